package placement

import (
	"math"
	"math/bits"
)

// unfold computes the bounds of a block's rows, but for those that were bounded
// apart.
func (s *search) unfold(k int) {
	if !s.blocks[k].folded {
		return
	}
	least := block{total: math.MaxInt64, own: math.MaxInt64, plain: true, twinned: s.blocks[k].twinned}
	for rows := s.allRows(k) &^ s.held[k].apart; rows != 0; rows &= rows - 1 {
		i := k*blockRows + bits.TrailingZeros16(rows)
		total, own := s.boundOn(s.rowLine(i), i)
		s.totals[i], s.owns[i] = total, own
		least.total = min(least.total, int64(math.Float64bits(total)))
		least.own = min(least.own, int64(math.Float64bits(own)))
	}
	s.blocks[k] = least
}

// rowLine is the bound of a row of a folded block as a function of its start.
func (s *search) rowLine(i int) *linear {
	r := &s.board.rows[i]
	if held := s.heldAt(i); held != nil {
		return &s.matchPrice(r, held).own
	}
	return &s.prices[r.class].own
}

// boundOn is the bound of a row of a folded block on its line.
func (s *search) boundOn(line *linear, i int) (total, own float64) {
	r := &s.board.rows[i]
	total, own = line.at(s.board.ends[i], r.decodeMs, r.live, r.gapMs, s.p.sit.NowMs, s.p.policy.Theta)
	far := s.farMs(r.id)
	return total + far, own + far
}

// kindLine is the line of the rows of a folded block of one kind, or if they have
// not one, what is below all of these, and the least of their ends.
func (s *search) kindLine(k, kind int) (line linear, endMs float64, one bool) {
	g, h := &s.board.groups[k], &s.held[k]
	if kind == bare {
		return s.prices[g.class].own, g.endMs, true
	}
	return s.behind(g.class, g.block, h.tokens()).price.own, h.endMs, g.even && !h.mixed()
}

// considerFolded is consider for the rows of a folded block.
func (s *search) considerFolded(k int) {
	g, now, theta := &s.board.groups[k], s.p.sit.NowMs, s.p.policy.Theta
	ends := s.board.ends[k*blockRows:]
	for kind := range numKinds {
		rows := s.rowsOf(k, kind)
		if rows == 0 {
			continue
		}
		// The start puts most of them beyond the bound, with the least of all else.
		line, endMs, one := s.kindLine(k, kind)
		rest := line.a*g.decodeMs*line.steps + line.perLive*g.live + line.baseMs + theta*g.gapMs + s.alikeFarMs
		if line.a*(endMs-now)+rest > s.bound {
			continue
		}
		for ; rows != 0; rows &= rows - 1 {
			i := bits.TrailingZeros16(rows)
			if line.a*(ends[i]-now)+rest > s.bound {
				continue
			}
			i += k * blockRows
			of := &line
			if !one {
				of = s.rowLine(i)
			}
			if total, own := s.boundOn(of, i); total <= s.bound {
				s.totals[i], s.owns[i] = total, own
				s.consider(i)
			}
		}
	}
}

// ownFolded is considerOwn for the rows of a folded block.
func (s *search) ownFolded(k int) {
	g, now, least := &s.board.groups[k], s.p.sit.NowMs, slack(s.bestOwn)
	ends := s.board.ends[k*blockRows:]
	for kind := range numKinds {
		rows := s.rowsOf(k, kind)
		if rows == 0 {
			continue
		}
		line, endMs, one := s.kindLine(k, kind)
		rest := g.decodeMs*line.steps + line.ownMs + s.alikeFarMs
		if endMs-now+rest > least {
			continue
		}
		for ; rows != 0; rows &= rows - 1 {
			i := bits.TrailingZeros16(rows)
			if ends[i]-now+rest > least {
				continue
			}
			i += k * blockRows
			of := &line
			if !one {
				of = s.rowLine(i)
			}
			if _, own := s.boundOn(of, i); own <= least {
				s.owns[i] = own
				if s.considerOwn(i, least) {
					least = slack(s.bestOwn)
				}
			}
		}
	}
}

// farMs is what the way to a worker costs at least.
func (s *search) farMs(id WorkerID) float64 {
	if !s.waysDiffer {
		return s.alikeFarMs
	}
	return s.wayMs(id)
}

// wayMs is the way to a worker; 0 if it is unknown.
func (s *search) wayMs(id WorkerID) float64 {
	if int(id) < len(s.q.Ways) {
		if far := s.q.Ways[id].RoundTripMs + s.q.Ways[id].SurchargeMs; far > 0 {
			return far
		}
	}
	return 0
}
