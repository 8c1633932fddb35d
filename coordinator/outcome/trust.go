package outcome

import (
	"math"
	"slices"
)

// Limits are the constants of what a coordinator does about a worker that
// predictions or requests fail on.
type Limits struct {
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
		ResyncErrors: 3, ResyncUnderTokens: 512, ResyncWithinMs: 60_000, ResyncEveryMs: 30_000, ResyncMostMs: 600_000,
		BreakerFaults: 5, BreakerRing: 20, BreakerWithinMs: 60_000, ProbeEveryMs: 10_000, ProbeMostMs: 300_000,
	}
}

// Worker is what outcomes say against one engine life: whether its view should
// be read anew, and whether it fails what it is given. It is not safe for
// concurrent use.
type Worker struct {
	limits Limits

	wrong       []wrong // the newest wrong predictions
	resyncs     uint64
	disagreedMs float64 // when the newest resync was due
	// resyncs of a view that promised too much, and of one that lacks something: the
	// latter may do nothing where events are told but once.
	overs, lacks resyncPace

	ends  []end // newest last
	state BreakerState
	// probeAtMs is when the next probe may go, probing since when one is out.
	probeAtMs, probePause, probingSinceMs float64
	openedMs                              float64
}

// wrong is a wrong prediction: too much was expected or, lacking, too little.
type wrong struct {
	atMs    float64
	lacking bool
}

// resyncPace is when the next resync may be asked for.
type resyncPace struct {
	atMs    float64 // no earlier
	pauseMs float64
}

type end struct {
	atMs  float64
	fault bool
}

// NewWorker knows nothing.
func NewWorker(l Limits) *Worker {
	pace := resyncPace{math.Inf(-1), l.ResyncEveryMs}
	return &Worker{limits: l, overs: pace, lacks: pace, probePause: l.ProbeEveryMs}
}

// Observe learns from the class of an outcome and from its reuse, expected
// before the learnt bias was applied.
func (w *Worker) Observe(nowMs float64, class Class, expectedTokens, actualTokens int) {
	if w.viewWrong(class, expectedTokens, actualTokens) {
		w.wrong = append(w.wrong, wrong{nowMs, class == ClassUnderPredicted})
		if n := len(w.wrong) - w.limits.ResyncErrors; n > 0 {
			w.wrong = slices.Delete(w.wrong, 0, n)
		}
	}
}

// viewWrong reports whether an outcome speaks against the worker's view. A new
// process is no fault of it, and neither is a little more than expected: what a
// prompt's end and answer added is told with a delay, by design.
func (w *Worker) viewWrong(class Class, expectedTokens, actualTokens int) bool {
	switch class {
	case ClassRestarted:
		return false
	case ClassUnderPredicted:
		return actualTokens-max(expectedTokens, 0) >= w.limits.ResyncUnderTokens
	}
	return class.Mispredicted()
}

// ResyncDue reports whether the worker's view should be asked for anew because
// its predictions went wrong; the caller then does it. It says so at a bounded
// rate. lacking says that all of them expected too little: what the view has is
// right as far as anybody knows.
func (w *Worker) ResyncDue(nowMs float64) (due, lacking bool) {
	l := &w.limits
	lacking = !slices.ContainsFunc(w.wrong, func(o wrong) bool { return !o.lacking })
	pace := &w.overs
	if lacking {
		pace = &w.lacks
	}
	if len(w.wrong) < l.ResyncErrors || nowMs-w.wrong[0].atMs > l.ResyncWithinMs || nowMs < pace.atMs {
		return false, false
	}
	// A quiet time since the last one takes the pause back.
	if nowMs-pace.atMs > pace.pauseMs {
		pace.pauseMs = l.ResyncEveryMs
	}
	w.wrong = w.wrong[:0]
	w.resyncs++
	w.disagreedMs = nowMs
	pace.atMs = nowMs + pace.pauseMs
	pace.pauseMs = min(2*pace.pauseMs, l.ResyncMostMs)
	return true, lacking
}

// Disagrees reports whether view and engine are at odds: the view was asked for
// anew because predictions went wrong, within the longest pause between two such
// requests.
func (w *Worker) Disagrees(nowMs float64) bool {
	return w.resyncs > 0 && nowMs-w.disagreedMs <= w.limits.ResyncMostMs
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
