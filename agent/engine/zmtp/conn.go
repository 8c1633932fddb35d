package zmtp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// lastLook is how long a read may wait for bytes that may have arrived while
// nobody read, before silence is held against the peer.
const lastLook = time.Millisecond

// longAgo is a deadline that interrupts at once.
var longAgo = time.Unix(1, 0)

// conn is one connection. One goroutine at a time uses it; cancel and close
// may come from others.
type conn struct {
	id       uint64
	nc       net.Conn
	peer     string
	opts     *Options
	dec      decoder
	out      []byte // the write in progress, reused
	messages uint64
	pongDue  bool // pong is a PONG not yet written
	pong     []byte

	lastRead time.Time // with heartbeats only
	pingedAt time.Time // zero: no PING is unanswered

	watched <-chan struct{} // Done of the context that cancels reads

	mu       sync.Mutex
	watch    uint64 // numbers the watched contexts, so that a late cancel is known
	unwatch  func() bool
	canceled bool
	writing  bool
}

func newConn(id uint64, nc net.Conn, o *Options) *conn {
	if o.Wrap != nil {
		nc = o.Wrap(nc)
	}
	return &conn{id: id, nc: nc, peer: nc.RemoteAddr().String(), opts: o, dec: newDecoder(o)}
}

// handshake greets, checks the peer and, for a SUB, subscribes. Its time is
// bounded by a deadline on the connection that the caller has set.
func (c *conn) handshake(r *role) error {
	stage := "sent no greeting"
	fail := func(err error) error {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("%w: after %v the peer %s; is this a ZeroMQ port?", ErrHandshakeTimeout, c.opts.HandshakeTimeout, stage)
		}
		return err
	}
	if _, err := c.nc.Write(appendGreeting(c.out[:0])); err != nil {
		return fail(err)
	}
	for {
		done, err := c.dec.greeting()
		if err != nil {
			return err
		}
		if done {
			break
		}
		if err := c.readHandshake("before its greeting ended"); err != nil {
			return fail(err)
		}
		stage = "sent half a greeting"
	}
	stage = "greeted and sent no READY"
	if _, err := c.nc.Write(appendReady(c.out[:0], r, c.opts.Identity)); err != nil {
		return fail(err)
	}
	if err := c.awaitReady(r); err != nil {
		return fail(err)
	}
	stage = "takes no subscriptions"
	for _, topic := range c.opts.Topics {
		c.out = appendSubscribe(c.out, topic)
	}
	if len(c.out) > 0 {
		if _, err := c.nc.Write(c.out); err != nil {
			return fail(err)
		}
		c.out = nil // may be large and is not needed again
	}
	c.dec.handshaking = false
	c.lastRead = time.Now()
	return nil
}

// readHandshake reads more of the handshake.
func (c *conn) readHandshake(where string) error {
	n, err := c.nc.Read(c.dec.space())
	if n > 0 {
		c.dec.filled(n)
		return nil
	}
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: peer closed the connection %s", io.ErrUnexpectedEOF, where)
	}
	return err
}

// awaitReady takes the peer's READY and checks its socket type.
func (c *conn) awaitReady(r *role) error {
	for {
		ev, err := c.dec.next()
		if err != nil {
			return err
		}
		if ev == needMore {
			if err := c.readHandshake("before READY; it may not want a " + r.name); err != nil {
				return err
			}
			continue
		}
		name, data, err := splitCommand(c.dec.cmd)
		if err != nil {
			return err
		}
		switch string(name) {
		case "READY":
			socketType, err := readySocketType(data)
			if err != nil {
				return err
			}
			return r.checkPeer(socketType)
		case "ERROR":
			return refusal(data)
		}
		return fmt.Errorf("%w: command %.32q before READY", ErrProtocol, name)
	}
}

// next returns the next message; with wait false it reads nothing and returns
// errNeedMore when no whole message is buffered.
func (c *conn) next(wait bool) ([][]byte, error) {
	for {
		if c.pongDue {
			if err := c.write(c.pong); err != nil {
				return nil, err
			}
			c.pongDue = false
		}
		ev, err := c.dec.next()
		if err != nil {
			return nil, err
		}
		switch ev {
		case gotMessage:
			c.messages++
			return c.dec.parts, nil
		case gotCommand:
			if err := c.command(c.dec.cmd); err != nil {
				return nil, err
			}
		default:
			if !wait {
				return nil, errNeedMore
			}
			if err := c.fill(); err != nil {
				return nil, err
			}
		}
	}
}

