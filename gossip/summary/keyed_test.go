package summary

import (
	"errors"
	"maps"
	"testing"

	"waypost/gossip/prefix"
)

// keyedTable tells prefix keys where another table tells chain values.
type keyedTable struct {
	starTable
	keyer *prefix.Keyer
}

func (k keyedTable) PointOf(id uint32) prefix.Chain {
	return prefix.Chain(k.keyer.Key(k.starTable.PointOf(id), k.blockTokens))
}

func (k keyedTable) CheckpointsIn(id uint32, dst []Checkpoint) []Checkpoint {
	from := len(dst)
	dst = k.starTable.CheckpointsIn(id, dst)
	for i := from; i < len(dst); i++ {
		dst[i].Chain = prefix.Chain(k.keyer.Key(dst[i].Chain, dst[i].DepthTokens))
	}
	return dst
}

// A stream whose table knows keys only tells the same as one that makes them.
func TestKeyedStreamTellsTheSame(t *testing.T) {
	table := starTable{1040}
	plain := follow(t, Options{Blocks: table})
	keyed := follow(t, Options{Blocks: keyedTable{table, prefix.NewKeyer(testKey, table.DomainOf(0))}, Keyed: true})
	for _, f := range []*follower{plain, keyed} {
		for id := uint32(1); id < 9; id++ {
			f.Attached(Block{ID: id, EndTokens: 1040, Usable: true})
			f.StoreEnded(id)
		}
		f.Detached(3)
		f.tick()
	}
	if !maps.Equal(plain.sink.held, keyed.sink.held) || len(plain.sink.held) != 7*3 {
		t.Errorf("%d keys and %d, want the same 21", len(plain.sink.held), len(keyed.sink.held))
	}
	if got, want := keyed.HotRoots(1), plain.HotRoots(1); len(got) != 1 || got[0] != want[0] {
		t.Errorf("hottest %v, want %v", got, want)
	}
	other := testKey
	other[0]++
	if err := keyed.SetKeys(testKey, other); !errors.Is(err, ErrKeys) {
		t.Errorf("what is known by one key was promised under another: %v", err)
	}
	if err := keyed.SetKeys(testKey); err != nil {
		t.Error(err)
	}
}
