package outcome

import (
	"math"
	"testing"

	"waypost/coordinator/placement"
)

// observe tells a worker of an outcome with a full view.
func observe(w *Worker, nowMs float64, expected, actual int) {
	class := Classify(Evidence{ExpectedTokens: expected, ActualTokens: actual, BlockTokens: 16, View: placement.ViewLive, ViewAgeMs: 100})
	w.Observe(nowMs, class, expected, actual)
}

// Whatever evidence comes later, a conclusive outcome keeps its class.
func TestConclusiveOutcomesKeepTheirClass(t *testing.T) {
	answers := []Answer{NotKnown, No, Yes}
	conclusive := 0
	for _, actual := range []int{placement.Unknown, 0, 128, 512, 1024} {
		for _, expected := range []int{placement.Unknown, 0, 16, 512} {
			for _, view := range []placement.ViewKind{placement.ViewLive, placement.ViewPartial} {
				for i := range 729 {
					e := Evidence{ExpectedTokens: expected, ActualTokens: actual, BlockTokens: 16, View: view, ViewAgeMs: 100}
					fields := func(e *Evidence) []*Answer {
						return []*Answer{&e.ProcessChanged, &e.BoundaryDiffers, &e.EvictedSince, &e.StreamLost, &e.WorkerHeld, &e.StoredAgain}
					}
					n := i
					for _, f := range fields(&e) {
						*f, n = answers[n%3], n/3
					}
					if !e.Conclusive() {
						continue
					}
					conclusive++
					want := Classify(e)
					for k := range fields(&e) {
						for _, a := range answers {
							later := e
							if f := fields(&later)[k]; *f == NotKnown {
								*f = a
							}
							if got := Classify(later); got != want {
								t.Fatalf("%+v is %s and conclusive, but %+v is %s", e, want, later, got)
							}
						}
					}
				}
			}
		}
	}
	if conclusive == 0 {
		t.Fatal("nothing is ever conclusive")
	}
}

func TestMissesAndRestartsAskForNoResync(t *testing.T) {
	w := NewWorker(DefaultLimits())
	for i := range 50 {
		observe(w, float64(i), 0, 0)
		w.Observe(float64(i), ClassRestarted, 512, 0)
	}
	if due, _ := w.ResyncDue(50); due {
		t.Error("misses and restarts ask for a resync")
	}
}

func TestResyncIsBounded(t *testing.T) {
	w := NewWorker(DefaultLimits())
	asked, now := 0, 0.0
	for now < 3_600_000 {
		now += 500
		observe(w, now, 1024, 0)
		if due, _ := w.ResyncDue(now); due {
			asked++
		}
	}
	// 30 s, doubling to 10 min: 30+60+120+240+480+600…
	if asked < 3 || asked > 11 {
		t.Errorf("%d resyncs in an hour of errors", asked)
	}
	if w.Resyncs() != uint64(asked) {
		t.Errorf("counted %d", w.Resyncs())
	}
	growing := NewWorker(DefaultLimits())
	for i := range 100 {
		observe(growing, float64(i), 1024, 1024+80)
		if due, _ := growing.ResyncDue(float64(i)); due {
			t.Fatal("a resync because answers are told with a delay")
		}
	}
	for i := range 3 {
		observe(growing, float64(100+i), 0, 4000)
	}
	if due, lacking := growing.ResyncDue(103); !due || !lacking {
		t.Errorf("due %v, lacking %v of a view that misses what the engine finds", due, lacking)
	}
	// That keeps none waiting that is asked for because too much was promised.
	observe(growing, 200, 4000, 0)
	for i := range 2 {
		observe(growing, float64(201+i), 0, 4000)
	}
	if due, lacking := growing.ResyncDue(203); !due || lacking {
		t.Errorf("due %v, lacking %v of a view that promised too much as well", due, lacking)
	}
	few := NewWorker(DefaultLimits())
	for i := range 10 {
		observe(few, float64(i)*40_000, 1024, 0)
		if due, _ := few.ResyncDue(float64(i) * 40_000); due {
			t.Error("a resync after few errors far apart")
		}
	}
}

