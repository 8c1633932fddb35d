// Package summarytest holds a plain stand-in for a block table, for tests of
// what listens to one: it keeps whole token paths, answers what an engine would
// reuse by comparing tokens, and changes itself at random.
package summarytest

import (
	"fmt"
	"slices"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// Forest is a set of unbroken prefixes made of blocks of one size.
type Forest struct {
	// Listener is told of every change; nil: nobody.
	Listener summary.Listener
	// BlockTokens is the size of every block.
	BlockTokens int
	// Domains are the domains that prefixes may have.
	Domains []prefix.Domain
	// Hybrid lets Step make blocks unusable.
	Hybrid bool
	// Tiers lets Step move blocks between tiers.
	Tiers bool

	blocks  map[uint32]*block
	roots   []uint32
	free    []uint32
	highest uint32
}

type block struct {
	id, parent uint32
	children   []uint32
	domain     uint16
	usable     bool
	tier       summary.Tier
	path       []uint32     // token ids from the start to the end of this block
	base       prefix.Chain // value at the last checkpoint at or before the end
}

// NewForest returns an empty forest.
func NewForest(blockTokens int, domains ...prefix.Domain) *Forest {
	return &Forest{BlockTokens: blockTokens, Domains: domains, blocks: map[uint32]*block{}}
}

// Len is the number of blocks.
func (f *Forest) Len() int { return len(f.blocks) }

// IDs returns the ids of all blocks in ascending order.
func (f *Forest) IDs() []uint32 {
	ids := make([]uint32, 0, len(f.blocks))
	for id := range f.blocks {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// Path returns the tokens up to the end of a block.
func (f *Forest) Path(id uint32) []uint32 { return f.blocks[id].path }

// Domain returns the domain of a block.
func (f *Forest) Domain(id uint32) prefix.Domain { return f.Domains[f.blocks[id].domain] }

// Usable says whether a match may end at a block.
func (f *Forest) Usable(id uint32) bool { return f.blocks[id].usable }

// Tier says where a block is held.
func (f *Forest) Tier(id uint32) summary.Tier { return f.blocks[id].tier }

// Parent returns the block before a block; 0: none.
func (f *Forest) Parent(id uint32) uint32 { return f.blocks[id].parent }

// Children returns the ids of the blocks after a block.
func (f *Forest) Children(id uint32) []uint32 { return f.blocks[id].children }

// Attach adds a block after parent, 0 for the start, and tells the listener.
// The domain counts at the start only. Equal content under one parent makes
// equal tokens.
func (f *Forest) Attach(parent uint32, domain uint16, content uint64, usable bool) uint32 {
	b := &block{parent: parent, domain: domain, usable: usable}
	var start int
	if p := f.blocks[parent]; p != nil {
		b.domain, b.base, start = p.domain, p.base, len(p.path)
		b.path = slices.Clone(p.path)
	}
	x := content*0x9e3779b97f4a7c15 + uint64(start)*0xd1342543de82ef95 + 1
	for range f.BlockTokens {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b.path = append(b.path, uint32(x>>40))
	}
	for c := start/prefix.ChunkTokens + 1; c*prefix.ChunkTokens <= len(b.path); c++ {
		b.base = prefix.Next(b.base, b.path[(c-1)*prefix.ChunkTokens:c*prefix.ChunkTokens])
	}
	b.id = f.newID()
	f.blocks[b.id] = b
	if p := f.blocks[parent]; p != nil {
		p.children = append(p.children, b.id)
	} else {
		f.roots = append(f.roots, b.id)
	}
	if f.Listener != nil {
		f.Listener.Attached(f.tell(b))
	}
	return b.id
}

func (f *Forest) newID() uint32 {
	if n := len(f.free); n > 0 {
		id := f.free[n-1]
		f.free = f.free[:n-1]
		return id
	}
	f.highest++
	return f.highest
}

func (f *Forest) tell(b *block) summary.Block {
	return summary.Block{
		ID: b.id, Parent: b.parent,
		StartTokens: uint32(len(b.path) - f.BlockTokens), EndTokens: uint32(len(b.path)),
		Domain: b.domain, Usable: b.usable, Tier: b.tier,
	}
}

// StoreEnded tells the listener that a store event ended.
func (f *Forest) StoreEnded(id uint32) {
	if f.Listener != nil {
		f.Listener.StoreEnded(id)
	}
}

// Detach removes a block and all after it.
func (f *Forest) Detach(id uint32) {
	b := f.blocks[id]
	for len(b.children) > 0 {
		f.Detach(b.children[len(b.children)-1])
	}
	if f.Listener != nil {
		f.Listener.Detached(id)
	}
	siblings := &f.roots
	if p := f.blocks[b.parent]; p != nil {
		siblings = &p.children
	}
	*siblings = slices.DeleteFunc(*siblings, func(c uint32) bool { return c == id })
	delete(f.blocks, id)
	f.free = append(f.free, id)
}

// SetUsable changes whether a match may end at a block.
func (f *Forest) SetUsable(id uint32, usable bool) {
	f.blocks[id].usable = usable
	if f.Listener != nil {
		f.Listener.UsableChanged(id, usable)
	}
}

// SetTier moves a block to another tier.
func (f *Forest) SetTier(id uint32, tier summary.Tier) {
	f.blocks[id].tier = tier
	if l, ok := f.Listener.(summary.TierListener); ok {
		l.TierChanged(id, tier)
	}
}

// Clear removes everything at once.
func (f *Forest) Clear() {
	f.blocks, f.roots, f.free, f.highest = map[uint32]*block{}, nil, nil, 0
	if f.Listener != nil {
		f.Listener.Cleared()
	}
}

// Relisten gives the forest a new listener and tells it everything.
func (f *Forest) Relisten(l summary.Listener) {
	f.Listener = l
	var walk func(ids []uint32)
	walk = func(ids []uint32) {
		for _, id := range ids {
			l.Attached(f.tell(f.blocks[id]))
			walk(f.blocks[id].children)
		}
	}
	walk(f.roots)
}

// Reuse is what an engine with these blocks would reuse of a prompt, in tokens:
// the deepest usable end whose path the prompt starts with.
func (f *Forest) Reuse(prompt []uint32, d prefix.Domain) int {
	deepest := 0
	var walk func(ids []uint32)
	walk = func(ids []uint32) {
		for _, id := range ids {
			b := f.blocks[id]
			n := len(b.path)
			if n > len(prompt) || f.Domains[b.domain] != d || !slices.Equal(b.path[n-f.BlockTokens:], prompt[n-f.BlockTokens:n]) {
				continue
			}
			if b.usable {
				deepest = max(deepest, n)
			}
			walk(b.children)
		}
	}
	walk(f.roots)
	return deepest
}

// PointOf implements summary.Blocks.
func (f *Forest) PointOf(id uint32) prefix.Chain {
	b := f.mustBlock(id)
	if rest := len(b.path) % prefix.ChunkTokens; rest != 0 {
		return prefix.Point(b.base, b.path[len(b.path)-rest:])
	}
	return b.base
}

// PlaceOf implements summary.Blocks.
func (f *Forest) PlaceOf(id uint32) (parent, endTokens uint32) {
	b := f.mustBlock(id)
	return b.parent, uint32(len(b.path))
}

// CheckpointsIn implements summary.Blocks.
func (f *Forest) CheckpointsIn(id uint32, dst []summary.Checkpoint) []summary.Checkpoint {
	b := f.mustBlock(id)
	start := len(b.path) - f.BlockTokens
	var c prefix.Chain
	for end := prefix.ChunkTokens; end <= len(b.path); end += prefix.ChunkTokens {
		c = prefix.Next(c, b.path[end-prefix.ChunkTokens:end])
		if end > start {
			dst = append(dst, summary.Checkpoint{DepthTokens: uint32(end), Chain: c})
		}
	}
	return dst
}

func (f *Forest) mustBlock(id uint32) *block {
	b := f.blocks[id]
	if b == nil {
		panic(fmt.Sprintf("summarytest: asked about block %d, which is not attached", id))
	}
	return b
}

// DomainOf implements summary.Blocks.
func (f *Forest) DomainOf(i uint16) prefix.Domain { return f.Domains[i] }

// Step changes the forest at random, by draws of intn(n) from [0, n).
func (f *Forest) Step(intn func(n int) int) {
	const maxBlocks = 400
	op := intn(100)
	switch {
	case len(f.blocks) == 0 || op < 35 && len(f.blocks) < maxBlocks:
		f.prompt(f.pick(intn, true), intn, 2+intn(1+2200/f.BlockTokens))
	case op < 60 && len(f.blocks) < maxBlocks:
		f.prompt(f.pickLeaf(intn), intn, 1)
	case op < 85:
		f.evictTail(intn)
	case op < 90 && f.Hybrid:
		for range 1 + intn(8) {
			id := f.pick(intn, false)
			f.SetUsable(id, !f.Usable(id))
		}
	case op < 93 && f.Tiers:
		for range 1 + intn(8) {
			f.SetTier(f.pick(intn, false), summary.Tier(intn(3)))
		}
	case op < 98:
		f.Detach(f.pick(intn, false))
	default:
		f.Clear()
	}
}

// prompt attaches a chain of n blocks after a block.
func (f *Forest) prompt(after uint32, intn func(n int) int, n int) {
	domain := uint16(intn(len(f.Domains)))
	contents := 6 // some blocks are copies of others
	if f.Hybrid || f.Tiers {
		contents = 1 << 30 // copies of unequal worth have no defined worth
	}
	for range n {
		after = f.Attach(after, domain, uint64(intn(contents)), !f.Hybrid || intn(3) != 0)
	}
	f.StoreEnded(after)
}

// evictTail detaches some blocks of one prefix, the last one first.
func (f *Forest) evictTail(intn func(n int) int) {
	id := f.pickLeaf(intn)
	for range 1 + intn(20) {
		parent := f.blocks[id].parent
		f.Detach(id)
		if p := f.blocks[parent]; p == nil || len(p.children) > 0 {
			return
		}
		id = parent
	}
}

// pick draws a block, or the start.
func (f *Forest) pick(intn func(n int) int, orStart bool) uint32 {
	ids := f.IDs()
	if orStart {
		ids = append(ids, 0)
	}
	return ids[intn(len(ids))]
}

func (f *Forest) pickLeaf(intn func(n int) int) uint32 {
	id := f.pick(intn, false)
	for len(f.blocks[id].children) > 0 {
		id = f.blocks[id].children[intn(len(f.blocks[id].children))]
	}
	return id
}
