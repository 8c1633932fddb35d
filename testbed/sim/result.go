package sim

import (
	"math"
	"slices"
)

// Distribution describes times in ms.
type Distribution struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
}

// Mean is a mean alone, in ms.
type Mean struct {
	Mean float64 `json:"mean"`
}

// Figures describe the requests of a run, or of one class.
type Figures struct {
	Requests int          `json:"requests"`
	TTFTMs   Distribution `json:"ttftMs"`
	E2EMs    Mean         `json:"e2eMs"`
	ITLMs    Mean         `json:"itlMs"`
	// Reuse is the share of prompt tokens found in the cache at the first
	// admission.
	Reuse float64 `json:"reuse"`
	// Preemptions counts requests that lost their blocks.
	Preemptions float64 `json:"preemptions"`
	// PredictionMs are predicted less true first-token times; nil: the rule
	// predicts none.
	PredictionMs *Error `json:"predictionMs,omitempty"`
}

// Error describes predicted less true times in ms: the mean, and quantiles of
// the absolute difference.
type Error struct {
	Bias float64 `json:"bias"`
	P50  float64 `json:"p50"`
	P95  float64 `json:"p95"`
}

func describeErrors(off []float64) *Error {
	if len(off) == 0 {
		return nil
	}
	sum := 0.0
	for i, v := range off {
		sum += v
		off[i] = math.Abs(v)
	}
	slices.Sort(off)
	return &Error{Bias: sum / float64(len(off)), P50: quantile(off, .5), P95: quantile(off, .95)}
}

func describe(values []float64) Distribution {
	if len(values) == 0 {
		return Distribution{}
	}
	slices.Sort(values)
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return Distribution{Mean: sum / float64(len(values)), P50: quantile(values, .5), P95: quantile(values, .95), P99: quantile(values, .99)}
}

// quantile interpolates linearly between the sorted values.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	low := int(at)
	if low+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[low] + (at-float64(low))*(sorted[low+1]-sorted[low])
}

// figuresOf describes the requests that keep selects.
func (run *t2) figuresOf(keep func(*served) bool) Figures {
	var f Figures
	var ttft, off []float64
	var e2e, gapSum, gaps, reused, prompt float64
	for i := range run.requests {
		r := &run.requests[i]
		if !keep(r) {
			continue
		}
		f.Requests++
		ttft = append(ttft, r.engine.FirstMs-r.atMs)
		if run.system != nil {
			off = append(off, run.system.Expected(r.id)-(r.engine.FirstMs-r.atMs))
		}
		e2e += r.engine.LastMs - r.atMs
		gapSum += r.engine.LastMs - r.engine.FirstMs
		gaps += float64(r.outputTokens - 1)
		reused += float64(r.engine.ReusedTokens)
		prompt += float64(r.prompt.Tokens)
		f.Preemptions += float64(r.engine.Preemptions)
	}
	f.TTFTMs, f.PredictionMs = describe(ttft), describeErrors(off)
	if f.Requests > 0 {
		f.E2EMs.Mean, f.Reuse = e2e/float64(f.Requests), reused/prompt
	}
	if gaps > 0 {
		f.ITLMs.Mean = gapSum / gaps
	}
	return f
}

// meanOf is the mean of the figures of several runs of one size.
func meanOf(runs []Figures) Figures {
	var m Figures
	if len(runs) == 0 {
		return m
	}
	n := float64(len(runs))
	for _, f := range runs {
		m.Requests = f.Requests
		m.TTFTMs.Mean += f.TTFTMs.Mean / n
		m.TTFTMs.P50 += f.TTFTMs.P50 / n
		m.TTFTMs.P95 += f.TTFTMs.P95 / n
		m.TTFTMs.P99 += f.TTFTMs.P99 / n
		m.E2EMs.Mean += f.E2EMs.Mean / n
		m.ITLMs.Mean += f.ITLMs.Mean / n
		m.Reuse += f.Reuse / n
		m.Preemptions += f.Preemptions / n
		if p := f.PredictionMs; p != nil {
			if m.PredictionMs == nil {
				m.PredictionMs = &Error{}
			}
			m.PredictionMs.Bias += p.Bias / n
			m.PredictionMs.P50 += p.P50 / n
			m.PredictionMs.P95 += p.P95 / n
		}
	}
	return m
}
