package zmtp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

// publisher is a raw PUB that dialed a listening socket.
func publisher(t testing.TB, s *Sub, script func(*rawPeer)) (ended <-chan struct{}) {
	t.Helper()
	nc, err := net.Dial("tcp", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		(&rawPeer{t, nc}).run(script)
	}()
	t.Cleanup(func() {
		nc.Close()
		<-done
	})
	return done
}

var listenOptions = Options{Endpoint: "tcp://127.0.0.1:0", Topics: []string{"kv@"}}

func TestListen(t *testing.T) {
	s := mustListenSub(t, listenOptions)
	ctx := testContext(t)
	publisher(t, s, func(p *rawPeer) {
		p.hello("PUB", "kv@")
		p.send(peerMessage("kv@", "1"))
		p.send(peerCommand("PING", "\x00\x00ctx"))
		p.expect(peerCommand("PONG", "ctx"))
		p.send(peerMessage("kv@", "2"))
	})
	c := wantNotice[*Connected](t, ctx, s)
	if c.Conn != 1 || c.Peer == "" || c.Attempts != 1 {
		t.Errorf("notice %+v", c)
	}
	wantMessage(t, ctx, s, "kv@", "1")
	wantMessage(t, ctx, s, "kv@", "2")
	d := wantNotice[*Disconnected](t, ctx, s)
	if d.Conn != 1 || d.Messages != 2 || d.Peer != c.Peer || d.RetryIn != 0 {
		t.Errorf("notice %+v", d)
	}
	wantErr(t, d, io.EOF)

	publisher(t, s, func(p *rawPeer) {
		p.hello("XPUB", "kv@")
		p.send(peerMessage("kv@", "3"))
		p.untilClosed()
	})
	wantNotice[*Connected](t, ctx, s)
	wantMessage(t, ctx, s, "kv@", "3")
	if s.Conn() != 2 {
		t.Errorf("Conn = %d, want 2", s.Conn())
	}
}

// Messages of several publishers keep their order and say whose they are,
// although every one of them sends more than a burst.
func TestListenToSeveral(t *testing.T) {
	const publishers, messages = 5, 3000
	s := mustListenSub(t, listenOptions)
	for p := range publishers {
		publisher(t, s, func(peer *rawPeer) {
			peer.hello("PUB", "kv@")
			var batch []byte
			for i := range messages {
				batch = append(batch, peerMessage("kv@", fmt.Sprint(p), fmt.Sprint(i))...)
			}
			peer.send(batch)
		})
	}
	ctx := testContext(t)
	next := map[string]int{}
	owner := map[uint64]string{}
	ready, gone := 0, 0
	for gone < publishers {
		frames, err := s.Recv(ctx)
		var connected *Connected
		var disconnected *Disconnected
		switch {
		case errors.As(err, &connected):
			ready++
		case errors.As(err, &disconnected):
			gone++
			if disconnected.Conn != s.Conn() || disconnected.Messages != messages {
				t.Errorf("notice %+v, want %d messages", disconnected, messages)
			}
		case err != nil:
			t.Fatal(err)
		default:
			p := string(frames[1])
			if o, ok := owner[s.Conn()]; ok && o != p {
				t.Fatalf("connection %d is of publisher %s and %s", s.Conn(), o, p)
			}
			owner[s.Conn()] = p
			if string(frames[2]) != fmt.Sprint(next[p]) {
				t.Fatalf("publisher %s: message %s, want %d", p, frames[2], next[p])
			}
			next[p]++
		}
	}
	if ready != publishers || len(owner) != publishers {
		t.Errorf("%d connections, %d with messages, want %d", ready, len(owner), publishers)
	}
}

