package ledger

import (
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// truthMs prices what a replay computed by another model.
func truthMs(w *Work, truth *StepModel, decodeMs float64) float64 {
	base, tokens := w.priceMs(truth, decodeMs)
	return base + tokens
}

func workOf(tokens int) *Work {
	prior := PriorFor(Class{Engine: EngineMocker})
	steps := NewSteps(prior.Model, prior.StepTokens, 0)
	r := NewReplay(&steps, 0, []Job{NewJob(0, 0, tokens)})
	r.RunThrough(0)
	return &r.Work
}

func relative(got, want float64) float64 { return math.Abs(got-want) / want }

func TestOneFactorIsLearntFirst(t *testing.T) {
	prior := PriorFor(Class{Engine: EngineMocker}).Model
	for _, factor := range []float64{.5, .9, 1.5, 3} {
		truth := prior.Scaled(factor)
		s := NewSpeeds(prior)
		rng := rand.New(rand.NewPCG(1, 2))
		for range 400 {
			w := workOf(500 + rng.IntN(8000))
			noise := math.Exp(rng.NormFloat64() * .15)
			s.ObservePrefill(w, 10, truthMs(w, &truth, 10*factor)*noise, false)
		}
		model := s.Model()
		for _, n := range []int{500, 3000, 8000} {
			// What a step of n tokens takes, its decode part included.
			got := model.PrefillMs(n) + model.DecodeMs(0, 0, 0)
			if want := truth.PrefillMs(n) + truth.DecodeMs(0, 0, 0); relative(got, want) > .12 {
				t.Errorf("factor %v: a step of %d tokens is priced %.1f, takes %.1f", factor, n, got, want)
			}
		}
		if model.Source != SourceLearnt || model.Validate() != nil {
			t.Errorf("factor %v: model %+v", factor, model)
		}
	}
}

// Another relation of base to tokens than the prior's is found as well.
func TestOwnBaseAndTokensAreLearnt(t *testing.T) {
	prior := PriorFor(Class{Engine: EngineMocker}).Model
	truth := prior
	truth.P0Ms *= 5 // 82 ms per step
	truth.P1MsPerToken *= .5
	truth.QMsPerToken2 *= .5
	s := NewSpeeds(prior)
	rng := rand.New(rand.NewPCG(3, 4))
	for range 600 {
		w := workOf(100 + rng.IntN(8000))
		s.ObservePrefill(w, 6, truthMs(w, &truth, 6)*math.Exp(rng.NormFloat64()*.05), true)
	}
	model := s.Model()
	for _, n := range []int{300, 2000, 8000} {
		if got, want := model.PrefillMs(n), truth.PrefillMs(n); relative(got, want) > .12 {
			t.Errorf("%d tokens are priced %.1f, take %.1f; one factor says %.1f", n, got, want, prior.PrefillMs(n)*s.Factor())
		}
	}
}

func TestDecodeIsLearntApart(t *testing.T) {
	prior := PriorFor(Class{Engine: EngineMocker}).Model
	s := NewSpeeds(prior)
	for range 60 {
		s.ObserveDecode(10, 20)
	}
	model := s.Model()
	if got, want := model.DecodeMs(4, 1e5, 1e6), 2*prior.DecodeMs(4, 1e5, 1e6); relative(got, want) > .2 {
		t.Errorf("decode step %v, want about %v", got, want)
	}
	if got := model.PrefillMs(2000); relative(got, prior.PrefillMs(2000)) > .05 {
		t.Errorf("prefill moved to %v", got)
	}
}

// A caller that sent three seconds late is no slow worker.
func TestOutliersAreClipped(t *testing.T) {
	prior := PriorFor(Class{Engine: EngineMocker}).Model
	s := NewSpeeds(prior)
	w := workOf(1000)
	right := truthMs(w, &prior, 6)
	for i := range 500 {
		took := right
		if i%20 == 0 {
			took += 3000
		}
		s.ObservePrefill(w, 6, took, true)
	}
	if f := s.Factor(); f > 1.12 {
		t.Errorf("factor %v from 5 %% late callers", f)
	}
}

// Noise around the prior does not change the model in force over and over.
func TestModelInForceIsCalm(t *testing.T) {
	prior := PriorFor(Class{Engine: EngineMocker}).Model
	s := NewSpeeds(prior)
	rng := rand.New(rand.NewPCG(5, 6))
	changes, last := 0, s.Model()
	for range 2000 {
		w := workOf(100 + rng.IntN(6000))
		s.ObservePrefill(w, 6, truthMs(w, &prior, 6)*math.Exp(rng.NormFloat64()*.1), rng.IntN(2) == 0)
		if m := s.Model(); m != last {
			changes, last = changes+1, m
		}
	}
	if changes > 20 {
		t.Errorf("the model in force changed %d times in 2,000 observations", changes)
	}
}

// Whatever is observed, the model stays valid and a state that was exported
// can be imported and says the same.
func TestSpeedsStayBounded(t *testing.T) {
	odd := []float64{math.NaN(), math.Inf(1), -1, 0, 1e-9, .5, 10, 900, 1e6, 1e300}
	rapid.Check(t, func(t *rapid.T) {
		prior := drawModel(t)
		prior.Source = SourcePrior
		s := NewSpeeds(prior)
		for range rapid.IntRange(0, 80).Draw(t, "observations") {
			if rapid.Bool().Draw(t, "decode") {
				s.ObserveDecode(rapid.SampledFrom(odd).Draw(t, "prior"), rapid.SampledFrom(odd).Draw(t, "observed"))
				continue
			}
			w := workOf(rapid.IntRange(1, 50_000).Draw(t, "tokens"))
			s.ObservePrefill(w, rapid.SampledFrom(odd[3:]).Draw(t, "decode ms"), rapid.SampledFrom(odd).Draw(t, "observed"), rapid.Bool().Draw(t, "alone"))
		}
		model := s.Model()
		if err := model.Validate(); err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(s.Export())
		if err != nil {
			t.Fatal(err)
		}
		var state SpeedsState
		if err := json.Unmarshal(text, &state); err != nil {
			t.Fatal(err)
		}
		again := NewSpeeds(prior)
		if err := again.Import(state); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		if again.Factor() != s.Factor() {
			t.Fatalf("factor %v after a restart, %v before", again.Factor(), s.Factor())
		}
	})
}

func TestImportRefusesWhatNoLearningLeadsTo(t *testing.T) {
	prior := PriorFor(Class{Engine: EngineMocker}).Model
	good := NewSpeeds(prior).Export()
	for name, change := range map[string]func(*SpeedsState){
		"prior":       func(s *SpeedsState) { s.Prior.P0Ms++ },
		"lnFactor":    func(s *SpeedsState) { s.LnFactor = 40 },
		"lnDecode":    func(s *SpeedsState) { s.LnDecode = math.NaN() },
		"weight":      func(s *SpeedsState) { s.Weight = -1 },
		"sums":        func(s *SpeedsState) { s.Sums[2] = math.Inf(1) },
		"ownError":    func(s *SpeedsState) { s.OwnError = 9 },
		"decodeMs":    func(s *SpeedsState) { s.DecodeMs = -2 },
		"factorError": func(s *SpeedsState) { s.FactorError = math.NaN() },
	} {
		state := good
		change(&state)
		if err := NewSpeeds(prior).Import(state); !errors.Is(err, ErrSpeeds) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestEqualise(t *testing.T) {
	prior := PriorFor(Class{Engine: EngineMocker}).Model
	var models []StepModel
	for _, f := range []float64{1.05, .96, 1, 1.6, 1.02, .5} {
		models = append(models, prior.Scaled(f))
	}
	got := Equalise(models, nil)
	times := make([]float64, len(models))
	for i := range models {
		m := models[i].Scaled(got[i])
		times[i] = m.typicalMs()
	}
	// All but the slow and the fast one are equal now.
	for _, i := range []int{0, 1, 2, 4} {
		if relative(times[i], times[2]) > 1e-9 {
			t.Errorf("model %d takes %v, want %v", i, times[i], times[2])
		}
	}
	if got[3] != 1 || got[5] != 1 {
		t.Errorf("factors %v: those outside the dead band stay", got)
	}
	if len(Equalise(nil, nil)) != 0 || Equalise([]StepModel{{}}, nil)[0] != 1 {
		t.Error("nothing to compare")
	}
}
