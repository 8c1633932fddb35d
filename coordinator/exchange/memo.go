package exchange

import (
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/memo"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of what a peer is told of memos.
const (
	// sharedBytesPerSec and sharedBurst bound what one peer is told in all: what
	// is over is not told, and costs the peer a miss.
	sharedBytesPerSec = 2 << 20
	sharedBurst       = 4 << 20
	// maxMemoWaiting bounds what waits for a peer that reads slowly.
	maxMemoWaiting = 4 << 20
)

// MemoEntry is an entry of a pool's text memo as a message.
func MemoEntry(pool string, epoch uint32, e *memo.Entry) *waypostv1.MemoEntry {
	answer := uint32(e.Answer)
	return &waypostv1.MemoEntry{Pool: &pool, Epoch: &epoch, Key: &e.Key, Tokens: &e.Tokens, Answer: &answer, Values: e.Values}
}

func memoEntryBytes(e *waypostv1.MemoEntry) int { return 32 + len(e.GetPool()) + 8*len(e.GetValues()) }

// TellMemo queues entries for every peer.
func (x *Exchange) TellMemo(pool string, epoch uint32, entries []memo.Entry) {
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
		frames[i] = MemoEntry(pool, epoch, &entries[i])
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
			l.x.opt.MemoEntries.WithLabelValues("lost").Inc()
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
		m := &waypostv1.ExchangePlacementsRequest{Coordinator: &l.x.opt.Process, SentMonoNs: proto.Uint64(uint64(time.Since(l.x.opt.Began)))}
		for size := 0; len(waiting) > 0 && size < placesBytes; waiting = waiting[1:] {
			size += memoEntryBytes(waiting[0])
			m.Memo = append(m.Memo, waiting[0])
		}
		if err := s.Send(m); err != nil {
			l.x.opt.MemoEntries.WithLabelValues("lost").Add(float64(len(m.Memo) + len(waiting)))
			return err
		}
		l.x.opt.MemoEntries.WithLabelValues("sent").Add(float64(len(m.Memo)))
	}
	return nil
}