// One publisher stops inside a message and one floods; a third gets through.
func TestListenIsFair(t *testing.T) {
	s := mustListenSub(t, listenOptions)
	ctx := testContext(t)
	publisher(t, s, func(p *rawPeer) {
		p.hello("PUB", "kv@")
		p.send(append(peerMessage("stalled"), "\x01\x05ab"...))
		p.untilClosed()
	})
	wantNotice[*Connected](t, ctx, s)
	wantMessage(t, ctx, s, "stalled")
	publisher(t, s, func(p *rawPeer) {
		p.hello("PUB", "kv@")
		flood := []byte(strings.Repeat(string(peerMessage("flood")), 1000))
		for {
			p.send(flood)
		}
	})
	wantNotice[*Connected](t, ctx, s)
	wantMessage(t, ctx, s, "flood")
	publisher(t, s, func(p *rawPeer) {
		p.hello("PUB", "kv@")
		for range 3 {
			p.send(peerMessage("third"))
		}
		p.untilClosed()
	})
	for third := 0; third < 3; {
		frames, err := s.Recv(ctx)
		if err != nil {
			if !IsNotice(err) {
				t.Fatal(err)
			}
			continue
		}
		if string(frames[0]) == "third" {
			third++
		}
	}
}

func TestListenLimitsPublishers(t *testing.T) {
	o := listenOptions
	o.MaxPublishers = 2
	s := mustListenSub(t, o)
	ctx := testContext(t)
	leave := make(chan struct{})
	stay := func(p *rawPeer) {
		p.hello("PUB", "kv@")
		<-leave
	}
	for range 2 {
		publisher(t, s, stay)
		wantNotice[*Connected](t, ctx, s)
	}
	ended := publisher(t, s, func(p *rawPeer) {
		p.hello("PUB", "kv@")
		p.untilClosed()
	})
	f := wantNotice[*ConnectFailed](t, ctx, s)
	wantErr(t, f, ErrTooMany)
	if !strings.Contains(f.Error(), "MaxPublishers") {
		t.Errorf("error %q does not name the limit", f)
	}
	<-ended // it was closed, not left waiting
	leave <- struct{}{}
	wantNotice[*Disconnected](t, ctx, s)
	publisher(t, s, stay)
	wantNotice[*Connected](t, ctx, s)
	close(leave)
}

