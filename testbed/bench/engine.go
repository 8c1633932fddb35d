package bench

import (
	"math"
	"unsafe"

	"github.com/zeebo/xxh3"

	"waypost/agent/blocktable"
	"waypost/testbed/workload"
)

// The simulated engine, as in the design's study.
const (
	stepTokens         = 2048 // prefill tokens per step
	prefillTokensPerMs = 20.  // 20,000 tokens/s
	decodeMsPerToken   = 25.  // whatever the batch
	prefillMsPerToken  = 1 / prefillTokensPerMs
	never              = math.MaxFloat64
)

// job is one request at an engine.
type job struct {
	tokens    []uint32 // prompt and answer
	hashes    []uint64 // of the whole blocks of tokens
	prompt    int      // tokens
	computed  int      // tokens whose KV is in blocks
	blocks    []uint32
	named     int // blocks that are named in the cache
	reserved  int // blocks it may still take
	firstMs   float64
	nextMs    float64 // when its next block of answer is full, or it ends
	arrivalMs float64
	queued    int // prompt tokens that were expected to be computed at arrival
}

// tape records what an engine publishes until it is applied.
type tape struct {
	events []blocktable.Event
	hashes []uint64
	tokens []uint32
	// batches are the ends in events of what one engine step published.
	batches []int
	blocks  int // block events: each hash of a store or removal
}

func (t *tape) reset() {
	t.events, t.hashes, t.tokens, t.batches, t.blocks = t.events[:0], t.hashes[:0], t.tokens[:0], t.batches[:0], 0
}

// engine is one simulated engine: one prefill at a time in order of arrival,
// in steps; all answers grow beside it.
type engine struct {
	cache    *cache
	tape     tape
	waiting  []*job
	prefill  *job
	stepEnd  float64 // of the prefill's step; never: none
	step     int     // tokens of the step
	decoding jobHeap
	reserved int
	jobs     *jobPool

	// appeared and vanished are told the first and last copy of a block.
	appeared, vanished func(hash uint64)

	queued     int // prefill tokens that are waiting, the present request's included
	prompts    int // prompt tokens of counted requests
	hits       int // of which found in the cache
	requests   int
	stored     int // blocks
	busyMs     float64
	fullWaits  int // requests that waited for blocks
	refused    int // requests larger than the pool
	waitedFull bool
}

func newEngine(blocks int, jobs *jobPool) *engine {
	e := &engine{cache: newCache(blocks), stepEnd: never, jobs: jobs}
	e.cache.evicted = e.evicted
	return e
}

// jobPool keeps ended jobs for their memory.
type jobPool struct{ spare []*job }

// newJob prepares a request: its tokens and the names of its blocks.
func (p *jobPool) newJob(r *workload.Request) *job {
	j := &job{}
	if n := len(p.spare); n > 0 {
		j, p.spare = p.spare[n-1], p.spare[:n-1]
		*j = job{tokens: j.tokens[:0], hashes: j.hashes[:0], blocks: j.blocks[:0]}
	}
	fillJob(j, r)
	return j
}

// fillJob expands a request into a job.
func fillJob(j *job, r *workload.Request) {
	j.arrivalMs = r.ArrivalMs
	j.tokens = r.Prompt.AppendTokens(j.tokens)
	j.prompt = len(j.tokens)
	out := max(1, r.OutputTokens)
	if r.Answer != nil {
		j.tokens = r.Answer.AppendTokens(j.tokens)
	} else {
		// Nobody repeats this answer: text of its own.
		only := workload.SegmentPrompt{FirstToken: 1000, TokenCount: 64000, Segments: []workload.Segment{
			{Name: math.Float64bits(r.ArrivalMs) ^ r.Conversation<<32, Tokens: out},
		}}
		j.tokens = only.AppendTokens(j.tokens)
	}
	j.hashes = appendBlockHashes(j.hashes, j.tokens)
}

