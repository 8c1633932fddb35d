package placement

import (
	"math"
	"slices"
)

// Way is the price of the way between caller and worker.
type Way struct {
	// RoundTripMs is the network round trip; NaN: unknown.
	RoundTripMs float64
	// SurchargeMs is the operator's price, at least 0.
	SurchargeMs float64
	// Outside says that the operator's topology rule closes it.
	Outside bool
}

// Query is what a Board is asked beside the request.
type Query struct {
	// Matches says who holds something of the prompt; the others hold nothing.
	Matches Matches
	// MatchUnknown says that nobody can say what is held.
	MatchUnknown bool
	// Ways are the ways from the caller by slot; what lies beyond is unknown.
	Ways []Way
	// WaysOpen says that all ways are there, known, and none is Outside: then
	// the nearest workers are found without a look at the others. WaysAlike says
	// that they also cost the same.
	WaysOpen, WaysAlike bool
	// Paths appends the ways from Situation.Sources to a worker, in their
	// order; nil: nothing may be pulled.
	Paths func(to *Worker, dst []Path) []Path
	// Way is the way of saved KV from one worker to another, for pairs of
	// prefill and decode workers; nil: none is known.
	Way func(from, to *Worker) Path
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
// counted in d.Survey. A pool with roles is priced whole.
func (b *Board) Decide(req *Request, policy *Policy, sit Situation, q *Query, dst []Candidate, d *Decision) ([]Candidate, error) {
	if err := check(req, policy, &sit); err != nil {
		return dst[:0], err
	}
	d.reset(0)
	if d.scratch == nil {
		d.scratch = new(scratch)
	}
	// Paths is a call that nobody can follow: what it could see must not be
	// allocated anew for each decision.
	p := &d.scratch.pricer
	*p = newPricer(req, policy, sit)
	s := search{board: b, p: p, q: q, d: d, dst: dst[:0]}
	if q.Paths == nil {
		p.sit.Sources = nil
	}
	d.scratch.begin(len(b.workers), len(b.classes))
	s.scratch = d.scratch
	if q.Whole || b.roles > 0 || len(b.workers) <= SearchAbove || !s.run() {
		s.whole()
	}
	// What the request holds must not live as long as this memory.
	p.req, p.policy, p.sit.Sources = nil, nil, nil
	return s.dst, nil
}

// scratch is the memory of searches, used again.
type scratch struct {
	totals, owns []float64 // lower bounds by position
	blocks       []block
	reasons      []Reason
	setOf        []int32 // by position of a holder: its set in Query.Matches
	prices       []classPrice
	held         []holding // by block
	reuse        [reusePrices]reusePrice
	searches     uint32
	paths        []Path
	twins        []twinGroup
	holders      []int32 // positions in folded blocks that are looked at apart
	pricer       pricer
	texts        texts
}

func (s *scratch) begin(rows, classes int) {
	if cap(s.totals) < rows {
		room := rows + rows/4
		s.totals, s.owns = make([]float64, room), make([]float64, room)
		s.reasons, s.setOf = make([]Reason, room), make([]int32, room)
	}
	n := (rows + blockRows - 1) / blockRows
	s.blocks = slices.Grow(s.blocks[:0], n)[:n]
	s.held = slices.Grow(s.held[:0], n)[:n]
	for k := range s.held {
		s.held[k] = holding{endMs: math.Inf(1)}
	}
	clear(s.reasons[:rows])
	s.totals, s.owns, s.reasons, s.setOf = s.totals[:rows], s.owns[:rows], s.reasons[:rows], s.setOf[:rows]
	s.prices = slices.Grow(s.prices[:0], classes)[:classes]
	s.searches++
	// Groups are pointed to: they must not move.
	s.paths, s.twins, s.holders = s.paths[:0], slices.Grow(s.twins[:0], maxTwinGroups), s.holders[:0]
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
	waysDiffer      bool    // or are not known to be alike
	alikeFarMs      float64 // what every way costs if they do not differ
	idleBlocks      int     // blocks with rows that have twins
	tieKey          uint64
	bestOwn         float64
	limit           float64
	limitKnown      bool
	lowest          [maxFallbacks + 1]float64 // smallest totals
	least           float64                   // smallest total that is allowed
	bound           float64                   // total beyond which nobody matters
	priced          int
	lastKeys        blockKeys
	lastView        lastView
	lastTwin        lastTwin
	lastGroup       *twinGroup
	lastReuse       *reusePrice
}

// whole prices all workers.
func (s *search) whole() {
	s.dst, s.d.Terms = s.dst[:0], s.d.Terms[:0]
	s.noteMatches()
	s.paths = s.paths[:0]
	for i := range s.board.workers {
		s.dst = append(s.dst, s.candidate(i))
	}
	if s.board.roles > 0 && s.q.Way != nil {
		PairUp(s.p.req, s.dst, s.p.policy, s.p.sit, s.q.Way)
	}
	s.d.priceAll(s.p, s.dst)
}

// candidate is the worker at a position as the request meets it.
func (s *search) candidate(i int) Candidate {
	c := Candidate{Worker: s.board.workers[i], DistanceMs: math.NaN()}
	if held := s.heldAt(i); held != nil {
		c.MatchedTokens, c.LowerTokens, c.Predicted = int(held.Tokens), int(held.LowerTokens), held.Predicted
	}
	if s.q.MatchUnknown {
		c.MatchedTokens, c.LowerTokens, c.Predicted = Unknown, 0, false
	}
	if int(c.ID) < len(s.q.Ways) {
		way := &s.q.Ways[c.ID]
		c.DistanceMs, c.SurchargeMs, c.Outside = way.RoundTripMs, way.SurchargeMs, way.Outside
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
	s.waysDiffer = len(s.q.Ways) > 0 && !s.q.WaysAlike
	if !s.waysDiffer {
		s.alikeFarMs = s.wayMs(b.rows[0].id)
	}
	s.idleBlocks = (b.idle + blockRows - 1) / blockRows
	s.tieKey = p.tieKey()
	s.bestOwn, s.least, s.bound = math.Inf(1), math.Inf(1), math.Inf(1)
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
	unknown, farUnknown := s.boundAll(survey, &firsts)
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
	s.p.meanLive = survey.MeanLive
	s.seed()
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
	now := s.p.sit.NowMs
	for i := range s.board.rows {
		if s.reasons[i].Firm() {
			continue
		}
		r := &s.board.rows[i]
		told := unknown &^ r.unknown
		if told&unknownQueue != 0 {
			queue.add(max(s.board.cold[i].idleMs-now, 0))
		}
		if told&unknownLive != 0 {
			live.add(r.live)
		}
		if told&unknownGap != 0 {
			gap.add(s.p.gapMs(s.board.workers[i]))
		}
		if told&unknownRoom != 0 {
			c := s.candidate(i)
			room.add(s.p.roomMs(c.Worker, s.p.promptTokens-max(s.p.reuse(&c), 0)))
		}
		if farUnknown && int(r.id) < len(s.q.Ways) {
			survey.far(s.q.Ways[r.id].RoundTripMs + s.q.Ways[r.id].SurchargeMs)
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
	lower(&s.lowest, t.TotalMs)
	s.allow(t)
	if key := s.twinKey(i); key != 0 {
		s.twin(key, i, t)
	}
	s.setBound()
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
	for _, i := range s.holders {
		if s.owns[i] <= least && s.considerOwn(int(i), least) {
			least = slack(s.bestOwn)
		}
	}
	for k := range s.blocks {
		if s.blocks[k].own > int64(math.Float64bits(least)) {
			continue
		}
		if k < s.idleBlocks && s.ownTwins(k, least) {
			least = slack(s.bestOwn)
			continue
		}
		if s.blocks[k].folded {
			s.ownFolded(k)
			least = slack(s.bestOwn)
			continue
		}
		from := k * blockRows
		for i, ms := range s.owns[from:min(from+blockRows, len(s.owns))] {
			if ms <= least && s.considerOwn(from+i, least) {
				least = slack(s.bestOwn)
			}
		}
	}
	s.limit, s.limitKnown = ownLimit(s.bestOwn, s.p.policy), true
	for i := range s.d.Terms {
		if s.d.Terms[i].Reason == ReasonNone {
			s.allow(&s.d.Terms[i])
		}
	}
	s.setBound()
}

// considerOwn prices a worker whose own time could be the least, unless the doubt
// puts it beyond that or one that costs as much is priced. It reports whether it
// did.
func (s *search) considerOwn(i int, least float64) bool {
	if !s.open(i) {
		return false
	}
	if key := s.twinKey(i); key != 0 && s.hasTwin(key) || s.owns[i]+s.doubtMs(i) > least {
		return false
	}
	s.evaluate(i)
	return true
}

// open reports whether a position may be chosen and is not priced yet.
func (s *search) open(i int) bool { return s.reasons[i] == ReasonNone }

// findTotals prices whoever could be chosen or be a fallback.
func (s *search) findTotals() {
	for _, i := range s.holders {
		if s.totals[i] <= s.bound {
			s.consider(int(i))
		}
	}
	s.findTwins()
	for k := range s.blocks {
		if s.blocks[k].twinned || s.blocks[k].total > int64(math.Float64bits(s.bound)) || k < s.idleBlocks && s.twinBlock(k) {
			continue
		}
		if s.blocks[k].folded {
			s.considerFolded(k)
			continue
		}
		from := k * blockRows
		for i, ms := range s.totals[from:min(from+blockRows, len(s.totals))] {
			if ms <= s.bound {
				s.consider(from + i)
			}
		}
	}
	s.priceTwins()
}

// consider prices a worker within the bound, unless the doubt puts it beyond
// that; one that has a twin is kept among them.
func (s *search) consider(i int) {
	if !s.open(i) {
		return
	}
	if key := s.twinKey(i); key != 0 && s.twin(key, i, nil) || s.totals[i]+s.doubtMs(i) > s.bound {
		return
	}
	s.evaluate(i)
}

// findTwins prices those of workers that cost the same as one priced before that
// could be chosen: then few of the others can be within what these cost.
func (s *search) findTwins() {
	for k := range s.blocks[:s.idleBlocks] {
		if s.blocks[k].total <= int64(math.Float64bits(s.bound)) {
			s.twinBlock(k)
		}
	}
	s.priceTwins()
}

// priceTwins prices the members of all groups that could be chosen.
func (s *search) priceTwins() {
	for g := range s.twins {
		if s.twins[g].totalMs > s.bound {
			continue
		}
		for _, top := range s.twins[g].tops[:s.twins[g].n] {
			if !top.priced {
				s.evaluate(int(top.at))
			}
		}
	}
}

// setBound finds the total beyond which nobody matters. A worker that is kept in
// a group of twins costs what the others cost.
func (s *search) setBound() {
	lowest := s.lowest
	for g := range s.twins {
		for range s.twins[g].unpriced {
			if !lower(&lowest, s.twins[g].totalMs) {
				break
			}
		}
	}
	s.bound = slack(max(lowest[len(lowest)-1], s.least+s.p.policy.TieMs))
}

// lower puts a total among the smallest and reports whether it is one.
func lower(lowest *[maxFallbacks + 1]float64, totalMs float64) bool {
	at := len(lowest) - 1
	if !(totalMs < lowest[at]) {
		return false
	}
	for ; at > 0 && totalMs < lowest[at-1]; at-- {
		lowest[at] = lowest[at-1]
	}
	lowest[at] = totalMs
	return true
}
