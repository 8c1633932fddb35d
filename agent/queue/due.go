package queue

import (
	"math"
	"time"

	"waypost/gossip/ledger"
)

// dueMs and dueShare say how far the end of the queue may move before a
// report is due at once.
const (
	dueMs    = 50
	dueShare = .25
)

// End is when the queue of a worker ends, as was known at a moment; both are on
// the estimator's clock. The zero value is of an idle worker.
type End struct{ knownMs, endMs float64 }

// End is when the queue ends by what is known at now.
func (e *Estimator) End(now time.Time) End {
	e.settle(e.ms(now))
	return e.Shown()
}

// Shown is the end that the newest Load shows.
func (e *Estimator) Shown() End {
	v := &e.view
	return End{v.nowMs, v.nowMs + min(v.waiting.QueueMs(v.nowMs), ledger.MaxQueueMs)}
}

// JumpedFrom reports whether somebody who was shown another end is to hear of
// this one at once: the worker became idle, or the queue ends so much earlier or
// later that other workers are to be preferred. A queue that drained as was shown
// did not jump.
func (n End) JumpedFrom(shown End) bool {
	was := max(shown.endMs, n.knownMs)
	idle := n.endMs == n.knownMs && was > n.knownMs
	return idle || math.Abs(n.endMs-was) > max(dueMs, dueShare*(was-n.knownMs))
}
