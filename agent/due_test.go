package agent

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/gossip/lane"
	"waypost/gossip/ledger"
)

// toldRank is a rank of an agent with lanes that are up and were told of it.
type toldRank struct {
	t *testing.T
	a *Agent
	*rank
	lanes []*lane.Lane
	seq   uint64
}

func newToldRank(t *testing.T, lanes int) *toldRank {
	a := newAgent(t, newKey)
	r := &toldRank{t: t, a: a, rank: a.addRank()}
	for range lanes {
		l := &lane.Lane{}
		a.lanes.toldNews[l] = map[uint32]uint64{}
		r.laneUp(l, uint64(len(r.lanes)+1))
		r.lanes = append(r.lanes, l)
		a.lanes.load(l)
	}
	return r
}

// fact hands a fact's word on whether a report is due on, as the shell does.
func (r *toldRank) fact(due bool, err error) (told bool) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
	if due {
		r.a.lanes.tellNews(r.rank)
	}
	return due
}

// offer takes a claim in that was made for an engine life.
func (r *toldRank) offer(prompt int, process uint64) (due bool) {
	r.t.Helper()
	r.seq++
	o := ledger.Offer{Claim: ledger.Claim{Seq: r.seq, EngineProcess: process, PromptTokens: prompt, UncachedTokens: prompt}}
	return r.fact(r.takeClaims(&ledger.ClaimFrame{Coordinator: 1, Agent: 0xa1, Prev: r.seq - 1, Offers: []ledger.Offer{o}}))
}

func (r *toldRank) mark(seq uint64, what ledger.Mark) (due bool) {
	r.t.Helper()
	return r.fact(r.takeMarks(&ledger.MarkFrame{Coordinator: 1, Marks: []ledger.Marked{{Seq: seq, What: what}}}))
}

func (r *toldRank) reading(running, waiting int) (due bool) {
	r.t.Helper()
	return r.fact(r.setLoad(engine.Load{At: time.Now(), Running: &running, Waiting: &waiting}), nil)
}

func (r *toldRank) batch(seed uint32) (due bool) {
	r.t.Helper()
	whole, due := r.apply(engine.Batch{Events: []blocktable.Event{store(seed, 40)}, Received: time.Now()})
	if !whole {
		r.t.Fatal("more copies than there are")
	}
	return r.fact(due, nil)
}

// heard says of each lane whether a LOAD is built for it now.
func (r *toldRank) heard() (out []bool) {
	for _, l := range r.lanes {
		out = append(out, r.a.lanes.loadNews(l) != nil)
	}
	return out
}

// However many facts come, what the queue is now is asked once per report: claims
// are told in any case, and what comes until they are told is told with them.
func TestQueueIsLookedAtOncePerReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newToldRank(t, 1)
		facts, reports := 0, 0
		before := r.estimate.Counts().Views
		for round := range uint32(20) {
			if !r.offer(4000, r.process) {
				t.Error("a claim is not told at once")
			}
			for i := range uint32(5) {
				r.reading(1, 2)
				r.batch(round*5 + i + 1)
				r.mark(r.seq, ledger.MarkFirst)
				r.mark(r.seq, ledger.MarkDone)
				if !r.offer(100, r.process) {
					t.Error("a claim is not told at once")
				}
				facts += 5
			}
			if !r.offer(100, r.process+1) {
				t.Error("a fenced claim is not told at once: its coordinator waits for the echo")
			}
			time.Sleep(20 * time.Millisecond)
			for _, heard := range r.heard() {
				if !heard {
					t.Error("a lane is not told of claims")
				}
				reports++
			}
		}
		if got := int(r.estimate.Counts().Views - before); got != reports {
			t.Errorf("the queue was looked at %d times for %d reports and %d facts", got, reports, facts)
		}
		// Told of all, a fact that may have moved the queue is asked of once, one
		// that says nothing of it never.
		before = r.estimate.Counts().Views
		r.mark(1, ledger.MarkDone)
		r.mark(1, ledger.MarkFirst)
		if got := r.estimate.Counts().Views - before; got != 0 {
			t.Errorf("marks on what is over had the queue looked at %d times", got)
		}
		r.reading(1, 2)
		if got := r.estimate.Counts().Views - before; got != 1 {
			t.Errorf("a reading had the queue looked at %d times", got)
		}
	})
}

