package coordinator

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"waypost/gossip/accuracy"
	"waypost/gossip/lane"
)

// Outcomes wait for one another by worker, none is lost or told twice, and no
// worker has more waiting than a frame may hold.
func TestOutcomesWaitTogether(t *testing.T) {
	o := newOutcomes()
	observed := func(n int) *lane.Observed {
		return &lane.Observed{EngineProcess: uint64(n), Observation: accuracy.NewObservation()}
	}
	var told []lane.Observed
	for n := range lane.MaxOutcomes + 3 {
		told = append(told, o.add("a", observed(n))...)
	}
	if len(told) != lane.MaxOutcomes {
		t.Fatalf("%d are told at once, want as many as a frame holds, %d", len(told), lane.MaxOutcomes)
	}
	o.add("b", observed(7))
	all := o.take(false)
	told = append(told, all["a"]...)
	for n := range told {
		if told[n].EngineProcess != uint64(n) {
			t.Fatalf("outcome %d is number %d", n, told[n].EngineProcess)
		}
	}
	if len(told) != lane.MaxOutcomes+3 || len(all) != 2 || len(all["b"]) != 1 {
		t.Errorf("%d of %d, and %v", len(told), lane.MaxOutcomes+3, all["b"])
	}
	if again := o.take(false); len(again) != 0 {
		t.Errorf("told twice: %v", again)
	}
}

// The first outcome after a pause is told at once, what follows once a period, and
// what waits at the end before the end.
func TestOutcomesAreToldTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancel(t.Context())
		o := newOutcomes()
		var mu sync.Mutex
		var lots []int
		done := make(chan struct{})
		go func() {
			defer close(done)
			o.run(ctx, func(_ string, list []lane.Observed) {
				mu.Lock()
				defer mu.Unlock()
				lots = append(lots, len(list))
			})
		}()
		at := func(n int, want ...int) {
			t.Helper()
			for range n {
				o.add("a", &lane.Observed{})
			}
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if len(lots) != len(want) {
				t.Fatalf("told %v, want %v", lots, want)
			}
			for i := range want {
				if lots[i] != want[i] {
					t.Fatalf("told %v, want %v", lots, want)
				}
			}
		}
		at(1, 1)
		time.Sleep(outcomesEvery / 2)
		at(3, 1)
		at(2, 1)
		time.Sleep(outcomesEvery)
		at(0, 1, 5)
		at(1, 1, 5)
		time.Sleep(time.Hour)
		at(0, 1, 5, 1)
		at(1, 1, 5, 1, 1)
		at(4, 1, 5, 1, 1)
		end()
		<-done
		at(0, 1, 5, 1, 1, 4)
		if due := o.add("a", &lane.Observed{}); len(due) != 1 || len(o.take(false)) != 0 {
			t.Errorf("after the end %d are to be told at once, want the one that came", len(due))
		}
	})
}
