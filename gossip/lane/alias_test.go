package lane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	waypostv1 "waypost/proto/waypost/v1"
)

// lineNet carries connections in virtual time: what is written on one arrives
// after a delay that is drawn per connection and direction.
type lineNet struct {
	mu      sync.Mutex
	rng     *rand.Rand
	most    time.Duration // of a delay
	accepts map[string]chan net.Conn
	dials   map[string]int
}

func newLineNet(seed uint64, most time.Duration) *lineNet {
	return &lineNet{rng: rand.New(rand.NewPCG(seed, 0)), most: most, accepts: map[string]chan net.Conn{}, dials: map[string]int{}}
}

func (n *lineNet) delay() time.Duration {
	return time.Duration(n.rng.Int64N(int64(n.most) + 1))
}

// listen returns a listener that all the addresses lead to.
func (n *lineNet) listen(addresses ...string) *lineListener {
	l := &lineListener{conns: make(chan net.Conn), closed: make(chan struct{})}
	for _, a := range addresses {
		n.accepts[a] = l.conns
	}
	return l
}

func (n *lineNet) dial(ctx context.Context, address string) (net.Conn, error) {
	n.mu.Lock()
	n.dials[address]++
	there, back := n.delay(), n.delay()
	n.mu.Unlock()
	a, b := net.Pipe()
	select {
	case n.accepts[address] <- newLine(b, back):
		return newLine(a, there), nil
	case <-ctx.Done():
		a.Close()
		b.Close()
		return nil, ctx.Err()
	}
}

type lineListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *lineListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}
func (l *lineListener) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *lineListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 7711} }

// line is a connection whose writes arrive late, in order.
type line struct {
	net.Conn
	delay time.Duration
	mu    sync.Mutex
	queue []packet
	ready chan struct{}
	ended chan struct{}
	once  sync.Once
}

type packet struct {
	at   time.Time
	data []byte
}

func newLine(c net.Conn, delay time.Duration) *line {
	l := &line{Conn: c, delay: delay, ready: make(chan struct{}, 1), ended: make(chan struct{})}
	go l.carry()
	return l
}

func (l *line) Write(p []byte) (int, error) {
	select {
	case <-l.ended:
		return 0, io.ErrClosedPipe
	default:
	}
	l.mu.Lock()
	l.queue = append(l.queue, packet{time.Now().Add(l.delay), slices.Clone(p)})
	l.mu.Unlock()
	signal(l.ready)
	return len(p), nil
}

func (l *line) carry() {
	for {
		l.mu.Lock()
		var next packet
		if len(l.queue) > 0 {
			next, l.queue = l.queue[0], l.queue[1:]
		}
		l.mu.Unlock()
		if next.data == nil {
			select {
			case <-l.ready:
				continue
			case <-l.ended:
				return
			}
		}
		time.Sleep(time.Until(next.at))
		if _, err := l.Conn.Write(next.data); err != nil {
			return
		}
	}
}

func (l *line) Close() error {
	l.once.Do(func() { close(l.ended) })
	return l.Conn.Close()
}

func (l *line) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

// virtualAgent dials the addresses over the net, with the default times.
func virtualAgent(t *testing.T, n *lineNet, addresses ...string) *agent {
	t.Helper()
	a := &agent{t: t}
	d, err := NewDialer(DialerOptions{
		Handler: a,
		Hello: func() *waypostv1.AgentHello {
			return &waypostv1.AgentHello{Host: new("gpu-01"), AgentProcess: new(uint64(0xa1)), Version: new("test")}
		},
		Load: func(*Lane) *waypostv1.Load { return &waypostv1.Load{LoadSeq: new(uint64(a.loads.Add(1)))} },
	})
	if err != nil {
		t.Fatal(err)
	}
	a.d = d
	d.dial = n.dial
	if err := d.SetAddresses(FromConfig, addresses); err != nil {
		t.Fatal(err)
	}
	d.Start()
	return a
}

