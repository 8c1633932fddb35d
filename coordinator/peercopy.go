package coordinator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"waypost/coordinator/views"
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

// CopyPeers implements [views.Peers]: it returns the cluster addresses of
// coordinators in random order, so that not all ask the same. Configured ones are
// among them: a coordinator that starts has lanes before it has its catalogue.
func (p *peers) CopyPeers() []string {
	var out []string
	now := time.Now()
	known := p.c.joinAddresses()
	p.mu.Lock()
	for _, address := range known {
		if address != "" && address != p.c.ClusterAddress() && !now.Before(p.mute[address]) && !slices.Contains(out, address) {
			out = append(out, address)
		}
	}
	p.mu.Unlock()
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

// FetchCopy implements [views.Peers]; a peer that fails is not asked for a while.
func (p *peers) FetchCopy(ctx context.Context, address, worker string, process uint64) (frames [][]byte, age time.Duration, err error) {
	if frames, age, err = p.fetchCopy(ctx, address, worker, process); err != nil {
		p.muted(address)
	}
	return frames, age, err
}

func (p *peers) fetchCopy(ctx context.Context, address, worker string, process uint64) (frames [][]byte, age time.Duration, err error) {
	conn, err := p.c.peer(address)
	if err != nil {
		return nil, 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, copyWithin)
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
		age = time.Duration(max(0, min(part.GetAgeMs(), views.MaxUntoldMs)) * float64(time.Millisecond))
	}
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
	frames, age := p.c.views.CopyOf(req.GetWorker(), req.GetEngineProcess())
	ageMs := ms(age)
	for i := range frames {
		if err := stream.Send(&waypostv1.CopyPrefixesResponse{Frames: frames[i : i+1], AgeMs: &ageMs}); err != nil {
			return err
		}
	}
	return nil
}
