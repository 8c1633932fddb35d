package coordinator

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"

	"waypost/coordinator/api"
	"waypost/coordinator/events"
	"waypost/coordinator/exchange"
	"waypost/coordinator/explain"
	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/prefixindex"
	"waypost/coordinator/registry"
	"waypost/coordinator/replica"
	"waypost/coordinator/transfers"
	"waypost/coordinator/views"
	"waypost/gossip/identity"
	"waypost/gossip/lane"
	"waypost/gossip/mesh"
	"waypost/gossip/oneport"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/systemd/daemon"
)

// SocketName is the file of the local socket within the run directory.
const SocketName = "coordinator.sock"

// reservationTTL is how long a reservation holds without a sign of life.
const reservationTTL = 60 * time.Second

// Options wires a Coordinator.
type Options struct {
	// Config is the coordinator's configuration, validated.
	Config Config
	// Bootstrap makes a new cluster of this coordinator alone.
	Bootstrap bool
	// Version is Waypost's version.
	Version string
	// Process is this coordinator's mark; 0: the process's own. Several
	// coordinators in one process need one each.
	Process uint64
	// Logger takes what an operator cares about.
	Logger *slog.Logger
	// Registerer takes the metrics, Gatherer serves them; nil: private ones.
	Registerer prometheus.Registerer
	Gatherer   prometheus.Gatherer
	// Timing tunes Raft; the zero value is the default.
	Timing replica.Timing
	// ReservationTTL is how long a reservation holds without a sign of life;
	// 0: 60 s.
	ReservationTTL time.Duration
	// SettleAfter is how long evidence on a wrong prediction is waited for; 0:
	// 3 s.
	SettleAfter time.Duration
}

// Coordinator is the service. New wires and binds it, Start runs it, Stop
// ends it.
type Coordinator struct {
	opt     Options
	cfg     Config
	name    string
	process uint64
	log     *slog.Logger
	number  atomic.Uint32
	late    atomic.Int64 // ns that a tick was handled late, the worst of late

	prefixKey      prefix.ClusterKey
	keyers         keyers
	identity       *identity.Source
	fleet          *fleet.Fleet
	index          *prefixindex.Index
	slots          idleSlots
	records        *explain.Store
	journal        *explain.Journal // nil: the disk is unusable
	journalError   error
	cases          *cases
	memos          *memos
	acks           *agentAsks[*waypostv1.AckGpuReply]
	linkProbes     *agentAsks[*waypostv1.LinkProbeReply]
	probing        sync.Mutex // held while a link is measured
	judges         *judges
	transfers      *transfers.Book
	heardMu        sync.Mutex
	heard          map[string]heardSeries // by receiving worker
	tenantShares   tenantShares
	shares         tally
	replica        *replica.Replica
	mesh           *mesh.Mesh
	meshUp         bool
	lanes          *lanes
	views          *views.Views
	laneServer     *lane.Server
	placements     *placements
	operators      *operators
	peers          *peers
	exchange       *exchange.Exchange
	hearing        *hearing
	board          *board
	announced      atomic.Pointer[registry.State]
	drains         drains
	metrics        *metrics
	policy         atomic.Pointer[placement.Policy]
	fleetFile      atomic.Pointer[registry.Fleet]
	inFlight       chan struct{}
	reservationTTL time.Duration
	// shipC wakes what sends claims, marks and placements; began is the zero of
	// the clock in messages to peers.
	shipC      chan struct{}
	began      time.Time
	boundaries *boundaries

	clusterListener, apiListener net.Listener
	clusterPort, apiPort         *oneport.Port
	clusterGRPC, localGRPC       *grpc.Server
	api                          *api.Server

	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	// telling are the tasks that send in lots. They end after the last call was
	// answered, and send what waits then.
	tellCtx context.Context
	endTell context.CancelFunc
	telling sync.WaitGroup

	journalTask sync.WaitGroup
	journalDone chan struct{}
	stopJournal sync.Once
}

