package blocktable

import "waypost/gossip/prefix"

// head remembers the tokens from the last checkpoint to the end of one linked
// node. Blocks of a prompt are asked about one after the other, forward when they
// are stored and backward when they are removed, and each is named by a hash over
// all tokens since the checkpoint: those of the former are nearly those of the
// next.
type head struct {
	id     uint32 // 0: none
	from   uint32 // depth in tokens of the checkpoint
	tokens []uint32
}

// forget is for when the node it knows may become another one.
func (h *head) forget() { h.id = 0 }

func checkpointBefore(depth uint32) uint32 { return depth / prefix.ChunkTokens * prefix.ChunkTokens }

// headTo gives the tokens from the last checkpoint at or before the end of a
// linked node to its end; none of a root. They are valid until the next call.
func (t *Table) headTo(id uint32) []uint32 {
	h := &t.head
	if h.id == id {
		return h.tokens
	}
	n := t.nodes.at(id)
	from := checkpointBefore(n.end)
	switch {
	case h.id != 0 && t.nodes.at(h.id).parent == id && h.from == from:
		h.tokens = h.tokens[:n.end-from]
	case h.id != 0 && n.parent == h.id && h.from == from:
		h.tokens = append(h.tokens, t.tokensOf(n)...)
	default:
		h.tokens = t.gather(h.tokens[:0], id, from)
	}
	h.id, h.from = id, from
	return h.tokens
}

// headUp is for a node that is about to lose its tokens: the one above is likely
// to be asked about next.
func (t *Table) headUp(id uint32) {
	h := &t.head
	if h.id != id {
		return
	}
	above := t.nodes.at(id).parent
	end := t.nodes.at(above).end
	if end < h.from {
		h.forget()
		return
	}
	h.id, h.tokens = above, h.tokens[:end-h.from]
}

// walkCheckpoints calls do with the chain value at each checkpoint in a node, at
// its end too. The node's parent is attached and its end is known.
func (t *Table) walkCheckpoints(id uint32, do func(depth uint32, c prefix.Chain)) {
	n := t.nodes.at(id)
	p := t.nodes.at(n.parent)
	h := &t.head
	tokens := append(t.headTo(n.parent), t.tokensOf(n)...)
	left, c := tokens, t.chains.at(p.chain)
	for depth := nextCheckpoint(p.end); depth <= n.end; depth += prefix.ChunkTokens {
		c = prefix.Next(c, left[:prefix.ChunkTokens])
		left = left[prefix.ChunkTokens:]
		do(depth, c)
	}
	h.id, h.from = id, checkpointBefore(n.end)
	h.tokens = append(tokens[:0], left...)
}

func nextCheckpoint(depth uint32) uint32 { return checkpointBefore(depth) + prefix.ChunkTokens }

// gather appends the tokens from a depth to the end of a node.
func (t *Table) gather(dst []uint32, id uint32, from uint32) []uint32 {
	left := int(t.nodes.at(id).end - from)
	at := len(dst)
	if cap(dst) < at+left {
		dst = append(make([]uint32, 0, at+left+prefix.ChunkTokens), dst...)
	}
	dst = dst[:at+left]
	for out := dst[at:]; left > 0; {
		n := t.nodes.at(id)
		if s := &t.slabs[n.class]; s.length <= left {
			left -= s.length
			s.read(out[left:], n.slot)
		} else {
			tokens := t.tokensOf(n)
			copy(out, tokens[len(tokens)-left:])
			left = 0
		}
		id = n.parent
	}
	return dst
}

// chains keeps the chain values at checkpoints. A block has that of the last
// checkpoint at or before its end, which most share with the block above: it
// belongs to the node that reaches it. Slot 0 is that of the empty prefix.
type chains struct {
	values []prefix.Chain
	free   []uint32
}

func (s *chains) at(slot uint32) prefix.Chain {
	if slot == 0 {
		return 0
	}
	return s.values[slot-1]
}

func (s *chains) take(c prefix.Chain) uint32 {
	if k := len(s.free); k > 0 {
		slot := s.free[k-1]
		s.free = s.free[:k-1]
		s.values[slot-1] = c
		return slot
	}
	s.values = append(s.values, c)
	return uint32(len(s.values))
}

func (s *chains) give(slot uint32) { s.free = append(s.free, slot) }

// reset is for when nothing is attached any more.
func (s *chains) reset() { s.values, s.free = s.values[:0], s.free[:0] }
