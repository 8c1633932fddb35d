package outcome

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"waypost/coordinator/placement"
)

func observed(expected, actual int) *Observation {
	nan := math.NaN()
	return &Observation{
		Class:          Classify(Evidence{ExpectedTokens: expected, ActualTokens: actual, BlockTokens: 16, View: placement.ViewLive, ViewAgeMs: 100}),
		ExpectedTokens: expected, ActualTokens: actual, BlockTokens: 16, ReuseMs: nan, WaitMs: nan, FirstTokenMs: nan, GapMs: nan,
	}
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

func TestTrustFallsWithErrorsAndReturns(t *testing.T) {
	w := NewWorker(DefaultLimits())
	now := 0.0
	if got := w.Trust(now, .9); got != .9 {
		t.Fatalf("trust without outcomes is %v, want the prior", got)
	}
	for range 20 {
		now += 100
		w.Observe(now, observed(1024, 0))
	}
	low := w.Trust(now, 1)
	if low > .25 {
		t.Errorf("trust after 20 outcomes that found nothing: %v", low)
	}
	// Half of the evidence is gone after a half-life, nearly all after ten.
	half := w.Trust(now+DefaultLimits().HalfLifeMs, 1)
	if !(half > low && half < .5) {
		t.Errorf("trust after a half-life: %v, was %v", half, low)
	}
	if got := w.Trust(now+10*DefaultLimits().HalfLifeMs, 1); got < .98 {
		t.Errorf("trust after ten half-lives: %v", got)
	}
}

func TestColdRequestsAndRestartsDoNotCountAgainstAWorker(t *testing.T) {
	w := NewWorker(DefaultLimits())
	for i := range 50 {
		o := observed(0, 0)
		w.Observe(float64(i), o)
		r := observed(512, 0)
		r.Class = ClassRestarted
		w.Observe(float64(i), r)
	}
	if got := w.Trust(50, 1); got != 1 {
		t.Errorf("trust %v after misses and restarts only", got)
	}
	if w.ResyncDue(50) {
		t.Error("misses ask for a resync")
	}
}

func TestConstantBiasIsLearntNotDistrusted(t *testing.T) {
	w := NewWorker(DefaultLimits())
	for i := range 40 {
		// The engine always computes the last 64 tokens anew.
		w.Observe(float64(i), observed(1024+16*(i%7), 1024+16*(i%7)-64))
	}
	if w.BiasTokens() != -64 {
		t.Errorf("bias %d, want -64", w.BiasTokens())
	}
	if got := w.Trust(40, 1); got < .95 {
		t.Errorf("trust %v under a constant bias", got)
	}
	for i := range 16 {
		w.Observe(float64(100+i), observed(1024, 512*(i%3)))
	}
	if w.BiasTokens() != 0 {
		t.Errorf("bias %d of an engine that is wrong now and then", w.BiasTokens())
	}
}

func TestErrorsPerTerm(t *testing.T) {
	w := NewWorker(DefaultLimits())
	for i := range 10 {
		o := observed(0, 0)
		o.FirstTokenMs, o.WaitMs = 20, 40-80*float64(i%2)
		w.Observe(float64(i), o)
	}
	got := map[Term]TermError{}
	for _, e := range w.Errors(10) {
		got[e.Term] = e
	}
	if f := got[TermFirstToken]; math.Abs(f.BiasMs-20) > .1 || math.Abs(f.MeanMs-20) > .1 {
		t.Errorf("first token: %+v", f)
	}
	if f := got[TermWait]; math.Abs(f.BiasMs) > .1 || math.Abs(f.MeanMs-40) > .1 {
		t.Errorf("wait: %+v", f)
	}
	if _, known := got[TermGap]; known {
		t.Error("an error of a term nobody reported")
	}
	if n := len(w.Errors(1e9)); n != 0 {
		t.Errorf("%d errors are still shown after days", n)
	}
}

func TestResyncIsBounded(t *testing.T) {
	w := NewWorker(DefaultLimits())
	asked, now := 0, 0.0
	for now < 3_600_000 {
		now += 500
		w.Observe(now, observed(1024, 0))
		if w.ResyncDue(now) {
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
		growing.Observe(float64(i), observed(1024, 1024+80))
		if growing.ResyncDue(float64(i)) {
			t.Fatal("a resync because answers are told with a delay")
		}
	}
	for i := range 3 {
		growing.Observe(float64(100+i), observed(0, 4000))
	}
	if !growing.ResyncDue(103) {
		t.Error("no resync of a view that misses what the engine finds")
	}
	few := NewWorker(DefaultLimits())
	for i := range 10 {
		few.Observe(float64(i)*40_000, observed(1024, 0))
		if few.ResyncDue(float64(i) * 40_000) {
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

// Trust is a factor whatever comes, and never rises by an outcome that found
// nothing of what was expected.
func TestTrustProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := NewWorker(DefaultLimits())
		now, prior := 0.0, rapid.Float64Range(0, 1).Draw(t, "prior")
		for range rapid.IntRange(1, 60).Draw(t, "outcomes") {
			now += rapid.Float64Range(0, 1e6).Draw(t, "pause")
			expected, actual := rapid.IntRange(-1, 1e5).Draw(t, "expected"), rapid.IntRange(-1, 1e5).Draw(t, "actual")
			before, bias := w.Trust(now, prior), w.BiasTokens()
			w.Observe(now, observed(expected, actual))
			after := w.Trust(now, prior)
			if !(after >= 0 && after <= 1) {
				t.Fatalf("trust %v", after)
			}
			if expected > 1000 && actual == 0 && bias == 0 && w.BiasTokens() == 0 && after > before+1e-9 {
				t.Fatalf("trust rose from %v to %v by a miss", before, after)
			}
		}
	})
}
