package placement

import (
	"math"
	"slices"
)

// pricer prices candidates for one request at one moment.
type pricer struct {
	req    *Request
	policy *Policy
	sit    Situation
	// promptTokens is what is computed: the prompt and what a former attempt
	// generated behind it.
	promptTokens int
	// outputTokens is the expected rest of the answer, meanOutputTokens that
	// of the pool's requests.
	outputTokens, meanOutputTokens float64
	marks                          Marks
	// meanLive is the mean of live requests where they are known; NaN: no survey
	// was taken, or needed.
	meanLive float64
}

func newPricer(req *Request, policy *Policy, sit Situation) pricer {
	p := pricer{req: req, policy: policy, sit: sit, promptTokens: req.PromptTokens + req.GeneratedTokens, meanLive: math.NaN()}
	learnt := sit.MeanOutputTokens >= 1
	p.meanOutputTokens = policy.PriorOutputTokens
	if learnt {
		p.meanOutputTokens = sit.MeanOutputTokens
	}
	p.outputTokens, _ = expectedOutput(req, p.meanOutputTokens, learnt)
	if req.LengthEstimated || req.OutputTokensExpected == 0 && !learnt {
		p.marks |= MarkEstimatedLength
	}
	p.outputTokens = max(p.outputTokens-float64(req.GeneratedTokens), 1)
	return p
}

// OutputSource says where the expected length of an answer comes from.
type OutputSource string

// The sources.
const (
	// OutputRequest: the request says what it expects.
	OutputRequest OutputSource = "request"
	// OutputLimit: the request's limit, below what else was expected.
	OutputLimit OutputSource = "limit"
	// OutputMean: the learnt mean of the pool's answers.
	OutputMean OutputSource = "learnt mean"
	// OutputPrior: nothing is learnt yet, so the policy's.
	OutputPrior OutputSource = "prior"
)

// expectedOutput is the length of the whole answer, tokens, and where it comes
// from. meanTokens is the pool's mean if that is learnt, else the prior.
func expectedOutput(req *Request, meanTokens float64, learnt bool) (tokens float64, source OutputSource) {
	switch tokens = req.OutputTokensExpected; {
	case tokens > 0:
		source = OutputRequest
	case learnt:
		tokens, source = meanTokens, OutputMean
	default:
		tokens, source = meanTokens, OutputPrior
	}
	if limit := float64(req.OutputTokensMax); limit > 0 && limit < tokens {
		return limit, OutputLimit
	}
	return tokens, source
}

// price fills the terms of one candidate that need no other candidate.
func (p *pricer) price(c *Candidate, t *Terms) {
	nan := math.NaN()
	w := c.Worker
	*t = Terms{Worker: w.ID, LoadMs: nan, PullMs: nan, StillThere: nan, QueueMs: nan, GapMs: nan, StallMs: nan, RoomMs: nan, HandMs: nan, Partner: -1}
	t.Reason = p.reason(w)
	if c.Outside && !t.Reason.Firm() {
		t.Reason = ReasonOutside
	}

	t.ReuseTokens = p.reuse(c)
	reused := max(t.ReuseTokens, 0)
	own := p.offer(w, reused)
	t.PrefillMs = own.computeMs
	if reused > 0 {
		t.StillThere = p.stillThere(&w.View, c.Predicted)
		own.loadMs, own.unknownMs = p.load(c, t, own)
		// What is gone is not read back either.
		own.doubtMs = own.unknownMs + (1-t.StillThere)*max(w.Steps.PrefillMs(0, p.promptTokens)-t.PrefillMs-own.loadMs-own.unknownMs, 0)
	}
	if len(p.sit.Sources) > 0 {
		own = p.pull(c, t, own)
	}
	t.StartMs, t.UncachedTokens, t.ComputeMs = own.startMs, own.tokens, own.computeMs
	t.DoubtMs = p.ageDoubtMs(w) + own.doubtMs
	t.DistanceMs = c.DistanceMs + c.SurchargeMs
	t.RoomMs = p.roomMs(w, p.promptTokens-reused)
	t.QueueMs = p.queueMs(t.StartMs, t.ComputeMs)
	t.GapMs = p.gapMs(w)
	t.StallMs = p.stallMs(w, t.ComputeMs, w.Live)
	if w.Role == RolePrefill {
		t.GapMs = math.NaN()
		if distanceMs, paired := p.partner(c, t); paired {
			t.DistanceMs += distanceMs
		} else if t.Reason == ReasonNone {
			t.Reason = ReasonNoPartner
		}
	} else if w.Role == RoleDecode && t.Reason == ReasonNone {
		t.Reason = ReasonDecodes
	}
}

