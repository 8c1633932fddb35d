package zmtp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"
)

const (
	handshakeTimeout = 10 * time.Second
	writeTimeout     = 30 * time.Second
	maxConnections   = 256
)

// server accepts connections, shakes hands, and runs one session per peer.
type server struct {
	socketType string
	peers      []string // the socket types allowed on the other side
	log        *slog.Logger
	session    func(ctx context.Context, c net.Conn, r *bufio.Reader) error

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	listeners []net.Listener
	conns     map[net.Conn]struct{}
}

func newServer(socketType string, peers []string, log *slog.Logger) *server {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &server{socketType: socketType, peers: peers, log: log, ctx: ctx, cancel: cancel, conns: make(map[net.Conn]struct{})}
}

// Serve accepts connections until Close; it returns at once and owns ln.
func (s *server) Serve(ln net.Listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		ln.Close()
		return
	}
	s.listeners = append(s.listeners, ln)
	s.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				s.log.Warn("accept failed", "socket", s.socketType, "error", err)
				if !sleep(s.ctx, 10*time.Millisecond) {
					return
				}
				continue
			}
			s.start(c)
		}
	})
}

func (s *server) start(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= maxConnections {
		c.Close()
		return
	}
	s.conns[c] = struct{}{}
	s.wg.Go(func() { s.run(c) })
}

// run serves one connection until it ends.
func (s *server) run(c net.Conn) {
	defer func() {
		c.Close()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}()
	r := bufio.NewReaderSize(c, 4<<10)
	err := s.handshake(c, r)
	if err == nil {
		err = s.session(s.ctx, c, r)
	}
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		s.log.Debug("connection ended", "socket", s.socketType, "peer", c.RemoteAddr(), "error", err)
	}
}

func (s *server) handshake(c net.Conn, r io.Reader) error {
	if err := c.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return err
	}
	if _, err := c.Write(greeting()); err != nil {
		return err
	}
	if err := readGreeting(r); err != nil {
		return err
	}
	ready := appendProperty(nil, "Socket-Type", s.socketType)
	if s.socketType == "ROUTER" {
		ready = appendProperty(ready, "Identity", "")
	}
	if _, err := c.Write(appendCommand(nil, "READY", ready)); err != nil {
		return err
	}
	m, err := readMessage(r)
	if err != nil {
		return err
	}
	if err := s.checkReady(m); err != nil {
		reason := err.Error()
		_, _ = c.Write(appendCommand(nil, "ERROR", append([]byte{byte(len(reason))}, reason...)))
		return err
	}
	return c.SetDeadline(time.Time{})
}

func (s *server) checkReady(m message) error {
	if !m.command {
		return fmt.Errorf("%w: a message before READY", ErrProtocol)
	}
	name, body, err := splitCommand(m.frames[0])
	if err != nil {
		return err
	}
	if name != "READY" {
		return fmt.Errorf("%w: command before READY", ErrProtocol)
	}
	p, err := properties(body)
	if err != nil {
		return err
	}
	if !slices.Contains(s.peers, p["socket-type"]) {
		return fmt.Errorf("%w: the peer's socket does not fit %s", ErrProtocol, s.socketType)
	}
	return nil
}

// DropConnections closes every connection; peers may come back at once.
func (s *server) DropConnections() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.Close()
	}
}

// Close ends everything and waits for it.
func (s *server) Close() {
	s.mu.Lock()
	s.closed = true
	s.cancel()
	for _, ln := range s.listeners {
		ln.Close()
	}
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// sleep reports false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
