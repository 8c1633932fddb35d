package lane

import (
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"waypost/gossip/identity"
	"waypost/gossip/oneport"
	waypostv1 "waypost/proto/waypost/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must happen sooner or later. It decides no pass: what is
// tested is that it happens. The lanes of tests have as much, so that a busy
// machine closes none.
const patience = time.Minute

// eventually waits for a condition that other goroutines bring about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// coordinator is a lane server on a real port that records what happens.
type coordinator struct {
	t    *testing.T
	name string
	addr string
	srv  *Server
	grpc *grpc.Server
	port *oneport.Port
	reg  *prometheus.Registry

	mu      sync.Mutex
	history []string // "up gpu-01", "down gpu-01"
	frames  map[string]int
	lates   []time.Duration
	ages    []float64 // of the LOADs, as the handler saw them
	last    map[string]*waypostv1.ConnectRequest
	refuse  error
	hold    chan struct{} // Frame waits for it to be closed
}

type coordinatorOptions struct {
	name, addr string
	process    uint64
	tls        *tls.Config
	net        *lineNet // nil: TCP
	edit       func(*ServerOptions)
}

func startCoordinator(t *testing.T, o coordinatorOptions) *coordinator {
	t.Helper()
	if o.name == "" {
		o.name = "c-1"
	}
	if o.addr == "" {
		o.addr = "127.0.0.1:0"
	}
	if o.process == 0 {
		o.process = 0xc1
	}
	c := &coordinator{t: t, name: o.name, reg: prometheus.NewRegistry(), frames: map[string]int{}, last: map[string]*waypostv1.ConnectRequest{}}
	opts := ServerOptions{
		Handler: c, InsecureLoopback: o.tls == nil, Registerer: c.reg,
		LiveProof: patience, StallAfter: patience, HelloTimeout: patience,
		Hello: func() *waypostv1.CoordinatorHello {
			return &waypostv1.CoordinatorHello{Name: new(o.name), CoordinatorProcess: new(o.process)}
		},
	}
	if o.edit != nil {
		o.edit(&opts)
	}
	var err error
	if c.srv, err = NewServer(opts); err != nil {
		t.Fatal(err)
	}
	if o.net != nil {
		c.addr = o.addr
		c.grpc = grpc.NewServer(c.srv.GRPCOptions()...)
		c.srv.Register(c.grpc)
		go c.grpc.Serve(o.net.listen(o.addr))
		t.Cleanup(func() { c.stop(); time.Sleep(time.Minute) }) // what was under way arrives
		return c
	}
	ln, err := net.Listen("tcp", o.addr)
	if err != nil {
		t.Fatal(err)
	}
	c.addr = ln.Addr().String()
	if c.port, err = oneport.New(oneport.Options{Listener: ln, TLS: o.tls, Protocols: []oneport.Protocol{oneport.GRPC}, Name: "cluster"}); err != nil {
		t.Fatal(err)
	}
	c.grpc = grpc.NewServer(append(c.srv.GRPCOptions(), grpc.Creds(oneport.Credentials()))...)
	c.srv.Register(c.grpc)
	c.port.Start()
	go c.grpc.Serve(c.port.Listener(oneport.GRPC))
	t.Cleanup(c.stop)
	return c
}

func (c *coordinator) stop() {
	c.srv.Close()
	c.grpc.Stop()
	if c.port != nil {
		c.port.Close()
	}
}

func (c *coordinator) LaneUp(s *Session) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refuse != nil {
		return c.refuse
	}
	c.history = append(c.history, "up "+s.Host())
	return nil
}

func (c *coordinator) Frame(s *Session, f *waypostv1.ConnectRequest, late time.Duration) {
	c.mu.Lock()
	c.frames[s.Host()+" "+kindOf(f)]++
	c.last[s.Host()+" "+kindOf(f)] = f
	if load := f.GetLoad(); load != nil && len(load.GetWorkers()) > 0 {
		c.lates = append(c.lates, late)
		c.ages = append(c.ages, load.GetWorkers()[0].GetAgeMs())
	}
	hold := c.hold
	c.mu.Unlock()
	if hold != nil {
		<-hold
	}
}

