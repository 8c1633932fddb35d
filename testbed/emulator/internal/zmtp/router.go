package zmtp

import (
	"bufio"
	"context"
	"log/slog"
	"net"
	"time"
)

// Handler answers one request of a peer. It may send any number of messages
// and none; send fails when the peer is gone.
type Handler func(request [][]byte, send func(frames ...[]byte) error)

// Router is a ROUTER socket that serves each peer's requests in order.
type Router struct {
	*server
	handle Handler
}

// NewRouter makes a ROUTER socket. log may be nil.
func NewRouter(handle Handler, log *slog.Logger) *Router {
	r := &Router{server: newServer("ROUTER", []string{"DEALER", "REQ", "ROUTER"}, log), handle: handle}
	r.session = r.serve
	return r
}

func (r *Router) serve(_ context.Context, c net.Conn, in *bufio.Reader) error {
	out := bufio.NewWriterSize(c, 64<<10)
	var encoded []byte
	send := func(frames ...[]byte) error {
		if err := c.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			return err
		}
		encoded = appendMessage(encoded[:0], frames...)
		_, err := out.Write(encoded)
		return err
	}
	for {
		m, err := readMessage(in)
		if err != nil {
			return err
		}
		if m.command {
			name, body, err := splitCommand(m.frames[0])
			if err != nil {
				return err
			}
			if name == "PING" {
				answer, err := pong(body)
				if err != nil {
					return err
				}
				if _, err := out.Write(answer); err != nil {
					return err
				}
			}
		} else {
			r.handle(m.frames, send)
		}
		if err := out.Flush(); err != nil {
			return err
		}
	}
}
