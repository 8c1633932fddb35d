package queue

import (
	"errors"
	"fmt"
	"math"

	"waypost/gossip/ledger"
)

// ErrState is wrapped by every error of Import.
var ErrState = errors.New("bad queue state")

// State is what an estimator has learnt of a worker, to be kept beside the
// engine's process mark over a restart of the agent. Nil is unknown.
type State struct {
	// Speeds is the learnt step model.
	Speeds ledger.SpeedsState `json:"speeds"`
	// LagMs is the signal lag of the counters.
	LagMs *float64 `json:"lagMs,omitempty"`
	// The mean request by claims and by counters, and the mean answer.
	ClaimTokens    *float64 `json:"claimTokens,omitempty"`
	ClaimPrompt    *float64 `json:"claimPrompt,omitempty"`
	UncachedTokens *float64 `json:"uncachedTokens,omitempty"`
	PromptTokens   *float64 `json:"promptTokens,omitempty"`
	OutputTokens   *float64 `json:"outputTokens,omitempty"`
	// EvictionAgeMs is the age that cached blocks reach.
	EvictionAgeMs *float64 `json:"evictionAgeMs,omitempty"`
}

// Export is what was learnt so far.
func (e *Estimator) Export() State {
	return State{
		Speeds: e.speeds.Export(), LagMs: known(e.lag.ms()),
		ClaimTokens: known(e.meanClaimTokens), ClaimPrompt: known(e.meanClaimPrompt),
		UncachedTokens: known(e.meanUncachedTokens), PromptTokens: known(e.meanPromptTokens), OutputTokens: known(e.meanOutputTokens),
		EvictionAgeMs: e.eviction.learnt(),
	}
}

// Import starts from what was learnt before. A state with a bad field changes
// nothing. Speeds that are relative to another prior than that of the facts are
// passed over: the model or the GPU is another.
func (e *Estimator) Import(s State) error {
	for _, f := range [...]struct {
		name  string
		value *float64
		high  float64
	}{
		{"lagMs", s.LagMs, (lagSteps - 1) * lagStepMs},
		{"claimTokens", s.ClaimTokens, ledger.MaxTokens},
		{"claimPrompt", s.ClaimPrompt, ledger.MaxTokens},
		{"uncachedTokens", s.UncachedTokens, ledger.MaxTokens},
		{"promptTokens", s.PromptTokens, ledger.MaxTokens},
		{"outputTokens", s.OutputTokens, ledger.MaxTokens},
		{"evictionAgeMs", s.EvictionAgeMs, ledger.MaxEvictionMs},
	} {
		if f.value != nil && !(*f.value >= 0 && *f.value <= f.high) {
			return fmt.Errorf("%w: %s: %v is not in 0 to %g", ErrState, f.name, *f.value, f.high)
		}
	}
	prior := s.Speeds.Prior
	prior.Source = e.speeds.Prior().Source
	if prior == e.speeds.Prior() {
		if err := e.speeds.Import(s.Speeds); err != nil {
			return fmt.Errorf("%w: speeds: %w", ErrState, err)
		}
	}
	if s.LagMs != nil {
		e.lag.set(*s.LagMs)
	}
	e.meanClaimTokens, e.meanClaimPrompt = orNaN(s.ClaimTokens), orNaN(s.ClaimPrompt)
	e.meanUncachedTokens, e.meanPromptTokens = orNaN(s.UncachedTokens), orNaN(s.PromptTokens)
	e.meanOutputTokens = orNaN(s.OutputTokens)
	if s.EvictionAgeMs != nil {
		e.eviction.restore(*s.EvictionAgeMs)
	}
	return nil
}

func orNaN(v *float64) float64 {
	if v == nil {
		return math.NaN()
	}
	return *v
}
