package mesh

import (
	"net/netip"
	"strings"
	"testing"
)

func TestChooseAddress(t *testing.T) {
	addr := netip.MustParseAddr
	host := []ifaceAddr{
		{"lo", addr("127.0.0.1"), true},
		{"lo", addr("::1"), true},
		{"docker0", addr("172.17.0.1"), true},
		{"ib0", addr("192.168.9.5"), true},
		{"eth0", addr("10.0.0.5"), true},
		{"eth0", addr("fe80::1"), true},
		{"eth0", addr("2001:db8::5"), true},
	}
	v6 := []ifaceAddr{{"lo", addr("::1"), true}, {"eth0", addr("fe80::1"), true}, {"eth0", addr("2001:db8::5"), true}}
	public := []ifaceAddr{{"lo", addr("127.0.0.1"), true}, {"eth0", addr("203.0.113.7"), true}}
	for _, tt := range []struct {
		name, advertise, listen string
		addrs                   []ifaceAddr
		source                  netip.Addr
		want, reason, err       string
	}{
		{"default route", "auto", "", host, addr("10.0.0.5"), "10.0.0.5", "eth0; skipped docker0 172.17.0.1, ib0 192.168.9.5: not the default route", ""},
		{"no default route", "", "", host, netip.Addr{}, "192.168.9.5", "ib0; skipped docker0 172.17.0.1, eth0 10.0.0.5: not the first that is up", ""},
		{"public only", "auto", "", public, addr("203.0.113.7"), "203.0.113.7", "eth0", ""},
		{"IPv6 only", "auto", "::", v6, addr("2001:db8::5"), "2001:db8::5", "eth0", ""},
		{"listens on one", "auto", "10.0.0.5", host, addr("192.168.9.5"), "10.0.0.5", "the address listened on", ""},
		{"loopback", "auto", "localhost", host, addr("10.0.0.5"), "127.0.0.1", "the address listened on", ""},
		{"address", "198.51.100.3", "", host, addr("10.0.0.5"), "198.51.100.3", "configured", ""},
		{"interface", "ib0", "", host, addr("10.0.0.5"), "192.168.9.5", "interface ib0", ""},
		{"interface with both families", "eth0", "", host, addr("10.0.0.5"), "10.0.0.5", "interface eth0", ""},
		{"CIDR", "192.168.0.0/16", "", host, addr("10.0.0.5"), "192.168.9.5", "ib0, in 192.168.0.0/16", ""},
		{"CIDR of nobody", "172.30.0.0/16", "", host, addr("10.0.0.5"), "", "", "no address of this host is in 172.30.0.0/16; there are lo 127.0.0.1"},
		{"no such interface", "eth7", "", host, addr("10.0.0.5"), "", "", `"eth7" is no address, no CIDR and no interface with an address`},
		{"loopback only", "auto", "", host[:2], netip.Addr{}, "", "", "no interface has an address that others could reach"},
		{"only a bridge", "auto", "", host[:3], netip.Addr{}, "", "", "no interface has an address that others could reach"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := choose(tt.advertise, tt.listen, tt.addrs, tt.source)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || !strings.Contains(err.Error(), "mesh.advertise") {
					t.Errorf("error %v, want %q", err, tt.err)
				}
				return
			}
			if err != nil || got.Addr != netip.MustParseAddr(tt.want) || got.Reason != tt.reason {
				t.Errorf("chose %v (%q), %v; want %s (%q)", got.Addr, got.Reason, err, tt.want, tt.reason)
			}
		})
	}
	// On the real host it either works or says what to do.
	if got, err := ChooseAddress("auto", "127.0.0.1"); err != nil || !got.Addr.IsLoopback() {
		t.Errorf("loopback on this host: %v, %v", got, err)
	}
}
