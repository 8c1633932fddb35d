package prefix

import (
	"testing"

	"pgregory.net/rapid"
)

// A probe of chain values gives the keys that one of the tokens gives, at the
// depths that are known, and none elsewhere; in another domain too.
func TestChainsGiveTheKeysOfTheirTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tokens := randomTokens(rapid.Uint64().Draw(t, "seed"), rapid.IntRange(1, 4*ChunkTokens).Draw(t, "tokens"))
		var chains []Chain
		var c Chain
		for i := ChunkTokens; i <= len(tokens); i += ChunkTokens {
			c = Next(c, tokens[i-ChunkTokens:i])
			chains = append(chains, c)
		}
		chunk := rapid.IntRange(0, len(chains)).Draw(t, "chunk")
		points := Points{Chunk: chunk}
		var before Chain
		if chunk > 0 {
			before = chains[chunk-1]
		}
		for o := PointTokens; o < ChunkTokens && chunk*ChunkTokens+o <= len(tokens); o += PointTokens {
			points.Values = append(points.Values, Point(before, tokens[chunk*ChunkTokens:chunk*ChunkTokens+o]))
		}
		k := NewKeyer(testKey, Domain{Model: "m"})
		var whole, known Probe
		whole.ResetTokens(tokens, k)
		known.ResetTokens(tokens, k) // what was asked before leaves nothing
		known.At(len(tokens))
		known.ResetChains(len(tokens), chains, []Points{points}, k)
		compare := func() {
			for depth := 0; depth <= len(tokens)+1; depth++ {
				want, ok := whole.At(depth)
				sure := ok && (depth%ChunkTokens == 0 || depth/ChunkTokens == chunk && depth%PointTokens == 0)
				got, ok := known.At(depth)
				if ok != sure || ok && got != want {
					t.Fatalf("depth %d: %x, %v; want %x, %v", depth, got, ok, want, sure)
				}
			}
		}
		compare()
		other := NewKeyer(testKey, Domain{Model: "m", Salt: "s"})
		whole.Rekey(other)
		known.Rekey(other)
		compare()
	})
}
