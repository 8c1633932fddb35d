package summary

import (
	"time"

	"waypost/gossip/prefix"
)

// forest is the tree of runs as the block table has it now. A block that
// continues the end of a run makes the run longer, any other one begins a run;
// blocks leave from the ends of runs.
type forest struct {
	blocks   Blocks
	nodes    []node  // by block id
	runs     []grown // by index; 0 stands for the root
	free     []uint32
	dirty    []uint32 // runs to look at for the next frame
	limits   []uint32 // runs whose limits may have changed
	held     []heldEnd
	gone     []uint32 // numbers of runs that ceased to be, children first
	domains  []domainUse
	attached int    // blocks attached since the last end of a store event
	clock    uint64 // counts touches of runs
	frames   uint32 // counts the times a frame was asked for
	scratch  []Checkpoint
}

// domainUse counts the runs of a domain. When there are none the table may give
// its index to another domain, so the generation rises.
type domainUse struct{ runs, generation uint32 }

// node is what is kept of an attached block. There is one per block of the
// engine's cache.
type node struct {
	run    uint32 // 0: not attached, or deeper than any named prefix
	parent uint32
	state  uint32 // end, depth in tokens; above it the tier, and nodeUsable
}

// Parts of node.state. The end is at most MaxDepthTokens.
const (
	nodeTierShift = 28
	nodeEndMask   = 1<<nodeTierShift - 1
	// nodeUsable says that the engine could end a match at the block's end.
	nodeUsable = 1 << 31
)

func (n *node) end() uint32  { return n.state & nodeEndMask }
func (n *node) usable() bool { return n.state&nodeUsable != 0 }
func (n *node) tier() Tier   { return Tier(n.state &^ nodeUsable >> nodeTierShift) }

func (n *node) setTier(t Tier) { n.state = n.state&(nodeUsable|nodeEndMask) | uint32(t)<<nodeTierShift }

// grown is a run of attached blocks.
type grown struct {
	parent, first, next, prev uint32 // runs: parent, first child, siblings
	attach                    uint32 // block it hangs on; 0: the root
	start, end                uint32 // depth in tokens
	tip                       uint32 // last block
	number                    uint32 // in the stream; 0: not told yet

	low      uint32 // smallest end since the last frame
	lowBlock uint32 // block that ended there

	held     uint32   // 1 + index into forest.held; 0: the end is not held back
	solid    uint32   // while held: depth up to which it is told
	solidAt  uint32   // block that ends at solid
	pending  []uint32 // blocks at known ends that were not told yet, shallow first
	chains   []prefix.Chain
	unusable uint32 // blocks at whose end no match may end
	lower    uint32 // blocks that are not in GPU memory
	touched  uint64
	domain   uint16
	flags    runFlags
	stored   uint32        // forest.frames at its latest end of a store event
	quiet    time.Duration // how long it is held back after it stopped growing
}

type runFlags uint8

const (
	runDirty   runFlags = 1 << iota // listed in forest.dirty
	runLimits                       // listed in forest.limits
	runMatched                      // something continued it or forks off
	runOdd                          // checkpoints lie inside blocks
	runCut                          // told in part because of the budget
)

func (r *grown) has(f runFlags) bool { return r.flags&f != 0 }

func newForest(b Blocks) forest {
	return forest{blocks: b, runs: make([]grown, 1)}
}

// Attached implements Listener.
func (f *forest) Attached(b Block) {
	for int(b.ID) >= len(f.nodes) {
		f.nodes = append(f.nodes, make([]node, max(64, int(b.ID)+1-len(f.nodes)))...)
	}
	n := &f.nodes[b.ID]
	*n = node{}
	if b.EndTokens > MaxDepthTokens || b.Parent != 0 && f.nodes[b.Parent].run == 0 {
		return
	}
	n.parent, n.state = b.Parent, b.EndTokens
	n.setTier(b.Tier)
	n.run = f.place(&b)
	r := &f.runs[n.run]
	if b.Usable {
		n.state |= nodeUsable
	} else {
		r.unusable++
	}
	if b.Tier != TierGPU {
		r.lower++
	}
	if first := nextCheckpoint(b.StartTokens); first <= b.EndTokens {
		f.scratch = f.blocks.CheckpointsIn(b.ID, f.scratch[:0])
		for _, c := range f.scratch {
			r.chains = append(r.chains, c.Chain)
			if c.DepthTokens != b.EndTokens {
				r.flags |= runOdd
			}
		}
	}
	if r.has(runOdd) || r.unusable+r.lower > 0 {
		f.touchLimits(n.run)
	}
	r.end, r.tip = b.EndTokens, b.ID
	f.attached++
	f.clock++
	r.touched = f.clock
	f.touch(n.run)
}

