package emulator

import (
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"
)

// ports is where an engine listens, the same in every life.
type ports struct {
	http   string
	events []string // per rank; nil: none
	replay []string
	sides  []string
}

const (
	portTries     = 64
	reopenFor     = 5 * time.Second
	reopenEvery   = 20 * time.Millisecond
	ephemeralPort = 0
)

// listenRanks opens n consecutive ports. With port 0 it tries until it finds a
// free range.
func listenRanks(address string, n int) ([]net.Listener, error) {
	host, port, err := splitAddress(address)
	if err != nil {
		return nil, err
	}
	tries := 1
	if port == ephemeralPort {
		tries = portTries
	}
	for ; tries > 0; tries-- {
		var lns []net.Listener
		if lns, err = listenRange(host, port, n); err == nil {
			return lns, nil
		}
	}
	return nil, err
}

func listenRange(host string, port, n int) ([]net.Listener, error) {
	lns := make([]net.Listener, 0, n)
	for i := range n {
		p := port
		if i > 0 {
			p = lns[0].Addr().(*net.TCPAddr).Port + i
		}
		if p > 65535 {
			closeAll(lns)
			return nil, fmt.Errorf("port %d for rank %d: there is none above 65535", p, i)
		}
		ln, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(p)))
		if err != nil {
			closeAll(lns)
			return nil, err
		}
		lns = append(lns, ln)
	}
	return lns, nil
}

func closeAll(lns []net.Listener) {
	for _, ln := range lns {
		ln.Close()
	}
}

// reopen listens where a former life did, which may take a moment to let go.
func reopen(address string) (net.Listener, error) {
	for end := time.Now().Add(reopenFor); ; time.Sleep(reopenEvery) {
		ln, err := net.Listen("tcp", address)
		if err == nil || time.Now().After(end) {
			return ln, err
		}
	}
}

func addresses(lns []net.Listener) []string {
	out := make([]string, len(lns))
	for i, ln := range lns {
		out[i] = ln.Addr().String()
	}
	return out
}

// trackedListener knows its connections, so that they can be cut.
type trackedListener struct {
	net.Listener
	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

func track(ln net.Listener) *trackedListener {
	return &trackedListener{Listener: ln, conns: make(map[net.Conn]struct{})}
}

// Accept implements net.Listener.
func (t *trackedListener) Accept() (net.Conn, error) {
	c, err := t.Listener.Accept()
	if err != nil {
		return nil, err
	}
	tc := &trackedConn{Conn: c, owner: t}
	t.mu.Lock()
	t.conns[tc] = struct{}{}
	t.mu.Unlock()
	return tc, nil
}

func (t *trackedListener) dropConnections() {
	t.mu.Lock()
	conns := make([]net.Conn, 0, len(t.conns))
	for c := range t.conns {
		conns = append(conns, c)
	}
	t.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
}

type trackedConn struct {
	net.Conn
	owner *trackedListener
}

// Close implements net.Conn.
func (c *trackedConn) Close() error {
	c.owner.mu.Lock()
	delete(c.owner.conns, c)
	c.owner.mu.Unlock()
	return c.Conn.Close()
}
