package outcome

import (
	"errors"
	"math"
	"strings"
	"testing"

	"waypost/coordinator/placement"
)

func TestClassify(t *testing.T) {
	base := Evidence{ExpectedTokens: 512, ActualTokens: 512, BlockTokens: 16, View: placement.ViewLive, ViewAgeMs: 400}
	for _, test := range []struct {
		name   string
		change func(*Evidence)
		want   Class
	}{
		{"exact", func(*Evidence) {}, ClassAsPredicted},
		{"one block less", func(e *Evidence) { e.ActualTokens = 496 }, ClassAsPredicted},
		{"one block more", func(e *Evidence) { e.ActualTokens = 528 }, ClassAsPredicted},
		{"two blocks more", func(e *Evidence) { e.ActualTokens = 544 }, ClassUnderPredicted},
		{"nothing reported", func(e *Evidence) { e.ActualTokens = placement.Unknown }, ClassNotReported},
		{"nothing reported after a restart", func(e *Evidence) { e.ActualTokens, e.ProcessChanged = placement.Unknown, Yes }, ClassNotReported},
		{"nothing expected or found", func(e *Evidence) { e.ExpectedTokens, e.ActualTokens = 0, 0 }, ClassCold},
		{"unknown expected, nothing found", func(e *Evidence) { e.ExpectedTokens, e.ActualTokens = placement.Unknown, 0 }, ClassCold},
		{"nothing expected, a block found", func(e *Evidence) { e.ExpectedTokens, e.ActualTokens = 0, 16 }, ClassUnderPredicted},
		{"unknown expected, something found", func(e *Evidence) { e.ExpectedTokens = placement.Unknown }, ClassUnderPredicted},
		{"one block expected, nothing found", func(e *Evidence) { e.ExpectedTokens, e.ActualTokens = 16, 0 }, ClassEvicted},
		{"two blocks less, nothing known", func(e *Evidence) { e.ActualTokens = 480 }, ClassEvicted},
		{"restart goes before all", func(e *Evidence) {
			e.ActualTokens, e.ProcessChanged, e.BoundaryDiffers, e.EvictedSince, e.StreamLost = 0, Yes, Yes, Yes, Yes
		}, ClassRestarted},
		{"silently gone: the engine stores the same again", func(e *Evidence) { e.ActualTokens, e.WorkerHeld, e.StoredAgain = 0, Yes, Yes }, ClassEvicted},
		{"events lost goes before stored again", func(e *Evidence) {
			e.ActualTokens, e.WorkerHeld, e.StoredAgain, e.StreamLost = 0, Yes, Yes, Yes
		}, ClassViewStale},
		{"never held goes before stored again", func(e *Evidence) { e.ActualTokens, e.WorkerHeld, e.StoredAgain = 0, No, Yes }, ClassFalsePositive},
		{"a known boundary explains more as well", func(e *Evidence) { e.ExpectedTokens, e.BoundaryDiffers = 0, Yes }, ClassBoundary},
		{"nothing is wrong with a cold request", func(e *Evidence) { e.ExpectedTokens, e.ActualTokens, e.BoundaryDiffers = 0, 0, Yes }, ClassCold},
		{"found as predicted whatever differs", func(e *Evidence) { e.BoundaryDiffers, e.ProcessChanged = Yes, Yes }, ClassAsPredicted},
		{"a restart does not explain more", func(e *Evidence) { e.ExpectedTokens, e.ProcessChanged = 16, Yes }, ClassUnderPredicted},
		{"known boundary goes before removal", func(e *Evidence) {
			e.ActualTokens, e.BoundaryDiffers, e.EvictedSince = 0, Yes, Yes
		}, ClassBoundary},
		{"removal goes before a stale view", func(e *Evidence) {
			e.ActualTokens, e.EvictedSince, e.StreamLost = 0, Yes, Yes
		}, ClassEvicted},
		{"frames lost", func(e *Evidence) { e.ActualTokens, e.StreamLost = 0, Yes }, ClassViewStale},
		{"old view", func(e *Evidence) { e.ActualTokens, e.ViewAgeMs = 0, 5001 }, ClassViewStale},
		{"view of unknown age", func(e *Evidence) { e.ActualTokens, e.ViewAgeMs, e.WorkerHeld = 0, math.NaN(), No }, ClassFalsePositive},
		{"inferred view", func(e *Evidence) { e.ActualTokens, e.View = 0, placement.ViewInferred }, ClassViewStale},
		{"the worker never held it", func(e *Evidence) { e.ActualTokens, e.WorkerHeld = 0, No }, ClassFalsePositive},
		{"the worker held it, unused", func(e *Evidence) { e.ActualTokens, e.WorkerHeld, e.StoredAgain = 0, Yes, No }, ClassBoundary},
		{"the worker held it, and whether it was stored anew is not known", func(e *Evidence) { e.ActualTokens, e.WorkerHeld = 0, Yes }, ClassEvicted},
		{"known to be neither", func(e *Evidence) {
			e.ActualTokens, e.ProcessChanged, e.BoundaryDiffers, e.EvictedSince, e.StreamLost = 0, No, No, No, No
		}, ClassEvicted},
		{"block size unknown: exactly or not", func(e *Evidence) { e.BlockTokens, e.ActualTokens = 0, 496 }, ClassEvicted},
	} {
		e := base
		test.change(&e)
		if got := Classify(e); got != test.want {
			t.Errorf("%s: %s, want %s", test.name, got, test.want)
		}
	}
}

