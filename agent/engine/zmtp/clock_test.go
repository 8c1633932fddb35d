package zmtp

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// These tests run on a fake clock over net.Pipe, so that times are exact.

const pipeEndpoint = "tcp://peer:1"

var errNoRoute = errors.New("no route")

// failures returns the pauses a SUB makes that never gets a connection.
func failures(t *testing.T, seed uint64, n int) (pauses []time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		var dialed []time.Time
		s := mustDialSub(t, Options{
			Endpoint: pipeEndpoint, Topics: everything,
			BackoffMin: 100 * time.Millisecond, BackoffMax: 3 * time.Second,
			Rand: rand.New(rand.NewPCG(seed, 0)),
			Dial: func(context.Context, string, string) (net.Conn, error) {
				dialed = append(dialed, time.Now())
				return nil, errNoRoute
			},
		})
		var told []time.Duration
		for i := range n {
			f := wantNotice[*ConnectFailed](t, t.Context(), s)
			wantErr(t, f, errNoRoute)
			if f.Attempts != i+1 {
				t.Errorf("Attempts = %d, want %d", f.Attempts, i+1)
			}
			told = append(told, f.RetryIn)
		}
		for i := range n - 1 {
			pauses = append(pauses, dialed[i+1].Sub(dialed[i]))
			if pauses[i] != told[i] {
				t.Errorf("pause %d was %v, announced as %v", i, pauses[i], told[i])
			}
		}
	})
	return pauses
}

func TestBackoffDoublesWithJitter(t *testing.T) {
	first := failures(t, 1, 200)
	full := 100 * time.Millisecond
	distinct := map[time.Duration]bool{}
	for i, pause := range first {
		if pause < full/2 || pause > full {
			t.Errorf("pause %d is %v, want %v to %v", i, pause, full/2, full)
		}
		if full == 3*time.Second {
			distinct[pause] = true
		}
		full = min(2*full, 3*time.Second)
	}
	if len(distinct) < 150 {
		t.Errorf("%d distinct pauses: no jitter", len(distinct))
	}
	again, other := failures(t, 1, 200), failures(t, 2, 200)
	same := 0
	for i := range first {
		if again[i] != first[i] {
			t.Fatalf("pause %d is %v and then %v with one seed", i, first[i], again[i])
		}
		if other[i] == first[i] {
			same++
		}
	}
	if same > 10 {
		t.Errorf("%d pauses are equal with another seed", same)
	}
}

// The back-off starts over only after a connection that was of use, else a
// peer that greets and fails would be dialed for ever at the first pause.
func TestBackoffStartsOver(t *testing.T) {
	useless := func(p *rawPeer) { p.hello("PUB", "") }
	useful := func(p *rawPeer) { p.hello("PUB", ""); p.send(peerMessage("kv")) }
	lasting := func(p *rawPeer) { p.hello("PUB", ""); p.sleep(5 * time.Second) }
	synctest.Test(t, func(t *testing.T) {
		s := mustDialSub(t, Options{
			Endpoint: pipeEndpoint, Topics: everything,
			Dial: pipeDial(t, useless, useless, useless, useful, useless, lasting, useless),
		})
		ctx := t.Context()
		for i, full := range []time.Duration{100, 200, 400, 100, 200, 100, 200} {
			full *= time.Millisecond
			wantNotice[*Connected](t, ctx, s)
			if i == 3 {
				wantMessage(t, ctx, s, "kv")
			}
			d := wantNotice[*Disconnected](t, ctx, s)
			if d.RetryIn < full/2 || d.RetryIn > full {
				t.Errorf("pause %d is %v, want %v to %v", i, d.RetryIn, full/2, full)
			}
		}
	})
}

// A caller whose context is shorter than the pauses does not dial more often.
func TestShortContextsKeepThePace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dials := 0
		s := mustDialSub(t, Options{
			Endpoint: pipeEndpoint, Topics: everything,
			Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
				dials++
				<-ctx.Done()
				return nil, ctx.Err()
			},
		})
		for range 10_000 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			_, err := s.Recv(ctx)
			cancel()
			wantErr(t, err, context.DeadlineExceeded)
		}
		if dials < 50 || dials > 101 {
			t.Errorf("%d dials in 10 s, want at most one each 100 ms", dials)
		}
	})
}

