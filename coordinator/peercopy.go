package coordinator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/pull"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of copying prefix streams between coordinators.
const (
	// copiesAtOnce bounds the copies that one coordinator sends at a time.
	copiesAtOnce = 64
	// copyWithin bounds one copy, copyPeersAsked how many peers are asked for
	// one stream: both together are less than a pull may take.
	copyWithin     = time.Second
	copyPeersAsked = 2
	// copyMute is how long a peer that failed is not asked again.
	copyMute = 10 * time.Second
	// maxCopyBytes bounds one copy: a cache of a million blocks takes 113 kB.
	maxCopyBytes = 16 << 20
)

// copyPeers are the cluster addresses of coordinators to ask for copies, in
// random order, so that not all ask the same. Configured ones are among them: a
// coordinator that starts has lanes before it has its catalogue.
func (c *Coordinator) copyPeers() []string {
	var out []string
	now := time.Now()
	known := c.joinAddresses()
	c.peers.mu.Lock()
	for _, address := range known {
		if address != "" && address != c.ClusterAddress() && !now.Before(c.peers.mute[address]) && !slices.Contains(out, address) {
			out = append(out, address)
		}
	}
	c.peers.mu.Unlock()
	rand.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out[:min(len(out), copyPeersAsked)]
}

// muted notes that a peer failed to copy a stream.
func (p *peers) muted(address string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.conns[address]; known { // bounds the map
		p.mute[address] = time.Now().Add(copyMute)
	}
}

// copyFromPeer takes over what another coordinator knows of a worker's cache. It
// is as old as that knowledge: what happened since, the agent tells.
func (h *lanes) copyFromPeer(peers []string, hl *hostLane, s *lane.Session, ask pull.Ask, worker fleet.WorkerID, process uint64) {
	at, ok := h.c.fleet.Endpoint(worker)
	if !ok {
		return
	}
	for _, address := range peers {
		h.c.metrics.pulls.WithLabelValues(ask.Reason, string(fromPeer)).Inc()
		frames, age, err := h.c.fetchCopy(address, at.Name, process)
		if err != nil {
			h.c.peers.muted(address)
			h.c.log.Debug("no copy of a prefix stream", "worker", at.Name, "peer", address, "error", err)
			continue
		}
		if len(frames) > 0 && h.takeCopy(hl, s, ask, process, frames, age) {
			return
		}
	}
}

// fetchCopy asks one peer. No frames: it knows nothing.
func (c *Coordinator) fetchCopy(address, worker string, process uint64) (frames [][]byte, age time.Duration, err error) {
	conn, err := c.peer(address)
	if err != nil {
		return nil, 0, err
	}
	ctx, cancel := context.WithTimeout(c.ctx, copyWithin)
	defer cancel()
	stream, err := waypostv1.NewPeerServiceClient(conn).CopyPrefixes(ctx, &waypostv1.CopyPrefixesRequest{Worker: &worker, EngineProcess: &process})
	if err != nil {
		return nil, 0, err
	}
	began, size := time.Now(), 0
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return frames, age + time.Since(began), nil
		}
		if err != nil {
			return nil, 0, err
		}
		for _, f := range part.GetFrames() {
			size += len(f)
		}
		if size > maxCopyBytes {
			return nil, 0, fmt.Errorf("more than %d bytes", maxCopyBytes)
		}
		frames = append(frames, part.GetFrames()...)
		age = time.Duration(max(0, min(part.GetAgeMs(), maxUntoldMs)) * float64(time.Millisecond))
	}
}

// takeCopy makes a peer's copy this coordinator's view, if the pull is still
// wanted. What does not decode, or does not have the digest that it says, leaves
// everything to the agent.
func (h *lanes) takeCopy(hl *hostLane, s *lane.Session, ask pull.Ask, process uint64, frames [][]byte, age time.Duration) bool {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	st := h.streamOf(hl, s, ask.Index)
	if hl.session != s || st == nil || st.process != process || st.pull != ask.ID {
		return false
	}
	short := st.short
	for _, f := range frames {
		h.apply(s.Host(), ask.Index, st, f, fromPeer)
	}
	st.short = short // what a peer sent wrong is not the agent's to repair
	_, _, ok := st.decoder.Have()
	if ok && st.coverage != "none" {
		st.viewKind, st.viewAt = placement.ViewWarming, time.Now().Add(-age)
		h.c.setView(st.worker, st.process, placement.ViewWarming, age)
	}
	return ok
}

// CopyPrefixes implements the peer service.
func (p *peers) CopyPrefixes(req *waypostv1.CopyPrefixesRequest, stream waypostv1.PeerService_CopyPrefixesServer) error {
	if err := p.c.checkPeer(stream.Context()); err != nil {
		return err
	}
	select {
	case p.copies <- struct{}{}:
		defer func() { <-p.copies }()
	default:
		return status.Errorf(codes.ResourceExhausted, "%s sends %d copies at once already", p.c.name, copiesAtOnce)
	}
	frames, age := p.c.lanes.copyOf(req.GetWorker(), req.GetEngineProcess())
	ageMs := ms(age)
	for i := range frames {
		if err := stream.Send(&waypostv1.CopyPrefixesResponse{Frames: frames[i : i+1], AgeMs: &ageMs}); err != nil {
			return err
		}
	}
	return nil
}

// copyOf writes what is known of a worker's cache as a snapshot, and tells how
// old it is; nothing if it is not known which frame of the stream it equals.
func (h *lanes) copyOf(worker string, process uint64) (frames [][]byte, age time.Duration) {
	id, current, ok := h.c.fleet.LookupWorker(worker)
	host, _, _ := strings.Cut(worker, "/")
	h.mu.Lock()
	hl := h.hosts[host]
	h.mu.Unlock()
	if !ok || current != process || hl == nil {
		return nil, 0
	}
	hl.mu.Lock()
	defer hl.mu.Unlock()
	for _, st := range hl.streams {
		if st.worker == id && st.process == process && !st.viewAt.IsZero() {
			frames, _ = st.decoder.Snapshot()
			return frames, time.Since(st.viewAt)
		}
	}
	return nil, 0
}
