package lane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"waypost/gossip/identity"
	waypostv1 "waypost/proto/waypost/v1"
)

const (
	defaultMaxHosts   = 4096
	defaultMaxPending = 256
	defaultLiveProof  = time.Second
	conflictKept      = time.Minute
	maxConflicts      = 256
	maxWorkersPerHost = 1024
	maxOpenSessions   = 1024 // of one agent process, told in a hello
	// serverKeepalive: a silent agent is asked after 2 s and closed 2 s later.
	serverKeepalive = 2 * time.Second
	// endWait bounds how long a new lane waits for the handler to let go of the
	// one that it replaces.
	endWait = 5 * time.Second
)

// CoordinatorHandler takes what agents send. Calls for one host come one after
// the other, also across lanes: LaneDown of a lane returns before LaneUp of the
// next. They must not block for long: a lane reads nothing meanwhile.
type CoordinatorHandler interface {
	// LaneUp is called with the agent's hello before anything else of the lane.
	// An error refuses the lane and is told to the agent.
	LaneUp(*Session) error
	// Frame is called for each frame after the first hello, later hellos
	// included. The lateness has been added to the ages in it.
	Frame(s *Session, f *waypostv1.ConnectRequest, late time.Duration)
	// LaneDown is called once for each LaneUp that returned nil, after the last Frame.
	LaneDown(s *Session, cause error)
}

// ServerOptions of a [Server]. Hello and Handler are required.
type ServerOptions struct {
	// Hello returns a new hello; the lane sets the protocol.
	Hello   func() *waypostv1.CoordinatorHello
	Handler CoordinatorHandler
	// InsecureLoopback accepts agents in clear from loopback addresses and takes
	// their identity from the hello. For development only.
	InsecureLoopback bool

	StallAfter   time.Duration // a lane that cannot write for so long is closed; zero means 2 s
	HelloTimeout time.Duration // for the agent's hello; zero means 5 s
	// LiveProof is how long the lane of another agent process has to show a frame
	// before a newcomer under the same host name takes its place. Zero means 1 s.
	LiveProof time.Duration
	MaxHosts  int // bound of sessions; zero means 4096

	Logger     *slog.Logger          // nil discards
	Registerer prometheus.Registerer // nil keeps the metrics private
}

// Server keeps the lanes of a coordinator.
type Server struct {
	waypostv1.UnimplementedLaneServiceServer

	opts    ServerOptions
	log     *slog.Logger
	metrics *serverMetrics
	began   time.Time // zero of the monotonic clock in frames
	wg      sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	pending   int
	open      map[*Session]struct{} // with or without hello
	hosts     map[string]*Session
	conflicts map[string]Conflict
}

// NewServer checks the options; it starts nothing.
func NewServer(opts ServerOptions) (*Server, error) {
	if opts.Hello == nil || opts.Handler == nil {
		return nil, errors.New("lane server: Hello and Handler are required")
	}
	for _, d := range []struct {
		name  string
		value *time.Duration
		unset time.Duration
	}{
		{"StallAfter", &opts.StallAfter, defaultStallAfter},
		{"HelloTimeout", &opts.HelloTimeout, defaultHelloTimeout},
		{"LiveProof", &opts.LiveProof, defaultLiveProof},
	} {
		if *d.value == 0 {
			*d.value = d.unset
		}
		if *d.value < 0 {
			return nil, fmt.Errorf("lane server: %s is negative: %v", d.name, *d.value)
		}
	}
	if opts.MaxHosts == 0 {
		opts.MaxHosts = defaultMaxHosts
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	m, err := newServerMetrics(opts.Registerer)
	if err != nil {
		return nil, fmt.Errorf("lane server: %w", err)
	}
	return &Server{
		opts: opts, log: opts.Logger, metrics: m, began: time.Now(),
		open: map[*Session]struct{}{}, hosts: map[string]*Session{}, conflicts: map[string]Conflict{},
	}, nil
}

// GRPCOptions returns the options that a gRPC server carrying lanes needs:
// message bound, fixed windows, keepalive and byte counters. Credentials are the caller's.
func (s *Server) GRPCOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(MaxMessageBytes),
		grpc.MaxSendMsgSize(MaxMessageBytes),
		grpc.StaticStreamWindowSize(streamWindow),
		grpc.StaticConnWindowSize(connWindow),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: serverKeepalive, Timeout: s.opts.StallAfter}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: keepaliveTime / 2}),
		grpc.ConnectionTimeout(s.opts.HelloTimeout),
		grpc.StatsHandler(byteCounter{s.metrics.bytes}),
	}
}

// Register adds the lane service to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) { waypostv1.RegisterLaneServiceServer(r, s) }

// Session returns the lane of a host.
func (s *Server) Session(host string) (*Session, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ses, ok := s.hosts[host]
	return ses, ok
}