// New wires a coordinator and binds its listeners; it serves nothing yet.
func New(opt Options) (*Coordinator, error) {
	c := &Coordinator{
		opt: opt, cfg: opt.Config, reservationTTL: cmp.Or(opt.ReservationTTL, reservationTTL),
		shipC: make(chan struct{}, 1), began: time.Now(), journalDone: make(chan struct{}), boundaries: newBoundaries(),
	}
	if err := c.cfg.Validate(); err != nil {
		return nil, err
	}
	if c.opt.Logger == nil {
		c.opt.Logger = slog.New(slog.DiscardHandler)
	}
	if c.opt.Registerer == nil {
		reg := prometheus.NewRegistry()
		c.opt.Registerer, c.opt.Gatherer = reg, reg
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.tellCtx, c.endTell = context.WithCancel(context.Background())
	steps := []func() error{c.wireIdentity, c.wireView, c.bind, c.wireReplica, c.wireLanes, c.wireMesh, c.wireAPI}
	for _, step := range steps {
		if err := step(); err != nil {
			c.closeListeners()
			c.cancel()
			c.endTell()
			return nil, err
		}
	}
	return c, nil
}

func (c *Coordinator) closeListeners() {
	for _, l := range []net.Listener{c.clusterListener, c.apiListener} {
		if l != nil {
			// It served nothing yet.
			_ = l.Close()
		}
	}
}

// wireIdentity settles who this coordinator is and reads its keys.
func (c *Coordinator) wireIdentity() error {
	c.name = c.cfg.Name
	if c.name == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("coordinator: no name configured and none known to the system: %w", err)
		}
		c.name = "c-" + host
	}
	c.board = newBoard(c)
	c.log = slog.New(&events.Tap{Handler: c.opt.Logger.Handler(), Keep: c.board.keep}).With("coordinator", c.name)
	if c.process = c.opt.Process; c.process == 0 {
		var err error
		if c.process, err = daemon.ProcessMark(); err != nil {
			return err
		}
	}
	b, err := os.ReadFile(c.cfg.Prefix.KeyFile)
	if err != nil {
		return bad("prefix.key_file", "%w", err)
	}
	keys, err := prefix.ParseClusterKeys(b)
	if err != nil {
		return bad("prefix.key_file", "%s: %w", c.cfg.Prefix.KeyFile, err)
	}
	// During a rotation agents tell both, and a coordinator needs but one.
	c.prefixKey = keys[0]
	c.keyers.key = c.prefixKey
	if c.cfg.TLS.set() {
		c.identity, err = identity.Open(identity.Options{Files: identity.Files{CA: c.cfg.TLS.CAFile, Cert: c.cfg.TLS.CertFile, Key: c.cfg.TLS.KeyFile}, Logger: c.log})
		if err != nil {
			return bad("tls", "%w", err)
		}
		if c.identity.Name() != c.name {
			return bad("name", "%q, but the certificate in tls.cert_file is %q's", c.name, c.identity.Name())
		}
		return c.opt.Registerer.Register(c.identity)
	}
	return nil
}

// predicted hands the ledger's predicted keys to the index.
type predicted struct{ c *Coordinator }

func (p predicted) AddPredicted(w fleet.WorkerID, claim, after uint64, keys []prefix.Key, depths []uint32) {
	p.c.index.AddPredicted(prefixindex.WorkerID(w), claim, summary.IndexKey(after), keys, depths)
}

func (p predicted) RemovePredicted(w fleet.WorkerID, claim uint64) {
	p.c.index.RemovePredicted(prefixindex.WorkerID(w), claim)
}

func (p predicted) Drop(w fleet.WorkerID) {
	p.c.views.Drop(w)
}