// queueMs is the delay of those who arrive while the backlog drains; NaN: how
// many do is not known. It is the rule's max(backlog, prefill/2), since start is
// never negative.
func (p *pricer) queueMs(startMs, computeMs float64) float64 {
	return p.policy.QueueWeight * p.sit.ArrivalsPerMs * computeMs * (startMs + computeMs/2)
}

// stallMs is what a prefill does to the gaps of live requests.
func (p *pricer) stallMs(w *Worker, computeMs, live float64) float64 {
	if w.Role == RolePrefill {
		return 0 // nothing decodes beside a prefill there
	}
	return computeMs * live / p.meanOutputTokens
}

// assumedLive is what a worker's live requests are taken as when it does not tell
// of them.
func (p *pricer) assumedLive(w *Worker) float64 { return max(w.OpenClaims, positive(p.meanLive)) }

// reuse is what a candidate's engine can reuse of its match.
func (p *pricer) reuse(c *Candidate) int {
	matched := c.MatchedTokens
	if c.View.Kind == ViewBlind && !c.Predicted {
		matched = Unknown // a cache nobody sees may hold anything
	}
	return reusableTokens(matched, p.promptTokens, c.BlockTokens)
}

// reason says why the worker is not a free choice.
func (p *pricer) reason(w *Worker) Reason {
	if w.Barred != ReasonNone {
		return w.Barred
	}
	if p.req.TenantBarred != "" {
		return ReasonTenant
	}
	for _, name := range p.req.ExcludeWorkers {
		if name == w.Name {
			return ReasonExcludedByRequest
		}
	}
	for _, process := range p.req.ExcludeProcesses {
		if process == w.Process {
			return ReasonSuperseded
		}
	}
	if w.MaxModelTokens > 0 && p.promptTokens >= w.MaxModelTokens {
		return ReasonTooLong
	}
	if p.req.Adapter != "" && !slices.Contains(w.Served, p.req.Adapter) {
		return ReasonNoAdapter
	}
	if w.Doubted != ReasonNone {
		return w.Doubted
	}
	if p.sit.NowMs-w.AwaySinceMs > p.policy.AwayBoundMs {
		return ReasonAway
	}
	if !(p.sit.NowMs-w.LoadAtMs <= p.policy.SilentMs) && math.IsNaN(w.AwaySinceMs) {
		return ReasonSilent
	}
	return ReasonNone
}

// reusableTokens is what an engine can reuse of a match: whole blocks, and
// never the last token, which is always computed.
func reusableTokens(matched, prompt, block int) int {
	if matched < 0 {
		return Unknown
	}
	usable := min(matched, prompt-1)
	if block > 1 {
		usable -= usable % block
	}
	return usable
}

// stillThere is the probability that matched blocks are found when the
// request gets there: trust · max(0, 1 − age/eviction age). Blocks in the
// cache are of all ages up to the eviction age, so while a view grows old by
// some age that share of them has gone. A match by a live claim does not
// fade: its prefill stands before this request's.
func (p *pricer) stillThere(v *View, predicted bool) float64 {
	trust := v.Trust
	if math.IsNaN(trust) {
		trust = p.policy.PriorTrust(v.Kind)
	}
	if predicted {
		return trust
	}
	eviction := v.EvictionAgeMs
	if !(eviction > 0) {
		eviction = p.policy.UnknownEvictionAgeMs
	}
	fresh := 1 - (p.sit.NowMs-v.AtMs)/eviction
	if math.IsNaN(fresh) {
		return 0
	}
	return trust * min(max(fresh, 0), 1)
}

// ageDoubtMs grows with the age of the load report beyond FreshMs. Without
// any report it is the largest allowance.
func (p *pricer) ageDoubtMs(w *Worker) float64 {
	age := p.sit.NowMs - w.LoadAtMs
	if math.IsNaN(age) {
		return p.policy.MaxAgeDoubtMs
	}
	return min(max(age-p.policy.FreshMs, 0)*p.policy.DoubtPerMs, p.policy.MaxAgeDoubtMs)
}

