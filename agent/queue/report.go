package queue

import (
	"fmt"
	"math"
	"time"

	"waypost/gossip/ledger"
)

// Load is the report at now. Counters older than ten seconds are not used:
// what rests on them is unknown. Foreign and open tokens stay unknown; only
// claims can tell them apart.
func (e *Estimator) Load(now time.Time) ledger.Load {
	load := ledger.Load{State: ledger.StateReady}
	load.MeanOutputTokens = known(e.meanOutputTokens)
	if stalled, reason := e.Stalled(now); stalled {
		load.State, load.StateReason = ledger.StateStalled, reason
	}
	age := now.Sub(e.last.At)
	if e.last.At.IsZero() || age > maxSampleAge {
		return load
	}
	ageMs := max(float64(age)/float64(time.Millisecond), 0)
	load.AgeMs, load.CountersAgeMs = &ageMs, &ageMs
	if e.last.Sleeping != nil && *e.last.Sleeping {
		load.State, load.StateReason = ledger.StateSleeping, "the engine sleeps"
	}
	load.Running, load.Waiting = count(e.last.Running), count(e.last.Waiting)
	load.KVUsedRatio = e.last.KVUsedRatio
	load.FinishPerSec = known(e.finishPerSec)
	if live, ok := sum(e.last.Running, e.last.Waiting); ok {
		load.Live = count(&live)
	}
	load.QueueMs = known(e.queueMs(ageMs))
	decoding := e.decoding()
	load.Decoding = count(decoding)
	load.HeldBlocks = known(e.heldBlocks())
	load.ContextTokens = known(e.contextTokens(decoding))
	if decoding != nil && *decoding > 0 {
		load.GapMs = known(e.gapMs)
	}
	return load
}

// queueMs is the waiting work at ageMs after the sample; NaN: unknown.
func (e *Estimator) queueMs(ageMs float64) float64 {
	if e.last.Waiting == nil {
		return math.NaN()
	}
	if *e.last.Waiting == 0 {
		return 0
	}
	mean := e.meanPrefillMs()
	return min(max((float64(*e.last.Waiting)+.5)*mean-ageMs, 0), ledger.MaxQueueMs)
}

// meanPrefillMs is what a mean request adds to the queue; NaN until learnt.
func (e *Estimator) meanPrefillMs() float64 {
	if math.IsNaN(e.meanUncachedTokens) {
		return math.NaN()
	}
	tokens := int(math.Round(e.meanUncachedTokens))
	cached := 0
	if e.meanPromptTokens > e.meanUncachedTokens {
		cached = int(math.Round(e.meanPromptTokens)) - tokens
	}
	steps := ledger.NewSteps(e.facts.Model, e.facts.StepTokens, e.decodeMs())
	return steps.PrefillMs(cached, tokens) + steps.DecodeMs()
}

// decodeMs is the decode part of a step with the present load.
func (e *Estimator) decodeMs() float64 {
	var decoding float64
	if d := e.decoding(); d != nil {
		decoding = float64(*d)
	}
	context := e.contextTokens(e.decoding())
	if math.IsNaN(context) {
		context = 0
	}
	return e.facts.Model.DecodeMs(decoding, context, float64(e.facts.PoolBlocks*e.facts.BlockTokens))
}

// decoding is the streams past their first token: while requests wait, one of
// the running ones is in its prefill.
func (e *Estimator) decoding() *int {
	if e.last.Running == nil || e.last.Waiting == nil {
		return nil
	}
	n := *e.last.Running
	if *e.last.Waiting > 0 && n > 0 {
		n--
	}
	return &n
}

// heldBlocks is the blocks that requests refer to; NaN: unknown.
func (e *Estimator) heldBlocks() float64 {
	if e.last.KVUsedRatio == nil || e.facts.PoolBlocks == 0 {
		return math.NaN()
	}
	return *e.last.KVUsedRatio * float64(e.facts.PoolBlocks)
}

// contextTokens is the context of the decoding streams: what they hold in the
// pool, or their number times a mean prompt and half a mean answer; NaN:
// unknown.
func (e *Estimator) contextTokens(decoding *int) float64 {
	if decoding != nil && *decoding == 0 {
		return 0
	}
	if held := e.heldBlocks(); !math.IsNaN(held) && e.facts.BlockTokens > 0 {
		return min(held*float64(e.facts.BlockTokens), ledger.MaxContextTokens)
	}
	if decoding == nil {
		return math.NaN()
	}
	return min(float64(*decoding)*(e.meanPromptTokens+e.meanOutputTokens/2), ledger.MaxContextTokens)
}

// Stalled reports whether the worker has requests but showed no sign of life
// for too long, with the reason. It needs counters or stores that can show
// one; without them nothing can be said and the answer is no.
func (e *Estimator) Stalled(now time.Time) (bool, string) {
	if e.busySince.IsZero() || !e.witness || now.Sub(e.last.At) > maxSampleAge {
		return false, ""
	}
	since := e.busySince
	if e.progressAt.After(since) {
		since = e.progressAt
	}
	silent := now.Sub(since)
	if silent < e.noProgressAfter {
		return false, ""
	}
	return true, fmt.Sprintf("no progress for %d s with %d running and %d waiting",
		int(silent.Seconds()), *e.last.Running, *e.last.Waiting)
}

// known returns a field of a report: nil for a value that is not known.
func known(v float64) *float64 {
	if math.IsNaN(v) {
		return nil
	}
	return &v
}

// count returns a count as a field of a report.
func count(n *int) *uint32 {
	if n == nil {
		return nil
	}
	c := uint32(*n)
	return &c
}