// appendBlockHashes appends the chained hashes of the whole blocks of tokens.
func appendBlockHashes(dst []uint64, tokens []uint32) []uint64 {
	before := uint64(0)
	for len(tokens) >= blockTokens {
		b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), blockTokens*4)
		before = max(1, xxh3.HashSeed(b, before))
		dst = append(dst, before)
		tokens = tokens[blockTokens:]
	}
	return dst
}

// most is how much of a prompt an engine reuses at most: whole blocks that
// leave a token to compute.
func most(promptTokens int) int { return (promptTokens - 1) / blockTokens }

// match is the number of leading blocks of a prompt in the cache.
func (e *engine) match(j *job) int {
	n := 0
	for n < most(j.prompt) && e.cache.find(j.hashes[n]) != 0 {
		n++
	}
	return n
}

// submit queues a request of which uncached prompt tokens must be computed as
// far as is known. One that the pool can never hold is refused, as engines do.
func (e *engine) submit(j *job, uncached int, now float64) {
	if j.pool() > len(e.cache.blocks)-1 {
		e.refused++
		e.jobs.spare = append(e.jobs.spare, j)
		return
	}
	j.queued = uncached
	e.queued += uncached
	e.waiting = append(e.waiting, j)
	e.begin(now)
}

// next is when the engine does something next.
func (e *engine) next() float64 {
	if len(e.decoding) > 0 {
		return min(e.stepEnd, e.decoding[0].nextMs)
	}
	return e.stepEnd
}

// advance does what is due next.
func (e *engine) advance() {
	if len(e.decoding) > 0 && e.decoding[0].nextMs <= e.stepEnd {
		e.decode(e.decoding[0])
		return
	}
	e.endStep()
}

// advanceTo does everything that is due up to now.
func (e *engine) advanceTo(now float64) {
	for e.next() <= now {
		e.advance()
	}
}

// begin takes up the next request if the engine is free and has room for it.
func (e *engine) begin(now float64) {
	if e.prefill != nil || len(e.waiting) == 0 {
		return
	}
	j := e.waiting[0]
	hits := e.match(j)
	idle := 0 // hits that wait for eviction: they are not free any more
	for _, h := range j.hashes[:hits] {
		if b := e.cache.find(h); e.cache.blocks[b].uses == 0 {
			idle++
		}
	}
	need := j.pool() - hits
	if e.cache.free-idle-e.reserved < need {
		if !e.waitedFull {
			e.fullWaits++
			e.waitedFull = true
		}
		return
	}
	e.waitedFull = false
	e.waiting = append(e.waiting[:0], e.waiting[1:]...)
	for _, h := range j.hashes[:hits] {
		b := e.cache.find(h)
		e.cache.use(b)
		j.blocks = append(j.blocks, b)
	}
	j.named, j.computed, j.reserved = hits, hits*blockTokens, need
	e.reserved += need
	e.count(j, hits*blockTokens)
	e.prefill = j
	e.beginStep(now)
}

func (e *engine) count(j *job, hitTokens int) {
	// What waits is known exactly from now on.
	e.queued += j.prompt - hitTokens - j.queued
	j.queued = j.prompt - hitTokens
	e.prompts += j.prompt
	e.hits += hitTokens
	e.requests++
}

func (e *engine) beginStep(now float64) {
	j := e.prefill
	e.step = min(stepTokens, j.prompt-j.computed)
	e.stepEnd = now + float64(e.step)*prefillMsPerToken
	e.busyMs += float64(e.step) * prefillMsPerToken
}

// endStep computes the tokens of the present step.
func (e *engine) endStep() {
	j, now := e.prefill, e.stepEnd
	e.queued -= e.step
	j.queued -= e.step
	e.compute(j, j.computed+e.step)
	if j.computed < j.prompt {
		e.beginStep(now)
		return
	}
	e.prefill, e.stepEnd = nil, never
	j.firstMs = now
	e.plan(j)
	e.decoding.push(j)
	e.begin(now)
}

// pool is how many blocks a job takes in the end.
func (j *job) pool() int { return (len(j.tokens) + blockTokens - 1) / blockTokens }

// kept is how many tokens of a job are ever in blocks: the last token of an
// answer is not computed.
func (j *job) kept() int { return len(j.tokens) - 1 }

