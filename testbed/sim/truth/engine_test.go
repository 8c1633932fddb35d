package truth

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"waypost/testbed/sim/prompt"
)

// rig runs one engine step by step and keeps what its steps computed.
type rig struct {
	t     *testing.T
	e     *Engine
	now   float64
	steps []Step
	names uint32
}

func newRig(t *testing.T, o Options) *rig {
	t.Helper()
	r := &rig{t: t}
	clock := o.StepTime
	if clock == nil {
		clock = Mocker
	}
	o.StepTime = func(s Step) float64 {
		r.steps = append(r.steps, s)
		return clock(s)
	}
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	r.e = e
	return r
}

// fresh is a prompt that shares nothing.
func (r *rig) fresh(tokens int) *prompt.Prompt {
	p := &prompt.Prompt{Tokens: tokens}
	for range tokens / r.e.options.BlockTokens {
		r.names++
		p.Blocks = append(p.Blocks, r.names)
	}
	return p
}

func (r *rig) add(p *prompt.Prompt, output int) *Request {
	r.t.Helper()
	q := &Request{Prompt: p, OutputTokens: output}
	if err := r.e.Add(q); err != nil {
		r.t.Fatal(err)
	}
	return q
}

// step runs one step and returns what it computed.
func (r *rig) step() Step {
	r.t.Helper()
	ms, ok := r.e.Begin()
	if !ok {
		r.t.Fatal("nothing to do")
	}
	r.now += ms
	r.e.Finish(r.now)
	return r.steps[len(r.steps)-1]
}

func (r *rig) drain() {
	for {
		ms, ok := r.e.Begin()
		if !ok {
			return
		}
		r.now += ms
		r.e.Finish(r.now)
	}
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(1, math.Abs(a)) }

// Row "step": running requests in order, one token or the next piece of prompt
// each, then waiting ones in order, until the budget or the batch is full.
func TestStepTakesRunningThenWaitingInOrder(t *testing.T) {
	r := newRig(t, Options{StepTokens: 100, MaxRunning: 3, BlockTokens: 8, PoolBlocks: 1000})
	a := r.add(r.fresh(30), 9)
	r.step()
	b, c, d := r.add(r.fresh(150), 9), r.add(r.fresh(40), 9), r.add(r.fresh(10), 9)
	// a decodes first, so 99 tokens are left for b.
	if s := r.step(); s.Decoding != 1 || s.PromptTokens != 99 || b.Computed() != 99 || c.Computed() != 0 {
		t.Errorf("step 2: %+v, b has %d", s, b.Computed())
	}
	// b's rest, then c; d finds the batch of 3 full.
	if s := r.step(); s.Decoding != 1 || s.PromptTokens != 51+40 || d.Computed() != 0 || r.e.Counters().Waiting != 1 {
		t.Errorf("step 3: %+v, %+v", s, r.e.Counters())
	}
	if a.Sampled() != 3 || b.Sampled() != 1 || c.Sampled() != 1 {
		t.Errorf("sampled %d, %d, %d: want 3, 1, 1", a.Sampled(), b.Sampled(), c.Sampled())
	}
	// The default budget and batch.
	big := newRig(t, Options{})
	big.add(big.fresh(10_000), 1)
	if s := big.step(); s.PromptTokens != 8192 {
		t.Errorf("a long prompt's first step has %d tokens, want 8192", s.PromptTokens)
	}
	many := newRig(t, Options{})
	for range 300 {
		many.add(many.fresh(1), 2)
	}
	if s := many.step(); s.PromptTokens != 256 {
		t.Errorf("300 prompts of a token: the step takes %d, want the batch of 256", s.PromptTokens)
	}
}

