package coordinator

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"waypost/coordinator/api"
	"waypost/coordinator/prefixindex"
	"waypost/coordinator/views"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

const firstWorker = "gpu-01/vllm-8000/0"

// inspectWithin asks about the first worker and waits for a time.
func (o *one) inspectWithin(tb testing.TB, verify bool, within time.Duration) (*waypostv1.InspectWorkerResponse, error) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), within)
	defer cancel()
	return waypostv1.NewOperatorServiceClient(o.conn).InspectWorker(ctx, &waypostv1.InspectWorkerRequest{Worker: new(firstWorker), Verify: &verify})
}

// inspected asks about the first worker; an error fails the test.
func (o *one) inspected(tb testing.TB, verify bool) *waypostv1.InspectWorkerResponse {
	tb.Helper()
	resp, err := o.inspectWithin(tb, verify, time.Minute)
	if err != nil {
		tb.Fatal(err)
	}
	return resp
}

// withCache starts a coordinator and an agent whose first worker streams a
// cache, and waits until the coordinator is where the cache is.
func withCache(t *testing.T, c *cache, blocks int) (*one, *fakeAgent) {
	t.Helper()
	o := startOne(t)
	tokens := c.grow(blocks)
	a := &fakeAgent{workers: 1, frame: c.delta}
	a.pulled = func(*waypostv1.PrefixPull) [][]byte { return c.snapshot() }
	a.start(t, o)
	eventually(t, "the stream is known", func() bool { return o.held(tokens) == blocks*16 })
	return o, a
}

// stream is the stream of the first worker.
func (o *one) stream() (views.Stream, bool) {
	w, err := o.fleet.Worker(time.Now(), firstWorker)
	if err != nil {
		return views.Stream{}, false
	}
	return o.views.Stream(&w)
}

// listed takes down what a stream lists, in the order of its coming. It is a
// summary.IndexSink of streams in which nothing goes.
type listed struct{ keys []prefixindex.Listing }

func (l *listed) add(key, checkpoint summary.IndexKey, depthTokens uint32) {
	l.keys = append(l.keys, prefixindex.Listing{Key: key, Checkpoint: checkpoint, DepthTokens: depthTokens})
}

func (*listed) Begin() {}
func (*listed) End()   {}
func (*listed) Reset() {}

func (l *listed) AddCheckpoint(key, parent summary.IndexKey, depthTokens uint32) {
	l.add(key, parent, depthTokens)
}

func (l *listed) AddPoint(key, checkpoint summary.IndexKey, depthTokens uint32, _ bool) {
	l.add(key, checkpoint, depthTokens)
}

func (*listed) RemoveCheckpoint(_, _ summary.IndexKey, _ uint32)            {}
func (*listed) RemovePoint(_, _ summary.IndexKey, _ uint32, _ bool)         {}
func (*listed) SetBranch(_, _ summary.IndexKey, _ uint32)                   {}
func (*listed) SetExtent(_, _ summary.IndexKey, _ uint32, _ summary.Extent) {}

// listings is what a snapshot tells, read beside everything else, shallow
// prefixes first.
func listings(t *testing.T, frames [][]byte) []prefixindex.Listing {
	t.Helper()
	set := &listed{}
	d := summary.NewDecoder(set)
	for _, f := range frames {
		if _, err := d.Apply(f); err != nil {
			t.Fatal(err)
		}
	}
	slices.SortStableFunc(set.keys, func(a, b prefixindex.Listing) int { return cmp.Compare(a.DepthTokens, b.DepthTokens) })
	return set.keys
}

func (c *cache) stats() summary.Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.encoder.Stats()
}