// wireView makes the pure parts.
func (c *Coordinator) wireView() error {
	c.index = prefixindex.New(prefixindex.Options{})
	var err error
	c.fleet, err = fleet.New(fleet.Options{Epoch: time.Now(), Process: c.process, Predicted: predicted{c}, ReservationTTL: c.reservationTTL})
	if err != nil {
		return err
	}
	c.memos, c.acks = newMemos(c), &agentAsks[*waypostv1.AckGpuReply]{}
	c.linkProbes = &agentAsks[*waypostv1.LinkProbeReply]{}
	c.cases, c.judges = newCases(c, cmp.Or(c.opt.SettleAfter, settleAfter)), newJudges(c)
	if c.cfg.Explain.Disk > 0 {
		// A disk that cannot be used must not keep placements from being
		// answered: records are kept in memory then, and status says so.
		c.journal, c.journalError = explain.OpenJournal(explain.JournalOptions{
			Dir: filepath.Join(c.cfg.StateDir, "explain"), MaxBytes: int64(c.cfg.Explain.Disk), MaxAge: c.cfg.Explain.Keep.D(),
			ReadBytes: int64(c.cfg.Explain.Memory), Logger: c.log,
		})
		if c.journalError != nil {
			c.log.Error("decision records are kept in memory only", "error", c.journalError)
		}
	}
	c.records, err = explain.New(explain.Options{MaxBytes: int64(c.cfg.Explain.Memory), MaxAge: c.cfg.Explain.Keep.D(), Journal: c.journal})
	if err != nil {
		return err
	}
	policy := placement.DefaultPolicy()
	c.policy.Store(&policy)
	c.fleetFile.Store(registry.EmptyFleet())
	c.transfers, c.heard = transfers.New(time.Now()), map[string]heardSeries{}
	c.inFlight = make(chan struct{}, c.cfg.Limits.PlacesInFlight)
	c.lanes, c.peers = newLanes(c), newPeers(c)
	c.views, err = views.New(views.Options{
		Fleet: c.fleet, Index: c.index, PrefixKey: c.prefixKey, Peers: c.peers, Lost: c.cases.lost, Logger: c.log, Registerer: c.opt.Registerer,
		Refused: func(kind string) { c.metrics.badFrames.WithLabelValues(kind).Inc() },
	})
	if err != nil {
		return err
	}
	c.placements, c.operators = &placements{c: c}, &operators{c: c}
	c.hearing, c.metrics = newHearing(), newMetrics(c.opt.Registerer, c)
	c.exchange, err = exchange.New(exchange.Options{
		Name: c.name, Process: c.process, Began: c.began, Dial: c.peer, HostsHeard: func() int { return c.lanes.heardHosts(time.Now()) }, Met: c.copyMemo,
		Places: c.metrics.places, MemoEntries: c.metrics.memoEntries, Logger: c.log,
	})
	return err
}

// bind opens the two ports.
func (c *Coordinator) bind() error {
	var err error
	if c.clusterListener, err = net.Listen("tcp", string(c.cfg.Cluster.Listen)); err != nil {
		return bad("cluster.listen", "%w", err)
	}
	if c.apiListener, err = net.Listen("tcp", string(c.cfg.API.Listen)); err != nil {
		return bad("api.listen", "%w", err)
	}
	cluster := oneport.Options{
		Listener: c.clusterListener, Protocols: []oneport.Protocol{oneport.GRPC, oneport.Raft}, Logger: c.log, Registerer: c.opt.Registerer, Name: "cluster",
	}
	if c.identity != nil {
		cluster.TLS = c.identity.Server(identity.ServerOptions{Accept: []identity.Role{identity.RoleCoordinator, identity.RoleAgent}})
	}
	if c.clusterPort, err = oneport.New(cluster); err != nil {
		return err
	}
	apiOpt := oneport.Options{Listener: c.apiListener, Protocols: []oneport.Protocol{oneport.GRPC, oneport.HTTP}, Logger: c.log, Registerer: c.opt.Registerer, Name: "api"}
	if c.apiTLS() {
		apiOpt.TLS = c.identity.Server(identity.ServerOptions{Accept: []identity.Role{
			identity.RoleAdmin, identity.RoleOperator, identity.RolePlacer, identity.RoleViewer, identity.RoleCoordinator,
		}})
	}
	c.apiPort, err = oneport.New(apiOpt)
	return err
}

func (c *Coordinator) apiTLS() bool { return c.identity != nil && c.cfg.API.TLS == "auto" }

// ClusterAddress is where Raft and lanes are reached.
func (c *Coordinator) ClusterAddress() string {
	return advertised(c.cfg.Cluster.Advertise, c.cfg.Mesh.Advertise, c.clusterListener.Addr())
}

// APIAddress is where the API is reached.
func (c *Coordinator) APIAddress() string {
	return advertised("", c.cfg.Mesh.Advertise, c.apiListener.Addr())
}

// MeshAddress is the gossip address.
func (c *Coordinator) MeshAddress() string {
	address, _ := c.mesh.Address()
	return address
}

// Name is the coordinator's name.
func (c *Coordinator) Name() string { return c.name }

