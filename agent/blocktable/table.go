package blocktable

import (
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// DefaultMaxBlocks bounds a table whose options name no bound.
const DefaultMaxBlocks = 1 << 20

const mostBlocks = maxNodes / 3 * 2

// Options says what a table is of and how large it may become.
type Options struct {
	// Model is the served model; it is part of every domain.
	Model string
	// MaxBlocks bounds the blocks held in GPU memory; blocks beyond it are
	// refused and counted. Half as many more are kept for other tiers, for
	// removed blocks whose descendants remain and for unknown parents.
	// 0 is DefaultMaxBlocks; more than about eleven million is cut to that.
	MaxBlocks int
	// ExpectBlocks sizes the indices at once; 0 lets them grow.
	ExpectBlocks int
	// PoolBlocks is the number of blocks the engine can hold, 0 if unknown.
	PoolBlocks int
	// Seed keys the fingerprints of contents; any value does, a random one
	// keeps tenants from making them collide.
	Seed uint64
	// FollowHost: see Table.FollowHost.
	FollowHost bool
	// Listener is told the changes; nil for none. See also Listen.
	Listener summary.Listener
}

// Stats counts what a table saw since New or Clear.
type Stats struct {
	Stores, Removes, Clears uint64
	// BlocksStored and BlocksRemoved count hashes of events.
	BlocksStored, BlocksRemoved uint64
	// Duplicates counts stores of a block that was held already.
	Duplicates uint64
	// UnknownRemovals counts removals of a block that is not held.
	UnknownRemovals uint64
	// ParkedOrphans counts stores under a parent that was not known,
	// JoinedOrphans the parents that came later.
	ParkedOrphans, JoinedOrphans uint64
	// Placeholders counts stores that name hashes only.
	Placeholders uint64
	// Malformed counts stores of a whole-prefix group whose tokens do not
	// cover their hashes, and events out of range.
	Malformed uint64
	// Conflicts counts blocks stored under another parent than before.
	Conflicts uint64
	// Refused counts blocks that found no room.
	Refused uint64
	// Rebuilds counts changes of the groups that moved what is attached.
	Rebuilds uint64
}

// Table mirrors the block table of one engine rank.
type Table struct {
	model    string
	seed     uint64
	listener summary.Listener
	tiers    summary.TierListener // nil: the listener follows no tiers

	nodes     nodes
	byHash    index // named blocks
	byContent index // linked blocks that are not flagUnlisted
	// chains are the chain values at checkpoints, each by the attached node that
	// reaches it: the last one in it or at its end.
	chains       map[uint32]prefix.Chain
	slabs        []slab // widths of them per block length
	longestFirst []int  // block lengths

	domains    []domain
	domainOf   map[prefix.Domain]uint16
	freeDomain []uint16

	groups    [mediums][maxGroups]*group
	allGroups []*group
	required  []*group // GPU groups that must hold the whole prefix
	windows   []*group // GPU groups that must hold its last blocks
	rank      int      // which kind of group defines structure; see regroup

	maxBlocks, pool int
	distinctCopies  bool // a second store of a held block adds no copy
	followHost      bool
	copies          int // in GPU memory, over all groups
	held            int // nodes with a copy in GPU memory
	hostCopies      int // blocks in host memory, over all groups
	resident        int
	attached        int

	heads    heads
	unpacked []uint32 // of one block, see tokensOf
	asked    uint64   // keeps the loads of askNames and askRemoved from being left out
	stats    Stats
	history  *History // nil: nobody remembers
}

// domain is one namespace of prompts and the root of its prefixes.
type domain struct {
	name *prefix.Domain // what remembers it shares it; nil: the place is free
	root uint32
}

// New makes an empty table.
func New(o Options) *Table {
	t := &Table{
		model:    o.Model,
		seed:     o.Seed,
		pool:     o.PoolBlocks,
		domainOf: make(map[prefix.Domain]uint16),
		chains:   make(map[uint32]prefix.Chain),
		// Index 0 of nodes is none; its page comes with the first node.
		byHash:    newIndex(o.ExpectBlocks),
		byContent: newIndex(0),
		rank:      rankNone,
	}
	t.followHost = o.FollowHost
	t.SetMaxBlocks(o.MaxBlocks)
	t.listen(o.Listener)
	t.nodes.pages = append(t.nodes.pages, new([pageNodes]node))
	return t
}

// Listen replaces the listener and tells the new one every attached block, as
// if each had just been attached; deepest blocks are told as store ends.
func (t *Table) Listen(l summary.Listener) {
	t.listen(l)
	for i := range t.domains {
		if root := t.domains[i].root; root != 0 {
			t.tellBelow(root)
		}
	}
}

func (t *Table) listen(l summary.Listener) {
	if l == nil {
		l = silent{}
	}
	t.listener = l
	t.tiers, _ = l.(summary.TierListener)
}

func (t *Table) tellBelow(root uint32) {
	t.walkAttached(root, func(id uint32) {
		t.listener.Attached(t.block(id))
		if t.nodes.firstWith(t.nodes.at(id).first, flagAttached, 0) == 0 {
			t.listener.StoreEnded(id)
		}
	})
}

// SetMaxBlocks changes the bound of Options.MaxBlocks. What is held beyond a lower
// one stays until the engine gives it up.
func (t *Table) SetMaxBlocks(n int) {
	if n <= 0 {
		n = DefaultMaxBlocks
	}
	t.maxBlocks = min(n, mostBlocks)
}

// SetPool tells the number of blocks the engine can hold; 0 is unknown.
func (t *Table) SetPool(usableBlocks int) { t.pool = usableBlocks }

// CountCopies says whether a second store of a held block is a second copy,
// as it is from New on. With false, a block is gone with its first removal:
// the right way to rebuild a table that was OverPool, since it can then claim
// too little but never too much.
func (t *Table) CountCopies(on bool) { t.distinctCopies = !on }

// OverPool says that more copies were announced than the engine can hold: some
// had no copy behind them, or removals were lost, and the table claims too
// much. The caller clears the table, calls CountCopies(false) and replays.
func (t *Table) OverPool() bool { return t.pool > 0 && t.copies > t.pool }

// Len is the number of resident blocks, those in followed host memory included.
func (t *Table) Len() int { return t.resident }

// Attached is the number of blocks in unbroken prefixes.
func (t *Table) Attached() int { return t.attached }

// Copies is the number of copies in GPU memory over all groups.
func (t *Table) Copies() int { return t.copies }

// Held is the number of nodes in use: blocks, removed blocks whose descendants
// remain, unknown parents and roots.
func (t *Table) Held() int { return t.nodes.live }

// Stats gives the counters.
func (t *Table) Stats() Stats { return t.stats }

// BlockTokens is the length of a block of the groups that define prefixes; 0
// until one was stored.
func (t *Table) BlockTokens() int {
	for _, g := range t.required {
		if g.structural {
			return int(g.blockTokens)
		}
	}
	return 0
}

// Windowed says whether groups are known that hold only the last blocks of a
// prefix. Then a shorter prefix than a usable one need not be usable.
func (t *Table) Windowed() bool { return len(t.windows) > 0 }

// Apply mirrors one event. Events must come in the engine's order.
func (t *Table) Apply(e *Event) {
	switch e.Op {
	case OpStore:
		t.stats.Stores++
		t.store(e)
	case OpRemove:
		t.stats.Removes++
		t.remove(e)
	case OpClear:
		t.stats.Clears++
		if e.Medium != MediumGPU {
			t.clearTier(e.Medium)
		}
		if e.Medium == MediumGPU || e.Medium == MediumUnknown {
			t.clearGPU()
		}
	}
}

func (t *Table) store(e *Event) {
	g := t.groupFor(e)
	if g == nil {
		t.stats.Malformed++
		return
	}
	t.stats.BlocksStored += uint64(len(e.Hashes))
	if len(e.Hashes) == 0 {
		return
	}
	if g.structural || t.placesHost(g) {
		if len(e.Tokens) == len(e.Hashes)*int(e.BlockTokens) && e.BlockTokens > 0 {
			if first, ok := t.lengthOf(int(e.BlockTokens)); ok {
				t.storeChain(g, e, first)
				return
			}
		}
		if len(e.Tokens) > 0 {
			t.stats.Malformed++
		}
	}
	if len(e.Tokens) == 0 {
		t.stats.Placeholders++
	}
	for _, h := range e.Hashes {
		id := t.findHash(h)
		if id == 0 {
			if id = t.newNamed(h, g.medium == MediumGPU); id == 0 {
				t.stats.Refused++
				continue
			}
		}
		t.addCopy(g, id)
	}
}

// storeChain stores blocks whose place and tokens are known; first is the first
// of the slabs of their length.
func (t *Table) storeChain(g *group, e *Event, first uint8) {
	above := t.parentOf(e)
	parent, size := above, int(e.BlockTokens)
	var last uint32
	for from := 0; from < len(e.Hashes); {
		var room [aheadBlocks]uint32
		ids := t.nameNext(e.Hashes[from:], g.medium == MediumGPU, &room)
		if len(ids) == 0 {
			t.stats.Refused += uint64(len(e.Hashes) - from)
			break
		}
		for k, id := range ids {
			i := from + k
			n := t.nodes.at(id)
			switch {
			case parent == 0:
			case n.flags&flagLinked == 0:
				opaque := i < len(e.Marks) && e.Marks[i] != 0
				tokens := e.Tokens[i*size : (i+1)*size]
				if t.history != nil && !opaque {
					var room [maxTwins + 1]uint32
					t.history.storedOtherwise(t.appendAttached(room[:0], parent, tokens))
				}
				t.link(id, parent, first, tokens, opaque)
			case n.parent != parent:
				t.stats.Conflicts++
			case n.flags&flagAttached != 0 && g.medium == MediumGPU && t.tierOf(id) == summary.TierGPU:
				// One that is in host memory only was read back.
				t.history.storedAgain(id, false)
			}
			t.addCopy(g, id)
			parent, last = id, id
		}
		from += len(ids)
	}
	if last != 0 && t.nodes.at(last).flags&flagAttached != 0 {
		t.listener.StoreEnded(last)
	}
	if above != 0 {
		t.release(above)
	}
}

// nameNext gives the nodes of the next blocks of a store, making those that are
// new; none if there is no room for the first one. gpu says that they are in GPU
// memory.
func (t *Table) nameNext(hashes []uint64, gpu bool, room *[aheadBlocks]uint32) []uint32 {
	hashes = hashes[:min(len(hashes), aheadBlocks)]
	if gpu && t.held+len(hashes) > t.maxBlocks {
		hashes = hashes[:1] // each one may be the last: it counts when it has its copy
	}
	t.askNames(hashes)
	ids := room[:0]
	for _, h := range hashes {
		id := t.findHash(h)
		if id == 0 {
			if id = t.newNamed(h, gpu); id == 0 {
				break
			}
		}
		ids = append(ids, id)
	}
	return ids
}

// parentOf gives the node that a store continues: a root, a named block, or a
// place kept for a parent that was not told. It is 0 if there is no room.
func (t *Table) parentOf(e *Event) uint32 {
	if !e.HasParent {
		return t.rootOf(e.Adapter, e.Salt)
	}
	if id := t.findHash(e.Parent); id != 0 {
		return id
	}
	t.stats.ParkedOrphans++
	return t.newNamed(e.Parent, false)
}

func (t *Table) rootOf(adapter, salt string) uint32 {
	name := prefix.Domain{Model: t.model, Adapter: adapter, Salt: salt}
	if i, ok := t.domainOf[name]; ok {
		return t.domains[i].root
	}
	if !t.roomFor(false) {
		return 0
	}
	var i uint16
	if k := len(t.freeDomain); k > 0 {
		i, t.freeDomain = t.freeDomain[k-1], t.freeDomain[:k-1]
	} else {
		if len(t.domains) > 1<<16-1 {
			return 0
		}
		t.domains = append(t.domains, domain{})
		i = uint16(len(t.domains) - 1)
	}
	id := t.nodes.take()
	n := t.nodes.at(id)
	n.flags |= flagRoot | flagAttached
	n.domain = i
	t.startRuns(id)
	shared := name // only a new domain is to take memory
	t.domains[i] = domain{name: &shared, root: id}
	t.domainOf[name] = i
	return id
}

// roomFor says whether one more node may be made: for a block in GPU memory,
// or for anything else.
func (t *Table) roomFor(gpu bool) bool {
	if gpu {
		return t.held < t.maxBlocks && t.nodes.live < t.maxBlocks+t.maxBlocks/2
	}
	return t.nodes.live-t.held < max(1, t.maxBlocks/2) && t.nodes.live < t.maxBlocks+t.maxBlocks/2
}

// newNamed makes a node for an engine hash that has none.
func (t *Table) newNamed(h uint64, gpu bool) uint32 {
	if !t.roomFor(gpu) {
		return 0
	}
	id := t.nodes.take()
	t.nodes.at(id).hash = h
	t.byHash.insert(hashKey(h), id, 0)
	return id
}

// link tells a named node its place and tokens. Orphans that waited for it
// become part of the tree with it.
//
// A block that is the first one after another stays its first child and is found
// there; nearly all are. Only the others, and those that begin prompts, of which
// there are many beside each other, are in the index by content.
func (t *Table) link(id, parent uint32, first uint8, tokens []uint32, opaque bool) {
	n := t.nodes.at(id)
	if parent == id || n.first != 0 && t.isBelow(parent, id) {
		t.stats.Conflicts++
		return
	}
	if n.first != 0 {
		t.stats.JoinedOrphans++
	}
	n.class, n.slot = t.keep(first, tokens)
	n.flags |= flagLinked
	if opaque {
		n.flags |= flagOpaque
	}
	if p := t.nodes.at(parent); opaque || p.first == 0 && p.flags&flagRoot == 0 || !t.list(id, parent, tokens) {
		n.flags |= flagUnlisted
	}
	t.nodes.addChild(parent, id)
	if n.flags&flagResident != 0 {
		t.tryAttach(id)
	}
}

// list puts a node into the index by content. It reports false if there are
// too many twins.
func (t *Table) list(id, parent uint32, tokens []uint32) bool {
	return t.byContent.insert(t.contentKey(parent, tokens), id, maxTwins)
}

// isBelow says whether id is ancestor itself or has it above: an engine that
// names a block its own ancestor must not tie a knot.
func (t *Table) isBelow(id, ancestor uint32) bool {
	for id != 0 {
		if id == ancestor {
			return true
		}
		id = t.nodes.at(id).parent
	}
	return false
}

func (t *Table) remove(e *Event) {
	t.stats.BlocksRemoved += uint64(len(e.Hashes))
	g, unknown := t.lookGroup(e), t.unknownGroup(e)
	for i, h := range e.Hashes {
		if i%aheadBlocks == 0 {
			t.askRemoved(e.Hashes[i:min(i+aheadBlocks, len(e.Hashes))])
		}
		id, of := t.findHash(h), g
		if id != 0 && unknown != nil && (g == nil || g.count(id) == 0) {
			of = unknown
		}
		if id == 0 || of == nil || of.count(id) == 0 {
			t.stats.UnknownRemovals++
			continue
		}
		t.dropCopy(of, id)
	}
}

// release frees a node that has neither copies nor children, and then its
// ancestors as far as that holds for them.
func (t *Table) release(id uint32) {
	for id != 0 {
		n := t.nodes.at(id)
		if n.first != 0 || n.flags&flagUsed == 0 || t.hasCopies(id) {
			return
		}
		above := n.parent
		t.free(id)
		id = above
	}
}

func (t *Table) free(id uint32) {
	n := t.nodes.at(id)
	if n.flags&flagRoot != 0 {
		d := &t.domains[n.domain]
		delete(t.domainOf, *d.name)
		*d = domain{}
		t.freeDomain = append(t.freeDomain, n.domain)
		t.heads.forget(id)
		t.nodes.give(id)
		return
	}
	if n.flags&flagLinked != 0 {
		t.unlink(id)
	}
	t.byHash.remove(hashKey(t.nodes.at(id).hash), id)
	t.nodes.give(id)
}

// unlink forgets a node's place and tokens.
func (t *Table) unlink(id uint32) {
	n := t.nodes.at(id)
	if n.flags&flagUnlisted == 0 {
		t.byContent.remove(t.contentKey(n.parent, t.tokensOf(n)), id)
	}
	t.heads.forget(id)
	t.nodes.dropChild(id)
	t.slabs[n.class].give(n.slot)
	n.flags &^= flagLinked | flagOpaque | flagUnlisted
}

// silent is the listener of a table that has none.
type silent struct{}

func (silent) Attached(summary.Block)     {}
func (silent) Detached(uint32)            {}
func (silent) UsableChanged(uint32, bool) {}
func (silent) StoreEnded(uint32)          {}
func (silent) Cleared()                   {}