// What is shown is what the agent has, and where it comes from.
func TestInspectShowsTheStream(t *testing.T) {
	c := newCache(7)
	o, a := withCache(t, c, 300)
	want := c.stats()
	got := o.inspected(t, false)
	if int(got.GetRuns()) != want.Runs || int(got.GetStreamKeys()) != want.Keys || int(got.GetKeys()) != want.Keys || got.GetEpoch() != 7 || want.Keys < 9 {
		t.Errorf("%v\nthe agent has %+v", got, want)
	}
	if got.GetIncarnation() != markHex(100) || got.GetView() != "live" || got.GetCoverage() != "full" || !got.GetLaneUp() || got.GetAnsweredBy() != "c-1" {
		t.Errorf("%v", got)
	}
	if got.Comparison != nil {
		t.Errorf("a comparison nobody asked for: %v", got.GetComparison())
	}
	if got.GetIndexWorkers() != 1 || int(got.GetIndexKeys()) != want.Keys || got.GetIndexBytes() <= 0 || got.GetDecoderBytes() <= 0 {
		t.Errorf("index: %v", got)
	}
	if got.GetFrames()["applied"] == 0 || got.GetStreamBytes() <= 0 || got.GetPulledBytes() <= 0 || got.GetPulledBytes() > got.GetStreamBytes() {
		t.Errorf("stream: %v", got)
	}
	_, pulls := a.counts()
	sum := uint32(0)
	for _, n := range got.GetResyncs() {
		sum += n
	}
	if int(sum) != pulls || got.GetLastResyncReason() == "" || got.LastResyncMs == nil || got.AgeMs == nil {
		t.Errorf("resyncs %v of %d pulls, last %q %v ms ago", got.GetResyncs(), pulls, got.GetLastResyncReason(), got.GetLastResyncMs())
	}
}

// A stream that is not known yet has unknown numbers, not zeros.
func TestInspectOfAnUnknownStreamSaysSo(t *testing.T) {
	o := startOne(t)
	a := &fakeAgent{workers: 1}
	a.start(t, o)
	var got *waypostv1.InspectWorkerResponse
	eventually(t, "the worker is known", func() bool {
		var err error
		got, err = o.inspectWithin(t, false, time.Minute)
		return err == nil && len(got.GetResyncs()) > 0
	})
	if got.Epoch != nil || got.Seq != nil || got.Runs != nil || got.StreamKeys != nil || got.AgeMs != nil || got.DecoderBytes != nil {
		t.Errorf("%v", got)
	}
	_, err := waypostv1.NewOperatorServiceClient(o.conn).InspectWorker(t.Context(), &waypostv1.InspectWorkerRequest{Worker: new("gpu-01/vllm-8000/9")})
	if status.Code(err) != codes.NotFound || api.FieldOf(err) != "worker" {
		t.Errorf("unknown worker: %v", err)
	}
	_, err = waypostv1.NewOperatorServiceClient(o.conn).InspectWorker(t.Context(), &waypostv1.InspectWorkerRequest{})
	if status.Code(err) != codes.InvalidArgument || api.FieldOf(err) != "worker" {
		t.Errorf("no worker: %v", err)
	}
}

// What changes while both sides are compared is no difference, and a
// verification leaves no trace in the stream.
func TestVerifyOfAStreamThatMoves(t *testing.T) {
	c := newCache(1)
	o := startOne(t)
	tokens := c.grow(200)
	a := &fakeAgent{workers: 1, every: 2 * time.Millisecond}
	var moves atomic.Bool
	rng := rand.New(rand.NewPCG(1, 2))
	a.frame = func() []byte {
		if moves.Load() {
			c.begin(40, rng.IntN)
		}
		return c.delta()
	}
	a.pulled = func(*waypostv1.PrefixPull) [][]byte { return c.snapshot() }
	a.start(t, o)
	eventually(t, "the stream is known", func() bool { return o.held(tokens) == 3200 })
	moves.Store(true)
	before := o.inspected(t, false)
	frames := map[float64]bool{}
	eventually(t, "compared at ten different frames", func() bool {
		r := o.inspected(t, true).GetComparison()
		if r.GetMissing()+r.GetExtra()+r.GetExtents() > 0 || len(r.GetKeys()) > 0 || r.GetEqual() == 0 || r.GetSnapshotBytes() == 0 {
			t.Errorf("%v", r)
		}
		frames[r.GetSeq()] = true
		return len(frames) >= 10
	})
	after := o.inspected(t, false)
	if diff := gocmp.Diff(before.GetResyncs(), after.GetResyncs()); diff != "" || before.GetPulledBytes() != after.GetPulledBytes() {
		t.Errorf("a verification counts as a resync: %s", diff)
	}
	if diff := gocmp.Diff(unusual(before.GetFrames()), unusual(after.GetFrames())); diff != "" {
		t.Errorf("a verification disturbs the stream: %s", diff)
	}
	if before.GetKeys() >= after.GetKeys() {
		t.Errorf("%d keys, then %d: the stream did not grow, the test proves little", before.GetKeys(), after.GetKeys())
	}
}

