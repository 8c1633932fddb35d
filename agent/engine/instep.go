package engine

import (
	"context"
	"time"
)

// InStep calls f at once and then at the multiples of a period, until ctx ends: all
// that have one period are due in the same moment, so that a host with many engines
// wakes once to ask them all. The wall clock is no more than the common phase; one
// that is set anew makes one pause shorter or longer, by less than a period. A call
// that takes longer than the period lets those in between out.
func InStep(ctx context.Context, period time.Duration, f func()) {
	t := time.NewTimer(period)
	defer t.Stop()
	for {
		f()
		t.Reset(untilStep(time.Now(), period))
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// untilStep is the time to the next multiple of a period: not one that is so near
// that it may be the last one's, come early by a clock that is being slowed down.
func untilStep(now time.Time, period time.Duration) time.Duration {
	d := period - now.Sub(now.Truncate(period))
	if d < period/16 {
		d += period
	}
	return d
}
