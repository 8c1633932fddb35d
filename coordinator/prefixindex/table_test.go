package prefixindex

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"waypost/gossip/prefix"
)

// TestTableIsASetOfPairs drives the table beside a plain set, with few keys, so
// that sets grow from a slot to a pair to a bitmap and back, and hashes meet.
func TestTableIsASetOfPairs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tab := table{seed: 1} // keys that differ in low bits only share a segment
		if rapid.Bool().Draw(t, "spread") {
			tab.seed = 0x9e3779b97f4a7c15
		}
		type pair struct {
			k prefix.Key
			w WorkerID
		}
		want := map[pair]bool{}
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			p := pair{
				prefix.Key(rapid.IntRange(1, 60).Draw(t, "key")),
				WorkerID(rapid.SampledFrom([]int{0, 1, 2, 3, 63, 64, 200}).Draw(t, "worker")),
			}
			is := rapid.Bool().Draw(t, "is")
			tab.put(p.k, p.w, want[p], is)
			if want[p] = is; !is {
				delete(want, p)
			}
		}
		keys := map[prefix.Key]bool{}
		for p := range want {
			keys[p.k] = true
		}
		if tab.keys != len(keys) {
			t.Fatalf("%d keys, want %d", tab.keys, len(keys))
		}
		cur := []uint64{1<<0 | 1<<2 | 1<<63, 1, 0, 1 << (200 - 192)}
		members := []WorkerID{0, 2, 63, 64, 200}
		for k := prefix.Key(1); k <= 60; k++ {
			dst := slices.Clone(cur)
			n := 0
			got := tab.intersect(dst, dst, k)
			for w := WorkerID(0); w < 256; w++ {
				if tab.contains(k, w) != want[pair{k, w}] {
					t.Fatalf("key %d worker %d: %v", k, w, !want[pair{k, w}])
				}
				in := want[pair{k, w}] && slices.Contains(members, w)
				if has(dst, uint32(w)) != in {
					t.Fatalf("key %d worker %d: intersection says %v", k, w, !in)
				}
				if in {
					n++
				}
			}
			if n != got {
				t.Fatalf("key %d: intersection of %d, want %d", k, got, n)
			}
		}
	})
}

// TestTableGivesMemoryBack churns and checks that bitmaps and slots are reused.
func TestTableGivesMemoryBack(t *testing.T) {
	tab := table{seed: 3}
	rng := rand.New(rand.NewPCG(1, 1))
	for round := range 50 {
		keys := make([]prefix.Key, 1000)
		for i := range keys {
			keys[i] = prefix.Key(rng.Uint64() | 1)
			for w := range WorkerID(5) {
				tab.add(keys[i], w)
			}
		}
		for _, k := range keys {
			for w := range WorkerID(5) {
				tab.remove(k, w)
			}
		}
		if tab.keys != 0 || len(tab.slab.sets) != 1000 {
			t.Fatalf("round %d: %d keys left, %d bitmaps", round, tab.keys, len(tab.slab.sets))
		}
	}
	slots := 0
	for i := range tab.segs {
		slots += len(tab.segs[i].slots)
	}
	if slots > segments*64 {
		t.Fatalf("%d slots for at most 1000 keys", slots)
	}
}
