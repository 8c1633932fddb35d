package lane

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"waypost/gossip/nonblock"
	waypostv1 "waypost/proto/waypost/v1"
)

// fakeStream takes frames and reports them written, at once or never.
type fakeStream struct {
	track  *tracker
	stuck  atomic.Bool // frames stay inside the transport
	loads  atomic.Int64
	others atomic.Int64
	last   atomic.Pointer[waypostv1.ConnectRequest]
}

func (s *fakeStream) Send(f *waypostv1.ConnectRequest) error {
	isLoad := f.GetLoad() != nil
	s.track.begin(100, isLoad)
	if isLoad {
		s.loads.Add(1)
	} else {
		s.others.Add(1)
	}
	s.last.Store(f)
	if !s.stuck.Load() {
		s.track.end(100)
	}
	return nil
}

// paced runs the writer of a lane against a fake stream in virtual time.
func paced(t *testing.T, load func(*Lane) *waypostv1.Load, test func(*Lane, *fakeStream)) {
	synctest.Test(t, func(t *testing.T) {
		d, err := NewDialer(DialerOptions{Load: load, Handler: nobody{}, Hello: func() *waypostv1.AgentHello { return &waypostv1.AgentHello{Host: new("h")} }})
		if err != nil {
			t.Fatal(err)
		}
		l := d.open("test")
		s := &fakeStream{track: l.track}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- l.write(ctx, s) }()
		test(l, s)
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("writer ended with %v", err)
		}
	})
}

type nobody struct{}

func (nobody) LaneUp(*Lane)                            {}
func (nobody) Frame(*Lane, *waypostv1.ConnectResponse) {}
func (nobody) LaneDown(*Lane, error)                   {}

func someLoad(*Lane) *waypostv1.Load { return &waypostv1.Load{} }

func TestLoadEvery200ms(t *testing.T) {
	paced(t, someLoad, func(l *Lane, s *fakeStream) {
		time.Sleep(10*time.Second + time.Millisecond)
		if n := s.loads.Load(); n != 51 { // at once and 50 times after
			t.Errorf("%d LOADs in 10 s, want 51", n)
		}
	})
}

func TestKickSendsAtOnceButNotMoreThanOncePer20ms(t *testing.T) {
	paced(t, someLoad, func(l *Lane, s *fakeStream) {
		time.Sleep(100 * time.Millisecond)
		l.Kick()
		synctest.Wait()
		if n := s.loads.Load(); n != 2 {
			t.Errorf("%d LOADs right after a kick, want 2", n)
		}
		time.Sleep(199 * time.Millisecond) // the period starts anew
		if n := s.loads.Load(); n != 2 {
			t.Errorf("%d LOADs 199 ms after a kick, want 2", n)
		}
		time.Sleep(time.Second)
		before := s.loads.Load()
		for range 1000 { // a kick per ms for a second
			l.Kick()
			time.Sleep(time.Millisecond)
		}
		if n := s.loads.Load() - before; n < 49 || n > 51 {
			t.Errorf("%d LOADs during a second of kicks, want 50", n)
		}
	})
}

