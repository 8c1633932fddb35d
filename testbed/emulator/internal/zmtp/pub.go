package zmtp

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"
)

const (
	maxSubscriptions = 1024
	writeBatch       = 64
	pingAllowance    = 64
	firstRedial      = 20 * time.Millisecond
	lastRedial       = 2 * time.Second
)

// Pub is a PUB socket. It never blocks its caller: a subscriber with too many
// messages waiting loses the next ones, as with libzmq.
type Pub struct {
	*server
	highWater int

	subMu   sync.Mutex
	subs    map[*subscriber]struct{}
	dropped int64
}

// NewPub makes a PUB socket that keeps at most highWater messages for each
// subscriber. log may be nil.
func NewPub(highWater int, log *slog.Logger) *Pub {
	p := &Pub{server: newServer("PUB", []string{"SUB", "XSUB"}, log), highWater: max(highWater, 1), subs: make(map[*subscriber]struct{})}
	p.session = p.serve
	return p
}

// Dial connects to a listening SUB socket, and again whenever the connection
// ends, until Close. It returns at once.
func (p *Pub) Dial(address string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.wg.Go(func() {
		var dialer net.Dialer
		wait := firstRedial
		for {
			c, err := dialer.DialContext(p.ctx, "tcp", address)
			if err == nil {
				if !p.adopt(c) {
					c.Close()
					return
				}
				wait = firstRedial
				p.run(c)
			}
			if !sleep(p.ctx, wait) {
				return
			}
			wait = min(2*wait, lastRedial)
		}
	})
}

func (p *Pub) adopt(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

// subscriber is one connected SUB socket.
type subscriber struct {
	mu     sync.Mutex
	topics map[string]int
	queue  [][]byte
	// waiting counts queued messages and those being written.
	waiting int
	limit   int
	wake    chan struct{}
}

// Send publishes one message to those who subscribed to a prefix of its first
// frame. The frames may be changed afterwards.
func (p *Pub) Send(frames ...[]byte) {
	var encoded []byte
	p.subMu.Lock()
	defer p.subMu.Unlock()
	for s := range p.subs {
		s.mu.Lock()
		if s.wants(frames[0]) {
			if encoded == nil {
				encoded = appendMessage(nil, frames...)
			}
			if s.waiting >= p.highWater {
				p.dropped++
			} else {
				s.push(encoded)
			}
		}
		s.mu.Unlock()
	}
}

// Subscribers is the number of connections that subscribed to anything.
func (p *Pub) Subscribers() int {
	p.subMu.Lock()
	defer p.subMu.Unlock()
	n := 0
	for s := range p.subs {
		s.mu.Lock()
		if len(s.topics) > 0 {
			n++
		}
		s.mu.Unlock()
	}
	return n
}

// Dropped counts messages that a slow subscriber lost.
func (p *Pub) Dropped() int64 {
	p.subMu.Lock()
	defer p.subMu.Unlock()
	return p.dropped
}

func (s *subscriber) wants(topic []byte) bool {
	for t := range s.topics {
		if strings.HasPrefix(string(topic), t) {
			return true
		}
	}
	return false
}

// push needs s.mu.
func (s *subscriber) push(encoded []byte) {
	s.queue = append(s.queue, encoded)
	s.waiting++
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (p *Pub) serve(ctx context.Context, c net.Conn, r *bufio.Reader) error {
	s := &subscriber{topics: make(map[string]int), limit: p.highWater + pingAllowance, wake: make(chan struct{}, 1)}
	p.subMu.Lock()
	p.subs[s] = struct{}{}
	p.subMu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	var writer sync.WaitGroup
	writer.Go(func() {
		s.write(ctx, c)
		c.Close()
	})
	err := s.read(r)
	p.subMu.Lock()
	delete(p.subs, s)
	p.subMu.Unlock()
	cancel()
	c.Close()
	writer.Wait()
	return err
}

// read takes subscriptions until the connection ends.
func (s *subscriber) read(r *bufio.Reader) error {
	for {
		m, err := readMessage(r)
		if err != nil {
			return err
		}
		if err := s.handle(m); err != nil {
			return err
		}
	}
}

func (s *subscriber) handle(m message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !m.command {
		// In ZMTP 3.0 a subscription is a message: 1 or 0, then the prefix.
		if b := m.frames[0]; len(m.frames) == 1 && len(b) > 0 && b[0] <= 1 {
			return s.subscribe(string(b[1:]), b[0] == 1)
		}
		return nil
	}
	name, body, err := splitCommand(m.frames[0])
	if err != nil {
		return err
	}
	switch name {
	case "SUBSCRIBE":
		return s.subscribe(string(body), true)
	case "CANCEL":
		return s.subscribe(string(body), false)
	case "PING":
		answer, err := pong(body)
		if err != nil {
			return err
		}
		if s.waiting >= s.limit {
			return fmt.Errorf("%w: PINGs from a peer that does not read", ErrProtocol)
		}
		s.push(answer)
	}
	return nil
}

// subscribe needs s.mu.
func (s *subscriber) subscribe(topic string, on bool) error {
	if !on {
		if s.topics[topic]--; s.topics[topic] <= 0 {
			delete(s.topics, topic)
		}
		return nil
	}
	if s.topics[topic] == 0 && len(s.topics) >= maxSubscriptions {
		return fmt.Errorf("%w: more than %d subscriptions", ErrProtocol, maxSubscriptions)
	}
	s.topics[topic]++
	return nil
}

// write sends what is queued until ctx or the connection ends.
func (s *subscriber) write(ctx context.Context, c net.Conn) {
	for {
		s.mu.Lock()
		n := min(len(s.queue), writeBatch)
		batch := append(net.Buffers(nil), s.queue[:n]...)
		clear(s.queue[:n])
		if s.queue = s.queue[n:]; len(s.queue) == 0 {
			s.queue = nil
		}
		s.mu.Unlock()
		if n == 0 {
			select {
			case <-ctx.Done():
				return
			case <-s.wake:
			}
			continue
		}
		if _, err := batch.WriteTo(c); err != nil {
			return
		}
		s.mu.Lock()
		s.waiting -= n
		s.mu.Unlock()
	}
}
