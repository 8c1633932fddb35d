package summary

import (
	"cmp"
	"slices"

	"waypost/gossip/prefix"
)

// wireState is what the stream has said about a key so far.
type wireState uint8

const (
	wireNone     wireState = iota
	wireResident           // named, no match may end here
	wireEnd                // named, a match may end here
)

// announcement counts who wants a key named. Different blocks may name the
// same key (duplicates of one prefix, hash collisions); it is withdrawn when
// the last of them goes.
type announcement struct {
	depth uint32
	refs  uint32 // blocks that name it
	ends  uint32 // those of them a match may end at
	wire  wireState
	dirty bool // listed in announcedSet.dirty
}

// want is the state the stream should tell.
func (a announcement) want() wireState {
	switch {
	case a.ends > 0:
		return wireEnd
	case a.refs > 0:
		return wireResident
	}
	return wireNone
}

// minSieve is the shortest list of dirty keys worth sieving.
const minSieve = 4096

// announcedSet is the difference between what blocks name and what the stream
// has told.
type announcedSet struct {
	keys   map[prefix.Key]announcement
	dirty  []prefix.Key // may differ from the wire, each once
	sieve  int          // length of dirty at which it is worth sieving
	onWire int          // keys the stream tells now
	digest uint32       // of the same
	most   int          // bound of onWire
}

func newAnnouncedSet() announcedSet {
	return announcedSet{keys: map[prefix.Key]announcement{}, most: MaxKeys}
}

// change adds to the counts of a key. end moves the count of possible ends.
func (s *announcedSet) change(k prefix.Key, depth uint32, refs, ends int32) {
	a, known := s.keys[k]
	if !known {
		a.depth = depth
	}
	a.refs += uint32(refs)
	a.ends += uint32(ends)
	if !a.dirty && a.want() != a.wire {
		a.dirty = true
		s.dirty = append(s.dirty, k)
	}
	if a == (announcement{depth: a.depth}) {
		delete(s.keys, k)
		return
	}
	s.keys[k] = a
	if len(s.dirty) > s.sieve {
		s.sieveDirty()
		s.sieve = max(minSieve, 2*len(s.dirty))
	}
}

// sieveDirty drops the keys whose changes took each other back, so that dirty
// is bounded by the keys that exist, however long nobody asks for a delta.
func (s *announcedSet) sieveDirty() {
	rest := s.dirty[:0]
	for _, k := range s.dirty {
		a := s.keys[k]
		switch a.dirty = a.want() != a.wire; {
		case a.dirty:
			rest = append(rest, k)
		case a.wire == wireNone:
			delete(s.keys, k)
		default:
			s.keys[k] = a
		}
	}
	s.dirty = rest
}

// clear forgets everything, what the stream has told included.
func (s *announcedSet) clear() {
	clear(s.keys)
	s.dirty = s.dirty[:0]
	s.onWire, s.digest = 0, 0
}

// take returns the changes the stream should tell next, at most limit in all:
// removals deep first, additions shallow first, so that a reader who applies
// them in order never holds a prefix without its checkpoints before it. It
// counts them as told; the rest stays for the next call.
func (s *announcedSet) take(limit int) (removes, adds []entry) {
	for _, k := range s.dirty {
		a := s.keys[k]
		old := entry{key: k, depth: a.depth, end: a.wire == wireEnd}
		if a.wire != wireNone && a.want() != a.wire {
			removes = append(removes, old)
		}
	}
	slices.SortFunc(removes, func(a, b entry) int { return compareEntries(b, a) })
	if len(removes) > limit {
		removes = removes[:limit]
	}
	for _, e := range removes {
		s.tell(e.key, wireNone)
	}
	for _, k := range s.dirty {
		if a := s.keys[k]; a.wire == wireNone && a.want() != wireNone {
			adds = append(adds, entry{key: k, depth: a.depth, end: a.want() == wireEnd})
		}
	}
	slices.SortFunc(adds, compareEntries)
	adds = adds[:min(len(adds), limit-len(removes), s.most-s.onWire)]
	for _, e := range adds {
		s.tell(e.key, s.keys[e.key].want())
	}
	s.sieveDirty()
	return removes, adds
}

// tell notes that the stream has told a state.
func (s *announcedSet) tell(k prefix.Key, to wireState) {
	a := s.keys[k]
	e := entry{key: k, depth: a.depth, end: a.wire == wireEnd}
	if a.wire != wireNone {
		s.digest -= e.mix()
		s.onWire--
	}
	if a.wire = to; to != wireNone {
		e.end = to == wireEnd
		s.digest += e.mix()
		s.onWire++
	}
	s.keys[k] = a
}

// told returns all keys as the stream has told them, shallow first.
func (s *announcedSet) told() []entry {
	out := make([]entry, 0, s.onWire)
	for k, a := range s.keys {
		if a.wire != wireNone {
			out = append(out, entry{key: k, depth: a.depth, end: a.wire == wireEnd})
		}
	}
	slices.SortFunc(out, compareEntries)
	return out
}

func compareEntries(a, b entry) int {
	return cmp.Or(cmp.Compare(a.depth, b.depth), cmp.Compare(a.key, b.key))
}
