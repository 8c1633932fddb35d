package prefixindex

import (
	"math/bits"
	"sync/atomic"
)

// bitset is a set of slots while a search is under way: the bits of
// words[lo:hi]. The other words are not part of it, so that small sets are
// worked on fast in whatever large fleet.
type bitset struct {
	words  []uint64
	lo, hi int
}

func (b *bitset) has(id uint32) bool {
	w := int(id / 64)
	return w >= b.lo && w < b.hi && b.words[w]>>(id%64)&1 != 0
}

func (b *bitset) reset() { b.lo, b.hi = 0, 0 }

// put adds a member.
func (b *bitset) put(id uint32) {
	w := int(id / 64)
	switch {
	case b.lo == b.hi:
		b.lo, b.hi = w, w+1
		b.words[w] = 0
	case w < b.lo:
		clear(b.words[w:b.lo])
		b.lo = w
	case w >= b.hi:
		clear(b.words[b.hi : w+1])
		b.hi = w + 1
	}
	b.words[w] |= 1 << (id % 64)
}

// trim leaves out empty words at both ends.
func (b *bitset) trim() {
	for b.lo < b.hi && b.words[b.lo] == 0 {
		b.lo++
	}
	for b.lo < b.hi && b.words[b.hi-1] == 0 {
		b.hi--
	}
}

// subtract takes out the members of another set.
func (b *bitset) subtract(other *bitset) {
	for i := max(b.lo, other.lo); i < min(b.hi, other.hi); i++ {
		b.words[i] &^= other.words[i]
	}
}

// intersect takes out all but the members of another set and returns how many
// are left.
func (b *bitset) intersect(other *bitset) (n int) {
	b.lo = max(b.lo, other.lo)
	b.hi = max(b.lo, min(b.hi, other.hi))
	for i := b.lo; i < b.hi; i++ {
		b.words[i] &= other.words[i]
		n += bits.OnesCount64(b.words[i])
	}
	return n
}

// difference makes b the members of one set that are not in another.
func (b *bitset) difference(of, without *bitset) {
	b.copyOf(of)
	b.subtract(without)
	b.trim()
}

// copyOf makes b equal to another set.
func (b *bitset) copyOf(other *bitset) {
	b.lo, b.hi = other.lo, other.hi
	copy(b.words[b.lo:b.hi], other.words[b.lo:b.hi])
}

// and makes b the set of those members of from that are in m, and returns how
// many. What m leads to may change meanwhile; the result is then to be thrown
// away.
func (b *bitset) and(from *bitset, m members, blocks *slab) int {
	b.reset()
	n := 0
	switch {
	case m == 0:
	case !m.hasBlock():
		if a := m.first(); from.has(a) {
			b.put(a)
			n++
		}
		if a := m.second(); m&kindMask == twoMembers && from.has(a) {
			b.put(a)
			n++
		}
	case m.inBits():
		words := blocks.words(m.handle())
		b.lo = from.lo
		b.hi = max(b.lo, min(from.hi, len(words)))
		for i := b.lo; i < b.hi; i++ {
			w := atomic.LoadUint64(&words[i]) & from.words[i]
			b.words[i] = w
			n += bits.OnesCount64(w)
		}
		b.trim()
	default:
		words := blocks.words(m.handle())
		for i := range words {
			for w := atomic.LoadUint64(&words[i]); w != 0; w >>= 16 {
				if a := uint32(w&0xffff) - 1; from.has(a) {
					b.put(a)
					n++
				}
			}
		}
	}
	return n
}
