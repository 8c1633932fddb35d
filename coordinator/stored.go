package coordinator

import (
	"slices"

	"google.golang.org/protobuf/types/known/structpb"

	"waypost/coordinator/memo"
	"waypost/coordinator/placement"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// What engines' events show of prompts whose ids are not known.
const (
	// idsPerPoint is how many token ids a chain value weighs in the bound of what
	// is kept.
	idsPerPoint = 2
	// maxStoredPoints bounds what is taken of one prompt.
	maxStoredPoints = 8192
)

// sessionFor has a text whose ids are not all known name itself to its engine, if
// that engine's events tell who stored; its agent then tells what was. It returns
// the session's name, which is the placement's id; empty: none.
func (c *Coordinator) sessionFor(w *work, chosen *placement.Candidate, terms *placement.Terms, answer *waypostv1.Placement) string {
	t := &w.text
	t.asked = t.request != nil && !t.learnt && !t.session && !t.request.Opaque() && terms.Partner < 0 && c.fleet.NamesSessions(chosen.ID)
	if !t.asked {
		return ""
	}
	patchBody(answer.GetWorker(), "session_id", structpb.NewStringValue(answer.GetPlacementId()))
	return answer.GetPlacementId()
}

// stored keeps what an agent tells of a prompt placed at its host: the longest
// that was told, until the prompt is learnt from a better source, or from this.
func (m *memos) stored(host string, told *waypostv1.StoredPrompt) {
	refused := func(why string) {
		m.c.metrics.badFrames.WithLabelValues("stored_prompt").Inc()
		m.c.log.Debug("what an engine stored of a prompt is refused", "host", host, "reason", why)
	}
	switch {
	case len(told.GetValues()) == 0 || len(told.GetValues()) > maxStoredPoints:
		refused("values: their number is out of range")
		return
	case told.GetKeyId() != m.c.prefixKey.ID():
		refused("key_id: it is of another cluster key")
		return
	}
	m.mu.Lock()
	tp := m.taught[told.GetSession()]
	m.mu.Unlock()
	if tp == nil {
		return // it is forgotten, or learnt and ended
	}
	if at, _, ok := m.c.lanes.where(tp.worker); !ok || at != host {
		refused("session: its placement is at another host")
		return
	}
	values := slices.Clone(told.GetValues())
	m.c.prefixKey.Mask(told.GetSession(), values)
	m.mu.Lock()
	defer m.mu.Unlock()
	tp.mu.Lock()
	defer tp.mu.Unlock()
	more := len(values) - len(tp.points)
	if tp.done != "" || tp.closed || more <= 0 || m.tokens+more*idsPerPoint > maxTaughtTokens {
		return
	}
	m.tokens += more * idsPerPoint
	tp.points = make([]prefix.Chain, len(values))
	for i, v := range values {
		tp.points[i] = prefix.Chain(v)
	}
}

// learnStored learns a prompt from what its engine stored of it, if nothing
// better taught it. promptTokens is its length; -1: it is not known.
func (m *memos) learnStored(tp *taughtPrompt, promptTokens int) {
	tp.mu.Lock()
	points := tp.points
	tp.mu.Unlock()
	if promptTokens >= 0 {
		points = points[:min(len(points), promptTokens/prefix.PointTokens)]
	}
	if len(points) == 0 {
		return
	}
	m.learnFrom(tp, fromEvents, len(points)*prefix.PointTokens, func(mm *memo.Memo) memo.Learnt { return mm.LearnStored(tp.request, points, &tp.given) })
}

// over says that a prompt need not be asked about.
func (tp *taughtPrompt) over() bool {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	return tp.done != "" || tp.closed
}

// upgrade notes that the engine's ids came for a prompt that was learnt from
// something else. It reports false if they came before.
func (tp *taughtPrompt) upgrade() bool {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	if tp.done == "" || tp.done == fromEngine {
		return false
	}
	tp.done = fromEngine
	return true
}
