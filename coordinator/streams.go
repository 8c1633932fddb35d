package coordinator

import (
	"strings"
	"time"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/prefixindex"
	"waypost/gossip/lane"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// origin is where a prefix frame came from, as metrics name it.
type origin string

const (
	fromDelta origin = "delta" // on a load report
	fromAgent origin = "agent" // asked for
	fromPeer  origin = "peer"  // asked for, from another coordinator
)

// takePrefix applies one frame of a worker's stream and asks for what is
// missing.
func (h *lanes) takePrefix(hl *hostLane, s *lane.Session, index uint32, process uint64, frame []byte, from origin) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	st := h.streamOf(hl, s, index)
	if st == nil {
		return
	}
	if st.process != process {
		h.c.metrics.badFrames.WithLabelValues("fenced").Inc()
		return
	}
	h.apply(s.Host(), index, st, frame, from)
	switch {
	case st.short != "":
		h.want(s.Host(), index, st, st.short, false)
	case from == fromDelta && !st.wanted:
		h.view(st)
	}
}

// apply gives a frame to the decoder and notes what it means for the stream.
func (h *lanes) apply(host string, index uint32, st *stream, frame []byte, from origin) {
	st.streamBytes += uint64(len(frame))
	if from != fromDelta {
		st.pulledBytes += uint64(len(frame))
	}
	h.c.metrics.prefixBytes.WithLabelValues(string(from)).Add(float64(len(frame)))
	result, err := st.decoder.Apply(frame)
	if err != nil {
		h.c.metrics.badFrames.WithLabelValues("prefix").Inc()
		h.c.log.Warn("prefix frame refused", "host", host, "index", index, "from", string(from), "error", err)
		h.lost(st, "damage")
		return
	}
	st.frames[result.String()]++
	h.c.metrics.prefixFrames.WithLabelValues(strings.ReplaceAll(result.String(), " ", "_")).Inc()
	switch result {
	case summary.Applied, summary.Duplicate:
		if from == fromDelta {
			st.short = "" // the newest frame fits
		}
	case summary.Gap:
		st.short = "gap"
		if !st.decoder.Anew() {
			h.lost(st, st.short)
		}
	case summary.DigestMismatch:
		h.lost(st, "digest")
	}
}

// lost notes that something of a stream was lost on its way.
func (h *lanes) lost(st *stream, how string) {
	st.short = how
	h.c.cases.lost(st.worker, time.Now())
}

// answered notes that all of an answer came: what is wrong from now on may be
// asked for again.
func (h *lanes) answered(hl *hostLane, s *lane.Session, index, pull uint32) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	st := h.streamOf(hl, s, index)
	if st == nil || st.pull == 0 || st.pull != pull {
		return
	}
	st.pull, st.wanted = 0, false
	st.distrusted = st.distrusted && st.distrustPull != pull
	if _, _, ok := st.decoder.Have(); !ok && st.short == "" {
		st.short = "missing"
	}
	h.puller.answered(pull, st.short == "")
	switch {
	case st.short != "":
		h.want(s.Host(), index, st, st.short, false)
	case st.distrusted:
		h.want(s.Host(), index, st, pullDistrust, false) // its turn had passed
	}
}

// heard notes that a report came without a frame: nothing changed since the
// last one, or since the lane is up; what changed before that, only the answer
// to a pull tells.
func (h *lanes) heard(hl *hostLane, s *lane.Session, index uint32) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	st := h.streamOf(hl, s, index)
	if st == nil {
		return
	}
	if _, _, ok := st.decoder.Have(); !ok || st.wanted || st.short != "" {
		h.want(s.Host(), index, st, "missing", false)
		return
	}
	h.view(st)
}

// covered notes how much of its cache a worker's engine shows, and how old the
// oldest change is that its agent has not told yet.
func (h *lanes) covered(hl *hostLane, s *lane.Session, w *waypostv1.WorkerLoad) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	if st := h.streamOf(hl, s, w.GetIndex()); st != nil {
		st.coverage, st.untoldMs = w.GetCoverage(), nil
		if age := w.PrefixAgeMs; age != nil && *age >= 0 { // else it is no age, and none is known
			st.untoldMs = age
		}
		h.c.slots.report(st.worker, w.GetIdleSlots())
		h.retain(st)
	}
}

// retain has the index keep what was placed on a worker of whose cache not all
// is seen, least recently used out first, as long as it fits what the engine
// says it can hold. Of an engine that does not say, nothing is kept.
func (h *lanes) retain(st *stream) {
	tokens := uint64(0)
	if (st.coverage == "none" || st.coverage == "partial") && !h.c.fleet.Followed(st.worker) {
		tokens = h.c.fleet.CapacityTokens(st.worker)
	}
	if tokens != st.retainedTokens {
		st.retainedTokens = tokens
		if tokens > 0 {
			h.c.inferred.Store(st.worker, struct{}{})
		} else {
			h.c.inferred.Delete(st.worker)
		}
		h.c.index.Retain(prefixindex.WorkerID(st.worker), tokens)
	}
}

// unretain forgets what is retained of a prompt that did not come to its end:
// nobody saw it prefilled. One that ran stands in the cache, whatever the engine
// found of it when it came; one of which nothing was heard is taken to have run.
func (c *Coordinator) unretain(e *fleet.EndedClaim) {
	if e.First || e.How != fleet.EndFailed && e.How != fleet.EndGone && e.How != fleet.EndSuperseded {
		return
	}
	c.index.Shorten(prefixindex.WorkerID(e.Worker), summary.IndexKey(e.AfterKey), e.Keys, e.KeyDepths, uint32(e.ReusedTokens()))
}

// view tells the fleet how good the worker's cache view is as of the report that
// is taken in: that of a stream whose engine shows nothing is blind, however
// fresh it is.
func (h *lanes) view(st *stream) {
	kind := placement.ViewWarming
	_, _, have := st.decoder.Have()
	switch {
	case have && st.coverage == "none" && h.c.fleet.Followed(st.worker):
		kind = placement.ViewInferred
	case st.coverage == "none":
		kind = placement.ViewBlind
	case have && st.coverage == "partial":
		kind = placement.ViewPartial
	case have && st.coverage == "full":
		kind = placement.ViewLive
	}
	age := st.decoder.Age()
	if st.untoldMs != nil {
		age = time.Duration(min(*st.untoldMs, maxUntoldMs) * float64(time.Millisecond))
	}
	st.viewKind, st.viewAt = kind, time.Now().Add(-age)
	h.c.setView(st.worker, st.process, kind, age)
}

// maxUntoldMs bounds what an agent may say of the age of its changes.
const maxUntoldMs = 24 * 3600 * 1000

// sync asks for the stream of every worker whose position is not known to
// continue: of all on a new lane, on which what was asked for on the former one
// is not answered any more.
func (h *lanes) sync(hl *hostLane, s *lane.Session, newLane bool) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	for _, w := range s.Hello().GetWorkers() {
		st := h.streamOf(hl, s, w.GetIndex())
		if st == nil {
			continue
		}
		if _, _, ok := st.decoder.Have(); ok && !newLane {
			continue
		}
		if newLane {
			st.pull = 0
		}
		h.want(s.Host(), w.GetIndex(), st, "new", true)
	}
}

// want asks for a replay from where a stream stands, or for a snapshot, when its
// turn comes.
func (h *lanes) want(host string, index uint32, st *stream, reason string, atOnce bool) {
	st.wanted = true
	h.puller.want(host, index, reason, atOnce)
}