// place finds or makes the run that a block belongs to.
func (f *forest) place(b *Block) uint32 {
	if b.Parent == 0 {
		return f.begin(0, 0, 0, b.Domain)
	}
	p := f.nodes[b.Parent]
	r := &f.runs[p.run]
	if r.tip == b.Parent {
		return p.run
	}
	r.flags |= runMatched
	if r.held != 0 && p.end() > r.solid {
		f.unhold(p.run)
	}
	f.touch(p.run)
	return f.begin(p.run, b.Parent, p.end(), r.domain)
}

// begin makes an empty run.
func (f *forest) begin(parent, attach, start uint32, domain uint16) uint32 {
	var i uint32
	if k := len(f.free); k > 0 {
		i, f.free = f.free[k-1], f.free[:k-1]
	} else {
		i = uint32(len(f.runs))
		f.runs = append(f.runs, grown{})
	}
	r := &f.runs[i]
	*r = grown{
		parent: parent, attach: attach, start: start, end: start, low: start, domain: domain,
		chains: r.chains[:0], pending: r.pending[:0],
		flags: r.flags & (runDirty | runLimits), // the lists still name it
	}
	if p := &f.runs[parent]; p.first != 0 {
		r.next = p.first
		f.runs[p.first].prev = i
	}
	f.runs[parent].first = i
	for int(domain) >= len(f.domains) {
		f.domains = append(f.domains, domainUse{})
	}
	f.domains[domain].runs++
	return i
}

// Detached implements Listener.
func (f *forest) Detached(id uint32) {
	if int(id) >= len(f.nodes) || f.nodes[id].run == 0 {
		return // deeper than any named prefix
	}
	n := f.nodes[id]
	f.nodes[id] = node{}
	r := &f.runs[n.run]
	r.tip, r.end = n.parent, r.start
	if n.parent != r.attach {
		r.end = f.nodes[n.parent].end()
	}
	r.chains = r.chains[:r.end/prefix.ChunkTokens-r.start/prefix.ChunkTokens]
	if !n.usable() {
		r.unusable--
	}
	if n.tier() != TierGPU {
		r.lower--
	}
	if r.has(runOdd) || r.unusable+r.lower > 0 || !n.usable() || n.tier() != TierGPU {
		f.touchLimits(n.run)
	}
	if r.end == r.start {
		f.end(n.run)
		return
	}
	if r.end < r.low {
		r.low, r.lowBlock = r.end, r.tip
	}
	f.shrinkMarks(n.run, r)
	f.touch(n.run)
}

// shrinkMarks forgets ends that a run has lost.
func (f *forest) shrinkMarks(i uint32, r *grown) {
	if r.held != 0 {
		if r.end <= r.solid {
			f.drop(i)
		} else {
			f.held[r.held-1].id = r.tip
		}
	}
	for k := len(r.pending); k > 0 && f.nodes[r.pending[k-1]].run == 0; k-- {
		r.pending = r.pending[:k-1]
	}
}

// end takes a run that has become empty out of the tree.
func (f *forest) end(i uint32) {
	r := &f.runs[i]
	if r.held != 0 {
		f.drop(i)
	}
	if r.number != 0 {
		f.gone = append(f.gone, r.number)
		r.number = 0
	}
	if r.prev != 0 {
		f.runs[r.prev].next = r.next
	} else {
		f.runs[r.parent].first = r.next
	}
	if r.next != 0 {
		f.runs[r.next].prev = r.prev
	}
	d := &f.domains[r.domain]
	if d.runs--; d.runs == 0 {
		d.generation++
	}
	r.end, r.start, r.next, r.prev = 0, 0, 0, 0
	f.free = append(f.free, i)
}

// UsableChanged implements Listener.
func (f *forest) UsableChanged(id uint32, usable bool) {
	if int(id) >= len(f.nodes) || f.nodes[id].run == 0 {
		return
	}
	n := &f.nodes[id]
	if n.usable() == usable {
		return
	}
	n.state ^= nodeUsable
	if usable {
		f.runs[n.run].unusable--
	} else {
		f.runs[n.run].unusable++
	}
	f.touchLimits(n.run)
}

// TierChanged implements TierListener.
func (f *forest) TierChanged(id uint32, tier Tier) {
	if int(id) >= len(f.nodes) || f.nodes[id].run == 0 {
		return
	}
	n := &f.nodes[id]
	if n.tier() != TierGPU {
		f.runs[n.run].lower--
	}
	if n.setTier(tier); tier != TierGPU {
		f.runs[n.run].lower++
	}
	f.touchLimits(n.run)
}

// cleared forgets everything.
func (f *forest) cleared() {
	clear(f.nodes)
	for i := range f.domains {
		f.domains[i] = domainUse{generation: f.domains[i].generation + 1}
	}
	*f = forest{
		blocks: f.blocks, nodes: f.nodes, runs: append(f.runs[:0], grown{}), free: f.free[:0], dirty: f.dirty[:0], limits: f.limits[:0],
		held: f.held[:0], gone: f.gone[:0], domains: f.domains, clock: f.clock, frames: f.frames, scratch: f.scratch,
	}
}