// Sessions returns the lanes that are up, by host.
func (s *Server) Sessions() []*Session {
	s.mu.Lock()
	all := make([]*Session, 0, len(s.hosts))
	for _, ses := range s.hosts {
		all = append(all, ses)
	}
	s.mu.Unlock()
	slices.SortFunc(all, func(a, b *Session) int {
		if a.host < b.host {
			return -1
		}
		return 1
	})
	return all
}

// Conflict is two live agents under one host identity.
type Conflict struct {
	Host                string
	Address, Other      string // remote addresses of the one that serves and of the one refused
	Process, OtherAgent uint64 // their process marks
	Last                time.Time
}

// Conflicts returns the conflicts seen within the last minute, by host.
func (s *Server) Conflicts() []Conflict {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sweepConflicts()
	all := make([]Conflict, 0, len(s.conflicts))
	for _, c := range s.conflicts {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b Conflict) int {
		if a.Host < b.Host {
			return -1
		}
		return 1
	})
	return all
}

func (s *Server) sweepConflicts() {
	for host, c := range s.conflicts {
		if time.Since(c.Last) > conflictKept {
			delete(s.conflicts, host)
		}
	}
}

// Close ends all lanes, drops what is queued on them, refuses new ones and waits.
// Call it before stopping the gRPC server, whose graceful stop would wait for lanes.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	for ses := range s.open {
		ses.end(errStops)
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// Finish is Close once the lanes have written what is queued on them, or ctx has
// ended; a Send that has begun by then has until StallAfter. What was written may
// still wait for the network: only a graceful stop of the gRPC server lets it go.
func (s *Server) Finish(ctx context.Context) {
	s.mu.Lock()
	s.closed = true
	up := make(map[*Session]bool, len(s.hosts))
	for _, ses := range s.hosts {
		up[ses] = true
		ses.out.finish()
	}
	for ses := range s.open {
		if !up[ses] {
			ses.end(errStops) // nothing is queued on what is no host's lane yet
		}
	}
	s.mu.Unlock()
	written := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(written)
	}()
	select {
	case <-written:
	case <-ctx.Done():
	}
	s.Close()
}

var (
	errStops    = errors.New("coordinator stops")
	errReplaced = errors.New("replaced by session")
)

// Connect implements the lane service.
func (s *Server) Connect(stream waypostv1.LaneService_ConnectServer) error {
	ses, err := s.admit(stream)
	if err != nil {
		return err
	}
	defer s.wg.Done()
	return ses.run()
}

// admit checks who calls and makes room for one more stream without hello.
func (s *Server) admit(stream waypostv1.LaneService_ConnectServer) (*Session, error) {
	certName, remote, err := s.authenticate(stream.Context())
	if err != nil {
		s.metrics.refused.WithLabelValues("identity").Inc()
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, status.Error(codes.Unavailable, errStops.Error())
	}
	if s.pending >= defaultMaxPending {
		s.metrics.refused.WithLabelValues("crowded").Inc()
		return nil, status.Error(codes.ResourceExhausted, "too many lanes without hello")
	}
	s.pending++
	ses := newSession(s, stream, certName, remote)
	s.open[ses] = struct{}{}
	s.wg.Add(2) // its run and its read
	go ses.read()
	return ses, nil
}

// authenticate returns the name that the agent's certificate proves; empty means
// that the connection is in clear on loopback and the hello is believed.
func (s *Server) authenticate(ctx context.Context) (certName, remote string, err error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "", "", status.Error(codes.Internal, "no peer")
	}
	remote = p.Addr.String()
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		if s.opts.InsecureLoopback && isLoopback(remote) {
			return "", remote, nil
		}
		return "", "", status.Error(codes.Unauthenticated, "a lane needs a certificate of role agent")
	}
	role, name, err := identity.PeerOf(info.State)
	if err != nil {
		return "", "", status.Error(codes.Unauthenticated, err.Error())
	}
	if role != identity.RoleAgent {
		return "", "", status.Errorf(codes.PermissionDenied, "certificate names %s/%s, a lane needs the role agent", role, name)
	}
	return name, remote, nil
}

// refusal is why a lane is refused, with its counter's label. One that lasts
// makes the agent wait long before it asks again; one in favour of another lane
// of the same process makes it wait for the end of that lane.
type refusal struct {
	label   string
	code    codes.Code
	text    string
	lasting bool
	favours uint64 // session of the other lane; 0: none
}

func (r *refusal) Error() string { return r.text }

func refuse(label string, code codes.Code, format string, args ...any) *refusal {
	return &refusal{label: label, code: code, text: fmt.Sprintf(format, args...), lasting: true}
}

func refuseNow(label string, code codes.Code, format string, args ...any) *refusal {
	return &refusal{label: label, code: code, text: fmt.Sprintf(format, args...)}
}

// refuseFor refuses a lane in favour of an older or newer one of its process.
func refuseFor(up *Session, format string, args ...any) *refusal {
	return &refusal{label: "other_session", code: codes.Aborted, text: fmt.Sprintf(format, args...), favours: up.session}
}

