package summary

import (
	"encoding/binary"
	"slices"

	"waypost/gossip/prefix"
)

// bodyLimit is the length of a body beyond which changes wait for the next
// frame; one operation more always fits.
const bodyLimit = MaxFrameBytes - 128<<10

// build writes the operations of the next frame into body and applies them to
// what was told. It reports false if some changes must wait: the frame is full.
func (e *Encoder) build() (whole bool) {
	whole = e.operations()
	if e.broken {
		e.startOver()
		return false
	}
	return whole
}

func (e *Encoder) operations() (whole bool) {
	e.body, e.work, e.at, e.before = e.body[:0], 0, 0, 0
	if e.clear {
		e.clear = false
		e.stats.Clears++
		for i := range e.told {
			e.told[i].tree.reset()
		}
	}
	e.orderGone()
	for k, n := range e.gone {
		if e.full() {
			e.gone = append(e.gone[:0], e.gone[k:]...)
			return false
		}
		e.operation(e.tag(n, opDelete))
		e.stats.Deletes++
	}
	e.gone = e.gone[:0]
	list := e.dirty
	e.dirty = nil
	slices.SortFunc(list, func(a, b uint32) int { return int(e.tagged(a)) - int(e.tagged(b)) })
	for _, i := range list {
		r := &e.runs[i]
		r.flags &^= runDirty
		if r.end > r.start {
			e.tell(i, false)
		}
	}
	e.tellLimits()
	return !e.full()
}

// startOver forgets what was told and begins a new epoch. It is for a table that
// breaks the contract of Listener: the stream stays consistent in itself, and an
// agent has more to do than this.
func (e *Encoder) startOver() {
	e.broken = false
	for i := range e.told {
		e.told[i].tree.reset()
	}
	e.body, e.gone = e.body[:0], e.gone[:0]
	for i := range e.runs {
		r := &e.runs[i]
		if r.number = 0; r.end > r.start {
			r.low, r.lowBlock = r.end, r.tip
			e.touch(uint32(i))
		}
	}
	e.nextEpoch()
	e.stats.Restarts++
}

// full says that the frame takes no more: for its length, or for what it costs
// to apply.
func (e *Encoder) full() bool { return len(e.body) > bodyLimit || e.work > maxWork/2 }

// operation appends an operation and applies it to what was told, as every
// decoder will. It returns the number of the run that a FORK made.
func (e *Encoder) operation(op []byte) (number uint32) {
	for i := range e.told {
		if e.broken {
			return 0
		}
		ed := newEditor(&e.told[i].tree, place{i, len(e.told)}, false)
		ed.last = e.before
		e.broken = ed.apply(&reader{b: op}) != nil
		number = ed.number
		e.work += ed.work
		ed.release()
	}
	e.body = append(e.body, op...)
	return number
}

// tag begins an operation on a run, or one that hangs on it.
func (e *Encoder) tag(n uint32, op uint64) []byte {
	e.before, e.at = e.at, n
	return binary.AppendUvarint(nil, zigzag(int64(n)-int64(e.before))<<2|op)
}

// tagged is the number that the first operation on a run will name. Operations
// go in their order, which makes tags short.
func (e *Encoder) tagged(i uint32) uint32 {
	if r := &e.runs[i]; r.number != 0 || r.parent == 0 {
		return r.number
	}
	return e.runs[e.runs[i].parent].number
}

// orderGone sorts the runs to be deleted by number, those that hang on others
// before them. The highest goes first, since what follows begins with the lowest.
func (e *Encoder) orderGone() {
	slices.SortFunc(e.gone, func(a, b uint32) int { return int(b) - int(a) })
	t := &e.told[0].tree
	under := map[uint32][]uint32{}
	for _, n := range e.gone {
		if p := uint32(t.runs[n].parent); p != 0 {
			under[p] = append(under[p], n)
		}
	}
	if len(under) == 0 {
		return
	}
	sorted := make([]uint32, 0, len(e.gone))
	put := make(map[uint32]bool, len(e.gone))
	var before func(n uint32)
	before = func(n uint32) {
		if put[n] {
			return
		}
		put[n] = true
		for _, child := range under[n] {
			before(child)
		}
		sorted = append(sorted, n)
	}
	for _, n := range e.gone {
		before(n)
	}
	e.gone = append(e.gone[:0], sorted...)
}

// toldRun is a run as it was told.
func (e *Encoder) toldRun(r *grown) *run { return &e.told[0].tree.runs[r.number] }

// toldEnd is the depth up to which a run was told; its start if it was not.
func (e *Encoder) toldEnd(r *grown) uint32 {
	if r.number == 0 {
		return r.start
	}
	return e.toldRun(r).end()
}

