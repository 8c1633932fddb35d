package queue

import (
	"math"
	"time"
)

// Room is what the worker has left for more requests; nil is unknown.
type Room struct {
	// FreeBlocks is the KV blocks that claims not admitted yet leave free,
	// their expected answers included; negative: they do not fit.
	FreeBlocks *float64
	// SlotWaitMs is the time until a batch slot is free for one more request:
	// 0 while there is one.
	SlotWaitMs *float64
}

// Room tells the room at now.
func (e *Estimator) Room(now time.Time) Room {
	v := e.settle(e.ms(now))
	var r Room
	if !e.fresh(v.nowMs) {
		return r
	}
	if held := e.heldBlocks(); !math.IsNaN(held) && e.facts.BlockTokens > 0 {
		free := float64(e.facts.PoolBlocks) - held - e.pendingBlocks(v)
		for _, c := range e.ledger.list {
			if c.why == inQueue && (c.young || c.waits || !v.counters) {
				free -= math.Ceil(e.answerTokens(c) * float64(c.sequences) / float64(e.facts.BlockTokens))
			}
		}
		r.FreeBlocks = &free
	}
	if e.facts.MaxRunning > 0 && e.last.Running != nil && v.counters {
		wait := 0.0
		if *e.last.Running >= e.facts.MaxRunning {
			ahead := float64(*e.last.Waiting)
			for _, c := range e.ledger.list {
				if c.young && c.why == inQueue {
					ahead += float64(c.sequences)
				}
			}
			if !(e.finishPerSec > 0) {
				return r
			}
			wait = (ahead + 1) / e.finishPerSec * 1000
		}
		r.SlotWaitMs = &wait
	}
	return r
}
