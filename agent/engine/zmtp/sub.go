package zmtp

import (
	"context"
	"net"
)

// Sub receives what publishers send on the topics it subscribes to. One
// goroutine calls Recv; any may call Close.
type Sub struct {
	dialer   *dialer   // of DialSub
	listener *listener // of ListenSub
	last     uint64
}

// DialSub returns a SUB that connects to a publisher. It does nothing yet:
// the first Recv connects.
func DialSub(o Options) (*Sub, error) {
	d, err := newDialer(o, subRole)
	if err != nil {
		return nil, err
	}
	return &Sub{dialer: d}, nil
}

// ListenSub returns a SUB that publishers connect to. The port is bound when
// it returns; the first Recv begins to accept.
func ListenSub(o Options) (*Sub, error) {
	l, err := newListener(o)
	if err != nil {
		return nil, err
	}
	return &Sub{listener: l}, nil
}

// Recv returns the next message as its frames, which are valid until the next
// Recv. Errors are notices (IsNotice: the socket goes on), ctx's error or
// ErrClosed. A Recv that ctx ends loses nothing that has arrived; while it
// connects it gives up the attempt.
func (s *Sub) Recv(ctx context.Context) ([][]byte, error) {
	if s.listener != nil {
		frames, id, err := s.listener.recv(ctx)
		s.last = id
		return frames, err
	}
	if s.dialer.conn == nil {
		connected, err := s.dialer.connect(ctx)
		if err != nil {
			return nil, err
		}
		s.last = connected.Conn
		return nil, connected
	}
	return s.dialer.recv(ctx)
}

// Conn is the number of the connection that the last message came from, as in
// the notices. Publishers that share a listening socket are told apart by it.
func (s *Sub) Conn() uint64 { return s.last }

// Addr is the address a listening socket is bound to; nil for one that dials.
func (s *Sub) Addr() net.Addr {
	if s.listener == nil {
		return nil
	}
	return s.listener.ln.Addr()
}

// Close ends the socket at once and with it a Recv in progress, which returns
// ErrClosed. Nothing of the socket runs on afterwards.
func (s *Sub) Close() error {
	if s.listener != nil {
		return s.listener.close()
	}
	return s.dialer.close()
}
