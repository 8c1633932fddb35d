package coordinator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/exchange"
	"waypost/coordinator/registry"
	"waypost/coordinator/replica"
	"waypost/gossip/identity"
	waypostv1 "waypost/proto/waypost/v1"
)

// peers serves coordinators for coordinators and keeps connections to them.
type peers struct {
	waypostv1.UnimplementedPeerServiceServer
	c *Coordinator

	// copies are the copies of prefix streams being sent.
	copies chan struct{}
	// inbound counts the streams on which peers tell their placements.
	inbound atomic.Int32

	mu    sync.Mutex
	conns map[string]*grpc.ClientConn
	// mute are the coordinators that failed to copy a stream, by address, and
	// until when they are not asked again.
	mute map[string]time.Time
}

func newPeers(c *Coordinator) *peers {
	return &peers{c: c, conns: map[string]*grpc.ClientConn{}, copies: make(chan struct{}, copiesAtOnce), mute: map[string]time.Time{}}
}

// maxPeers bounds the connections to other coordinators.
const maxPeers = exchange.MaxPeers

// peer returns a connection to the coordinator at a cluster address.
func (c *Coordinator) peer(address string) (*grpc.ClientConn, error) {
	p := c.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	if conn, ok := p.conns[address]; ok {
		return conn, nil
	}
	if len(p.conns) >= maxPeers {
		p.closeGone(c.joinAddresses())
	}
	if len(p.conns) >= maxPeers {
		return nil, fmt.Errorf("more than %d coordinators", maxPeers)
	}
	creds := insecure.NewCredentials()
	if c.identity != nil {
		creds = credentials.NewTLS(c.identity.Client(identity.ClientOptions{Accept: []identity.Role{identity.RoleCoordinator}, Protocols: []string{"h2"}}))
	}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(creds), grpc.WithDisableServiceConfig(),
		// A peer that comes back is found at once, one that vanished is noticed.
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: exchange.Pause, Multiplier: 1.6, Jitter: .2, MaxDelay: exchange.PauseMost}, MinConnectTimeout: exchange.Greeting}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 2 * time.Second}))
	if err != nil {
		return nil, err
	}
	p.conns[address] = conn
	return conn, nil
}

// closeGone closes connections to addresses where no coordinator is expected any
// more: coordinators that are replaced come with new ones. The lock is held.
func (p *peers) closeGone(expected []string) {
	for address, conn := range p.conns {
		if !slices.Contains(expected, address) {
			_ = conn.Close() // what is under way to nobody fails
			delete(p.conns, address)
			delete(p.mute, address)
		}
	}
}

func (p *peers) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range p.conns {
		// Nothing is in flight any more.
		_ = conn.Close()
	}
	p.conns = map[string]*grpc.ClientConn{}
}

// peerByName returns a connection to a coordinator of the catalogue.
func (c *Coordinator) peerByName(name string) (*grpc.ClientConn, error) {
	for _, m := range c.replica.State().Coordinators() {
		if m.Name == name {
			return c.peer(m.ClusterAddress)
		}
	}
	return nil, fmt.Errorf("no coordinator %q; see: waypost coordinators", name)
}

// peerByNumber returns a connection to the coordinator that a placement id names.
func (c *Coordinator) peerByNumber(number uint32) (conn *grpc.ClientConn, name string, err error) {
	for _, m := range c.replica.State().Coordinators() {
		if m.Number == number {
			conn, err = c.peer(m.ClusterAddress)
			return conn, m.Name, err
		}
	}
	return nil, "", fmt.Errorf("no coordinator has number %d", number)
}

// onlyPeers admits the coordinator role to the peer service, and any
// certificate of the fleet to the lane service, which checks for itself.
func (c *Coordinator) onlyPeers(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := c.checkPeer(ctx); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

func (c *Coordinator) checkPeer(ctx context.Context) error {
	if c.identity == nil {
		return nil
	}
	role, name, err := peerOf(ctx)
	if err != nil {
		return err
	}
	if role != identity.RoleCoordinator {
		return status.Errorf(codes.PermissionDenied, "%s has role %q; this needs coordinator", name, role)
	}
	return nil
}

// checkPeerName binds what a coordinator calls itself to its certificate.
func (c *Coordinator) checkPeerName(ctx context.Context, claimed string) error {
	if c.identity == nil {
		return nil
	}
	_, name, err := peerOf(ctx)
	if err != nil {
		return err
	}
	if name != claimed {
		return status.Errorf(codes.PermissionDenied, "a coordinator with the certificate of %q cannot join as %q", name, claimed)
	}
	return nil
}

func peerOf(ctx context.Context) (identity.Role, string, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "", "", status.Error(codes.Unauthenticated, "no certificate")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return "", "", status.Error(codes.Unauthenticated, "no certificate")
	}
	role, name, err := identity.PeerOf(info.State)
	if err != nil {
		return "", "", status.Error(codes.Unauthenticated, err.Error())
	}
	return role, name, nil
}

