package prefixindex

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	"waypost/gossip/summary/summarytest"
)

var (
	testKey = prefix.ClusterKey{9, 8, 7}
	domains = []prefix.Domain{{Model: "m"}, {Model: "m", Salt: "s"}}
	start   = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
)

// agent is a worker's blocks with their stream to the index.
type agent struct {
	f *summarytest.Forest
	e *summary.Encoder
	d *summary.Decoder
}

func newAgent(t interface{ Fatalf(string, ...any) }, x *Index, w WorkerID, f *summarytest.Forest) *agent {
	a := &agent{f: f}
	a.e = summary.NewEncoder(summary.Options{Key: testKey, Blocks: f, Epoch: 1})
	f.Listener = a.e
	a.d = summary.NewDecoder(x.WorkerSink(w))
	a.apply(t, a.e.Snapshot())
	return a
}

func (a *agent) apply(t interface{ Fatalf(string, ...any) }, frames [][]byte) {
	for _, b := range frames {
		if got, err := a.d.Apply(b); err != nil || got != summary.Applied {
			t.Fatalf("%v, %v", got, err)
		}
	}
}

func (a *agent) sync(t interface{ Fatalf(string, ...any) }, now time.Time) {
	for b := a.e.Delta(now); b != nil; b = a.e.Delta(now) {
		a.apply(t, [][]byte{b})
	}
}

// ask returns the matches by worker and fails if a worker comes twice or the
// order is not deepest first.
func ask(t interface{ Fatalf(string, ...any) }, x *Index, p *prefix.Probe) map[WorkerID]Match {
	matches := x.Match(p, nil)
	out := map[WorkerID]Match{}
	for i, m := range matches {
		if _, dup := out[m.Worker]; dup || m.Tokens == 0 {
			t.Fatalf("match %d of %v: worker twice, or nothing matched", i, matches)
		}
		if i > 0 && m.Tokens > matches[i-1].Tokens {
			t.Fatalf("%v is not deepest first", matches)
		}
		out[m.Worker] = m
	}
	return out
}

// TestNeverMoreThanTheBlocks compares answers with what the engines' blocks
// would serve, found by comparing tokens: never more, not less at known ends,
// and never a whole chunk less where blocks and checkpoints meet.
func TestNeverMoreThanTheBlocks(t *testing.T) {
	var p prefix.Probe
	rapid.Check(t, func(t *rapid.T) {
		x := New(Options{Seed: rapid.Uint64().Draw(t, "seed")})
		intn := func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "n") }
		size := rapid.SampledFrom([]int{16, 48, 64, 272, 528}).Draw(t, "block tokens")
		hybrid := rapid.Bool().Draw(t, "hybrid")
		agents := make([]*agent, rapid.IntRange(1, 5).Draw(t, "workers"))
		ids := []WorkerID{0, 3, 63, 64, 130}
		for i := range agents {
			f := summarytest.NewForest(size, domains...)
			f.Hybrid = hybrid
			agents[i] = newAgent(t, x, ids[i], f)
		}
		now := start
		for range rapid.IntRange(1, 25).Draw(t, "steps") {
			for range 1 + intn(4) {
				a := agents[intn(len(agents))]
				a.f.Step(intn)
			}
			for range 2 {
				now = now.Add(6 * time.Second)
				for _, a := range agents {
					a.sync(t, now)
				}
			}
			of := agents[intn(len(agents))].f
			if of.Len() == 0 {
				continue
			}
			id := of.IDs()[intn(of.Len())]
			prompt, exact := drawPrompt(intn, of, id)
			d := of.Domain(id)
			p.ResetTokens(prompt, prefix.NewKeyer(testKey, d))
			got := ask(t, x, &p)
			for i, a := range agents {
				truth, answer := a.f.Reuse(prompt, d), int(got[ids[i]].Tokens)
				if answer > truth {
					t.Fatalf("worker %d: %d tokens of %d, its blocks have %d", ids[i], answer, len(prompt), truth)
				}
				if a.f == of && exact && answer != truth {
					t.Fatalf("worker %d: %d tokens at a known end, its blocks have %d", ids[i], answer, truth)
				}
				if !hybrid && prefix.ChunkTokens%size == 0 && answer < truth/prefix.ChunkTokens*prefix.ChunkTokens {
					t.Fatalf("worker %d: %d tokens, its blocks have %d", ids[i], answer, truth)
				}
			}
		}
	})
}

// drawPrompt makes a prompt that shares tokens with a block's path. exact says
// that it leaves the worker's prefixes at the last block of one.
func drawPrompt(intn func(int) int, f *summarytest.Forest, id uint32) (prompt []uint32, exact bool) {
	prompt = slices.Clone(f.Path(id))
	switch intn(3) {
	case 0:
		prompt = prompt[:1+intn(len(prompt))]
	case 1:
		prompt[intn(len(prompt))]++
	default:
		exact = len(f.Children(id)) == 0
	}
	for range intn(700) {
		prompt = append(prompt, 1<<30)
	}
	return prompt, exact
}

