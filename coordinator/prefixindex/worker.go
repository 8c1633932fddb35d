package prefixindex

import (
	"sync/atomic"

	"waypost/gossip/summary"
)

// worker is what the index knows about one worker. The writer lock guards it.
type worker struct {
	id         WorkerID
	slot       uint32
	gone       bool // dropped; what still writes to it writes nowhere
	unverified bool
	keys       int      // listed or predicted
	details    *segment // of the slot; nil: all is ordinary
	claims     map[uint64]path
	retained   *retained // nil: predictions end with their claim
}

// detail says why and how a worker is listed under a key, where that is not the
// ordinary case: listed once by its stream, with a whole extent.
type detail struct {
	listed    uint32 // times added by the stream
	predicted uint32 // claims, and one if it is retained
	extent    summary.Extent
	partial   bool // the extent is not whole; else extent is not set
}

var ordinary = detail{listed: 1}

func (d *detail) isHeld() bool       { return d.listed+d.predicted > 0 }
func (d *detail) isOnlyClaims() bool { return d.listed == 0 && d.predicted > 0 }

// Details stand in a segment per worker, for readers too: the spot of the key;
// listed, predicted, usable tokens; GPU and host tokens.
const (
	detailStride = 3

	maxCount = 1<<16 - 1
	// wholeExtent in place of the usable tokens says that the extent is whole.
	wholeExtent = 1<<32 - 1
	allBits     = ^uint64(0)
)

// word is a spot as it stands in the details; never 0.
func (p spot) word() uint64 { return p.tag | uint64(p.segment)<<1 | 1 }

// detailAt reads the detail at i.
func (v view) detailAt(i int) detail {
	rest := v.rest(i)
	a, b := atomic.LoadUint64(&rest[0]), atomic.LoadUint64(&rest[1])
	d := detail{listed: uint32(a >> 48), predicted: uint32(a >> 32 & maxCount)}
	if usable := uint32(a); usable != wholeExtent {
		d.partial = true
		d.extent = summary.Extent{UsableTokens: usable, GPUTokens: uint32(b >> 32), HostTokens: uint32(b)}
	}
	return d
}

// words are those of a detail after the hash.
func (d *detail) words() (a, b uint64) {
	a = uint64(d.listed)<<48 | uint64(d.predicted)<<32 | wholeExtent
	if d.partial {
		a = a&^wholeExtent | uint64(d.extent.UsableTokens)
		b = uint64(d.extent.GPUTokens)<<32 | uint64(d.extent.HostTokens)
	}
	return a, b
}

// detail returns what is recorded of a worker's key; false: nothing, so it is
// ordinary if it is held at all.
func (x *Index) detail(w *worker, at spot) (detail, bool) {
	if w.details == nil {
		return detail{}, false
	}
	v := w.details.view()
	i, _ := v.find(at.word(), allBits)
	if i < 0 {
		return detail{}, false
	}
	return v.detailAt(i), true
}

// record stores a detail, or forgets it if it is ordinary or says nothing.
func (x *Index) record(w *worker, at spot, d detail) {
	needless := !d.isHeld() || d == ordinary
	if w.details == nil {
		if needless {
			return
		}
		s := &segment{stride: detailStride}
		s.resize()
		x.setDetails(w, s)
	}
	s, v := w.details, w.details.view()
	i, _ := v.find(at.word(), allBits)
	if needless {
		if i >= 0 {
			x.forget(w, i)
		}
		return
	}
	if i < 0 && s.isFull() {
		s.resize()
	}
	a, b := d.words()
	s.begin()
	if i < 0 {
		i = s.put(at.word())
		v = s.view()
	}
	rest := v.rest(i)
	atomic.StoreUint64(&rest[0], a)
	atomic.StoreUint64(&rest[1], b)
	s.end()
}

func (x *Index) setDetails(w *worker, s *segment) {
	w.details = s
	x.slots.setDetails(w.slot, s)
}

func (x *Index) forget(w *worker, i int) {
	s := w.details
	s.begin()
	s.remove(i)
	s.end()
	switch {
	case s.used == 0:
		x.setDetails(w, nil)
	case s.isSparse():
		s.resize()
	}
}

// change replaces what a worker's key is. A search that runs meanwhile sees
// either, and never a prediction as something listed, nor a whole extent that was
// not told.
func (x *Index) change(w *worker, n *name, was, is detail) {
	if is.listed == 0 || !is.partial {
		is.partial, is.extent = false, summary.Extent{}
	}
	at, info := x.spot(n), uint32(0)
	if is.partial {
		x.record(w, at, is)
		x.partial.add(at, w.slot, 0)
		info |= infoPartial
	}
	if is.isOnlyClaims() {
		x.predicted.add(at, w.slot, 0)
		info |= infoPredicted
	}
	if is.isHeld() {
		x.enlist(w, n, info)
	} else {
		x.delist(w, n)
	}
	if was.partial && !is.partial {
		x.unmark(&x.partial, at, w, infoPartial)
	}
	if was.isOnlyClaims() && !is.isOnlyClaims() {
		x.unmark(&x.predicted, at, w, infoPredicted)
	}
	if !is.partial {
		x.record(w, at, is)
	}
}

// list counts a listing of a key by the worker's stream, and sets its extent if
// one is given.
func (x *Index) list(w *worker, n *name, e *summary.Extent) {
	at := x.spot(n)
	was, ok := x.detail(w, at)
	if !ok && e != nil && x.held.has(at, w.slot) {
		was, ok = ordinary, true
	}
	if ok || e != nil {
		is := was
		is.listed = min(is.listed+1, maxCount)
		if e != nil {
			is.partial, is.extent = *e != summary.WholeExtent(n.depth), *e
		}
		x.change(w, n, was, is)
		return
	}
	if !x.enlist(w, n, 0) {
		// It is listed already: two of the worker's own keys collide.
		x.record(w, at, detail{listed: 2})
	}
}

// unlist takes a listing back.
func (x *Index) unlist(w *worker, n *name) {
	was, ok := x.detail(w, x.spot(n))
	if !ok {
		x.delist(w, n)
		return
	}
	is := was
	is.listed = max(is.listed, 1) - 1
	x.change(w, n, was, is)
}

// setExtent replaces the extent of a key that the stream lists.
func (x *Index) setExtent(w *worker, n *name, e summary.Extent) {
	at := x.spot(n)
	was, ok := x.detail(w, at)
	if !ok {
		if e == summary.WholeExtent(n.depth) || !x.held.has(at, w.slot) {
			return
		}
		was = ordinary
	}
	if was.listed == 0 {
		return
	}
	is := was
	is.partial = e != summary.WholeExtent(n.depth)
	is.extent = e
	x.change(w, n, was, is)
}
