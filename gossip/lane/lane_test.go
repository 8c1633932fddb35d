package lane

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/gossip/identity"
	"waypost/gossip/oneport"
	waypostv1 "waypost/proto/waypost/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// eventually waits for a condition that other goroutines bring about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
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
		Handler: c, InsecureLoopback: o.tls == nil, Registerer: c.reg, LiveProof: 300 * time.Millisecond,
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
	c.port.Close()
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
		Hello: func() *waypostv1.AgentHello {
			return &waypostv1.AgentHello{Host: new(o.host), AgentProcess: new(o.process), Version: new("test")}
		},
		Load: func(*Lane) *waypostv1.Load {
			return &waypostv1.Load{AgentProcess: new(o.process), LoadSeq: new(uint64(a.loads.Add(1))),
				Workers: []*waypostv1.WorkerLoad{{Index: new(uint32(0)), AgeMs: new(10.0)}, {Index: new(uint32(1))}}}
		},
	}
	if o.edit != nil {
		o.edit(&opts)
	}
	var err error
	if a.d, err = NewDialer(opts); err != nil {
		t.Fatal(err)
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
		sent := testutil.ToFloat64(a.d.metrics.bytes.WithLabelValues(kind))
		if sent == 0 {
			t.Errorf("no bytes of kind %s counted at the agent", kind)
		}
		eventually(t, "bytes of "+kind+" at the coordinator", func() bool { return testutil.ToFloat64(c.srv.metrics.bytes.WithLabelValues(kind)) >= sent })
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
	c := startCoordinator(t, coordinatorOptions{})
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

func TestStalledLaneIsClosed(t *testing.T) {
	c := startCoordinator(t, coordinatorOptions{})
	a := startAgent(t, agentOptions{edit: func(o *DialerOptions) { o.StallAfter = 400 * time.Millisecond }}, c.addr)
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
	c := startCoordinator(t, coordinatorOptions{edit: func(o *ServerOptions) { o.StallAfter = 200 * time.Millisecond }})
	// An agent that greets and then reads nothing.
	conn, stream := rawLane(t, c.addr)
	defer conn.Close()
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
	big := &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Render{Render: &waypostv1.RenderAsk{ChatJson: new(strings.Repeat("x", 1<<20))}}}
	for range 3 {
		if err := s.Send(big); err != nil {
			t.Fatal(err)
		}
	}
	<-s.Done()
	if !errors.Is(s.cause, errStalled) {
		t.Errorf("lane ended with %v", s.cause)
	}
}

func rawLane(t *testing.T, addr string) (*grpc.ClientConn, waypostv1.LaneService_ConnectClient) {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(64<<20)))
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
		Host: new(host), AgentProcess: new(process), Session: new(session), Protocol: new(uint32(1)), ProtocolMin: new(uint32(1))}}}
}

func TestNewestLaneOfAProcessWins(t *testing.T) {
	c := startCoordinator(t, coordinatorOptions{})
	conn1, stream1 := rawLane(t, c.addr)
	defer conn1.Close()
	stream1.Send(hello("gpu-01", 1, 5))
	if _, err := stream1.Recv(); err != nil {
		t.Fatal(err)
	}
	conn2, stream2 := rawLane(t, c.addr)
	defer conn2.Close()
	stream2.Send(hello("gpu-01", 1, 6))
	if _, err := stream2.Recv(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream1.Recv(); status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "replaced by session 6") {
		t.Errorf("the older lane ended with %v", err)
	}
	conn3, stream3 := rawLane(t, c.addr)
	defer conn3.Close()
	stream3.Send(hello("gpu-01", 1, 5))
	if _, err := stream3.Recv(); status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "session 5 is not newer than session 6") {
		t.Errorf("a lane older than the one that is up ended with %v", err)
	}
	if s, _ := c.srv.Session("gpu-01"); s.Number() != 6 {
		t.Errorf("session %d is up, want 6", s.Number())
	}
	if got := c.events(); got != "up gpu-01, down gpu-01, up gpu-01" {
		t.Errorf("handler saw %s", got)
	}
}

