package queue

import (
	"math"
	"slices"
	"time"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// Bounds of the claims of one worker.
const (
	// MaxClaims bounds the claims kept; beyond it the oldest sixteenth is
	// dropped.
	MaxClaims = ledger.MaxOffers
	// maxKeysPerClaim bounds the keys of one claim that evidence is matched
	// by: the first, the tip and evenly spaced ones between.
	maxKeysPerClaim = 64
	// silentMs is how long a claim without any fact stays, lifeMs how long any
	// claim does.
	silentMs = 60_000
	lifeMs   = 600_000
	// endUntoldMs is how long a claim stays after its newest fact if its end
	// was not told: evidence of it may still come.
	endUntoldMs = 20_000
	// maxClaimMs bounds the work of one claim.
	maxClaimMs = 600_000
)

// over says why a claim is in the queue no more.
type over uint8

const (
	inQueue over = iota
	// overServed: evidence showed its first token.
	overServed
	// overClosed: a claim made later was served; the engine serves in order.
	overClosed
	// overInferred: the counters admitted it and its time is over.
	overInferred
	// overGone: a mark ended it before it was served.
	overGone
)

// claimID is the identity of a claim at one worker.
type claimID struct{ coordinator, seq uint64 }

// claim is one claim and the facts about it. Times are on the estimator's
// clock in ms; NaN is not yet, or not known. What every view reads of every claim
// comes first: of the hundred requests of a busy worker that are over, nothing
// else is read.
type claim struct {
	madeMs float64
	// startedMs is when its prefill was first seen to run.
	startedMs float64
	// overMs is when it left the queue, why says by what.
	overMs float64
	// doneMs is when its stream ended, by evidence.
	doneMs float64
	// modelEndMs is when the newest replay ends its prefill, modelBeganMs when
	// the one up to the newest sample began it, waits and young what that
	// sample says of it. alive is how many of its sequences go on by the newest
	// view, ended how many ended since that sample. They follow from the facts.
	modelEndMs   float64
	modelBeganMs float64
	alive, ended float64
	waits, young bool
	why          over
	// marked says that its issuer marked its first token, estimated that only
	// its end was told.
	marked, estimated bool
	sequences         int

	// grewMs says when the newest block known of its stream was stored, tail
	// names it and outTokens is how much of the answer it holds.
	grewMs       float64
	tail         prefix.Key
	outTokens    int
	outputTokens float64
	prompt       int
	// factMs is when something was last heard of it.
	factMs float64
	// admittedMs is when the counters say it left the waiting line, against
	// the replay; confirmedMs is when they said as the replay that it had.
	admittedMs, confirmedMs float64
	// servedMs is its first token, by evidence.
	servedMs float64
	// coveredTokens is how much of the prompt is known to be computed, as of
	// progressMs.
	coveredTokens int
	progressMs    float64

	id       claimID
	uncached int
	keys     []prefix.Key
	depths   []uint32
}

// before orders claims as the engine serves them.
func (c *claim) before(o *claim) bool {
	switch {
	case c.madeMs != o.madeMs:
		return c.madeMs < o.madeMs
	case c.id.coordinator != o.id.coordinator:
		return c.id.coordinator < o.id.coordinator
	}
	return c.id.seq < o.id.seq
}

// reused is the part of the prompt that is expected to be cached.
func (c *claim) reused() int { return c.prompt - c.uncached }

// left is the context before what is left to compute, and that.
func (c *claim) left() (context, tokens int) {
	context = min(max(c.coveredTokens, c.reused()), c.prompt-1)
	return context, c.prompt - context
}

// tipTokens is the depth of the last key: with it covered, what is left of the
// prompt is less than a block.
func (c *claim) tipTokens() int {
	if len(c.depths) == 0 {
		return math.MaxInt
	}
	return int(c.depths[len(c.depths)-1])
}

// leave takes a claim out of the queue at a moment.
func (c *claim) leave(atMs float64, why over) { c.overMs, c.why = max(atMs, c.madeMs), why }

// noteStores learns from a claim that leaves the queue whether stores name the
// keys that claims have.
func (l *claims) noteStores(c *claim) {
	switch {
	case len(c.keys) == 0:
	case !math.IsNaN(c.startedMs):
		blend(&l.storesSeen, 1, perRequest)
	case !math.IsNaN(l.storesSeen):
		l.storesSeen -= perRequest * l.storesSeen
	}
}

// holding is a claim that holds a key at a depth.
type holding struct {
	c     *claim
	depth uint32
	next  *holding
}

// keySlots is a few times the keys that the claims of a busy worker have.
const keySlots = 4096

// claims is the ledger of one worker.
type claims struct {
	echoes ledger.Echoes
	list   []*claim // as the engine serves them
	byID   map[claimID]*claim
	byKey  map[prefix.Key]*holding
	byTail map[prefix.Key]*claim
	// inSlot counts the holdings of byKey by the lowest bits of their keys, which
	// are hashes: of the hundred blocks of a part of a prompt few are any claim's,
	// and where a slot is empty nothing needs to be looked up.
	inSlot [keySlots]uint32
	ever   bool
	early  early
	// anchorMs is the newest evidence of any claim, newestServed the last
	// claim in order that was served. They outlive the claims.
	anchorMs     float64
	newestServed *claim
	// foreignMs is when a step that computed a prompt nobody explains was last
	// seen to end, foreignGoesOn says that more of the prompt is to come.
	foreignMs     float64
	foreignGoesOn bool
	// storesSeen is the share of claims with keys whose stores were seen before
	// they left the queue; NaN: none was yet.
	storesSeen float64
	// evidenceMs is when evidence last matched a claim of this engine life.
	evidenceMs float64
}

func (l *claims) init() {
	l.byID = map[claimID]*claim{}
	l.byKey = map[prefix.Key]*holding{}
	l.byTail = map[prefix.Key]*claim{}
	l.forgetEvidence()
}

func (l *claims) forgetEvidence() {
	l.anchorMs, l.evidenceMs, l.foreignMs = math.Inf(-1), math.Inf(-1), math.Inf(-1)
	l.foreignGoesOn, l.storesSeen = false, math.NaN()
	l.newestServed = nil
	l.early = early{}
}

// hasOpen reports whether a coordinator has claims here.
func (l *claims) hasOpen(coordinator uint64) bool {
	return slices.ContainsFunc(l.list, func(c *claim) bool { return c.id.coordinator == coordinator })
}

// Intake is what became of a frame of claims.
type Intake struct {
	// Taken counts claims that are open now, Fenced those that name another
	// engine process and were ended at once.
	Taken, Fenced int
	// Gap says that claims before the frame are missing: the coordinator will
	// offer again. Full says that too many coordinators are known.
	Gap, Full bool
	// Ignored says that the frame was meant for another agent process.
	Ignored bool
}

// Claims takes a frame of claims in. A frame with a bad field changes nothing.
// When claims were taken in or fenced, a load report is due at once: it tells the
// coordinators that do not hear of each other.
func (e *Estimator) Claims(now time.Time, f *ledger.ClaimFrame) (Intake, error) {
	if err := f.Validate(); err != nil {
		return Intake{}, err
	}
	if e.agentProcess == 0 || f.Agent != e.agentProcess {
		e.counts.FramesIgnored++
		return Intake{Ignored: true}, nil
	}
	nowMs := e.ms(now)
	var in Intake
	duplicates := len(f.Offers)
	switch e.ledger.echoes.Take(nowMs, f, e.ledger.hasOpen, func(o *ledger.Offer) {
		duplicates--
		if e.take(nowMs, f.Coordinator, o) {
			in.Taken++
		} else {
			in.Fenced++
		}
	}) {
	case ledger.TakenGap:
		in.Gap = true
		e.counts.FrameGaps++
	case ledger.TakenFull:
		in.Full = true
		e.counts.CoordinatorsRefused++
	default:
		e.counts.DuplicateClaims += uint64(duplicates)
	}
	e.counts.TakenClaims += uint64(in.Taken)
	return in, nil
}

// LaneUp tells that a lane of a coordinator is up: how far its claims were
// taken in is remembered while it is.
func (e *Estimator) LaneUp(now time.Time, coordinator uint64) {
	if !e.ledger.echoes.LaneUp(e.ms(now), coordinator, e.ledger.hasOpen) {
		e.counts.CoordinatorsRefused++
	}
}

// LaneDown tells that a lane of a coordinator is down.
func (e *Estimator) LaneDown(now time.Time, coordinator uint64) {
	e.ledger.echoes.LaneDown(e.ms(now), coordinator)
}

// take takes one claim in. It reports false if the claim is of another engine
// life: its request will not come, or comes as a foreign one.
func (e *Estimator) take(nowMs float64, coordinator uint64, o *ledger.Offer) bool {
	nan := math.NaN()
	received := o.Received(nowMs)
	if e.process != 0 && o.EngineProcess != e.process {
		e.counts.FencedClaims++
		return false
	}
	l := &e.ledger
	l.ever = true
	c := &claim{
		id: claimID{coordinator, o.Seq}, madeMs: received.MadeMs, prompt: o.PromptTokens, uncached: o.UncachedTokens,
		sequences: received.Sequences, outputTokens: o.OutputTokens, factMs: nowMs,
		startedMs: nan, progressMs: nan, admittedMs: nan, confirmedMs: nan, servedMs: nan, overMs: nan, doneMs: nan, grewMs: nan, modelEndMs: nan,
	}
	c.keys, c.depths = thinned(o.Keys, o.KeyDepths)
	e.lag.claim(c.madeMs, c.sequences)
	blend(&e.meanClaimTokens, float64(c.uncached), perRequest)
	blend(&e.meanClaimPrompt, float64(c.prompt), perRequest)
	l.insert(c)
	if s := l.newestServed; s != nil && !e.facts.Unordered && c.before(s) {
		c.leave(l.servedAfter(c), overClosed)
	}
	e.replayEarly(nowMs, c)
	if len(l.list) > MaxClaims {
		e.dropOldest()
	}
	return true
}

// servedAfter is when the first of the claims behind c was served.
func (l *claims) servedAfter(c *claim) float64 {
	at := l.newestServed.servedByMs()
	for i := len(l.list) - 1; i >= 0 && c.before(l.list[i]); i-- {
		if o := l.list[i]; o.why == overServed && o.servedByMs() < at {
			at = o.servedByMs()
		}
	}
	return at
}

// thinned copies at most maxKeysPerClaim keys: the first, the last and evenly
// spaced ones between.
func thinned(keys []prefix.Key, depths []uint32) ([]prefix.Key, []uint32) {
	n := len(keys)
	if n <= maxKeysPerClaim {
		return slices.Clone(keys), slices.Clone(depths)
	}
	k, d := make([]prefix.Key, maxKeysPerClaim), make([]uint32, maxKeysPerClaim)
	for i := range k {
		from := i * (n - 1) / (maxKeysPerClaim - 1)
		k[i], d[i] = keys[from], depths[from]
	}
	return k, d
}

func (l *claims) insert(c *claim) {
	at := len(l.list)
	for at > 0 && c.before(l.list[at-1]) {
		at--
	}
	l.list = slices.Insert(l.list, at, c)
	l.byID[c.id] = c
	for i, k := range c.keys {
		l.byKey[k] = &holding{c: c, depth: c.depths[i], next: l.byKey[k]}
		l.inSlot[k%keySlots]++
	}
}

// holders are the claims that hold a key.
func (l *claims) holders(k prefix.Key) *holding {
	if l.inSlot[k%keySlots] == 0 {
		return nil
	}
	return l.byKey[k]
}

// forget takes a claim out of the indices; the caller takes it off the list.
func (l *claims) forget(c *claim) {
	delete(l.byID, c.id)
	for _, k := range c.keys {
		l.release(k, c)
	}
	if l.byTail[c.tail] == c {
		delete(l.byTail, c.tail)
	}
}

func (l *claims) release(k prefix.Key, c *claim) {
	for at, link := l.byKey[k], (*holding)(nil); at != nil; link, at = at, at.next {
		if at.c != c {
			continue
		}
		switch {
		case link != nil:
			link.next = at.next
		case at.next != nil:
			l.byKey[k] = at.next
		default:
			delete(l.byKey, k)
		}
		l.inSlot[k%keySlots]--
		return
	}
}

// remove takes claims off the list for which drop says so.
func (l *claims) remove(drop func(*claim) bool) (removed int) {
	l.list = slices.DeleteFunc(l.list, func(c *claim) bool {
		if !drop(c) {
			return false
		}
		l.forget(c)
		removed++
		return true
	})
	return removed
}

// dropOldest makes room: what left the queue goes first, then the oldest, some
// at once.
func (e *Estimator) dropOldest() {
	if e.ledger.remove(func(c *claim) bool { return c.why != inQueue }) > 0 {
		return
	}
	n := MaxClaims / 16
	e.counts.DroppedClaims += uint64(n)
	e.ledger.remove(func(*claim) bool { n--; return n >= 0 })
}

// Marks takes marks on claims. Unknown and second ones change nothing and are
// counted; a mark whose claim is still on its way is held for it. A frame with
// a bad field changes nothing. moved says that they tell something of the queue:
// ends of answers do not, nor do first tokens that evidence has shown.
func (e *Estimator) Marks(now time.Time, f *ledger.MarkFrame) (moved bool, err error) {
	if err := f.Validate(); err != nil {
		return false, err
	}
	nowMs := e.ms(now)
	for i := range f.Marks {
		m := &f.Marks[i]
		id := claimID{f.Coordinator, m.Seq}
		c := e.ledger.byID[id]
		switch {
		case c != nil:
			moved = e.mark(c, m.What, nowMs-m.AgeMs, m.OutputTokens) || moved
		case m.Seq > e.ledger.echoes.Upto(f.Coordinator):
			e.ledger.early.holdMark(nowMs, id, m)
		default:
			e.counts.UnknownMarks++
		}
	}
	return moved, nil
}

// mark applies a mark at its own time. It reports whether it tells something of
// the queue.
func (e *Estimator) mark(c *claim, what ledger.Mark, atMs float64, outputTokens int) (moved bool) {
	ends := what != ledger.MarkFirst
	if !ends && c.why == overGone && atMs <= c.overMs {
		// Its first token was told after its end.
		c.why, c.overMs = inQueue, math.NaN()
	}
	if c.why == overGone || ends && !math.IsNaN(c.doneMs) || !ends && !math.IsNaN(c.servedMs) && !c.estimated && atMs >= c.servedMs {
		e.counts.DuplicateMarks++
		return false
	}
	atMs = max(atMs, c.madeMs)
	c.factMs = max(c.factMs, atMs)
	switch what {
	case ledger.MarkFirst:
		moved = math.IsNaN(c.servedMs) || c.estimated
		c.marked = true
		e.served(c, atMs, told)
	case ledger.MarkDone:
		c.doneMs = atMs
		if moved = math.IsNaN(c.servedMs); moved {
			// The first token was so many token gaps before.
			first := atMs
			if outputTokens > 1 {
				first -= float64(outputTokens-1) * e.paceMs()
			}
			e.served(c, max(first, c.madeMs), estimated)
		}
		e.learnAnswer(c, atMs, outputTokens)
	default:
		// Cancelled, failed or placed elsewhere: nothing follows for others.
		if moved = c.why == inQueue || c.why != overServed && atMs < c.overMs; moved {
			c.overMs, c.why = atMs, overGone
		}
		c.doneMs = atMs
	}
	return moved
}
