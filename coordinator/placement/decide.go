package placement

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/zeebo/xxh3"
)

// maxFallbacks is the number of next best workers an answer names.
const maxFallbacks = 3

// Survey is what a decision takes from the candidates together. A record that
// keeps only some of the candidates keeps it, so that they are priced alike.
type Survey struct {
	// Candidates counts all, Eligible those that will does not exclude, Aged
	// those of them that only silence excludes, Placeable those that could
	// be chosen.
	Candidates, Eligible, Aged, Placeable int
	// Unpriced counts placeable workers that a search left out because no
	// price of theirs could have won.
	Unpriced int
	// Known means over the eligible; NaN where no candidate knows, or where a
	// search found no placeable worker that needs them: unknown terms of
	// excluded workers are shown without them then.
	MeanQueueMs, MeanLive, MeanGapMs, MeanRoomMs float64
	// MeanErrorMs is the mean of the prediction errors of ErrorsKnown workers,
	// all that are not barred.
	MeanErrorMs float64
	ErrorsKnown int
	// MaxDistanceMs is the farthest known distance; NaN: none is known.
	MaxDistanceMs float64
	// BestOwnMs is the least own time among the placeable.
	BestOwnMs float64
	// PanicFloor says that silence was ignored.
	PanicFloor bool
	// Reasons counts the candidates per reason.
	Reasons [numReasons]int
}

// Decision is the outcome of Decide. It is reusable: Decide overwrites it and
// keeps the memory of its terms.
type Decision struct {
	// Chosen is the index of the chosen candidate; -1: refused.
	Chosen int
	// Terms holds the terms of every candidate that was priced, in the
	// candidates' order.
	Terms []Terms
	// MostReuse is the index of the candidate with most reuse, placeable or
	// not; -1: nobody is known to hold anything.
	MostReuse int
	// Tied says that the choice was made among equals.
	Tied bool
	// Marks says what was not normal.
	Marks Marks
	// OutputTokens is the answer that was expected.
	OutputTokens float64
	// FirstTokenMs and FirstTokenP90Ms are the prediction for the chosen.
	FirstTokenMs, FirstTokenP90Ms float64
	// Refusal says why nobody was chosen; meaningful if Chosen is -1.
	Refusal Refusal
	// Survey is what was taken from the candidates together.
	Survey Survey

	// theta is the policy's, for comparing terms; tenantBarred the request's.
	theta                 float64
	tenantBarred, adapter string
	// tenantOver is why a tenant was refused, refusedWaitMs the wait it found.
	tenantOver    string
	refusedWaitMs float64
	// least is the index of the smallest total that was allowed.
	least int
	// soonest is, of a refusal, the index of the worker that the time to ask
	// again comes from, or that a tenant was refused.
	soonest       int
	fallbacks     [maxFallbacks]int
	fallbackCount int
	because       string // made once
	scratch       *scratch
}

// Fallbacks are the indices of the next best candidates, best first, at most
// three.
func (d *Decision) Fallbacks() []int { return d.fallbacks[:d.fallbackCount] }

// RefusalReason says why no worker was chosen.
type RefusalReason string

// The refusals.
const (
	// RefusedNoneEligible: will excludes every worker.
	RefusedNoneEligible RefusalReason = "none_eligible"
	// RefusedDeadline: no worker meets the budgets.
	RefusedDeadline RefusalReason = "deadline_impossible"
	// RefusedOverLimit: no worker meets the budgets now; waiting may help.
	RefusedOverLimit RefusalReason = "all_over_limit"
	// RefusedTenantOverShare: the tenant had more than its share and the pool
	// has no headroom, or the tenant's bound of tokens under way is reached.
	RefusedTenantOverShare RefusalReason = "tenant_over_share"
)

// Refusal is an answer without a worker.
type Refusal struct {
	// Reason says why.
	Reason RefusalReason
	// RetryAfterMs is when asking again may help; NaN: not by waiting.
	RetryAfterMs float64
}

// Redirected reports whether the worker with most reuse was passed over.
func (d *Decision) Redirected() bool {
	return d.Chosen >= 0 && d.MostReuse >= 0 &&
		d.Terms[d.MostReuse].ReuseTokens > max(d.Terms[d.Chosen].ReuseTokens, 0)
}

