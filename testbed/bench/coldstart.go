package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/prefixindex"
	"waypost/coordinator/pull"
	"waypost/gossip/identity"
	"waypost/gossip/lane"
	"waypost/gossip/oneport"
	waypostv1 "waypost/proto/waypost/v1"
)

// coldOptions say how a coordinator that knows nothing meets a fleet.
type coldOptions struct {
	hosts, workersPerHost int
	lives                 []life // of hosts × workersPerHost workers
	rounds                int
}

// ColdStart is what it takes a coordinator that knows nothing to meet a fleet.
type ColdStart struct {
	Hosts, Workers int
	// Ms is from the first accepted connection to 99 % of all keys, the median of
	// the rounds. Both ends are in this process, handshakes included; agents
	// have their snapshots encoded.
	Ms float64
	// SnapshotBytes are those of all workers.
	SnapshotBytes int
	// Threads are those of this process, Descriptors those of the coordinator's
	// side; 0: not known here.
	Threads, Descriptors int
}

const (
	coldTimeout   = 5 * time.Minute // 1,000 handshakes take long on a busy machine
	coordinatorID = "coordinator-1"
)

func benchColdStart(ctx context.Context, o coldOptions) (ColdStart, error) {
	out := ColdStart{Hosts: o.hosts, Workers: o.hosts * o.workersPerHost}
	dir, err := os.MkdirTemp("", "waypost-bench")
	if err != nil {
		return out, err
	}
	defer os.RemoveAll(dir)
	ids, err := newIdentities(dir, o.hosts)
	if err != nil {
		return out, err
	}
	var times []float64
	for range o.rounds {
		ms, err := coldRound(ctx, o, ids, &out)
		if err != nil {
			return out, err
		}
		times = append(times, ms)
	}
	slices.Sort(times)
	out.Ms = times[len(times)/2]
	return out, nil
}

// identities are the certificates of a fleet.
type identities struct {
	coordinator *identity.Source
	hosts       []*identity.Source
}

func hostName(i int) string { return fmt.Sprintf("host-%04d", i) }

func newIdentities(dir string, hosts int) (*identities, error) {
	ca, err := identity.NewCA("bench", 24*time.Hour)
	if err != nil {
		return nil, err
	}
	caFile := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(caFile, ca.CertPEM(), 0o600); err != nil {
		return nil, err
	}
	issue := func(role identity.Role, name string) (*identity.Source, error) {
		pair, err := ca.Issue(role, name, []string{"127.0.0.1"}, 12*time.Hour)
		if err != nil {
			return nil, err
		}
		f := identity.Files{CA: caFile, Cert: filepath.Join(dir, name+".pem"), Key: filepath.Join(dir, name+".key")}
		if err := identity.WritePair(pair, f.Cert, f.Key); err != nil {
			return nil, err
		}
		return identity.Open(identity.Options{Files: f, CheckEvery: time.Hour})
	}
	ids := &identities{}
	if ids.coordinator, err = issue(identity.RoleCoordinator, coordinatorID); err != nil {
		return nil, err
	}
	for i := range hosts {
		s, err := issue(identity.RoleAgent, hostName(i))
		if err != nil {
			return nil, err
		}
		ids.hosts = append(ids.hosts, s)
	}
	return ids, nil
}

// coldRound starts a coordinator and all hosts, and waits for the keys.
func coldRound(ctx context.Context, o coldOptions, ids *identities, out *ColdStart) (float64, error) {
	before, _, err := processCounts()
	if err != nil {
		return 0, err
	}
	c, err := startColdCoordinator(o, ids.coordinator)
	if err != nil {
		return 0, err
	}
	defer c.stop()
	var hosts []*coldHost
	defer func() {
		var wg sync.WaitGroup
		for _, h := range hosts {
			wg.Go(h.dialer.Close)
		}
		wg.Wait()
	}()
	for i := range o.hosts {
		h, err := newColdHost(i, o, ids.hosts[i])
		if err != nil {
			return 0, err
		}
		hosts = append(hosts, h)
		if err := h.dialer.SetAddresses(lane.FromConfig, []string{c.listener.Addr().String()}); err != nil {
			return 0, err
		}
	}
	for _, h := range hosts {
		h.dialer.Start()
	}
	ctx, cancel := context.WithTimeout(ctx, coldTimeout)
	defer cancel()
	select {
	case <-c.reached:
	case <-ctx.Done():
		return 0, fmt.Errorf("cold start: %d of %d keys from %d hosts after %v: %w", c.keys, c.wanted, o.hosts, coldTimeout, errors.Join(ctx.Err(), c.fault()))
	}
	if err := c.fault(); err != nil {
		return 0, err
	}
	descriptors, threads, err := processCounts()
	if err != nil {
		return 0, err
	}
	// Each lane has two ends here, and one of them is the host's.
	out.Descriptors, out.Threads = descriptors-before-o.hosts, threads
	out.SnapshotBytes = c.bytes
	return float64(c.took()) / float64(time.Millisecond), nil
}