// begin adds a prompt that shares nothing with the others, and changes
// something else.
func (c *cache) begin(blocks int, intn func(int) int) {
	c.mu.Lock()
	c.last = 0
	c.forest.Step(intn)
	c.mu.Unlock()
	c.grow(blocks)
}

// An answer that is ahead of the stream waits for it, and one that is behind
// takes the deltas that came meanwhile: only the same frame is compared.
func TestVerifyWaitsForTheSameFrame(t *testing.T) {
	for _, ahead := range []bool{true, false} {
		c := newCache(8)
		o := startOne(t)
		tokens := c.grow(100)
		rng := rand.New(rand.NewPCG(1, 2))
		a := &fakeAgent{workers: 1}
		var mu sync.Mutex
		var loads, told, from int // reports built, deltas in them, the report from which on there are deltas again
		next := func() []byte {
			c.begin(40, rng.IntN)
			return c.delta()
		}
		var held [][]byte
		a.frame = func() []byte {
			mu.Lock()
			defer mu.Unlock()
			loads++
			switch {
			case loads < from:
				return nil
			case len(held) > 0:
				f := held[0]
				held = held[1:]
				return f
			case from > 0:
				told++
				return next()
			}
			return c.delta()
		}
		a.pulled = func(p *waypostv1.PrefixPull) [][]byte {
			if p.GetReason() != "verify" {
				return c.snapshot()
			}
			mu.Lock()
			if ahead {
				held, from = append(held, next(), next()), loads+5
				mu.Unlock()
				return c.snapshot()
			}
			old := c.snapshot()
			from = loads
			mu.Unlock()
			eventually(t, "three more deltas are on the lane", func() bool {
				mu.Lock()
				defer mu.Unlock()
				return told > 3
			})
			return old
		}
		a.start(t, o)
		eventually(t, "the stream is known", func() bool { return o.held(tokens) == 1600 })
		before := o.inspected(t, false)
		r := o.inspected(t, true).GetComparison()
		if r.GetMissing()+r.GetExtra()+r.GetExtents() > 0 || r.GetEqual() <= before.GetStreamKeys() || r.GetSeq() < before.GetSeq()+2 {
			t.Errorf("ahead %v: %v, before %v", ahead, r, before)
		}
		a.mu.Lock()
		asks := 0
		for _, p := range a.pulls {
			if p.GetReason() == "verify" {
				asks++
			}
		}
		a.mu.Unlock()
		if asks != 1 {
			t.Errorf("ahead %v: the agent was asked %d times", ahead, asks)
		}
	}
}

// unusual counts frames that were not simply applied.
func unusual(frames map[string]uint32) map[string]uint32 {
	out := map[string]uint32{}
	for k, n := range frames {
		if k != "applied" {
			out[k] = n
		}
	}
	return out
}

