package lane

import (
	"errors"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"

	"waypost/gossip/accuracy"
	waypostv1 "waypost/proto/waypost/v1"
)

// Outcomes and what was learnt of them come over the wire as they were, unknown
// as unknown; what a stranger could make of them is refused.
func TestOutcomesOverTheWire(t *testing.T) {
	nothing := Observed{EngineProcess: 7, Observation: accuracy.NewObservation()}
	all := Observed{EngineProcess: 7, Observation: accuracy.Observation{ExpectedTokens: 512, ActualTokens: 0, ReuseMs: 25, WaitMs: -3, FirstTokenMs: 22, GapMs: .5}}
	for _, list := range [][]Observed{{nothing}, {all}, {all, nothing, all}} {
		f := OutcomeFrameOf(0xc1, 3, list)
		back, err := ObservationsOf(f)
		if err != nil || f.GetCoordinator() != 0xc1 || f.GetIndex() != 3 {
			t.Fatalf("%v: %v", f, err)
		}
		if diff := cmp.Diff(list, back, cmpopts.EquateNaNs()); diff != "" {
			t.Error(diff)
		}
	}
	beyond := all
	beyond.WaitMs = 1e300
	if back, err := ObservationsOf(OutcomeFrameOf(1, 0, []Observed{beyond})); err != nil || back[0].WaitMs != accuracy.MostErrorMs {
		t.Errorf("an error of years is told as %v, %v", back, err)
	}
	for name, m := range map[string]*waypostv1.ObservedOutcome{
		"NaN":           {WaitMs: proto.Float64(math.NaN())},
		"infinite":      {GapMs: proto.Float64(math.Inf(1))},
		"tokens":        {ExpectedTokens: proto.Uint32(math.MaxUint32)},
		"actual tokens": {ActualTokens: proto.Uint32(math.MaxUint32)},
	} {
		if _, err := ObservationsOf(&waypostv1.OutcomeFrame{Outcomes: []*waypostv1.ObservedOutcome{m}}); !errors.Is(err, ErrOutcomes) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ObservationsOf(&waypostv1.OutcomeFrame{Outcomes: make([]*waypostv1.ObservedOutcome, MaxOutcomes+1)}); !errors.Is(err, ErrOutcomes) {
		t.Errorf("too many outcomes: %v", err)
	}

	report := accuracy.Report{Outcomes: 8, FoundRatio: .5, BiasTokens: -16, Errors: []accuracy.TermError{{Term: accuracy.TermGap, BiasMs: -1, MeanMs: 2, Outcomes: 3}}}
	back, err := AccuracyReportOf(AccuracyOf(&report))
	if diff := cmp.Diff(report, back); diff != "" || err != nil {
		t.Errorf("%v %s", err, diff)
	}
	m := AccuracyOf(&report)
	m.Errors = append(m.Errors, &waypostv1.TermError{Term: proto.String("of a newer version")})
	if back, err := AccuracyReportOf(m); err != nil || len(back.Errors) != 1 {
		t.Errorf("a term that is not known: %v, %v", back, err)
	}
	m.FoundRatio = proto.Float64(-1)
	if _, err := AccuracyReportOf(m); !errors.Is(err, accuracy.ErrReport) {
		t.Errorf("a negative share: %v", err)
	}
}