func (c *coordinator) LaneDown(s *Session, _ error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.history = append(c.history, "down "+s.Host())
}

func (c *coordinator) count(what string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.frames[what]
}

func (c *coordinator) newest(what string) *waypostv1.ConnectRequest {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last[what]
}

func (c *coordinator) events() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.history, ", ")
}

func (c *coordinator) holdFrames() (release func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	hold := make(chan struct{})
	c.hold = hold
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.hold = nil
		close(hold)
	}
}

// agent is a dialer that records what happens.
type agent struct {
	t   *testing.T
	d   *Dialer
	reg *prometheus.Registry

	mu     sync.Mutex
	ups    []*Lane
	downs  []error
	frames []*waypostv1.ConnectResponse
	loads  atomic.Int64
}

type agentOptions struct {
	host    string
	process uint64
	tls     *tls.Config
	net     *lineNet // nil: TCP
	edit    func(*DialerOptions)
}

func startAgent(t *testing.T, o agentOptions, addresses ...string) *agent {
	t.Helper()
	if o.host == "" {
		o.host = "gpu-01"
	}
	if o.process == 0 {
		o.process = 0xa1
	}
	a := &agent{t: t, reg: prometheus.NewRegistry()}
	opts := DialerOptions{
		Handler: a, TLS: o.tls, Registerer: a.reg, LoadEvery: 20 * time.Millisecond, LoadGap: 5 * time.Millisecond,
		BackoffLeast: 5 * time.Millisecond, BackoffMost: 50 * time.Millisecond, RefusedPause: 100 * time.Millisecond,
		StallAfter: patience, HelloTimeout: patience,
		Hello: func() *waypostv1.AgentHello {
			return &waypostv1.AgentHello{Host: new(o.host), AgentProcess: new(o.process), Version: new("test")}
		},
		Load: func(*Lane) *waypostv1.Load {
			return &waypostv1.Load{
				AgentProcess: new(o.process), LoadSeq: new(uint64(a.loads.Add(1))),
				Workers: []*waypostv1.WorkerLoad{{Index: new(uint32(0)), AgeMs: new(10.0)}, {Index: new(uint32(1))}},
			}
		},
	}
	if o.edit != nil {
		o.edit(&opts)
	}
	var err error
	if a.d, err = NewDialer(opts); err != nil {
		t.Fatal(err)
	}
	if o.net != nil {
		a.d.dial = o.net.dial
	}
	if err := a.d.SetAddresses(FromConfig, addresses); err != nil {
		t.Fatal(err)
	}
	a.d.Start()
	t.Cleanup(a.d.Close)
	return a
}

func (a *agent) LaneUp(l *Lane) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ups = append(a.ups, l)
}

func (a *agent) Frame(_ *Lane, f *waypostv1.ConnectResponse) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.frames = append(a.frames, f)
}

func (a *agent) LaneDown(_ *Lane, cause error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.downs = append(a.downs, cause)
}

func (a *agent) upCount() int { a.mu.Lock(); defer a.mu.Unlock(); return len(a.ups) }

func (a *agent) lane() *Lane {
	a.t.Helper()
	eventually(a.t, "a lane up", func() bool { return len(a.d.Lanes()) == 1 })
	return a.d.Lanes()[0]
}

func (a *agent) statusOf(address string) LaneStatus {
	for _, s := range a.d.Status() {
		if s.Address == address {
			return s
		}
	}
	return LaneStatus{}
}

type pki struct {
	t   *testing.T
	dir string
}

func newPKI(t *testing.T) pki {
	t.Helper()
	dir := t.TempDir()
	if _, err := identity.WriteDevCerts(dir, []string{"gpu-01", "gpu-02"}, []string{"c-1", "c-2"}); err != nil {
		t.Fatal(err)
	}
	return pki{t, dir}
}

