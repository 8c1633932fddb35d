package emulator

import (
	"encoding/binary"
	"log/slog"
	"sync"

	"waypost/testbed/emulator/core"
	"waypost/testbed/emulator/internal/kvevent"
	"waypost/testbed/emulator/internal/zmtp"
	"waypost/testbed/emulator/wire"
)

// DropMode says how an event batch gets lost.
type DropMode uint8

// The ways to lose a batch. Both use up its number.
const (
	// DropLive loses it on the way to the subscribers; replay still has it.
	DropLive DropMode = iota
	// DropForever loses it before it is numbered in the replay buffer too.
	DropForever
)

// numbered is a batch in the replay buffer.
type numbered struct {
	seq     uint64
	payload []byte
}

// publisher numbers, keeps and sends the event batches of one rank's life.
type publisher struct {
	topic        []byte
	rank         int
	withoutTopic bool
	tap          wire.Tap // nil: none
	pub          *zmtp.Pub
	router       *zmtp.Router // nil without replay

	mu      sync.Mutex
	encoder kvevent.Encoder
	next    uint64
	ring    []numbered // oldest first, from ringAt
	ringAt  int
	keep    int
	drop    [2]int // by DropMode
}

func newPublisher(o Options, rank int, log *slog.Logger) *publisher {
	p := &publisher{
		topic: []byte(o.Topic), rank: rank, tap: o.Tap, withoutTopic: o.ReplayWithoutTopic, keep: o.BufferBatches,
		encoder: kvevent.Encoder{Form: o.eventForm(), Bytes: o.DigestHashes, BlockTokens: o.BlockTokens},
		pub:     zmtp.NewPub(o.HighWater, log),
	}
	if !o.NoReplay {
		p.router = zmtp.NewRouter(p.replay, log)
	}
	return p
}

// publish sends one batch.
func (p *publisher) publish(events []core.Event, seconds float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := wire.Batch{Rank: p.rank, Payload: p.encoder.Append(nil, events, seconds, p.rank)}
	if p.tap != nil {
		p.tap(&b)
	}
	for i := range b.Others {
		p.pub.Send(p.topic, binary.BigEndian.AppendUint64(nil, b.Others[i].Seq), b.Others[i].Payload)
	}
	p.next += b.Skip
	for range 1 + b.Copies {
		p.number(&b)
	}
}

// number gives a batch its number, keeps and sends it.
func (p *publisher) number(b *wire.Batch) {
	seq := p.next
	p.next++
	if p.drop[DropForever] > 0 {
		p.drop[DropForever]--
		return
	}
	if !b.Unkept {
		p.remember(numbered{seq, b.Payload})
	}
	if p.drop[DropLive] > 0 {
		p.drop[DropLive]--
		return
	}
	if !b.Unsent {
		p.pub.Send(p.topic, binary.BigEndian.AppendUint64(nil, seq), b.Payload)
	}
}

func (p *publisher) remember(b numbered) {
	if len(p.ring) < p.keep {
		p.ring = append(p.ring, b)
		return
	}
	p.ring[p.ringAt] = b
	p.ringAt = (p.ringAt + 1) % p.keep
}

// since copies the kept batches from a number on.
func (p *publisher) since(start uint64) []numbered {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []numbered
	for i := range p.ring {
		if b := p.ring[(p.ringAt+i)%len(p.ring)]; b.seq >= start {
			out = append(out, b)
		}
	}
	return out
}

// replay answers (empty, start) with the kept batches and an end marker.
// Anything else is never answered, as by the real publisher.
func (p *publisher) replay(request [][]byte, send func(frames ...[]byte) error) {
	if len(request) != 2 || len(request[0]) != 0 || len(request[1]) > 8 {
		return
	}
	start := uint64(0)
	for _, b := range request[1] {
		start = start<<8 | uint64(b)
	}
	for _, b := range p.since(start) {
		if p.answer(send, p.topic, binary.BigEndian.AppendUint64(nil, b.seq), b.payload) != nil {
			return
		}
	}
	_ = p.answer(send, nil, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, nil)
}

func (p *publisher) answer(send func(frames ...[]byte) error, topic, seq, payload []byte) error {
	if p.withoutTopic {
		return send(nil, seq, payload)
	}
	return send(nil, topic, seq, payload)
}

// lose loses the next n batches, in addition to those already to be lost.
func (p *publisher) lose(n int, mode DropMode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop[mode] += n
}

// claim makes the events state another block size; 0: the true one.
func (p *publisher) claim(blockTokens int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.encoder.BlockTokens = blockTokens
}

// hideSalts leaves salts out of the events.
func (p *publisher) hideSalts(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.encoder.HideSalts = on
}

func (p *publisher) dropConnections() {
	p.pub.DropConnections()
	if p.router != nil {
		p.router.DropConnections()
	}
}

func (p *publisher) close() {
	p.pub.Close()
	if p.router != nil {
		p.router.Close()
	}
}
