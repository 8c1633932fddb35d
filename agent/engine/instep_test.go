package engine

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// Whenever they began, and however long a call takes, all are called in the same
// moments: no more often than once a period, and the first time at once.
func TestInStep(t *testing.T) {
	const period = 250 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		began := time.Now()
		calls := make([][]time.Duration, 3)
		for i, o := range []struct{ begins, takes time.Duration }{{0, 0}, {70 * time.Millisecond, 100 * time.Millisecond}, {130 * time.Millisecond, 600 * time.Millisecond}} {
			go func() {
				time.Sleep(o.begins)
				InStep(ctx, period, func() {
					calls[i] = append(calls[i], time.Since(began))
					time.Sleep(o.takes)
				})
			}()
		}
		time.Sleep(1600 * time.Millisecond)
		cancel()
		synctest.Wait()
		ms := func(n ...int) (out []time.Duration) {
			for _, n := range n {
				out = append(out, time.Duration(n)*time.Millisecond)
			}
			return out
		}
		for i, want := range [][]time.Duration{ms(0, 250, 500, 750, 1000, 1250, 1500), ms(70, 250, 500, 750, 1000, 1250, 1500), ms(130, 750, 1500)} {
			if !slices.Equal(calls[i], want) {
				t.Errorf("%d: called after %v, want %v", i, calls[i], want)
			}
		}
		time.Sleep(time.Second) // the slow one ends
	})
}

// A timer that fires a little early by the wall clock is not followed by another
// one at once.
func TestUntilStep(t *testing.T) {
	at := time.Unix(1000, 0)
	for _, c := range []struct{ past, want time.Duration }{
		{0, 200}, {1, 199}, {180, 20}, {187, 13}, {188, 212}, {199, 201},
	} {
		if got := untilStep(at.Add(c.past*time.Millisecond), 200*time.Millisecond); got != c.want*time.Millisecond {
			t.Errorf("%v ms after a step: %v, want %v ms", int64(c.past), got, int64(c.want))
		}
	}
}
