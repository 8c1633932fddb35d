package summary

import (
	"fmt"
	"slices"
	"sync"

	"waypost/gossip/prefix"
)

// Operations of a delta: the low two bits of a tag, whose other bits say which
// run, by how far its number is from that of the operation before, 0 at first. A
// TRIM by nothing escapes to further operations.
const (
	opExtend = 0
	opFork   = 1
	opTrim   = 2
	opDelete = 3

	opUsable = 1
	opTier   = 2
)

// changeKind is a call to an IndexSink.
type changeKind uint8

const (
	addCheckpoint changeKind = iota
	addPoint
	removeCheckpoint
	removePoint
	setBranch
	setExtent
)

// change is one call to an IndexSink that waits for its frame to be whole.
type change struct {
	mark
	kind   changeKind
	extent Extent
}

// editor applies operations to a tree. It collects what they change for a sink,
// if one is to be told.
type editor struct {
	t       *tree
	at      place
	record  bool
	changes []change
	number  uint32 // of the latest fork
	last    uint32 // run of the operation before
	work    int    // runs and words looked at
	ops     uint64 // applied
	asked   uint32 // keeps the loads of tree.ask from being left out

	words []uint16
	pts   []point
	scan  []mark

	undoable bool
	journal  journal
}

// editors lends editors, so that a thousand decoders need not keep the room.
var editors = sync.Pool{New: func() any { return new(editor) }}

func newEditor(t *tree, at place, record bool) *editor {
	e := editors.Get().(*editor)
	e.t, e.at, e.record, e.work, e.ops, e.last, e.changes = t, at, record, 0, 0, 0, e.changes[:0]
	return e
}

func (e *editor) release() {
	if e.undoable {
		e.journal.end()
	}
	e.t, e.undoable = nil, false
	editors.Put(e)
}

// canUndo makes all that follows undoable.
func (e *editor) canUndo() {
	e.undoable = true
	e.journal.begin(e.t)
}

func (e *editor) undo() { e.journal.undo(e.t) }

// keep must be called before a run is changed or begun.
func (e *editor) keep(n uint32) {
	if e.undoable {
		e.journal.keep(e.t, n)
	}
}

// zigzag writes small numbers of either sign as small ones without.
func zigzag(v int64) uint64 { return uint64(v<<1 ^ v>>63) }

func unzigzag(v uint32) int64 { return int64(v>>1) ^ -int64(v&1) }

// apply applies a sequence of operations.
func (e *editor) apply(r *reader) error {
	for len(r.b) > 0 && r.err == nil {
		e.step(r)
		e.ops++
	}
	return r.err
}

// maxWork bounds what one frame may cost, in runs and words looked at: about
// 20 ms. The largest honest caches told at once need a fifth.
const maxWork = 1 << 24

// toil counts what the next operation on a run may cost.
func (e *editor) toil(r *reader, on *run) {
	if e.work += int(on.words()) + 1; e.work > maxWork {
		r.fail("frame", "too much to do for one frame")
	}
}

// step applies one operation.
func (e *editor) step(r *reader) {
	tag := r.bounded("tag", 2*MaxRuns<<2|3)
	n := uint32(int64(e.last) + unzigzag(tag>>2))
	e.last = n
	if op := tag & 3; n == 0 && op == opFork {
		e.fork(r, 0)
		return
	}
	if !e.t.has(n) {
		r.fail("tag", fmt.Sprintf("there is no run %d", n))
		return
	}
	if e.toil(r, &e.t.runs[n]); r.err != nil {
		return
	}
	e.keep(n)
	switch tag & 3 {
	case opExtend:
		e.extend(r, n)
	case opFork:
		e.fork(r, n)
	case opTrim:
		if code := r.bounded("length", MaxDepthTokens<<1|1); code != 0 {
			e.trim(r, n, lengthOf(code, r, "length"))
		} else {
			e.further(r, n)
		}
	case opDelete:
		e.delete(r, n)
	}
}

func (e *editor) further(r *reader, n uint32) {
	l := e.t.limitOf(n)
	switch op := r.uint8("operation"); op {
	case opUsable:
		l.usable = r.usable(&e.t.runs[n])
	case opTier:
		l.tier = r.tier()
	default:
		r.fail("operation", fmt.Sprintf("%d is none of usable (1) and tier (2)", op))
	}
	if r.err == nil {
		e.limit(n, l)
	}
}

// limit replaces the limit of a run.
func (e *editor) limit(n uint32, l limit) {
	run := &e.t.runs[n]
	if e.record {
		e.scan = e.t.marks(run, run.start(), e.scan[:0])
		for _, m := range e.scan {
			if now := l.extent(m.depth); now != e.t.extent(n, m.depth) {
				e.changes = append(e.changes, change{mark: m, kind: setExtent, extent: now})
			}
		}
	}
	e.t.setLimit(n, l)
}

