package prefix

import "math/bits"

// Probe names the prefixes of one request. Keys are computed when first asked
// for and kept. A Probe may be reset and reused: after it has seen a request of
// some size, further ones of that size allocate nothing. It is not safe for
// concurrent use.
type Probe struct {
	promptTokens int
	tokens       []uint32 // of a request that came as tokens
	marks        []Mark
	inChunk      []Mark // scratch
	keyer        *Keyer
	chains       []Chain // value after chunk i, as far as computed
	checkpoints  []Key   // key after chunk i; 0: not computed, or not given
	points       pointCache
	given        map[uint32]Key // points of a request that came as keys
	learnt       []Points       // of a request that came as chain values
}

// Points are chain values inside one chunk, [PointTokens] apart.
type Points struct {
	// Chunk is the number of the chunk, from 0.
	Chunk int
	// Values are the chain values: Values[i] at the chunk's first
	// (i+1)·PointTokens tokens.
	Values []Chain
}

// PointTokens is the distance of the values in [Points], in tokens.
const PointTokens = 16

// ResetTokens prepares for a request given as token ids. The probe reads tokens
// until the next reset; the caller must not change them.
func (p *Probe) ResetTokens(tokens []uint32, k *Keyer) {
	p.promptTokens, p.tokens, p.marks, p.given, p.learnt = len(tokens), tokens, nil, nil, nil
	p.chains = p.chains[:0]
	p.Rekey(k)
}

// ResetMarked is ResetTokens for a prompt in which items other than tokens
// stand. The error wraps [ErrMarks]; then the probe is that of an empty prompt.
func (p *Probe) ResetMarked(tokens []uint32, marks []Mark, k *Keyer) error {
	if err := CheckMarks(marks, len(tokens)); err != nil {
		p.ResetTokens(nil, k)
		return err
	}
	p.ResetTokens(tokens, k)
	p.marks = marks
	return nil
}

// ResetChains prepares for a request of which chain values are known: chains[i]
// at depth (i+1)·ChunkTokens, and those at points. The keys of other depths are
// unknown. The prompt counts as promptTokens long; that may be a guess. The probe
// reads points until the next reset.
func (p *Probe) ResetChains(promptTokens int, chains []Chain, points []Points, k *Keyer) {
	promptTokens = max(promptTokens, 0)
	p.promptTokens, p.tokens, p.marks, p.learnt = promptTokens, nil, nil, points
	p.chains = append(p.chains[:0], chains[:min(len(chains), promptTokens/ChunkTokens)]...)
	p.rekey(k, len(p.chains))
}

// Rekey changes the cluster key or domain of a request given as tokens or chain
// values and keeps what does not depend on them, for a second search while
// cluster keys rotate. A request given as keys has nothing to rekey: it becomes
// empty.
func (p *Probe) Rekey(k *Keyer) {
	if p.keyer == nil && p.tokens == nil {
		p.promptTokens, p.learnt = 0, nil
		p.chains = p.chains[:0]
	}
	if p.tokens == nil {
		p.rekey(k, len(p.chains))
		return
	}
	p.rekey(k, len(p.tokens)/ChunkTokens)
}

func (p *Probe) rekey(k *Keyer, checkpoints int) {
	p.keyer, p.given = k, nil
	p.checkpoints = resize(p.checkpoints, checkpoints)
	clear(p.checkpoints)
	p.points.reset()
}

// ResetKeys prepares for a request given as keys: checkpoints[i] at depth
// (i+1)·ChunkTokens, points by depth in tokens. A zero key, a missing one and
// one deeper than the prompt are unknown. The probe reads points until the next reset.
func (p *Probe) ResetKeys(promptTokens int, checkpoints []Key, points map[uint32]Key) {
	promptTokens = max(promptTokens, 0)
	n := min(len(checkpoints), promptTokens/ChunkTokens)
	p.promptTokens, p.tokens, p.marks, p.keyer, p.given, p.learnt = promptTokens, nil, nil, nil, points, nil
	p.chains = p.chains[:0]
	p.checkpoints = append(p.checkpoints[:0], checkpoints[:n]...)
	p.points.reset()
}

func resize(s []Key, n int) []Key {
	if cap(s) < n {
		return make([]Key, n)
	}
	return s[:n]
}

// PromptTokens is the length of the prompt, in tokens.
func (p *Probe) PromptTokens() int { return p.promptTokens }

// Checkpoint returns the key at depth j·ChunkTokens, j ≥ 1. It reports false
// past the end of the prompt and where the caller's keys have a gap.
func (p *Probe) Checkpoint(j int) (Key, bool) {
	if j < 1 || j > len(p.checkpoints) {
		return 0, false
	}
	if p.checkpoints[j-1] == 0 && p.keyer != nil {
		p.checkpoints[j-1] = p.keyer.Key(p.chain(j), uint32(j*ChunkTokens))
	}
	k := p.checkpoints[j-1]
	return k, k != 0
}

