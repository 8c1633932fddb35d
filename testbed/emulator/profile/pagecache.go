package profile

// held is what a running request keeps.
type held struct {
	at     *node
	cached int
	own    int // pages that are not in the tree
	ns     string
	salt   string
	prompt int
	slot   int // of llama.cpp
	// rest are the pages that its answer may still need, where they are kept free.
	rest int
	// output is the length of the answer so far, retract says that it must give up
	// its pages, and away that it has.
	output  int
	retract bool
	away    bool
	// computed says that the prompt is.
	computed bool
}

// pageCache is the memory of SGLang and, a block at a time, of TensorRT-LLM: a
// pool of pages, the tree of what is cached, and the pages of running requests.
type pageCache struct {
	tree    *radix
	pool    int // pages
	own     int // pages of running requests outside the tree
	rest    int // pages that are kept free for their answers
	running int
	// partial tells of the last page too, which is not full.
	partial bool
	// whole admits only what surely comes to its end, as TensorRT-LLM does unless told
	// otherwise; else requests are retracted when memory runs out.
	whole bool
}

func newSGLCache(page, pool int, salted bool, seen func(event)) *pageCache {
	return &pageCache{tree: newRadix(page, true, sglHash(salted), seen), pool: pool}
}

func newTRTCache(block, pool int, hash hashPage, seen func(event)) *pageCache {
	return &pageCache{tree: newRadix(block, false, hash, seen), pool: pool, partial: true, whole: true}
}

// room evicts until so many pages are free.
func (c *pageCache) room(pages int) bool {
	if short := pages - (c.pool - c.tree.pages - c.own); short > 0 {
		c.tree.evict(short)
	}
	return c.pool-c.tree.pages-c.own >= pages
}

// begin admits a prompt and takes its pages, which are found by others once they are
// kept: the last token is computed in any case, so what is found of it is at most a
// token less. It reports false
// if there is no room, for what may be generated as well if that is asked for.
func (c *pageCache) begin(namespace, salt string, prompt []uint32, maxTokens int) (held, bool) {
	at, cached := c.tree.walk(namespace, prompt[:len(prompt)-1])
	h := held{at: at, cached: cached, ns: namespace, salt: salt, prompt: len(prompt)}
	c.tree.lock(at, 1)
	// A page more than the prompt fills is asked for, for what is generated.
	need := (len(prompt)-cached+c.tree.page-1)/c.tree.page + 1
	if c.whole {
		h.rest = (len(prompt)+maxTokens+c.tree.page-1)/c.tree.page - (len(prompt)+c.tree.page-1)/c.tree.page
	}
	if c.whole && c.pool-c.used()-c.rest < need+h.rest || !c.room(need) {
		c.tree.lock(at, -1)
		return h, false
	}
	h.own = (len(prompt) - cached + c.tree.page - 1) / c.tree.page
	c.own += h.own
	c.rest += h.rest
	c.running++
	return h, true
}

// keep stores the full pages of what has been computed.
func (c *pageCache) keep(h *held, tokens []uint32) {
	at := c.tree.insert(h.ns, h.salt, tokens)
	c.tree.lock(at, 1)
	c.tree.lock(h.at, -1)
	h.at = at
	c.own -= h.own
	if h.own = 0; len(tokens)%c.tree.page > 0 {
		h.own = 1
	}
	c.own += h.own
	h.computed = true
}

// grow makes room for the token behind n others. The engine frees a page at
// every step, also when it needs none.
func (c *pageCache) grow(h *held, n int) bool {
	ok := c.room(1)
	if n%c.tree.page > 0 {
		return true
	}
	if !ok {
		return false
	}
	h.own++
	c.own++
	if h.rest > 0 {
		h.rest--
		c.rest--
	}
	return true
}

// retract takes a request's pages; what is in the tree stays cached.
func (c *pageCache) retract(h *held) {
	c.tree.lock(h.at, -1)
	c.own -= h.own
	c.rest -= h.rest
	c.running--
	h.away, h.retract = true, false
}

// used is how many pages are referenced by requests.
func (c *pageCache) used() int { return c.own + c.tree.pinned(c.tree.root) }

// end stores the full pages of all but the last token generated.
func (c *pageCache) end(h *held, all []uint32) {
	at := c.tree.insert(h.ns, h.salt, all[:len(all)-1])
	if rest := (len(all) - 1) % c.tree.page; c.partial && rest > 0 {
		c.tree.tail(at, h.salt, all[len(all)-1-rest:len(all)-1])
	}
	c.tree.lock(h.at, -1)
	c.own -= h.own
	c.rest -= h.rest
	c.running--
}