// touch puts a run on the list of those to look at for the next frame.
func (f *forest) touch(i uint32) {
	if r := &f.runs[i]; !r.has(runDirty) {
		r.flags |= runDirty
		f.dirty = append(f.dirty, i)
	}
}

func (f *forest) touchLimits(i uint32) {
	if r := &f.runs[i]; !r.has(runLimits) {
		r.flags |= runLimits
		f.limits = append(f.limits, i)
	}
}

const (
	// maxHold is how long an end that grows block by block is held back at most.
	// Checkpoints that an answer passes are told at once, and nobody continues an
	// answer before it is finished; each step told before costs a point at every
	// coordinator for as long as the blocks live.
	maxHold = 15 * time.Second
	// leastQuiet and mostQuiet are how long one is held back that stopped growing:
	// the least at first, twice as long each time the same answer grew on.
	leastQuiet = time.Second
	mostQuiet  = 4 * time.Second
	// restedFrames is for how many frames an end has to rest for one more block to
	// be taken for a short prompt, whose end must be known once an answer has
	// grown from it. The first block of an answer follows its prompt sooner.
	restedFrames = 2
	// maxPending bounds the ends of one run that wait to be told.
	maxPending = 16
)

// heldEnd is the end of a run that grows block by block, as answers do. Telling
// each step would cost more than all the rest.
type heldEnd struct {
	run   uint32
	id    uint32    // block at the end
	grew  bool      // since the last frame
	since time.Time // first frame that saw it
	quiet time.Time // latest frame that saw it grown
}

// StoreEnded implements Listener.
func (f *forest) StoreEnded(id uint32) {
	attached := f.attached
	f.attached = 0
	if attached == 0 || int(id) >= len(f.nodes) || f.nodes[id].run == 0 {
		return
	}
	n := f.nodes[id]
	r := &f.runs[n.run]
	f.clock++
	r.touched = f.clock
	rested := f.frames - r.stored
	r.stored = f.frames
	switch {
	case r.tip != id:
		f.expect(r, id) // blocks behind it were there before
	case attached == 1 && n.parent != r.attach:
		f.growAnswer(n.run, id, rested >= restedFrames)
	default:
		if r.held != 0 {
			f.expect(r, f.held[r.held-1].id) // where an answer ended
			f.unhold(n.run)
		}
		if r.number != 0 {
			r.flags |= runMatched
		}
		r.quiet = 0
	}
	f.touch(n.run)
}

// growAnswer holds back the block by which an end has grown. rested says that
// the end had not changed for some frames.
func (f *forest) growAnswer(i, id uint32, rested bool) {
	r := &f.runs[i]
	n := f.nodes[id]
	prompt := rested && r.held == 0
	if r.held == 0 {
		f.held = append(f.held, heldEnd{run: i})
		r.held = uint32(len(f.held))
		r.solidAt, r.solid = n.parent, f.nodes[n.parent].end()
		r.quiet = min(max(leastQuiet, 2*r.quiet), mostQuiet)
	}
	if prompt || isCheckpoint(n.end()) { // a checkpoint costs no fingerprint of its own
		r.solidAt, r.solid = id, n.end()
	}
	h := &f.held[r.held-1]
	h.id, h.grew = id, true
}

// unhold lets an end be told. Where it was held is a known end too.
func (f *forest) unhold(i uint32) {
	r := &f.runs[i]
	f.expect(r, r.solidAt)
	f.drop(i)
	f.touch(i)
}

// drop forgets that an end is held.
func (f *forest) drop(i uint32) {
	r := &f.runs[i]
	at, last := int(r.held-1), len(f.held)-1
	r.held = 0
	if at != last {
		f.held[at] = f.held[last]
		f.runs[f.held[at].run].held = uint32(at + 1)
	}
	f.held = f.held[:last]
}

// expect notes a known end that is to be told.
func (f *forest) expect(r *grown, id uint32) {
	end := f.nodes[id].end()
	at := len(r.pending)
	for at > 0 && f.nodes[r.pending[at-1]].end() >= end {
		if f.nodes[r.pending[at-1]].end() == end {
			return
		}
		at--
	}
	if len(r.pending) == maxPending {
		if at == 0 {
			return
		}
		copy(r.pending, r.pending[1:at])
		r.pending[at-1] = id
		return
	}
	r.pending = append(r.pending, 0)
	copy(r.pending[at+1:], r.pending[at:])
	r.pending[at] = id
}

// settle frees the ends that have been held long enough. It returns how long the
// oldest of them had been held.
func (f *forest) settle(now time.Time) (held time.Duration) {
	f.frames++
	for i := 0; i < len(f.held); {
		h := &f.held[i]
		if h.since.IsZero() {
			h.since = now
		}
		if h.grew {
			h.grew, h.quiet = false, now
		}
		if age := now.Sub(h.since); age >= maxHold || now.Sub(h.quiet) >= f.runs[h.run].quiet {
			held = max(held, age)
			f.unhold(h.run) // moves another one to i
			continue
		}
		i++
	}
	return held
}
