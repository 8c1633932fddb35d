package outcome

import (
	"errors"
	"fmt"
	"math"

	"waypost/coordinator/placement"
)

// ErrOutcome is wrapped by errors about a field of an outcome.
var ErrOutcome = errors.New("bad outcome")

// Outcome is what is told of a placement. Times are ms and NaN if
// unknown, counts placement.Unknown.
type Outcome struct {
	// Source says who tells it.
	Source Source
	// Result is done, failed or cancelled; of SourceAgent it is ended.
	Result string
	// HTTPStatus is what the engine answered with, 100 to 599; 0: unknown.
	HTTPStatus int
	// FirstTokenMs is the time from sending to the first token, DurationMs to
	// the end.
	FirstTokenMs, DurationMs float64
	// CachedTokens is what the engine says it reused, PromptTokens and
	// OutputTokens what it counted.
	CachedTokens, PromptTokens, OutputTokens int
	// ErrorClass is, of a failure, worker, client, overload or timeout.
	ErrorClass string
}

// Source is who tells an outcome; the higher one is believed.
type Source uint8

// The sources, in rank.
const (
	// SourceAgent: the worker's agent concluded it from what the engine stored.
	SourceAgent Source = iota
	// SourceCaller: the caller reported it.
	SourceCaller
	// SourceFrontDoor: a front door of ours read it in the engine's answer.
	SourceFrontDoor
)

var sourceWords = [...]string{"agent", "caller", "front_door"}

// String is its name in the API.
func (s Source) String() string { return sourceWords[min(int(s), len(sourceWords)-1)] }

// The results and error classes of outcomes.
const (
	ResultDone      = "done"
	ResultFailed    = "failed"
	ResultCancelled = "cancelled"
	// ResultEnded: it ended, and nobody said how.
	ResultEnded = "ended"

	ErrorWorker   = "worker"
	ErrorClient   = "client"
	ErrorOverload = "overload"
	ErrorTimeout  = "timeout"
)

// WorkerFault reports whether the worker is to blame: an overload, the client's
// own mistake and a client that left are not its fault.
func (o *Outcome) WorkerFault() bool {
	if o.Result != ResultFailed {
		return false
	}
	switch o.ErrorClass {
	case ErrorWorker, ErrorTimeout:
		return true
	case "":
		return o.HTTPStatus == 0 || o.HTTPStatus >= 500 && o.HTTPStatus != 503
	}
	return false
}

// NewOutcome is a caller's outcome of which only the result is known.
func NewOutcome(result string) Outcome {
	return Outcome{
		Source: SourceCaller, Result: result, FirstTokenMs: math.NaN(), DurationMs: math.NaN(),
		CachedTokens: placement.Unknown, PromptTokens: placement.Unknown, OutputTokens: placement.Unknown,
	}
}

const maxOutcomeMs = 1e9

// Validate names the first field that is out of range.
func (o *Outcome) Validate() error {
	bad := func(field, format string, args ...any) error {
		return fmt.Errorf("%w: %s: %s", ErrOutcome, field, fmt.Sprintf(format, args...))
	}
	switch o.Result {
	case ResultDone, ResultFailed, ResultCancelled:
	case ResultEnded:
		if o.Source != SourceAgent {
			return bad("result", "ended is what an agent concludes; report done, failed or cancelled")
		}
	default:
		return bad("result", "%q is not done, failed or cancelled", o.Result)
	}
	switch o.ErrorClass {
	case "", ErrorWorker, ErrorClient, ErrorOverload, ErrorTimeout:
	default:
		return bad("errorClass", "%q is not worker, client, overload or timeout", o.ErrorClass)
	}
	if o.HTTPStatus != 0 && (o.HTTPStatus < 100 || o.HTTPStatus > 599) {
		return bad("httpStatus", "%d is not in 100 to 599", o.HTTPStatus)
	}
	for _, f := range [...]struct {
		name string
		ms   float64
	}{{"firstTokenMs", o.FirstTokenMs}, {"durationMs", o.DurationMs}} {
		if !math.IsNaN(f.ms) && !(f.ms >= 0 && f.ms <= maxOutcomeMs) {
			return bad(f.name, "%v is not in 0 to %g", f.ms, float64(maxOutcomeMs))
		}
	}
	for _, f := range [...]struct {
		name   string
		tokens int
	}{{"cachedTokens", o.CachedTokens}, {"promptTokens", o.PromptTokens}, {"outputTokens", o.OutputTokens}} {
		if f.tokens < placement.Unknown || f.tokens > math.MaxInt32 {
			return bad(f.name, "%d is not in 0 to %d", f.tokens, math.MaxInt32)
		}
	}
	if o.PromptTokens != placement.Unknown && o.CachedTokens > o.PromptTokens {
		return bad("cachedTokens", "%d are more than the %d prompt tokens", o.CachedTokens, o.PromptTokens)
	}
	return nil
}
