package truth

// Step is what one step computes.
type Step struct {
	// PromptTokens are computed of prompts. What a preempted request had
	// answered is recomputed for nothing and is not among them.
	PromptTokens int
	// Decoding counts the requests that get a further token, ContextTokens
	// sums their contexts: prompt and output so far, the last sampled token
	// included. A prefix that several share counts once for each. A request
	// whose prompt ends in the step gets its first token and does not decode.
	Decoding, ContextTokens int
	// Running counts the requests in the batch.
	Running int
	// PoolTokens is the size of the pool.
	PoolTokens int
}

// StepTime is how long a step takes, in ms.
type StepTime func(Step) float64

// Mocker is the default timing of the mock engine:
//
//	P(n) = 4.209989e-7 n² + .01518344 n + 16.50142   if prompt tokens are computed
//	D(x) = −25.74 x² + 54.01 x + 5.74                if anything decodes
//
// n are all prompt tokens of the step, x the decoding requests' context over
// the tokens of the pool.
func Mocker(s Step) float64 {
	ms := 0.0
	if s.PromptTokens > 0 {
		n := float64(s.PromptTokens)
		ms += 4.209989e-7*n*n + .01518344*n + 16.50142
	}
	if s.Decoding > 0 {
		x := float64(s.ContextTokens) / float64(s.PoolTokens)
		ms += -25.74*x*x + 54.01*x + 5.74
	}
	return ms
}

// Linear is a usual engine: 14 ms per step, .05 ms per decoding request, 4e-5
// ms per token of their context and .05 ms per prompt token.
func Linear(s Step) float64 {
	return 14 + .05*float64(s.Decoding) + 4e-5*float64(s.ContextTokens) + .05*float64(s.PromptTokens)
}

// Slower multiplies all step times.
func Slower(t StepTime, factor float64) StepTime {
	if factor == 1 {
		return t
	}
	return func(s Step) float64 { return factor * t(s) }
}
