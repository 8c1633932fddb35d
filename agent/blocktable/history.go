package blocktable

import (
	"math"

	"waypost/gossip/prefix"
)

// historyLength bounds what a History remembers of each kind.
const historyLength = 4096

// History remembers what the engine's events said of listed prefixes a short
// while ago, so that a wrong prediction can be explained: when a block was
// listed, which were removed, and which the engine stored once more although
// they were listed. It belongs to one Table and shares its goroutine; moments
// are ms on the owner's clock.
type History struct {
	table *Table
	nowMs float64
	// sinceMs is from when on it is complete.
	sinceMs float64
	// listed is of each attached node, by id.
	listed       [][]listing
	listedFromMs float64
	removed      ring[removal]
	stored       ring[restore]
	// clearedMs is when the engine last reported that it cleared its cache.
	clearedMs float64
	// contradictedMs is when events last did not fit their block size.
	contradictedMs float64
	malformed      uint64
}

// listing is what is kept of an attached node: 12 bytes, for they are as many as an
// engine's blocks.
type listing struct {
	// at is when it was attached: whole ms after listedFromMs, or before it; 0:
	// never. It spans seven weeks, see moment.
	at uint32
	// pointLow and pointHigh are halves of what PointOf gives: it is asked for when a
	// block comes, by who names it, and when it goes, and is a hash over hundreds of
	// tokens.
	pointLow, pointHigh uint32
}

// removal is a prefix that ceased to be listed.
type removal struct {
	domain *prefix.Domain
	chain  prefix.Chain
	atMs   float64
	depth  uint32
}

// restore is a listed block that the engine stored once more: under its hash,
// or under another one.
type restore struct {
	atMs  float64
	id    uint32
	other bool
}

// ring keeps the newest historyLength items.
type ring[T any] struct {
	items []T
	next  int
}

func (r *ring[T]) add(v T) (dropped T, full bool) {
	if n := len(r.items); n < historyLength {
		if n == cap(r.items) {
			r.items = append(make([]T, 0, min(max(64, 2*n), historyLength)), r.items...)
		}
		r.items = append(r.items, v)
		return dropped, false
	}
	dropped = r.items[r.next]
	r.items[r.next] = v
	r.next = (r.next + 1) % historyLength
	return dropped, true
}

// never is a moment before all others.
const never = -1e18

// NewHistory begins to remember what happens to an empty table. A table has one
// history at most.
func NewHistory(t *Table) *History {
	h := &History{table: t, nowMs: never, sinceMs: never, contradictedMs: never, clearedMs: never, listedFromMs: never}
	t.history = h
	return h
}

// History is what remembers; nil: nothing does.
func (t *Table) History() *History { return t.history }

// SetNow tells the moment of the events that are applied next. Events of a
// replay happened when the engine published them.
func (h *History) SetNow(nowMs float64) {
	h.nowMs = nowMs
	if h.table.stats.Malformed > h.malformed {
		h.contradictedMs = nowMs
	}
	h.malformed = h.table.stats.Malformed
}

func (h *History) attached(id uint32) {
	if h == nil {
		return
	}
	page := int(id >> pageShift)
	for page >= len(h.listed) {
		h.listed = append(h.listed, nil)
	}
	if h.listed[page] == nil {
		h.listed[page] = make([]listing, pageNodes)
	}
	point := uint64(h.table.hashTo(id))
	h.listed[page][id&(pageNodes-1)] = listing{h.moment(), uint32(point), uint32(point >> 32)}
}

// point is the chain value of the prefix that ends with an attached block.
func (h *History) point(id uint32) prefix.Chain {
	l := &h.listed[id>>pageShift][id&(pageNodes-1)]
	return prefix.Chain(l.pointLow) | prefix.Chain(l.pointHigh)<<32
}

// halfSpanMs is half of what the moments in listed span: more than a replay
// reaches back, and a prediction never does.
const halfSpanMs = 1 << 31

// moment is now as it stands in listed. When the span is used up, what was listed
// in its first half was listed before anything that is asked.
func (h *History) moment() uint32 {
	if h.nowMs == never {
		return 0
	}
	if h.listedFromMs == never {
		h.listedFromMs = h.nowMs - halfSpanMs
	}
	if after := h.nowMs - h.listedFromMs; after >= 2*halfSpanMs-2 {
		by := math.Floor(after) - halfSpanMs
		h.listedFromMs += by
		for _, page := range h.listed {
			for i := range page {
				if at := page[i].at; at > 0 {
					page[i].at = uint32(max(float64(at)-by, 1))
				}
			}
		}
	}
	return uint32(max(0, math.Round(h.nowMs-h.listedFromMs))) + 1
}