func keysOf(tokens []uint32, depths ...uint32) []prefix.Key {
	var p prefix.Probe
	p.ResetTokens(tokens, prefix.NewKeyer(testKey, domains[0]))
	keys := make([]prefix.Key, len(depths))
	for i, d := range depths {
		keys[i], _ = p.At(int(d))
	}
	return keys
}

func randomTokens(seed uint64, n int) []uint32 {
	rng := rand.New(rand.NewPCG(seed, 0))
	out := make([]uint32, n)
	for i := range out {
		out[i] = rng.Uint32N(150_000)
	}
	return out
}

func probeOf(tokens []uint32) *prefix.Probe {
	var p prefix.Probe
	p.ResetTokens(tokens, prefix.NewKeyer(testKey, domains[0]))
	return &p
}

func TestPredictionsLiveAsLongAsTheirClaim(t *testing.T) {
	tokens := randomTokens(1, 1500)
	depths := []uint32{512, 1024, 1408}
	keys := keysOf(tokens, depths...)
	x := New(Options{})
	expect := func(when string, want ...Match) {
		t.Helper()
		if diff := cmp.Diff(want, x.Match(probeOf(tokens), nil)); diff != "" {
			t.Errorf("%s: %s", when, diff)
		}
	}
	x.AddPredicted(4, 100, keys, depths)
	expect("one claim", Match{4, 1408, true})
	x.AddPredicted(4, 101, keys[:2], depths[:2])
	x.RemovePredicted(4, 100)
	expect("the shorter of two claims is left", Match{4, 1024, true})
	x.AddPredicted(4, 101, keys[:1], depths[:1])
	expect("the claim was replaced", Match{4, 512, true})
	s := x.WorkerSink(4)
	s.Add(keys[0], 512)
	expect("confirmed", Match{4, 512, false})
	x.RemovePredicted(4, 101)
	expect("claim ended after confirmation", Match{4, 512, false})
	x.RemovePredicted(4, 101)
	x.RemovePredicted(9, 1)
	expect("ended twice", Match{4, 512, false})
	s.Remove(keys[0])
	expect("gone")
	if x.Keys() != 0 || len(x.counts) != 0 {
		t.Errorf("%d keys and %d points left", x.Keys(), len(x.counts))
	}
}

func TestUnverifiedStreamsArePredictions(t *testing.T) {
	tokens := randomTokens(2, 600)
	key := keysOf(tokens, 512)[0]
	x := New(Options{})
	old, fresh := x.WorkerSink(1, false), x.WorkerSink(1, true)
	old.Add(key, 512)
	if got := x.Match(probeOf(tokens), nil); !slices.Equal(got, []Match{{1, 512, true}}) {
		t.Errorf("unverified only: %v", got)
	}
	fresh.Add(key, 512)
	old.Reset()
	if got := x.Match(probeOf(tokens), nil); !slices.Equal(got, []Match{{1, 512, false}}) {
		t.Errorf("after the swap: %v", got)
	}
}

// TestCountsCollisions: a key listed twice is listed until the second removal.
func TestCountsCollisions(t *testing.T) {
	tokens := randomTokens(3, 700)
	key := keysOf(tokens, 512)[0]
	x := New(Options{})
	s := x.WorkerSink(0)
	s.Remove(key) // of nothing: ignored
	s.Add(key, 512)
	s.Add(key, 512)
	s.Remove(key)
	if !x.Holds(0, key) || len(x.Match(probeOf(tokens), nil)) != 1 {
		t.Error("one removal took both away")
	}
	s.Remove(key)
	if x.Holds(0, key) || x.WorkerKeys(0) != 0 {
		t.Error("still there after both were removed")
	}
}

// TestResidentsLeadToEnds: a worker whose deep checkpoints cannot end a match
// is found at the end before them.
func TestResidentsLeadToEnds(t *testing.T) {
	tokens := randomTokens(4, 3000)
	depths := []uint32{512, 1024, 1536, 2048, 2560}
	keys := keysOf(tokens, depths...)
	x := New(Options{})
	s := x.WorkerSink(2).(summary.ResidentSink)
	for i, k := range keys {
		s.AddResident(k, depths[i])
	}
	if got := x.Match(probeOf(tokens), nil); len(got) != 0 {
		t.Errorf("no end anywhere: %v", got)
	}
	end := keysOf(tokens, 1100)[0]
	s.Add(end, 1100)
	x.WorkerSink(5).Add(keys[0], 512)
	if got, want := x.Match(probeOf(tokens), nil), []Match{{2, 1100, false}, {5, 512, false}}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	s.SetEnd(keys[3], true)
	if got := x.Match(probeOf(tokens), nil)[0]; got != (Match{2, 2048, false}) {
		t.Errorf("after an end deeper: %v", got)
	}
	s.SetEnd(keys[3], false)
	x.AddPredicted(2, 1, keys[4:], depths[4:])
	if got := x.Match(probeOf(tokens), nil)[0]; got != (Match{2, 2560, false}) {
		t.Errorf("a prediction makes an end: %v", got)
	}
}

