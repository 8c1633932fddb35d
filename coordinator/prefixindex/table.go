package prefixindex

import (
	"math/bits"

	"waypost/gossip/prefix"
)

// WorkerID is a small dense number for a worker; sets are bitmaps over it.
type WorkerID uint32

// MaxWorkers bounds worker ids, since bitmaps grow to the highest one.
const MaxWorkers = 1 << 16

// segments splits the table, so that growing moves a small part at a time.
const segments = 256

// table maps keys to worker sets by open addressing. Up to two workers stand
// in the slot itself; more have a bitmap in the slab.
type table struct {
	seed uint64 // odd; keeps workers from choosing keys that collide
	segs [segments]segment
	slab slab
	keys int
}

type segment struct {
	slots []slot // a power of two long, at most 3/4 used
	used  int
}

// slot holds a key and its workers: a alone, a and b, or the bitmap number a
// when b is inSlab.
type slot struct {
	key  prefix.Key // 0: free
	a, b uint32
}

const (
	nobody = ^uint32(0)
	inSlab = ^uint32(0) - 1
)

func (t *table) place(k prefix.Key) (seg *segment, at uint64) {
	h := uint64(k) * t.seed
	return &t.segs[h>>56], h << 8
}

// home is the slot where the search for a hash starts.
func (s *segment) home(at uint64) int {
	return int(at >> (64 - bits.Len(uint(len(s.slots)-1))) & uint64(len(s.slots)-1))
}

// find returns the slot of a key, or nil.
func (t *table) find(k prefix.Key) *slot {
	seg, at := t.place(k)
	if len(seg.slots) == 0 {
		return nil
	}
	mask := len(seg.slots) - 1
	for i := seg.home(at); ; i = (i + 1) & mask {
		switch s := &seg.slots[i]; s.key {
		case k:
			return s
		case 0:
			return nil
		}
	}
}

// add puts a worker into the set of a key.
func (t *table) add(k prefix.Key, w WorkerID) {
	seg, at := t.place(k)
	if 4*(seg.used+1) > 3*len(seg.slots) {
		t.grow(seg)
	}
	mask := len(seg.slots) - 1
	i := seg.home(at)
	for seg.slots[i].key != 0 && seg.slots[i].key != k {
		i = (i + 1) & mask
	}
	s := &seg.slots[i]
	switch id := uint32(w); {
	case s.key == 0:
		*s = slot{key: k, a: id, b: nobody}
		seg.used++
		t.keys++
	case s.b == inSlab:
		t.slab.set(s.a, w)
	case s.a == id || s.b == id:
	case s.b == nobody:
		s.b = id
	default:
		n := t.slab.take()
		t.slab.set(n, WorkerID(s.a))
		t.slab.set(n, WorkerID(s.b))
		t.slab.set(n, w)
		s.a, s.b = n, inSlab
	}
}

func (t *table) grow(seg *segment) {
	old := seg.slots
	seg.slots = make([]slot, max(16, 2*len(old)))
	mask := len(seg.slots) - 1
	for _, s := range old {
		if s.key == 0 {
			continue
		}
		_, at := t.place(s.key)
		i := seg.home(at)
		for seg.slots[i].key != 0 {
			i = (i + 1) & mask
		}
		seg.slots[i] = s
	}
}

// remove takes a worker out of the set of a key, and the key with its last one.
func (t *table) remove(k prefix.Key, w WorkerID) {
	s := t.find(k)
	if s == nil {
		return
	}
	switch id := uint32(w); {
	case s.b == inSlab:
		t.slab.unset(s.a, w)
		if t.slab.counts[s.a] == 2 {
			n := s.a
			s.a, s.b = t.slab.pair(n)
			t.slab.give(n)
		}
	case s.b == id:
		s.b = nobody
	case s.a == id && s.b != nobody:
		s.a, s.b = s.b, nobody
	case s.a == id:
		t.free(k)
	}
}

// free empties a slot and closes the gap behind it.
func (t *table) free(k prefix.Key) {
	seg, at := t.place(k)
	mask := len(seg.slots) - 1
	i := seg.home(at)
	for seg.slots[i].key != k {
		i = (i + 1) & mask
	}
	for j := (i + 1) & mask; seg.slots[j].key != 0; j = (j + 1) & mask {
		_, at := t.place(seg.slots[j].key)
		if home := seg.home(at); (j-home)&mask >= (j-i)&mask {
			seg.slots[i] = seg.slots[j]
			i = j
		}
	}
	seg.slots[i] = slot{}
	seg.used--
	t.keys--
}

// intersect sets dst to cur ∩ the set of k and returns its size. dst may be cur.
func (t *table) intersect(dst, cur []uint64, k prefix.Key) int {
	s := t.find(k)
	if s != nil && s.b == inSlab {
		n := 0
		set := t.slab.sets[s.a]
		for i := range dst {
			var word uint64
			if i < len(set) {
				word = set[i] & cur[i]
			}
			dst[i] = word
			n += bits.OnesCount64(word)
		}
		return n
	}
	var a, b bool
	if s != nil {
		a = has(cur, s.a)
		b = s.b != nobody && has(cur, s.b)
	}
	clear(dst)
	n := 0
	if a {
		dst[s.a/64] |= 1 << (s.a % 64)
		n++
	}
	if b {
		dst[s.b/64] |= 1 << (s.b % 64)
		n++
	}
	return n
}

func has(set []uint64, id uint32) bool {
	return int(id/64) < len(set) && set[id/64]>>(id%64)&1 != 0
}

// contains says whether a worker is in the set of a key.
func (t *table) contains(k prefix.Key, w WorkerID) bool {
	s := t.find(k)
	switch {
	case s == nil:
		return false
	case s.b == inSlab:
		return has(t.slab.sets[s.a], uint32(w))
	}
	return s.a == uint32(w) || s.b == uint32(w)
}

// slab holds the bitmaps of sets with three workers or more.
type slab struct {
	sets   [][]uint64
	counts []uint32
	unused []uint32
}

func (b *slab) take() uint32 {
	if n := len(b.unused); n > 0 {
		id := b.unused[n-1]
		b.unused = b.unused[:n-1]
		return id
	}
	b.sets = append(b.sets, nil)
	b.counts = append(b.counts, 0)
	return uint32(len(b.sets) - 1)
}

func (b *slab) give(id uint32) {
	clear(b.sets[id])
	b.counts[id] = 0
	b.unused = append(b.unused, id)
}

func (b *slab) set(id uint32, w WorkerID) {
	for int(w/64) >= len(b.sets[id]) {
		b.sets[id] = append(b.sets[id], 0)
	}
	word, bit := &b.sets[id][w/64], uint64(1)<<(w%64)
	if *word&bit == 0 {
		*word |= bit
		b.counts[id]++
	}
}

func (b *slab) unset(id uint32, w WorkerID) {
	if has(b.sets[id], uint32(w)) {
		b.sets[id][w/64] &^= 1 << (w % 64)
		b.counts[id]--
	}
}

// pair returns the two members of a set of two.
func (b *slab) pair(id uint32) (x, y uint32) {
	x, y = nobody, nobody
	for i, word := range b.sets[id] {
		for ; word != 0; word &= word - 1 {
			x, y = y, uint32(i*64+bits.TrailingZeros64(word))
		}
	}
	return x, y
}

// put changes whether a worker is in the set of a key.
func (t *table) put(k prefix.Key, w WorkerID, was, is bool) {
	switch {
	case is && !was:
		t.add(k, w)
	case was && !is:
		t.remove(k, w)
	}
}
