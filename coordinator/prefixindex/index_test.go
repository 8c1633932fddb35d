package prefixindex

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// TestIndexIsTheModel makes random changes to an index and to plain sets, and
// compares every answer and all that is kept.
func TestIndexIsTheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		intn := func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "n") }
		d := newDriver(t, intn, rapid.Uint64().Draw(t, "seed"))
		d.windows = rapid.Bool().Draw(t, "windows")
		var p prefix.Probe
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			d.step()
			d.compareSome(&p, 2)
		}
		d.m.audit(t, d.x)
		for _, id := range d.ids {
			d.drop(id)
		}
		d.m.audit(t, d.x)
	})
}

// TestGrowingFleetIsTheModel is TestIndexIsTheModel in a fleet that ever more
// workers join, of ever higher numbers: they hold the same texts in common, some of
// them less than those before.
func TestGrowingFleetIsTheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 17))
		d := newDriver(t, r.IntN, r.Uint64())
		d.edges = forest(r.IntN, 1+r.IntN(4))
		d.windows = r.IntN(2) == 0
		d.ids = nil
		whole := anyText(r.IntN, d.edges)
		var p prefix.Probe
		for stage, first := 0, 0; stage < 6; stage++ {
			joined := 0
			for range 1 + r.IntN(10) {
				d.ids = append(d.ids, WorkerID(first+r.IntN(64)))
				joined++
			}
			for range 1 + r.IntN(3) {
				part := whole.at(step * uint32(1+r.IntN(int(whole.depth)/step)))
				for _, id := range d.ids[len(d.ids)-joined:] {
					d.storeText(id, part)
				}
			}
			for range r.IntN(10) {
				d.step()
				d.compareSome(&p, 1)
			}
			d.m.compare(t, d.x, &p, whole, step*uint32(r.IntN(60)))
			first += 64 * (1 + r.IntN(1<<stage))
		}
		d.m.audit(t, d.x)
	})
}

// FuzzChanges is TestIndexIsTheModel with changes read from bytes.
func FuzzChanges(f *testing.F) {
	f.Add([]byte("a few bytes make a few changes"), uint64(1))
	f.Add([]byte{9, 9, 9, 0, 1, 2, 3, 200, 10, 20, 11, 5, 7, 6, 3, 2, 1, 12, 13, 14, 0, 0, 0, 90}, uint64(0))
	f.Fuzz(func(t *testing.T, b []byte, seed uint64) {
		if len(b) > 400 {
			t.Skip("long inputs only take long")
		}
		intn := func(n int) int {
			if len(b) == 0 {
				return 0
			}
			v := int(b[0])
			b = b[1:]
			return v % n
		}
		d := newDriver(t, intn, seed)
		var p prefix.Probe
		for len(b) > 0 {
			d.step()
			d.m.compare(t, d.x, &p, anyText(intn, d.edges), 512)
		}
		d.m.audit(t, d.x)
	})
}

// TestWritersOfManyWorkers: streams of different workers are written beside each
// other, as lanes do.
func TestWritersOfManyWorkers(t *testing.T) {
	x := New(Options{Seed: 4})
	edges := forest(rand.New(rand.NewPCG(7, 7)).IntN, 20)
	all := newModel()
	var writers sync.WaitGroup
	var mu sync.Mutex
	for g := range 4 {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 8))
			d := newDriver(fatal{t}, rng.IntN, 0)
			d.x, d.edges = x, edges
			for i := range d.ids {
				d.ids[i] = WorkerID(4*i + g)
			}
			for range 300 {
				d.step()
			}
			mu.Lock()
			defer mu.Unlock()
			for id, w := range d.m.workers {
				all.workers[id] = w
			}
		})
	}
	writers.Wait()
	all.audit(fatal{t}, x)
	rng := rand.New(rand.NewPCG(1, 1))
	var p prefix.Probe
	for range 100 {
		all.compare(t, x, &p, anyText(rng.IntN, edges), 512)
	}
}

// line is a text without branches.
func line(depth uint32) text { return text{&edge{id: 1, end: 1 << 20}, depth} }

// add lists a text's known prefixes.
func add(s *Sink, t text) {
	for _, k := range t.known() {
		addOne(s, k)
	}
}

func addOne(s *Sink, k text) {
	if n := k.name(); n.isPoint() {
		s.AddPoint(n.key, n.parent, n.depth, false)
	} else {
		s.AddCheckpoint(n.key, n.parent, n.depth)
	}
}

func removeOne(s *Sink, k text) {
	if n := k.name(); n.isPoint() {
		s.RemovePoint(n.key, n.parent, n.depth, false)
	} else {
		s.RemoveCheckpoint(n.key, n.parent, n.depth)
	}
}