// Row "step time": P of all prompt tokens of the step and D if anything
// decodes. A request whose prompt ends does not decode in that step.
func TestStepTime(t *testing.T) {
	for _, p := range []struct {
		tokens int
		want   float64
	}{{64, 17.474885}, {1024, 32.490718}, {4096, 85.755980}, {8192, 169.136918}} {
		if got := Mocker(Step{PromptTokens: p.tokens, PoolTokens: 1}); math.Abs(got-p.want) > 1e-5 {
			t.Errorf("P(%d) = %f, want %f", p.tokens, got, p.want)
		}
	}
	for _, d := range []struct{ x, want float64 }{{0, 5.74}, {.25, 17.63375}, {.5, 26.31}} {
		if got := Mocker(Step{Decoding: 1, ContextTokens: int(d.x * 1e6), PoolTokens: 1e6}); math.Abs(got-d.want) > 1e-9 {
			t.Errorf("D(%v) = %v, want %v", d.x, got, d.want)
		}
	}
	r := newRig(t, Options{})
	r.add(r.fresh(1000), 3)
	r.add(r.fresh(500), 3)
	first := r.step()
	if first.Decoding != 0 || first.PromptTokens != 1500 || !near(r.now, Mocker(Step{PromptTokens: 1500, PoolTokens: 1})) {
		t.Errorf("two prompts in one step: %+v in %v ms, want P(1500) alone", first, r.now)
	}
	r.add(r.fresh(200), 3)
	before := r.now
	mixed := r.step()
	want := Mocker(Step{PromptTokens: 200, PoolTokens: 1}) + Mocker(Step{Decoding: 2, ContextTokens: 1502, PoolTokens: 16384 * 64})
	if mixed.Decoding != 2 || !near(r.now-before, want) {
		t.Errorf("mixed step: %+v in %v ms, want %v", mixed, r.now-before, want)
	}
}

// Row "x": tokens and not blocks, the last sampled token included; a shared
// prefix counts once per request.
func TestDecodeContext(t *testing.T) {
	r := newRig(t, Options{})
	p := r.fresh(1000)
	r.add(p, 4)
	r.add(p, 4)
	r.step()
	if s := r.step(); s.ContextTokens != 2*1001 {
		t.Errorf("first decode step of two equal prompts of 1000: context %d, want 2002", s.ContextTokens)
	}
	if s := r.step(); s.ContextTokens != 2*1002 {
		t.Errorf("second: context %d, want 2004", s.ContextTokens)
	}
}

// Row "admission": the whole prompt must fit at that moment, else the queue
// stops and nobody overtakes. Blocks are given piece by piece, so that more
// can be promised than there is.
func TestAdmission(t *testing.T) {
	r := newRig(t, Options{BlockTokens: 8, PoolBlocks: 20, StepTokens: 64})
	a := r.add(r.fresh(80), 2) // 10 blocks
	r.step()
	b, c := r.add(r.fresh(120), 1), r.add(r.fresh(8), 1) // 15 and 1
	r.step()
	if b.Computed() != 0 || c.Computed() != 0 {
		t.Errorf("b has %d and c %d tokens: b does not fit and c must not overtake it", b.Computed(), c.Computed())
	}
	r.drain()
	if a.LastMs == 0 || b.LastMs == 0 || c.LastMs < b.LastMs {
		t.Errorf("ends at %v, %v, %v", a.LastMs, b.LastMs, c.LastMs)
	}
	// When y comes, x has 9 of 20 blocks and y's 11 fit; but y gets them piece
	// by piece, and x grows into the tenth meanwhile.
	over := newRig(t, Options{BlockTokens: 8, PoolBlocks: 20, StepTokens: 16})
	x := over.add(over.fresh(71), 12)
	for x.Sampled() == 0 {
		over.step()
	}
	y := over.add(over.fresh(88), 4)
	if over.step(); y.Computed() == 0 {
		t.Error("y was not admitted though its whole prompt fitted")
	}
	over.drain()
	if x.Preemptions != 0 || y.Preemptions == 0 || y.LastMs == 0 {
		t.Errorf("preempted %d and %d times: want the one admitted last", x.Preemptions, y.Preemptions)
	}
}

// Row "cache visibility": a block can be reused as soon as it is scheduled;
// the last block of a full hit is computed again.
func TestCacheIsVisibleWithinTheStep(t *testing.T) {
	r := newRig(t, Options{})
	p := r.fresh(640)
	a, b := r.add(p, 1), r.add(p, 1)
	if s := r.step(); s.PromptTokens != 640+64 || a.ReusedTokens != 0 || b.ReusedTokens != 576 {
		t.Errorf("equal prompts in one step compute %d tokens, reuse %d and %d: want 704, 0, 576", s.PromptTokens, a.ReusedTokens, b.ReusedTokens)
	}
	longer := &prompt.Prompt{Tokens: 700, Blocks: p.Blocks}
	c := r.add(longer, 1)
	if s := r.step(); s.PromptTokens != 60 || c.ReusedTokens != 640 {
		t.Errorf("a longer one computes %d and reuses %d: want 60 and 640", s.PromptTokens, c.ReusedTokens)
	}
}

