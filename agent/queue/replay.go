package queue

import (
	"math"

	"waypost/gossip/ledger"
)

// plan is the worker's prefill steps, replayed from the newest fact to a
// moment.
type plan struct {
	replay ledger.Replay
	// owners are the claims of the replay's jobs; nil: work of nobody.
	owners []*claim
}

// meanClaimMs is what a request that nobody explains is taken to add to the
// queue: the mean claim, or without any the mean of the counters; NaN: neither
// is known.
func (e *Estimator) meanClaimMs(steps *ledger.Steps) float64 {
	tokens, prompt := e.meanClaimTokens, e.meanClaimPrompt
	if math.IsNaN(tokens) {
		tokens, prompt = e.meanUncachedTokens, e.meanPromptTokens
	}
	if math.IsNaN(tokens) {
		return math.NaN()
	}
	u := int(math.Round(tokens))
	cached := 0
	if prompt > tokens {
		cached = int(math.Round(prompt)) - u
	}
	return min(steps.PrefillMs(cached, u)+steps.DecodeMs(), maxClaimMs)
}

// foreignMs is the work of the requests that wait at the newest reading and
// that no claim explains. While they wait and no claim is in service, one of
// them is, half done.
func (e *Estimator) foreignMs(steps *ledger.Steps) float64 {
	if !math.IsNaN(e.queuedWaitMs()) {
		return 0 // the engine's own sum has them
	}
	if e.slotsUsable() {
		return steps.PrefillMs(0, max(e.slotForeignTokens, 1))
	}
	if e.foreign == 0 {
		return 0
	}
	requests := float64(e.foreign)
	if !e.claimInService() {
		requests += .5
	}
	return requests * e.meanClaimMs(steps)
}

// foreignRestMs is what is expected to be left, at the end of the newest step
// seen, of a prompt that nobody explains: as little is known of it as at its
// beginning.
func (e *Estimator) foreignRestMs(steps *ledger.Steps) float64 {
	l := &e.ledger
	if !l.foreignGoesOn || l.foreignMs < l.anchorMs {
		return 0
	}
	return zeroIfNaN(e.meanClaimMs(steps))
}

// queuedWaitMs is when the engine's own sum of waiting tokens was read, if it
// belongs to the newest reading; NaN if not.
func (e *Estimator) queuedWaitMs() float64 {
	if e.queuedTokens < 0 || math.Abs(e.queuedMs-e.lastMs) > durationMs(maxSampleAge)/10 {
		return math.NaN()
	}
	return e.queuedMs
}

// slotsUsable reports whether the slots tell of the work that no claim
// explains.
func (e *Estimator) slotsUsable() bool {
	return e.facts.Unordered && e.slotForeignTokens > 0 && e.lastMs-e.slotsMs <= durationMs(maxSampleAge)
}

// plan replays the steps up to nowMs. sMs is when the newest reading was true;
// -Inf: it is not used.
func (e *Estimator) plan(steps *ledger.Steps, sMs, nowMs float64) plan {
	x := e.ledger.anchorMs
	seen := max(x, e.ledger.foreignMs)
	counters := !math.IsInf(sMs, -1)
	foreign := 0.0
	if counters {
		if ms := e.foreignMs(steps); ms > 0 {
			foreign = ms
		}
	}
	e.jobs, e.owners = e.jobs[:0], e.owners[:0]
	var p plan
	switch {
	case counters && sMs >= x && !e.explained:
		p = e.planFromCounters(steps, sMs, foreign)
	case !math.IsInf(seen, -1):
		if counters {
			foreign = max(foreign-max(seen-sMs, 0), 0)
		}
		p = e.planFromEvidence(steps, max(foreign, e.foreignRestMs(steps)))
	default:
		p = e.planByTime(steps, nowMs)
	}
	p.replay.Run(nowMs)
	p.note()
	return p
}

// job adds what is left of a claim, to be begun at atMs at the earliest.
func (e *Estimator) job(c *claim, atMs float64) {
	context, tokens := c.left()
	e.jobs = append(e.jobs, ledger.NewJob(atMs, context, tokens))
	e.owners = append(e.owners, c)
}

// freeMs is when the engine was free for the first of the jobs, as far as is
// known at a moment: at the newest evidence, at the end of a step that computed
// for others, or at the end of a prefill that was taken as over.
func (e *Estimator) freeMs(byMs float64) float64 {
	free := e.ledger.anchorMs
	if e.ledger.foreignMs <= byMs {
		free = max(free, e.ledger.foreignMs)
	}
	if s := e.ledger.newestServed; s != nil {
		free = max(free, s.servedMs) // its first token may have been estimated
	}
	for _, c := range e.ledger.list {
		if c.why == overInferred {
			free = max(free, c.overMs)
		}
	}
	if math.IsInf(free, -1) && len(e.jobs) > 0 {
		free = e.jobs[0].AtMs
	}
	return free
}

