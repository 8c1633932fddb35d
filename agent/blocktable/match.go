package blocktable

import (
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

var (
	_ summary.Blocks   = (*Table)(nil)
	_ summary.Listener = silent{}
)

// Match is the number of tokens of a prompt that the engine would reuse now:
// the longest unbroken prefix of whole blocks that every group can serve and
// that leaves at least the last token to compute, so at most
// floor((n-1)/block)*block.
func (t *Table) Match(tokens []uint32, adapter, salt string) int {
	i, ok := t.domainOf[prefix.Domain{Model: t.model, Adapter: adapter, Salt: salt}]
	if !ok {
		return 0
	}
	return t.reuse(t.domains[i].root, 0, tokens)
}

// reuse is how much of a prompt can be reused of which depth tokens lead to a
// node; 0 stands for no more than that. Of twins the one that leads furthest
// counts.
func (t *Table) reuse(cur uint32, depth int, tokens []uint32) (longest int) {
	for {
		var room [maxTwins + 1]uint32
		twins := room[:0]
		for _, class := range t.longestFirst {
			length := t.slabs[class].length
			if depth+length >= len(tokens) {
				continue
			}
			if twins = t.appendAttached(twins, cur, class, tokens[depth:depth+length]); len(twins) > 0 {
				depth += length
				break
			}
		}
		if len(twins) == 0 {
			return longest
		}
		for _, id := range twins {
			if t.nodes.at(id).flags&flagUsable != 0 {
				longest = max(longest, depth)
			}
		}
		for _, id := range twins[1:] {
			longest = max(longest, t.reuse(id, depth, tokens))
		}
		cur = twins[0]
	}
}

// PointOf gives the chain value of the prefix that ends with an attached block.
func (t *Table) PointOf(id uint32) prefix.Chain {
	n := t.nodes.at(id)
	from := n.end / prefix.ChunkTokens * prefix.ChunkTokens
	if from == n.end {
		return n.chain
	}
	return prefix.Point(n.chain, t.gather(id, from))
}

// PromptTo gives the tokens of the prompt that ends with a block, by the
// engine's hash of it; nil: it is not attached. They are valid until the next
// call.
func (t *Table) PromptTo(hash uint64) []uint32 {
	id := t.findHash(hash)
	if id == 0 || t.nodes.at(id).flags&flagAttached == 0 {
		return nil
	}
	return t.gather(id, 0)
}

// CheckpointsIn appends the checkpoints inside an attached block or at its end.
func (t *Table) CheckpointsIn(id uint32, dst []summary.Checkpoint) []summary.Checkpoint {
	n := t.nodes.at(id)
	start := t.nodes.at(n.parent).end
	first, last := start/prefix.ChunkTokens+1, n.end/prefix.ChunkTokens
	for j := first; j <= last; j++ {
		c := n.chain
		if j < last {
			c = t.chainAt(id, j*prefix.ChunkTokens)
		}
		dst = append(dst, summary.Checkpoint{DepthTokens: j * prefix.ChunkTokens, Chain: c})
	}
	return dst
}

// DomainOf gives a domain by the index that blocks of it carry. It is valid
// while a block of the domain is attached.
func (t *Table) DomainOf(i uint16) prefix.Domain {
	if int(i) >= len(t.domains) {
		return prefix.Domain{}
	}
	return t.domains[i].name
}

// chainAt computes the chain value at a checkpoint inside a node whose parent
// is attached and whose end is known.
func (t *Table) chainAt(id uint32, depth uint32) prefix.Chain {
	p := t.nodes.at(t.nodes.at(id).parent)
	from := p.end / prefix.ChunkTokens * prefix.ChunkTokens
	tokens := t.gather(id, from)
	c := p.chain
	for ; from < depth; from += prefix.ChunkTokens {
		c = prefix.Next(c, tokens[:prefix.ChunkTokens])
		tokens = tokens[prefix.ChunkTokens:]
	}
	return c
}

// gather collects the tokens from a depth to the end of a node, valid until
// the next call.
func (t *Table) gather(id uint32, from uint32) []uint32 {
	left := int(t.nodes.at(id).end - from)
	if len(t.scratch) < left {
		t.scratch = make([]uint32, left+prefix.ChunkTokens)
	}
	out := t.scratch[:left]
	for left > 0 {
		n := t.nodes.at(id)
		tokens := t.slabs[n.class].at(n.slot)
		if len(tokens) > left {
			tokens = tokens[len(tokens)-left:]
		}
		left -= copy(out[left-len(tokens):left], tokens)
		id = n.parent
	}
	return out
}
