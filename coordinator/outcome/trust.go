package outcome

import (
	"math"
	"slices"
)

// Limits are the constants of what is learnt about a worker.
type Limits struct {
	// HalfLifeMs is the time in which what was learnt counts half: trust
	// returns to its prior with it, 10 min.
	HalfLifeMs float64
	// PriorWeight is how many outcomes the prior of trust counts as, 4.
	PriorWeight float64
	// ResyncErrors wrong predictions within ResyncWithinMs ask for the view
	// anew, 3 within 60 s; the first time at once, then after ResyncEveryMs,
	// doubling up to ResyncMostMs: 30 s, 10 min.
	// More found than expected counts as wrong from ResyncUnderTokens on, 512:
	// one chunk of the prefix keys.
	ResyncErrors, ResyncUnderTokens             int
	ResyncWithinMs, ResyncEveryMs, ResyncMostMs float64
	// BreakerFaults faults of the worker in a row open the breaker, 5; so does
	// the larger half of the last BreakerRing ends, 20, if all are younger
	// than BreakerWithinMs, 60 s.
	BreakerFaults, BreakerRing int
	BreakerWithinMs            float64
	// ProbeEveryMs is the pause before a worker with an open breaker gets one
	// placement to prove itself, 10 s; each failed probe doubles it up to
	// ProbeMostMs, 5 min.
	ProbeEveryMs, ProbeMostMs float64
}

// DefaultLimits are the documented ones.
func DefaultLimits() Limits {
	return Limits{
		HalfLifeMs: 600_000, PriorWeight: 4,
		ResyncErrors: 3, ResyncUnderTokens: 512, ResyncWithinMs: 60_000, ResyncEveryMs: 30_000, ResyncMostMs: 600_000,
		BreakerFaults: 5, BreakerRing: 20, BreakerWithinMs: 60_000, ProbeEveryMs: 10_000, ProbeMostMs: 300_000,
	}
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

// TermError is what was learnt of the predictions of one term. Values are ms;
// a term without outcomes is left out.
type TermError struct {
	Term Term
	// BiasMs is the mean of actual minus predicted, MeanMs that of its size.
	BiasMs, MeanMs float64
	// Weight is the number of outcomes behind it, old ones counting less.
	Weight float64
}

// fading is a sum whose parts count half after each half-life.
type fading struct{ sum, abs, n, atMs float64 }

func (f *fading) fade(nowMs, halfLifeMs float64) {
	if nowMs > f.atMs {
		k := math.Exp2(-(nowMs - f.atMs) / halfLifeMs)
		f.sum, f.abs, f.n = f.sum*k, f.abs*k, f.n*k
		f.atMs = nowMs
	}
}

func (f *fading) add(nowMs, halfLifeMs, v float64) {
	f.fade(nowMs, halfLifeMs)
	f.sum, f.abs, f.n = f.sum+v, f.abs+math.Abs(v), f.n+1
}

// Observation is one outcome beside its prediction. Times are ms, NaN unknown;
// tokens placement.Unknown.
type Observation struct {
	// Class is the outcome's class.
	Class Class
	// ExpectedTokens is the prediction before the learnt bias was applied,
	// ActualTokens what was reused, BlockTokens the block size; 0: unknown.
	ExpectedTokens, ActualTokens, BlockTokens int
	// ReuseMs, WaitMs, FirstTokenMs and GapMs are actual minus predicted.
	ReuseMs, WaitMs, FirstTokenMs, GapMs float64
}

// biasRing is how many differences a bias is learnt from, biasLeast how few,
// biasBlocks the largest bias.
const (
	biasRing   = 16
	biasLeast  = 8
	biasBlocks = 4
)

// Worker is what outcomes taught about one engine life. It is not safe for
// concurrent use.
type Worker struct {
	limits Limits
	terms  [numTerms]fading
	// held sums, per outcome that expected reuse, the share that was found.
	held fading
	// offs are the newest differences actual − expected in tokens.
	offs  []int
	offAt int
	bias  int

	wrongMs     []float64 // when the newest wrong predictions were
	resyncs     uint64
	resyncAtMs  float64 // no earlier
	resyncPause float64

	ends  []end // newest last
	state BreakerState
	// probeAtMs is when the next probe may go, probing since when one is out.
	probeAtMs, probePause, probingSinceMs float64
	openedMs                              float64
}

type end struct {
	atMs  float64
	fault bool
}

// NewWorker knows nothing.
func NewWorker(l Limits) *Worker {
	return &Worker{limits: l, resyncAtMs: math.Inf(-1), resyncPause: l.ResyncEveryMs, probePause: l.ProbeEveryMs}
}

// Observe learns from an outcome.
func (w *Worker) Observe(nowMs float64, o *Observation) {
	for term, v := range [numTerms]float64{o.ReuseMs, o.WaitMs, o.FirstTokenMs, o.GapMs} {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			w.terms[term].add(nowMs, w.limits.HalfLifeMs, v)
		}
	}
	if w.viewWrong(o) {
		w.wrongMs = append(w.wrongMs, nowMs)
		if n := len(w.wrongMs) - w.limits.ResyncErrors; n > 0 {
			w.wrongMs = slices.Delete(w.wrongMs, 0, n)
		}
	}
	if o.ExpectedTokens <= 0 || o.ActualTokens < 0 || o.Class == ClassRestarted {
		return
	}
	w.learnBias(o)
	found := 1.0
	if expected := o.ExpectedTokens + w.bias; o.ActualTokens+o.BlockTokens < expected {
		found = float64(o.ActualTokens) / float64(expected)
	}
	w.held.add(nowMs, w.limits.HalfLifeMs, found)
}