func TestHandshakeTimeout(t *testing.T) {
	for _, tc := range []struct {
		name, about string
		script      func(*rawPeer)
	}{
		{"mute", "sent no greeting; is this a ZeroMQ port?", func(p *rawPeer) { p.untilClosed() }},
		{"deaf", "sent no greeting", func(p *rawPeer) { p.sleep(time.Hour) }},
		{"half a greeting", "sent half a greeting", func(p *rawPeer) { p.read(64); p.send(peerGreeting()[:40]); p.untilClosed() }},
		{"no READY", "greeted and sent no READY", func(p *rawPeer) { p.read(64); p.send(peerGreeting()); p.untilClosed() }},
		{"drips", "sent half a greeting", func(p *rawPeer) {
			p.read(64)
			for _, b := range peerGreeting() {
				p.send([]byte{b})
				p.sleep(time.Second)
			}
		}},
		{"takes no subscriptions", "takes no subscriptions", func(p *rawPeer) {
			p.read(64)
			p.send(peerGreeting())
			p.frame()
			p.send(peerReady("PUB"))
			p.sleep(time.Hour)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := mustDialSub(t, Options{Endpoint: pipeEndpoint, Topics: everything, HandshakeTimeout: 7 * time.Second, Dial: pipeDial(t, tc.script)})
				start := time.Now()
				f := wantNotice[*ConnectFailed](t, t.Context(), s)
				wantErr(t, f, ErrHandshakeTimeout)
				if took := time.Since(start); took != 7*time.Second {
					t.Errorf("took %v, want 7s", took)
				}
				if !strings.Contains(f.Error(), tc.about) {
					t.Errorf("error %q, want one about %q", f, tc.about)
				}
			})
		})
	}
}

var heartbeat = Options{Endpoint: pipeEndpoint, Topics: everything, HeartbeatInterval: 10 * time.Second, HeartbeatTimeout: 4 * time.Second}

func TestHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ping := []byte("\x04\x07\x04PING\x00\x00")
		start := time.Now()
		at := func(want time.Duration) {
			if got := time.Since(start); got != want {
				t.Errorf("at %v, want %v", got, want)
			}
		}
		o := heartbeat
		o.Dial = pipeDial(t, func(p *rawPeer) {
			p.hello("PUB", "")
			p.expect(ping)
			at(10 * time.Second)
			p.sleep(3 * time.Second)
			p.send(peerCommand("PONG", ""))
			// Any byte is a sign of life, also one of half a message.
			p.sleep(9 * time.Second)
			p.send([]byte("\x00\x02"))
			p.sleep(9 * time.Second)
			p.send([]byte("kv"))
			p.expect(ping)
			at(41 * time.Second)
			p.untilClosed()
		})
		s := mustDialSub(t, o)
		wantNotice[*Connected](t, t.Context(), s)
		wantMessage(t, t.Context(), s, "kv")
		at(31 * time.Second)
		wantErr(t, wantNotice[*Disconnected](t, t.Context(), s), ErrSilent)
		at(45 * time.Second)
	})
}

// Silence is no fault of a peer that nobody listened to.
func TestHeartbeatAfterAStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := heartbeat
		o.Dial = pipeDial(t, func(p *rawPeer) {
			p.hello("PUB", "")
			p.frame() // our PING
			p.sleep(2 * time.Second)
			p.send(peerCommand("PONG", "")) // waits until the client reads
			p.send(peerMessage("kv"))
			p.untilClosed()
		})
		s := mustDialSub(t, o)
		wantNotice[*Connected](t, t.Context(), s)
		ctx, cancel := context.WithTimeout(t.Context(), 11*time.Second)
		defer cancel()
		_, err := s.Recv(ctx)
		wantErr(t, err, context.DeadlineExceeded)
		time.Sleep(time.Hour)
		wantMessage(t, t.Context(), s, "kv")
	})
}

func TestHeartbeatsOffWaitForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mustDialSub(t, Options{Endpoint: pipeEndpoint, Topics: everything, Dial: pipeDial(t, func(p *rawPeer) {
			p.hello("PUB", "")
			p.sleep(1000 * time.Hour)
			p.send(peerMessage("kv"))
			p.untilClosed()
		})})
		wantNotice[*Connected](t, t.Context(), s)
		wantMessage(t, t.Context(), s, "kv")
	})
}

// A peer that floods PINGs and reads no PONG is dropped.
func TestPongIsNotTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mustDialSub(t, Options{Endpoint: pipeEndpoint, Topics: everything, WriteTimeout: 3 * time.Second, Dial: pipeDial(t, func(p *rawPeer) {
			p.hello("PUB", "")
			p.send(peerCommand("PING", "\x00\x00"))
			p.sleep(time.Hour)
		})})
		wantNotice[*Connected](t, t.Context(), s)
		start := time.Now()
		wantErr(t, wantNotice[*Disconnected](t, t.Context(), s), ErrNotReading)
		if took := time.Since(start); took != 3*time.Second {
			t.Errorf("took %v, want 3s", took)
		}
	})
}

