package blocktable

import "testing"

// stored is a table that holds one prompt in blocks of a size.
func stored(blockTokens, blocks int) (t *Table, tokens []uint32) {
	t = New(Options{Model: "m", MaxBlocks: 1 << 10, Seed: 1})
	e := Event{Op: OpStore, BlockTokens: int32(blockTokens)}
	for b := range blocks {
		e.Hashes = append(e.Hashes, uint64(b+1))
	}
	for i := range blockTokens * blocks {
		e.Tokens = append(e.Tokens, uint32(i)*7919)
	}
	t.ApplyAll([]Event{e})
	return t, e.Tokens
}

// A prompt that is shorter than one block cannot be found, one of a block and a
// token can; every engine computes the last token itself.
func TestTOK03PromptsShorterThanABlock(t *testing.T) {
	table, tokens := stored(16, 2)
	for n, want := range map[int]int{0: 0, 1: 0, 15: 0, 16: 0, 17: 16, 32: 16} {
		if got := table.Match(tokens[:n], "", ""); got != want {
			t.Errorf("%d tokens: %d can be reused, want %d", n, got, want)
		}
	}
}

// Of an engine that stores in units of thousands of tokens nothing below one is
// predicted: its unit is learnt from its events.
func TestTOK04SmallestCacheableUnit(t *testing.T) {
	table, tokens := stored(4096, 2)
	for n, want := range map[int]int{3000: 0, 4096: 0, 4097: 4096, 8000: 4096} {
		if got := table.Match(tokens[:n], "", ""); got != want {
			t.Errorf("%d tokens: %d can be reused, want %d", n, got, want)
		}
	}
}
