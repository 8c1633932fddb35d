package views

import (
	"strings"
	"time"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/prefixindex"
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

// answer is what an agent answered a pull with, as metrics name it.
type answer string

const (
	answerNothing  answer = "nothing" // the stream was whole
	answerReplay   answer = "replay"
	answerSnapshot answer = "snapshot"
)

// note takes a frame of the answer.
func (a *answer) note(frame []byte) {
	switch {
	case summary.IsSnapshot(frame):
		*a = answerSnapshot
	case *a == answerNothing:
		*a = answerReplay
	}
}

// TakeCoverage takes what a report says of how much of a worker's cache shows,
// and returns the worker; false: the lane has none at that index.
func (vs *Views) TakeCoverage(s Session, w *waypostv1.WorkerLoad) (fleet.WorkerID, bool) {
	hs := vs.host(s.Host())
	hs.mu.Lock()
	defer hs.mu.Unlock()
	st := vs.streamOf(hs, s, w.GetIndex())
	if st == nil {
		return 0, false
	}
	vs.covered(st, w)
	return st.worker, true
}

// TakeLoad takes the frame of a report, or that it has none.
func (vs *Views) TakeLoad(s Session, w *waypostv1.WorkerLoad) {
	hs := vs.host(s.Host())
	if len(w.GetPrefixFrame()) > 0 {
		vs.takePrefix(hs, s, w.GetIndex(), w.GetEngineProcess(), w.GetPrefixFrame(), fromDelta)
	} else {
		vs.heard(hs, s, w.GetIndex())
	}
	vs.follow(hs, s, w.GetIndex(), w.GetEngineProcess(), w.GetPrefixFrame())
}

// TakePulled takes a part of an agent's answer to a pull.
func (vs *Views) TakePulled(s Session, p *waypostv1.PrefixFrames) {
	hs := vs.host(s.Host())
	if p.GetPullId()&verifyPulls != 0 {
		vs.takeVerified(hs, s, p)
		return
	}
	for _, frame := range p.GetFrames() {
		vs.takePrefix(hs, s, p.GetIndex(), p.GetEngineProcess(), frame, fromAgent)
	}
	vs.puller.progress(s.Host(), p.GetIndex(), p.GetPullId())
	if p.GetLast() {
		vs.answered(hs, s, p.GetIndex(), p.GetPullId())
	}
	vs.follow(hs, s, p.GetIndex(), p.GetEngineProcess(), nil)
}

// takePrefix applies one frame of a worker's stream and asks for what is
// missing.
func (vs *Views) takePrefix(hs *hostStreams, s Session, index uint32, process uint64, frame []byte, from origin) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	st := vs.streamOf(hs, s, index)
	if st == nil {
		return
	}
	if st.process != process {
		vs.opt.Refused("fenced")
		return
	}
	vs.apply(s.Host(), index, st, frame, from)
	switch {
	case st.short != "":
		vs.want(s.Host(), index, st, st.short, false)
	case from == fromDelta && !st.wanted:
		vs.view(st)
	}
}

// apply gives a frame to the decoder and notes what it means for the stream.
func (vs *Views) apply(host string, index uint32, st *stream, frame []byte, from origin) {
	st.streamBytes += uint64(len(frame))
	if from != fromDelta {
		st.pulledBytes += uint64(len(frame))
	}
	if from == fromAgent {
		st.answer.note(frame)
	}
	vs.metrics.prefixBytes.WithLabelValues(string(from)).Add(float64(len(frame)))
	result, err := st.decoder.Apply(frame)
	if err != nil {
		vs.opt.Refused("prefix")
		vs.log.Warn("prefix frame refused", "host", host, "index", index, "from", string(from), "error", err)
		vs.lost(st, "damage", from)
		return
	}
	st.frames[result.String()]++
	vs.metrics.prefixFrames.WithLabelValues(strings.ReplaceAll(result.String(), " ", "_")).Inc()
	switch result {
	case summary.Applied, summary.Duplicate:
		if from == fromDelta {
			st.short = "" // the newest frame fits
		}
	case summary.Gap:
		st.short = "gap"
		if !st.decoder.Anew() {
			vs.lost(st, st.short, from)
		}
	case summary.DigestMismatch:
		vs.lost(st, "digest", from)
	}
}

// lost notes that something of a stream was lost on its way. What a peer sends
// wrong is nothing that the worker's own stream lost.
func (vs *Views) lost(st *stream, how string, from origin) {
	st.short = how
	if from != fromPeer {
		vs.opt.Lost(st.worker, time.Now())
	}
}

// answered notes that all of an answer came: what is wrong from now on may be
// asked for again.
func (vs *Views) answered(hs *hostStreams, s Session, index, pull uint32) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	st := vs.streamOf(hs, s, index)
	if st == nil || st.pull == 0 || st.pull != pull {
		return
	}
	vs.metrics.answers.WithLabelValues(string(st.answer)).Inc()
	st.pull, st.wanted = 0, false
	st.distrusted = st.distrusted && st.distrustPull != pull
	if _, _, ok := st.decoder.Have(); !ok && st.short == "" {
		st.short = "missing"
	}
	vs.puller.answered(pull, st.short == "")
	switch {
	case st.short != "":
		vs.want(s.Host(), index, st, st.short, false)
	case st.distrusted:
		vs.want(s.Host(), index, st, pullDistrust, false) // its turn had passed
	}
}

