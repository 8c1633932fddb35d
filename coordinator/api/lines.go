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

// lineStream is the server's side of a stream that goes out as JSON lines.
type lineStream struct {
	grpc.ServerStream
	r       *http.Request
	w       http.ResponseWriter
	control *http.ResponseController
}

// begin sends the head, so that the client knows it is connected.
func (l *lineStream) begin() error {
	l.w.Header().Set("Content-Type", "application/x-ndjson")
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
	if _, err := l.w.Write(append(b, '\n')); err != nil {
		return err
	}
	return l.control.Flush()
}