// ForwardWrite implements the peer service.
func (p *peers) ForwardWrite(ctx context.Context, req *waypostv1.ForwardWriteRequest) (*waypostv1.ForwardWriteResponse, error) {
	applied, err := p.c.replica.ProposeHere(ctx, req.GetCommand())
	var other *replica.NotLeaderError
	switch {
	case err == nil:
	case errors.Is(err, replica.ErrUnknownOutcome):
		// First, because such an error may match the others as well.
		return nil, status.Error(codes.Unavailable, err.Error())
	case errors.As(err, &other):
		return &waypostv1.ForwardWriteResponse{LeaderAddress: &other.LeaderAddress}, nil
	case errors.Is(err, replica.ErrNoLeader):
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	case errors.Is(err, registry.ErrInvalid), errors.Is(err, registry.ErrUnknownCommand):
		return nil, status.Error(codes.InvalidArgument, err.Error())
	default:
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	b, err := applied.Result.Encode()
	if err != nil {
		return nil, err
	}
	return &waypostv1.ForwardWriteResponse{Index: &applied.Index, Result: b}, nil
}

// forward hands a command to the leader.
func (c *Coordinator) forward(ctx context.Context, leaderAddress string, cmd []byte) (replica.Applied, error) {
	conn, err := c.peer(leaderAddress)
	if err != nil {
		return replica.Applied{}, err
	}
	resp, err := waypostv1.NewPeerServiceClient(conn).ForwardWrite(ctx, &waypostv1.ForwardWriteRequest{Command: cmd})
	switch {
	case status.Code(err) == codes.FailedPrecondition:
		return replica.Applied{}, replica.ErrNoLeader
	case status.Code(err) == codes.InvalidArgument:
		return replica.Applied{}, fmt.Errorf("%w: %s", registry.ErrInvalid, status.Convert(err).Message())
	case status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), "connection error"):
		// gRPC says so when it never had a connection to send on.
		return replica.Applied{}, fmt.Errorf("%w: %w", replica.ErrNotSent, err)
	case err != nil:
		return replica.Applied{}, err
	case resp.GetLeaderAddress() != "":
		return replica.Applied{}, &replica.NotLeaderError{LeaderAddress: resp.GetLeaderAddress()}
	}
	result, err := registry.DecodeResult(resp.GetResult())
	return replica.Applied{Index: resp.GetIndex(), Result: result}, err
}

// JoinCluster implements the peer service.
func (p *peers) JoinCluster(ctx context.Context, req *waypostv1.JoinClusterRequest) (*waypostv1.JoinClusterResponse, error) {
	if err := p.c.checkPeerName(ctx, req.GetName()); err != nil {
		return nil, err
	}
	number, err := p.c.replica.JoinCluster(ctx, replica.JoinRequest{
		ID: req.GetId(), Name: req.GetName(), ClusterAddress: req.GetClusterAddress(), APIAddress: req.GetApiAddress(), Voter: req.GetVoter(), ClusterID: req.GetClusterId(),
	})
	var other *replica.NotLeaderError
	switch {
	case errors.As(err, &other):
		return &waypostv1.JoinClusterResponse{LeaderAddress: &other.LeaderAddress}, nil
	case errors.Is(err, replica.ErrNoLeader), errors.Is(err, replica.ErrUnknownOutcome), errors.Is(err, replica.ErrBusy):
		return nil, status.Error(codes.Unavailable, err.Error())
	case err != nil:
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &waypostv1.JoinClusterResponse{Number: &number}, nil
}

// join asks the coordinators of a cluster to be added, until it was or ctx ends.
func (c *Coordinator) join(ctx context.Context) {
	const pause = time.Second
	ask := func(address string) (leader string, err error) {
		conn, err := c.peer(address)
		if err != nil {
			return "", err
		}
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		j := c.replica.JoinRequest()
		resp, err := waypostv1.NewPeerServiceClient(conn).JoinCluster(ctx, &waypostv1.JoinClusterRequest{
			Id: &j.ID, Name: &j.Name, ClusterAddress: &j.ClusterAddress, ApiAddress: &j.APIAddress, Voter: &j.Voter, ClusterId: &j.ClusterID,
		})
		return resp.GetLeaderAddress(), err
	}
	for ctx.Err() == nil {
		if c.replica.NeedsJoin() != "" {
			for _, address := range c.joinAddresses() {
				leader, err := ask(address)
				if err == nil && leader != "" {
					_, err = ask(leader)
				}
				if err == nil {
					break
				}
				c.log.Info("not joined yet", "asked", address, "error", err)
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// joinAddresses are the cluster addresses of other coordinators: configured
// ones and those the catalogue knows.
func (c *Coordinator) joinAddresses() []string {
	var out []string
	for _, a := range c.cfg.Cluster.Join {
		out = append(out, string(a))
	}
	for _, m := range c.replica.State().Coordinators() {
		if m.Name != c.name {
			out = append(out, m.ClusterAddress)
		}
	}
	return out
}

// PeerMembers implements the peer service.
func (p *peers) PeerMembers(context.Context, *waypostv1.PeerMembersRequest) (*waypostv1.PeerMembersResponse, error) {
	return &waypostv1.PeerMembersResponse{Members: p.c.members()}, nil
}

// WaitApplied implements the peer service.
func (p *peers) WaitApplied(ctx context.Context, req *waypostv1.WaitAppliedRequest) (*waypostv1.WaitAppliedResponse, error) {
	const longest = 10 * time.Second
	wait := min(time.Duration(req.GetTimeoutMs()*float64(time.Millisecond)), longest)
	ctx, cancel := context.WithTimeout(ctx, max(wait, 0))
	defer cancel()
	// A wait that runs out answers how far the log is here.
	_ = p.c.replica.WaitApplied(ctx, req.GetIndex())
	return &waypostv1.WaitAppliedResponse{AppliedIndex: proto.Uint64(p.c.replica.AppliedIndex()), Name: &p.c.name}, nil
}

// FetchPlacement implements the peer service.
func (p *peers) FetchPlacement(_ context.Context, req *waypostv1.FetchPlacementRequest) (*waypostv1.FetchPlacementResponse, error) {
	rec := p.c.recordOf(req.GetPlacementId())
	if rec == nil {
		return &waypostv1.FetchPlacementResponse{}, nil
	}
	b, err := proto.Marshal(rec)
	if err != nil {
		return nil, err
	}
	return &waypostv1.FetchPlacementResponse{Record: b}, nil
}
