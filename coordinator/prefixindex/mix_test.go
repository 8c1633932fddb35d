package prefixindex

import (
	"math/rand/v2"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// The mix: chats that begin with one of 200 system prompts of Zipf popularity,
// questions about one of 4,000 documents of Zipf popularity that a router sends
// where they were asked before, and agents, whose long contexts fork and are
// edited. A piece of text is a segment; blocks are of 16 tokens.

const blockTokens = 16

// piece is a stretch of a prompt that comes from one segment.
type piece struct {
	segment    uint64
	start, end uint32 // depth in tokens
}

// prompt is a sequence of pieces.
type prompt []piece

func (p prompt) tokens() uint32 {
	if len(p) == 0 {
		return 0
	}
	return p[len(p)-1].end
}

func (p prompt) plus(segment uint64, blocks int) prompt {
	return append(p[:len(p):len(p)], piece{segment, p.tokens(), p.tokens() + uint32(blocks)*blockTokens})
}

// cut is the first part of a prompt.
func (p prompt) cut(tokens uint32) prompt {
	var out prompt
	for _, s := range p {
		if s.start < tokens {
			out = append(out, piece{s.segment, s.start, min(s.end, tokens)})
		}
	}
	return out
}

// append writes the prompt's token ids.
func (p prompt) append(dst []uint32) []uint32 {
	for _, s := range p {
		x := s.segment*0x9e3779b97f4a7c15 + 1
		for range s.end - s.start {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
			dst = append(dst, uint32(x>>40))
		}
	}
	return dst
}

// mix draws the requests of one worker out of many.
type mix struct {
	rng      *rand.Rand
	shared   *mixShared
	docs     []int // documents asked about here
	chats    []prompt
	agents   []prompt
	segments uint64 // made here
}

// mixShared is what is the same for all workers.
type mixShared struct {
	workers    int
	systems    []int // blocks
	docs       []int // blocks
	docWorkers [][]int
}

func newMixShared(workers int) *mixShared {
	rng := rand.New(rand.NewPCG(11, 12))
	sh := &mixShared{workers: workers, systems: make([]int, 200), docs: make([]int, 4000), docWorkers: make([][]int, workers)}
	for i := range sh.systems {
		sh.systems[i] = 20 + rng.IntN(180)
	}
	for i := range sh.docs {
		sh.docs[i] = 100 + rng.IntN(1100)
		// Popular documents are asked about on more workers.
		for range 1 + workers/(40+20*i) {
			w := rng.IntN(workers)
			sh.docWorkers[w] = append(sh.docWorkers[w], i)
		}
	}
	return sh
}

func newMix(shared *mixShared, worker int) *mix {
	return &mix{
		rng: rand.New(rand.NewPCG(uint64(worker), 3)), shared: shared, docs: shared.docWorkers[worker],
		segments: uint64(worker+1) << 32,
	}
}

func (m *mix) fresh() uint64 {
	m.segments++
	return m.segments
}

func (m *mix) blocks(lo, hi int) int { return lo + m.rng.IntN(hi-lo) }

// zipf draws a number below n, low ones more often.
func (m *mix) zipf(n int) int {
	for {
		u := m.rng.Float64()
		k := int(1/(u+1e-9)*1.2) - 1 // P(≥k) about 1/k
		if k < n {
			return k
		}
	}
}

func (m *mix) system(kind int) prompt {
	s := m.zipf(len(m.shared.systems))
	return prompt(nil).plus(uint64(kind)<<20|uint64(s+1), m.shared.systems[s])
}

// next draws a request: its prompt, and what it becomes with its answer.
func (m *mix) next() (ask, done prompt) {
	switch k := m.rng.IntN(100); {
	case k < 58:
		return m.chat()
	case k < 83 && len(m.docs) > 0:
		return m.question()
	default:
		return m.agent()
	}
}

func (m *mix) chat() (ask, done prompt) {
	i := m.rng.IntN(70)
	if i >= len(m.chats) {
		m.chats, i = append(m.chats, m.system(1)), len(m.chats)
	}
	ask = m.chats[i].plus(m.fresh(), m.blocks(3, 44))
	done = ask.plus(m.fresh(), m.blocks(5, 36))
	m.chats[i] = done
	if m.rng.IntN(4) == 0 {
		m.chats[i] = m.system(1)
	}
	return ask, done
}

func (m *mix) question() (ask, done prompt) {
	d := m.docs[m.rng.IntN(len(m.docs))]
	if m.rng.IntN(6) == 0 {
		d = m.rng.IntN(len(m.shared.docs))
	}
	ask = prompt(nil).plus(uint64(3)<<20|uint64(d+1), m.shared.docs[d]).plus(m.fresh(), m.blocks(2, 20))
	return ask, ask.plus(m.fresh(), m.blocks(5, 45))
}

func (m *mix) agent() (ask, done prompt) {
	i := m.rng.IntN(12)
	if i >= len(m.agents) {
		m.agents, i = append(m.agents, m.system(2).plus(m.fresh(), m.blocks(100, 600))), len(m.agents)
	}
	base := m.agents[i]
	switch k := m.rng.IntN(100); {
	case k < 18: // a side task; the main one goes on from where it was
		ask = base.plus(m.fresh(), m.blocks(20, 200))
		return ask, ask.plus(m.fresh(), m.blocks(5, 60))
	case k < 32: // the context is edited
		base = base.cut(blockTokens * uint32(1+m.rng.IntN(int(base.tokens()/blockTokens))))
	}
	ask = base.plus(m.fresh(), m.blocks(10, 160))
	done = ask.plus(m.fresh(), m.blocks(5, 60))
	m.agents[i] = done
	if done.tokens() > 1600*blockTokens || m.rng.IntN(14) == 0 {
		m.agents[i] = m.system(2).plus(m.fresh(), m.blocks(100, 600))
	}
	return ask, done
}

// cacheRun is a stretch of cached text that nothing leaves but its children.
type cacheRun struct {
	parent      *cacheRun
	start, end  uint32
	text        []piece // covers start to end and may reach further
	children    []*cacheRun
	used        int
	checkpoints []prefix.Key // in (start, end]
	points      []cachePoint // ascending
}

type cachePoint struct {
	depth uint32
	key   prefix.Key
}

// stream is what a cache tells of itself.
type stream interface {
	Begin()
	End()
	AddCheckpoint(key, parent summary.IndexKey, depthTokens uint32)
	AddPoint(key, checkpoint summary.IndexKey, depthTokens uint32, branch bool)
	RemoveCheckpoint(key, parent summary.IndexKey, depthTokens uint32)
	RemovePoint(key, checkpoint summary.IndexKey, depthTokens uint32, branch bool)
}

// cache is the prefix cache of a worker with its stream to an index: a tree of
// runs, of which the least recently used lose their tails first.
type cache struct {
	sink   stream
	keyer  *prefix.Keyer
	root   *cacheRun
	runs   []*cacheRun
	blocks int
	limit  int
	now    int

	probe  prefix.Probe
	tokens []uint32

	requests, ops, events int // of the stream; blocks stored and evicted
	asked, hit            int // blocks
}

func newCache(sink stream, limit int) *cache {
	return &cache{sink: sink, keyer: prefix.NewKeyer(prefix.ClusterKey{9}, prefix.Domain{Model: "m"}), root: &cacheRun{}, limit: limit}
}

// serve takes a request in: its prompt and answer are cached.
func (c *cache) serve(ask, done prompt) {
	c.now++
	c.requests++
	c.tokens = done.append(c.tokens[:0])
	c.probe.ResetTokens(c.tokens, c.keyer)
	r, at := c.walk(done)
	c.asked += int(ask.tokens()) / blockTokens
	c.hit += int(min(at, ask.tokens())) / blockTokens
	c.sink.Begin()
	if n := int(done.tokens()-at)/blockTokens + c.blocks - c.limit; n > 0 {
		c.evict(n)
	}
	c.extend(r, at, done)
	c.sink.End()
	for ; r != nil; r = r.parent {
		r.used = c.now
	}
	c.mark(ask.tokens(), done)
}

// walk finds the run in which a prompt leaves what is cached, and where; the
// runs on the way count as used.
func (c *cache) walk(p prompt) (*cacheRun, uint32) {
	r, at := c.root, uint32(0)
	for {
		r.used = c.now
		at = common(r, at, p)
		var next *cacheRun
		for _, k := range r.children {
			if k.start == at && at < p.tokens() && same(k.text[0], p, at) {
				next = k
			}
		}
		if next == nil {
			return r, at
		}
		r = next
	}
}

// common is how far a prompt that agrees with a run up to at goes on doing so.
func common(r *cacheRun, at uint32, p prompt) uint32 {
	for _, s := range r.text {
		if s.end <= at {
			continue
		}
		if at >= r.end || at >= p.tokens() || !same(s, p, at) {
			break
		}
		end := min(s.end, r.end)
		for _, q := range p {
			if q.segment == s.segment && q.start == s.start {
				end = min(end, q.end)
			}
		}
		at = end
	}
	return at
}

func same(s piece, p prompt, at uint32) bool {
	for _, q := range p {
		if q.start <= at && at < q.end {
			return q.segment == s.segment && q.start == s.start
		}
	}
	return false
}

// extend caches a prompt behind a place in a run: a leaf's end grows, elsewhere
// a new run forks.
func (c *cache) extend(r *cacheRun, at uint32, p prompt) {
	if at == p.tokens() {
		return
	}
	if r == c.root || at < r.end || len(r.children) > 0 {
		if r != c.root {
			c.addPoint(r, at) // where it forks
		}
		n := &cacheRun{parent: r, start: at, end: at, used: c.now}
		r.children = append(r.children, n)
		c.runs = append(c.runs, n)
		r = n
	}
	c.blocks += int(p.tokens()-at) / blockTokens
	c.events += int(p.tokens()-at) / blockTokens
	c.ops++
	r.text = nil
	for _, s := range p {
		if s.end > r.start {
			r.text = append(r.text, s)
		}
	}
	for d := (r.end/prefix.ChunkTokens + 1) * prefix.ChunkTokens; d <= p.tokens(); d += prefix.ChunkTokens {
		k, _ := c.probe.Checkpoint(int(d / prefix.ChunkTokens))
		r.checkpoints = append(r.checkpoints, k)
		key, parent := c.chain(r, d)
		c.sink.AddCheckpoint(key, parent, d)
	}
	r.end = p.tokens()
	c.addPoint(r, r.end)
}

// mark makes the end of a prompt a known point.
func (c *cache) mark(depth uint32, p prompt) {
	r := c.root
	for r != nil && (r == c.root || r.end < depth) {
		var next *cacheRun
		for _, k := range r.children {
			if k.start < depth && same(k.text[0], p, k.start) {
				next = k
			}
		}
		r = next
	}
	if r != nil {
		c.sink.Begin()
		c.addPoint(r, depth)
		c.sink.End()
	}
}

func (c *cache) addPoint(r *cacheRun, depth uint32) {
	if depth%prefix.ChunkTokens == 0 || depth <= r.start {
		return
	}
	i := len(r.points)
	for i > 0 && r.points[i-1].depth >= depth {
		if i--; r.points[i].depth == depth {
			return
		}
	}
	k, _ := c.probe.At(int(depth))
	r.points = append(r.points, cachePoint{})
	copy(r.points[i+1:], r.points[i:])
	r.points[i] = cachePoint{depth, k}
	up, _ := c.chain(r, depth)
	c.sink.AddPoint(summary.PointKey(up, depth, k), up, depth, false)
}

// chain computes the index keys of the last checkpoint at or before a depth on
// the path to a run, and of the one before it.
func (c *cache) chain(r *cacheRun, depth uint32) (key, parent summary.IndexKey) {
	if r == c.root {
		return 0, 0
	}
	key, parent = c.chain(r.parent, min(depth, r.start))
	for i, k := range r.checkpoints {
		d := (r.start/prefix.ChunkTokens + 1 + uint32(i)) * prefix.ChunkTokens
		if d > depth {
			break
		}
		key, parent = summary.CheckpointKey(key, d, k), key
	}
	return key, parent
}

// evict drops blocks from the tails of the least recently used leaves.
func (c *cache) evict(n int) {
	for n > 0 {
		var r *cacheRun
		for _, q := range c.runs {
			if len(q.children) == 0 && (r == nil || q.used < r.used) {
				r = q
			}
		}
		cut := min(n, int(r.end-r.start)/blockTokens)
		c.trim(r, r.end-uint32(cut)*blockTokens)
		n -= cut
	}
}

func (c *cache) trim(r *cacheRun, end uint32) {
	c.ops++
	c.events += int(r.end-end) / blockTokens
	c.blocks -= int(r.end-end) / blockTokens
	for i := len(r.points) - 1; i >= 0 && r.points[i].depth > end; i-- {
		p := r.points[i]
		up, _ := c.chain(r, p.depth)
		c.sink.RemovePoint(summary.PointKey(up, p.depth, p.key), up, p.depth, false)
		r.points = r.points[:i]
	}
	for d := r.end / prefix.ChunkTokens * prefix.ChunkTokens; d > end && d > r.start; d -= prefix.ChunkTokens {
		key, parent := c.chain(r, d)
		c.sink.RemoveCheckpoint(key, parent, d)
		r.checkpoints = r.checkpoints[:len(r.checkpoints)-1]
	}
	r.end = end
	if r.end == r.start {
		r.parent.children = without(r.parent.children, r)
		c.runs = without(c.runs, r)
	}
}

func without(s []*cacheRun, r *cacheRun) []*cacheRun {
	for i := range s {
		if s[i] == r {
			s[i] = s[len(s)-1]
			return s[:len(s)-1]
		}
	}
	return s
}