// Decide chooses among the candidates and writes terms, choice or refusal
// into d. It returns an error, and no decision, for a request or policy with
// a bad field.
func Decide(req *Request, candidates []Candidate, policy *Policy, sit Situation, d *Decision) error {
	if err := check(req, policy, &sit); err != nil {
		return err
	}
	for i := range candidates {
		if candidates[i].Worker == nil {
			return &FieldError{Field: fmt.Sprintf("candidates[%d]", i), Detail: "names no worker", kind: ErrRequest}
		}
	}
	p := newPricer(req, policy, sit)
	d.reset(len(candidates))
	d.priceAll(&p, candidates)
	return nil
}

// check validates what a decision is asked with.
func check(req *Request, policy *Policy, sit *Situation) error {
	if err := req.Validate(); err != nil {
		return err
	}
	if err := policy.Validate(); err != nil {
		return err
	}
	if math.IsNaN(sit.NowMs) {
		return &FieldError{Field: "nowMs", Detail: "is not a number", kind: ErrRequest}
	}
	if len(sit.Sources) > MaxSources {
		return &FieldError{Field: "sources", Detail: fmt.Sprintf("%d are more than %d", len(sit.Sources), MaxSources), kind: ErrRequest}
	}
	return nil
}

// priceAll prices all candidates and chooses.
func (d *Decision) priceAll(p *pricer, candidates []Candidate) {
	d.Terms = slices.Grow(d.Terms[:0], len(candidates))[:len(candidates)]
	for i := range candidates {
		p.price(&candidates[i], &d.Terms[i])
	}
	d.Survey = survey(candidates, d.Terms, p.sit.NowMs)
	p.meanLive = d.Survey.MeanLive
	for i := range candidates {
		if math.IsNaN(candidates[i].Live) && len(p.sit.Sources) > 0 {
			// Whether a pull pays depends on how many it spares the wait.
			p.price(&candidates[i], &d.Terms[i])
		}
	}
	d.decide(p, candidates)
}

func (d *Decision) reset(n int) {
	terms := d.Terms
	if cap(terms) < n {
		terms = make([]Terms, n)
	}
	nan := math.NaN()
	*d = Decision{
		scratch: d.scratch,
		Chosen:  -1, MostReuse: -1, least: -1, soonest: -1, Terms: terms[:n],
		FirstTokenMs: nan, FirstTokenP90Ms: nan, Refusal: Refusal{RetryAfterMs: nan},
	}
}

// survey takes what the candidates say together.
func survey(candidates []Candidate, terms []Terms, nowMs float64) Survey {
	s := emptySurvey(len(candidates))
	var queue, live, gap, room mean
	var errors errorSum
	for i := range candidates {
		w, t := candidates[i].Worker, &terms[i]
		s.Reasons[t.Reason]++
		errors.add(w, 1)
		if t.Reason.Firm() {
			continue
		}
		s.Eligible++
		if t.Reason.ofAge() {
			s.Aged++
		}
		if w.QueueKnown {
			queue.add(w.Waiting.QueueMs(nowMs))
		}
		live.add(w.Live)
		gap.add(t.GapMs)
		room.add(t.RoomMs)
		s.far(t.DistanceMs)
	}
	s.MeanQueueMs, s.MeanLive, s.MeanGapMs, s.MeanRoomMs = queue.value(), live.value(), gap.value(), room.value()
	s.MeanErrorMs, s.ErrorsKnown = errors.meanMs(), errors.known
	s.PanicFloor = s.Aged*2 > s.Eligible
	return s
}

func emptySurvey(candidates int) Survey {
	nan := math.NaN()
	return Survey{
		Candidates: candidates, MaxDistanceMs: nan, BestOwnMs: nan,
		MeanQueueMs: nan, MeanLive: nan, MeanGapMs: nan, MeanRoomMs: nan, MeanErrorMs: nan,
	}
}

// far takes a distance, which may be unknown.
func (s *Survey) far(ms float64) {
	if !(ms <= s.MaxDistanceMs) && !math.IsNaN(ms) {
		s.MaxDistanceMs = ms
	}
}

// errorSum sums the prediction errors of workers that are not barred, in whole
// µs so that the order of changes leaves no trace.
type errorSum struct {
	us    int64
	known int
}

