package prefixindex

import (
	"fmt"
	"slices"
	"sync"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// Options configure an [Index].
type Options struct {
	// Seed spreads keys over the table. A random one keeps a worker from
	// choosing keys that collide there; results do not depend on it.
	Seed uint64
}

// Index maps prefixes to the workers that hold them. It is safe for concurrent
// use.
type Index struct {
	// writer is held for a whole change and guards what only changes look at.
	// It is taken before mu.
	writer  sync.Mutex
	workers map[WorkerID]*worker
	counts  map[uint32]uint32 // known ends by depth, off the checkpoints

	// mu guards what searches look at; changes hold it for a few keys at a time.
	mu         sync.RWMutex
	held       table    // all workers that hold a prefix, or are predicted to
	notEnd     table    // those of them that cannot end a match exactly there
	unverified table    // those of them of which no verified stream says so
	present    []uint64 // workers that hold anything
	points     []chunkPoints

	searches sync.Pool
}

// chunkPoints marks the offsets within one chunk at which known ends lie.
type chunkPoints [prefix.ChunkTokens / 64]uint64

// worker is what the index knows about one worker.
type worker struct {
	id     WorkerID
	gone   bool // dropped; what still writes to it writes nowhere
	keys   map[prefix.Key]holding
	claims map[uint64][]prefix.Key
}

// holding counts why a worker is listed under a key.
type holding struct {
	depth     uint32
	predicted uint32 // claims
	streams   [2]listing
}

// listing counts what a stream says.
type listing struct {
	n    uint32 // times added
	ends uint32 // of those, with a match allowed to end there
}

// Classes of streams, indices into holding.streams.
const (
	classVerified = iota
	classUnverified
)

func (h *holding) isHeld() bool {
	return h.predicted+h.streams[classVerified].n+h.streams[classUnverified].n > 0
}

func (h *holding) isNotEnd() bool {
	return h.isHeld() && h.predicted+h.streams[classVerified].ends+h.streams[classUnverified].ends == 0
}

func (h *holding) isUnverified() bool {
	return h.isHeld() && h.streams[classVerified].n == 0
}

// New returns an empty index.
func New(o Options) *Index {
	x := &Index{workers: map[WorkerID]*worker{}, counts: map[uint32]uint32{}}
	for _, t := range []*table{&x.held, &x.notEnd, &x.unverified} {
		t.seed = o.Seed*2 ^ 0x9e3779b97f4a7c15 // odd, and not 1 without a seed
	}
	x.searches.New = func() any { return new(search) }
	return x
}

// worker returns the record of a worker. The writer lock must be held.
func (x *Index) worker(id WorkerID) *worker {
	if id >= MaxWorkers {
		panic(fmt.Sprintf("prefixindex: worker id %d, ids are dense and below %d", id, MaxWorkers))
	}
	w := x.workers[id]
	if w == nil {
		w = &worker{id: id, keys: map[prefix.Key]holding{}, claims: map[uint64][]prefix.Key{}}
		x.workers[id] = w
	}
	return w
}

// WorkerSink returns what the decoder of a worker's stream writes to; it is a
// [summary.ResidentSink]. verified defaults to true; what an unverified sink
// adds is reported as predicted. Sinks of one worker and class share their
// counts, and Reset empties the class. After Drop a sink writes nothing more.
func (x *Index) WorkerSink(w WorkerID, verified ...bool) summary.Sink {
	class := classVerified
	if len(verified) > 0 && !verified[0] {
		class = classUnverified
	}
	x.writer.Lock()
	defer x.writer.Unlock()
	return &sink{x: x, w: x.worker(w), class: class}
}

// sink writes one class of one worker.
type sink struct {
	x     *Index
	w     *worker
	class int
}

var _ summary.ResidentSink = (*sink)(nil)

// Add implements summary.Sink.
func (s *sink) Add(k prefix.Key, depthTokens uint32) {
	s.change(k, depthTokens, func(l listing) listing { return listing{l.n + 1, l.ends + 1} })
}

// AddResident implements summary.ResidentSink.
func (s *sink) AddResident(k prefix.Key, depthTokens uint32) {
	s.change(k, depthTokens, func(l listing) listing { return listing{l.n + 1, l.ends} })
}

// SetEnd implements summary.ResidentSink.
func (s *sink) SetEnd(k prefix.Key, end bool) {
	s.change(k, 0, func(l listing) listing {
		if end {
			return listing{l.n, min(l.ends+1, l.n)}
		}
		return listing{l.n, max(l.ends, 1) - 1}
	})
}

// Remove implements summary.Sink.
func (s *sink) Remove(k prefix.Key) {
	s.change(k, 0, func(l listing) listing {
		n := max(l.n, 1) - 1
		return listing{n, min(l.ends, n)}
	})
}

// Reset implements summary.Sink.
func (s *sink) Reset() {
	s.x.writer.Lock()
	defer s.x.writer.Unlock()
	if s.w.gone {
		return
	}
	s.x.changeAll(s.w, func(h holding) holding {
		h.streams[s.class] = listing{}
		return h
	})
}

func (s *sink) change(k prefix.Key, depthTokens uint32, do func(listing) listing) {
	s.x.writer.Lock()
	defer s.x.writer.Unlock()
	if s.w.gone {
		return
	}
	s.x.change(s.w, k, depthTokens, func(h holding) holding {
		h.streams[s.class] = do(h.streams[s.class])
		return h
	})
}

// AddPredicted lists keys[i], depths[i] tokens deep, for a worker that will
// hold them once the request of a claim is prefilled there. A second call for
// the same claim replaces the first. keys and depths must be equally long.
func (x *Index) AddPredicted(w WorkerID, claim uint64, keys []prefix.Key, depths []uint32) {
	if len(keys) != len(depths) {
		panic(fmt.Sprintf("prefixindex: %d keys with %d depths", len(keys), len(depths)))
	}
	x.writer.Lock()
	defer x.writer.Unlock()
	wk := x.worker(w)
	old := wk.claims[claim]
	wk.claims[claim] = slices.Clone(keys)
	for i, k := range keys {
		x.change(wk, k, depths[i], func(h holding) holding {
			h.predicted++
			return h
		})
	}
	x.unpredict(wk, old)
}

// RemovePredicted ends a claim: what it predicted is listed no longer, unless a
// stream or another claim lists it too.
func (x *Index) RemovePredicted(w WorkerID, claim uint64) {
	x.writer.Lock()
	defer x.writer.Unlock()
	wk := x.workers[w]
	if wk == nil {
		return
	}
	old := wk.claims[claim]
	delete(wk.claims, claim)
	x.unpredict(wk, old)
}

func (x *Index) unpredict(w *worker, keys []prefix.Key) {
	for _, k := range slices.Backward(keys) {
		x.change(w, k, 0, func(h holding) holding {
			h.predicted = max(h.predicted, 1) - 1
			return h
		})
	}
}

// Drop forgets a worker: its streams, its claims, its sinks. The id may be used
// again afterwards.
func (x *Index) Drop(w WorkerID) {
	x.writer.Lock()
	defer x.writer.Unlock()
	wk := x.workers[w]
	if wk == nil {
		return
	}
	wk.gone = true
	delete(x.workers, w)
	x.changeAll(wk, func(h holding) holding { return holding{depth: h.depth} })
}

// batch is the number of keys changed under one hold of mu.
const batch = 64

// changeAll changes all holdings of a worker.
func (x *Index) changeAll(w *worker, do func(holding) holding) {
	i := 0
	x.mu.Lock()
	for k, old := range w.keys {
		if i++; i%batch == 0 { // let searches through
			x.mu.Unlock()
			x.mu.Lock()
		}
		x.store(w, k, old, do(old))
	}
	x.mu.Unlock()
}

// change changes one holding. A new one needs a depth; a key without one, or
// deeper than any prompt, is not listed.
func (x *Index) change(w *worker, k prefix.Key, depthTokens uint32, do func(holding) holding) {
	old, known := w.keys[k]
	if !known {
		if depthTokens == 0 || depthTokens > summary.MaxDepthTokens || k == 0 {
			return
		}
		old.depth = depthTokens
	}
	now := do(old)
	x.mu.Lock()
	x.store(w, k, old, now)
	x.mu.Unlock()
}

// store replaces a holding and keeps tables, points and presence in step. Both
// locks must be held.
func (x *Index) store(w *worker, k prefix.Key, old, now holding) {
	wasHeld, isHeld := old.isHeld(), now.isHeld()
	x.held.put(k, w.id, wasHeld, isHeld)
	x.notEnd.put(k, w.id, old.isNotEnd(), now.isNotEnd())
	x.unverified.put(k, w.id, old.isUnverified(), now.isUnverified())
	switch {
	case isHeld:
		w.keys[k] = now
		if !wasHeld {
			x.countPoint(now.depth, 1)
		}
	case wasHeld:
		delete(w.keys, k)
		x.countPoint(old.depth, -1)
	}
	x.markPresent(w)
}

func (x *Index) markPresent(w *worker) {
	word, bit := int(w.id/64), uint64(1)<<(w.id%64)
	for word >= len(x.present) {
		x.present = append(x.present, 0)
	}
	if len(w.keys) > 0 {
		x.present[word] |= bit
	} else {
		x.present[word] &^= bit
	}
}

// countPoint counts a known end and marks its place while there is one.
func (x *Index) countPoint(depth uint32, by int32) {
	chunk, offset := int(depth/prefix.ChunkTokens), depth%prefix.ChunkTokens
	if offset == 0 {
		return
	}
	for chunk >= len(x.points) {
		x.points = append(x.points, chunkPoints{})
	}
	n := x.counts[depth] + uint32(by)
	if n == 0 {
		delete(x.counts, depth)
		x.points[chunk][offset/64] &^= 1 << (offset % 64)
		return
	}
	x.counts[depth] = n
	x.points[chunk][offset/64] |= 1 << (offset % 64)
}

// Keys is the number of different keys listed.
func (x *Index) Keys() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.held.keys
}

// WorkerKeys is the number of keys listed for a worker.
func (x *Index) WorkerKeys(w WorkerID) int {
	x.writer.Lock()
	defer x.writer.Unlock()
	if wk := x.workers[w]; wk != nil {
		return len(wk.keys)
	}
	return 0
}

// Holds says whether a key is listed for a worker, predictions included.
func (x *Index) Holds(w WorkerID, k prefix.Key) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.held.contains(k, w)
}
