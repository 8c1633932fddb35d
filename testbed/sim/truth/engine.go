package truth

import (
	"errors"
	"fmt"
	"slices"

	"waypost/testbed/sim/prompt"
)

// ErrOptions is wrapped by every error of New.
var ErrOptions = errors.New("bad engine options")

// The mock engine's defaults.
const (
	DefaultPoolBlocks = 16_384
	DefaultStepTokens = 8192
	DefaultMaxRunning = 256
)

// Options configures an engine. Zero values take the mock engine's defaults.
type Options struct {
	// BlockTokens is the number of tokens per KV block, 64; PoolBlocks the
	// number of blocks, 16,384.
	BlockTokens, PoolBlocks int
	// StepTokens is the budget of tokens of one step, 8,192; MaxRunning the
	// largest batch, 256.
	StepTokens, MaxRunning int
	// StepTime is how long steps take, Mocker.
	StepTime StepTime
}

func (o *Options) setDefaults() error {
	for _, f := range [...]struct {
		name  string
		value *int
		usual int
	}{
		{"blockTokens", &o.BlockTokens, prompt.BlockTokens},
		{"poolBlocks", &o.PoolBlocks, DefaultPoolBlocks},
		{"stepTokens", &o.StepTokens, DefaultStepTokens},
		{"maxRunning", &o.MaxRunning, DefaultMaxRunning},
	} {
		if *f.value == 0 {
			*f.value = f.usual
		}
		if *f.value < 1 || *f.value > 1<<24 {
			return fmt.Errorf("%w: %s: %d is not in 1 to 2^24", ErrOptions, f.name, *f.value)
		}
	}
	if o.StepTime == nil {
		o.StepTime = Mocker
	}
	return nil
}

// Request is one request in an engine. The engine fills the outcome.
type Request struct {
	Prompt *prompt.Prompt
	// OutputTokens is the length of the answer, at least 1.
	OutputTokens int

	// ReusedTokens were found in the cache at the first admission; −1 before.
	ReusedTokens int
	// FirstMs and LastMs are when the first and the last token were ready.
	FirstMs, LastMs float64
	// Preemptions counts how often it lost its blocks.
	Preemptions int

	blocks []int32
	// sampled counts output tokens, computed the tokens whose KV exists in
	// this residency, step those that the step in flight computes.
	sampled, computed, step int
	// named is the number of leading blocks that are findable.
	named int
	// decodes says that it got a token in this residency.
	decodes bool
	// cancelled says that it is to be dropped.
	cancelled bool
}

// Sampled is the number of output tokens so far.
func (r *Request) Sampled() int { return r.sampled }

// Computed is the number of its tokens whose KV exists, Context its prompt and
// output so far.
func (r *Request) Computed() int { return r.computed }

// Context is the length of its prompt and output so far.
func (r *Request) Context() int { return r.Prompt.Tokens + r.sampled }

// Engine is one worker's engine. It is not safe for concurrent use.
type Engine struct {
	options Options
	pool    *pool
	running []*Request
	waiting []*Request
	step    []*Request // in the step in flight
	inStep  bool
	outcome Outcome
	counts  Counters
}

// Counters are what the engine's metrics tell; the sums only grow.
type Counters struct {
	Running, Waiting, HeldBlocks int
	// PromptTokens are those of requests that got their first token, of which
	// ComputedTokens were not found in the cache.
	PromptTokens, ComputedTokens int
	// Generated counts output tokens, FirstTokens and Finished requests.
	Generated, FirstTokens, Finished int
}

// Outcome is what a step brought; it is valid until the next Begin.
type Outcome struct {
	// First got their first token, Done their last; a request may be in both.
	First, Done []*Request
	// Cache is what entered and left the cache since the last outcome, in
	// order, prompt blocks only.
	Cache []CacheEvent
}

// CacheEvent says that a prompt block became findable, or ceased to be.
type CacheEvent struct {
	Name    uint32
	Removed bool
	// Depth counts the blocks up to it in the prompt that stored it.
	Depth int32
}

// New makes an idle engine with an empty cache.
func New(o Options) (*Engine, error) {
	if err := o.setDefaults(); err != nil {
		return nil, err
	}
	return &Engine{options: o, pool: newPool(o.PoolBlocks)}, nil
}

