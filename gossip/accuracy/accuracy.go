package accuracy

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
)

// Unknown is a count of tokens that is not known.
const Unknown = -1

// Limits are the constants of what is learnt about a worker.
type Limits struct {
	// HalfLifeMs is the time in which what was learnt counts half: trust
	// returns to its prior with it, 10 min.
	HalfLifeMs float64
	// PriorWeight is how many outcomes the prior of trust counts as, 4.
	PriorWeight float64
	// MostWeight bounds the outcomes that one coordinator's word counts as, 64:
	// one that is wrong, or says too much, weighs no more than another that
	// says much.
	MostWeight float64
	// MostCoordinators bounds the coordinators that are remembered, 16; the one
	// that weighs least makes room.
	MostCoordinators int
}

// DefaultLimits are the documented ones.
func DefaultLimits() Limits {
	return Limits{HalfLifeMs: 600_000, PriorWeight: 4, MostWeight: 64, MostCoordinators: 16}
}

// Term names what a prediction is made of.
type Term uint8

// The terms whose error is learnt.
const (
	// TermReuse is the prefill of the tokens that were expected to be reused
	// and were not; negative if more were.
	TermReuse Term = iota
	// TermWait is what is left of the first token's time after reuse: the
	// queue and the worker's speed.
	TermWait
	// TermFirstToken is the whole time to the first token.
	TermFirstToken
	// TermGap is the time between tokens.
	TermGap
	numTerms
)

var termWords = [numTerms]string{"reuse", "wait", "first token", "gap"}

// String names the term.
func (t Term) String() string { return termWords[min(t, numTerms-1)] }

// TermOf is the term of a name.
func TermOf(word string) (Term, bool) {
	i := slices.Index(termWords[:], word)
	return Term(max(i, 0)), i >= 0
}

// TermError is what was learnt of the predictions of one term. Values are ms;
// a term without outcomes is left out.
type TermError struct {
	Term Term
	// BiasMs is the mean of actual minus predicted, MeanMs that of its size.
	BiasMs, MeanMs float64
	// Outcomes is the number of outcomes behind it, old ones counting less.
	Outcomes float64
}

// Observation is one outcome beside its prediction. Times are ms, NaN unknown.
type Observation struct {
	// ExpectedTokens is the reuse that was predicted before the learnt bias was
	// applied, ActualTokens what was reused; Unknown: nothing is to be learnt
	// from them. BlockTokens is the engine's block size; 0: unknown.
	ExpectedTokens, ActualTokens, BlockTokens int
	// ReuseMs, WaitMs, FirstTokenMs and GapMs are actual minus predicted.
	ReuseMs, WaitMs, FirstTokenMs, GapMs float64
}

// NewObservation knows nothing.
func NewObservation() Observation {
	nan := math.NaN()
	return Observation{ExpectedTokens: Unknown, ActualTokens: Unknown, ReuseMs: nan, WaitMs: nan, FirstTokenMs: nan, GapMs: nan}
}

func (o *Observation) terms() [numTerms]float64 {
	return [numTerms]float64{o.ReuseMs, o.WaitMs, o.FirstTokenMs, o.GapMs}
}

// Bounds of what is taken in: an hour, and more tokens than any context has.
const (
	MostErrorMs = 3_600_000
	MostTokens  = 1 << 24
)

// ErrObservation is wrapped by every error of Observation.Validate, ErrReport
// by every error of Report.Validate.
var (
	ErrObservation = errors.New("bad outcome")
	ErrReport      = errors.New("bad accuracy")
)

// Validate names the first field that is beyond its bounds.
func (o *Observation) Validate() error {
	for _, f := range [...]struct {
		name  string
		value int
	}{{"expectedTokens", o.ExpectedTokens}, {"actualTokens", o.ActualTokens}, {"blockTokens", o.BlockTokens}} {
		if f.value < Unknown || f.value > MostTokens {
			return fmt.Errorf("%w: %s: %d is not in %d to %d", ErrObservation, f.name, f.value, Unknown, MostTokens)
		}
	}
	for t, v := range o.terms() {
		if !math.IsNaN(v) && !(math.Abs(v) <= MostErrorMs) {
			return fmt.Errorf("%w: error of %s: %v ms is not within ±%d", ErrObservation, Term(t), v, MostErrorMs)
		}
	}
	return nil
}

