package prefix

import (
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// Of every length, and after any other length of the same tokens, the value is that
// of all tokens at once.
func TestGrowingEqualsPoint(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	chunk := make([]uint32, ChunkTokens)
	for round := range 4 {
		for i := range chunk {
			chunk[i] = rng.Uint32()
		}
		prev := Chain(rng.Uint64())
		if round == 0 {
			prev = 0
		}
		want := func(n int) Chain {
			if n == ChunkTokens {
				return Next(prev, chunk)
			}
			return Point(prev, chunk[:n])
		}
		for _, step := range []int{1, 5, 16, 100, 511, -1, -7, -16} {
			var g Growing
			from := step
			if step < 0 {
				from = ChunkTokens
			}
			for n := from; n > 0 && n <= ChunkTokens; n += step {
				if got := g.To(prev, chunk[:n]); got != want(n) {
					t.Fatalf("%d tokens in steps of %d: %x, want %x", n, step, got, want(n))
				}
			}
		}
	}
}

func TestGrowingAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var g Growing
		chunk := make([]uint32, ChunkTokens)
		prev, n := Chain(0), 0
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			switch rapid.IntRange(0, 4).Draw(t, "change") {
			case 0: // what was asked about goes on otherwise
				for i := n; i < len(chunk); i++ {
					chunk[i]++
				}
			case 1:
				prev = Chain(rapid.Uint64().Draw(t, "prev"))
				for i, seed := 0, rapid.Uint32().Draw(t, "tokens"); i < len(chunk); i++ {
					chunk[i] = seed * uint32(i+1)
				}
				g.Reset()
			}
			n = rapid.IntRange(1, ChunkTokens-1).Draw(t, "length")
			if got, want := g.To(prev, chunk[:n]), Point(prev, chunk[:n]); got != want {
				t.Fatalf("%d tokens: %x, want %x", n, got, want)
			}
		}
	})
}

func TestGrowingRefusesOtherLengths(t *testing.T) {
	for _, n := range []int{0, ChunkTokens + 1} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%d tokens are a head", n)
				}
			}()
			new(Growing).To(0, make([]uint32, n))
		}()
	}
}

// What a block of 16 tokens takes of a prefix that grows block by block.
func BenchmarkGrowing(b *testing.B) {
	chunk := make([]uint32, ChunkTokens)
	for name, to := range map[string]func(*Growing, []uint32) Chain{
		"anew":    func(_ *Growing, head []uint32) Chain { return hashTokens(5, head) },
		"growing": func(g *Growing, head []uint32) Chain { return g.To(5, head) },
	} {
		b.Run(name, func(b *testing.B) {
			var g Growing
			n := 0
			for b.Loop() {
				if n += 16; n == ChunkTokens {
					n = 16
					g.Reset()
				}
				to(&g, chunk[:n])
			}
		})
	}
}
