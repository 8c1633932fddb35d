package bench

import "math/bits"

// blockSets is a structure that knows which workers hold a block. It narrows a
// set of workers to those that hold one more block.
type blockSets interface {
	// intersect sets dst to those of from that hold block i of the chain, and
	// returns their number.
	intersect(dst, from []uint64, chain []uint64, i int) int
	words() int
}

// exactIndex is the exact inverted index over single blocks, the reference for
// what one entry per block costs: 12 bytes per slot, a worker in place or a
// bitset in a slab.
type exactIndex struct {
	hashes  []uint64
	sets    []uint32 // worker<<1 | 1, or bitset number<<1
	slab    []uint64
	used    int
	nWords  int
	members int
}

func newExactIndex(workers int) *exactIndex {
	return &exactIndex{hashes: make([]uint64, 1<<10), sets: make([]uint32, 1<<10), nWords: (workers + 63) / 64}
}

func (x *exactIndex) words() int { return x.nWords }

func (x *exactIndex) slot(hash uint64) int {
	hi, _ := bits.Mul64(hash, uint64(len(x.hashes)))
	for i := int(hi); ; i++ {
		if i == len(x.hashes) {
			i = 0
		}
		if h := x.hashes[i]; h == hash || h == 0 {
			return i
		}
	}
}

// add lists a worker for blocks.
func (x *exactIndex) add(worker int, hashes []uint64) {
	for _, h := range hashes {
		if x.used*4 >= len(x.hashes)*3 {
			x.grow()
		}
		x.members++
		i := x.slot(h)
		switch set := x.sets[i]; {
		case x.hashes[i] == 0:
			x.hashes[i], x.sets[i] = h, uint32(worker)<<1|1
			x.used++
		case set&1 == 1:
			bitset := uint32(len(x.slab) / x.nWords)
			x.slab = append(x.slab, make([]uint64, x.nWords)...)
			x.sets[i] = bitset << 1
			x.mark(bitset, int(set>>1))
			x.mark(bitset, worker)
		default:
			x.mark(set>>1, worker)
		}
	}
}

func (x *exactIndex) mark(bitset uint32, worker int) {
	x.slab[int(bitset)*x.nWords+worker/64] |= 1 << (worker % 64)
}

func (x *exactIndex) grow() {
	old := *x
	n := len(old.hashes) + len(old.hashes)/2
	x.hashes, x.sets = make([]uint64, n), make([]uint32, n)
	for i, h := range old.hashes {
		if h != 0 {
			j := x.slot(h)
			x.hashes[j], x.sets[j] = h, old.sets[i]
		}
	}
}

func (x *exactIndex) intersect(dst, from []uint64, chain []uint64, i int) (n int) {
	clear(dst)
	s := x.slot(chain[i])
	if x.hashes[s] == 0 {
		return 0
	}
	if set := x.sets[s]; set&1 == 1 {
		w := int(set >> 1)
		dst[w/64] = from[w/64] & (1 << (w % 64))
		return bits.OnesCount64(dst[w/64])
	}
	base := int(x.sets[s]>>1) * x.nWords
	for k, word := range x.slab[base : base+x.nWords] {
		dst[k] = word & from[k]
		n += bits.OnesCount64(dst[k])
	}
	return n
}

// bytes is what the index takes.
func (x *exactIndex) bytes() int {
	return 8*len(x.hashes) + 4*len(x.sets) + 8*len(x.slab)
}

// bloomIndex is one Bloom filter per worker, transposed: a row of all workers
// per place.
type bloomIndex struct {
	rows   []uint64
	places int
	nWords int
}

func newBloomIndex(workers, blocks int) *bloomIndex {
	n := (workers + 63) / 64
	return &bloomIndex{rows: make([]uint64, n*blocks*bloomBits), places: blocks * bloomBits, nWords: n}
}

func (x *bloomIndex) words() int { return x.nWords }

func (x *bloomIndex) add(worker int, hashes []uint64) {
	for _, h := range hashes {
		for i := range bloomProbes {
			x.rows[place(h, i, x.places)*x.nWords+worker/64] |= 1 << (worker % 64)
		}
	}
}

// intersect confirms each hit by the block before it.
func (x *bloomIndex) intersect(dst, from []uint64, chain []uint64, i int) (n int) {
	copy(dst, from)
	x.narrow(dst, chain[i])
	if i > 0 {
		x.narrow(dst, chain[i-1])
	}
	for _, word := range dst {
		n += bits.OnesCount64(word)
	}
	return n
}

func (x *bloomIndex) narrow(dst []uint64, hash uint64) {
	for i := range bloomProbes {
		base := place(hash, i, x.places) * x.nWords
		for k, word := range x.rows[base : base+x.nWords] {
			dst[k] &= word
		}
	}
}

func (x *bloomIndex) bytes() int { return 8 * len(x.rows) }

// blockSearch finds how many leading blocks of a chain each worker holds: it
// gallops, and divides where workers drop out, as the product's search does with
// checkpoints.
type blockSearch struct {
	sets   blockSets
	chain  []uint64
	arena  []uint64
	levels []searchLevel
	out    []int32
}

type searchLevel struct {
	blocks, n int
	set       []uint64
}

func newBlockSearch(sets blockSets, workers int) *blockSearch {
	return &blockSearch{sets: sets, out: make([]int32, workers)}
}

// run returns the leading blocks of each worker, valid until the next run.
func (s *blockSearch) run(chain []uint64) []int32 {
	s.chain, s.arena, s.levels = chain, s.arena[:0], s.levels[:0]
	clear(s.out)
	top := searchLevel{set: s.newSet(), n: len(s.out)}
	for w := range s.out {
		top.set[w/64] |= 1 << (w % 64)
	}
	s.levels = append(s.levels, top)
	for step := 1; top.n > 0 && top.blocks < len(chain); step *= 2 {
		top = s.visit(top, min(top.blocks+step, len(chain)))
		s.levels = append(s.levels, top)
	}
	s.settle(top, searchLevel{})
	for i := len(s.levels) - 1; i > 0; i-- {
		s.between(s.levels[i-1], s.levels[i])
	}
	return s.out
}

func (s *blockSearch) newSet() []uint64 {
	n, words := len(s.arena), s.sets.words()
	if n+words > cap(s.arena) {
		s.arena, n = make([]uint64, 0, 2*cap(s.arena)+64*words), 0
	}
	s.arena = s.arena[:n+words]
	set := s.arena[n : n+words : n+words]
	clear(set)
	return set
}

func (s *blockSearch) visit(from searchLevel, blocks int) searchLevel {
	to := searchLevel{blocks: blocks, set: s.newSet()}
	to.n = s.sets.intersect(to.set, from.set, s.chain, blocks-1)
	return to
}

// between settles those of a that are not in b.
func (s *blockSearch) between(a, b searchLevel) {
	switch {
	case a.n == b.n:
	case a.blocks+1 == b.blocks:
		s.settle(a, b)
	default:
		mid := s.visit(a, (a.blocks+b.blocks)/2)
		s.between(mid, b)
		s.between(a, mid)
	}
}

// settle gives those of a that are not in b the length of a.
func (s *blockSearch) settle(a, b searchLevel) {
	for i, word := range a.set {
		if b.set != nil {
			word &^= b.set[i]
		}
		for ; word != 0; word &= word - 1 {
			s.out[i*64+trailing(word)] = int32(a.blocks)
		}
	}
}
