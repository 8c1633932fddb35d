package slots

import (
	"slices"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// tree is what can be reused, as blocks of ledger.PointTokens tokens.
type tree struct {
	listener summary.Listener
	tiers    summary.TierListener // nil: not told of
	nodes    []node               // by id; nodes[0] is the root
	free     []uint32
	byKey    map[prefix.Key]uint32
	shown    map[*sequence]shown
	order    []*sequence // those shown, in the order of show
	blocks   int
}

// shown is how a sequence is shown.
type shown struct {
	host bool // else in a slot
	// from is the first block at which a match may end.
	from int
	// blocks is how many are shown: less than there are if a key stands
	// elsewhere already, which no honest ones do.
	blocks int
}

type node struct {
	key    prefix.Key
	parent uint32
	end    uint32 // depth in tokens
	// inSlots, inHost and usable count the sequences that hold the block: in
	// slots, in the host cache, and there in such a way that a match may end.
	inSlots, inHost, usable uint32
}

func (t *tree) init(l summary.Listener) {
	t.listener = l
	t.tiers, _ = l.(summary.TierListener)
	t.nodes, t.free = make([]node, 1), nil
	t.byKey, t.shown = map[prefix.Key]uint32{}, map[*sequence]shown{}
	t.order, t.blocks = nil, 0
}

// reset forgets all.
func (t *tree) reset() {
	had := t.blocks > 0
	t.init(t.listener)
	if had && t.listener != nil {
		t.listener.Cleared()
	}
}

// show makes what is shown what is wanted: what comes first, so that what stays
// by another holder does not blink.
func (t *tree) show(want map[*sequence]shown, order []*sequence) {
	for _, s := range order {
		is, ok := t.shown[s]
		w := want[s]
		if ok && is.host == w.host && is.from == w.from {
			continue
		}
		w.blocks = t.add(s, w)
		if ok {
			t.remove(s, is)
		}
		t.shown[s] = w
	}
	for _, s := range t.order {
		if _, ok := want[s]; !ok {
			t.remove(s, t.shown[s])
			delete(t.shown, s)
		}
	}
	t.order = order
}

func (t *tree) add(s *sequence, how shown) (blocks int) {
	parent, grown := uint32(0), false
	for i, k := range s.keys {
		id := t.byKey[k]
		if k == 0 || id != 0 && t.nodes[id].parent != parent {
			break
		}
		if id == 0 {
			id = t.take()
			t.nodes[id] = node{key: k, parent: parent, end: t.nodes[parent].end + ledger.PointTokens}
			t.byKey[k] = id
			t.count(id, how, i, 1)
			t.blocks++
			if t.listener != nil {
				t.listener.Attached(t.block(id))
			}
			grown = true
		} else {
			t.change(id, how, i, 1)
		}
		parent = id
		blocks++
	}
	if grown && t.listener != nil {
		t.listener.StoreEnded(parent)
	}
	return blocks
}

func (t *tree) remove(s *sequence, how shown) {
	for i := how.blocks - 1; i >= 0; i-- {
		id := t.byKey[s.keys[i]]
		if n := &t.nodes[id]; n.inSlots+n.inHost > 1 {
			t.change(id, how, i, -1)
			continue
		}
		if t.listener != nil {
			t.listener.Detached(id)
		}
		delete(t.byKey, s.keys[i])
		t.nodes[id] = node{}
		t.free = append(t.free, id)
		t.blocks--
	}
}

// change counts a holder of a block and tells what follows.
func (t *tree) change(id uint32, how shown, at int, by int32) {
	before := t.block(id)
	t.count(id, how, at, by)
	after := t.block(id)
	if t.listener == nil {
		return
	}
	if before.Usable != after.Usable {
		t.listener.UsableChanged(id, after.Usable)
	}
	if before.Tier != after.Tier && t.tiers != nil {
		t.tiers.TierChanged(id, after.Tier)
	}
}

func (t *tree) count(id uint32, how shown, at int, by int32) {
	n := &t.nodes[id]
	if !how.host {
		n.inSlots += uint32(by)
		return
	}
	n.inHost += uint32(by)
	if at >= how.from {
		n.usable += uint32(by)
	}
}

func (t *tree) take() uint32 {
	if k := len(t.free); k > 0 {
		id := t.free[k-1]
		t.free = t.free[:k-1]
		return id
	}
	t.nodes = append(t.nodes, node{})
	return uint32(len(t.nodes) - 1)
}

func (t *tree) block(id uint32) summary.Block {
	n := &t.nodes[id]
	b := summary.Block{ID: id, Parent: n.parent, StartTokens: n.end - ledger.PointTokens, EndTokens: n.end, Usable: n.inSlots+n.usable > 0}
	if n.inSlots == 0 {
		b.Tier = summary.TierHost
	}
	return b
}

// publish tells what a new request could reuse. Where requests come at once, others
// may reach the server before it does: each of them makes the server copy what idle
// slots hold to the host cache, which lets go of its oldest entries for that, and
// empty slots that share a buffer.
func (r *Replay) publish() {
	want := make(map[*sequence]shown, len(r.slots)+len(r.cache.entries))
	order := make([]*sequence, 0, len(r.slots)+len(r.cache.entries))
	crowded, sure := r.crowded() && r.cache.limitTokens > 0, 0
	if crowded {
		sure = r.cache.stay(r.idle()...)
	}
	// Without a host cache what those that wait overwrite is lost.
	lost := r.cache.limitTokens == 0 && r.waiting()
	risk := r.atRisk()
	for i := range r.slots {
		if s := &r.slots[i]; !s.busy() && len(s.held.keys) > 0 && !lost && !s.doubts.any() && !slices.Contains(risk, i) {
			if want[s.held] = (shown{}); crowded && r.opt.Shared {
				want[s.held] = shown{host: true, from: firstUsable(s.held, keptAtLeast)}
			}
			order = append(order, s.held)
		}
	}
	stay := make([]int, len(r.slots)) // from 1; 0: not known yet
	for at, e := range r.cache.entries {
		if _, inSlot := want[e]; inSlot || len(e.keys) == 0 || at < sure || e.doubtful {
			continue
		}
		slot, least, ok := r.leastKept(e)
		if !ok {
			continue
		}
		if slot >= 0 {
			// The slot gives first what it holds, and may drive the entry out.
			if stay[slot] == 0 {
				stay[slot] = 1 + r.cache.stay(r.slots[slot].held)
			}
			if at < stay[slot]-1 {
				continue
			}
		}
		want[e] = shown{host: true, from: firstUsable(e, least)}
		order = append(order, e)
	}
	r.tree.show(want, order)
}

// firstUsable is the first block of an entry that ends deep enough for a share of
// it to be kept.
func firstUsable(e *sequence, least float64) int {
	return max(0, (int(least*float64(e.tokens))+ledger.PointTokens-1)/ledger.PointTokens-1)
}

// leastKept is the slot that a request goes to which continues an entry, -1: none
// is idle, and the share of the entry that it must keep for it to be taken: a
// quarter, and more than it would keep of the slot. It reports false if it would
// not get it: the slot was chosen for what it shares, and would keep so much that
// the host cache is not asked.
func (r *Replay) leastKept(e *sequence) (slot int, least float64, ok bool) {
	q := &request{keys: e.keys, tokens: e.tokens, pinned: -1}
	if slot = r.choose(q); slot < 0 {
		return slot, keptAtLeast, true
	}
	held := r.slots[slot].held
	lcp := held.shared(e.keys)
	if share(lcp, q.tokens) > r.opt.Similarity && share(lcp+ledger.PointTokens-1, held.tokens) >= lostAtMost {
		return slot, 0, false
	}
	return slot, max(keptAtLeast, share(lcp, held.tokens)), true
}

// maxIdle bounds the slots that are told.
const maxIdle = 64

// Idle are the slots that are idle and known to hold something, which the server
// has confirmed by its length: a request that names another slot than the one
// that holds its beginning loses it. Slots that share a KV buffer are not told:
// another request empties them, and one that names an empty slot takes nothing
// from the host cache either.
func (r *Replay) Idle() (idle []ledger.IdleSlot) {
	if !r.own {
		return nil
	}
	for i := range r.slots {
		s := &r.slots[i]
		if n := len(s.held.keys); !s.busy() && n > 0 && s.confirmed == s.held && !s.doubts.any() && len(idle) < maxIdle {
			idle = append(idle, ledger.IdleSlot{Slot: uint32(i), DepthTokens: uint32(n * ledger.PointTokens), Key: s.held.keys[n-1]})
		}
	}
	return idle
}

// Blocks is the number of blocks that can be reused.
func (r *Replay) Blocks() int { return r.tree.blocks }

// Listen replaces the listener and tells it all that can be reused.
func (r *Replay) Listen(l summary.Listener) {
	r.tree.init(l)
	r.publish()
}

// PointOf implements summary.Blocks: the prefix key stands for the chain value.
func (r *Replay) PointOf(id uint32) prefix.Chain {
	if int(id) >= len(r.tree.nodes) {
		return 0
	}
	return prefix.Chain(r.tree.nodes[id].key)
}

// PlaceOf implements summary.Blocks.
func (r *Replay) PlaceOf(id uint32) (parent, endTokens uint32) {
	if int(id) >= len(r.tree.nodes) {
		return 0, 0
	}
	n := &r.tree.nodes[id]
	return n.parent, n.end
}

// CheckpointsIn implements summary.Blocks.
func (r *Replay) CheckpointsIn(id uint32, dst []summary.Checkpoint) []summary.Checkpoint {
	if int(id) < len(r.tree.nodes) {
		if n := &r.tree.nodes[id]; n.end%prefix.ChunkTokens == 0 && n.end > 0 {
			dst = append(dst, summary.Checkpoint{DepthTokens: n.end, Chain: prefix.Chain(n.key)})
		}
	}
	return dst
}

// DomainOf implements summary.Blocks: keys hold their domain.
func (r *Replay) DomainOf(uint16) prefix.Domain { return prefix.Domain{} }
