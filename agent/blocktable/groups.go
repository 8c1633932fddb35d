package blocktable

const (
	// maxGroups bounds the KV cache groups of one medium.
	maxGroups = 16

	maxCopies = 1<<16 - 1
	maxNeed   = 1<<16 - 1
)

// group is one KV cache group in one medium: how many copies it holds of each
// block, and what it means for a prefix.
type group struct {
	medium      Medium
	index       int32
	spec        Spec
	blockTokens int32
	window      int32

	// structural groups tell where blocks belong and what they hold.
	structural bool
	// needBlocks of window groups is how many blocks before the end of a
	// match must be held; 0 of all other groups.
	needBlocks uint16

	counts []*[pageNodes]uint16
	// runs of window groups: how many blocks in a row, ending with this one,
	// are held, up to needBlocks. A root counts as needBlocks, for nothing
	// before it can be missing; so a change reaches needBlocks nodes down.
	runs []*[pageNodes]uint16
}

func page(pages *[]*[pageNodes]uint16, id uint32) *uint16 {
	p := int(id >> pageShift)
	for p >= len(*pages) {
		*pages = append(*pages, nil)
	}
	if (*pages)[p] == nil {
		(*pages)[p] = new([pageNodes]uint16)
	}
	return &(*pages)[p][id&(pageNodes-1)]
}

func at(pages []*[pageNodes]uint16, id uint32) uint16 {
	p := int(id >> pageShift)
	if p >= len(pages) || pages[p] == nil {
		return 0
	}
	return pages[p][id&(pageNodes-1)]
}

func (g *group) count(id uint32) uint16     { return at(g.counts, id) }
func (g *group) run(id uint32) uint16       { return at(g.runs, id) }
func (g *group) setRun(id uint32, r uint16) { *page(&g.runs, id) = r }

func (g *group) reset() {
	for _, p := range g.counts {
		if p != nil {
			clear(p[:])
		}
	}
	for _, p := range g.runs {
		if p != nil {
			clear(p[:])
		}
	}
}

// The roles a group can have for a prefix.
type role uint8

const (
	// roleNone groups say nothing about prefixes.
	roleNone role = iota
	// roleWhole groups must hold every block of a prefix.
	roleWhole
	// roleWindow groups must hold its last blocks.
	roleWindow
)

// The ranks of kinds as definers of structure, best first. Only groups of the
// best rank seen define it: the others may leave blocks out or cut differently.
const (
	rankFull = iota
	rankUnknown
	rankOther
	rankNone
)

type trait struct {
	role role
	rank int
}

// traits says what each kind must hold. Chunked local attention needs the
// blocks since the start of a chunk whose length is not told, so the whole
// prefix is required: too little is claimed, never too much.
var traits = [specs]trait{
	SpecUnknown:          {roleWhole, rankUnknown},
	SpecFull:             {roleWhole, rankFull},
	SpecMLA:              {roleWhole, rankFull},
	SpecSinkFull:         {roleWhole, rankFull},
	SpecSlidingWindow:    {roleWindow, rankOther},
	SpecSlidingWindowMLA: {roleWindow, rankOther},
	SpecMamba:            {roleWindow, rankOther},
	SpecChunkedLocal:     {roleWhole, rankOther},
	SpecEncoderOnly:      {roleNone, rankNone},
	SpecCrossAttention:   {roleNone, rankNone},
}

func (g *group) trait() trait {
	tr := traits[g.spec]
	if tr.role == roleWindow && g.need() == 0 {
		tr.role = roleWhole
	}
	return tr
}

// need is how many of the last blocks a window group must hold: the window of
// the next token reaches window-1 tokens back; a recurrent state is held whole
// by the last block. It is 0 if it cannot be said.
func (g *group) need() uint16 {
	if g.spec == SpecMamba {
		return 1
	}
	if g.window <= 0 || g.blockTokens <= 0 {
		return 0
	}
	blocks := (int64(g.window) - 1 + int64(g.blockTokens) - 1) / int64(g.blockTokens)
	if blocks > maxNeed {
		return 0
	}
	return uint16(max(1, blocks))
}

