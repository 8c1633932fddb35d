package placement

import "math"

// linear is a lower bound of own time and total as a function of the start:
// own = start + ownMs, total = a·start + perLive·live + baseMs + θ·gap.
type linear struct{ ownMs, a, perLive, baseMs, steps float64 }

// classPrice is what a step model makes of the prompt: computed whole, and
// behind what the best source could send.
type classPrice struct{ own, pulled linear }

// reusePrice is the classPrice behind what is reused of a match, and what that
// saves.
type reusePrice struct {
	search       uint32 // that it was computed in
	class, block int32
	tokens       int32
	price        classPrice
	savedMs      float64
}

// reusePrices is the number of reusePrice that are kept: several times the number
// of lengths that the matches of a prompt have, so that these rarely share a place.
const (
	reuseBits   = 8
	reusePrices = 1 << reuseBits
)

// blockRows is the number of rows whose least bounds are kept, so that later
// passes look at few rows.
const blockRows = 16

// block holds the least bounds of some rows, as the bits of numbers that are
// not negative: these compare like the numbers.
type block struct {
	total, own int64
	// plain says that the rows are those of a plain group, under ways that are
	// open.
	plain bool
	// folded says that the rows' own bounds are not computed yet: these are the
	// group's, behind the longest match of a row.
	folded bool
	// twinned says that its rows are in their groups of twins.
	twinned bool
}

// boundAll computes the lower bounds of all workers. It returns which facts of
// placeable workers are unknown.
func (s *search) boundAll(survey *Survey, firsts *[numReasons]int32) (unknown unknownFacts, farUnknown bool) {
	p, b := s.p, s.board
	req, now, theta := p.req, p.sit.NowMs, p.policy.Theta
	ways, pulls := s.q.Ways, s.pulls
	anyWays := len(ways) > 0
	special := req.TenantBarred != "" || len(req.ExcludeWorkers) > 0 || len(req.ExcludeProcesses) > 0 || req.Adapter != ""
	bounds := [2]float64{p.policy.SilentMs, p.policy.AwayBoundMs}
	tokens := int32(min(p.promptTokens, math.MaxInt32))
	prices, rows := s.prices, b.rows
	excluded := 0
	fold := !special && !pulls && (!anyWays || s.q.WaysOpen)
	for k := range s.blocks {
		if g := &b.groups[k]; fold && g.plain && tokens < g.maxTokens && now-g.seenMs <= p.policy.SilentMs {
			total, own := math.Inf(1), math.Inf(1)
			h := &s.held[k]
			if s.rowsOf(k, bare) != 0 {
				total, own = prices[g.class].own.at(g.endMs, g.decodeMs, g.live, g.gapMs, now, theta)
			}
			if h.some() {
				t, o := s.behind(g.class, g.block, h.tokens()).price.own.at(h.endMs, g.decodeMs, g.live, g.gapMs, now, theta)
				total, own = min(total, t), min(own, o)
			}
			s.blocks[k] = block{total: int64(math.Float64bits(total + s.alikeFarMs)), own: int64(math.Float64bits(own + s.alikeFarMs)), plain: true, folded: true}
			continue
		}
		least := block{total: math.MaxInt64, own: math.MaxInt64}
		from := k * blockRows
		to := min(from+blockRows, len(rows))
		part, totals, owns, ends := rows[from:to], s.totals[from:to], s.owns[from:to], b.ends[from:to]
		holders := s.held[k].rows
		for i := range part {
			r := &part[i]
			if r.reason != ReasonNone || tokens >= r.maxTokens || now-r.seenMs > bounds[r.flags&rowAway] || special ||
				anyWays && int(r.id) < len(ways) && ways[r.id].Outside {
				if reason := s.reasonAt(from+i, special); reason != ReasonNone {
					s.reasons[from+i] = reason
					totals[i], owns[i] = math.Inf(1), math.Inf(1)
					if survey.Reasons[reason]++; survey.Reasons[reason] == 1 {
						firsts[reason] = int32(from + i)
					}
					excluded++
					continue
				}
			}
			unknown |= r.unknown
			price := &prices[r.class]
			if holders>>i&1 != 0 {
				price = s.matchPrice(r, s.heldAt(from+i))
			}
			total, own := price.own.at(ends[i], r.decodeMs, r.live, r.gapMs, now, theta)
			if pulls && r.flags&rowPulls != 0 {
				start := max(ends[i]-now, r.decodeMs/2)
				total, own = price.pulled.under(start, r, theta, total, own)
			}
			if anyWays {
				far := math.NaN()
				if int(r.id) < len(ways) {
					far = ways[r.id].RoundTripMs + ways[r.id].SurchargeMs
				}
				if far > 0 {
					total, own = total+far, own+far
				}
				farUnknown = farUnknown || far != far
			}
			totals[i], owns[i] = total, own
			least.total = min(least.total, int64(math.Float64bits(total)))
			least.own = min(least.own, int64(math.Float64bits(own)))
		}
		s.blocks[k] = least
	}
	survey.Reasons[ReasonNone] = len(rows) - excluded
	s.boundHolders()
	return unknown, farUnknown
}