// advertised is the host:port that others use for a bound address.
func advertised(configured, meshAdvertise string, bound net.Addr) string {
	tcp, ok := bound.(*net.TCPAddr)
	if !ok {
		return bound.String()
	}
	port := strconv.Itoa(tcp.Port)
	if configured != "" {
		if _, _, err := net.SplitHostPort(configured); err == nil {
			return configured
		}
		return net.JoinHostPort(configured, port)
	}
	if !tcp.IP.IsUnspecified() {
		return tcp.String()
	}
	if a, err := mesh.ChooseAddress(meshAdvertise, ""); err == nil {
		return net.JoinHostPort(a.Addr.String(), port)
	}
	return tcp.String()
}

// wireReplica opens the registry.
func (c *Coordinator) wireReplica() error {
	dial := func(ctx context.Context, address string) (net.Conn, error) {
		d := net.Dialer{}
		if c.identity == nil {
			conn, err := d.DialContext(ctx, "tcp", address)
			if err != nil {
				return nil, err
			}
			if _, err := conn.Write([]byte(oneport.RaftPreface)); err != nil {
				return nil, errors.Join(err, conn.Close())
			}
			return conn, nil
		}
		cfg := c.identity.Client(identity.ClientOptions{Accept: []identity.Role{identity.RoleCoordinator}, Protocols: []string{string(oneport.Raft)}})
		td := tls.Dialer{NetDialer: &d, Config: cfg}
		return td.DialContext(ctx, "tcp", address)
	}
	var err error
	c.replica, err = replica.New(replica.Options{
		Dir: filepath.Join(c.cfg.StateDir, "raft"), Name: c.name, ClusterAddress: c.ClusterAddress(), APIAddress: c.APIAddress(), Voter: c.cfg.Cluster.Voter,
		Bootstrap: c.opt.Bootstrap, FleetName: c.cfg.Mesh.Fleet, Listener: c.raftListener(), Dial: dial, Forward: c.forward,
		Logger: c.log, Registerer: c.opt.Registerer, Timing: c.opt.Timing,
	})
	if errors.Is(err, replica.ErrStateExists) {
		return bad("--bootstrap", "%w", err)
	}
	return err
}

// raftListener lets only coordinators speak Raft.
func (c *Coordinator) raftListener() net.Listener {
	l := c.clusterPort.Listener(oneport.Raft)
	if c.identity == nil {
		return l
	}
	return &roleListener{Listener: l, log: c.log}
}

// roleListener passes on connections of coordinators only.
type roleListener struct {
	net.Listener
	log *slog.Logger
}

// Accept implements net.Listener.
func (l *roleListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		t, ok := conn.(interface{ ConnectionState() tls.ConnectionState })
		if ok {
			if role, _, err := identity.PeerOf(t.ConnectionState()); err == nil && role == identity.RoleCoordinator {
				return conn, nil
			}
		}
		l.log.Warn("raft connection refused: not a coordinator", "remote", conn.RemoteAddr())
		// It is refused; nothing more is to be said on it.
		_ = conn.Close()
	}
}

// wireLanes prepares the agents' lanes and the service for peers.
func (c *Coordinator) wireLanes() error {
	var err error
	c.laneServer, err = lane.NewServer(lane.ServerOptions{
		Hello: func() *waypostv1.CoordinatorHello {
			return &waypostv1.CoordinatorHello{
				Name: &c.name, CoordinatorProcess: &c.process, Version: &c.opt.Version, PrefixKeyIds: []string{c.prefixKey.ID()}, PrefixFormats: prefixFormats,
			}
		},
		Handler: c.lanes, InsecureLoopback: c.identity == nil, Logger: c.log, Registerer: c.opt.Registerer,
	})
	if err != nil {
		return err
	}
	opts := append(c.laneServer.GRPCOptions(), grpc.Creds(oneport.Credentials()), grpc.ChainUnaryInterceptor(api.Recovering(c.log), c.onlyPeers))
	c.clusterGRPC = grpc.NewServer(opts...)
	c.laneServer.Register(c.clusterGRPC)
	waypostv1.RegisterPeerServiceServer(c.clusterGRPC, c.peers)
	return nil
}

