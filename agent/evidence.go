package agent

import (
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/engine/kvevents"
	"waypost/gossip/lane"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// What bounds the work that coordinators can ask for.
const (
	// maxUnsalted bounds the places of one question.
	maxUnsalted = 64
	// maxEvidenceAge is how far back a question may reach.
	maxEvidenceAge = time.Hour
	// evidencePerSec bounds the walks over one rank's table.
	evidencePerSec = 50
	// resyncEvery is the least time between two views read anew because a
	// coordinator was wrong about the rank.
	resyncEvery = time.Minute
)

// ms is a moment on the rank's own clock, for its history.
func (r *rank) ms(now time.Time) float64 {
	return float64(now.Sub(r.began)) / float64(time.Millisecond)
}

// lostEvents notes counts of the stream that mean lost events.
func (r *rank) lostEvents(what string, now time.Time) {
	switch what {
	case kvevents.CountLost, kvevents.CountMissing, kvevents.CountDamaged, kvevents.CountMalformed, kvevents.CountHeldDropped:
		r.lostAt = now
	}
}

// testify answers what the engine's events say of a prompt's prefixes; nil:
// nothing can be said, or too much is asked.
func (r *rank) testify(now time.Time, ask *waypostv1.EvidenceAsk) *waypostv1.EvidenceReply {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := &waypostv1.EvidenceReply{AskId: proto.Uint32(ask.GetAskId()), EngineProcess: proto.Uint64(r.process)}
	decided, view := age(ask.GetDecidedAgeMs()), age(ask.GetViewAgeMs())
	if ask.GetEngineProcess() != r.process {
		return out
	}
	since := now.Add(-decided - view)
	out.EventsLost = proto.Bool(r.coverage != engine.CoverageFull || !r.lostAt.IsZero() && r.lostAt.After(since))
	if r.table == nil || r.beside != nil || !r.asks.take(now) {
		return out
	}
	q := blocktable.Asked{
		Key: r.key, ViewMs: r.ms(since), DecidedMs: r.ms(now.Add(-decided)),
		Expected: placeOf(ask.GetExpected()), Tip: placeOf(ask.GetTip()),
	}
	for i, p := range ask.GetUnsalted() {
		if i < maxUnsalted {
			q.Unsalted = append(q.Unsalted, placeOf(p))
		}
	}
	h := r.table.History()
	h.SetNow(r.ms(now))
	told := h.Ask(&q)
	out.Held, out.Removed, out.StoredAgain, out.NamedOtherwise = told.Held, told.Removed, told.StoredAgain, told.NamedOtherwise
	out.ReusedTokens, out.UnsaltedTokens = tokens(told.ReusedTokens), tokens(told.UnsaltedTokens)
	return out
}

func placeOf(p *waypostv1.EvidencePoint) blocktable.Place {
	return blocktable.Place{DepthTokens: p.GetDepth(), Key: prefix.Key(p.GetKey())}
}

// tokens is nil for a number of tokens that cannot be said.
func tokens(n int) *uint32 {
	if n == blocktable.Unknown {
		return nil
	}
	return proto.Uint32(uint32(n))
}

// age is a time ago as a coordinator told it.
func age(ms float64) time.Duration {
	if !(ms > 0) {
		return 0
	}
	return time.Duration(min(ms, float64(maxEvidenceAge/time.Millisecond)) * float64(time.Millisecond))
}

// limiter lets so many through per second.
type limiter struct {
	second int64
	n      int
}

func (l *limiter) take(now time.Time) bool {
	if s := now.Unix(); s != l.second {
		l.second, l.n = s, 0
	}
	l.n++
	return l.n <= evidencePerSec
}

// distrusted notes that a coordinator's predictions about the rank went wrong, and
// has the engine's events read again from the beginning: at a bounded rate, however
// many ask. It reports whether they are; again reports whether they can be.
func (r *rank) distrusted(now time.Time, again func() bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.resyncedAt.IsZero() && now.Sub(r.resyncedAt) < resyncEvery || !again() {
		return false
	}
	r.resyncedAt = now
	r.faults["distrusted"]++
	return true
}

// pullDistrust is the reason of a pull by a coordinator whose predictions
// about a worker went wrong.
const pullDistrust = "distrust"

// resync reads a rank's events again if a coordinator distrusts its view.
func (h *lanes) resync(p *waypostv1.PrefixPull, r *rank) {
	w := h.a.watchedOf(p.GetIndex())
	if p.GetReason() != pullDistrust || w == nil {
		return
	}
	again, ok := w.adapter.(engine.Resyncer)
	if ok && r.distrusted(time.Now(), func() bool { return again.Resync(r.number, p.GetLacking()) }) {
		h.a.log.Info("cache view is read again: predictions about it went wrong", "event", "view_disagrees", "engine", w.target.Name, "rank", r.number)
	}
}

// late is how late a frame of a lane came.
func (h *lanes) late(l *lane.Lane, f *waypostv1.ConnectResponse) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	fresh := h.fresh[l]
	if fresh == nil {
		if _, up := h.told[l]; !up {
			return 0
		}
		fresh = &lane.Freshness{}
		h.fresh[l] = fresh
	}
	return fresh.Observe(f.GetSentMonoNs(), int64(time.Since(h.began)))
}

// answerEvidence answers a coordinator's question about a wrong prediction,
// which came late.
func (h *lanes) answerEvidence(l *lane.Lane, ask *waypostv1.EvidenceAsk, late time.Duration) {
	reply := &waypostv1.EvidenceReply{AskId: proto.Uint32(ask.GetAskId())}
	if r := h.a.rank(ask.GetIndex()); r != nil {
		reply = r.testify(time.Now().Add(-late), ask)
	}
	if err := l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Evidence{Evidence: reply}}); err != nil {
		h.a.log.Debug("evidence not sent", "error", err)
	}
}
