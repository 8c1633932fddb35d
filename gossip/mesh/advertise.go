package mesh

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// ifaceAddr is one address of an interface.
type ifaceAddr struct {
	iface string
	addr  netip.Addr
	up    bool
}

// Advertised is the address that others reach this member at, and why it was chosen.
type Advertised struct {
	Addr   netip.Addr
	Reason string // "eth0; skipped docker0 172.17.0.1: not the default route"
}

// ChooseAddress resolves an `advertise` setting: an address, the name of an
// interface, a CIDR, or "auto", which is the address that packets leave from by
// the default route. A member that listens on one address advertises that one.
func ChooseAddress(advertise, listenHost string) (Advertised, error) {
	addrs, err := interfaceAddrs()
	if err != nil {
		return Advertised{}, fmt.Errorf("mesh.advertise: %w", err)
	}
	return choose(advertise, listenHost, addrs, defaultSource())
}

func choose(advertise, listenHost string, addrs []ifaceAddr, source netip.Addr) (Advertised, error) {
	if advertise == "" {
		advertise = "auto"
	}
	if advertise != "auto" {
		return chooseNamed(advertise, addrs)
	}
	if listenHost == "localhost" {
		listenHost = "127.0.0.1"
	}
	if ip, err := netip.ParseAddr(listenHost); err == nil && !ip.IsUnspecified() {
		return Advertised{ip.Unmap(), "the address listened on"}, nil
	}
	var chosen *ifaceAddr
	for i, a := range addrs {
		if a.addr == source {
			chosen = &addrs[i]
		}
	}
	why := "not the default route"
	if chosen == nil { // no route out: the first address that others could reach
		why = "not the first that is up"
		for i, a := range addrs {
			if a.up && usable(a) && !isBridge(a.iface) {
				chosen = &addrs[i]
				break
			}
		}
	}
	if chosen == nil {
		return Advertised{}, fmt.Errorf("mesh.advertise: no interface has an address that others could reach; set it to an address, an interface or a CIDR")
	}
	var skipped []string
	for _, a := range addrs {
		if a.addr != chosen.addr && usable(a) && a.addr.Is4() == chosen.addr.Is4() {
			skipped = append(skipped, a.iface+" "+a.addr.String())
		}
	}
	reason := chosen.iface
	if len(skipped) > 0 {
		reason += "; skipped " + strings.Join(skipped, ", ") + ": " + why
	}
	return Advertised{chosen.addr, reason}, nil
}

func chooseNamed(advertise string, addrs []ifaceAddr) (Advertised, error) {
	if ip, err := netip.ParseAddr(advertise); err == nil {
		return Advertised{ip.Unmap(), "configured"}, nil
	}
	if prefix, err := netip.ParsePrefix(advertise); err == nil {
		for _, a := range addrs {
			if prefix.Contains(a.addr) {
				return Advertised{a.addr, a.iface + ", in " + prefix.String()}, nil
			}
		}
		return Advertised{}, fmt.Errorf("mesh.advertise: no address of this host is in %s; there are %s", prefix, list(addrs))
	}
	var first *ifaceAddr
	for i, a := range addrs {
		if a.iface == advertise && usable(a) && (first == nil || a.addr.Is4() && !first.addr.Is4()) {
			first = &addrs[i]
		}
	}
	if first == nil {
		return Advertised{}, fmt.Errorf("mesh.advertise: %q is no address, no CIDR and no interface with an address; there are %s", advertise, list(addrs))
	}
	return Advertised{first.addr, "interface " + first.iface}, nil
}

func usable(a ifaceAddr) bool {
	return !a.addr.IsLoopback() && !a.addr.IsLinkLocalUnicast() && !a.addr.IsUnspecified()
}

// isBridge says whether an interface leads into this host's own containers or guests.
func isBridge(name string) bool {
	return slices.ContainsFunc([]string{"docker", "br-", "virbr", "veth", "cni", "podman", "lxc", "lxdbr"}, func(p string) bool {
		return strings.HasPrefix(name, p)
	})
}

func list(addrs []ifaceAddr) string {
	var all []string
	for _, a := range addrs {
		all = append(all, a.iface+" "+a.addr.String())
	}
	return strings.Join(all, ", ")
}

func interfaceAddrs() ([]ifaceAddr, error) {
	ifaces, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	var out []ifaceAddr
	for _, i := range ifaces {
		addrs, err := i.Addrs()
		if err != nil {
			continue // the interface went away
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				out = append(out, ifaceAddr{i.Name, p.Addr().Unmap(), i.Flags&net.FlagUp != 0})
			}
		}
	}
	return out, nil
}

// defaultSource returns the address that packets to the outside leave from. A
// connected UDP socket asks the routing table and sends nothing; the targets are
// documentation addresses (RFC 5737, RFC 3849).
func defaultSource() netip.Addr {
	for _, target := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} {
		c, err := net.Dial("udp", target)
		if err != nil {
			continue
		}
		local := c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
		c.Close()
		return local
	}
	return netip.Addr{}
}
