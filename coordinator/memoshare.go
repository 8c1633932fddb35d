package coordinator

import (
	"context"
	"errors"
	"io"
	"time"

	"waypost/coordinator/exchange"
	"waypost/coordinator/memo"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of what coordinators tell each other of their memos.
const (
	// maxSharedBytes bounds what is told after one learnt prompt.
	maxSharedBytes = 16 << 10
	// memoSnapshotBytes bounds what a coordinator that starts is told of a pool.
	memoSnapshotBytes = 4 << 20
	memoPart          = 256
	memoCopyWithin    = 10 * time.Second
)

// take takes over entries of a peer. One that is refused does not end the
// stream.
func (m *memos) take(entries []*waypostv1.MemoEntry) {
	for _, e := range entries {
		// What is refused must not take the place of a pool.
		var p *poolMemo
		if len(e.GetPool()) <= maxNameLen && e.GetAnswer() <= 255 {
			p = m.of(e.GetPool())
		}
		if p == nil {
			m.c.metrics.memoEntries.WithLabelValues("refused").Inc()
			continue
		}
		p.mu.Lock()
		err := p.memo.Take(m.key, e.GetEpoch(), memo.Entry{Key: e.GetKey(), Tokens: e.GetTokens(), Answer: uint8(e.GetAnswer()), Values: e.GetValues()})
		p.mu.Unlock()
		result := "taken"
		if err != nil {
			result = "refused"
			m.c.log.Debug("memo entry of a peer refused", "error", err)
		}
		m.c.metrics.memoEntries.WithLabelValues(result).Inc()
	}
}

// CopyMemo implements the peer service.
func (p *peers) CopyMemo(_ *waypostv1.CopyMemoRequest, stream waypostv1.PeerService_CopyMemoServer) error {
	if err := p.c.checkPeer(stream.Context()); err != nil {
		return err
	}
	for name, pm := range p.c.memos.all() {
		pm.mu.Lock()
		entries, epoch := pm.memo.Snapshot(p.c.memos.key, memoSnapshotBytes), pm.memo.Epoch()
		pm.mu.Unlock()
		for len(entries) > 0 {
			n := min(len(entries), memoPart)
			out := &waypostv1.CopyMemoResponse{}
			for i := range entries[:n] {
				out.Entries = append(out.Entries, exchange.MemoEntry(name, epoch, &entries[i]))
			}
			if err := stream.Send(out); err != nil {
				return err
			}
			entries = entries[n:]
		}
	}
	return nil
}

// copyMemo takes a peer's entries over, once, when the first one is met.
func (c *Coordinator) copyMemo(ctx context.Context, address string) {
	if c.memos.copied.Swap(true) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, memoCopyWithin)
	defer cancel()
	if err := c.memoFrom(ctx, address); err != nil {
		c.memos.copied.Store(false)
		c.log.Debug("the text memo of a peer was not copied", "peer", address, "error", err)
	}
}

func (c *Coordinator) memoFrom(ctx context.Context, address string) error {
	conn, err := c.peer(address)
	if err != nil {
		return err
	}
	stream, err := waypostv1.NewPeerServiceClient(conn).CopyMemo(ctx, &waypostv1.CopyMemoRequest{})
	if err != nil {
		return err
	}
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		c.memos.take(part.GetEntries())
	}
}