func TestConflictOfTwoLiveAgents(t *testing.T) {
	c := startCoordinator(t, coordinatorOptions{})
	first := startAgent(t, agentOptions{process: 1}, c.addr)
	first.lane()
	second := startAgent(t, agentOptions{process: 2}, c.addr)
	eventually(t, "refusal of the second", func() bool {
		s := second.statusOf(c.addr)
		return s.State == StateRefused && strings.Contains(s.Error, `host "gpu-01" is served by another live agent at 127.0.0.1:`)
	})
	conflicts := c.srv.Conflicts()
	if len(conflicts) != 1 || conflicts[0].Host != "gpu-01" || conflicts[0].Process != 1 || conflicts[0].OtherAgent != 2 || conflicts[0].Other == conflicts[0].Address {
		t.Errorf("conflicts %+v", conflicts)
	}
	if s, _ := c.srv.Session("gpu-01"); s.AgentProcess() != 1 {
		t.Errorf("process %d serves, want the first", s.AgentProcess())
	}
	if first.upCount() != 1 || second.upCount() != 0 {
		t.Errorf("lanes up: first %d times, second %d", first.upCount(), second.upCount())
	}
	// The first goes away; the second gets in by itself.
	first.d.Close()
	eventually(t, "second up", func() bool { return second.upCount() == 1 })
}

func TestSilentLaneYieldsToANewProcess(t *testing.T) {
	// A host lost power: its connection looks open but says nothing any more.
	c := startCoordinator(t, coordinatorOptions{})
	conn, stream := rawLane(t, c.addr)
	defer conn.Close()
	stream.Send(hello("gpu-01", 1, 900))
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	a := startAgent(t, agentOptions{process: 2}, c.addr)
	eventually(t, "new process up", func() bool { return a.upCount() == 1 })
	if n := len(c.srv.Conflicts()); n != 0 {
		t.Errorf("%d conflicts shown", n)
	}
}

func TestTwoAddressesOfOneCoordinator(t *testing.T) {
	c := startCoordinator(t, coordinatorOptions{})
	_, port, _ := net.SplitHostPort(c.addr)
	alias := "localhost:" + port
	a := startAgent(t, agentOptions{}, c.addr, alias)
	eventually(t, "one up, the other an alias", func() bool {
		one, two := a.statusOf(c.addr).State, a.statusOf(alias).State
		return one == StateUp && two == StateAlias || one == StateAlias && two == StateUp
	})
	before := a.upCount()
	loads := c.count("gpu-01 load")
	eventually(t, "20 more LOADs", func() bool { return c.count("gpu-01 load") > loads+20 })
	if n := a.upCount(); n != before {
		t.Errorf("lanes flap: %d ups, then %d", before, n)
	}
	if n := len(a.d.Lanes()); n != 1 {
		t.Errorf("%d lanes", n)
	}
}

func TestAddressesFollowTheirSources(t *testing.T) {
	c1 := startCoordinator(t, coordinatorOptions{name: "c-1", process: 1})
	c2 := startCoordinator(t, coordinatorOptions{name: "c-2", process: 2})
	a := startAgent(t, agentOptions{edit: func(o *DialerOptions) { o.MaxAddresses = 2 }}, c1.addr)
	a.lane()
	if err := a.d.SetAddresses(FromMesh, []string{c2.addr, c1.addr, "127.0.0.1:1"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "two lanes", func() bool { return len(a.d.Lanes()) == 2 })
	if n := len(a.d.Status()); n != 2 {
		t.Errorf("%d addresses tried, the limit is 2", n)
	}
	err := a.d.SetAddresses(FromMesh, []string{"nowhere", "10.0.0.1:x", "10.0.0.1:0", "8.8.8.8:7711"})
	for _, want := range []string{`"nowhere": want host:port`, `"10.0.0.1:x": port must be`, `"8.8.8.8:7711" is not on loopback`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("SetAddresses = %v, want %q", err, want)
		}
	}
	// c2 is in no source now: its lane stays while it is up and is not dialled again.
	if n := len(a.d.Lanes()); n != 2 {
		t.Errorf("%d lanes after an address disappeared", n)
	}
	c2.stop()
	eventually(t, "only c1 is tried", func() bool { return len(a.d.Lanes()) == 1 && len(a.d.Status()) == 1 })
}

