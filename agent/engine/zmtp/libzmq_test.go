package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// pythonEnv names an interpreter with pyzmq. Where it is set, a missing pyzmq
// is a failure and no reason to skip.
const pythonEnv = "WAYPOST_PYTHON"

var importZMQ = sync.OnceValue(func() error { return exec.Command("python3", "-c", "import zmq").Run() })

// zmqPeer is a process with a socket of the real libzmq.
type zmqPeer struct {
	t     testing.TB
	stdin *json.Encoder
	out   *bufio.Reader
}

func startZMQ(t testing.TB) *zmqPeer {
	t.Helper()
	python := os.Getenv(pythonEnv)
	if python == "" {
		python = "python3"
		if err := importZMQ(); err != nil {
			t.Skipf("needs python3 with pyzmq: pip install pyzmq, and set %s to that interpreter (%v)", pythonEnv, err)
		}
	}
	cmd := exec.Command(python, "testdata/zmqpeer.py")
	stderr := &bytes.Buffer{}
	cmd.Stderr = stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	watchdog := time.AfterFunc(testTimeout, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("zmqpeer.py: %v\n%s", err, stderr)
		}
		watchdog.Stop()
	})
	p := &zmqPeer{t, json.NewEncoder(stdin), bufio.NewReader(stdout)}
	t.Logf("%s", p.line())
	return p
}

func (p *zmqPeer) line() []byte {
	p.t.Helper()
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		p.t.Fatalf("zmqpeer.py ended: %v", err)
	}
	return bytes.TrimSpace(line)
}

type args map[string]any

// start gives a command; result waits for its answer.
func (p *zmqPeer) start(do string, a args) {
	p.t.Helper()
	command := args{"do": do}
	for k, v := range a {
		command[k] = v
	}
	if err := p.stdin.Encode(command); err != nil {
		p.t.Fatal(err)
	}
}

func (p *zmqPeer) result() any {
	p.t.Helper()
	var answer struct{ Result any }
	if err := json.Unmarshal(p.line(), &answer); err != nil {
		p.t.Fatal(err)
	}
	return answer.Result
}

func (p *zmqPeer) do(do string, a args) any {
	p.t.Helper()
	p.start(do, a)
	return p.result()
}

// bind opens a socket on the endpoint and returns where it is.
func (p *zmqPeer) bind(socketType, endpoint string, options args) string {
	p.t.Helper()
	return p.do("open", args{"type": socketType, "bind": endpoint, "options": options}).(string)
}

const anyPort = "tcp://127.0.0.1:*"

// nextMessage returns the next message, counting the notices before it.
func nextMessage(t testing.TB, ctx context.Context, r receiver) (frames [][]byte, notices int) {
	t.Helper()
	for {
		frames, err := r.Recv(ctx)
		if err == nil {
			return frames, notices
		}
		if !IsNotice(err) {
			t.Fatal(err)
		}
		notices++
	}
}

// warmUp lets the publisher send until a message is here: then the
// subscription is in place and nothing more can be missed.
func (p *zmqPeer) warmUp(ctx context.Context, s *Sub, topic string) {
	p.t.Helper()
	p.start("warm", args{"topic": topic})
	for {
		frames, _ := nextMessage(p.t, ctx, s)
		if string(frames[1]) == "warm" {
			return
		}
	}
}

// wantNumbered receives messages whose sequences run from first in steps.
func wantNumbered(t testing.TB, ctx context.Context, r receiver, topic string, first, step, count, payloadBytes int) {
	t.Helper()
	for i := 0; i < count; {
		frames, notices := nextMessage(t, ctx, r)
		if notices > 0 {
			t.Fatalf("%d notices before message %d of %d", notices, i, count)
		}
		if len(frames) == 3 && string(frames[1]) == "warm" {
			continue
		}
		want := uint64(first + i*step)
		if len(frames) != 3 || string(frames[0]) != topic || binary.BigEndian.Uint64(frames[1]) != want {
			t.Fatalf("message %d is %.100q, want sequence %d of %q", i, frames, want, topic)
		}
		if len(frames[2]) != payloadBytes || len(bytes.Trim(frames[2], "p")) > 0 {
			t.Fatalf("message %d has a damaged payload of %d bytes, want %d", i, len(frames[2]), payloadBytes)
		}
		i++
	}
}

