package prefixindex

import (
	"fmt"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// path names the prefixes of one prompt, in ascending depth.
type path []name

// pathOf chains keys, which must ascend in depth, to the checkpoint after, the
// last one before them. What lies behind a missing checkpoint cannot be found by
// a search and is left out.
func pathOf(after summary.IndexKey, keys []prefix.Key, depths []uint32) path {
	out := make(path, 0, len(keys))
	var last name // the latest checkpoint
	if len(depths) > 0 && depths[0] > prefix.ChunkTokens && after != 0 {
		last = name{key: after, depth: (depths[0] - 1) / prefix.ChunkTokens * prefix.ChunkTokens}
	}
	for i, k := range keys {
		d := depths[i]
		switch {
		case k == 0 || d > summary.MaxDepthTokens || len(out) > 0 && d <= out[len(out)-1].depth:
			continue
		case d%prefix.ChunkTokens != 0 && d-d%prefix.ChunkTokens == last.depth:
			out = append(out, name{key: summary.PointKey(last.key, d, k), parent: last.key, depth: d})
		case d%prefix.ChunkTokens == 0 && d == last.depth+prefix.ChunkTokens:
			last = name{key: summary.CheckpointKey(last.key, d, k), parent: last.key, depth: d}
			out = append(out, last)
		}
	}
	return out
}

// base is the checkpoint that a path hangs on; after if it is empty.
func (p path) base(after summary.IndexKey) summary.IndexKey {
	if len(p) > 0 {
		return p[0].parent
	}
	return after
}

// AddPredicted lists keys[i], depths[i] tokens deep, for a worker that will
// hold them once the request of a claim is prefilled there. They hang on the
// checkpoint with the index key after, the last one before them; 0: they begin
// before the first. Depths must ascend; what lies behind a missing checkpoint is
// left out. A second call for the same
// claim replaces the first. keys and depths must be equally long.
func (x *Index) AddPredicted(id WorkerID, claim uint64, after summary.IndexKey, keys []prefix.Key, depths []uint32) {
	if len(keys) != len(depths) {
		panic(fmt.Sprintf("prefixindex: %d keys with %d depths", len(keys), len(depths)))
	}
	p := pathOf(after, keys, depths)
	x.writer.Lock()
	defer x.writer.Unlock()
	w := x.worker(id)
	old := w.claims[claim]
	if w.claims == nil {
		w.claims = map[uint64]path{}
	}
	if w.claims[claim] = p; len(p) == 0 {
		delete(w.claims, claim) // nothing new, but a use of what it hangs on
	}
	x.predictAll(w, after, p)
	x.unpredictAll(w, old)
	x.sweepSome()
}

// RemovePredicted ends a claim: what it predicted is listed no longer, unless a
// stream or another claim lists it too, or the worker's predictions are
// retained.
func (x *Index) RemovePredicted(id WorkerID, claim uint64) {
	x.writer.Lock()
	defer x.writer.Unlock()
	w := x.workers[id]
	if w == nil {
		return
	}
	p := w.claims[claim]
	delete(w.claims, claim)
	x.unpredictAll(w, p)
	x.sweepSome()
}

func (x *Index) predictAll(w *worker, after summary.IndexKey, p path) {
	for i := range p {
		x.predict(w, &p[i])
	}
	x.retain(w, after, p)
}

func (x *Index) unpredictAll(w *worker, p path) {
	x.retain(w, 0, p)
	for i := len(p) - 1; i >= 0; i-- {
		x.unpredict(w, &p[i])
	}
}

// predict counts a prediction of a key.
func (x *Index) predict(w *worker, n *name) {
	var k placed
	x.place(n, &k)
	was, ok := x.detail(w, k.at)
	if !ok && x.held.has(k.at, w.slot) {
		was = ordinary
	}
	is := was
	is.predicted = min(is.predicted+1, maxCount)
	x.change(w, &k, was, is)
}

// unpredict takes a prediction back.
func (x *Index) unpredict(w *worker, n *name) {
	var k placed
	x.place(n, &k)
	was, ok := x.detail(w, k.at)
	if !ok || was.predicted == 0 {
		return
	}
	is := was
	is.predicted--
	x.change(w, &k, was, is)
}
