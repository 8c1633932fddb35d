package agent

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/gossip/prefix"
)

// coldWorker is an engine at its full cache as an agent hears of it: prompts come
// whole, answers grow block by block, and each new block takes the place of the one
// that was used longest ago, tails first.
type coldWorker struct {
	rank    *rank
	rng     *rand.Rand
	pool    []uint32 // tokens that stores take windows of
	next    uint64   // number of the next block
	held    []uint64 // blocks of requests that ended, in order of removal
	answers []coldAnswer
}

// coldAnswer is a request that is being answered.
type coldAnswer struct {
	hashes []uint64
	left   int // blocks that it grows by yet
}

const (
	coldWorkers      = 8
	coldPool         = 32768
	coldPromptBlocks = 100
	coldAnswerBlocks = 10
	coldEvery        = 12500 * time.Microsecond // between batches of a worker
	coldBlockTokens  = 16
	coldCacheBytes   = 8 << 20
	// A prompt comes with each so manyth batch.
	coldPromptEvery = 8
)

func (w *coldWorker) store(e *engine.Batch, parent uint64, blocks int) (hashes []uint64) {
	for ; blocks > len(hashes); w.next++ {
		hashes = append(hashes, w.next*0x9e3779b97f4a7c15)
	}
	at := w.rng.IntN(len(w.pool) - blocks*coldBlockTokens)
	e.Events = append(e.Events, blocktable.Event{
		Op: blocktable.OpStore, Spec: blocktable.SpecFull, BlockTokens: coldBlockTokens, HasParent: parent != 0, Parent: parent,
		Hashes: hashes, Tokens: w.pool[at : at+blocks*coldBlockTokens],
	})
	return hashes
}

// batch is what a step of the engine does; prompt says that a request begins with it.
func (w *coldWorker) batch(prompt bool) (b engine.Batch, blocks int) {
	var stores engine.Batch
	stored, going := 0, w.answers[:0]
	for _, a := range w.answers {
		if a.left > 0 && w.rng.IntN(coldPromptEvery) == 0 {
			a.hashes = append(a.hashes, w.store(&stores, a.hashes[len(a.hashes)-1], 1)...)
			a.left--
			stored++
		}
		if a.left > 0 {
			going = append(going, a)
			continue
		}
		for i := len(a.hashes) - 1; i >= 0; i-- {
			w.held = append(w.held, a.hashes[i])
		}
	}
	w.answers = going
	if prompt {
		w.answers = append(w.answers, coldAnswer{w.store(&stores, 0, coldPromptBlocks), coldAnswerBlocks})
		stored += coldPromptBlocks
	}
	live := 0
	for _, a := range w.answers {
		live += len(a.hashes)
	}
	for len(w.held)+live > coldPool {
		b.Events = append(b.Events, blocktable.Event{Op: blocktable.OpRemove, Hashes: w.held[:1:1]})
		w.held = w.held[1:]
		blocks++
	}
	b.Events = append(b.Events, stores.Events...)
	return b, blocks + stored
}

// What a block event takes of an agent that has the processor to itself for a moment
// only: the mirrors of its workers, their histories and streams are in the caches of
// nobody when their batches come.
func BenchmarkApplyCold(b *testing.B) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pool := make([]uint32, 1<<16)
	for i, rng := 0, rand.New(rand.NewPCG(1, 2)); i < len(pool); i++ {
		pool[i] = 1000 + rng.Uint32N(64_000)
	}
	now := time.Now()
	workers := make([]*coldWorker, coldWorkers)
	for i := range workers {
		r := newRank(0, "vllm", "vllm-1", "here", i, []prefix.ClusterKey{{5}}, coldPool+1)
		f := testFacts
		f.BlockTokens, f.PoolBlocks = coldBlockTokens, coldPool+1
		r.setFacts(f)
		workers[i] = &coldWorker{rank: r, rng: rand.New(rand.NewPCG(3, uint64(i))), pool: pool, next: 1}
	}
	caches := make([]byte, coldCacheBytes)
	batches := make([]engine.Batch, coldWorkers)
	sum := byte(0)
	round := func(i int) (spent time.Duration, blocks int) {
		now = now.Add(coldEvery)
		for k, w := range workers {
			var n int
			batches[k], n = w.batch((i+k)%coldPromptEvery == 0)
			batches[k].Received = now
			blocks += n
			if (i+k)%coldPromptEvery == 0 {
				w.rank.tick(now)
			}
		}
		for at := 0; at < len(caches); at += 64 {
			sum += caches[at]
		}
		from := threadTime(b)
		for k, w := range workers {
			if whole, _ := w.rank.apply(batches[k]); !whole {
				b.Fatal("more copies than the pool holds")
			}
		}
		return threadTime(b) - from, blocks
	}
	rounds := 0
	next := func() float64 {
		spent, blocks := round(rounds)
		rounds++
		return float64(spent.Nanoseconds()) / float64(blocks)
	}
	for rounds < coldPromptEvery*coldPool*5/4/(coldPromptBlocks+coldAnswerBlocks) {
		next()
	}
	var each []float64 // ns per block event of a round
	for b.Loop() {
		each = append(each, next())
	}
	caches[0] = sum
	slices.Sort(each)
	// Rounds in which others were in the caches too tell less of the code.
	b.ReportMetric(each[len(each)/2], "cpu-ns/blockEvent")
	b.ReportMetric(each[len(each)/50], "cpu-ns/blockEvent-undisturbed")
}

// threadTime is the processor time of this thread: wall time counts what others do.
func threadTime(b *testing.B) time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		b.Fatal(err)
	}
	return time.Duration(t.Nano())
}