// lookGroup gives the group that a removal is from, or nil if no store told of it.
// What is removed from a place that is not told is taken for gone from GPU memory.
func (t *Table) lookGroup(e *Event) *group {
	if e.Group < 0 || e.Group >= maxGroups || int(e.Medium) >= mediums {
		return nil
	}
	if e.Medium == MediumUnknown {
		return t.groups[MediumGPU][e.Group]
	}
	return t.groups[e.Medium][e.Group]
}

// unknownGroup gives the group of copies in places that are not told, if the
// event is of one; else nil.
func (t *Table) unknownGroup(e *Event) *group {
	if e.Group < 0 || e.Group >= maxGroups || e.Medium != MediumUnknown {
		return nil
	}
	return t.groups[MediumUnknown][e.Group]
}

// groupFor gives the group of a store, learning what the event tells about it.
func (t *Table) groupFor(e *Event) *group {
	if e.Group < 0 || e.Group >= maxGroups || int(e.Medium) >= mediums || int(e.Spec) >= specs {
		return nil
	}
	g := t.groups[e.Medium][e.Group]
	changed := false
	if g == nil {
		g = &group{medium: e.Medium, index: e.Group}
		t.groups[e.Medium][e.Group] = g
		t.allGroups = append(t.allGroups, g)
		changed = true
	}
	if e.Spec != SpecUnknown && e.Spec != g.spec {
		g.spec, changed = e.Spec, true
	}
	if e.WindowTokens > 0 && e.WindowTokens != g.window {
		g.window, changed = e.WindowTokens, true
	}
	// A partial tail is shorter than the group's blocks, never longer.
	if e.BlockTokens > g.blockTokens {
		changed = changed || traits[g.spec].role == roleWindow
		g.blockTokens = e.BlockTokens
	}
	if changed && g.medium == MediumGPU {
		t.regroup()
	}
	return g
}

// regroup decides anew which groups define structure and which are required,
// and rebuilds what is attached if that moved anything. It happens with the
// first batch of an engine's life.
func (t *Table) regroup() {
	best := rankNone
	for _, g := range t.allGroups {
		if g.medium == MediumGPU {
			best = min(best, g.trait().rank)
		}
	}
	t.required, t.windows = t.required[:0], t.windows[:0]
	var lone *group
	for _, g := range t.allGroups {
		g.structural, g.needBlocks = false, 0
		if g.medium != MediumGPU {
			continue
		}
		tr := g.trait()
		g.structural = tr.rank == best && best <= rankUnknown
		switch tr.role {
		case roleWhole:
			t.required = append(t.required, g)
		case roleWindow:
			g.needBlocks = g.need()
			t.windows = append(t.windows, g)
		}
		if tr.rank == rankOther && (lone == nil || g.index < lone.index) {
			lone = g
		}
	}
	if best == rankOther {
		t.standIn(lone)
	}
	if best != t.rank && t.nodes.live > 0 {
		t.dropStructure()
	}
	t.rank = best
	t.rebuild()
}

// standIn lets a group define structure where no group holds whole prefixes.
func (t *Table) standIn(g *group) {
	g.structural = true
	for _, r := range t.required {
		if r == g {
			return
		}
	}
	t.required = append(t.required, g)
}

// dropStructure forgets the places of all blocks: a better group to learn them
// from has come.
func (t *Table) dropStructure() {
	told := t.attached > 0
	clear(t.chains)
	t.heads.forgetAll()
	for id := uint32(1); id <= t.nodes.made; id++ {
		n := t.nodes.at(id)
		if n.flags&flagLinked != 0 {
			n.flags &^= flagAttached | flagUsable
			t.unlink(id)
		}
	}
	t.attached = 0
	for id := uint32(1); id <= t.nodes.made; id++ {
		if t.nodes.at(id).flags&flagUsed != 0 {
			t.release(id)
		}
	}
	if told {
		t.listener.Cleared()
	}
}