// boundHolders computes the bounds of the workers that are looked at apart, which
// are not in the blocks' numbers. Those in blocks that are not folded are bounded
// with these.
func (s *search) boundHolders() {
	b, groups := s.board, s.q.Matches.groups
	var price *classPrice
	set, class, block := int32(-1), int32(0), int32(0)
	kept := s.holders[:0]
	for _, i := range s.holders {
		if !s.blocks[i/blockRows].folded {
			continue
		}
		kept = append(kept, i)
		r := &b.rows[i]
		if s.setOf[i] != set || r.class != class || r.block != block || r.flags&rowBlind != 0 {
			price = s.matchPrice(r, &groups[s.setOf[i]].Held)
			if set, class, block = s.setOf[i], r.class, r.block; r.flags&rowBlind != 0 {
				set = -1
			}
		}
		total, own := price.own.at(b.ends[i], r.decodeMs, r.live, r.gapMs, s.p.sit.NowMs, s.p.policy.Theta)
		far := s.farMs(r.id)
		s.totals[i], s.owns[i] = total+far, own+far
	}
	s.holders = kept
}

// at is the bound of a row, or of a group of rows: each number may only make it
// larger, also in its last digit.
func (l *linear) at(endMs, decodeMs, live, gapMs, nowMs, theta float64) (total, own float64) {
	start := endMs - nowMs
	if idle := decodeMs / 2; start < idle {
		start = idle
	}
	own = start + decodeMs*l.steps
	return l.a*own + l.perLive*live + l.baseMs + theta*gapMs, own + l.ownMs
}

// apart reports whether a position is looked at apart.
func (s *search) apart(i int) bool { return s.held[i/blockRows].apart>>(i%blockRows)&1 != 0 }

// nearest are a few positions or blocks with the least bounds, least first.
type nearest struct {
	n  int
	at [maxFallbacks + 1]int
	by [maxFallbacks + 1]int64 // as in block
}

func (l *nearest) offer(by int64, at int) {
	i := l.n
	if i == len(l.at) {
		if i--; by >= l.by[i] {
			return
		}
	} else {
		l.n++
	}
	for ; i > 0 && by < l.by[i-1]; i-- {
		l.at[i], l.by[i] = l.at[i-1], l.by[i-1]
	}
	l.at[i], l.by[i] = at, by
}

// seed prices those whose bounds are least, so that few others can matter.
func (s *search) seed() {
	var blocks, rows nearest
	soonest := int64(math.MaxInt64) // the least own time
	own, ofBlock := -1, false
	for k := range s.blocks {
		b := &s.blocks[k]
		if b.total != math.MaxInt64 {
			blocks.offer(b.total, k)
		}
		if b.own < soonest {
			soonest, own, ofBlock = b.own, k, true
		}
	}
	for _, i := range s.holders {
		rows.offer(int64(math.Float64bits(s.totals[i])), int(i))
		if bits := int64(math.Float64bits(s.owns[i])); bits < soonest {
			soonest, own, ofBlock = bits, int(i), false
		}
	}
	for _, k := range blocks.at[:blocks.n] {
		if rows.n == len(rows.at) && s.blocks[k].total >= rows.by[rows.n-1] {
			break
		}
		if i := s.leastOf(s.totals, k); i >= 0 {
			by := s.blocks[k].total
			if !s.blocks[k].folded {
				by = int64(math.Float64bits(s.totals[i]))
			}
			rows.offer(by, i)
		}
	}
	for _, i := range rows.at[:rows.n] {
		if key := s.twinKey(i); key == 0 || !s.twin(key, i, nil) {
			s.evaluate(i)
		}
	}
	if ofBlock {
		own = s.leastOf(s.owns, own)
	}
	if own >= 0 {
		if key := s.twinKey(own); key == 0 || !s.hasTwin(key) {
			s.evaluate(own)
		}
	}
}

// leastOf is the position of the least bound of a block, of one of twins any;
// -1: all its rows are looked at apart.
func (s *search) leastOf(bounds []float64, k int) int {
	from := k * blockRows
	to := min(from+blockRows, len(bounds))
	if !s.blocks[k].plain {
		return indexOfLeast(bounds, k)
	}
	if s.blockKeys(k) != nil {
		kind := 0
		if s.held[k].some() {
			kind = 1
		}
		return s.firstOf(k, kind)
	}
	s.unfold(k)
	at := -1
	for i := from; i < to; i++ {
		if !s.apart(i) && (at < 0 || bounds[i] < bounds[at]) {
			at = i
		}
	}
	return at
}

// indexOfLeast is the position of the least bound of a block.
func indexOfLeast(bounds []float64, k int) int {
	from := k * blockRows
	at := from
	for i, ms := range bounds[from:min(from+blockRows, len(bounds))] {
		if ms < bounds[at] {
			at = from + i
		}
	}
	return at
}

// reasonAt is pricer.reason for a position, without a look at the worker
// unless the request is special.
func (s *search) reasonAt(i int, special bool) Reason {
	reason, id := s.ownReasonAt(i, special), s.board.rows[i].id
	if int(id) < len(s.q.Ways) && s.q.Ways[id].Outside && !reason.Firm() {
		return ReasonOutside
	}
	return reason
}

