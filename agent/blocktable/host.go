package blocktable

import "waypost/gossip/summary"

// FollowHost says whether the engine reads blocks back that it offloaded to host
// memory and tells of all that comes and goes there. Then a block in host memory is
// resident and attached as one in GPU memory is, on a tier of its own; else what is
// in host memory counts for nothing, as it does from New on. Blocks that were
// stored in host memory alone before are known from their next store.
//
// Where groups hold only the last blocks of a prefix, host memory counts for
// nothing: which of these blocks are there is not told.
func (t *Table) FollowHost(on bool) {
	if on == t.followHost {
		return
	}
	t.followHost = on
	if t.hostCopies > 0 {
		t.rebuild()
	}
}

// hostHolds says whether host memory holds a block for a group.
func (t *Table) hostHolds(g *group, id uint32) bool {
	if !t.followHost || len(t.windows) > 0 {
		return false
	}
	host := t.groups[MediumCPU][g.index]
	return host != nil && host.count(id) > 0
}

// placesHost says whether stores of a group in host memory tell where blocks belong
// and what they hold: blocks there may be of another length than in GPU memory.
func (t *Table) placesHost(g *group) bool {
	if !t.followHost || g.medium != MediumCPU {
		return false
	}
	gpu := t.groups[MediumGPU][g.index]
	return gpu != nil && gpu.structural
}

// tierOf is the slowest memory that a resident block must be read from.
func (t *Table) tierOf(id uint32) summary.Tier {
	if !t.followHost {
		return summary.TierGPU
	}
	for _, g := range t.required {
		if g.count(id) == 0 {
			return summary.TierHost
		}
	}
	return summary.TierGPU
}

// tellTier tells that an attached block is on another tier than it was.
func (t *Table) tellTier(id uint32, was summary.Tier) {
	if t.tiers == nil || t.nodes.at(id).flags&flagAttached == 0 {
		return
	}
	if tier := t.tierOf(id); tier != was {
		t.tiers.TierChanged(id, tier)
	}
}