// Canceled receives lose nothing, wherever in a message they are cut: each
// byte is followed by the end of a context.
func TestCancelLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		large := strings.Repeat("x", 40_000)
		first := peerMessage("kv", "payload", "")
		ping := peerCommand("PING", "\x00\x00ctx")
		third := peerMessage(large)
		cancels := make(chan context.CancelFunc)
		s := mustDialSub(t, Options{Endpoint: pipeEndpoint, Topics: everything, Dial: pipeDial(t, func(p *rawPeer) {
			p.hello("PUB", "")
			// The byte is taken when send returns, so the cancel comes after it.
			cut := func(b []byte, n int) {
				for len(b) > 0 {
					cancel := <-cancels
					p.send(b[:min(n, len(b))])
					cancel()
					b = b[min(n, len(b)):]
				}
			}
			cut(first, 1)
			cut(ping[:len(ping)-1], 1)
			cancel := <-cancels
			p.send(ping[len(ping)-1:])
			p.expect(peerCommand("PONG", "ctx"))
			cancel()
			cut(peerMessage(large[:300]), 1)
			cut(third, 10_000)
			p.untilClosed()
		})})
		wantNotice[*Connected](t, t.Context(), s)
		var got [][]string
		canceled := 0
		for len(got) < 3 {
			ctx, cancel := context.WithCancel(t.Context())
			cancels <- cancel
			frames, err := s.Recv(ctx)
			switch {
			case err == nil:
				got = append(got, toStrings(frames))
			case errors.Is(err, context.Canceled):
				canceled++
			default:
				t.Fatal(err)
			}
			cancel()
		}
		if !equal(got[0], []string{"kv", "payload", ""}) || !equal(got[1], []string{large[:300]}) || !equal(got[2], []string{large}) {
			t.Errorf("got %.300q", got)
		}
		if canceled < 300 {
			t.Errorf("%d receives were canceled; the test wants one for nearly each byte", canceled)
		}
	})
}

// A PONG that is due when the context ends is written by the next Recv.
func TestCanceledPongIsWrittenLater(t *testing.T) {
	data := append(peerCommand("PING", "\x00\x00ctx"), peerMessage("kv")...)
	nc := &memConn{data: data, chunk: len(data)}
	c := newConn(1, nc, fuzzOptions)
	c.dec.handshaking = false
	first, cancel := context.WithCancel(context.Background())
	defer cancel()
	c.watchContext(first)
	c.cancel(c.watch)
	_, err := c.next(true)
	wantErr(t, err, errCanceled)
	if nc.written.Len() != 0 {
		t.Errorf("wrote %q after the context had ended", nc.written.Bytes())
	}
	c.watchContext(context.Background())
	frames, err := c.next(true)
	if err != nil || !equal(toStrings(frames), []string{"kv"}) {
		t.Fatalf("next = %q, %v", frames, err)
	}
	if want := string(peerCommand("PONG", "ctx")); nc.written.String() != want {
		t.Errorf("wrote %q, want %q", nc.written.String(), want)
	}
}

// A heartbeat's deadline does not replace the one that a cancel has set.
func TestHeartbeatRespectsCancel(t *testing.T) {
	o := *fuzzOptions
	o.HeartbeatInterval, o.HeartbeatTimeout = time.Second, time.Second
	c := newConn(1, &memConn{chunk: 1}, &o)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c.watchContext(ctx)
	c.cancel(c.watch)
	_, err := c.next(true)
	wantErr(t, err, errCanceled)
}

// afterFuncContext counts what waits for its end.
type afterFuncContext struct {
	context.Context
	done    chan struct{}
	waiting int
}

func (c *afterFuncContext) Done() <-chan struct{} { return c.done }

func (c *afterFuncContext) AfterFunc(func()) (stop func() bool) {
	c.waiting++
	return func() bool { c.waiting--; return true }
}