// News of some workers goes out at once, no more often than any LOAD, and leaves
// the period of the LOADs that tell of all as it is.
func TestNewsBetweenLoads(t *testing.T) {
	var news atomic.Int64
	paced(t, someLoad, func(l *Lane, s *fakeStream) {
		whole := func() int64 { return s.loads.Load() - news.Load() }
		l.d.opts.News = func(*Lane) *waypostv1.Load { news.Add(1); return &waypostv1.Load{} }
		synctest.Wait()
		for range 2000 { // news every ms for two seconds
			l.KickNews()
			time.Sleep(time.Millisecond)
		}
		if n := whole(); n < 10 || n > 11 {
			t.Errorf("%d LOADs of all workers in two seconds of news, want one each 200 ms", n)
		}
		if n := s.loads.Load(); n < 90 || n > 101 {
			t.Errorf("%d LOADs in two seconds of news, want one each 20 ms", n)
		}
		// Counted between two LOADs: at one moment, nobody says who comes first.
		time.Sleep(time.Second)
		for n := s.loads.Load(); s.loads.Load() == n; {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(100*time.Millisecond + 500*time.Microsecond)
		before, told := whole(), news.Load()
		time.Sleep(time.Second)
		if n := whole() - before; n != 5 || news.Load() != told {
			t.Errorf("%d LOADs of all workers and %d of news in a second without any", n, news.Load()-told)
		}
		l.KickNews()
		l.Kick()
		synctest.Wait()
		if n := whole() - before; n != 6 || news.Load() != told {
			t.Errorf("a kick beside news: %d LOADs of all workers, %d of news", n-5, news.Load()-told)
		}
		// Nothing that was left out is told later, and nothing twice.
		l.d.opts.News = func(*Lane) *waypostv1.Load { news.Add(1); return nil }
		sent := s.loads.Load()
		time.Sleep(50 * time.Millisecond)
		l.KickNews()
		synctest.Wait()
		if s.loads.Load() != sent || news.Load() != told+1 {
			t.Errorf("%d LOADs sent where there was no news, asked %d times", s.loads.Load()-sent, news.Load()-told)
		}
	})
}

func TestLoadIsNeverQueued(t *testing.T) {
	var built atomic.Int64
	load := func(*Lane) *waypostv1.Load { built.Add(1); return &waypostv1.Load{LoadSeq: new(uint64(built.Load()))} }
	paced(t, load, func(l *Lane, s *fakeStream) {
		time.Sleep(time.Second)
		s.stuck.Store(true)
		time.Sleep(10 * time.Second)
		stuckAt := built.Load()
		if n := s.loads.Load(); n != stuckAt || n > 8 {
			t.Errorf("%d LOADs built and %d handed over while the socket takes nothing", stuckAt, n)
		}
		if d := l.track.stalledFor(time.Now()); d < 9*time.Second {
			t.Errorf("stalled for %v by the tracker, want about 10 s", d)
		}
		// When the socket takes the old one, a new one is built at once.
		s.stuck.Store(false)
		l.track.end(100)
		synctest.Wait()
		if n := built.Load(); n != stuckAt+1 {
			t.Errorf("%d LOADs built when the socket is free, want %d", n, stuckAt+1)
		}
		if d := l.track.stalledFor(time.Now()); d != 0 {
			t.Errorf("still stalled for %v", d)
		}
	})
}

func TestNoLoadYetIsAskedAgain(t *testing.T) {
	var asked atomic.Int64
	paced(t, func(*Lane) *waypostv1.Load { asked.Add(1); return nil }, func(l *Lane, s *fakeStream) {
		time.Sleep(2*time.Second + time.Millisecond)
		if n := asked.Load(); n != 11 {
			t.Errorf("asked %d times in 2 s, want 11", n)
		}
		if n := s.loads.Load(); n != 0 {
			t.Errorf("%d LOADs sent", n)
		}
	})
}

func TestQueueDoesNotDelayLoad(t *testing.T) {
	paced(t, someLoad, func(l *Lane, s *fakeStream) {
		frame := func() *waypostv1.ConnectRequest {
			return &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Host{Host: &waypostv1.HostReport{}}}
		}
		for range 100 {
			for range 10 {
				if err := l.SendWait(t.Context(), frame()); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(10 * time.Millisecond)
		}
		if n := s.others.Load(); n != 1000 {
			t.Errorf("%d frames sent, want 1000", n)
		}
		if n := s.loads.Load(); n < 5 || n > 7 {
			t.Errorf("%d LOADs in a second beside them, want 6", n)
		}
	})
}

func TestHelloChangedIsBuiltWhenWritten(t *testing.T) {
	paced(t, func(*Lane) *waypostv1.Load { return nil }, func(l *Lane, s *fakeStream) {
		l.d.up["c"] = l
		l.d.HelloChanged()
		l.d.HelloChanged()
		synctest.Wait()
		if n := s.others.Load(); n < 1 || n > 2 {
			t.Errorf("%d hellos sent", n)
		}
		if h := s.last.Load().GetHello(); h.GetHost() != "h" || h.GetSession() != l.Session() || h.GetProtocol() != Protocol {
			t.Errorf("hello sent: %v", h)
		}
	})
}

func TestStallGrantsTimeForBigFrames(t *testing.T) {
	tr := newTracker()
	tr.begin(4*writtenBytesPerSec, false)
	began := time.Now()
	if d := tr.stalledFor(began.Add(3 * time.Second)); d != 0 {
		t.Errorf("4 MiB on its way for 3 s counts as stalled for %v", d)
	}
	if d := tr.stalledFor(began.Add(7 * time.Second)); d < 2*time.Second {
		t.Errorf("4 MiB on its way for 7 s counts as stalled for %v, want 3 s", d)
	}
}

func TestOutboxBounds(t *testing.T) {
	o := newOutbox[*waypostv1.ConnectRequest]()
	frame := func(n int) *waypostv1.ConnectRequest {
		return &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Prefixes{Prefixes: &waypostv1.PrefixFrames{Frames: [][]byte{make([]byte, n)}}}}
	}
	if err := o.push(frame(MaxMessageBytes)); !errors.Is(err, ErrTooBig) {
		t.Errorf("push of %d bytes: %v", MaxMessageBytes, err)
	}
	for i := range 2 {
		if err := o.push(frame(outboxBytes/2 - 100)); err != nil {
			t.Fatalf("push %d: %v", i, err)
		}
	}
	if err := o.push(frame(1000)); !errors.Is(err, ErrQueueFull) {
		t.Errorf("push beyond the bytes: %v", err)
	}
	o.pop()
	o.pop()
	if _, ok := o.pop(); ok || o.bytes != 0 {
		t.Errorf("after taking all: %v, %d bytes", ok, o.bytes)
	}
	for range outboxFrames {
		if err := o.push(frame(1)); err != nil {
			t.Fatal(err)
		}
	}
	if err := o.push(frame(1)); !errors.Is(err, ErrQueueFull) {
		t.Errorf("push beyond the count: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := o.pushWait(ctx, frame(1)); !errors.Is(err, ErrQueueFull) || !errors.Is(err, context.Canceled) {
		t.Errorf("pushWait of a cancelled caller: %v", err)
	}
	got := make(chan error, 3)
	for range 3 {
		go func() { got <- o.pushWait(t.Context(), frame(1)) }()
	}
	for range 3 {
		o.pop()
	}
	for range 3 {
		if err := <-got; err != nil {
			t.Errorf("waiting push: %v", err)
		}
	}
	go func() { got <- o.pushWait(t.Context(), frame(1)) }()
	o.close()
	if err := <-got; !errors.Is(err, ErrLaneDown) {
		t.Errorf("push on a closed queue: %v", err)
	}
}

func TestBackoffGrowsWithJitterAndBound(t *testing.T) {
	b := backoff{least: 100 * time.Millisecond, most: 5 * time.Second}
	rng := newRand()
	want := 100 * time.Millisecond
	for i := range 12 {
		if p := b.pause(rng); p < want/2 || p > want {
			t.Errorf("pause %d is %v, want %v to %v", i, p, want/2, want)
		}
		want = min(2*want, 5*time.Second)
	}
	b.reset()
	if p := b.pause(rng); p > 100*time.Millisecond {
		t.Errorf("pause after a reset is %v", p)
	}
}

// A lane that is read on ticks loses no frame and keeps their order, its LOADs go
// on, and its end is seen.
func TestLaneOnTicks(t *testing.T) {
	k, err := nonblock.NewCoalescer(nonblock.CoalescerOptions{BeginReadsPerSec: 1})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	p := newPKI(t)
	c := startCoordinator(t, coordinatorOptions{tls: p.server("coordinator-c-1")})
	a := startAgent(t, agentOptions{tls: p.client("agent-gpu-01"), edit: func(o *DialerOptions) { o.Coalescer = k }}, c.addr)
	a.lane()
	eventually(t, "the coordinator's lane", func() bool { _, ok := c.srv.Session("gpu-01"); return ok })
	s, _ := c.srv.Session("gpu-01")
	const frames = 500
	for n := range frames {
		eventually(t, "room in the queue", func() bool {
			return s.Send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Tokenize{Tokenize: &waypostv1.TokenizeAsk{AskId: new(uint32(n))}}}) == nil
		})
		if n%10 == 0 {
			time.Sleep(10 * time.Millisecond) // so that there are reads to wait with
		}
	}
	eventually(t, "all frames", func() bool { a.mu.Lock(); defer a.mu.Unlock(); return len(a.frames) == frames })
	if !k.Ticking() {
		t.Error("no read has waited for a tick")
	}
	for n, f := range a.frames {
		if got := f.GetTokenize().GetAskId(); got != uint32(n) {
			t.Fatalf("frame %d is number %d", n, got)
		}
	}
	loads := c.count("gpu-01 load")
	eventually(t, "more LOADs", func() bool { return c.count("gpu-01 load") >= loads+10 })
	c.stop()
	eventually(t, "the end", func() bool { a.mu.Lock(); defer a.mu.Unlock(); return len(a.downs) == 1 })
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
