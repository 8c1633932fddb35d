package coordinator

import (
	"sync/atomic"
	"testing"
	"time"

	waypostv1 "waypost/proto/waypost/v1"
)

// held is how many tokens of a prompt the index lists for the first worker.
func (o *one) held(tokens []uint32) int {
	req := &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: append(tokens, 1)}, Explain: new("terms"), Reserve: new(false)}
	resp, err := waypostv1.NewPlacementServiceClient(o.conn).Place(o.ctx, req)
	if err != nil || len(resp.GetPlacement().GetTerms()) != 1 {
		return -1
	}
	return int(resp.GetPlacement().GetTerms()[0].GetReuseTokens())
}

// A stream that begins anew right after a snapshot is asked for at once.
func TestNewStreamAfterASnapshotIsPulledAtOnce(t *testing.T) {
	o := startOne(t)
	var now atomic.Pointer[cache]
	first := newCache(1)
	now.Store(first)
	tokens := first.grow(100)
	a := &fakeAgent{workers: 1}
	a.pulled = func(*waypostv1.PrefixPull) [][]byte { return now.Load().snapshot() }
	a.frame = func() []byte { return now.Load().delta() }
	a.start(t, o)
	eventually(t, "the first stream is known", func() bool { return o.held(tokens) == 1600 })

	for epoch := uint32(2); epoch < 6; epoch++ {
		next := newCache(epoch)
		other := next.grow(int(40 + epoch))
		now.Store(next)
		loads, _ := a.counts()
		eventually(t, "the new stream is known", func() bool { return o.held(other) == len(other) })
		// At 20 ms a report: 3 s would be 150 of them.
		if n, _ := a.counts(); n > loads+100 {
			t.Errorf("epoch %d: known after %d reports", epoch, n-loads)
		}
	}
}

// An agent that does not answer a pull is not asked with each of its reports.
func TestUnansweredPullIsNotRepeatedWithEachReport(t *testing.T) {
	o := startOne(t)
	a := &fakeAgent{workers: 1}
	a.start(t, o)
	eventually(t, "the first pull", func() bool { _, pulls := a.counts(); return pulls > 0 })
	loads, _ := a.counts()
	eventually(t, "40 more reports", func() bool { n, _ := a.counts(); return n >= loads+40 })
	n, pulls := a.counts()
	if uint64(pulls) > 2+n/100 {
		t.Errorf("%d pulls in %d reports", pulls, n)
	}
}

// A damaged answer is asked for again, but at a pace.
func TestDamagedAnswersArePulledAtAPace(t *testing.T) {
	o := startOne(t)
	c := newCache(1)
	c.grow(10)
	a := &fakeAgent{workers: 1}
	var damaged atomic.Int64
	a.pulled = func(*waypostv1.PrefixPull) [][]byte {
		damaged.Add(1)
		return [][]byte{{0xff, 0xff, 0xff}}
	}
	a.frame = c.delta
	a.start(t, o)
	eventually(t, "three damaged answers", func() bool { return damaged.Load() >= 3 })
	n, pulls := a.counts()
	if uint64(pulls) > 3+n/5 {
		t.Errorf("%d pulls in %d reports", pulls, n)
	}
}

// After a lane was lost its reports alone do not make the view fresh: what
// changed meanwhile is not known before a pull is answered.
func TestViewAgesUntilTheStreamIsKnownToContinue(t *testing.T) {
	o := startOne(t)
	c := newCache(1)
	tokens := c.grow(100)
	c.delta()
	var answers atomic.Bool
	answers.Store(true)
	a := &fakeAgent{workers: 1}
	a.pulled = func(*waypostv1.PrefixPull) [][]byte {
		if !answers.Load() {
			return nil
		}
		return c.snapshot()
	}
	a.start(t, o)
	eventually(t, "the stream is known", func() bool { return o.held(tokens) == 1600 })
	viewAge := func() time.Duration {
		resp, err := waypostv1.NewPlacementServiceClient(o.conn).Place(t.Context(), &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: tokens}, Reserve: new(false)})
		if err != nil || resp.GetPlacement() == nil {
			return 0
		}
		return time.Duration(resp.GetPlacement().GetBasis().GetCacheViewAgeMs() * float64(time.Millisecond))
	}
	answers.Store(false)
	if !o.CloseLane("gpu-01") {
		t.Fatal("there is no lane to cut")
	}
	_, pulls := a.counts()
	eventually(t, "the lane is up again", func() bool { _, n := a.counts(); return n > pulls })
	cut := time.Now() // or some time before
	loads, _ := a.counts()
	eventually(t, "10 more reports", func() bool { n, _ := a.counts(); return n > loads+10 })
	since := time.Since(cut) // before the question, however long the answer takes
	if age := viewAge(); age < since {
		t.Errorf("the view is %s old, the lane was cut more than %s ago and nobody answered", age, since)
	}
	answers.Store(true)
	eventually(t, "a fresh view", func() bool { return viewAge() < time.Since(cut)/2 })
}
