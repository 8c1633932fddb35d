package prefixindex

import (
	"fmt"
	"math/bits"
	"sync"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// WorkerID is a small dense number for a worker.
type WorkerID uint32

// MaxWorkers bounds worker ids.
const MaxWorkers = 1 << 14

// Options configure an [Index].
type Options struct {
	// Seed spreads keys over the table. A random one keeps a worker from
	// choosing keys that collide there; results do not depend on it.
	Seed uint64
}

// Index maps prefixes to the workers that hold them. It is safe for concurrent
// use; see [Searcher] for reading.
type Index struct {
	add, mul uint64 // of the hash

	held      table   // all workers that hold a prefix, or are predicted to
	predicted table   // those of them of which no stream says so
	partial   table   // those of them of which a stream tells an extent that is not whole
	root      segment // the known points before the first checkpoint, in its slot 0
	rootWord  uint64  // of that
	sets      sets
	points    points
	slab      slab
	full      entries
	slots     slots

	// writer is held while a change is made; it guards what follows.
	writer  sync.Mutex
	workers map[WorkerID]*worker
	sweep   sweep
	buffers sync.Pool          // *calls
	near    [callsAhead]placed // the next calls
	asked   uint64             // keeps the loads of lookAhead from being left out
	holding *segment           // see hold

	searchers sync.Pool // *Searcher
}

// name is a key with what is needed to place it.
type name struct {
	key, parent summary.IndexKey // parent: the checkpoint before it, 0: none
	depth       uint32
}

func (n *name) isPoint() bool  { return n.depth%prefix.ChunkTokens != 0 }
func (n *name) offset() uint32 { return n.depth % prefix.ChunkTokens }

// isValid reports whether a prefix of that depth can be listed.
func (n *name) isValid() bool {
	return n.key != 0 && n.depth > 0 && n.depth <= summary.MaxDepthTokens && (n.parent != 0 || n.depth <= prefix.ChunkTokens)
}

// New returns an empty index.
func New(o Options) *Index {
	x := &Index{
		add: o.Seed ^ 0x9e3779b97f4a7c15, mul: o.Seed*0xd1342543de82ef95 | 1,
		workers: map[WorkerID]*worker{},
	}
	x.mul ^= 0xbf58476d1ce4e5b8 // even, so that the sum stays odd
	x.sets.slab, x.points.slab = &x.slab, &x.slab
	for _, t := range []*table{&x.held, &x.predicted, &x.partial} {
		t.init(&x.sets, &x.points, &x.full)
	}
	x.held.begin()
	x.root.stride = 1
	x.root.resize()
	x.rootWord = x.held.block(entry{})
	x.root.put(x.rootWord)
	x.buffers.New = func() any { return new(calls) }
	x.searchers.New = func() any { return x.NewSearcher() }
	return x
}

func (x *Index) hash(k summary.IndexKey) uint64 {
	hi, lo := bits.Mul64(uint64(k)+x.add, x.mul)
	return hi ^ lo
}

// checkpointSpot is where a checkpoint belongs.
func (x *Index) checkpointSpot(k summary.IndexKey) spot {
	h := x.hash(k)
	return spot{segment: uint32(h >> (64 - segmentBits)), tag: h << segmentBits & tagMask}
}

// pointSpot is where a point belongs: in the segment of its checkpoint, so that
// each is found from the other.
func (x *Index) pointSpot(k, checkpoint summary.IndexKey) spot {
	at := x.checkpointSpot(k)
	if checkpoint != 0 {
		at.segment = x.checkpointSpot(checkpoint).segment
	}
	return at
}

func (x *Index) spot(n *name) spot {
	if n.isPoint() {
		return x.pointSpot(n.key, n.parent)
	}
	return x.checkpointSpot(n.key)
}

// placed is a key with where it belongs, and where the checkpoint before it does
// if it is a point behind one.
type placed struct {
	name
	at, up spot
}

func (x *Index) place(n *name, k *placed) {
	k.name, k.at = *n, x.checkpointSpot(n.key)
	if n.isPoint() && n.parent != 0 {
		k.up = x.checkpointSpot(n.parent)
		k.at.segment = k.up.segment
	}
}

// enlist puts a worker into the set of a prefix, sets bits of its info, and
// reports whether the worker was not in it.
func (x *Index) enlist(w *worker, k *placed, info uint32) bool {
	if k.isPoint() {
		info |= k.info()
	}
	added, info := x.held.add(k.at, w.slot, info)
	if added {
		w.keys++
		x.countPoint(k, info, true)
	}
	return added
}

// delist takes a worker out of the set of a prefix.
func (x *Index) delist(w *worker, k *placed) {
	removed, _, info := x.held.remove(k.at, w.slot)
	if !removed {
		return
	}
	w.keys--
	x.countPoint(k, info, false)
}

// unmark takes a worker out of the set of a prefix in one of the lesser tables.
func (x *Index) unmark(t *table, at spot, w *worker, info uint32) {
	if _, gone, _ := t.remove(at, w.slot); gone {
		x.held.clearInfo(at, info)
	}
}

// info is that of a point.
func (k *placed) info() uint32 {
	up := uint32(0)
	if k.parent != 0 {
		up = upTag(k.up.tag)
	}
	return infoPoint | up<<offsetBits | k.offset()
}

// countPoint counts, at the checkpoint before a point, that a worker lists it,
// or does no longer. The info of its entry says where it is.
func (x *Index) countPoint(k *placed, info uint32, listed bool) {
	if info&infoPoint == 0 || !k.isPoint() { // else two keys meet
		return
	}
	var at place
	var e entry
	if k.parent == 0 {
		at, e = x.rootPlace()
	} else if x.held.countAlone(&x.held.dir[k.up.segment], k.up.tag, info&offsetMask, listed) {
		return
	} else {
		at, e = x.held.at(k.up)
	}
	if at.i < 0 || e.info&infoPoint != 0 {
		return
	}
	at.seg.begin()
	if listed {
		e.info = x.points.add(e.info, info&offsetMask, k.at.tag)
	} else {
		e.info = x.points.remove(e.info, info&offsetMask)
	}
	x.held.set(at, e)
	at.seg.end()
}

// rootPlace is where the known points before the first checkpoint are counted.
func (x *Index) rootPlace() (place, entry) {
	return place{seg: &x.root, v: x.root.view()}, x.full.entryOf(x.rootWord)
}

// worker returns the record of a worker. The writer lock must be held.
func (x *Index) worker(id WorkerID) *worker {
	if id >= MaxWorkers {
		panic(fmt.Sprintf("prefixindex: worker id %d, ids are dense and below %d", id, MaxWorkers))
	}
	w := x.workers[id]
	if w == nil {
		w = &worker{id: id, slot: x.reserveSlot(id)}
		w.shown = w.slot
		x.slots.show(w.slot)
		x.workers[id] = w
	}
	return w
}

// Drop forgets a worker: its stream, its claims, its sinks. The id may be used
// again at once.
func (x *Index) Drop(id WorkerID) {
	x.writer.Lock()
	defer x.writer.Unlock()
	w := x.workers[id]
	if w == nil {
		return
	}
	w.gone = true
	delete(x.workers, id)
	x.retireSlot(w.slot)
	x.sweepSome()
}

// SetVerified says whether what a worker's stream lists is to be believed; it
// is until told otherwise. What an unverified stream lists is reported as such.
func (x *Index) SetVerified(id WorkerID, verified bool) {
	x.writer.Lock()
	defer x.writer.Unlock()
	w := x.worker(id)
	w.unverified = !verified
	x.slots.setUnverified(w.slot, w.unverified)
}

// Stats describes the size of an index.
type Stats struct {
	// Workers is the number of workers known, Keys that of different prefixes
	// listed, Listings that of pairs of a worker and a prefix.
	Workers, Keys, Listings int
	// Predicted is the number of prefixes listed for some worker by
	// predictions only.
	Predicted int
	// Unswept is the number of dropped workers of which traces remain.
	Unswept int
	// Bytes is the memory of the tables, without the claims.
	Bytes int
}

// Stats counts. It takes about a millisecond for a million keys.
func (x *Index) Stats() Stats {
	x.writer.Lock()
	defer x.writer.Unlock()
	st := Stats{
		Workers: len(x.workers), Keys: x.held.entries, Predicted: x.predicted.entries, Unswept: x.sweep.unswept(),
		Bytes: x.held.bytes() + x.predicted.bytes() + x.partial.bytes() + x.slab.bytes() + x.full.slab.bytes(),
	}
	for _, w := range x.workers {
		st.Listings += w.keys
		if d := x.slots.details(w.slot); d != nil {
			st.Bytes += 8 * len(d.view().words())
		}
	}
	return st
}

// WorkerKeys is the number of prefixes listed for a worker, predictions included.
func (x *Index) WorkerKeys(id WorkerID) int {
	x.writer.Lock()
	defer x.writer.Unlock()
	if w := x.workers[id]; w != nil {
		return w.keys
	}
	return 0
}

// Holds says whether a prefix is listed for a worker: by its stream, or only
// predicted. checkpoint is the key of the last checkpoint before it, 0 if there
// is none.
func (x *Index) Holds(id WorkerID, key, checkpoint summary.IndexKey, depthTokens uint32) (listed, predicted bool) {
	x.writer.Lock()
	defer x.writer.Unlock()
	w := x.workers[id]
	if w == nil {
		return false, false
	}
	at := x.spot(&name{key, checkpoint, depthTokens})
	if !x.held.has(at, w.slot) {
		return false, false
	}
	predicted = x.predicted.has(at, w.slot)
	return !predicted, predicted
}
