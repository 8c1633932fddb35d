package prefixindex

import (
	"slices"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// calls are those of one frame.
type calls struct {
	ops    []op
	resets bool     // some of them clear the cache
	order  []uint32 // numbers of ops, as they are to be made
	sorted []uint64
	unsort []uint64
	starts []int32 // of the chunks among sorted
}

// An element of sorted sorts a call by its chunk, then by the checkpoint that the
// chunk follows, then as it came.
const (
	sortIndexBits  = 24
	sortAnchorBits = 24
	sortChunkShift = sortIndexBits + sortAnchorBits
	sortAnchorMask = 1<<sortAnchorBits - 1
	maxSorted      = 1 << sortIndexBits
	sortDone       = 1 << 63 // beyond any chunk
)

// arrange orders calls so that a search never finds less than it would both
// before the frame and after it. What is added comes before what is taken out
// elsewhere: a run that is cut gets its new end first. Deep chunks are added
// first and taken out last, since it is the deepest key that decides, and what is
// listed on the way to it may be usable less far than what it takes the place of.
// Calls about one chunk stay together in the order in which they came; they are
// seen at once (see [Index.hold]).
func (c *calls) arrange() {
	c.order = c.order[:0]
	if len(c.ops) < 2 || len(c.ops) > maxSorted {
		for i := range c.ops {
			c.order = append(c.order, uint32(i))
		}
		return
	}
	for from := 0; from < len(c.ops); {
		to := from
		for to < len(c.ops) && c.ops[to].kind != opReset {
			to++
		}
		c.arrangePart(from, to)
		if to < len(c.ops) {
			c.order = append(c.order, uint32(to))
			to++
		}
		from = to
	}
}

// arrangePart arranges calls between resets.
func (c *calls) arrangePart(from, to int) {
	c.sort(from, to)
	for end := len(c.sorted); end > 0; {
		start, removesOnly := end-1, true
		for ; start >= 0 && c.sorted[start]>>sortIndexBits == c.sorted[end-1]>>sortIndexBits; start-- {
			removesOnly = removesOnly && c.ops[c.at(start)].kind == opRemove
		}
		start++
		if !removesOnly {
			for i := start; i < end; i++ {
				c.order = append(c.order, c.at(i))
				c.sorted[i] |= sortDone
			}
		}
		end = start
	}
	for i, o := range c.sorted {
		if o&sortDone == 0 {
			c.order = append(c.order, c.at(i))
		}
	}
}

func (c *calls) at(i int) uint32 { return uint32(c.sorted[i] & (maxSorted - 1)) }

// sort sorts calls. There are few chunks as a rule, and few calls about each.
func (c *calls) sort(from, to int) {
	c.unsort = c.unsort[:0]
	least, most := uint64(summary.MaxDepthTokens), uint64(0)
	for i := from; i < to; i++ {
		n := &c.ops[i].name
		anchor := n.key
		if n.isPoint() && n.parent != 0 {
			anchor = n.parent
		}
		chunk := uint64(min(n.depth, summary.MaxDepthTokens) / prefix.ChunkTokens)
		least, most = min(least, chunk), max(most, chunk)
		c.unsort = append(c.unsort, chunk<<sortChunkShift|uint64(anchor)&sortAnchorMask<<sortIndexBits|uint64(i))
	}
	c.sorted = append(c.sorted[:0], c.unsort...)
	if most-least > uint64(4*(to-from)) {
		slices.Sort(c.sorted)
		return
	}
	c.starts = slices.Grow(c.starts[:0], int(most-least)+2)[:most-least+2]
	clear(c.starts)
	for _, o := range c.unsort {
		c.starts[o>>sortChunkShift-least+1]++
	}
	for i := 1; i < len(c.starts); i++ {
		c.starts[i] += c.starts[i-1]
	}
	for _, o := range c.unsort {
		at := &c.starts[o>>sortChunkShift-least]
		c.sorted[*at] = o
		*at++
	}
	start := int32(0)
	for _, end := range c.starts[:len(c.starts)-1] { // of the chunk now
		slices.Sort(c.sorted[start:end])
		start = end
	}
}
