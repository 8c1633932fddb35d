package enginetest

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// Publisher is one publisher: a PUB socket and a ROUTER for replay.
type Publisher struct {
	t          testing.TB
	mu         sync.Mutex
	pub, route net.Listener
	conns      map[net.Conn]bool // of PUB: subscribed?
	all        map[net.Conn]bool
	next       uint64
	ring       [][]byte // payloads
	first      uint64   // number of ring[0]
	size       int
	mute       bool // replay does not answer
	rank       int
	asked      []uint64
	wake       *sync.Cond
	wg         sync.WaitGroup
}

// NewPublisher opens one; the caller closes it.
func NewPublisher(t testing.TB) *Publisher {
	r := &Publisher{t: t, conns: map[net.Conn]bool{}, all: map[net.Conn]bool{}, size: 10000}
	r.wake = sync.NewCond(&r.mu)
	var err error
	if r.pub, err = net.Listen("tcp", AnyPort()); err != nil {
		t.Fatal(err)
	}
	if r.route, err = net.Listen("tcp", AnyPort()); err != nil {
		t.Fatal(err)
	}
	r.accept(r.pub, "PUB", r.Subscriber)
	r.accept(r.route, "ROUTER", r.replayer)
	return r
}

// Port is that of the events, ReplayPort that of the replay.
func (r *Publisher) Port() int { return r.pub.Addr().(*net.TCPAddr).Port }

// ReplayPort is the port of the replay.
func (r *Publisher) ReplayPort() int { return r.route.Addr().(*net.TCPAddr).Port }

func (r *Publisher) accept(ln net.Listener, kind string, serve func(net.Conn, *bufio.Reader)) {
	r.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.all[c] = true
			r.mu.Unlock()
			r.wg.Go(func() {
				defer func() {
					c.Close()
					r.mu.Lock()
					delete(r.all, c)
					delete(r.conns, c)
					r.mu.Unlock()
				}()
				in := bufio.NewReader(c)
				if Greet(c, in, kind) == nil {
					serve(c, in)
				}
			})
		}
	})
}

// Close ends both sockets.
func (r *Publisher) Close() {
	r.pub.Close()
	r.route.Close()
	r.Cut()
	r.wg.Wait()
}

// Cut drops every connection.
func (r *Publisher) Cut() {
	r.mu.Lock()
	for c := range r.all {
		c.Close()
	}
	r.mu.Unlock()
}

// Restart is another process on the same ports: nothing is remembered, numbers
// begin again and connections are cut.
func (r *Publisher) Restart() {
	r.mu.Lock()
	r.next, r.first, r.ring = 0, 0, nil
	r.mu.Unlock()
	r.Cut()
}

// Subscriber serves a connection of a subscriber.
func (r *Publisher) Subscriber(c net.Conn, in *bufio.Reader) {
	for {
		frames, err := zmtpRead(in)
		if err != nil {
			return
		}
		if len(frames) == 1 && len(frames[0]) > 0 && frames[0][0] == 1 {
			r.mu.Lock()
			r.conns[c] = true
			r.wake.Broadcast()
			r.mu.Unlock()
		}
	}
}

// AwaitSubscriber waits until somebody is subscribed.
func (r *Publisher) AwaitSubscriber() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.conns) == 0 {
		r.wake.Wait()
	}
}

// AwaitAsked waits until replays were asked for so many times.
func (r *Publisher) AwaitAsked(times int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.asked) < times {
		r.wake.Wait()
	}
}

func (r *Publisher) replayer(c net.Conn, in *bufio.Reader) {
	for {
		frames, err := zmtpRead(in)
		if err != nil {
			return
		}
		if len(frames) != 2 || len(frames[0]) != 0 || len(frames[1]) != 8 {
			continue // never answered
		}
		from := binary.BigEndian.Uint64(frames[1])
		r.mu.Lock()
		r.asked = append(r.asked, from)
		r.wake.Broadcast()
		var out bytes.Buffer
		for i, payload := range r.ring {
			if seq := r.first + uint64(i); seq >= from {
				zmtpWrite(&out, nil, []byte("kv@test"), binary.BigEndian.AppendUint64(nil, seq), payload)
			}
		}
		mute := r.mute
		r.mu.Unlock()
		if mute {
			continue
		}
		zmtpWrite(&out, nil, nil, bytes.Repeat([]byte{0xff}, 8), nil)
		if _, err := c.Write(out.Bytes()); err != nil {
			return
		}
	}
}

// Publish publishes a batch of events; lost ones get a number and a place in
// the ring but reach nobody.
func (r *Publisher) Publish(lost bool, events ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	payload, err := msgp.AppendIntf(nil, []any{1000.5 + float64(r.next), events, r.rank})
	if err != nil {
		r.t.Fatal(err)
	}
	r.publish(lost, payload)
}

// PublishRaw publishes a payload as it is.
func (r *Publisher) PublishRaw(lost bool, payload []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.publish(lost, payload)
}

