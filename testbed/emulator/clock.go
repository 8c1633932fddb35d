package emulator

import (
	"context"
	"time"
)

// Clock is the time an engine lives in.
type Clock interface {
	Now() time.Time
	// SleepUntil returns at t or when ctx ends, whichever is first.
	SleepUntil(ctx context.Context, t time.Time)
}

// realClock is the machine's.
type realClock struct{}

func (realClock) Now() time.Time { return time.Now() }

func (realClock) SleepUntil(ctx context.Context, t time.Time) {
	d := time.Until(t)
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
