package summary

import (
	"time"

	"waypost/gossip/prefix"
)

const (
	// maxHold is how long a growing end stays unannounced at most.
	maxHold = 5 * time.Second
	// quietHold is how long an end that stopped growing stays unannounced.
	quietHold = 2 * time.Second
)

// node is what the encoder keeps of an attached block.
type node struct {
	parent         uint32
	children       uint32
	usableChildren uint32
	endTokens      uint32
	held           uint32 // 1 + index into ends.held; 0: not held
	domain         uint16
	flags          nodeFlags
}

type nodeFlags uint8

const (
	nodeAttached    nodeFlags = 1 << iota
	nodeUsable                // the engine could end a match at the block's end
	nodeCheckpoints           // checkpoints lie within the block
	nodeKnown                 // the block's end is a known end
	nodeSuspect               // listed in ends.suspects
)

func (n *node) has(f nodeFlags) bool { return n.flags&f != 0 }

// atCheckpoint says whether the block ends at a checkpoint, whose name is the
// name of the block's end as well.
func (n *node) atCheckpoint() bool { return n.endTokens%prefix.ChunkTokens == 0 }

// heldEnd is an end that grows block by block.
type heldEnd struct {
	id    uint32
	grew  bool      // since the last delta
	since time.Time // first delta that saw it
	quiet time.Time // latest delta that saw it grown
}

// domainUse prepares the keys of a domain while blocks of it are attached.
type domainUse struct {
	keyer  *prefix.Keyer
	blocks uint32
}

// ends decides which prefixes are worth a name and counts them in set. Known
// ends are the ends of prompts, forks, and wherever a usable prefix stops;
// growth by single blocks is held back.
type ends struct {
	key     prefix.ClusterKey
	blocks  Blocks
	set     announcedSet
	nodes   []node // by block id
	domains []domainUse
	held    []heldEnd
	// suspects are blocks that may have become the last usable one of their
	// prefix; whether they are is decided when a delta is built.
	suspects []uint32
	attached int // blocks attached since the last end of a store event
	scratch  []Checkpoint
}

func (e *ends) node(id uint32) *node { return &e.nodes[id] }

// Attached implements Listener.
func (e *ends) Attached(b Block) {
	if b.EndTokens > MaxDepthTokens {
		return
	}
	if int(b.ID) >= len(e.nodes) {
		e.nodes = append(e.nodes, make([]node, int(b.ID)+1-len(e.nodes))...)
	}
	n := e.node(b.ID)
	flags := n.flags&nodeSuspect | nodeAttached
	*n = node{parent: b.Parent, endTokens: b.EndTokens, domain: b.Domain, flags: flags}
	if b.Usable {
		n.flags |= nodeUsable
	}
	if b.StartTokens/prefix.ChunkTokens != b.EndTokens/prefix.ChunkTokens {
		n.flags |= nodeCheckpoints
	}
	e.attached++
	e.useDomain(b.Domain)
	e.suspect(b.ID)
	e.attachToParent(n)
	e.nameCheckpoints(b.ID, 1)
}

// attachToParent makes forks known, and the ends of blocks before a checkpoint
// that lies inside the next block: a match cannot end at such a checkpoint, so
// the end before it stands in.
func (e *ends) attachToParent(n *node) {
	if n.parent == 0 {
		return
	}
	p := e.node(n.parent)
	p.children++
	if n.has(nodeUsable) {
		p.usableChildren++
	}
	inside := n.has(nodeCheckpoints) && (!n.atCheckpoint() || n.endTokens-p.endTokens > prefix.ChunkTokens)
	if p.children >= 2 || inside {
		e.makeKnown(n.parent)
	}
}

// Detached implements Listener.
func (e *ends) Detached(id uint32) {
	if int(id) >= len(e.nodes) || !e.node(id).has(nodeAttached) {
		return // too deep to be followed
	}
	n := e.node(id)
	e.nameCheckpoints(id, -1)
	if n.has(nodeKnown) {
		e.nameEnd(id, -1)
	}
	e.release(n)
	if n.parent != 0 {
		p := e.node(n.parent)
		p.children--
		if n.has(nodeUsable) {
			p.usableChildren--
		}
		e.suspect(n.parent)
	}
	if d := &e.domains[n.domain]; d.blocks == 1 {
		*d = domainUse{}
	} else {
		d.blocks--
	}
	n.flags &= nodeSuspect // the list of suspects still names the id
}

// UsableChanged implements Listener.
func (e *ends) UsableChanged(id uint32, usable bool) {
	if int(id) >= len(e.nodes) || !e.node(id).has(nodeAttached) || e.node(id).has(nodeUsable) == usable {
		return
	}
	n := e.node(id)
	if n.has(nodeKnown) {
		e.nameEnd(id, -1)
	}
	e.nameCheckpoints(id, -1)
	n.flags ^= nodeUsable
	e.nameCheckpoints(id, 1)
	if n.has(nodeKnown) {
		e.nameEnd(id, 1)
	}
	e.suspect(id)
	if n.parent != 0 {
		if p := e.node(n.parent); usable {
			p.usableChildren++
		} else {
			p.usableChildren--
		}
		e.suspect(n.parent)
	}
}

