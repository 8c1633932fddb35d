package prefixindex_test

import (
	"fmt"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"waypost/agent/blocktable"
	"waypost/coordinator/prefixindex"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

var streamKey = prefix.ClusterKey{5, 6, 7}

// fleet is some workers, whole: a block table fed with events, its stream, and
// the index at the end of it.
type fleet struct {
	author    *author
	index     *prefixindex.Index
	tables    []*blocktable.Table
	encoders  []*summary.Encoder
	decoders  []*summary.Decoder
	now       time.Time
	swallow   bool // the next operation that evicts is not told
	swallowed int
}

// listener hides evictions from an encoder when the test asks for it.
type listener struct {
	*summary.Encoder
	f *fleet
}

func (l listener) Detached(id uint32) {
	if l.f.swallow {
		l.f.swallowed++
		return
	}
	l.Encoder.Detached(id)
}

func newFleet(seed uint64, workers int) *fleet {
	f := &fleet{author: newAuthor(seed, workers), index: prefixindex.New(prefixindex.Options{Seed: seed}), now: time.Unix(1e9, 0)}
	for w := range workers {
		t := blocktable.New(blocktable.Options{Model: "m"})
		e := summary.NewEncoder(summary.Options{Key: streamKey, Blocks: t, Epoch: uint32(w + 1)})
		t.Listen(listener{e, f})
		f.tables, f.encoders = append(f.tables, t), append(f.encoders, e)
		f.decoders = append(f.decoders, summary.NewDecoder(f.index.WorkerSink(prefixindex.WorkerID(w))))
	}
	return f
}

// play tells a worker's table of an operation as its engine would.
func (f *fleet) play(op operation) {
	for _, t := range op.stores {
		n, e := t.len(), &blocktable.Event{Op: blocktable.OpStore, Spec: blocktable.SpecFull, BlockTokens: oracleBlock, Hashes: []uint64{t.hash()}}
		if n > oracleBlock {
			e.Parent, e.HasParent = t.first(n-oracleBlock).hash(), true
		}
		for i := n - oracleBlock; i < n; i++ {
			e.Tokens = append(e.Tokens, t.token(i))
		}
		f.tables[op.worker].Apply(e)
	}
	for _, t := range op.drops {
		f.tables[op.worker].Apply(&blocktable.Event{Op: blocktable.OpRemove, Hashes: []uint64{t.hash()}})
	}
	f.swallow = f.swallow && f.swallowed == 0
}

// report brings the index up to a worker's table, but for what is held back.
func (f *fleet) report(w int) error {
	d, e := f.decoders[w], f.encoders[w]
	if _, _, have := d.Have(); !have {
		for _, b := range e.Snapshot() {
			if got, err := d.Apply(b); err != nil || got != summary.Applied {
				return fmt.Errorf("snapshot: %v, %w", got, err)
			}
		}
	}
	for b := e.Delta(f.now); b != nil; b = e.Delta(f.now) {
		if got, err := d.Apply(b); err != nil || got != summary.Applied {
			return fmt.Errorf("delta: %v, %w", got, err)
		}
	}
	return nil
}

func tokensOf(t plainText) []uint32 {
	out := make([]uint32, t.len())
	for i := range out {
		out[i] = t.token(i)
	}
	return out
}

// ask is what the index says of a prompt, by worker.
func (f *fleet) ask(s *prefixindex.Searcher, prompt plainText) []int {
	var p prefix.Probe
	p.ResetTokens(tokensOf(prompt), prefix.NewKeyer(streamKey, prefix.Domain{Model: "m"}))
	out := make([]int, len(f.tables))
	for _, m := range prefixindex.AppendMatches(nil, s.Search(&p)) {
		out[m.Worker] = int(m.Tokens)
	}
	return out
}

// compare asks for a prompt. settled says that nothing is held back.
func (f *fleet) compare(s *prefixindex.Searcher, prompt plainText, settled bool) error {
	for w, got := range f.ask(s, prompt) {
		h := f.author.holds[w]
		want := h.reusable(prompt)
		if got > want {
			return fmt.Errorf("worker %d: the index says %d of %d tokens, it holds %d", w, got, prompt.len(), want)
		}
		isKnown := want%prefix.ChunkTokens == 0 || h.forks(prompt.first(want)) != 1
		switch least := want / prefix.ChunkTokens * prefix.ChunkTokens; {
		case settled && isKnown && got != want:
			return fmt.Errorf("worker %d: the index says %d of %d tokens, it holds %d, which has a name", w, got, prompt.len(), want)
		case settled && got < least:
			return fmt.Errorf("worker %d: the index says %d of %d tokens, less than the checkpoint before the %d it holds", w, got, prompt.len(), want)
		}
	}
	return nil
}

// run plays steps and compares after each.
func (f *fleet) run(steps int) (compared int, err error) {
	s := f.index.NewSearcher()
	s.Exact = true
	for i := range steps {
		op := f.author.step()
		f.play(op)
		f.now = f.now.Add(time.Second)
		if err := f.report(op.worker); err != nil {
			return compared, fmt.Errorf("step %d: %w", i, err)
		}
		settled := i%8 == 7
		if settled { // what was held back is told once it has rested
			f.now = f.now.Add(10 * time.Second)
			for w := range f.tables {
				if err := f.report(w); err != nil {
					return compared, fmt.Errorf("step %d: %w", i, err)
				}
			}
		}
		questions := []plainText{f.author.question(), f.author.question()}
		if len(op.drops) > 0 {
			questions = append(questions, op.drops[0])
		}
		for _, q := range questions {
			if err := f.compare(s, q, settled); err != nil {
				return compared, fmt.Errorf("step %d: %w", i, err)
			}
			compared++
		}
	}
	return compared, nil
}

// Whatever operations make a worker hold, the index at the end of its stream
// never says more, and no less where a prefix ends, forks or has a checkpoint. A
// false positive has a probability of 2^-16 a question here, and with these seeds
// there is none.
func TestIndexOfStreams(t *testing.T) {
	seeds, steps := uint64(6), 250
	if testing.Short() || prefixindex.RaceEnabled {
		seeds, steps = 2, 120
	}
	compared := 0
	for seed := range seeds {
		n, err := newFleet(seed, 3).run(steps)
		if err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		compared += n
	}
	if compared < int(seeds)*steps {
		t.Errorf("%d questions compared: too few to tell", compared)
	}
}

// One eviction that a stream does not tell must be noticed.
func TestIndexOfStreamsNoticesASkippedTrim(t *testing.T) {
	const seeds = 10
	noticed := 0
	for seed := range uint64(seeds) {
		f := newFleet(seed, 3)
		if _, err := f.run(60); err != nil {
			t.Fatal(err)
		}
		f.swallow = true
		if _, err := f.run(200); err != nil {
			noticed++
		}
		if f.swallowed == 0 {
			t.Fatalf("seed %d: nothing was evicted", seed)
		}
	}
	if noticed < seeds {
		t.Errorf("noticed %d of %d times", noticed, seeds)
	}
}

// Searches beside the writer say what was true at some moment since they began.
func TestIndexOfStreamsBesideItsWriter(t *testing.T) {
	steps := 500
	if testing.Short() || prefixindex.RaceEnabled {
		steps = 150
	}
	f := newFleet(3, 3)
	if _, err := f.run(60); err != nil {
		t.Fatal(err)
	}
	prompts := slices.Clone(f.author.prompts[:12])
	truth := func() [][]int {
		out := make([][]int, len(prompts))
		for i, p := range prompts {
			for _, h := range f.author.holds {
				out[i] = append(out[i], h.reusable(p))
			}
		}
		return out
	}
	var mu sync.Mutex
	pushed := sync.NewCond(&mu)
	truths := [][][]int{truth()} // after each step
	done := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(truths)
	}
	var stop atomic.Bool
	var readers sync.WaitGroup
	var searches, begun atomic.Int64 // begun: steps whose changes may be in the index
	begun.Store(1)
	for r := range 2 {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(r), 4))
			s := f.index.NewSearcher()
			s.Exact = true
			for !stop.Load() && !t.Failed() {
				i := rng.IntN(len(prompts))
				from := done() - 1
				got := f.ask(s, prompts[i])
				to := int(begun.Load())
				mu.Lock()
				for len(truths) < to && !stop.Load() {
					pushed.Wait()
				}
				window := truths[from:]
				mu.Unlock()
				searches.Add(1)
				for w, n := range got {
					most := 0
					for _, t := range window {
						most = max(most, t[i][w])
					}
					if n > most {
						t.Errorf("worker %d: the index says %d, it held %d at most", w, n, most)
					}
				}
			}
		})
	}
	for range steps {
		op := f.author.step()
		next := truth()
		begun.Store(int64(len(truths) + 1))
		f.play(op)
		f.now = f.now.Add(6 * time.Second)
		if err := f.report(op.worker); err != nil {
			t.Error(err)
			break
		}
		mu.Lock()
		truths = append(truths, next)
		mu.Unlock()
		pushed.Broadcast()
	}
	mu.Lock()
	stop.Store(true)
	mu.Unlock()
	pushed.Broadcast()
	readers.Wait()
	if searches.Load() < 10 {
		t.Errorf("%d searches: too few to tell", searches.Load())
	}
}

// The oracle has nothing to be wrong together with.
func TestOracleStandsAlone(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "oracle_test.go", nil, parser.ImportsOnly)
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range file.Imports {
		if strings.Contains(i.Path.Value, "waypost") {
			t.Errorf("the oracle imports %s", i.Path.Value)
		}
	}
}