func TestBreakerOpensOnFaultsAndProbes(t *testing.T) {
	w := NewWorker(DefaultLimits())
	now := 0.0
	for i := range 5 {
		if !w.Placeable(now) {
			t.Fatalf("not placeable after %d faults", i)
		}
		now += 2
		w.Ended(now, true)
	}
	if w.Placeable(now) || w.Breaker(now) != BreakerOpen {
		t.Fatal("placeable after 5 faults in a row")
	}
	probes := 0
	for end := now + 60_000; now < end; now += 10 {
		if w.TakeProbe(now) {
			probes++
			w.Ended(now+2, true)
		}
	}
	// 10, 20 and (not yet) 40 s after each other.
	if probes < 1 || probes > 3 {
		t.Errorf("%d probes in a minute", probes)
	}
	for !w.TakeProbe(now) {
		now += 1000
	}
	if w.TakeProbe(now) {
		t.Error("two probes at once")
	}
	w.Ended(now+100, false)
	if w.Breaker(now) != BreakerClosed || !w.Placeable(now) || !math.IsNaN(w.FailingMs(now)) {
		t.Error("a served probe does not close the breaker")
	}
}

func TestProbeThatNobodyHearsOfIsGivenUp(t *testing.T) {
	w := NewWorker(DefaultLimits())
	for i := range 5 {
		w.Ended(float64(i), true)
	}
	now := 5 + DefaultLimits().ProbeEveryMs
	if !w.TakeProbe(now) || w.Placeable(now+1) {
		t.Fatal("no single probe")
	}
	if !w.Placeable(now + DefaultLimits().ProbeEveryMs + 1) {
		t.Error("a lost probe keeps the worker out for ever")
	}
}

func TestBreakerSeesHalfFaults(t *testing.T) {
	w := NewWorker(DefaultLimits())
	for i := range 60 {
		w.Ended(float64(i), i%3 != 0)
	}
	if w.Placeable(60) {
		t.Error("two of three requests fail and the worker is placeable")
	}
	slow := NewWorker(DefaultLimits())
	for i := range 100 {
		slow.Ended(float64(i)*20_000, i%3 != 0)
	}
	if !slow.Placeable(2_000_000) {
		t.Error("a few faults over hours open the breaker")
	}
}

func TestOnlyWorkerFaultsCount(t *testing.T) {
	for _, test := range []struct {
		result, class string
		status        int
		want          bool
	}{
		{ResultDone, "", 200, false},
		{ResultFailed, ErrorClient, 400, false},
		{ResultFailed, ErrorOverload, 503, false},
		{ResultFailed, ErrorWorker, 500, true},
		{ResultFailed, ErrorTimeout, 0, true},
		{ResultFailed, "", 0, true},
		{ResultFailed, "", 400, false},
		{ResultFailed, "", 429, false},
		{ResultFailed, "", 502, true},
		{ResultFailed, "", 503, false},
		{ResultCancelled, "", 0, false},
	} {
		o := NewOutcome(test.result)
		o.ErrorClass, o.HTTPStatus = test.class, test.status
		if got := o.WorkerFault(); got != test.want {
			t.Errorf("%s %q %d: %v", test.result, test.class, test.status, got)
		}
	}
}

// A worker is at odds with its view from the first resync on, until nothing went
// wrong for the longest pause.
func TestDisagreementFades(t *testing.T) {
	l := DefaultLimits()
	w := NewWorker(l)
	if w.Disagrees(0) {
		t.Error("at odds before any outcome")
	}
	for i := range l.ResyncErrors {
		w.Observe(float64(i), ClassUnderPredicted, 0, 4000)
	}
	if w.Disagrees(10) {
		t.Error("at odds before anything was asked for")
	}
	if due, _ := w.ResyncDue(10); !due || !w.Disagrees(10) || !w.Disagrees(10+l.ResyncMostMs) {
		t.Error("not at odds though its predictions went wrong")
	}
	if w.Disagrees(11 + l.ResyncMostMs) {
		t.Error("at odds for ever")
	}
}
