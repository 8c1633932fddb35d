package prefixindex

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// TestCallsAreArranged: between two resets, calls about one place stay together
// and as they came; places that gain something come first, deep chunks before
// shallow ones, then those that only lose, the other way round.
func TestCallsAreArranged(t *testing.T) {
	type where struct {
		part, chunk uint32
		anchor      summary.IndexKey
	}
	rapid.Check(t, func(t *rapid.T) {
		chunks := rapid.SampledFrom([]uint32{1, 4, 60, 16_000}).Draw(t, "chunks") // few and far between
		var c calls
		var of []where // by number
		part, loses := uint32(0), map[where]bool{}
		for range rapid.IntRange(0, 120).Draw(t, "calls") {
			if rapid.IntRange(0, 40).Draw(t, "reset") == 0 {
				c.ops = append(c.ops, op{kind: opReset})
				of = append(of, where{part: part + 1})
				part += 2
				continue
			}
			w := where{part, rapid.Uint32Range(1, chunks).Draw(t, "chunk"), summary.IndexKey(rapid.IntRange(1, 3).Draw(t, "anchor"))}
			o := op{kind: rapid.SampledFrom([]opKind{opAdd, opRemove, opExtent}).Draw(t, "kind"), name: name{w.anchor, 7, w.chunk * prefix.ChunkTokens}}
			if rapid.Bool().Draw(t, "point") {
				o.name = name{summary.IndexKey(100 + len(of)), w.anchor, w.chunk*prefix.ChunkTokens + 16}
			}
			if was, ok := loses[w]; !ok || was {
				loses[w] = o.kind == opRemove
			}
			c.ops, of = append(c.ops, o), append(of, w)
		}
		c.arrange()
		sorted := slices.Sorted(slices.Values(c.order))
		for i, number := range sorted {
			if number != uint32(i) || len(sorted) != len(c.ops) {
				t.Fatalf("%v is no order of %d calls", c.order, len(c.ops))
			}
		}
		done := map[where]bool{}
		for i := 1; i < len(c.order); i++ {
			was, is := of[c.order[i-1]], of[c.order[i]]
			if was == is {
				if c.order[i-1] > c.order[i] {
					t.Fatalf("call %d comes before %d", c.order[i-1], c.order[i])
				}
				continue
			}
			done[was] = true
			switch {
			case done[is]:
				t.Fatalf("calls about %+v are apart", is)
			case was.part != is.part:
				if was.part > is.part {
					t.Fatalf("%+v comes before %+v, beyond a reset", was, is)
				}
			case loses[was] != loses[is]:
				if loses[was] {
					t.Fatalf("%+v loses before %+v gains", was, is)
				}
			case loses[is] && was.chunk > is.chunk, !loses[is] && was.chunk < is.chunk:
				t.Fatalf("%+v comes before %+v", was, is)
			}
		}
	})
}
