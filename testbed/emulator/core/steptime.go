package core

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// StepTime is the model of how long one step takes, in ms:
//
//	[any prefill: P0 + P1*N + Q*N^2 + P2*sum((c+u)^2 - c^2)] +
//	[any decode:  D0 + D1*B + D2*KV + D3*(KV/capacity)^2]
//
// N is the number of prompt tokens computed in the step, u and c those of one
// request and the tokens before them, B the number of decoding requests and KV
// the sum of their context lengths. A request whose prompt ends in the step
// counts as prefill only.
type StepTime struct {
	P0, P1, Q, P2  float64
	D0, D1, D2, D3 float64
}

// Llama8BH100 is Llama-3.1-8B in bf16 on one H100, fitted to public
// measurements (aiconfigurator silicon sample, TPOT error 1.5 %). The
// quadratic term is charged against the context, so that it does not depend on
// how a prompt is cut into steps and a cached prefix is not free to attend to;
// for a cold prompt in one step it is P1*n + 6.3e-7*n^2.
var Llama8BH100 = StepTime{P1: .0186, P2: 6.3e-7, D0: 6.58, D1: .003, D2: 4.68e-5}

// Validate says which coefficient is not a time.
func (s StepTime) Validate() error {
	names := [...]string{"P0", "P1", "Q", "P2", "D0", "D1", "D2", "D3"}
	for i, v := range [...]float64{s.P0, s.P1, s.Q, s.P2, s.D0, s.D1, s.D2, s.D3} {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return fmt.Errorf("step time %s is %v: want a finite number of ms", names[i], v)
		}
	}
	if s == (StepTime{}) {
		return errors.New("step time has no coefficient: a step would take no time")
	}
	return nil
}

// work is what one step computes.
type work struct {
	prefillTokens int
	prefillSquare float64
	decodes       int
	decodeContext int
}

func (s StepTime) of(w work, capacityTokens int) time.Duration {
	ms := 0.0
	if w.prefillTokens > 0 {
		n := float64(w.prefillTokens)
		ms += s.P0 + s.P1*n + s.Q*n*n + s.P2*w.prefillSquare
	}
	if w.decodes > 0 {
		kv := float64(w.decodeContext)
		fill := kv / float64(capacityTokens)
		ms += s.D0 + s.D1*float64(w.decodes) + s.D2*kv + s.D3*fill*fill
	}
	return time.Duration(max(ms, 0) * float64(time.Millisecond))
}
