package prefixindex

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestSegmentIsAMap drives a segment beside a map, with tags that meet, through
// growing and shrinking.
func TestSegmentIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stride := rapid.SampledFrom([]int{1, 3}).Draw(t, "stride")
		s := &segment{stride: uint16(stride)}
		mask := tagMask
		if stride == 3 {
			mask = allBits
		}
		tag := func() uint64 { // few homes: the last ones wrap around
			return uint64(rapid.SampledFrom([]int{1, 2, 3, 1 << 27, 1<<28 - 2, 1<<28 - 1}).Draw(t, "home"))<<tagShift |
				uint64(rapid.IntRange(0, 30).Draw(t, "key"))<<(tagShift+4)
		}
		want := map[uint64]uint64{}
		for n := range rapid.IntRange(1, 300).Draw(t, "steps") {
			k := tag()
			v := s.view()
			i, _ := v.find(k, mask)
			if old, ok := want[k]; ok != (i >= 0) || ok && valueOf(v, i) != old {
				t.Fatalf("key %x: at %d, want %v", k, i, ok)
			}
			switch {
			case i >= 0:
				s.begin()
				s.remove(i)
				s.end()
				delete(want, k)
				if s.isSparse() {
					s.resize()
				}
			case rapid.IntRange(0, 9).Draw(t, "put") > 0:
				if s.isFull() {
					s.resize()
				}
				want[k] = uint64(n) + 1
				s.begin()
				if stride == 1 {
					s.put(k | want[k])
				} else {
					i := s.put(k)
					s.view().rest(i)[stride-2] = want[k]
				}
				s.end()
			}
			if int(s.used) != len(want) || s.seq.Load()%2 != 0 {
				t.Fatalf("%d used, want %d; seq %d", s.used, len(want), s.seq.Load())
			}
		}
		v := s.view()
		for k, n := range want {
			if i, _ := v.find(k, mask); i < 0 || valueOf(v, i) != n {
				t.Fatalf("key %x is lost", k)
			}
		}
	})
}

// valueOf is what the test stored with a key.
func valueOf(v view, i int) uint64 {
	if v.stride == 1 {
		return v.load(i) &^ tagMask
	}
	return v.rest(i)[v.stride-2]
}

// TestSparseSegmentsShrink: who is told to resize gets a smaller segment, else
// each further removal would copy all for nothing.
func TestSparseSegmentsShrink(t *testing.T) {
	for _, stride := range []uint16{1, detailStride} {
		s := segment{stride: stride}
		shrunk := 0
		for n := range uint64(20_000) {
			if s.isFull() {
				s.resize()
			}
			s.put(n*0x9e3779b97f4a7c15&tagMask | 1)
		}
		for i := 0; s.used > 0; {
			for v := s.view(); v.load(i) == 0; {
				if i = (i + 1) % (v.slots * v.stride); i%bucketSlots == 0 && v.stride > 1 {
					i = v.after(i - bucketSlots)
				}
			}
			s.remove(i)
			if slots := s.slots.Load(); s.isSparse() {
				s.resize()
				if shrunk, i = shrunk+1, 0; s.slots.Load() >= slots {
					t.Errorf("stride %d, %d used: %d slots, %d before", stride, s.used, s.slots.Load(), slots)
				}
			}
		}
		if slots := s.slots.Load(); shrunk < 20 || slots > 4*minSlots {
			t.Errorf("stride %d: shrunk %d times to %d slots", stride, shrunk, slots)
		}
	}
}