// Add puts a request at the end of the queue. A prompt that can never fit
// with its answer is refused.
func (e *Engine) Add(r *Request) error {
	if need := e.blocksFor(r.Prompt.Tokens + r.OutputTokens); r.Prompt.Tokens < 1 || r.OutputTokens < 1 || need > e.pool.size() {
		return fmt.Errorf("engine: a prompt of %d and an answer of %d tokens: want at least 1 each and at most %d blocks of %d", r.Prompt.Tokens, r.OutputTokens, e.pool.size(), e.options.BlockTokens)
	}
	r.ReusedTokens = -1
	e.waiting = append(e.waiting, r)
	return nil
}

// InStep says that a step is in flight.
func (e *Engine) InStep() bool { return e.inStep }

// Counters reads the metrics.
func (e *Engine) Counters() Counters {
	c := e.counts
	c.Running, c.Waiting, c.HeldBlocks = len(e.running), len(e.waiting), e.pool.size()-e.pool.available()
	return c
}

// Cached is the number of leading blocks of a prompt that the engine has,
// held by requests or not.
func (e *Engine) Cached(p *prompt.Prompt) int {
	for i, name := range p.Blocks {
		if e.pool.index.find(name) == none {
			return i
		}
	}
	return len(p.Blocks)
}

func (e *Engine) blocksFor(tokens int) int {
	return (tokens + e.options.BlockTokens - 1) / e.options.BlockTokens
}

// hits is the number of blocks of a prompt that spare computing: the last
// token is always computed, and so is its block.
func (e *Engine) hits(p *prompt.Prompt) int {
	return min(e.Cached(p), (p.Tokens-1)/e.options.BlockTokens)
}

// Begin schedules the next step and returns how long it takes; false if there
// is nothing to do or a step is in flight. Running requests come first, each
// with one token or its next piece of prompt, then waiting ones in order
// while tokens and places are left.
func (e *Engine) Begin() (ms float64, ok bool) {
	if e.inStep || len(e.running)+len(e.waiting) == 0 {
		return 0, false
	}
	e.step = e.step[:0]
	budget := e.options.StepTokens
	work := Step{Running: len(e.running), PoolTokens: e.pool.size() * e.options.BlockTokens}
	preempted := false
	for i := 0; i < len(e.running) && budget > 0; i++ {
		r := e.running[i]
		n := min(r.Context()-r.computed, budget)
		for !e.allocate(r, n) {
			preempted = true
			if e.preempt() == r {
				n = 0
				break
			}
		}
		if n == 0 {
			break
		}
		budget -= n
		e.include(r, n, &work)
	}
	if !preempted {
		e.admit(budget, &work)
	}
	if len(e.step) == 0 {
		return 0, false
	}
	e.inStep = true
	work.Running = len(e.running)
	return e.options.StepTime(work), true
}

// admit takes requests from the head of the queue. The first whose whole
// prompt does not fit stops it: nobody overtakes.
func (e *Engine) admit(budget int, work *Step) {
	for len(e.waiting) > 0 && budget > 0 && len(e.running) < e.options.MaxRunning {
		r := e.waiting[0]
		hits := e.hits(r.Prompt)
		if e.blocksFor(r.Context())-hits > e.pool.available() {
			return
		}
		for _, name := range r.Prompt.Blocks[:hits] {
			b := e.pool.index.find(name)
			e.pool.hold(b)
			r.blocks = append(r.blocks, b)
		}
		r.named, r.computed = hits, hits*e.options.BlockTokens
		n := min(r.Context()-r.computed, budget)
		if !e.allocate(r, n) {
			e.pool.release(r.blocks, r.named)
			r.blocks, r.named, r.computed = r.blocks[:0], 0, 0
			return
		}
		if r.ReusedTokens < 0 {
			r.ReusedTokens = r.computed
		}
		e.waiting = slices.Delete(e.waiting, 0, 1)
		e.running = append(e.running, r)
		budget -= n
		e.include(r, n, work)
	}
}

// allocate gives r blocks for its next n tokens and makes the full ones of
// the prompt findable at once. It changes nothing if they do not fit.
func (e *Engine) allocate(r *Request, n int) bool {
	after := r.computed + n
	need := e.blocksFor(after)
	if need > len(r.blocks)+e.pool.available() {
		return false
	}
	full := min(after/e.options.BlockTokens, len(r.Prompt.Blocks))
	for i := r.named; i < full; i++ {
		name := r.Prompt.Blocks[i]
		if i < len(r.blocks) {
			r.blocks[i] = e.pool.publish(r.blocks[i], name, i+1)
			continue
		}
		if b := e.pool.index.find(name); b != none {
			e.pool.hold(b)
			r.blocks = append(r.blocks, b)
			continue
		}
		r.blocks = append(r.blocks, e.pool.publish(e.pool.take(), name, i+1))
	}
	r.named = max(r.named, full)
	for len(r.blocks) < need {
		r.blocks = append(r.blocks, e.pool.take())
	}
	return true
}

