package prefixindex

import (
	"slices"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// calls are those of one frame.
type calls struct {
	ops      []op
	arranged []op
	order    []uint64
}

// An element of order sorts a call by its chunk, then by the checkpoint that the
// chunk follows, then as it came.
const (
	orderIndexBits  = 24
	orderAnchorBits = 24
	maxOrdered      = 1 << orderIndexBits
	orderAnchorMask = 1<<orderAnchorBits - 1
	orderDone       = 1 << 63 // beyond any chunk
)

// arrange orders calls so that a search never finds less than it would both
// before the frame and after it. What is added comes before what is taken out
// elsewhere: a run that is cut gets its new end first. Deep chunks are added
// first and taken out last, since it is the deepest key that decides, and what is
// listed on the way to it may be usable less far than what it takes the place of.
// Calls about one chunk stay together in the order in which they came; they are
// seen at once (see [Index.hold]).
func (c *calls) arrange() []op {
	if len(c.ops) < 2 || len(c.ops) > maxOrdered {
		return c.ops
	}
	c.arranged = c.arranged[:0]
	for from := 0; from < len(c.ops); {
		to := from
		for to < len(c.ops) && c.ops[to].kind != opReset {
			to++
		}
		c.arrangePart(from, to)
		if to < len(c.ops) {
			c.arranged = append(c.arranged, c.ops[to])
			to++
		}
		from = to
	}
	return c.arranged
}

// arrangePart arranges calls between resets.
func (c *calls) arrangePart(from, to int) {
	c.order = c.order[:0]
	for i := from; i < to; i++ {
		n := &c.ops[i].name
		anchor := n.key
		if n.isPoint() && n.parent != 0 {
			anchor = n.parent
		}
		chunk := uint64(min(n.depth, summary.MaxDepthTokens) / prefix.ChunkTokens)
		c.order = append(c.order, chunk<<(orderAnchorBits+orderIndexBits)|uint64(anchor)&orderAnchorMask<<orderIndexBits|uint64(i))
	}
	slices.Sort(c.order)
	for end := len(c.order); end > 0; {
		start, removesOnly := end-1, true
		for ; start >= 0 && c.order[start]>>orderIndexBits == c.order[end-1]>>orderIndexBits; start-- {
			removesOnly = removesOnly && c.at(start).kind == opRemove
		}
		start++
		if !removesOnly {
			for i := start; i < end; i++ {
				c.arranged = append(c.arranged, *c.at(i))
				c.order[i] |= orderDone
			}
		}
		end = start
	}
	for i, o := range c.order {
		if o&orderDone == 0 {
			c.arranged = append(c.arranged, *c.at(i))
		}
	}
}

func (c *calls) at(i int) *op { return &c.ops[c.order[i]&(maxOrdered-1)] }
