package prefixindex

import (
	"math/bits"
	"sync/atomic"
)

// members is a set of worker slots in 32 bits: none, one, two, or the handle of
// a block that lists more of them, as a list of 16-bit numbers while that is
// smaller than a bitmap. 0 is the empty set. Blocks belong to one set each.
type members uint32

// Kinds of members, in the top bits. listBlocks have a 0 in the third bit.
const (
	kindBits           = 30
	kindMask   members = 3 << kindBits
	oneMember  members = 1 << kindBits
	twoMembers members = 2 << kindBits
	manyInList members = 3 << kindBits
	manyInBits members = 7 << (kindBits - 1)

	slotBits = 15
	// maxSlots bounds worker slots; those of dropped workers count until what
	// they held is swept.
	maxSlots = 1 << slotBits
)

func one(a uint32) members    { return oneMember | members(a) }
func two(a, b uint32) members { return twoMembers | members(a)<<slotBits | members(b) }

// first and second are the members of a set of two; first that of one.
func (m members) first() uint32 {
	if m&kindMask == oneMember {
		return uint32(m &^ kindMask)
	}
	return uint32(m&^kindMask) >> slotBits
}
func (m members) second() uint32    { return uint32(m) & (maxSlots - 1) }
func (m members) handle() handle    { return handle(m) & anyHandle }
func (m members) inBits() bool      { return m >= manyInBits }
func (m members) hasBlock() bool    { return m >= manyInList }
func listAt(h handle) members       { return manyInList | members(h) }
func bitsAt(h handle) members       { return manyInBits | members(h) }
func lanesOf(size int) int          { return 4 * size }
func laneAt(w uint64, i int) uint64 { return w >> (16 * i) & 0xffff }

// sets changes members. It is the writer's.
type sets struct {
	slab  *slab
	width int // words of a bitmap of all slots
}

// bitsClass is the class of blocks that hold a bitmap of all slots.
func (s *sets) bitsClass() int { return bits.Len(uint(max(s.width, 1) - 1)) }

// has reports whether a slot is a member.
func (s *sets) has(m members, id uint32) bool {
	switch {
	case m == 0:
		return false
	case !m.hasBlock():
		return m.first() == id || m&kindMask == twoMembers && m.second() == id
	case m.inBits():
		words := s.slab.words(m.handle())
		return int(id/64) < len(words) && words[id/64]>>(id%64)&1 != 0
	}
	_, found := s.lane(s.slab.words(m.handle()), id)
	return found
}

// lane finds a member in a list; without one it returns the first free lane,
// or the length of the list.
func (s *sets) lane(words []uint64, id uint32) (at int, found bool) {
	for i, w := range words {
		for j := range 4 {
			switch laneAt(w, j) {
			case uint64(id) + 1:
				return 4*i + j, true
			case 0:
				return 4*i + j, false
			}
		}
	}
	return lanesOf(len(words)), false
}

// setLane stores a value in a lane: a member's number plus one, or 0.
func setLane(words []uint64, at int, value uint32) {
	w, shift := &words[at/4], 16*(at%4)
	atomic.StoreUint64(w, *w&^(0xffff<<shift)|uint64(value)<<shift)
}

// add returns the set with a slot in it and whether it was not before.
func (s *sets) add(m members, id uint32) (members, bool) {
	switch {
	case m == 0:
		return one(id), true
	case s.has(m, id):
		return m, false
	case m&kindMask == oneMember:
		return two(m.first(), id), true
	case m&kindMask == twoMembers:
		h := s.slab.take(0)
		words := s.slab.words(h)
		setLane(words, 0, m.first()+1)
		setLane(words, 1, m.second()+1)
		setLane(words, 2, id+1)
		return listAt(h), true
	case m.inBits():
		return s.addToBits(m, id), true
	}
	return s.addToList(m, id), true
}

func (s *sets) addToList(m members, id uint32) members {
	words := s.slab.words(m.handle())
	at, _ := s.lane(words, id)
	if at < lanesOf(len(words)) {
		setLane(words, at, id+1)
		return m
	}
	if m.handle().class()+1 >= s.bitsClass() {
		return s.addToBits(s.toBits(m), id)
	}
	h := s.slab.take(m.handle().class() + 1)
	to := s.slab.words(h)
	for i, w := range words {
		atomic.StoreUint64(&to[i], w)
	}
	setLane(to, at, id+1)
	s.slab.give(m.handle())
	return listAt(h)
}