// StoreEnded implements Listener.
func (e *ends) StoreEnded(id uint32) {
	attached := e.attached
	e.attached = 0
	if attached == 0 || int(id) >= len(e.nodes) || !e.node(id).has(nodeAttached) {
		return
	}
	n := e.node(id)
	if attached == 1 && n.children == 0 && n.parent != 0 && e.node(n.parent).children == 1 {
		e.grow(n.parent, id)
		return
	}
	e.makeKnown(id)
}

// grow holds back the end id, which extends the end from by one block.
func (e *ends) grow(from, id uint32) {
	p, n := e.node(from), e.node(id)
	if n.held != 0 {
		return
	}
	if p.held != 0 {
		n.held, p.held = p.held, 0
		e.suspect(from) // the last usable one still, if the new block is not usable
	} else {
		e.held = append(e.held, heldEnd{})
		n.held = uint32(len(e.held))
	}
	h := &e.held[n.held-1]
	h.id, h.grew = id, true
}

// release forgets that an end is held.
func (e *ends) release(n *node) {
	if n.held == 0 {
		return
	}
	i, last := int(n.held-1), len(e.held)-1
	n.held = 0
	if i != last {
		e.held[i] = e.held[last]
		e.node(e.held[i].id).held = uint32(i + 1)
	}
	e.held = e.held[:last]
}

// cleared forgets all blocks.
func (e *ends) cleared() {
	clear(e.nodes)
	clear(e.domains)
	e.held, e.suspects, e.attached = e.held[:0], e.suspects[:0], 0
	e.set.clear()
}

// suspect puts a block on the list of those to look at for the next delta.
func (e *ends) suspect(id uint32) {
	if n := e.node(id); !n.has(nodeSuspect) {
		n.flags |= nodeSuspect
		e.suspects = append(e.suspects, id)
	}
}

// settle makes known what is an end at the time of a delta: the last usable
// block of each prefix, unless it is held. It returns how long the oldest end
// that it set free had been held.
func (e *ends) settle(now time.Time) (held time.Duration) {
	for i := 0; i < len(e.held); {
		h := &e.held[i]
		if h.since.IsZero() {
			h.since = now
		}
		if h.grew {
			h.grew, h.quiet = false, now
		}
		if age := now.Sub(h.since); age >= maxHold || now.Sub(h.quiet) >= quietHold {
			held = max(held, age)
			e.suspect(h.id)
			e.release(e.node(h.id)) // moves another one to i
			continue
		}
		i++
	}
	for _, id := range e.suspects {
		n := e.node(id)
		n.flags &^= nodeSuspect
		if n.has(nodeAttached) && n.has(nodeUsable) && n.usableChildren == 0 && n.held == 0 {
			e.makeKnown(id)
		}
	}
	e.suspects = e.suspects[:0]
	return held
}

// makeKnown makes the end of a block a known end; it stays one as long as the
// block is attached.
func (e *ends) makeKnown(id uint32) {
	n := e.node(id)
	if n.has(nodeKnown) {
		return
	}
	e.release(n)
	n.flags |= nodeKnown
	e.nameEnd(id, 1)
}

// nameEnd counts a known end, by 1 or -1, if a match may end there. The name of
// a checkpoint is left to nameCheckpoints.
func (e *ends) nameEnd(id uint32, by int32) {
	n := e.node(id)
	if n.atCheckpoint() || !n.has(nodeUsable) {
		return
	}
	k := e.domains[n.domain].keyer.Key(e.blocks.PointOf(id), n.endTokens)
	e.set.change(k, n.endTokens, by, by)
}

// nameCheckpoints counts the checkpoints within a block, by 1 or -1.
func (e *ends) nameCheckpoints(id uint32, by int32) {
	n := e.node(id)
	if !n.has(nodeCheckpoints) {
		return
	}
	e.scratch = e.blocks.CheckpointsIn(id, e.scratch[:0])
	for _, c := range e.scratch {
		var endBy int32
		if c.DepthTokens == n.endTokens && n.has(nodeUsable) {
			endBy = by
		}
		k := e.domains[n.domain].keyer.Key(c.Chain, c.DepthTokens)
		e.set.change(k, c.DepthTokens, by, endBy)
	}
}

func (e *ends) useDomain(i uint16) {
	if int(i) >= len(e.domains) {
		e.domains = append(e.domains, make([]domainUse, int(i)+1-len(e.domains))...)
	}
	d := &e.domains[i]
	if d.blocks == 0 {
		d.keyer = prefix.NewKeyer(e.key, e.blocks.DomainOf(i))
	}
	d.blocks++
}