func TestLibzmqPublisher(t *testing.T) {
	for _, tc := range []struct {
		socketType     string
		count, payload int
	}{
		{"PUB", 10_000, 200},
		{"XPUB", 10_000, 200},
		{"PUB", 10_000, 6000},
		{"PUB", 60, 1 << 20},
		{"PUB", 1000, 0},
	} {
		t.Run(fmt.Sprintf("%s, %d bytes", tc.socketType, tc.payload), func(t *testing.T) {
			peer := startZMQ(t)
			s := mustDialSub(t, Options{Endpoint: peer.bind(tc.socketType, anyPort, nil), Topics: []string{"kv@"}})
			ctx := testContext(t)
			peer.warmUp(ctx, s, "kv@node1")
			peer.start("publish", args{"topics": []string{"kv@node1"}, "count": tc.count, "payload": tc.payload})
			peer.result() // of warm
			wantNumbered(t, ctx, s, "kv@node1", 0, 1, tc.count, tc.payload)
			peer.result()
		})
	}
}

func TestLibzmqPublisherConnects(t *testing.T) {
	s := mustListenSub(t, Options{Endpoint: "tcp://127.0.0.1:0", Topics: []string{"kv@"}})
	endpoint := "tcp://" + s.Addr().String()
	ctx := testContext(t)
	for round := range uint64(2) {
		peer := startZMQ(t)
		peer.do("open", args{"type": "PUB", "connect": endpoint})
		peer.warmUp(ctx, s, "kv@node1")
		if s.Conn() != round+1 {
			t.Errorf("Conn = %d, want %d", s.Conn(), round+1)
		}
		peer.start("publish", args{"topics": []string{"kv@node1"}, "count": 10_000, "payload": 200})
		peer.result() // of warm
		wantNumbered(t, ctx, s, "kv@node1", 0, 1, 10_000, 200)
		peer.result()
		peer.do("close", nil)
		if d := wantNotice[*Disconnected](t, ctx, s); d.Conn != round+1 {
			t.Errorf("notice %+v", d)
		}
	}
}

func TestLibzmqTopicFilter(t *testing.T) {
	peer := startZMQ(t)
	s := mustDialSub(t, Options{Endpoint: peer.bind("PUB", anyPort, nil), Topics: []string{"kv@b", "none"}})
	ctx := testContext(t)
	peer.warmUp(ctx, s, "kv@b-1")
	peer.start("publish", args{"topics": []string{"kv@a", "kv@b-1", "load"}, "count": 3000, "payload": 100})
	peer.result() // of warm
	wantNumbered(t, ctx, s, "kv@b-1", 1, 3, 1000, 100)
	peer.result()
}

func TestLibzmqReplay(t *testing.T) {
	for name, tc := range map[string]struct {
		topic any
		parts int
	}{
		"3 frames": {nil, 3},
		"4 frames": {"kv@node1", 4},
	} {
		t.Run(name, func(t *testing.T) {
			peer := startZMQ(t)
			d := mustDialDealer(t, Options{Endpoint: peer.bind("ROUTER", anyPort, nil)})
			ctx := testContext(t)
			// Two requests on one connection.
			for _, first := range []uint64{0, 9_990} {
				if err := d.Send(ctx, nil, binary.BigEndian.AppendUint64(nil, first)); err != nil {
					t.Fatal(err)
				}
				peer.start("replay", args{"until": 10_000, "payload": 6000, "topic": tc.topic})
				for seq := first; ; seq++ {
					frames, err := d.Recv(ctx)
					if err != nil {
						t.Fatal(err)
					}
					if len(frames) != tc.parts {
						t.Fatalf("reply of %d frames, want %d", len(frames), tc.parts)
					}
					got, payload := binary.BigEndian.Uint64(frames[tc.parts-2]), frames[tc.parts-1]
					if seq == 10_000 {
						if got != 1<<64-1 || len(payload) != 0 {
							t.Fatalf("after the last reply came sequence %d with %d bytes, want the end marker", got, len(payload))
						}
						break
					}
					if got != seq || len(payload) != 6000 {
						t.Fatalf("reply with sequence %d of %d bytes, want %d of 6000", got, len(payload), seq)
					}
				}
				if got := peer.result(); got != float64(first) {
					t.Errorf("the publisher was asked for %v, want %d", got, first)
				}
			}
			if got := d.dialer.conn.id; got != 1 {
				t.Errorf("connection %d, want 1", got)
			}
		})
	}
}

