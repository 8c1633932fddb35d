package queue

import (
	"math"
	"time"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// Point names the prefix that ends with a block, and its depth in tokens.
type Point struct {
	Key         prefix.Key
	DepthTokens int
}

// Store is one store event of the engine: blocks of one prompt or answer in
// order.
type Store struct {
	// Parent names the prefix before the first block; 0: the root, or not
	// known.
	Parent prefix.Key
	// Points are the ends of the blocks.
	Points []Point
}

// Evidence that comes before its claim is kept a moment.
const (
	maxEarlyStores = 256
	maxEarlyMarks  = 256
	earlyStoreMs   = 2_000
	earlyMarkMs    = 5_000
)

// early is evidence without a claim: of foreign requests, or of claims that
// are still on their way.
type early struct {
	stores []earlyStore
	marks  []earlyMark
}

type earlyStore struct {
	heardMs, atMs float64
	Point
}

type earlyMark struct {
	heardMs, atMs float64
	id            claimID
	what          ledger.Mark
	outputTokens  int
}

// holdStore keeps the ends that a claim may name: the first block, the last
// one and the checkpoints between.
func (y *early) holdStore(nowMs, atMs float64, s *Store) {
	for i, p := range s.Points {
		if i > 0 && i < len(s.Points)-1 && p.DepthTokens%prefix.ChunkTokens != 0 {
			continue
		}
		if len(y.stores) >= maxEarlyStores {
			y.stores = y.stores[:copy(y.stores, y.stores[1:])]
		}
		y.stores = append(y.stores, earlyStore{nowMs, atMs, p})
	}
}

func (y *early) holdMark(nowMs float64, id claimID, m *ledger.Marked) {
	if len(y.marks) >= maxEarlyMarks {
		y.marks = y.marks[:copy(y.marks, y.marks[1:])]
	}
	y.marks = append(y.marks, earlyMark{nowMs, nowMs - m.AgeMs, id, m.What, m.OutputTokens})
}

// expire forgets what waited long enough.
func (y *early) expire(nowMs float64) {
	for len(y.stores) > 0 && nowMs-y.stores[0].heardMs > earlyStoreMs {
		y.stores = y.stores[1:]
	}
	for len(y.marks) > 0 && nowMs-y.marks[0].heardMs > earlyMarkMs {
		y.marks = y.marks[1:]
	}
}

// replayEarly applies evidence that came before the claim.
func (e *Estimator) replayEarly(nowMs float64, c *claim) {
	y := &e.ledger.early
	y.expire(nowMs)
	for i := range y.stores {
		s := &y.stores[i]
		for j, k := range c.keys {
			if k == s.Key {
				if s.atMs >= e.ledger.foreignMs {
					e.ledger.foreignGoesOn = false // it was this one
				}
				e.progress(c, s.atMs, int(c.depths[j]))
				e.ledger.follow(c, k)
			}
		}
	}
	for i := 0; i < len(y.marks); i++ {
		if m := y.marks[i]; m.id == c.id {
			y.marks = append(y.marks[:i], y.marks[i+1:]...)
			i--
			e.mark(c, m.what, m.atMs, m.outputTokens)
		}
	}
}

// Stores takes store events of one batch, published at a moment: the end of
// the step that computed them. They are evidence of the claims whose keys they
// name; what continues a known prompt or answer is evidence of it as well. It
// reports whether they say anything of the queue: blocks of answers do not.
func (e *Estimator) Stores(at time.Time, stores []Store) (moved bool) {
	atMs := e.ms(at)
	before := max(e.ledger.anchorMs, e.ledger.foreignMs)
	var batch batchWork
	for i := range stores {
		e.store(atMs, &stores[i], &batch)
	}
	switch {
	case batch.foreign > 0:
		e.foreignPrefill(atMs, &batch)
	case batch.tokens > 0:
		e.learnStep(&batch, before, atMs)
	}
	return batch.moved
}

// nearlyFull is the share of a step's tokens above which it was full: the last
// tokens of a prompt fill no block, and decoding streams take some.
const nearlyFull = .9

// leastSeen is the share of claims whose stores must be recognized before
// others count as foreign.
const leastSeen = .5

// foreignPrefill takes that a step computed a prompt that no claim explains:
// open claims were not computed meanwhile. If the step was full, that prompt
// goes on. It says nothing where an open claim could not be recognized by its
// stores: one without keys, or where keys do not match what engines store.
func (e *Estimator) foreignPrefill(atMs float64, b *batchWork) {
	l := &e.ledger
	if e.facts.Unordered || atMs < l.foreignMs || !(l.storesSeen >= leastSeen) {
		return
	}
	for _, c := range l.list {
		if c.why == inQueue && len(c.keys) == 0 && c.madeMs <= atMs {
			return
		}
	}
	l.foreignMs = atMs
	l.foreignGoesOn = b.tokens+b.foreign >= nearlyFull*float64(e.facts.StepTokens) && e.facts.StepTokens > 0
}

// batchWork is what one batch of stores computed of the claims.
type batchWork struct {
	tokens, attention float64
	// foreign is the tokens of prompts that no claim explains.
	foreign float64
	// sinceMs is when the first of the claims was made.
	sinceMs float64
	// moved says that something of a prompt was computed.
	moved bool
}

// add takes that a claim's prompt was computed from one depth to another.
func (b *batchWork) add(c *claim, from, to int) {
	if to <= from {
		return
	}
	if b.tokens == 0 || c.madeMs < b.sinceMs {
		b.sinceMs = c.madeMs
	}
	u := float64(to - from)
	b.tokens += u
	b.attention += u * (u + 2*float64(from))
}

// store takes one store event.
func (e *Estimator) store(atMs float64, s *Store, batch *batchWork) {
	if len(s.Points) == 0 {
		return
	}
	l := &e.ledger
	last := s.Points[len(s.Points)-1]
	var owner *claim
	from := 0
	match := func(c *claim, depth int) {
		if c != owner {
			owner = c
			from, _ = c.left()
			if !math.IsNaN(c.servedMs) {
				from = c.prompt
			} else {
				batch.moved = true
			}
		}
		e.observe(c, atMs, depth)
	}
	for _, p := range s.Points {
		for h := l.holders(p.Key); h != nil; h = h.next {
			match(h.c, int(h.depth))
		}
	}
	switch {
	case owner != nil && l.holders(last.Key) == nil:
		// The run goes on beyond the last key that anybody holds.
		match(owner, last.DepthTokens)
	case owner == nil && s.Parent != 0 && l.byTail[s.Parent] != nil:
		match(l.byTail[s.Parent], last.DepthTokens)
	case owner == nil:
		l.early.holdStore(atMs, atMs, s)
		e.counts.ForeignStores++
		if n := len(s.Points); n > 1 { // answers grow by single blocks
			batch.foreign += float64(n * e.facts.BlockTokens)
			batch.moved = true
		}
		return
	}
	to, _ := owner.left()
	if !math.IsNaN(owner.servedMs) {
		to = owner.prompt
	}
	batch.add(owner, from, to)
	l.follow(owner, last.Key)
}

// follow notes the newest block of a claim's stream.
func (l *claims) follow(c *claim, tail prefix.Key) {
	if l.byTail[c.tail] == c {
		delete(l.byTail, c.tail)
	}
	c.tail = tail
	l.byTail[tail] = c
}

// observe takes that a prompt or answer is computed up to a depth.
func (e *Estimator) observe(c *claim, atMs float64, depth int) {
	if math.IsNaN(c.servedMs) {
		e.progress(c, atMs, depth)
		return
	}
	if depth < c.prompt || c.why == overGone || !math.IsNaN(c.doneMs) || atMs <= c.servedMs {
		return
	}
	if !(atMs <= c.grewMs) {
		c.grewMs = atMs
	}
	c.factMs = max(c.factMs, atMs)
	c.outTokens = max(c.outTokens, depth-c.prompt)
	e.growthSeen = true
}

// progress takes that a claim's prompt is computed up to a depth at a moment.
func (e *Estimator) progress(c *claim, atMs float64, depth int) {
	atMs = max(atMs, c.madeMs)
	if c.why == overGone || !math.IsNaN(c.servedMs) {
		return
	}
	e.anchor(atMs)
	c.factMs = max(c.factMs, atMs)
	if math.IsNaN(c.startedMs) || atMs < c.startedMs {
		c.startedMs = atMs
	}
	if depth > c.coveredTokens {
		c.coveredTokens, c.progressMs = min(depth, c.prompt), atMs
	}
	if depth >= c.tipTokens() {
		e.served(c, atMs, stored)
		return
	}
	if c.why != inQueue && atMs > c.overMs {
		// Closed or inferred too early: it was computed after that.
		c.why, c.overMs = inQueue, math.NaN()
	}
}

// anchor notes evidence at a moment.
func (e *Estimator) anchor(atMs float64) {
	e.ledger.anchorMs = max(e.ledger.anchorMs, atMs)
	e.ledger.evidenceMs = max(e.ledger.evidenceMs, atMs)
}

// firstBy says how the moment of a first token is known.
type firstBy uint8

const (
	told      firstBy = iota // by a mark
	stored                   // by the store of the prompt's last block
	estimated                // from the end of the answer
)

// served takes the first token of a claim.
func (e *Estimator) served(c *claim, atMs float64, how firstBy) {
	if c.why == overGone {
		return
	}
	fresh := math.IsNaN(c.servedMs)
	if fresh && how == told {
		e.learnFirst(c, atMs)
	}
	if !fresh && !c.estimated && atMs >= c.servedMs {
		return
	}
	c.servedMs, c.estimated = atMs, how == estimated
	c.leave(atMs, overServed)
	if fresh && how == stored {
		e.ledger.noteStores(c)
	}
	if how == estimated {
		e.ledger.evidenceMs = max(e.ledger.evidenceMs, atMs)
	} else {
		if !(c.startedMs <= atMs) {
			c.startedMs = atMs
		}
		e.anchor(atMs)
	}
	l := &e.ledger
	if l.newestServed == nil || l.newestServed.before(c) {
		l.newestServed = c
	}
	if e.facts.Unordered {
		return
	}
	for _, older := range l.list {
		if !older.before(c) {
			break
		}
		if older.why == inQueue && how == stored {
			e.ledger.noteStores(older)
		}
		older.closeAt(c.servedByMs())
	}
}

// servedByMs is when the claim was served at the latest.
func (c *claim) servedByMs() float64 {
	if c.estimated {
		return c.doneMs
	}
	return c.servedMs
}

// closeAt takes that a claim behind this one was served at a moment. What is
// known to have ended before, or to go on after it, stays.
func (c *claim) closeAt(atMs float64) {
	switch {
	case c.progressMs > atMs:
	case c.why == inQueue, (c.why == overClosed || c.why == overInferred) && atMs < c.overMs, c.why == overGone && atMs <= c.overMs:
		c.leave(atMs, overClosed)
	}
}
