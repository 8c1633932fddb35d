package prefixindex

import (
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// beside runs a search over and over while something is changed n times.
func beside(t *testing.T, x *Index, prompt text, n int, change func(i int), check func(groups []Group)) {
	t.Helper()
	if raceEnabled || testing.Short() {
		n /= 10
	}
	var stop atomic.Bool
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			var p prefix.Probe
			prompt.probe(&p, 16)
			s := x.NewSearcher()
			s.Exact = true
			for !stop.Load() && !t.Failed() {
				check(s.Search(&p))
			}
		})
	}
	for i := range n {
		if t.Failed() {
			break
		}
		change(i)
	}
	stop.Store(true)
	readers.Wait()
}

// TestClearsDoNotBlink: while a worker's cache is cleared and filled again and
// again, it is found once and with what its claim predicts.
func TestClearsDoNotBlink(t *testing.T) {
	x, long := New(Options{}), line(2000)
	x.claim(1, 1, line(1024))
	s := x.WorkerSink(1)
	beside(t, x, long, 20_000, func(int) {
		s.Reset()
		add(s, long)
	}, func(groups []Group) {
		if len(groups) != 1 || groups[0].Workers.Len() != 1 || groups[0].Tokens < 1024 {
			t.Errorf("found %+v", groups)
		}
	})
}

// TestClearsAreSeenWithWhatFollows: a frame that clears the cache and lists what is
// stored since is seen as one change, however long it is.
func TestClearsAreSeenWithWhatFollows(t *testing.T) {
	x, long := New(Options{}), line(2000)
	s := x.WorkerSink(1)
	add(s, long)
	beside(t, x, long, 1000, func(i int) {
		s.Begin()
		add(s, line(512*uint32(i%4)+16))
		s.Reset()
		s.Reset()
		for other := range uint64(2 * batchOps) { // comes in between
			k := summary.IndexKey(1<<40 + other)
			s.AddCheckpoint(k, k+1, 1024)
		}
		add(s, long)
		s.End()
	}, func(groups []Group) {
		if len(groups) != 1 || groups[0].Workers.Len() != 1 || groups[0].Tokens != long.depth {
			t.Errorf("found %+v", groups)
		}
	})
	if st, want := x.Stats(), 2*batchOps+len(long.known()); st.Listings != want {
		t.Errorf("%d listings, want %d", st.Listings, want)
	}
}

// TestExtentsComeAndGoWithTheirKey: nobody sees the key without its extent.
func TestExtentsComeAndGoWithTheirKey(t *testing.T) {
	x, k := New(Options{}), line(512)
	s, n := x.WorkerSink(1), k.name()
	beside(t, x, k, 100_000, func(int) {
		s.Begin()
		addOne(s, k)
		s.SetExtent(n.key, n.parent, n.depth, summary.Extent{UsableTokens: 96})
		s.End()
		removeOne(s, k)
	}, func(groups []Group) {
		if len(groups) > 0 && groups[0].Tokens != 96 {
			t.Errorf("found %+v", groups)
		}
	})
}

// TestTrimsDoNotBlink: while a run is cut and grown again, in the chunk of its end
// or over several, the shorter of its ends is found at least.
func TestTrimsDoNotBlink(t *testing.T) {
	for _, ends := range [][2]uint32{{704, 800}, {320, 480}, {1200, 2800}, {1024, 1600}} {
		x := New(Options{})
		s, short, long := x.WorkerSink(1), line(ends[0]), line(ends[1])
		add(s, long)
		isPoint := short.depth%prefix.ChunkTokens != 0
		tail := long.known()[len(short.known())-1:]
		if !isPoint {
			tail = tail[1:]
		}
		beside(t, x, long, 50_000, func(i int) {
			s.Begin()
			if i%2 == 0 { // as a TRIM is told
				for _, k := range slices.Backward(tail) {
					removeOne(s, k)
				}
				if isPoint {
					addOne(s, short)
				}
			} else { // the oldest known point makes room
				if isPoint {
					removeOne(s, short)
				}
				for _, k := range tail {
					addOne(s, k)
				}
			}
			s.End()
		}, func(groups []Group) {
			if len(groups) != 1 || groups[0].Tokens < short.depth {
				t.Errorf("ends at %v: found %+v", ends, groups)
			}
		})
	}
}

// TestDisturbedSearchesEnd: a writer faster than any search, at the very prefix
// looked for, makes no search answer what it knows to be doubtful.
func TestDisturbedSearchesEnd(t *testing.T) {
	x, k := New(Options{}), line(512)
	for i := range uint32(31) { // a search takes longer than a change
		add(x.WorkerSink(WorkerID(i)), line(k.depth+16*i))
	}
	var p prefix.Probe
	line(1008).probe(&p, 16)
	s, seg := x.NewSearcher(), &x.held.dir[x.checkpointSpot(k.name().key).segment]
	s.Exact = true
	var stop atomic.Bool
	var writer sync.WaitGroup
	writer.Go(func() {
		for !stop.Load() {
			x.writer.Lock()
			seg.begin()
			seg.end()
			x.writer.Unlock()
		}
	})
	for range 3000 {
		if s.Search(&p); s.again {
			t.Error("a search gave up")
			break
		}
	}
	stop.Store(true)
	writer.Wait()
}

