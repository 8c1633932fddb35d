package coordinator

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/memo"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of what coordinators tell each other of their memos.
const (
	// maxSharedBytes bounds what is told after one learnt prompt, sharedBytesPerSec
	// and sharedBurst what one peer is told in all: what is over is not told, and
	// costs the peer a miss.
	maxSharedBytes    = 16 << 10
	sharedBytesPerSec = 2 << 20
	sharedBurst       = 4 << 20
	// maxMemoWaiting bounds what waits for a peer that reads slowly.
	maxMemoWaiting = 4 << 20
	// memoSnapshotBytes bounds what a coordinator that starts is told of a pool.
	memoSnapshotBytes = 4 << 20
	memoPart          = 256
	memoCopyWithin    = 10 * time.Second
)

func memoEntry(pool string, epoch uint32, e *memo.Entry) *waypostv1.MemoEntry {
	answer := uint32(e.Answer)
	return &waypostv1.MemoEntry{Pool: &pool, Epoch: &epoch, Key: &e.Key, Tokens: &e.Tokens, Answer: &answer, Values: e.Values}
}

func memoEntryBytes(e *waypostv1.MemoEntry) int { return 32 + len(e.GetPool()) + 8*len(e.GetValues()) }

// tellMemo queues entries for every peer.
func (x *exchange) tellMemo(pool string, epoch uint32, entries []memo.Entry) {
	if len(entries) == 0 {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.cut.Load() || len(x.links) == 0 {
		return
	}
	now := time.Now()
	frames := make([]*waypostv1.MemoEntry, len(entries))
	for i := range entries {
		frames[i] = memoEntry(pool, epoch, &entries[i])
	}
	for _, l := range x.links {
		l.pushMemo(now, frames)
	}
}

// pushMemo queues entries within the peer's allowance.
func (l *link) pushMemo(now time.Time, entries []*waypostv1.MemoEntry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.allowance = min(l.allowance+now.Sub(l.allowedAt).Seconds()*sharedBytesPerSec, sharedBurst)
	l.allowedAt = now
	for _, e := range entries {
		n := float64(memoEntryBytes(e))
		if n > l.allowance || n > maxMemoWaiting-l.memoBytes || !l.up {
			l.x.c.metrics.memoEntries.WithLabelValues("lost").Inc()
			continue
		}
		l.allowance -= n
		l.memoBytes += n
		l.memo = append(l.memo, e)
	}
	if len(l.memo) > 0 {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// takeMemo hands over the entries that wait.
func (l *link) takeMemo() []*waypostv1.MemoEntry {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := l.memo
	l.memo, l.memoBytes = nil, 0
	return out
}

// writeMemo sends the entries that wait. What is not sent is lost.
func (l *link) writeMemo(s placesStream) error {
	for waiting := l.takeMemo(); len(waiting) > 0; {
		m := &waypostv1.ExchangePlacementsRequest{Coordinator: &l.x.c.process, SentMonoNs: proto.Uint64(uint64(time.Since(l.x.c.began)))}
		for size := 0; len(waiting) > 0 && size < placesBytes; waiting = waiting[1:] {
			size += memoEntryBytes(waiting[0])
			m.Memo = append(m.Memo, waiting[0])
		}
		if err := s.Send(m); err != nil {
			l.x.c.metrics.memoEntries.WithLabelValues("lost").Add(float64(len(m.Memo) + len(waiting)))
			return err
		}
		l.x.c.metrics.memoEntries.WithLabelValues("sent").Add(float64(len(m.Memo)))
	}
	return nil
}

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
				out.Entries = append(out.Entries, memoEntry(name, epoch, &entries[i]))
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
func (c *Coordinator) copyMemo(address string) {
	if c.memos.copied.Swap(true) {
		return
	}
	ctx, cancel := context.WithTimeout(c.ctx, memoCopyWithin)
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
