package ledger

import "math"

// Job is the prefill of one claim as a replay of the worker's steps sees it.
type Job struct {
	// AtMs is when it may be begun at the earliest.
	AtMs float64
	// Reused is the context before its tokens, Tokens what is left to compute.
	Reused, Tokens int
	// BeganMs is when the first of them was begun, EndMs when the last was
	// computed; NaN: not yet.
	BeganMs, EndMs float64
}

// NewJob is the prefill of tokens, at least 1, behind reused ones.
func NewJob(atMs float64, reused, tokens int) Job {
	return Job{AtMs: atMs, Reused: max(reused, 0), Tokens: clampTokens(tokens), BeganMs: math.NaN(), EndMs: math.NaN()}
}

func (j *Job) begin(atMs float64) {
	if math.IsNaN(j.BeganMs) {
		j.BeganMs = atMs
	}
}

// Work is what a replay computed, in the terms of the step model.
type Work struct {
	// Steps counts steps with prefill, Tokens their prompt tokens.
	Steps, Tokens float64
	// SquaredTokens sums the squares of the tokens per step.
	SquaredTokens float64
	// AttentionTokens2 sums (c+u)² − c² over the chunks.
	AttentionTokens2 float64
	// BeganMs is when the first step began; NaN before it.
	BeganMs float64
}

// Replay serves jobs first in, first out, one step after the other, as an
// engine does that chunks prefills by a step budget: a step takes up to the
// budget of tokens from jobs that are there when it begins, in order, without
// overtaking. Waiting is its closed form for what is still ahead; the replay
// finds out what is behind.
type Replay struct {
	steps *Steps
	jobs  []Job
	next  int // first job with tokens left
	// FreeMs is when the step in flight ends and the next may begin.
	FreeMs float64
	// Work is what was computed so far.
	Work Work
}

// NewReplay starts with the engine free at freeMs. The jobs are in the order
// they are served and are changed by the replay.
func NewReplay(s *Steps, freeMs float64, jobs []Job) Replay {
	return Replay{steps: s, jobs: jobs, FreeMs: freeMs, Work: Work{BeganMs: math.NaN()}}
}

// Jobs are the jobs with what is left of them.
func (r *Replay) Jobs() []Job { return r.jobs }

// Skip passes over the first n jobs, which were served before.
func (r *Replay) Skip(n int) { r.next = n }

// Run serves until a step ends after nowMs: steps begin before nowMs, so that
// what comes in the same instant still joins the next one, and what a step in
// flight computes counts as computed.
func (r *Replay) Run(nowMs float64) {
	for r.next < len(r.jobs) {
		begin := max(r.FreeMs, r.jobs[r.next].AtMs)
		if begin >= nowMs {
			return
		}
		if r.skipFullSteps(begin, nowMs) {
			continue
		}
		r.step(begin)
	}
}

// RunThrough serves until the job of an index is computed and returns when.
func (r *Replay) RunThrough(index int) (endMs float64) {
	for r.next <= index && r.next < len(r.jobs) {
		begin := max(r.FreeMs, r.jobs[r.next].AtMs)
		if r.next < index || r.jobs[index].Tokens <= r.steps.budget || !r.skipFullSteps(begin, math.Inf(1)) {
			r.step(begin)
		}
	}
	return r.jobs[index].EndMs
}

// step serves one step that begins at a moment.
func (r *Replay) step(begin float64) {
	if math.IsNaN(r.Work.BeganMs) {
		r.Work.BeganMs = begin
	}
	left, attention := r.steps.budget, 0.0
	first := r.next
	for left > 0 && r.next < len(r.jobs) && r.jobs[r.next].AtMs <= begin {
		j := &r.jobs[r.next]
		j.begin(begin)
		take := min(left, j.Tokens)
		attention += r.steps.model.AttentionMs(j.Reused, take)
		r.Work.AttentionTokens2 += squares(j.Reused, take)
		j.Reused += take
		j.Tokens -= take
		left -= take
		if j.Tokens > 0 {
			break
		}
		r.next++
	}
	tokens := r.steps.budget - left
	r.FreeMs = begin + r.steps.model.PrefillMs(tokens) + r.steps.decodeMs + attention
	for i := first; i < r.next; i++ {
		r.jobs[i].EndMs = r.FreeMs
	}
	r.Work.Steps++
	r.Work.Tokens += float64(tokens)
	r.Work.SquaredTokens += float64(tokens) * float64(tokens)
}

// skipFullSteps serves all steps at once that a long job fills alone, leaves
// at least a token of it, and begins none after nowMs. It reports whether there
// was one: without it a prompt of millions of tokens would be walked step by
// step.
func (r *Replay) skipFullSteps(begin, nowMs float64) bool {
	j, b := &r.jobs[r.next], r.steps.budget
	n := float64((j.Tokens - 1) / b)
	if n < 2 {
		return false
	}
	if left := nowMs - begin; !math.IsInf(left, 1) {
		n = min(n, r.stepsWithin(j.Reused, left))
	}
	count := int(n)
	if count < 2 {
		return false
	}
	if math.IsNaN(r.Work.BeganMs) {
		r.Work.BeganMs = begin
	}
	j.begin(begin)
	tokens := count * b
	r.FreeMs = begin + float64(count)*r.steps.fullMs + r.steps.model.AttentionMs(j.Reused, tokens)
	r.Work.AttentionTokens2 += squares(j.Reused, tokens)
	j.Reused += tokens
	j.Tokens -= tokens
	r.Work.Steps += float64(count)
	r.Work.Tokens += float64(tokens)
	r.Work.SquaredTokens += float64(count) * float64(b) * float64(b)
	return true
}

// stepsWithin is how many full steps of one job end within ms: the largest k
// with k·full + p2·((c+k·b)² − c²) ≤ ms.
func (r *Replay) stepsWithin(context int, ms float64) float64 {
	b := float64(r.steps.budget)
	square := r.steps.model.P2MsPerToken2 * b * b
	linear := r.steps.fullMs + 2*r.steps.model.P2MsPerToken2*b*float64(context)
	switch {
	case square == 0 && linear == 0:
		return math.MaxInt32
	case square == 0:
		return math.Floor(ms / linear)
	}
	return math.Floor((math.Sqrt(linear*linear+4*square*ms) - linear) / (2 * square))
}

// squares is (c+u)² − c².
func squares(c, u int) float64 { return float64(u) * (float64(u) + 2*float64(c)) }

// Waiting is the work ahead after Run(nowMs): F is the end of the step in
// flight and of the steps for the tokens behind it, K those tokens modulo the
// budget.
func (r *Replay) Waiting(nowMs float64) Waiting {
	w := Waiting{F: r.FreeMs, S: r.FreeMs, builtMs: nowMs}
	for i := r.next; i < len(r.jobs); i++ {
		w.Fold(r.steps, r.jobs[i].AtMs, r.jobs[i].Reused, r.jobs[i].Tokens)
	}
	return w
}

// priceMs is what the work cost under a step model with the given decode part:
// the bases of its steps, and its tokens.
func (w *Work) priceMs(m *StepModel, decodeMs float64) (baseMs, tokensMs float64) {
	baseMs = w.Steps * (m.P0Ms + decodeMs)
	tokensMs = m.P1MsPerToken*w.Tokens + m.QMsPerToken2*w.SquaredTokens + m.P2MsPerToken2*w.AttentionTokens2
	return baseMs, tokensMs
}
