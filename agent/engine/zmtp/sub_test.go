package zmtp

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

var everything = []string{""}

func TestPingIsAnswered(t *testing.T) {
	endpoint := startPeer(t, func(p *rawPeer) {
		p.hello("PUB", "")
		// Heartbeats come between the frames of a message, too.
		p.send([]byte("\x01\x02kv"))
		p.send(peerCommand("PING", "\x00\x0acontext"))
		p.expect(peerCommand("PONG", "context"))
		p.send([]byte("\x00\x01a"))
		p.send(peerCommand("PING", "\x00\x00"))
		p.expect(peerCommand("PONG", ""))
		p.send(peerCommand("PONG", "unasked"))
		p.send(peerCommand("SUBSCRIBE", "unknown to a SUB"))
		p.send(peerMessage("kv", "b"))
		p.untilClosed()
	})
	s := mustDialSub(t, Options{Endpoint: endpoint, Topics: everything})
	ctx := testContext(t)
	wantNotice[*Connected](t, ctx, s)
	wantMessage(t, ctx, s, "kv", "a")
	wantMessage(t, ctx, s, "kv", "b")
}

func TestTopics(t *testing.T) {
	long := strings.Repeat("t", 300)
	endpoint := startPeer(t, func(p *rawPeer) {
		p.hello("PUB", "kv@a", "kv@b")
		p.expect([]byte(longHeader(0, 301) + "\x01" + long))
		p.send(peerMessage("end"))
		p.untilClosed()
	})
	s := mustDialSub(t, Options{Endpoint: endpoint, Topics: []string{"kv@a", "kv@b", long}})
	ctx := testContext(t)
	wantNotice[*Connected](t, ctx, s)
	wantMessage(t, ctx, s, "end")
}

// Each peer breaks another rule; each gets one clear notice, and the next
// connection works.
func TestBadPeers(t *testing.T) {
	say := func(b string) func(*rawPeer) {
		return func(p *rawPeer) {
			p.send([]byte(b))
			p.untilClosed()
		}
	}
	after := func(then func(*rawPeer)) func(*rawPeer) {
		return func(p *rawPeer) {
			p.read(64)
			p.send(peerGreeting())
			p.frame()
			then(p)
			p.untilClosed()
		}
	}
	ready := func(frames string) func(*rawPeer) {
		return func(p *rawPeer) {
			p.hello("PUB", "")
			p.send([]byte(frames))
			p.untilClosed()
		}
	}
	const handshake, established = false, true
	for _, tc := range []struct {
		name   string
		script func(*rawPeer)
		err    error
		stage  bool
		about  string
	}{
		{"HTTP server", say("HTTP/1.1 400 Bad Request\r\n\r\n"), ErrNotZMTP, handshake, "HTTP server"},
		{"TLS server", say("\x15\x03\x01\x00\x02\x02\x0a"), ErrNotZMTP, handshake, "TLS"},
		{"random bytes", say(strings.Repeat("\x81\x9c\x00\xff", 1000)), ErrNotZMTP, handshake, `\x81\x9c`},
		{"closes at once", func(*rawPeer) {}, nil, handshake, ""},
		{"closes after the greeting", func(p *rawPeer) { p.read(64); p.send(peerGreeting()); p.frame() }, io.ErrUnexpectedEOF, handshake, "may not want a SUB"},
		{"ROUTER", after(func(p *rawPeer) { p.send(peerReady("ROUTER")) }), ErrSocketType, handshake, "replay endpoint"},
		{"refuses", after(func(p *rawPeer) { p.send(peerCommand("ERROR", "\x09no more SU")) }), ErrRefused, handshake, `"no more S"`},
		{"message for READY", after(func(p *rawPeer) { p.send(peerMessage("kv", "a")) }), ErrProtocol, handshake, "before READY"},
		{"PING for READY", after(func(p *rawPeer) { p.send(peerCommand("PING", "\x00\x00")) }), ErrProtocol, handshake, `"PING" before READY`},
		{"READY of 2^62", after(func(p *rawPeer) { p.send([]byte(longHeader(4, 1<<62))) }), ErrLimit, handshake, "command of 4611686018427387904"},
		{"broken READY", after(func(p *rawPeer) { p.send(peerCommand("READY", "\x0bSocket")) }), ErrProtocol, handshake, "READY"},
		{"nameless command", after(func(p *rawPeer) { p.send([]byte{4, 1, 9}) }), ErrProtocol, handshake, "name"},

		{"closes", func(p *rawPeer) { p.hello("PUB", "") }, io.EOF, established, "closed the connection"},
		{"closes in a header", func(p *rawPeer) { p.hello("PUB", ""); p.send([]byte{0}) }, io.ErrUnexpectedEOF, established, "inside a message"},
		{"closes in a frame", func(p *rawPeer) { p.hello("PUB", ""); p.send([]byte("\x00\x05ab")) }, io.ErrUnexpectedEOF, established, "inside a message"},
		{"closes between frames", func(p *rawPeer) { p.hello("PUB", ""); p.send([]byte("\x01\x01a")) }, io.ErrUnexpectedEOF, established, "inside a message"},
		{"frame of 2^62", ready(longHeader(0, 1<<62) + "x"), ErrLimit, established, "MaxFrameBytes"},
		{"endless message", ready(strings.Repeat("\x01\x00", 100)), ErrLimit, established, "MaxParts"},
		{"reserved flag", ready("\x40\x00"), ErrProtocol, established, "reserved"},
		{"late ERROR", ready(string(peerCommand("ERROR", "\x04gone"))), ErrRefused, established, `"gone"`},
		{"short PING", ready(string(peerCommand("PING", "\x00"))), ErrProtocol, established, "PING"},
		{"empty command", ready("\x04\x00"), ErrProtocol, established, "command"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			good := func(p *rawPeer) {
				p.hello("PUB", "")
				p.send(peerMessage("good"))
				p.untilClosed()
			}
			s := mustDialSub(t, Options{Endpoint: startPeer(t, tc.script, good), Topics: everything, BackoffMin: 1, BackoffMax: 1})
			ctx := testContext(t)
			var cause error
			if tc.stage == established {
				c := wantNotice[*Connected](t, ctx, s)
				if c.Conn != 1 || !strings.Contains(c.Error(), "connected to tcp://127.0.0.1:") {
					t.Errorf("notice %+v: %v", c, c)
				}
				d := wantNotice[*Disconnected](t, ctx, s)
				if d.Conn != 1 || d.Messages != 0 || d.Peer == "" {
					t.Errorf("notice %+v", d)
				}
				cause = d
			} else {
				f := wantNotice[*ConnectFailed](t, ctx, s)
				if f.Attempts != 1 || f.Peer == "" {
					t.Errorf("notice %+v", f)
				}
				cause = f
			}
			if tc.err != nil {
				wantErr(t, cause, tc.err)
			}
			if !strings.Contains(cause.Error(), tc.about) || !strings.Contains(cause.Error(), "tcp://127.0.0.1:") {
				t.Errorf("error %q, want one about %q and the endpoint", cause, tc.about)
			}
			wantNotice[*Connected](t, ctx, s)
			if s.Conn() != 2 {
				t.Errorf("Conn = %d, want 2", s.Conn())
			}
			wantMessage(t, ctx, s, "good")
		})
	}
}

