package slots

// Seen is what the server says of a slot.
type Seen struct {
	// Busy says that a request is under way.
	Busy bool
	// Tokens is the length of what the slot holds; -1: it was never used.
	Tokens int
	// Prompt is the length of a busy slot's prompt once all of it is computed;
	// 0: not known.
	Prompt int
	// Task names the latest request in the slot, no two of a server alike; 0: not
	// known.
	Task uint64
}

// ran says that a slot had a request between two observations, or may have had.
func (now *Seen) ran(former *Seen) bool {
	return now.Busy != former.Busy || now.Task != former.Task || !now.Busy && now.Tokens != former.Tokens
}

// look is what was believed of a slot at the latest observation.
type look struct {
	held *sequence
	by   *request
}

// Observe compares the replay with what the server says of its slots, in their
// order. Requests and their ends are on their way for a while and overtake each
// other, so there is always some disagreement; but lengths name what a slot holds
// and has, and few are alike. What is believed of one slot and seen in another is
// moved there at once: that changes nothing of what can be reused. What lengths do
// not explain is put right when the same is seen twice while nothing was told of
// that slot, whatever happens in the others.
func (r *Replay) Observe(seen []Seen) {
	if len(seen) != len(r.slots) {
		return
	}
	changed := r.buffers(seen)
	changed = r.arrange(seen) || changed
	r.admit(seen)
	for i := range seen {
		if r.correct(i, seen) {
			r.counts.Corrected++
			changed = true
		}
	}
	for i := range r.slots {
		s, now := &r.slots[i], &seen[i]
		s.confirmed = nil
		if s.is(now) {
			if now.Busy {
				s.by.task = now.Task
			} else {
				s.held.task, s.confirmed = now.Task, s.held
			}
		}
		s.look = look{held: s.held, by: s.by}
	}
	changed = r.lookAtDoubts(seen) || changed
	r.looks++
	dense := r.dense()
	r.begun, r.begunBefore = 0, r.begun
	changed = changed || dense != r.dense()
	r.seen, r.passed = append(r.seen[:0], seen...), false
	if changed {
		r.publish()
	}
}

// is says that a slot is surely what was seen, by its length.
func (s *slot) is(now *Seen) bool {
	switch {
	case now.Busy:
		return s.by != nil && now.Prompt > 0 && s.by.tokens == now.Prompt && same(s.by.task, now.Task)
	case now.Tokens > 0:
		return !s.busy() && s.held.exact && s.held.tokens == now.Tokens && same(s.held.task, now.Task)
	}
	return false
}

// same says that two names of requests, as far as known, are one's.
func same(a, b uint64) bool { return a == 0 || b == 0 || a == b }

// buffers looks whether the slots share one KV buffer. A used slot that is idle
// and holds nothing was emptied by another's request, unless somebody erased
// it; one that holds what it held before a request that came elsewhere has a
// buffer of its own. It reports whether anything changed.
func (r *Replay) buffers(seen []Seen) (changed bool) {
	came := r.passed
	for i := range seen {
		came = came || len(r.seen) > 0 && seen[i].Task != r.seen[i].Task && seen[i].Task > 0
	}
	for i := range seen {
		s, now := &r.slots[i], &seen[i]
		if now.Busy || s.busy() {
			continue
		}
		if now.Tokens == 0 {
			changed = changed || !r.opt.Shared
			r.opt.Shared, r.own = true, false
			return changed
		}
		kept := came && now.Tokens > 0 && len(r.seen) > 0 && r.seen[i] == *now && (now.Task > 0 || s.look == look{held: s.held})
		if kept && !r.own {
			r.opt.Shared, r.own = false, true
			r.cache.limitTokens = max(r.cache.limitTokens, r.opt.HostTokensOwn)
			r.cache.most = max(r.cache.most, r.opt.HostTokensOwn)
			changed = true
		}
	}
	return changed
}

// arrange puts what is believed of the slots into those where it is seen.
func (r *Replay) arrange(seen []Seen) (changed bool) {
	for _, busy := range []bool{false, true} {
		for i := range seen {
			if seen[i].Busy != busy || r.slots[i].is(&seen[i]) {
				continue
			}
			for k := range seen {
				if s := &r.slots[k]; k == i || !s.is(&seen[i]) || s.is(&seen[k]) {
					continue
				}
				if busy && !r.slots[i].busy() && !seen[k].Busy {
					// The contents that are seen have their places already: this
					// request went where it was not expected.
					r.move(k, i)
					changed = true
				} else {
					r.swap(i, k)
				}
				break
			}
		}
	}
	return changed
}

// admit gives up requests that are taken to wait, though they were told before the
// latest observation and there is a slot for them: they have ended untold.
func (r *Replay) admit(seen []Seen) {
	idle := false
	for i := range seen {
		idle = idle || !seen[i].Busy
	}
	for k := 0; k < len(r.order); {
		if q := r.order[k]; q.slot < 0 && q.told < r.looks && (q.pinned < 0 && idle || q.pinned >= 0 && !seen[q.pinned].Busy) {
			r.lose(q, nil)
			continue
		}
		k++
	}
}

// swap exchanges two slots.
func (r *Replay) swap(i, k int) {
	r.slots[i], r.slots[k] = r.slots[k], r.slots[i]
	r.latest = launched{} // it names slots by their numbers
	for _, at := range []int{i, k} {
		if q := r.slots[at].by; q != nil {
			q.slot = at
		}
	}
}

