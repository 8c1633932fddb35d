package registry

import (
	"net/netip"
	"slices"
	"time"
)

// DefaultZone is the zone of every host while no topology is declared.
const DefaultZone = "default"

// Place is where a host or a caller stands.
type Place struct {
	// Host may be empty: a caller of which only the zone is known.
	Host string
	// Rack is empty if unknown.
	Rack string
	// Zone is empty if unknown; an unknown zone satisfies no rule.
	Zone string
	// Source is Declared, Assumed while no topology is declared, or NotSet.
	Source Source
}

// HostPlace returns where a host stands: in the first rack of the file that
// names it, else in the first zone. While neither racks nor zones are declared,
// every host stands in DefaultZone.
func (f *Fleet) HostPlace(host string) Place {
	names := func(hosts []Pattern) bool {
		return slices.ContainsFunc(hosts, func(p Pattern) bool { return p.Match(host) })
	}
	for _, r := range f.Racks {
		if names(r.Hosts) {
			return Place{host, r.Name, r.Zone, Declared}
		}
	}
	for _, z := range f.Zones {
		if names(z.Hosts) {
			return Place{host, "", z.Name, Declared}
		}
	}
	if len(f.Racks)+len(f.Zones) == 0 {
		return Place{host, "", DefaultZone, Assumed}
	}
	return Place{Host: host, Source: NotSet}
}

// ZoneOfAddr returns the zone with the narrowest network around an address.
func (f *Fleet) ZoneOfAddr(addr netip.Addr) (string, bool) {
	zone, bits := "", -1
	for _, z := range f.Zones {
		for _, n := range z.Networks {
			if n.Contains(addr.Unmap()) && n.Bits() > bits {
				zone, bits = z.Name, n.Bits()
			}
		}
	}
	return zone, bits >= 0
}

// Path is what lies between two places, in both directions.
type Path struct {
	// Name is that of the declared link, "rack a1 ↔ rack a1", or "same host",
	// "same zone", "other zone" or "unknown zone".
	Name string
	// Source is Declared if a link of the file names the path. Each value has
	// its own source beside it: a link may leave some out.
	Source               Source
	BandwidthBytesPerSec Sourced[uint64]
	// Latency is one way.
	Latency  Sourced[time.Duration]
	Transfer Sourced[TransferRule]
	// PlaceSurcharge is what crossing costs in the comparison of workers.
	PlaceSurcharge Sourced[time.Duration]
}

// Link returns the path between two hosts.
func (f *Fleet) Link(a, b string) Path { return f.PathBetween(f.HostPlace(a), f.HostPlace(b)) }

// PathBetween returns the path between two places: the declared link that names
// them most closely (host before rack before zone, at both ends; of two as
// close the slower one), else what is assumed. Nothing is assumed fast: hosts of
// one rack or engines of one host are not near each other until a link says so.
// Only a link of a host with itself speaks of the paths inside a host.
func (f *Fleet) PathBetween(a, b Place) Path {
	sameHost := a.Host != "" && a.Host == b.Host
	var best *Link
	bestRank := -1
	for i, sa := range a.scopes() {
		for j, sb := range b.scopes() {
			l, ok := f.linkIndex[pairOf(sa, sb)]
			inside := sa.Kind == ScopeHost && sb.Kind == ScopeHost
			if !ok || sameHost && !inside || i+j < bestRank {
				continue
			}
			link := &f.Links[l]
			if i+j > bestRank || link.BandwidthBytesPerSec.Value < best.BandwidthBytesPerSec.Value {
				best, bestRank = link, i+j
			}
		}
	}
	if best != nil {
		return Path{best.name, Declared, best.BandwidthBytesPerSec, best.Latency, best.Transfer, best.PlaceSurcharge}
	}
	return assumedPath(relationOf(sameHost, a.Zone, b.Zone))
}

// relationOf names what is known of two places without a link.
func relationOf(sameHost bool, zoneA, zoneB string) string {
	switch {
	case sameHost:
		return "same host"
	case zoneA == "" || zoneB == "":
		return "unknown zone"
	case zoneA == zoneB:
		return "same zone"
	}
	return "other zone"
}

// scopes are the ends a link may name this place by, from the widest.
func (p Place) scopes() [3]Scope {
	return [3]Scope{{ScopeZone, p.Zone}, {ScopeRack, p.Rack}, {ScopeHost, p.Host}}
}

// String is "rack a1 ↔ rack a1".
func (l *Link) String() string { return l.Between[0].String() + " ↔ " + l.Between[1].String() }

// assumedPath is what is taken for granted about a path of which nothing is
// declared, on the slow side: 10 Gbit/s and a tenth of a millisecond inside a
// zone, 1 Gbit/s and ten milliseconds across.
func assumedPath(relation string) Path {
	p := Path{
		Name: relation, Source: Assumed,
		BandwidthBytesPerSec: Sourced[uint64]{1_250_000_000, Assumed},
		Latency:              Sourced[time.Duration]{100 * time.Microsecond, Assumed},
		Transfer:             Sourced[TransferRule]{TransferAllow, Assumed},
		PlaceSurcharge:       Sourced[time.Duration]{0, Assumed},
	}
	switch relation {
	case "same host":
		p.Latency.Value = 20 * time.Microsecond
	case "other zone", "unknown zone":
		p.BandwidthBytesPerSec.Value = 125_000_000
		p.Latency.Value = 10 * time.Millisecond
	}
	return p
}

// assumedLink is what a declared link has where it says nothing.
func (f *Fleet) assumedLink(between [2]Scope) Path {
	a, b := between[0], between[1]
	return assumedPath(relationOf(a == b && a.Kind == ScopeHost, f.placeOf(a).Zone, f.placeOf(b).Zone))
}

// scopePair is two ends without an order.
type scopePair struct{ a, b Scope }

func pairOf(a, b Scope) scopePair {
	if a.Kind > b.Kind || a.Kind == b.Kind && a.Name > b.Name {
		a, b = b, a
	}
	return scopePair{a, b}
}

func (f *Fleet) buildIndex() {
	f.linkIndex = make(map[scopePair]int, len(f.Links))
	for i := range f.Links {
		l := &f.Links[i]
		l.name = l.String()
		f.linkIndex[pairOf(l.Between[0], l.Between[1])] = i
	}
}
