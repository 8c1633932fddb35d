package kvevents

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginetest"
	"waypost/gossip/nonblock"

	"github.com/tinylib/msgp/msgp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var testDialect = Dialect{Setting: "--kv-events-config", Enable: "--kv-events-config x"}

// follow reads a rank by a plan until the test ends.
func follow(t *testing.T, plan Plan, sink engine.Sink) *Reader {
	t.Helper()
	return followBy(t, plan, sink, nil)
}

// followBy does so by connections that are wrapped.
func followBy(t *testing.T, plan Plan, sink engine.Sink, wrap func(net.Conn) net.Conn) *Reader {
	t.Helper()
	r := NewReader(ReaderOptions{
		Plan: plan, Wrap: wrap, Host: enginetest.Host, Dialect: &testDialect, Stream: StreamOptions{RetryMin: 50 * time.Millisecond}, Logger: slog.New(slog.DiscardHandler), Sink: sink,
	})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { r.Run(ctx) })
	wg.Go(func() {
		for ctx.Err() == nil {
			r.Tick(time.Now())
			sleep(ctx, 20*time.Millisecond)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return r
}

func publisherFor(t *testing.T) *enginetest.Publisher {
	t.Helper()
	p := enginetest.NewPublisher(t)
	t.Cleanup(p.Close)
	return p
}

func dialled(p *enginetest.Publisher) Plan {
	return Plan{Events: fmt.Sprintf("tcp://%s:%d", enginetest.Host, p.Port()), Replay: fmt.Sprintf("tcp://%s:%d", enginetest.Host, p.ReplayPort())}
}

// Two publishers that connect to one socket have numbers of their own each:
// together they would look like an engine that restarts with every batch.
func TestSecondPublisherIsIgnored(t *testing.T) {
	address := enginetest.FreeAddress(t)
	m := enginetest.NewMirror(t)
	follow(t, Plan{Events: "tcp://" + address, Listen: true}, m)
	first, second := publisherFor(t), publisherFor(t)
	c := first.Dial(address)
	first.AwaitSubscriber()
	first.Publish(false, enginetest.Stored(0, 1))
	m.Await("the first", func() bool { return m.Of(0).Match(1) == 2 })
	second.Dial(address)
	second.AwaitSubscriber()
	second.Publish(false, enginetest.Stored(0, 5))
	m.Await("the second is seen", func() bool { return m.Of(0).Counts[CountForeign] == 1 })
	first.Publish(false, enginetest.Stored(1, 2))
	m.Await("the first goes on", func() bool { r := m.Of(0); return r.Match(1, 2) == 4 && r.Match(5) == 0 && len(r.Resets) == 0 })
	// When the first is gone, the other one is an engine in its place.
	c.Close()
	m.Await("disconnected", func() bool { return m.Of(0).Hint == hintDisconnected })
	second.SetNext(0)
	second.Publish(false, enginetest.Stored(0, 6))
	m.Await("the second", func() bool { r := m.Of(0); return r.Match(6) == 2 && r.Match(1) == 0 })
}

// Events are read by the connections that the agent has for them, here one that is
// read on ticks, whichever side opens it: none is lost, and the end of one is seen.
func TestEventsComeByTheWrappedConnection(t *testing.T) {
	k, err := nonblock.NewCoalescer(nonblock.CoalescerOptions{BeginReadsPerSec: 1})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	for _, listens := range []bool{false, true} {
		p, m := publisherFor(t), enginetest.NewMirror(t)
		plan, address := dialled(p), enginetest.FreeAddress(t)
		if listens {
			plan = Plan{Events: "tcp://" + address, Listen: true}
		}
		var wrapped atomic.Int32
		followBy(t, plan, m, func(c net.Conn) net.Conn {
			wrapped.Add(1)
			return k.Conn(c)
		})
		end := p.Cut
		if listens {
			c := p.Dial(address)
			end = func() { c.Close() }
		}
		p.AwaitSubscriber()
		const batches = 300
		for n := range batches {
			p.Publish(false, enginetest.Stored(0, 1000+n))
			if n%10 == 0 {
				time.Sleep(10 * time.Millisecond) // so that there are reads to wait with
			}
		}
		m.Await("all batches", func() bool {
			for n := range batches {
				if m.Of(0).Match(1000+n) == 0 {
					return false
				}
			}
			return true
		})
		if !k.Ticking() {
			t.Error("no read has waited for a tick")
		}
		if n := wrapped.Load(); n != 1 {
			t.Errorf("%d connections were wrapped, want 1", n)
		}
		if r := m.Of(0); r.Counts[CountLost]+r.Counts[CountMissing] > 0 {
			t.Errorf("counted %v", r.Counts)
		}
		end()
		m.Await("seen to end", func() bool { return m.Of(0).Hint == hintDisconnected })
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// An engine that lies about where it publishes sends the agent nowhere.
func TestEndpointOnAnotherHostIsRefused(t *testing.T) {
	m := enginetest.NewMirror(t)
	p := publisherFor(t)
	plan := dialled(p)
	plan.Events, plan.EventsTold = "tcp://192.0.2.1:5557", true
	follow(t, plan, m)
	m.Await("said", func() bool {
		return m.Of(0).Coverage == engine.CoverageNone && strings.Contains(m.Of(0).Hint, "192.0.2.1:5557") && strings.Contains(m.Of(0).Hint, "kv_events")
	})
	// What the operator configured may be anywhere, and the engine's own host is
	// this one.
	for _, fine := range []Plan{dialled(p), {Events: dialled(p).Events, EventsTold: true, Replay: dialled(p).Replay, ReplayTold: true}} {
		m := enginetest.NewMirror(t)
		follow(t, fine, m)
		m.Await("read", func() bool { return m.Of(0).Coverage == engine.CoverageFull })
	}
}

// A replay socket on another host is not asked; live events count without it.
func TestReplayOnAnotherHostIsRefused(t *testing.T) {
	m := enginetest.NewMirror(t)
	p := publisherFor(t)
	plan := dialled(p)
	plan.Replay, plan.ReplayTold = "tcp://192.0.2.1:5657", true
	follow(t, plan, m)
	p.AwaitSubscriber()
	m.Await("the replay fails", func() bool { return m.Of(0).Counts[CountReplayFailed] >= triesBeforeGoingOn })
	p.Publish(false, enginetest.Stored(0, 1))
	m.Await("live", func() bool { return m.Of(0).Match(1) == 2 && m.Of(0).Coverage == engine.CoveragePartial })
}

// Rank 0 is not credited with what another rank holds.
func TestWrongRank(t *testing.T) {
	m := enginetest.NewMirror(t)
	p := publisherFor(t)
	plan := dialled(p)
	plan.Others = []int{1, 2}
	follow(t, plan, m)
	p.AwaitSubscriber()
	m.Await("connected", func() bool { return m.Of(0).Coverage == engine.CoverageFull })
	p.SetRank(2)
	p.Publish(false, enginetest.Stored(0, 1))
	m.Await("refused", func() bool {
		r := m.Of(0)
		return r.Counts[CountWrongRank] == 1 && r.Match(1) == 0 && r.Coverage == engine.CoverageNone && strings.Contains(r.Hint, "rank 2")
	})
	p.SetRank(7) // a number that is nobody's says nothing
	p.Publish(false, enginetest.Stored(0, 2))
	m.Await("taken", func() bool { return m.Of(0).Match(2) == 2 && m.Of(0).Coverage == engine.CoverageFull })
}

// IDN-06: a port that another process has taken is named, and used once it is
// free.
func TestIDN06TakenPort(t *testing.T) {
	ln, err := net.Listen("tcp", enginetest.FreeAddress(t))
	if err != nil {
		t.Fatal(err)
	}
	address := ln.Addr().String()
	m := enginetest.NewMirror(t)
	follow(t, Plan{Events: "tcp://" + address, Listen: true}, m)
	m.Await("named", func() bool {
		return m.Of(0).Coverage == engine.CoverageNone && strings.Contains(m.Of(0).Hint, address) && strings.Contains(m.Of(0).Hint, "another process")
	})
	ln.Close()
	p := publisherFor(t)
	p.Dial(address)
	p.AwaitSubscriber()
	p.Publish(false, enginetest.Stored(0, 1))
	m.Await("used", func() bool { return m.Of(0).Match(1) == 2 })
}

// IDN-11: messages with the wrong number of frames between good ones are
// counted; several in a row are an unknown format.
func TestIDN11OddMessages(t *testing.T) {
	m := enginetest.NewMirror(t)
	p := publisherFor(t)
	follow(t, dialled(p), m)
	p.AwaitSubscriber()
	m.Await("connected", func() bool { return m.Of(0).Coverage == engine.CoverageFull })
	number := binary.BigEndian.AppendUint64(nil, 0)
	good := func(h int) { p.Publish(false, enginetest.Stored(0, h)) }
	good(1)
	p.Send()
	p.Send([]byte("topic"))
	good(2)
	p.Send([]byte("topic"), []byte("short"), []byte("x"))
	p.Send([]byte("a"), []byte("b"), []byte("c"), []byte("d"))
	good(3)
	m.Await("the good ones", func() bool {
		r := m.Of(0)
		return r.Match(1) == 2 && r.Match(2) == 2 && r.Match(3) == 2 && r.Coverage == engine.CoverageFull && r.Counts[CountMalformed] >= 3
	})
	for range 3 {
		p.Send(number, []byte("not eight bytes"), nil)
	}
	m.Await("said", func() bool { return m.Of(0).Coverage == engine.CoveragePartial && m.Of(0).Hint == hintFormat })
	good(4)
	m.Await("forgiven", func() bool { return m.Of(0).Match(4) == 2 && m.Of(0).Coverage == engine.CoverageFull })
}

// A clock that lies makes a batch neither old nor of the future.
func TestAgeOfABatch(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	for _, test := range []struct {
		published float64
		replayed  bool
		want      time.Duration
	}{
		{1_699_999_999.5, false, 500 * time.Millisecond},
		{1_699_996_400, true, time.Hour},
		{1_699_996_400, false, time.Minute},
		{1, true, 30 * 24 * time.Hour},
		{1_800_000_000, false, 0},
		{0, false, 0},
		{-5, false, 0},
		{math.NaN(), false, 0},
		{math.Inf(1), true, 0},
		{math.Inf(-1), true, 0},
	} {
		if got := age(Message{Received: now, Replayed: test.replayed}, test.published); got.Round(time.Millisecond) != test.want {
			t.Errorf("%v, replayed %v: %v, want %v", test.published, test.replayed, got, test.want)
		}
	}
}

// Work without events is seen: a wrong endpoint looks like a quiet engine.
func TestWorkWithoutEvents(t *testing.T) {
	at := time.Unix(1000, 0)
	n := func(v float64) *float64 { return &v }
	for _, test := range []struct {
		name              string
		computed, prompts float64
		after             time.Duration
		live              bool
		want              bool
	}{
		{"long prompts", 64 * 16, 10, time.Minute, false, true},
		{"prompts shorter than a block", 64 * 16, 100, time.Minute, false, false},
		{"not much yet", 63 * 16, 1, time.Minute, false, false},
		{"events may wait for some steps", 1e6, 10, 5 * time.Second, false, false},
		{"an event came", 1e6, 10, time.Minute, true, false},
	} {
		w := work{blockTokens: 16}
		if w.unheard(&engine.Load{ComputedPromptTokens: n(5), Finished: n(0)}, time.Time{}, at) {
			t.Fatal("the first reading shows work")
		}
		live := time.Time{}
		if test.live {
			live = at.Add(time.Second)
		}
		if got := w.unheard(&engine.Load{ComputedPromptTokens: n(5 + test.computed), Finished: n(test.prompts)}, live, at.Add(test.after)); got != test.want {
			t.Errorf("%s: %v", test.name, got)
		}
	}
	w := work{blockTokens: 16}
	for _, l := range []engine.Load{{}, {Finished: n(1)}, {ComputedPromptTokens: n(1e9), Finished: n(1)}, {ComputedPromptTokens: n(5), Finished: n(0)}, {ComputedPromptTokens: n(1e9)}} {
		if at = at.Add(time.Hour); w.unheard(&l, time.Time{}, at) {
			t.Errorf("%+v: what is not known shows work", l)
		}
	}
}

// What an engine gave up to sleep is not believed when it wakes either, though it was
// read anew meanwhile; what it tells of its first steps is.
func TestAWakingEngineHoldsNothing(t *testing.T) {
	began := time.Now()
	at := func(s int) time.Time { return began.Add(time.Duration(s) * time.Second) }
	for _, told := range []int{2, 4} { // before and after it was last read to sleep
		m := enginetest.NewMirror(t)
		r := NewReader(ReaderOptions{Plan: Plan{Pulled: true}, Dialect: &testDialect, Logger: slog.New(slog.DiscardHandler), Sink: m})
		r.Connected(at(0))
		r.Deliver(Message{Seq: 0, Payload: batch(t, enginetest.Stored(0, 1)), Received: at(0)})
		load := func(s int, asleep bool) { r.Load(engine.Load{Sleeping: &asleep}, at(s)) }
		load(1, false)
		load(2, true)
		load(3, true)
		if got := m.Of(0).Match(1); got != 0 {
			t.Fatalf("%d blocks of an engine that sleeps", got)
		}
		r.Deliver(Message{Seq: 1, Payload: batch(t, enginetest.Stored(0, 2)), Received: at(told)})
		load(5, false)
		load(6, false)
		want := 0
		if told > 3 {
			want = 2
		}
		if got := m.Of(0).Match(2); got != want {
			t.Errorf("told at %d s: %d tokens are there once it is awake, want %d", told, got, want)
		}
	}
}

// A reader tells its stream of clears, but only of those that leave nothing.
func TestClearsAreTold(t *testing.T) {
	clear := []any{"AllBlocksCleared"}
	for _, test := range []struct {
		name   string
		events []any
		want   engine.Coverage
	}{
		{"all of it", []any{clear}, engine.CoverageFull},
		{"of what holds another copy", []any{[]any{"BlockStored", []any{1}, nil, []any{2, 3}, 2, nil, "CPU"}, clear}, engine.CoveragePartial},
	} {
		m := enginetest.NewMirror(t)
		r := NewReader(ReaderOptions{Plan: Plan{Pulled: true}, Dialect: &testDialect, Logger: slog.New(slog.DiscardHandler), Sink: m})
		r.Connected(time.Now())
		r.Deliver(Message{Seq: 7, Payload: batch(t, block(0, 1)), Received: time.Now()})
		r.Deliver(Message{Seq: 8, Payload: batch(t, test.events...), Received: time.Now()})
		m.Mu.Lock()
		if got := m.Of(0).Coverage; got != test.want {
			t.Errorf("%s: %s (%s), want %s", test.name, got, m.Of(0).Hint, test.want)
		}
		m.Mu.Unlock()
	}
}

func batch(t *testing.T, events ...any) []byte {
	t.Helper()
	payload, err := msgp.AppendIntf(nil, []any{1.5, events, 0})
	if err != nil {
		t.Fatal(err)
	}
	return payload
}
