package prefixindex

import (
	"testing"

	"pgregory.net/rapid"
)

// TestTableIsAMapOfSets drives one segment of a table beside a map, with keys of
// one worker and of several, that meet in full buckets: the short ways of the
// ordinary changes and the general ones take turns on the same buckets.
func TestTableIsAMapOfSets(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var tab table
		var blocks slab
		tab.init(&sets{slab: &blocks, width: 1}, &points{&blocks}, new(entries))
		spots := func() spot { // few homes: the last ones wrap around
			home := uint64(rapid.SampledFrom([]int{0, 1, 2, 1<<28 - 2, 1<<28 - 1}).Draw(t, "home"))
			return spot{tag: (home + uint64(rapid.IntRange(0, 14).Draw(t, "key"))<<4) << tagShift & tagMask}
		}
		want := map[spot]map[uint32]bool{}
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			at, id := spots(), uint32(rapid.SampledFrom([]int{3, 3, 3, 3, 4, 63}).Draw(t, "worker"))
			listed := want[at][id]
			if rapid.IntRange(0, 9).Draw(t, "add") < 6 {
				if added, _ := tab.add(at, id, 7); added == listed {
					t.Fatalf("add of %x for %d says %v", at.tag, id, added)
				}
				if want[at] == nil {
					want[at] = map[uint32]bool{}
				}
				want[at][id] = true
			} else {
				removed, gone, info := tab.remove(at, id)
				delete(want[at], id)
				if removed != listed || gone != (listed && len(want[at]) == 0) || listed && info != 7 {
					t.Fatalf("remove of %x for %d says %v, %v, info %d", at.tag, id, removed, gone, info)
				}
				if len(want[at]) == 0 {
					delete(want, at)
				}
			}
			if tab.entries != len(want) || tab.dir != nil && (int(tab.dir[0].used) != len(want) || tab.dir[0].seq.Load()%2 != 0) {
				t.Fatalf("%d entries, want %d", tab.entries, len(want))
			}
		}
		for at, of := range want {
			for _, id := range []uint32{3, 4, 63} {
				if tab.has(at, id) != of[id] {
					t.Fatalf("%x is listed for %d: %v, want %v", at.tag, id, !of[id], of[id])
				}
			}
		}
	})
}

// TestCountAloneIsTheGeneralCount: the short way to count a point does what the
// general one does, or nothing.
func TestCountAloneIsTheGeneralCount(t *testing.T) {
	short := map[bool]int{}
	rapid.Check(t, func(t *rapid.T) {
		var tab table
		var blocks slab
		pts := &points{&blocks}
		tab.init(&sets{slab: &blocks, width: 1}, pts, new(entries))
		at := spot{tag: 5 << tagShift}
		tab.add(at, 9, 0)
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			where, e := tab.at(at)
			offset := rapid.Uint32Range(1, 5).Draw(t, "offset")
			listed := rapid.Bool().Draw(t, "listed")
			done := tab.countAlone(where.seg, at.tag, offset, listed)
			short[done]++
			now := e
			if listed {
				now.info = pts.add(e.info, offset, 0)
			} else {
				now.info = pts.remove(e.info, offset)
			}
			_, is := tab.at(at)
			switch {
			case done && is != now:
				t.Fatalf("offset %d, listed %v: %+v becomes %+v, want %+v", offset, listed, e, is, now)
			case !done && is.members != e.members:
				t.Fatalf("%+v becomes %+v", e, is)
			case !done:
				where.seg.begin()
				tab.set(where, now)
				where.seg.end()
			}
		}
	})
	if short[true] == 0 || short[false] == 0 {
		t.Errorf("short ways %v: want both", short)
	}
}
