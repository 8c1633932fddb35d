package zmtp

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = time.Minute

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

func newPub(t *testing.T, highWater int) (*Pub, string) {
	p := NewPub(highWater, nil)
	ln := listen(t)
	p.Serve(ln)
	t.Cleanup(p.Close)
	return p, ln.Addr().String()
}

// peer is a raw client; the test writes and reads bytes.
type peer struct {
	t *testing.T
	c net.Conn
	r *bufio.Reader
}

func dial(t *testing.T, address string) *peer {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return wrap(t, c)
}

func wrap(t *testing.T, c net.Conn) *peer {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return &peer{t, c, bufio.NewReader(c)}
}

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

func (p *peer) write(hexBytes string) {
	p.t.Helper()
	if _, err := p.c.Write(unhex(hexBytes)); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) expect(what, hexBytes string) {
	p.t.Helper()
	want := unhex(hexBytes)
	got := make([]byte, len(want))
	if n, err := io.ReadFull(p.r, got); err != nil {
		p.t.Fatalf("%s: after %x: %v", what, got[:n], err)
	}
	if !bytes.Equal(got, want) {
		p.t.Fatalf("%s: got %x, want %x", what, got, want)
	}
}

// expectClosed reads whatever comes until the other side closes.
func (p *peer) expectClosed() {
	p.t.Helper()
	if _, err := io.Copy(io.Discard, p.r); errors.Is(err, os.ErrDeadlineExceeded) {
		p.t.Fatal("the connection stays open")
	}
}

const (
	clientGreeting = "ff0000000000000000 7f 0300 4e554c4c 00000000000000000000000000000000 00 00000000000000000000000000000000000000000000000000000000000000"
	serverGreeting = "ff0000000000000001 7f 0301 4e554c4c 00000000000000000000000000000000 00 00000000000000000000000000000000000000000000000000000000000000"
	readySub       = "04 19 055245414459 0b536f636b65742d54797065 00000003 535542"
	readyPub       = "04 19 055245414459 0b536f636b65742d54797065 00000003 505542"
	readyDealer    = "04 29 055245414459 0b536f636b65742d54797065 00000006 4445414c4552 084964656e74697479 00000000"
	readyRouter    = "04 29 055245414459 0b536f636b65742d54797065 00000006 524f55544552 084964656e74697479 00000000"
)

