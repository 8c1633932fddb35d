package slots

import (
	"slices"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// Learn tells that more is known of a request's prompt than when it was told. As
// long as the server was not seen to have it in its slot, it is taken to be where
// the rules put it by what is known now.
func (r *Replay) Learn(id ledger.ClaimID, keys []prefix.Key, promptTokens int) {
	q := r.open[id]
	if q == nil || promptTokens < 1 {
		return
	}
	keys = keys[:min(len(keys), promptTokens/ledger.PointTokens, maxPoints)]
	if len(keys) < len(q.keys) {
		return
	}
	q.keys, q.tokens = append([]prefix.Key(nil), keys...), promptTokens
	if q.slot < 0 {
		return
	}
	s := &r.slots[q.slot]
	r.settle(q, nil)
	q.others = nil
	if q.task > 0 {
		s.held = &sequence{keys: q.keys, tokens: q.tokens}
		return
	}
	s.held, s.by = q.before, nil
	s.doubts, q.beforeDoubts = q.beforeDoubts, doubts{}
	r.undo(q)
	if q.maybe != nil {
		q.maybe.doubtful = false
	}
	q.slot, q.least, q.fromHost, q.taken, q.takenNext, q.maybe = -1, false, 0, nil, nil, nil
	r.launch(q)
	r.publish()
}

// launched is what the latest request that got a slot changed elsewhere.
type launched struct {
	// by is the request; nil: all of its prompt was known, so nothing of it is kept.
	by *request
	// entries and ghosts are the host cache's before it, changes its count after it.
	entries, ghosts []*sequence
	changes         uint64
	// emptied are the slots that were emptied for it, held what they held and empty
	// what they hold since.
	emptied []int
	held    []*sequence
	empty   *sequence
}

// launches notes what is before a request gets a slot, if a part of its prompt
// decides which: more may be learnt of it.
func (r *Replay) launches(q *request) launched {
	l := launched{empty: &sequence{exact: true}}
	if !q.whole() {
		l.by, l.entries, l.ghosts = q, slices.Clone(r.cache.entries), slices.Clone(r.cache.ghosts)
	}
	return l
}

// undo takes back what was changed for a request that is not where it was taken to
// be. Once others count on it, as they do with each launch, it is only what was taken
// for it: what it gave stays, too much rather than lost.
func (r *Replay) undo(q *request) {
	l := &r.latest
	if l.by != q || l.changes != r.cache.changes {
		if q.taken != nil {
			r.cache.putBack(q.taken, q.takenNext)
		}
		return
	}
	for i, at := range l.emptied {
		r.slots[at].held = l.held[i]
	}
	r.cache.entries, r.cache.ghosts = l.entries, l.ghosts
	r.cache.changes++
}
