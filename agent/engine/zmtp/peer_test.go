package zmtp

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// testTimeout only keeps a broken test from hanging.
const testTimeout = 60 * time.Second

// exchange is one line of the transcript.
type exchange struct {
	fromClient bool
	bytes      []byte
}

// readTranscript returns the sections of testdata/transcript.txt.
func readTranscript(t testing.TB) map[string][]exchange {
	t.Helper()
	text, err := os.ReadFile("testdata/transcript.txt")
	if err != nil {
		t.Fatal(err)
	}
	defs := map[string]string{}
	sections := map[string][]exchange{}
	section := ""
	for _, line := range strings.Split(string(text), "\n") {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 0 || fields[0] == "#":
		case fields[0] == "def":
			defs["{"+fields[1]+"}"] = fields[2]
		case strings.HasPrefix(line, "["):
			section = strings.Trim(line, "[]")
		default:
			e := exchange{fromClient: fields[0] == "C"}
			for _, f := range fields[1:] {
				e.bytes = append(e.bytes, unhex(t, f, defs)...)
			}
			sections[section] = append(sections[section], e)
		}
	}
	return sections
}

func unhex(t testing.TB, s string, defs map[string]string) []byte {
	t.Helper()
	if d, ok := defs[s]; ok {
		s = d
	}
	s, count, repeated := strings.Cut(s, "*")
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatalf("transcript: %q: %v", s, err)
	}
	if repeated {
		n, err := strconv.Atoi(count)
		if err != nil {
			t.Fatalf("transcript: %q: %v", count, err)
		}
		b = bytes.Repeat(b, n)
	}
	return b
}

// The peer's half of the handshake, spelled out from the transcript and not
// by the code under test.
func peerGreeting() []byte {
	g := make([]byte, 64)
	g[0], g[8], g[9], g[10], g[11] = 0xff, 1, 0x7f, 3, 1
	copy(g[12:], "NULL")
	return g
}

func peerReady(socketType string) []byte {
	b := []byte("\x05READY\x0bSocket-Type")
	b = binary.BigEndian.AppendUint32(b, uint32(len(socketType)))
	b = append(b, socketType...)
	return append([]byte{4, byte(len(b))}, b...)
}

// peerMessage encodes a message of short and long frames.
func peerMessage(frames ...string) []byte {
	var b []byte
	for i, f := range frames {
		flags := byte(1)
		if i == len(frames)-1 {
			flags = 0
		}
		if len(f) > 255 {
			b = append(b, flags|2)
			b = binary.BigEndian.AppendUint64(b, uint64(len(f)))
		} else {
			b = append(b, flags, byte(len(f)))
		}
		b = append(b, f...)
	}
	return b
}

func peerCommand(name, data string) []byte {
	body := string(rune(len(name))) + name + data
	return append([]byte{4, byte(len(body))}, body...)
}

// rawPeer is the other end of a connection. Its methods run on the peer's
// goroutine and report failures there.
type rawPeer struct {
	t  testing.TB
	nc net.Conn
}

// errPeer unwinds a peer's script after a failure.
type errPeer struct{ err error }

func (p *rawPeer) send(b []byte) {
	if _, err := p.nc.Write(b); err != nil {
		panic(errPeer{err})
	}
}

func (p *rawPeer) read(n int) []byte {
	b := make([]byte, n)
	if _, err := io.ReadFull(p.nc, b); err != nil {
		panic(errPeer{err})
	}
	return b
}

// expect reads exactly want.
func (p *rawPeer) expect(want []byte) {
	if got := p.read(len(want)); !bytes.Equal(got, want) {
		p.t.Errorf("client sent %x, want %x", got, want)
	}
}

// frame reads one short frame.
func (p *rawPeer) frame() (flags byte, body []byte) {
	h := p.read(2)
	return h[0], p.read(int(h[1]))
}

// hello does the handshake with a SUB that has the given topics.
func (p *rawPeer) hello(socketType string, topics ...string) {
	p.read(64)
	p.send(peerGreeting())
	p.frame()
	p.send(peerReady(socketType))
	for _, topic := range topics {
		p.expect(append([]byte{0, byte(1 + len(topic)), 1}, topic...))
	}
}

// sleep waits d or until the test ends.
func (p *rawPeer) sleep(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.t.Context().Done():
		panic(errPeer{p.t.Context().Err()})
	}
}

// untilClosed reads and drops until the client closes.
func (p *rawPeer) untilClosed() {
	_, _ = io.Copy(io.Discard, p.nc)
}

// run runs a script and closes the connection; a script cut short by the
// connection's end is fine, what it checked is reported by expect.
func (p *rawPeer) run(script func(*rawPeer)) {
	defer p.nc.Close()
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(errPeer); !ok {
				panic(r)
			}
		}
	}()
	script(p)
}

// startPeer serves connections on loopback, the n-th with the n-th script and
// later ones with the last, and returns the endpoint.
func startPeer(t testing.TB, scripts ...func(*rawPeer)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	wg.Go(func() {
		for i := 0; ; i++ {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, nc)
			mu.Unlock()
			script := scripts[min(i, len(scripts)-1)]
			wg.Go(func() { (&rawPeer{t, nc}).run(script) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		mu.Lock()
		for _, nc := range open {
			nc.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return "tcp://" + ln.Addr().String()
}

// pipeDial is an Options.Dial whose n-th connection runs the n-th script, for
// tests on a fake clock.
func pipeDial(t testing.TB, scripts ...func(*rawPeer)) func(context.Context, string, string) (net.Conn, error) {
	i := 0
	return func(context.Context, string, string) (net.Conn, error) {
		script := scripts[min(i, len(scripts)-1)]
		i++
		ours, theirs := net.Pipe()
		go (&rawPeer{t, theirs}).run(script)
		return ours, nil
	}
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	t.Cleanup(cancel)
	return ctx
}

func mustDialSub(t testing.TB, o Options) *Sub {
	t.Helper()
	s, err := DialSub(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func mustListenSub(t testing.TB, o Options) *Sub {
	t.Helper()
	s, err := ListenSub(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func mustDialDealer(t testing.TB, o Options) *Dealer {
	t.Helper()
	d, err := DialDealer(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// receiver is what Sub and Dealer share.
type receiver interface {
	Recv(context.Context) ([][]byte, error)
}

func wantMessage(t testing.TB, ctx context.Context, r receiver, want ...string) {
	t.Helper()
	frames, err := r.Recv(ctx)
	if err != nil {
		t.Fatalf("Recv: %v, want message %q", err, want)
	}
	if got := toStrings(frames); !equal(got, want) {
		t.Fatalf("Recv = %.200q, want %.200q", got, want)
	}
}

func wantNotice[E error](t testing.TB, ctx context.Context, r receiver) E {
	t.Helper()
	frames, err := r.Recv(ctx)
	var e E
	if !errors.As(err, &e) {
		t.Fatalf("Recv = %.200q, %v, want a %T", frames, err, e)
	}
	if !IsNotice(err) {
		t.Errorf("IsNotice(%v) = false", err)
	}
	return e
}

func wantErr(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

func toStrings(frames [][]byte) []string {
	var s []string
	for _, f := range frames {
		s = append(s, string(f))
	}
	return s
}

func equal(a, b []string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}
