package prefixindex

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// fleet is an index filled by the mix, with what told it.
type fleet struct {
	x      *Index
	mixes  []*mix
	caches []*cache
}

// newFleet fills each worker's cache of so many blocks, and turns it over.
func newFleet(workers, blocks, turnovers int) *fleet {
	f := &fleet{x: New(Options{Seed: 7})}
	shared := newMixShared(workers)
	for w := range workers {
		m, c := newMix(shared, w), newCache(f.x.WorkerSink(WorkerID(w)), blocks)
		for c.events < blocks*(2*turnovers+1) { // each block is stored and evicted
			c.serve(m.next())
		}
		c.tokens, c.probe = nil, prefix.Probe{}
		f.mixes, f.caches = append(f.mixes, m), append(f.caches, c)
	}
	return f
}

func (f *fleet) blocks() (n int) {
	for _, c := range f.caches {
		n += c.blocks
	}
	return n
}

// query is a prompt whose keys are known.
type query struct {
	probe  prefix.Probe
	depths []int // of the points that were asked for
}

// queries draws next requests of about 1,000 blocks.
func (f *fleet) queries(n int) []*query {
	k := prefix.NewKeyer(prefix.ClusterKey{9}, prefix.Domain{Model: "m"})
	s := f.x.NewSearcher()
	var out []*query
	for i := 0; len(out) < n; i++ {
		ask, _ := f.mixes[i%len(f.mixes)].next()
		if b := ask.tokens() / blockTokens; b < 900 || b > 1100 {
			continue
		}
		q := &query{}
		q.probe.ResetTokens(ask.append(nil), k)
		s.Search(&q.probe)
		s.p = &q.probe
		for i, at := range s.order {
			s.readPoints(&s.levels[at], i+1 == len(s.order) || s.levels[s.order[i+1]].n == 0)
			for _, pt := range s.points {
				q.depths = append(q.depths, int(pt.depth))
			}
		}
		out = append(out, q)
	}
	return out
}

// warm brings a query's keys near, as they are when they were just computed.
func (q *query) warm() {
	for j := 1; ; j++ {
		if _, ok := q.probe.Checkpoint(j); !ok {
			break
		}
	}
	for _, d := range q.depths {
		q.probe.At(d)
	}
}

// quantiles sorts some times and reports their quantiles.
func quantiles(b *testing.B, took []time.Duration) {
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
	b.ReportMetric(0, "ns/op")
}

// each times what is done with random queries, their keys at hand.
func each(b *testing.B, qs []*query, do func(q *query)) {
	rng := rand.New(rand.NewPCG(1, 1))
	took := make([]time.Duration, 0, 1<<20)
	b.ReportAllocs()
	for b.Loop() {
		q := qs[rng.IntN(len(qs))]
		q.warm()
		begin := time.Now()
		do(q)
		if d := time.Since(begin); len(took) < cap(took) {
			took = append(took, d)
		}
	}
	quantiles(b, took)
}

// BenchmarkSearch looks up prompts of 1,000 blocks in the state of the mix:
// alone, with the choice of the cheapest of all workers, and while a writer
// applies 5,000 frames a second.
func BenchmarkSearch(b *testing.B) {
	for _, workers := range []int{100, 1000} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			f := newFleet(workers, 32768, 0)
			qs := f.queries(2000)
			s := f.x.NewSearcher()
			b.Run("lookup", func(b *testing.B) {
				groups := 0
				each(b, qs, func(q *query) { groups += len(s.Search(&q.probe)) })
			})
			queued := make([]int32, workers)
			for i := range queued {
				queued[i] = rand.Int32N(20_000)
			}
			b.Run("lookup+argmin", func(b *testing.B) {
				best := 0
				each(b, qs, func(q *query) {
					groups := s.Search(&q.probe)
					least := int32(1 << 30)
					for w, c := range queued {
						if c < least {
							least, best = c, w
						}
					}
					for i := range groups {
						for w := range groups[i].Workers.All {
							if c := queued[w] - int32(groups[i].Tokens); c < least {
								least, best = c, int(w)
							}
						}
					}
				})
				runtime.KeepAlive(best)
			})
			b.Run("matches", func(b *testing.B) {
				dst := make([]Match, 0, workers)
				each(b, qs, func(q *query) { dst = f.x.Match(&q.probe, dst[:0]) })
			})
			b.Run("lookup+writer", func(b *testing.B) {
				frames := f.record(20_000)
				stop := make(chan struct{})
				done := make(chan int)
				go func() { done <- write(frames, stop) }()
				begin := time.Now()
				each(b, qs, func(q *query) { s.Search(&q.probe) })
				close(stop)
				b.ReportMetric(float64(<-done)/time.Since(begin).Seconds(), "frames/s")
			})
		})
	}
}