// move puts the request of one slot into another that is idle: it overwrote what
// that one held, and not what its own did.
func (r *Replay) move(from, to int) {
	o, s := &r.slots[from], &r.slots[to]
	q := o.by
	r.give(s.held)
	q.before, o.held, s.held = s.held, q.before, o.held
	s.by, o.by, q.slot, s.foreign = q, nil, to, false
	s.doubts.end(q)
	q.beforeDoubts, o.doubts, s.doubts = s.doubts, q.beforeDoubts, doubts{}
}

// correct puts right what is believed of one slot.
func (r *Replay) correct(i int, seen []Seen) (changed bool) {
	s, now := &r.slots[i], &seen[i]
	tokens := max(0, now.Tokens)
	// settled says that what was told before the latest observation has had its
	// time, again that the server has said the same then.
	settled := len(r.seen) > 0 && s.look == look{held: s.held, by: s.by}
	again := settled && !now.ran(&r.seen[i])
	switch {
	case s.is(now):
		return false
	case now.Busy && s.by == nil:
		if s.foreign || !again {
			return false
		}
		r.give(s.held)
		s.foreign = true
		return true
	case now.Busy:
		if !again || now.Prompt == 0 || !s.by.whole() {
			return false // the length of its prompt is not that sure
		}
		r.lose(s.by, &sequence{})
		if s.by == nil {
			s.foreign = true
		}
		return true
	case s.by != nil:
		if !settled {
			return false
		}
		q := s.by
		for k := range r.slots {
			if o := &r.slots[k]; seen[k].Busy && o.by == nil && seen[k].Prompt == 0 && same(q.task, seen[k].Task) {
				// A request is there that nothing else explains.
				r.move(i, k)
				return true
			}
		}
		switch held := r.known(now); {
		case q.before.exact && tokens == q.before.tokens && same(q.before.task, now.Task):
			former := q.beforeDoubts
			if r.lose(q, q.before); s.held == q.before {
				s.doubts = former
			}
		case held == nil && tokens >= q.tokens && same(q.task, now.Task):
			r.lose(q, &sequence{keys: q.keys, tokens: tokens, exact: true, partial: !q.whole(), task: now.Task})
		default:
			r.lose(q, r.unknown(now))
		}
		return true
	case s.foreign:
		s.foreign = false
		r.fill(s, r.unknown(now))
		return true
	case s.held.tokens == tokens && same(s.held.task, now.Task):
		s.held.exact = true
		return false
	case !s.held.exact && tokens >= s.held.sure() && same(s.held.task, now.Task):
		// What may have been overwritten may be another's that is as long.
		if settled && (!s.doubts.any() || s.held.task > 0 && s.held.task == now.Task) {
			s.held.tokens, s.held.exact = tokens, true
		}
		return false
	case tokens == 0:
		if again || settled && r.opt.Shared {
			r.give(s.held)
			s.held = &sequence{exact: true}
			return true
		}
		return false
	}
	held := r.known(now)
	switch {
	case held != nil && settled:
	case again:
		held = r.unknown(now)
	default:
		return false
	}
	r.give(s.held)
	r.fill(s, held)
	return true
}

// fill notes that a slot holds what a request left that was not taken to be there.
func (r *Replay) fill(s *slot, held *sequence) {
	r.clock++
	s.held, s.used, s.doubts = held, r.clock, doubts{}
}

// known is what ended of late and is as long as what an idle slot holds; nil:
// nothing.
func (r *Replay) known(now *Seen) *sequence {
	if now.Tokens <= 0 {
		return nil
	}
	for i := len(r.ended) - 1; i >= 0; i-- {
		if e := r.ended[i]; e.exact && e.tokens == now.Tokens && same(e.task, now.Task) && !r.inSlot(e) {
			return e
		}
	}
	return nil
}

// unknown is what an idle slot holds, of which only the length is sure.
func (r *Replay) unknown(now *Seen) *sequence {
	if s := r.known(now); s != nil {
		return s
	}
	return &sequence{tokens: max(0, now.Tokens), exact: true, task: now.Task}
}

func (r *Replay) inSlot(e *sequence) bool {
	for i := range r.slots {
		if r.slots[i].held == e {
			return true
		}
	}
	return false
}

// remember keeps what a request left: a slot may turn out to hold it.
func (r *Replay) remember(e *sequence) {
	r.ended = append(r.ended, e)
	r.ended = r.ended[max(0, len(r.ended)-maxEndedPerSlot*len(r.slots)-minEnded):]
}

// place finds a place for what a request left that was in no slot, or not any
// more. Where something of its length was found already, this is it; else it is
// in a slot that is not known, or in the host cache soon.
func (r *Replay) place(e *sequence) {
	r.remember(e)
	placed := false
	for i := range r.slots {
		if s := &r.slots[i]; !s.busy() && e.names(s.held) && !r.inSlot(e) {
			s.held, placed = e, true
			break
		}
	}
	for i, o := range r.cache.entries {
		if e.names(o) && !r.cache.holds(e) {
			r.cache.entries[i], placed = e, true
			r.cache.changes++
			break
		}
	}
	if !placed {
		r.give(e)
	}
}

// names says that another sequence, of which only the length is known, may be
// this one.
func (s *sequence) names(other *sequence) bool {
	return other != s && len(other.keys) == 0 && len(s.keys) > 0 && s.exact && other.exact && other.tokens == s.tokens && same(other.task, s.task)
}
