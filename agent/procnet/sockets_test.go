package procnet

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

const header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"

func socketLine(address string, uid, inode int) string {
	return fmt.Sprintf("   0: %s 00000000:0000 0A 00000000:00000000 00:00000000 00000000 %5d        0 %d 1 0000000000000000 100 0 0 10 0\n", address, uid, inode)
}

func TestSocketTable(t *testing.T) {
	out := Sockets{}
	text := header + socketLine("0100007F:1F40", 5, 7) +
		strings.Replace(socketLine("0100007F:1F41", 5, 8), " 0A ", " 01 ", 1) + "nonsense\n" + socketLine("zz:1F40", 5, 9) +
		socketLine("0000000000000000FFFF00000100007F:1F42", 5, 10) + socketLine("00000000000000000000000001000000:1F43", 5, 11)
	if err := parse(strings.NewReader(text), out); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, k := range out {
		got = append(got, fmt.Sprintf("%d %s %d", k.Inode, k.Address, k.UID))
	}
	slices.Sort(got)
	want := []string{"10 127.0.0.1:8002 5", "11 [::1]:8003 5", "7 127.0.0.1:8000 5"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A host with many connections costs no more than one with few: those that listen
// come first.
func TestConnectionsAreNotWalkedThrough(t *testing.T) {
	connection := strings.Replace(socketLine("0100007F:1F41", 5, 8), " 0A ", " 01 ", 1)
	text := header + socketLine("0100007F:1F40", 5, 7) + strings.Repeat(connection, 10_000)
	r, out := strings.NewReader(text), Sockets{}
	if err := parse(r, out); err != nil || len(out) != 1 {
		t.Fatalf("%v, %v", out, err)
	}
	if read := len(text) - r.Len(); read > len(text)/5 {
		t.Errorf("%d of %d bytes were read", read, len(text))
	}
}

// A connection comes to the socket that listens nearest to its address.
func TestServing(t *testing.T) {
	all := Sockets{}
	for i, a := range []string{"127.0.0.1:8000", "0.0.0.0:8000", "[::]:8000", "10.0.0.5:8000", "10.0.0.5:8000", "[::1]:8001", "[::]:8002", "0.0.0.0:8003", "10.0.0.5:8004"} {
		all[uint64(i)] = Socket{Address: netip.MustParseAddrPort(a), Inode: uint64(i)}
	}
	for at, want := range map[string][]uint64{
		"127.0.0.1:8000":         {0},
		"127.0.0.2:8000":         {1},
		"10.0.0.5:8000":          {3, 4}, // two that share it
		"[fd00::1]:8000":         {2},
		"127.0.0.1:8001":         nil,
		"127.0.0.1:8002":         {6},
		"[::1]:8002":             {6},
		"[::1]:8003":             nil,
		"[::ffff:10.0.0.5]:8003": {7},
		"127.0.0.1:8004":         nil,
		"127.0.0.1:9000":         nil,
	} {
		if got := all.Serving(netip.MustParseAddrPort(at)); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", at, got, want)
		}
	}
	for port, want := range map[uint16][]uint64{8000: {0}, 8001: {5}, 8002: {6}, 8003: {7}, 8004: nil} {
		if got := all.Serving(netip.AddrPortFrom(netip.Addr{}, port)); !slices.Equal(got, want) {
			t.Errorf("localhost:%d: %v, want %v", port, got, want)
		}
	}
}

func TestRead(t *testing.T) {
	both := fstest.MapFS{
		"7/net/tcp":  {Data: []byte(header + socketLine("0100007F:1F40", 5, 7))},
		"7/net/tcp6": {Data: []byte(header + socketLine("00000000000000000000000000000000:1F41", 5, 8))},
		"net/tcp6":   {Data: []byte(header)},
	}
	if s, err := Read(both, "7/net"); err != nil || len(s) != 2 || s[8].Address != netip.MustParseAddrPort("[::]:8001") {
		t.Errorf("%v %v", s, err)
	}
	if s, err := Read(both, "net"); err != nil || len(s) != 0 {
		t.Errorf("one family: %v %v", s, err)
	}
	if _, err := Read(both, "8/net"); err == nil {
		t.Error("no tables: no error")
	}
}
