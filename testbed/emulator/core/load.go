package core

// Prefix returns the hashes of a prompt's full blocks, except the block that
// holds the last token: those that another engine could hand over.
func (c *Core) Prefix(r Request) []Hash {
	s := &Sequence{req: r, tokens: r.Prompt}
	if len(r.Prompt) == 0 {
		return nil
	}
	return s.hash(c.hasher, (len(r.Prompt)-1)/c.opts.BlockTokens, c.opts.BlockTokens)
}

// Held counts how many of the leading hashes are cached.
func (c *Core) Held(hashes []Hash) int {
	for i, h := range hashes {
		if _, ok := c.pool.lookup(h); !ok {
			return i
		}
	}
	return len(hashes)
}

// Load caches the first blocks of a prompt without computing them, as a
// connector does with what it read from elsewhere, and returns how many of
// them are cached afterwards: fewer if the pool has no room. It must not be
// called within a step; the events come with the next one.
func (c *Core) Load(r Request, blocks int) int {
	hashes := c.Prefix(r)
	hashes = hashes[:min(blocks, len(hashes))]
	s := &Sequence{req: r, tokens: r.Prompt, hashes: hashes}
	from := c.Held(hashes)
	for _, h := range hashes[:from] {
		id, _ := c.pool.lookup(h)
		c.pool.touch(id)
		s.blocks = append(s.blocks, id)
	}
	for i := from; i < len(hashes) && c.pool.free > 0; i++ {
		id := c.pool.take()
		c.pool.name(id, hashes[i])
		s.blocks = append(s.blocks, id)
	}
	if n := len(s.blocks); n > from {
		c.announce(s, from, n)
	}
	c.pool.release(s.blocks)
	return len(s.blocks)
}