// add counts a worker in (1) or out (-1).
func (e *errorSum) add(w *Worker, times int64) {
	if w.Barred == ReasonNone && !math.IsNaN(w.ErrorMs) {
		e.us += times * int64(min(max(w.ErrorMs, 0), maxBudgetMs)*1000)
		e.known += int(times)
	}
}

func (e *errorSum) meanMs() float64 {
	if e.known == 0 {
		return math.NaN()
	}
	return float64(e.us) / 1000 / float64(e.known)
}

// mean is a mean over what is known.
type mean struct {
	sum float64
	n   int
}

func (m *mean) add(v float64) {
	if !math.IsNaN(v) {
		m.sum += v
		m.n++
	}
}

func (m *mean) value() float64 {
	if m.n == 0 {
		return math.NaN()
	}
	return m.sum / float64(m.n)
}

// decide completes the terms with the survey and chooses.
func (d *Decision) decide(p *pricer, candidates []Candidate) {
	for i := range d.Terms {
		p.complete(candidates[i].Worker, &d.Terms[i], &d.Survey)
	}
	d.settle(p, candidates)
}

// settle chooses among complete terms.
func (d *Decision) settle(p *pricer, candidates []Candidate) {
	s := &d.Survey
	d.tenantBarred, d.adapter = p.req.TenantBarred, p.req.Adapter
	d.Marks, d.theta, d.OutputTokens = p.marks, p.policy.Theta, p.outputTokens
	s.Placeable = 0
	for i := range d.Terms {
		t := &d.Terms[i]
		t.Placeable = t.Reason == ReasonNone || s.PanicFloor && t.Reason.ofAge()
		if t.Placeable {
			s.Placeable++
		}
	}
	if s.PanicFloor {
		d.Marks |= MarkPanicFloor
	}
	if s.Placeable == 0 {
		for i := range d.Terms {
			if t := &d.Terms[i]; !t.Reason.Firm() {
				t.Placeable = true
			}
		}
		if s.Eligible == 0 {
			d.Refusal.Reason = RefusedNoneEligible
			return
		}
		d.Marks |= MarkLastResort
	}
	d.choose(p, candidates)
}

// complete adds what the survey takes unknown terms to be, and sums up.
func (p *pricer) complete(w *Worker, t *Terms, s *Survey) {
	t.DoubtMs += p.errorDoubtMs(w, s)
	if !w.QueueKnown {
		// No better than the average of those that tell.
		t.DoubtMs += positive(s.MeanQueueMs - w.Waiting.QueueMs(p.sit.NowMs))
	}
	room := t.RoomMs
	if math.IsNaN(room) {
		room = 0
		t.DoubtMs += positive(s.MeanRoomMs)
	}
	distance := t.DistanceMs
	if math.IsNaN(distance) {
		distance = 0
		t.DoubtMs += positive(s.MaxDistanceMs)
	}
	t.OwnMs = t.StartMs + t.reachMs() + positive(t.LoadMs) + room + t.DoubtMs + distance + positive(t.HandMs)
	theta := p.policy.Theta
	t.TotalMs = t.OwnMs
	if !math.IsNaN(t.QueueMs) {
		t.TotalMs += t.QueueMs
	}
	if math.IsNaN(t.GapMs) {
		t.AssumedMs += theta * positive(s.MeanGapMs)
	} else {
		t.TotalMs += theta * t.GapMs
	}
	if math.IsNaN(t.StallMs) {
		t.AssumedMs += theta * p.stallMs(w, t.ComputeMs, p.assumedLive(w))
	} else {
		t.TotalMs += theta * t.StallMs
	}
	t.TotalMs += t.AssumedMs
}

// positive is v, or 0 if it is negative or unknown.
func positive(v float64) float64 {
	if v > 0 {
		return v
	}
	return 0
}