// frame is what one request changes at one worker.
type frame struct {
	to  *Sink
	ops []op
}

// recorder keeps the calls of a frame.
type recorder struct {
	*Sink
	ops []op
}

func (r *recorder) Begin() {}
func (r *recorder) End()   {}

func (r *recorder) AddCheckpoint(key, parent summary.IndexKey, depth uint32) {
	r.ops = append(r.ops, op{kind: opAdd, name: name{key, parent, depth}})
}

func (r *recorder) AddPoint(key, checkpoint summary.IndexKey, depth uint32, _ bool) {
	r.ops = append(r.ops, op{kind: opAdd, name: name{key, checkpoint, depth}})
}

func (r *recorder) RemoveCheckpoint(key, parent summary.IndexKey, depth uint32) {
	r.ops = append(r.ops, op{kind: opRemove, name: name{key, parent, depth}})
}

func (r *recorder) RemovePoint(key, checkpoint summary.IndexKey, depth uint32, _ bool) {
	r.ops = append(r.ops, op{kind: opRemove, name: name{key, checkpoint, depth}})
}

// record makes frames, workers in turn, without applying them.
func (f *fleet) record(n int) []frame {
	out := make([]frame, n)
	for i := range out {
		w := i % len(f.caches)
		c := f.caches[w]
		sink := c.sink.(*Sink)
		r := &recorder{Sink: sink}
		c.sink = r
		c.serve(f.mixes[w].next())
		c.sink = sink
		out[i] = frame{sink, r.ops}
	}
	return out
}

func (fr *frame) apply() {
	fr.to.Begin()
	for i := range fr.ops {
		fr.to.do(fr.ops[i])
	}
	fr.to.End()
}

// write applies 5,000 frames a second until told to stop.
func write(frames []frame, stop chan struct{}) (n int) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	begin := time.Now()
	for {
		select {
		case <-stop:
			return n
		case <-tick.C:
		}
		for due := int(time.Since(begin).Seconds() * 5000); n < due && n < len(frames); n++ {
			frames[n].apply()
		}
	}
}

// BenchmarkUpdates applies frames of 1,000 workers in turn. An operation is a
// run that is begun, grown, trimmed or dropped; block events are stores and
// evictions.
func BenchmarkUpdates(b *testing.B) {
	f := newFleet(1000, 32768, 0)
	var perFrame [3][]float64 // keys, operations, block events per second
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		was := f.counts()
		frames := f.record(5000)
		now := f.counts()
		keys := 0
		for i := range frames {
			keys += len(frames[i].ops)
		}
		b.StartTimer()
		begin := time.Now()
		for i := range frames {
			frames[i].apply()
		}
		took := time.Since(begin).Seconds()
		for i, n := range []int{keys, now[0] - was[0], now[1] - was[1]} {
			perFrame[i] = append(perFrame[i], float64(n)/took)
		}
	}
	b.ReportMetric(0, "ns/op")
	for i, unit := range []string{"keys/s", "ops/s", "block-events/s"} {
		slices.Sort(perFrame[i])
		b.ReportMetric(perFrame[i][len(perFrame[i])/2], unit)
		b.ReportMetric(perFrame[i][len(perFrame[i])-1], "best-"+unit)
	}
}

func (f *fleet) counts() (n [2]int) {
	for _, c := range f.caches {
		n[0], n[1] = n[0]+c.ops, n[1]+c.events
	}
	return n
}

// BenchmarkHeap tells the bytes per cached block, after a fill and after each
// cache was turned over some times.
func BenchmarkHeap(b *testing.B) {
	for _, turnovers := range []int{0, 4} {
		b.Run(fmt.Sprintf("workers=1000/turnovers=%d", turnovers), func(b *testing.B) {
			for b.Loop() {
				f := newFleet(1000, 32768, turnovers)
				blocks := f.blocks()
				runs, hit, asked := 0, 0, 0
				for _, c := range f.caches {
					runs, hit, asked = runs+len(c.runs), hit+c.hit, asked+c.asked
				}
				b.ReportMetric(float64(runs)/1000, "runs/worker")
				b.ReportMetric(float64(hit)/float64(asked), "hit-rate")
				b.ReportMetric(float64(f.x.Stats().Listings)/1000, "keys/worker")
				f.mixes, f.caches = nil, nil
				full := heapBytes()
				runtime.KeepAlive(f)
				f = nil
				b.ReportMetric(float64(full-heapBytes())/float64(blocks), "B/block")
				b.ReportMetric(0, "ns/op")
			}
		})
	}
}

