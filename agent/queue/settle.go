package queue

import (
	"math"
	"time"

	"waypost/gossip/ledger"
)

// priorAnswerTokens is the answer of a request whose coordinator expects
// nothing, before any answer was seen.
const priorAnswerTokens = 256

// expireEveryMs is how often coordinators are looked through for forgotten
// ones.
const expireEveryMs = 10_000

// overdueShare and overdueMs say when the next block of an answer is overdue:
// so many times its usual time, and so much longer.
const (
	overdueShare = 1.5
	overdueMs    = 500
)

// view is what the facts say at a moment.
type view struct {
	nowMs float64
	// counters says that the newest reading is used; it was true at sMs, else
	// sMs is -Inf.
	counters bool
	sMs      float64
	steps    ledger.Steps
	plan     plan
	waiting  ledger.Waiting
	// foreignWait says that foreign requests still wait.
	foreignWait bool
	// paceMs is the time per token of a stream.
	paceMs float64
	streams
}

// streams counts the requests by phase; NaN is unknown.
type streams struct {
	// unserved waits for its first token, tracked are claims behind it with
	// trackedContext tokens; sequences each.
	unserved, tracked, trackedContext float64
	// live counts all requests, decoding those past their first token, context
	// sums their tokens.
	live, decoding, context float64
}

// settle derives the view at nowMs from the facts. The replay needs the decode
// load and the decode load needs the replay: it is done twice, from nothing, so
// that the view depends on the facts and the moment only. Where the first replay
// ends nobody's prefill, the second would equal it.
func (e *Estimator) settle(nowMs float64) *view {
	e.counts.Views++
	v := &e.view
	*v = view{nowMs: nowMs, sMs: math.Inf(-1)}
	e.ledger.early.expire(nowMs)
	if nowMs-e.expiredMs >= expireEveryMs {
		e.expiredMs = nowMs
		e.ledger.echoes.Expire(nowMs, e.ledger.hasOpen)
	}
	v.counters = e.countersUsable(nowMs)
	e.foreign = 0
	for _, c := range e.ledger.list {
		c.waits, c.young = false, false
		c.modelEndMs = math.Inf(1)
	}
	if v.counters {
		v.sMs = e.sampledMs()
		e.expect(v.sMs)
	}
	e.dropEnded(v)
	e.survive(v)
	e.countStreams(v)
	e.replay(v)
	if e.replayServes(nowMs) {
		e.countStreams(v)
		e.replay(v)
		e.countStreams(v)
	}
	v.waiting = v.plan.replay.Waiting(nowMs)
	e.infer(v)
	e.decodeLoad, e.contextLoad = zeroIfNaN(v.decoding), zeroIfNaN(v.context)
	return v
}

// replay replays the steps at the decode load of the view.
func (e *Estimator) replay(v *view) {
	v.steps = e.stepsAt(v.decoding, v.context)
	v.plan = e.plan(&v.steps, v.sMs, v.nowMs)
}

// replayServes reports whether the newest replay ends the prefill of a waiting
// claim by nowMs, so that it decodes.
func (e *Estimator) replayServes(nowMs float64) bool {
	for _, c := range e.owners {
		if c != nil && c.modelEndMs <= nowMs {
			return true
		}
	}
	return false
}

// stepsAt prices steps at a decode load.
func (e *Estimator) stepsAt(decoding, context float64) ledger.Steps {
	model := e.speeds.Model()
	return ledger.NewSteps(model, e.facts.StepTokens, model.DecodeMs(zeroIfNaN(decoding), zeroIfNaN(context), e.poolTokens()))
}

func (e *Estimator) poolTokens() float64 {
	return float64(e.facts.PoolBlocks) * float64(e.facts.BlockTokens)
}

// infer ends the prefill of claims that the counters admitted and whose time
// is over, plus one step: their requests were served, or never came.
func (e *Estimator) infer(v *view) {
	if !v.counters {
		return
	}
	step := v.steps.PrefillMs(0, v.steps.BudgetTokens()) + v.steps.DecodeMs()
	for _, c := range e.ledger.list {
		if c.why == inQueue && (!math.IsNaN(c.admittedMs) || !math.IsNaN(c.confirmedMs)) && c.modelEndMs+step <= v.nowMs {
			e.ledger.noteStores(c)
			c.leave(c.modelEndMs, overInferred)
			e.counts.InferredClaims++
		}
	}
}