// processCounts are this process's descriptors and threads.
func processCounts() (descriptors, threads int, err error) {
	fds, err := os.ReadDir("/proc/self/fd")
	if errors.Is(err, os.ErrNotExist) {
		return 0, 0, nil // not Linux: not known
	}
	if err != nil {
		return 0, 0, err
	}
	tasks, err := os.ReadDir("/proc/self/task")
	return len(fds), len(tasks), err
}

// coldCoordinator is the coordinator's side: the production lane server, queue
// of pulls, decoders and index.
type coldCoordinator struct {
	opt      coldOptions
	listener *acceptClock
	server   *lane.Server
	grpc     *grpc.Server
	port     *oneport.Port
	served   chan struct{}

	mu        sync.Mutex
	receivers []*receiver
	filled    []bool // by worker
	pulls     *pull.Queue
	sessions  map[string]*lane.Session
	keys      int
	wanted    int
	bytes     int
	done      time.Time
	err       error
	reached   chan struct{}
}

func startColdCoordinator(o coldOptions, id *identity.Source) (*coldCoordinator, error) {
	c := &coldCoordinator{opt: o, filled: make([]bool, o.hosts*o.workersPerHost), sessions: map[string]*lane.Session{}, reached: make(chan struct{}), served: make(chan struct{})}
	x := prefixindex.New(prefixindex.Options{Seed: 1})
	for w := range o.hosts * o.workersPerHost {
		c.receivers = append(c.receivers, newReceiver(x, w))
		c.wanted += o.lives[w].filledKeys
	}
	c.wanted = c.wanted * 99 / 100
	hello := func() *waypostv1.CoordinatorHello {
		return &waypostv1.CoordinatorHello{Name: proto.String(coordinatorID), CoordinatorProcess: proto.Uint64(1)}
	}
	var err error
	if c.pulls, err = pull.New(pull.Options{Seed: 1}); err != nil {
		return nil, err
	}
	if c.server, err = lane.NewServer(lane.ServerOptions{Hello: hello, Handler: c}); err != nil {
		return nil, err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	c.listener = &acceptClock{Listener: ln}
	c.port, err = oneport.New(oneport.Options{
		Listener: c.listener, TLS: id.Server(identity.ServerOptions{Accept: []identity.Role{identity.RoleAgent}, Protocols: []string{"h2"}}),
		Protocols: []oneport.Protocol{oneport.GRPC}, Name: "cluster",
	})
	if err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	c.grpc = grpc.NewServer(append(c.server.GRPCOptions(), grpc.Creds(oneport.Credentials()))...)
	c.server.Register(c.grpc)
	c.port.Start()
	go func() {
		defer close(c.served)
		_ = c.grpc.Serve(c.port.Listener(oneport.GRPC)) // ends with stop
	}()
	return c, nil
}

func (c *coldCoordinator) stop() {
	c.server.Close()
	c.grpc.Stop()
	c.port.Close()
	<-c.served
}

// LaneUp implements lane.CoordinatorHandler.
func (c *coldCoordinator) LaneUp(s *lane.Session) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var host int
	if _, err := fmt.Sscanf(s.Host(), "host-%d", &host); err != nil {
		return err
	}
	for _, w := range s.Hello().GetWorkers() {
		if c.filled[host*c.opt.workersPerHost+int(w.GetIndex())] {
			continue
		}
		c.pulls.Want(pull.Stream{Host: s.Host(), Index: w.GetIndex()}, "new", true)
	}
	c.sessions[s.Host()] = s
	c.ask()
	return nil
}

// LaneDown implements lane.CoordinatorHandler: what it was asked for, its next
// lane will be asked again.
func (c *coldCoordinator) LaneDown(s *lane.Session, _ error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pulls.Drop(s.Host())
	delete(c.sessions, s.Host())
	c.ask()
}

// ask sends the pulls whose turn it is. Called with mu held.
func (c *coldCoordinator) ask() {
	for {
		p, ok := c.pulls.Next(time.Now())
		if !ok {
			return
		}
		msg := &waypostv1.PrefixPull{PullId: &p.ID, Index: &p.Index, Reason: &p.Reason}
		// A lane that is down says so to LaneDown next.
		_ = c.sessions[p.Host].Send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Pull{Pull: msg}})
	}
}

