package placement

import "math"

// maxTwinGroups bounds the groups of workers that cost the same.
const maxTwinGroups = 16

// twinGroup is a group of workers that cost the same; of them those with the
// highest hashes can be chosen or be fallbacks.
type twinGroup struct {
	key  uint64
	n    int
	tops [maxFallbacks + 1]struct {
		hash   uint64
		at     int32
		priced bool
	}
}

// twinKey is equal for positions that cost the same; 0: it has no twin.
func (s *search) twinKey(i int) uint64 {
	c := &s.board.cold[i]
	if c.twin == 0 || s.matchOf[i] != 0 || !(s.p.sit.NowMs >= c.idleMs) || !(s.p.sit.NowMs-c.loadMs <= s.p.policy.FreshMs) {
		return 0
	}
	key := c.twin
	if id := s.board.rows[i].id; int(id) < len(s.q.Ways) {
		way := &s.q.Ways[id]
		key = rendezvous(key, math.Float64bits(way.RoundTripMs)) + rendezvous(3, math.Float64bits(way.SurchargeMs)) | 1
	}
	return key
}

// blockTwinKey is twinKey of all positions of a block that hold nothing of the
// prompt; 0: they do not cost the same, or that is not known.
func (s *search) blockTwinKey(k int) uint64 {
	g := &s.board.groups[k]
	if !s.blocks[k].folded || g.twin == 0 || len(s.q.Ways) > 0 && !s.q.WaysAlike ||
		!(s.p.sit.NowMs >= g.idleMs) || !(s.p.sit.NowMs-g.loadMs <= s.p.policy.FreshMs) {
		return 0
	}
	from := k * blockRows
	for i := from; i < min(from+blockRows, len(s.matchOf)); i++ {
		if s.matchOf[i] == 0 {
			return s.twinKey(i)
		}
	}
	return 0
}

// twinBlock keeps those positions of a block of twins in their group whose hashes
// are among the highest. It reports false if there is no such group yet.
func (s *search) twinBlock(k int) bool {
	key := s.blockTwinKey(k)
	if key == 0 {
		return false
	}
	g := s.twinGroup(key)
	if g == nil {
		return false
	}
	s.blocks[k].twinned = true
	from := k * blockRows
	for i, name := range s.board.hashes[from:min(from+blockRows, len(s.matchOf))] {
		if g.n == len(g.tops) && rendezvous(s.tieKey, name) < g.tops[g.n-1].hash {
			continue
		}
		if s.open(from+i) && s.matchOf[from+i] == 0 {
			s.twin(key, from+i, false)
		}
	}
	return true
}

// twinGroup is the group of a key; nil: there is none.
func (s *search) twinGroup(key uint64) *twinGroup {
	for k := range s.twins {
		if s.twins[k].key == key {
			return &s.twins[k]
		}
	}
	return nil
}

func (s *search) hasTwin(key uint64) bool { return s.twinGroup(key) != nil }

// twin keeps a position in its group if its hash is among the highest. It
// reports false if there is no such group yet; a priced position makes one.
func (s *search) twin(key uint64, i int, priced bool) bool {
	g := s.twinGroup(key)
	if g == nil {
		if !priced || len(s.twins) >= maxTwinGroups {
			return false
		}
		s.twins = append(s.twins, twinGroup{key: key})
		g = &s.twins[len(s.twins)-1]
	}
	hash := rendezvous(s.tieKey, s.board.hashes[i])
	for k := range g.tops[:g.n] {
		if g.tops[k].at == int32(i) {
			g.tops[k].priced = g.tops[k].priced || priced
			return true
		}
	}
	at := g.n
	if at == len(g.tops) {
		if at--; hash < g.tops[at].hash {
			return true
		}
	} else {
		g.n++
	}
	for ; at > 0 && hash > g.tops[at-1].hash; at-- {
		g.tops[at] = g.tops[at-1]
	}
	g.tops[at].hash, g.tops[at].at, g.tops[at].priced = hash, int32(i), priced
	return true
}
