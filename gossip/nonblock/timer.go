package nonblock

import "time"

// Timer fires once each time it is set. While the connections of its Coalescer wait
// for ticks, it fires on the first tick at which it is due, so that nothing wakes
// for it alone.
type Timer struct {
	// C is sent to when the timer fires.
	C <-chan struct{}

	c       chan struct{}
	k       *Coalescer // nil: there are no ticks
	due     time.Time  // on ticks; zero: not set
	runtime *time.Timer
}

// NewTimer returns a timer that is not set. Stop ends its use. A nil Coalescer never
// ticks.
func (k *Coalescer) NewTimer() *Timer {
	t := &Timer{c: make(chan struct{}, 1), k: k}
	t.C = t.c
	t.runtime = time.AfterFunc(time.Hour, t.fire)
	t.runtime.Stop()
	if k != nil {
		k.with(func() { k.timers[t] = struct{}{} })
	}
	return t
}

// Reset makes the timer fire after d, instead of when it would have. One that has
// fired already may still be received from C.
func (t *Timer) Reset(d time.Duration) {
	if t.k == nil {
		t.runtime.Reset(d)
		return
	}
	t.k.with(func() {
		t.due = time.Time{}
		switch {
		case d <= 0:
			t.runtime.Stop()
			t.fire()
		case t.k.on:
			t.runtime.Stop()
			t.due = time.Now().Add(d)
		default:
			t.runtime.Reset(d)
		}
	})
}

// Stop ends the use of the timer.
func (t *Timer) Stop() {
	t.runtime.Stop()
	if t.k != nil {
		t.k.with(func() { delete(t.k.timers, t) })
	}
}

func (t *Timer) fire() {
	select {
	case t.c <- struct{}{}:
	default:
	}
}

// look fires the timer if it is due on a tick. The lock of the coalescer is held.
func (t *Timer) look(now time.Time) {
	if !t.due.IsZero() && !now.Before(t.due) {
		t.due = time.Time{}
		t.fire()
	}
}

// leave goes on without ticks. The lock of the coalescer is held.
func (t *Timer) leave(now time.Time) {
	if !t.due.IsZero() {
		t.runtime.Reset(max(0, t.due.Sub(now)))
		t.due = time.Time{}
	}
}