// While no lane is up nobody is to be told, and yet each fact has the queue looked at,
// also behind news that nobody heard: what is learnt of the engine's speed rests on it.
func TestQueueIsLookedAtWithoutLanes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newToldRank(t, 0)
		r.offer(4000, r.process)
		before := r.estimate.Counts().Views
		const facts = 5
		for range facts {
			if r.reading(1, 2) {
				t.Error("somebody is to be told, and nobody is there")
			}
		}
		if got := r.estimate.Counts().Views - before; got != facts {
			t.Errorf("the queue was looked at %d times for %d facts", got, facts)
		}
	})
}

// Each lane hears each news once. What comes after one lane's LOAD was built is
// news again, to all of them; before that it is told with what is to come.
func TestNewsAfterOneLanesLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newToldRank(t, 2)
		expect := func(what string, want ...bool) {
			t.Helper()
			if got := r.heard(); !slices.Equal(got, want) {
				t.Errorf("%s: heard %v, want %v", what, got, want)
			}
		}
		expect("nothing yet", false, false)
		r.offer(8000, r.process)
		if r.mark(1, ledger.MarkFirst) {
			t.Error("news before any lane was told of the former")
		}
		expect("a claim and its end", true, true)
		expect("the same again", false, false)
		r.offer(8000, r.process)
		if r.a.lanes.loadNews(r.lanes[0]) == nil {
			t.Error("the first lane is not told of the claim")
		}
		if !r.mark(2, ledger.MarkFirst) {
			t.Error("the first lane takes the worker for busy, and it became idle")
		}
		expect("the end to both", true, true)
		expect("the end again", false, false)
	})
}

// A lane that cannot take its LOAD has one to come: what it was shown last is no
// reason to tell the others again and again.
func TestLaneThatWaitsIsNoNewsToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newToldRank(t, 2)
		first, second := r.lanes[0], r.lanes[1]
		r.offer(100_000, r.process)
		for range 5 {
			if r.a.lanes.loadNews(first); r.reading(0, 0) {
				t.Error("told again of what the first lane knows and the second is about to hear")
			}
			time.Sleep(20 * time.Millisecond)
		}
		if !r.mark(1, ledger.MarkFirst) {
			t.Error("the first lane takes the worker for busy, and it became idle")
		}
		if r.a.lanes.loadNews(second) == nil || r.a.lanes.loadNews(first) == nil {
			t.Error("a lane is not told in the end")
		}
	})
}

// What jumped is held against what each lane was shown last: by a LOAD, of the
// period too, and by nothing else that looks at the queue.
func TestJumpIsFromWhatEachLaneWasShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newToldRank(t, 2)
		first, second := r.lanes[0], r.lanes[1]
		jumped := func(what string, want bool) {
			t.Helper()
			if got := r.reading(0, 0); got != want {
				t.Errorf("%s: due %v", what, got)
			}
			time.Sleep(time.Millisecond)
		}
		jumped("nothing happened", false)
		// Unlike what a lane offers, this is not told at once.
		o := ledger.Offer{Claim: ledger.Claim{Seq: 1, EngineProcess: r.process, PromptTokens: 100_000, UncachedTokens: 100_000}}
		if _, err := r.estimate.Claims(time.Now(), &ledger.ClaimFrame{Coordinator: 1, Agent: 0xa1, Offers: []ledger.Offer{o}}); err != nil {
			t.Fatal(err)
		}
		r.report(time.Now())
		r.sketch(time.Now(), 4)
		jumped("only metrics and a sketch showed it", true)
		jumped("it is told already", false)
		r.a.lanes.load(first)
		jumped("the other lane has a LOAD to come", false)
		r.a.lanes.load(second)
		jumped("both were told", false)

		if _, err := r.estimate.Marks(time.Now(), &ledger.MarkFrame{Coordinator: 1, Marks: []ledger.Marked{{Seq: 1, What: ledger.MarkGone}}}); err != nil {
			t.Fatal(err)
		}
		r.a.lanes.load(first)
		jumped("the period told one lane only", true)
		r.a.lanes.load(first)
		r.a.lanes.load(second)
		jumped("both were told by the period", false)
		r.a.lanes.load(first)
		r.laneDown(second)
		jumped("nobody is left who was not told", false)
		if _, kept := r.shown[second]; kept || len(r.shown) != 1 {
			t.Errorf("what %d lanes were shown is kept", len(r.shown))
		}
		r.a.lanes.load(second) // built while it went down
		if len(r.shown) != 1 {
			t.Error("a lane that is down is remembered")
		}
	})
}
