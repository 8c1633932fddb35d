package prefixindex

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// The sets of a search are sets, whatever part of the words they are in, whatever
// stands in the others, and in whatever form the members of a key are kept.
func TestBitsetsAreSets(t *testing.T) {
	const width = 6
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 5))
		random := func() (b bitset, in map[uint32]bool) {
			b, in = bitset{words: make([]uint64, width)}, map[uint32]bool{}
			for i := range b.words {
				b.words[i] = r.Uint64() // no part of it
			}
			b.lo = r.IntN(width)
			b.hi = b.lo + r.IntN(width-b.lo+1)
			density := r.IntN(70)
			for id := uint32(64 * b.lo); id < uint32(64*b.hi); id++ {
				b.words[id/64] &^= 1 << (id % 64)
				if r.IntN(70) < density {
					b.words[id/64] |= 1 << (id % 64)
					in[id] = true
				}
			}
			return b, in
		}
		check := func(op string, b *bitset, want func(id uint32) bool) {
			n := 0
			for id := range uint32(64 * width) {
				if b.has(id) != want(id) {
					t.Fatalf("%s: %d is in the set: %v", op, id, b.has(id))
				}
				if want(id) {
					n++
				}
			}
			got := 0
			for _, w := range b.words[b.lo:b.hi] {
				got += bits.OnesCount64(w)
			}
			if got != n {
				t.Fatalf("%s: %d members, want %d", op, got, n)
			}
		}
		a, inA := random()
		b, inB := random()
		within := true
		for id := range inA {
			within = within && inB[id]
		}
		if got := a.within(&b); got != within {
			t.Fatalf("within %v, want %v", got, within)
		}
		d, _ := random()
		d.difference(&a, &b)
		check("difference", &d, func(id uint32) bool { return inA[id] && !inB[id] })
		if !d.within(&a) {
			t.Fatal("a difference is not within what it was taken from")
		}
		d.copyOf(&a)
		d.subtract(&b)
		check("subtract", &d, func(id uint32) bool { return inA[id] && !inB[id] })
		d.copyOf(&a)
		if n := d.intersect(&b); n != len(inA)-outside(inA, inB) {
			t.Fatalf("intersect returns %d", n)
		}
		check("intersect", &d, func(id uint32) bool { return inA[id] && inB[id] })

		// The fleet may grow while members are added: bitmaps stay as narrow as it was.
		var slab slab
		s := sets{slab: &slab, width: 1 + r.IntN(width)}
		var m members
		held := map[uint32]bool{}
		for range r.IntN(60) * r.IntN(6) {
			id := r.Uint32N(uint32(64 * s.width))
			if !held[id] {
				m, _ = s.add(m, id)
				held[id] = true
			}
			if s.width < width && r.IntN(100) == 0 {
				s.width++
			}
		}
		if n := d.and(&a, m, &slab); n != len(inA)-outside(inA, held) {
			t.Fatalf("and returns %d of %d, of whom %d hold it", n, len(inA), len(held))
		}
		check("and", &d, func(id uint32) bool { return inA[id] && held[id] })
		if !slices.IsSorted([]int{0, d.lo, d.hi, width}) {
			t.Fatalf("words %d to %d", d.lo, d.hi)
		}
	})
}

// outside counts who is in the first set and not in the second.
func outside(of, other map[uint32]bool) (n int) {
	for id := range of {
		if !other[id] {
			n++
		}
	}
	return n
}

// Slots of a fleet that has grown are looked for in a bitmap made before: nobody
// is there, wherever the set of them begins.
func TestSlotsBeyondABitmap(t *testing.T) {
	const width = 5
	var slab slab
	s := sets{slab: &slab, width: 1}
	var m members
	for id := range uint32(10) {
		m, _ = s.add(m, id)
	}
	if words := slab.words(m.handle()); !m.inBits() || len(words) != 1 {
		t.Fatalf("%d words, a bitmap %v: want a bitmap of one", len(words), m.inBits())
	}
	for first := range uint32(width) {
		for last := first; last < width; last++ {
			from, to := bitset{words: make([]uint64, width)}, bitset{words: make([]uint64, width)}
			from.put(64*first + 3)
			from.put(64*last + 20)
			want := 0
			if first == 0 {
				want = 1
			}
			to.lo, to.hi = 0, width // of an earlier search
			if n := to.and(&from, m, &slab); n != want || to.has(3) != (want == 1) || to.hi-to.lo != want {
				t.Errorf("words %d to %d: %d members in words %d to %d, want %d", first, last, n, to.lo, to.hi, want)
			}
		}
	}
}
