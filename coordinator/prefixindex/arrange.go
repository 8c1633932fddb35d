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
	sorted []uint64 // see sortChunkShift
	unsort []uint64
	starts []int32 // of the chunks among sorted
}

// An element of sorted sorts a call by its chunk, then by the checkpoint that the
// chunk follows, then as it came. Its lowest bit is set unless the call removes.
const (
	sortIndexShift = 1
	sortIndexBits  = 23
	sortRestBits   = sortIndexShift + sortIndexBits
	sortAnchorBits = 24
	sortChunkShift = sortRestBits + sortAnchorBits
	sortAnchorMask = 1<<sortAnchorBits - 1
	maxSorted      = 1 << sortIndexBits
	sortKeeps      = 1
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
	sorted := c.sorted
	for end := len(sorted); end > 0; {
		place := sorted[end-1] >> sortRestBits
		start, keeps := end-1, sorted[end-1]
		for ; start > 0 && sorted[start-1]>>sortRestBits == place; start-- {
			keeps |= sorted[start-1]
		}
		if keeps&sortKeeps != 0 {
			for i := start; i < end; i++ {
				c.order = append(c.order, indexOf(sorted[i]))
				sorted[i] |= sortDone
			}
		}
		end = start
	}
	for _, o := range sorted {
		if o&sortDone == 0 {
			c.order = append(c.order, indexOf(o))
		}
	}
}

// indexOf is the number of a call among those of its frame.
func indexOf(sorted uint64) uint32 { return uint32(sorted>>sortIndexShift) & (maxSorted - 1) }

// sort sorts calls. There are few chunks as a rule, and few calls about each.
func (c *calls) sort(from, to int) {
	n := to - from
	c.unsort = slices.Grow(c.unsort[:0], n)[:n]
	c.sorted = slices.Grow(c.sorted[:0], n)[:n]
	least, most := uint64(summary.MaxDepthTokens), uint64(0)
	for i := range c.unsort {
		o := &c.ops[from+i]
		anchor := o.key
		if o.isPoint() && o.parent != 0 {
			anchor = o.parent
		}
		chunk := uint64(min(o.depth, summary.MaxDepthTokens) / prefix.ChunkTokens)
		least, most = min(least, chunk), max(most, chunk)
		e := chunk<<sortChunkShift | uint64(anchor)&sortAnchorMask<<sortRestBits | uint64(from+i)<<sortIndexShift
		if o.kind != opRemove {
			e |= sortKeeps
		}
		c.unsort[i] = e
	}
	if most-least > uint64(4*n) {
		copy(c.sorted, c.unsort)
		slices.Sort(c.sorted)
		return
	}
	c.starts = slices.Grow(c.starts[:0], int(most-least)+2)[:most-least+2]
	starts := c.starts
	clear(starts)
	for _, o := range c.unsort {
		starts[o>>sortChunkShift-least+1]++
	}
	for i := 1; i < len(starts); i++ {
		starts[i] += starts[i-1]
	}
	for _, o := range c.unsort {
		at := &starts[o>>sortChunkShift-least]
		c.sorted[*at] = o
		*at++
	}
	start := int32(0)
	for _, end := range starts[:len(starts)-1] { // of the chunk now
		sortFew(c.sorted[start:end])
		start = end
	}
}

// sortFew sorts numbers that are few as a rule.
func sortFew(list []uint64) {
	if len(list) > 12 {
		slices.Sort(list)
		return
	}
	for i := 1; i < len(list); i++ {
		v, at := list[i], i
		for ; at > 0 && list[at-1] > v; at-- {
			list[at] = list[at-1]
		}
		list[at] = v
	}
}
