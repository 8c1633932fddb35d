package placement

import (
	"math"
	"slices"
)

// Match is what one worker is known to hold of a prompt.
type Match struct {
	// Worker holds it.
	Worker WorkerID
	// Tokens is the deepest prefix it is known to hold.
	Tokens int
	// Predicted says that the match comes from the prompt of a live claim.
	Predicted bool
}

// Way is the price of the way between caller and worker.
type Way struct {
	// RoundTripMs is the network round trip; NaN: unknown.
	RoundTripMs float64
	// SurchargeMs is the operator's price, at least 0.
	SurchargeMs float64
}

// Query is what a Board is asked beside the request.
type Query struct {
	// Matches says who holds something of the prompt, each worker once; the
	// others hold nothing.
	Matches []Match
	// MatchUnknown says that nobody can say what is held.
	MatchUnknown bool
	// Ways are the ways from the caller by slot; what lies beyond is unknown.
	Ways []Way
	// Paths appends the ways from Situation.Sources to a worker, in their
	// order; nil: nothing may be pulled.
	Paths func(to *Worker, dst []Path) []Path
	// FastestBytesPerMs is an upper bound of the bandwidth of all paths; 0:
	// unknown.
	FastestBytesPerMs float64
	// Whole prices every worker, as explanations of small fleets want it.
	Whole bool
}

// SearchAbove is the number of workers above which a Board does not price all.
const SearchAbove = 64

// Decide chooses among the board's workers. The choice, its fallbacks and a
// refusal are those of Decide over all of them; d.Terms and the returned
// candidates, which overwrite dst, are those that were priced: all that could
// have won, and one example of every reason of exclusion. The others are
// counted in d.Survey.
func (b *Board) Decide(req *Request, policy *Policy, sit Situation, q *Query, dst []Candidate, d *Decision) ([]Candidate, error) {
	if err := check(req, policy, &sit); err != nil {
		return dst[:0], err
	}
	p := newPricer(req, policy, sit)
	s := search{board: b, p: &p, q: q, d: d, dst: dst[:0]}
	if q.Paths == nil {
		p.sit.Sources = nil
	}
	d.reset(0)
	if d.scratch == nil {
		d.scratch = new(scratch)
	}
	d.scratch.begin(len(b.workers), len(b.classes))
	s.scratch = d.scratch
	if q.Whole || len(b.workers) <= SearchAbove || !s.run() {
		s.whole()
	}
	for _, m := range q.Matches {
		if i := b.position(m.Worker); i >= 0 {
			s.matchOf[i] = 0
		}
	}
	return s.dst, nil
}

// scratch is the memory of searches, used again.
type scratch struct {
	totals, owns []float64 // lower bounds by position
	blocks       []block
	reasons      []Reason
	matchOf      []int32 // by position: index in Query.Matches + 1
	prices       []classPrice
	memo         []classMemo
	paths        []Path
	twins        []twinGroup
}

func (s *scratch) begin(rows, classes int) {
	if cap(s.totals) < rows {
		room := rows + rows/4
		s.totals, s.owns = make([]float64, room), make([]float64, room)
		s.reasons, s.matchOf = make([]Reason, room), make([]int32, room)
	}
	n := (rows + blockRows - 1) / blockRows
	s.blocks = slices.Grow(s.blocks[:0], n)[:n]
	clear(s.reasons[:rows])
	s.totals, s.owns, s.reasons, s.matchOf = s.totals[:rows], s.owns[:rows], s.reasons[:rows], s.matchOf[:rows]
	s.prices = slices.Grow(s.prices[:0], classes)[:classes]
	s.memo = slices.Grow(s.memo[:0], classes)[:classes]
	clear(s.memo)
	s.paths, s.twins = s.paths[:0], s.twins[:0]
}

// linear is a lower bound of own time and total as a function of the start:
// own = start + ownMs, total = a·start + perLive·live + baseMs + θ·gap.
type linear struct{ ownMs, a, perLive, baseMs, steps float64 }

// classPrice is what a step model makes of the prompt: computed whole, and
// behind what the best source could send.
type classPrice struct{ own, pulled linear }

// classMemo is the last classPrice behind a match.
type classMemo struct {
	tokens int
	block  int32
	price  classPrice
}

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

// search is one bounded search.
type search struct {
	*scratch
	board *Board
	p     *pricer
	q     *Query
	d     *Decision
	dst   []Candidate

	lambda, perLive float64 // weights of the queue and stall terms
	pulls           bool
	tieKey          uint64
	bestOwn         float64
	limit           float64
	limitKnown      bool
	lowest          [maxFallbacks + 1]float64 // smallest totals
	least           float64                   // smallest total that is allowed
	priced          int
}

