package ledger

import (
	"errors"
	"fmt"
	"math"
)

// ErrStepModel is wrapped by every error of StepModel.Validate.
var ErrStepModel = errors.New("bad step model")

// Source says where the numbers of a step model come from.
type Source string

// The sources of a step model.
const (
	SourcePrior  Source = "prior"
	SourceLearnt Source = "learnt"
)

// StepModel prices one engine step in ms:
//
//	[any prefill: p0 + p1·N + q·N² + p2·Σ((c+u)² − c²)] +
//	[any decode:  d0 + d1·B + d2·KV + d3·(KV/pool)²]
//
// N are the prompt tokens computed in the step, u those of one request behind
// c tokens of context, B the decoding requests, KV the sum of their contexts
// in tokens and pool the KV tokens the worker can hold. Every coefficient may
// be 0 and only D3Ms may be negative.
type StepModel struct {
	// P0Ms is the base of a step that computes prompt tokens.
	P0Ms float64
	// P1MsPerToken is the price of one prompt token.
	P1MsPerToken float64
	// QMsPerToken2 is the price of the square of the tokens of one step.
	QMsPerToken2 float64
	// P2MsPerToken2 prices attention: the difference of the squares of a
	// request's context after and before its tokens.
	P2MsPerToken2 float64
	// D0Ms is the base of a step that decodes.
	D0Ms float64
	// D1MsPerRequest is the price of one decoding request.
	D1MsPerRequest float64
	// D2MsPerToken is the price of one token of decoding context.
	D2MsPerToken float64
	// D3Ms times the square of the pool's share held by decoding contexts.
	D3Ms float64
	// Source says whether the numbers are a prior or learnt.
	Source Source
}

// Upper limits of the coefficients. They are far above any engine and keep
// every product of the package finite.
const (
	maxBaseMs      = 60_000
	maxMsPerToken  = 1_000
	maxMsPerToken2 = 1
)

// Validate reports the first coefficient that is not finite or out of range.
func (m *StepModel) Validate() error {
	for _, c := range [...]struct {
		name      string
		value     float64
		low, high float64
	}{
		{"p0Ms", m.P0Ms, 0, maxBaseMs},
		{"p1MsPerToken", m.P1MsPerToken, 0, maxMsPerToken},
		{"qMsPerToken2", m.QMsPerToken2, 0, maxMsPerToken2},
		{"p2MsPerToken2", m.P2MsPerToken2, 0, maxMsPerToken2},
		{"d0Ms", m.D0Ms, 0, maxBaseMs},
		{"d1MsPerRequest", m.D1MsPerRequest, 0, maxBaseMs},
		{"d2MsPerToken", m.D2MsPerToken, 0, maxMsPerToken},
		{"d3Ms", m.D3Ms, -maxBaseMs, maxBaseMs},
	} {
		if !(c.value >= c.low && c.value <= c.high) {
			return fmt.Errorf("%w: %s: %v is not in %g to %g", ErrStepModel, c.name, c.value, c.low, c.high)
		}
	}
	return nil
}

// PrefillMs is P(n): what n prompt tokens of one step cost without attention
// to earlier context; 0 for no tokens.
func (m *StepModel) PrefillMs(tokens int) float64 {
	if tokens <= 0 {
		return 0
	}
	n := float64(tokens)
	return m.P0Ms + n*(m.P1MsPerToken+n*m.QMsPerToken2)
}

// AttentionMs is p2·((c+u)² − c²): what u new tokens pay for attending to
// themselves and to c reused tokens. It does not depend on the chunking.
func (m *StepModel) AttentionMs(reused, tokens int) float64 {
	if m.P2MsPerToken2 == 0 || tokens <= 0 {
		return 0
	}
	c, u := float64(max(reused, 0)), float64(tokens)
	return m.P2MsPerToken2 * u * (u + 2*c)
}

