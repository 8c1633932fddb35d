package rules

import "math/rand/v2"

// LeastTokens takes the worker with the fewest prompt tokens before a first
// token, blind to caches.
type LeastTokens struct{ books }

// NewLeastTokens makes the rule.
func NewLeastTokens(workers int, rng *rand.Rand) *LeastTokens {
	return &LeastTokens{newBooks(workers, nil, rng)}
}

// Place implements Router.
func (r *LeastTokens) Place(_ float64, q Query) int {
	w := least(r.rng, len(r.workers), func(w int) float64 { return float64(r.workers[w].prefillTokens) })
	r.enter(w, q, q.Prompt.Tokens)
	return w
}

// LMetric is the product rule of arXiv 2603.15202: uncached tokens queued and
// its own, times the number of requests with it.
type LMetric struct{ books }

// NewLMetric makes the rule.
func NewLMetric(workers int, cache CacheView, rng *rand.Rand) *LMetric {
	return &LMetric{newBooks(workers, cache, rng)}
}

// Place implements Router.
func (r *LMetric) Place(_ float64, q Query) int {
	w := least(r.rng, len(r.workers), func(w int) float64 {
		a := &r.workers[w]
		return float64(a.prefillTokens+r.uncached(w, q.Prompt)) * float64(a.requests+1)
	})
	r.enter(w, q, r.uncached(w, q.Prompt))
	return w
}

// Sticky is llm-d's default since August 2026, sticky until saturated: of the
// workers that match at least 80 % of the best match, the one with the least
// uncached tokens in flight, its own included; unless its first token is
// estimated 18 s later than that of the least loaded of all.
type Sticky struct{ books }

// Constants that llm-d ships.
const (
	stickyAffinity     = .8
	stickyTokensPerSec = 15_928
	stickyPenaltySec   = 18
)

// NewSticky makes the rule.
func NewSticky(workers int, cache CacheView, rng *rand.Rand) *Sticky {
	return &Sticky{newBooks(workers, cache, rng)}
}

// Place implements Router.
func (r *Sticky) Place(_ float64, q Query) int {
	p := q.Prompt
	deepest := 0
	for w := range r.workers {
		deepest = max(deepest, r.cache.Depth(w, p))
	}
	load := func(w int) float64 { return float64(r.workers[w].prefillTokens + r.uncached(w, p)) }
	const out = 1e15 // beyond any load
	warm := least(r.rng, len(r.workers), func(w int) float64 {
		if float64(r.cache.Depth(w, p)) < stickyAffinity*float64(deepest) {
			return out
		}
		return load(w)
	})
	w := least(r.rng, len(r.workers), load)
	if (load(warm)-load(w))/stickyTokensPerSec <= stickyPenaltySec {
		w = warm
	}
	r.enter(w, q, r.uncached(w, p))
	return w
}
