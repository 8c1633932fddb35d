package prefixindex

import (
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// retained models the cache of a worker that tells nothing of it: predictions
// outlive their claims and leave least recently used first, deep ones before
// what they build on, when they are more than the engine can hold.
type retained struct {
	capacity uint64 // tokens
	tokens   uint64
	byKey    map[summary.IndexKey]int32
	nodes    []retainedNode // nodes[0] heads the list: next is the latest used
	unused   []int32
}

type retainedNode struct {
	name
	next, prev int32
}

func newRetained(capacityTokens uint64) *retained {
	return &retained{capacity: capacityTokens, byKey: map[summary.IndexKey]int32{}, nodes: make([]retainedNode, 1)}
}

// retainedTokens is what a node adds to what is cached. An end between
// checkpoints counts from the checkpoint, so several in one chunk count more
// than they take; the older ones leave first.
func (n *name) retainedTokens() uint64 {
	if n.isPoint() {
		return uint64(n.offset())
	}
	return prefix.ChunkTokens
}

// Retain says how many tokens of KV cache a worker has whose stream does not
// tell what is in it: predictions then stay when their claim ends, up to that
// much. 0 is the ordinary case, that they end with their claim.
func (x *Index) Retain(id WorkerID, capacityTokens uint64) {
	x.writer.Lock()
	defer x.writer.Unlock()
	w := x.worker(id)
	if w.retained == nil {
		if capacityTokens == 0 {
			return
		}
		w.retained = newRetained(capacityTokens)
		for _, p := range w.claims {
			x.retain(w, 0, p)
		}
	}
	w.retained.capacity = capacityTokens
	x.evict(w)
	if capacityTokens == 0 {
		w.retained = nil
	}
}

// Shorten tells the outcome of a request: of the prompt with these keys, a
// worker whose predictions are retained had only foundTokens when the request
// came. What is retained deeper on that path is forgotten; open claims keep
// what they predict. after, keys and depths are as in AddPredicted.
func (x *Index) Shorten(id WorkerID, after summary.IndexKey, keys []prefix.Key, depths []uint32, foundTokens uint32) {
	p := pathOf(after, keys, depths)
	x.writer.Lock()
	defer x.writer.Unlock()
	w := x.workers[id]
	if w == nil || w.retained == nil {
		return
	}
	for i := len(p) - 1; i >= 0 && p[i].depth > foundTokens; i-- {
		x.release(w, p[i].key)
	}
	for at, ok := w.retained.byKey[p.base(after)]; ok && w.retained.nodes[at].depth > foundTokens; {
		n := w.retained.nodes[at].name
		x.release(w, n.key)
		at, ok = w.retained.byKey[n.parent]
	}
}

// retain makes a path, and what of the checkpoints it hangs on is retained, the
// most recently used, the deepest part least so.
func (x *Index) retain(w *worker, after summary.IndexKey, p path) {
	r := w.retained
	if r == nil {
		return
	}
	for i := len(p) - 1; i >= 0; i-- {
		at, ok := r.byKey[p[i].key]
		if !ok {
			at = r.take(p[i])
			x.predict(w, &p[i])
		} else {
			r.unlink(at)
		}
		r.link(at)
	}
	for at, ok := r.byKey[p.base(after)]; ok; at, ok = r.byKey[r.nodes[at].parent] {
		r.unlink(at)
		r.link(at)
	}
	x.evict(w)
}

// evict forgets what does not fit.
func (x *Index) evict(w *worker) {
	r := w.retained
	for r.tokens > r.capacity {
		x.release(w, r.nodes[r.nodes[0].prev].key)
	}
}

// release forgets a retained key, if it is one.
func (x *Index) release(w *worker, k summary.IndexKey) {
	r := w.retained
	at, ok := r.byKey[k]
	if !ok {
		return
	}
	n := r.nodes[at].name
	r.unlink(at)
	r.tokens -= n.retainedTokens()
	delete(r.byKey, k)
	r.unused = append(r.unused, at)
	x.unpredict(w, &n)
}

// take makes a node.
func (r *retained) take(n name) int32 {
	at := int32(len(r.nodes))
	if k := len(r.unused); k > 0 {
		at, r.unused = r.unused[k-1], r.unused[:k-1]
	} else {
		r.nodes = append(r.nodes, retainedNode{})
	}
	r.nodes[at].name = n
	r.byKey[n.key] = at
	r.tokens += n.retainedTokens()
	return at
}

func (r *retained) link(at int32) {
	n := &r.nodes[at]
	n.prev, n.next = 0, r.nodes[0].next
	r.nodes[n.next].prev = at
	r.nodes[0].next = at
}

func (r *retained) unlink(at int32) {
	n := &r.nodes[at]
	r.nodes[n.prev].next, r.nodes[n.next].prev = n.next, n.prev
}