func TestBadStreamsAreClosedAndDisturbNobody(t *testing.T) {
	c := startCoordinator(t, coordinatorOptions{edit: func(o *ServerOptions) { o.HelloTimeout = 150 * time.Millisecond }})
	a := startAgent(t, agentOptions{host: "gpu-02"}, c.addr)
	a.lane()
	load := &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Load{Load: &waypostv1.Load{}}}
	big := &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Prefixes{Prefixes: &waypostv1.PrefixFrames{Frames: [][]byte{make([]byte, MaxMessageBytes+1)}}}}
	for _, tt := range []struct {
		name string
		send []*waypostv1.ConnectRequest
		want string
	}{
		{"says nothing", nil, "no hello within"},
		{"LOAD before hello", []*waypostv1.ConnectRequest{load}, "spoke load before its hello"},
		{"big frame", []*waypostv1.ConnectRequest{hello("gpu-04", 1, 1), big}, "received message larger than max"},
		{"becomes another host", []*waypostv1.ConnectRequest{hello("gpu-01", 1, 1), hello("gpu-03", 1, 1)}, "names another host"},
		{"no process", []*waypostv1.ConnectRequest{hello("gpu-01", 0, 1)}, "agent_process and session must not be 0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			conn, stream := rawLane(t, c.addr)
			defer conn.Close()
			for _, f := range tt.send {
				stream.Send(f)
			}
			var err error
			for err == nil {
				_, err = stream.Recv()
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("stream ended with %v, want %q", err, tt.want)
			}
		})
	}
	if n := a.upCount(); n != 1 {
		t.Errorf("the good lane came up %d times", n)
	}
	l := a.lane()
	if err := l.Send(big); !errors.Is(err, ErrTooBig) {
		t.Errorf("Send of a big frame: %v", err)
	}
	for _, f := range []*waypostv1.ConnectRequest{load, hello("x", 1, 1), {}} {
		if err := l.Send(f); err == nil {
			t.Errorf("Send(%v) was accepted", f)
		}
	}
}

func TestHandlerRefusesALane(t *testing.T) {
	c := startCoordinator(t, coordinatorOptions{})
	c.mu.Lock()
	c.refuse = errors.New("prefix key 1a2b3c4d is not known here")
	c.mu.Unlock()
	a := startAgent(t, agentOptions{}, c.addr)
	eventually(t, "refusal shown", func() bool {
		s := a.statusOf(c.addr)
		return s.State == StateRefused && strings.Contains(s.Error, "prefix key 1a2b3c4d")
	})
	c.mu.Lock()
	c.refuse = nil
	c.mu.Unlock()
	a.lane()
	if got := c.events(); got != "up gpu-01" {
		t.Errorf("handler saw %s", got)
	}
}

func TestLateFramesAreOlder(t *testing.T) {
	c := startCoordinator(t, coordinatorOptions{})
	a := startAgent(t, agentOptions{}, c.addr)
	a.lane()
	eventually(t, "a first LOAD", func() bool { return c.count("gpu-01 load") > 3 })
	release := c.holdFrames()
	n := c.count("gpu-01 load")
	eventually(t, "LOADs wait in the socket", func() bool { return a.loads.Load() > int64(n)+20 })
	release()
	eventually(t, "they are read", func() bool { return c.count("gpu-01 load") > n+20 })
	c.mu.Lock()
	defer c.mu.Unlock()
	worst := time.Duration(0)
	for i, late := range c.lates {
		worst = max(worst, late)
		if want := 10 + float64(late)/float64(time.Millisecond); c.ages[i] != want { // it was sent as 10 ms old
			t.Fatalf("a LOAD that was late by %v has age %v ms, want %v", late, c.ages[i], want)
		}
	}
	if worst < 100*time.Millisecond { // at least 20 LOADs of 20 ms waited, less what was under way
		t.Errorf("latest LOAD by %v", worst)
	}
}

func TestLatenessIsAddedToEveryKnownAge(t *testing.T) {
	up := &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Host{Host: &waypostv1.HostReport{Gpus: []*waypostv1.Gpu{{Xids: []*waypostv1.XidEvent{{AgeMs: new(5.0)}, {}}}}}}}
	addLateness(up, 1500*time.Millisecond)
	if xids := up.GetHost().GetGpus()[0].GetXids(); xids[0].GetAgeMs() != 1505 || xids[1].AgeMs != nil {
		t.Errorf("Xid ages %v", xids)
	}
	load := &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Load{Load: &waypostv1.Load{Workers: []*waypostv1.WorkerLoad{{AgeMs: new(1.0), CountersAgeMs: new(2.0)}, {}}}}}
	addLateness(load, time.Second)
	if w := load.GetLoad().GetWorkers(); w[0].GetAgeMs() != 1001 || w[0].GetCountersAgeMs() != 1002 || w[1].AgeMs != nil || w[1].CountersAgeMs != nil {
		t.Errorf("LOAD ages %v", w)
	}
	claims := &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Claims{Claims: &waypostv1.ClaimFrame{Claims: []*waypostv1.Claim{{AgeMs: new(3.0)}}}}}
	addLatenessDown(claims, time.Second)
	if age := claims.GetClaims().GetClaims()[0].GetAgeMs(); age != 1003 {
		t.Errorf("claim age %v", age)
	}
	marks := &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Marks{Marks: &waypostv1.MarkFrame{Marks: []*waypostv1.Mark{{AgeMs: new(4.0)}, {}}}}}
	addLatenessDown(marks, time.Second)
	if m := marks.GetMarks().GetMarks(); m[0].GetAgeMs() != 1004 || m[1].AgeMs != nil {
		t.Errorf("mark ages %v", m)
	}
}