func (a *agent) states() string {
	var words []string
	for _, s := range a.d.Status() {
		words = append(words, string(s.State))
	}
	slices.Sort(words)
	return strings.Join(words, " ")
}

// Whatever the order in which hellos and answers of the addresses of one
// coordinator arrive, the first lane that it takes is the only one, and when that
// one ends another takes its place, once.
func TestAddressesOfOneCoordinatorDoNotFlap(t *testing.T) {
	addresses := []string{"127.0.0.1:7711", "localhost:7711", "[::1]:7711"}
	firsts := map[string]int{}
	seeds := uint64(40)
	if testing.Short() {
		seeds = 12
	}
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) {
			n := newLineNet(seed, 1200*time.Millisecond) // beyond every pause of the first dials
			c := &coordinator{t: t, frames: map[string]int{}, last: map[string]*waypostv1.ConnectRequest{}}
			srv, err := NewServer(ServerOptions{Handler: c, InsecureLoopback: true, Hello: func() *waypostv1.CoordinatorHello {
				return &waypostv1.CoordinatorHello{Name: new("c-1"), CoordinatorProcess: new(uint64(0xc1))}
			}})
			if err != nil {
				t.Fatal(err)
			}
			gs := grpc.NewServer(srv.GRPCOptions()...)
			srv.Register(gs)
			l := n.listen(addresses...)
			go gs.Serve(l)
			a := virtualAgent(t, n, addresses...)
			defer func() {
				a.d.Close()
				srv.Close()
				gs.Stop()
				time.Sleep(time.Minute) // what was under way arrives
			}()

			time.Sleep(time.Minute)
			if got, want := c.events(), "up gpu-01"; got != want || a.upCount() != 1 {
				t.Fatalf("seed %d: %d lanes up at the agent, the coordinator saw %s, want one and %s", seed, a.upCount(), got, want)
			}
			if got := a.states(); got != "alias alias up" {
				t.Fatalf("seed %d: addresses are %s", seed, got)
			}
			for _, s := range a.d.Status() {
				if s.Coordinator != "c-1" {
					t.Errorf("seed %d: %s is %s of coordinator %q, want c-1", seed, s.Address, s.State, s.Coordinator)
				}
			}
			firsts[a.d.Lanes()[0].Address()]++

			s, _ := srv.Session("gpu-01")
			s.Close(errors.New("test"))
			time.Sleep(time.Minute)
			if got, want := c.events(), "up gpu-01, down gpu-01, up gpu-01"; got != want || a.upCount() != 2 {
				t.Fatalf("seed %d: after the lane ended %d lanes up at the agent, the coordinator saw %s, want two and %s", seed, a.upCount(), got, want)
			}
		})
	}
	if len(firsts) < 2 {
		t.Errorf("the same address was first in all orders: %v", firsts)
	}
}

// scripted is a coordinator that answers as a test tells it to.
type scripted struct {
	waypostv1.UnimplementedLaneServiceServer
	hellos chan *scriptedLane
}

type scriptedLane struct {
	hello  *waypostv1.AgentHello
	answer chan *waypostv1.CoordinatorHello
	end    chan error
}

