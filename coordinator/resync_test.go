package coordinator

import (
	"encoding/binary"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/pull"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// metric is the value of a series of this coordinator; its name may end in the
// values of its labels: name{a,b}. Series that are not there are -1.
func (o *one) metric(tb testing.TB, series string) float64 {
	tb.Helper()
	families, err := o.opt.Gatherer.Gather()
	if err != nil {
		tb.Fatal(err)
	}
	name, labels, _ := strings.Cut(strings.TrimSuffix(series, "}"), "{")
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if strings.Join(values, ",") == labels {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return -1
}

// slowAgent answers pulls frame by frame, when the test says so.
type slowAgent struct {
	fakeAgent
	asks   chan *waypostv1.PrefixPull
	onLane chan *lane.Lane
}

func newSlowAgent(frame func() []byte) *slowAgent {
	a := &slowAgent{fakeAgent: fakeAgent{workers: 1, frame: frame}, asks: make(chan *waypostv1.PrefixPull, 64), onLane: make(chan *lane.Lane, 64)}
	return a
}

// Frame implements lane.AgentHandler.
func (a *slowAgent) Frame(l *lane.Lane, f *waypostv1.ConnectResponse) {
	if p := f.GetPull(); p != nil {
		a.asks <- p
		a.onLane <- l
	}
}

func (a *slowAgent) next(tb testing.TB) (*waypostv1.PrefixPull, *lane.Lane) {
	tb.Helper()
	select {
	case p := <-a.asks:
		return p, <-a.onLane
	case <-time.After(2 * time.Minute):
		tb.Fatal("no pull")
		return nil, nil
	}
}

func answer(tb testing.TB, l *lane.Lane, p *waypostv1.PrefixPull, last bool, frames ...[]byte) {
	tb.Helper()
	err := l.SendWait(tb.Context(), &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Prefixes{Prefixes: &waypostv1.PrefixFrames{
		Index: new(uint32(0)), EngineProcess: new(uint64(100)), Frames: frames, PullId: p.PullId, Last: proto.Bool(last),
	}}})
	if err != nil {
		tb.Fatal(err)
	}
}

// answerUntil answers a pull, and whatever is asked again because the answer came
// late, until something is so.
func (a *slowAgent) answerUntil(tb testing.TB, what string, ok func() bool, l *lane.Lane, p *waypostv1.PrefixPull, frames ...[]byte) {
	tb.Helper()
	answer(tb, l, p, true, frames...)
	eventually(tb, what, func() bool {
		select {
		case p := <-a.asks:
			answer(tb, <-a.onLane, p, true, frames...)
		default:
		}
		return ok()
	})
}

// many adds prompts of two blocks that share nothing.
func (c *cache) many(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for range n {
		c.content += 2
		c.forest.StoreEnded(c.forest.Attach(c.forest.Attach(0, 0, c.content, true), 0, c.content+1, true))
	}
}

// A new stream comes in as a snapshot of many parts: until the last one, and
// when it is swapped in, nothing is lost of what the old stream and the new one
// both hold.
func TestResyncNeverBlinds(t *testing.T) {
	o := startOne(t)
	var now atomic.Pointer[cache]
	first := newCache(1)
	now.Store(first)
	common := first.grow(100)
	first.delta()          // so that its end is a known point
	gone := first.grow(40) // longer
	first.delta()
	var live atomic.Bool // before, a frame could be on its way beside the answer
	a := newSlowAgent(func() []byte {
		if !live.Load() {
			return nil
		}
		return now.Load().delta()
	})
	a.dialSlow(t, o)
	p, l := a.next(t)
	a.answerUntil(t, "the first stream is known", func() bool { return o.held(gone) == len(gone) }, l, p, first.snapshot()...)

	second := newCache(2)
	if again := second.grow(100); fmt.Sprint(again) != fmt.Sprint(common) {
		t.Fatal("the caches do not share a prompt")
	}
	second.many(10000)
	second.delta()
	now.Store(second)
	live.Store(true)
	p, l = a.next(t)
	parts := second.snapshot()
	if len(parts) < 3 {
		t.Fatalf("only %d parts: the test proves little", len(parts))
	}
	for i := 0; i < len(parts); i++ {
		taken := max(0, o.metric(t, "waypost_prefix_frames_total{snapshotting}"))
		answer(t, l, p, i == len(parts)-1, parts[i])
		if i < len(parts)-1 {
			eventually(t, "the part is taken", func() bool {
				if got := o.held(common); got < 1600 {
					t.Fatalf("part %d: %d of 1600 tokens that both sides hold", i, got)
				}
				select {
				case p = <-a.asks: // the answer came late, and is asked for anew
					l, i = <-a.onLane, -1
					return true
				default:
					return o.metric(t, "waypost_prefix_frames_total{snapshotting}") > taken
				}
			})
		}
	}
	eventually(t, "what is gone is known to be", func() bool {
		got := o.held(gone)
		if got < 1600 {
			t.Fatalf("%d of 1600 tokens that both sides hold", got)
		}
		return got == 1600
	})
}

// dialSlow opens the lane with the slow agent as its handler.
func (a *slowAgent) dialSlow(tb testing.TB, o *one) {
	tb.Helper()
	var err error
	a.dialer, err = lane.NewDialer(lane.DialerOptions{Hello: a.hello, Load: a.load, Handler: a, LoadEvery: 20 * time.Millisecond, StallAfter: noStall})
	if err != nil {
		tb.Fatal(err)
	}
	if err := a.dialer.SetAddresses(lane.FromConfig, []string{o.ClusterAddress()}); err != nil {
		tb.Fatal(err)
	}
	a.dialer.Start()
	tb.Cleanup(a.dialer.Close)
}

// otherDigest changes the digest of a delta, which stands after version, kind,
// key id, two bytes of epoch, seq and age.
func otherDigest(tb testing.TB, frame []byte) []byte {
	tb.Helper()
	out := append([]byte(nil), frame...)
	at := 8
	for range 2 {
		_, n := binary.Uvarint(out[at:])
		at += n
	}
	out[at] ^= 1
	return out
}

// A digest that does not fit asks for a snapshot, is counted, and takes nothing
// away until that comes.
func TestDigestMismatchIsPulledAndCounted(t *testing.T) {
	o := startOne(t)
	c := newCache(1)
	tokens := c.grow(100)
	c.delta()
	var damage, live atomic.Bool
	a := newSlowAgent(func() []byte {
		if !live.Load() {
			return nil
		}
		f := c.delta()
		if f != nil && damage.Swap(false) {
			return otherDigest(t, f)
		}
		return f
	})
	a.dialSlow(t, o)
	p, l := a.next(t)
	a.answerUntil(t, "the stream is known", func() bool { return o.held(tokens) == 1600 }, l, p, c.snapshot()...)
	damage.Store(true)
	live.Store(true)
	if p, l = a.next(t); p.GetReason() != "digest" {
		t.Errorf("pulled for %s", p.GetReason())
	}
	if p.HaveSeq != nil {
		t.Error("a replay was asked for although only a snapshot helps")
	}
	if got := o.held(tokens); got != 1600 {
		t.Errorf("%d tokens during the resync", got)
	}
	if n := o.metric(t, "waypost_prefix_frames_total{digest_mismatch}"); n != 1 {
		t.Errorf("%v digest mismatches counted", n)
	}
	if n := o.metric(t, "waypost_prefix_pulls_total{digest,agent}"); n != 1 {
		t.Errorf("%v pulls for a digest counted", n)
	}
	if n := o.metric(t, "waypost_prefix_pulls_in_flight"); n != 1 {
		t.Errorf("%v pulls under way", n)
	}
	a.answerUntil(t, "the pull ends", func() bool { return o.metric(t, "waypost_prefix_pulls_in_flight") == 0 }, l, p, c.snapshot()...)
	if got := o.held(tokens); got != 1600 {
		t.Errorf("%d tokens after the resync", got)
	}
	for series, least := range map[string]float64{
		"waypost_prefix_bytes_total{delta}": 10, "waypost_prefix_bytes_total{agent}": 50, "waypost_prefix_frames_total{applied}": 2,
		"waypost_index_keys": 4, "waypost_index_bytes": 100, "waypost_prefix_pulls_total{new,agent}": 1,
	} {
		if got := o.metric(t, series); got < least {
			t.Errorf("%s is %v, want %v at least", series, got, least)
		}
	}
	eventually(t, "a fresh view", func() bool {
		age := o.metric(t, "waypost_cache_view_age_seconds{"+testModel+"}")
		return age >= 0 && age < 30
	})
}

// A frame that comes before the answer it goes with is not forgotten: the view
// is not fresh before what it told is known.
func TestFrameBeforeItsSnapshotIsAskedForAgain(t *testing.T) {
	o := startOne(t)
	c := newCache(1)
	tokens := c.grow(100)
	c.delta()
	before := c.snapshot()
	grown := c.grow(60)
	late := c.delta()
	if late == nil {
		t.Fatal("no frame")
	}
	var send atomic.Bool
	a := newSlowAgent(func() []byte {
		if send.Swap(false) {
			return late
		}
		return nil
	})
	a.dialSlow(t, o)
	p, l := a.next(t)
	send.Store(true)
	eventually(t, "the frame comes first", func() bool { return o.metric(t, "waypost_prefix_frames_total{gap}") == 1 })
	for p.GetReason() != "gap" { // again if the answer came late
		answer(t, l, p, true, before...)
		p, l = a.next(t)
	}
	if p.GetHaveSeq() != 1 {
		t.Errorf("asked from %d", p.GetHaveSeq())
	}
	loads, _ := a.counts()
	eventually(t, "5 more reports", func() bool { n, _ := a.counts(); return n > loads+5 })
	if v := o.placed(t, tokens).GetBasis().GetCacheView(); v != "blind" {
		t.Errorf("the view is %s before all is known", v)
	}
	a.answerUntil(t, "all is known", func() bool {
		return o.held(grown) == len(grown) && o.placed(t, tokens).GetBasis().GetCacheView() == "live"
	}, l, p, late)
}

// The streams of one host are asked for a few at a time; the others wait.
func TestPullsOfOneHostAreBounded(t *testing.T) {
	o := startOne(t)
	a := newSlowAgent(nil)
	a.workers = 60
	a.dialSlow(t, o)
	answered := map[uint32]bool{}
	for len(answered) < 60 { // one that is answered late is asked for again
		p, l := a.next(t)
		if n := o.metric(t, "waypost_prefix_pulls_in_flight"); n > pull.DefaultPerHost {
			t.Fatalf("%v pulls under way", n)
		}
		if n := o.metric(t, "waypost_prefix_pulls_waiting"); n > 60 { // what was answered late waits again
			t.Fatalf("%v wait", n)
		}
		answered[p.GetIndex()] = true
		c := newCache(1)
		c.grow(10)
		c.delta()
		if err := l.SendWait(t.Context(), &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Prefixes{Prefixes: &waypostv1.PrefixFrames{
			Index: p.Index, EngineProcess: p.EngineProcess, Frames: c.snapshot(), PullId: p.PullId, Last: proto.Bool(true),
		}}}); err != nil {
			t.Fatal(err)
		}
	}
}