// Row "ids", the engine's part: only full blocks are cached.
func TestOnlyFullBlocksAreCached(t *testing.T) {
	r := newRig(t, Options{})
	p := r.fresh(1000) // 15 blocks and 40 tokens
	r.add(p, 1)
	r.drain()
	if len(p.Blocks) != 15 || r.e.Cached(p) != 15 {
		t.Errorf("%d of %d blocks cached, want 15", r.e.Cached(p), len(p.Blocks))
	}
	if q := r.add(p, 1); func() bool { r.drain(); return q.ReusedTokens != 960 }() {
		t.Errorf("reuses %d of 1000 tokens, want 960", q.ReusedTokens)
	}
}

// Rows "output" and "LRU": answers fill blocks that stand in the LRU order like
// others and are never hit; of a released request the tail goes before the
// head.
func TestLRUAndBallast(t *testing.T) {
	r := newRig(t, Options{BlockTokens: 8, PoolBlocks: 20})
	p := r.fresh(80) // 10 blocks
	r.add(p, 1)
	r.drain()
	// 5 blocks of prompt and 10 of answer: 5 must come from p, tail first.
	q := r.fresh(40)
	r.add(q, 81)
	r.drain()
	if got := r.e.Cached(p); got != 5 {
		t.Errorf("%d leading blocks of p are left, want the first 5", got)
	}
	// The answer's blocks are ballast: they are younger than what is left of p
	// and q's prompt, so another prompt takes p's rest first.
	r.add(r.fresh(40), 1)
	r.drain()
	if r.e.Cached(p) != 0 || r.e.Cached(q) != 5 {
		t.Errorf("p has %d and q %d blocks left, want 0 and 5", r.e.Cached(p), r.e.Cached(q))
	}
	// Using a prefix makes it young again, the rest of its prompt stays old.
	r = newRig(t, Options{BlockTokens: 8, PoolBlocks: 20})
	p = r.fresh(80)
	r.add(p, 1)
	r.drain()
	r.add(r.fresh(80), 1)
	r.drain()
	r.add(&prompt.Prompt{Tokens: 33, Blocks: p.Blocks[:4]}, 1)
	r.drain()
	r.add(r.fresh(48), 1)
	r.drain()
	if got := r.e.Cached(p); got != 4 {
		t.Errorf("%d blocks of p are left, want the 4 that were used again", got)
	}
}

// Row "preemption": last admitted first, to the head of the queue; its own
// blocks may be hit again and recomputed output costs nothing in P.
func TestPreemption(t *testing.T) {
	r := newRig(t, Options{BlockTokens: 8, PoolBlocks: 12})
	a, b := r.add(r.fresh(40), 50), r.add(r.fresh(40), 50) // 5 blocks each
	c := r.add(r.fresh(8), 1)
	for b.Preemptions == 0 {
		r.step()
	}
	if a.Preemptions != 0 {
		t.Fatal("the one admitted first was preempted")
	}
	if r.e.waiting[0] != b || b.Computed() != 0 {
		t.Error("the preempted request is not at the head of the queue, with nothing computed")
	}
	answered := b.Sampled()
	for b.Computed() == 0 {
		r.step()
	}
	s := r.steps[len(r.steps)-1]
	for _, s := range r.steps[1:] {
		if s.PromptTokens > 40 {
			t.Errorf("a step computes %d prompt tokens: what was answered costs nothing again", s.PromptTokens)
		}
	}
	if s.PromptTokens < 1 || s.PromptTokens > 40 || answered == 0 {
		t.Errorf("readmission computes %d prompt tokens after %d answered", s.PromptTokens, answered)
	}
	r.drain()
	if a.LastMs == 0 || b.LastMs == 0 || c.LastMs == 0 || b.Sampled() != 50 {
		t.Error("not everybody was served")
	}
}

// Row "TTFT": to the end of the step with the first token.
func TestFirstTokenIsTheEndOfItsStep(t *testing.T) {
	r := newRig(t, Options{})
	q := r.add(r.fresh(20_000), 2)
	r.drain()
	p := func(n int) float64 { return Mocker(Step{PromptTokens: n, PoolTokens: 1}) }
	want := 2*p(8192) + p(20_000-2*8192)
	if !near(q.FirstMs, want) {
		t.Errorf("first token at %v, want %v", q.FirstMs, want)
	}
	if d := Mocker(Step{Decoding: 1, ContextTokens: 20_001, PoolTokens: 16384 * 64}); !near(q.LastMs-q.FirstMs, d) {
		t.Errorf("second token %v later, want %v", q.LastMs-q.FirstMs, d)
	}
}

