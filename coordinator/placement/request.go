package placement

import (
	"errors"
	"fmt"
	"math"

	"waypost/gossip/accuracy"
)

// ErrRequest is wrapped by every error about a field of a request.
var ErrRequest = errors.New("bad request")

// ErrPolicy is wrapped by every error about a field of a policy.
var ErrPolicy = errors.New("bad policy")

// FieldError names a field and what is wrong with it. It wraps ErrRequest or
// ErrPolicy.
type FieldError struct {
	// Field is the field's name in the API or the fleet file.
	Field string
	// Detail says what is wrong and what is allowed.
	Detail string
	kind   error
}

// Error is "kind: field: detail".
func (e *FieldError) Error() string { return fmt.Sprintf("%v: %s: %s", e.kind, e.Field, e.Detail) }

// Unwrap is the kind of the error.
func (e *FieldError) Unwrap() error { return e.kind }

// IfInfeasible says what to answer when no worker meets the budgets.
type IfInfeasible string

// The answers to an impossible budget; empty takes the policy's.
const (
	BestEffort IfInfeasible = "best-effort"
	Reject     IfInfeasible = "reject"
	RetryAfter IfInfeasible = "retry-after"
)

func (i IfInfeasible) valid() bool {
	return i == "" || i == BestEffort || i == Reject || i == RetryAfter
}

// Limits of a request.
const (
	// MaxPromptTokens is the longest prompt.
	MaxPromptTokens = 1 << 24
	// MaxOutputTokens is the largest limit of an answer.
	MaxOutputTokens = math.MaxInt32
	maxBudgetMs     = 1e9
	maxExclude      = 1024
	maxIDBytes      = 256
)

// Request is one request to place. Budgets are ms that remain; 0 is none.
type Request struct {
	// ID is the caller's id, at most 256 bytes.
	ID string
	// Tenant and Pool are names, for texts and records.
	Tenant, Pool string
	// CallerZone is where the caller stands; empty: unknown. Distances and
	// Outside already follow from it.
	CallerZone string
	// TenantBarred says why the tenant may not use the pool; empty: it may.
	TenantBarred string
	// TenantOver says that the tenant had more than its share: without headroom
	// in the pool that refuses the request, else it marks it. TenantFull says
	// that the tenant's bound of tokens under way is reached, which refuses it
	// in any case. Both are empty if it is not so.
	TenantOver, TenantFull string
	// Adapter must be loaded on the worker; empty: the base model.
	Adapter string
	// PromptTokens is the prompt's length, 1 to MaxPromptTokens.
	PromptTokens int
	// LengthEstimated says that PromptTokens is an estimate.
	LengthEstimated bool
	// OutputTokensMax is the limit of the answer; 0: none.
	OutputTokensMax int
	// OutputTokensExpected is the expected answer; 0: the learnt mean.
	OutputTokensExpected float64
	// GeneratedTokens were already answered by a former attempt; they are
	// computed again behind the prompt.
	GeneratedTokens int
	// DeadlineMs is left for the whole answer, FirstTokenBudgetMs for its
	// first token, GapBudgetMs is the largest mean gap.
	DeadlineMs, FirstTokenBudgetMs, GapBudgetMs float64
	// MaxTransferMs bounds the time that what is asked of a source may take, behind
	// the worker's own tokens; a spare source's all. 0: nothing does.
	MaxTransferMs float64
	// IfInfeasible says what to answer when no worker meets the budgets.
	IfInfeasible IfInfeasible
	// ExcludeWorkers are names that must not be chosen.
	ExcludeWorkers []string
	// ExcludeProcesses are engine lives that must not be chosen: those of
	// superseded attempts.
	ExcludeProcesses []uint64
	// SharedKey is the deepest prefix key of the prompt that any worker
	// holds; 0: none. It breaks ties.
	SharedKey uint64
}

