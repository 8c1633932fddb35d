package queue

import (
	"math"
	"time"

	"waypost/gossip/ledger"
)

// youthMs is the age below which a claim is not expected in the counters yet:
// its request is on the way.
const youthMs = 100

// Slot is one processing place of an engine that serves each request in a
// slot of its own.
type Slot struct {
	// PromptTokens is the prompt's length, ProcessedTokens how much of it is
	// computed.
	PromptTokens, ProcessedTokens int
}

// Queued takes the engine's own sum of the prompt tokens that wait and are not
// cached, for engines that tell it. It takes the place of the sum over waiting
// claims.
func (e *Estimator) Queued(at time.Time, uncachedTokens int) {
	if uncachedTokens < 0 || uncachedTokens > ledger.MaxTokens*maxRequests {
		e.counts.BadReadings++
		return
	}
	e.queuedMs, e.queuedTokens = e.ms(at), min(uncachedTokens, math.MaxInt32)
}

// Slots takes the busy slots of an engine. Each is matched with an open claim
// by the length of its prompt.
func (e *Estimator) Slots(at time.Time, slots []Slot) {
	atMs := e.ms(at)
	used := map[*claim]bool{}
	foreign := 0
	// A claim may be kept long after its stream must have ended; a slot is not
	// its any more.
	pace := e.paceMs()
	gone := func(c *claim) bool {
		_, ended := e.streamEnd(c, atMs-earlyMarkMs, pace)
		return ended || c.why == overGone || !math.IsNaN(c.doneMs)
	}
	for _, s := range slots {
		if s.PromptTokens < 1 || s.PromptTokens > ledger.MaxTokens || s.ProcessedTokens < 0 || s.ProcessedTokens > s.PromptTokens {
			e.counts.BadReadings++
			continue
		}
		var match *claim
		for _, c := range e.ledger.list {
			if c.prompt == s.PromptTokens && !used[c] && c.madeMs <= atMs && !gone(c) {
				match = c
				break
			}
		}
		switch {
		case match == nil:
			foreign += s.PromptTokens - s.ProcessedTokens
			continue
		case s.ProcessedTokens == s.PromptTokens:
			e.served(match, atMs, stored)
		case s.ProcessedTokens > 0:
			e.progress(match, atMs, s.ProcessedTokens)
		}
		used[match] = true
	}
	e.slotForeignTokens, e.slotsMs = foreign, atMs
}

// countersUsable reports whether the newest reading may be used: it is fresh,
// and the lag of what it says is known. Without any claim nothing can be
// counted twice and the reading is taken as it is.
func (e *Estimator) countersUsable(nowMs float64) bool {
	return e.last.Waiting != nil && nowMs-e.lastMs <= durationMs(maxSampleAge) && (!e.ledger.ever || e.lag.step >= 0)
}

// sampledMs is when the newest reading was true of the engine.
func (e *Estimator) sampledMs() float64 {
	if e.lag.step < 0 {
		return e.lastMs
	}
	return e.lastMs - e.lag.ms()
}

// expect says of every claim what the newest reading, true at sMs, says of it.
// A reading that the replay from the newest evidence explains tells nothing
// new. Else, of the claims that it must know and that had not begun by then,
// the newest `waiting` wait and all older ones were admitted between the former
// reading and it. What waits beyond them is foreign.
//
// A reading is blurred: claims younger than youthMs may be in it or not, and as
// engines count at the end of a step, what began within the step before may
// still have been counted as waiting.
func (e *Estimator) expect(sMs float64) {
	waiting := *e.last.Waiting
	steps := e.stepsAt(e.decodeLoad, e.contextLoad)
	step := steps.PrefillMs(0, steps.BudgetTokens()) + steps.DecodeMs()
	e.replayTo(&steps, sMs)
	least, young, blurred := 0, 0, 0 // that wait
	for _, c := range e.ledger.list {
		c.young, c.waits = c.madeMs > sMs-youthMs, false
		switch began := min(orInf(c.startedMs), orInf(c.overMs), c.modelBeganMs); {
		case began <= sMs && began > sMs-step:
			blurred += c.sequences
		case began <= sMs:
		case c.young:
			young += c.sequences
		default:
			least += c.sequences
		}
	}
	e.explained = sMs >= e.ledger.anchorMs && waiting >= least && waiting <= least+young+blurred &&
		!e.facts.Unordered && math.IsNaN(e.queuedWaitMs())
	if e.explained {
		e.foreign = 0
		for _, c := range e.ledger.list {
			if c.young || c.why != inQueue {
				continue
			}
			if c.waits = c.modelBeganMs > sMs; !c.waits {
				c.confirmedMs = sMs
			}
		}
		return
	}
	e.correct(sMs, waiting, young, step)
}

// correct takes the reading's word against the replay's.
func (e *Estimator) correct(sMs float64, waiting, young int, step float64) {
	middle := sMs
	if d := e.lastMs - e.formerMs; d > 0 && d <= durationMs(maxSampleAge) {
		middle = sMs - d/2
	}
	for i := len(e.ledger.list) - 1; i >= 0; i-- {
		c := e.ledger.list[i]
		if c.young {
			continue
		}
		if began := min(orInf(c.startedMs), orInf(c.overMs)); began <= sMs {
			if waiting > 0 && began > sMs-step {
				waiting -= c.sequences
			}
			continue
		}
		if waiting > 0 {
			waiting -= c.sequences
			if c.why == inQueue {
				c.waits, c.admittedMs, c.confirmedMs = true, math.NaN(), math.NaN()
				c.factMs = max(c.factMs, sMs)
			}
			continue
		}
		if math.IsNaN(c.admittedMs) && math.IsNaN(c.confirmedMs) {
			c.admittedMs = max(middle, c.madeMs)
		}
	}
	e.foreign = max(waiting-young, 0)
}

func orInf(v float64) float64 {
	if math.IsNaN(v) {
		return math.Inf(1)
	}
	return v
}