// An index that lost a key, has one too many or another extent is found out,
// and the keys are named.
func TestVerifyNamesWhatDiffers(t *testing.T) {
	c := newCache(3)
	o, _ := withCache(t, c, 300)
	keys := listings(t, c.snapshot())
	if r := o.inspected(t, true).GetComparison(); int(r.GetEqual()) != len(keys) || r.GetMissing()+r.GetExtra()+r.GetExtents() != 0 {
		t.Fatalf("%v of %d keys", r, len(keys))
	}
	id, _, ok := o.fleet.LookupWorker(firstWorker)
	if !ok {
		t.Fatal("the worker is not known")
	}
	// The index is changed behind the stream's back.
	sink := o.index.WorkerSink(prefixindex.WorkerID(id))
	lost, shortened := keys[len(keys)-1], keys[0]
	if lost.DepthTokens%prefix.ChunkTokens == 0 {
		t.Fatal("the last key is not the known end: the test does not fit")
	}
	sink.RemovePoint(lost.Key, lost.Checkpoint, lost.DepthTokens, false)
	sink.SetExtent(shortened.Key, shortened.Checkpoint, shortened.DepthTokens, summary.Extent{UsableTokens: 16})
	sink.AddPoint(0xabc, 0, 48, false)
	sink.AddPoint(0xabd, 0, 48, false)
	r := o.inspected(t, true).GetComparison()
	if int(r.GetEqual()) != len(keys)-2 || r.GetMissing() != 1 || r.GetExtra() != 2 || r.GetExtents() != 1 {
		t.Errorf("%v of %d keys", r, len(keys))
	}
	want := []string{
		fmt.Sprintf("missing %016x %d", uint64(lost.Key), lost.DepthTokens),
		fmt.Sprintf("extent %016x %d", uint64(shortened.Key), shortened.DepthTokens),
	}
	if diff := gocmp.Diff(want, named(r)); diff != "" {
		t.Error(diff)
	}
}

func named(r *waypostv1.StreamComparison) (out []string) {
	for _, k := range r.GetKeys() {
		out = append(out, fmt.Sprintf("%s %s %d", k.GetHow(), k.GetKey(), k.GetDepthTokens()))
	}
	return out
}

// An agent whose own set is another one at the same frame is found out too: the
// keys that only this side has are named from the stream.
func TestVerifyOfAnotherSetAtTheSameFrame(t *testing.T) {
	c, other := newCache(4), newCache(4)
	o := startOne(t)
	tokens := c.grow(100)
	a := &fakeAgent{workers: 1, frame: func() []byte { return nil }}
	c.delta()
	a.pulled = func(p *waypostv1.PrefixPull) [][]byte {
		if p.GetReason() == "verify" {
			return other.snapshot()
		}
		return c.snapshot()
	}
	other.grow(97)
	other.delta()
	a.start(t, o)
	eventually(t, "the stream is known", func() bool { return o.held(tokens) == 1600 })
	// Both begin alike; the ends are at 1,600 and 1,552 tokens.
	r := o.inspected(t, true).GetComparison()
	if r.GetMissing() != 1 || r.GetExtra() != 1 || r.GetEqual() != 3 {
		t.Errorf("%v", r)
	}
	if got := named(r); len(got) != 2 || !strings.HasPrefix(got[0], "missing ") || !strings.HasSuffix(got[0], " 1552") || !strings.HasPrefix(got[1], "extra ") || !strings.HasSuffix(got[1], " 1600") {
		t.Errorf("named: %v", got)
	}
}

