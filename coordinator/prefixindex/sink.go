package prefixindex

import (
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

// batchOps is the number of calls applied under one hold of the writer lock.
const batchOps = 256

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
	for ops := s.frame.arrange(); len(ops) > 0; {
		n := min(batchOps, len(ops))
		for n < len(ops) && ops[n].kind == opExtent { // belongs to the call before it
			n++
		}
		s.x.apply(s.w, ops[:n])
		ops = ops[n:]
	}
	if cap(s.frame.ops) <= 64*batchOps { // a large snapshot's are not kept
		s.frame.ops = s.frame.ops[:0]
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
func (s *Sink) Reset() { s.do(op{kind: opReset}) }

func (s *Sink) do(o op) {
	if s.frame == nil {
		s.x.apply(s.w, []op{o})
		return
	}
	s.frame.ops = append(s.frame.ops, o)
}

// apply makes changes in order.
func (x *Index) apply(w *worker, ops []op) {
	x.writer.Lock()
	defer x.writer.Unlock()
	if w.gone {
		return
	}
	for len(ops) > 0 {
		x.lookAhead(ops)
		for n := min(aheadSpots/2, len(ops)); n > 0; {
			done := x.applyNext(w, ops)
			ops = ops[done:]
			n -= done
		}
	}
	x.hold(nil)
	x.sweepSome()
}

// lookAhead asks for the memory of the next calls.
func (x *Index) lookAhead(ops []op) {
	var last summary.IndexKey
	for i := range ops[:min(aheadSpots/2, len(ops))] {
		n := &ops[i].name
		x.ahead.add(&x.held, x.spot(n))
		if n.isPoint() && n.parent != 0 && n.parent != last {
			x.ahead.add(&x.held, x.checkpointSpot(n.parent))
			last = n.parent
		}
	}
	x.ahead.ask()
}

// applyNext applies the first of some calls, or the first two if they add a key
// and set its extent, and returns how many.
func (x *Index) applyNext(w *worker, ops []op) int {
	o := &ops[0]
	switch {
	case o.kind == opReset:
		x.hold(nil)
		x.clear(w)
		return 1
	case !o.isValid():
		return 1
	}
	x.hold(&x.held.dir[x.spot(&o.name).segment])
	switch {
	case o.kind == opRemove:
		x.unlist(w, &o.name)
	case o.kind == opExtent:
		x.setExtent(w, &o.name, o.extent)
	case len(ops) > 1 && ops[1].kind == opExtent && ops[1].key == o.key:
		x.list(w, &o.name, &ops[1].extent)
		return 2
	default:
		x.list(w, &o.name, nil)
	}
	return 1
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
// under a new slot before that is shown instead of the old one.
func (x *Index) clear(w *worker) {
	old := w.slot
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
	x.slots.show(w.slot, old)
	x.retireSlot(old)
}