func (p pki) source(base string) *identity.Source {
	p.t.Helper()
	s, err := identity.Open(identity.Options{Files: identity.Files{CA: filepath.Join(p.dir, "ca.pem"), Cert: filepath.Join(p.dir, base+".pem"), Key: filepath.Join(p.dir, base+".key")}})
	if err != nil {
		p.t.Fatal(err)
	}
	return s
}

func (p pki) server(base string) *tls.Config {
	return p.source(base).Server(identity.ServerOptions{Accept: []identity.Role{identity.RoleAgent, identity.RoleViewer}})
}

func (p pki) client(base string) *tls.Config {
	return p.source(base).Client(identity.ClientOptions{Accept: []identity.Role{identity.RoleCoordinator}})
}

func TestLaneOverTLS(t *testing.T) {
	p := newPKI(t)
	c := startCoordinator(t, coordinatorOptions{tls: p.server("coordinator-c-1")})
	a := startAgent(t, agentOptions{tls: p.client("agent-gpu-01")}, c.addr)
	l := a.lane()
	if name, process := l.Coordinator(); name != "c-1" || process != 0xc1 {
		t.Errorf("lane to %s %x", name, process)
	}
	eventually(t, "LOADs at the coordinator", func() bool { return c.count("gpu-01 load") >= 3 })
	s, ok := c.srv.Session("gpu-01")
	if !ok || s.Host() != "gpu-01" || s.AgentProcess() != 0xa1 || s.Number() != l.Session() {
		t.Fatalf("session at the coordinator: %v %+v", ok, s)
	}
	load := c.newest("gpu-01 load").GetLoad()
	if w := load.GetWorkers(); w[0].GetAgeMs() < 10 || w[1].AgeMs != nil {
		t.Errorf("ages %v and %v, want at least 10 and unknown", w[0].AgeMs, w[1].AgeMs)
	}

	if err := s.Send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Policy{Policy: &waypostv1.PolicyPush{PolicyVersion: new(uint32(7))}}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "policy at the agent", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.frames) == 1 && a.frames[0].GetPolicy().GetPolicyVersion() == 7
	})
	if err := l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Host{Host: &waypostv1.HostReport{}}}); err != nil {
		t.Fatal(err)
	}
	a.d.HelloChanged()
	eventually(t, "host report and second hello", func() bool { return c.count("gpu-01 host") == 1 && c.count("gpu-01 agent_hello") == 1 })

	if n := testutil.ToFloat64(c.srv.metrics.connected); n != 1 {
		t.Errorf("waypost_lanes_connected %v", n)
	}
	if n := testutil.ToFloat64(a.d.metrics.connected.WithLabelValues("c-1")); n != 1 {
		t.Errorf("waypost_lane_connected %v", n)
	}
	for _, kind := range []string{"load", "host", "policy", "agent_hello", "coordinator_hello"} {
		sent := testutil.ToFloat64(a.d.metrics.bytes.vec.WithLabelValues(kind))
		if sent == 0 {
			t.Errorf("no bytes of kind %s counted at the agent", kind)
		}
		eventually(t, "bytes of "+kind+" at the coordinator", func() bool { return testutil.ToFloat64(c.srv.metrics.bytes.vec.WithLabelValues(kind)) >= sent })
	}
	a.d.Close()
	eventually(t, "lane down at the coordinator", func() bool { return c.events() == "up gpu-01, down gpu-01" })
	if st := a.d.Status(); len(st) != 0 {
		t.Errorf("status after Close: %v", st)
	}
}

