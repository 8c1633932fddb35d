package outcome

import (
	"math"

	"waypost/coordinator/placement"
)

// Class says how a prediction of reuse compares with what happened.
type Class string

// The classes. Every outcome gets exactly one.
const (
	// ClassCold: nothing was expected and nothing was found.
	ClassCold Class = "cold"
	// ClassAsPredicted: what was found is within one block of the prediction.
	ClassAsPredicted Class = "as_predicted"
	// ClassUnderPredicted: more was found.
	ClassUnderPredicted Class = "under_predicted"
	// ClassEvicted: less was found, because blocks went since the view.
	ClassEvicted Class = "evicted_since_view"
	// ClassViewStale: less was found, because the view was old or incomplete.
	ClassViewStale Class = "view_stale"
	// ClassRestarted: less was found, because the engine is a new process.
	ClassRestarted Class = "restarted"
	// ClassBoundary: the blocks were there and the engine did not use them.
	ClassBoundary Class = "boundary"
	// ClassFalsePositive: the coordinator's summary named what the worker
	// never held.
	ClassFalsePositive Class = "false_positive"
	// ClassNotReported: nobody said what was found.
	ClassNotReported Class = "not_reported"
)

// Classes lists all classes in the order they are shown.
var Classes = [...]Class{
	ClassAsPredicted, ClassCold, ClassUnderPredicted, ClassEvicted, ClassViewStale,
	ClassRestarted, ClassBoundary, ClassFalsePositive, ClassNotReported,
}

// Mispredicted reports whether the outcome differed from the prediction. A
// cold request is a miss, not a misprediction.
func (c Class) Mispredicted() bool {
	switch c {
	case ClassUnderPredicted, ClassEvicted, ClassViewStale, ClassRestarted, ClassBoundary, ClassFalsePositive:
		return true
	}
	return false
}

// Answer is yes, no, or not known; the zero value is not known.
type Answer uint8

// The answers.
const (
	NotKnown Answer = iota
	No
	Yes
)

// AnswerOf turns a known fact into an answer.
func AnswerOf(fact bool) Answer {
	if fact {
		return Yes
	}
	return No
}

// Evidence is what is known of a placement and its outcome. The zero value of
// a field that can be unknown says so; ExpectedTokens and ActualTokens use
// placement.Unknown.
type Evidence struct {
	// ExpectedTokens is the prediction, ActualTokens what the engine says it
	// reused.
	ExpectedTokens, ActualTokens int
	// BlockTokens is the worker's block size; 0: unknown.
	BlockTokens int
	// ProcessChanged: another engine life served the request than was chosen.
	ProcessChanged Answer
	// BoundaryDiffers: prompts and blocks are known to mean other things to
	// the engine than to us: it counted other prompt tokens, its events do not
	// fit its block size, or it names equal content differently.
	BoundaryDiffers Answer
	// EvictedSince: the worker reported blocks of the prefix as removed after
	// the view that was decided on.
	EvictedSince Answer
	// StreamLost: events of the engine or prefix frames of the worker were
	// lost around the decision.
	StreamLost Answer
	// WorkerHeld: the worker's own block table held the prefix when the
	// request was placed.
	WorkerHeld Answer
	// StoredAgain: the engine stored blocks of the prefix once more under the
	// names they were listed by, so that they were gone without a word.
	StoredAgain Answer
	// View is the view that was decided on, ViewAgeMs its age; NaN: unknown.
	View      placement.ViewKind
	ViewAgeMs float64
}

// Conclusive reports whether what is still unknown could not change the class:
// evidence that comes later need not be waited for.
func (e *Evidence) Conclusive() bool {
	if e.ActualTokens < 0 || !e.less() && e.BoundaryDiffers != NotKnown {
		return true
	}
	if e.asExpected() || e.ExpectedTokens <= 0 && e.ActualTokens == 0 {
		return true
	}
	return e.less() && (e.ProcessChanged == Yes ||
		e.ProcessChanged == No && (e.BoundaryDiffers == Yes ||
			e.BoundaryDiffers == No && e.EvictedSince == Yes))
}

// asExpected reports whether what was found is within one block of the
// prediction.
func (e *Evidence) asExpected() bool {
	off := e.ActualTokens - e.ExpectedTokens
	return e.ExpectedTokens > 0 && e.ActualTokens > 0 && off >= -e.BlockTokens && off <= e.BlockTokens
}

// less reports whether less was found than expected.
func (e *Evidence) less() bool { return e.ActualTokens < e.ExpectedTokens }

// staleViewMs is the age from which a view counts as old: prefix frames come
// every second.
const staleViewMs = 5_000

// Classify gives an outcome its class. The first line that applies decides:
//
//	nothing reported                                   not_reported
//	nothing found, nothing (known) expected            cold
//	found within one block of the expected             as_predicted
//	less found: by another engine process              restarted
//	boundary known to differ                           boundary
//	more found, or something where nothing (known)
//	was expected                                       under_predicted
//	less found: removal reported since the view        evicted_since_view
//	            frames or events lost, view incomplete
//	            or older than 5 s                      view_stale
//	            worker's own table had it not          false_positive
//	            engine stored the same blocks anew     evicted_since_view
//	            worker's own table had it, and the
//	            engine stored nothing of it anew       boundary
//	            nothing more known                     evicted_since_view
//
// A known difference of the boundary goes before more and less alike: it is
// the cause of either. The last line takes the everyday cause where the facts
// to tell are missing.
func Classify(e Evidence) Class {
	switch {
	case e.ActualTokens < 0:
		return ClassNotReported
	case e.ExpectedTokens <= 0 && e.ActualTokens == 0:
		return ClassCold
	case e.asExpected():
		return ClassAsPredicted
	case e.less() && e.ProcessChanged == Yes:
		return ClassRestarted
	case e.BoundaryDiffers == Yes:
		return ClassBoundary
	case !e.less():
		return ClassUnderPredicted
	case e.EvictedSince == Yes:
		return ClassEvicted
	case e.StreamLost == Yes, incomplete(e.View), !math.IsNaN(e.ViewAgeMs) && e.ViewAgeMs > staleViewMs:
		return ClassViewStale
	case e.WorkerHeld == No:
		return ClassFalsePositive
	case e.StoredAgain == Yes:
		return ClassEvicted
	case e.WorkerHeld == Yes && e.StoredAgain == No:
		return ClassBoundary
	}
	return ClassEvicted
}

// incomplete reports whether a view of this kind may miss removals.
func incomplete(k placement.ViewKind) bool { return k != placement.ViewLive }
