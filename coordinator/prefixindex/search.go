package prefixindex

import (
	"math/bits"
	"slices"
	"sync/atomic"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// Searcher searches an index. It keeps its memory from search to search and
// then allocates nothing; use one per goroutine. Searches wait for nobody, but
// for what patience says.
type Searcher struct {
	// Exact makes a search try all known points. Without it, where workers leave
	// the prompt before the last of them does, only the points most listed
	// there are tried; their matches may then be less than a chunk too short.
	Exact bool

	x *Index
	p *prefix.Probe

	chunks int // checkpoints of the prompt that have a key
	keys   []summary.IndexKey

	width  int
	arena  []uint64
	levels []level // as visited
	order  []int32 // of them, by checkpoint
	spare  []int32
	points []point
	items  []uint32
	left   bitset
	hit    bitset
	part   bitset

	groups     []Group
	outOfOrder bool
	again      bool // what was read does not belong together
	strangers  bool // there are slots that are not of their worker's number
	ahead      ahead
}

// level is the set of slots known to hold the prompt up to a checkpoint.
type level struct {
	read      // of the checkpoint; n is the size of set
	chunk int // number of the checkpoint, 0: the start of the prompt
	set   bitset
}

// point is a known point to be tried.
type point struct {
	depth uint32
	at    spot
}

// A search that changes disturbed patience times takes the writer's lock for the
// next try if it is free, and after maxTries whenever it comes free: a writer that
// changes the same few prefixes over and over can be faster than any search.
const (
	patience = 32
	maxTries = 1000
)

// NewSearcher returns a searcher.
func (x *Index) NewSearcher() *Searcher { return &Searcher{x: x} }

// Search finds what each worker holds of the prompt behind p. The groups are
// disjoint and come deepest first; workers that hold nothing of the prompt are
// in none. The result is valid until the next search.
func (s *Searcher) Search(p *prefix.Probe) []Group {
	for tries := 0; ; tries++ {
		if s.try(p) {
			return s.groups
		}
		pause(tries)
		if tries >= patience && s.x.quiet(tries >= maxTries) {
			return s.alone(p)
		}
	}
}

// alone searches while the writer is kept out, and lets it in again.
func (s *Searcher) alone(p *prefix.Probe) []Group {
	defer s.x.writer.Unlock()
	s.try(p)
	return s.groups
}

// quiet keeps the writer out, if it is at rest or after waiting for that.
func (x *Index) quiet(wait bool) bool {
	if wait {
		x.writer.Lock()
		return true
	}
	return x.writer.TryLock()
}

// try searches, and reports whether what it found belongs together.
func (s *Searcher) try(p *prefix.Probe) bool {
	version := s.x.slots.version.Load()
	if version%2 != 0 {
		return false
	}
	s.search(p)
	// A slot found may have become another worker's meanwhile, or a worker may
	// have got another slot.
	return !s.again && s.x.slots.version.Load() == version
}

func (s *Searcher) search(p *prefix.Probe) {
	s.reset(p)
	s.ends()
	s.bisect()
	for s.nest() { // levels that seemed equal are not
		s.bisect()
	}
	s.settle()
	if s.outOfOrder {
		slices.SortStableFunc(s.groups, func(a, b Group) int { return int(b.Tokens) - int(a.Tokens) })
	}
	s.p = nil
}

func (s *Searcher) reset(p *prefix.Probe) {
	s.p = p
	s.chunks = p.PromptTokens() / prefix.ChunkTokens
	s.keys = append(s.keys[:0], 0)
	s.width = int(s.x.slots.width.Load())
	s.arena = s.arena[:0]
	s.levels, s.order, s.groups = s.levels[:0], s.order[:0], s.groups[:0]
	s.outOfOrder, s.again, s.strangers = false, false, false
	s.left, s.hit, s.part = s.newSet(), s.newSet(), s.newSet()
}

// newSet returns an empty set. When the arena grows, older sets stay where they
// are.
func (s *Searcher) newSet() bitset {
	n := len(s.arena)
	if n+s.width > cap(s.arena) {
		s.arena = make([]uint64, 0, 2*cap(s.arena)+32*s.width)
		n = 0
	}
	s.arena = s.arena[:n+s.width]
	return bitset{words: s.arena[n : n+s.width : n+s.width]}
}

// chainTo computes the keys up to a checkpoint; if the prompt's keys have a gap,
// what lies behind it is out of reach.
func (s *Searcher) chainTo(chunk int) bool {
	for j := len(s.keys); j <= chunk && j <= s.chunks; j++ {
		k, ok := s.p.Checkpoint(j)
		if !ok {
			s.chunks = j - 1
			break
		}
		s.keys = append(s.keys, summary.CheckpointKey(s.keys[j-1], uint32(j*prefix.ChunkTokens), k))
	}
	return chunk <= s.chunks
}

// spot is where a checkpoint is in the tables.
func (s *Searcher) spot(chunk int) spot { return s.x.checkpointSpot(s.keys[chunk]) }

// read is what a search read of a key.
type read struct {
	n     int // workers looked for that hold it
	info  uint32
	seq   uint32 // of the segment then
	found bool   // somebody is listed there
}

// probe makes dst those members of from that hold a key.
func (s *Searcher) probe(t *table, at spot, from, dst *bitset) read {
	seg := &t.dir[at.segment]
	for tries := 0; ; tries++ {
		seq, v, ok := seg.steady()
		if !ok {
			pause(tries)
			continue
		}
		_, word := v.find(at.tag, tagMask)
		e := s.x.full.entryOf(word)
		n := dst.and(from, e.members, &s.x.slab)
		if seg.stable(seq) {
			return read{n, e.info, seq, word != 0}
		}
	}
}

// visit makes a level of those of another one that hold a later checkpoint as
// well, and returns its number. A worker that was lost before is no longer looked
// for: a false positive cannot last.
func (s *Searcher) visit(from int32, chunk int) int32 {
	s.levels = append(s.levels, level{chunk: chunk, set: s.newSet()})
	to := &s.levels[len(s.levels)-1]
	to.read = s.probe(&s.x.held, s.spot(chunk), &s.levels[from].set, &to.set)
	return int32(len(s.levels) - 1)
}

// roundsAhead is for how many rounds of bisection memory is asked for at once.
const roundsAhead = 3

// ends visits the first checkpoint and, unless nobody holds it, the last one.
func (s *Searcher) ends() {
	s.levels = append(s.levels, level{set: s.newSet()})
	top := &s.levels[0]
	top.set.hi = s.width
	for i := range s.width {
		w := s.x.slots.alive[i].Load()
		s.strangers = s.strangers || w&^s.x.slots.natural[i].Load() != 0
		top.set.words[i] = w
		top.n += bits.OnesCount64(w)
	}
	top.set.trim()
	s.order = append(s.order[:0], 0)
	if !s.chainTo(1) {
		return
	}
	s.chainTo(s.chunks)
	s.ahead.add(&s.x.held, s.spot(1))
	s.ahead.add(&s.x.held, s.spot(s.chunks))
	s.askBetween(1, s.chunks, roundsAhead)
	s.ahead.ask()
	first := s.visit(0, 1)
	s.order = append(s.order, first)
	if s.levels[first].n > 0 && s.chunks > 1 {
		s.order = append(s.order, s.visit(first, s.chunks))
	}
}

// bisect visits checkpoints between two levels that differ, until each is
// followed by its neighbour. Where two levels are equal nobody was lost, and
// nothing between need be looked at.
func (s *Searcher) bisect() {
	for round := 0; ; round++ {
		open := false
		for i := range len(s.order) - 1 {
			if a, b, ok := s.gap(i); ok {
				open = true
				if round%roundsAhead == 0 && round > 0 {
					s.askBetween(a, b, roundsAhead)
				}
			}
		}
		if !open {
			return
		}
		s.ahead.ask()
		s.spare = s.spare[:0]
		for i, at := range s.order {
			s.spare = append(s.spare, at)
			if a, b, ok := s.gap(i); ok {
				s.spare = append(s.spare, s.visit(at, (a+b)/2))
			}
		}
		s.order, s.spare = s.spare, s.order
	}
}

// askBetween notes the checkpoints that some rounds of bisection may visit.
func (s *Searcher) askBetween(a, b, rounds int) {
	if mid := (a + b) / 2; a < mid && rounds > 0 {
		s.ahead.add(&s.x.held, s.spot(mid))
		s.askBetween(a, mid, rounds-1)
		s.askBetween(mid, b, rounds-1)
	}
}

// gap tells between which checkpoints one has to be visited, if any, after the
// i-th level.
func (s *Searcher) gap(i int) (a, b int, ok bool) {
	if i+1 == len(s.order) {
		return 0, 0, false
	}
	l, next := &s.levels[s.order[i]], &s.levels[s.order[i+1]]
	return l.chunk, next.chunk, l.n != next.n && l.chunk+1 < next.chunk
}

// nest takes out of each level who is not in the one before, which changes made
// during the search can cause, and reports whether there was anybody.
func (s *Searcher) nest() (any bool) {
	for i := 1; i < len(s.order); i++ {
		l, before := &s.levels[s.order[i]], &s.levels[s.order[i-1]].set
		if !l.set.within(before) {
			l.n = l.set.intersect(before)
			any = true
		}
	}
	return any
}

// settle finds the match of every worker, deep ones first. Workers with the
// same deepest checkpoint are one group.
func (s *Searcher) settle() {
	first := true
	for i := len(s.order) - 1; i >= 0; i-- {
		l := &s.levels[s.order[i]]
		if i+1 == len(s.order) {
			if l.n > 0 {
				s.left.copyOf(&l.set)
				s.settleGroup(l, l.n, true)
				first = false
			}
			continue
		}
		if next := &s.levels[s.order[i+1]]; l.n > next.n {
			s.left.difference(&l.set, &next.set)
			s.settleGroup(l, l.n-next.n, first || s.Exact)
			first = false
			s.checkStill(next)
		}
	}
}

// settleGroup settles the n workers left of a level: at known points of the
// chunk after it, deep ones first, or at the checkpoint itself.
func (s *Searcher) settleGroup(l *level, n int, all bool) {
	s.readPoints(l, all)
	for i := range s.points {
		s.ahead.add(&s.x.held, s.points[i].at)
	}
	s.ahead.ask()
	var likely uint32
	for i := range s.points {
		pt := &s.points[i]
		r := s.probe(&s.x.held, pt.at, &s.left, &s.hit)
		if r.found && likely == 0 {
			likely = pt.depth
		}
		if r.n == 0 {
			continue
		}
		s.left.subtract(&s.hit)
		n -= r.n
		s.emit(&s.hit, pt, likely, r)
		if n == 0 {
			break
		}
	}
	s.checkStill(l)
	if n > 0 && l.chunk > 0 {
		depth := uint32(l.chunk * prefix.ChunkTokens)
		s.emit(&s.left, &point{depth, s.spot(l.chunk)}, max(likely, depth), l.read)
	}
}

// checkStill repeats the search if what was read of a level may have changed.
// Who is found at no point of a chunk, nor at the next checkpoint, is said to hold
// no more than was true at one moment: else a new end listed after the one was
// read, and an old one taken out before the other was, would both be missed.
func (s *Searcher) checkStill(l *level) {
	if !s.segmentAfter(l).stable(l.seq) {
		s.again = true
	}
}

// readPoints lists the known points to be tried after a level, deep ones first.
func (s *Searcher) readPoints(l *level, all bool) {
	s.readItems(l, all)
	s.points = s.points[:0]
	start := uint32(l.chunk * prefix.ChunkTokens)
	for _, i := range s.items {
		o := itemOffset(i)
		k, ok := s.p.At(int(start + o))
		if !ok {
			continue
		}
		key := summary.PointKey(s.keys[l.chunk], start+o, k)
		at := s.x.pointSpot(key, s.keys[l.chunk])
		if i&itemBit(at.tag) == 0 {
			continue
		}
		s.points = append(s.points, point{start + o, at})
	}
}

// readItems lists the known points after a checkpoint, or only those most
// listed, in order of falling offsets.
func (s *Searcher) readItems(l *level, all bool) {
	if l.chunk > 0 && l.info&infoList == 0 {
		s.readInfo(l.info, all)
		return
	}
	seg := s.segmentAfter(l)
	for tries := 0; ; tries++ {
		seq, v, ok := seg.steady()
		if !ok {
			pause(tries)
			continue
		}
		word := s.x.rootWord
		if l.chunk > 0 {
			_, word = v.find(s.spot(l.chunk).tag, tagMask)
		}
		s.readInfo(s.x.full.entryOf(word).info, all)
		if seg.stable(seq) {
			if l.chunk == 0 {
				l.seq = seq
			}
			return
		}
	}
}

// segmentAfter is where the known points after a level are listed.
func (s *Searcher) segmentAfter(l *level) *segment {
	if l.chunk == 0 {
		return &s.x.root
	}
	return &s.x.held.dir[s.spot(l.chunk).segment]
}

func (s *Searcher) readInfo(info uint32, all bool) {
	s.items = s.items[:0]
	switch {
	case info&infoList == 0:
		for i := range inWord {
			s.addOffset(info >> (offsetBits * i) & offsetMask)
		}
	case all:
		l := s.x.slab.words(handle(info & infoPayload))
		n := min(int(atomic.LoadUint64(&l[0])>>lenShift), pointList(l).room())
		for i := range n {
			w := atomic.LoadUint64(&l[1+i/2])
			s.items = append(s.items, uint32(w>>(32*(i%2))))
		}
	default:
		head := atomic.LoadUint64(&s.x.slab.words(handle(info & infoPayload))[0])
		for i := range hints {
			s.addOffset(uint32(head>>(offsetBits*i)) & offsetMask)
		}
	}
}

// addOffset puts an offset in its place.
func (s *Searcher) addOffset(o uint32) {
	if o == 0 {
		return
	}
	s.items = append(s.items, o<<itemShift|anyItem)
	for i := len(s.items) - 1; i > 0 && s.items[i] > s.items[i-1]; i-- {
		s.items[i], s.items[i-1] = s.items[i-1], s.items[i]
	}
}