// fading is a sum whose parts count half after each half-life.
type fading struct {
	Sum, Abs, N float64
	AtMs        float64 `json:"-"`
}

func (f *fading) fade(nowMs, halfLifeMs float64) {
	if nowMs > f.AtMs {
		k := math.Exp2(-(nowMs - f.AtMs) / halfLifeMs)
		f.Sum, f.Abs, f.N = f.Sum*k, f.Abs*k, f.N*k
		f.AtMs = nowMs
	}
}

func (f *fading) add(nowMs float64, l *Limits, v float64) {
	f.fade(nowMs, l.HalfLifeMs)
	f.Sum, f.Abs, f.N = f.Sum+v, f.Abs+math.Abs(v), f.N+1
	if f.N > l.MostWeight {
		k := l.MostWeight / f.N
		f.Sum, f.Abs, f.N = f.Sum*k, f.Abs*k, l.MostWeight
	}
}

// ring is how many differences of one coordinator a bias is learnt from,
// biasLeast how few of all, biasBlocks the largest bias.
const (
	biasRing   = 16
	biasLeast  = 8
	biasBlocks = 4
)

// tally is what one coordinator saw.
type tally struct {
	Terms [numTerms]fading
	// Held sums, per outcome that expected reuse, the share that was found.
	Held fading
	// Offs are the newest differences actual − expected in tokens, OffAt the
	// oldest of them.
	Offs  []int
	OffAt int
}

func (t *tally) weight() float64 {
	n := t.Held.N
	for i := range t.Terms {
		n += t.Terms[i].N
	}
	return n
}

// Worker folds what coordinators saw of one engine life. It is not safe for
// concurrent use.
type Worker struct {
	limits Limits
	by     map[uint64]*tally
	bias   int
	// version grows with every observation.
	version uint64
}

// New knows nothing.
func New(l Limits) *Worker { return &Worker{limits: l, by: map[uint64]*tally{}} }

// Version changes with what was observed.
func (w *Worker) Version() uint64 { return w.version }

// Observe takes an outcome that a coordinator saw; check it with Validate
// before.
func (w *Worker) Observe(nowMs float64, coordinator uint64, o *Observation) {
	w.version++
	t := w.of(nowMs, coordinator)
	for term, v := range o.terms() {
		if !math.IsNaN(v) {
			t.Terms[term].add(nowMs, &w.limits, v)
		}
	}
	if o.ExpectedTokens <= 0 || o.ActualTokens < 0 {
		return
	}
	w.learnBias(t, o)
	found := 1.0
	if expected := o.ExpectedTokens + w.bias; o.ActualTokens+o.BlockTokens < expected {
		found = float64(o.ActualTokens) / float64(expected)
	}
	t.Held.add(nowMs, &w.limits, found)
}

// of is the tally of a coordinator; a new one takes the room of the one that
// weighs least.
func (w *Worker) of(nowMs float64, coordinator uint64) *tally {
	t := w.by[coordinator]
	if t != nil {
		return t
	}
	if len(w.by) >= w.limits.MostCoordinators {
		w.fade(nowMs)
		least := uint64(0)
		for c, other := range w.by {
			if l := w.by[least]; l == nil || other.weight() < l.weight() || other.weight() == l.weight() && c < least {
				least = c
			}
		}
		delete(w.by, least)
	}
	t = &tally{}
	w.by[coordinator] = t
	return t
}

func (w *Worker) fade(nowMs float64) {
	for _, t := range w.by {
		t.Held.fade(nowMs, w.limits.HalfLifeMs)
		for i := range t.Terms {
			t.Terms[i].fade(nowMs, w.limits.HalfLifeMs)
		}
	}
}