// usualErrors is how many times the others' mean error a worker's error may be
// before it sets the worker apart. Below it the difference is noise, and noise
// breaks good ties: it costs reuse.
const usualErrors = 2

// errorDoubtMs is the allowance for past prediction errors beyond those of the
// other workers that are not barred.
func (p *pricer) errorDoubtMs(w *Worker, s *Survey) float64 {
	if math.IsNaN(w.ErrorMs) {
		return 0
	}
	sum, others := 0.0, s.ErrorsKnown
	if others > 0 {
		sum = s.MeanErrorMs * float64(others)
	}
	if w.Barred == ReasonNone {
		sum, others = sum-w.ErrorMs, others-1
	}
	usual := 0.0
	if others > 0 {
		usual = usualErrors * max(sum, 0) / float64(others)
	}
	return p.policy.ErrorWeight * max(w.ErrorMs-usual, 0)
}

// roomMs is the wait for KV blocks or a batch slot: what is missing over the
// rate at which requests end, held amount / (mean answer · gap). It is NaN
// when neither the pool nor the batch can be judged.
func (p *pricer) roomMs(w *Worker, uncached int) float64 {
	room := math.NaN()
	gap := w.GapMs
	if !(gap > 0) {
		gap = max(w.Steps.DecodeMs(), 1)
	}
	answerMs := p.meanOutputTokens * gap
	if w.PoolBlocks > 0 && w.BlockTokens > 0 && !math.IsNaN(w.HeldBlocks) {
		added := float64((uncached+w.BlockTokens-1)/w.BlockTokens + 1)
		room = missingMs(w.HeldBlocks+added-float64(w.PoolBlocks), min(w.HeldBlocks, float64(w.PoolBlocks)), answerMs)
	}
	if w.MaxRunning > 0 && !math.IsNaN(w.Live) {
		limit := float64(w.MaxRunning)
		slots := missingMs(w.Live+1-limit, min(w.Live, limit), answerMs)
		if math.IsNaN(room) || slots > room {
			room = slots
		}
	}
	return p.policy.RoomWeight * room
}

// missingMs is the time until what is missing was given back by those who
// hold the held amount for answerMs each.
func missingMs(missing, held, answerMs float64) float64 {
	if missing <= 0 {
		return 0
	}
	return missing * answerMs / max(held, 1)
}

// gapMs is the request's own token gap once it decodes on w.
func (p *pricer) gapMs(w *Worker) float64 {
	model := w.Steps.Model()
	return model.DecodeMs(w.Decoding+1, w.ContextTokens+float64(p.promptTokens), float64(w.PoolBlocks)*float64(w.BlockTokens))
}

// missed is the budget that the request would miss here. An unknown gap
// cannot be held against a worker.
func (p *pricer) missed(t *Terms) Budget {
	r := p.req
	switch {
	case r.FirstTokenBudgetMs > 0 && t.OwnMs > r.FirstTokenBudgetMs:
		return BudgetFirstToken
	case r.GapBudgetMs > 0 && t.GapMs > r.GapBudgetMs:
		return BudgetGap
	case r.DeadlineMs > 0 && t.OwnMs+(p.outputTokens-1)*positive(t.GapMs) > r.DeadlineMs:
		return BudgetDeadline
	}
	return BudgetNone
}

// firstTokenP90Ms is the first-token time not exceeded in nine of ten cases,
// taking the errors of start (a quarter), prefill (a tenth), the doubt and
// the worker's past error as independent.
func firstTokenP90Ms(w *Worker, t *Terms) float64 {
	past := w.ErrorMs
	if math.IsNaN(past) {
		past = 0
	}
	// 1.25 turns a mean absolute error into a standard deviation, 1.28 that
	// into the ninth decile.
	sigma := math.Sqrt(sq(t.StartMs/4) + sq((t.reachMs()+positive(t.LoadMs))/10) + sq(t.DoubtMs) + sq(1.25*past))
	return t.OwnMs + 1.28*sigma
}

func sq(v float64) float64 { return v * v }