func (h *History) unlisted(id uint32) {
	if h == nil {
		return
	}
	n := h.table.nodes.at(id)
	old, full := h.removed.add(removal{h.table.domains[n.domain].name, h.point(id), h.nowMs, n.end})
	if full {
		h.sinceMs = max(h.sinceMs, old.atMs)
	}
}

func (h *History) storedAgain(id uint32, other bool) {
	if h == nil {
		return
	}
	if old, full := h.stored.add(restore{h.nowMs, id, other}); full {
		h.sinceMs = max(h.sinceMs, old.atMs)
	}
}

// storedOtherwise notes that a block of the content of listed twins was stored
// under another hash. The twin listed first stands for them, as in find.
func (h *History) storedOtherwise(twins []uint32) {
	if len(twins) == 0 {
		return
	}
	first := twins[0]
	for _, id := range twins[1:] {
		if h.listedAt(id) < h.listedAt(first) {
			first = id
		}
	}
	h.storedAgain(first, true)
}

// cleared forgets: every prefix went at once, as the engine reported or
// because its view begins anew. Blocks that are attached all the same, in host
// memory, keep their names.
func (h *History) cleared(reported bool) {
	if h == nil {
		return
	}
	if reported {
		h.clearedMs = h.nowMs
	}
	if h.table.attached == 0 {
		h.listed = nil
	}
	if h.listedFromMs != never { // else none has a moment, and clears come in floods
		for _, page := range h.listed {
			for i := range page {
				page[i].at = 0
			}
		}
	}
	h.sinceMs, h.listedFromMs = h.nowMs, never
	h.removed, h.stored = ring[removal]{}, ring[restore]{}
}

// Asked is a question about a prompt whose reuse was predicted.
type Asked struct {
	// Key is the cluster key that prefixes are named with.
	Key prefix.ClusterKey
	// ViewMs is when the view was true that the prediction rested on,
	// DecidedMs when it was made.
	ViewMs, DecidedMs float64
	// Expected is the prefix that was expected to be held, Tip the prompt's
	// last whole block; depth 0: none.
	Expected, Tip Place
	// Unsalted are the prompt's prefixes as if it had no salt.
	Unsalted []Place
}

// Place is a prefix by its key.
type Place struct {
	DepthTokens uint32
	Key         prefix.Key
}

// Unknown is a number of tokens that cannot be said.
const Unknown = -1

// Told is what the events say; nil is unknown, as Unknown is of tokens.
type Told struct {
	// Held says whether the expected prefix was listed between the view and the
	// decision, Removed whether its removal was reported since the view.
	Held, Removed *bool
	// StoredAgain says whether its last block was stored once more under the
	// same hash since the decision, NamedOtherwise whether it or one before it
	// was under another hash, or events contradicted their block size.
	StoredAgain, NamedOtherwise *bool
	// ReusedTokens is the depth of the prompt that was listed before the
	// decision and not stored since.
	ReusedTokens int
	// UnsaltedTokens is the depth to which the prompt without its salt was
	// listed at the decision.
	UnsaltedTokens int
}

// Ask answers from what is remembered. It walks the table once.
func (h *History) Ask(q *Asked) Told {
	out := Told{ReusedTokens: Unknown, UnsaltedTokens: Unknown}
	found, stored := h.find(q), h.storedSince(q.DecidedMs-slackMs)
	complete := q.ViewMs >= h.sinceMs
	other := h.contradictedMs > q.ViewMs-contradictionMs
	if q.Expected.DepthTokens > 0 {
		id := found[q.Expected]
		removed := h.clearedMs > q.ViewMs || h.wasRemoved(q.Expected, q.Key, q.ViewMs)
		listed := id != 0 && h.listedAt(id) <= q.DecidedMs
		if complete || listed || removed {
			out.Held, out.Removed = known(listed || removed), known(removed)
		}
		again := false
		for up := id; up != 0; up = h.table.nodes.at(up).parent {
			again = again || up == id && stored[up]&storedSame != 0
			other = other || stored[up]&storedOther != 0
		}
		if id != 0 && complete {
			out.StoredAgain = known(again)
		}
	}
	if other || complete {
		out.NamedOtherwise = known(other)
	}
	if tip := found[q.Tip]; tip != 0 && q.Tip.DepthTokens > 0 && q.DecidedMs >= h.sinceMs {
		out.ReusedTokens = h.reused(tip, q.DecidedMs, stored)
	}
	if complete && len(q.Unsalted) > 0 {
		out.UnsaltedTokens = 0
		for _, p := range q.Unsalted {
			if id := found[p]; id != 0 && h.listedAt(id) <= q.DecidedMs {
				out.UnsaltedTokens = max(out.UnsaltedTokens, int(p.DepthTokens))
			}
		}
	}
	return out
}