// wireMesh prepares the gossip membership.
func (c *Coordinator) wireMesh() error {
	var err error
	join := make([]string, 0, len(c.cfg.Mesh.Join))
	for _, a := range c.cfg.Mesh.Join {
		join = append(join, string(a))
	}
	c.mesh, err = mesh.New(mesh.Options{
		Name: c.name, Fleet: c.cfg.Mesh.Fleet, Role: mesh.RoleCoordinator, Version: c.opt.Version, Process: c.process,
		ClusterAddress: c.ClusterAddress(), APIAddress: c.APIAddress(), Listen: string(c.cfg.Mesh.Listen), Advertise: c.cfg.Mesh.Advertise,
		KeyFile: c.cfg.Mesh.KeyFile, PeersFile: filepath.Join(c.cfg.StateDir, "peers"), Join: join, Local: c.cfg.Mesh.Listen.Loopback(),
		Logger: c.log, Registerer: c.opt.Registerer,
	})
	return err
}

// wireAPI prepares the API and the local socket.
func (c *Coordinator) wireAPI() error {
	opt := api.DefaultOptions()
	opt.Placement, opt.Operator, opt.BodyLimitBytes, opt.Logger = c.placements, c.operators, int64(c.cfg.API.BodyLimit), c.log
	opt.Metrics = promhttp.HandlerFor(c.opt.Gatherer, promhttp.HandlerOpts{})
	opt.Ready = c.ready
	opt.Clear = api.Caller{Name: "local", Role: api.RoleAdmin}
	opt.Credentials = nil
	if c.apiTLS() {
		opt.Credentials, opt.CallerOfTLS = oneport.Credentials(), callerOfTLS
	}
	var err error
	if c.api, err = api.New(opt); err != nil {
		return err
	}
	c.localGRPC = grpc.NewServer(grpc.MaxRecvMsgSize(int(c.cfg.API.BodyLimit)), grpc.ChainUnaryInterceptor(api.Recovering(c.log), api.LocalCaller("local", api.RoleAdmin)))
	waypostv1.RegisterPlacementServiceServer(c.localGRPC, c.placements)
	waypostv1.RegisterOperatorServiceServer(c.localGRPC, c.operators)
	return nil
}

// callerOfTLS reads name and role from a certificate.
func callerOfTLS(state tls.ConnectionState) (api.Caller, error) {
	certified, name, err := identity.PeerOf(state)
	if err != nil {
		return api.Caller{}, err
	}
	if certified == identity.RoleCoordinator {
		return api.Caller{Name: name, Role: api.RoleAdmin}, nil
	}
	role, err := api.ParseRole(string(certified))
	return api.Caller{Name: name, Role: role}, err
}

// journalProblem says why decision records are not written to disk; empty: they
// are, or need not be.
func (c *Coordinator) journalProblem() string {
	switch {
	case c.journalError != nil:
		return c.journalError.Error()
	case c.journal != nil:
		return c.journal.State().Problem
	}
	return ""
}

// ready lists what must hold before this coordinator should be asked.
func (c *Coordinator) ready() []api.Check {
	checks := []api.Check{{Name: "registry"}, {Name: "fleet-file"}}
	if c.replica.State().ClusterID() == "" || !c.Joined() {
		checks[0].Problem = "not part of a cluster yet: start the first coordinator with --bootstrap, others with [cluster] join"
	}
	if err := c.replica.State().FleetProblem(); err != nil {
		checks[1].Problem = err.Error()
	}
	return append(checks, c.laneCheck(time.Now()))
}

// policyAgeMs is the time since the last contact with a leader; NaN: never.
func (c *Coordinator) policyAgeMs() float64 {
	d, ok := c.replica.LastContact()
	if !ok {
		return math.NaN()
	}
	return ms(d)
}

func (c *Coordinator) leaderName() string {
	l, ok := c.replica.Leader()
	if !ok {
		return ""
	}
	if l.Name == "" {
		return l.ClusterAddress
	}
	return l.Name
}

// modelOf is the served model of a pool.
func (c *Coordinator) modelOf(pool string) string {
	if p, ok := c.fleetFile.Load().Pool(pool); ok {
		return p.Model
	}
	return pool
}

// Joined says whether this coordinator has its number and can reserve.
func (c *Coordinator) Joined() bool { return c.number.Load() != 0 }

// takeNumber learns this coordinator's number in placement ids.
func (c *Coordinator) takeNumber(state *registry.State) {
	if m, ok := state.Coordinator(c.replica.ID()); ok {
		c.number.Store(m.Number)
	}
}

// CloseLane ends the lane of a host, which dials again, and says whether there
// was one. For tests.
func (c *Coordinator) CloseLane(host string) bool {
	s, ok := c.laneServer.Session(host)
	if ok {
		s.Close(errors.New("closed by a test"))
	}
	return ok
}
