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
		for _, length := range t.longestFirst {
			if depth+length >= len(tokens) {
				continue
			}
			if twins = t.appendAttached(twins, cur, tokens[depth:depth+length]); len(twins) > 0 {
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
	if t.history != nil && t.nodes.at(id).flags&flagRoot == 0 {
		return t.history.point(id)
	}
	return t.hashTo(id)
}

// hashTo is PointOf where nothing knows it yet.
func (t *Table) hashTo(id uint32) prefix.Chain {
	h := t.headTo(id)
	if len(h.tokens) == 0 {
		return h.chain
	}
	return h.growing.To(h.chain, h.tokens)
}

// PromptTo gives the tokens of the prompt that ends with a block, by the
// engine's hash of it; nil: it is not attached.
func (t *Table) PromptTo(hash uint64) []uint32 {
	id := t.findHash(hash)
	if id == 0 || t.nodes.at(id).flags&flagAttached == 0 {
		return nil
	}
	tokens, _ := t.gather(nil, id, 0)
	return tokens
}

// PlaceOf gives the block before an attached block, 0: a root, and the depth in
// tokens after it.
func (t *Table) PlaceOf(id uint32) (parent, endTokens uint32) {
	n := t.nodes.at(id)
	if t.nodes.at(n.parent).flags&flagRoot == 0 {
		parent = n.parent
	}
	return parent, n.end
}

// CheckpointsIn appends the checkpoints inside an attached block or at its end.
func (t *Table) CheckpointsIn(id uint32, dst []summary.Checkpoint) []summary.Checkpoint {
	n := t.nodes.at(id)
	last := checkpointBefore(n.end)
	switch start := checkpointBefore(t.nodes.at(n.parent).end); {
	case last == start:
	case last == start+prefix.ChunkTokens:
		dst = append(dst, summary.Checkpoint{DepthTokens: last, Chain: t.chains[id]})
	default:
		t.walkCheckpoints(id, func(depth uint32, c prefix.Chain) {
			dst = append(dst, summary.Checkpoint{DepthTokens: depth, Chain: c})
		})
	}
	return dst
}

// DomainOf gives a domain by the index that blocks of it carry. It is valid
// while a block of the domain is attached.
func (t *Table) DomainOf(i uint16) prefix.Domain {
	if int(i) >= len(t.domains) || t.domains[i].name == nil {
		return prefix.Domain{}
	}
	return *t.domains[i].name
}
