package prefixindex

import (
	"fmt"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// listedKey is a prefix of a path; its parent is an earlier one of the path.
type listedKey struct {
	key   summary.IndexKey
	depth uint32
}

// path names the prefixes of one prompt, in ascending depth.
type path []listedKey

// pathOf chains keys, which must ascend in depth. What lies behind a missing
// checkpoint cannot be found by a search and is left out.
func pathOf(keys []prefix.Key, depths []uint32) path {
	out := make(path, 0, len(keys))
	var last listedKey // the latest checkpoint
	for i, k := range keys {
		d := depths[i]
		switch {
		case k == 0 || d > summary.MaxDepthTokens || len(out) > 0 && d <= out[len(out)-1].depth:
			continue
		case d%prefix.ChunkTokens != 0 && d-d%prefix.ChunkTokens == last.depth:
			out = append(out, listedKey{summary.PointKey(last.key, d, k), d})
		case d%prefix.ChunkTokens == 0 && d == last.depth+prefix.ChunkTokens:
			last = listedKey{summary.CheckpointKey(last.key, d, k), d}
			out = append(out, last)
		}
	}
	return out
}

// name is the i-th prefix with its parent.
func (p path) name(i int) name {
	n := name{key: p[i].key, depth: p[i].depth}
	up := (n.depth - 1) / prefix.ChunkTokens * prefix.ChunkTokens
	for i--; i >= 0 && p[i].depth >= up; i-- {
		if p[i].depth == up {
			n.parent = p[i].key
		}
	}
	return n
}

// AddPredicted lists keys[i], depths[i] tokens deep, for a worker that will
// hold them once the request of a claim is prefilled there. Depths must ascend;
// what lies behind a missing checkpoint is left out. A second call for the same
// claim replaces the first. keys and depths must be equally long.
func (x *Index) AddPredicted(id WorkerID, claim uint64, keys []prefix.Key, depths []uint32) {
	if len(keys) != len(depths) {
		panic(fmt.Sprintf("prefixindex: %d keys with %d depths", len(keys), len(depths)))
	}
	p := pathOf(keys, depths)
	x.writer.Lock()
	defer x.writer.Unlock()
	w := x.worker(id)
	old := w.claims[claim]
	if w.claims == nil {
		w.claims = map[uint64]path{}
	}
	w.claims[claim] = p
	x.predictAll(w, p)
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

func (x *Index) predictAll(w *worker, p path) {
	for i := range p {
		n := p.name(i)
		x.predict(w, &n)
	}
	x.retain(w, p)
}

func (x *Index) unpredictAll(w *worker, p path) {
	x.retain(w, p)
	for i := len(p) - 1; i >= 0; i-- {
		n := p.name(i)
		x.unpredict(w, &n)
	}
}

// predict counts a prediction of a key.
func (x *Index) predict(w *worker, n *name) {
	at := x.spot(n)
	was, ok := x.detail(w, at)
	if !ok && x.held.has(at, w.slot) {
		was = ordinary
	}
	is := was
	is.predicted = min(is.predicted+1, maxCount)
	x.change(w, n, was, is)
}

// unpredict takes a prediction back.
func (x *Index) unpredict(w *worker, n *name) {
	was, ok := x.detail(w, x.spot(n))
	if !ok || was.predicted == 0 {
		return
	}
	is := was
	is.predicted--
	x.change(w, n, was, is)
}
