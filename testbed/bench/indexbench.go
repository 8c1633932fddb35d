package bench

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"waypost/coordinator/prefixindex"
	"waypost/gossip/prefix"
	"waypost/testbed/workload"
)

// indexOptions say how one fleet's index is measured.
type indexOptions struct {
	fleetOptions
	window time.Duration // of one repetition of a timing
}

// Index is what the index of one fleet costs a coordinator.
type Index struct {
	Workload            string
	Workers, PoolBlocks int
	ChurnSeconds        float64
	// Blocks are resident over all workers at the fill, Keys announced at the end.
	Blocks, Keys int
	// Runs is how many runs a worker's stream tells at the fill. The fewer blocks
	// a run has, the more each of them costs, in memory and in updates.
	Runs float64
	// Refused counts requests larger than a worker's pool.
	Refused int
	// Queries about 1,000 blocks long, and of any length.
	LongQueries, Queries int
	// Matches are the workers that hold something of a long query, on average.
	Matches float64

	// Lookup is of long queries with their names known, answered as sets of
	// workers that hold the same; LookupList answers worker by worker. LookupAny
	// is of any queries, and LookupTokens of long ones from their token ids,
	// hashing included.
	Lookup, LookupList, LookupAny, LookupTokens quantiles
	// LookupWriting is while WrittenPerSec frames are applied, LookupResting
	// between windows of that.
	LookupResting, LookupWriting quantiles
	WrittenPerSec                float64
	// Decide is a lookup and the cheapest of all workers, each one looked at.
	Decide       quantiles
	DecideAllocs float64

	// What one core applies, over Frames frames of all workers in turn.
	Frames                                int
	FramesPerSec, OpsPerSec, EventsPerSec float64

	// Heap of index and decoders per resident block, at the fill and after the
	// churn.
	HeapFill, HeapChurned float64

	// The references: an exact inverted index over single blocks, and a Bloom
	// filter of 10 bits per worker, transposed. Bytes per (block, worker).
	References             bool
	Exact, Bloom           quantiles
	ExactBytes, BloomBytes float64
	// Pairs of a long query and a worker that holds something of it, and how the
	// index differs from the exact one over them.
	Pairs   int
	Differs Deviation
	// Cases are further lookups.
	Cases []Case
}

// indexBench is the coordinator's side of one fleet.
type indexBench struct {
	opt           indexOptions
	out           Index
	lives         []life
	exact         *exactIndex
	bloom         *bloomIndex
	index         *prefixindex.Index
	receivers     []*receiver
	long, all     []*query
	queued        []int32
	churnedBlocks int
	applied       int // (worker, second) pairs of the churn
}

// query is a prompt that is looked up, its names computed.
type query struct {
	tokens []uint32
	hashes []uint64
	probe  prefix.Probe
}

func benchIndex(o indexOptions) (Index, []life, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b := &indexBench{opt: o}
	b.out.Workload = o.workload
	b.out.Workers, b.out.PoolBlocks, b.out.ChurnSeconds, b.out.References = o.workers, o.blocks, o.churnMs/1000, o.references
	if err := b.live(); err != nil {
		return Index{}, nil, err
	}
	if err := b.prepareQueries(); err != nil {
		return Index{}, nil, err
	}
	empty := heapBytes()
	if err := b.fill(); err != nil {
		return Index{}, nil, err
	}
	for _, r := range b.receivers {
		b.out.Runs += float64(r.decoder.Runs()) / float64(o.workers)
	}
	b.out.HeapFill = float64(heapBytes()-empty) / float64(b.out.Blocks)
	b.warm()
	b.lookups()
	if o.references {
		b.lookupReferences()
	}
	if o.workload == chainsWorkload {
		b.lookupCases()
	}
	if err := b.whileWriting(); err != nil {
		return Index{}, nil, err
	}
	if err := b.churn(); err != nil {
		return Index{}, nil, err
	}
	b.chill()
	b.out.HeapChurned = float64(heapBytes()-empty) / float64(b.churnedBlocks)
	runtime.KeepAlive(b.index)
	runtime.KeepAlive(b.receivers)
	return b.out, b.lives, b.verify()
}

// live simulates the workers.
func (b *indexBench) live() error {
	o := b.opt
	var full func(int, []uint64)
	if o.references {
		b.exact, b.bloom = newExactIndex(o.workers), newBloomIndex(o.workers, o.blocks)
		full = func(w int, hashes []uint64) {
			b.exact.add(w, hashes)
			b.bloom.add(w, hashes)
		}
	}
	var err error
	if o.workload == chainsWorkload {
		b.lives = chainLives(o.fleetOptions, full)
	} else {
		b.lives, err = livesOf(o.fleetOptions, full)
	}
	for i := range b.lives {
		b.out.Blocks += b.lives[i].blocks
		b.churnedBlocks += b.lives[i].last
		b.out.Keys += b.lives[i].keys
		b.out.Refused += b.lives[i].refused
	}
	return err
}

