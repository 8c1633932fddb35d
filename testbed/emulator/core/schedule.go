package core

import (
	"slices"
	"time"
)

// Step is what the engine computes next.
type Step struct {
	// Duration is how long it takes by the step-time model.
	Duration time.Duration
	// PrefillTokens is the number of prompt tokens computed, Decodes that of
	// requests that get their next token.
	PrefillTokens, Decodes int
}

// Schedule decides the next step: running requests first, in order of
// admission, each one token or its next piece of prompt; then waiting ones
// while tokens and places are left. It reports false if there is nothing to
// do. Finish must follow before the next Schedule.
func (c *Core) Schedule(now time.Duration) (Step, bool) {
	if c.inStep || c.Idle() {
		return Step{}, false
	}
	c.step = c.step[:0]
	budget := c.opts.StepTokens
	preempted := false
	for i := 0; i < len(c.running) && budget > 0; i++ {
		s := c.running[i]
		n := min(len(s.tokens)-s.computed, budget)
		fits := c.allocate(s, nil, n)
		for !fits {
			preempted = true
			victim := len(c.running) - 1
			self := c.running[victim] == s
			c.preempt(victim)
			if self {
				break
			}
			fits = c.allocate(s, nil, n)
		}
		if !fits {
			break
		}
		budget -= n
		c.include(s, n)
	}
	if !preempted {
		c.admit(budget, now)
	}
	w := c.work()
	c.inStep = true
	return Step{Duration: c.opts.StepTime.of(w, c.capacityTokens()), PrefillTokens: w.prefillTokens, Decodes: w.decodes}, true
}

// admit takes requests from the head of the waiting queue. The first that does
// not fit stops it: nobody overtakes.
func (c *Core) admit(budget int, now time.Duration) {
	for len(c.waiting) > 0 && budget > 0 && len(c.running) < c.opts.MaxRunning {
		s := c.waiting[0]
		hits := c.hits(s)
		if s.req.ReportHits && len(hits) > 0 {
			c.announce(s, 0, len(hits))
		}
		cached := len(hits) * c.opts.BlockTokens
		n := min(len(s.tokens)-cached, budget)
		// The whole prompt must fit, not only what this step computes of it.
		if c.missing(s, hits, len(s.tokens)) > c.pool.free {
			return
		}
		if !c.allocate(s, hits, n) {
			return
		}
		c.waiting = slices.Delete(c.waiting, 0, 1)
		c.running = append(c.running, s)
		s.computed = cached
		if s.cachedTokens < 0 {
			s.cachedTokens, s.started = cached, now
		}
		if s.preemptions == 0 && !s.req.SkipCacheRead {
			c.counts.QueriedTokens += int64(len(s.tokens))
			c.counts.HitTokens += int64(cached)
		}
		budget -= n
		c.include(s, n)
	}
}

func (c *Core) include(s *Sequence, n int) {
	s.step = n
	c.step = append(c.step, s)
}

// hits are the cached blocks a waiting request can use. The last token is
// always computed, so the block that holds it is never among them.
func (c *Core) hits(s *Sequence) []uint32 {
	if s.req.SkipCacheRead {
		return nil
	}
	var ids []uint32
	most := (len(s.tokens) - 1) / c.opts.BlockTokens
	for i := range most {
		h := s.hash(c.hasher, i+1, c.opts.BlockTokens)[i]
		id, ok := c.pool.lookup(h)
		if !ok {
			break
		}
		ids = append(ids, id)
	}
	return ids
}

// missing is the number of blocks that must leave the free queue before tokens
// of s have a place: new ones, and hits that nobody references yet.
func (c *Core) missing(s *Sequence, hits []uint32, tokens int) int {
	n := (tokens+c.opts.BlockTokens-1)/c.opts.BlockTokens - len(s.blocks) - len(hits)
	n = max(n, 0)
	for _, id := range hits {
		if c.pool.blocks[id].queued {
			n++
		}
	}
	return n
}

// allocate gives s the blocks for its next n tokens and caches those that
// become full. It changes nothing if they do not fit.
func (c *Core) allocate(s *Sequence, hits []uint32, n int) bool {
	before := s.computed + len(hits)*c.opts.BlockTokens
	if c.missing(s, hits, before+n) > c.pool.free {
		return false
	}
	for _, id := range hits {
		c.pool.touch(id)
	}
	s.blocks = append(s.blocks, hits...)
	s.named = max(s.named, len(hits))
	for len(s.blocks)*c.opts.BlockTokens < before+n {
		s.blocks = append(s.blocks, c.pool.take())
	}
	full := min(before+n, len(s.tokens)) / c.opts.BlockTokens
	if full > s.named {
		hashes := s.hash(c.hasher, full, c.opts.BlockTokens)
		for i := s.named; i < full; i++ {
			c.pool.name(s.blocks[i], hashes[i])
		}
		c.announce(s, s.named, full)
		s.named = full
	}
	return true
}

// announce makes the store event for blocks from..to of s.
func (c *Core) announce(s *Sequence, from, to int) {
	hashes := s.hash(c.hasher, to, c.opts.BlockTokens)
	e := Event{
		Op: OpStored, Hashes: hashes[from:to:to], FirstBlock: from,
		Tokens:  s.tokens[from*c.opts.BlockTokens : to*c.opts.BlockTokens],
		Adapter: s.req.Adapter, Salt: s.req.Salt, SessionID: s.req.SessionID,
	}
	if from > 0 {
		e.Parent, e.HasParent = hashes[from-1], true
	}
	c.pool.events = append(c.pool.events, e)
}

// preempt sends a running request back to the head of the waiting queue; all
// it computed is lost except what stays cached.
func (c *Core) preempt(i int) {
	s := c.running[i]
	c.running = slices.Delete(c.running, i, i+1)
	c.pool.release(s.blocks)
	s.blocks, s.computed, s.named = nil, 0, 0
	s.preemptions++
	c.counts.Preemptions++
	c.waiting = slices.Insert(c.waiting, 0, s)
}

func (c *Core) work() work {
	var w work
	for _, s := range c.step {
		after := s.computed + s.step
		if s.step == 1 && after == len(s.tokens) && s.OutputTokens() > 0 {
			w.decodes++
			w.decodeContext += after
			continue
		}
		w.prefillTokens += s.step
		w.prefillSquare += float64(after)*float64(after) - float64(s.computed)*float64(s.computed)
	}
	return w
}

func (c *Core) capacityTokens() int { return (c.opts.PoolBlocks - 1) * c.opts.BlockTokens }
