package prefixindex

import (
	"math/bits"
	"sync/atomic"
)

// Nine of ten changes are of a prefix that one worker lists, which stands in one
// word of a bucket with room. They are made here, in fewer steps than the general
// ones; what is out of the ordinary is left to those, with nothing changed.

// addAlone lists a key that nobody lists.
func (t *table) addAlone(s *segment, tag uint64, e entry) (done bool) {
	word, ok := e.short()
	v := s.view()
	if !ok || s.isFull() {
		return false
	}
	heads := v.heads(v.homeOf(tag))
	free := equal(heads, 0, allBits)
	if equal(heads, tag, tagMask)&^free != 0 || free == 0 {
		return false
	}
	s.begin()
	atomic.StoreUint64(&heads[bits.TrailingZeros32(free)%bucketSlots], tag|word)
	s.end()
	s.used++
	t.entries++
	return true
}

// removeAlone takes a worker slot out of the set of a key that it alone is in,
// and the key with it, and returns the info it had.
func (t *table) removeAlone(s *segment, tag uint64, id uint32) (info uint32, done bool) {
	v := s.view()
	if v.slots == 0 {
		return 0, false
	}
	heads := v.heads(v.homeOf(tag))
	same := equal(heads, tag, tagMask)
	at := &heads[bits.TrailingZeros32(same)%bucketSlots]
	e, ok := alone(atomic.LoadUint64(at))
	if same == 0 || !ok || e.members != one(id) || equal(heads, 0, allBits) == 0 {
		return 0, false
	}
	s.begin()
	atomic.StoreUint64(at, 0)
	s.end()
	s.used--
	t.entries--
	if s.isSparse() {
		s.resize()
	}
	return e.info, true
}

// alone reads the entry that a word tells without a block.
func alone(word uint64) (e entry, ok bool) {
	kind := word & kindOf
	e = entry{one(uint32(word>>payloadBits) & (maxSlots - 1)), uint32(word) & (1<<payloadBits - 1)}
	if kind == kindPoint {
		e.info |= infoPoint
	}
	return e, kind == kindPoint || kind == kindCheckpoint
}

// countAlone counts, at a checkpoint whose entry is one word before and after,
// that a point at an offset after it is listed, or is no longer.
func (t *table) countAlone(s *segment, tag uint64, offset uint32, listed bool) (done bool) {
	v := s.view()
	if v.slots == 0 {
		return false
	}
	heads := v.heads(v.homeOf(tag))
	same := equal(heads, tag, tagMask)
	at := &heads[bits.TrailingZeros32(same)%bucketSlots]
	word := atomic.LoadUint64(at)
	payload := uint32(word) & (1<<payloadBits - 1)
	first, second := payload&offsetMask, payload>>offsetBits // with the third, if that fits
	if same == 0 || word&kindOf != kindCheckpoint {
		return false
	}
	switch {
	case listed && first == 0:
		first = offset
	case listed && second == 0 && first != offset:
		second = offset
	case !listed && first == offset:
		first, second = second, 0
	case !listed && second == offset:
		second = 0
	default:
		return false
	}
	s.begin()
	atomic.StoreUint64(at, word&^(1<<payloadBits-1)|uint64(second<<offsetBits|first))
	s.end()
	return true
}