// toBits turns a list into a bitmap.
func (s *sets) toBits(m members) members {
	h := s.slab.take(s.bitsClass())
	to := s.slab.words(h)
	for _, w := range s.slab.words(m.handle()) {
		for ; w != 0; w >>= 16 {
			setBit(to, uint32(w&0xffff)-1)
		}
	}
	s.slab.give(m.handle())
	return bitsAt(h)
}

func setBit(words []uint64, id uint32) {
	w := &words[id/64]
	atomic.StoreUint64(w, *w|1<<(id%64))
}

func (s *sets) addToBits(m members, id uint32) members {
	words := s.slab.words(m.handle())
	if int(id/64) >= len(words) {
		h := s.slab.take(s.bitsClass())
		to := s.slab.words(h)
		for i, w := range words {
			atomic.StoreUint64(&to[i], w)
		}
		s.slab.give(m.handle())
		m, words = bitsAt(h), to
	}
	setBit(words, id)
	return m
}

// remove returns the set without a slot and whether it was in it.
func (s *sets) remove(m members, id uint32) (members, bool) {
	switch {
	case !s.has(m, id):
		return m, false
	case m&kindMask == oneMember:
		return 0, true
	case m&kindMask == twoMembers:
		if m.first() == id {
			return one(m.second()), true
		}
		return one(m.first()), true
	case m.inBits():
		return s.removeFromBits(m, id), true
	}
	return s.removeFromList(m, id), true
}

func (s *sets) removeFromList(m members, id uint32) members {
	words := s.slab.words(m.handle())
	at, _ := s.lane(words, id)
	n, _ := s.lane(words, maxSlots+1) // nobody: the number of members
	n--
	last := uint32(laneAt(words[n/4], n%4))
	setLane(words, at, last)
	setLane(words, n, 0)
	switch {
	case n == 2:
		return s.toPair(m)
	case len(words) > 1 && 8*n <= 3*lanesOf(len(words)):
		h := s.slab.take(m.handle().class() - 1)
		for i, to := 0, s.slab.words(h); lanesOf(i) < n; i++ {
			atomic.StoreUint64(&to[i], words[i])
		}
		s.slab.give(m.handle())
		return listAt(h)
	}
	return m
}

func (s *sets) removeFromBits(m members, id uint32) members {
	words := s.slab.words(m.handle())
	w, n := &words[id/64], 0
	atomic.StoreUint64(w, *w&^(1<<(id%64)))
	for _, w := range words {
		n += bits.OnesCount64(w)
	}
	class := m.handle().class() - 1
	switch {
	case n == 2:
		return s.toPair(m)
	case class >= 0 && 4*n <= 3*lanesOf(1<<class):
		return s.toList(m, class)
	}
	return m
}

// toPair turns a block of two members into a pair.
func (s *sets) toPair(m members) members {
	var ids [2]uint32
	n := 0
	s.each(m, func(id uint32) { ids[n] = id; n++ })
	s.slab.give(m.handle())
	return two(ids[0], ids[1])
}

// toList turns a bitmap into a list of a class.
func (s *sets) toList(m members, class int) members {
	h := s.slab.take(class)
	to, at := s.slab.words(h), 0
	for i, w := range s.slab.words(m.handle()) {
		for ; w != 0; w &= w - 1 {
			setLane(to, at, uint32(64*i+bits.TrailingZeros64(w))+1)
			at++
		}
	}
	s.slab.give(m.handle())
	return listAt(h)
}

// each calls do for every member.
func (s *sets) each(m members, do func(id uint32)) {
	switch {
	case m == 0:
	case !m.hasBlock():
		do(m.first())
		if m&kindMask == twoMembers {
			do(m.second())
		}
	case m.inBits():
		for i, w := range s.slab.words(m.handle()) {
			for ; w != 0; w &= w - 1 {
				do(uint32(64*i + bits.TrailingZeros64(w)))
			}
		}
	default:
		for _, w := range s.slab.words(m.handle()) {
			for ; w != 0; w >>= 16 {
				do(uint32(w&0xffff) - 1)
			}
		}
	}
}