func (x *Index) claim(id WorkerID, claim uint64, t text) {
	keys, depths := t.keys()
	x.AddPredicted(id, claim, 0, keys, depths)
}

// expect compares the matches of a text followed by more.
func expect(t *testing.T, x *Index, when string, prompt text, want ...Match) {
	t.Helper()
	for i := range want {
		w := &want[i]
		w.LikelyTokens = max(w.LikelyTokens, w.Tokens)
		if w.HostTokens == 0 {
			w.GPUTokens, w.HostTokens = w.Tokens, w.Tokens
		}
	}
	var p prefix.Probe
	if diff := cmp.Diff(want, x.Match(prompt.probe(&p, 800), nil)); diff != "" {
		t.Errorf("%s: %s", when, diff)
	}
}

func listed(id WorkerID, tokens uint32) Match {
	return Match{Worker: id, Reuse: Reuse{Tokens: tokens}}
}

func predicted(id WorkerID, tokens uint32) Match {
	return Match{Worker: id, Reuse: Reuse{Tokens: tokens, Predicted: true}}
}

func TestPredictionsLiveAsLongAsTheirClaim(t *testing.T) {
	x, long := New(Options{}), line(1408)
	x.claim(4, 100, long)
	expect(t, x, "one claim", long, predicted(4, 1408))
	x.claim(4, 101, line(1024))
	x.RemovePredicted(4, 100)
	expect(t, x, "the shorter of two claims is left", long, predicted(4, 1024))
	x.claim(4, 101, line(512))
	expect(t, x, "the claim was replaced", long, predicted(4, 512))
	s := x.WorkerSink(4)
	addOne(s, line(512))
	expect(t, x, "confirmed", long, listed(4, 512))
	x.RemovePredicted(4, 101)
	expect(t, x, "claim ended after confirmation", long, listed(4, 512))
	x.RemovePredicted(4, 101)
	x.RemovePredicted(9, 1)
	expect(t, x, "ended twice", long, listed(4, 512))
	removeOne(s, line(512))
	expect(t, x, "gone", long)
	if st := x.Stats(); st.Keys != 0 || st.Predicted != 0 || st.Listings != 0 {
		t.Errorf("left over: %+v", st)
	}
}

// TestLaterWorkersHoldLess: workers that join a fleet are looked for where only
// those are listed that were there before.
func TestLaterWorkersHoldLess(t *testing.T) {
	x := New(Options{})
	var want []Match
	for id := range WorkerID(10) {
		s := x.WorkerSink(id)
		add(s, line(1024))
		addOne(s, line(704))
		want = append(want, listed(id, 1024))
	}
	for id := WorkerID(192); id < 195; id++ {
		add(x.WorkerSink(id), line(512))
		later := listed(id, 512)
		later.LikelyTokens = 704
		want = append(want, later)
	}
	expect(t, x, "two sizes of a fleet", line(1104), want...)
}

// TestClaimsOutliveAClear: what runs on an engine that cleared its cache is
// prefilled again.
func TestClaimsOutliveAClear(t *testing.T) {
	x := New(Options{})
	s := x.WorkerSink(2)
	add(s, line(2000))
	x.SetVerified(2, false)
	x.claim(2, 1, line(1008))
	s.Reset()
	expect(t, x, "after the clear", line(2000), predicted(2, 1008))
	add(s, line(608))
	want := listed(2, 608)
	want.Unverified = true
	x.RemovePredicted(2, 1)
	x.sweepAll()
	expect(t, x, "still unverified", line(2000), want)
}

func TestUnverified(t *testing.T) {
	x := New(Options{})
	add(x.WorkerSink(1), line(608))
	add(x.WorkerSink(2), line(608))
	x.SetVerified(1, false)
	doubtful := listed(1, 608)
	doubtful.Unverified = true
	expect(t, x, "one of two", line(608), doubtful, listed(2, 608))
	x.SetVerified(1, true)
	x.SetVerified(1, true)
	expect(t, x, "both", line(608), listed(1, 608), listed(2, 608))
}

// TestCountsCollisions: a key listed twice is listed until the second removal.
func TestCountsCollisions(t *testing.T) {
	x, k := New(Options{}), line(512)
	s := x.WorkerSink(0)
	removeOne(s, k) // of nothing: ignored
	addOne(s, k)
	addOne(s, k)
	removeOne(s, k)
	expect(t, x, "removed once", line(608), listed(0, 512))
	removeOne(s, k)
	expect(t, x, "removed twice", line(608))
	if x.WorkerKeys(0) != 0 {
		t.Error("still there after both were removed")
	}
}