// choose picks among the placeable candidates.
func (d *Decision) choose(p *pricer, candidates []Candidate) {
	s := &d.Survey
	withinBudget := 0
	for i := range d.Terms {
		t := &d.Terms[i]
		if t.ReuseTokens > 0 && (d.MostReuse < 0 || d.outholds(i, d.MostReuse)) {
			d.MostReuse = i
		}
		if !t.Placeable {
			continue
		}
		// A record that left candidates out keeps the best own time of all.
		if !(s.BestOwnMs <= t.OwnMs) {
			s.BestOwnMs = t.OwnMs
		}
		if t.Missed = p.missed(t); t.Missed == BudgetNone {
			withinBudget++
		}
	}
	budgetBinds := withinBudget > 0
	if !budgetBinds && p.req.hasBudget() && d.missBudget(p) {
		return
	}
	limit := ownLimit(s.BestOwnMs, p.policy)
	competing := 0
	for i := range d.Terms {
		t := &d.Terms[i]
		t.OverLimit = t.Placeable && t.OwnMs > limit
		if t.Placeable && !t.OverLimit && !(budgetBinds && t.Missed != BudgetNone) {
			competing++
		}
	}
	// A budget goes before the limit: if only workers beyond the limit keep
	// the budget, they compete.
	limitBinds := competing > 0
	allowed := func(t *Terms) bool {
		return t.Placeable && !(budgetBinds && t.Missed != BudgetNone) && !(limitBinds && t.OverLimit)
	}
	if d.Chosen = d.best(p, candidates, allowed); d.Chosen < 0 {
		// Of a record whose survey speaks of workers that it does not keep.
		d.Refusal.Reason = RefusedNoneEligible
		return
	}
	if d.refuseTenant(p) {
		return
	}
	d.rankFallbacks(p, candidates)
	d.describe(p, candidates)
}

// ownLimit is the longest own time that may still win, ms.
func ownLimit(bestOwnMs float64, policy *Policy) float64 {
	return bestOwnMs*(1+policy.OwnLimitRatio) + policy.OwnLimitMs
}

// refuseTenant withdraws the choice from a tenant that has had its share, and
// reports whether it did. Whoever waits long at the best worker finds a pool
// without headroom.
func (d *Decision) refuseTenant(p *pricer) bool {
	t := &d.Terms[d.Chosen]
	wait := t.StartMs + positive(t.RoomMs)
	switch {
	case p.req.TenantFull != "":
		d.Refusal = Refusal{Reason: RefusedTenantOverShare, RetryAfterMs: math.NaN()}
	case p.req.TenantOver == "":
		return false
	case wait <= p.policy.HeadroomMs:
		d.Marks |= MarkTenantOverShare
		return false
	default:
		d.Refusal = Refusal{Reason: RefusedTenantOverShare, RetryAfterMs: wait - p.policy.HeadroomMs}
	}
	d.refusedWaitMs, d.soonest, d.Chosen, d.Tied = wait, d.Chosen, -1, false
	d.tenantOver = cmp.Or(p.req.TenantFull, p.req.TenantOver)
	return true
}

// outholds reports whether candidate i holds more than j: more reuse, or as
// much on a worker that could be chosen, or that in the lower slot.
func (d *Decision) outholds(i, j int) bool {
	a, b := &d.Terms[i], &d.Terms[j]
	if a.ReuseTokens != b.ReuseTokens {
		return a.ReuseTokens > b.ReuseTokens
	}
	if a.Placeable != b.Placeable {
		return a.Placeable
	}
	return a.Worker < b.Worker
}

// missBudget answers a request that no worker can serve in its budget; it
// reports whether that is a refusal.
func (d *Decision) missBudget(p *pricer) bool {
	answer := p.req.IfInfeasible
	if answer == "" {
		answer = p.policy.IfInfeasible
	}
	switch answer {
	case Reject:
		d.Refusal.Reason = RefusedDeadline
		return true
	case RetryAfter:
		// The least excess of any worker, if only waiting stands between.
		wait := math.NaN()
		for i := range d.Terms {
			t := &d.Terms[i]
			if !t.Placeable {
				continue
			}
			fresh := *t
			fresh.OwnMs -= t.StartMs + positive(t.RoomMs)
			if p.missed(&fresh) != BudgetNone {
				continue
			}
			if excess := p.excessMs(t); !(wait <= excess) {
				wait, d.soonest = excess, i
			}
		}
		d.Refusal = Refusal{Reason: RefusedOverLimit, RetryAfterMs: wait}
		if math.IsNaN(wait) {
			d.Refusal.Reason = RefusedDeadline
		}
		return true
	}
	d.Marks |= MarkOverLimit
	return false
}

