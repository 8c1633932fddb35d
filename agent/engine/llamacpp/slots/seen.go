package slots

import "waypost/gossip/ledger"

// Seen is what the server says of a slot.
type Seen struct {
	// Busy says that a request is under way.
	Busy bool
	// Tokens is the length of what an idle slot holds; -1: it was never used.
	Tokens int
}

// Observe compares the replay with what the server says of its slots, in their
// order. A disagreement counts when it is seen twice with nothing in between:
// requests and their ends are on their way for a while.
func (r *Replay) Observe(seen []Seen) {
	if len(seen) != len(r.slots) {
		return
	}
	again := len(r.seen) == len(seen) && r.seenAt == r.moves
	former := r.seen
	r.seen, r.seenAt = append([]Seen(nil), seen...), r.moves
	if !again {
		return
	}
	changed := false
	for i := range seen {
		if seen[i] == former[i] && r.correct(i, seen) {
			changed = true
		}
	}
	if changed {
		r.counts.Corrected++
		r.moves++
		r.publish()
	}
}

// correct puts right what is held of one slot.
func (r *Replay) correct(i int, seen []Seen) bool {
	s, now := &r.slots[i], seen[i]
	switch {
	case now.Busy && !s.busy():
		// Nobody told of this request; what the slot held is overwritten.
		s.foreign = true
		return true
	case now.Busy:
		return false
	case s.foreign:
		s.foreign = false
		r.clock++
		s.used = r.clock
		s.held = r.unknown(max(0, now.Tokens))
		return true
	case s.by != nil:
		// Its end was not told, or it is elsewhere.
		if q := s.by; now.Tokens >= q.tokens {
			q.began = true
		}
		r.lose(s.by)
		if s.by == nil && now.Tokens >= 0 {
			s.held.tokens, s.held.exact = max(now.Tokens, len(s.held.keys)*ledger.PointTokens), true
		}
		return true
	}
	tokens := max(0, now.Tokens)
	switch {
	case s.held.tokens == tokens:
		return false
	case !s.held.exact && tokens >= len(s.held.keys)*ledger.PointTokens:
		s.held.tokens, s.held.exact = tokens, true
		return false
	}
	for k := range r.slots {
		// What was taken to be in another slot, and is not there.
		if o := &r.slots[k]; k != i && !o.busy() && o.held.exact && o.held.tokens == tokens && !seen[k].Busy && seen[k].Tokens != tokens && tokens > 0 {
			s.held, o.held = o.held, s.held
			s.used, o.used = o.used, s.used
			return true
		}
	}
	if tokens == 0 && s.held.tokens > 0 {
		// Emptied by a new request, unless somebody erased it; then as much is
		// in the host cache, if there is one.
		r.opt.Shared = true
	} else if tokens > 0 && s.held.tokens == 0 {
		r.opt.Shared = false
	}
	s.held = r.unknown(tokens)
	return true
}

// unknown is what a slot holds of which only the length is known; what has lost
// its slot and has this length is it.
func (r *Replay) unknown(tokens int) *sequence {
	for i, s := range r.strays {
		if s.tokens == tokens {
			r.strays = append(r.strays[:i], r.strays[i+1:]...)
			return s
		}
	}
	return &sequence{tokens: tokens, exact: true}
}
