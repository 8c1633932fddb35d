package core

import (
	"slices"
	"time"
)

// Output is one generated token.
type Output struct {
	Sequence *Sequence
	// Index is the token's place in the answer, from 0.
	Index int
	Token uint32
	// Previous is when the request's token before this one was ready; zero for
	// the first.
	Previous time.Duration
	// Finish is not empty on the last token.
	Finish Finish
}

// Outcome is what a step brought. It is valid until the next Schedule.
type Outcome struct {
	Outputs []Output
	// Events are the cache changes since the last outcome, in order.
	Events []Event
	// Tokens is the number of tokens computed.
	Tokens int
	// ComputedPromptTokens are the prompt tokens of requests that got their
	// first token in this step and were not found in the cache.
	ComputedPromptTokens int
}

// Finish ends the step begun by Schedule. It returns false without one.
func (c *Core) Finish(now time.Duration) (*Outcome, bool) {
	if !c.inStep {
		return nil, false
	}
	c.inStep = false
	o := &c.outcome
	*o = Outcome{Outputs: o.Outputs[:0]}
	for _, s := range c.step {
		o.Tokens += s.step
		s.computed += s.step
		s.step = 0
		if s.finish == "" && s.computed == len(s.tokens) {
			o.Outputs = append(o.Outputs, c.generate(s, now))
		}
	}
	for i := range o.Outputs {
		if s := o.Outputs[i].Sequence; o.Outputs[i].Index == 0 {
			o.ComputedPromptTokens += s.PromptTokens() - s.cachedTokens
		}
	}
	c.sweep()
	o.Events = c.pool.events
	c.pool.events, c.spare = c.spare[:0], c.pool.events
	c.pool.arena, c.spareArena = c.spareArena[:0], c.pool.arena
	return o, true
}

// generate appends the next token of s.
func (c *Core) generate(s *Sequence, now time.Duration) Output {
	i := s.OutputTokens()
	token, end := s.req.Generate(i)
	s.tokens = append(s.tokens, token)
	out := Output{Sequence: s, Index: i, Token: token, Previous: s.last}
	if i == 0 {
		s.first = now
		c.counts.PromptTokens += int64(s.PromptTokens())
		c.counts.CachedPromptTokens += int64(s.cachedTokens)
	}
	s.last = now
	c.counts.GeneratedTokens++
	switch {
	case end:
		s.finish = FinishStop
	case i+1 >= s.req.MaxTokens, len(s.tokens) >= c.opts.MaxModelTokens:
		s.finish = FinishLength
	}
	out.Finish = s.finish
	return out
}

// Counters only grow within the life of a Core.
type Counters struct {
	// QueriedTokens and HitTokens are prompt tokens looked up in the cache at
	// admission, and found; readmissions are not counted.
	QueriedTokens, HitTokens int64
	// PromptTokens are those of requests that got their first token;
	// CachedPromptTokens of these came from the cache.
	PromptTokens, CachedPromptTokens int64
	GeneratedTokens                  int64
	Preemptions                      int64
}

// Status is the state of the rank between two steps.
type Status struct {
	Running, Waiting int
	// UsedBlocks are referenced, CachedBlocks findable by their hash; a block
	// can be both, one, or neither.
	UsedBlocks, CachedBlocks int
	// UsableBlocks is the size of the pool without the block never used.
	UsableBlocks int
	// RunningAdapters and WaitingAdapters are the names in use, in order of
	// their requests, each once.
	RunningAdapters, WaitingAdapters []string
	Counters                         Counters
}

// Status reads the rank's state.
func (c *Core) Status() Status {
	return Status{
		Running: len(c.running), Waiting: len(c.waiting),
		UsedBlocks: c.pool.used(), CachedBlocks: c.pool.copies, UsableBlocks: c.opts.PoolBlocks - 1,
		RunningAdapters: adapters(c.running), WaitingAdapters: adapters(c.waiting),
		Counters: c.counts,
	}
}

func adapters(list []*Sequence) []string {
	var names []string
	for _, s := range list {
		if a := s.req.Adapter; a != nil && !slices.Contains(names, a.Name) {
			names = append(names, a.Name)
		}
	}
	return names
}