func TestWrongIdentitiesAreRefused(t *testing.T) {
	p := newPKI(t)
	good := startCoordinator(t, coordinatorOptions{tls: p.server("coordinator-c-1")})
	misnamed := startCoordinator(t, coordinatorOptions{tls: p.server("coordinator-c-2"), name: "c-1"})
	impostor := startCoordinator(t, coordinatorOptions{tls: p.server("agent-gpu-02")})
	for _, tt := range []struct {
		name  string
		agent agentOptions
		addr  string
		state LaneState
		want  string
	}{
		{"an agent poses as coordinator", agentOptions{tls: p.client("agent-gpu-01")}, impostor.addr, StateDown, "it is agent/gpu-02, accepted here: [coordinator]"},
		{"certificate and hello of the coordinator differ", agentOptions{tls: p.client("agent-gpu-01")}, misnamed.addr, StateDown, `certificate names coordinator/c-2, hello says coordinator "c-1"`},
		{"hello names another host", agentOptions{tls: p.client("agent-gpu-01"), host: "gpu-02"}, good.addr, StateRefused, `certificate names agent/gpu-01, hello says host "gpu-02"`},
		{"a viewer opens a lane", agentOptions{tls: p.client("viewer")}, good.addr, StateRefused, "certificate names viewer/viewer, a lane needs the role agent"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := startAgent(t, tt.agent, tt.addr)
			eventually(t, "state "+string(tt.state)+" with its reason", func() bool {
				s := a.statusOf(tt.addr)
				return s.State == tt.state && strings.Contains(s.Error, tt.want)
			})
			if a.upCount() != 0 {
				t.Error("lane came up")
			}
		})
	}
	if good.events() != "" {
		t.Errorf("coordinator saw %s", good.events())
	}
	if n := testutil.ToFloat64(good.srv.metrics.refused.WithLabelValues("identity")); n < 2 {
		t.Errorf("%v refusals counted", n)
	}
}

func TestClearIsForLoopbackOnly(t *testing.T) {
	if err := checkAddress("10.0.0.1:7711", true); err == nil || !strings.Contains(err.Error(), "not on loopback") {
		t.Errorf("clear lane to another host: %v", err)
	}
	// A server without the option refuses even on loopback.
	c := startCoordinator(t, coordinatorOptions{edit: func(o *ServerOptions) { o.InsecureLoopback = false }})
	a := startAgent(t, agentOptions{}, c.addr)
	eventually(t, "refusal", func() bool {
		s := a.statusOf(c.addr)
		return s.State == StateRefused && strings.Contains(s.Error, "needs a certificate")
	})
}

func TestReconnect(t *testing.T) {
	// An address of its own on loopback: its port is free until it is used again.
	c := startCoordinator(t, coordinatorOptions{addr: fmt.Sprintf("127.%d.%d.%d:0", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254))})
	a := startAgent(t, agentOptions{}, c.addr)
	first := a.lane()
	s, _ := c.srv.Session("gpu-01")
	s.Close(errors.New("test"))
	eventually(t, "a second lane", func() bool { return a.upCount() == 2 })
	<-first.Done()
	if second := a.lane(); second.Session() <= first.Session() {
		t.Errorf("session %d after %d", second.Session(), first.Session())
	}
	if err := first.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Host{}}); !errors.Is(err, ErrLaneDown) {
		t.Errorf("Send on a dead lane: %v", err)
	}
	// The coordinator restarts on its port.
	c.stop()
	eventually(t, "down", func() bool { return a.statusOf(c.addr).State == StateDown })
	if s := a.statusOf(c.addr); s.Error == "" {
		t.Error("no reason shown")
	}
	again := startCoordinator(t, coordinatorOptions{addr: c.addr, process: 0xc2})
	eventually(t, "a third lane", func() bool { return a.upCount() == 3 && again.count("gpu-01 load") > 0 })
	if _, process := a.lane().Coordinator(); process != 0xc2 {
		t.Errorf("lane to process %x", process)
	}
	if n := testutil.ToFloat64(a.d.metrics.reconnects); n != 2 {
		t.Errorf("%v reconnects counted, want 2", n)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.downs) != 2 {
		t.Errorf("%d LaneDown calls for two lanes that ended", len(a.downs))
	}
}

