package api

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// lineWithin is how long a client has to take a line.
const lineWithin = 10 * time.Second

// eventStream is the media type of server-sent events.
const eventStream = "text/event-stream"

// lineStream is the server's side of a stream that goes out as JSON lines, or
// as server-sent events of one such line each.
type lineStream[Res any] struct {
	grpc.ServerStream
	r       *http.Request
	w       http.ResponseWriter
	control *http.ResponseController
	events  bool
	begun   bool
}

// begin sends the head, so that the client knows it is connected.
func (l *lineStream[Res]) begin() error {
	l.begun = true
	kind := "application/x-ndjson"
	if l.events {
		kind = eventStream
	}
	l.w.Header().Set("Content-Type", kind)
	l.w.WriteHeader(http.StatusOK)
	return l.control.Flush()
}

// Context implements grpc.ServerStream.
func (l *lineStream[Res]) Context() context.Context { return l.r.Context() }

// Send writes one line.
func (l *lineStream[Res]) Send(m *Res) error {
	message, ok := any(m).(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no message", m)
	}
	b, err := MarshalJSON(message)
	if err != nil {
		return err
	}
	if !l.begun {
		if err := l.begin(); err != nil {
			return err
		}
	}
	if err := l.control.SetWriteDeadline(time.Now().Add(lineWithin)); err != nil {
		return err
	}
	b = append(b, '\n')
	if l.events {
		b = append(append([]byte("data: "), b...), '\n')
	}
	if _, err := l.w.Write(b); err != nil {
		return err
	}
	return l.control.Flush()
}
