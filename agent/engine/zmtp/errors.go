package zmtp

import (
	"errors"
	"fmt"
	"time"
)

// What ends a Recv or Send for good.
var (
	// ErrClosed means that the socket was closed by Close.
	ErrClosed = errors.New("zmtp: socket closed")
	// ErrNotConnected means that a DEALER has no connection: nothing was sent
	// since the last one ended, so no reply can come.
	ErrNotConnected = errors.New("zmtp: dealer is not connected: send a request first")
)

// Why a connection failed or ended; wrapped in ConnectFailed and Disconnected.
var (
	// ErrNotZMTP means that the peer speaks another protocol.
	ErrNotZMTP = errors.New("peer does not speak ZMTP")
	// ErrVersion means that the peer speaks a ZMTP older than 3.0.
	ErrVersion = errors.New("peer speaks ZMTP before 3.0")
	// ErrMechanism means that the peer demands a security mechanism.
	ErrMechanism = errors.New("peer demands a security mechanism other than NULL")
	// ErrSocketType means that the peer's socket type does not fit ours.
	ErrSocketType = errors.New("peer has the wrong socket type")
	// ErrProtocol means that the peer broke the protocol.
	ErrProtocol = errors.New("malformed ZMTP")
	// ErrLimit means that a frame, message, command or its number of parts
	// exceeds the limit in Options.
	ErrLimit = errors.New("limit exceeded")
	// ErrRefused means that the peer sent an ERROR command.
	ErrRefused = errors.New("peer refused the connection")
	// ErrHandshakeTimeout means that the peer did not finish the handshake in
	// Options.HandshakeTimeout.
	ErrHandshakeTimeout = errors.New("handshake timed out")
	// ErrSilent means that the peer did not answer a heartbeat.
	ErrSilent = errors.New("peer is silent")
	// ErrNotReading means that the peer took no bytes for
	// Options.WriteTimeout.
	ErrNotReading = errors.New("peer does not read")
	// ErrTooMany means that a listening socket has all the connections it
	// allows.
	ErrTooMany = errors.New("too many connections")
)

// Connected tells that a connection is ready and the subscriptions were sent.
// Recv returns it as an error once per connection, before the connection's
// first message.
type Connected struct {
	// Conn numbers the connections of a socket from 1.
	Conn uint64
	// Endpoint is the endpoint in Options, Peer the remote address.
	Endpoint, Peer string
	// Attempts is the number of attempts it took, 1 or more; 1 when listening.
	Attempts int
}

// Error describes the connection.
func (e *Connected) Error() string {
	return fmt.Sprintf("zmtp: connected to %s (%s), connection %d", e.Endpoint, e.Peer, e.Conn)
}

// Disconnected tells that a ready connection ended. Messages were lost, in
// part or in whole; a DEALER's unanswered request is lost too.
type Disconnected struct {
	// Conn numbers the connections of a socket from 1.
	Conn uint64
	// Endpoint is the endpoint in Options, Peer the remote address.
	Endpoint, Peer string
	// Messages is the number of whole messages received on the connection.
	Messages uint64
	// RetryIn is the pause before the next attempt; 0 when listening.
	RetryIn time.Duration
	// Err is the cause.
	Err error
}

// Error describes the cause.
func (e *Disconnected) Error() string {
	return fmt.Sprintf("zmtp: connection %d with %s (%s) ended after %d messages: %v", e.Conn, e.Endpoint, e.Peer, e.Messages, e.Err)
}

// Unwrap returns the cause.
func (e *Disconnected) Unwrap() error { return e.Err }

// ConnectFailed tells that an attempt to connect failed, or that a peer that
// dialed a listening socket did not become a publisher.
type ConnectFailed struct {
	// Endpoint is the endpoint in Options, Peer the remote address; Peer is
	// empty when there was no TCP connection.
	Endpoint, Peer string
	// Attempts counts the attempts since the last good connection, from 1;
	// it is 1 when listening.
	Attempts int
	// Suppressed is the number of like failures since the last notice that
	// gave no notice of their own; always 0 when dialing.
	Suppressed int
	// RetryIn is the pause before the next attempt; 0 when listening.
	RetryIn time.Duration
	// Err is the cause.
	Err error
}

// Error describes the cause.
func (e *ConnectFailed) Error() string {
	peer := ""
	if e.Peer != "" {
		peer = " (" + e.Peer + ")"
	}
	return fmt.Sprintf("zmtp: connecting %s%s: %v", e.Endpoint, peer, e.Err)
}

// Unwrap returns the cause.
func (e *ConnectFailed) Unwrap() error { return e.Err }

type notice interface {
	error
	notice()
}

func (*Connected) notice()     {}
func (*Disconnected) notice()  {}
func (*ConnectFailed) notice() {}

// IsNotice says whether err only tells of a change of connection: the socket
// goes on and the caller calls Recv (or a DEALER's Send) again.
func IsNotice(err error) bool {
	var n notice
	return errors.As(err, &n)
}

// Inner results that callers never see.
var (
	errNeedMore = errors.New("zmtp: more bytes needed")
	errCanceled = errors.New("zmtp: canceled")
)
