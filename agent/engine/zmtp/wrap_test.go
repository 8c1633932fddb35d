package zmtp

import (
	"context"
	"net"
	"testing"
	"time"
)

// Every connection is wrapped before its first byte, whichever side opened it.
func TestWrap(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	wrapped := make(chan net.Conn, 8)
	o := Options{Topics: []string{""}, Wrap: func(c net.Conn) net.Conn {
		wrapped <- c
		return c
	}}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	next := func() net.Conn {
		t.Helper()
		select {
		case c := <-wrapped:
			return c
		case <-ctx.Done():
			t.Fatal("a connection was not wrapped")
			return nil
		}
	}

	dialling := o
	dialling.Endpoint = "tcp://" + l.Addr().String()
	dialled, err := DialSub(dialling)
	if err != nil {
		t.Fatal(err)
	}
	defer dialled.Close()
	go dialled.Recv(ctx) // ends with Close
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	if c := next(); c.RemoteAddr().String() != l.Addr().String() {
		t.Errorf("dialled %v", c.RemoteAddr())
	}

	listening := o
	listening.Endpoint = "tcp://127.0.0.1:0"
	listener, err := ListenSub(listening)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go listener.Recv(ctx)
	publisher, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer publisher.Close()
	if c := next(); c.RemoteAddr().String() != publisher.LocalAddr().String() {
		t.Errorf("accepted %v", c.RemoteAddr())
	}
}
