package zmtp

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// dialer holds the one connection of a socket that connects and renews it.
// It has no goroutine: the caller of Recv or Send dials, greets and waits.
type dialer struct {
	opts    *Options
	role    *role
	address string

	alive  context.Context // ends with close
	die    context.CancelFunc
	closed atomic.Bool

	// Of the goroutine that receives or sends.
	backoff   backoff
	notBefore time.Time // no attempt earlier
	attempts  int       // since the last good connection
	lastID    uint64
	openedAt  time.Time

	mu   sync.Mutex
	conn *conn // nil: none; written under mu by its goroutine, closed by close
}

func newDialer(o Options, r *role) (*dialer, error) {
	opts, err := o.withDefaults(r, false)
	if err != nil {
		return nil, err
	}
	addr, err := address(opts.Endpoint, false)
	if err != nil {
		return nil, err
	}
	d := &dialer{opts: opts, role: r, address: addr, backoff: newBackoff(opts)}
	d.alive, d.die = context.WithCancel(context.Background())
	return d, nil
}

// connect waits for its turn and makes one attempt. It returns a
// *ConnectFailed, ErrClosed or ctx's error.
func (d *dialer) connect(ctx context.Context) (*Connected, error) {
	if err := d.wait(ctx); err != nil {
		return nil, err
	}
	d.attempts++
	// Should ctx end the attempt, the next one still keeps its distance.
	d.notBefore = time.Now().Add(d.opts.BackoffMin)
	c, peer, err := d.attempt(ctx)
	switch {
	case err == nil:
		d.openedAt = time.Now()
		return &Connected{Conn: c.id, Endpoint: d.opts.Endpoint, Peer: c.peer, Attempts: d.attempts}, nil
	case d.closed.Load():
		return nil, ErrClosed
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	return nil, &ConnectFailed{Endpoint: d.opts.Endpoint, Peer: peer, Attempts: d.attempts, RetryIn: d.postpone(), Err: err}
}

// wait sleeps until the next attempt is due.
func (d *dialer) wait(ctx context.Context) error {
	if d.closed.Load() {
		return ErrClosed
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	pause := time.Until(d.notBefore)
	if pause <= 0 {
		return nil
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-d.alive.Done():
		return ErrClosed
	}
}

// attempt dials and greets. On success the connection is d.conn, otherwise
// it is closed.
func (d *dialer) attempt(ctx context.Context) (c *conn, peer string, err error) {
	ctx, cancel := context.WithTimeout(ctx, d.opts.HandshakeTimeout)
	defer cancel()
	defer context.AfterFunc(d.alive, cancel)()
	nc, err := d.opts.Dial(ctx, "tcp", d.address)
	if err != nil {
		return nil, "", err
	}
	d.lastID++
	c = newConn(d.lastID, nc, d.opts)
	if err := d.greet(ctx, c); err != nil {
		c.close()
		return nil, c.peer, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() {
		c.close()
		return nil, c.peer, ErrClosed
	}
	d.conn = c
	return c, c.peer, nil
}

// greet does the handshake, bounded by ctx.
func (d *dialer) greet(ctx context.Context, c *conn) error {
	stop := context.AfterFunc(ctx, func() {
		// A failure means that the connection is closed already.
		_ = c.nc.SetDeadline(longAgo)
	})
	err := c.handshake(d.role)
	if !stop() && err == nil {
		err = ctx.Err() // the connection is being interrupted and of no use
	}
	return err
}

// drop ends the connection because of err and returns what to tell the caller.
func (d *dialer) drop(err error) error {
	c := d.conn
	c.close()
	d.mu.Lock()
	d.conn = nil
	d.mu.Unlock()
	if d.closed.Load() {
		return ErrClosed
	}
	d.attempts = 0
	// A peer that greets and fails at once must not be dialed without pause.
	if c.messages > 0 || time.Since(d.openedAt) >= d.opts.BackoffMax {
		d.backoff.reset()
	}
	return &Disconnected{Conn: c.id, Endpoint: d.opts.Endpoint, Peer: c.peer, Messages: c.messages, RetryIn: d.postpone(), Err: err}
}

// postpone puts the next attempt off by the back-off.
func (d *dialer) postpone() time.Duration {
	pause := d.backoff.next()
	d.notBefore = time.Now().Add(pause)
	return pause
}

// recv returns the next message of the connection there is.
func (d *dialer) recv(ctx context.Context) ([][]byte, error) {
	if d.closed.Load() {
		return nil, ErrClosed
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	d.conn.watchContext(ctx)
	frames, err := d.conn.next(true)
	switch {
	case err == nil:
		return frames, nil
	case errors.Is(err, errCanceled):
		// The connection stays good, with what has arrived of a message.
		return nil, ctx.Err()
	}
	return nil, d.drop(err)
}

func (d *dialer) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Swap(true) {
		return nil
	}
	d.die()
	if d.conn != nil {
		d.conn.close()
	}
	return nil
}
