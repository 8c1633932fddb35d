package profile

// slot is one sequence of llama.cpp's server: the tokens whose KV it holds.
type slot struct {
	tokens []uint32
	busy   bool
	used   uint64 // order of last use; 0: never
	task   int
	// What is shown of the request in progress.
	computed, cached int
}

// saved is an entry of the host's prompt cache: a whole sequence.
type saved struct{ tokens []uint32 }

// slotOptions are the flags that decide what is kept.
type slotOptions struct {
	slots int
	// similarity is --slot-prompt-similarity.
	similarity float64
	// hostTokens bounds the host's prompt cache; 0: there is none, -1: unbounded.
	hostTokens int
	// unified says that the slots share one buffer: what a new task saves of
	// the idle slots is then taken from them.
	unified bool
	// idleKept turns off that a new task saves the idle slots
	// (--no-cache-idle-slots).
	idleKept bool
}

// minKeep is the share of a saved sequence that must be of use for it to be
// loaded; at keepHalf a slot that loses more is saved first.
const (
	minKeep  = 0.25
	keepHalf = 0.5
)

// slotCache is the memory of a llama.cpp server. It is not safe for concurrent
// use.
type slotCache struct {
	opts  slotOptions
	slots []slot
	host  []saved
	clock uint64
	task  int
}

func newSlotCache(o slotOptions) *slotCache { return &slotCache{opts: o, slots: make([]slot, o.slots)} }

// choose finds the slot of a prompt: the idle one that holds the largest share
// of it if that is more than the similarity asked for, else the one that was
// used longest ago, of those never used the last. It is -1 if all are busy.
func (c *slotCache) choose(prompt []uint32) (id int, similar bool) {
	id, best := -1, c.opts.similarity
	for i := range c.slots {
		s := &c.slots[i]
		if s.busy || len(s.tokens) == 0 {
			continue
		}
		if share := float64(common(s.tokens, prompt)) / float64(len(prompt)); share > best {
			id, best = i, share
		}
	}
	if id >= 0 {
		return id, true
	}
	for i := range c.slots {
		if s := &c.slots[i]; !s.busy && (id < 0 || s.used <= c.slots[id].used) {
			id = i
		}
	}
	return id, false
}

// begin gives a prompt its slot. pinned is the slot asked for, -1: any; reuse
// is cache_prompt. It reports false if the slot, or all, are busy.
func (c *slotCache) begin(prompt []uint32, pinned int, reuse bool) (held, bool) {
	id, similar := pinned, true
	if pinned >= 0 {
		id = pinned % len(c.slots)
	} else {
		id, similar = c.choose(prompt)
	}
	if id < 0 || c.slots[id].busy {
		return held{}, false
	}
	s := &c.slots[id]
	if len(s.tokens) == 0 || !similar || float64(common(s.tokens, prompt)) < keepHalf*float64(len(s.tokens)) {
		if len(s.tokens) > 0 {
			c.save(s.tokens)
		}
		c.load(s, prompt)
	}
	for i := range c.slots {
		o := &c.slots[i]
		if i == id || o.busy || len(o.tokens) == 0 || c.opts.idleKept || c.opts.hostTokens == 0 {
			continue
		}
		if c.save(o.tokens); c.opts.unified {
			o.tokens = nil
		}
	}
	cached := 0
	if reuse {
		cached = min(common(s.tokens, prompt), len(prompt)-1)
	}
	c.task++
	c.clock++
	s.tokens, s.busy, s.task, s.used = append([]uint32(nil), prompt...), true, c.task, c.clock
	s.computed, s.cached = len(prompt)-cached, cached
	return held{cached: cached, slot: id, prompt: len(prompt)}, true
}

// end leaves in the slot all but the last token generated.
func (c *slotCache) end(h *held, all []uint32) {
	s := &c.slots[h.slot]
	c.clock++
	s.tokens, s.busy, s.used = append([]uint32(nil), all[:len(all)-1]...), false, c.clock
	s.computed, s.cached = 0, 0
}

// save puts a sequence into the host's cache, unless one there begins with it;
// those that it begins with are replaced by it, and what was saved first goes
// when there is no room.
func (c *slotCache) save(tokens []uint32) {
	if c.opts.hostTokens == 0 {
		return
	}
	kept := c.host[:0:0]
	for _, e := range c.host {
		switch same := common(e.tokens, tokens); {
		case same == len(tokens):
			return
		case same < len(e.tokens):
			kept = append(kept, e)
		}
	}
	c.host = append(kept, saved{tokens})
	if c.opts.hostTokens < 0 {
		return
	}
	total := 0
	for _, e := range c.host {
		total += len(e.tokens)
	}
	for len(c.host) > 1 && total > c.opts.hostTokens {
		total -= len(c.host[0].tokens)
		c.host = c.host[1:]
	}
}

// load takes the saved sequence that serves a prompt better than the slot does,
// both by how much of it would be kept and by how much of the prompt it is.
func (c *slotCache) load(s *slot, prompt []uint32) {
	same := common(s.tokens, prompt)
	keep, share := 0.0, float64(same)/float64(len(prompt))
	if len(s.tokens) > 0 {
		keep = float64(same) / float64(len(s.tokens))
	}
	best := -1
	for i, e := range c.host {
		n := common(e.tokens, prompt)
		k, v := float64(n)/float64(len(e.tokens)), float64(n)/float64(len(prompt))
		if k >= minKeep && k > keep && v > share {
			best, keep, share = i, k, v
		}
	}
	if best >= 0 {
		s.tokens = c.host[best].tokens
		c.host = append(c.host[:best:best], c.host[best+1:]...)
	}
}

// erase empties a slot.
func (c *slotCache) erase(id int) int {
	n := len(c.slots[id].tokens)
	c.slots[id].tokens = c.slots[id].tokens[:0:0]
	return n
}