// TestListingsDoNotBlink: while what a claim predicts becomes the start of what
// the stream lists, usable less far there but farther in all, and back, nobody
// finds less than the claim predicts.
func TestListingsDoNotBlink(t *testing.T) {
	for _, ends := range [][2]uint32{{512, 800}, {1008, 1600}, {1008, 3000}} {
		x := New(Options{})
		s, claimed, long := x.WorkerSink(1), line(ends[0]), line(ends[1])
		x.claim(1, 1, claimed)
		beside(t, x, long, 50_000, func(i int) {
			s.Begin()
			if i%2 == 0 {
				for _, k := range long.known() {
					addOne(s, k)
					n := k.name()
					s.SetExtent(n.key, n.parent, n.depth, summary.Extent{UsableTokens: k.depth / 96 * 96})
				}
			} else {
				for _, k := range slices.Backward(long.known()) {
					removeOne(s, k)
				}
			}
			s.End()
		}, func(groups []Group) {
			if len(groups) != 1 || groups[0].Tokens < claimed.depth {
				t.Errorf("claim of %d, stream of %d: found %+v", ends[0], ends[1], groups)
			}
		})
	}
}

// TestPredictionsAreNeverListed: nobody sees a claim as something a stream says.
func TestPredictionsAreNeverListed(t *testing.T) {
	x, k := New(Options{}), line(512)
	beside(t, x, k, 100_000, func(i int) {
		x.claim(1, uint64(i), k)
		x.RemovePredicted(1, uint64(i))
	}, func(groups []Group) {
		if len(groups) > 0 && !groups[0].Predicted {
			t.Errorf("found %+v", groups)
		}
	})
}

// TestNeighboursDoNotDisturb: points of one checkpoint share a segment of the
// table, where they move when others come and go.
func TestNeighboursDoNotDisturb(t *testing.T) {
	x := New(Options{Seed: 1})
	stay, s := x.WorkerSink(0), x.WorkerSink(1)
	long := line(1008)
	for d := uint32(512); d <= long.depth; d += step {
		addOne(stay, line(d))
	}
	parent := line(512).name()
	addOne(s, line(512))
	rng := rand.New(rand.NewPCG(3, 3))
	other := make([]name, 300)
	for i := range other {
		depth := 512 + 1 + rng.Uint32N(511)
		other[i] = name{summary.IndexKey(rng.Uint64()), parent.key, depth}
	}
	held := make([]bool, len(other))
	beside(t, x, long, 300_000, func(int) {
		i := rng.IntN(len(other))
		if n := other[i]; held[i] {
			s.RemovePoint(n.key, n.parent, n.depth, false)
		} else {
			s.AddPoint(n.key, n.parent, n.depth, false)
		}
		held[i] = !held[i]
	}, func(groups []Group) {
		if len(groups) == 0 || groups[0].Tokens != long.depth || !groups[0].Workers.Has(0) {
			t.Errorf("found %+v", groups)
		}
	})
}

// TestSweepKeepsOthersPoints: what a dropped worker listed is taken back at the
// right checkpoints, many of which look alike.
func TestSweepKeepsOthersPoints(t *testing.T) {
	x := New(Options{Seed: 6})
	rng := rand.New(rand.NewPCG(6, 6))
	gone, stays := x.WorkerSink(1), x.WorkerSink(2)
	var kept, shared []name
	for i := range 60_000 {
		n := name{summary.IndexKey(rng.Uint64()), 1, 1024}
		s := gone
		if i%2 == 0 {
			s, kept = stays, append(kept, n)
		}
		s.AddCheckpoint(n.key, n.parent, n.depth)
		s.AddPoint(summary.IndexKey(rng.Uint64()), n.key, 1024+16, false)
		if i%20 == 0 { // a checkpoint of both, with a point of the other's own
			shared = append(shared, n)
			gone.AddCheckpoint(n.key, n.parent, n.depth)
			gone.AddPoint(summary.IndexKey(rng.Uint64()), n.key, 1024+32, false)
		}
	}
	x.Drop(1)
	x.sweepAll()
	lists := func(n name, offset uint32) bool {
		at, e := x.held.at(x.spot(&n))
		return at.i >= 0 && x.points.lists(e.info, offset)
	}
	for _, n := range kept {
		if !lists(n, 16) {
			t.Fatal("a point of a worker that stays is lost")
		}
	}
	stale := 0
	for _, n := range shared {
		if lists(n, 32) {
			stale++
		}
	}
	if stale > len(shared)/10 {
		t.Errorf("%d of %d points of the dropped worker are still tried", stale, len(shared))
	}
	if st := x.Stats(); st.Keys != 2*len(kept) || st.Listings != st.Keys {
		t.Errorf("%+v, want %d keys", st, 2*len(kept))
	}
}

// TestSlotsOfOthersAreNoticed: a search under way when a slot gets another
// worker is repeated.
func TestSlotsOfOthersAreNoticed(t *testing.T) {
	x := New(Options{})
	s := x.WorkerSink(1)
	s.Reset() // now in another worker's slot
	slot := x.workers[1].slot
	if slot == 1 {
		t.Fatal("the slot is its own again before the sweep")
	}
	before := x.slots.version.Load()
	x.Drop(1)
	x.sweepAll()
	x.WorkerSink(WorkerID(slot))
	if x.slots.owner(slot) != WorkerID(slot) || x.slots.version.Load() == before || x.slots.version.Load()%2 != 0 {
		t.Errorf("owner %d, version %d, before %d", x.slots.owner(slot), x.slots.version.Load(), before)
	}
}