// At returns the key at any depth from 1 to the length of the prompt, in
// tokens. It reports false outside and where the caller's keys have a gap.
func (p *Probe) At(depthTokens int) (Key, bool) {
	if depthTokens < 1 || depthTokens > p.promptTokens {
		return 0, false
	}
	if depthTokens%ChunkTokens == 0 {
		return p.Checkpoint(depthTokens / ChunkTokens)
	}
	if p.keyer == nil {
		k := p.given[uint32(depthTokens)]
		return k, k != 0
	}
	j := depthTokens / ChunkTokens
	var c Chain
	if p.tokens == nil {
		var ok bool
		if c, ok = p.learntAt(depthTokens); !ok {
			return 0, false
		}
	}
	slot := p.points.slot(uint32(depthTokens))
	if slot.key == 0 {
		if p.tokens != nil {
			c = PointMarked(p.chain(j), p.tokens[j*ChunkTokens:depthTokens], p.marksOf(j))
		}
		slot.key = p.keyer.Key(c, uint32(depthTokens))
	}
	return slot.key, true
}

// learntAt is the chain value at a point of a request given as chain values.
func (p *Probe) learntAt(depthTokens int) (Chain, bool) {
	chunk, offset := depthTokens/ChunkTokens, depthTokens%ChunkTokens
	if offset%PointTokens != 0 {
		return 0, false
	}
	for i := range p.learnt {
		if q := &p.learnt[i]; q.Chunk == chunk {
			if at := offset/PointTokens - 1; at < len(q.Values) {
				return q.Values[at], true
			}
			return 0, false
		}
	}
	return 0, false
}

// Chain returns the chain value at depth j·ChunkTokens, j ≥ 0, of a request
// given as tokens; false past the end of the prompt or when keys were given.
func (p *Probe) Chain(j int) (Chain, bool) {
	if p.keyer == nil || j < 0 || j > len(p.checkpoints) {
		return 0, false
	}
	return p.chain(j), true
}

// chain computes the values up to chunk j, at most len(p.checkpoints).
func (p *Probe) chain(j int) Chain {
	for i := len(p.chains); i < j; i++ {
		var prev Chain
		if i > 0 {
			prev = p.chains[i-1]
		}
		p.chains = append(p.chains, NextMarked(prev, p.tokens[i*ChunkTokens:(i+1)*ChunkTokens], p.marksOf(i)))
	}
	if j == 0 {
		return 0
	}
	return p.chains[j-1]
}

// marksOf returns the marks of chunk j, counted from its start.
func (p *Probe) marksOf(j int) []Mark {
	if len(p.marks) == 0 {
		return nil
	}
	p.inChunk = within(p.inChunk[:0], p.marks, uint32(j*ChunkTokens), uint32((j+1)*ChunkTokens))
	return p.inChunk
}

// pointCache is a hash table from depth to key that is emptied in O(1) and
// keeps its memory. A slot counts only if its generation is the current one.
type pointCache struct {
	slots      []pointSlot // a power of two long
	used       int
	generation uint32
}

type pointSlot struct {
	depth      uint32
	generation uint32
	key        Key
}

func (c *pointCache) reset() {
	c.used = 0
	c.generation++
	if c.generation == 0 { // wrapped: slots of 2^32 resets ago would look current
		clear(c.slots)
		c.generation = 1
	}
}

// slot returns the slot of a depth, with key 0 if it is new. It is valid until
// the next call.
func (c *pointCache) slot(depth uint32) *pointSlot {
	if c.used*2 >= len(c.slots) {
		c.grow()
	}
	s := c.find(depth)
	if s.generation != c.generation {
		*s = pointSlot{depth: depth, generation: c.generation}
		c.used++
	}
	return s
}

// find returns the slot that holds depth, or the free one where it belongs.
func (c *pointCache) find(depth uint32) *pointSlot {
	mask := uint32(len(c.slots) - 1)
	shift := 32 - bits.Len32(mask)
	for i := depth * 2654435769 >> shift; ; i++ { // Fibonacci hashing
		s := &c.slots[i&mask]
		if s.generation != c.generation || s.depth == depth {
			return s
		}
	}
}

// grow doubles the table; the slots in use move, the others are dropped.
func (c *pointCache) grow() {
	old := c.slots
	c.slots = make([]pointSlot, max(16, 2*len(old)))
	for _, s := range old {
		if s.generation == c.generation {
			*c.find(s.depth) = s
		}
	}
}
