package discover

import (
	"encoding/hex"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
)

const (
	maxRouteBytes = 1 << 20 // of a namespace's table of routes or addresses
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
func (s *Scanner) published(addresses map[netip.Addr]bool) map[int]netip.AddrPort {
	if len(s.forwards) == 0 || len(addresses) == 0 {
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

// localAddresses are the addresses of a process's network namespace besides
// loopback; empty: they cannot be read. Those of the older family stand in its
// table of routes, each in a line of its own with lines below that say what it is.
func (s *Scanner) localAddresses(pid int) map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	dir := strconv.Itoa(pid) + "/net/"
	text, err := readSome(s.proc, dir+"fib_trie", maxRouteBytes)
	if err == nil {
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
	}
	if text, err = readSome(s.proc, dir+"if_inet6", maxRouteBytes); err == nil {
		for line := range strings.Lines(text) {
			// Address, index, length of the prefix, scope, flags and name.
			digits, _, _ := strings.Cut(line, " ")
			bytes, err := hex.DecodeString(digits)
			if a, ok := netip.AddrFromSlice(bytes); err == nil && ok && a.Is6() && !a.IsLoopback() && !a.IsLinkLocalUnicast() {
				out[a] = true
			}
		}
	}
	return out
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

// ReachedAt says whether an address is one at which an engine in another network
// namespace listens there: this host may reach it so, over a bridge for example.
func (e *Engine) ReachedAt(a netip.AddrPort) bool {
	return e.Place == Elsewhere && int(a.Port()) == e.Port && e.addresses[a.Addr().Unmap()] && (e.Address.IsUnspecified() || e.Address == a.Addr().Unmap())
}

// AllowPublished are the lines of agent.toml that have the agent serve such an
// engine, and the ports inside that would have to be published for its events.
func (e *Engine) AllowPublished(at netip.AddrPort) (lines string, missing []int) {
	live, replay, missing := e.PublishedEvents()
	return configLines(e.Kind, "http://"+at.String(), live, replay), missing
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