// dropEnded takes claims off the list of which nothing follows any more. What
// is only estimated drops nothing that was heard of lately: how long a claim
// can still be told of must not rest on what was learnt, for that depends on
// the order in which facts came.
func (e *Estimator) dropEnded(v *view) {
	pace := e.paceMs()
	removed := e.ledger.remove(func(c *claim) bool {
		if v.nowMs-c.madeMs >= lifeMs {
			return true
		}
		if c.why == inQueue && math.IsNaN(c.doneMs) {
			return v.nowMs-c.factMs >= silentMs
		}
		if end, ended := e.streamEnd(c, v.nowMs, pace); ended {
			if math.IsNaN(c.doneMs) && v.nowMs-max(c.factMs, c.overMs) <= endUntoldMs {
				return false
			}
			// A reading from before its end still counts it, and marks may be
			// late.
			since := v.nowMs - end
			return since > earlyMarkMs && (!v.counters || end <= v.sMs) || since > 2*durationMs(maxSampleAge)
		}
		return v.nowMs-max(c.factMs, c.overMs+e.answerTokens(c)*pace) >= silentMs
	})
	e.counts.EndedClaims += uint64(removed)
}

// answerTokens is the expected answer of a claim.
func (e *Estimator) answerTokens(c *claim) float64 {
	switch {
	case c.outputTokens > 0:
		return c.outputTokens
	case !math.IsNaN(e.meanOutputTokens):
		return e.meanOutputTokens
	}
	return priorAnswerTokens
}

// streamEnd is when a claim's stream ended: as it was told, when its blocks
// stopped growing, or after its expected answer. A caller that told the first
// token is waited for to tell the end.
func (e *Estimator) streamEnd(c *claim, nowMs, pace float64) (endMs float64, ended bool) {
	switch {
	case !math.IsNaN(c.doneMs):
		return c.doneMs, c.doneMs <= nowMs
	case c.why == inQueue || c.marked:
		return 0, false
	case e.growthSeen && c.why == overServed && c.tail != 0 && e.facts.BlockTokens > 0:
		last := c.overMs
		if c.grewMs > last {
			last = c.grewMs
		}
		end := last + float64(e.facts.BlockTokens)*pace
		return end, end+float64(e.facts.BlockTokens)*pace+1000 <= nowMs
	}
	end := c.overMs + e.answerTokens(c)*pace
	return end, end <= nowMs
}

// grows reports whether stores tell how far the claim's answer is.
func (e *Estimator) grows(c *claim) bool {
	return e.growthSeen && c.why == overServed && c.tail != 0 && e.facts.BlockTokens > 0
}

// aliveAt is the probability, by what is known at nowMs, that a claim had not
// ended at a moment. What is known of it is certain; else its answer may end
// with every token, and when its next block is overdue it ended before that.
func (e *Estimator) aliveAt(c *claim, atMs, nowMs, pace float64) float64 {
	switch {
	case !math.IsNaN(c.doneMs) && c.doneMs <= atMs:
		return 0
	case !math.IsNaN(c.doneMs), c.why == inQueue, c.marked:
		return 1
	}
	last := c.overMs
	if e.grows(c) {
		if c.grewMs > last {
			last = c.grewMs
		}
		if block := float64(e.facts.BlockTokens) * pace; nowMs-last > block*overdueShare+overdueMs {
			return min(max(1-(atMs-last)/block, 0), 1)
		}
	}
	return min(math.Exp(-(atMs-last)/(e.answerTokens(c)*pace)), 1)
}

// paceMs is the time per token of a stream.
func (e *Estimator) paceMs() float64 {
	if !math.IsNaN(e.gapMs) {
		return e.gapMs
	}
	const requests, context = 8, 8 * 4096 // a usual decode load
	model := e.speeds.Model()
	return max(model.DecodeMs(requests, context, e.poolTokens()), 1)
}

// survive says of every claim how many of its sequences go on. The replay does
// not change that, so that it is said once for all the times that it is run.
func (e *Estimator) survive(v *view) {
	v.paceMs = e.paceMs()
	for _, c := range e.ledger.list {
		n := float64(c.sequences)
		c.alive = n * e.aliveAt(c, v.nowMs, v.nowMs, v.paceMs)
		if !c.young {
			c.ended = n*e.aliveAt(c, v.sMs, v.nowMs, v.paceMs) - c.alive
		}
	}
}