func TestHostsComeAndGo(t *testing.T) {
	// LaneUp and LaneDown of each host alternate, whatever the churn.
	c := startCoordinator(t, coordinatorOptions{})
	for i := range 4 {
		startAgent(t, agentOptions{host: fmt.Sprintf("h%d", i), process: uint64(i + 1)}, c.addr)
	}
	for range 30 {
		for _, s := range c.srv.Sessions() {
			s.Close(errors.New("churn"))
		}
		time.Sleep(3 * time.Millisecond)
	}
	c.srv.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	up := map[string]bool{}
	for _, e := range c.history {
		what, host, _ := strings.Cut(e, " ")
		if up[host] == (what == "up") {
			t.Fatalf("two %s of %s in a row: %v", what, host, c.history)
		}
		up[host] = what == "up"
	}
	for host, is := range up {
		if is {
			t.Errorf("%s is still up after Close", host)
		}
	}
	if len(c.history) < 16 {
		t.Errorf("only %d events", len(c.history))
	}
}

// drain throws frames away.
type drain struct{ frames atomic.Int64 }

func (*drain) LaneUp(*Session) error                                      { return nil }
func (d *drain) Frame(*Session, *waypostv1.ConnectRequest, time.Duration) { d.frames.Add(1) }
func (*drain) LaneDown(*Session, error)                                   {}
func benchLane(b *testing.B, workers int) (*drain, *Lane, *waypostv1.ConnectRequest) {
	d := &drain{}
	srv, err := NewServer(ServerOptions{Handler: d, InsecureLoopback: true, Hello: func() *waypostv1.CoordinatorHello { return &waypostv1.CoordinatorHello{Name: new("c")} }})
	if err != nil {
		b.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	gs := grpc.NewServer(srv.GRPCOptions()...)
	srv.Register(gs)
	go gs.Serve(ln)
	load := &waypostv1.Load{AgentProcess: new(uint64(1)), LoadSeq: new(uint64(1))}
	for i := range workers {
		load.Workers = append(load.Workers, &waypostv1.WorkerLoad{Index: new(uint32(i)), EngineProcess: new(uint64(9)), State: new("ready"), AgeMs: new(3.5),
			QueueMs: new(120.0), OpenTokens: new(uint32(2048)), Decoding: new(uint32(12)), ContextTokens: new(90000.0), GapMs: new(21.0), Live: new(uint32(14)),
			HeldBlocks: new(5000.0), Running: new(uint32(13)), Waiting: new(uint32(1)), KvUsedRatio: new(0.4), FinishPerSec: new(2.5)})
	}
	dialer, err := NewDialer(DialerOptions{Handler: nobody{}, Hello: func() *waypostv1.AgentHello {
		return &waypostv1.AgentHello{Host: new("h"), AgentProcess: new(uint64(1))}
	},
		Load: func(*Lane) *waypostv1.Load { return nil }, LoadEvery: time.Hour})
	if err != nil {
		b.Fatal(err)
	}
	dialer.SetAddresses(FromConfig, []string{ln.Addr().String()})
	dialer.Start()
	b.Cleanup(func() { dialer.Close(); srv.Close(); gs.Stop() })
	for len(dialer.Lanes()) == 0 {
		time.Sleep(time.Millisecond)
	}
	return d, dialer.Lanes()[0], &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Load{Load: load}}
}

// BenchmarkLoadFrame sends LOADs of 8 workers over a real socket, one after the other.
func BenchmarkLoadFrame(b *testing.B) {
	d, l, f := benchLane(b, 8)
	b.ReportAllocs()
	for b.Loop() {
		if err := l.out.pushWait(context.Background(), f); err != nil {
			b.Fatal(err)
		}
	}
	want := int64(b.N)
	for d.frames.Load() < want {
		time.Sleep(time.Millisecond)
	}
}

func FuzzHello(f *testing.F) {
	f.Add([]byte{}, "gpu-01")
	f.Add([]byte("\x0a\x06gpu-01"), "")
	f.Fuzz(func(t *testing.T, data []byte, certName string) {
		frame := &waypostv1.ConnectRequest{}
		if err := proto.Unmarshal(data, frame); err != nil {
			return
		}
		kindOf(frame)
		addLateness(frame, time.Second)
		if h := frame.GetHello(); h != nil {
			if r := checkHello(h, certName); r == nil && (h.GetHost() == "" || certName != "" && h.GetHost() != certName) {
				t.Fatalf("hello %v accepted under certificate name %q", h, certName)
			}
		}
	})
}
