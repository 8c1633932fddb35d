package trtllm

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/kvevents"
)

const (
	eventsPath = "/kv_cache_events"
	// eventsEvery is the least time between two questions for events; the
	// server waits up to two seconds for the first event itself.
	eventsEvery   = 250 * time.Millisecond
	eventsTimeout = 15 * time.Second
	// missingEvery is the pause after an answer that there is no such route.
	missingEvery = 30 * time.Second
	// maxMembers bounds the events of an answer, and the blocks, tokens and hashes
	// of one.
	maxMembers = 1 << 18
	// maxWaiting bounds the events that wait for the reader of their rank.
	maxWaiting      = 10_000
	maxWaitingBytes = 64 << 20
)

// waiting are events of ranks that have no reader yet: the server hands each out
// once, so that they must not be dropped.
type waiting struct {
	byRank map[int][]kvevents.Message
	n      int
	bytes  int
}

func (w *waiting) put(rank int, m kvevents.Message) {
	if w.n >= maxWaiting || w.bytes+len(m.Payload) > maxWaitingBytes {
		return // the gap in the numbers will tell
	}
	w.byRank[rank] = append(w.byRank[rank], m)
	w.n, w.bytes = w.n+1, w.bytes+len(m.Payload)
}

func (w *waiting) take(rank int) []kvevents.Message {
	list := w.byRank[rank]
	delete(w.byRank, rank)
	w.n -= len(list)
	for _, m := range list {
		w.bytes -= len(m.Payload)
	}
	return list
}

// hintUnanswered is why events are doubted after an answer that failed: what it
// would have told is told to nobody else.
const hintUnanswered = "an answer with events failed; the next events show what was lost"

// Deliver implements poller.Deliverer.
func (s *source) Deliver(ctx context.Context, reader func(rank int) *kvevents.Reader) {
	if s.streams() {
		return
	}
	late := waiting{byRank: map[int][]kvevents.Message{}}
	connected := map[*kvevents.Reader]bool{}
	doubt := func(why string) {
		for rank := range int(max(1, s.ranks.Load())) {
			if r := reader(rank); r != nil {
				r.Doubt(why)
			}
		}
	}
	for ctx.Err() == nil {
		began := time.Now()
		var list []json.RawMessage
		answered, err := s.askEvents(ctx, &list)
		now := time.Now()
		pause := eventsEvery - now.Sub(began)
		switch {
		case ctx.Err() != nil:
			return
		case enginehttp.Missing(err):
			s.noEvents.Store(true)
			pause = missingEvery
		case err != nil:
			// Events of an answer that failed are lost; the next number shows
			// which, and until it comes nobody knows.
			s.log.Debug("events cannot be read", "error", err)
			if r := reader(0); r != nil && answered {
				r.Malformed(now)
			}
			doubt(hintUnanswered)
		default:
			s.noEvents.Store(false)
			s.pass(list, now, reader, &late, connected)
			if len(list) > 0 {
				doubt("")
			}
		}
		wait(ctx, pause)
	}
}

func wait(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// askEvents asks for events; answered says that there is an answer, though it may be
// none that can be read.
func (s *source) askEvents(ctx context.Context, list *[]json.RawMessage) (answered bool, err error) {
	_, err = s.Ask(ctx, enginehttp.Question{Method: http.MethodPost, Path: eventsPath, MaxBytes: kvevents.MaxBatchBytes, Timeout: eventsTimeout}, &s.eventBuf)
	if err != nil {
		return false, err
	}
	if b := bytes.TrimSpace(s.eventBuf.Bytes()); len(b) > 0 {
		if err = enginehttp.Widest(b, maxMembers); err == nil {
			err = json.Unmarshal(b, list)
		}
	}
	return true, err
}

// pass gives events to the readers of their ranks.
func (s *source) pass(list []json.RawMessage, now time.Time, reader func(rank int) *kvevents.Reader, late *waiting, connected map[*kvevents.Reader]bool) {
	ready := func(rank int) *kvevents.Reader {
		r := reader(rank)
		if r == nil {
			return nil
		}
		if !connected[r] {
			// A reader that was made anew replaces the former.
			if len(connected) > engine.MaxRanks {
				clear(connected)
			}
			connected[r] = true
			r.Connected(now)
		}
		for _, m := range late.take(rank) {
			r.Deliver(m)
		}
		return r
	}
	for rank := range int(max(1, s.ranks.Load())) {
		ready(rank)
	}
	for _, raw := range list {
		seq, rank, err := head(raw)
		if err != nil {
			if r := ready(0); r != nil {
				r.Malformed(now)
			}
			continue
		}
		if n := int32(rank) + 1; n > s.ranks.Load() {
			s.ranks.Store(n)
			s.factsDue.Store(true)
		}
		s.learnPool(raw, rank)
		m := kvevents.Message{Seq: seq, Payload: raw, Received: now}
		if r := ready(rank); r != nil {
			r.Deliver(m)
		} else {
			late.put(rank, m)
		}
	}
}

// learnPool takes the number of blocks from the event that tells of the pool.
func (s *source) learnPool(raw json.RawMessage, rank int) {
	if !bytes.Contains(raw[:min(len(raw), 256)], []byte(`"created"`)) {
		return
	}
	var e struct {
		Data change `json:"data"`
	}
	if json.Unmarshal(raw, &e) != nil || len(e.Data.Pools) == 0 || rank > 0 {
		return
	}
	if n := int64(engine.Within(e.Data.Pools[0], engine.MaxPoolBlocks)); n != s.pool.Swap(n) {
		s.factsDue.Store(true)
	}
}