// plan sets when a decoding job fills its next block, or ends.
func (e *engine) plan(j *job) {
	at := min((j.computed/blockTokens+1)*blockTokens, j.kept())
	tokens := at - j.prompt
	if j.computed == j.kept() {
		tokens = len(j.tokens) - j.prompt // the end
	}
	j.nextMs = j.firstMs + float64(tokens)*decodeMsPerToken
}

// decode lets a job reach what was planned.
func (e *engine) decode(j *job) {
	now := j.nextMs
	if j.computed < j.kept() {
		e.compute(j, min((j.computed/blockTokens+1)*blockTokens, j.kept()))
		e.plan(j)
		e.decoding.fixFirst()
		return
	}
	e.decoding.popFirst()
	for i := len(j.blocks) - 1; i >= 0; i-- {
		e.cache.release(j.blocks[i])
	}
	e.reserved -= j.reserved
	e.jobs.spare = append(e.jobs.spare, j)
	e.begin(now)
}

// compute fills blocks up to a number of tokens and names the full ones.
func (e *engine) compute(j *job, upTo int) {
	defer e.tape.endBatch()
	for len(j.blocks)*blockTokens < upTo {
		j.blocks = append(j.blocks, e.cache.take())
		j.reserved--
		e.reserved--
	}
	j.computed = upTo
	from, to := j.named, upTo/blockTokens
	if to == from {
		return
	}
	ev := blocktable.Event{Op: blocktable.OpStore, Spec: blocktable.SpecFull, BlockTokens: blockTokens, HasParent: from > 0}
	if from > 0 {
		ev.Parent = j.hashes[from-1]
	}
	before := ev.Parent
	for i := from; i < to; i++ {
		if e.cache.store(j.blocks[i], j.hashes[i], before) && e.appeared != nil {
			e.appeared(j.hashes[i])
		}
		before = j.hashes[i]
	}
	t := &e.tape
	ev.Hashes = record(&t.hashes, j.hashes[from:to])
	ev.Tokens = record(&t.tokens, j.tokens[from*blockTokens:to*blockTokens])
	t.events = append(t.events, ev)
	t.blocks += to - from
	e.stored += to - from
	j.named = to
}

// endBatch ends what one step published.
func (t *tape) endBatch() {
	if n := len(t.batches); n == 0 && len(t.events) > 0 || n > 0 && t.batches[n-1] < len(t.events) {
		t.batches = append(t.batches, len(t.events))
	}
}

// record copies values to the end of an arena and returns the copy.
func record[T any](arena *[]T, values []T) []T {
	n := len(*arena)
	*arena = append(*arena, values...)
	return (*arena)[n:len(*arena):len(*arena)]
}

func (e *engine) evicted(hash uint64, last bool) {
	t := &e.tape
	t.events = append(t.events, blocktable.Event{Op: blocktable.OpRemove, Hashes: record(&t.hashes, []uint64{hash})})
	t.blocks++
	if last && e.vanished != nil {
		e.vanished(hash)
	}
}

// jobHeap orders decoding jobs by their next time.
type jobHeap []*job

func (h *jobHeap) push(j *job) {
	*h = append(*h, j)
	s := *h
	for i := len(s) - 1; i > 0; {
		p := (i - 1) / 2
		if s[p].nextMs <= s[i].nextMs {
			return
		}
		s[p], s[i] = s[i], s[p]
		i = p
	}
}

func (h *jobHeap) popFirst() {
	s := *h
	n := len(s) - 1
	s[0], s[n] = s[n], nil
	*h = s[:n]
	h.fixFirst()
}

// fixFirst restores the order after the first job got a later time.
func (h *jobHeap) fixFirst() {
	s := *h
	for i := 0; ; {
		c := 2*i + 1
		if c >= len(s) {
			return
		}
		if c+1 < len(s) && s[c+1].nextMs < s[c].nextMs {
			c++
		}
		if s[i].nextMs <= s[c].nextMs {
			return
		}
		s[i], s[c] = s[c], s[i]
		i = c
	}
}