// command acts on a command after the handshake. Unknown ones are skipped, as
// libzmq does, so that a newer peer can be talked to.
func (c *conn) command(cmd []byte) error {
	name, data, err := splitCommand(cmd)
	if err != nil {
		return err
	}
	switch {
	case bytes.Equal(name, pingName):
		if len(data) < pingTTLBytes {
			return fmt.Errorf("%w: PING of %d bytes", ErrProtocol, len(data))
		}
		c.pong = appendCommand(c.pong[:0], "PONG", data[pingTTLBytes:])
		c.pongDue = true
	case bytes.Equal(name, errorName):
		return refusal(data)
	}
	return nil
}

var (
	pingName  = []byte("PING")
	errorName = []byte("ERROR")
)

// fill reads once, answering silence with a heartbeat.
func (c *conn) fill() error {
	for {
		if err := c.armHeartbeat(); err != nil {
			return err
		}
		n, err := c.nc.Read(c.dec.space())
		if n > 0 {
			c.dec.filled(n)
			if c.opts.HeartbeatInterval > 0 {
				c.lastRead, c.pingedAt = time.Now(), time.Time{}
			}
			return nil
		}
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded):
			if err := c.timedOut(err); err != nil {
				return err
			}
		case errors.Is(err, io.EOF) && c.dec.inMessage():
			return fmt.Errorf("%w: peer closed the connection inside a message", io.ErrUnexpectedEOF)
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%w: peer closed the connection", io.EOF)
		default:
			return err
		}
	}
}

// armHeartbeat sets the read deadline to when silence is due to be acted on.
func (c *conn) armHeartbeat() error {
	if c.opts.HeartbeatInterval == 0 {
		return nil
	}
	due := c.silenceDue()
	if soon := time.Now().Add(lastLook); due.Before(soon) {
		due = soon
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.canceled {
		return errCanceled
	}
	return c.nc.SetReadDeadline(due)
}

// silenceDue is when to send a PING or, after one, to give up.
func (c *conn) silenceDue() time.Time {
	if c.pingedAt.IsZero() {
		return c.lastRead.Add(c.opts.HeartbeatInterval)
	}
	return c.pingedAt.Add(c.opts.HeartbeatTimeout)
}

// timedOut acts on a read deadline: the context's end, or silence.
func (c *conn) timedOut(err error) error {
	c.mu.Lock()
	canceled := c.canceled
	c.mu.Unlock()
	switch {
	case canceled:
		return errCanceled
	case c.opts.HeartbeatInterval == 0:
		return err // nobody set a deadline
	case time.Now().Before(c.silenceDue()):
		return nil
	}
	if !c.pingedAt.IsZero() {
		return fmt.Errorf("%w: no byte for %v after a heartbeat", ErrSilent, c.opts.HeartbeatTimeout)
	}
	// TTL 0: the peer need not time us out, TCP keep-alive does.
	c.out = appendCommand(c.out[:0], "PING", make([]byte, pingTTLBytes))
	if err := c.write(c.out); err != nil {
		return err
	}
	c.pingedAt = time.Now()
	return nil
}

// write writes p. After the watched context ended it writes nothing; an end
// in the middle breaks the connection.
func (c *conn) write(p []byte) error {
	c.mu.Lock()
	if c.canceled {
		c.mu.Unlock()
		return errCanceled
	}
	c.writing = true
	err := c.nc.SetWriteDeadline(time.Now().Add(c.opts.WriteTimeout))
	c.mu.Unlock()
	if err == nil {
		_, err = c.nc.Write(p)
	}
	c.mu.Lock()
	c.writing = false
	c.mu.Unlock()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%w: a write of %d bytes did not end in time", ErrNotReading, len(p))
	}
	return err
}

// watchContext makes ctx the one that interrupts reads and writes. The
// registration stays for the next call with the same context, so that a
// Recv that waits allocates nothing.
func (c *conn) watchContext(ctx context.Context) {
	done := ctx.Done()
	if done == c.watched {
		return
	}
	c.watched = done
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unwatch != nil {
		c.unwatch()
		c.unwatch = nil
	}
	c.watch++
	if c.canceled {
		c.canceled = false
		// A failure shows at the next read.
		_ = c.nc.SetReadDeadline(time.Time{})
	}
	if done != nil {
		watch := c.watch
		c.unwatch = context.AfterFunc(ctx, func() { c.cancel(watch) })
	}
}

// cancel interrupts the read or write in progress, and the next ones.
func (c *conn) cancel(watch uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if watch != c.watch {
		return
	}
	c.canceled = true
	// Failures mean that the connection is closed, which interrupts as well.
	_ = c.nc.SetReadDeadline(longAgo)
	if c.writing {
		_ = c.nc.SetWriteDeadline(longAgo)
	}
}

// close closes the connection and interrupts whoever uses it.
func (c *conn) close() {
	c.mu.Lock()
	if c.unwatch != nil {
		c.unwatch()
		c.unwatch = nil
	}
	c.mu.Unlock()
	// Nothing is owed to the peer, so a failure to close loses nothing.
	_ = c.nc.Close()
}