// checkHello returns why a hello cannot be accepted.
func checkHello(h *waypostv1.AgentHello, certName string) *refusal {
	host := h.GetHost()
	if err := identity.CheckName(host); err != nil {
		return refuse("hello", codes.InvalidArgument, "hello: host: %v", err)
	}
	if certName != "" && certName != host {
		return refuse("identity", codes.PermissionDenied, "certificate names agent/%s, hello says host %q", certName, host)
	}
	if h.GetAgentProcess() == 0 || h.GetSession() == 0 {
		return refuse("hello", codes.InvalidArgument, "hello: agent_process and session must not be 0")
	}
	if h.GetProtocol() < ProtocolMin || h.GetProtocolMin() > Protocol {
		return refuse("protocol", codes.FailedPrecondition, "lane protocol %d (oldest %d) is not understood here (%d, oldest %d): upgrade the older side",
			h.GetProtocol(), h.GetProtocolMin(), Protocol, ProtocolMin)
	}
	if n := len(h.GetWorkers()); n > maxWorkersPerHost {
		return refuse("hello", codes.InvalidArgument, "hello: %d workers, at most %d", n, maxWorkersPerHost)
	}
	if n := len(h.GetOpenSessions()); n > maxOpenSessions {
		return refuse("hello", codes.InvalidArgument, "hello: %d open sessions, at most %d", n, maxOpenSessions)
	}
	seen := map[uint32]bool{}
	for _, w := range h.GetWorkers() {
		if seen[w.GetIndex()] {
			return refuse("hello", codes.InvalidArgument, "hello: two workers have index %d", w.GetIndex())
		}
		seen[w.GetIndex()] = true
	}
	return nil
}

// claim makes ses the lane of its host, once an older one has let go of it.
func (s *Server) claim(ses *Session) *refusal {
	for {
		s.mu.Lock()
		old := s.hosts[ses.host]
		if old == nil {
			defer s.mu.Unlock()
			if s.closed {
				return refuseNow("stops", codes.Unavailable, "%v", errStops)
			}
			if len(s.hosts) >= s.opts.MaxHosts {
				return refuseNow("crowded", codes.ResourceExhausted, "%d hosts have lanes here already", len(s.hosts))
			}
			s.hosts[ses.host] = ses
			s.metrics.connected.Set(float64(len(s.hosts)))
			return nil
		}
		s.mu.Unlock()
		if r := s.displace(old, ses); r != nil {
			return r
		}
	}
}

// displace ends an older lane of the same host, or says why it stays.
func (s *Server) displace(old, ses *Session) *refusal {
	if old.process == ses.process {
		// The first lane of a process stays for as long as the process holds it
		// open, in whatever order the hellos of its addresses arrive. One that is
		// not held open any more only looks open from here.
		switch {
		case ses.session <= old.session:
			return refuseFor(old, "session %d is not newer than session %d, which is up", ses.session, old.session)
		case slices.Contains(ses.hello.Load().GetOpenSessions(), old.session) && !old.isEnding():
			return refuseFor(old, "session %d of the same agent is up and stays", old.session)
		}
		old.end(fmt.Errorf("%w %d", errReplaced, ses.session))
	} else {
		// Only a frame that arrives from now on proves that the other agent lives:
		// a connection may look open long after its host has lost power.
		select {
		case <-old.nextFrame():
			s.noteConflict(old, ses)
			return refuse("conflict", codes.AlreadyExists, "conflict: host %q is served by another live agent at %s (process %016x): two hosts with one name?",
				ses.host, old.remote, old.process)
		case <-old.done:
		case <-ses.ending:
			return refuseNow("gone", codes.Canceled, "%v", ses.cause)
		case <-time.After(s.opts.LiveProof):
			old.end(fmt.Errorf("silent for %v while process %016x of the same host connected", s.opts.LiveProof, ses.process))
		}
	}
	s.metrics.replaced.Inc()
	select {
	case <-old.done:
		return nil
	case <-time.After(endWait):
		return refuseNow("busy", codes.Unavailable, "the former lane of host %q has not ended yet", ses.host)
	}
}

func (s *Server) noteConflict(old, ses *Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sweepConflicts()
	if _, known := s.conflicts[ses.host]; !known {
		if len(s.conflicts) >= maxConflicts {
			return
		}
		s.log.Warn("two agents under one host name, the first keeps serving", "event", "host_conflict", "host", ses.host, "serving", old.remote, "refused", ses.remote)
	}
	s.conflicts[ses.host] = Conflict{Host: ses.host, Address: old.remote, Other: ses.remote, Process: old.process, OtherAgent: ses.process, Last: time.Now()}
}

// release forgets a session that has ended.
func (s *Server) release(ses *Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, ses)
	if s.hosts[ses.host] == ses {
		delete(s.hosts, ses.host)
		s.metrics.connected.Set(float64(len(s.hosts)))
	}
}

// greeted makes room for the next stream without hello.
func (s *Server) greeted() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending--
}