// DecodeMs is D: what a step pays for decoding beside its prefill, given the
// decoding requests and their context tokens. poolTokens ≤ 0 means unknown
// and leaves the quadratic term out. Charging it to a worker where nothing
// decodes yet is right for an estimate: the request being placed will.
//
// A negative D3Ms bends D down at high fill; beyond its vertex D is held, so
// that more context never makes a worker look faster.
func (m *StepModel) DecodeMs(decoding, contextTokens, poolTokens float64) float64 {
	decoding, contextTokens = max(decoding, 0), max(contextTokens, 0)
	ms := m.D0Ms + m.D1MsPerRequest*decoding
	if !(poolTokens > 0) || m.D3Ms == 0 {
		return ms + m.D2MsPerToken*contextTokens
	}
	fill := contextTokens / poolTokens
	linear := m.D2MsPerToken * poolTokens
	if m.D3Ms < 0 {
		fill = min(fill, linear/(-2*m.D3Ms))
	}
	return ms + fill*(linear+fill*m.D3Ms)
}

// DefaultStepTokens is the step budget assumed for a worker that does not
// tell: the engines' common default for serving.
const DefaultStepTokens = 8192

// MaxTokens bounds the tokens of one claim and of one step.
const MaxTokens = 1 << 24

// Steps is a step model made ready for one worker at one load: a step budget
// and the decode part that every step pays. The zero value has no budget and can
// price nothing; use NewSteps.
type Steps struct {
	model     StepModel
	budget    int
	decodeMs  float64
	prefillMs float64 // P(budget)
	fullMs    float64 // P(budget) + D
}

// NewSteps prepares a validated model. budgetTokens below 1 means unknown and
// becomes DefaultStepTokens; a decodeMs that is negative or not finite is 0.
func NewSteps(m StepModel, budgetTokens int, decodeMs float64) Steps {
	if budgetTokens < 1 {
		budgetTokens = DefaultStepTokens
	}
	budgetTokens = min(budgetTokens, MaxTokens)
	if !(decodeMs > 0) || math.IsInf(decodeMs, 0) {
		decodeMs = 0
	}
	s := Steps{model: m, budget: budgetTokens, decodeMs: decodeMs}
	s.prefillMs = m.PrefillMs(budgetTokens)
	s.fullMs = s.prefillMs + decodeMs
	return s
}

// Model is the step model it was made from.
func (s *Steps) Model() StepModel { return s.model }

// BudgetTokens is the number of prefill tokens a step may hold.
func (s *Steps) BudgetTokens() int { return s.budget }

// DecodeMs is the decode part D of every step.
func (s *Steps) DecodeMs() float64 { return s.decodeMs }

// PrefillMs is the prefill of tokens behind reused ones, in steps of their
// own and without the decode part: ⌊u/b⌋·P(b) + P(u mod b) + attention.
func (s *Steps) PrefillMs(reused, tokens int) float64 {
	tokens = clampTokens(tokens)
	ms := s.model.AttentionMs(reused, tokens)
	if tokens >= s.budget {
		full := tokens / s.budget
		ms += float64(full) * s.prefillMs
		tokens -= full * s.budget
	}
	return ms + s.model.PrefillMs(tokens)
}

// totalMs is T(m) = ⌊m/b⌋·(P(b)+D) + [rest > 0]·(P(rest)+D), without
// attention.
func (s *Steps) totalMs(tokens int) float64 {
	var ms float64
	if tokens >= s.budget {
		full := tokens / s.budget
		ms = float64(full) * s.fullMs
		tokens -= full * s.budget
	}
	if tokens > 0 {
		ms += s.model.PrefillMs(tokens) + s.decodeMs
	}
	return ms
}

// IdleMs is the time until the prefill of tokens behind reused ones ends on a
// worker with nothing waiting: D/2 + T(u) + attention. The half step is the
// decode step in flight.
func (s *Steps) IdleMs(reused, tokens int) float64 {
	tokens = clampTokens(tokens)
	return s.decodeMs/2 + s.totalMs(tokens) + s.model.AttentionMs(reused, tokens)
}

// clampTokens brings a claim's tokens into 1..MaxTokens: even a prompt that
// is cached whole computes its last token.
func clampTokens(tokens int) int { return min(max(tokens, 1), MaxTokens) }
