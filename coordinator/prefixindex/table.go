package prefixindex

import (
	"sync/atomic"
	"unsafe"
)

// A table of sets is split by hash into segments, so that a change is seen by
// few readers and resizing moves little.
const (
	segmentBits = 12
	segments    = 1 << segmentBits
)

// spot is where a key belongs: the number of its segment and its tag, in the
// upper bits of a word. Keys of the same spot are the same key to a table; that
// happens to a pair of them with probability 2^-40.
type spot struct {
	tag     uint64
	segment uint32
}

// entry is what a table knows of a key.
type entry struct {
	members members
	info    uint32 // see infoPoint
}

// A slot of a table is one word: the tag, two bits of kind and 34 more. They are
// all there is to tell of a checkpoint or point that one worker lists: the
// worker, and the offsets of up to two known points, or the point's own offset
// and some bits of its checkpoint's tag. Else they are the handle of a block with
// an entry in full.
const (
	tagMask uint64 = (1<<tagBits - 1) << tagShift

	kindShift             = tagShift - 2
	kindCheckpoint uint64 = 1 << kindShift
	kindPoint      uint64 = 2 << kindShift
	kindBlock      uint64 = 3 << kindShift
	kindOf                = kindBlock

	// payloadBits are beside the one worker.
	payloadBits = kindShift - slotBits
)

// short returns an entry in one word, if it fits.
func (e entry) short() (word uint64, ok bool) {
	kind, payload := kindCheckpoint, e.info
	if payload&infoPoint != 0 {
		kind, payload = kindPoint, payload&^infoPoint
	}
	if e.members&kindMask != oneMember || payload >= 1<<payloadBits {
		return 0, false
	}
	return kind | uint64(e.members.first())<<payloadBits | uint64(payload), true
}

// entries are the blocks that hold entries in full. They hold nothing else, since
// a reader that comes late must not take something else for an entry.
type entries struct{ slab slab }

// entryOf reads the entry that a word tells.
func (b *entries) entryOf(word uint64) entry {
	if e, ok := alone(word); ok {
		return e
	}
	if word == 0 {
		return entry{}
	}
	w := atomic.LoadUint64(&b.slab.words(handle(word) & anyHandle)[0])
	return entry{members(w >> 32), uint32(w)}
}

// table maps keys to sets of worker slots.
type table struct {
	dir     *[segments]segment // nil while nothing was ever added
	sets    *sets
	points  *points
	full    *entries
	entries int // the writer's, as are the functions below
}

func (t *table) init(s *sets, p *points, e *entries) {
	t.sets, t.points, t.full = s, p, e
}

// begin makes the segments. Searches look into a table only where what they read
// elsewhere says that something was added to it.
func (t *table) begin() {
	t.dir = new([segments]segment)
	for i := range t.dir {
		t.dir[i].stride = 1
	}
}

// place is a slot of a table.
type place struct {
	seg *segment
	v   view
	i   int // -1: the key is not there
}

// at finds the entry of a key.
func (t *table) at(p spot) (place, entry) {
	if t.dir == nil {
		return place{i: -1}, entry{}
	}
	at := place{seg: &t.dir[p.segment]}
	at.v = at.seg.view()
	var word uint64
	at.i, word = at.v.find(p.tag, tagMask)
	return at, t.full.entryOf(word)
}

// set replaces an entry, between begin and end.
func (t *table) set(at place, e entry) {
	old := at.v.load(at.i)
	word, ok := e.short()
	switch wasBlock := old&kindOf == kindBlock; {
	case ok:
		at.v.store(at.i, old&tagMask|word)
		if wasBlock {
			t.full.slab.give(handle(old) & anyHandle)
		}
	case wasBlock:
		t.full.set(handle(old)&anyHandle, e)
	default:
		at.v.store(at.i, old&tagMask|t.block(e))
	}
}

// block puts an entry into a block and returns the word for it.
func (t *table) block(e entry) uint64 {
	h := t.full.slab.take(0)
	t.full.set(h, e)
	return kindBlock | uint64(h)
}

