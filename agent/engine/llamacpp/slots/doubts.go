package slots

import "slices"

// maxDoubts bounds the requests that are noted for one slot. Most doubts end
// within three pages, so more come together only where these are rare or fail;
// one is enough to hide the slot, and each is looked at with every page.
const maxDoubts = 8

// doubts are the requests that may have overwritten what a slot holds, though they
// are taken to be in others.
type doubts struct {
	noted []*request
	// later is the latest of those that came when there was no room; nil: none did.
	// As the others of them are not known, what is learnt of one request never ends
	// it, but only that the slot is seen to hold what it did long after.
	later *request
}

// any says that what the slot holds may be gone.
func (d *doubts) any() bool { return len(d.noted) > 0 || d.later != nil }

// add notes a request.
func (d *doubts) add(q *request) {
	if len(d.noted) < maxDoubts {
		d.noted = append(d.noted, q)
	} else {
		d.later = q
	}
}

// end forgets a request that was noted.
func (d *doubts) end(q *request) {
	d.noted = slices.DeleteFunc(d.noted, func(o *request) bool { return o == q })
}

// settle ends the doubts that a request made about a sequence; nil: about all that is
// in an idle slot, where it is doubted anew if it may be. What another has taken to be
// overwritten since it would not be.
func (r *Replay) settle(q *request, about *sequence) {
	for i := range r.slots {
		s := &r.slots[i]
		if about == nil || s.held == about {
			s.doubts.end(q)
		}
		if by := s.by; by != nil && about != nil && by.before == about {
			by.beforeDoubts.end(q)
		}
	}
}

// lookAtDoubts ends the doubts that a request made once it is seen where it was
// taken to be, and those about a slot that is seen to hold what it did long after. It
// reports whether there were any.
func (r *Replay) lookAtDoubts(seen []Seen) (changed bool) {
	elsewhere := func(q *request) bool { return q.task > 0 || r.confirmed(q.end) }
	for i := range r.slots {
		s := &r.slots[i]
		before, is := len(s.doubts.noted), s.is(&seen[i])
		kept := func(q *request) bool { return is && r.looks > q.look+1 }
		s.doubts.noted = slices.DeleteFunc(s.doubts.noted, func(q *request) bool { return elsewhere(q) || kept(q) })
		changed = changed || len(s.doubts.noted) < before
		if later := s.doubts.later; later != nil && kept(later) {
			s.doubts.later, changed = nil, true
		}
		if q := s.by; q != nil {
			q.beforeDoubts.noted = slices.DeleteFunc(q.beforeDoubts.noted, elsewhere)
		}
	}
	return changed
}