const (
	maxQueries       = 512
	countedDecisions = 1000 // whose allocations are counted
)

func newQuery(p workload.Prompt) *query {
	q := &query{tokens: p.AppendTokens(nil)}
	q.hashes = appendBlockHashes(nil, q.tokens)
	return q
}

func (b *indexBench) prepareQueries() error {
	rng := rand.New(rand.NewPCG(b.opt.seed, 12))
	if b.opt.workload == chainsWorkload {
		for _, p := range chainQueries(b.opt.fleetOptions) {
			b.long = append(b.long, newQuery(p))
		}
		b.all = b.long
	} else {
		b.pickQueries(rng)
	}
	b.queued = make([]int32, b.opt.workers)
	for w := range b.queued {
		b.queued[w] = rng.Int32N(20_000)
	}
	b.out.Queries, b.out.LongQueries = len(b.all), len(b.long)
	if len(b.long) == 0 {
		return fmt.Errorf("no prompt of about %d blocks among the next requests: fill the fleet for longer", queryBlocks)
	}
	return nil
}

// pickQueries takes the next requests of workers at random.
func (b *indexBench) pickQueries(rng *rand.Rand) {
	for _, w := range rng.Perm(len(b.lives)) {
		for i := range b.lives[w].queries {
			r := &b.lives[w].queries[i]
			long := isLong(r)
			if len(b.all) >= maxQueries && (!long || len(b.long) >= maxQueries) {
				continue
			}
			q := newQuery(r.Prompt)
			if long && len(b.long) < maxQueries {
				b.long = append(b.long, q)
			}
			if len(b.all) < maxQueries {
				b.all = append(b.all, q)
			}
		}
		b.lives[w].queries = nil
	}
}

// fill brings every worker's snapshot to a new index.
func (b *indexBench) fill() error {
	b.index = prefixindex.New(prefixindex.Options{Seed: 1})
	b.receivers = make([]*receiver, b.opt.workers)
	for w := range b.lives {
		b.receivers[w] = newReceiver(b.index, w)
		for _, f := range b.lives[w].snapshot {
			if err := b.receivers[w].take(f); err != nil {
				return fmt.Errorf("worker %d: snapshot: %w", w, err)
			}
		}
	}
	return nil
}

// warm computes the names of all queries: a coordinator has them once per
// request, whatever it does with them.
func (b *indexBench) warm() {
	k := benchKeyer()
	for _, list := range [][]*query{b.long, b.all} {
		for _, q := range list {
			q.probe.ResetTokens(q.tokens, k)
			b.lookup(&q.probe)
		}
	}
}

// chill frees the names.
func (b *indexBench) chill() {
	for _, list := range [][]*query{b.long, b.all} {
		for _, q := range list {
			q.probe = prefix.Probe{}
		}
	}
}

// lookup asks the index for the sets of workers that hold something of a prompt.
func (b *indexBench) lookup(p *prefix.Probe) (workers int) {
	b.index.Groups(p, func(g *prefixindex.Group) { workers += g.Workers.Len() })
	return workers
}

func (b *indexBench) lookups() {
	found := 0
	for _, q := range b.long {
		found += b.lookup(&q.probe)
	}
	b.out.Matches = float64(found) / float64(len(b.long))
	b.out.Lookup = bestOf(b.opt.window, func(i int) { b.lookup(&b.long[i%len(b.long)].probe) })
	b.out.LookupAny = bestOf(b.opt.window, func(i int) { b.lookup(&b.all[i%len(b.all)].probe) })
	dst := make([]prefixindex.Match, 0, b.opt.workers)
	b.out.LookupList = bestOf(b.opt.window, func(i int) { dst = b.index.Match(&b.long[i%len(b.long)].probe, dst[:0]) })
	worker := 0
	decide := func(i int) { worker += b.decide(b.long[i%len(b.long)]) }
	b.out.Decide = bestOf(b.opt.window, decide)
	b.out.DecideAllocs = float64(allocations(func() {
		for i := range countedDecisions {
			decide(i)
		}
	})) / countedDecisions
	k := benchKeyer()
	var probe prefix.Probe
	b.out.LookupTokens = bestOf(b.opt.window, func(i int) {
		probe.ResetTokens(b.long[i%len(b.long)].tokens, k)
		b.lookup(&probe)
	})
	runtime.KeepAlive(worker)
}

// decide is the worker with the fewest tokens to compute before the first token
// of a prompt, over all workers.
func (b *indexBench) decide(q *query) (best int) {
	least := b.queued[0]
	for w, n := range b.queued {
		if n < least {
			best, least = w, n
		}
	}
	b.index.Groups(&q.probe, func(g *prefixindex.Group) {
		reused := int32(min(int(g.Tokens), len(q.tokens)))
		for w := range g.Workers.All {
			if c := b.queued[w] - reused; c < least {
				best, least = int(w), c
			}
		}
	})
	return best
}