func TestDrop(t *testing.T) {
	tokens := randomTokens(5, 1100)
	depths := []uint32{512, 1024, 1090}
	keys := keysOf(tokens, depths...)
	x := New(Options{})
	s := x.WorkerSink(7)
	for i, k := range keys {
		s.Add(k, depths[i])
	}
	x.WorkerSink(8).Add(keys[0], 512)
	x.AddPredicted(7, 1, keys, depths)
	x.Drop(7)
	x.Drop(99)
	want := []Match{{8, 512, false}}
	if got := x.Match(probeOf(tokens), nil); !slices.Equal(got, want) {
		t.Errorf("after the drop: %v", got)
	}
	next := x.WorkerSink(7) // the id's next owner
	next.Add(keys[0], 512)
	s.Add(keys[1], 1024)
	s.Remove(keys[0])
	s.Reset()
	x.RemovePredicted(7, 1)
	want = []Match{{7, 512, false}, {8, 512, false}}
	if got := x.Match(probeOf(tokens), nil); !slices.Equal(got, want) {
		t.Errorf("the old sink wrote into the new worker: %v", got)
	}
	if len(x.counts) != 0 {
		t.Errorf("%d points left", len(x.counts))
	}
}

func TestDepthsThatCannotBe(t *testing.T) {
	x := New(Options{})
	s := x.WorkerSink(0)
	s.Add(5, 0)
	s.Add(6, summary.MaxDepthTokens+1)
	s.Add(0, 512)
	if x.Keys() != 0 {
		t.Errorf("%d keys listed", x.Keys())
	}
}

func TestPromptOfKeys(t *testing.T) {
	tokens := randomTokens(6, 1200)
	keys := keysOf(tokens, 512, 1024, 1168)
	x := New(Options{})
	s := x.WorkerSink(3)
	s.Add(keys[0], 512)
	s.Add(keys[1], 1024)
	s.Add(keys[2], 1168)
	var p prefix.Probe
	p.ResetKeys(1200, keys[:2], map[uint32]prefix.Key{1168: keys[2]})
	if got := x.Match(&p, nil); !slices.Equal(got, []Match{{3, 1168, false}}) {
		t.Errorf("got %v", got)
	}
	p.ResetKeys(1200, keys[:2], nil)
	if got := x.Match(&p, nil); !slices.Equal(got, []Match{{3, 1024, false}}) {
		t.Errorf("without points: %v", got)
	}
}

// TestSearchesBesideChanges lets writers churn while readers search: a prefix
// that stays listed is always found, whatever else changes around it.
func TestSearchesBesideChanges(t *testing.T) {
	x := New(Options{Seed: 1})
	tokens := randomTokens(7, 3000)
	depths := []uint32{512, 1024, 1536, 2048, 2064}
	keys := keysOf(tokens, depths...)
	stay := x.WorkerSink(0)
	for i, k := range keys {
		stay.Add(k, depths[i])
	}
	var writers, readers sync.WaitGroup
	done := make(chan struct{})
	for g := range WorkerID(3) {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for i := range 400 {
				w := 1 + g + WorkerID(rng.IntN(40))*3
				s := x.WorkerSink(w)
				other := randomTokens(rng.Uint64(), 1100)
				for j, k := range keysOf(other, 512, 1024, 1040) {
					s.Add(k, []uint32{512, 1024, 1040}[j])
				}
				for j, k := range keys {
					s.Add(k, depths[j])
				}
				x.AddPredicted(0, uint64(g)<<32|uint64(i), keys[3:], depths[3:])
				switch rng.IntN(3) {
				case 0:
					x.Drop(w)
				case 1:
					s.Reset()
				default:
					for _, k := range slices.Backward(keys) {
						s.Remove(k)
					}
				}
				x.RemovePredicted(0, uint64(g)<<32|uint64(i))
			}
		})
	}
	for range 2 {
		readers.Go(func() {
			p := probeOf(tokens)
			for {
				select {
				case <-done:
					return
				default:
				}
				if got := ask(t, x, p)[0]; got != (Match{0, 2064, false}) {
					t.Errorf("worker 0 held 2064 tokens all the time, found %v", got)
					return
				}
			}
		})
	}
	writers.Wait()
	close(done)
	readers.Wait()
}
