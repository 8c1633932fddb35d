package bench

import (
	"math"
	"math/rand/v2"
	"testing"
)

// fleetOfChains gives workers random prefixes of a few branching chains.
func fleetOfChains(rng *rand.Rand, workers int) (held []map[uint64]bool, chains [][]uint64) {
	for range 6 {
		chain := make([]uint64, 1+rng.IntN(200))
		for i := range chain {
			chain[i] = rng.Uint64() | 1
		}
		if len(chains) > 0 { // branch off another one
			other := chains[rng.IntN(len(chains))]
			chain = append(append([]uint64(nil), other[:rng.IntN(len(other)+1)]...), chain...)
		}
		chains = append(chains, chain)
	}
	for range workers {
		set := map[uint64]bool{}
		for range rng.IntN(4) {
			chain := chains[rng.IntN(len(chains))]
			for _, h := range chain[:rng.IntN(len(chain)+1)] {
				set[h] = true
			}
		}
		held = append(held, set)
	}
	return held, chains
}

func TestReferencesAgainstSets(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	off, pairs := 0, 0
	for range 60 {
		workers := 1 + rng.IntN(130)
		held, chains := fleetOfChains(rng, workers)
		exact, filter := newExactIndex(workers), newBloomIndex(workers, 1000)
		for w, set := range held {
			var list []uint64
			for h := range set {
				list = append(list, h)
			}
			exact.add(w, list)
			filter.add(w, list)
		}
		se, sf := newBlockSearch(exact, workers), newBlockSearch(filter, workers)
		for _, chain := range chains {
			got := append([]int32(nil), se.run(chain)...)
			filtered := sf.run(chain)
			for w, set := range held {
				want := 0
				for want < len(chain) && set[chain[want]] {
					want++
				}
				if int(got[w]) != want {
					t.Fatalf("worker %d holds %d blocks: the exact index says %d", w, want, got[w])
				}
				pairs++
				if int(filtered[w]) < want {
					t.Fatalf("worker %d holds %d blocks: the filter says %d", w, want, filtered[w])
				} else if int(filtered[w]) > want {
					off++
				}
			}
		}
	}
	if float64(off) > .01*float64(pairs) {
		t.Errorf("the filter is too high for %d of %d pairs", off, pairs)
	}
}

func TestBloomFollowsItsBlocks(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	b := newBloom(2000)
	var held []uint64
	for round := range 20 {
		for range 200 {
			if len(held) >= 1500 {
				i := rng.IntN(len(held))
				b.remove(held[i])
				held[i] = held[len(held)-1]
				held = held[:len(held)-1]
			}
			h := rng.Uint64()
			b.add(h)
			held = append(held, h)
		}
		before := append([]uint64(nil), b.sent...)
		got := b.send()
		changed := 0
		for i := range before {
			for x := before[i] ^ b.sent[i]; x != 0; x &= x - 1 {
				changed++
			}
		}
		// A Rice code takes about 1.6 bits more than log2 of the mean gap.
		mean := 20_000 / float64(changed)
		if want := float64(changed) * (math.Log2(mean) + 1.6) / 8; math.Abs(float64(got)-want) > .1*want+2 {
			t.Errorf("round %d: %d changed bits in %d bytes: want about %.0f", round, changed, got, want)
		}
		for _, h := range held {
			if !b.has(h) {
				t.Fatal("a block that is held is not in the filter")
			}
		}
	}
	if b.send() != 0 {
		t.Error("nothing changed, and yet there is something to send")
	}
	for _, h := range held {
		b.remove(h)
	}
	for i, c := range b.counts {
		if c != 0 || b.now[i/64]>>(i%64)&1 != 0 {
			t.Fatal("an empty filter has a bit")
		}
	}
}

func TestDeepest(t *testing.T) {
	for most := range 70 {
		for want := 0; want <= most; want++ {
			if got := deepest(most, func(n int) bool {
				if n < 1 || n > most {
					t.Fatalf("asked for %d of %d", n, most)
				}
				return n <= want
			}); got != want {
				t.Fatalf("deepest of %d is %d: want %d", most, got, want)
			}
		}
	}
}
