package bench

import (
	"math/bits"

	"waypost/testbed/workload"
)

func trailing(x uint64) int { return bits.TrailingZeros64(x) }

// closedOptions say how a closed simulation runs.
type closedOptions struct {
	workers    int
	blocks     int     // per worker
	durationMs float64 // arrivals after it are left out
	warmUp     float64 // share of the duration that is not counted
	tickMs     float64
	onTick     func(now float64, counted bool)
	onArrival  func(j *job, at *arrival)
}

// arrival is what the router sees when a request arrives.
type arrival struct {
	now     float64
	counted bool
	// truth is the leading blocks each worker holds, queued the prefill tokens
	// that wait there.
	truth, queued []int
}

// closed is a closed simulation: the router sends each request to the worker
// with the fewest tokens to compute before its first token, by the truth.
type closed struct {
	opt     closedOptions
	engines []*engine
	truth   *masks
	jobs    jobPool
	seen    arrival
	warm    Shape
}

// Shape is what a workload looks like at the engines, after the warm-up.
type Shape struct {
	Requests int
	Seconds  float64
	// HitRate is the share of prompt tokens found in a cache.
	HitRate float64
	// BlocksPerSec are stored, and RequestsPerSec taken up, per worker.
	BlocksPerSec, RequestsPerSec float64
	// Runs per worker and blocks per run.
	Runs, RunBlocks float64
	// Utilisation is the share of time in which an engine prefills.
	Utilisation float64
	// FullWaits counts requests that waited for free blocks.
	FullWaits int
}

func newClosed(o closedOptions) *closed {
	c := &closed{opt: o, truth: newMasks(o.workers * o.blocks)}
	for w := range o.workers {
		e := newEngine(o.blocks, &c.jobs)
		e.appeared = func(hash uint64) { c.truth.set(hash, w) }
		e.vanished = func(hash uint64) { c.truth.clear(hash, w) }
		c.engines = append(c.engines, e)
	}
	c.seen.truth, c.seen.queued = make([]int, o.workers), make([]int, o.workers)
	return c
}

// run plays requests, which are in order of arrival.
func (c *closed) run(requests []workload.Request) Shape {
	start := c.opt.durationMs * c.opt.warmUp
	tick := c.opt.tickMs
	begun := false
	samples := 0
	for i := range requests {
		r := &requests[i]
		if r.ArrivalMs >= c.opt.durationMs {
			break
		}
		for tick <= r.ArrivalMs {
			c.advance(tick)
			if !begun && tick >= start {
				begun = true
				c.warm = c.totals()
			}
			if c.opt.onTick != nil {
				c.opt.onTick(tick, begun)
			}
			for _, e := range c.engines {
				e.tape.reset()
			}
			if begun {
				samples++
				c.sampleRuns()
			}
			tick += c.opt.tickMs
		}
		c.advance(r.ArrivalMs)
		c.place(r, begun)
	}
	return c.since(c.warm, (tick-c.opt.tickMs-start)/1000, samples)
}

func (c *closed) advance(now float64) {
	for _, e := range c.engines {
		e.advanceTo(now)
	}
}

func (c *closed) place(r *workload.Request, counted bool) {
	j := c.jobs.newJob(r)
	a := &c.seen
	a.now, a.counted = r.ArrivalMs, counted
	c.truth.matches(j.hashes[:most(j.prompt)], a.truth)
	for w, e := range c.engines {
		a.queued[w] = e.queued
	}
	if c.opt.onArrival != nil {
		c.opt.onArrival(j, a)
	}
	best := cheapest(a.queued, a.truth, j.prompt)
	c.engines[best].submit(j, j.prompt-a.truth[best]*blockTokens, r.ArrivalMs)
}

// cheapest is the worker with the fewest tokens to compute before the first
// token of a request; the first one of equals.
func cheapest(queued, match []int, prompt int) int {
	best, least := 0, 0
	for w := range queued {
		if cost := queued[w] + prompt - match[w]*blockTokens; w == 0 || cost < least {
			best, least = w, cost
		}
	}
	return best
}

// totals are sums so far, in the fields of a shape.
func (c *closed) totals() Shape {
	var s Shape
	prompts := 0
	for _, e := range c.engines {
		s.Requests += e.requests
		s.HitRate += float64(e.hits)
		prompts += e.prompts
		s.BlocksPerSec += float64(e.stored)
		s.Utilisation += e.busyMs
		s.FullWaits += e.fullWaits
	}
	s.RequestsPerSec = float64(prompts)
	return s
}

func (c *closed) sampleRuns() {
	for _, e := range c.engines {
		c.warm.Runs += float64(e.cache.runs.count)
		c.warm.RunBlocks += float64(e.cache.named)
	}
}

func (c *closed) since(from Shape, seconds float64, samples int) Shape {
	now := c.totals()
	n := float64(c.opt.workers)
	out := Shape{
		Requests: now.Requests - from.Requests, Seconds: seconds,
		HitRate:      (now.HitRate - from.HitRate) / (now.RequestsPerSec - from.RequestsPerSec),
		BlocksPerSec: (now.BlocksPerSec - from.BlocksPerSec) / seconds / n,
		Utilisation:  (now.Utilisation - from.Utilisation) / seconds / 1000 / n,
		FullWaits:    now.FullWaits - from.FullWaits,
		Runs:         from.Runs / float64(samples) / n,
		RunBlocks:    from.RunBlocks / from.Runs,
	}
	out.RequestsPerSec = float64(out.Requests) / seconds / n
	return out
}
