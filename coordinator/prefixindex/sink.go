package prefixindex

import (
	"sync/atomic"

	"waypost/gossip/summary"
)

// WorkerSink returns what the decoder of a worker's stream writes to. Calls
// between Begin and End are applied at End; others at once. Sinks of one worker
// write to the same set, and Reset empties it but for what claims predict.
// After Drop a sink writes nothing more.
func (x *Index) WorkerSink(id WorkerID) *Sink {
	x.writer.Lock()
	defer x.writer.Unlock()
	return &Sink{x: x, w: x.worker(id)}
}

// Sink takes in one worker's stream; it is a summary.IndexSink.
type Sink struct {
	x     *Index
	w     *worker
	frame *calls // between Begin and End
}

var _ summary.IndexSink = (*Sink)(nil)

// op is one call.
type op struct {
	name
	kind   opKind
	extent summary.Extent
}

type opKind uint8

const (
	opAdd opKind = iota
	opRemove
	opExtent
	opReset
)

// batchOps is the number of calls applied under one hold of the writer lock; those
// of a frame that clears the cache are applied under one, however many they are.
const batchOps = 256

// callsAhead is the number of calls whose memory is asked for at once.
const callsAhead = 64

// Begin implements summary.IndexSink.
func (s *Sink) Begin() {
	if s.frame == nil {
		s.frame = s.x.buffers.Get().(*calls)
	}
}

// End implements summary.IndexSink.
func (s *Sink) End() {
	if s.frame == nil {
		return
	}
	ops := s.frame.ops
	s.frame.arrange()
	for order := s.frame.order; len(order) > 0; {
		n := min(batchOps, len(order))
		if s.frame.resets {
			n = len(order) // shown at once
		}
		for n < len(order) && ops[order[n]].kind == opExtent { // belongs to the call before it
			n++
		}
		s.x.apply(s.w, ops, order[:n])
		order = order[n:]
	}
	if cap(ops) <= 64*batchOps { // a large snapshot's are not kept
		s.frame.ops, s.frame.resets = ops[:0], false
		s.x.buffers.Put(s.frame)
	}
	s.frame = nil
}

// AddCheckpoint implements summary.IndexSink.
func (s *Sink) AddCheckpoint(key, parent summary.IndexKey, depthTokens uint32) {
	s.do(op{kind: opAdd, name: name{key, parent, depthTokens}})
}

// AddPoint implements summary.IndexSink.
func (s *Sink) AddPoint(key, checkpoint summary.IndexKey, depthTokens uint32, _ bool) {
	s.do(op{kind: opAdd, name: name{key, checkpoint, depthTokens}})
}

// RemoveCheckpoint implements summary.IndexSink.
func (s *Sink) RemoveCheckpoint(key, parent summary.IndexKey, depthTokens uint32) {
	s.do(op{kind: opRemove, name: name{key, parent, depthTokens}})
}

// RemovePoint implements summary.IndexSink.
func (s *Sink) RemovePoint(key, checkpoint summary.IndexKey, depthTokens uint32, _ bool) {
	s.do(op{kind: opRemove, name: name{key, checkpoint, depthTokens}})
}

// SetBranch implements summary.IndexSink. The index goes by how often points are
// listed.
func (s *Sink) SetBranch(summary.IndexKey, summary.IndexKey, uint32) {}

// SetExtent implements summary.IndexSink.
func (s *Sink) SetExtent(key, checkpoint summary.IndexKey, depthTokens uint32, e summary.Extent) {
	s.do(op{kind: opExtent, name: name{key, checkpoint, depthTokens}, extent: e})
}

// Reset implements summary.IndexSink.
func (s *Sink) Reset() {
	if s.frame == nil {
		s.Begin()
		defer s.End()
	}
	s.frame.resets = true
	s.do(op{kind: opReset})
}

func (s *Sink) do(o op) {
	if s.frame == nil {
		s.Begin()
		s.do(o)
		s.End()
		return
	}
	s.frame.ops = append(s.frame.ops, o)
}

// apply makes changes in some order.
func (x *Index) apply(w *worker, ops []op, order []uint32) {
	x.writer.Lock()
	defer x.writer.Unlock()
	if w.gone {
		return
	}
	for len(order) > 0 {
		x.lookAhead(ops, order)
		n := 0
		for most := min(callsAhead, len(order)); n < most; n++ {
			o, k := &ops[order[n]], &x.near[n]
			var e *summary.Extent
			if n+1 < len(order) && o.kind == opAdd {
				if next := &ops[order[n+1]]; next.kind == opExtent && next.key == o.key {
					e = &next.extent
					n++
				}
			}
			x.applyOne(w, o, k, e)
		}
		order = order[n:]
	}
	x.hold(nil)
	x.reveal(w)
	x.sweepSome()
}

// applyOne applies a call. If it adds a key, e is the extent that is set with it;
// nil: none.
func (x *Index) applyOne(w *worker, o *op, k *placed, e *summary.Extent) {
	switch {
	case o.kind == opReset:
		x.hold(nil)
		x.clear(w)
		return
	case !o.isValid():
		return
	}
	x.hold(&x.held.dir[k.at.segment])
	switch o.kind {
	case opAdd:
		x.list(w, k, e)
	case opRemove:
		x.unlist(w, k)
	case opExtent:
		x.setExtent(w, k, o.extent)
	}
}

// lookAhead notes where the next calls belong, and asks for the memory there
// before it is used, so that waiting for one is waiting for all: that is most of
// what changes take. Where to look is computed first: the processor has more loads
// under way the less stands between them.
func (x *Index) lookAhead(ops []op, order []uint32) {
	var at [3 * callsAhead]*uint64
	n := 0
	near := x.near[:min(callsAhead, len(order))]
	for i := range near {
		k := &near[i]
		x.place(&ops[order[i]].name, k)
		v := x.held.dir[k.at.segment].view()
		if v.slots == 0 {
			continue
		}
		at[n], at[n+1] = v.home(k.at.tag) // the second is needed where the first is full
		n += 2
		if k.isPoint() && k.parent != 0 {
			at[n], _ = v.home(k.up.tag)
			n++
		}
	}
	sum := x.asked
	for _, word := range at[:n] {
		sum += atomic.LoadUint64(word)
	}
	x.asked = sum
}

// hold makes all changes of a segment visible at once, until another one is
// held, or none.
func (x *Index) hold(s *segment) {
	if x.holding == s {
		return
	}
	if x.holding != nil {
		x.holding.letGo()
	}
	if x.holding = s; s != nil {
		s.hold()
	}
}

// clear takes back all that a worker's stream listed, and what is retained: the
// cache is empty. What open claims predict is yet to be computed; it is listed
// under a new slot, to be shown instead of the old one.
func (x *Index) clear(w *worker) {
	if w.slot != w.shown { // nobody has seen it
		x.retireSlot(w.slot)
	}
	w.slot = x.reserveSlot(w.id)
	w.keys, w.details = 0, nil
	x.slots.setUnverified(w.slot, w.unverified)
	for _, p := range w.claims {
		for i := range p {
			x.predict(w, &p[i])
		}
	}
	if w.retained != nil {
		w.retained = newRetained(w.retained.capacity)
	}
}

// reveal shows what was listed since a clear.
func (x *Index) reveal(w *worker) {
	if w.slot == w.shown {
		return
	}
	x.slots.show(w.slot, w.shown)
	x.retireSlot(w.shown)
	w.shown = w.slot
}