// rebuild recomputes residency and attachment of all blocks.
func (t *Table) rebuild() {
	if t.nodes.live == 0 {
		return
	}
	t.stats.Rebuilds++
	if t.attached > 0 {
		t.listener.Cleared()
	}
	t.attached, t.resident = 0, 0
	clear(t.chains)
	for id := uint32(1); id <= t.nodes.made; id++ {
		n := t.nodes.at(id)
		switch {
		case n.flags&flagRoot != 0:
			t.startRuns(id)
		case n.flags&flagUsed != 0:
			n.flags &^= flagResident | flagAttached | flagUsable
			if t.isResident(id) {
				n.flags |= flagResident
				t.resident++
			}
		}
	}
	for i := range t.domains {
		root := t.domains[i].root
		if root == 0 {
			continue
		}
		for c := t.nodes.at(root).first; c != 0; c = t.nodes.next(c) {
			t.tryAttach(c)
		}
	}
}

func (t *Table) startRuns(root uint32) {
	for _, g := range t.windows {
		g.setRun(root, g.needBlocks)
	}
}

func (t *Table) isResident(id uint32) bool {
	for _, g := range t.required {
		if g.count(id) == 0 && !t.hostHolds(g, id) {
			return false
		}
	}
	return len(t.required) > 0
}

func (t *Table) hasCopies(id uint32) bool {
	for _, g := range t.allGroups {
		if g.count(id) > 0 {
			return true
		}
	}
	return false
}

func (t *Table) hasGPUCopies(id uint32) bool {
	for _, g := range t.allGroups {
		if g.medium == MediumGPU && g.count(id) > 0 {
			return true
		}
	}
	return false
}

// addCopy counts one more copy of a block and lets it take effect.
func (t *Table) addCopy(g *group, id uint32) {
	c := page(&g.counts, id)
	if *c > 0 {
		t.stats.Duplicates++
		if t.distinctCopies || *c == maxCopies {
			return
		}
		*c++
		if g.medium == MediumGPU {
			t.copies++
		}
		return
	}
	if g.medium != MediumGPU {
		*c = 1
		if g.medium == MediumCPU {
			t.hostCopies++
			t.becomesResident(id)
		}
		return
	}
	was := t.tierOf(id)
	if !t.hasGPUCopies(id) {
		t.held++
	}
	*c = 1
	t.copies++
	n := t.nodes.at(id)
	if t.becomesResident(id) {
		return
	}
	t.tellTier(id, was)
	if g.needBlocks > 0 && n.flags&flagAttached != 0 {
		t.updateRuns(g, id)
	}
}

// dropCopy takes one copy of a block away; the count is above 0.
func (t *Table) dropCopy(g *group, id uint32) {
	c, was := page(&g.counts, id), t.tierOf(id)
	*c--
	if g.medium == MediumGPU {
		t.copies--
	}
	if *c > 0 {
		return
	}
	n := t.nodes.at(id)
	switch g.medium {
	case MediumCPU:
		t.hostCopies--
		t.ceasesResident(id)
	case MediumGPU:
		if !t.hasGPUCopies(id) {
			t.held--
		}
		if !t.ceasesResident(id) {
			t.tellTier(id, was)
			if g.needBlocks > 0 && n.flags&flagAttached != 0 {
				t.updateRuns(g, id)
			}
		}
	}
	t.release(id)
}

// becomesResident lets a new copy take effect, and reports whether it was the one
// that a block needed to be resident.
func (t *Table) becomesResident(id uint32) bool {
	n := t.nodes.at(id)
	if n.flags&flagResident != 0 || !t.isResident(id) {
		return false
	}
	n.flags |= flagResident
	t.resident++
	t.tryAttach(id)
	return true
}

// ceasesResident lets the end of a copy take effect, and reports whether a block is
// not resident any more.
func (t *Table) ceasesResident(id uint32) bool {
	n := t.nodes.at(id)
	if n.flags&flagResident == 0 || t.isResident(id) {
		return false
	}
	if n.flags&flagAttached != 0 {
		t.detach(id)
	}
	n.flags &^= flagResident
	t.resident--
	return true
}