// Send sends a message as it is, without a number of its own.
func (r *Publisher) Send(frames ...[]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out bytes.Buffer
	zmtpWrite(&out, frames...)
	for c := range r.conns {
		c.Write(out.Bytes())
	}
}

// SetRank sets the number that the publisher gives itself, SetRing how many
// batches it keeps for replay, SetMute whether replay never answers.
func (r *Publisher) SetRank(n int) { r.set(func() { r.rank = n }) }

// SetRing sets how many batches are kept for replay.
func (r *Publisher) SetRing(n int) { r.set(func() { r.size = n }) }

// SetMute sets whether a replay is never answered.
func (r *Publisher) SetMute(on bool) { r.set(func() { r.mute = on }) }

// SetNext sets the number of the next batch.
func (r *Publisher) SetNext(n uint64) { r.set(func() { r.next, r.first, r.ring = n, n, nil }) }

func (r *Publisher) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

// Dial connects to a subscriber that listens, as engines do whose endpoint is
// bound by others; it waits until somebody listens there.
func (r *Publisher) Dial(address string) net.Conn {
	r.t.Helper()
	for {
		c, err := net.Dial("tcp", address)
		if err != nil {
			if r.t.Context().Err() != nil {
				r.t.Fatal(err)
			}
			time.Sleep(10 * time.Millisecond)
			continue
		}
		r.wg.Go(func() {
			defer c.Close()
			in := bufio.NewReader(c)
			if Greet(c, in, "PUB") == nil {
				r.Subscriber(c, in)
			}
		})
		return c
	}
}

func (r *Publisher) publish(lost bool, payload []byte) {
	var out bytes.Buffer
	zmtpWrite(&out, []byte("kv@test"), binary.BigEndian.AppendUint64(nil, r.next), payload)
	r.next++
	r.ring = append(r.ring, payload)
	if len(r.ring) > r.size {
		r.ring = r.ring[1:]
		r.first++
	}
	if lost {
		return
	}
	for c := range r.conns {
		c.Write(out.Bytes())
	}
}

// Stored is a store of blocks of two tokens; block h holds tokens 10h, 10h+1.
func Stored(parent int, hashes ...int) any {
	var hs, tokens []any
	for _, h := range hashes {
		hs, tokens = append(hs, h), append(tokens, 10*h, 10*h+1)
	}
	e := map[string]any{
		"type": "BlockStored", "block_hashes": hs, "parent_block_hash": nil, "token_ids": tokens, "block_size": 2,
		"medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": "full_attention",
	}
	if parent != 0 {
		e["parent_block_hash"] = parent
	}
	return e
}

// Removed is a removal of a block.
func Removed(hash int) any {
	return map[string]any{"type": "BlockRemoved", "block_hashes": []any{hash}, "medium": "GPU", "group_idx": 0}
}

// Cleared is a clear.
func Cleared() any { return map[string]any{"type": "AllBlocksCleared"} }

// Greet is the server's half of the handshake.
func Greet(c net.Conn, in *bufio.Reader, kind string) error {
	greeting := make([]byte, 64)
	copy(greeting, "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL")
	if _, err := c.Write(greeting); err != nil {
		return err
	}
	if _, err := io.ReadFull(in, make([]byte, 64)); err != nil {
		return err
	}
	body := append([]byte("\x05READY\x0bSocket-Type"), 0, 0, 0, byte(len(kind)))
	body = append(body, kind...)
	if _, err := c.Write(append([]byte{4, byte(len(body))}, body...)); err != nil {
		return err
	}
	_, _, err := zmtpFrame(in) // the client's READY
	return err
}

func zmtpFrame(in *bufio.Reader) (flags byte, body []byte, err error) {
	if flags, err = in.ReadByte(); err != nil {
		return 0, nil, err
	}
	size := make([]byte, 1)
	if flags&2 != 0 {
		size = make([]byte, 8)
	}
	if _, err := io.ReadFull(in, size); err != nil {
		return 0, nil, err
	}
	n := uint64(0)
	for _, b := range size {
		n = n<<8 | uint64(b)
	}
	body = make([]byte, n)
	_, err = io.ReadFull(in, body)
	return flags, body, err
}

func zmtpRead(in *bufio.Reader) (frames [][]byte, err error) {
	for {
		flags, body, err := zmtpFrame(in)
		if err != nil {
			return nil, err
		}
		if flags&4 != 0 {
			continue
		}
		frames = append(frames, body)
		if flags&1 == 0 {
			return frames, nil
		}
	}
}

func zmtpWrite(out *bytes.Buffer, frames ...[]byte) {
	for i, f := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = 1
		}
		if len(f) > 255 {
			out.WriteByte(flags | 2)
			out.Write(binary.BigEndian.AppendUint64(nil, uint64(len(f))))
		} else {
			out.WriteByte(flags)
			out.WriteByte(byte(len(f)))
		}
		out.Write(f)
	}
}