// viewWrong reports whether an outcome speaks against the worker's view. A new
// process is no fault of it, and neither is a little more than expected: what a
// prompt's end and answer added is told with a delay, by design.
func (w *Worker) viewWrong(o *Observation) bool {
	switch o.Class {
	case ClassRestarted:
		return false
	case ClassUnderPredicted:
		return o.ActualTokens-max(o.ExpectedTokens, 0) >= w.limits.ResyncUnderTokens
	}
	return o.Class.Mispredicted()
}

// learnBias takes the difference of an outcome. A difference of up to four
// blocks counts as bias while the middle half of the newest ones lies within
// one block: an engine that always computes the last block again is
// understood, one that is wrong now and then, or finds nothing, is not.
func (w *Worker) learnBias(o *Observation) {
	off := o.ActualTokens - o.ExpectedTokens
	if len(w.offs) < biasRing {
		w.offs = append(w.offs, off)
	} else {
		w.offs[w.offAt] = off
		w.offAt = (w.offAt + 1) % biasRing
	}
	if len(w.offs) < biasLeast {
		return
	}
	sorted := slices.Sorted(slices.Values(w.offs))
	n := len(sorted)
	if sorted[n-1-n/4]-sorted[n/4] > max(o.BlockTokens, 1) {
		w.bias = 0
		return
	}
	w.bias = sorted[n/2]
	if most := biasBlocks * o.BlockTokens; w.bias < -most || w.bias > most {
		w.bias = 0
	}
}

// BiasTokens is the constant difference actual − expected; 0: none learnt.
func (w *Worker) BiasTokens() int { return w.bias }

// Trust is the factor on cache credit: the prior and the share of expected
// tokens that was found, old outcomes counting less. It is in [0, 1].
func (w *Worker) Trust(nowMs, prior float64) float64 {
	w.held.fade(nowMs, w.limits.HalfLifeMs)
	k := w.limits.PriorWeight
	return min(max((w.held.sum+k*prior)/(w.held.n+k), 0), 1)
}

// Outcomes is the weight of the outcomes behind Trust.
func (w *Worker) Outcomes(nowMs float64) float64 {
	w.held.fade(nowMs, w.limits.HalfLifeMs)
	return w.held.n
}

// forgotten is the weight below which an error is not shown any more.
const forgotten = .05

// Errors are the errors per term.
func (w *Worker) Errors(nowMs float64) []TermError {
	var out []TermError
	for t := range w.terms {
		f := &w.terms[t]
		f.fade(nowMs, w.limits.HalfLifeMs)
		if f.n >= forgotten {
			out = append(out, TermError{Term: Term(t), BiasMs: f.sum / f.n, MeanMs: f.abs / f.n, Weight: f.n})
		}
	}
	return out
}

// ResyncDue reports whether the worker's view should be asked for anew because
// its predictions went wrong; the caller then does it. It says so at a bounded
// rate.
func (w *Worker) ResyncDue(nowMs float64) bool {
	l := &w.limits
	if len(w.wrongMs) < l.ResyncErrors || nowMs-w.wrongMs[0] > l.ResyncWithinMs || nowMs < w.resyncAtMs {
		return false
	}
	// A quiet time since the last one takes the pause back.
	if nowMs-w.resyncAtMs > w.resyncPause {
		w.resyncPause = l.ResyncEveryMs
	}
	w.wrongMs = w.wrongMs[:0]
	w.resyncs++
	w.resyncAtMs = nowMs + w.resyncPause
	w.resyncPause = min(2*w.resyncPause, l.ResyncMostMs)
	return true
}

