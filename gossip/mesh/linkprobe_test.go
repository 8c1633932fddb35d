package mesh

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// The way between two members is measured once per token, within its bounds, and
// gossip goes on beside it.
func TestLinkProbe(t *testing.T) {
	t.Parallel()
	a := newNode(t, nodeOptions{name: "a"})
	b := newNode(t, nodeOptions{name: "b", join: []string{a.addr()}})
	a.waitFor("b", StatusAlive)
	b.waitFor("a", StatusAlive)
	limits := ProbeLimits{Bytes: 5<<20 + 3, Time: MaxProbeTime}
	token := ProbeToken{1, 2, 3}
	// What did not come is given up for the next one.
	for _, expected := range []ProbeToken{{9}, token} {
		if err := b.ExpectProbe(expected, limits); err != nil {
			t.Fatal(err)
		}
	}
	in, out := b.counts.bytesIn.Load(), a.counts.bytesOut.Load()
	p, err := a.ProbeTo(t.Context(), "b", token, limits)
	if err != nil || p.Bytes != limits.Bytes || p.Took <= 0 || p.Answer <= 0 {
		t.Fatalf("%+v, %v", p, err)
	}
	if b.counts.bytesIn.Load()-in < uint64(p.Bytes) || a.counts.bytesOut.Load()-out < uint64(p.Bytes) {
		t.Error("its bytes are not counted")
	}
	// The token was good once.
	if _, err := a.ProbeTo(t.Context(), "b", token, limits); err == nil || !strings.Contains(err.Error(), "did not let the probe in") {
		t.Errorf("the same token again: %v", err)
	}
	// Time bounds a probe as well as bytes do.
	eventually(t, "b is free", func() bool {
		return b.ExpectProbe(ProbeToken{4}, ProbeLimits{MaxProbeBytes, 50 * time.Millisecond}) == nil
	})
	if p, err = a.ProbeTo(t.Context(), "b", ProbeToken{4}, ProbeLimits{MaxProbeBytes, 50 * time.Millisecond}); err != nil || p.Bytes < 1 || p.Bytes >= MaxProbeBytes {
		t.Errorf("bounded by time: %+v, %v", p, err)
	}
	for _, bad := range []ProbeLimits{{}, {0, time.Second}, {MaxProbeBytes + 1, time.Second}, {1, 0}, {1, MaxProbeTime + 1}} {
		if err := b.ExpectProbe(token, bad); !errors.Is(err, ErrProbeLimits) {
			t.Errorf("%+v is expected: %v", bad, err)
		}
		if _, err := a.ProbeTo(t.Context(), "b", token, bad); !errors.Is(err, ErrProbeLimits) {
			t.Errorf("%+v is sent: %v", bad, err)
		}
	}
	for _, nobody := range []string{"c", "a", ""} {
		if _, err := a.ProbeTo(t.Context(), nobody, token, limits); err == nil || !strings.Contains(err.Error(), "is alive here") {
			t.Errorf("to %q: %v", nobody, err)
		}
	}
	if a.member("b").Status != StatusAlive || b.member("a").Status != StatusAlive {
		t.Error("they lost each other")
	}
}

// Strangers get nothing: a wrong token ends the stream at once, one that says
// nothing ends with the mesh, and a sender that gives up leaves nothing behind.
func TestLinkProbeStrangers(t *testing.T) {
	t.Parallel()
	a := newNode(t, nodeOptions{name: "a"})
	b := newNode(t, nodeOptions{name: "b", join: []string{a.addr()}})
	a.waitFor("b", StatusAlive)
	b.waitFor("a", StatusAlive)
	if err := b.ExpectProbe(ProbeToken{7}, ProbeLimits{MaxProbeBytes, MaxProbeTime}); err != nil {
		t.Fatal(err)
	}
	dial := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", b.addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	wrong := dial()
	if _, err := wrong.Write(append([]byte{probePreface}, make([]byte, 16)...)); err != nil {
		t.Fatal(err)
	}
	if answer, _ := io.ReadAll(wrong); len(answer) > 0 { // the stream may be reset
		t.Errorf("a wrong token is answered with %x", answer)
	}
	if b.counts.droppedFor("stream_limit") == 0 {
		t.Error("it is not counted")
	}
	silent, half := dial(), dial()
	if _, err := half.Write([]byte{probePreface, 7}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := a.ProbeTo(ctx, "b", ProbeToken{7}, ProbeLimits{MaxProbeBytes, MaxProbeTime})
		done <- err
	}()
	in := b.counts.bytesIn.Load()
	eventually(t, "the probe runs", func() bool { return b.counts.bytesIn.Load()-in > 1<<20 })
	// Each takes part in one at a time.
	for _, n := range []*testNode{a, b} {
		if err := n.ExpectProbe(ProbeToken{6}, ProbeLimits{1, time.Second}); !errors.Is(err, ErrProbeBusy) {
			t.Errorf("%s expects another one: %v", n.opts.Name, err)
		}
	}
	if _, err := b.ProbeTo(t.Context(), "a", ProbeToken{6}, ProbeLimits{1, time.Second}); !errors.Is(err, ErrProbeBusy) {
		t.Errorf("b sends another one: %v", err)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	eventually(t, "b is free again", func() bool { return b.ExpectProbe(ProbeToken{8}, ProbeLimits{1, time.Second}) == nil })
	if err := b.Stop(); err != nil {
		t.Error(err)
	}
	for _, c := range []net.Conn{silent, half} {
		if _, err := io.ReadAll(c); err != nil && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "reset") {
			t.Errorf("a stranger's stream: %v", err)
		}
	}
	late, _ := net.Pipe()
	defer late.Close()
	if b.transport.admit(late) != nil {
		t.Error("a stream is let in after the end")
	}
}
