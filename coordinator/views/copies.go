package views

import (
	"context"
	"strings"
	"time"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/pull"
)

// copyFromPeer takes over what another coordinator knows of a worker's cache. It
// is as old as that knowledge: what happened since, the agent tells.
func (vs *Views) copyFromPeer(ctx context.Context, peers []string, hs *hostStreams, s Session, ask pull.Ask, worker fleet.WorkerID, process uint64) {
	at, ok := vs.fleet.Endpoint(worker)
	if !ok {
		return
	}
	for _, address := range peers {
		vs.metrics.pulls.WithLabelValues(ask.Reason, string(fromPeer)).Inc()
		frames, age, err := vs.opt.Peers.FetchCopy(ctx, address, at.Name, process)
		if err != nil {
			vs.log.Debug("no copy of a prefix stream", "worker", at.Name, "peer", address, "error", err)
			continue
		}
		if len(frames) > 0 && vs.takeCopy(hs, s, ask, process, frames, age) {
			return
		}
	}
}

// takeCopy makes a peer's copy this coordinator's view, if the pull is still
// wanted. What does not decode, or does not have the digest that it says, leaves
// everything to the agent.
func (vs *Views) takeCopy(hs *hostStreams, s Session, ask pull.Ask, process uint64, frames [][]byte, age time.Duration) bool {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	st := vs.streamOf(hs, s, ask.Index)
	if hs.session != s || st == nil || st.process != process || st.pull != ask.ID {
		return false
	}
	short := st.short
	for _, f := range frames {
		vs.apply(s.Host(), ask.Index, st, f, fromPeer)
	}
	st.short = short // what a peer sent wrong is not the agent's to repair
	_, _, ok := st.decoder.Have()
	if ok && st.coverage != "none" {
		st.viewKind, st.viewAt = placement.ViewWarming, time.Now().Add(-age)
		vs.setView(st.worker, st.process, placement.ViewWarming, age)
	}
	return ok
}

// CopyOf writes what is known of a worker's cache as a snapshot, and tells how
// old it is; nothing if it is not known which frame of the stream it equals.
func (vs *Views) CopyOf(worker string, process uint64) (frames [][]byte, age time.Duration) {
	id, current, ok := vs.fleet.LookupWorker(worker)
	host, _, _ := strings.Cut(worker, "/")
	hs := vs.known(host)
	if !ok || current != process || hs == nil {
		return nil, 0
	}
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, st := range hs.streams {
		if st.worker == id && st.process == process && !st.viewAt.IsZero() {
			frames, _ = st.decoder.Snapshot()
			return frames, time.Since(st.viewAt)
		}
	}
	return nil, 0
}
