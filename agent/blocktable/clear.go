package blocktable

// Clear forgets everything, groups and tiers included: the engine's process
// ended. Whether copies are counted is kept.
func (t *Table) Clear() {
	told := t.attached > 0
	t.wipe()
	t.groups = [mediums][maxGroups]*group{}
	t.allGroups, t.required, t.windows = nil, nil, nil
	t.rank = rankNone
	t.stats = Stats{}
	t.history.cleared(false)
	if told {
		t.listener.Cleared()
	}
}

// wipe drops every node and copy and keeps memory and groups.
func (t *Table) wipe() {
	t.nodes.reset()
	t.byHash.reset()
	t.byContent.reset()
	clear(t.chains)
	t.heads.forgetAll()
	for i := range t.slabs {
		t.slabs[i].reset()
	}
	clear(t.domainOf)
	t.domains, t.freeDomain = t.domains[:0], t.freeDomain[:0]
	for _, g := range t.allGroups {
		g.reset()
	}
	t.copies, t.held, t.hostCopies, t.resident, t.attached = 0, 0, 0, 0, 0
}

// clearTier drops every copy in a medium other than GPU memory; what is held
// there stays.
func (t *Table) clearTier(m Medium) {
	if m == MediumCPU {
		if t.hostCopies > 0 {
			t.dropAll(m)
		}
		return
	}
	for _, g := range t.allGroups {
		if g.medium == m {
			g.reset()
		}
	}
	if !t.hasTiers() {
		return
	}
	for id := uint32(1); id <= t.nodes.made; id++ {
		if t.nodes.at(id).flags&flagUsed != 0 {
			t.release(id)
		}
	}
}

// clearGPU drops every copy in GPU memory; other tiers keep theirs.
func (t *Table) clearGPU() {
	told := t.attached > 0
	if t.copies == 0 {
		// Clears where nothing is held come in floods.
		t.history.cleared(true)
		return
	}
	switch {
	case t.followHost && t.hostCopies > 0:
		// What is in host memory too stays attached.
		t.dropAll(MediumGPU)
		told = false
	case t.hasTiers():
		t.clearGPUCopies()
	default:
		t.wipe()
	}
	t.history.cleared(true)
	if told {
		t.listener.Cleared()
	}
}

// dropAll drops every copy in a medium, one by one.
func (t *Table) dropAll(m Medium) {
	for _, g := range t.allGroups {
		if g.medium != m {
			continue
		}
		for id := uint32(1); id <= t.nodes.made; id++ {
			for g.count(id) > 0 {
				t.dropCopy(g, id)
			}
		}
	}
}

func (t *Table) hasTiers() bool {
	for _, g := range t.allGroups {
		if g.medium != MediumGPU {
			return true
		}
	}
	return false
}

func (t *Table) clearGPUCopies() {
	for _, g := range t.allGroups {
		if g.medium == MediumGPU {
			g.reset()
		}
	}
	t.copies, t.held, t.resident, t.attached = 0, 0, 0, 0
	clear(t.chains)
	for id := uint32(1); id <= t.nodes.made; id++ {
		if n := t.nodes.at(id); n.flags&flagRoot == 0 {
			n.flags &^= flagResident | flagAttached | flagUsable
		}
	}
	for id := uint32(1); id <= t.nodes.made; id++ {
		if t.nodes.at(id).flags&flagUsed != 0 {
			t.release(id)
		}
	}
	for i := range t.domains {
		if root := t.domains[i].root; root != 0 {
			t.startRuns(root)
		}
	}
}