func (e *Engine) include(r *Request, n int, work *Step) {
	r.step = n
	e.step = append(e.step, r)
	if r.decodes {
		work.Decoding++
		work.ContextTokens += r.Context()
		return
	}
	// What a preempted request had answered is recomputed for nothing.
	work.PromptTokens += max(min(r.computed+n, r.Prompt.Tokens)-r.computed, 0)
}

// preempt sends the request admitted last back to the head of the queue; all
// it computed is lost but for what stays cached.
func (e *Engine) preempt() *Request {
	last := len(e.running) - 1
	r := e.running[last]
	e.running = e.running[:last]
	e.pool.release(r.blocks, r.computed/e.options.BlockTokens)
	r.blocks, r.computed, r.named, r.decodes = r.blocks[:0], 0, 0, false
	r.Preemptions++
	e.waiting = slices.Insert(e.waiting, 0, r)
	return r
}

// Cancel ends a request before its time. Its blocks stay cached.
func (e *Engine) Cancel(r *Request) {
	r.cancelled = true
	if !e.inStep {
		e.sweep()
	}
}

// sweep removes what ended.
func (e *Engine) sweep() {
	ended := func(r *Request) bool { return r.cancelled || r.sampled == r.OutputTokens }
	for _, r := range e.running {
		if ended(r) {
			e.pool.release(r.blocks, r.computed/e.options.BlockTokens)
			r.blocks = nil
		}
	}
	e.running = slices.DeleteFunc(e.running, ended)
	e.waiting = slices.DeleteFunc(e.waiting, ended)
}

// Backlog is the time from the end of the step in flight until all prompts
// that are here now would be computed, with the decode load as it is.
func (e *Engine) Backlog() float64 {
	left := 0
	for _, r := range e.running {
		if !r.decodes {
			left += max(r.Prompt.Tokens-r.computed-r.step, 0)
		}
	}
	for _, r := range e.waiting {
		left += r.Prompt.Tokens - e.hits(r.Prompt)*e.options.BlockTokens
	}
	return e.PrefillMs(left)
}

// Prefills says that the step in flight computes prompt tokens.
func (e *Engine) Prefills() bool {
	if !e.inStep {
		return false
	}
	for _, r := range e.step {
		if !r.decodes {
			return true
		}
	}
	return false
}

// PrefillMs is how long steps of their own take for so many prompt tokens,
// with the decode load as it is.
func (e *Engine) PrefillMs(tokens int) float64 {
	ms := 0.0
	load := e.load()
	budget := max(e.options.StepTokens-load.Decoding, 1)
	for tokens > 0 {
		load.PromptTokens = min(tokens, budget)
		ms += e.options.StepTime(load)
		tokens -= load.PromptTokens
	}
	return ms
}

// load is a step in which everybody past the prompt decodes.
func (e *Engine) load() Step {
	s := Step{Running: len(e.running), PoolTokens: e.pool.size() * e.options.BlockTokens}
	for _, r := range e.running {
		if r.decodes {
			s.Decoding++
			s.ContextTokens += r.Context()
		}
	}
	return s
}

// Uncached is the number of a prompt's tokens that would be computed.
func (e *Engine) Uncached(p *prompt.Prompt) int {
	return p.Tokens - e.hits(p)*e.options.BlockTokens
}

// Finish ends the step in flight.
func (e *Engine) Finish(nowMs float64) *Outcome {
	o := &e.outcome
	o.First, o.Done = o.First[:0], o.Done[:0]
	for _, r := range e.step {
		r.computed += r.step
		r.step = 0
		if r.computed < r.Context() || r.cancelled {
			continue
		}
		r.sampled++
		r.decodes = true
		e.counts.Generated++
		if r.sampled == 1 {
			e.counts.FirstTokens++
			e.counts.PromptTokens += r.Prompt.Tokens
			e.counts.ComputedTokens += r.Prompt.Tokens - r.ReusedTokens
			r.FirstMs = nowMs
			o.First = append(o.First, r)
		}
		if r.sampled == r.OutputTokens {
			e.counts.Finished++
			r.LastMs = nowMs
			o.Done = append(o.Done, r)
		}
	}
	e.inStep = false
	e.sweep()
	o.Cache, e.pool.events = e.pool.events, o.Cache[:0]
	return o
}
