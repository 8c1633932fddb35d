package api

import (
	"context"
	"net/http"
	"time"

	"google.golang.org/grpc"

	waypostv1 "waypost/proto/waypost/v1"
)

// lineWithin is how long a client has to take a line.
const lineWithin = 10 * time.Second

// eventStream is the media type of server-sent events.
const eventStream = "text/event-stream"

// lineStream is the server's side of a stream that goes out as JSON lines, or
// as server-sent events of one such line each.
type lineStream struct {
	grpc.ServerStream
	r       *http.Request
	w       http.ResponseWriter
	control *http.ResponseController
	events  bool
}

// begin sends the head, so that the client knows it is connected.
func (l *lineStream) begin() error {
	kind := "application/x-ndjson"
	if l.events {
		kind = eventStream
	}
	l.w.Header().Set("Content-Type", kind)
	l.w.WriteHeader(http.StatusOK)
	return l.control.Flush()
}

// Context implements grpc.ServerStream.
func (l *lineStream) Context() context.Context { return l.r.Context() }

// Send writes one line.
func (l *lineStream) Send(m *waypostv1.WatchPlacementsResponse) error {
	b, err := MarshalJSON(m)
	if err != nil {
		return err
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