// countStreams counts requests by phase, from the claims and the counters.
func (e *Estimator) countStreams(v *view) {
	nan := math.NaN()
	v.streams = streams{live: nan, decoding: nan, context: nan}
	pace := v.paceMs
	young, ended := 0.0, 0.0
	for _, c := range e.ledger.list {
		n, alive := float64(c.sequences), c.alive
		if c.young {
			young += alive
		} else {
			ended += c.ended
		}
		if alive == 0 {
			continue
		}
		start := c.overMs
		if c.why == inQueue {
			start = c.modelEndMs
		}
		if start > v.nowMs {
			v.unserved += n
			continue
		}
		v.tracked += alive
		out := max((v.nowMs-start)/pace, float64(c.outTokens))
		if e.growthSeen && c.why == overServed && c.tail != 0 {
			out = float64(c.outTokens)
		}
		v.trackedContext += alive * (float64(c.prompt) + min(out, ledger.MaxTokens))
	}
	e.countLive(v, young, ended)
	v.context = e.contextTokens(v)
}

// countLive takes the totals from the counters where there are any: they see
// foreign requests as well.
func (e *Estimator) countLive(v *view, young, ended float64) {
	foreign := e.foreignWaiting(v)
	requests, known := sum(e.last.Running, e.last.Waiting)
	if v.counters && known {
		v.live = max(float64(requests)+young-ended, v.unserved)
		v.decoding = max(v.live-v.unserved-foreign, 0)
	} else if e.ledger.ever {
		v.live = v.unserved + v.tracked + foreign
		v.decoding = v.tracked
	}
}

// foreignWaiting counts foreign requests that have no first token yet: while
// they wait and no claim is in service, one of the running ones is in its
// prefill.
func (e *Estimator) foreignWaiting(v *view) float64 {
	v.foreignWait = false
	if e.foreign == 0 {
		return 0
	}
	steps := e.stepsAt(math.NaN(), math.NaN())
	work := e.foreignMs(&steps)
	v.foreignWait = math.IsNaN(work) || v.sMs+work > v.nowMs
	switch {
	case !v.foreignWait:
		return 0
	case e.claimInService():
		return float64(e.foreign)
	}
	return float64(e.foreign) + 1
}

// claimInService reports whether a claim's prefill is under way.
func (e *Estimator) claimInService() bool {
	for _, c := range e.ledger.list {
		if c.why == inQueue && !c.waits && !c.young {
			return true
		}
	}
	return false
}

// contextTokens is the context of the decoding streams: of the claims among
// them as known, of others as the mean of those, or by what they hold in the
// pool, or their number times a mean prompt and half a mean answer.
func (e *Estimator) contextTokens(v *view) float64 {
	if v.decoding == 0 {
		return 0
	}
	if v.tracked > 0 && !math.IsNaN(v.decoding) {
		return min(v.trackedContext*v.decoding/v.tracked, ledger.MaxContextTokens)
	}
	if held := e.heldBlocks(); !math.IsNaN(held) && e.facts.BlockTokens > 0 && (v.counters || !e.ledger.ever) && e.fresh(v.nowMs) {
		return min(held*float64(e.facts.BlockTokens), ledger.MaxContextTokens)
	}
	if math.IsNaN(v.decoding) {
		return math.NaN()
	}
	return min(v.decoding*(e.meanPromptTokens+e.meanOutputTokens/2), ledger.MaxContextTokens)
}

// fresh reports whether there is a reading that is not too old.
func (e *Estimator) fresh(nowMs float64) bool {
	return !e.last.At.IsZero() && nowMs-e.lastMs <= durationMs(maxSampleAge)
}

// heldBlocks is the blocks that requests refer to, by the newest reading; NaN:
// unknown.
func (e *Estimator) heldBlocks() float64 {
	if e.last.KVUsedRatio == nil || e.facts.PoolBlocks == 0 {
		return math.NaN()
	}
	return *e.last.KVUsedRatio * float64(e.facts.PoolBlocks)
}

// pendingBlocks is what claims will hold that had not begun at the newest
// reading.
func (e *Estimator) pendingBlocks(v *view) (blocks float64) {
	if e.facts.BlockTokens == 0 {
		return 0
	}
	for _, c := range e.ledger.list {
		if c.young && c.why != overGone && math.IsNaN(c.doneMs) || c.why == inQueue && (c.waits || !v.counters) {
			blocks += float64((c.uncached+e.facts.BlockTokens-1)/e.facts.BlockTokens + c.sequences)
		}
	}
	return blocks
}

func zeroIfNaN(v float64) float64 {
	if math.IsNaN(v) {
		return 0
	}
	return v
}

func durationMs(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