// A socket lets go of the contexts it no longer watches: they may live long.
func TestContextsAreLetGo(t *testing.T) {
	stream := []byte(strings.Repeat(string(peerMessage("kv")), 3))
	s := mustDialSub(t, Options{Endpoint: startPeer(t, func(p *rawPeer) {
		p.hello("PUB", "")
		p.send(stream)
		p.untilClosed()
	}), Topics: everything})
	wantNotice[*Connected](t, testContext(t), s)
	contexts := make([]*afterFuncContext, 3)
	for i := range contexts {
		contexts[i] = &afterFuncContext{Context: context.Background(), done: make(chan struct{})}
		wantMessage(t, contexts[i], s, "kv")
		for j, c := range contexts[:i] {
			if c.waiting != 0 {
				t.Errorf("context %d is still watched with context %d", j, i)
			}
		}
	}
	if contexts[2].waiting != 1 {
		t.Errorf("the current context is watched %d times, want once", contexts[2].waiting)
	}
	s.Close()
	if contexts[2].waiting != 0 {
		t.Error("the last context is still watched after Close")
	}
}

// A context that ended earlier must not disturb a Recv with another one.
func TestLateCancelIsIgnored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s := mustDialSub(t, Options{Endpoint: pipeEndpoint, Topics: everything, Dial: pipeDial(t, func(p *rawPeer) {
			p.hello("PUB", "")
			p.send(peerMessage("1"))
			<-release
			p.send(peerMessage("2"))
			p.untilClosed()
		})})
		wantNotice[*Connected](t, t.Context(), s)
		first, cancelFirst := context.WithCancel(context.Background())
		wantMessage(t, first, s, "1")
		got := make(chan error)
		second, cancelSecond := context.WithCancel(context.Background())
		defer cancelSecond()
		go func() {
			frames, err := s.Recv(second)
			if err == nil && string(frames[0]) != "2" {
				err = errors.New("wrong message")
			}
			got <- err
		}()
		synctest.Wait()
		cancelFirst()
		s.dialer.conn.cancel(1) // as if it ran late
		synctest.Wait()
		close(release)
		if err := <-got; err != nil {
			t.Error(err)
		}
	})
}

// Close ends a Recv at every stage, in no time.
func TestCloseIsImmediate(t *testing.T) {
	hang := func(context.Context, string, string) (net.Conn, error) { return nil, errNoRoute }
	for _, tc := range []struct {
		name string
		dial func(t *testing.T) func(context.Context, string, string) (net.Conn, error)
		skip int // notices before the Recv that hangs
	}{
		{"dialing", func(*testing.T) func(context.Context, string, string) (net.Conn, error) {
			return func(ctx context.Context, _, _ string) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() }
		}, 0},
		{"backing off", func(*testing.T) func(context.Context, string, string) (net.Conn, error) { return hang }, 1},
		{"greeting", func(t *testing.T) func(context.Context, string, string) (net.Conn, error) {
			return pipeDial(t, func(p *rawPeer) { p.sleep(time.Hour) })
		}, 0},
		{"waiting for READY", func(t *testing.T) func(context.Context, string, string) (net.Conn, error) {
			return pipeDial(t, func(p *rawPeer) { p.read(64); p.send(peerGreeting()); p.untilClosed() })
		}, 0},
		{"receiving", func(t *testing.T) func(context.Context, string, string) (net.Conn, error) {
			return pipeDial(t, func(p *rawPeer) { p.hello("PUB", ""); p.untilClosed() })
		}, 1},
		{"writing a PONG", func(t *testing.T) func(context.Context, string, string) (net.Conn, error) {
			return pipeDial(t, func(p *rawPeer) {
				p.hello("PUB", "")
				p.send(peerCommand("PING", "\x00\x00"))
				p.sleep(time.Hour)
			})
		}, 1},
	} {
		for _, by := range []string{"Close", "context"} {
			t.Run(tc.name+" by "+by, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := mustDialSub(t, Options{Endpoint: pipeEndpoint, Topics: everything, Dial: tc.dial(t)})
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					for range tc.skip {
						if _, err := s.Recv(ctx); !IsNotice(err) {
							t.Fatalf("Recv: %v, want a notice", err)
						}
					}
					got := make(chan error)
					go func() {
						_, err := s.Recv(ctx)
						got <- err
					}()
					synctest.Wait()
					start := time.Now()
					if by == "Close" {
						s.Close()
						wantErr(t, <-got, ErrClosed)
					} else {
						cancel()
						if err := <-got; !errors.Is(err, context.Canceled) && !errors.Is(err, ErrNotReading) {
							t.Errorf("Recv: %v", err)
						}
					}
					if took := time.Since(start); took != 0 {
						t.Errorf("took %v", took)
					}
				})
			})
		}
	}
}
