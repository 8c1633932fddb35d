package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// maxGreeting limits the peers in the handshake, so that strangers cannot use
// up memory and publishers have places of their own.
const maxGreeting = 64

// listener accepts publishers. Each has a goroutine that waits for a whole
// message and lends the connection to Recv, which takes the messages in the
// read buffer and gives it back: a publisher that stalls holds up no other,
// and one that floods no longer than a buffer lasts.
type listener struct {
	opts *Options
	ln   net.Listener

	lent    chan loan
	notices chan error // of the accept loop
	done    chan struct{}
	wg      sync.WaitGroup

	// Of the goroutine that receives.
	current *conn
	back    chan<- error

	mu       sync.Mutex
	started  bool
	closed   bool
	conns    map[*conn]struct{}
	greeting int
	ready    int
	lastID   uint64
}

// loan is a connection with a whole message, or a notice.
type loan struct {
	conn   *conn
	frames [][]byte
	back   chan<- error // receives the conn's fate, nil when it is good
	notice error
	id     uint64
}

func newListener(o Options) (*listener, error) {
	opts, err := o.withDefaults(subRole, true)
	if err != nil {
		return nil, err
	}
	addr, err := address(opts.Endpoint, true)
	if err != nil {
		return nil, err
	}
	lc := net.ListenConfig{KeepAlive: opts.KeepAlive, KeepAliveConfig: opts.keepAlive()}
	ln, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("zmtp: listening on %s: %w", opts.Endpoint, err)
	}
	return &listener{
		opts:    opts,
		ln:      ln,
		lent:    make(chan loan),
		notices: make(chan error, 1),
		done:    make(chan struct{}),
		conns:   make(map[*conn]struct{}),
	}, nil
}

// start begins to accept, once.
func (l *listener) start() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.started || l.closed {
		return
	}
	l.started = true
	l.wg.Go(l.accept)
}

// accept takes connections until close.
func (l *listener) accept() {
	pause := newBackoff(l.opts)
	suppressed := 0
	tell := func(peer string, err error) {
		n := &ConnectFailed{Endpoint: l.opts.Endpoint, Peer: peer, Attempts: 1, Suppressed: suppressed, Err: err}
		select {
		case l.notices <- n:
			suppressed = 0
		default:
			suppressed++
		}
	}
	for {
		nc, err := l.ln.Accept()
		if err != nil {
			// Out of file descriptors, for example: what fails now may work
			// later.
			if !l.sleep(pause.next()) {
				return
			}
			tell("", err)
			continue
		}
		pause.reset()
		c, err := l.admit(nc)
		if err != nil {
			if !errors.Is(err, ErrClosed) {
				tell(nc.RemoteAddr().String(), err)
			}
			_ = nc.Close() // nothing was exchanged yet
			continue
		}
		l.wg.Go(func() { l.serve(c) })
	}
}

// sleep pauses; false means that the socket was closed.
func (l *listener) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.done:
		return false
	}
}

// admit gives a new connection a place in the handshake.
func (l *listener) admit(nc net.Conn) (*conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, ErrClosed
	}
	if l.greeting >= maxGreeting {
		return nil, fmt.Errorf("%w: %d peers have not finished their handshake", ErrTooMany, l.greeting)
	}
	l.greeting++
	l.lastID++
	c := newConn(l.lastID, nc, l.opts)
	l.conns[c] = struct{}{}
	return c, nil
}

// serve runs one connection from its handshake to its end.
func (l *listener) serve(c *conn) {
	err := l.greet(c)
	if err != nil {
		l.remove(c)
		l.lend(loan{id: c.id, notice: &ConnectFailed{Endpoint: l.opts.Endpoint, Peer: c.peer, Attempts: 1, Err: err}})
		l.leave(&l.greeting)
		return
	}
	defer l.leave(&l.ready)
	defer l.remove(c)
	if !l.lend(loan{id: c.id, notice: &Connected{Conn: c.id, Endpoint: l.opts.Endpoint, Peer: c.peer, Attempts: 1}}) {
		return
	}
	back := make(chan error)
	for err == nil {
		var frames [][]byte
		if frames, err = c.next(true); err != nil {
			break
		}
		if !l.lend(loan{conn: c, frames: frames, back: back, id: c.id}) {
			return
		}
		select {
		case err = <-back:
		case <-l.done:
			return
		}
	}
	l.remove(c)
	l.lend(loan{id: c.id, notice: &Disconnected{Conn: c.id, Endpoint: l.opts.Endpoint, Peer: c.peer, Messages: c.messages, Err: err}})
}

// greet does the handshake and moves the connection to the ready ones.
func (l *listener) greet(c *conn) error {
	if err := c.nc.SetDeadline(time.Now().Add(l.opts.HandshakeTimeout)); err != nil {
		return err
	}
	if err := c.handshake(subRole); err != nil {
		return err
	}
	if err := c.nc.SetDeadline(time.Time{}); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ready >= l.opts.MaxPublishers {
		return fmt.Errorf("%w: %d publishers are connected (MaxPublishers)", ErrTooMany, l.ready)
	}
	l.greeting--
	l.ready++
	return nil
}

// lend hands something to Recv; false means that the socket was closed.
func (l *listener) lend(n loan) bool {
	select {
	case l.lent <- n:
		return true
	case <-l.done:
		return false
	}
}

// remove closes the connection; it may be called again.
func (l *listener) remove(c *conn) {
	c.close()
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c)
}

// leave gives a place back.
func (l *listener) leave(places *int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	*places--
}

// recv returns the next message or notice of any publisher, with the number
// of its connection.
func (l *listener) recv(ctx context.Context) ([][]byte, uint64, error) {
	select {
	case <-l.done:
		return nil, 0, ErrClosed
	default:
	}
	if err := ctx.Err(); err != nil {
		return nil, 0, err
	}
	l.start()
	if c := l.current; c != nil {
		frames, err := c.next(false)
		if err == nil {
			return frames, c.id, nil
		}
		l.giveBack(err)
	}
	select {
	case n := <-l.lent:
		if n.notice != nil {
			return nil, n.id, n.notice
		}
		l.current, l.back = n.conn, n.back
		return n.frames, n.id, nil
	case err := <-l.notices:
		return nil, 0, err
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	case <-l.done:
		return nil, 0, ErrClosed
	}
}

// giveBack returns the current connection to its goroutine.
func (l *listener) giveBack(err error) {
	if errors.Is(err, errNeedMore) {
		err = nil
	}
	select {
	case l.back <- err:
	case <-l.done:
	}
	l.current, l.back = nil, nil
}

// close ends the socket and waits for its goroutines, which it interrupts.
func (l *listener) close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		l.wg.Wait()
		return nil
	}
	l.closed = true
	close(l.done)
	err := l.ln.Close()
	for c := range l.conns {
		c.close()
	}
	l.mu.Unlock()
	l.wg.Wait()
	return err
}