func (s *scripted) Connect(stream waypostv1.LaneService_ConnectServer) error {
	f, err := stream.Recv()
	if err != nil {
		return err
	}
	l := &scriptedLane{f.GetHello(), make(chan *waypostv1.CoordinatorHello, 1), make(chan error, 1)}
	select {
	case s.hellos <- l:
	case <-stream.Context().Done():
		return stream.Context().Err()
	}
	for {
		select {
		case h := <-l.answer:
			if err := stream.Send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Hello{Hello: h}}); err != nil {
				return err
			}
		case err := <-l.end:
			return err
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// A coordinator took the newer lane after it had greeted the older one, and the
// older greeting is read last: the newer lane, which is the one there is, stays.
func TestLateGreetingOfAnOlderLane(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newLineNet(1, 0)
		s := &scripted{hellos: make(chan *scriptedLane)}
		gs := grpc.NewServer()
		waypostv1.RegisterLaneServiceServer(gs, s)
		l := n.listen("127.0.0.1:1", "127.0.0.1:2")
		go gs.Serve(l)
		a := virtualAgent(t, n, "127.0.0.1:1", "127.0.0.1:2")
		defer func() { a.d.Close(); gs.Stop() }()
		older, newer := <-s.hellos, <-s.hellos
		if older.hello.GetSession() > newer.hello.GetSession() {
			older, newer = newer, older
		}
		if got := newer.hello.GetOpenSessions(); !slices.Equal(got, []uint64{older.hello.GetSession()}) {
			t.Errorf("session %d names the open sessions %v, want %d", newer.hello.GetSession(), got, older.hello.GetSession())
		}
		greeting := &waypostv1.CoordinatorHello{Name: new("c-1")}
		newer.answer <- greeting
		synctest.Wait()
		older.answer <- greeting
		synctest.Wait()
		older.end <- status.Error(codes.Aborted, "replaced")
		time.Sleep(time.Minute)
		if got := a.states(); got != "alias up" || a.upCount() != 1 || a.d.Lanes()[0].Session() != newer.hello.GetSession() {
			t.Errorf("addresses are %s after %d lanes up", got, a.upCount())
		}
	})
}

// A newer lane takes the place of an older one that its coordinator has not ended,
// as when the order of both is lost on the way: one lane is left.
func TestNewerLaneEndsTheOlder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newLineNet(1, 0)
		s := &scripted{hellos: make(chan *scriptedLane)}
		gs := grpc.NewServer()
		waypostv1.RegisterLaneServiceServer(gs, s)
		l := n.listen("127.0.0.1:1", "127.0.0.1:2")
		go gs.Serve(l)
		a := virtualAgent(t, n, "127.0.0.1:1", "127.0.0.1:2")
		defer func() { a.d.Close(); gs.Stop() }()
		older, newer := <-s.hellos, <-s.hellos
		if older.hello.GetSession() > newer.hello.GetSession() {
			older, newer = newer, older
		}
		older.answer <- &waypostv1.CoordinatorHello{Name: new("c-1")}
		synctest.Wait()
		newer.answer <- &waypostv1.CoordinatorHello{Name: new("c-1")}
		time.Sleep(time.Minute)
		if got := a.states(); got != "alias up" || a.upCount() != 2 || len(a.d.Lanes()) != 1 || a.d.Lanes()[0].Session() != newer.hello.GetSession() {
			t.Errorf("addresses are %s after %d lanes up", got, a.upCount())
		}
	})
}

// A coordinator that always prefers another lane of this host is dialled again at
// a slow pace.
func TestReplacedLanesAreDialledSlowly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newLineNet(1, 0)
		s := &scripted{hellos: make(chan *scriptedLane)}
		gs := grpc.NewServer()
		waypostv1.RegisterLaneServiceServer(gs, s)
		l := n.listen("127.0.0.1:1")
		go gs.Serve(l)
		a := virtualAgent(t, n, "127.0.0.1:1")
		defer func() { a.d.Close(); gs.Stop() }()
		const most = int(time.Minute/(aliasPause/2)) + 1
		asked := 0
		for over := time.After(time.Minute); asked <= most; {
			select {
			case c := <-s.hellos:
				asked++
				c.end <- status.Error(codes.Aborted, "replaced")
				continue
			case <-over:
			}
			break
		}
		if asked < 30 || asked > most {
			t.Errorf("%d lanes in a minute, want 30 to %d", asked, most)
		}
	})
}