func heapBytes() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkDrop forgets a worker of 32,768 blocks among 100 and sweeps it out.
func BenchmarkDrop(b *testing.B) {
	f := newFleet(100, 32768, 0)
	var drop, sweep time.Duration
	n := 0
	for b.Loop() {
		id := WorkerID(n % 100)
		begin := time.Now()
		f.x.Drop(id)
		drop += time.Since(begin)
		begin = time.Now()
		f.x.sweepAll()
		sweep += time.Since(begin)
		n++
		b.StopTimer()
		c := newCache(f.x.WorkerSink(id), 32768)
		for c.events < 32768 {
			c.serve(f.mixes[id].next())
		}
		b.StartTimer()
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(drop.Microseconds())/float64(n), "drop-us")
	b.ReportMetric(float64(sweep.Microseconds())/float64(n), "sweep-us")
}

// TestSearchAllocatesNothing: not even with claims and extents.
func TestSearchAllocatesNothing(t *testing.T) {
	f := newFleet(20, 4096, 1)
	for id := range WorkerID(20) {
		f.x.claim(id, 1, line(900))
		n := line(512).name()
		f.caches[id].sink.(*Sink).SetExtent(n.key, n.parent, n.depth, summary.Extent{UsableTokens: 500})
	}
	s := f.x.NewSearcher()
	qs := f.queries(5)
	var p prefix.Probe
	line(900).probe(&p, 300)
	dst := make([]Match, 0, 20)
	ask := func() {
		for _, q := range qs {
			s.Search(&q.probe)
			dst = f.x.Match(&q.probe, dst[:0])
		}
		s.Search(&p)
	}
	ask()
	if n := testing.AllocsPerRun(50, ask); n != 0 && !raceEnabled {
		t.Errorf("%v allocations", n)
	}
}

// TestMemoryStaysAfterChurn: what was turned over many times takes no more
// memory than what was filled.
func TestMemoryStaysAfterChurn(t *testing.T) {
	x := New(Options{Seed: 2})
	empty := x.Stats().Bytes
	rng := rand.New(rand.NewPCG(4, 4))
	type listing struct {
		s *Sink
		n name
	}
	var live []listing
	add := func() {
		s, up := x.WorkerSink(WorkerID(rng.IntN(300))), summary.IndexKey(rng.Uint64())
		for depth := range uint32(rng.IntN(8)) { // some are shared, some have points
			n := name{summary.IndexKey(rng.Uint64()), up, (depth + 2) * prefix.ChunkTokens}
			s.AddCheckpoint(n.key, n.parent, n.depth)
			live = append(live, listing{s, n})
			for w := range rng.IntN(5) {
				other := x.WorkerSink(WorkerID(w * rng.IntN(60)))
				if listed, _ := x.Holds(other.w.id, n.key, up, n.depth); !listed {
					other.AddCheckpoint(n.key, n.parent, n.depth)
					live = append(live, listing{other, n})
				}
			}
			up = n.key
		}
	}
	size := func() float64 { return float64(x.Stats().Bytes-empty) / float64(x.Stats().Keys) }
	for len(live) < 120_000 {
		add()
	}
	fill := size()
	for range 500_000 {
		i := rng.IntN(len(live))
		live[i].s.RemoveCheckpoint(live[i].n.key, live[i].n.parent, live[i].n.depth)
		live[i] = live[len(live)-1]
		if live = live[:len(live)-1]; len(live) < 120_000 {
			add()
		}
	}
	if churned := size(); churned > 1.1*fill {
		t.Errorf("%.1f bytes per key after a fill, %.1f after churn", fill, churned)
	}
	for _, l := range live {
		l.s.RemoveCheckpoint(l.n.key, l.n.parent, l.n.depth)
	}
	if st := x.Stats(); st.Keys != 0 || st.Listings != 0 {
		t.Errorf("left over: %+v", st)
	}
}