func (b *entries) set(h handle, e entry) {
	atomic.StoreUint64(&b.slab.words(h)[0], uint64(e.members)<<32|uint64(e.info))
}

// add puts a worker slot into the set of a key and sets bits of its info. It
// reports whether the worker slot was not in it, and the info.
func (t *table) add(p spot, id, info uint32) (added bool, now uint32) {
	if t.dir == nil {
		t.begin()
	}
	if t.addAlone(&t.dir[p.segment], p.tag, entry{one(id), info}) {
		return true, info
	}
	at, e := t.at(p)
	if at.i < 0 {
		t.create(at.seg, p.tag, entry{one(id), info})
		return true, info
	}
	info &= infoPredicted | infoPartial // what else it says is there already
	if e.info|info == e.info && t.sets.has(e.members, id) {
		return false, e.info
	}
	at.seg.begin()
	e.info |= info
	e.members, added = t.sets.add(e.members, id)
	t.set(at, e)
	at.seg.end()
	return added, e.info
}

func (t *table) create(s *segment, tag uint64, e entry) {
	if s.isFull() {
		s.resize()
	}
	word, ok := e.short()
	if !ok {
		word = t.block(e)
	}
	s.begin()
	s.put(tag | word)
	s.end()
	t.entries++
}

// remove takes a worker slot out of the set of a key, and the key with its last
// one. It reports whether the worker slot was in it, whether the key is gone, and
// the info it had.
func (t *table) remove(p spot, id uint32) (removed, gone bool, info uint32) {
	if t.dir == nil {
		return false, false, 0
	}
	if info, done := t.removeAlone(&t.dir[p.segment], p.tag, id); done {
		return true, true, info
	}
	at, e := t.at(p)
	if at.i < 0 || !t.sets.has(e.members, id) {
		return false, false, 0
	}
	gone = t.removeAt(at, e, id)
	if at.seg.isSparse() {
		at.seg.resize()
	}
	return true, gone, e.info
}

// removeAt is remove of a member.
func (t *table) removeAt(at place, e entry, id uint32) (gone bool) {
	at.seg.begin()
	defer at.seg.end()
	e.members, _ = t.sets.remove(e.members, id)
	if e.members != 0 {
		t.set(at, e)
		return false
	}
	t.points.release(e.info)
	if word := at.v.load(at.i); word&kindOf == kindBlock {
		t.full.slab.give(handle(word) & anyHandle)
	}
	at.seg.remove(at.i)
	t.entries--
	return true
}

// has reports whether a worker slot is in the set of a key.
func (t *table) has(p spot, id uint32) bool {
	at, e := t.at(p)
	return at.i >= 0 && t.sets.has(e.members, id)
}

// clearInfo clears bits of the info of a key, if it is there.
func (t *table) clearInfo(p spot, info uint32) {
	if at, e := t.at(p); at.i >= 0 && e.info&info != 0 {
		t.setInfo(at, e, e.info&^info)
	}
}

func (t *table) setInfo(at place, e entry, info uint32) {
	at.seg.begin()
	e.info = info
	t.set(at, e)
	at.seg.end()
}

// bytes is the memory of a table without blocks.
func (t *table) bytes() int {
	if t.dir == nil {
		return 0
	}
	n := int(unsafe.Sizeof(*t.dir))
	for i := range t.dir {
		n += 8 * len(t.dir[i].view().words())
	}
	return n
}

// ahead asks for the memory of several spots before it is used, so that waiting
// for one is waiting for all: that is most of what a search takes.
type ahead struct {
	at  [aheadSpots]*uint64
	n   int
	sum uint64 // keeps the loads from being left out
}

const aheadSpots = 32

// add notes a spot, if there is room.
func (a *ahead) add(t *table, p spot) {
	_, v, ok := t.dir[p.segment].steady()
	if ok && v.slots > 0 && a.n < aheadSpots {
		a.at[a.n], _ = v.home(p.tag)
		a.n++
	}
}

// ask asks for all spots noted.
func (a *ahead) ask() {
	for _, p := range a.at[:a.n] {
		a.sum += atomic.LoadUint64(p)
	}
	a.n = 0
}