func (p *peer) shake(ready, answer string) {
	p.t.Helper()
	p.write(clientGreeting)
	p.expect("greeting", serverGreeting)
	p.write(ready)
	p.expect("READY", answer)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// The bytes are those that libzmq and a real publisher exchanged.
func TestPubTranscript(t *testing.T) {
	pub, address := newPub(t, 100)
	p := dial(t, address)
	p.shake(readySub, readyPub)
	pub.Send([]byte("kv@node1"), make([]byte, 8), []byte("lost"))
	p.write("00 04 01 6b7640") // subscribe to kv@
	eventually(t, "subscribed", func() bool { return pub.Subscribers() == 1 })
	pub.Send([]byte("other"), []byte("x"))
	pub.Send([]byte("kv@node1"), unhex("0000000000000001"), []byte("payload"))
	pub.Send([]byte("kv@node1"), unhex("0000000000000002"), bytes.Repeat([]byte{7}, 644))
	p.expect("short message", "01 08 6b76406e6f646531 01 08 0000000000000001 00 07 7061796c6f6164")
	p.expect("long message", "01 08 6b76406e6f646531 01 08 0000000000000002 02 0000000000000284 "+strings.Repeat("07", 644))
	p.write("00 04 00 6b7640") // unsubscribe
	eventually(t, "unsubscribed", func() bool { return pub.Subscribers() == 0 })
}

func TestSubscribeCommands(t *testing.T) {
	pub, address := newPub(t, 100)
	p := dial(t, address)
	p.shake(readySub, readyPub)
	p.write("04 0c 09 535542534352494245 6b76") // SUBSCRIBE kv
	eventually(t, "subscribed", func() bool { return pub.Subscribers() == 1 })
	pub.Send([]byte("kv"))
	p.expect("message", "00 02 6b76")
	p.write("04 09 06 43414e43454c 6b76") // CANCEL kv
	eventually(t, "cancelled", func() bool { return pub.Subscribers() == 0 })
}

func TestPingIsAnswered(t *testing.T) {
	_, address := newPub(t, 100)
	p := dial(t, address)
	p.shake(readySub, readyPub)
	p.write("04 0a 04 50494e47 0010 616263")
	p.expect("PONG", "04 08 04 504f4e47 616263")
	router := NewRouter(func([][]byte, func(...[]byte) error) {}, nil)
	t.Cleanup(router.Close)
	ln := listen(t)
	router.Serve(ln)
	q := dial(t, ln.Addr().String())
	q.shake(readyDealer, readyRouter)
	q.write("04 07 04 50494e47 0010")
	q.expect("PONG", "04 05 04 504f4e47")
}

func TestRouterTranscript(t *testing.T) {
	router := NewRouter(func(request [][]byte, send func(...[]byte) error) {
		if len(request) != 2 {
			return // no answer, as the real one
		}
		_ = send(nil, []byte("t"), request[1], []byte("data"))
		_ = send(nil, nil, bytes.Repeat([]byte{0xff}, 8), nil)
	}, nil)
	t.Cleanup(router.Close)
	ln := listen(t)
	router.Serve(ln)
	p := dial(t, ln.Addr().String())
	p.shake(readyDealer, readyRouter)
	p.write("00 08 0000000000000009") // one frame: ignored
	p.write("01 00 00 08 0000000000000001")
	p.expect("data", "01 00 01 01 74 01 08 0000000000000001 00 04 64617461")
	p.expect("end", "01 00 01 00 01 08 ffffffffffffffff 00 00")
	router.DropConnections()
	p.expectClosed()
}

func TestSlowSubscriberLosesMessages(t *testing.T) {
	pub, address := newPub(t, 10)
	slow, quick := dial(t, address), dial(t, address)
	for _, p := range []*peer{slow, quick} {
		p.shake(readySub, readyPub)
		p.write("00 01 01")
	}
	eventually(t, "subscribed", func() bool { return pub.Subscribers() == 2 })
	payload := make([]byte, 256<<10)
	var received atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			if n, err := io.CopyN(io.Discard, quick.r, int64(len(payload))+9); n != int64(len(payload))+9 || err != nil {
				return
			}
			received.Add(1)
		}
	}()
	for i := range int64(300) {
		pub.Send(payload)
		eventually(t, "the quick one receives", func() bool { return received.Load() == i+1 })
	}
	if pub.Dropped() == 0 {
		t.Error("nothing was dropped for a subscriber that does not read")
	}
	quick.c.Close()
	<-done
}

func TestStrangersAreCutOff(t *testing.T) {
	pub, address := newPub(t, 10)
	good := dial(t, address)
	good.shake(readySub, readyPub)
	good.write("00 01 01")
	eventually(t, "subscribed", func() bool { return pub.Subscribers() == 1 })
	for name, bytes := range map[string]string{
		"HTTP":                  hex.EncodeToString([]byte("GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a-stranger-with-more-than-64-bytes\r\n\r\n")),
		"version 2":             strings.Replace(clientGreeting, "0300", "0200", 1),
		"mechanism PLAIN":       strings.Replace(clientGreeting, "4e554c4c", "504c4149", 1),
		"message before READY":  clientGreeting + "00 01 01",
		"another socket type":   clientGreeting + readyDealer,
		"a frame of 2^62 bytes": clientGreeting + readySub + "02 4000000000000000",
		"unknown flags":         clientGreeting + readySub + "f0 00",
		"command with more":     clientGreeting + readySub + "05 01 00",
		"command in a message":  clientGreeting + readySub + "01 01 00 04 01 00",
		"nameless command":      clientGreeting + readySub + "04 00",
		"17 frames":             clientGreeting + readySub + strings.Repeat("01 00", 17),
		"long PING":             clientGreeting + readySub + "04 22 04 50494e47" + strings.Repeat("00", 29),
		"1025 subscriptions":    clientGreeting + readySub + subscriptions(1025),
	} {
		t.Run(name, func(t *testing.T) {
			p := dial(t, address)
			p.write(bytes)
			p.expectClosed()
		})
	}
	eventually(t, "only the good one is left", func() bool { return pub.Subscribers() == 1 })
	pub.Send([]byte("x"))
	good.expect("message", "00 01 78")
}