// replayTo replays the open claims up to sMs and notes when each began.
func (e *Estimator) replayTo(steps *ledger.Steps, sMs float64) {
	e.jobs, e.owners = e.jobs[:0], e.owners[:0]
	for _, c := range e.ledger.list {
		c.modelBeganMs = math.Inf(1)
		if c.why == inQueue {
			e.job(c, c.beganMs())
		}
	}
	r := ledger.NewReplay(steps, e.freeMs(sMs), e.jobs)
	r.Run(sMs)
	for i, c := range e.owners {
		c.modelBeganMs = orInf(e.jobs[i].BeganMs)
	}
}

// planFromEvidence starts at the newest evidence of a claim: what it tells of
// the order stands, and the counters tell of foreign work only.
func (e *Estimator) planFromEvidence(steps *ledger.Steps, foreignMs float64) plan {
	admitted := 0
	for _, c := range e.ledger.list {
		if c.why != inQueue {
			continue
		}
		began := !c.waits && (c.admittedMs <= e.ledger.anchorMs || !math.IsNaN(c.startedMs))
		if began && admitted == len(e.jobs) {
			admitted++
		}
		e.job(c, c.beganMs())
	}
	trimAdmitted(e.jobs[:admitted], steps.BudgetTokens(), e.ledger.anchorMs)
	p := plan{ledger.NewReplay(steps, e.freeMs(math.Inf(1))+foreignMs, e.jobs), e.owners}
	p.skipServed()
	return p
}

// planByTime has no fact but what the counters confirmed: the claims drain by
// time alone.
func (e *Estimator) planByTime(steps *ledger.Steps, nowMs float64) plan {
	for _, c := range e.ledger.list {
		if c.why == inQueue {
			e.job(c, c.beganMs())
		}
	}
	free := nowMs
	if len(e.jobs) > 0 {
		free = e.freeMs(math.Inf(1))
	}
	return plan{ledger.NewReplay(steps, free, e.jobs), e.owners}
}

// planFromCounters starts at the newest reading: the admitted claims are
// replayed from their admission up to it, the waiting ones are whole, and those
// too young to be in it come on top.
func (e *Estimator) planFromCounters(steps *ledger.Steps, sMs, foreignMs float64) plan {
	for _, c := range e.ledger.list {
		if c.why == inQueue && !c.waits && !c.young {
			e.job(c, c.beganMs())
		}
	}
	free := sMs
	if len(e.jobs) > 0 {
		before := ledger.NewReplay(steps, e.freeMs(sMs), e.jobs)
		before.Run(sMs)
		free = max(sMs, before.FreeMs)
		trimAdmitted(e.jobs, steps.BudgetTokens(), sMs)
	}
	told := !math.IsNaN(e.queuedWaitMs())
	if told && e.queuedTokens > 0 {
		e.jobs = append(e.jobs, ledger.NewJob(sMs, 0, e.queuedTokens))
		e.owners = append(e.owners, nil)
	}
	for _, c := range e.ledger.list {
		if c.why == inQueue && (c.young || c.waits && !told) {
			e.job(c, max(c.madeMs, sMs))
		}
	}
	p := plan{ledger.NewReplay(steps, free+foreignMs, e.jobs), e.owners}
	p.skipServed()
	return p
}

// beganMs is when the claim's prefill is known to have been under way, with
// what is left of it at that moment.
func (c *claim) beganMs() float64 {
	switch {
	case !math.IsNaN(c.progressMs):
		return c.progressMs
	case !math.IsNaN(c.startedMs):
		return c.startedMs
	case !math.IsNaN(c.admittedMs):
		return c.admittedMs
	}
	return c.madeMs
}

// trimAdmitted bounds the work of claims that the engine has admitted: it
// admits the next one only while the former fit into a step, so no more is left
// than the last one and a full step. Without it a wrong speed makes the work in
// service grow without bound.
func trimAdmitted(jobs []ledger.Job, budgetTokens int, atMs float64) {
	over := -budgetTokens
	for i := range jobs[:max(len(jobs)-1, 0)] {
		over += jobs[i].Tokens
	}
	for i := range jobs {
		if over <= 0 {
			return
		}
		cut := min(over, jobs[i].Tokens)
		jobs[i].Reused += cut
		jobs[i].Tokens -= cut
		if cut > 0 && jobs[i].Tokens == 0 {
			jobs[i].EndMs = atMs
		}
		over -= cut
	}
}

// skipServed passes over the jobs at the front that are served already.
func (p *plan) skipServed() {
	served := 0
	for _, j := range p.replay.Jobs() {
		if j.Tokens > 0 {
			break
		}
		served++
	}
	p.replay.Skip(served)
}

// note keeps when the plan ends each claim's prefill.
func (p *plan) note() {
	for i, j := range p.replay.Jobs() {
		if c := p.owners[i]; c != nil {
			c.modelEndMs = math.Inf(1)
			if j.Tokens == 0 {
				c.modelEndMs = j.EndMs
			}
		}
	}
}
