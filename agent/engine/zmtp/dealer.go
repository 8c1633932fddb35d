package zmtp

import (
	"context"
	"errors"
	"fmt"
)

// Dealer sends requests to a ROUTER and receives its replies. One goroutine
// calls Send and Recv; any may call Close.
type Dealer struct {
	dialer *dialer
	out    []byte
}

// DialDealer returns a DEALER. It does nothing yet: Send connects.
func DialDealer(o Options) (*Dealer, error) {
	d, err := newDialer(o, dealerRole)
	if err != nil {
		return nil, err
	}
	return &Dealer{dialer: d}, nil
}

// Send sends one message, connecting first where there is no connection. A
// request belongs to its connection: when Recv tells of its end, the request
// and its replies are lost and the caller sends it again. Send may itself
// return *ConnectFailed or *Disconnected, ctx's error, or ErrClosed; after
// any error the message does not count as sent.
func (d *Dealer) Send(ctx context.Context, frames ...[]byte) error {
	if len(frames) == 0 {
		return errors.New("zmtp: a message needs at least one frame")
	}
	if d.dialer.conn == nil {
		if _, err := d.dialer.connect(ctx); err != nil {
			return err
		}
	}
	if d.dialer.closed.Load() {
		return ErrClosed
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	c := d.dialer.conn
	c.watchContext(ctx)
	d.out = appendMessage(d.out[:0], frames)
	err := c.write(d.out)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errCanceled):
		return ctx.Err()
	}
	// Part of the message may be on the wire, so the connection is spent even
	// if it was ctx that ended the write.
	dropped := d.dialer.drop(err)
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", dropped, ctx.Err())
	}
	return dropped
}

// Recv returns the next message as its frames, valid until the next Recv.
// Errors are *Disconnected, ErrNotConnected when nothing was sent since, ctx's
// error or ErrClosed. A Recv that ctx ends loses nothing that has arrived.
func (d *Dealer) Recv(ctx context.Context) ([][]byte, error) {
	if d.dialer.closed.Load() {
		return nil, ErrClosed
	}
	if d.dialer.conn == nil {
		return nil, ErrNotConnected
	}
	return d.dialer.recv(ctx)
}

// Close ends the socket at once and with it a Send or Recv in progress, which
// returns ErrClosed.
func (d *Dealer) Close() error { return d.dialer.close() }