// Resyncs counts the times ResyncDue said so.
func (w *Worker) Resyncs() uint64 { return w.resyncs }

// BreakerState says whether a worker that failed is kept from placements.
type BreakerState uint8

// The states.
const (
	// BreakerClosed: it serves.
	BreakerClosed BreakerState = iota
	// BreakerOpen: it gets nothing until its next probe.
	BreakerOpen
	// BreakerProbing: the next placement on it is its probe.
	BreakerProbing
)

var breakerWords = [...]string{"closed", "open", "probing"}

// String names the state.
func (s BreakerState) String() string { return breakerWords[min(int(s), len(breakerWords)-1)] }

// Ended tells the breaker how a request ended: by the worker's fault, or
// served. What is neither is not told.
func (w *Worker) Ended(nowMs float64, fault bool) {
	l := &w.limits
	w.ends = append(w.ends, end{nowMs, fault})
	if n := len(w.ends) - l.BreakerRing; n > 0 {
		w.ends = slices.Delete(w.ends, 0, n)
	}
	switch {
	case !fault && w.state == BreakerProbing:
		w.state, w.ends, w.probePause = BreakerClosed, w.ends[:0], l.ProbeEveryMs
	case fault && w.state == BreakerProbing:
		w.probePause = min(2*w.probePause, l.ProbeMostMs)
		w.open(nowMs)
	case fault && w.state == BreakerClosed && w.tooMany(nowMs):
		w.openedMs = nowMs
		w.open(nowMs)
	}
}

func (w *Worker) open(nowMs float64) {
	w.state, w.probeAtMs, w.probingSinceMs = BreakerOpen, nowMs+w.probePause, math.NaN()
}

// tooMany reports whether the newest ends open the breaker.
func (w *Worker) tooMany(nowMs float64) bool {
	l := &w.limits
	row, faults := 0, 0
	for i := len(w.ends) - 1; i >= 0; i-- {
		if e := w.ends[i]; nowMs-e.atMs > l.BreakerWithinMs {
			return false
		} else if e.fault {
			faults++
			if row == len(w.ends)-1-i {
				row++
			}
		}
		if row >= l.BreakerFaults {
			return true
		}
	}
	return len(w.ends) == l.BreakerRing && 2*faults > l.BreakerRing
}

// Breaker is the state at a moment. An open breaker whose pause is over lets
// one probe through; a probe that nobody hears of is given up after the pause.
func (w *Worker) Breaker(nowMs float64) BreakerState {
	switch w.state {
	case BreakerOpen:
		if nowMs >= w.probeAtMs {
			w.state, w.probingSinceMs = BreakerProbing, math.NaN()
		}
	case BreakerProbing:
		if nowMs-w.probingSinceMs > w.probePause {
			w.probingSinceMs = math.NaN()
		}
	}
	return w.state
}

// Placeable reports whether a placement may go to the worker now: a worker
// that is probed takes one at a time.
func (w *Worker) Placeable(nowMs float64) bool {
	switch w.Breaker(nowMs) {
	case BreakerOpen:
		return false
	case BreakerProbing:
		return math.IsNaN(w.probingSinceMs)
	}
	return true
}

// TakeProbe asks to place on the worker. It reports false if the worker is
// kept from placements, or probed already; then decide again.
func (w *Worker) TakeProbe(nowMs float64) bool {
	if !w.Placeable(nowMs) {
		return false
	}
	if w.state == BreakerProbing {
		w.probingSinceMs = nowMs
	}
	return true
}

// FailingMs is since when the breaker is not closed; NaN: it is closed.
func (w *Worker) FailingMs(nowMs float64) float64 {
	if w.Breaker(nowMs) == BreakerClosed {
		return math.NaN()
	}
	return nowMs - w.openedMs
}

// NextProbeMs is the time until the next probe; NaN: none is waited for.
func (w *Worker) NextProbeMs(nowMs float64) float64 {
	if w.Breaker(nowMs) != BreakerOpen {
		return math.NaN()
	}
	return w.probeAtMs - nowMs
}