// Frame implements lane.CoordinatorHandler.
func (c *coldCoordinator) Frame(s *lane.Session, f *waypostv1.ConnectRequest, _ time.Duration) {
	p := f.GetPrefixes()
	if p == nil {
		return // a LOAD, as in production
	}
	var host int
	if _, err := fmt.Sscanf(s.Host(), "host-%d", &host); err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.fail(err)
		return
	}
	w := host*c.opt.workersPerHost + int(p.GetIndex())
	r := c.receivers[w]
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.pulls.Progress(pull.Stream{Host: s.Host(), Index: p.GetIndex()}, p.GetPullId(), time.Now()) || c.filled[w] {
		return
	}
	for _, frame := range p.GetFrames() {
		c.bytes += len(frame)
		if err := r.take(frame); err != nil {
			c.fail(err)
		}
	}
	if !p.GetLast() {
		return
	}
	c.filled[w] = true
	c.keys += r.decoder.Keys()
	c.pulls.Answered(p.GetPullId(), true)
	c.ask()
	if c.keys >= c.wanted && c.done.IsZero() {
		c.done = time.Now()
		close(c.reached)
	}
}

// fail notes the first error. Called with mu held.
func (c *coldCoordinator) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

func (c *coldCoordinator) fault() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *coldCoordinator) took() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.done.Sub(c.listener.first())
}

// acceptClock notes when the first connection was accepted.
type acceptClock struct {
	net.Listener
	once sync.Once
	mu   sync.Mutex
	at   time.Time
}

func (l *acceptClock) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.once.Do(func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.at = time.Now()
		})
	}
	return conn, err
}

func (l *acceptClock) first() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.at
}

// coldHost is one host's side: the production lane dialer over snapshots that
// its agent would encode.
type coldHost struct {
	name    string
	first   int // of its workers
	opt     coldOptions
	dialer  *lane.Dialer
	replies sync.WaitGroup
}

func newColdHost(i int, o coldOptions, id *identity.Source) (*coldHost, error) {
	h := &coldHost{name: hostName(i), first: i * o.workersPerHost, opt: o}
	var err error
	h.dialer, err = lane.NewDialer(lane.DialerOptions{
		Hello: h.hello, Load: h.load, Handler: h,
		TLS: id.Client(identity.ClientOptions{Accept: []identity.Role{identity.RoleCoordinator}, Protocols: []string{"h2"}}),
	})
	return h, err
}

func (h *coldHost) hello() *waypostv1.AgentHello {
	out := &waypostv1.AgentHello{Host: &h.name, AgentProcess: proto.Uint64(uint64(h.first + 1)), PrefixKeyIds: []string{benchKey.ID()}}
	for i := range h.opt.workersPerHost {
		out.Workers = append(out.Workers, &waypostv1.WorkerFacts{Index: proto.Uint32(uint32(i)), Engine: proto.String("vllm-8000"), Model: proto.String(benchModel), EngineProcess: proto.Uint64(1)})
	}
	return out
}

func (h *coldHost) load(*lane.Lane) *waypostv1.Load {
	out := &waypostv1.Load{AgentProcess: proto.Uint64(uint64(h.first + 1))}
	for i := range h.opt.workersPerHost {
		out.Workers = append(out.Workers, &waypostv1.WorkerLoad{
			Index: proto.Uint32(uint32(i)), EngineProcess: proto.Uint64(1), State: proto.String("ready"),
			AgeMs: proto.Float64(1), QueueMs: proto.Float64(10), Live: proto.Uint32(4), Running: proto.Uint32(4), Waiting: proto.Uint32(0),
		})
	}
	return out
}

// LaneUp implements lane.AgentHandler.
func (h *coldHost) LaneUp(*lane.Lane) {}

// LaneDown implements lane.AgentHandler.
func (h *coldHost) LaneDown(*lane.Lane, error) { h.replies.Wait() }

// Frame implements lane.AgentHandler: it answers pulls beside the lane.
func (h *coldHost) Frame(l *lane.Lane, f *waypostv1.ConnectResponse) {
	p := f.GetPull()
	if p == nil {
		return
	}
	h.replies.Go(func() {
		frames := h.opt.lives[h.first+int(p.GetIndex())].snapshot
		for i, frame := range frames {
			msg := &waypostv1.PrefixFrames{Index: p.Index, EngineProcess: proto.Uint64(1), PullId: p.PullId, Frames: [][]byte{frame}, Last: proto.Bool(i == len(frames)-1)}
			// A lane that ends is dialled again and asked again.
			if l.SendWait(context.Background(), &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Prefixes{Prefixes: msg}}) != nil {
				return
			}
		}
	})
}
