package placement

import (
	"math"
	"math/bits"
)

// maxTwinGroups bounds the groups of workers that cost the same.
const maxTwinGroups = 16

// twinGroup is a group of workers that cost the same; of them those with the
// highest hashes can be chosen or be fallbacks.
type twinGroup struct {
	key     uint64
	totalMs float64
	// n are kept; of these some may not be priced.
	n, unpriced int
	tops        [maxFallbacks + 1]struct {
		hash   uint64
		at     int32
		priced bool
	}
}

// twinKey is equal for positions that cost the same; 0: it has no twin.
func (s *search) twinKey(i int) uint64 {
	if i >= s.board.idle {
		return 0
	}
	c := &s.board.cold[i]
	if !(s.p.sit.NowMs >= c.idleMs) || !(s.p.sit.NowMs-c.loadMs <= s.p.policy.FreshMs) {
		return 0
	}
	of := lastTwin{twin: c.twin}
	held := s.heldAt(i)
	if held != nil {
		of.view, of.held = c.mark, held.number()
	}
	if last := &s.lastTwin; last.twin == of.twin && last.view == of.view && last.held == of.held && !s.waysDiffer {
		return last.key
	}
	of.key = s.wayKey(c.twin, s.board.rows[i].id)
	if held != nil {
		of.key = s.holderKey(of.key, c, held.Tokens, held.LowerTokens, held.Predicted)
	}
	s.lastTwin = of
	return of.key
}

// lastTwin is what the last key was made of, and the key: those who hold the
// same stand side by side.
type lastTwin struct {
	twin uint64
	// view and held are 0 for one that holds nothing.
	view, held uint64
	key        uint64
}

// wayKey adds the way to a worker to its key.
func (s *search) wayKey(key uint64, id WorkerID) uint64 {
	if int(id) < len(s.q.Ways) {
		way := &s.q.Ways[id]
		key = rendezvous(key, math.Float64bits(way.RoundTripMs)) + rendezvous(3, math.Float64bits(way.SurchargeMs))
	}
	return key | 1
}

// holderKey adds to a key what a price sees of a match: its length, what kind
// it is, how much must be read back and what that takes, and the doubt whether it
// is still there.
func (s *search) holderKey(key uint64, c *coldRow, tokens, lower int32, predicted bool) uint64 {
	kind := uint64(tokens) << 1
	if predicted {
		kind |= 1
	}
	if lower > 0 {
		key = rendezvous(rendezvous(key, uint64(lower)), c.mark)
	}
	return rendezvous(rendezvous(key, kind), math.Float64bits(s.stillThere(c, predicted))) | 1
}

// blockKeys are the keys of the rows of a block whose rows are alike: of those
// that hold nothing of the prompt and of those that hold something, 0: of which
// there is none. Blocks that stand side by side mostly have the same.
type blockKeys struct {
	of   keysOf
	keys [2]uint64
	// priced says that of each kind a row is priced.
	priced bool
	// groups are those of the kinds that could be chosen, once found is set.
	groups [2]*twinGroup
	found  bool
}

// keysOf is what the keys of a block depend on.
type keysOf struct {
	twin, view uint64
	most       uint64 // as in holding
}

// blockKeys finds the keys of a block; nil: its rows are not alike.
func (s *search) blockKeys(k int) *blockKeys {
	g, h, b := &s.board.alike[k], &s.held[k], &s.lastKeys
	if g.twin == 0 || !s.blocks[k].plain || s.waysDiffer || !(s.p.sit.NowMs >= g.idleMs) || !(s.p.sit.NowMs-g.loadMs <= s.p.policy.FreshMs) {
		return nil
	}
	if !h.some() && b.of.most == 0 && g.twin == b.of.twin {
		return b
	}
	if h.mixed() || h.some() && g.view == 0 {
		return nil
	}
	of := keysOf{twin: g.twin, most: h.most}
	if h.some() {
		of.view = g.view
	}
	if b.of != of {
		from := k * blockRows
		*b = blockKeys{of: of}
		b.keys[0] = s.wayKey(g.twin, s.board.rows[from].id)
		if h.some() {
			b.keys[1] = s.holderKey(b.keys[0], &s.board.cold[from], h.tokens(), h.lower(), h.predicted())
		}
	}
	return b
}

// firstOf is the first position of a block whose row is of a kind; -1: there is
// none.
func (s *search) firstOf(k, kind int) int {
	rows := s.rowsOf(k, kind)
	if rows == 0 {
		return -1
	}
	return k*blockRows + bits.TrailingZeros16(rows)
}

// kindBound is a lower bound of the rows of a block of one kind.
func (s *search) kindBound(k, kind int) (total, own float64) {
	if kind == 0 && s.held[k].some() {
		g := &s.board.groups[k]
		total, own = s.prices[g.class].own.at(g.endMs, g.decodeMs, g.live, g.gapMs, s.p.sit.NowMs, s.p.policy.Theta)
		return total + s.alikeFarMs, own + s.alikeFarMs
	}
	return math.Float64frombits(uint64(s.blocks[k].total)), math.Float64frombits(uint64(s.blocks[k].own))
}

