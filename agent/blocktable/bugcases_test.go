package blocktable

import (
	"fmt"
	"slices"
	"testing"

	"waypost/gossip/summary"
)

// Faults of comparable systems, by the names that they are listed under.

// EVT-05: a hash that is not held does not stop the rest of a removal.
func TestEVT05UnknownRemovalInABatch(t *testing.T) {
	table := New(Options{})
	apply(table, store(0, 1), store(0, 2), remove(1, 99, 2))
	if table.Len() != 0 || table.Stats().UnknownRemovals != 1 {
		t.Errorf("%d blocks, %d unknown removals", table.Len(), table.Stats().UnknownRemovals)
	}
}

// EVT-08: blocks under a parent that is not known wait for it, never begin a
// prefix, and are bounded.
func TestEVT08OrphansWaitForTheirParent(t *testing.T) {
	table := New(Options{MaxBlocks: 1000})
	apply(table, store(1, 2))
	if got := table.Match(prompt(2), "", ""); got != 0 || table.Attached() != 0 {
		t.Errorf("an orphan is a prefix of %d tokens", got)
	}
	apply(table, store(0, 1))
	if got := table.Match(prompt(1, 2), "", ""); got != 32 || table.Stats().ParkedOrphans != 1 {
		t.Errorf("%d tokens once the parent came, %+v", got, table.Stats())
	}
	for h := uint64(10); h < 1_000_010; h++ {
		table.Apply(&Event{Op: OpStore, Spec: SpecFull, BlockTokens: 1, Hashes: []uint64{h}, Tokens: []uint32{uint32(h)}, Parent: h + 1<<40, HasParent: true})
	}
	if table.Held() > 1500 || table.Stats().Refused == 0 {
		t.Errorf("%d nodes after a million orphans, %d refused", table.Held(), table.Stats().Refused)
	}
	if got := table.Match(prompt(1, 2), "", ""); got != 32 {
		t.Errorf("orphans drove out what was known: %d tokens", got)
	}
}

// EVT-09: tokens that cover another span than the hashes say nothing about
// them: that event is counted, the next good one counts.
func TestEVT09TokensOfAnotherSpan(t *testing.T) {
	table := New(Options{})
	bad := store(0, 1, 2, 3)
	bad.Tokens = bad.Tokens[:32]
	apply(table, bad)
	if got := table.Match(prompt(1, 2, 3), "", ""); got != 0 || table.Stats().Malformed != 1 {
		t.Errorf("%d tokens, %d malformed", got, table.Stats().Malformed)
	}
	apply(table, store(0, 7))
	if got := table.Match(prompt(7), "", ""); got != 16 {
		t.Errorf("%d tokens of a good event behind it", got)
	}
}

// TRU-02: of two copies one is removed, and one more than there were: no count
// goes below none, and a new store counts again.
func TestTRU02TwoCopiesOfABlock(t *testing.T) {
	table := New(Options{})
	for _, step := range []struct {
		event *Event
		want  int
	}{{store(0, 1), 16}, {store(0, 1), 16}, {remove(1), 16}, {remove(1), 0}, {remove(1), 0}, {remove(1), 0}, {store(0, 1), 16}} {
		table.Apply(step.event)
		if got := table.Match(prompt(1), "", ""); got != step.want {
			t.Fatalf("%d tokens, want %d", got, step.want)
		}
	}
	if table.Copies() != 1 || table.Stats().UnknownRemovals != 2 {
		t.Errorf("%d copies, %+v", table.Copies(), table.Stats())
	}
}

// TRU-06: only the unbroken run from the first block counts.
func TestTRU06OnlyTheUnbrokenRunCounts(t *testing.T) {
	table := New(Options{})
	apply(table, store(0, 1, 2, 3, 4, 5, 6), remove(2), remove(6))
	if got := table.Match(prompt(1, 2, 3, 4, 5, 6), "", ""); got != 16 {
		t.Errorf("%d tokens of a prompt whose second block is gone, want 16", got)
	}
}

// IDN-01: eight blocks of 16 tokens are less than four of 64, whatever the
// blocks are called.
func TestIDN01TokensNotBlocks(t *testing.T) {
	all := append(tokens(0, 512), 1)
	for size, want := range map[int]int{16: 8 * 16, 64: 4 * 64} {
		table := New(Options{})
		e := &Event{Op: OpStore, Spec: SpecFull, BlockTokens: int32(size), Tokens: all[:want]}
		for h := range want / size {
			e.Hashes = append(e.Hashes, uint64(h+1))
		}
		table.Apply(e)
		if got := table.Match(all, "", ""); got != want {
			t.Errorf("blocks of %d: %d tokens, want %d", size, got, want)
		}
	}
}