func TestCancel(t *testing.T) {
	r := newRig(t, Options{})
	a, b := r.add(r.fresh(10_000), 5), r.add(r.fresh(100), 5)
	r.e.Begin()
	r.e.Cancel(a)
	r.e.Cancel(b)
	r.e.Finish(1)
	if c := r.e.Counters(); c.Running+c.Waiting+c.HeldBlocks != 0 || a.Sampled() != 0 {
		t.Errorf("after both were cancelled: %+v", c)
	}
	if _, ok := r.e.Begin(); ok {
		t.Error("there is still something to do")
	}
}

func TestBadRequestsAndOptions(t *testing.T) {
	if _, err := New(Options{PoolBlocks: -1}); err == nil {
		t.Error("a negative pool was accepted")
	}
	r := newRig(t, Options{BlockTokens: 8, PoolBlocks: 4})
	for _, q := range []Request{
		{Prompt: r.fresh(40), OutputTokens: 1},
		{Prompt: &prompt.Prompt{}, OutputTokens: 1},
		{Prompt: r.fresh(8)},
	} {
		if r.e.Add(&q) == nil {
			t.Errorf("accepted %+v", q)
		}
	}
}

// The backlog is what a prompt that comes now waits for.
func TestBacklog(t *testing.T) {
	r := newRig(t, Options{StepTime: Linear, StepTokens: 2048})
	r.add(r.fresh(5000), 1)
	r.add(r.fresh(300), 1)
	ms, _ := r.e.Begin()
	probe := r.add(r.fresh(64), 1)
	r.e.waiting = r.e.waiting[:len(r.e.waiting)-1]
	want := ms + r.e.Backlog()
	r.e.waiting = append(r.e.waiting, probe)
	r.now += ms
	r.e.Finish(r.now)
	r.drain()
	// The probe joins the last step, for .05 ms per token.
	if got := probe.FirstMs - .05*64; !near(got, want) {
		t.Errorf("waited %v, the backlog said %v", got, want)
	}
}

// Whatever happens, every block is free, cached once or held, and everybody
// is served.
func TestInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := Options{BlockTokens: 8, PoolBlocks: rapid.IntRange(8, 40).Draw(t, "pool"), StepTokens: rapid.IntRange(4, 64).Draw(t, "budget"), MaxRunning: rapid.IntRange(1, 8).Draw(t, "batch")}
		e, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		var all []*Request
		now := 0.0
		for i := range 40 {
			if i < 20 {
				tokens := 1 + rng.IntN(8*o.PoolBlocks/2)
				p := &prompt.Prompt{Tokens: tokens}
				for b := range tokens / 8 {
					p.Blocks = append(p.Blocks, uint32(1+b+100*rng.IntN(2)*min(b, 1)))
				}
				slices.Sort(p.Blocks) // prefix names must not branch back
				q := &Request{Prompt: p, OutputTokens: 1 + rng.IntN(20)}
				if e.Add(q) == nil {
					all = append(all, q)
				}
			}
			if ms, ok := e.Begin(); ok {
				now += ms
				e.Finish(now)
			}
			checkPool(t, e)
		}
		for range 10_000 {
			ms, ok := e.Begin()
			if !ok {
				break
			}
			now += ms
			e.Finish(now)
		}
		for _, q := range all {
			if q.Sampled() != q.OutputTokens {
				t.Fatalf("a request has %d of %d tokens", q.Sampled(), q.OutputTokens)
			}
		}
		if held := e.Counters().HeldBlocks; held != 0 {
			t.Fatalf("%d blocks are held by nobody", held)
		}
	})
}

func checkPool(t *rapid.T, e *Engine) {
	p := e.pool
	listed := 0
	for b := p.head; b != none; b = p.next[b] {
		listed++
		if p.refs[b] != 0 {
			t.Fatal("a held block is in the LRU list")
		}
	}
	held := 0
	for b := range p.refs {
		if p.refs[b] > 0 {
			held++
		}
		if n := p.name[b]; n != anonymous && p.index.find(n) != int32(b) {
			t.Fatalf("block %d is not found by its name", b)
		}
	}
	if listed != p.cached || len(p.free)+p.cached+held != p.size() {
		t.Fatalf("%d free, %d cached, %d listed, %d held of %d", len(p.free), p.cached, listed, held, p.size())
	}
}
