package blocktable

import (
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// attachable are the flags of a node that is attached as soon as its parent is.
const attachable = flagLinked | flagResident

// tryAttach attaches a node and everything below that waited for it, if
// nothing above is missing.
func (t *Table) tryAttach(id uint32) {
	n := t.nodes.at(id)
	if n.flags&(attachable|flagOpaque|flagAttached) != attachable ||
		t.nodes.at(n.parent).flags&flagAttached == 0 {
		return
	}
	cur := id
	for {
		t.attachOne(cur)
		next := t.nextAttachable(t.nodes.at(cur).first)
		for next == 0 {
			if cur == id {
				return
			}
			if next = t.nextAttachable(t.nodes.next(cur)); next == 0 {
				cur = t.nodes.at(cur).parent
			}
		}
		cur = next
	}
}

func (t *Table) nextAttachable(id uint32) uint32 {
	return t.nodes.firstWith(id, attachable, flagOpaque|flagAttached)
}

func (t *Table) attachOne(id uint32) {
	n := t.nodes.at(id)
	p := t.nodes.at(n.parent)
	n.end = p.end + uint32(t.slabs[n.class].length)
	n.domain = p.domain
	n.flags |= flagAttached
	t.attached++
	if checkpointBefore(n.end) != checkpointBefore(p.end) {
		var last prefix.Chain
		t.walkCheckpoints(id, func(_ uint32, c prefix.Chain) { last = c })
		t.chains[id] = last
	}
	for _, g := range t.windows {
		g.setRun(id, t.runOf(g, id))
	}
	if t.isUsable(id) {
		n.flags |= flagUsable
	}
	t.history.attached(id)
	t.listener.Attached(t.block(id))
}

// detach detaches a node after everything below it.
func (t *Table) detach(id uint32) {
	cur := t.deepest(id)
	for {
		n := t.nodes.at(cur)
		t.listener.Detached(cur)
		t.history.unlisted(cur)
		if checkpointBefore(n.end) != checkpointBefore(t.nodes.at(n.parent).end) {
			delete(t.chains, cur)
		}
		n.flags &^= flagAttached | flagUsable
		t.attached--
		if cur == id {
			return
		}
		if next := t.nodes.firstWith(t.nodes.next(cur), flagAttached, 0); next != 0 {
			cur = t.deepest(next)
		} else {
			cur = n.parent
		}
	}
}

// deepest follows first attached children down.
func (t *Table) deepest(id uint32) uint32 {
	for {
		c := t.nodes.firstWith(t.nodes.at(id).first, flagAttached, 0)
		if c == 0 {
			return id
		}
		id = c
	}
}

// walkAttached visits the attached nodes below root, parents first.
func (t *Table) walkAttached(root uint32, visit func(id uint32)) {
	cur := root
	for {
		next := t.nodes.firstWith(t.nodes.at(cur).first, flagAttached, 0)
		for next == 0 {
			if cur == root {
				return
			}
			if next = t.nodes.firstWith(t.nodes.next(cur), flagAttached, 0); next == 0 {
				cur = t.nodes.at(cur).parent
			}
		}
		cur = next
		visit(cur)
	}
}

func (t *Table) block(id uint32) summary.Block {
	n := t.nodes.at(id)
	p := t.nodes.at(n.parent)
	b := summary.Block{
		ID: id, Parent: n.parent, StartTokens: p.end, EndTokens: n.end,
		Domain: n.domain, Usable: n.flags&flagUsable != 0, Tier: t.tierOf(id),
	}
	if p.flags&flagRoot != 0 {
		b.Parent = 0
	}
	return b
}

// runOf computes the run of an attached node from its parent's.
func (t *Table) runOf(g *group, id uint32) uint16 {
	if g.count(id) == 0 {
		return 0
	}
	n := t.nodes.at(id)
	// Blocks of a window group that are cut differently cannot be counted in
	// blocks of the prefix; only a single one is certain.
	if g.needBlocks > 1 && int(g.blockTokens) != t.slabs[n.class].length {
		return 0
	}
	return min(g.run(n.parent), g.needBlocks-1) + 1
}

func (t *Table) isUsable(id uint32) bool {
	for _, g := range t.windows {
		if g.run(id) < g.needBlocks {
			return false
		}
	}
	return true
}

// updateRuns lets a change of a window group's copies reach the nodes below,
// as far as it changes anything.
func (t *Table) updateRuns(g *group, id uint32) {
	cur := id
	for {
		next := uint32(0)
		if t.updateRun(g, cur) {
			next = t.nodes.firstWith(t.nodes.at(cur).first, flagAttached, 0)
		}
		for next == 0 {
			if cur == id {
				return
			}
			if next = t.nodes.firstWith(t.nodes.next(cur), flagAttached, 0); next == 0 {
				cur = t.nodes.at(cur).parent
			}
		}
		cur = next
	}
}

// updateRun recomputes one node and says whether the nodes below may change.
func (t *Table) updateRun(g *group, id uint32) bool {
	run := t.runOf(g, id)
	if run == g.run(id) {
		return false
	}
	g.setRun(id, run)
	n := t.nodes.at(id)
	if usable := t.isUsable(id); usable != (n.flags&flagUsable != 0) {
		n.flags ^= flagUsable
		t.listener.UsableChanged(id, usable)
	}
	return true
}
