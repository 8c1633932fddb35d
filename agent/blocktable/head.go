package blocktable

import (
	"slices"

	"waypost/gossip/prefix"
)

// maxHeads is for how many prompts heads are remembered: about as many as an engine
// answers at once.
const maxHeads = 32

// head remembers the tokens from the last checkpoint to the end of one attached
// node. Blocks of a prompt are asked about one after the other when they are stored,
// and each is named by a hash over all tokens since the checkpoint: those of the
// former are nearly those of the next.
type head struct {
	from  uint32 // depth in tokens of the checkpoint
	grew  bool   // since a place was last looked for
	chain prefix.Chain
	// tokens has room for a chunk once it is used, and never for more, whatever the
	// length of the blocks.
	tokens  []uint32
	growing prefix.Growing // from chain on, along tokens
}

// heads are the heads of the prompts that were asked about last. An engine stores
// the blocks of many answers in turn.
type heads struct {
	ids  [maxHeads]uint32 // 0: none
	list [maxHeads]head
	near [256]uint8 // how many ids there are with the low byte
	last int        // the place that was used last
	hand int        // the place that is looked at next for a new one
}

// find gives the place of the head that ends with a node; -1: there is none.
func (h *heads) find(id uint32) int {
	switch {
	case h.near[uint8(id)] == 0 || id == 0:
		return -1
	case h.ids[h.last] == id:
		return h.last
	}
	return slices.Index(h.ids[:], id)
}

// move has the head at a place end with another node; 0: with none. No two end with
// one.
func (h *heads) move(place int, id uint32) {
	if other := h.find(id); other >= 0 {
		h.near[uint8(id)]--
		h.ids[other] = 0
	}
	if old := h.ids[place]; old != 0 {
		h.near[uint8(old)]--
	}
	if h.ids[place] = id; id != 0 {
		h.near[uint8(id)]++
	}
}

// forget is for when the node that a head ends with may become another one.
func (h *heads) forget(id uint32) {
	if place := h.find(id); place >= 0 {
		h.move(place, 0)
	}
}

// forgetAll is for when all nodes may.
func (h *heads) forgetAll() {
	h.ids, h.near = [maxHeads]uint32{}, [256]uint8{}
}

// room gives the place for another head: that of one that did not grow, as those
// of answers do.
func (h *heads) room() int {
	for {
		h.hand = (h.hand + 1) % maxHeads
		switch kept := &h.list[h.hand]; {
		case h.ids[h.hand] != 0 && kept.grew:
			kept.grew = false
		case h.hand != h.last:
			return h.hand
		}
	}
}

func checkpointBefore(depth uint32) uint32 { return depth / prefix.ChunkTokens * prefix.ChunkTokens }

// headTo gives the head that ends with an attached node: without tokens if that is
// a checkpoint. It is valid until the next call.
func (t *Table) headTo(id uint32) *head {
	s := &t.heads
	if place := s.find(id); place >= 0 {
		s.last = place
		return &s.list[place]
	}
	n := t.nodes.at(id)
	from := checkpointBefore(n.end)
	if place := s.find(n.parent); place >= 0 && s.list[place].from == from {
		h := &s.list[place]
		h.tokens, h.grew = append(h.tokens, t.tokensOf(n)...), true
		s.move(place, id)
		s.last = place
		return h
	}
	s.last = s.room()
	h := &s.list[s.last]
	if h.tokens == nil {
		h.tokens = make([]uint32, 0, prefix.ChunkTokens)
	}
	var reaches uint32
	h.tokens, reaches = t.gather(h.tokens[:0], id, from)
	h.chain = t.chains[reaches] // that of a root is 0
	h.growing.Reset()
	h.from = from
	s.move(s.last, id)
	return h
}

// walkCheckpoints calls do with the chain value at each checkpoint in a node, at
// its end too. The node's parent is attached and its end is known.
func (t *Table) walkCheckpoints(id uint32, do func(depth uint32, c prefix.Chain)) {
	n := t.nodes.at(id)
	p := t.nodes.at(n.parent)
	h := t.headTo(n.parent)
	left, c := t.tokensOf(n), h.chain
	for depth := nextCheckpoint(p.end); depth <= n.end; depth += prefix.ChunkTokens {
		missing := prefix.ChunkTokens - len(h.tokens)
		h.tokens = append(h.tokens, left[:missing]...)
		c = h.growing.To(c, h.tokens)
		h.growing.Reset()
		h.tokens, left = h.tokens[:0], left[missing:]
		do(depth, c)
	}
	h.from, h.chain, h.grew = checkpointBefore(n.end), c, true
	h.tokens = append(h.tokens, left...)
	t.heads.move(t.heads.last, id)
}

func nextCheckpoint(depth uint32) uint32 { return checkpointBefore(depth) + prefix.ChunkTokens }

// gather appends the tokens from a depth to the end of a node. It gives the node
// that reaches that depth too.
func (t *Table) gather(dst []uint32, id uint32, from uint32) (tokens []uint32, reaches uint32) {
	left := int(t.nodes.at(id).end - from)
	at := len(dst)
	dst = slices.Grow(dst, left)[:at+left]
	for out := dst[at:]; left > 0; {
		n := t.nodes.at(id)
		s := &t.slabs[n.class]
		if s.length > left {
			tokens := t.tokensOf(n)
			copy(out, tokens[len(tokens)-left:])
			break
		}
		left -= s.length
		s.read(out[left:], n.slot)
		id = n.parent
	}
	return dst, id
}
