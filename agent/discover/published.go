package discover

import (
	"io/fs"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
)

const (
	maxRouteBytes = 1 << 20 // of a namespace's table of routes
	// maxForwards bounds the forwarders of ports that are remembered.
	maxForwards = 1 << 12
)

// forward is a process of a container runtime that listens on this host and
// passes on to a container in a network namespace of its own.
type forward struct {
	pid            int
	host, internal netip.AddrPort
}

// forwardOf tells what a command line forwards: docker-proxy has all of it in its
// flags.
func forwardOf(pid int, args []string) (fw forward, ok bool) {
	if len(args) == 0 || path.Base(args[0]) != "docker-proxy" {
		return fw, false
	}
	f := Flags(args[1:])
	if proto, _ := f.Get("-proto"); proto != "tcp" {
		return fw, false
	}
	at := func(ip, port string) (netip.AddrPort, bool) {
		text, _ := f.Get(ip)
		a, err := netip.ParseAddr(text)
		n, known := f.Int(port)
		return netip.AddrPortFrom(a, uint16(n)), err == nil && known && n > 0 && n < 1<<16
	}
	host, okHost := at("-host-ip", "-host-port")
	internal, okInternal := at("-container-ip", "-container-port")
	return forward{pid, host, internal}, okHost && okInternal
}

// published finds where this host reaches ports of an engine in another network
// namespace, by the port inside: those that a runtime forwards to an address of
// that namespace.
func (s *Scanner) published(pid int) map[int]netip.AddrPort {
	if len(s.forwards) == 0 {
		return nil
	}
	addresses, err := localAddresses(s.proc, strconv.Itoa(pid)+"/net/fib_trie")
	if err != nil {
		return nil
	}
	out := map[int]netip.AddrPort{}
	for _, fw := range s.forwards {
		port := int(fw.internal.Port())
		if !addresses[fw.internal.Addr()] {
			continue
		}
		// Each address family has a forwarder of its own; every host speaks IPv4.
		if was, known := out[port]; !known || fw.host.Addr().Is4() && !was.Addr().Is4() || fw.host.Addr().Is4() == was.Addr().Is4() && fw.host.Compare(was) < 0 {
			out[port] = fw.host
		}
	}
	return out
}

// localAddresses are a namespace's own addresses, by its table of routes: each
// stands in a line of its own, and the lines below say what it is.
func localAddresses(proc fs.FS, name string) (map[netip.Addr]bool, error) {
	text, err := readSome(proc, name, maxRouteBytes)
	if err != nil {
		return nil, err
	}
	out := map[netip.Addr]bool{}
	var last netip.Addr
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if address, ok := strings.CutPrefix(line, "|-- "); ok {
			last, _ = netip.ParseAddr(address)
			continue
		}
		if strings.HasPrefix(line, "/32 ") && strings.HasSuffix(line, " LOCAL") && last.IsValid() && !last.IsLoopback() {
			out[last] = true
		}
	}
	return out, nil
}

// here is where a socket of this host is reached from it.
func here(a netip.AddrPort) netip.AddrPort {
	switch {
	case a.Addr() == netip.IPv4Unspecified():
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), a.Port())
	case a.Addr().IsUnspecified():
		return netip.AddrPortFrom(netip.IPv6Loopback(), a.Port())
	}
	return a
}

// Published is where this host reaches an engine in another network namespace
// through a port that its container runtime forwards; false: nowhere.
func (e *Engine) Published() (netip.AddrPort, bool) {
	a, ok := e.forwarded[e.Port]
	return here(a), ok && e.Place == Elsewhere
}

// PublishedEvents are the endpoints at which this host reads the events of such
// an engine, and the ports inside that would have to be published for it.
func (e *Engine) PublishedEvents() (live, replay string, missing []int) {
	at := func(endpoint string) string {
		port := endpointPort(endpoint)
		if port == 0 {
			return ""
		}
		a, ok := e.forwarded[port]
		if !ok {
			missing = append(missing, port)
			return ""
		}
		return "tcp://" + here(a).String()
	}
	live, replay = e.Events()
	live, replay = at(live), at(replay)
	slices.Sort(missing)
	return live, replay, missing
}