// Validate reports the first field that is out of range, by its API name.
func (r *Request) Validate() error {
	bad := func(field, format string, args ...any) error {
		return &FieldError{Field: field, Detail: fmt.Sprintf(format, args...), kind: ErrRequest}
	}
	if len(r.ID) > maxIDBytes {
		return bad("requestId", "%d bytes are more than %d", len(r.ID), maxIDBytes)
	}
	if r.PromptTokens < 1 || r.PromptTokens > MaxPromptTokens {
		return bad("input", "%d prompt tokens are not 1 to %d", r.PromptTokens, MaxPromptTokens)
	}
	if r.OutputTokensMax < 0 || r.OutputTokensMax > MaxOutputTokens {
		return bad("outputTokensMax", "%d is not in 1 to %d; leave it out for no limit", r.OutputTokensMax, MaxOutputTokens)
	}
	if !(r.OutputTokensExpected >= 0 && r.OutputTokensExpected <= MaxOutputTokens) {
		return bad("outputTokensExpected", "%v is not in 1 to %d; leave it out for the learnt mean", r.OutputTokensExpected, MaxOutputTokens)
	}
	if r.GeneratedTokens < 0 || r.GeneratedTokens > MaxPromptTokens {
		return bad("generatedTokens", "%d is not in 0 to %d", r.GeneratedTokens, MaxPromptTokens)
	}
	for _, budget := range [...]struct {
		field string
		ms    float64
	}{
		{"deadlineMs", r.DeadlineMs},
		{"firstTokenBudgetMs", r.FirstTokenBudgetMs},
		{"gapBudgetMs", r.GapBudgetMs},
		{"maxTransferMs", r.MaxTransferMs},
	} {
		if !(budget.ms >= 0 && budget.ms <= maxBudgetMs) {
			return bad(budget.field, "%v is not above 0 and at most %g; leave it out for none", budget.ms, float64(maxBudgetMs))
		}
	}
	if !r.IfInfeasible.valid() {
		return bad("ifInfeasible", "%q is not one of %s, %s, %s", r.IfInfeasible, BestEffort, Reject, RetryAfter)
	}
	if len(r.ExcludeWorkers) > maxExclude {
		return bad("exclude", "%d names are more than %d", len(r.ExcludeWorkers), maxExclude)
	}
	return nil
}

// hasBudget reports whether any budget is set.
func (r *Request) hasBudget() bool {
	return r.DeadlineMs > 0 || r.FirstTokenBudgetMs > 0 || r.GapBudgetMs > 0
}

// Policy holds the preferences and constants of the rule. DefaultPolicy sets
// them; the zero value is not valid.
type Policy struct {
	// Theta is θ: 1 ms of token gap is worth so many ms of first-token time.
	Theta float64
	// QueueWeight and RoomWeight scale their terms.
	QueueWeight, RoomWeight float64
	// OwnLimitRatio and OwnLimitMs bound altruism: only workers with
	// own ≤ best own · (1 + ratio) + ms compete.
	OwnLimitRatio, OwnLimitMs float64
	// TieMs: totals this close to the best are equal, less than what is known of
	// any of them. Without it, views that differ in age by a little drew requests
	// to the same few workers: at light load that cost .2 % of the first-token time
	// in the simulator. 1 ms cost a flash crowd more than that.
	TieMs float64
	// FreshMs is the age of a load report up to which there is no doubt.
	FreshMs float64
	// DoubtPerMs is the doubt per ms of age beyond FreshMs, up to
	// MaxAgeDoubtMs: the share of the time in which work that nobody told of
	// may have reached a silent worker.
	DoubtPerMs, MaxAgeDoubtMs float64
	// ErrorWeight times the worker's mean prediction error is doubt.
	ErrorWeight float64
	// UnknownEvictionAgeMs stands for an eviction age that is not known.
	UnknownEvictionAgeMs float64
	// InferredTrust, PartialTrust and StaleTrust are the priors of views that
	// are not verified by events.
	InferredTrust, PartialTrust, StaleTrust float64
	// HeadroomMs is the wait at the chosen worker up to which the pool has
	// headroom.
	HeadroomMs float64
	// AwayBoundMs is how long a worker stays placeable after its lane was
	// lost, SilentMs how long while the lane is up.
	AwayBoundMs, SilentMs float64
	// StaleQueueMs and StalePolicyMs are the ages from which a decision is
	// marked.
	StaleQueueMs, StalePolicyMs float64
	// TransferSetupMs is what any pull costs before its first byte.
	TransferSetupMs float64
	// PriorOutputTokens is the mean answer before any was learnt.
	PriorOutputTokens float64
	// IfInfeasible is the answer to impossible budgets where the request
	// does not say.
	IfInfeasible IfInfeasible
}

