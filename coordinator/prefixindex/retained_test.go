package prefixindex

import (
	"math/rand/v2"
	"slices"
	"testing"

	"waypost/gossip/prefix"
)

// TestRetainedOutliveTheirClaim: without events, what was placed on a worker
// stays listed until more was placed there than it can hold.
func TestRetainedOutliveTheirClaim(t *testing.T) {
	x := New(Options{})
	x.Retain(3, 2048)
	a := &edge{id: 1, end: 1 << 20}
	b := &edge{id: 2, end: 1 << 20}
	c := &edge{id: 3, parent: a, start: 512, end: 1 << 20}
	x.claim(3, 1, text{a, 1024})
	x.RemovePredicted(3, 1)
	expect(t, x, "after the claim", text{a, 1024}, predicted(3, 1024))
	x.claim(3, 2, text{b, 512})
	x.RemovePredicted(3, 2)
	x.claim(3, 3, text{c, 1024}) // shares 512 tokens: 2,048 now
	x.RemovePredicted(3, 3)
	expect(t, x, "all fit", text{a, 1024}, predicted(3, 1024))
	x.claim(3, 4, text{b, 528})
	expect(t, x, "the oldest end went", text{a, 1024}, predicted(3, 512))
	expect(t, x, "what it shared with a later one stays", text{c, 1024}, predicted(3, 1024))
	x.Shorten(3, nil, nil, 0)
	keys, depths := text{c, 1024}.keys()
	x.Shorten(3, keys, depths, 600)
	expect(t, x, "shortened", text{c, 1024}, predicted(3, 512))
	keys, depths = text{b, 528}.keys()
	x.Shorten(3, keys, depths, 0)
	expect(t, x, "an open claim is not shortened", text{b, 528}, predicted(3, 528))
	x.RemovePredicted(3, 4) // it was used again
	expect(t, x, "nor what follows it", text{b, 528}, predicted(3, 528))
	x.Retain(3, 512)
	expect(t, x, "a smaller cache", text{b, 528}, predicted(3, 512))
	x.WorkerSink(3).Reset()
	expect(t, x, "no stream, nothing to clear", text{b, 528}, predicted(3, 512))
	x.Retain(3, 0)
	expect(t, x, "a worker that tells", text{b, 528})
	x.sweepAll()
	if st := x.Stats(); st.Listings != 0 || st.Keys != 0 || st.Predicted != 0 {
		t.Errorf("left over: %+v", st)
	}
	x.Retain(4, 0)
	x.Retain(5, 512)
	x.Drop(5)
	x.Shorten(5, keys, depths, 0)
}

// TestRetainedIsAnLRU compares with a list that is searched.
func TestRetainedIsAnLRU(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 1))
	edges := forest(rng.IntN, 25)
	x := New(Options{})
	const capacity = 6000
	x.Retain(1, capacity)
	var used []text // latest first
	use := func(of text) {
		for _, k := range slices.Backward(of.known()) {
			if i := slices.Index(used, k); i >= 0 {
				used = slices.Delete(used, i, i+1)
			}
			used = slices.Insert(used, 0, k)
		}
		for {
			sum := uint32(0)
			for _, k := range used {
				n := k.name()
				sum += uint32(n.retainedTokens())
			}
			if sum <= capacity {
				return
			}
			used = used[:len(used)-1]
		}
	}
	open := map[uint64]text{}
	for i := range uint64(600) {
		of := anyText(rng.IntN, edges)
		x.claim(1, i, of)
		open[i] = of
		use(of)
		if j := i - uint64(rng.IntN(3)); i > 3 && open[j].depth > 0 {
			x.RemovePredicted(1, j)
			use(open[j])
			delete(open, j)
		}
		want := map[text]bool{}
		for _, k := range used {
			want[k] = true
			if up := k.at((k.depth - 1) / prefix.ChunkTokens * prefix.ChunkTokens); up.depth > 0 && !slices.Contains(used, up) {
				t.Fatalf("step %d: %+v is retained without what it builds on", i, k)
			}
		}
		for _, of := range open {
			for _, k := range of.known() {
				want[k] = true
			}
		}
		if got := x.WorkerKeys(1); got != len(want) {
			t.Fatalf("step %d: %d keys, want %d", i, got, len(want))
		}
		for k := range want {
			n := k.name()
			if _, predicted := x.Holds(1, n.key, n.parent, n.depth); !predicted {
				t.Fatalf("step %d: %+v is not predicted", i, k)
			}
		}
	}
}