// Strangers are told about one by one and disturb no publisher.
func TestListenMeetsStrangers(t *testing.T) {
	s := mustListenSub(t, listenOptions)
	ctx := testContext(t)
	publisher(t, s, func(p *rawPeer) {
		p.hello("PUB", "kv@")
		p.send(peerMessage("kv@", "before"))
		p.untilClosed()
	})
	wantNotice[*Connected](t, ctx, s)
	wantMessage(t, ctx, s, "kv@", "before")
	for _, tc := range []struct {
		script func(*rawPeer)
		err    error
		about  string
	}{
		{func(p *rawPeer) { p.send([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")); p.untilClosed() }, ErrNotZMTP, "HTTP client"},
		{func(p *rawPeer) { p.send([]byte("\x16\x03\x01\x02\x00\x01\x00")); p.untilClosed() }, ErrNotZMTP, "TLS"},
		{func(p *rawPeer) { p.hello("SUB", "kv@"); p.untilClosed() }, ErrSocketType, "both ends subscribe"},
		{func(p *rawPeer) { p.send(peerGreeting()[:30]); p.nc.(*net.TCPConn).CloseWrite(); p.untilClosed() }, io.ErrUnexpectedEOF, "greeting"},
	} {
		publisher(t, s, tc.script)
		f := wantNotice[*ConnectFailed](t, ctx, s)
		wantErr(t, f, tc.err)
		if !strings.Contains(f.Error(), tc.about) || f.Peer == "" {
			t.Errorf("error %q, want one about %q with the peer", f, tc.about)
		}
	}
	publisher(t, s, func(p *rawPeer) {
		p.hello("PUB", "kv@")
		p.send([]byte("\x00\x02ok" + longHeader(0, 1<<62)))
		p.untilClosed()
	})
	wantNotice[*Connected](t, ctx, s)
	wantMessage(t, ctx, s, "ok")
	wantErr(t, wantNotice[*Disconnected](t, ctx, s), ErrLimit)
}

// Peers that never finish their handshake are limited, and refused ones are
// told about in a bounded number of notices that adds up.
func TestListenLimitsHandshakes(t *testing.T) {
	s := mustListenSub(t, listenOptions)
	ctx := testContext(t)
	s.listener.start()
	for range maxGreeting {
		publisher(t, s, func(p *rawPeer) { p.send(peerGreeting()[:20]); p.untilClosed() })
	}
	const refused = 30
	for range refused {
		// Accepted in order, so each of these finds all places taken.
		<-publisher(t, s, func(p *rawPeer) { p.untilClosed() })
	}
	f := wantNotice[*ConnectFailed](t, ctx, s)
	wantErr(t, f, ErrTooMany)
	told := 1 + f.Suppressed
	<-publisher(t, s, func(p *rawPeer) { p.untilClosed() })
	f = wantNotice[*ConnectFailed](t, ctx, s)
	told += 1 + f.Suppressed
	if told != refused+1 {
		t.Errorf("notices tell of %d refusals, want %d", told, refused+1)
	}
}

// Strangers give their places back.
func TestListenAfterManyStrangers(t *testing.T) {
	s := mustListenSub(t, listenOptions)
	ctx := testContext(t)
	for range maxGreeting + 1 {
		publisher(t, s, func(p *rawPeer) { p.send([]byte("SSH-2.0-x\r\n")); p.untilClosed() })
		wantErr(t, wantNotice[*ConnectFailed](t, ctx, s), ErrNotZMTP)
	}
	publisher(t, s, func(p *rawPeer) { p.hello("PUB", "kv@"); p.untilClosed() })
	wantNotice[*Connected](t, ctx, s)
}

// Publishers give back what they held.
func TestListenAfterManyPublishers(t *testing.T) {
	s := mustListenSub(t, listenOptions)
	ctx := testContext(t)
	for range maxGreeting + 1 {
		publisher(t, s, func(p *rawPeer) { p.hello("PUB", "kv@") })
		wantNotice[*Connected](t, ctx, s)
		wantNotice[*Disconnected](t, ctx, s)
	}
	s.listener.mu.Lock()
	defer s.listener.mu.Unlock()
	if n := len(s.listener.conns); n != 0 {
		t.Errorf("%d closed connections are held", n)
	}
}

// pipeListener accepts what is dialed by pipes, for a fake clock.
type pipeListener struct {
	dialed chan net.Conn
	closed chan struct{}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case nc := <-l.dialed:
		return nc, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}
func (l *pipeListener) Close() error   { close(l.closed); return nil }
func (l *pipeListener) Addr() net.Addr { return nil }

// pipeListen is a listening socket on pipes with the function that dials it.
func pipeListen(t *testing.T, o Options) (s *Sub, dial func(script func(*rawPeer))) {
	s = mustListenSub(t, o)
	s.listener.ln.Close()
	ln := &pipeListener{make(chan net.Conn), make(chan struct{})}
	s.listener.ln = ln
	return s, func(script func(*rawPeer)) {
		ours, theirs := net.Pipe()
		go func() {
			select {
			case ln.dialed <- ours:
				(&rawPeer{t, theirs}).run(script)
			case <-ln.closed:
			}
		}()
	}
}

// The handshake has a deadline and the time after it has none.
func TestListenHandshakeTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, dial := pipeListen(t, listenOptions)
		start := time.Now()
		dial(func(p *rawPeer) { p.untilClosed() })
		wantErr(t, wantNotice[*ConnectFailed](t, t.Context(), s), ErrHandshakeTimeout)
		if took := time.Since(start); took != defaultTimeout {
			t.Errorf("took %v, want %v", took, defaultTimeout)
		}
		dial(func(p *rawPeer) {
			p.hello("PUB", "kv@")
			p.sleep(100 * time.Hour)
			p.send(peerMessage("kv@"))
			p.untilClosed()
		})
		wantNotice[*Connected](t, t.Context(), s)
		wantMessage(t, t.Context(), s, "kv@")
	})
}

func TestListenHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := listenOptions
		o.HeartbeatInterval, o.HeartbeatTimeout = 10*time.Second, 3*time.Second
		s, dial := pipeListen(t, o)
		start := time.Now()
		dial(func(p *rawPeer) {
			p.hello("PUB", "kv@")
			for range 3 {
				p.expect([]byte("\x04\x07\x04PING\x00\x00"))
				p.send(peerCommand("PONG", ""))
			}
			p.untilClosed()
		})
		wantNotice[*Connected](t, t.Context(), s)
		wantErr(t, wantNotice[*Disconnected](t, t.Context(), s), ErrSilent)
		if took := time.Since(start); took != 43*time.Second {
			t.Errorf("took %v, want 43s", took)
		}
	})
}

// failingListener is out of file descriptors for a while.
type failingListener struct {
	net.Listener
	failures int
}