// heard notes that a report came without a frame: nothing changed since the
// last one, or since the lane is up; what changed before that, only the answer
// to a pull tells.
func (vs *Views) heard(hs *hostStreams, s Session, index uint32) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	st := vs.streamOf(hs, s, index)
	if st == nil {
		return
	}
	if _, _, ok := st.decoder.Have(); !ok || st.wanted || st.short != "" {
		vs.want(s.Host(), index, st, "missing", false)
		return
	}
	vs.view(st)
}

// covered notes how much of its cache a worker's engine shows, and how old the
// oldest change is that its agent has not told yet.
func (vs *Views) covered(st *stream, w *waypostv1.WorkerLoad) {
	st.coverage, st.untoldMs = w.GetCoverage(), nil
	if age := w.PrefixAgeMs; age != nil && *age >= 0 { // else it is no age, and none is known
		st.untoldMs = age
	}
	vs.retain(st)
}

// retain has the index keep what was placed on a worker of whose cache not all
// is seen, least recently used out first, as long as it fits what the engine
// says it can hold. Of an engine that does not say, nothing is kept.
func (vs *Views) retain(st *stream) {
	tokens := uint64(0)
	if (st.coverage == "none" || st.coverage == "partial") && !vs.fleet.Followed(st.worker) {
		tokens = vs.fleet.CapacityTokens(st.worker)
	}
	if tokens != st.retainedTokens {
		st.retainedTokens = tokens
		if tokens > 0 {
			vs.inferred.Store(st.worker, struct{}{})
		} else {
			vs.inferred.Delete(st.worker)
		}
		vs.index.Retain(prefixindex.WorkerID(st.worker), tokens)
	}
}

// Retains says whether the index keeps what was placed on a worker.
func (vs *Views) Retains(worker fleet.WorkerID) bool {
	_, retained := vs.inferred.Load(worker)
	return retained
}

// Drop gives up all that the index lists for a worker.
func (vs *Views) Drop(worker fleet.WorkerID) {
	vs.inferred.Delete(worker)
	vs.index.Drop(prefixindex.WorkerID(worker))
}

// Unretain forgets what is retained of a prompt that did not come to its end:
// nobody saw it prefilled. One that ran stands in the cache, whatever the engine
// found of it when it came; one of which nothing was heard is taken to have run.
func (vs *Views) Unretain(e *fleet.EndedClaim) {
	if e.First || e.How != fleet.EndFailed && e.How != fleet.EndGone && e.How != fleet.EndSuperseded {
		return
	}
	vs.index.Shorten(prefixindex.WorkerID(e.Worker), summary.IndexKey(e.AfterKey), e.Keys, e.KeyDepths, uint32(e.ReusedTokens()))
}

// view tells the fleet how good the worker's cache view is as of the report that
// is taken in: that of a stream whose engine shows nothing is blind, however
// fresh it is.
func (vs *Views) view(st *stream) {
	kind := placement.ViewWarming
	_, _, have := st.decoder.Have()
	switch {
	case have && st.coverage == "none" && vs.fleet.Followed(st.worker):
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
		age = time.Duration(min(*st.untoldMs, MaxUntoldMs) * float64(time.Millisecond))
	}
	st.viewKind, st.viewAt = kind, time.Now().Add(-age)
	vs.setView(st.worker, st.process, kind, age)
}

// MaxUntoldMs bounds what an agent, or a peer, may say of the age of changes.
const MaxUntoldMs = 24 * 3600 * 1000

// Sync asks for the stream of every worker whose position is not known to
// continue: of all on a new lane, on which what was asked for on the former one
// is not answered any more.
func (vs *Views) Sync(s Session, newLane bool) {
	hs := vs.host(s.Host())
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, w := range s.Hello().GetWorkers() {
		st := vs.streamOf(hs, s, w.GetIndex())
		if st == nil {
			continue
		}
		if _, _, ok := st.decoder.Have(); ok && !newLane {
			continue
		}
		if newLane {
			st.pull = 0
		}
		vs.want(s.Host(), w.GetIndex(), st, "new", true)
	}
}

// Distrust asks for a worker's whole view anew, because predictions about it
// went wrong; its agent reads the engine's events again, at its own rate. lacking
// says that they all expected too little. The caller bounds how often.
func (vs *Views) Distrust(worker string, lacking bool) {
	w, err := vs.fleet.Worker(time.Now(), worker)
	if err != nil {
		return
	}
	hs := vs.known(w.Host)
	if hs == nil {
		return
	}
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if hs.session == nil {
		return
	}
	if st := vs.streamOf(hs, hs.session, w.Facts.Index); st != nil {
		vs.log.Warn("predictions about a worker went wrong: its cache view is asked for anew", "event", "view_disagrees", "worker", worker)
		if st.distrusted && st.lacking && !lacking {
			st.distrustPull = 0 // the one that is out asks for too little
		}
		st.lacking = lacking && (st.lacking || !st.distrusted)
		st.distrusted = true
		vs.want(w.Host, w.Facts.Index, st, pullDistrust, false)
	}
}

// pullDistrust is the reason of a pull that has the agent read the engine's
// events again.
const pullDistrust = "distrust"

// want asks for a replay from where a stream stands, or for a snapshot, when its
// turn comes.
func (vs *Views) want(host string, index uint32, st *stream, reason string, atOnce bool) {
	st.wanted = true
	vs.puller.want(host, index, reason, atOnce)
}
