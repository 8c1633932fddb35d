package blocktable

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"waypost/gossip/summary"
)

// diary writes down what a listener is told.
type diary struct{ lines []string }

func (d *diary) Attached(b summary.Block)         { d.add("attached", b) }
func (d *diary) Detached(id uint32)               { d.add("detached", id) }
func (d *diary) UsableChanged(id uint32, on bool) { d.add("usable", id, on) }
func (d *diary) StoreEnded(id uint32)             { d.add("ended", id) }
func (d *diary) Cleared()                         { d.add("cleared") }
func (d *diary) add(what ...any)                  { d.lines = append(d.lines, fmt.Sprintln(what...)) }

// Looking ahead changes nothing but the time it takes: one by one, in one go or
// cut anywhere, events have the same effects in the same order, at the bound of
// a table too.
func TestApplyAllEqualsApply(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const hashes = 3 * aheadBlocks
		options := Options{MaxBlocks: rapid.IntRange(1, 5*aheadBlocks).Draw(rt, "bound")}
		hash := rapid.Uint64Range(1, hashes)
		var events []Event
		for range rapid.IntRange(1, 12).Draw(rt, "rounds") {
			for range rapid.IntRange(0, 2*aheadBlocks).Draw(rt, "removals") {
				events = append(events, *remove(hash.Draw(rt, "removed")))
			}
			if rapid.Bool().Draw(rt, "many at once") {
				events = append(events, *remove(rapid.SliceOfN(hash, 1, 2*aheadBlocks).Draw(rt, "together")...))
			}
			parent := rapid.Uint64Range(0, hashes).Draw(rt, "parent")
			events = append(events, *store(parent, rapid.SliceOfN(hash, 1, 2*aheadBlocks).Draw(rt, "stored")...))
		}
		var one, all diary
		single, whole := New(options), New(options)
		single.Listen(&one)
		whole.Listen(&all)
		for i := range events {
			single.Apply(&events[i])
		}
		for rest := events; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(rt, "cut")
			whole.ApplyAll(rest[:n])
			rest = rest[n:]
		}
		if single.Stats() != whole.Stats() || single.Held() != whole.Held() || single.Copies() != whole.Copies() {
			rt.Fatalf("one by one %+v, together %+v", single.Stats(), whole.Stats())
		}
		if fmt.Sprint(one.lines) != fmt.Sprint(all.lines) {
			rt.Fatalf("one by one %q, together %q", one.lines, all.lines)
		}
	})
}

// A store longer than what is looked ahead for fills a table to its last block.
func TestLongStoreMeetsBound(t *testing.T) {
	for _, bound := range []int{2, aheadBlocks - 1, aheadBlocks, aheadBlocks + 1, 3*aheadBlocks - 1, 3 * aheadBlocks} {
		table := New(Options{MaxBlocks: bound})
		var hashes []uint64
		for h := range uint64(3*aheadBlocks + 5) {
			hashes = append(hashes, h+1)
		}
		table.Apply(store(0, hashes...))
		if got, refused := table.Len(), int(table.Stats().Refused); got != bound || refused != len(hashes)-bound {
			t.Errorf("bound %d: holds %d, refused %d of %d", bound, got, refused, len(hashes))
		}
	}
}