func (l *failingListener) Accept() (net.Conn, error) {
	if l.failures > 0 {
		l.failures--
		return nil, syscall.EMFILE
	}
	return l.Listener.Accept()
}

// A failing accept is told about, retried after pauses, and does not end the
// socket.
func TestListenOutlivesAcceptErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, dial := pipeListen(t, listenOptions)
		s.listener.ln = &failingListener{s.listener.ln, 5}
		start := time.Now()
		for range 5 {
			wantErr(t, wantNotice[*ConnectFailed](t, t.Context(), s), syscall.EMFILE)
		}
		// 100, 200, 400, 800 and 1600 ms, each at least half.
		if took := time.Since(start); took < 1550*time.Millisecond {
			t.Errorf("5 attempts took %v", took)
		}
		dial(func(p *rawPeer) { p.hello("PUB", "kv@"); p.untilClosed() })
		wantNotice[*Connected](t, t.Context(), s)
	})
}

func TestListenCancel(t *testing.T) {
	s := mustListenSub(t, listenOptions)
	for range 3 {
		ctx, cancel := context.WithCancel(testContext(t))
		got := make(chan error)
		go func() {
			_, err := s.Recv(ctx)
			got <- err
		}()
		cancel()
		wantErr(t, <-got, context.Canceled)
	}
	publisher(t, s, func(p *rawPeer) {
		p.hello("PUB", "kv@")
		p.send(peerMessage("kv@", "1"))
		p.untilClosed()
	})
	wantNotice[*Connected](t, testContext(t), s)
	wantMessage(t, testContext(t), s, "kv@", "1")
}

func TestListenPortTaken(t *testing.T) {
	s := mustListenSub(t, listenOptions)
	o := listenOptions
	o.Endpoint = "tcp://" + s.Addr().String()
	if _, err := ListenSub(o); err == nil || !strings.Contains(err.Error(), o.Endpoint) {
		t.Errorf("error %v, want one that names %s", err, o.Endpoint)
	}
}

// Close ends everything with peers at every stage, before and after accepting
// began, while Recv waits and while a connection is lent.
func TestListenClose(t *testing.T) {
	for name, before := range map[string]func(t *testing.T, ctx context.Context, s *Sub){
		"unused":           func(*testing.T, context.Context, *Sub) {},
		"lent":             func(t *testing.T, ctx context.Context, s *Sub) { recvMessages(t, ctx, s, 1) },
		"lent and unasked": func(t *testing.T, ctx context.Context, s *Sub) { recvMessages(t, ctx, s, 100) },
	} {
		t.Run(name, func(t *testing.T) {
			ignore := goleak.IgnoreCurrent()
			s, err := ListenSub(listenOptions)
			if err != nil {
				t.Fatal(err)
			}
			var ended []<-chan struct{}
			for _, script := range []func(*rawPeer){
				func(p *rawPeer) { p.untilClosed() },
				func(p *rawPeer) { p.send([]byte("GET / HTTP/1.1\r\n\r\n")); p.untilClosed() },
				func(p *rawPeer) { p.hello("PUB", "kv@"); p.untilClosed() },
				func(p *rawPeer) { p.hello("PUB", "kv@"); p.send([]byte("\x01\x05a")); p.untilClosed() },
				func(p *rawPeer) {
					p.hello("PUB", "kv@")
					for {
						p.send(peerMessage("kv@", "flood"))
					}
				},
			} {
				ended = append(ended, publisher(t, s, script))
			}
			before(t, testContext(t), s)
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			_, err = s.Recv(context.Background())
			wantErr(t, err, ErrClosed)
			for _, e := range ended {
				<-e
			}
			goleak.VerifyNone(t, ignore)
		})
	}
	t.Run("while Recv waits", func(t *testing.T) {
		s := mustListenSub(t, listenOptions)
		got := make(chan error)
		go func() {
			_, err := s.Recv(context.Background())
			got <- err
		}()
		s.Close()
		wantErr(t, <-got, ErrClosed)
	})
}

func recvMessages(t *testing.T, ctx context.Context, s *Sub, n int) {
	t.Helper()
	for n > 0 {
		_, err := s.Recv(ctx)
		switch {
		case err == nil:
			n--
		case !IsNotice(err):
			t.Fatal(err)
		}
	}
}
