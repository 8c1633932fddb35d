package zmtp

import (
	"context"
	"encoding/binary"
	"io"
	"strings"
	"testing"
	"testing/synctest"
)

// router is a peer that answers requests with themselves.
func router(requests int) func(*rawPeer) {
	return func(p *rawPeer) {
		p.hello("ROUTER")
		for range requests {
			p.expect([]byte("\x01\x00\x00\x03ask"))
			p.send(peerMessage("", "answer"))
		}
	}
}

func TestDealerResendsAfterTheConnectionEnded(t *testing.T) {
	d := mustDialDealer(t, Options{Endpoint: startPeer(t, router(2)), BackoffMin: 1, BackoffMax: 1})
	ctx := testContext(t)
	_, err := d.Recv(ctx)
	wantErr(t, err, ErrNotConnected)
	if IsNotice(err) {
		t.Error("ErrNotConnected is no notice: calling Recv again does not help")
	}
	for conn := uint64(1); conn <= 3; conn++ {
		for range 2 {
			if err := d.Send(ctx, nil, []byte("ask")); err != nil {
				t.Fatal(err)
			}
			if got := d.dialer.conn.id; got != conn {
				t.Errorf("connection %d, want %d", got, conn)
			}
			wantMessage(t, ctx, d, "", "answer")
		}
		n := wantNotice[*Disconnected](t, ctx, d)
		wantErr(t, n, io.EOF)
		if n.Messages != 2 {
			t.Errorf("Disconnected.Messages = %d, want 2", n.Messages)
		}
		_, err := d.Recv(ctx)
		wantErr(t, err, ErrNotConnected)
	}
}

func TestDealerIdentity(t *testing.T) {
	endpoint := startPeer(t, func(p *rawPeer) {
		p.read(64)
		p.send(peerGreeting())
		want := "\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x05agent"
		p.expect(append([]byte{4, byte(len(want))}, want...))
		p.send(peerReady("ROUTER"))
		p.expect([]byte("\x00\x01x"))
		p.send(peerMessage("seen"))
		p.untilClosed()
	})
	d := mustDialDealer(t, Options{Endpoint: endpoint, Identity: "agent"})
	ctx := testContext(t)
	if err := d.Send(ctx, []byte("x")); err != nil {
		t.Fatal(err)
	}
	wantMessage(t, ctx, d, "seen")
}

func TestDealerMeetsPublisher(t *testing.T) {
	endpoint := startPeer(t, func(p *rawPeer) { p.hello("PUB") })
	d := mustDialDealer(t, Options{Endpoint: endpoint})
	err := d.Send(testContext(t), nil, []byte("x"))
	wantErr(t, err, ErrSocketType)
	if !IsNotice(err) || !strings.Contains(err.Error(), "live events") {
		t.Errorf("error %v", err)
	}
}

func TestDealerSendsNothing(t *testing.T) {
	d := mustDialDealer(t, Options{Endpoint: "tcp://127.0.0.1:5557"})
	if err := d.Send(testContext(t)); err == nil {
		t.Error("a message without frames was sent")
	}
}

func TestDealerSendsLongFrames(t *testing.T) {
	long := strings.Repeat("x", 100_000)
	endpoint := startPeer(t, func(p *rawPeer) {
		p.hello("ROUTER")
		p.expect([]byte("\x01\x00" + longHeader(1, 256) + long[:256] + longHeader(0, 100_000) + long))
		p.send(peerMessage("seen"))
		p.untilClosed()
	})
	d := mustDialDealer(t, Options{Endpoint: endpoint})
	ctx := testContext(t)
	if err := d.Send(ctx, nil, []byte(long[:256]), []byte(long)); err != nil {
		t.Fatal(err)
	}
	wantMessage(t, ctx, d, "seen")
}

// A Send that ctx cuts in the middle spends the connection, because half a
// message is on the wire; the next Send starts anew.
func TestDealerSendCanceled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := func(p *rawPeer) {
			p.hello("ROUTER")
			p.read(3) // and no more, until the client gives up
			<-t.Context().Done()
		}
		d := mustDialDealer(t, Options{Endpoint: "tcp://peer:1", Dial: pipeDial(t, stuck, router(1))})
		ctx, cancel := context.WithCancel(t.Context())
		sent := make(chan error)
		go func() { sent <- d.Send(ctx, nil, []byte("ask")) }()
		synctest.Wait()
		cancel()
		err := <-sent
		wantErr(t, err, context.Canceled)
		wantErr(t, err, ErrNotReading)
		wantErr(t, d.Send(ctx, nil, []byte("ask")), context.Canceled)
		if err := d.Send(t.Context(), nil, []byte("ask")); err != nil {
			t.Fatal(err)
		}
		wantMessage(t, t.Context(), d, "", "answer")
	})
}

// A peer that never reads costs WriteTimeout, not for ever.
func TestDealerPeerDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := func(p *rawPeer) {
			p.hello("ROUTER")
			<-t.Context().Done()
		}
		d := mustDialDealer(t, Options{Endpoint: "tcp://peer:1", Dial: pipeDial(t, stuck)})
		err := d.Send(t.Context(), binary.BigEndian.AppendUint64(nil, 1))
		wantErr(t, err, ErrNotReading)
		if !IsNotice(err) {
			t.Errorf("%v is no notice", err)
		}
	})
}
