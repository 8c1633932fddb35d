package lane

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

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
	if f, err := stream3.Recv(); err != nil || f.GetHello().GetSessionUp() != 6 {
		t.Fatalf("a lane older than the one that is up is told %v, %v", f, err)
	}
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
	c := startCoordinator(t, coordinatorOptions{edit: func(o *ServerOptions) { o.LiveProof = 300 * time.Millisecond }})
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
	loads := c.count("gpu-01 load")
	eventually(t, "20 more LOADs", func() bool { return c.count("gpu-01 load") > loads+20 })
	if n := a.upCount(); n != 1 || c.events() != "up gpu-01" {
		t.Errorf("%d lanes up at the agent, the coordinator saw %s, want one", n, c.events())
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
	c := startCoordinator(t, coordinatorOptions{})
	hasty := startCoordinator(t, coordinatorOptions{edit: func(o *ServerOptions) { o.HelloTimeout = 150 * time.Millisecond }})
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
			addr := c.addr
			if tt.send == nil {
				addr = hasty.addr
			}
			conn, stream := rawLane(t, addr)
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
	eventually(t, "60 ups and downs", func() bool {
		for _, s := range c.srv.Sessions() {
			s.Close(errors.New("churn"))
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.history) >= 60
	})
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
		load.Workers = append(load.Workers, &waypostv1.WorkerLoad{
			Index: new(uint32(i)), EngineProcess: new(uint64(9)), State: new("ready"), AgeMs: new(3.5),
			QueueMs: new(120.0), OpenTokens: new(uint32(2048)), Decoding: new(uint32(12)), ContextTokens: new(90000.0), GapMs: new(21.0), Live: new(uint32(14)),
			HeldBlocks: new(5000.0), Running: new(uint32(13)), Waiting: new(uint32(1)), KvUsedRatio: new(0.4), FinishPerSec: new(2.5),
		})
	}
	dialer, err := NewDialer(DialerOptions{
		Handler: nobody{}, Hello: func() *waypostv1.AgentHello {
			return &waypostv1.AgentHello{Host: new("h"), AgentProcess: new(uint64(1))}
		},
		Load: func(*Lane) *waypostv1.Load { return nil }, LoadEvery: time.Hour,
	})
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