// An address that is told of a lane that is not up here yet waits for it and
// does not dial again; if the lane fails after all, it does.
func TestAliasWaitsForALaneThatIsNotUpYet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newLineNet(1, 0)
		s := &scripted{hellos: make(chan *scriptedLane)}
		gs := grpc.NewServer()
		waypostv1.RegisterLaneServiceServer(gs, s)
		l := n.listen("127.0.0.1:1", "127.0.0.1:2")
		go gs.Serve(l)
		a := virtualAgent(t, n, "127.0.0.1:1", "127.0.0.1:2")
		defer func() { a.d.Close(); gs.Stop() }()
		first, second := <-s.hellos, <-s.hellos
		second.answer <- &waypostv1.CoordinatorHello{Name: new("c-1"), Refused: new("another is up"), SessionUp: new(first.hello.GetSession())}
		time.Sleep(defaultHelloTimeout - time.Second)
		n.mu.Lock()
		if n.dials["127.0.0.1:1"] != 1 || n.dials["127.0.0.1:2"] != 1 {
			t.Errorf("dialled again while the first lane is under way: %v", n.dials)
		}
		n.mu.Unlock()
		if got := a.states(); got != "alias connecting" {
			t.Errorf("addresses are %s", got)
		}
		// The first one's time for an answer runs out.
		for range 2 {
			l := <-s.hellos
			if got := l.hello.GetOpenSessions(); slices.Contains(got, first.hello.GetSession()) {
				t.Errorf("session %d names %v as open, %d has ended", l.hello.GetSession(), got, first.hello.GetSession())
			}
		}
	})
}

func TestLaneHeldOpenStays(t *testing.T) {
	c := startCoordinator(t, coordinatorOptions{})
	conn1, stream1 := rawLane(t, c.addr)
	defer conn1.Close()
	stream1.Send(hello("gpu-01", 1, 5))
	if _, err := stream1.Recv(); err != nil {
		t.Fatal(err)
	}
	for _, session := range []uint64{6, 4} { // a newer one that holds the first open, an older one
		conn, stream := rawLane(t, c.addr)
		defer conn.Close()
		h := hello("gpu-01", 1, session)
		h.GetHello().OpenSessions = []uint64{2, 5}
		stream.Send(h)
		f, err := stream.Recv()
		if err != nil {
			t.Fatalf("session %d: %v", session, err)
		}
		if h := f.GetHello(); h.GetName() != "c-1" || h.GetSessionUp() != 5 || h.GetRefused() == "" {
			t.Fatalf("session %d is told %v", session, h)
		}
		if _, err := stream.Recv(); status.Code(err) != codes.Aborted {
			t.Errorf("session %d ended with %v", session, err)
		}
	}
	// One that is held open no more is replaced, though it looks open.
	conn, stream := rawLane(t, c.addr)
	defer conn.Close()
	h := hello("gpu-01", 1, 7)
	h.GetHello().OpenSessions = []uint64{2, 6}
	stream.Send(h)
	if f, err := stream.Recv(); err != nil || f.GetHello().GetRefused() != "" {
		t.Fatalf("session 7: %v, %v", f, err)
	}
	if _, err := stream1.Recv(); status.Code(err) != codes.Aborted {
		t.Errorf("session 5 ended with %v", err)
	}
	if got := c.events(); got != "up gpu-01, down gpu-01, up gpu-01" {
		t.Errorf("handler saw %s", got)
	}
}

func TestOpenSessionsAreBounded(t *testing.T) {
	d, err := NewDialer(DialerOptions{Load: someLoad, Handler: nobody{}, Hello: func() *waypostv1.AgentHello { return &waypostv1.AgentHello{Host: new("h")} }})
	if err != nil {
		t.Fatal(err)
	}
	for range maxOpenSessions + 10 {
		d.open("test")
	}
	last := d.open("test")
	older := d.openBefore(last.session)
	if len(older) != maxOpenSessions || older[len(older)-1] != last.session-1 || older[0] != 11 {
		t.Errorf("%d sessions told, %d to %d", len(older), older[0], older[len(older)-1])
	}
	h := hello("gpu-01", 1, last.session).GetHello()
	h.OpenSessions = older
	if r := checkHello(h, ""); r != nil {
		t.Error(r)
	}
	h.OpenSessions = append(h.OpenSessions, 1)
	if r := checkHello(h, ""); r == nil || !strings.Contains(r.text, fmt.Sprintf("%d open sessions, at most %d", maxOpenSessions+1, maxOpenSessions)) {
		t.Errorf("too many open sessions: %v", r)
	}
}