// The objectives: named values of θ.
const (
	ObjectiveFirstToken = "first-token"
	ObjectiveBalanced   = "balanced"
	ObjectiveThroughput = "throughput"
)

// ThetaOf is the θ of a named objective.
func ThetaOf(objective string) (theta float64, err error) {
	switch objective {
	case ObjectiveFirstToken:
		return 1, nil
	case ObjectiveBalanced:
		return 5, nil
	case ObjectiveThroughput:
		return 20, nil
	}
	return 0, &FieldError{
		Field:  "policy.objective",
		Detail: fmt.Sprintf("%q is not one of %s, %s, %s", objective, ObjectiveFirstToken, ObjectiveBalanced, ObjectiveThroughput),
		kind:   ErrPolicy,
	}
}

// DefaultPolicy is the balanced objective with the measured constants. Halving
// or doubling any of them moves the mean first-token time by about a percent.
func DefaultPolicy() Policy {
	return Policy{
		Theta: 5, QueueWeight: 1, RoomWeight: 1,
		OwnLimitRatio: .5, OwnLimitMs: 200, TieMs: .5,
		FreshMs: 300, DoubtPerMs: .05, MaxAgeDoubtMs: 5_000,
		ErrorWeight:          .25,
		UnknownEvictionAgeMs: 120_000,
		InferredTrust:        accuracy.PriorInferred, PartialTrust: accuracy.PriorPartial, StaleTrust: .5,
		HeadroomMs:  2_000,
		AwayBoundMs: 60_000, SilentMs: 30_000,
		StaleQueueMs: 2_000, StalePolicyMs: 60_000,
		TransferSetupMs:   5,
		PriorOutputTokens: 256,
		IfInfeasible:      BestEffort,
	}
}

// Validate reports the first field that is out of range.
func (p *Policy) Validate() error {
	for _, f := range [...]struct {
		name      string
		value     float64
		low, high float64
	}{
		{"theta", p.Theta, 0, 1000},
		{"queueWeight", p.QueueWeight, 0, 100},
		{"roomWeight", p.RoomWeight, 0, 100},
		{"ownLimitRatio", p.OwnLimitRatio, 0, 1000},
		{"ownLimitMs", p.OwnLimitMs, 0, maxBudgetMs},
		{"tieMs", p.TieMs, 0, 1000},
		{"freshMs", p.FreshMs, 0, maxBudgetMs},
		{"doubtPerMs", p.DoubtPerMs, 0, 10},
		{"maxAgeDoubtMs", p.MaxAgeDoubtMs, 0, maxBudgetMs},
		{"errorWeight", p.ErrorWeight, 0, 10},
		{"unknownEvictionAgeMs", p.UnknownEvictionAgeMs, 1, 1e12},
		{"inferredTrust", p.InferredTrust, 0, 1},
		{"partialTrust", p.PartialTrust, 0, 1},
		{"staleTrust", p.StaleTrust, 0, 1},
		{"headroomMs", p.HeadroomMs, 0, maxBudgetMs},
		{"awayBoundMs", p.AwayBoundMs, 0, maxBudgetMs},
		{"silentMs", p.SilentMs, 0, maxBudgetMs},
		{"staleQueueMs", p.StaleQueueMs, 0, maxBudgetMs},
		{"stalePolicyMs", p.StalePolicyMs, 0, maxBudgetMs},
		{"transferSetupMs", p.TransferSetupMs, 0, maxBudgetMs},
		{"priorOutputTokens", p.PriorOutputTokens, 1, MaxOutputTokens},
	} {
		if !(f.value >= f.low && f.value <= f.high) {
			return &FieldError{Field: "policy." + f.name, Detail: fmt.Sprintf("%v is not in %g to %g", f.value, f.low, f.high), kind: ErrPolicy}
		}
	}
	if p.IfInfeasible == "" || !p.IfInfeasible.valid() {
		return &FieldError{Field: "policy.ifInfeasible", Detail: fmt.Sprintf("%q is not one of %s, %s, %s", p.IfInfeasible, BestEffort, Reject, RetryAfter), kind: ErrPolicy}
	}
	return nil
}