// An agent that does not answer is named, costs the stream nothing, and its
// late answer is nobody's.
func TestVerifyWithoutAnAnswer(t *testing.T) {
	c := newCache(5)
	tokens := c.grow(100)
	o := startOne(t)
	var silent atomic.Bool
	silent.Store(true)
	asked := make(chan *waypostv1.PrefixPull, 64)
	a := &fakeAgent{workers: 1, frame: c.delta}
	a.pulled = func(p *waypostv1.PrefixPull) [][]byte {
		if p.GetReason() == "verify" && silent.Load() {
			asked <- p
			return nil
		}
		return c.snapshot()
	}
	a.start(t, o)
	eventually(t, "the stream is known", func() bool { return o.held(tokens) == 1600 })
	before := o.inspected(t, false)
	// The coordinator answers a little before who asks gives up, who on a busy
	// machine may give up first.
	eventually(t, "the agent is named", func() bool {
		_, err := o.inspectWithin(t, true, 2*time.Second)
		return status.Code(err) == codes.DeadlineExceeded && strings.Contains(err.Error(), "gpu-01 did not send its set")
	})
	after := o.inspected(t, false)
	if diff := gocmp.Diff(before.GetResyncs(), after.GetResyncs()); diff != "" || after.GetView() != "live" {
		t.Errorf("view %s, resyncs: %s", after.GetView(), diff)
	}
	p := <-asked
	s, ok := o.laneServer.Session("gpu-01")
	if !ok {
		t.Fatal("no lane")
	}
	o.lanes.Frame(s, &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Prefixes{Prefixes: &waypostv1.PrefixFrames{
		Index: new(uint32(0)), EngineProcess: new(uint64(100)), Frames: c.snapshot(), PullId: p.PullId, Last: new(true),
	}}}, 0)
	if got := o.inspected(t, false); got.GetPulledBytes() != after.GetPulledBytes() || len(unusual(got.GetFrames())) != len(unusual(after.GetFrames())) {
		t.Errorf("a late answer went into the stream: %v, before %v", got, after)
	}
	silent.Store(false)
	if r := o.inspected(t, true).GetComparison(); r.GetEqual() == 0 || r.GetMissing()+r.GetExtra() > 0 {
		t.Errorf("once it answers: %v", r)
	}
}

// One verification of a worker runs at a time; a lane that goes down ends it.
func TestVerifyOneAtATime(t *testing.T) {
	c := newCache(6)
	c.grow(50)
	o := startOne(t)
	asked := make(chan struct{}, 1)
	a := &fakeAgent{workers: 1, frame: c.delta}
	a.pulled = func(p *waypostv1.PrefixPull) [][]byte {
		if p.GetReason() == "verify" {
			asked <- struct{}{}
			return nil
		}
		return c.snapshot()
	}
	a.start(t, o)
	eventually(t, "the stream is known", func() bool {
		r, err := o.inspectWithin(t, false, time.Minute)
		return err == nil && r.GetStreamKeys() > 0
	})
	var first sync.WaitGroup
	var firstErr error
	first.Go(func() { _, firstErr = o.inspectWithin(t, true, time.Minute) })
	<-asked
	_, err := o.inspectWithin(t, true, time.Minute)
	if status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "verified already") {
		t.Errorf("a second one at once: %v", err)
	}
	a.dialer.Close()
	first.Wait()
	if status.Code(firstErr) != codes.Unavailable || !strings.Contains(firstErr.Error(), "lane of host gpu-01 went down") {
		t.Errorf("the lane went down: %v", firstErr)
	}
	_, err = o.inspectWithin(t, true, time.Minute)
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "gpu-01 has no lane") {
		t.Errorf("without a lane: %v", err)
	}
	// Without --verify what is known still shows.
	if r := o.inspected(t, false); r.GetLaneUp() || r.GetStreamKeys() == 0 {
		t.Errorf("%v", r)
	}
}

// A stream that begins anew during a verification is compared where it then is.
func TestVerifyAcrossANewStream(t *testing.T) {
	o := startOne(t)
	var now atomic.Pointer[cache]
	first, next := newCache(1), newCache(2)
	now.Store(first)
	tokens := first.grow(100)
	next.grow(60)
	a := &fakeAgent{workers: 1}
	a.pulled = func(p *waypostv1.PrefixPull) [][]byte {
		if p.GetReason() == "verify" {
			now.Store(next)
		}
		return now.Load().snapshot()
	}
	a.frame = func() []byte { return now.Load().delta() }
	a.start(t, o)
	eventually(t, "the first stream is known", func() bool { return o.held(tokens) == 1600 })
	r := o.inspected(t, true).GetComparison()
	if r.GetEpoch() != 2 || int(r.GetEqual()) != next.stats().Keys || r.GetMissing()+r.GetExtra()+r.GetExtents() > 0 {
		t.Errorf("%v, the agent has %d keys", r, next.stats().Keys)
	}
}
