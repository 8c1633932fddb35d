package discover

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

// routes is the table of a container's namespace with one address of its own, as
// the kernel writes it.
func routes(address string) string {
	return fmt.Sprintf(`Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 127.0.0.0/8 2 0 2
        +-- 127.0.0.0/31 1 0 0
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
     +-- 172.17.0.0/16 2 0 2
        |-- 172.17.0.0
           /16 link UNICAST
        |-- %s
           /32 host LOCAL
        |-- 172.17.255.255
           /32 link BROADCAST
Local:
  +-- 172.17.0.0/16 2 0 2
        |-- %s
           /32 host LOCAL
`, address, address)
}

// forwarder is docker's process for one published port.
func forwarder(pid int, hostIP string, hostPort int, ip string, port int) fake {
	return fake{pid: pid, uid: 0, args: fmt.Sprintf("/usr/bin/docker-proxy -proto tcp -host-ip %s -host-port %d -container-ip %s -container-port %d -use-listen-fd", hostIP, hostPort, ip, port)}
}

const publishes = ` --kv-events-config {"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}`

// Two containers have the same port inside; each is reached where its own is
// published, and so are the events of one of them.
func TestPublishedPorts(t *testing.T) {
	tb := newTable()
	tb.add(fake{pid: 7713, uid: 0, args: "vllm serve a" + publishes, cgroup: "/docker/a", away: all8000})
	tb.add(fake{pid: 7800, uid: 0, args: "vllm serve b" + publishes, cgroup: "/docker/b", away: all8000})
	tb.add(fake{pid: 7900, uid: 0, args: "vllm serve c", cgroup: "/docker/c", away: all8000})
	tb.add(fake{pid: 7950, uid: 0, args: "vllm serve d", cgroup: "/docker/d", away: all8000})
	for pid, address := range map[int]string{7713: "172.17.0.2", 7800: "172.17.0.3", 7900: "172.17.0.4"} {
		tb.MapFS[fmt.Sprintf("%d/net/fib_trie", pid)] = &fstest.MapFile{Data: []byte(routes(address))}
	}
	tb.add(forwarder(90, "::", 18000, "172.17.0.2", 8000))
	tb.add(forwarder(91, "0.0.0.0", 18000, "172.17.0.2", 8000))
	tb.add(forwarder(92, "0.0.0.0", 15557, "172.17.0.2", 5557))
	tb.add(forwarder(93, "0.0.0.0", 15657, "172.17.0.2", 5657))
	tb.add(forwarder(94, "10.0.0.5", 18001, "172.17.0.3", 8000))
	tb.add(forwarder(95, "0.0.0.0", 18002, "172.17.0.9", 8000))
	tb.add(fake{pid: 96, args: "docker-proxy -proto udp -host-ip 0.0.0.0 -host-port 1 -container-ip 172.17.0.4 -container-port 8000"})
	tb.add(fake{pid: 97, args: "docker-proxy -proto tcp -host-ip x -host-port 1 -container-ip 172.17.0.4 -container-port 8000"})
	tb.finish()
	s := New(Options{Proc: tb})
	// Forwarders are no engines, and still known in the next scan.
	sameInEachScan(t, s, []string{
		"7713 elsewhere true 127.0.0.1:18000 tcp://127.0.0.1:15557 tcp://127.0.0.1:15657 []",
		"7800 elsewhere true 10.0.0.5:18001   [5557 5657]",
		"7900 elsewhere false invalid AddrPort   []", // nobody publishes it
		"7950 elsewhere false invalid AddrPort   []", // its addresses cannot be read
	}, func(e *Engine) string {
		at, ok := e.Published()
		live, replay, missing := e.PublishedEvents()
		return fmt.Sprint(e.PID, " ", e.Place, " ", ok, " ", at, " ", live, " ", replay, " ", missing)
	})
	for name := range tb.MapFS {
		if slices.Contains([]string{"91/cmdline", "90/cmdline"}, name) {
			delete(tb.MapFS, name)
		}
	}
	var last Result
	for range lookAgain + 2 {
		var err error
		if last, err = s.Scan(); err != nil {
			t.Fatal(err)
		}
	}
	if at, ok := last.Engines[0].Published(); ok {
		t.Errorf("nobody publishes it any more, yet it is at %s", at)
	}
}

func TestLocalAddresses(t *testing.T) {
	table := fstest.MapFS{
		"7/net/fib_trie": &fstest.MapFile{Data: []byte(routes("172.17.0.2"))},
		"7/net/if_inet6": &fstest.MapFile{Data: []byte("00000000000000000000000000000001 01 80 10 80       lo\n" +
			"fe800000000000000042acfffe110002 02 40 20 80     eth0\nfd000000000000000000000000000002 02 40 00 80     eth0\nzz 1\n")},
	}
	s := New(Options{Proc: table})
	want := map[netip.Addr]bool{netip.MustParseAddr("172.17.0.2"): true, netip.MustParseAddr("fd00::2"): true}
	if diff := cmp.Diff(want, s.localAddresses(7), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
	if got := s.localAddresses(8); len(got) != 0 {
		t.Errorf("of no process: %v", got)
	}
}

// An engine in a container is reached at the addresses of its namespace at which
// it listens.
func TestReachedAt(t *testing.T) {
	for listens, want := range map[string][]string{
		all8000:         {"172.17.0.2:8000", "[::ffff:172.17.0.2]:8000"},
		"020011AC:1F40": {"172.17.0.2:8000", "[::ffff:172.17.0.2]:8000"},
		"0100007F:1F40": nil,
	} {
		tb := newTable()
		tb.add(fake{pid: 7713, uid: 0, args: "vllm serve a", cgroup: "/docker/a", away: listens})
		tb.MapFS["7713/net/fib_trie"] = &fstest.MapFile{Data: []byte(routes("172.17.0.2"))}
		e := tb.scan(t).Engines[0]
		var got []string
		for _, at := range []string{"172.17.0.2:8000", "[::ffff:172.17.0.2]:8000", "172.17.0.2:8001", "172.17.0.3:8000", "127.0.0.1:8000"} {
			if e.ReachedAt(netip.MustParseAddrPort(at)) {
				got = append(got, at)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("listens at %s: %s", listens, diff)
		}
	}
}