// IDN-07: blocks of 16 tokens in GPU memory and of 256 in host memory are never
// added up. Where the engine reads host memory back, a prompt of 300 tokens of
// which 2 blocks of the former and 1 of the latter are held reuses 256, all of it
// from the host; a block that the prompt covers in part only is of no use.
func TestIDN07BlockSizesOfTiersAreNotAdded(t *testing.T) {
	table := New(Options{})
	big := &Event{Op: OpStore, Medium: MediumCPU, BlockTokens: 256, Hashes: []uint64{1000}}
	for _, h := range []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16} {
		big.Tokens = append(big.Tokens, tokens(100*h, 16)...)
	}
	apply(table, store(0, 1, 2), big)
	all := prompt(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18)[:300]
	if got := table.Match(all, "", ""); got != 32 {
		t.Errorf("%d tokens, want the 32 in GPU memory", got)
	}
	if table.BlockTokens() != 16 {
		t.Errorf("blocks of %d tokens", table.BlockTokens())
	}

	table = New(Options{FollowHost: true})
	tiers := &tierLog{table: table}
	table.Listen(tiers)
	apply(table, store(0, 1, 2), big)
	if got := table.Match(all, "", ""); got != 256 {
		t.Errorf("%d tokens, want the 256 in host memory", got)
	}
	if got := table.Match(all[:200], "", ""); got != 32 {
		t.Errorf("%d tokens of a prompt that covers the block in part", got)
	}
	if want := []string{"16 gpu", "32 gpu", "256 host"}; !slices.Equal(tiers.told, want) {
		t.Errorf("told %v, want %v", tiers.told, want)
	}
	if table.BlockTokens() != 16 {
		t.Errorf("blocks of %d tokens", table.BlockTokens())
	}
	apply(table, &Event{Op: OpRemove, Medium: MediumCPU, Hashes: big.Hashes})
	if got := table.Match(all, "", ""); got != 32 {
		t.Errorf("%d tokens after it left host memory", got)
	}
}

// tierLog notes the tier of every block that is attached or moves, by its end.
type tierLog struct {
	silent
	table *Table
	told  []string
}

func (l *tierLog) Attached(b summary.Block) {
	l.told = append(l.told, fmt.Sprint(b.EndTokens, " ", b.Tier))
}

func (l *tierLog) TierChanged(id uint32, tier summary.Tier) {
	_, end := l.table.PlaceOf(id)
	l.told = append(l.told, fmt.Sprint(end, " ", tier))
}

// What an engine evicts from GPU memory and keeps in the host's stays reusable, and
// reading it back is no sign that it was computed once more.
func TestHostMemoryIsFollowed(t *testing.T) {
	table := New(Options{})
	history := NewHistory(table)
	history.SetNow(1000)
	tiers := &tierLog{table: table}
	table.Listen(tiers)
	// By hash only, as offloading connectors tell.
	host := &Event{Op: OpStore, Medium: MediumCPU, Hashes: []uint64{1, 2}}
	apply(table, store(0, 1, 2, 3), host, remove(3, 2))
	if got := table.Match(prompt(1, 2, 3), "", ""); got != 16 {
		t.Errorf("%d tokens where host memory is not followed, want 16", got)
	}
	table.FollowHost(true)
	if got := table.Match(prompt(1, 2, 3), "", ""); got != 32 {
		t.Errorf("%d tokens, want 32", got)
	}
	tiers.told = nil
	apply(table, remove(1))
	history.SetNow(2000)
	apply(table, store(0, 1), store(1, 2)) // read back
	if want := []string{"16 host", "16 gpu", "32 gpu"}; !slices.Equal(tiers.told, want) {
		t.Errorf("told %v, want %v", tiers.told, want)
	}
	if n := len(history.stored.items); n != 0 {
		t.Errorf("%d blocks count as computed once more", n)
	}
	apply(table, store(0, 1))
	if n := len(history.stored.items); n != 1 {
		t.Errorf("%d blocks count as computed once more, want the one that was in GPU memory", n)
	}
	// A clear of GPU memory leaves the host's.
	tiers.told = nil
	apply(table, &Event{Op: OpClear})
	if got := table.Match(prompt(1, 2, 3), "", ""); got != 32 || len(tiers.told) != 2 {
		t.Errorf("%d tokens after a clear of GPU memory, told %v", got, tiers.told)
	}
	apply(table, &Event{Op: OpClear, Medium: MediumCPU})
	if got := table.Match(prompt(1, 2, 3), "", ""); got != 0 || table.Attached() != 0 || table.Held() != 0 {
		t.Errorf("%d tokens, %d blocks, %d nodes after a clear of both", got, table.Attached(), table.Held())
	}
}
