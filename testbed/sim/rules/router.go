// Package rules holds the placement rules that others have published, as
// baselines. Each keeps its own books of what it sent where, and sees the
// workers' caches through a CacheView.
package rules

import (
	"math/rand/v2"

	"waypost/testbed/sim/prompt"
)

// Query is what a rule sees of a request.
type Query struct {
	// ID numbers the requests of a run in order of arrival.
	ID     int
	Prompt *prompt.Prompt
	// SizeFactor multiplies the work that a claim on it tells, to have claims
	// in error; 0: it is told as it is expected.
	SizeFactor float64
}

// Router places requests. Notices reach it as late as the run says, each with
// the time at which the thing happened.
type Router interface {
	// Place chooses the worker of a request.
	Place(nowMs float64, q Query) int
	// First and Done tell that a request got its first and its last token.
	First(nowMs float64, id int, atMs float64)
	Done(nowMs float64, id int, atMs float64, outputTokens int)
}

// CacheView is what a rule knows of the workers' caches.
type CacheView interface {
	// Depth is the number of leading blocks of a prompt that a worker has.
	Depth(worker int, p *prompt.Prompt) int
}

// RoundRobin takes the workers in turn.
type RoundRobin struct{ next, workers int }

// NewRoundRobin begins with the first of so many workers.
func NewRoundRobin(workers int) *RoundRobin { return &RoundRobin{workers: workers} }

// Place implements Router.
func (r *RoundRobin) Place(float64, Query) int {
	w := r.next
	r.next = (r.next + 1) % r.workers
	return w
}

// First implements Router.
func (*RoundRobin) First(float64, int, float64) {}

// Done implements Router.
func (*RoundRobin) Done(float64, int, float64, int) {}

// least is the worker with the smallest cost, one of the equal ones at random.
func least(rng *rand.Rand, workers int, cost func(worker int) float64) int {
	best, bestCost, equal := 0, cost(0), 1
	for w := 1; w < workers; w++ {
		switch c := cost(w); {
		case c < bestCost:
			best, bestCost, equal = w, c, 1
		case c == bestCost:
			equal++
			if rng.IntN(equal) == 0 {
				best = w
			}
		}
	}
	return best
}

// books are what a rule sent to each worker and has not seen the end of.
type books struct {
	rng     *rand.Rand
	cache   CacheView
	workers []account
	open    map[int]entry
}

// account is one worker's.
type account struct {
	// prefillTokens are expected to be computed before first tokens that were
	// not seen yet.
	prefillTokens int
	// requests have not ended.
	requests int
}

type entry struct {
	worker        int
	prefillTokens int
	prompt        *prompt.Prompt
}

func newBooks(workers int, cache CacheView, rng *rand.Rand) books {
	return books{rng: rng, cache: cache, workers: make([]account, workers), open: map[int]entry{}}
}

// uncached are the tokens of a prompt that a worker would compute.
func (b *books) uncached(w int, p *prompt.Prompt) int {
	return max(p.Tokens-b.cache.Depth(w, p)*prompt.BlockTokens, 0)
}

func (b *books) enter(w int, q Query, prefillTokens int) {
	b.workers[w].prefillTokens += prefillTokens
	b.workers[w].requests++
	b.open[q.ID] = entry{w, prefillTokens, q.Prompt}
}

// First implements Router.
func (b *books) First(_ float64, id int, _ float64) {
	e, ok := b.open[id]
	if !ok {
		return
	}
	b.workers[e.worker].prefillTokens -= e.prefillTokens
	e.prefillTokens = 0
	b.open[id] = e
}

// Done implements Router.
func (b *books) Done(_ float64, id int, _ float64, _ int) { b.close(id) }

func (b *books) close(id int) (entry, bool) {
	e, ok := b.open[id]
	if !ok {
		return e, false
	}
	b.workers[e.worker].prefillTokens -= e.prefillTokens
	b.workers[e.worker].requests--
	delete(b.open, id)
	return e, true
}
