package slots

import (
	"slices"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// Bounds of a replay.
const (
	// MaxSlots bounds the slots of one server.
	MaxSlots = 1024
	// maxRequests bounds the requests under way; the oldest is given up.
	maxRequests = 4096
	// maxLost bounds the requests that left untold. Of what ended so many
	// sequences are remembered in any case and for each slot: the more, the
	// likelier it is that two of a length are taken for each other.
	maxLost, minEnded, maxEndedPerSlot = 64, 8, 4
	// crowdRequests is for how many requests it counts that some came at once.
	crowdRequests = 16
	// maxPoints bounds the points of one prompt.
	maxPoints = summary.MaxDepthTokens / ledger.PointTokens
)

// DefaultSimilarity is the share of a prompt that a slot must hold more than,
// to be chosen for it: the server's own default.
const DefaultSimilarity = 0.1

// Options says what is known of a server.
type Options struct {
	// Slots is the number of slots, 1 to MaxSlots.
	Slots int
	// Similarity is the server's --slot-prompt-similarity; 0: DefaultSimilarity.
	Similarity float64
	// Shared says that the slots share one KV buffer: idle ones are emptied by
	// each new request.
	Shared bool
	// HostTokens is what the host cache holds, in tokens; 0: there is none. It
	// is a first guess unless HostKnown.
	HostTokens int
	// HostKnown says that HostTokens is no guess.
	HostKnown bool
	// HostTokensOwn is the first guess once it is seen that the slots have KV
	// buffers of their own; less than HostTokens: the same.
	HostTokensOwn int
	// Listener is told what can be reused; nil: nobody.
	Listener summary.Listener
}

// request is a request that has not ended.
type request struct {
	id     ledger.ClaimID
	nth    uint64 // in the order of arrival
	keys   []prefix.Key
	tokens int
	slot   int // -1: all slots were busy
	pinned int // -1: the server chooses
	// began says that its first token was told.
	began bool
	// task is the server's name of it; 0: not known.
	task uint64
	// before is what its slot held before, taken what came from the host cache,
	// where takenNext was given after it.
	before, taken, takenNext *sequence
	// beforeDoubts are the doubts about before, until the request ends.
	beforeDoubts doubts
	// told is Replay.looks when it was told, look when it got its slot.
	told, look uint64
	// expected is the reuse that the rules give, from what was held before;
	// fromHost how much had to fit the host cache for it, 0: it was in a slot.
	expected, fromHost int
	// least says that it may be no more than what its slot shared.
	least bool
	// maybe is what the host cache has no more if it was taken for this request.
	maybe *sequence
	// others are the slots that the server may have chosen for it instead of its
	// own, and the reuse there. end is what it left; nil: it has not ended.
	own    reuse
	others []otherSlot
	end    *sequence
	// unexpected is the reuse that an entry believed to be gone would give, and
	// what had to fit for it to be there.
	unexpected, needTokens int
}

type slot struct {
	held *sequence
	// by is the request under way; nil: idle. foreign says that a request
	// is under way that nobody told of.
	by      *request
	foreign bool
	used    int64 // order of the ends of requests; -1: never
	// look is the slot at the latest observation, confirmed what it held when
	// its length was last seen to be as taken.
	look      look
	confirmed *sequence
	doubts    doubts
	// latest is the latest request that ended here, endLook and endNth the
	// observations and requests that were told before its end.
	latest          *request
	endLook, endNth uint64
}

func (s *slot) busy() bool { return s.by != nil || s.foreign }

// Counts is what happened, since New.
type Counts struct {
	// Requests were told, Replaced sequences overwritten in a slot, Given to
	// the host cache, Taken from it.
	Requests, Replaced, Given, Taken uint64
	// Missed counts requests that reused less than was expected, Found those
	// that reused what was believed to be gone.
	Missed, Found uint64
	// Corrected counts slots whose content was not as the server says.
	Corrected uint64
}

// Replay follows one server.
type Replay struct {
	opt    Options
	slots  []slot
	cache  hostCache
	open   map[ledger.ClaimID]*request
	order  []*request // by time of arrival, those waiting among them
	clock  int64
	counts Counts
	tree   tree
	seen   []Seen // the latest observation, for disagreements seen twice
	// looks counts observations; passed says that since the latest one a whole
	// request came and ended. own says that the slots were seen to have KV
	// buffers of their own.
	looks  uint64
	passed bool
	own    bool
	// begun is how many requests were told since the latest observation, begunBefore
	// how many between that and the one before.
	begun, begunBefore int
	// crowds is how many requests were under way at each of the latest beginnings.
	crowds [crowdRequests]int
	// lost are requests that left their slot before their end was told, ended
	// what the latest requests left, the newest last.
	lost  []*request
	ended []*sequence
	// latest is the latest launch.
	latest launched
}

// New follows a server that has just started.
func New(o Options) *Replay {
	o.Slots = min(max(o.Slots, 1), MaxSlots)
	if !(o.Similarity > 0 && o.Similarity < 1) {
		o.Similarity = DefaultSimilarity
	}
	r := &Replay{opt: o, open: map[ledger.ClaimID]*request{}}
	r.cache.limitTokens = max(0, o.HostTokens)
	r.cache.known = o.HostKnown
	r.cache.most = r.cache.limitTokens
	r.tree.init(o.Listener)
	r.empty()
	return r
}

func (r *Replay) empty() {
	r.slots = make([]slot, r.opt.Slots)
	for i := range r.slots {
		r.slots[i] = slot{held: &sequence{exact: true}, used: -1}
	}
	r.cache.entries, r.cache.ghosts = nil, nil
	clear(r.open)
	r.order, r.seen, r.lost, r.ended, r.passed, r.latest = nil, nil, nil, nil, false, launched{}
	r.crowds, r.begun, r.begunBefore = [crowdRequests]int{}, 0, 0
}

// Reset forgets everything: the server's process ended, or its model was
// unloaded. What was learnt of the host cache's size stays.
func (r *Replay) Reset() {
	r.empty()
	r.tree.reset()
}

// Counts tells what happened.
func (r *Replay) Counts() Counts { return r.counts }

// HostTokens is what the host cache is believed to hold.
func (r *Replay) HostTokens() int { return r.cache.limitTokens }

// Begin tells a request in the order of arrival: keys are the prefix keys of
// its prompt at ledger.PointTokens, twice that and so on; pinned is the slot it names,
// -1: none. A second request of a name is ignored. expected is the reuse that
// the rules give it, in tokens, rounded down to a point; -1: it waits for a
// slot.
func (r *Replay) Begin(id ledger.ClaimID, keys []prefix.Key, promptTokens, pinned int) (expected int) {
	if _, known := r.open[id]; known || promptTokens < 1 {
		return 0
	}
	if len(r.order) >= maxRequests {
		r.leave(r.order[0], nil)
	}
	r.counts.Requests++
	r.begun++
	keys = keys[:min(len(keys), promptTokens/ledger.PointTokens, maxPoints)]
	q := &request{id: id, keys: append([]prefix.Key(nil), keys...), tokens: promptTokens, slot: -1, pinned: pinned, told: r.looks}
	if pinned >= 0 {
		q.pinned = pinned % len(r.slots) // as the server takes it
	} else {
		q.pinned = -1
	}
	r.open[id] = q
	r.order = append(r.order, q)
	q.nth = r.counts.Requests
	r.crowds[q.nth%crowdRequests] = len(r.order)
	expected = -1
	if r.launch(q) {
		expected = q.expected
	}
	r.publish()
	return expected
}

// Slot is the slot a request is believed to be in; -1: none.
func (r *Replay) Slot(id ledger.ClaimID) int {
	if q := r.open[id]; q != nil {
		return q.slot
	}
	return -1
}

// launch gives a request a slot, if one is idle.
func (r *Replay) launch(q *request) bool {
	i := r.choose(q)
	if i < 0 {
		return false
	}
	r.doubtOthers(q, i)
	l := r.launches(q)
	s := &r.slots[i]
	lcp := s.held.shared(q.keys)
	own, before := lcp, s.held
	similar := share(lcp, q.tokens) > r.opt.Similarity
	// A request that names an empty slot takes nothing from the host cache.
	ask := !similar || share(lcp, s.held.tokens) < lostAtMost
	if ask && (q.pinned < 0 || s.held.tokens > 0) {
		r.give(s.held)
		if similar && share(lcp+ledger.PointTokens-1, s.held.tokens) >= lostAtMost {
			// Between two points it cannot be said whether the cache is asked.
			q.least = true
		}
		e := r.cache.better(s.held, q, 0)
		if e == nil {
			if o := r.cache.better(s.held, q, ledger.PointTokens-1); o != nil && !o.doubtful {
				// Between two points it cannot be said whether it is taken.
				o.doubtful, q.maybe = true, o
			}
		} else {
			q.fromHost = r.cache.newer(e)
			q.taken, q.takenNext = e, r.cache.take(e)
			s.held = e
			r.counts.Taken++
			lcp = e.shared(q.keys)
		}
	}
	q.unexpected, q.needTokens = r.cache.ghost(q)
	if lcp < len(s.held.keys)*ledger.PointTokens {
		r.counts.Replaced++
	}
	if q.least {
		lcp = min(lcp, own)
	}
	q.slot, q.expected = i, min(lcp, q.tokens-1)
	q.look, q.before = r.looks, before
	// They count again if it turns out that what the slot held is still there.
	q.beforeDoubts, s.doubts = s.doubts, doubts{}
	s.by = q
	s.held = &sequence{keys: q.keys, tokens: q.tokens}
	if r.cache.limitTokens > 0 {
		for k := range r.slots {
			if idle := &r.slots[k]; !idle.busy() {
				r.give(idle.held)
				if r.opt.Shared && idle.held.tokens > 0 {
					l.emptied, l.held = append(l.emptied, k), append(l.held, idle.held)
					idle.held = l.empty
				}
			}
		}
	}
	l.changes = r.cache.changes
	r.latest = l
	return true
}

func (r *Replay) give(s *sequence) {
	if r.cache.give(s) {
		r.counts.Given++
	}
}

// First tells that a request's first token came: its prompt is computed.
func (r *Replay) First(id ledger.ClaimID) {
	if q := r.open[id]; q != nil {
		q.began = true
	}
}

// Done tells the end of a request's answer: outputTokens of it, 0: not known;
// cachedTokens as the server reported, -1: not known.
func (r *Replay) Done(id ledger.ClaimID, outputTokens, cachedTokens int) {
	q := r.open[id]
	if q == nil {
		r.found(id, outputTokens)
		return
	}
	q.began = true
	r.tell(q, cachedTokens)
	r.judge(q, cachedTokens)
	if outputTokens <= 0 {
		r.leave(q, q.sure(cachedTokens))
	} else {
		r.passed = r.passed || q.slot >= 0 && q.look == r.looks
		e, waited := q.left(outputTokens), q.slot < 0
		r.leave(q, e)
		if waited {
			r.place(e)
		} else {
			r.remember(e)
		}
	}
	r.doubt(q)
	r.publish()
}

// crowded says that of late requests were under way at once: what is expected now
// is asked for after others that nobody has told of yet.
func (r *Replay) crowded() bool { return slices.Max(r.crowds[:]) > 1 }

// waiting says that of late requests had to wait for a slot, and that some are under
// way: such callers come again.
func (r *Replay) waiting() bool { return len(r.order) > 0 && slices.Max(r.crowds[:]) > len(r.slots) }

// doubt notes what the host cache may have let go of because of the end of a
// request: one that came later but was not seen at the server since may have
// begun after that end, though it was told before. The server then copied what
// the ended one left for its sake, and whatever else was idle.
func (r *Replay) doubt(ended *request) {
	for _, q := range r.order {
		if q.nth > ended.nth && q.slot >= 0 && q.task == 0 {
			for _, e := range r.cache.entries[:r.cache.stay(r.idle()...)] {
				e.doubtful = true
			}
			return
		}
	}
}

// idle is what the idle slots hold.
func (r *Replay) idle() (held []*sequence) {
	for i := range r.slots {
		if s := &r.slots[i]; !s.busy() {
			held = append(held, s.held)
		}
	}
	return held
}

// left is what a request leaves in its slot. The last token that is sampled is
// not computed any more.
func (q *request) left(outputTokens int) *sequence {
	return &sequence{keys: q.keys, tokens: q.tokens + outputTokens - 1, exact: q.whole(), partial: !q.whole(), task: q.task}
}

// whole says that all of a prompt is known: else its length is a guess.
func (q *request) whole() bool { return len(q.keys) >= min(q.tokens/ledger.PointTokens, maxPoints) }

// sure is what a request leaves whose answer's length is not known: its prompt,
// if its first token was told, else what was there before.
func (q *request) sure(cachedTokens int) *sequence {
	if q.began {
		return &sequence{keys: q.keys, tokens: q.tokens, partial: !q.whole(), task: q.task}
	}
	keep := q.expected
	if cachedTokens >= 0 {
		keep = min(keep, cachedTokens)
	}
	return &sequence{keys: q.keys[:keep/ledger.PointTokens], tokens: keep, task: q.task}
}

// found notes that a request that was taken to be over has ended: what it left
// is in some slot.
func (r *Replay) found(id ledger.ClaimID, outputTokens int) {
	for i, q := range r.lost {
		if q.id == id {
			r.lost = append(r.lost[:i], r.lost[i+1:]...)
			if outputTokens > 0 {
				r.place(q.left(outputTokens))
				r.publish()
			}
			return
		}
	}
}

// lose notes that a request has left its slot, in which something else is now,
// though its end was not told.
func (r *Replay) lose(q *request, held *sequence) {
	r.lost = append(r.lost, q)
	r.lost = r.lost[max(0, len(r.lost)-maxLost):]
	r.leave(q, held)
}

// Gone tells that a request came to no good end, or none is known: how much of
// its prompt was computed is not known, unless its first token was told.
func (r *Replay) Gone(id ledger.ClaimID) {
	if q := r.open[id]; q != nil {
		r.leave(q, nil)
		r.publish()
	}
}

// judge learns from the reuse that the server reported.
func (r *Replay) judge(q *request, cached int) {
	if cached < 0 || q.slot < 0 {
		return
	}
	if e := q.maybe; e != nil {
		switch lcp := e.shared(q.keys); {
		case lcp < q.expected+2*ledger.PointTokens:
			// Both would reuse as much.
		case cached >= lcp:
			r.cache.take(e)
		default:
			e.doubtful = false
		}
	}
	switch {
	case cached < q.expected:
		r.counts.Missed++
		if q.fromHost > 0 && !q.taken.doubtful {
			r.cache.missed(q.fromHost)
		}
	case q.unexpected > q.expected && cached >= q.unexpected:
		r.counts.Found++
		r.cache.found(q.needTokens)
	case q.fromHost > 0:
		r.cache.fit(q.fromHost)
	}
}

// leave takes a request out of its slot, which holds something then, nil: what is
// sure without a word of its end; and lets the next one in.
func (r *Replay) leave(q *request, held *sequence) {
	delete(r.open, q.id)
	former := q.beforeDoubts
	q.beforeDoubts = doubts{} // else each request would keep those before it
	for i, o := range r.order {
		if o == q {
			r.order = append(r.order[:i], r.order[i+1:]...)
			break
		}
	}
	if q.slot < 0 {
		return
	}
	s := &r.slots[q.slot]
	if s.by != q {
		return
	}
	var kept doubts
	if held == nil {
		held = q.sure(-1)
		if !q.began && q.taken == nil && len(held.keys) > 0 {
			kept = former // it is nothing but what was there before
		}
	}
	s.by, q.end = nil, held
	s.latest, s.endLook, s.endNth = q, r.looks, r.counts.Requests
	r.fill(s, held)
	s.doubts = kept
	for _, next := range r.order {
		if next.slot < 0 && r.launch(next) {
			break
		}
	}
}