// excessMs is how far a candidate's own time is beyond the budgets.
func (p *pricer) excessMs(t *Terms) float64 {
	excess := 0.0
	if b := p.req.FirstTokenBudgetMs; b > 0 {
		excess = max(excess, t.OwnMs-b)
	}
	if b := p.req.DeadlineMs; b > 0 {
		excess = max(excess, t.OwnMs+(p.outputTokens-1)*positive(t.GapMs)-b)
	}
	return excess
}

// best is the allowed candidate with the smallest total; among those within
// the policy's tie of it the one with most reuse, then the highest hash.
func (d *Decision) best(p *pricer, candidates []Candidate, allowed func(*Terms) bool) int {
	least := math.NaN()
	for i := range d.Terms {
		if t := &d.Terms[i]; allowed(t) && !(least <= t.TotalMs) {
			least, d.least = t.TotalMs, i
		}
	}
	key := p.tieKey()
	best, equals := -1, 0
	var bestHash uint64
	for i := range d.Terms {
		t := &d.Terms[i]
		if !allowed(t) || t.TotalMs > least+p.policy.TieMs {
			continue
		}
		equals++
		hash := rendezvous(key, candidates[i].hash())
		if best < 0 || t.ReuseTokens > d.Terms[best].ReuseTokens ||
			t.ReuseTokens == d.Terms[best].ReuseTokens && hash > bestHash {
			best, bestHash = i, hash
		}
	}
	d.Tied = equals > 1
	return best
}

// tieKey is what equal candidates are ranked by.
func (p *pricer) tieKey() uint64 {
	if p.req.SharedKey != 0 {
		return p.req.SharedKey
	}
	return xxh3.HashString(p.req.ID)
}

// rendezvous mixes a key with a worker's name hash (the finalizer of
// splitmix64). All coordinators agree on it because names are the fleet's.
func rendezvous(key, nameHash uint64) uint64 {
	return lastMix(middleMix(firstMix(key) ^ firstMix(nameHash)))
}

// firstMix is the first step of rendezvous: that of key ^ name is that of the key
// ^ that of the name, so that names can be kept with it done.
func firstMix(x uint64) uint64 { return x ^ x>>30 }

func middleMix(x uint64) uint64 {
	x *= 0xbf58476d1ce4e5b9
	return (x ^ x>>27) * 0x94d049bb133111eb
}

// lastMix leaves the highest 31 bits as they are.
func lastMix(x uint64) uint64 { return x ^ x>>31 }

// rankFallbacks names the next best placeable candidates by total; equal
// totals by the hash.
func (d *Decision) rankFallbacks(p *pricer, candidates []Candidate) {
	key := p.tieKey()
	n := 0
	before := func(a, b int) bool {
		if ta, tb := d.Terms[a].TotalMs, d.Terms[b].TotalMs; ta != tb {
			return ta < tb
		}
		return rendezvous(key, candidates[a].hash()) > rendezvous(key, candidates[b].hash())
	}
	for i := range d.Terms {
		if i == d.Chosen || !d.Terms[i].Placeable {
			continue
		}
		if n == maxFallbacks && !before(i, d.fallbacks[n-1]) {
			continue
		}
		n = min(n+1, maxFallbacks)
		at := n - 1
		for ; at > 0 && before(i, d.fallbacks[at-1]); at-- {
			d.fallbacks[at] = d.fallbacks[at-1]
		}
		d.fallbacks[at] = i
	}
	d.fallbackCount = n
}

// describe sets the prediction and the marks of the choice.
func (d *Decision) describe(p *pricer, candidates []Candidate) {
	w, t := candidates[d.Chosen].Worker, &d.Terms[d.Chosen]
	d.FirstTokenMs, d.FirstTokenP90Ms = t.OwnMs, firstTokenP90Ms(w, t)
	if !w.QueueKnown {
		d.Marks |= MarkQueueUnknown
	}
	if !(p.sit.NowMs-w.LoadAtMs <= p.policy.StaleQueueMs) {
		d.Marks |= MarkStaleQueue
	}
	if !(p.sit.PolicyAgeMs <= p.policy.StalePolicyMs) {
		d.Marks |= MarkStalePolicy
	}
	if t.ReuseTokens == Unknown || w.View.Kind == ViewBlind {
		d.Marks |= MarkNoCacheView
	}
	if !p.req.LengthEstimated && p.promptTokens <= w.BlockTokens {
		d.Marks |= MarkShorterThanBlock
	}
}