// whole prices all workers.
func (s *search) whole() {
	s.dst, s.d.Terms = s.dst[:0], s.d.Terms[:0]
	s.noteMatches()
	s.paths = s.paths[:0]
	for i := range s.board.workers {
		s.dst = append(s.dst, s.candidate(i))
	}
	s.d.priceAll(s.p, s.dst)
}

// noteMatches says at every position what is held there.
func (s *search) noteMatches() {
	for m := range s.q.Matches {
		if i := s.board.position(s.q.Matches[m].Worker); i >= 0 {
			s.matchOf[i] = int32(m) + 1
		}
	}
}

// candidate is the worker at a position as the request meets it.
func (s *search) candidate(i int) Candidate {
	c := Candidate{Worker: s.board.workers[i], DistanceMs: math.NaN()}
	if m := s.matchOf[i]; m > 0 {
		c.MatchedTokens, c.Predicted = s.q.Matches[m-1].Tokens, s.q.Matches[m-1].Predicted
	}
	if s.q.MatchUnknown {
		c.MatchedTokens, c.Predicted = Unknown, false
	}
	if int(c.ID) < len(s.q.Ways) {
		c.DistanceMs, c.SurchargeMs = s.q.Ways[c.ID].RoundTripMs, s.q.Ways[c.ID].SurchargeMs
	}
	if len(s.p.sit.Sources) > 0 {
		at := len(s.paths)
		s.paths = s.q.Paths(c.Worker, s.paths)
		c.Paths = s.paths[at:len(s.paths):len(s.paths)]
	}
	return c
}

// run searches. It reports false when the rare cases ask for all workers: when
// nobody can be chosen freely.
func (s *search) run() bool {
	p, b := s.p, s.board
	s.lambda = p.policy.QueueWeight * positive(p.sit.ArrivalsPerMs)
	s.perLive = p.policy.Theta / p.meanOutputTokens
	s.pulls = len(p.sit.Sources) > 0 && b.pulling > 0
	s.tieKey = p.tieKey()
	s.bestOwn, s.least = math.Inf(1), math.Inf(1)
	for i := range s.lowest {
		s.lowest[i] = math.Inf(1)
	}
	for i := range b.classes {
		if b.classes[i].rows > 0 {
			s.prices[i] = s.classPrice(int32(i), 0)
		}
	}
	survey := &s.d.Survey
	*survey = emptySurvey(len(b.workers))
	var firsts [numReasons]int32
	if !s.q.MatchUnknown {
		s.noteMatches()
	}
	unknown, farUnknown := s.bound(survey, &firsts)
	for r, n := range survey.Reasons {
		if !Reason(r).Firm() {
			survey.Eligible += n
		}
	}
	survey.Aged = survey.Reasons[ReasonAway] + survey.Reasons[ReasonSilent]
	survey.PanicFloor = survey.Aged*2 > survey.Eligible
	placeable := survey.Reasons[ReasonNone]
	if placeable == 0 || survey.PanicFloor {
		return false
	}
	s.means(survey, unknown, farUnknown)
	total, own := s.seeds()
	s.evaluate(total)
	s.evaluate(own)
	if !s.q.MatchUnknown {
		s.evaluate(s.mostReuse())
	}
	for r, i := range firsts {
		if Reason(r) != ReasonNone && survey.Reasons[r] > 0 {
			s.evaluate(int(i))
		}
	}
	s.findBestOwn()
	s.findTotals()
	s.d.settle(p, s.dst)
	survey.Placeable, survey.Unpriced = placeable, placeable-s.priced
	return true
}

// blockRows is the number of rows whose least bounds are kept, so that later
// passes look at few rows.
const blockRows = 16

// block holds the least bounds of some rows, as the bits of numbers that are
// not negative: these compare like the numbers.
type block struct{ total, own int64 }