// add counts and tells a new key of a run.
func (e *editor) add(n uint32, m mark) {
	e.t.digest += m.key.mix()
	e.t.keys++
	if !e.record {
		return
	}
	kind := addPoint
	if isCheckpoint(m.depth) {
		kind = addCheckpoint
	}
	e.changes = append(e.changes, change{mark: m, kind: kind})
	if x := e.t.extent(n, m.depth); x != WholeExtent(m.depth) {
		e.changes = append(e.changes, change{mark: m, kind: setExtent, extent: x})
	}
}

func (e *editor) remove(m mark) {
	e.t.digest -= m.key.mix()
	e.t.keys--
	if !e.record {
		return
	}
	kind := removePoint
	if isCheckpoint(m.depth) {
		kind = removeCheckpoint
	}
	e.changes = append(e.changes, change{mark: m, kind: kind})
}

// extend reads EXT: a length, the fingerprints of the checkpoints passed, and
// the one of the new end unless that is a checkpoint.
func (e *editor) extend(r *reader, n uint32) {
	run := &e.t.runs[n]
	by := r.length("length")
	if by == 0 || by > MaxDepthTokens-run.end() {
		r.fail("length", "an extension by nothing or beyond the deepest prefix")
		return
	}
	e.grow(r, n, run.end()+by)
}

func (e *editor) grow(r *reader, n, end uint32) {
	run := &e.t.runs[n]
	old := run.words()
	w := append(e.words[:0], e.t.words[run.at:run.at+run.checkpointWords()]...)
	pts := e.t.wordsOf(run)[run.checkpointWords():]
	before := e.t.keyAt(run, run.end())
	added := e.scan[:0]
	for d := nextCheckpoint(run.end()); d <= end && r.err == nil; d += prefix.ChunkTokens {
		fp := r.fingerprint(checkpointBytes(d), e.at)
		w = appendCheckpoint(w, d, fp)
		k := chain(before, d, fp)
		added = append(added, mark{key: k, before: before, depth: d})
		before = k
	}
	if !isCheckpoint(end) && run.points() == maxPoints {
		e.removePoint(run, readPoint(pts))
		pts = pts[pointWords:]
		run.startPoints--
	}
	w = append(w, pts...)
	if !isCheckpoint(end) {
		p := point{depth: end, fingerprint: r.fingerprint(pointBytes(end), e.at)}
		w = appendPoint(w, p)
		added = append(added, mark{key: chain(before, end, p.fingerprint), before: before, depth: end})
		run.startPoints++
	}
	e.words, e.scan = w, added
	if r.err != nil {
		return
	}
	run.setEnd(end)
	e.t.store(run, w, old)
	for _, m := range added {
		e.add(n, m)
	}
	e.bound(r)
}

// removePoint counts and tells that a point of a run is gone.
func (e *editor) removePoint(run *run, p point) {
	k := e.t.keyAt(run, p.depth)
	e.remove(mark{key: chain(k, p.depth, p.fingerprint), before: k, depth: p.depth, branch: p.branch})
}

// bound refuses a state that no honest agent tells.
func (e *editor) bound(r *reader) {
	if e.t.live > MaxRuns || e.t.keys > MaxKeys {
		r.fail("state", fmt.Sprintf("more than %d runs or %d keys", MaxRuns, MaxKeys))
	}
}

// fork reads FORK: unless the parent is the root, how far before the parent's
// end the new run hangs and, unless that depth has a name already, its
// fingerprint; then as EXT. The run gets the smallest free number.
func (e *editor) fork(r *reader, parent uint32) {
	var start uint32
	var base IndexKey
	if parent != 0 {
		p := &e.t.runs[parent]
		back := r.length("attach")
		if back >= p.end()-p.start() {
			r.fail("attach", "not within the parent")
			return
		}
		start = p.end() - back
		e.branch(r, parent, start)
		if r.err != nil {
			return
		}
		p = &e.t.runs[parent]
		base = e.t.keyAt(p, start)
		p.children++
	}
	by := r.length("length")
	if by == 0 || by > MaxDepthTokens-start {
		r.fail("length", "an empty run or one beyond the deepest prefix")
		return
	}
	n := e.t.take()
	e.keep(n)
	e.number = n
	e.t.runs[n] = newRun(base, parent, start)
	e.grow(r, n, start+by)
}

