package core

import (
	"errors"
	"fmt"
	"time"
)

// Options configures one rank of an engine.
type Options struct {
	// BlockTokens is the number of tokens per KV block.
	BlockTokens int
	// PoolBlocks is the number of KV blocks; one of them is never usable.
	PoolBlocks int
	// MaxModelTokens is the longest prompt and answer together. One request of
	// this length must fit into the pool.
	MaxModelTokens int
	// StepTokens is the largest number of tokens computed in one step.
	StepTokens int
	// MaxRunning is the largest number of running requests.
	MaxRunning int
	// HashSeed is the engine's PYTHONHASHSEED; empty: unset.
	HashSeed string
	// StepTime is the duration of a step.
	StepTime StepTime
}

// Validate names the field that cannot work.
func (o Options) Validate() error {
	for _, f := range []struct {
		name  string
		value int
	}{
		{"BlockTokens", o.BlockTokens},
		{"PoolBlocks", o.PoolBlocks},
		{"MaxModelTokens", o.MaxModelTokens},
		{"StepTokens", o.StepTokens},
		{"MaxRunning", o.MaxRunning},
	} {
		if f.value < 1 || f.value > 1<<30 {
			return fmt.Errorf("%s is %d: want 1 to 2^30", f.name, f.value)
		}
	}
	if usable := (o.PoolBlocks - 1) * o.BlockTokens; o.MaxModelTokens > usable {
		return fmt.Errorf("MaxModelTokens is %d but the pool holds %d tokens (PoolBlocks-1 blocks of BlockTokens): raise PoolBlocks", o.MaxModelTokens, usable)
	}
	return o.StepTime.Validate()
}

// ErrRequest is a request that the engine refuses.
var ErrRequest = errors.New("request refused")

// Core is one rank's scheduler and cache. It is not safe for concurrent use.
type Core struct {
	opts    Options
	pool    *pool
	hasher  *hasher
	running []*Sequence
	waiting []*Sequence // in order of admission
	byID    map[string]*Sequence
	inStep  bool
	step    []*Sequence // those computed in the current step
	counts  Counters
	outcome Outcome
	// spare and spareArena back the last outcome and are overwritten next.
	spare      []Event
	spareArena []Hash
}

// New makes an idle rank with an empty cache.
func New(o Options) (*Core, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	return &Core{opts: o, pool: newPool(o.PoolBlocks), hasher: newHasher(o.HashSeed), byID: make(map[string]*Sequence)}, nil
}

// Add puts a request at the end of the waiting queue.
func (c *Core) Add(r Request, now time.Duration) (*Sequence, error) {
	switch {
	case len(r.Prompt) == 0:
		return nil, fmt.Errorf("%w: the prompt is empty", ErrRequest)
	case len(r.Prompt) >= c.opts.MaxModelTokens:
		return nil, fmt.Errorf("%w: the prompt has %d tokens and the model's limit with the answer is %d", ErrRequest, len(r.Prompt), c.opts.MaxModelTokens)
	case r.MaxTokens < 1:
		return nil, fmt.Errorf("%w: MaxTokens is %d: want at least 1", ErrRequest, r.MaxTokens)
	case r.Generate == nil:
		return nil, fmt.Errorf("%w: Generate is not set", ErrRequest)
	case c.byID[r.ID] != nil:
		return nil, fmt.Errorf("%w: request id %q is in use", ErrRequest, r.ID)
	}
	s := &Sequence{req: r, cachedTokens: -1, arrived: now}
	// The copy leaves room for the answer, so that growing seldom moves it.
	s.tokens = append(make([]uint32, 0, len(r.Prompt)+min(r.MaxTokens, 1024)), r.Prompt...)
	c.byID[r.ID] = s
	c.waiting = append(c.waiting, s)
	return s, nil
}

// Abort ends a request. Its blocks stay cached. It reports whether the request
// was live.
func (c *Core) Abort(id string) bool {
	s := c.byID[id]
	if s == nil {
		return false
	}
	s.finish = FinishAbort
	if !c.inStep {
		c.sweep()
	}
	return true
}

// Reset forgets the whole cache. It fails while a request holds blocks, unless
// evictRunning: then every running request goes back to the head of the
// waiting queue and is computed again. It must not be called within a step.
func (c *Core) Reset(evictRunning bool) bool {
	if c.inStep {
		return false
	}
	for evictRunning && len(c.running) > 0 {
		c.preempt(len(c.running) - 1)
	}
	return c.pool.reset()
}

// EvictSilently forgets up to n unreferenced blocks, longest released first,
// without an event, and returns how many it forgot.
func (c *Core) EvictSilently(n int) int { return c.pool.evictSilently(n) }

// Idle says that there is nothing to schedule. Events may still be pending.
func (c *Core) Idle() bool { return len(c.running) == 0 && len(c.waiting) == 0 }

// sweep removes ended requests and frees their blocks.
func (c *Core) sweep() {
	ended := func(list []*Sequence) []*Sequence {
		kept := list[:0]
		for _, s := range list {
			if s.finish == "" {
				kept = append(kept, s)
				continue
			}
			c.pool.release(s.blocks)
			s.blocks = nil
			delete(c.byID, s.req.ID)
		}
		clear(list[len(kept):])
		return kept
	}
	c.running = ended(c.running)
	c.waiting = ended(c.waiting)
}
