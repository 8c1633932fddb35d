package prefixindex

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"waypost/gossip/prefix"
)

// fleet fills an index the way placements by affinity do: conversations begin
// with one of 200 system prompts of Zipf popularity, grow turn by turn on one
// worker, some are forked or moved, and ends are multiples of 16 tokens.
type fleet struct {
	x       *Index
	prompts [][]uint32 // next turns of conversations, about 16k tokens long
}

// blocksPerWorker is the size of a cache, in blocks of 16 tokens.
const blocksPerWorker = 32768

func newFleet(workers int) *fleet {
	f := &fleet{x: New(Options{Seed: 7})}
	rng := rand.New(rand.NewPCG(1, 2))
	systems := make([][]uint32, 200)
	for i := range systems {
		systems[i] = randomTokens(rng.Uint64(), 16*(10+rng.IntN(250)))
	}
	zipf := rand.NewZipf(rng, 1.1, 4, uint64(len(systems)-1))
	k := prefix.NewKeyer(testKey, domains[0])
	for w := range WorkerID(workers) {
		for left := blocksPerWorker; left > 0; {
			left -= f.converse(rng, systems[zipf.Uint64()], k, w, WorkerID(workers))
		}
	}
	return f
}

// converse puts a conversation on a worker and its beginning on another, and
// returns its blocks.
func (f *fleet) converse(rng *rand.Rand, system []uint32, k *prefix.Keyer, w, workers WorkerID) int {
	n := 16 * (20 + rng.IntN(1100))
	tokens := append(append([]uint32(nil), system...), randomTokens(rng.Uint64(), n)...)
	ends := []int{len(system)}
	for end := len(system); end < len(tokens); end += 16 * (5 + rng.IntN(200)) {
		ends = append(ends, end)
	}
	ends = append(ends, len(tokens))
	f.list(tokens, ends, k, w)
	if other := WorkerID(rng.IntN(int(workers))); rng.IntN(4) == 0 && other != w {
		cut := ends[rng.IntN(len(ends))]
		f.list(tokens[:cut], []int{cut}, k, other)
	}
	if len(tokens) > 15000 && len(tokens) < 17000 {
		f.prompts = append(f.prompts, append(tokens, randomTokens(rng.Uint64(), 200)...))
	}
	return n / 16
}

func (f *fleet) list(tokens []uint32, ends []int, k *prefix.Keyer, w WorkerID) {
	var p prefix.Probe
	p.ResetTokens(tokens, k)
	s := f.x.WorkerSink(w)
	add := func(depth int) {
		if key, _ := p.At(depth); !f.x.Holds(w, key) {
			s.Add(key, uint32(depth))
		}
	}
	for depth := prefix.ChunkTokens; depth <= len(tokens); depth += prefix.ChunkTokens {
		add(depth)
	}
	for _, depth := range ends {
		add(depth)
	}
}

// BenchmarkMatch searches prompts of about 1,000 blocks, hashing included. The
// metric ns/match leaves out the copy that stands for the arrival of a prompt,
// which brings its tokens into the cache.
func BenchmarkMatch(b *testing.B) {
	for _, workers := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			f := newFleet(workers)
			k := prefix.NewKeyer(testKey, domains[0])
			var p prefix.Probe
			var dst []Match
			var tokens []uint32
			var took time.Duration
			matches := 0
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				tokens = append(tokens[:0], f.prompts[i%len(f.prompts)]...)
				begin := time.Now()
				p.ResetTokens(tokens, k)
				dst = f.x.Match(&p, dst[:0])
				took += time.Since(begin)
				matches += len(dst)
			}
			b.ReportMetric(float64(took.Nanoseconds())/float64(b.N), "ns/match")
			b.ReportMetric(float64(matches)/float64(b.N), "matches/op")
			b.ReportMetric(float64(f.x.Keys()), "keys")
		})
	}
}

func BenchmarkSink(b *testing.B) {
	f := newFleet(10)
	s := f.x.WorkerSink(3)
	rng := rand.New(rand.NewPCG(1, 1))
	b.ReportAllocs()
	for b.Loop() {
		k := prefix.Key(rng.Uint64() | 1)
		s.Add(k, 1024)
		s.Remove(k)
	}
}

func TestMatchAllocatesNothing(t *testing.T) {
	f := newFleet(3)
	k := prefix.NewKeyer(testKey, domains[0])
	var p prefix.Probe
	var dst []Match
	ask := func() {
		for _, prompt := range f.prompts[:3] {
			p.ResetTokens(prompt, k)
			dst = f.x.Match(&p, dst[:0])
		}
	}
	ask()
	if n := testing.AllocsPerRun(50, ask); n != 0 && !raceEnabled {
		t.Errorf("%v allocations", n)
	}
}