// ownTwins prices one row of each kind of a block whose rows are alike, unless
// one of its twins is priced or it cannot have the least own time. It reports
// false if all rows need a look.
func (s *search) ownTwins(k int, least float64) bool {
	b := s.blockKeys(k)
	if b == nil || b.priced {
		return b != nil
	}
	b.priced = true
	for kind, key := range b.keys {
		if key == 0 || s.hasTwin(key) {
			continue
		}
		if _, own := s.kindBound(k, kind); own <= least {
			if i := s.firstOf(k, kind); i >= 0 {
				s.evaluate(i)
			}
		}
		b.priced = b.priced && s.hasTwin(key)
	}
	return len(s.twins) < maxTwinGroups || b.priced
}

// twinBlock keeps those positions of a block of twins in their groups whose
// hashes are among the highest, if they could be chosen. It reports false if all
// rows need a look.
func (s *search) twinBlock(k int) bool {
	b := s.blockKeys(k)
	if b == nil || !b.found && !s.findGroups(k, b) {
		return false
	}
	s.blocks[k].twinned = true
	from := k * blockRows
	names := s.board.names[from:min(from+blockRows, len(s.setOf))]
	for kind, g := range b.groups {
		rows := s.rowsOf(k, kind)
		if g == nil || rows == 0 {
			continue
		}
		key, limit := firstMix(s.tieKey), g.limit()
		for i := nextHigh(names, 0, key, limit); i < len(names); i = nextHigh(names, i+1, key, limit) {
			if hash := lastMix(middleMix(key ^ names[i])); hash >= limit && rows>>i&1 != 0 {
				s.keep(g, hash, from+i)
				limit = g.limit()
			}
		}
	}
	return true
}

// nextHigh is the first name from one on whose hash may not be below a limit:
// lastMix leaves the bits that are compared.
func nextHigh(names []uint64, from int, key, limit uint64) int {
	limit >>= 33
	for i := from; i < len(names); i++ {
		if middleMix(key^names[i])>>33 >= limit {
			return i
		}
	}
	return len(names)
}

// findGroups finds the groups of the kinds of a block's rows that could be
// chosen, and makes those that there are not. It reports false if all rows need
// a look.
func (s *search) findGroups(k int, b *blockKeys) bool {
	b.groups, b.found = [2]*twinGroup{}, true
	for kind, key := range b.keys {
		if key == 0 {
			continue
		}
		g := s.twinGroup(key)
		if g == nil {
			b.found = false // the next block may have such rows, or cheaper ones
			i := s.firstOf(k, kind)
			if total, _ := s.kindBound(k, kind); i < 0 || total > s.bound {
				continue
			}
			s.evaluate(i)
			if g = s.twinGroup(key); g == nil {
				return false
			}
		}
		if g.totalMs <= s.bound {
			b.groups[kind] = g
		}
	}
	return true
}

// limit is the hash below which none is kept.
func (g *twinGroup) limit() uint64 {
	if g.n < len(g.tops) {
		return 0
	}
	return g.tops[len(g.tops)-1].hash
}

// twinGroup is the group of a key; nil: there is none.
func (s *search) twinGroup(key uint64) *twinGroup {
	if g := s.lastGroup; g != nil && g.key == key {
		return g
	}
	for k := range s.twins {
		if s.twins[k].key == key {
			s.lastGroup = &s.twins[k]
			return s.lastGroup
		}
	}
	return nil
}

func (s *search) hasTwin(key uint64) bool { return s.twinGroup(key) != nil }

// twin keeps a position in its group if its hash is among the highest. It
// reports false if there is no such group yet; a priced position, whose terms
// are given, makes one.
func (s *search) twin(key uint64, i int, priced *Terms) bool {
	g := s.twinGroup(key)
	if g == nil {
		if priced == nil || len(s.twins) >= maxTwinGroups {
			return false
		}
		s.twins = append(s.twins, twinGroup{key: key, totalMs: priced.TotalMs})
		g = &s.twins[len(s.twins)-1]
	}
	if hash := lastMix(middleMix(firstMix(s.tieKey) ^ s.board.names[i])); hash >= g.limit() {
		s.keep(g, hash, i)
	}
	return true
}

// keep keeps a position in a group whose limit its hash is not below.
func (s *search) keep(g *twinGroup, hash uint64, i int) {
	priced := s.reasons[i] == reasonPriced
	for k := range g.tops[:g.n] {
		if top := &g.tops[k]; top.at == int32(i) {
			if priced && !top.priced {
				top.priced = true
				g.unpriced--
			}
			return
		}
	}
	at := g.n
	if at == len(g.tops) {
		if at--; !g.tops[at].priced {
			g.unpriced--
		}
	} else {
		g.n++
	}
	for ; at > 0 && hash > g.tops[at-1].hash; at-- {
		g.tops[at] = g.tops[at-1]
	}
	g.tops[at].hash, g.tops[at].at, g.tops[at].priced = hash, int32(i), priced
	if !priced {
		g.unpriced++
		s.setBound()
	}
}
