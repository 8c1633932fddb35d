package kvevents

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"waypost/agent/blocktable"
)

// Real batches with bytes changed, cut and doubled: no panic, what comes out is
// bounded by what went in, and the batches around a damaged one are read as
// ever; a damaged batch never hides that it may have held removals.
func TestMutatedRecordings(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	d := NewDecoder()
	tried, damaged, refused := 0, 0, 0
	for _, file := range recordings(t) {
		payloads := livePayloads(t, file)
		payloads = payloads[:min(len(payloads), 6)]
		for _, whole := range payloads {
			want := fmt.Sprint(eventsOf(t, whole))
			removals := bytes.Count(whole, []byte("BlockRemoved")) + bytes.Count(whole, []byte("AllBlocksCleared"))
			for range 10 {
				tried++
				bad := mutate(rng, whole)
				b, err := d.Decode(bad)
				if err != nil {
					refused++
				} else {
					hashes, tokens, gone := 0, 0, 0
					table := blocktable.New(blocktable.Options{MaxBlocks: 1000})
					for i := range b.Events {
						hashes, tokens = hashes+len(b.Events[i].Hashes), tokens+len(b.Events[i].Tokens)
						if b.Events[i].Op != blocktable.OpStore {
							gone++
						}
						table.Apply(&b.Events[i])
					}
					if hashes+tokens+len(b.Events) > len(bad) {
						t.Fatalf("%s: %d hashes and %d tokens from %d bytes", file, hashes, tokens, len(bad))
					}
					if b.Damaged > 0 {
						damaged++
					}
					if gone < removals && len(bad) == len(whole) && b.Damaged > 0 && b.Unknown == 0 && b.Clears == 0 && !b.LostRemovals {
						t.Fatalf("%s: %d of %d removals came out of a damaged batch that claims to have lost none", file, gone, removals)
					}
				}
				if again := fmt.Sprint(eventsOf(t, whole)); again != want {
					t.Fatalf("%s: a damaged batch changes how the next is read", file)
				}
			}
		}
	}
	if tried < 300 || damaged == 0 || refused == 0 {
		t.Errorf("%d batches tried, %d damaged, %d refused: the mutations do not reach everything", tried, damaged, refused)
	}
	if kept := cap(d.tokens) + cap(d.hashes) + cap(d.events); kept > 1<<20 {
		t.Errorf("the decoder keeps %d items", kept)
	}
}

func eventsOf(t *testing.T, payload []byte) (out []string) {
	t.Helper()
	b, err := NewDecoder().Decode(payload)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b.Events {
		out = append(out, describe(&b.Events[i]))
	}
	return out
}

// mutate changes a few bytes, cuts, doubles or moves a part.
func mutate(rng *rand.Rand, whole []byte) []byte {
	b := bytes.Clone(whole)
	switch rng.IntN(6) {
	case 0:
		return b[:rng.IntN(len(b))]
	case 1:
		i := rng.IntN(len(b))
		return append(b[:i:i], whole[rng.IntN(len(whole)):]...)
	case 2: // a header that promises the world
		i := rng.IntN(len(b))
		copy(b[i:], []byte{0xdd, 0xff, 0xff, 0xff, 0xff})
		return b
	}
	for range 1 + rng.IntN(4) {
		b[rng.IntN(len(b))] = byte(rng.Uint32())
	}
	return b
}
