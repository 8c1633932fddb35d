package oneport

import (
	"net"
	"sync"
)

// listener hands out the connections of one protocol.
type listener struct {
	addr  net.Addr
	conns chan net.Conn

	mu     sync.Mutex // orders offers before the drain of Close
	closed bool
	done   chan struct{}
}

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: l.addr, Err: net.ErrClosed}
	}
}

// Close implements [net.Listener].
func (l *listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	close(l.done)
	for {
		select {
		case c := <-l.conns:
			c.Close()
		default:
			return nil
		}
	}
}

// Addr implements [net.Listener].
func (l *listener) Addr() net.Addr { return l.addr }

// offer hands a connection over unless the listener is closed or full.
func (l *listener) offer(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	select {
	case l.conns <- c:
		return true
	default:
		return false
	}
}