func TestStalledLaneIsClosed(t *testing.T) { synctest.Test(t, testStalledLaneIsClosed) }

func testStalledLaneIsClosed(t *testing.T) {
	n := newLineNet(1, 0)
	c := startCoordinator(t, coordinatorOptions{net: n, addr: "127.0.0.1:1"})
	a := startAgent(t, agentOptions{net: n, edit: func(o *DialerOptions) { o.StallAfter = 400 * time.Millisecond }}, c.addr)
	l := a.lane()
	release := sync.OnceFunc(c.holdFrames()) // the coordinator reads nothing more
	defer release()
	for range 3 { // more than the window holds and the reader may have begun to take
		prefixes := &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Prefixes{Prefixes: &waypostv1.PrefixFrames{Frames: [][]byte{make([]byte, 300<<10)}}}}
		if err := l.Send(prefixes); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "socket taken by the big frame", func() bool { return l.track.stalledFor(time.Now()) > 0 })
	before := a.loads.Load()
	<-l.Done()
	if n := a.loads.Load() - before; n > 1 {
		t.Errorf("%d LOADs built while nothing could be written", n)
	}
	a.mu.Lock()
	cause := a.downs[0]
	a.mu.Unlock()
	if !errors.Is(cause, errStalled) {
		t.Errorf("lane ended with %v, want %v", cause, errStalled)
	}
	if n := testutil.ToFloat64(a.d.metrics.stalled); n != 1 {
		t.Errorf("%v stalls counted", n)
	}
	release()
	eventually(t, "lane up again", func() bool { return a.upCount() >= 2 })
}

func TestCoordinatorClosesLaneItCannotWriteTo(t *testing.T) {
	synctest.Test(t, testCoordinatorClosesLaneItCannotWriteTo)
}

func testCoordinatorClosesLaneItCannotWriteTo(t *testing.T) {
	n := newLineNet(1, 0)
	c := startCoordinator(t, coordinatorOptions{net: n, addr: "127.0.0.1:1", edit: func(o *ServerOptions) { o.StallAfter = 200 * time.Millisecond }})
	// An agent that greets and then reads nothing.
	conn, _, s := greetedLane(t, c, n)
	defer conn.Close()
	for range 3 {
		big := &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Render{Render: &waypostv1.RenderAsk{ChatJson: new(strings.Repeat("x", 1<<20))}}}
		if err := s.Send(big); err != nil {
			t.Fatal(err)
		}
	}
	<-s.Done()
	if !errors.Is(s.cause, errStalled) {
		t.Errorf("lane ended with %v", s.cause)
	}
}

// greetedLane is the connection, stream and session of an agent that has exchanged
// hellos and reads no further by itself.
func greetedLane(t *testing.T, c *coordinator, n *lineNet) (*grpc.ClientConn, waypostv1.LaneService_ConnectClient, *Session) {
	t.Helper()
	conn, stream := rawLane(t, c.addr, grpc.WithContextDialer(n.dial))
	if err := stream.Send(hello("gpu-01", 1, 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	s, ok := c.srv.Session("gpu-01")
	if !ok {
		t.Fatal("no session")
	}
	return conn, stream, s
}

func rawLane(t *testing.T, addr string, options ...grpc.DialOption) (*grpc.ClientConn, waypostv1.LaneService_ConnectClient) {
	t.Helper()
	options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(64<<20)))
	conn, err := grpc.NewClient("passthrough:///"+addr, options...)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := waypostv1.NewLaneServiceClient(conn).Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return conn, stream
}

func hello(host string, process, session uint64) *waypostv1.ConnectRequest {
	return &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Hello{Hello: &waypostv1.AgentHello{
		Host: new(host), AgentProcess: new(process), Session: new(session), Protocol: new(uint32(1)), ProtocolMin: new(uint32(1)),
	}}}
}
