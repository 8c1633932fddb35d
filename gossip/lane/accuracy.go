package lane

import (
	"errors"
	"fmt"
	"math"

	"google.golang.org/protobuf/proto"

	"waypost/gossip/accuracy"
	waypostv1 "waypost/proto/waypost/v1"
)

// MaxOutcomes bounds the outcomes of one frame.
const MaxOutcomes = 256

// ErrOutcomes is wrapped by every error of ObservationsOf.
var ErrOutcomes = errors.New("bad frame of outcomes")

// Observed is an outcome with the engine process it happened on.
type Observed struct {
	EngineProcess uint64
	accuracy.Observation
}

// OutcomeFrameOf turns outcomes, at most MaxOutcomes, into their wire form.
func OutcomeFrameOf(coordinator uint64, index uint32, list []Observed) *waypostv1.OutcomeFrame {
	f := &waypostv1.OutcomeFrame{Coordinator: &coordinator, Index: &index}
	for i := range list {
		o := &list[i]
		f.Outcomes = append(f.Outcomes, &waypostv1.ObservedOutcome{
			EngineProcess: &o.EngineProcess, ExpectedTokens: tokensOf(o.ExpectedTokens), ActualTokens: tokensOf(o.ActualTokens),
			ReuseMs: msOf(o.ReuseMs), WaitMs: msOf(o.WaitMs), FirstTokenMs: msOf(o.FirstTokenMs), GapMs: msOf(o.GapMs),
		})
	}
	return f
}

func tokensOf(n int) *uint32 {
	if n < 0 {
		return nil
	}
	return proto.Uint32(uint32(min(n, accuracy.MostTokens)))
}

func msOf(v float64) *float64 {
	if math.IsNaN(v) {
		return nil
	}
	return proto.Float64(min(max(v, -accuracy.MostErrorMs), accuracy.MostErrorMs))
}

// ObservationsOf turns the wire form back and checks it: a frame with a field
// beyond its bounds is refused whole.
func ObservationsOf(f *waypostv1.OutcomeFrame) ([]Observed, error) {
	if n := len(f.GetOutcomes()); n > MaxOutcomes {
		return nil, fmt.Errorf("%w: outcomes: %d are more than %d", ErrOutcomes, n, MaxOutcomes)
	}
	out := make([]Observed, 0, len(f.GetOutcomes()))
	for i, m := range f.GetOutcomes() {
		o := Observed{EngineProcess: m.GetEngineProcess(), Observation: accuracy.NewObservation()}
		for _, t := range []struct {
			from *uint32
			to   *int
		}{{m.ExpectedTokens, &o.ExpectedTokens}, {m.ActualTokens, &o.ActualTokens}} {
			if t.from != nil {
				*t.to = int(*t.from)
			}
		}
		for _, t := range []struct{ from, to *float64 }{{m.ReuseMs, &o.ReuseMs}, {m.WaitMs, &o.WaitMs}, {m.FirstTokenMs, &o.FirstTokenMs}, {m.GapMs, &o.GapMs}} {
			if t.from == nil {
				continue
			}
			if *t.to = *t.from; math.IsNaN(*t.from) {
				return nil, fmt.Errorf("%w: outcomes[%d]: NaN is no time", ErrOutcomes, i)
			}
		}
		if err := o.Validate(); err != nil {
			return nil, fmt.Errorf("%w: outcomes[%d]: %w", ErrOutcomes, i, err)
		}
		out = append(out, o)
	}
	return out, nil
}

// AccuracyOf turns what was learnt of a worker into its wire form.
func AccuracyOf(r *accuracy.Report) *waypostv1.WorkerAccuracy {
	return &waypostv1.WorkerAccuracy{Outcomes: &r.Outcomes, FoundRatio: &r.FoundRatio, BiasTokens: proto.Int32(int32(r.BiasTokens)), Errors: TermErrorsOf(r.Errors)}
}

// TermErrorsOf turns the errors per term into their wire form.
func TermErrorsOf(errs []accuracy.TermError) (out []*waypostv1.TermError) {
	for _, e := range errs {
		out = append(out, &waypostv1.TermError{Term: proto.String(e.Term.String()), BiasMs: &e.BiasMs, MeanMs: &e.MeanMs, Outcomes: &e.Outcomes})
	}
	return out
}

// AccuracyReportOf turns the wire form back and checks it. Terms that are not
// known here are left out.
func AccuracyReportOf(m *waypostv1.WorkerAccuracy) (accuracy.Report, error) {
	r := accuracy.Report{Outcomes: m.GetOutcomes(), FoundRatio: m.GetFoundRatio(), BiasTokens: int(m.GetBiasTokens())}
	if n := len(m.GetErrors()); n > MaxOutcomes {
		return accuracy.Report{}, fmt.Errorf("%w: errors: %d are more than %d", accuracy.ErrReport, n, MaxOutcomes)
	}
	for _, e := range m.GetErrors() {
		if t, known := accuracy.TermOf(e.GetTerm()); known {
			r.Errors = append(r.Errors, accuracy.TermError{Term: t, BiasMs: e.GetBiasMs(), MeanMs: e.GetMeanMs(), Outcomes: e.GetOutcomes()})
		}
	}
	return r, r.Validate()
}