// tell writes what is new about a run: TRIM, then FORK or EXT up to each known
// end. The run it hangs on goes first. forced is for a run that another one
// hangs on. What cannot be told now is looked at again for the next frame.
func (e *Encoder) tell(i uint32, forced bool) {
	r := &e.runs[i]
	if e.full() || !e.tellParent(r) {
		e.touch(i)
		return
	}
	if r.number != 0 && r.low < e.toldEnd(r) {
		e.trim(r)
	}
	r.low, r.lowBlock = r.end, r.tip
	to, block := e.target(r, forced)
	if !e.roomFor(r, to) {
		e.touch(i)
		return
	}
	for _, id := range r.pending {
		if end := e.nodes[id].end(); end > e.toldEnd(r) && end < to {
			e.extend(i, end, id)
		}
	}
	if to > e.toldEnd(r) {
		e.extend(i, to, block)
	}
	e.forget(r, to)
}

// tellParent tells what a run hangs on and reports whether that is known now.
func (e *Encoder) tellParent(r *grown) bool {
	if r.parent == 0 {
		return true
	}
	// Where it hangs must be told, and what was there before must be gone.
	p := &e.runs[r.parent]
	ready := func() bool {
		end := e.toldEnd(p)
		return p.number != 0 && end >= r.start && p.low >= end
	}
	if !ready() {
		e.tell(r.parent, true)
	}
	return ready()
}

// forget drops the ends that need not wait any more: all up to a depth was told.
func (e *Encoder) forget(r *grown, to uint32) {
	left := 0
	for left < len(r.pending) && e.nodes[r.pending[left]].end() <= to {
		left++
	}
	r.pending = append(r.pending[:0], r.pending[left:]...)
}

// target is the depth up to which a run is to be told, and the block that ends
// there; 0 if that is a checkpoint, which may lie inside one.
func (e *Encoder) target(r *grown, forced bool) (to, block uint32) {
	to, block = r.end, r.tip
	if r.held != 0 {
		to, block = r.solid, r.solidAt
	}
	r.flags &^= runCut
	if e.budget.level == 0 || forced || r.has(runMatched) {
		return to, block
	}
	if n := to/prefix.ChunkTokens - r.start/prefix.ChunkTokens; n >= minCut {
		r.flags |= runCut
		return (r.start/prefix.ChunkTokens + (n+1)/2) * prefix.ChunkTokens, 0
	}
	return to, block
}

// minCut is the number of checkpoints from which on a run is told in part when
// the budget is exceeded.
const minCut = 4

// roomFor says whether a run may be told up to a depth without exceeding what a
// decoder takes.
func (e *Encoder) roomFor(r *grown, to uint32) bool {
	t := &e.told[0].tree
	more := int(to/prefix.ChunkTokens) + len(r.pending) + 2
	return (r.number != 0 || t.live < MaxRuns) && t.keys+more <= MaxKeys
}

// trim writes TRIM.
func (e *Encoder) trim(r *grown) {
	told := e.toldRun(r)
	b := e.tag(r.number, opTrim)
	b = appendLength(b, told.end()-r.low)
	if !e.told[0].tree.knows(told, r.low) {
		b = e.appendMark(b, r.domain, e.blocks.PointOf(r.lowBlock), r.low)
	}
	e.operation(b)
	e.stats.Trims++
}

// extend writes EXT, or FORK for a run that was not told yet.
func (e *Encoder) extend(i, to, block uint32) {
	r := &e.runs[i]
	from := e.toldEnd(r)
	var b []byte
	if r.number != 0 {
		e.stats.Extends++
		b = e.tag(r.number, opExtend)
	} else {
		e.stats.Forks++
		b = e.attach(r)
	}
	b = appendLength(b, to-from)
	for d := nextCheckpoint(from); d <= to; d += prefix.ChunkTokens {
		b = e.appendMark(b, r.domain, r.chains[d/prefix.ChunkTokens-r.start/prefix.ChunkTokens-1], d)
	}
	if !isCheckpoint(to) {
		b = e.appendMark(b, r.domain, e.blocks.PointOf(block), to)
	}
	n := e.operation(b)
	if r.number == 0 {
		r.number = n
	}
	if r.has(runOdd) || r.unusable+r.lower > 0 || r.parent != 0 && e.told[0].tree.limitOn(e.runs[r.parent].number) != nil {
		e.touchLimits(i)
	}
}

// attach writes the tag of a FORK and where the run hangs.
func (e *Encoder) attach(r *grown) []byte {
	if r.parent == 0 {
		return e.tag(0, opFork)
	}
	p := &e.runs[r.parent]
	told := e.toldRun(p)
	b := e.tag(p.number, opFork)
	b = appendLength(b, told.end()-r.start)
	if !e.told[0].tree.knows(told, r.start) {
		b = e.appendMark(b, r.domain, e.blocks.PointOf(r.attach), r.start)
	}
	return b
}

// appendMark writes the fingerprints of a depth, one per cluster key.
func (e *Encoder) appendMark(b []byte, domain uint16, c prefix.Chain, depth uint32) []byte {
	for i := range e.told {
		k := e.name(&e.told[i], domain, c, depth)
		b = appendFingerprint(b, fingerprintOf(k, depth), markBytes(depth))
	}
	return b
}

