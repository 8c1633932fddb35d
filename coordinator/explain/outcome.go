package explain

import (
	"errors"
	"fmt"
	"math"

	"waypost/coordinator/placement"
)

// ErrOutcome is wrapped by errors about a field of an outcome.
var ErrOutcome = errors.New("bad outcome")

// Outcome is what a caller reports of a placement. Times are ms and NaN if
// unknown, counts placement.Unknown.
type Outcome struct {
	// Result is done, failed or cancelled.
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

// The results and error classes of outcomes.
const (
	ResultDone      = "done"
	ResultFailed    = "failed"
	ResultCancelled = "cancelled"

	ErrorWorker   = "worker"
	ErrorClient   = "client"
	ErrorOverload = "overload"
	ErrorTimeout  = "timeout"
)

// NewOutcome is an outcome of which only the result is known.
func NewOutcome(result string) Outcome {
	return Outcome{
		Result: result, FirstTokenMs: math.NaN(), DurationMs: math.NaN(),
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
