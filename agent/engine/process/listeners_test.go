package process

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The process of a listening socket is found by the kernel's tables.
func TestListenersOfThisProcess(t *testing.T) {
	if _, err := os.Stat("/proc/net/tcp"); err != nil {
		t.Skip("needs /proc")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().(*net.TCPAddr).AddrPort()
	found := NewListeners("")
	for range 2 { // the second time by what was found before
		if pids, err := found.PIDs(at); err != nil || !slices.Equal(pids, []int{os.Getpid()}) {
			t.Errorf("%v: %v %v, want %d", at, pids, err, os.Getpid())
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if pids, err := found.PIDs(at); err != nil || len(pids) != 0 {
		t.Errorf("closed: %v %v", pids, err)
	}
}

// loopback is a port at the loopback address.
func loopback(port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)
}

const tcpHead = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"

// procWith is a proc file system with the given sockets and holders.
func procWith(t *testing.T, tcp, tcp6 string, sockets map[string][]string) string {
	t.Helper()
	root := t.TempDir()
	write := func(name, text string) {
		if text == "" {
			return
		}
		if err := os.MkdirAll(filepath.Join(root, "net"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "net", name), []byte(tcpHead+text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("tcp", tcp)
	write("tcp6", tcp6)
	for pid, targets := range sockets {
		fd := filepath.Join(root, pid, "fd")
		if err := os.MkdirAll(fd, 0o755); err != nil {
			t.Fatal(err)
		}
		for i, target := range targets {
			if err := os.Symlink(target, filepath.Join(fd, string(rune('0'+i)))); err != nil {
				t.Fatal(err)
			}
		}
	}
	return root
}

func TestListeners(t *testing.T) {
	const on8000 = "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 501 1 0 100 0 0 10 0\n"
	const connected8000 = "   1: 0100007F:1F40 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 777 1 0 100 0 0 10 0\n"
	const other8000 = "   0: 0500000A:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 503 1 0 100 0 0 10 0\n"
	const on8000v6 = "   0: 00000000000000000000000000000000:1F40 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 502 1 0 100 0 0 10 0\n"
	for _, c := range []struct {
		name      string
		tcp, tcp6 string
		sockets   map[string][]string
		want      []int
		err       error
	}{
		{name: "one", tcp: on8000, sockets: map[string][]string{"41": {"/dev/null", "socket:[501]"}, "42": {"socket:[777]"}, "sys": {"socket:[501]"}}, want: []int{41}},
		{name: "only connected", tcp: connected8000, sockets: map[string][]string{"42": {"socket:[777]"}}},
		{name: "nobody", tcp: "\n"},
		{name: "both families, several processes", tcp: on8000, tcp6: on8000v6, sockets: map[string][]string{"41": {"socket:[501]"}, "43": {"socket:[502]"}, "44": {"socket:[501]"}}, want: []int{41, 44}},
		{name: "all addresses of the newer family", tcp6: on8000v6, sockets: map[string][]string{"43": {"socket:[502]"}}, want: []int{43}},
		{name: "another address of the port", tcp: on8000 + other8000, sockets: map[string][]string{"40": {"socket:[503]"}, "41": {"socket:[501]"}}, want: []int{41}},
		{name: "another address alone", tcp: other8000, sockets: map[string][]string{"40": {"socket:[503]"}}},
		{name: "of a hidden process", tcp: on8000, sockets: map[string][]string{"41": {"socket:[9]"}}, err: errHidden},
		{name: "damaged lines", tcp: "x\n:1F40\n" + on8000[:40] + "\n"},
	} {
		got, err := NewListeners(procWith(t, c.tcp, c.tcp6, c.sockets)).PIDs(loopback(8000))
		if !slices.Equal(got, c.want) || !errors.Is(err, c.err) {
			t.Errorf("%s: %v %v, want %v %v", c.name, got, err, c.want, c.err)
		}
	}
	// As many connections as a busy server has stand behind those that listen.
	var busy strings.Builder
	busy.WriteString(on8000)
	for range 20_000 {
		busy.WriteString(connected8000)
	}
	if got, err := NewListeners(procWith(t, busy.String(), "", map[string][]string{"41": {"socket:[501]"}})).PIDs(loopback(8000)); err != nil || !slices.Equal(got, []int{41}) {
		t.Errorf("among 20,000 connections: %v %v", got, err)
	}
	if _, err := NewListeners(t.TempDir()).PIDs(loopback(8000)); err == nil {
		t.Error("without tables: no error")
	}
}

// A process that ends gives its place to the one that listens on its socket now.
func TestListenersNoticeAnEnd(t *testing.T) {
	const on8000 = "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 501 1 0 100 0 0 10 0\n"
	root := procWith(t, on8000, "", map[string][]string{"41": {"socket:[501]"}, "44": {"socket:[501]"}})
	l := NewListeners(root)
	for _, want := range [][]int{{41, 44}, {44}} {
		if got, err := l.PIDs(loopback(8000)); err != nil || !slices.Equal(got, want) {
			t.Errorf("%v %v, want %v", got, err, want)
		}
		if err := os.RemoveAll(filepath.Join(root, "41")); err != nil {
			t.Fatal(err)
		}
	}
}
