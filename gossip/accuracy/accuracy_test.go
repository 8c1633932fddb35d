package accuracy

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var limits = DefaultLimits()

func observed(expected, actual int) *Observation {
	o := NewObservation()
	o.ExpectedTokens, o.ActualTokens, o.BlockTokens = expected, actual, 16
	return &o
}

func (w *Worker) trust(nowMs, prior float64) float64 {
	r := w.Report(nowMs)
	return r.Trust(&limits, 0, prior)
}

func TestTrustFallsWithErrorsAndReturns(t *testing.T) {
	w := New(limits)
	now := 0.0
	if got := w.trust(now, .9); got != .9 {
		t.Fatalf("trust without outcomes is %v, want the prior", got)
	}
	for range 20 {
		now += 100
		w.Observe(now, 1, observed(1024, 0))
	}
	low := w.trust(now, 1)
	if low > .25 {
		t.Errorf("trust after 20 outcomes that found nothing: %v", low)
	}
	// Half of the evidence is gone after a half-life, nearly all after ten. A
	// report that nothing follows fades alike.
	report := w.Report(now)
	half, told := w.trust(now+limits.HalfLifeMs, 1), report.Trust(&limits, limits.HalfLifeMs, 1)
	if !(half > low && half < .5) || math.Abs(half-told) > 1e-9 {
		t.Errorf("trust after a half-life: %v, by a report of that age %v, was %v", half, told, low)
	}
	if got := w.trust(now+10*limits.HalfLifeMs, 1); got < .98 {
		t.Errorf("trust after ten half-lives: %v", got)
	}
}

// One coordinator that reports nothing but failures, as often as it likes, is
// one voice: what the others see keeps half of the weight, and when it falls
// silent its word is gone within half-lives.
func TestOneCoordinatorIsOneVoice(t *testing.T) {
	w := New(limits)
	for i := range 100_000 {
		now := float64(i) / 10
		w.Observe(now, 666, observed(1024, 0))
		if i%100 == 0 {
			w.Observe(now, 1, observed(1024, 1024))
		}
	}
	now := 10_000.0
	if got := w.trust(now, 1); got < .5 {
		t.Errorf("trust %v after a flood of one coordinator", got)
	}
	for i := range 100 {
		now += 36_000
		w.Observe(now, 1, observed(1024, 1024))
		_ = i
	}
	if got := w.trust(now, 1); got < .9 {
		t.Errorf("trust %v an hour after the flood", got)
	}
	// Marks that nobody has cost no memory.
	for i := range uint64(1000) {
		w.Observe(now, 1000+i, observed(1024, 0))
	}
	if len(w.by) > limits.MostCoordinators {
		t.Errorf("%d coordinators are remembered", len(w.by))
	}
}

// What coordinators saw adds up as if one had seen it all.
func TestCoordinatorsAddUp(t *testing.T) {
	one, two := New(limits), New(limits)
	for i := range 40 {
		o := observed(1000, 1000-25*i)
		o.FirstTokenMs = float64(i)
		one.Observe(float64(i), 1, o)
		two.Observe(float64(i), uint64(1+i%2), o)
	}
	a, b := one.Report(40), two.Report(40)
	if diff := cmp.Diff(a, b, cmp.Comparer(func(x, y float64) bool { return math.Abs(x-y) < 1e-9 })); diff != "" || a.Empty() {
		t.Errorf("one and two coordinators differ: %s", diff)
	}
}

func TestMissesAndUnknownDoNotCount(t *testing.T) {
	w := New(limits)
	for i := range 50 {
		w.Observe(float64(i), 1, observed(0, 0))
		w.Observe(float64(i), 1, observed(512, Unknown))
	}
	if r := w.Report(50); !r.Empty() || w.trust(50, 1) != 1 {
		t.Errorf("misses taught %+v", r)
	}
}

func TestConstantBiasIsLearntNotDistrusted(t *testing.T) {
	w := New(limits)
	for i := range 40 {
		// The engine always computes the last 64 tokens anew.
		w.Observe(float64(i), uint64(i%2), observed(1024+16*(i%7), 1024+16*(i%7)-64))
	}
	if got := w.Report(40).BiasTokens; got != -64 {
		t.Errorf("bias %d, want -64", got)
	}
	if got := w.trust(40, 1); got < .95 {
		t.Errorf("trust %v under a constant bias", got)
	}
	for i := range 32 {
		w.Observe(float64(100+i), uint64(i%2), observed(1024, 512*(i%3)))
	}
	if got := w.Report(132).BiasTokens; got != 0 {
		t.Errorf("bias %d of an engine that is wrong now and then", got)
	}
}

