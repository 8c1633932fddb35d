package prefixindex

import (
	"math/rand/v2"
	"slices"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
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
	x.Shorten(3, 0, nil, nil, 0)
	keys, depths := text{c, 1024}.keys()
	x.Shorten(3, 0, keys, depths, 600)
	expect(t, x, "shortened", text{c, 1024}, predicted(3, 512))
	keys, depths = text{b, 528}.keys()
	x.Shorten(3, 0, keys, depths, 0)
	expect(t, x, "an open claim is not shortened", text{b, 528}, predicted(3, 528))
	x.RemovePredicted(3, 4) // it was used again
	expect(t, x, "nor what follows it", text{b, 528}, predicted(3, 528))
	x.Retain(3, 512)
	expect(t, x, "a smaller cache", text{b, 528}, predicted(3, 512))
	x.claim(3, 5, text{a, 512})
	x.WorkerSink(3).Reset()
	expect(t, x, "a cache that was cleared", text{b, 528})
	expect(t, x, "what an open claim will compute", text{a, 512}, predicted(3, 512))
	x.RemovePredicted(3, 5)
	expect(t, x, "and has computed", text{a, 512}, predicted(3, 512))
	x.Retain(3, 0)
	expect(t, x, "a worker that tells", text{a, 512})
	x.sweepAll()
	if st := x.Stats(); st.Listings != 0 || st.Keys != 0 || st.Predicted != 0 {
		t.Errorf("left over: %+v", st)
	}
	x.Retain(4, 0)
	x.Retain(5, 512)
	x.Drop(5)
	x.Shorten(5, 0, keys, depths, 0)
}

// TestRetainedIsAnLRU compares with a list that is searched: with claims that
// name all of their prompt, and with some that name what is new only.
func TestRetainedIsAnLRU(t *testing.T) {
	t.Run("whole", func(t *testing.T) { retainedIsAnLRU(t, false) })
	t.Run("new", func(t *testing.T) { retainedIsAnLRU(t, true) })
}

// tail is what is new of a text beyond a checkpoint, with the key of that.
func (of text) tail(held uint32) (after summary.IndexKey, keys []prefix.Key, depths []uint32) {
	if held > 0 {
		after = of.at(held).name().key
	}
	keys, depths = of.keys()
	for len(depths) > 0 && depths[0] <= held {
		keys, depths = keys[1:], depths[1:]
	}
	return after, keys, depths
}

func retainedIsAnLRU(t *testing.T, news bool) {
	rng := rand.New(rand.NewPCG(3, 1))
	edges := forest(rng.IntN, 25)
	x := New(Options{})
	const capacity = 6000
	x.Retain(1, capacity)
	var used []text // latest first
	use := func(of text, held uint32) {
		for _, k := range slices.Backward(of.known()) {
			if k.depth <= held && k.depth%prefix.ChunkTokens != 0 {
				continue // not told of
			}
			if k.depth <= held && !slices.Contains(used, k) {
				break // gone
			}
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
	open, from := map[uint64]text{}, map[uint64]uint32{}
	for i := range uint64(600) {
		of := anyText(rng.IntN, edges)
		held := uint32(0)
		for news && held+prefix.ChunkTokens < of.depth && slices.Contains(used, of.at(held+prefix.ChunkTokens)) {
			held += prefix.ChunkTokens
		}
		after, keys, depths := of.tail(held)
		x.AddPredicted(1, i, after, keys, depths)
		open[i], from[i] = of, held
		use(of, held)
		if j := i - uint64(rng.IntN(3)); i > 3 && open[j].depth > 0 {
			x.RemovePredicted(1, j)
			use(open[j], from[j])
			delete(open, j)
		}
		want := map[text]bool{}
		for _, k := range used {
			want[k] = true
			if up := k.at((k.depth - 1) / prefix.ChunkTokens * prefix.ChunkTokens); up.depth > 0 && !news && !slices.Contains(used, up) {
				t.Fatalf("step %d: %+v is retained without what it builds on", i, k)
			}
		}
		for claim, of := range open {
			for _, k := range of.known() {
				if k.depth > from[claim] {
					want[k] = true
				}
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

// TestNewPartOfAHeldPrompt: a claim names what is new, and that is found behind
// what the stream lists.
func TestNewPartOfAHeldPrompt(t *testing.T) {
	x := New(Options{})
	a := &edge{id: 1, end: 1 << 20}
	s := x.WorkerSink(3)
	s.Begin()
	add(s, text{a, 1296})
	s.End()
	for _, held := range []uint32{512, 1024} {
		after, keys, depths := text{a, 2992}.tail(held)
		x.AddPredicted(3, 1, after, keys, depths)
		expect(t, x, "the claim", text{a, 2992}, predicted(3, 2992))
		x.AddPredicted(3, 1, after+1, keys, depths)
		expect(t, x, "of another prompt", text{a, 2992}, Match{3, Reuse{Tokens: 1296}})
		x.AddPredicted(3, 1, 0, keys, depths)
		expect(t, x, "hanging on nothing", text{a, 2992}, Match{3, Reuse{Tokens: 1296}})
		x.RemovePredicted(3, 1)
	}
	// Where nothing is listed, what is found on arrival says how far the rest
	// stands; what a prompt hangs on counts as used with it.
	x.Retain(5, 3*512)
	x.claim(5, 1, text{a, 1024})
	x.RemovePredicted(5, 1)
	x.claim(5, 2, text{&edge{id: 2, end: 1 << 20}, 512})
	x.RemovePredicted(5, 2)
	after, keys, depths := text{a, 1024}.tail(1024)
	x.AddPredicted(5, 3, after, keys, depths)
	x.RemovePredicted(5, 3)
	x.claim(5, 4, text{&edge{id: 3, end: 1 << 20}, 512})
	x.RemovePredicted(5, 4)
	expectOf(t, x, 5, text{a, 1024}, 1024)
	x.Shorten(5, after, keys, depths, 600)
	expectOf(t, x, 5, text{a, 1024}, 512)
	x.Shorten(5, after, keys, depths, 600)
	x.Shorten(5, 0, nil, nil, 600)
	expectOf(t, x, 5, text{a, 1024}, 512)
}

// expectOf checks how much of a text one worker is predicted to hold.
func expectOf(t *testing.T, x *Index, id WorkerID, of text, want uint32) {
	t.Helper()
	var p prefix.Probe
	got := uint32(0)
	for _, m := range x.Match(of.probe(&p, 800), nil) {
		if m.Worker == id {
			got = m.Tokens
		}
	}
	if got != want {
		t.Errorf("%d tokens of %+v, want %d", got, of, want)
	}
}
