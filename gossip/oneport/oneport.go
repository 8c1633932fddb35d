package oneport

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Protocol names one of the listeners of a [Port].
type Protocol string

// The protocols; the values are ALPN names.
const (
	GRPC Protocol = "h2"
	HTTP Protocol = "http/1.1"
	Raft Protocol = "waypost-raft/1"
)

const (
	defaultDecideTimeout = 5 * time.Second
	defaultMaxUndecided  = 256
	// backlog is how many decided connections may wait for Accept. A full one
	// means that nobody accepts any more.
	backlog = 128
	// acceptPause is waited after a failed accept, which is most often a lack of
	// file descriptors and does not pass sooner by asking faster.
	acceptPause = 50 * time.Millisecond
)

// Options of a [Port].
type Options struct {
	// Listener is the bound TCP listener. The Port closes it.
	Listener net.Listener
	// TLS is the server configuration; its NextProtos are set by the Port. Nil
	// serves in clear, which is refused unless the listener is on loopback.
	TLS *tls.Config
	// Protocols that are served; others are refused. At least one.
	Protocols []Protocol
	// DecideTimeout is how long a connection may take to show its protocol, the
	// TLS handshake included. Zero means 5 s.
	DecideTimeout time.Duration
	// MaxUndecided bounds connections that have not shown it. Zero means 256.
	MaxUndecided int
	// Logger takes one line per stranger at debug level. Nil discards.
	Logger *slog.Logger
	// Registerer takes the counters. Nil keeps them private.
	Registerer prometheus.Registerer
	// Name is the "port" label of the counters, "cluster" for example.
	Name string
}

// Port splits the connections of one listener by protocol.
type Port struct {
	opts    Options
	tls     *tls.Config
	log     *slog.Logger
	subs    map[Protocol]*listener
	metrics *metrics

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu        sync.Mutex
	started   bool
	closed    bool
	undecided *list.List // of net.Conn, oldest first
}

// New checks the options; it starts nothing.
func New(opts Options) (*Port, error) {
	if opts.Listener == nil {
		return nil, errors.New("oneport: no listener")
	}
	if len(opts.Protocols) == 0 {
		return nil, errors.New("oneport: no protocol is served")
	}
	if opts.DecideTimeout == 0 {
		opts.DecideTimeout = defaultDecideTimeout
	}
	if opts.MaxUndecided == 0 {
		opts.MaxUndecided = defaultMaxUndecided
	}
	if opts.DecideTimeout < 0 || opts.MaxUndecided < 0 {
		return nil, fmt.Errorf("oneport: negative limit: decide timeout %v, max undecided %d", opts.DecideTimeout, opts.MaxUndecided)
	}
	addr := opts.Listener.Addr()
	if tcp, ok := addr.(*net.TCPAddr); opts.TLS == nil && ok && !tcp.IP.IsLoopback() {
		return nil, fmt.Errorf("oneport: %s is not on loopback and there is no TLS configuration: set [tls] or listen on 127.0.0.1", addr)
	}
	log := opts.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	m, err := newMetrics(opts.Registerer, opts.Name)
	if err != nil {
		return nil, fmt.Errorf("oneport: %w", err)
	}
	p := &Port{opts: opts, log: log.With("port", opts.Name), metrics: m, subs: map[Protocol]*listener{}, undecided: list.New()}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	for _, proto := range opts.Protocols {
		switch proto {
		case GRPC, HTTP, Raft:
			p.subs[proto] = &listener{addr: addr, conns: make(chan net.Conn, backlog), done: make(chan struct{})}
		default:
			return nil, fmt.Errorf("oneport: unknown protocol %q", proto)
		}
	}
	if opts.TLS != nil {
		p.tls = opts.TLS.Clone()
		p.tls.NextProtos = nil
		for _, proto := range []Protocol{HTTP, Raft, GRPC} { // the server's order decides
			if p.subs[proto] != nil {
				p.tls.NextProtos = append(p.tls.NextProtos, string(proto))
			}
		}
	}
	return p, nil
}

// Listener returns the listener of a protocol; nil if it is not served. With
// TLS its connections are *tls.Conn whose handshake is done. Closing it refuses
// further connections of the protocol and leaves the port open.
func (p *Port) Listener(proto Protocol) net.Listener {
	if l := p.subs[proto]; l != nil {
		return l
	}
	return nil
}

// Addr returns the bound address.
func (p *Port) Addr() net.Addr { return p.opts.Listener.Addr() }

// Start begins to accept.
func (p *Port) Start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.started || p.closed {
		return
	}
	p.started = true
	p.wg.Add(1)
	go p.acceptLoop()
}

// Close closes the port, its listeners and all undecided connections, and waits
// for its goroutines. Connections that were accepted stay open.
func (p *Port) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	p.cancel()
	err := p.opts.Listener.Close()
	for e := p.undecided.Front(); e != nil; e = e.Next() {
		e.Value.(net.Conn).Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
	for _, l := range p.subs {
		l.Close()
	}
	return err
}

func (p *Port) acceptLoop() {
	defer p.wg.Done()
	for {
		conn, err := p.opts.Listener.Accept()
		if err != nil {
			if p.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			p.log.Warn("accept failed", "error", err)
			select {
			case <-time.After(acceptPause):
			case <-p.ctx.Done():
				return
			}
			continue
		}
		p.admit(conn)
	}
}

// admit starts to decide about a connection, at the cost of the oldest
// undecided one if there are too many.
func (p *Port) admit(conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		conn.Close()
		return
	}
	if p.undecided.Len() >= p.opts.MaxUndecided {
		oldest := p.undecided.Front()
		p.undecided.Remove(oldest)
		oldest.Value.(net.Conn).Close()
		p.metrics.refused(reasonCrowded)
	}
	place := p.undecided.PushBack(conn)
	p.wg.Add(1)
	go p.decide(conn, place)
}

func (p *Port) decide(conn net.Conn, place *list.Element) {
	defer p.wg.Done()
	decided, proto, err := p.negotiate(conn)
	p.mu.Lock()
	p.undecided.Remove(place) // no effect if it was pushed out
	p.mu.Unlock()
	var sub *listener
	if err == nil {
		if sub = p.subs[proto]; sub == nil {
			err = &refusal{reasonUnknown, fmt.Errorf("protocol %q is not served here", proto)}
		} else if !sub.offer(decided) {
			err = &refusal{reasonOverflow, fmt.Errorf("nobody accepts %q", proto)}
		}
	}
	if err != nil {
		conn.Close()
		p.metrics.refused(reasonOf(err))
		p.log.Debug("connection refused", "remote", conn.RemoteAddr(), "error", err)
		return
	}
	p.metrics.accepted(proto)
}

// negotiate finds out the protocol of a connection within the time limit.
func (p *Port) negotiate(conn net.Conn) (net.Conn, Protocol, error) {
	if err := conn.SetDeadline(time.Now().Add(p.opts.DecideTimeout)); err != nil {
		return nil, "", err
	}
	var decided net.Conn
	var proto Protocol
	if p.tls != nil {
		c := tls.Server(conn, p.tls)
		if err := c.HandshakeContext(p.ctx); err != nil {
			return nil, "", err
		}
		decided, proto = c, Protocol(c.ConnectionState().NegotiatedProtocol)
		if proto == "" {
			proto = HTTP // simple clients know no ALPN, and gRPC and Raft insist on it
		}
	} else {
		head, found, err := sniff(conn)
		if err != nil {
			return nil, "", err
		}
		decided, proto = &peekedConn{Conn: conn, head: head}, found
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, "", err
	}
	return decided, proto, nil
}
