package prefixindex

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// truth is what each worker holds of each of some prompts at some moment.
type truth [][]held

type held struct {
	tokens uint32 // listed or predicted
	listed uint32 // of them by a stream
	whole  bool   // no extents: known points and checkpoints tell all
}

func (m *model) truth(prompts []text, ids []WorkerID) truth {
	out := make(truth, len(prompts))
	for i, p := range prompts {
		out[i] = make([]held, len(ids))
		for j, id := range ids {
			w := m.workers[id]
			if w == nil {
				continue
			}
			r, _ := w.match(p)
			h := held{tokens: r.Tokens, listed: r.Tokens, whole: !w.hasExtents()}
			if r.Predicted {
				without := *w
				without.claims = nil
				r, _ = without.match(p)
				h.listed = r.Tokens
			}
			out[i][j] = h
		}
	}
	return out
}

// history is the truth after each change.
type history struct {
	started atomic.Int64 // number of the change that is being made
	mu      sync.Mutex
	done    *sync.Cond
	truths  []truth
}

func (h *history) push(t truth) {
	h.mu.Lock()
	h.truths = append(h.truths, t)
	h.mu.Unlock()
	h.done.Broadcast()
}

// last is the number of the last finished change.
func (h *history) last() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.truths) - 1
}

// window returns the truths from one change to another, once both are made.
func (h *history) window(from, to int) []truth {
	h.mu.Lock()
	defer h.mu.Unlock()
	for len(h.truths) <= to {
		h.done.Wait()
	}
	return h.truths[from : to+1]
}

// TestSearchesBesideChanges makes random changes while others search. Whatever
// a search says of a worker was true, or between what was true before and after
// a change that was made meanwhile; what it says of a stream, of the stream.
func TestSearchesBesideChanges(t *testing.T) {
	changes := 40000
	if raceEnabled || testing.Short() {
		changes = 700
	}
	rng := rand.New(rand.NewPCG(5, 6))
	d := newDriver(fatal{t}, rng.IntN, 3)
	d.windows = true
	d.edges = forest(rng.IntN, 12)
	var prompts []text
	for range 8 {
		prompts = append(prompts, anyText(rng.IntN, d.edges))
	}
	h := &history{}
	h.done = sync.NewCond(&h.mu)
	h.push(d.m.truth(prompts, d.ids))

	var readers sync.WaitGroup
	var stop atomic.Bool
	var searches, beside atomic.Int64
	for r := range 3 {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(r), 9))
			s := d.x.NewSearcher()
			s.Exact = r > 0
			var p prefix.Probe
			for !stop.Load() && !t.Failed() {
				i := rng.IntN(len(prompts))
				prompts[i].probe(&p, 700)
				from := h.last()
				got := ask(fatal{t}, s, &p)
				to := int(h.started.Load())
				searches.Add(1)
				if to > from {
					beside.Add(1)
				}
				if err := within(h.window(from, to), i, d.ids, got, s.Exact); err != nil {
					t.Errorf("prompt %d, changes %d to %d: %v", i, from, to, err)
				}
			}
		})
	}
	for i := 1; i <= changes && !t.Failed(); i++ {
		h.started.Store(int64(i))
		d.step()
		h.push(d.m.truth(prompts, d.ids))
	}
	stop.Store(true)
	readers.Wait()
	d.m.audit(fatal{t}, d.x)
	if searches.Load() < 100 || beside.Load() == 0 {
		t.Errorf("%d searches, %d of them beside a change: too few to tell", searches.Load(), beside.Load())
	}
}

// TestSearchesAloneAreNeverDoubtful: what a search finds while it keeps the writer
// out belongs together, whatever the writer was about, between two batches of a
// frame as well. A search that was disturbed too often gives that answer unasked.
func TestSearchesAloneAreNeverDoubtful(t *testing.T) {
	changes := 1500
	if raceEnabled || testing.Short() {
		changes = 300
	}
	rng := rand.New(rand.NewPCG(7, 8))
	d := newDriver(fatal{t}, rng.IntN, 4)
	d.edges = forest(rng.IntN, 12)
	var all []text // of a worker that holds all of it, or nothing
	for _, e := range d.edges {
		for depth := e.start + step; depth <= e.end; depth += step {
			all = append(all, text{e, depth})
		}
	}
	if len(all) < 2*batchOps {
		t.Fatalf("%d prefixes are not several batches", len(all))
	}
	var stop atomic.Bool
	var alone atomic.Int64
	try := func(s *Searcher, p *prefix.Probe, intn func(int) int) {
		anyText(intn, d.edges).probe(p, 700)
		d.x.quiet(true)
		defer d.x.writer.Unlock()
		if !s.try(p) {
			t.Error("a search that keeps the writer out is in doubt")
			stop.Store(true)
		}
		alone.Add(1)
	}
	var readers sync.WaitGroup
	for r := range 2 { // between batches
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(r), 10))
			s := d.x.NewSearcher()
			var p prefix.Probe
			for !stop.Load() {
				try(s, &p, rng.IntN)
			}
		})
	}
	own, p := d.x.NewSearcher(), &prefix.Probe{} // after each change
	whole := d.x.WorkerSink(900)
	for i := range changes {
		if stop.Load() {
			break
		}
		d.step()
		for range 3 {
			try(own, p, rng.IntN)
		}
		if i%20 > 0 {
			continue
		}
		whole.Begin()
		for n, k := range all {
			if i%40 > 0 {
				removeOne(whole, all[len(all)-1-n])
				continue
			}
			addOne(whole, k)
			name := k.name()
			whole.SetExtent(name.key, name.parent, name.depth, summary.Extent{UsableTokens: k.depth / 2})
		}
		whole.End()
	}
	stop.Store(true)
	readers.Wait()
	if alone.Load() < 100 {
		t.Errorf("%d searches: too few to tell", alone.Load())
	}
}

// within checks a search's answers against the truths of its time.
func within(window []truth, prompt int, ids []WorkerID, got map[WorkerID]Reuse, exact bool) error {
	for j, id := range ids {
		least, most, listed, whole := ^uint32(0), uint32(0), uint32(0), true
		for _, t := range window {
			h := t[prompt][j]
			least, most, listed = min(least, h.tokens), max(most, h.tokens), max(listed, h.listed)
			whole = whole && h.whole
		}
		if !exact { // a shallower match of a worker with extents may say anything less
			least = least / prefix.ChunkTokens * prefix.ChunkTokens
			if !whole {
				continue
			}
		}
		r := got[id]
		if r.Tokens < least || r.Tokens > most {
			return fmt.Errorf("worker %d: %d tokens, not within %d to %d", id, r.Tokens, least, most)
		}
		if !r.Predicted && r.Tokens > listed {
			return fmt.Errorf("worker %d: %d tokens said to be listed, %d were", id, r.Tokens, listed)
		}
	}
	return nil
}

// fatal makes an error of what must not end a goroutine.
type fatal struct{ t *testing.T }

func (f fatal) Fatalf(format string, args ...any) { f.t.Errorf(format, args...) }
