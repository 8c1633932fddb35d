package placement

import "math"

// holding is what the rows of a block hold of the prompt: the largest number that
// stands for a match, and the complement of the least. So many matches are noted
// that there must be no branch to guess.
type holding struct{ most, least uint64 }

// mostTokens is more than any match has.
const mostTokens = 1<<30 - 1

// add notes a match. Its number is never 0, and the larger the longer it is.
func (h *holding) add(match *Match) {
	number := uint64(match.Tokens&mostTokens)<<32 | uint64(match.LowerTokens&mostTokens)<<2 | 1
	if match.Predicted {
		number |= 2
	}
	h.most, h.least = max(h.most, number), max(h.least, ^number)
}

// some says that a row holds something.
func (h *holding) some() bool { return h.most != 0 }

// mixed says that two rows hold different lengths or kinds.
func (h *holding) mixed() bool { return h.most != 0 && h.most != ^h.least }

// tokens are the most that a row holds.
func (h *holding) tokens() int32 { return int32(h.most >> 32) }

// lower is how much of the longest match is in host memory.
func (h *holding) lower() int32 { return int32(h.most >> 2 & mostTokens) }

// predicted says that the longest match comes from a live claim.
func (h *holding) predicted() bool { return h.most&2 != 0 }

// unfold computes the bounds of a block's rows, but for those that were bounded
// apart.
func (s *search) unfold(k int) {
	if !s.blocks[k].folded {
		return
	}
	least := block{total: math.MaxInt64, own: math.MaxInt64, plain: true, twinned: s.blocks[k].twinned}
	f, now, theta := s.foldedRows(k), s.p.sit.NowMs, s.p.policy.Theta
	for i := range f.rows {
		r, line := &f.rows[i], f.line(s, i)
		if line == nil {
			continue
		}
		total, own := line.at(r.endMs, r.decodeMs, r.live, r.gapMs, now, theta)
		far := s.farMs(r.id)
		total, own = total+far, own+far
		s.totals[k*blockRows+i], s.owns[k*blockRows+i] = total, own
		least.total = min(least.total, int64(math.Float64bits(total)))
		least.own = min(least.own, int64(math.Float64bits(own)))
	}
	s.blocks[k] = least
}

// foldedRows are the rows of a folded block that are not looked at apart.
type foldedRows struct {
	rows    []row
	matchOf []int32
	bare    *linear // of those that hold nothing
	// held is that of those that held tokens in blocks of so many; tokens are -1
	// before the first.
	held          *linear
	tokens, block int32
}

func (s *search) foldedRows(k int) foldedRows {
	from := k * blockRows
	to := min(from+blockRows, len(s.matchOf))
	rows := s.board.rows[from:to]
	return foldedRows{rows: rows, matchOf: s.matchOf[from:to], bare: &s.prices[rows[0].class].own, tokens: -1}
}

// line is the bound of a row as a function of its start; nil: it is looked at
// apart.
func (f *foldedRows) line(s *search, i int) *linear {
	if f.matchOf[i] == 0 {
		return f.bare
	}
	return f.holderLine(s, i, f.matchOf[i])
}

func (f *foldedRows) holderLine(s *search, i int, m int32) *linear {
	if s.apart(m) {
		return nil
	}
	r, match := &f.rows[i], &s.q.Matches[m-1]
	if r.flags&rowBlind != 0 {
		return &s.matchPrice(r, match).own
	}
	if match.Tokens != f.tokens || r.block != f.block {
		f.held, f.tokens, f.block = &s.matchPrice(r, match).own, match.Tokens, r.block
	}
	return f.held
}

// considerFolded is consider for the rows of a folded block.
func (s *search) considerFolded(k int) {
	f, now, theta := s.foldedRows(k), s.p.sit.NowMs, s.p.policy.Theta
	for i := range f.rows {
		r, line := &f.rows[i], f.line(s, i)
		// The start alone puts most of them beyond the bound.
		if line == nil || line.a*(r.endMs-now)+line.baseMs > s.bound {
			continue
		}
		total, own := line.at(r.endMs, r.decodeMs, r.live, r.gapMs, now, theta)
		far := s.farMs(r.id)
		if total, own = total+far, own+far; total <= s.bound {
			i += k * blockRows
			s.totals[i], s.owns[i] = total, own
			s.consider(i)
		}
	}
}

// ownFolded is considerOwn for the rows of a folded block.
func (s *search) ownFolded(k int) {
	f, now, theta := s.foldedRows(k), s.p.sit.NowMs, s.p.policy.Theta
	least := slack(s.bestOwn)
	for i := range f.rows {
		r, line := &f.rows[i], f.line(s, i)
		if line == nil || r.endMs-now+line.ownMs > least {
			continue
		}
		_, own := line.at(r.endMs, r.decodeMs, r.live, r.gapMs, now, theta)
		if own += s.farMs(r.id); own <= least {
			i += k * blockRows
			s.owns[i] = own
			if s.considerOwn(i, least) {
				least = slack(s.bestOwn)
			}
		}
	}
}

// farMs is the way to a worker; 0 if it is unknown.
func (s *search) farMs(id WorkerID) float64 {
	if int(id) < len(s.q.Ways) {
		if far := s.q.Ways[id].RoundTripMs + s.q.Ways[id].SurchargeMs; far > 0 {
			return far
		}
	}
	return 0
}