// TestKeysOfOneSpot: to the tables two points are one if their hashes agree far
// enough. It is listed until both are gone, and nothing is left then.
func TestKeysOfOneSpot(t *testing.T) {
	x := New(Options{Seed: 5})
	seen := map[spot]summary.IndexKey{}
	rng := rand.New(rand.NewPCG(1, 2))
	parent := line(512).name()
	var a, b summary.IndexKey
	for b == 0 {
		k := summary.IndexKey(rng.Uint64())
		at := x.pointSpot(k, parent.key)
		if a = seen[at]; a != 0 {
			b = k
		}
		seen[at] = k
	}
	first, second := x.WorkerSink(1), x.WorkerSink(2)
	for _, s := range []*Sink{first, second} {
		addOne(s, line(512))
	}
	first.AddPoint(a, parent.key, 600, false)
	first.AddPoint(b, parent.key, 700, false)
	second.AddPoint(b, parent.key, 700, false)
	first.RemovePoint(a, parent.key, 600, false)
	for _, id := range []WorkerID{1, 2} {
		if listed, _ := x.Holds(id, b, parent.key, 700); !listed {
			t.Errorf("worker %d lost a point with the other one", id)
		}
	}
	first.RemovePoint(b, parent.key, 700, false)
	second.RemovePoint(b, parent.key, 700, false)
	if st := x.Stats(); st.Keys != 1 || st.Listings != 2 {
		t.Errorf("left over: %+v", st)
	}
	if _, e := x.held.at(x.spot(&parent)); e.info != 0 {
		t.Errorf("points left: %x", e.info)
	}
}

// TestExtents: residency leads the search, extents say what it is worth.
func TestExtents(t *testing.T) {
	x := New(Options{})
	s := x.WorkerSink(2)
	extent := func(k text, e summary.Extent) {
		n := k.name()
		s.SetExtent(n.key, n.parent, n.depth, e)
	}
	prompt := line(3000)
	s.Begin()
	for _, k := range line(2560).known() {
		addOne(s, k)
		extent(k, summary.Extent{HostTokens: k.depth, GPUTokens: k.depth})
	}
	s.End()
	expect(t, x, "no end anywhere", prompt)
	addOne(x.WorkerSink(5), line(512))
	extent(line(2560), summary.Extent{UsableTokens: 1100, GPUTokens: 512, HostTokens: 1024})
	want := listed(2, 1100)
	want.GPUTokens, want.HostTokens = 512, 1024
	expect(t, x, "an end before", prompt, want, listed(5, 512))
	extent(line(2560), summary.Extent{UsableTokens: 300, GPUTokens: 2048, HostTokens: 2560})
	expect(t, x, "ranked by what is usable", prompt, listed(5, 512), listed(2, 300))
	extent(line(2560), summary.WholeExtent(2560))
	expect(t, x, "whole again", prompt, listed(2, 2560), listed(5, 512))
	extent(line(2048), summary.Extent{UsableTokens: 2000, GPUTokens: 2048, HostTokens: 2048})
	removeOne(s, line(2560))
	expect(t, x, "one that ends before", prompt, listed(2, 2000), listed(5, 512))
	removeOne(s, line(2048))
	addOne(s, line(2048))
	expect(t, x, "a new listing is whole", prompt, listed(2, 2048), listed(5, 512))
	x.claim(2, 1, line(2560))
	expect(t, x, "so is a prediction", prompt, predicted(2, 2560), listed(5, 512))
}

func TestDrop(t *testing.T) {
	x, long := New(Options{}), line(1088)
	s := x.WorkerSink(7)
	add(s, long)
	addOne(x.WorkerSink(8), line(512))
	x.claim(7, 1, long)
	x.Drop(7)
	x.Drop(99)
	expect(t, x, "after the drop", long, listed(8, 512))
	next := x.WorkerSink(7) // the id's next owner
	expect(t, x, "a new owner holds nothing", long, listed(8, 512))
	addOne(next, line(512))
	addOne(s, line(1024))
	removeOne(s, line(512))
	s.Reset()
	x.RemovePredicted(7, 1)
	expect(t, x, "the old sink wrote into the new worker", long, listed(7, 512), listed(8, 512))
	if n := x.Stats().Unswept; n != 1 {
		t.Errorf("%d workers unswept: the id had no other slot", n)
	}
	for i := 0; x.Stats().Unswept > 0; i++ {
		x.RemovePredicted(8, 1) // any change goes on with the sweep
		if i > segments {
			t.Fatal("the sweep does not end")
		}
	}
	expect(t, x, "after the sweep", long, listed(7, 512), listed(8, 512))
	if st := x.Stats(); st.Keys != 1 || st.Listings != 2 {
		t.Errorf("left over: %+v", st)
	}
}