const (
	// slackMs is by how much a decision may have been earlier than it is told:
	// a question takes its time on the way.
	slackMs = 250
	// aboutMs before a decision a block may have been stored for its request or
	// for one before it.
	aboutMs = 30
)

// contradictionMs is how long events that did not fit their block size count
// against a worker: what they should have listed is missing until it is
// stored anew.
const contradictionMs = 600_000

func known(fact bool) *bool { return &fact }

// reused is the depth of the deepest block up from tip that was not stored
// since a moment; Unknown if one was stored about then.
func (h *History) reused(tip uint32, sinceMs float64, stored map[uint32]uint8) int {
	deepest := 0
	for id := tip; ; id = h.table.nodes.at(id).parent {
		n := h.table.nodes.at(id)
		if n.flags&flagRoot != 0 {
			return deepest
		}
		listed := h.listedAt(id)
		if listed > sinceMs-aboutMs && listed <= sinceMs {
			return Unknown
		}
		if stored[id]&storedSame != 0 || listed > sinceMs {
			deepest = 0
		} else if deepest == 0 {
			deepest = int(n.end)
		}
	}
}

func (h *History) listedAt(id uint32) float64 {
	if page := int(id >> pageShift); page < len(h.listed) && h.listed[page] != nil {
		if at := h.listed[page][id&(pageNodes-1)].at; at > 0 {
			return h.listedFromMs + float64(at-1)
		}
	}
	return never
}

// How a listed block was stored once more.
const (
	storedSame uint8 = 1 << iota
	storedOther
)

// storedSince is the blocks stored once more since a moment.
func (h *History) storedSince(sinceMs float64) map[uint32]uint8 {
	out := map[uint32]uint8{}
	for i := range h.stored.items {
		switch r := &h.stored.items[i]; {
		case r.atMs <= sinceMs:
		case r.other:
			out[r.id] |= storedOther
		default:
			out[r.id] |= storedSame
		}
	}
	return out
}

func (h *History) wasRemoved(p Place, key prefix.ClusterKey, sinceMs float64) bool {
	for i := range h.removed.items {
		r := &h.removed.items[i]
		if r.depth == p.DepthTokens && r.atMs > sinceMs && prefix.NewKeyer(key, *r.domain).Key(r.chain, r.depth) == p.Key {
			return true
		}
	}
	return false
}

// find gives the attached nodes at the places of a question.
func (h *History) find(q *Asked) map[Place]uint32 {
	wanted := map[uint32][]Place{}
	for _, p := range append([]Place{q.Expected, q.Tip}, q.Unsalted...) {
		if p.DepthTokens > 0 {
			wanted[p.DepthTokens] = append(wanted[p.DepthTokens], p)
		}
	}
	found := map[Place]uint32{}
	keyers := map[uint16]*prefix.Keyer{}
	t := h.table
	for id := uint32(1); id <= t.nodes.made; id++ {
		n := t.nodes.at(id)
		if n.flags&(flagAttached|flagRoot) != flagAttached {
			continue
		}
		places := wanted[n.end]
		if len(places) == 0 {
			continue
		}
		k := keyers[n.domain]
		if k == nil {
			k = prefix.NewKeyer(q.Key, *t.domains[n.domain].name)
			keyers[n.domain] = k
		}
		key := k.Key(t.PointOf(id), n.end)
		for _, p := range places {
			// Of twins the one listed first counts: it is what a reader saw.
			if former := found[p]; p.Key == key && (former == 0 || h.listedAt(id) < h.listedAt(former)) {
				found[p] = id
			}
		}
	}
	return found
}
