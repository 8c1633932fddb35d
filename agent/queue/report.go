package queue

import (
	"fmt"
	"math"
	"time"

	"waypost/gossip/ledger"
)

// Load is the report at now. Counters older than ten seconds, or whose lag is
// not known while claims come, are not used: what rests on them is unknown.
func (e *Estimator) Load(now time.Time) ledger.Load {
	nowMs := e.ms(now)
	v := e.settle(nowMs)
	load := ledger.Load{State: ledger.StateReady}
	load.MeanOutputTokens = known(e.meanOutputTokens)
	load.EvictionAgeMs = known(min(e.eviction.ageMs(nowMs), ledger.MaxEvictionMs))
	if stalled, reason := e.Stalled(now); stalled {
		load.State, load.StateReason = ledger.StateStalled, reason
	}
	if e.fresh(nowMs) {
		if e.last.Sleeping != nil && *e.last.Sleeping {
			load.State, load.StateReason = ledger.StateSleeping, "the engine sleeps"
		}
		load.Running, load.Waiting = count(e.last.Running), count(e.last.Waiting)
		load.KVUsedRatio = e.last.KVUsedRatio
		load.FinishPerSec = known(e.finishPerSec)
		load.HeldBlocks = known(e.heldBlocks() + e.pendingBlocks(v))
	}
	e.reportAges(&load, v)
	e.reportQueue(&load, v)
	load.Live, load.Decoding = whole(v.live), whole(v.decoding)
	load.ContextTokens = known(v.context)
	if v.decoding > 0 {
		load.GapMs = known(e.gapMs)
	}
	load.Echo = e.ledger.echoes.Append(nil)
	return load
}

// reportAges tells how old the facts are.
func (e *Estimator) reportAges(load *ledger.Load, v *view) {
	newest := e.ledger.anchorMs
	if e.fresh(v.nowMs) {
		sampled := e.sampledMs()
		newest = max(newest, sampled)
		if v.counters || e.last.Waiting == nil && !e.ledger.ever {
			age := max(v.nowMs-sampled, 0)
			load.CountersAgeMs = &age
		}
	}
	if age := v.nowMs - newest; age <= 2*durationMs(maxSampleAge) {
		age = max(age, 0)
		load.AgeMs = &age
	}
}

// reportQueue tells the waiting work. It is told whenever claims are echoed,
// for a coordinator leaves those out that are.
func (e *Estimator) reportQueue(load *ledger.Load, v *view) {
	if v.counters {
		foreign := uint32(e.foreign)
		load.Foreign = &foreign
	}
	onlyForeign := v.foreignWait && len(v.plan.owners) == 0
	switch {
	case !v.counters && !e.ledger.ever:
		return
	case onlyForeign && math.IsNaN(e.meanClaimMs(&v.steps)):
		return
	}
	queue := min(v.waiting.QueueMs(v.nowMs), ledger.MaxQueueMs)
	load.QueueMs = &queue
	if !onlyForeign {
		open := uint32(v.waiting.K)
		if queue == 0 {
			open = 0
		}
		load.OpenTokens = &open
	}
	load.QueueBasis = e.basis(v)
}

// basis says what the queue rests on.
func (e *Estimator) basis(v *view) ledger.Basis {
	switch {
	case v.nowMs-e.ledger.evidenceMs <= silentMs || len(e.ledger.list) == 0 && !math.IsInf(e.ledger.evidenceMs, -1):
		return ledger.BasisEvidence
	case v.counters:
		return ledger.BasisCounters
	}
	return ledger.BasisTime
}

// SetNoProgressAfter sets how long a worker with requests may show no sign of
// life; 0 or less: DefaultNoProgressAfter.
func (e *Estimator) SetNoProgressAfter(d time.Duration) {
	if d <= 0 {
		d = DefaultNoProgressAfter
	}
	e.noProgressAfter = d
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

// whole returns a count that may have a fraction as a field of a report.
func whole(v float64) *uint32 {
	if math.IsNaN(v) {
		return nil
	}
	c := uint32(min(math.Round(v), maxRequests))
	return &c
}