// TestMembersAreASet drives members beside a map through all their forms, and
// intersects them as a search does.
func TestMembersAreASet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var blocks slab
		s := sets{slab: &blocks, width: rapid.SampledFrom([]int{1, 2, 3, 16, 17, 130}).Draw(t, "width")}
		slots := uint32(64 * s.width)
		var m members
		want := map[uint32]bool{}
		for range rapid.IntRange(1, 400).Draw(t, "steps") {
			id := rapid.Uint32Range(0, slots-1).Draw(t, "slot")
			if len(want) > 0 && rapid.IntRange(0, 9).Draw(t, "known") < 4 {
				all := slices.Sorted(maps.Keys(want))
				id = all[int(id)%len(all)]
			}
			var changed bool
			if is := rapid.IntRange(0, 9).Draw(t, "is") < 6; is {
				m, changed = s.add(m, id)
				if changed == want[id] {
					t.Fatalf("add of %d: %v", id, changed)
				}
				want[id] = true
			} else {
				m, changed = s.remove(m, id)
				if changed != want[id] {
					t.Fatalf("remove of %d: %v", id, changed)
				}
				delete(want, id)
			}
			if rapid.IntRange(0, 50).Draw(t, "wider") == 0 && s.width < 200 {
				s.width++ // slots beyond the bitmap come later
				slots = uint32(64 * s.width)
			}
		}
		got := map[uint32]bool{}
		s.each(m, func(id uint32) { got[id] = true })
		if !maps.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
		from, to := bitset{words: make([]uint64, s.width)}, bitset{words: make([]uint64, s.width)}
		n := 0
		for id := range slots {
			if id%3 == 1 {
				from.put(id)
				if want[id] {
					n++
				}
			}
			if s.has(m, id) != want[id] {
				t.Fatalf("has %d: %v", id, !want[id])
			}
		}
		for i := range to.words {
			to.words[i] = ^uint64(0) // of an earlier search
		}
		if got := to.and(&from, m, &blocks); got != n {
			t.Fatalf("intersection of %d, want %d", got, n)
		}
		for id := range slots {
			if to.has(id) != (want[id] && id%3 == 1) {
				t.Fatalf("intersection has %d: %v", id, to.has(id))
			}
		}
		for id := range want {
			m, _ = s.remove(m, id)
		}
		for i := range blocks.classes {
			if c := &blocks.classes[i]; m != 0 || c.taken != len(c.unused) {
				t.Fatalf("members %x and %d blocks left", m, c.taken-len(c.unused))
			}
		}
	})
}

// TestPointsAreCounted drives the known points of a checkpoint beside a map.
func TestPointsAreCounted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var x Index
		blocks := &x.slab
		p := points{slab: blocks}
		flags := rapid.SampledFrom([]uint32{0, infoPredicted, infoPartial}).Draw(t, "flags")
		info := flags
		want := map[uint32]int{}
		tags := map[uint32][]uint64{}
		most := rapid.SampledFrom([]int{4, 31, 511}).Draw(t, "offsets")
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			o := uint32(rapid.IntRange(1, most).Draw(t, "offset"))
			if rapid.IntRange(0, 9).Draw(t, "add") < 6 {
				tag := rapid.Uint64().Draw(t, "tag")
				info = p.add(info, o, tag)
				want[o]++
				tags[o] = append(tags[o], tag)
			} else {
				info = p.remove(info, o) // perhaps of nothing
				if want[o]--; want[o] <= 0 {
					delete(want, o)
					delete(tags, o)
				}
			}
			if got := p.lists(info, o); got != (want[o] > 0) {
				t.Fatalf("lists %d: %v", o, got)
			}
		}
		if info&(infoPredicted|infoPartial) != flags {
			t.Fatalf("flags of %x are not %x", info, flags)
		}
		s := Searcher{x: &x}
		s.readInfo(info, true)
		if !slices.IsSortedFunc(s.items, func(a, b uint32) int { return int(itemOffset(b)) - int(itemOffset(a)) }) {
			t.Fatalf("items %x are not in order", s.items)
		}
		got := map[uint32]bool{}
		for _, i := range s.items {
			got[itemOffset(i)] = true
			for _, tag := range tags[itemOffset(i)] {
				if i&itemBit(tag) == 0 {
					t.Fatalf("offset %d: a search skips tag %x", itemOffset(i), tag)
				}
			}
		}
		for o := range want {
			if !got[o] {
				t.Fatalf("offset %d is missing", o)
			}
		}
		if len(got) != len(want) {
			t.Fatalf("%d offsets, want %d", len(got), len(want))
		}
		p.checkHints(t, info, want)
		for o, n := range want {
			for range n {
				info = p.remove(info, o)
			}
		}
		for i := range blocks.classes {
			if c := &blocks.classes[i]; info != flags || c.taken != len(c.unused) {
				t.Fatalf("info %x and %d blocks left", info, c.taken-len(c.unused))
			}
		}
	})
}

