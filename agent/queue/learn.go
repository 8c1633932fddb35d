package queue

import (
	"math"

	"waypost/gossip/ledger"
)

// Answers teach where the counters do not.

// learnAnswer takes the length of an answer and the pace it came at.
func (e *Estimator) learnAnswer(c *claim, doneMs float64, outputTokens int) {
	if outputTokens < 1 || e.last.GenerationTokens != nil {
		return
	}
	blend(&e.meanOutputTokens, float64(min(outputTokens, ledger.MaxTokens)), perRequest)
	if outputTokens > 1 && !c.estimated && doneMs > c.servedMs {
		blend(&e.gapMs, min((doneMs-c.servedMs)/float64(outputTokens-1), 60_000), perRequest)
	}
}

// priorDecodeMs is the decode part of a step at the newest decode load, by the
// prior.
func (e *Estimator) priorDecodeMs() float64 {
	prior := e.speeds.Prior()
	return prior.DecodeMs(e.decodeLoad, e.contextLoad, e.poolTokens())
}

// teaches reports whether a prefill says something of the worker's speed: not
// when requests that nobody explains may have been computed with it, and not
// without an order.
func (e *Estimator) teaches(c *claim) bool {
	return e.foreign == 0 && !e.facts.Unordered && c.why == inQueue
}

// learnFirst takes the time of a claim's first token, before it is applied:
// what was computed since the newest evidence took so long.
func (e *Estimator) learnFirst(c *claim, atMs float64) {
	if !e.teaches(c) || atMs <= c.madeMs || atMs <= e.ledger.anchorMs {
		return
	}
	e.jobs = e.jobs[:0]
	for _, o := range e.ledger.list {
		if o.why == inQueue && !c.before(o) {
			context, tokens := o.left()
			e.jobs = append(e.jobs, ledger.NewJob(o.madeMs, context, tokens))
		}
		if o == c {
			break
		}
	}
	free := e.ledger.anchorMs
	if math.IsInf(free, -1) {
		free = e.jobs[0].AtMs
	}
	steps := e.stepsAt(e.decodeLoad, e.contextLoad)
	r := ledger.NewReplay(&steps, free, e.jobs)
	r.RunThrough(len(e.jobs) - 1)
	alone := len(e.jobs) == 1 && r.Work.BeganMs == c.madeMs
	e.speeds.ObservePrefill(&r.Work, e.priorDecodeMs(), atMs-r.Work.BeganMs, alone)
}

// learnStep takes what one batch of stores says: its tokens were computed in
// the steps since the former evidence, if there was work all the time, or since
// the only claim was made.
func (e *Estimator) learnStep(b *batchWork, formerMs, atMs float64) {
	if e.foreign > 0 || e.facts.Unordered {
		return
	}
	steps := e.stepsAt(e.decodeLoad, e.contextLoad)
	budget := float64(steps.BudgetTokens())
	began, alone := max(formerMs, b.sinceMs), b.sinceMs >= formerMs
	w := ledger.Work{Steps: math.Ceil(b.tokens / budget), Tokens: b.tokens, AttentionTokens2: b.attention, BeganMs: began}
	full := math.Floor(b.tokens / budget)
	rest := b.tokens - full*budget
	w.SquaredTokens = full*budget*budget + rest*rest
	e.speeds.ObservePrefill(&w, e.priorDecodeMs(), atMs-began, alone)
}

// learnGap takes the token gap of an interval without any prefill: it is the
// worker's pure decode step. Counters tell of a prefill when it is over, so an
// interval in the middle of a long one looks like pure decoding: what counts is
// that no claim was open at any time of it, and, for requests of others, that
// the next interval brought no first token either.
func (e *Estimator) learnGap(s *Sample, gapMs, computed, firsts float64) {
	pure := computed == 0 && !(firsts > 0) && s.Waiting != nil && *s.Waiting == 0 &&
		e.last.Waiting != nil && *e.last.Waiting == 0 && !e.openSince(e.lastMs)
	held := e.heldGap
	e.heldGap = gapSeen{}
	if !pure {
		return
	}
	if held.gapMs > 0 {
		e.speeds.ObserveDecode(held.priorMs, held.gapMs)
	}
	if context := e.contextLoad; context > 0 {
		prior := e.speeds.Prior()
		e.heldGap = gapSeen{prior.DecodeMs(float64(*s.Running), context, e.poolTokens()), gapMs}
	}
}

// gapSeen is a token gap and the prior's for the same load.
type gapSeen struct{ priorMs, gapMs float64 }

// openSince reports whether a claim was open at any time since a moment.
func (e *Estimator) openSince(ms float64) bool {
	for _, c := range e.ledger.list {
		if c.why == inQueue || c.overMs >= ms {
			return true
		}
	}
	return false
}

// StepModel is the step model in force: the prior of the facts until evidence
// said otherwise. It changes seldom; tell it to coordinators when it does.
func (e *Estimator) StepModel() ledger.StepModel { return e.speeds.Model() }