func TestNobodyListens(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	endpoint := "tcp://" + ln.Addr().String()
	ln.Close()
	s := mustDialSub(t, Options{Endpoint: endpoint, Topics: everything, BackoffMin: time.Microsecond, BackoffMax: time.Millisecond})
	ctx := testContext(t)
	for want := 1; want <= 3; want++ {
		f := wantNotice[*ConnectFailed](t, ctx, s)
		if f.Attempts != want || f.Peer != "" || f.RetryIn <= 0 || !strings.Contains(f.Error(), "refused") {
			t.Errorf("notice %+v: %v", f, f)
		}
	}
}

// A publisher that restarts is told about and then received again.
func TestReconnect(t *testing.T) {
	publisher := func(messages ...string) func(*rawPeer) {
		return func(p *rawPeer) {
			p.hello("XPUB", "kv@")
			for _, m := range messages {
				p.send(peerMessage("kv@", m))
			}
		}
	}
	endpoint := startPeer(t, publisher("1", "2"), publisher(), publisher("3"))
	s := mustDialSub(t, Options{Endpoint: endpoint, Topics: []string{"kv@"}, BackoffMin: 1, BackoffMax: 1})
	ctx := testContext(t)
	wantNotice[*Connected](t, ctx, s)
	wantMessage(t, ctx, s, "kv@", "1")
	wantMessage(t, ctx, s, "kv@", "2")
	if d := wantNotice[*Disconnected](t, ctx, s); d.Messages != 2 || d.Conn != 1 {
		t.Errorf("notice %+v, want 2 messages of connection 1", d)
	}
	wantNotice[*Connected](t, ctx, s)
	wantNotice[*Disconnected](t, ctx, s)
	if c := wantNotice[*Connected](t, ctx, s); c.Conn != 3 || c.Attempts != 1 {
		t.Errorf("notice %+v, want connection 3 at the first attempt", c)
	}
	wantMessage(t, ctx, s, "kv@", "3")
}

// Large frames are read straight into the message; what follows is not lost.
func TestLargeMessages(t *testing.T) {
	large := strings.Repeat("0123456789abcdef", 1<<16)
	endpoint := startPeer(t, func(p *rawPeer) {
		p.hello("PUB", "")
		for range 20 {
			p.send(peerMessage("kv", large, "tail"))
			p.send(peerMessage("small"))
		}
		p.untilClosed()
	})
	s := mustDialSub(t, Options{Endpoint: endpoint, Topics: everything})
	ctx := testContext(t)
	wantNotice[*Connected](t, ctx, s)
	for range 20 {
		wantMessage(t, ctx, s, "kv", large, "tail")
		wantMessage(t, ctx, s, "small")
	}
}

func TestDialerClosed(t *testing.T) {
	s := mustDialSub(t, Options{Endpoint: "tcp://127.0.0.1:5557", Topics: everything})
	for range 2 {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	_, err := s.Recv(context.Background())
	wantErr(t, err, ErrClosed)
	if IsNotice(err) || IsNotice(nil) || IsNotice(errors.New("x")) {
		t.Error("IsNotice says true of what ends the socket")
	}
	d := mustDialDealer(t, Options{Endpoint: "tcp://127.0.0.1:5557"})
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	wantErr(t, d.Send(context.Background(), nil), ErrClosed)
	_, err = d.Recv(context.Background())
	wantErr(t, err, ErrClosed)
}
