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

// overlap are the words where another set may have members as well.
func (b *bitset) overlap(other *bitset) (lo, hi int) {
	lo = max(b.lo, other.lo)
	return lo, max(lo, min(b.hi, other.hi))
}

// subtract takes out the members of another set.
func (b *bitset) subtract(other *bitset) {
	lo, hi := b.overlap(other)
	words := other.words[lo:hi]
	for i, w := range b.words[lo:hi][:len(words)] {
		b.words[lo+i] = w &^ words[i]
	}
}

// within reports whether all members are in another set.
func (b *bitset) within(other *bitset) bool {
	lo, hi := b.overlap(other)
	var out uint64
	words := other.words[lo:hi]
	for i, w := range b.words[lo:hi][:len(words)] {
		out |= w &^ words[i]
	}
	for _, w := range b.words[b.lo:min(lo, b.hi)] {
		out |= w
	}
	for _, w := range b.words[min(hi, b.hi):b.hi] {
		out |= w
	}
	return out == 0
}

// intersect takes out all but the members of another set and returns how many
// are left.
func (b *bitset) intersect(other *bitset) (n int) {
	b.lo, b.hi = b.overlap(other)
	for i := b.lo; i < b.hi; i++ {
		b.words[i] &= other.words[i]
		n += bits.OnesCount64(b.words[i])
	}
	return n
}

// difference makes b the members of one set that are not in another.
func (b *bitset) difference(of, without *bitset) {
	lo, hi := of.overlap(without)
	b.lo, b.hi = of.lo, of.hi
	copy(b.words[b.lo:], of.words[b.lo:min(lo, b.hi)])
	to, words := b.words[lo:hi], without.words[lo:hi]
	for i, w := range of.words[lo:hi][:len(to)] {
		to[i] = w &^ words[i]
	}
	if hi < b.hi {
		copy(b.words[hi:b.hi], of.words[hi:b.hi])
	}
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
		// A bitmap is as wide as the fleet was when it was made: all of from may have
		// joined since.
		lo, hi := from.lo, min(from.hi, len(words))
		if lo >= hi {
			break
		}
		b.lo, b.hi = lo, hi
		to := b.words[b.lo:b.hi]
		words = words[b.lo:b.hi]
		for i, w := range from.words[b.lo:b.hi][:len(to)] {
			w &= atomic.LoadUint64(&words[i])
			to[i] = w
			n += bits.OnesCount64(w)
		}
		b.trim()
	default:
		n = b.andList(from, blocks.words(m.handle()))
	}
	return n
}

// andList is and for a list. So many members in no order are looked for that there
// must be no branch to guess.
func (b *bitset) andList(from *bitset, list []uint64) (n int) {
	b.lo, b.hi = from.lo, from.hi
	in := from.words[from.lo:from.hi]
	out := b.words[from.lo:from.hi][:len(in)]
	clear(out)
	for i := range list {
		for w := atomic.LoadUint64(&list[i]); w != 0; w >>= 16 {
			a := uint32(w&0xffff) - 1
			if at := uint(a/64) - uint(from.lo); at < uint(len(in)) {
				bit := in[at] >> (a % 64) & 1
				out[at] |= bit << (a % 64)
				n += int(bit)
			}
		}
	}
	b.trim()
	return n
}
