package prefixindex

import (
	"math/rand/v2"
	"slices"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// listings is what a worker's stream lists, by the model.
func (w *modelWorker) listings() []Listing {
	var out []Listing
	for k, times := range w.listed {
		if times == 0 {
			continue
		}
		n := k.name()
		l := Listing{Key: n.key, Checkpoint: n.parent, DepthTokens: n.depth, Times: times, Extent: summary.WholeExtent(n.depth)}
		if e, ok := w.extents[k]; ok {
			l.Extent = e
		}
		out = append(out, l)
	}
	return out
}

// auditListings compares the index with the model key by key.
func (m *model) auditListings(t interface{ Fatalf(string, ...any) }, x *Index) {
	for id, w := range m.workers {
		want := w.listings()
		if c := x.Compare(id, want); c.Equal != len(want) || c.Missing+c.Extra+c.Extents > 0 {
			t.Fatalf("worker %d: %+v, want %d equal", id, c, len(want))
		}
	}
}

// TestCompareFindsEveryDifference takes a list that equals the index and changes
// it in known ways.
func TestCompareFindsEveryDifference(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	d := newDriver(fatal{t}, rng.IntN, 3)
	for range 400 {
		d.step()
	}
	// One worker more, that holds enough whatever was drawn.
	const id = 900
	sink := d.x.WorkerSink(id)
	add(sink, line(40*prefix.ChunkTokens+160))
	add(sink, text{&edge{id: 2, end: 1 << 20}, 80})
	var want []Listing
	for _, k := range append(line(40*prefix.ChunkTokens+160).known(), text{&edge{id: 2, end: 1 << 20}, 80}) {
		n := k.name()
		want = append(want, Listing{n.key, n.parent, n.depth, 1, summary.WholeExtent(n.depth)})
	}
	check := func(what string, list []Listing, equal, missing, extra, extents int) Comparison {
		t.Helper()
		c := d.x.Compare(id, list)
		if c.Equal != equal || c.Missing != missing || c.Extra != extra || c.Extents != extents {
			t.Errorf("%s: %+v, want %d equal, %d missing, %d extra, %d extents", what, c, equal, missing, extra, extents)
		}
		return c
	}
	n := len(want)
	check("the same", want, n, 0, 0, 0)
	check("nothing wanted", nil, 0, 0, n, 0)
	check("one key less is wanted", want[1:], n-1, 0, 1, 0)

	d.x.AddPredicted(id, 1, 0, []prefix.Key{77 << 56}, []uint32{48})
	check("a prediction is no listing", want, n, 0, 0, 0)

	more := text{&edge{id: 3, end: 1 << 20}, 96}.name()
	lacking := Listing{more.key, more.parent, more.depth, 1, summary.WholeExtent(more.depth)}
	if c := check("one key more is wanted", append(slices.Clone(want), lacking), n, 1, 0, 0); len(c.MissingKeys) != 1 || c.MissingKeys[0] != lacking {
		t.Errorf("named missing: %+v", c.MissingKeys)
	}

	twice := slices.Clone(want)
	twice[2].Times = 2
	check("a key is wanted twice", twice, n-1, 1, 0, 0)
	addOne(sink, line(3*prefix.ChunkTokens))
	check("it is listed twice", twice, n, 0, 0, 0)
	check("but wanted once", want, n-1, 0, 1, 0)
	removeOne(sink, line(3*prefix.ChunkTokens))

	less := slices.Clone(want)
	less[0].Extent.GPUTokens = 0
	if c := check("a key of another extent is wanted", less, n-1, 0, 0, 1); len(c.ExtentKeys) != 1 || c.ExtentKeys[0] != less[0] {
		t.Errorf("named of another extent: %+v", c.ExtentKeys)
	}
	sink.SetExtent(less[0].Key, less[0].Checkpoint, less[0].DepthTokens, less[0].Extent)
	check("it has it", less, n, 0, 0, 0)

	// A slot given back is not swept yet, and says nothing.
	sink.Reset()
	check("all was taken back", want, 0, n, 0, 0)
	if c := check("of a worker that is not known", nil, 0, 0, 0, 0); len(c.MissingKeys) > 0 {
		t.Errorf("%+v", c)
	}
	c := d.x.Compare(id, want)
	if len(c.MissingKeys) != maxNamed {
		t.Errorf("%d keys are named, want %d", len(c.MissingKeys), maxNamed)
	}
	d.m.auditListings(fatal{t}, d.x)
}
