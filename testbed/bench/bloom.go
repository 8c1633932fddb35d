package bench

import "math/bits"

// The Bloom filter that stands for its family: 10 bits per block of the pool,
// 7 probes.
const (
	bloomBits   = 10
	bloomProbes = 7
)

// bloom is a filter over one worker's blocks as its agent would keep it, with
// counters, and as it was sent at the latest tick.
type bloom struct {
	counts    []uint8
	now, sent []uint64
}

func newBloom(blocks int) *bloom {
	n := blocks * bloomBits
	return &bloom{counts: make([]uint8, n), now: make([]uint64, (n+63)/64), sent: make([]uint64, (n+63)/64)}
}

// place gives the i-th probe of a hash among n places.
func place(hash uint64, i, n int) int {
	h := hash*0x9e3779b97f4a7c15 + uint64(i)*(hash>>32|1)*0xff51afd7ed558ccd
	hi, _ := bits.Mul64(h^h>>29, uint64(n))
	return int(hi)
}

func (b *bloom) add(hash uint64) {
	for i := range bloomProbes {
		p := place(hash, i, len(b.counts))
		if b.counts[p]++; b.counts[p] == 1 {
			b.now[p/64] |= 1 << (p % 64)
		}
	}
}

func (b *bloom) remove(hash uint64) {
	for i := range bloomProbes {
		p := place(hash, i, len(b.counts))
		if b.counts[p]--; b.counts[p] == 0 {
			b.now[p/64] &^= 1 << (p % 64)
		}
	}
}

// send makes the filter as it is now the one that is known, and returns the
// bytes of the difference as Rice-coded gaps, the least of all its codings.
func (b *bloom) send() int {
	changed := 0
	for i := range b.now {
		changed += bits.OnesCount64(b.now[i] ^ b.sent[i])
	}
	if changed == 0 {
		return 0
	}
	mean := len(b.counts) / changed
	k := bits.Len(uint(mean*69/100)) - 1 // best parameter: about log2(mean · ln 2)
	k = max(k, 0)
	total, last := 0, -1
	for i := range b.now {
		for x := b.now[i] ^ b.sent[i]; x != 0; x &= x - 1 {
			at := i*64 + trailing(x)
			total += (at-last-1)>>k + 1 + k
			last = at
		}
	}
	copy(b.sent, b.now)
	return (total + 7) / 8
}

func (b *bloom) has(hash uint64) bool {
	for i := range bloomProbes {
		if p := place(hash, i, len(b.counts)); b.sent[p/64]>>(p%64)&1 == 0 {
			return false
		}
	}
	return true
}

// match is the number of leading blocks of a chain by the filter: bisection,
// each hit confirmed by the block before it.
func (b *bloom) match(chain []uint64) int {
	return deepest(len(chain), func(n int) bool { return b.has(chain[n-1]) && (n < 2 || b.has(chain[n-2])) })
}

// deepest gallops and bisects for the largest n up to most for which holds is
// true, if it is true for all smaller ones.
func deepest(most int, holds func(n int) bool) int {
	low, high := 0, most+1
	for step := 1; low+step < high; step *= 2 {
		if !holds(low + step) {
			high = low + step
			break
		}
		low += step
	}
	for high-low > 1 {
		if m := (low + high) / 2; holds(m) {
			low = m
		} else {
			high = m
		}
	}
	return low
}