// checkHints: as long as there are that many, hints are offsets that are listed,
// each once.
func (p *points) checkHints(t *rapid.T, info uint32, want map[uint32]int) {
	if info&infoList == 0 {
		return
	}
	l := p.list(info)
	given := map[uint32]bool{}
	for i := range hints {
		h := l.hint(i)
		if h == 0 {
			continue
		}
		if want[h] == 0 || given[h] {
			t.Fatalf("hint %d of %d offsets: %d, listed %d times", i, len(want), h, want[h])
		}
		given[h] = true
	}
	if len(given) != min(len(want), hints) {
		t.Fatalf("hints %v of %d offsets", given, len(want))
	}
}

// TestHintsArePopular: whatever comes and goes, an offset that far more workers
// list than others is tried first.
func TestHintsArePopular(t *testing.T) {
	var blocks slab
	p := points{slab: &blocks}
	rng := rand.New(rand.NewPCG(2, 2))
	info := uint32(0)
	var others []uint32
	for i := range 2000 {
		o := uint32(16 * (1 + rng.IntN(31)))
		info = p.add(info, o, rng.Uint64())
		others = append(others, o)
		if i%2 == 0 {
			info = p.add(info, 400, rng.Uint64())
		}
		if len(others) > 60 {
			info = p.remove(info, others[0])
			others = others[1:]
		}
	}
	if l := p.list(info); l.hint(0) != 400 && l.hint(1) != 400 {
		t.Errorf("hints %d and %d; 400 is listed %d times", l.hint(0), l.hint(1), l.count(400))
	}
}

// TestManyListings: a count that reached its bound stays.
func TestManyListings(t *testing.T) {
	var blocks slab
	p := points{slab: &blocks}
	info := uint32(0)
	for range maxListed + 10 {
		info = p.add(info, 5, 0)
	}
	for range maxListed + 10 {
		info = p.remove(info, 5)
	}
	if !p.lists(info, 5) {
		t.Error("the offset is gone although nobody knows how many list it")
	}
}

// TestSlabGivesBlocksAgain: blocks are zero, apart from each other and reused.
func TestSlabGivesBlocksAgain(t *testing.T) {
	var b slab
	rng := rand.New(rand.NewPCG(1, 1))
	lent := map[handle]uint64{}
	for i := range uint64(20000) {
		if len(lent) > 300 || rng.IntN(3) == 0 && len(lent) > 0 {
			for h, v := range lent {
				for _, w := range b.words(h) {
					if w != v {
						t.Fatalf("a word of %x became %d, was %d", h, w, v)
					}
				}
				b.give(h)
				delete(lent, h)
				break
			}
			continue
		}
		class := rng.IntN(13)
		h := b.take(class)
		if _, dup := lent[h]; dup || h.size() != 1<<class || len(b.words(h)) != h.size() {
			t.Fatalf("handle %x twice, or of %d words", h, len(b.words(h)))
		}
		for j := range b.words(h) {
			if b.words(h)[j] != 0 {
				t.Fatalf("block %x is not empty", h)
			}
			b.words(h)[j] = i
		}
		lent[h] = i
	}
	if n := b.bytes(); n > 64<<20 {
		t.Errorf("%d bytes for at most 300 blocks", n)
	}
}
