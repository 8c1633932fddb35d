package agent

import (
	"time"

	"waypost/agent/engine"
	"waypost/gossip/ledger"
	"waypost/gossip/summary"
)

// followBudgetBytesPerSec is the rate of the stream of a followed cache: each
// request replaces what a slot holds, and what is not told in time is promised
// in vain.
const followBudgetBytesPerSec = 50_000

var _ engine.MirrorSink = (*watched)(nil)

// Mirror implements engine.MirrorSink.
func (w *watched) Mirror(number int, m engine.Mirror) {
	if r := w.rank(number); r != nil {
		r.setMirror(m)
	}
	w.changed()
}

// Update implements engine.MirrorSink.
func (w *watched) Update(number int, change func()) {
	r := w.rank(number)
	if r == nil {
		return
	}
	r.mu.Lock()
	change()
	due := r.followed(time.Now())
	r.mu.Unlock()
	if due {
		w.dirty(r)
	}
}

// setMirror begins a stream that tells what a mirror follows. The mirror knows
// prefixes by one cluster key only.
func (r *rank) setMirror(m engine.Mirror) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.known {
		return
	}
	r.mirror(r.newTable())
	r.follow = m
	r.encoder = summary.NewEncoder(summary.Options{Key: r.key, Blocks: m, Keyed: true, Epoch: r.nextEpoch(), BudgetBytesPerSec: followBudgetBytesPerSec})
	r.told = frameAges{}
	m.Listen(r.encoder)
	r.nextDelta(time.Now())
}

// followClaims tells the mirror of claims that were taken in, each once: it
// knows those it was told of. Points by another cluster key name nothing here.
// The lock is held.
func (r *rank) followClaims(now time.Time, f *ledger.ClaimFrame) {
	if r.follow == nil {
		return
	}
	readable := f.PointsKeyID == r.key.ID()
	for i := range f.Offers {
		o := &f.Offers[i]
		if o.EngineProcess != r.process {
			continue
		}
		keys := o.Points
		if !readable {
			keys = nil
			if len(o.Points) > 0 {
				r.faults["points_of_another_key"]++
			}
		}
		slot := -1
		if o.Slot != nil {
			slot = int(*o.Slot)
		}
		r.follow.Begin(ledger.ClaimID{Coordinator: f.Coordinator, Seq: o.Seq}, keys, o.PromptTokens, slot)
	}
	r.followed(now)
}

// followMarks tells the mirror what happened to claims. It reports whether what
// can be reused changed. The lock is held.
func (r *rank) followMarks(now time.Time, f *ledger.MarkFrame) (changed bool) {
	if r.follow == nil {
		return false
	}
	if len(f.Learnt) > 0 && f.PointsKeyID != r.key.ID() {
		r.faults["points_of_another_key"]++
	} else {
		for i := range f.Learnt {
			l := &f.Learnt[i]
			r.follow.Learn(ledger.ClaimID{Coordinator: f.Coordinator, Seq: l.Seq}, l.Points, l.PromptTokens)
		}
	}
	for i := range f.Marks {
		m := &f.Marks[i]
		id := ledger.ClaimID{Coordinator: f.Coordinator, Seq: m.Seq}
		switch {
		case m.What == ledger.MarkFirst:
			r.follow.First(id)
		case m.What == ledger.MarkDone:
			cached := -1
			if m.CachedTokens != nil {
				cached = *m.CachedTokens
			}
			r.follow.Done(id, m.OutputTokens, cached)
		case m.What.Ends():
			r.follow.Gone(id)
		}
	}
	return r.followed(now)
}

// followed makes a frame of what the mirror told, if anything: a slot that is in
// use, or that was overwritten, must not be promised again. The lock is held.
func (r *rank) followed(now time.Time) (told bool) {
	if r.told.dirty.IsZero() {
		r.told.dirty = now
	}
	before := r.encoder.Seq()
	r.nextDelta(now)
	if r.encoder.Seq() == before {
		r.told.dirty = time.Time{} // nothing changed
		return false
	}
	return true
}