func TestErrorsPerTerm(t *testing.T) {
	w := New(limits)
	for i := range 10 {
		o := observed(0, 0)
		o.FirstTokenMs, o.WaitMs = 20, 40-80*float64(i%2)
		w.Observe(float64(i), 1, o)
	}
	got := map[Term]TermError{}
	for _, e := range w.Report(10).Errors {
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
	if n := len(w.Report(1e9).Errors); n != 0 {
		t.Errorf("%d errors are still shown after days", n)
	}
	for i := range numTerms {
		if back, ok := TermOf(i.String()); !ok || back != i {
			t.Errorf("%s is not read back", i)
		}
	}
}

// A restart of the agent forgets nothing, and a file that was tampered with
// teaches nothing.
func TestStateIsKept(t *testing.T) {
	w := New(limits)
	for i := range 30 {
		o := observed(1024, 960)
		o.GapMs = 3
		w.Observe(float64(i), uint64(1+i%3), o)
	}
	b, err := json.Marshal(w.Export(30))
	if err != nil {
		t.Fatal(err)
	}
	var s State
	if err := json.Unmarshal(b, &s); err != nil {
		t.Fatal(err)
	}
	again := New(limits)
	if err := again.Import(1e7, s); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(w.Report(30), again.Report(1e7)); diff != "" {
		t.Errorf("kept and restored differ: %s", diff)
	}
	for name, change := range map[string]func(*State, *tally){
		"more found than seen":   func(_ *State, t *tally) { t.Held.Sum, t.Held.Abs = 2*t.Held.N, 2*t.Held.N },
		"a weight without bound": func(_ *State, t *tally) { t.Held.N = 1e9 },
		"a negative weight":      func(_ *State, t *tally) { t.Terms[0].N = -1 },
		"too many differences":   func(_ *State, t *tally) { t.Offs = make([]int, 17) },
		"a place beyond the end": func(_ *State, t *tally) { t.OffAt = 16 },
		"no mark":                func(s *State, t *tally) { s.Coordinators["x"] = *t },
		"a bias without bound":   func(s *State, _ *tally) { s.BiasTokens = 1 << 40 },
	} {
		bad := w.Export(30)
		for mark, of := range bad.Coordinators {
			change(&bad, &of)
			bad.Coordinators[mark] = of
			break
		}
		before := again.Report(1e7)
		if err := again.Import(1e7, bad); err == nil {
			t.Errorf("%s: taken", name)
		}
		if diff := cmp.Diff(before, again.Report(1e7)); diff != "" {
			t.Errorf("%s: changed what was known: %s", name, diff)
		}
	}
}

// Trust is a factor whatever comes, and never rises by an outcome that found
// nothing of what was expected; every report is one that is accepted.
func TestTrustProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := New(limits)
		now, prior := 0.0, rapid.Float64Range(0, 1).Draw(t, "prior")
		for range rapid.IntRange(1, 60).Draw(t, "outcomes") {
			now += rapid.Float64Range(0, 1e6).Draw(t, "pause")
			expected, actual := rapid.IntRange(-1, 1e5).Draw(t, "expected"), rapid.IntRange(-1, 1e5).Draw(t, "actual")
			before, bias := w.trust(now, prior), w.bias
			o := observed(expected, actual)
			o.WaitMs = rapid.Float64Range(-MostErrorMs, MostErrorMs).Draw(t, "wait")
			w.Observe(now, rapid.Uint64Range(0, 20).Draw(t, "coordinator"), o)
			after := w.trust(now, prior)
			if !(after >= 0 && after <= 1) {
				t.Fatalf("trust %v", after)
			}
			if len(w.by) < limits.MostCoordinators && expected > 1000 && actual == 0 && bias == 0 && w.bias == 0 && after > before+1e-9 {
				t.Fatalf("trust rose from %v to %v by a miss", before, after)
			}
			r := w.Report(now)
			if err := r.Validate(); err != nil {
				t.Fatal(err)
			}
			if err := New(limits).Import(now, w.Export(now)); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestBadObservationsAreNamed(t *testing.T) {
	for name, change := range map[string]func(*Observation){
		"expectedTokens": func(o *Observation) { o.ExpectedTokens = MostTokens + 1 },
		"actualTokens":   func(o *Observation) { o.ActualTokens = -2 },
		"reuse":          func(o *Observation) { o.ReuseMs = math.Inf(1) },
		"gap":            func(o *Observation) { o.GapMs = -MostErrorMs - 1 },
	} {
		o := NewObservation()
		if err := o.Validate(); err != nil {
			t.Fatal(err)
		}
		if change(&o); o.Validate() == nil {
			t.Errorf("%s beyond its bounds is taken", name)
		}
	}
	for name, r := range map[string]Report{
		"outcomes": {Outcomes: math.NaN()}, "ratio": {FoundRatio: 1.1}, "bias": {BiasTokens: -MostTokens - 1},
		"errors": {Errors: []TermError{{MeanMs: -1, Outcomes: 1}}}, "no outcomes": {Errors: []TermError{{}}},
	} {
		if r.Validate() == nil {
			t.Errorf("%s beyond its bounds is taken", name)
		}
	}
}