// branch makes a depth of a run a known branch point.
func (e *editor) branch(r *reader, n, depth uint32) {
	if isCheckpoint(depth) {
		return
	}
	run := &e.t.runs[n]
	e.pts = e.t.points(run, e.pts[:0])
	i, known := slices.BinarySearchFunc(e.pts, depth, func(p point, d uint32) int { return int(p.depth) - int(d) })
	before := e.t.keyAt(run, depth)
	if known {
		if p := &e.pts[i]; !p.branch {
			p.branch = true
			e.rewrite(n, run.words())
			if e.record {
				m := mark{key: chain(before, depth, p.fingerprint), before: before, depth: depth, branch: true}
				e.changes = append(e.changes, change{mark: m, kind: setBranch})
			}
		}
		return
	}
	p := point{depth: depth, fingerprint: r.fingerprint(pointBytes(depth), e.at), branch: true}
	if r.err == nil {
		e.insert(n, i, p, before)
	}
}

// insert puts a point in its place among e.pts.
func (e *editor) insert(n uint32, i int, p point, before IndexKey) {
	run := &e.t.runs[n]
	old := run.words()
	if run.points() == maxPoints {
		e.removePoint(run, e.pts[0])
		run.startPoints--
		e.pts = slices.Delete(e.pts, 0, 1)
		i = max(i, 1) - 1
	}
	e.pts = slices.Insert(e.pts, i, p)
	run.startPoints++
	e.rewrite(n, old)
	e.add(n, mark{key: chain(before, p.depth, p.fingerprint), before: before, depth: p.depth, branch: p.branch})
}

// rewrite stores e.pts as the points of a run that had so many words.
func (e *editor) rewrite(n, old uint32) {
	run := &e.t.runs[n]
	w := append(e.words[:0], e.t.words[run.at:run.at+run.checkpointWords()]...)
	for _, p := range e.pts {
		w = appendPoint(w, p)
	}
	e.words = w
	e.t.store(run, w, old)
}

// trim reads TRIM: a length and, unless the new end has a name already, its
// fingerprint.
func (e *editor) trim(r *reader, n, by uint32) {
	run := &e.t.runs[n]
	if by >= run.end()-run.start() {
		r.fail("length", "a trim of the whole run")
		return
	}
	end := run.end() - by
	if run.children > 0 && e.hasChildBeyond(n, end) {
		r.fail("length", "a trim of what a run hangs on")
		return
	}
	e.scan = e.t.marks(run, end, e.scan[:0])
	for _, m := range slices.Backward(e.scan) {
		e.remove(m)
	}
	e.pts = e.t.points(run, e.pts[:0])
	old := run.words()
	for len(e.pts) > 0 && e.pts[len(e.pts)-1].depth > end {
		run.startPoints--
		e.pts = e.pts[:len(e.pts)-1]
	}
	run.setEnd(end)
	e.rewrite(n, old)
	if last := len(e.pts) - 1; isCheckpoint(end) || last >= 0 && e.pts[last].depth == end {
		return
	}
	p := point{depth: end, fingerprint: r.fingerprint(pointBytes(end), e.at)}
	if r.err == nil {
		e.insert(n, len(e.pts), p, e.t.keyAt(run, end))
	}
}

// hasChildBeyond says whether a run hangs on another one behind a depth.
func (e *editor) hasChildBeyond(parent, depth uint32) bool {
	e.work += len(e.t.runs)
	for i := range e.t.runs {
		if r := &e.t.runs[i]; uint32(r.parent) == parent && r.start() > depth {
			return true
		}
	}
	return false
}

// delete is DEL. Nothing may hang on the run.
func (e *editor) delete(r *reader, n uint32) {
	run := &e.t.runs[n]
	if run.children > 0 {
		r.fail("tag", fmt.Sprintf("deletes run %d, on which others hang", n))
		return
	}
	e.scan = e.t.marks(run, run.start(), e.scan[:0])
	for _, m := range slices.Backward(e.scan) {
		e.remove(m)
	}
	e.keep(uint32(run.parent))
	e.t.give(n)
}

// tell calls a sink with what was recorded.
func (e *editor) tell(to IndexSink, reset bool) {
	if len(e.changes) == 0 && !reset {
		return
	}
	to.Begin()
	if reset {
		to.Reset()
	}
	for i := range e.changes {
		c := &e.changes[i]
		switch c.kind {
		case addCheckpoint:
			to.AddCheckpoint(c.key, c.before, c.depth)
		case addPoint:
			to.AddPoint(c.key, c.before, c.depth, c.branch)
		case removeCheckpoint:
			to.RemoveCheckpoint(c.key, c.before, c.depth)
		case removePoint:
			to.RemovePoint(c.key, c.before, c.depth, c.branch)
		case setBranch:
			to.SetBranch(c.key, c.before, c.depth)
		case setExtent:
			to.SetExtent(c.key, c.before, c.depth, c.extent)
		}
	}
	to.End()
}
