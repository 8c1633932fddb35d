package profile

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"waypost/testbed/emulator/internal/zmtp"
	"waypost/testbed/emulator/wire"
)

// stream numbers, keeps and sends the batches of one process life.
type stream struct {
	topic        []byte
	withoutTopic bool
	tap          wire.Tap
	pub          *zmtp.Pub
	router       *zmtp.Router

	mu   sync.Mutex
	next uint64
	ring []kept
	keep int
}

type kept struct {
	seq     uint64
	payload []byte
}

func newStream(o Options, log *slog.Logger) *stream {
	s := &stream{topic: []byte(o.Topic), withoutTopic: o.ReplayWithoutTopic, tap: o.Tap, keep: o.BufferBatches, pub: zmtp.NewPub(100_000, log)}
	if !o.NoReplay {
		s.router = zmtp.NewRouter(s.replay, log)
	}
	return s
}

func (s *stream) serve(events, replay net.Listener) {
	s.pub.Serve(events)
	if s.router != nil {
		s.router.Serve(replay)
	}
}

func (s *stream) send(payload []byte) {
	b := wire.Batch{Payload: payload}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tap != nil {
		s.tap(&b)
	}
	for i := range b.Others {
		s.pub.Send(s.topic, binary.BigEndian.AppendUint64(nil, b.Others[i].Seq), b.Others[i].Payload)
	}
	s.next += b.Skip
	for range 1 + b.Copies {
		seq := s.next
		s.next++
		if !b.Unkept {
			s.ring = append(s.ring, kept{seq, b.Payload})
			s.ring = s.ring[max(0, len(s.ring)-s.keep):]
		}
		if !b.Unsent {
			s.pub.Send(s.topic, binary.BigEndian.AppendUint64(nil, seq), b.Payload)
		}
	}
}

// replay answers (empty, start) with what is kept and an end marker.
func (s *stream) replay(request [][]byte, send func(frames ...[]byte) error) {
	if len(request) != 2 || len(request[0]) != 0 || len(request[1]) != 8 {
		return
	}
	start := binary.BigEndian.Uint64(request[1])
	s.mu.Lock()
	list := append([]kept(nil), s.ring...)
	s.mu.Unlock()
	answer := func(topic, seq, payload []byte) error {
		if s.withoutTopic {
			return send(nil, seq, payload)
		}
		return send(nil, topic, seq, payload)
	}
	for _, k := range list {
		if k.seq >= start && answer(s.topic, binary.BigEndian.AppendUint64(nil, k.seq), k.payload) != nil {
			return
		}
	}
	_ = answer(nil, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, nil)
}

func (s *stream) dropConnections() {
	s.pub.DropConnections()
	if s.router != nil {
		s.router.DropConnections()
	}
}

func (s *stream) close() {
	s.pub.Close()
	if s.router != nil {
		s.router.Close()
	}
}

// polled is TensorRT-LLM's queue of events, each handed out once; of too many
// the oldest are lost.
type polled struct {
	mu    sync.Mutex
	next  uint64
	queue []json.RawMessage
	limit int
	more  chan struct{}
}

func newPolled(limit int) *polled { return &polled{limit: limit, more: make(chan struct{}, 1)} }

func (p *polled) put(data any, window int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// What is encoded here are our own shapes.
	raw, _ := json.Marshal(map[string]any{"event_id": p.next, "data": data, "window_size": window})
	p.next++
	p.queue = append(p.queue, raw)
	p.queue = p.queue[max(0, len(p.queue)-p.limit):]
	select {
	case p.more <- struct{}{}:
	default:
	}
}

// take empties the queue; it waits a while for the first event.
func (p *polled) take(done <-chan struct{}, wait time.Duration) []json.RawMessage {
	t := time.NewTimer(wait)
	defer t.Stop()
	for {
		p.mu.Lock()
		out := p.queue
		p.queue = nil
		p.mu.Unlock()
		if len(out) > 0 {
			return out
		}
		select {
		case <-done:
			return nil
		case <-t.C:
			return nil
		case <-p.more:
		}
	}
}

// trtData is an event as it is polled.
func trtData(e event, h TRTHash) any {
	name := func(d digest) any {
		if h == TRTSHA256 {
			return fmt.Sprintf("%x", d)
		}
		return uint64(d.first64())
	}
	var hashes []any
	for _, d := range e.hashes {
		hashes = append(hashes, name(d))
	}
	if e.op == opRemoved {
		return map[string]any{"type": "removed", "block_hashes": hashes}
	}
	var parent any
	if e.parent != nil {
		parent = name(*e.parent)
	}
	var blocks []any
	for i, h := range hashes {
		var tokens []any
		for _, t := range e.tokens[min(len(e.tokens), i*e.pageSize):min(len(e.tokens), (i+1)*e.pageSize)] {
			tokens = append(tokens, map[string]any{"type": "unique_token", "token_id": t, "token_extra_id": 0})
		}
		blocks = append(blocks, map[string]any{"type": "stored_block", "block_hash": h, "tokens": tokens, "cache_level": 0, "priority": 35, "mm_keys": []any{}})
	}
	return map[string]any{"type": "stored", "parent_hash": parent, "blocks": blocks}
}