// TestIdsRunOut: a worker that is dropped and comes back more often than there
// are slots.
func TestIdsRunOut(t *testing.T) {
	x := New(Options{})
	for i := range 2*maxSlots + 10 {
		addOne(x.WorkerSink(3), line(512))
		if i%2 == 0 {
			x.Drop(3)
		} else {
			x.WorkerSink(3).Reset()
		}
	}
	addOne(x.WorkerSink(3), line(512))
	expect(t, x, "at the end", line(608), listed(3, 512))
}

func TestDepthsThatCannotBe(t *testing.T) {
	x := New(Options{})
	s := x.WorkerSink(0)
	s.AddCheckpoint(5, 0, 0)
	s.AddCheckpoint(6, 1, summary.MaxDepthTokens+512)
	s.AddCheckpoint(0, 0, 512)
	s.AddCheckpoint(8, 0, 1024) // no checkpoint before it
	s.AddPoint(9, 0, 513, false)
	if n := x.Stats().Keys; n != 0 {
		t.Errorf("%d keys listed", n)
	}
	x.AddPredicted(0, 1, 0, []prefix.Key{1, 2, 0, 4}, []uint32{1024, 700, 512, summary.MaxDepthTokens + 1})
	if n := x.Stats().Keys; n != 0 {
		t.Errorf("%d keys predicted behind a gap", n)
	}
}

func TestBadCallsPanic(t *testing.T) {
	for name, f := range map[string]func(x *Index){
		"worker":  func(x *Index) { x.WorkerSink(MaxWorkers) },
		"lengths": func(x *Index) { x.AddPredicted(1, 1, 0, []prefix.Key{1}, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("accepted")
				}
			}()
			f(New(Options{}))
		})
	}
	New(Options{}).WorkerSink(MaxWorkers - 1)
}

// TestGapsInKeys: a request given as keys without some is searched as far as
// they go.
func TestGapsInKeys(t *testing.T) {
	x, long := New(Options{}), line(1168)
	add(x.WorkerSink(3), long)
	keys, _ := long.keys()
	var p prefix.Probe
	tokens := func(checkpoints []prefix.Key, points map[uint32]prefix.Key) uint32 {
		p.ResetKeys(1500, checkpoints, points)
		m := x.Match(&p, nil)
		if len(m) == 0 {
			return 0
		}
		return m[0].Tokens
	}
	for _, c := range []struct {
		got, want uint32
	}{
		{tokens(keys[:2], map[uint32]prefix.Key{1168: keys[2]}), 1168},
		{tokens(keys[:2], nil), 1024},
		{tokens([]prefix.Key{0, keys[1]}, map[uint32]prefix.Key{1168: keys[2]}), 0},
		{tokens([]prefix.Key{keys[0], 0}, nil), 512},
		{tokens(nil, nil), 0},
	} {
		if c.got != c.want {
			t.Errorf("%d tokens, want %d", c.got, c.want)
		}
	}
}

// TestLikelyTokens: a guess is somebody's known end on the prompt's path.
func TestLikelyTokens(t *testing.T) {
	x := New(Options{})
	add(x.WorkerSink(1), line(704))
	add(x.WorkerSink(2), line(2000))
	addOne(x.WorkerSink(2), line(800))
	short := listed(1, 704)
	short.LikelyTokens = 800
	expect(t, x, "two ends in a chunk", line(2048), listed(2, 2000), short)
}

func TestFormsOfAResult(t *testing.T) {
	x := New(Options{})
	for _, id := range []WorkerID{0, 63, 64, 700} {
		add(x.WorkerSink(id), line(608))
	}
	add(x.WorkerSink(5), line(2000))
	var p prefix.Probe
	groups := x.NewSearcher().Search(line(2000).probe(&p, 16))
	if len(groups) != 2 || groups[0].Tokens != 2000 || groups[1].Workers.Len() != 4 {
		t.Fatalf("groups %+v", groups)
	}
	if got := slices.Collect(groups[1].Workers.All); !slices.Equal(got, []WorkerID{0, 63, 64, 700}) {
		t.Errorf("workers %v", got)
	}
	for w := range groups[1].Workers.All {
		if w == 63 {
			break // may be left early
		}
	}
	first, words := groups[0].Workers.Bitmap()
	if first != 0 || !slices.Equal(words, []uint64{1 << 5}) {
		t.Errorf("bitmap %d, %x", first, words)
	}
	if groups[1].Workers.Has(5) || !groups[1].Workers.Has(700) || groups[1].Workers.Has(9999) {
		t.Error("Has is wrong")
	}
}
