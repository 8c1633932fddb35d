package agent

import (
	"slices"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of what coordinators are told of stored prompts.
const (
	// maxWanted bounds the claims of a worker of which it is told, the oldest go
	// first.
	maxWanted = 1024
	// maxStoredTokens bounds what is told of one prompt.
	maxStoredTokens = 128 << 10
	// maxUntold bounds the prompts that wait to be told: what is over is left out.
	maxUntold = 64
)

// wantedPrompts are claims on texts of which the coordinator does not know the
// token ids: what the engine stores for them tells. Requests are known by the
// session that they name.
type wantedPrompts struct {
	by     map[string]*wantedPrompt
	order  []string
	untold []storedPrompt
}

// wantedPrompt is one of them.
type wantedPrompt struct {
	coordinator uint64
	tokens      int  // stored so far
	ended       bool // what comes now may be the answer
}

// storedPrompt is what an engine stored of one, by the points of its chain.
type storedPrompt struct {
	coordinator uint64
	session     string
	points      []prefix.Chain
}

// claims notes the claims of a frame that want to hear, each once.
func (w *wantedPrompts) claims(f *ledger.ClaimFrame) {
	for i := range f.Offers {
		session := f.Offers[i].Session
		if session == "" || w.by[session] != nil {
			continue
		}
		if w.by == nil {
			w.by = map[string]*wantedPrompt{}
		}
		if len(w.order) == maxWanted {
			delete(w.by, w.order[0])
			w.order = slices.Delete(w.order, 0, 1)
		}
		w.by[session] = &wantedPrompt{coordinator: f.Coordinator}
		w.order = append(w.order, session)
	}
}

// stored takes in what an applied batch stored for them. An engine stores the
// blocks of a prefill step with one event, and those of an answer one by one: the
// first event of one block may be either and ends what is told, and so does one
// that does not continue the former, as after a preemption.
func (w *wantedPrompts) stored(t *blocktable.Table, b *engine.Batch) {
	if b.Replayed || len(w.by) == 0 {
		return
	}
	for i := range b.Events {
		e := &b.Events[i]
		if e.Session == "" || e.Op != blocktable.OpStore || e.Medium != blocktable.MediumGPU || e.Spec == blocktable.SpecSlidingWindow || e.Spec == blocktable.SpecSlidingWindowMLA ||
			len(e.Hashes) == 0 || len(e.Tokens) != len(e.Hashes)*int(e.BlockTokens) {
			continue
		}
		p := w.by[e.Session]
		if p == nil || p.ended {
			continue
		}
		tokens := t.PromptTo(e.Hashes[len(e.Hashes)-1])
		if len(tokens) > 0 && len(tokens) <= p.tokens {
			continue // of another group of layers, or once more
		}
		if len(e.Hashes) == 1 || len(tokens) == 0 || p.tokens > 0 && len(tokens)-len(e.Tokens) != p.tokens {
			p.ended = true
			continue
		}
		p.tokens, p.ended = len(tokens), len(tokens) >= maxStoredTokens
		if len(w.untold) < maxUntold {
			points := prefix.PointsOf(nil, tokens[:min(len(tokens), maxStoredTokens)])
			w.untold = append(w.untold, storedPrompt{p.coordinator, e.Session, points})
		}
	}
}

// takeStored hands over what waits to be told, with the lanes of those who want
// to hear it. What nobody is there to hear is dropped.
func (r *rank) takeStored() (told []storedPrompt, to []*lane.Lane, key prefix.ClusterKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.wanted.untold {
		for l, coordinator := range r.lanes {
			if coordinator == s.coordinator {
				told, to = append(told, s), append(to, l)
				break
			}
		}
	}
	r.wanted.untold = r.wanted.untold[:0]
	return told, to, r.key
}

// tellStored tells coordinators what an engine stored of their prompts. Tokens
// stay here; chain values are masked.
func (w *watched) tellStored(r *rank) {
	told, to, key := r.takeStored()
	for i := range told {
		s := &told[i]
		m := &waypostv1.StoredPrompt{Session: &s.session, KeyId: new(key.ID())}
		for _, c := range s.points {
			m.Values = append(m.Values, uint64(c))
		}
		key.Mask(s.session, m.Values)
		if err := to[i].Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_StoredPrompt{StoredPrompt: m}}); err != nil {
			w.log.Debug("stored prompt not told", "error", err)
		}
	}
}