// learnBias takes the difference of an outcome. A difference of up to four
// blocks counts as bias while the middle half of the newest ones lies within
// one block: an engine that always computes the last block again is
// understood, one that is wrong now and then, or finds nothing, is not.
func (w *Worker) learnBias(t *tally, o *Observation) {
	off := o.ActualTokens - o.ExpectedTokens
	if len(t.Offs) < biasRing {
		t.Offs = append(t.Offs, off)
	} else {
		t.Offs[t.OffAt] = off
		t.OffAt = (t.OffAt + 1) % biasRing
	}
	var all []int
	for _, t := range w.by {
		all = append(all, t.Offs...)
	}
	n := len(all)
	if n < biasLeast {
		return
	}
	slices.Sort(all)
	if all[n-1-n/4]-all[n/4] > max(o.BlockTokens, 1) {
		w.bias = 0
		return
	}
	w.bias = all[n/2]
	if most := biasBlocks * o.BlockTokens; w.bias < -most || w.bias > most {
		w.bias = 0
	}
}

// Report is what the agent tells of a worker. The zero value knows nothing.
type Report struct {
	// Outcomes is the number of outcomes that expected reuse, old ones counting
	// less; FoundRatio the mean share of it that was found, 0 to 1.
	Outcomes, FoundRatio float64
	// BiasTokens is the constant difference actual − expected; 0: none learnt.
	BiasTokens int
	// Errors are the errors per term.
	Errors []TermError
}

// forgotten is the weight below which nothing is told any more.
const forgotten = .05

// Report sums up what all coordinators saw.
func (w *Worker) Report(nowMs float64) Report {
	w.fade(nowMs)
	out := Report{BiasTokens: w.bias}
	var held fading
	var terms [numTerms]fading
	for _, c := range w.coordinators() {
		t := w.by[c]
		held.Sum, held.N = held.Sum+t.Held.Sum, held.N+t.Held.N
		for i := range t.Terms {
			terms[i].Sum, terms[i].Abs, terms[i].N = terms[i].Sum+t.Terms[i].Sum, terms[i].Abs+t.Terms[i].Abs, terms[i].N+t.Terms[i].N
		}
	}
	if held.N >= forgotten {
		out.Outcomes, out.FoundRatio = held.N, min(max(held.Sum/held.N, 0), 1)
	}
	for i, f := range terms {
		if f.N >= forgotten {
			out.Errors = append(out.Errors, TermError{Term: Term(i), BiasMs: f.Sum / f.N, MeanMs: f.Abs / f.N, Outcomes: f.N})
		}
	}
	return out
}

// coordinators are in the order of their marks, so that sums do not depend on
// the order of a map.
func (w *Worker) coordinators() []uint64 {
	out := make([]uint64, 0, len(w.by))
	for c := range w.by {
		out = append(out, c)
	}
	slices.Sort(out)
	return out
}

// Empty reports whether a report says nothing.
func (r *Report) Empty() bool { return r.Outcomes == 0 && r.BiasTokens == 0 && len(r.Errors) == 0 }

// Trust is the factor on cache credit: the prior and the share of expected
// tokens that was found, which counts less with the age of the report. It is in
// [0, 1].
func (r *Report) Trust(l *Limits, ageMs, prior float64) float64 {
	n := r.OutcomesAfter(l, ageMs)
	return min(max((n*r.FoundRatio+l.PriorWeight*prior)/(n+l.PriorWeight), 0), 1)
}

// OutcomesAfter is how much Outcomes count when the report is of an age.
func (r *Report) OutcomesAfter(l *Limits, ageMs float64) float64 {
	return r.Outcomes * math.Exp2(-max(ageMs, 0)/l.HalfLifeMs)
}

// maxOutcomes bounds a report's weights, far above what any agent folds.
const maxOutcomes = 1e6

