package zmtp

import (
	"net"
	"syscall"
	"testing"
	"time"
)

// The kernel probes a silent peer, unless told not to.
func TestKeepAlive(t *testing.T) {
	get := func(nc net.Conn, level, option int) (value int) {
		raw, err := nc.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if cerr := raw.Control(func(fd uintptr) { value, err = syscall.GetsockoptInt(int(fd), level, option) }); cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
		return value
	}
	quiet := func(p *rawPeer) { p.hello("PUB", ""); p.untilClosed() }
	for _, tc := range []struct {
		keepAlive      time.Duration
		on, idle, step int
	}{
		{0, 1, 15, 5},
		{time.Minute, 1, 60, 20},
		{time.Second, 1, 1, 1},
		{-1, 0, 0, 0},
	} {
		dialed := mustDialSub(t, Options{Endpoint: startPeer(t, quiet), Topics: everything, KeepAlive: tc.keepAlive})
		wantNotice[*Connected](t, testContext(t), dialed)
		listening := mustListenSub(t, Options{Endpoint: "tcp://127.0.0.1:0", Topics: everything, KeepAlive: tc.keepAlive})
		publisher(t, listening, quiet)
		wantNotice[*Connected](t, testContext(t), listening)
		conns := []net.Conn{dialed.dialer.conn.nc}
		listening.listener.mu.Lock()
		for c := range listening.listener.conns {
			conns = append(conns, c.nc)
		}
		listening.listener.mu.Unlock()
		for i, nc := range conns {
			if on := get(nc, syscall.SOL_SOCKET, syscall.SO_KEEPALIVE); on != tc.on {
				t.Errorf("KeepAlive %v, connection %d: keep-alive is %d, want %d", tc.keepAlive, i, on, tc.on)
			}
			if tc.on == 0 {
				continue
			}
			idle, step := get(nc, syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE), get(nc, syscall.IPPROTO_TCP, syscall.TCP_KEEPINTVL)
			if idle != tc.idle || step != tc.step {
				t.Errorf("KeepAlive %v, connection %d: probes after %d s each %d s, want %d and %d", tc.keepAlive, i, idle, step, tc.idle, tc.step)
			}
		}
	}
}
