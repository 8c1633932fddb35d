package prefixindex

import (
	"math/bits"

	"waypost/gossip/prefix"
)

// Match is what one worker holds of a prompt.
type Match struct {
	// Worker is the worker.
	Worker WorkerID
	// Tokens is the length of the deepest listed prefix at which a match may
	// end, 1 to the length of the prompt. An engine recomputes at least the
	// last token of a prompt, so what it reuses may be less.
	Tokens uint32
	// Predicted says that no verified stream lists that prefix: open claims or
	// an unverified stream do.
	Predicted bool
}

// Match appends to dst what each worker holds of the prompt behind p, deepest
// first; workers that hold nothing of it are left out. It allocates nothing if
// dst has room and p is warm.
func (x *Index) Match(p *prefix.Probe, dst []Match) []Match {
	s := x.searches.Get().(*search)
	x.mu.RLock()
	dst = s.run(x, p, dst)
	x.mu.RUnlock()
	x.searches.Put(s)
	return dst
}

// search is one Match under way. Sets of workers are bitmaps as long as
// Index.present, taken from an arena.
type search struct {
	x      *Index
	p      *prefix.Probe
	dst    []Match
	arena  []uint64
	levels []level
	// pending are workers whose prefixes in deeper chunks cannot end a match;
	// an end is looked for in pending.chunk and before.
	pending level
}

// level is the set of workers known to hold the prompt up to a chunk border.
type level struct {
	chunk int // border before this chunk, that is checkpoint number chunk
	set   []uint64
	n     int // size of the set
}

func (s *search) run(x *Index, p *prefix.Probe, dst []Match) []Match {
	s.x, s.p, s.dst = x, p, dst
	s.arena, s.levels = s.arena[:0], s.levels[:0]
	s.pending = level{set: s.newSet()}
	s.gallop()
	s.settleGroups()
	dst = s.dst
	s.x, s.p, s.dst = nil, nil, nil
	return dst
}

// newSet returns an empty set. When the arena grows, older sets stay where they are.
func (s *search) newSet() []uint64 {
	n, words := len(s.arena), len(s.x.present)
	if n+words > cap(s.arena) {
		s.arena = make([]uint64, 0, 2*cap(s.arena)+16*words)
		n = 0
	}
	s.arena = s.arena[:n+words]
	set := s.arena[n : n+words : n+words]
	clear(set)
	return set
}

// gallop visits checkpoints at doubling distances until nobody holds one.
func (s *search) gallop() {
	top := level{set: s.newSet()}
	copy(top.set, s.x.present)
	for _, word := range top.set {
		top.n += bits.OnesCount64(word)
	}
	s.levels = append(s.levels, top)
	last := s.p.PromptTokens() / prefix.ChunkTokens
	for step := 1; top.n > 0 && top.chunk < last; step *= 2 {
		top = s.visit(top, min(top.chunk+step, last))
		s.levels = append(s.levels, top)
	}
}

// visit returns those of a level that hold a later checkpoint as well. Holding
// all earlier ones is what a worker that holds a prefix does, so one that was
// lost before is no longer looked for: a false positive cannot last.
func (s *search) visit(from level, chunk int) level {
	to := level{chunk: chunk, set: s.newSet()}
	if k, ok := s.p.Checkpoint(chunk); ok {
		to.n = s.x.held.intersect(to.set, from.set, k)
	}
	return to
}

// settleGroups finds the match of every worker, deep ones first. Workers with
// the same deepest checkpoint are one group.
func (s *search) settleGroups() {
	top := s.levels[len(s.levels)-1]
	s.settleGroup(top, level{})
	for i := len(s.levels) - 1; i > 0; i-- {
		s.between(s.levels[i-1], s.levels[i])
	}
	for s.pending.n > 0 {
		s.settle(s.pending)
	}
}