// name is the prefix key of a depth.
func (e *Encoder) name(t *told, domain uint16, c prefix.Chain, depth uint32) prefix.Key {
	if e.keyed {
		return prefix.Key(c)
	}
	return e.keyer(t, domain).Key(c, depth)
}

func (e *Encoder) keyer(t *told, domain uint16) *prefix.Keyer {
	for int(domain) >= len(t.keyers) {
		t.keyers = append(t.keyers, domainKeyer{})
	}
	k := &t.keyers[domain]
	if g := e.domains[domain].generation; k.keyer == nil || k.generation != g {
		*k = domainKeyer{prefix.NewKeyer(t.key, e.blocks.DomainOf(domain)), g}
	}
	return k.keyer
}

// tellLimits writes USABLE and TIER for runs whose limits are not as told. What
// becomes of a run can reach those behind it.
func (e *Encoder) tellLimits() {
	var later []uint32
	for k := 0; k < len(e.limits); k++ {
		i := e.limits[k]
		r := &e.runs[i]
		r.flags &^= runLimits
		switch {
		case r.end == r.start:
		case r.number == 0 || e.full():
			later = append(later, i)
		case e.tellLimit(r):
			for c := r.first; c != 0; c = e.runs[c].next {
				e.touchLimits(c)
			}
		}
	}
	e.limits = e.limits[:0]
	for _, i := range later {
		e.touchLimits(i)
	}
}

// tellLimit reports whether the limit of a run has changed.
func (e *Encoder) tellLimit(r *grown) (changed bool) {
	told := e.told[0].tree.limitOf(r.number)
	head := func(op byte) []byte { return append(e.tag(r.number, opTrim), 0, op) }
	if u := e.usableOf(r); !u.equal(&told.usable) {
		e.operation(appendUsable(head(opUsable), &u, r.start))
		e.stats.Usables++
		changed = true
	}
	if t := e.tierOf(r); t != told.tier {
		e.operation(appendTier(head(opTier), t))
		e.stats.Tiers++
		changed = true
	}
	return changed
}

// blockEnd is a block of a run, for usableOf.
type blockEnd struct {
	from, to uint32
	usable   bool
}

// usableOf is where a match may end within what was told of a run.
func (e *Encoder) usableOf(r *grown) (u usable) {
	if r.unusable == 0 && !r.has(runOdd) {
		return u
	}
	told := e.toldEnd(r)
	var ends []blockEnd // deep first
	for id := r.tip; id != r.attach; id = e.nodes[id].parent {
		n := &e.nodes[id]
		from := r.start
		if n.parent != r.attach {
			from = e.nodes[n.parent].end()
		}
		if end := n.end(); end <= told {
			ends = append(ends, blockEnd{from, end, n.usable()})
		}
	}
	u.floor = e.usableBefore(r.attach)
	u.stride = max(1, told-r.start)
	if len(ends) > 0 {
		first := ends[len(ends)-1]
		u.stride = first.to - first.from
	}
	u.spans = spansOf(ends, u.stride)
	if n := len(u.spans); n > 0 && r.unusable == 0 {
		u.open = true
		u.spans[n-1].to = u.spans[n-1].from
	}
	if n := len(u.spans); n > maxSpans {
		u.spans = u.spans[n-maxSpans:]
	}
	return u
}

// spansOf joins usable ends, given deep first, that lie a stride apart.
func spansOf(ends []blockEnd, stride uint32) (spans []span) {
	for i := len(ends) - 1; i >= 0; i-- {
		b := ends[i]
		if !b.usable {
			continue
		}
		if n := len(spans); n > 0 && spans[n-1].to == b.from && b.to-b.from == stride {
			spans[n-1].to = b.to
			continue
		}
		spans = append(spans, span{b.to, b.to})
	}
	return spans
}

// usableBefore is the deepest usable end at or before the end of a block.
func (e *Encoder) usableBefore(id uint32) uint32 {
	for ; id != 0; id = e.nodes[id].parent {
		if n := &e.nodes[id]; n.usable() {
			return n.end()
		}
	}
	return 0
}

// tierOf is how far memory reaches within what was told of a run.
func (e *Encoder) tierOf(r *grown) tier {
	t := noTier
	if r.parent != 0 {
		p := e.told[0].tree.limitOf(e.runs[r.parent].number).tier
		if p.gpu < r.start {
			t.gpu = p.gpu
		}
		if p.host < r.start {
			t.host = p.host
		}
	}
	if r.lower == 0 {
		return t
	}
	told := e.toldEnd(r)
	for id := r.tip; id != r.attach; id = e.nodes[id].parent {
		n := &e.nodes[id]
		if n.end() > told || n.tier() == TierGPU {
			continue
		}
		from := r.start
		if n.parent != r.attach {
			from = e.nodes[n.parent].end()
		}
		t.gpu = min(t.gpu, from)
		if n.tier() == TierDisk {
			t.host = min(t.host, from)
		}
	}
	return t
}
