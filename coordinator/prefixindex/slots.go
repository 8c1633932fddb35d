package prefixindex

import (
	"math/bits"
	"sync/atomic"
)

const slotWords = maxSlots / 64

// slots are the numbers that stand for workers in sets. A worker has the slot
// of its own number if that is free; after it was dropped or cleared, its old
// slot is used by nobody until it is swept out of all sets.
type slots struct {
	width      atomic.Uint32            // words of a bitmap of all slots in use, and of all workers
	alive      [slotWords]atomic.Uint64 // slots of workers
	unverified [slotWords]atomic.Uint64 // those of workers whose stream is unverified
	natural    [slotWords]atomic.Uint64 // those whose number is the worker's
	pages      [slotWords]atomic.Pointer[slotPage]
	doubtful   atomic.Uint32 // number of unverified ones
	version    atomic.Uint32 // odd while alive changes; changes before an owner does

	used    [slotWords]uint64 // alive or unswept; the writer's
	highest uint32            // worker id seen; the writer's
}

type slotPage struct {
	owner   [64]atomic.Uint32
	details [64]atomic.Pointer[segment] // nil: all ordinary
}

func (s *slots) set(of *[slotWords]atomic.Uint64, id uint32, on bool) {
	w, bit := &of[id/64], uint64(1)<<(id%64)
	if on {
		w.Store(w.Load() | bit)
	} else {
		w.Store(w.Load() &^ bit)
	}
}

func (s *slots) isFree(id uint32) bool { return s.used[id/64]>>(id%64)&1 == 0 }

func (s *slots) owner(id uint32) WorkerID {
	return WorkerID(s.pages[id/64].Load().owner[id%64].Load())
}

// details returns the records of a slot, or nil.
func (s *slots) details(id uint32) *segment { return s.pages[id/64].Load().details[id%64].Load() }

func (s *slots) setDetails(id uint32, d *segment) {
	s.pages[id/64].Load().details[id%64].Store(d)
}

// free finds a slot for a worker: its own, or the first one beyond all
// workers' own ones, or any. It reports false if all are in use.
func (s *slots) free(id uint32) (uint32, bool) {
	s.highest = max(s.highest, id)
	if s.isFree(id) {
		return id, true
	}
	for _, from := range [...]uint32{s.highest + 1, 0} {
		for i := from / 64; i < slotWords; i++ {
			w := s.used[i]
			if i == from/64 {
				w |= 1<<(from%64) - 1
			}
			if w != ^uint64(0) {
				return 64*i + uint32(bits.TrailingZeros64(^w)), true
			}
		}
	}
	return 0, false
}

// reserve makes a free slot a worker's. Nobody sees it before it is switched to.
func (s *slots) reserve(slot uint32, id WorkerID) {
	s.version.Add(2) // searches that saw it as another worker's are repeated
	p := s.pages[slot/64].Load()
	if p == nil {
		p = new(slotPage)
		s.pages[slot/64].Store(p)
	}
	p.owner[slot%64].Store(uint32(id))
	s.used[slot/64] |= 1 << (slot % 64)
	s.set(&s.natural, slot, slot == uint32(id))
	s.width.Store(max(s.width.Load(), slot/64+1, uint32(id)/64+1))
}

// show makes a slot visible instead of another one, or of none.
func (s *slots) show(slot uint32, hide ...uint32) {
	s.version.Add(1)
	for _, old := range hide {
		s.set(&s.alive, old, false)
	}
	s.set(&s.alive, slot, true)
	s.version.Add(1)
}

// setUnverified marks the slot of a worker whose stream is not to be believed.
func (s *slots) setUnverified(slot uint32, on bool) {
	switch was := s.unverified[slot/64].Load()>>(slot%64)&1 != 0; {
	case on && !was:
		s.doubtful.Add(1)
	case was && !on:
		s.doubtful.Add(^uint32(0))
	}
	s.set(&s.unverified, slot, on)
}

// narrow fits the width to the slots in use.
func (s *slots) narrow() {
	n := s.width.Load()
	for n > s.highest/64+1 && s.used[n-1] == 0 {
		n--
	}
	s.width.Store(n)
}

// reserveSlot finds a slot for a worker. It is to be shown.
func (x *Index) reserveSlot(id WorkerID) uint32 {
	slot, ok := x.slots.free(uint32(id))
	if !ok {
		x.sweepAll()
		slot, _ = x.slots.free(uint32(id)) // workers are fewer than slots
	}
	x.slots.reserve(slot, id)
	x.sets.width = int(x.slots.width.Load())
	return slot
}

// retireSlot forgets a slot that is shown no longer. What stands under it is
// swept later.
func (x *Index) retireSlot(slot uint32) {
	x.slots.set(&x.slots.alive, slot, false)
	x.slots.set(&x.slots.natural, slot, false)
	x.slots.setUnverified(slot, false)
	x.slots.setDetails(slot, nil)
	x.sweep.add(slot)
}

// sweep takes slots of dropped workers out of all sets, a few segments with
// every change.
type sweep struct {
	waiting []uint64 // slots dropped since the pass began
	pass    []uint64 // slots that the pass takes out
	next    int      // segment; segments: no pass
	active  bool
}

// sweepStep is the number of segments swept with a change.
const sweepStep = 8

func (s *sweep) add(slot uint32) {
	if s.waiting == nil {
		s.waiting, s.pass = make([]uint64, slotWords), make([]uint64, slotWords)
	}
	s.waiting[slot/64] |= 1 << (slot % 64)
}

