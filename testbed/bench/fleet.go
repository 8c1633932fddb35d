package bench

import (
	"cmp"
	"math"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"waypost/testbed/workload"
)

// fleetOptions say how a large fleet is filled and lived through. Each worker is
// simulated on its own, so that only a few block tables live at once.
type fleetOptions struct {
	workload          string
	workers, blocks   int
	requestsPerSecond float64 // per worker
	fillMs, churnMs   float64
	seed              uint64
	references        bool // exact index and Bloom filters beside it
}

// life is what is kept of one simulated worker: its stream from the moment its
// cache is full, as a coordinator would receive it.
type life struct {
	snapshot   [][]byte
	deltas     []byte   // all of them, one after the other
	ends       []uint32 // in deltas, one per second of churn
	blocks     int      // resident at the snapshot
	last       int      // resident at the end
	keys       int      // announced at the end
	filledKeys int      // announced at the snapshot
	events     int      // block events during the churn
	refused    int      // requests larger than the pool
	queries    []workload.Request
}

// frame gives the delta of a second of churn; empty: there was none.
func (l *life) frame(second int) []byte {
	from := uint32(0)
	if second > 0 {
		from = l.ends[second-1]
	}
	return l.deltas[from:l.ends[second]]
}

// queryBlocks is the length of the chains that are looked up, in blocks, and
// how far off it a prompt may be.
const (
	queryBlocks     = 1000
	queryTolerance  = 60
	queriesPerKind  = 4
	queryWindowMs   = 20_000
	homesPerTraffic = 1.5
)

// livesOf simulates a fleet on all processors. full is told the blocks of each
// worker when its cache is full, one worker at a time.
func livesOf(o fleetOptions, full func(worker int, hashes []uint64)) ([]life, error) {
	g, err := workload.NewFleetGenerator(workload.Mix, o.seed, o.workers)
	if err != nil {
		return nil, err
	}
	sessions := assign(g, o)
	lives := make([]life, o.workers)
	var next atomic.Int64
	var wg sync.WaitGroup
	var mu sync.Mutex
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			var pool jobPool
			for {
				w := int(next.Add(1)) - 1
				if w >= o.workers {
					return
				}
				lives[w] = live(g, o, w, sessions[w], &pool, func(hashes []uint64) {
					mu.Lock()
					defer mu.Unlock()
					if full != nil {
						full(w, hashes)
					}
				})
				sessions[w] = nil
			}
		})
	}
	wg.Wait()
	return lives, nil
}

// assign gives each session to a worker by affinity. A session stays with its
// worker. Readings of a document go to the workers it lives on, of which it has
// as many as its traffic needs; chats and agents begin anywhere, so that system
// prompts are on most workers. Of a few workers the one with the least recent
// work is taken.
func assign(g *workload.Generator, o fleetOptions) [][]workload.Session {
	const candidates, halfLifeMs = 4, 10_000
	out := make([][]workload.Session, o.workers)
	load, at := make([]float64, o.workers), make([]float64, o.workers)
	rng := rand.New(rand.NewPCG(o.seed, 11))
	duration := time.Duration((o.fillMs + o.churnMs + queryWindowMs) * float64(time.Millisecond))
	for s := range g.Sessions(o.requestsPerSecond*float64(o.workers), duration) {
		best := -1
		for range candidates {
			w := rng.IntN(o.workers)
			if g.IsDocument(s.Item) {
				homes := int(math.Ceil(homesPerTraffic * g.Share(s.Item) * float64(o.workers)))
				w = home(s.Item, rng.IntN(min(o.workers, max(2, homes))), o.workers)
			}
			load[w] *= math.Exp2((at[w] - s.StartMs) / halfLifeMs)
			at[w] = s.StartMs
			if best < 0 || load[w] < load[best] {
				best = w
			}
		}
		load[best] += g.Cost(s.Item)
		out[best] = append(out[best], s)
	}
	return out
}

// home is the i-th worker that an item lives on.
func home(item, i, workers int) int {
	h := (uint64(item)*0x9e3779b97f4a7c15 ^ uint64(i)) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	hi, _ := bits.Mul64(h^h>>29, uint64(workers))
	return int(hi)
}

// live simulates one worker from an empty cache on.
func live(g *workload.Generator, o fleetOptions, worker int, sessions []workload.Session, pool *jobPool, full func(hashes []uint64)) life {
	requests := requestsOf(g, sessions)
	e := newEngine(o.blocks, pool)
	a := newAgent(o.blocks, uint32(worker+1))
	var l life
	next := 0
	for tick := 1000.0; tick <= o.fillMs+o.churnMs; tick += 1000 {
		for ; next < len(requests) && requests[next].ArrivalMs < tick; next++ {
			r := &requests[next]
			e.advanceTo(r.ArrivalMs)
			j := pool.newJob(r)
			e.submit(j, j.prompt-e.match(j)*blockTokens, r.ArrivalMs)
		}
		e.advanceTo(tick)
		frame := a.apply(&e.tape, tick)
		if tick > o.fillMs {
			l.events += e.tape.blocks
			l.deltas = append(l.deltas, frame...)
			l.ends = append(l.ends, uint32(len(l.deltas)))
		}
		e.tape.reset()
		if tick <= o.fillMs && tick+1000 > o.fillMs {
			l.snapshot = a.encoder.Snapshot()
			l.blocks, l.filledKeys = a.table.Len(), a.encoder.Keys()
			l.queries = pickQueries(requests[next:], tick)
			full(e.cache.names())
		}
	}
	l.last, l.keys = a.table.Len(), a.encoder.Keys()
	l.refused = e.refused
	return l
}

// requestsOf is the requests of sessions by arrival.
func requestsOf(g *workload.Generator, sessions []workload.Session) []workload.Request {
	var out []workload.Request
	for _, s := range sessions {
		out = g.Append(out, s)
	}
	slices.SortStableFunc(out, func(a, b workload.Request) int { return cmp.Compare(a.ArrivalMs, b.ArrivalMs) })
	return out
}

// pickQueries picks a few of the next requests of about queryBlocks blocks, and
// a few of any length.
func pickQueries(next []workload.Request, now float64) []workload.Request {
	var long, others []workload.Request
	for i := range next {
		r := next[i]
		if r.ArrivalMs > now+queryWindowMs {
			break
		}
		switch {
		case isLong(&r) && len(long) < queriesPerKind:
			long = append(long, r)
		case len(others) < queriesPerKind:
			others = append(others, r)
		}
	}
	return append(long, others...)
}

func isLong(r *workload.Request) bool {
	n := r.Prompt.Len()/blockTokens - queryBlocks
	return max(n, -n) <= queryTolerance
}

// names lists the hashes in a cache.
func (c *cache) names() []uint64 {
	out := make([]uint64, 0, c.named)
	for _, b := range c.slots {
		if b != 0 {
			out = append(out, c.blocks[b].hash)
		}
	}
	return out
}
