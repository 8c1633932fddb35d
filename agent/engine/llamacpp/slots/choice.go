package slots

import (
	"cmp"
	"slices"

	"waypost/gossip/ledger"
)

// densePace is from how many requests between two observations on it counts that
// one that is on its way may come before another that is placed.
const densePace = 2

// reuse is how much of a request a slot shares, between two points: least to
// most tokens.
type reuse struct{ least, most int }

// otherSlot is a slot that the server may have chosen for a request, what it held
// and how much of the request that shares.
type otherSlot struct {
	held *sequence
	reuse
}

// reuseOf is how much of a request a slot's content shares. Where all of its known
// points are shared, as much of what it holds beyond may be.
func (s *sequence) reuseOf(q *request) reuse {
	least := min(s.shared(q.keys), q.tokens)
	most := least + ledger.PointTokens - 1
	if least == s.sure() || least == len(q.keys)*ledger.PointTokens {
		most = s.tokens
	}
	return reuse{least, min(most, s.tokens, q.tokens)}
}

// choose finds the slot as the server does; -1: the request waits.
func (r *Replay) choose(q *request) int {
	if q.pinned >= 0 {
		if r.slots[q.pinned].busy() {
			return -1
		}
		return q.pinned
	}
	best, most := -1, 0
	for i := range r.slots {
		s := &r.slots[i]
		if s.busy() || s.held.tokens == 0 {
			continue
		}
		if lcp := s.held.shared(q.keys); lcp > most && share(lcp, q.tokens) > r.opt.Similarity {
			best, most = i, lcp
		}
	}
	if best >= 0 {
		return best
	}
	for i := range r.slots {
		if s := &r.slots[i]; !s.busy() && (best < 0 || s.used <= r.slots[best].used) {
			best = i
		}
	}
	return best
}

// doubtOthers notes which slots the server may have chosen for a request instead
// of one: what lies between two points decides whether a slot shares enough, and
// which one shares most. What they hold may be overwritten.
func (r *Replay) doubtOthers(q *request, chosen int) {
	q.own, q.others = r.slots[chosen].held.reuseOf(q), nil
	if q.pinned >= 0 || r.cache.limitTokens > 0 {
		return
	}
	enough := func(tokens int) bool { return share(tokens, q.tokens) > r.opt.Similarity }
	sure, oldest := 0, -1
	for i := range r.slots {
		s := &r.slots[i]
		if s.busy() {
			continue
		}
		if least := s.held.reuseOf(q).least; !s.doubts.any() && enough(least) {
			sure = max(sure, least)
		}
		if oldest < 0 || s.used <= r.slots[oldest].used {
			oldest = i
		}
	}
	for i := range r.slots {
		s := &r.slots[i]
		if s.busy() || i == chosen || s.held.tokens == 0 {
			continue
		}
		if of := s.held.reuseOf(q); enough(of.most) && of.most >= sure || sure == 0 && (i == oldest || together(&r.slots[oldest], s)) {
			s.doubts.add(q)
			q.others = append(q.others, otherSlot{s.held, of})
		}
	}
}

// together says that of two slots that became idle one after the other it is not
// known which was the first: their requests ran at once, and no observation lies
// between their ends.
func together(first, second *slot) bool {
	return first.latest != nil && second.latest != nil && first.endLook == second.endLook && second.latest.nth <= first.endNth
}

// tell learns from the reuse that the server reported which of the slots that it
// may have chosen for a request it did.
func (r *Replay) tell(q *request, cached int) {
	if cached < 0 || q.slot < 0 || q.taken != nil {
		return
	}
	fits := func(of reuse) bool {
		// At least one token is computed.
		return cached >= min(of.least, q.tokens-1) && cached <= of.most
	}
	if !fits(q.own) && !slices.ContainsFunc(q.others, func(o otherSlot) bool { return fits(o.reuse) }) {
		return // it was in none of them
	}
	q.others = slices.DeleteFunc(q.others, func(o otherSlot) bool {
		if fits(o.reuse) {
			return false
		}
		r.settle(q, o.held)
		return true
	})
	if fits(q.own) || len(q.others) != 1 {
		return
	}
	for i := range r.slots {
		if s := &r.slots[i]; s.held == q.others[0].held && slices.Contains(s.doubts.noted, q) && !s.busy() {
			// What it was taken to have overwritten was there if all else was right.
			former := &r.slots[q.slot]
			r.move(q.slot, i)
			former.doubts.add(q)
			q.others = nil
			return
		}
	}
}

// confirmed says that a sequence was seen in a slot at the latest observation.
func (r *Replay) confirmed(e *sequence) bool {
	return e != nil && slices.ContainsFunc(r.slots, func(s slot) bool { return s.confirmed == e })
}

// atRisk are the idle slots that requests on their way may overwrite before one that
// is placed now, where no host cache keeps what they held: those least recently
// used. Where requests come seldom the like is rare, and hiding them would cost more.
func (r *Replay) atRisk() []int {
	sum := 0
	for _, n := range r.crowds {
		sum += n
	}
	// The mean of how many were under way, rounded, counts the beginner itself.
	unseen := (sum+crowdRequests/2)/crowdRequests - 1 - len(r.order)
	if r.cache.limitTokens > 0 || unseen < 1 || !r.dense() {
		return nil
	}
	var idle []int
	for i := range r.slots {
		if !r.slots[i].busy() {
			idle = append(idle, i)
		}
	}
	slices.SortStableFunc(idle, func(a, b int) int { return cmp.Compare(r.slots[a].used, r.slots[b].used) })
	return idle[:min(unseen, len(idle))]
}

// dense says that requests come at a pace at which one overtakes another.
func (r *Replay) dense() bool { return max(r.begun, r.begunBefore) >= densePace }
