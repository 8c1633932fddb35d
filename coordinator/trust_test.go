package coordinator

import (
	"math"
	"testing"
	"time"

	"waypost/coordinator/explain"
	"waypost/coordinator/outcome"
	"waypost/gossip/accuracy"
)

// reusedLess is a record of an engine that reused less than was expected.
func reusedLess(spare bool) *explain.Entry {
	o := outcome.NewOutcome(outcome.ResultDone)
	o.CachedTokens, o.FirstTokenMs, o.DurationMs, o.OutputTokens = 1024, 130, 330, 11
	return &explain.Entry{
		Worker: "gpu-01/vllm-8000/0", Process: 100, ExpectedTokens: 2048, BiasTokens: -16, UncachedTokens: 1024, PrefillMs: 64, GapMs: 18, FirstTokenMs: 100,
		SpareSource: spare, Outcome: &o, Class: outcome.ClassViewStale,
	}
}

// Reuse beside a spare source may be the source's: it teaches neither trust in the
// worker's view nor what a lack of it costs; the times are the worker's all the same.
func TestSpareSourceTeachesNothingOfReuse(t *testing.T) {
	if got, want := observationOf(reusedLess(false)).Observation, (accuracy.Observation{ExpectedTokens: 2064, ActualTokens: 1024, ReuseMs: 64, WaitMs: -34, FirstTokenMs: 30, GapMs: 2}); got != want {
		t.Errorf("of its own alone: %+v, want %+v", got, want)
	}
	got := observationOf(reusedLess(true))
	if got.EngineProcess != 100 || got.ExpectedTokens != accuracy.Unknown || got.ActualTokens != accuracy.Unknown ||
		!math.IsNaN(got.ReuseMs) || !math.IsNaN(got.WaitMs) || got.FirstTokenMs != 30 || got.GapMs != 2 {
		t.Errorf("beside a spare source: %+v", got)
	}
	if err := got.Validate(); err != nil {
		t.Error(err)
	}
}

// Nor does it speak against the view, however often it is less than expected.
func TestSpareSourceDoesNotHaveTheViewReadAnew(t *testing.T) {
	o := startOne(t)
	joined(t, o)
	resyncs := func(spare bool) uint64 {
		for range outcome.DefaultLimits().ResyncErrors {
			o.judges.observe(time.Now(), reusedLess(spare))
		}
		o.judges.mu.Lock()
		defer o.judges.mu.Unlock()
		return o.judges.of("gpu-01/vllm-8000/0", 100).Resyncs()
	}
	if n := resyncs(true); n != 0 {
		t.Errorf("%d beside a spare source, want none", n)
	}
	if n := resyncs(false); n != 1 {
		t.Errorf("%d of its own alone, want 1", n)
	}
}