func TestLibzmqPublisherRestarts(t *testing.T) {
	peer := startZMQ(t)
	endpoint := peer.bind("PUB", anyPort, nil)
	s := mustDialSub(t, Options{Endpoint: endpoint, Topics: everything, BackoffMin: time.Millisecond, BackoffMax: 50 * time.Millisecond})
	ctx := testContext(t)
	wantNotice[*Connected](t, ctx, s)
	for restart := range 5 {
		peer.warmUp(ctx, s, "kv")
		if got, want := s.Conn(), uint64(restart+1); got < want {
			t.Errorf("Conn = %d, want at least %d", got, want)
		}
		peer.start("publish", args{"topics": []string{"kv"}, "count": 100, "payload": 200})
		peer.result() // of warm
		wantNumbered(t, ctx, s, "kv", 0, 1, 100, 200)
		peer.result()
		peer.do("close", nil)
		wantNotice[*Disconnected](t, ctx, s)
		peer.bind("PUB", endpoint, nil)
		for {
			_, err := s.Recv(ctx)
			var connected *Connected
			if errors.As(err, &connected) {
				break
			}
			if !IsNotice(err) {
				t.Fatal(err)
			}
		}
	}
}

// countingConn counts commands by their name, on either way.
type countingConn struct {
	net.Conn
	read, written *atomic.Int64
	name          string
	heard         func()
}

func (c *countingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if bytes.Contains(p[:n], []byte(c.name)) {
		c.read.Add(1)
		c.heard()
	}
	return n, err
}

func (c *countingConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if bytes.Contains(p[:n], []byte(c.name)) {
		c.written.Add(1)
		c.heard()
	}
	return n, err
}

// idle receives until enough PONGs went by, in the given direction, and
// checks that the connection lived through it and still works.
func idle(t *testing.T, o Options, publisherOptions args, pongs func(read, written int64) int64) {
	t.Helper()
	peer := startZMQ(t)
	o.Endpoint, o.Topics = peer.bind("PUB", anyPort, publisherOptions), everything
	ctx := testContext(t)
	quiet, enough := context.WithCancel(ctx)
	defer enough()
	var read, written atomic.Int64
	var counting atomic.Bool
	o.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		nc, err := new(net.Dialer).DialContext(ctx, network, address)
		return &countingConn{nc, &read, &written, "\x04PONG", func() {
			if counting.Load() && pongs(read.Load(), written.Load()) >= 12 {
				enough()
			}
		}}, err
	}
	s := mustDialSub(t, o)
	peer.warmUp(ctx, s, "kv")
	// Ends the warm-up and sends a last message to drain it.
	peer.start("publish", args{"topics": []string{"last"}, "count": 1, "payload": 0})
	for {
		frames, _ := nextMessage(t, ctx, s)
		if string(frames[0]) == "last" {
			break
		}
	}
	peer.result()
	peer.result()
	counting.Store(true)
	frames, err := s.Recv(quiet)
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("idle Recv = %q, %v; want the context's end", frames, err)
	}
	peer.start("publish", args{"topics": []string{"kv"}, "count": 100, "payload": 200})
	wantNumbered(t, ctx, s, "kv", 0, 1, 100, 200)
	peer.result()
	if s.Conn() != 1 {
		t.Errorf("Conn = %d: the connection was cut", s.Conn())
	}
}

// libzmq cuts a peer that does not answer its heartbeats; 12 of them take
// four times as long as it waits.
func TestLibzmqHeartbeats(t *testing.T) {
	options := args{"HEARTBEAT_IVL": 50, "HEARTBEAT_TIMEOUT": 150, "HEARTBEAT_TTL": 200}
	idle(t, Options{}, options, func(_, written int64) int64 { return written })
}

// libzmq answers our heartbeats.
func TestLibzmqAnswersHeartbeats(t *testing.T) {
	o := Options{HeartbeatInterval: 30 * time.Millisecond, HeartbeatTimeout: 10 * time.Second}
	idle(t, o, nil, func(read, _ int64) int64 { return read })
}

// A SUB that meets the replay socket, and a DEALER that meets the live one.
func TestLibzmqWrongSocket(t *testing.T) {
	peer := startZMQ(t)
	endpoint := peer.bind("ROUTER", anyPort, nil)
	ctx := testContext(t)
	f := wantNotice[*ConnectFailed](t, ctx, mustDialSub(t, Options{Endpoint: endpoint, Topics: everything}))
	wantErr(t, f, ErrSocketType)
	if !strings.Contains(f.Error(), "replay endpoint") {
		t.Errorf("error %q", f)
	}
	peer.bind("PUB", endpoint, nil)
	d := mustDialDealer(t, Options{Endpoint: endpoint})
	for {
		err := d.Send(ctx, nil, make([]byte, 8))
		if errors.Is(err, ErrSocketType) {
			break
		}
		if !IsNotice(err) {
			t.Fatalf("Send: %v, want a wrong socket type", err)
		}
	}
}
