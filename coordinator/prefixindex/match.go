package prefixindex

import (
	"math/bits"
	"slices"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// Match is what one worker holds of a prompt.
type Match struct {
	// Worker is the worker.
	Worker WorkerID
	Reuse
}

// Reuse is how much of a prompt is held, and how sure that is.
type Reuse struct {
	// Tokens is the length of the deepest listed prefix at which a match may
	// end, 1 to the length of the prompt. An engine recomputes at least the
	// last token of a prompt, so what it reuses may be less.
	Tokens uint32
	// GPUTokens is how much of that, from its start, is in GPU memory;
	// HostTokens, at least as much, is how much is there or in host memory. The
	// rest is on disk.
	GPUTokens, HostTokens uint32
	// LikelyTokens, at least Tokens, is a guess: somebody's known end on the
	// prompt's path, up to which a worker that holds Tokens may hold it as well.
	// What a worker holds is never said to be more than Tokens.
	LikelyTokens uint32
	// Predicted says that no stream lists that prefix: open claims do, or it is
	// retained for a worker that tells nothing.
	Predicted bool
	// Unverified says that a stream lists it that is not to be believed fully.
	Unverified bool
}

// Group is a set of workers that hold the same of a prompt.
type Group struct {
	Reuse
	Workers Workers
}

// Workers is a set of worker ids.
type Workers struct {
	first int // word
	words []uint64
}

// Len is the number of workers.
func (w Workers) Len() int {
	n := 0
	for _, word := range w.words {
		n += bits.OnesCount64(word)
	}
	return n
}

// Has reports whether a worker is in the set.
func (w Workers) Has(id WorkerID) bool {
	i := int(id/64) - w.first
	return i >= 0 && i < len(w.words) && w.words[i]>>(id%64)&1 != 0
}

// All yields the workers in ascending order.
func (w Workers) All(yield func(WorkerID) bool) {
	for i, word := range w.words {
		for ; word != 0; word &= word - 1 {
			if !yield(WorkerID(64*(w.first+i) + bits.TrailingZeros64(word))) {
				return
			}
		}
	}
}

// Bitmap returns the set as a bitmap: the bits of words stand for the workers
// from 64·firstWord on. It is valid as long as the search result.
func (w Workers) Bitmap() (firstWord int, words []uint64) { return w.first, w.words }

// Groups calls do for each group of workers that hold the same of the prompt
// behind p, deepest first; see [Searcher.Search]. A group is valid during its
// call only. It allocates nothing if p is warm.
func (x *Index) Groups(p *prefix.Probe, do func(g *Group)) {
	s := x.searchers.Get().(*Searcher)
	defer x.searchers.Put(s)
	groups := s.Search(p)
	for i := range groups {
		do(&groups[i])
	}
}

// Match appends to dst what each worker holds of the prompt behind p, deepest
// first; workers that hold nothing of it are left out. It allocates nothing if
// dst has room and p is warm.
func (x *Index) Match(p *prefix.Probe, dst []Match) []Match {
	s := x.searchers.Get().(*Searcher)
	dst = AppendMatches(dst, s.Search(p))
	x.searchers.Put(s)
	return dst
}

// AppendMatches appends the workers of all groups to dst.
func AppendMatches(dst []Match, groups []Group) []Match {
	for i := range groups {
		g := &groups[i]
		at := len(dst)
		dst = slices.Grow(dst, g.Workers.Len())[:at+g.Workers.Len()]
		for j, word := range g.Workers.words {
			for ; word != 0; word &= word - 1 {
				dst[at] = Match{WorkerID(64*(g.Workers.first+j) + bits.TrailingZeros64(word)), g.Reuse}
				at++
			}
		}
	}
	return dst
}

// emit reports a set of slots, all of which hold the prefix of a point, in
// groups of equal trust. It changes the set.
func (s *Searcher) emit(set *bitset, at *point, likely uint32, was read) {
	r := Reuse{Tokens: at.depth, GPUTokens: at.depth, HostTokens: at.depth, LikelyTokens: likely}
	if was.info&(infoPartial|infoPredicted) != 0 {
		if was.info&infoPartial != 0 {
			s.emitPartial(set, at)
		}
		if was.info&infoPredicted != 0 {
			s.emitPredicted(set, at, r)
		}
		// Who left the prefix leaves the lesser sets after it: what they say is
		// worth something only if it is held as it was.
		if !s.x.held.dir[at.at.segment].stable(was.seq) {
			s.again = true
		}
	}
	if s.x.slots.doubtful.Load() > 0 {
		s.emitUnverified(set, r)
	}
	s.group(r, set)
}

// emitPredicted reports those of a set of which no stream says so, and takes
// them out of it.
func (s *Searcher) emitPredicted(set *bitset, at *point, r Reuse) {
	if s.probe(&s.x.predicted, at.at, set, &s.part).n > 0 {
		r.Predicted = true
		s.group(r, &s.part)
		set.subtract(&s.part)
	}
}

// emitUnverified reports those of a set whose stream is not to be believed, and
// takes them out of it.
func (s *Searcher) emitUnverified(set *bitset, r Reuse) {
	s.part.copyOf(set)
	for i := s.part.lo; i < s.part.hi; i++ {
		s.part.words[i] &= s.x.slots.unverified[i].Load()
	}
	set.subtract(&s.part)
	r.Unverified = true
	s.group(r, &s.part)
}

// emitPartial reports those of a set whose extent is not whole, and takes them
// out of it.
func (s *Searcher) emitPartial(set *bitset, at *point) {
	if s.probe(&s.x.partial, at.at, set, &s.part).n == 0 {
		return
	}
	set.subtract(&s.part)
	for i := s.part.lo; i < s.part.hi; i++ {
		for w := s.part.words[i]; w != 0; w &= w - 1 {
			slot := uint32(64*i + bits.TrailingZeros64(w))
			e, ok := s.extent(slot, at)
			if !ok { // it has become whole, or has gone
				s.again = true
				return
			}
			if e.UsableTokens = min(e.UsableTokens, at.depth); e.UsableTokens == 0 {
				continue
			}
			s.outOfOrder = true
			s.groupOfOne(slot, Reuse{
				Tokens: e.UsableTokens, LikelyTokens: e.UsableTokens,
				GPUTokens: min(e.GPUTokens, e.UsableTokens), HostTokens: min(e.HostTokens, e.UsableTokens),
				Unverified: s.x.slots.unverified[i].Load()>>(slot%64)&1 != 0,
			})
		}
	}
}

// extent is that of a slot's key; false: nothing is recorded of it.
func (s *Searcher) extent(slot uint32, at *point) (e summary.Extent, ok bool) {
	for tries := 0; ; tries++ {
		seg := s.x.slots.details(slot)
		if seg == nil {
			return e, false
		}
		seq, v, ok := seg.steady()
		if !ok {
			pause(tries)
			continue
		}
		var d detail
		if i, _ := v.find(at.at.word(), allBits); i >= 0 {
			d = v.detailAt(i)
		}
		if seg.stable(seq) {
			return d.extent, d.partial
		}
	}
}

// group reports a set of slots as a set of workers.
func (s *Searcher) group(r Reuse, set *bitset) {
	set.trim()
	if set.lo == set.hi {
		return
	}
	out := s.newSet()
	if !s.strangers {
		out.copyOf(set)
		s.groups = append(s.groups, Group{r, Workers{out.lo, out.words[out.lo:out.hi]}})
		return
	}
	others := false
	out.lo, out.hi = set.lo, set.hi
	for i := set.lo; i < set.hi; i++ {
		w := set.words[i]
		out.words[i] = w & s.x.slots.natural[i].Load()
		others = others || out.words[i] != w
	}
	if others {
		s.addOthers(&out, set)
	}
	s.groups = append(s.groups, Group{r, Workers{out.lo, out.words[out.lo:out.hi]}})
}

// addOthers adds the workers of those slots that are not of their number.
func (s *Searcher) addOthers(out, set *bitset) {
	for i := set.lo; i < set.hi; i++ {
		for w := set.words[i] &^ s.x.slots.natural[i].Load(); w != 0; w &= w - 1 {
			id := uint32(s.x.slots.owner(uint32(64*i + bits.TrailingZeros64(w))))
			if int(id/64) < s.width { // else it joined during the search, which is repeated
				out.put(id)
			}
		}
	}
	out.trim()
}

// groupOfOne reports one slot.
func (s *Searcher) groupOfOne(slot uint32, r Reuse) {
	id := uint32(s.x.slots.owner(slot))
	s.arena = append(s.arena, 1<<(id%64))
	n := len(s.arena)
	s.groups = append(s.groups, Group{r, Workers{int(id / 64), s.arena[n-1 : n : n]}})
}