func (s *sweep) unswept() int {
	n := 0
	for i := range s.waiting {
		n += bits.OnesCount64(s.waiting[i]) + bits.OnesCount64(s.pass[i])
	}
	return n
}

func (s *sweep) isDead(slot uint32) bool { return s.pass[slot/64]>>(slot%64)&1 != 0 }

// sweepSome goes on with the sweep, if there is anything to do.
func (x *Index) sweepSome() {
	if x.sweep.waiting == nil {
		return
	}
	for range sweepStep {
		if !x.sweepStep() {
			return
		}
	}
}

// sweepAll sweeps all dropped slots.
func (x *Index) sweepAll() {
	if x.sweep.waiting == nil {
		return
	}
	for x.sweepStep() {
	}
}

// sweepStep sweeps a segment of each table; false: nothing is left to do.
func (x *Index) sweepStep() bool {
	s := &x.sweep
	if !s.active {
		if !s.begin() {
			return false
		}
	}
	x.sweepSegment(&x.predicted, s.next, 0)
	x.sweepSegment(&x.partial, s.next, 0)
	x.sweepSegment(&x.held, s.next, infoPoint) // while their checkpoints are there
	x.sweepSegment(&x.held, s.next, 0)
	if s.next++; s.next == segments {
		s.active = false
		x.freeSwept()
	}
	return true
}

// begin starts a pass over the slots that wait for one.
func (s *sweep) begin() bool {
	for i, w := range s.waiting {
		s.active = s.active || w != 0
		s.pass[i] |= w
		s.waiting[i] = 0
	}
	s.next = 0
	return s.active
}

// freeSwept lets the slots of a finished pass be used again.
func (x *Index) freeSwept() {
	for i, w := range x.sweep.pass {
		x.slots.used[i] &^= w
		x.sweep.pass[i] = 0
	}
	x.slots.narrow()
}

// sweepSegment takes the dead out of those sets of a segment whose info has some
// bits.
func (x *Index) sweepSegment(t *table, number int, having uint32) {
	if t.dir == nil {
		return
	}
	at := place{seg: &t.dir[number], v: t.dir[number].view()}
	for at.i < at.v.slots {
		e := x.full.entryOf(at.v.load(at.i))
		dead, any := x.someDead(e.members)
		if !any || e.info&having != having {
			at.i++
			continue
		}
		// Removing a slot may bring another one to its place.
		x.sweepMember(t, number, at, e, dead)
	}
	if at.seg.isSparse() {
		at.seg.resize()
	}
}

// someDead returns a member that is dead.
func (x *Index) someDead(m members) (slot uint32, any bool) {
	switch {
	case m == 0:
	case !m.hasBlock():
		if a := m.first(); x.sweep.isDead(a) {
			return a, true
		}
		if m&kindMask == twoMembers && x.sweep.isDead(m.second()) {
			return m.second(), true
		}
	case m.inBits():
		for i, w := range x.slab.words(m.handle()) {
			if w &= x.sweep.pass[i]; w != 0 {
				return uint32(64*i + bits.TrailingZeros64(w)), true
			}
		}
	default:
		for _, w := range x.slab.words(m.handle()) {
			for ; w != 0; w >>= 16 {
				if a := uint32(w&0xffff) - 1; x.sweep.isDead(a) {
					return a, true
				}
			}
		}
	}
	return 0, false
}

// sweepMember takes a dead slot out of a set.
func (x *Index) sweepMember(t *table, number int, at place, e entry, slot uint32) {
	key := spot{segment: uint32(number), tag: at.v.load(at.i) & tagMask}
	gone := t.removeAt(at, e, slot)
	switch {
	case t == &x.predicted && gone:
		x.held.clearInfo(key, infoPredicted)
	case t == &x.partial && gone:
		x.held.clearInfo(key, infoPartial)
	case t == &x.held && e.info&infoPoint != 0:
		x.uncountSwept(at, e.info)
	}
}

// uncountSwept takes back what a swept point counted at its checkpoint, which
// is in the same segment. If more than one checkpoint could be that, the count
// stays: a search then tries a point too many.
func (x *Index) uncountSwept(at place, info uint32) {
	offset, up := info&offsetMask, info>>offsetBits&(1<<upBits-1)
	found := 0
	if up == 0 {
		at, _ = x.rootPlace()
		found = 1
	} else {
		at.i, found = x.checkpointsOf(at.v, up, offset)
	}
	if found == 1 {
		e := x.full.entryOf(at.v.load(at.i))
		x.held.setInfo(at, e, x.points.remove(e.info, offset))
	}
}

// checkpointsOf counts the checkpoints in a segment that have some bits in their
// tag and a known point at an offset, and returns the place of one.
func (x *Index) checkpointsOf(v view, up, offset uint32) (at, found int) {
	bucket := v.homeOf(uint64(up) << (64 - upBits))
	last := v.homeOf(uint64(up)<<(64-upBits) | (1<<(64-upBits) - 1))
	if up == 1 { // 0 as well
		bucket = 0
	}
	for range v.slots / bucketSlots {
		for in, word := range v.heads(bucket) {
			if word != 0 && upTag(word) == up {
				if e := x.full.entryOf(word); e.info&infoPoint == 0 && x.points.lists(e.info, offset) {
					at, found = bucket+in, found+1
				}
			}
		}
		if bucket >= last && !v.isFull(bucket) {
			break
		}
		bucket = v.after(bucket)
	}
	return at, found
}
