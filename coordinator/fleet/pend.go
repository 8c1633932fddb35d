package fleet

import (
	"math"
	"slices"

	"waypost/gossip/ledger"
)

// maxPending bounds the claims per coordinator and worker that are not in the
// worker's report; the oldest beyond it are folded into the report.
const maxPending = 1024

// offerableMs is how long a claim is offered to its worker's agent, and how
// long one of a peer is kept while no report comes.
const offerableMs = 60_000

// part is a claim at one worker: of an own placement or of a peer's.
type part struct {
	c           *claim // the own placement; nil: a peer's
	w           *worker
	coordinator uint64
	number      uint64 // names its predicted keys
	ledger.Claim
	first     bool    // its first token was seen
	covered   bool    // the report in hand speaks of it, or must have by now
	folded    bool    // it is in the base, for the bound
	echoed    bool    // an agent took it in: it is not offered again
	offeredMs float64 // when it was last offered
	extended  bool    // more is predicted of it than its keys
}

// pending reports whether it counts on top of the report.
func (p *part) pending() bool { return !p.covered && !p.folded }

// waits reports whether its prefill is ahead and not in the report.
func (p *part) waits() bool { return p.pending() && !p.first }

// before orders claims by the time they were made.
func (p *part) before(o *part) bool {
	switch {
	case p.MadeMs != o.MadeMs:
		return p.MadeMs < o.MadeMs
	case p.coordinator != o.coordinator:
		return p.coordinator < o.coordinator
	}
	return p.Seq < o.Seq
}

// insert puts a claim among those of its worker and into the waiting work.
func (f *Fleet) insert(w *worker, p *part) {
	at := len(w.open)
	for at > 0 && p.before(w.open[at-1]) {
		at--
	}
	last := at == len(w.open)
	w.open = slices.Insert(w.open, at, p)
	switch {
	case !p.waits():
	case last:
		w.waiting.Fold(&w.steps, p.MadeMs, p.ReusedTokens(), p.UncachedTokens)
	default:
		w.refold()
	}
	f.bound(w, p.coordinator)
}

// bound folds a coordinator's oldest claims into the report when too many are
// on top. The order of folding stays the same, so the waiting work does as
// well.
func (f *Fleet) bound(w *worker, coordinator uint64) {
	if len(w.open) <= maxPending {
		return
	}
	over := -maxPending
	for _, p := range w.open {
		if p.coordinator == coordinator && p.pending() {
			over++
		}
	}
	for _, p := range w.open {
		if over <= 0 {
			return
		}
		if p.coordinator == coordinator && p.pending() {
			f.fold(w, p)
			over--
		}
	}
}

// fold moves a claim into the base of its worker.
func (f *Fleet) fold(w *worker, p *part) {
	if p.waits() {
		w.base.Fold(&w.steps, p.MadeMs, p.ReusedTokens(), p.UncachedTokens)
	}
	p.folded = true
	w.report.foldedLive += float64(p.Sequences)
	f.counts.FoldedClaims++
}

// cover judges every claim by a report just taken: those it echoes are in it;
// those it does not echo although it was built long after them are not waited
// for, because their lane is broken: they show up as foreign requests, or never
// were sent. Claims of peers have then done their part here.
func (f *Fleet) cover(w *worker, l *ledger.Load) {
	r := &w.report
	w.echoing = w.echoing || len(l.Echo) > 0
	kept := w.open[:0]
	var bounded []uint64
	for _, p := range w.open {
		echoed := p.Seq <= l.EchoOf(p.coordinator)
		if p.folded {
			p.folded = math.IsNaN(r.queueMs) // else the base began anew
			if !slices.Contains(bounded, p.coordinator) {
				bounded = append(bounded, p.coordinator)
			}
		}
		if covered := r.covers(p.MadeMs, echoed, w.echoing, f.graceMs); covered || !math.IsNaN(r.queueMs) {
			p.covered = covered
		}
		if p.folded && !p.covered {
			r.foldedLive += float64(p.Sequences) // this report does not have it either
		}
		if p.c == nil && p.covered && r.writtenMs-p.MadeMs > f.graceMs {
			f.claims.peerParts--
			continue
		}
		p.echoed = p.echoed || p.c != nil && echoed
		kept = append(kept, p)
	}
	clear(w.open[len(kept):])
	w.open = kept
	for _, coordinator := range bounded {
		f.bound(w, coordinator)
	}
}

// covers reports whether the report speaks of a claim; echoing says that the
// host's agents echo claims at all.
func (r *report) covers(madeMs float64, echoed, echoing bool, graceMs float64) bool {
	switch {
	case echoed:
		return true
	case math.IsNaN(r.queueMs):
		return false // it speaks of no queue at all: claims count on
	case echoing || math.IsNaN(r.sampledMs):
		return r.writtenMs-madeMs > graceMs
	}
	return r.sampledMs-madeMs > counterGraceMs
}

// dropPeers takes the claims of peers off a worker for which drop says so, and
// reports whether there was one.
func (f *Fleet) dropPeers(w *worker, drop func(*part) bool) (dropped bool) {
	w.open = slices.DeleteFunc(w.open, func(p *part) bool {
		if p.c != nil || !drop(p) {
			return false
		}
		f.claims.peerParts--
		dropped = true
		return true
	})
	return dropped
}

// expirePeers folds claims of peers that no report spoke of for a minute, and
// takes kept keys back whose time is over.
func (f *Fleet) expirePeers(w *worker, nowMs float64, changes *Changes) {
	changed := false
	for len(w.open) > 0 && nowMs-w.open[0].MadeMs >= offerableMs {
		at := slices.IndexFunc(w.open, func(p *part) bool { return p.c == nil })
		if at < 0 || nowMs-w.open[at].MadeMs < offerableMs {
			break
		}
		p := w.open[at]
		if p.waits() {
			w.base.Fold(&w.steps, p.MadeMs, p.ReusedTokens(), p.UncachedTokens)
		}
		f.dropPeers(w, func(other *part) bool { return other == p })
		changed = true
	}
	if changed {
		w.refold()
		f.publish(w, nowMs, changes)
	}
	f.dropKeys(w, func(k keptKeys) bool { return nowMs >= k.untilMs })
}