// bound computes the lower bounds of all workers. It returns which facts of
// placeable workers are unknown.
func (s *search) bound(survey *Survey, firsts *[numReasons]int32) (unknown unknownFacts, farUnknown bool) {
	p, b := s.p, s.board
	req, now, theta := p.req, p.sit.NowMs, p.policy.Theta
	ways, pulls := s.q.Ways, s.pulls
	special := req.TenantBarred != "" || len(req.ExcludeWorkers) > 0 || len(req.ExcludeProcesses) > 0
	bounds := [2]float64{p.policy.SilentMs, p.policy.AwayBoundMs}
	tokens := int32(min(p.promptTokens, math.MaxInt32))
	prices, rows := s.prices, b.rows
	excluded := 0
	for k := range s.blocks {
		least := block{math.MaxInt64, math.MaxInt64}
		from := k * blockRows
		to := min(from+blockRows, len(rows))
		part, totals, owns, matchOf := rows[from:to], s.totals[from:to], s.owns[from:to], s.matchOf[from:to]
		for i := range part {
			r := &part[i]
			if r.reason != ReasonNone || tokens >= r.maxTokens || now-r.seenMs > bounds[r.flags&rowAway] || special {
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
			if m := matchOf[i]; m != 0 {
				price = s.matchPrice(r, m)
			}
			start := r.endMs - now
			if idle := r.decodeMs / 2; start < idle {
				start = idle
			}
			l := &price.own
			own := start + r.decodeMs*l.steps
			total := l.a*own + l.perLive*r.live + l.baseMs + theta*r.gapMs
			own += l.ownMs
			if pulls && r.flags&rowPulls != 0 {
				total, own = price.pulled.under(start, r, theta, total, own)
			}
			if len(ways) > 0 {
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
	return unknown, farUnknown
}

// seeds are the positions of the least bounds of total and own time.
func (s *search) seeds() (total, own int) {
	least, blocks := block{math.MaxInt64, math.MaxInt64}, [2]int{}
	for k := range s.blocks {
		if s.blocks[k].total < least.total {
			least.total, blocks[0] = s.blocks[k].total, k
		}
		if s.blocks[k].own < least.own {
			least.own, blocks[1] = s.blocks[k].own, k
		}
	}
	return indexOfLeast(s.totals, blocks[0]), indexOfLeast(s.owns, blocks[1])
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

// matchPrice is the price of a worker's class behind what it holds.
func (s *search) matchPrice(r *row, m int32) *classPrice {
	match := &s.q.Matches[m-1]
	memo := &s.memo[r.class]
	if memo.tokens != match.Tokens || memo.block != r.block {
		memo.tokens, memo.block = match.Tokens, r.block
		reused := max(reusableTokens(match.Tokens, s.p.promptTokens, int(memo.block)), 0)
		memo.price = s.classPrice(r.class, reused)
	}
	if r.flags&rowBlind != 0 && !match.Predicted {
		return &s.prices[r.class]
	}
	return &memo.price
}

// mostReuse is the position of the worker that holds most; -1: nobody does.
func (s *search) mostReuse() (most int) {
	deepest := 0
	for m := range s.q.Matches {
		deepest = max(deepest, s.q.Matches[m].Tokens)
	}
	most = -1
	mostTokens := 0
	visit := func(match *Match) {
		i := s.board.position(match.Worker)
		if i < 0 || s.board.rows[i].flags&rowBlind != 0 && !match.Predicted {
			return
		}
		reused := reusableTokens(match.Tokens, s.p.promptTokens, int(s.board.rows[i].block))
		if reused > mostTokens || reused == mostTokens && most >= 0 && s.outholds(i, most) {
			most, mostTokens = i, reused
		}
	}
	// The deepest first: no engine reuses more than its match, so that most
	// of the others need no look.
	for m := range s.q.Matches {
		if s.q.Matches[m].Tokens == deepest {
			visit(&s.q.Matches[m])
		}
	}
	for m := range s.q.Matches {
		if tokens := s.q.Matches[m].Tokens; tokens != deepest && tokens >= mostTokens {
			visit(&s.q.Matches[m])
		}
	}
	return most
}

// outholds is Decision.outholds for positions that hold as much.
func (s *search) outholds(i, j int) bool {
	if free, other := s.reasons[i] == ReasonNone, s.reasons[j] == ReasonNone; free != other {
		return free
	}
	return s.board.rows[i].id < s.board.rows[j].id
}

// means takes the means that placeable workers with unknown facts need.
func (s *search) means(survey *Survey, unknown unknownFacts, farUnknown bool) {
	survey.ErrorsKnown, survey.MeanErrorMs = s.board.errors.known, s.board.errors.meanMs()
	if unknown == 0 && !farUnknown {
		return
	}
	var queue, live, gap, room mean
	for i, w := range s.board.workers {
		if s.reasons[i].Firm() {
			continue
		}
		if unknown != 0 {
			if w.QueueKnown {
				queue.add(w.Waiting.QueueMs(s.p.sit.NowMs))
			}
			live.add(w.Live)
			gap.add(s.p.gapMs(w))
			c := s.candidate(i)
			room.add(s.p.roomMs(w, s.p.promptTokens-max(s.p.reuse(&c), 0)))
		}
		if farUnknown {
			c := s.candidate(i)
			survey.far(c.DistanceMs + c.SurchargeMs)
		}
	}
	survey.MeanQueueMs, survey.MeanLive, survey.MeanGapMs, survey.MeanRoomMs = queue.value(), live.value(), gap.value(), room.value()
	s.paths = s.paths[:0]
}

// evaluate prices the worker at a position in full, once.
func (s *search) evaluate(i int) {
	if i < 0 || s.reasons[i] == reasonPriced {
		return
	}
	s.dst = append(s.dst, s.candidate(i))
	s.d.Terms = append(s.d.Terms, Terms{})
	c, t := &s.dst[len(s.dst)-1], &s.d.Terms[len(s.d.Terms)-1]
	s.p.price(c, t)
	s.p.complete(c.Worker, t, &s.d.Survey)
	placeable := s.reasons[i] == ReasonNone
	s.reasons[i] = reasonPriced
	if !placeable {
		return
	}
	s.priced++
	s.bestOwn = min(s.bestOwn, t.OwnMs)
	last := len(s.lowest) - 1
	if t.TotalMs < s.lowest[last] {
		at := last
		for ; at > 0 && t.TotalMs < s.lowest[at-1]; at-- {
			s.lowest[at] = s.lowest[at-1]
		}
		s.lowest[at] = t.TotalMs
	}
	s.allow(t)
	if key := s.twinKey(i); key != 0 {
		s.twin(key, i, true)
	}
}

// reasonPriced marks a position that was priced.
const reasonPriced = numReasons

// allow notes the total of a worker that a budget and the own-time limit
// leave, once the limit is known.
func (s *search) allow(t *Terms) {
	if s.limitKnown && t.OwnMs <= s.limit && s.p.missed(t) == BudgetNone {
		s.least = min(s.least, t.TotalMs)
	}
}

// roundingSlack is the room for rounding between a bound and a price.
const roundingSlack = 1e-9

func slack(ms float64) float64 { return ms + roundingSlack*(1+math.Abs(ms)) }

// findBestOwn prices whoever could have the least own time.
func (s *search) findBestOwn() {
	least := slack(s.bestOwn)
	for k := range s.blocks {
		if s.blocks[k].own > int64(math.Float64bits.least+s.p.policy.TieMs)) {
			continue
		}
		from := k * blockRows
		for i := from; i < min(from+blockRows, len(s.owns)); i++ {
			if !s.open(i) || s.owns[i] > least {
				continue
			}
			if key := s.twinKey(i); key != 0 && s.hasTwin(key) {
				continue
			}
			s.evaluate(i)
			least = slack(s.bestOwn)
		}
	}
	s.limit, s.limitKnown = s.bestOwn*(1+s.p.policy.OwnLimitRatio)+s.p.policy.OwnLimitMs, true
	for i := range s.d.Terms {
		if s.d.Terms[i].Reason == ReasonNone {
			s.allow(&s.d.Terms[i])
		}
	}
}

// open reports whether a position may be chosen and is not priced yet.
func (s *search) open(i int) bool { return s.reasons[i] == ReasonNone }

// findTotals prices whoever could be chosen or be a fallback.
func (s *search) findTotals() {
	bound := s.totalBound()
	for k := range s.blocks {
		if s.blocks[k].total > int64(math.Float64bits(bound)) {
			continue
		}
		from := k * blockRows
		for i := from; i < min(from+blockRows, len(s.totals)); i++ {
			if !s.open(i) || s.totals[i] > bound {
				continue
			}
			if key := s.twinKey(i); key != 0 && s.twin(key, i, false) {
				continue
			}
			s.evaluate(i)
			bound = s.totalBound()
		}
	}
	for g := range s.twins {
		for _, top := range s.twins[g].tops[:s.twins[g].n] {
			if !top.priced {
				s.evaluate(int(top.at))
			}
		}
	}
}

// totalBound is the total beyond which nobody matters.
func (s *search) totalBound() float64 {
	return slack(max(s.lowest[len(s.lowest)-1], s.least+s.p.policy.TieMs))
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

func (s *search) hasTwin(key uint64) bool {
	for g := range s.twins {
		if s.twins[g].key == key {
			return true
		}
	}
	return false
}

// twin keeps a position in its group if its hash is among the highest. It
// reports false if there is no such group yet; a priced position makes one.
func (s *search) twin(key uint64, i int, priced bool) bool {
	var g *twinGroup
	for k := range s.twins {
		if s.twins[k].key == key {
			g = &s.twins[k]
		}
	}
	if g == nil {
		if !priced || len(s.twins) >= maxTwinGroups {
			return false
		}
		s.twins = append(s.twins, twinGroup{key: key})
		g = &s.twins[len(s.twins)-1]
	}
	hash := rendezvous(s.tieKey, s.board.cold[i].nameHash)
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