func (s *search) ownReasonAt(i int, special bool) Reason {
	r := &s.board.rows[i]
	switch age := s.p.sit.NowMs - r.seenMs; {
	case special:
		return s.p.reason(s.board.workers[i])
	case r.flags&rowBarred != 0:
		return r.reason
	case s.p.promptTokens >= int(r.maxTokens):
		return ReasonTooLong
	case r.reason != ReasonNone:
		return r.reason
	case r.flags&rowAway != 0 && age > s.p.policy.AwayBoundMs:
		return ReasonAway
	case r.flags&rowAway == 0 && age > s.p.policy.SilentMs:
		return ReasonSilent
	}
	return ReasonNone
}

// under is the smaller of the bounds given and those of this line.
func (l *linear) under(start float64, r *row, theta, total, own float64) (float64, float64) {
	begin := start + r.decodeMs*l.steps
	return min(total, l.a*begin+l.perLive*r.live+l.baseMs+theta*r.gapMs), min(own, begin+l.ownMs)
}

// line is the bound for computing behind reused tokens, after a transfer.
func (s *search) line(class int32, reused int, transferMs float64) linear {
	tokens := s.p.promptTokens - reused
	steps := &s.board.classes[class].steps
	ms := steps.PrefillMs(reused, tokens)
	budget := steps.BudgetTokens()
	return linear{
		ownMs: ms + transferMs, a: 1 + s.lambda*ms, perLive: s.perLive * ms,
		baseMs: ms + transferMs + s.lambda*ms*ms/2, steps: float64((tokens + budget - 1) / budget),
	}
}

// classPrice is the bound of a class behind reused tokens.
func (s *search) classPrice(class int32, reused int) classPrice {
	price := classPrice{own: s.line(class, reused, 0)}
	if !s.pulls {
		return price
	}
	price.pulled = price.own
	for i := range s.p.sit.Sources {
		source := &s.p.sit.Sources[i]
		held := min(source.Tokens, s.p.promptTokens-1)
		if source.Worker == nil || source.Transfer == nil || held <= reused {
			continue
		}
		transfer := s.p.policy.TransferSetupMs
		if fastest := s.q.FastestBytesPerMs; fastest > 0 {
			// A candidate with larger blocks moves less, by less than a block.
			moved := max(held-reused-int(s.board.largestBlock)+1, 0)
			transfer += float64(moved) * source.Transfer.BytesPerToken / fastest
		}
		line := s.line(class, held, transfer)
		price.pulled = linear{
			ownMs: min(price.pulled.ownMs, line.ownMs), a: min(price.pulled.a, line.a), perLive: min(price.pulled.perLive, line.perLive),
			baseMs: min(price.pulled.baseMs, line.baseMs), steps: min(price.pulled.steps, line.steps),
		}
	}
	return price
}

// behind is the price of a class behind what is reused of a match.
func (s *search) behind(class, block, tokens int32) *reusePrice {
	if r := s.lastReuse; r != nil && r.tokens == tokens && r.class == class && r.block == block {
		return r
	}
	at := (uint32(tokens) ^ uint32(class)*0x85ebca6b ^ uint32(block)<<16) * 0x9e3779b1 >> (32 - reuseBits)
	r := &s.reuse[at]
	if r.search != s.searches || r.block != block || r.class != class || r.tokens != tokens {
		r.search, r.class, r.block, r.tokens = s.searches, class, block, tokens
		r.price = s.classPrice(class, max(reusableTokens(int(tokens), s.p.promptTokens, int(block)), 0))
		r.savedMs = max(s.prices[class].own.ownMs-r.price.own.ownMs, 0)
	}
	s.lastReuse = r
	return r
}

// matchPrice is the price of a worker's class behind what it holds.
func (s *search) matchPrice(r *row, held *Held) *classPrice {
	if r.flags&rowBlind != 0 && !held.Predicted {
		return &s.prices[r.class]
	}
	return &s.behind(r.class, r.block, held.Tokens).price
}

// doubtMs is the doubt whether what a worker holds is still there, which its
// bounds leave out: few workers are within these.
func (s *search) doubtMs(i int) float64 {
	held := s.heldAt(i)
	if held == nil {
		return 0
	}
	r := &s.board.rows[i]
	if s.pulls && r.flags&rowPulls != 0 || r.flags&rowBlind != 0 && !held.Predicted {
		return 0
	}
	return (1 - s.stillThere(&s.board.cold[i], held.Predicted)) * s.behind(r.class, r.block, held.Tokens).savedMs
}

// lastView is the view that was asked last how likely what it shows is there.
type lastView struct {
	mark      uint64
	predicted bool
	there     float64
}

// stillThere is pricer.stillThere for a row.
func (s *search) stillThere(c *coldRow, predicted bool) float64 {
	if s.lastView.mark != c.mark || s.lastView.predicted != predicted {
		s.lastView = lastView{c.mark, predicted, s.p.stillThere(&c.view, predicted)}
	}
	return s.lastView.there
}
