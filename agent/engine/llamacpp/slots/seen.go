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
	changed := r.buffers(seen)
	r.looks++
	r.seen, r.seenAt, r.passed = append([]Seen(nil), seen...), r.moves, false
	for i := range r.slots {
		s := &r.slots[i]
		s.usedThen = s.used
		if !seen[i].Busy && !s.busy() && s.held.exact && s.held.tokens == seen[i].Tokens {
			s.confirmed = s.held
		}
	}
	if again {
		changed = r.places(seen, former) || changed
		for i := range seen {
			if seen[i] == former[i] && r.correct(i, seen) {
				changed = true
			}
		}
	}
	if changed {
		r.counts.Corrected++
		r.moves++
		r.publish()
	}
}

// buffers looks whether the slots share one KV buffer. A used slot that is idle
// and holds nothing was emptied by another's request, unless somebody erased
// it; one that holds what it held before a request that came and ended
// elsewhere has a buffer of its own. It reports whether anything changed.
func (r *Replay) buffers(seen []Seen) (changed bool) {
	for i, now := range seen {
		s := &r.slots[i]
		if now.Busy || s.busy() {
			continue
		}
		if now.Tokens == 0 {
			changed = changed || !r.opt.Shared
			r.opt.Shared = true
			return changed
		}
		kept := r.passed && now.Tokens > 0 && len(r.seen) == len(seen) && r.seen[i] == now && s.used == s.usedThen
		if kept && (r.opt.Shared || r.opt.HostTokensOwn > r.cache.limitTokens) {
			r.opt.Shared = false
			r.cache.limitTokens = max(r.cache.limitTokens, r.opt.HostTokensOwn)
			r.cache.most = max(r.cache.most, r.opt.HostTokensOwn)
			r.opt.HostTokensOwn = 0
			changed = true
		}
	}
	return changed
}

// places puts right which slots have a request. One that is in another slot than
// was taken overwrote what that one held; requests beyond those that were told
// are somebody else's; requests that are in no slot have ended.
func (r *Replay) places(seen, former []Seen) (changed bool) {
	var extra, missing []int
	for i := range seen {
		switch s := &r.slots[i]; {
		case seen[i].Busy != former[i].Busy:
		case seen[i].Busy && !s.busy():
			extra = append(extra, i)
		case !seen[i].Busy && s.by != nil:
			missing = append(missing, i)
		}
	}
	for k, i := range extra {
		s := &r.slots[i]
		changed = true
		if k >= len(missing) {
			s.foreign = true
			continue
		}
		o := &r.slots[missing[k]]
		q := o.by
		r.give(s.held)
		q.before, o.held, s.held = s.held, q.before, o.held
		s.by, o.by, q.slot = q, nil, i
	}
	for _, i := range missing[min(len(extra), len(missing)):] {
		changed = true
		s, tokens := &r.slots[i], seen[i].Tokens
		if tokens >= s.by.tokens {
			s.by.began = true
		}
		r.lose(s.by)
		if s.by == nil && tokens >= 0 {
			s.held.tokens, s.held.exact = max(tokens, len(s.held.keys)*ledger.PointTokens), true
		}
	}
	return changed
}

// correct puts right what is held of one idle slot.
func (r *Replay) correct(i int, seen []Seen) bool {
	s, now := &r.slots[i], seen[i]
	switch {
	case now.Busy || s.by != nil:
		return false
	case s.foreign:
		s.foreign = false
		r.clock++
		s.used = r.clock
		s.held = r.unknown(max(0, now.Tokens))
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
