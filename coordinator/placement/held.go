package placement

import "math/bits"

// holding is what the rows of a block hold of the prompt, but for those that are
// looked at apart: the largest number that stands for a match, and the complement
// of the least. So many matches are noted that there must be no branch to guess.
type holding struct {
	most, least uint64
	// endMs is the least of Board.ends of these, +Inf if there are none.
	endMs float64
	// rows are those that hold something, apart those of them that are looked at
	// apart: a bit for each.
	rows, apart uint16
}

// some says that a row holds something.
func (h *holding) some() bool { return h.most != 0 }

// mixed says that two rows hold different lengths or kinds.
func (h *holding) mixed() bool { return h.most != 0 && h.most != ^h.least }

// tokens are the most that a row holds; Unknown: of none is that known.
func (h *holding) tokens() int32 { return int32(h.most>>32) + Unknown }

// lower is how much of the longest match is in host memory.
func (h *holding) lower() int32 { return int32(h.most >> 2 & mostLower) }

// predicted says that the longest match comes from a live claim.
func (h *holding) predicted() bool { return h.most&2 != 0 }

// apartMatches is how many holders are bounded one by one, while the others are
// bounded by blocks: those of small sets, which would set the bounds of blocks that
// hold little else.
const apartMatches = 512

// noteMatches says at every position what is held there and in every block what
// is held but for small sets.
func (s *search) noteMatches() {
	at, ends, setOf, held, holders := s.board.at, s.board.ends, s.setOf, s.held, s.holders[:0]
	m := &s.q.Matches
	for set := range m.groups {
		g := &m.groups[set]
		number, apart := g.number(), uint16(0)
		if m.size(set) <= apartMatches-len(holders) {
			number, apart = 0, 1
		}
		least := ^number
		if apart != 0 {
			least = 0
		}
		for n, word := range m.words[g.from:g.to] {
			for first := 64 * (g.firstWord + n); word != 0; word &= word - 1 {
				id := first + bits.TrailingZeros64(word)
				if id >= len(at) {
					break
				}
				i := uint32(at[id] - 1)
				if uint(i) >= uint(len(setOf)) {
					continue // nobody's slot
				}
				setOf[i] = int32(set)
				h := &held[i/blockRows]
				if h.most, h.least = max(h.most, number), max(h.least, least); apart == 0 {
					h.endMs = min(h.endMs, ends[i])
				}
				h.rows |= 1 << (i % blockRows)
				h.apart |= apart << (i % blockRows)
				if apart != 0 {
					holders = append(holders, int32(i))
				}
			}
		}
	}
	s.holders = holders
}

// heldAt is what the worker at a position holds; nil: nothing.
func (s *search) heldAt(i int) *Held {
	if s.held[i/blockRows].rows>>(i%blockRows)&1 == 0 {
		return nil
	}
	return &s.q.Matches.groups[s.setOf[i]].Held
}

// allRows are all rows of a block, a bit for each.
func (s *search) allRows(k int) uint16 { return 1<<min(blockRows, len(s.setOf)-k*blockRows) - 1 }

// The kinds of rows of a block that are not looked at apart: those that hold
// nothing of the prompt and those that hold something.
const (
	bare = iota
	holder
	numKinds
)

// rowsOf are the rows of a block of one kind, a bit for each.
func (s *search) rowsOf(k, kind int) uint16 {
	h := &s.held[k]
	if kind == bare {
		return s.allRows(k) &^ h.rows
	}
	return h.rows &^ h.apart
}

// mostReuse is the position of the worker that reuses most; -1: nobody does.
func (s *search) mostReuse() int {
	r := mostReuse{s: s, most: -1}
	// The deepest first: no engine reuses more than its match, so that most of the
	// others need no look.
	groups := s.q.Matches.groups
	deepest := int32(s.q.Matches.DeepestTokens())
	for set := range groups {
		if groups[set].Tokens == deepest {
			r.visit(set)
		}
	}
	for set := range groups {
		if tokens := groups[set].Tokens; tokens != deepest && int(tokens) >= r.tokens {
			r.visit(set)
		}
	}
	return r.most
}

// mostReuse is the worker found so far that reuses most; of equal ones as
// Decision.outholds says.
type mostReuse struct {
	s      *search
	most   int
	tokens int
}

func (r *mostReuse) visit(set int) {
	b, held := r.s.board, &r.s.q.Matches.groups[set].Held
	last, most := int32(0), 0
	for id := range r.s.q.Matches.of(set) {
		i := b.position(id)
		if i < 0 {
			continue
		}
		// The group's is a divisor of the row's.
		if block := b.groups[i/blockRows].block; block != last {
			last, most = block, reusableTokens(int(held.Tokens), r.s.p.promptTokens, int(block))
		}
		if most < r.tokens || most <= 0 || most == r.tokens && r.most >= 0 && id > b.rows[r.most].id && r.s.reasons[r.most] == ReasonNone {
			continue
		}
		row := &b.rows[i]
		if row.flags&rowBlind != 0 && !held.Predicted {
			continue
		}
		reused := reusableTokens(int(held.Tokens), r.s.p.promptTokens, int(row.block))
		if reused > r.tokens || reused == r.tokens && r.most >= 0 && r.s.outholds(i, r.most) {
			r.most, r.tokens = i, reused
		}
	}
}
