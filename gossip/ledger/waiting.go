package ledger

import "math"

// Waiting is the waiting work of one worker as the fold keeps it. F, K and S
// are the letters of the formulas:
//
//	T(m) = ⌊m/b⌋·(P(b)+D) + [rest > 0]·(P(rest)+D)
//	at a load report:  F = built + queue, K = open tokens, S = K>0 ? F − P(K) − D : F
//	fold a claim of u tokens made at t (not before built):
//	    K>0 and t ≤ S:  F = S + T(K+u),       K = (K+u) mod b
//	    else:           F = max(F, t) + T(u), K = u mod b
//	    S = K>0 ? F − P(K) − D : F
//	own(u, now) = now ≥ F ? D/2 + T(u) : K>0 and now ≤ S ? S + T(K+u) − now : F + T(u) − now
//
// and own is never below the prefill of u alone. Attention to earlier context
// (the p2 term of the step model) is added per claim and belongs to the step
// that computes the tokens, so the equality with a replay of the list holds
// with it as well.
//
// The zero value is an idle worker reported at time 0.
type Waiting struct {
	// F is when the prefill of the last known claim ends, ms.
	F float64
	// S is when the open step begins, ms; equal to F while K is 0.
	S float64
	// K is the number of tokens in the last planned step that has not begun.
	K int
	// builtMs is when the load report it started from was built.
	builtMs float64
	// attentionMs is the attention part inside the open step.
	attentionMs float64
}

// MaxQueueMs bounds a reported queue; ten hours is beyond any use.
const MaxQueueMs = 36_000_000

// AtLoad starts from a load report: when it was built, the time until the
// last known claim's prefill ends and the tokens of the open step. Values
// that are negative or not finite count as 0, open tokens stay below the step
// budget.
func AtLoad(s *Steps, builtMs, queueMs float64, openTokens int) Waiting {
	builtMs = finiteOr(builtMs, 0)
	queueMs = min(max(finiteOr(queueMs, 0), 0), MaxQueueMs)
	w := Waiting{F: builtMs + queueMs, builtMs: builtMs}
	if openTokens > 0 && queueMs > 0 {
		w.K = openTokens % s.budget
	}
	w.S = w.F
	if w.K > 0 {
		w.S = w.F - s.model.PrefillMs(w.K) - s.decodeMs
	}
	return w
}

// Fold adds a claim: made at madeMs, tokens to compute behind reused ones.
// Claims are folded in the order they were made.
func (w *Waiting) Fold(s *Steps, madeMs float64, reused, tokens int) {
	tokens = clampTokens(tokens)
	at := max(finiteOr(madeMs, w.builtMs), w.builtMs)
	begin, total, attention := max(w.F, at), tokens, 0.0
	if w.K > 0 && at <= w.S {
		begin, total, attention = w.S, tokens+w.K, w.attentionMs
	}
	attention += s.model.AttentionMs(reused, tokens)
	// S is found going forward rather than as F − P(K) − D: two claims made in
	// the same instant must share a step, and a rounding error would part them.
	full := total / s.budget
	open := total - full*s.budget
	inOpen := attention
	if full > 0 {
		// Of the claims folded so far only this one reaches past a full step.
		inOpen = s.model.AttentionMs(max(reused, 0)+tokens-open, open)
	}
	w.S = begin + float64(full)*s.fullMs + (attention - inOpen)
	w.F, w.K, w.attentionMs = w.S, open, 0
	if open > 0 {
		w.F += s.model.PrefillMs(open) + s.decodeMs + inOpen
		w.attentionMs = inOpen
	}
}

// OwnMs is the time from now until the prefill of tokens behind reused ones
// would end on this worker, never below that prefill alone. On an idle worker
// it includes half a decode part: the step in flight.
func (w *Waiting) OwnMs(s *Steps, nowMs float64, reused, tokens int) float64 {
	tokens = clampTokens(tokens)
	attention := s.model.AttentionMs(reused, tokens)
	var own float64
	switch {
	case nowMs >= w.F:
		own = s.decodeMs/2 + s.totalMs(tokens)
	case w.K > 0 && nowMs <= w.S:
		own = w.S - nowMs + s.totalMs(w.K+tokens) + w.attentionMs
	default:
		own = w.F - nowMs + s.totalMs(tokens)
	}
	return max(own+attention, s.PrefillMs(reused, tokens))
}

// QueueMs is the time from now until the last known claim's prefill ends, at
// least 0.
func (w *Waiting) QueueMs(nowMs float64) float64 { return max(w.F-nowMs, 0) }

// Shift moves the whole queue by deltaMs, later if positive. What-if
// questions use it.
func (w *Waiting) Shift(deltaMs float64) {
	w.F += deltaMs
	w.S += deltaMs
}

// finiteOr returns v, or fallback if v is not a finite number.
func finiteOr(v, fallback float64) float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return fallback
	}
	return v
}