// between settles those of level a that are not in level b, which is deeper.
// Where both are equal nobody was lost, and nothing between need be looked at.
func (s *search) between(a, b level) {
	switch {
	case a.n == b.n:
	case a.chunk+1 == b.chunk:
		s.settleGroup(a, b)
	default:
		mark := len(s.arena)
		mid := s.visit(a, (a.chunk+b.chunk)/2)
		mid.n = union(mid.set, b.set)
		s.between(mid, b)
		s.between(a, mid)
		s.arena = s.arena[:min(mark, len(s.arena))]
	}
}

// settleGroup settles those of level a that are not in level b.
func (s *search) settleGroup(a, b level) {
	if a.n == b.n {
		return
	}
	for s.pending.n > 0 && s.pending.chunk > a.chunk {
		s.settle(s.pending)
	}
	mark := len(s.arena)
	group := level{chunk: a.chunk, set: s.newSet()}
	copy(group.set, a.set)
	subtract(group.set, b.set)
	group.n = union(group.set, s.pending.set)
	s.settle(group)
	s.arena = s.arena[:min(mark, len(s.arena))]
}

// settle looks for the deepest end in the chunk after a checkpoint, then at the
// checkpoint itself; who has none there is pending for the chunk before.
func (s *search) settle(g level) {
	mark := len(s.arena)
	left, hit := s.newSet(), s.newSet()
	copy(left, g.set)
	n := g.n - s.settlePoints(g.chunk, left, hit)
	if k, ok := s.p.Checkpoint(g.chunk); ok && n > 0 {
		copy(hit, left)
		n -= s.report(hit, n, uint32(g.chunk*prefix.ChunkTokens), k)
		subtract(left, hit)
	}
	if g.chunk == 0 {
		n = 0 // nothing before the start
		clear(left)
	}
	copy(s.pending.set, left)
	s.pending.chunk, s.pending.n = g.chunk-1, n
	s.arena = s.arena[:min(mark, len(s.arena))]
}

// settlePoints reports the workers of left at the known ends within a chunk,
// deep ones first, takes them out and returns their number.
func (s *search) settlePoints(chunk int, left, hit []uint64) (found int) {
	if chunk >= len(s.x.points) {
		return 0
	}
	points := &s.x.points[chunk]
	start := chunk * prefix.ChunkTokens
	for i := len(points) - 1; i >= 0; i-- {
		for word := points[i]; word != 0; {
			bit := 63 - bits.LeadingZeros64(word)
			word &^= 1 << bit
			depth := start + i*64 + bit
			k, ok := s.p.At(depth)
			if !ok {
				continue
			}
			n := s.x.held.intersect(hit, left, k)
			if n == 0 {
				continue
			}
			found += s.report(hit, n, uint32(depth), k)
			subtract(left, hit)
			if isEmpty(left) {
				return found
			}
		}
	}
	return found
}

// report appends the workers of a set of n, all of which hold the prefix named
// k, except those that cannot end a match there: they are taken out of the set.
// It returns the number of the others.
func (s *search) report(set []uint64, n int, depth uint32, k prefix.Key) int {
	mark := len(s.arena)
	other := s.newSet()
	if s.x.notEnd.keys > 0 {
		n -= s.x.notEnd.intersect(other, set, k)
		subtract(set, other)
	}
	clear(other)
	if s.x.unverified.keys > 0 {
		s.x.unverified.intersect(other, set, k)
	}
	for i, word := range set {
		for ; word != 0; word &= word - 1 {
			w := uint32(i*64 + bits.TrailingZeros64(word))
			s.dst = append(s.dst, Match{Worker: WorkerID(w), Tokens: depth, Predicted: has(other, w)})
		}
	}
	s.arena = s.arena[:min(mark, len(s.arena))]
	return n
}

func subtract(set, other []uint64) {
	for i := range other {
		set[i] &^= other[i]
	}
}

// union adds other to set and returns the size.
func union(set, other []uint64) (n int) {
	for i := range set {
		set[i] |= other[i]
		n += bits.OnesCount64(set[i])
	}
	return n
}

func isEmpty(set []uint64) bool {
	for _, word := range set {
		if word != 0 {
			return false
		}
	}
	return true
}