func subscriptions(n int) string {
	var b []byte
	for i := range n {
		b = appendMessage(b, []byte{1, byte(i >> 8), byte(i)})
	}
	return hex.EncodeToString(b)
}

func TestDialingPub(t *testing.T) {
	ln := listen(t)
	defer ln.Close()
	pub := NewPub(10, nil)
	t.Cleanup(pub.Close)
	pub.Dial(ln.Addr().String())
	for range 2 { // it comes back after the first connection has ended
		c, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		p := wrap(t, c)
		p.shake(readySub, readyPub)
		p.write("00 01 01")
		eventually(t, "subscribed", func() bool { return pub.Subscribers() == 1 })
		pub.Send([]byte("x"))
		p.expect("message", "00 01 78")
		c.Close()
		eventually(t, "gone", func() bool { return pub.Subscribers() == 0 })
	}
}

func FuzzReadMessage(f *testing.F) {
	f.Add(unhex("00 04 01 6b7640"))
	f.Add(unhex("01 00 00 08 0000000000000001"))
	f.Add(unhex("04 0a 04 50494e47 0010 616263"))
	f.Add(unhex("02 4000000000000000"))
	f.Add(unhex(readySub))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := readMessage(bytes.NewReader(b))
		if err != nil {
			return
		}
		size := 0
		for _, x := range m.frames {
			size += len(x)
		}
		if len(m.frames) > maxMessageFrames || size > maxMessageBytes || size > len(b) {
			t.Fatalf("%d frames, %d bytes", len(m.frames), size)
		}
		if m.command {
			name, body, err := splitCommand(m.frames[0])
			if err != nil {
				return
			}
			if len(name)+len(body)+1 != len(m.frames[0]) {
				t.Fatal("a command lost bytes")
			}
			_, _ = properties(body)
			if _, err := pong(body); err == nil && len(body) > 2+maxPingContext {
				t.Fatal("a long PING is answered")
			}
			s := &subscriber{topics: make(map[string]int), limit: 1, wake: make(chan struct{}, 1)}
			_ = s.handle(m)
			return
		}
		again, err := readMessage(bytes.NewReader(appendMessage(nil, m.frames...)))
		if err != nil || len(again.frames) != len(m.frames) {
			t.Fatalf("the message does not survive: %v", err)
		}
		for i := range m.frames {
			if !bytes.Equal(again.frames[i], m.frames[i]) {
				t.Fatalf("frame %d changed", i)
			}
		}
	})
}

func FuzzHandshake(f *testing.F) {
	f.Add(unhex(clientGreeting + readySub))
	f.Add(unhex(clientGreeting + readyDealer))
	f.Add(unhex(strings.Replace(clientGreeting, "0300", "0200", 1)))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := newServer("PUB", []string{"SUB", "XSUB"}, nil)
		defer s.Close()
		r := bytes.NewReader(b)
		if readGreeting(r) != nil {
			return
		}
		if m, err := readMessage(r); err == nil && s.checkReady(m) == nil && !bytes.Contains(b, []byte("SUB")) {
			t.Fatal("a peer that is no subscriber was accepted")
		}
	})
}

func BenchmarkSend(b *testing.B) {
	pub := NewPub(1<<20, nil)
	defer pub.Close()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	pub.Serve(ln)
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(unhex(clientGreeting + readySub + "00 01 01")); err != nil {
		b.Fatal(err)
	}
	for pub.Subscribers() == 0 {
		time.Sleep(time.Millisecond)
	}
	read := make(chan struct{})
	payload := make([]byte, 200)
	total := int64(0)
	go func() {
		defer close(read)
		_, _ = io.Copy(io.Discard, c)
	}()
	b.ReportAllocs()
	for b.Loop() {
		pub.Send([]byte("kv@node1"), []byte("12345678"), payload)
		total++
	}
	b.ReportMetric(float64(pub.Dropped())/float64(total), "dropped/msg")
	c.Close()
	<-read
}