// Validate names the first field that is beyond its bounds.
func (r *Report) Validate() error {
	for _, f := range [...]struct {
		name        string
		value, high float64
	}{{"outcomes", r.Outcomes, maxOutcomes}, {"foundRatio", r.FoundRatio, 1}} {
		if !(f.value >= 0 && f.value <= f.high) {
			return fmt.Errorf("%w: %s: %v is not in 0 to %g", ErrReport, f.name, f.value, f.high)
		}
	}
	if r.BiasTokens < -MostTokens || r.BiasTokens > MostTokens {
		return fmt.Errorf("%w: biasTokens: %d is not within ±%d", ErrReport, r.BiasTokens, MostTokens)
	}
	if len(r.Errors) > int(numTerms) {
		return fmt.Errorf("%w: errors: %d are more than there are terms", ErrReport, len(r.Errors))
	}
	for i := range r.Errors {
		e := &r.Errors[i]
		if !(math.Abs(e.BiasMs) <= MostErrorMs) || !(e.MeanMs >= 0 && e.MeanMs <= MostErrorMs) || !(e.Outcomes > 0 && e.Outcomes <= maxOutcomes) {
			return fmt.Errorf("%w: errors[%d]: %+v is beyond an hour or has no outcomes", ErrReport, i, *e)
		}
	}
	return nil
}

// State is what is kept of a worker over a restart of its agent.
type State struct {
	// BiasTokens is the learnt bias.
	BiasTokens int `json:"biasTokens"`
	// Coordinators are what each saw, by its mark in 16 hex digits.
	Coordinators map[string]tally `json:"coordinators"`
}

// Export is what was learnt at a moment. The time until Import does not count.
func (w *Worker) Export(nowMs float64) State {
	w.fade(nowMs)
	out := State{BiasTokens: w.bias, Coordinators: map[string]tally{}}
	for c, t := range w.by {
		if t.weight() >= forgotten {
			kept := *t
			kept.Offs = slices.Clone(t.Offs)
			out.Coordinators[fmt.Sprintf("%016x", c)] = kept
		}
	}
	return out
}

// Import starts from what was learnt before; an error changes nothing.
func (w *Worker) Import(nowMs float64, s State) error {
	if len(s.Coordinators) > w.limits.MostCoordinators {
		return fmt.Errorf("%w: %d coordinators are more than %d", ErrReport, len(s.Coordinators), w.limits.MostCoordinators)
	}
	if s.BiasTokens < -MostTokens || s.BiasTokens > MostTokens {
		return fmt.Errorf("%w: biasTokens: %d is not within ±%d", ErrReport, s.BiasTokens, MostTokens)
	}
	by := map[uint64]*tally{}
	for mark, t := range s.Coordinators {
		c, err := strconv.ParseUint(mark, 16, 64)
		if err != nil {
			return fmt.Errorf("%w: %q is not a mark of 16 hex digits", ErrReport, mark)
		}
		if err := t.validate(w.limits.MostWeight); err != nil {
			return fmt.Errorf("%w: coordinators[%q]: %w", ErrReport, mark, err)
		}
		kept := t
		kept.Offs, kept.Held.AtMs = slices.Clone(t.Offs), nowMs
		for i := range kept.Terms {
			kept.Terms[i].AtMs = nowMs
		}
		by[c] = &kept
	}
	w.by, w.bias = by, s.BiasTokens
	w.version++
	return nil
}

// validate refuses sums beyond what outcomes can add up to.
func (t *tally) validate(mostWeight float64) error {
	for i, f := range append([]fading{t.Held}, t.Terms[:]...) {
		most := float64(MostErrorMs)
		if i == 0 {
			most = 1
		}
		const rounding = 1 + 1e-9
		if !(f.N >= 0 && f.N <= mostWeight) || !(f.Abs >= 0 && f.Abs <= most*f.N*rounding) || !(math.Abs(f.Sum) <= f.Abs*rounding) {
			return fmt.Errorf("%+v: beyond what outcomes can add up to", f)
		}
	}
	if len(t.Offs) > biasRing || t.OffAt < 0 || t.OffAt >= biasRing {
		return fmt.Errorf("%d differences, the oldest at %d; at most %d are kept", len(t.Offs), t.OffAt, biasRing)
	}
	return nil
}