// Whatever else holds, the first line that applies decides.
func TestFirstLineDecides(t *testing.T) {
	base := Evidence{ExpectedTokens: 512, BlockTokens: 16, View: placement.ViewLive, ViewAgeMs: 400}
	lines := []struct {
		name   string
		change func(*Evidence)
		want   Class
	}{
		{"restarted", func(e *Evidence) { e.ProcessChanged = Yes }, ClassRestarted},
		{"boundary differs", func(e *Evidence) { e.BoundaryDiffers = Yes }, ClassBoundary},
		{"removal reported", func(e *Evidence) { e.EvictedSince = Yes }, ClassEvicted},
		{"frames lost", func(e *Evidence) { e.StreamLost = Yes }, ClassViewStale},
		{"view incomplete", func(e *Evidence) { e.View = placement.ViewPartial }, ClassViewStale},
		{"view old", func(e *Evidence) { e.ViewAgeMs = staleViewMs + 1 }, ClassViewStale},
		{"never held", func(e *Evidence) { e.WorkerHeld = No }, ClassFalsePositive},
		{"stored again", func(e *Evidence) { e.StoredAgain = Yes }, ClassEvicted},
	}
	for i, first := range lines {
		e := base
		for _, later := range lines[i:] {
			later.change(&e)
			if got := Classify(e); got != first.want {
				t.Errorf("%s, and all up to %s: %s, want %s", first.name, later.name, got, first.want)
			}
		}
		for actual, want := range map[int]Class{placement.Unknown: ClassNotReported, 496: ClassAsPredicted, 512: ClassAsPredicted, 528: ClassAsPredicted, 544: ClassUnderPredicted} {
			if want == ClassUnderPredicted && e.BoundaryDiffers == Yes {
				want = ClassBoundary
			}
			if e.ActualTokens = actual; Classify(e) != want {
				t.Errorf("%d tokens found, %s and all after it: %s, want %s", actual, first.name, Classify(e), want)
			}
		}
		if e.ExpectedTokens, e.ActualTokens = 0, 0; Classify(e) != ClassCold {
			t.Errorf("nothing expected or found, %s and all after it: %s", first.name, Classify(e))
		}
	}
}

// What is known at once is not waited for.
func TestWhatIsConclusive(t *testing.T) {
	for _, test := range []struct {
		name string
		e    Evidence
		want bool
	}{
		{"nothing reported", Evidence{ExpectedTokens: 512, ActualTokens: placement.Unknown}, true},
		{"nothing expected or found", Evidence{}, true},
		{"as expected", Evidence{ExpectedTokens: 512, ActualTokens: 496, BlockTokens: 16}, true},
		{"more found", Evidence{ActualTokens: 512}, false},
		{"more found, another boundary", Evidence{ActualTokens: 512, BoundaryDiffers: Yes}, true},
		{"more found, the same boundary", Evidence{ActualTokens: 512, BoundaryDiffers: No}, true},
		{"less found", Evidence{ExpectedTokens: 512}, false},
		{"less found, restarted", Evidence{ExpectedTokens: 512, ProcessChanged: Yes}, true},
		{"less found, the same process", Evidence{ExpectedTokens: 512, ProcessChanged: No}, false},
		{"less found, the same process, another boundary", Evidence{ExpectedTokens: 512, ProcessChanged: No, BoundaryDiffers: Yes}, true},
		{"less found, removed", Evidence{ExpectedTokens: 512, ProcessChanged: No, BoundaryDiffers: No, EvictedSince: Yes}, true},
		{"less found, not removed", Evidence{ExpectedTokens: 512, ProcessChanged: No, BoundaryDiffers: No, EvictedSince: No}, false},
	} {
		if got := test.e.Conclusive(); got != test.want {
			t.Errorf("%s: conclusive %v", test.name, got)
		}
	}
}

// Misses are not mispredictions, and every class is listed once.
func TestClassList(t *testing.T) {
	seen := map[Class]bool{}
	for _, c := range Classes {
		if seen[c] {
			t.Errorf("%s twice", c)
		}
		seen[c] = true
	}
	for c, want := range map[Class]bool{
		ClassCold: false, ClassAsPredicted: false, ClassNotReported: false, "": false,
		ClassUnderPredicted: true, ClassEvicted: true, ClassViewStale: true, ClassRestarted: true, ClassBoundary: true, ClassFalsePositive: true,
	} {
		if c.Mispredicted() != want {
			t.Errorf("%q mispredicted: %v", c, c.Mispredicted())
		}
		if c != "" && !seen[c] {
			t.Errorf("%s is not listed", c)
		}
	}
}

func TestOutcomeNamesBadFields(t *testing.T) {
	for field, change := range map[string]func(*Outcome){
		"result":       func(o *Outcome) { o.Result = "ok" },
		"errorClass":   func(o *Outcome) { o.ErrorClass = "oops" },
		"httpStatus":   func(o *Outcome) { o.HTTPStatus = 99 },
		"firstTokenMs": func(o *Outcome) { o.FirstTokenMs = -1 },
		"durationMs":   func(o *Outcome) { o.DurationMs = math.Inf(1) },
		"cachedTokens": func(o *Outcome) { o.CachedTokens = -2 },
		"promptTokens": func(o *Outcome) { o.PromptTokens = math.MinInt },
		"outputTokens": func(o *Outcome) { o.OutputTokens = math.MaxInt },
	} {
		o := NewOutcome(ResultDone)
		change(&o)
		if err := o.Validate(); !errors.Is(err, ErrOutcome) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: error %v", field, err)
		}
	}
	o := NewOutcome(ResultDone)
	o.CachedTokens, o.PromptTokens = 20, 10
	if err := o.Validate(); !errors.Is(err, ErrOutcome) {
		t.Errorf("more cached than prompt: %v", err)
	}
	if o = NewOutcome(ResultCancelled); o.Validate() != nil {
		t.Error("an outcome of which only the result is known is refused")
	}
}
