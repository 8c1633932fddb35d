package slots

import (
	"slices"

	"waypost/gossip/ledger"
)

const (
	// keptAtLeast is the share of an entry that must be kept for it to be
	// taken; lostAtMost is the share of a slot that may be lost without
	// looking for an entry.
	keptAtLeast = 0.25
	lostAtMost  = 0.5
	// maxEntries bounds the entries and the ghosts of them.
	maxEntries = 4096
	// doubtsToLearn is after how many misses in a row a limit that was told is
	// not believed: one has other reasons, such as requests that came in another
	// order.
	doubtsToLearn = 3
)

// hostCache is the cache of whole sequences in host memory.
type hostCache struct {
	// entries are in the order they were given, ghosts are those that are
	// believed to be gone, newest last.
	entries, ghosts []*sequence
	// limitTokens is what is believed to fit; 0: there is no cache.
	limitTokens int
	// tooMany is the least that was seen not to fit; 0: nothing was.
	tooMany int
	// fits is the most that was seen to fit.
	fits int
	// known says that the limit was told: most tokens. doubts counts the misses
	// since it was last seen to hold.
	known        bool
	most, doubts int
	// changes counts what changed entries, or relied on one that is there.
	changes uint64
}

// takes says whether what a slot holds is saved when it is given: unless an entry
// holds it already.
func (c *hostCache) takes(s *sequence) bool {
	if c.known && s.tokens > c.limitTokens {
		return false // the server keeps the others
	}
	return c.limitTokens > 0 && s.tokens > 0 && !c.holds(s)
}

// give saves what a slot holds; entries that it continues are dropped. It
// reports whether it saved something.
func (c *hostCache) give(s *sequence) bool {
	c.changes++
	if !c.takes(s) {
		return false
	}
	c.entries = slices.DeleteFunc(c.entries, func(e *sequence) bool { return contains(s, e) })
	s.doubtful = false
	c.entries = append(c.entries, s)
	c.trim()
	return true
}

// stay is the first of the entries that are still there once something was
// given.
func (c *hostCache) stay(given ...*sequence) (first int) {
	tokens, taken := c.limitTokens, make([]*sequence, 0, len(given))
	for _, g := range given {
		if c.takes(g) {
			tokens -= g.tokens
			taken = append(taken, g)
		}
	}
	for first = len(c.entries); first > 0; first-- {
		e := c.entries[first-1]
		if !slices.ContainsFunc(taken, func(g *sequence) bool { return contains(g, e) }) {
			tokens -= e.tokens
		}
		if tokens < 0 {
			break
		}
	}
	return first
}

// holds says whether an entry holds a sequence. What ends in an unknown part of a
// prompt is held by nothing else: saved twice it lets go of others early, but not
// to see that it is saved promises what goes for it, again and again while it is
// idle in its slot.
func (c *hostCache) holds(s *sequence) bool {
	return slices.ContainsFunc(c.entries, func(e *sequence) bool { return e == s || !s.partial && contains(e, s) })
}

// contains says whether s holds all of e. Of generated tokens only the number is
// known: what ends in some is taken to be held when all that is known of it is,
// and s is at least as long.
func contains(s, e *sequence) bool {
	return len(e.keys) > 0 && s.tokens >= e.tokens && s.shared(e.keys) >= len(e.keys)*ledger.PointTokens
}

// trim drops the oldest entries that do not fit.
func (c *hostCache) trim() {
	for len(c.entries) > 0 && (c.tokens() > c.limitTokens || len(c.entries) > maxEntries) {
		c.ghosts = append(c.ghosts, c.entries[0])
		c.entries = c.entries[1:]
		c.changes++
	}
	if n := len(c.ghosts) - maxEntries; n > 0 {
		c.ghosts = c.ghosts[n:]
	}
}

func (c *hostCache) tokens() (n int) {
	for _, e := range c.entries {
		n += e.tokens
	}
	return n
}

// better finds the entry that keeps more of itself and of the prompt than the
// slot's own content does. All that is shared with it is taken to be slack tokens
// more than is known.
func (c *hostCache) better(held *sequence, r *request, slack int) *sequence {
	own := min(held.shared(r.keys)+slack, held.tokens, r.tokens)
	kept, found := share(own, held.tokens), share(own, r.tokens)
	if held.tokens == 0 {
		kept = -1 // any entry is better than nothing
	}
	var best *sequence
	for _, e := range c.entries {
		lcp := min(e.shared(r.keys)+slack, e.tokens, r.tokens)
		k, f := share(lcp, e.tokens), share(lcp, r.tokens)
		if k >= keptAtLeast && k > kept && f > found {
			kept, found, best = k, f, e
		}
	}
	return best
}

// take removes an entry, and returns the one that was given after it; nil: none.
func (c *hostCache) take(s *sequence) (next *sequence) {
	if at := slices.Index(c.entries, s); at >= 0 {
		if at+1 < len(c.entries) {
			next = c.entries[at+1]
		}
		c.entries = slices.Delete(c.entries, at, at+1)
		c.changes++
	}
	return next
}

// putBack undoes a take. If what was given after it is gone, so is it.
func (c *hostCache) putBack(s, next *sequence) {
	at := len(c.entries)
	if next != nil {
		if at = slices.Index(c.entries, next); at < 0 {
			return
		}
	}
	c.entries = slices.Insert(c.entries, at, s)
	c.changes++
	c.trim()
}

// missed learns that an entry was gone that had been believed to be there: so
// much had to fit for it. Half of the way to what was seen to fit is given up,
// for a miss costs more than what is found by surprise.
func (c *hostCache) missed(needTokens int) {
	if c.known {
		if c.doubts++; c.doubts < doubtsToLearn {
			return
		}
		c.doubts = 0
	}
	if needTokens <= c.fits {
		// It had another reason, such as requests that came in another order,
		// unless the cache is smaller now and this comes again.
		c.fits -= c.fits / 8
		return
	}
	c.tooMany = needTokens
	c.limitTokens = max(1, min(c.limitTokens, c.fits+(needTokens-c.fits)/2))
	c.trim()
}

// fit learns that so much fits.
func (c *hostCache) fit(needTokens int) {
	if needTokens >= c.fits {
		c.fits, c.doubts = needTokens, 0
	}
}

// found learns that so many tokens fit at least: a little more is tried, up to
// what was seen not to fit.
func (c *hostCache) found(needTokens int) {
	more := needTokens + needTokens/16
	if c.tooMany > needTokens {
		more = min(more, (needTokens+c.tooMany)/2)
	} else {
		c.tooMany = 0 // it was another reason
	}
	c.fit(needTokens)
	if c.known {
		more = min(more, c.most)
	}
	c.limitTokens = max(c.limitTokens, more)
}

// newer is how many tokens were given after an entry, with it.
func (c *hostCache) newer(s *sequence) (tokens int) {
	at := slices.Index(c.entries, s)
	for i := max(at, 0); i < len(c.entries); i++ {
		tokens += c.entries[i].tokens
	}
	return tokens
}

// ghost finds what was believed to be gone and would have given a request so
// much, and how many tokens had to fit for it to be there.
func (c *hostCache) ghost(r *request) (lcp, needTokens int) {
	need := c.tokens()
	for i := len(c.ghosts) - 1; i >= 0; i-- {
		g := c.ghosts[i]
		need += g.tokens
		if n := min(g.shared(r.keys), r.tokens-1); n > lcp && share(n, g.tokens) >= keptAtLeast {
			lcp, needTokens = n, need
		}
	}
	return lcp, needTokens
}