func (b *indexBench) lookupReferences() {
	search := newBlockSearch(b.exact, b.opt.workers)
	b.out.Exact = bestOf(b.opt.window, func(i int) { search.run(b.long[i%len(b.long)].hashes) })
	b.out.ExactBytes = float64(b.exact.bytes()) / float64(b.exact.members)
	b.compare(search)
	filters := newBlockSearch(b.bloom, b.opt.workers)
	b.out.Bloom = bestOf(b.opt.window, func(i int) { filters.run(b.long[i%len(b.long)].hashes) })
	b.out.BloomBytes = float64(b.bloom.bytes()) / float64(b.exact.members)
}

// compare counts where index and exact index differ over all long queries.
func (b *indexBench) compare(search *blockSearch) {
	estimate := make([]int, b.opt.workers)
	var dst []prefixindex.Match
	for _, q := range b.long {
		dst = b.index.Match(&q.probe, dst[:0])
		clear(estimate)
		for _, m := range dst {
			estimate[m.Worker] = int(m.Tokens) / blockTokens
		}
		for w, n := range search.run(q.hashes) {
			if n > 0 || estimate[w] > 0 {
				b.out.Pairs++
				b.out.Differs.count(estimate[w], int(n), int(n))
			}
		}
	}
	b.out.Differs.Absolute /= float64(max(1, b.out.Pairs))
}

// applyNext applies the next frame of the interleaved streams; false at the end.
func (b *indexBench) applyNext() (bool, error) {
	for seconds := int(b.opt.churnMs / 1000); b.applied < seconds*b.opt.workers; {
		w, second := b.applied%b.opt.workers, b.applied/b.opt.workers
		b.applied++
		if f := b.lives[w].frame(second); len(f) > 0 {
			b.out.Frames++
			if err := b.receivers[w].take(f); err != nil {
				return false, fmt.Errorf("worker %d, second %d: %w", w, second, err)
			}
			return true, nil
		}
	}
	return false, nil
}

// writtenFrames is what a coordinator of 1,000 workers takes in at five times
// the usual rate, per second.
const writtenFrames = 5000

// whileWriting looks up while the writer applies frames at a steady rate, and
// while it rests, in turns: what a shared machine does in minutes between two
// windows would else count as the writer's.
func (b *indexBench) whileWriting() error {
	perWindow := min(int(writtenFrames*b.opt.window.Seconds()), int(b.opt.churnMs/1000)*b.opt.workers/2/repetitions)
	if perWindow == 0 {
		return nil
	}
	lookup := func(i int) { b.lookup(&b.long[i%len(b.long)].probe) }
	window := time.Duration(perWindow) * time.Second / writtenFrames
	var resting, writing []quantiles
	var took time.Duration
	for range repetitions {
		resting = append(resting, timeFor(window, lookup))
		began, done := time.Now(), make(chan error, 1)
		go func() {
			err := b.write(began, perWindow)
			took += time.Since(began)
			done <- err
		}()
		writing = append(writing, timeFor(window, lookup))
		if err := <-done; err != nil {
			return err
		}
	}
	b.out.WrittenPerSec = float64(perWindow*repetitions) / took.Seconds()
	b.out.LookupResting, b.out.LookupWriting = best(resting), best(writing)
	return nil
}

// write applies frames as they are due.
func (b *indexBench) write(began time.Time, total int) error {
	for n := 0; n < total; time.Sleep(time.Millisecond) {
		for due := int(time.Since(began).Seconds() * writtenFrames); n < min(due, total); n++ {
			if ok, err := b.applyNext(); err != nil || !ok {
				return err
			}
		}
	}
	return nil
}

// churn applies the rest of the streams as fast as it goes.
func (b *indexBench) churn() error {
	frames, ops, applied := b.out.Frames, b.ops(), b.applied
	began := threadCPU()
	for {
		ok, err := b.applyNext()
		if err != nil {
			return err
		}
		if !ok {
			break
		}
	}
	took := (threadCPU() - began).Seconds()
	if took == 0 || b.out.Frames == frames {
		return nil
	}
	b.out.FramesPerSec = float64(b.out.Frames-frames) / took
	b.out.OpsPerSec = float64(b.ops()-ops) / took
	total := 0
	for i := range b.lives {
		total += b.lives[i].events
	}
	share := float64(b.applied-applied) / float64(b.applied)
	b.out.EventsPerSec = float64(total) * share / took
	return nil
}

// ops is the number of operations that all receivers have applied.
func (b *indexBench) ops() (n uint64) {
	for _, r := range b.receivers {
		n += r.decoder.Ops()
	}
	return n
}

// verify compares what the receivers hold with what the agents announced.
func (b *indexBench) verify() error {
	for w, r := range b.receivers {
		if got, want := r.decoder.Keys(), b.lives[w].keys; got != want && b.opt.churnMs > 0 {
			return fmt.Errorf("worker %d: %d keys at the coordinator, %d at the agent", w, got, want)
		}
	}
	return nil
}
