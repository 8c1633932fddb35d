package agent

import (
	"cmp"
	"net"
	"net/netip"
	"strconv"

	"google.golang.org/protobuf/proto"

	"waypost/agent/engine"
	"waypost/nvml"
	waypostv1 "waypost/proto/waypost/v1"
)

// transferOf is how saved KV of a rank may travel: what the configuration
// says, and where it is silent what the engine says.
func transferOf(e *EngineConfig, f *engine.Facts, hostAddress string, rank int) (facts *waypostv1.TransferFacts, role string) {
	t := f.Transfer
	orElse := func(configured string, told *string) {
		if configured != "" {
			*told = configured
		}
	}
	orElse(string(e.Role), &t.Role)
	orElse(e.KVConnector, &t.Connector)
	orElse(e.KVFingerprint, &t.Fingerprint)
	orElse(string(e.KVExported), &t.ExportedTier)
	if e.KVSideChannel == "" {
		t.SideChannel = reachable(t.SideChannel, hostAddress)
	}
	orElse(string(e.KVSideChannel), &t.SideChannel)
	if e.KVBytes > 0 {
		t.BytesPerToken = e.KVBytes
	}
	if t.Connector == "" {
		return nil, t.Role
	}
	t.SideChannel = countOn(t.SideChannel, rank)
	out := &waypostv1.TransferFacts{Connector: &t.Connector, SideChannel: &t.SideChannel, Fingerprint: &t.Fingerprint, ExportedTier: &t.ExportedTier}
	if t.BytesPerToken > 0 {
		out.KvBytesPerToken = proto.Float64(t.BytesPerToken)
	}
	return out, t.Role
}

const (
	// assumedHostRate is what the way between host and GPU is taken to carry, bytes
	// per second: what a published measurement of a CPU tier over PCIe reached.
	assumedHostRate = 18e9
	// usableLinkShare is how much of a link copies get: published ones of vLLM got 50
	// of the 64 GB/s of PCIe 5.0 x16.
	usableLinkShare = 50. / 64
)

// hostTierOf is what it takes an engine to read saved KV back from host memory; nil:
// it does not. A link that is known to carry less than what is assumed bounds it,
// which leaves it assumed: that copies get such a share of a link is no more than
// that, and nobody declared or measured it. The link is told beside it. An engine
// with windows does not tell which of their blocks are in host memory, so that
// nothing there is counted.
func hostTierOf(e *EngineConfig, f *engine.Facts, link *nvml.PCIeLink, windowed bool) *waypostv1.HostTierFacts {
	if !f.Capabilities.Has(engine.ReadsHostTier) {
		return nil
	}
	out := &waypostv1.HostTierFacts{LinkBytesPerSec: proto.Float64(assumedHostRate), LinkSource: proto.String("assumed")}
	if windowed {
		out.Uncounted = proto.String("hybrid model: the engine does not tell which blocks of its windows are there")
	}
	if link != nil {
		out.Link = proto.String(link.String())
		if rate, known := link.BytesPerSec(); known && rate*usableLinkShare < assumedHostRate {
			out.LinkBytesPerSec = proto.Float64(rate * usableLinkShare)
		}
	}
	if e.KVHostRate > 0 {
		out.LinkBytesPerSec, out.LinkSource = &e.KVHostRate, proto.String("declared")
	}
	if bytes := cmp.Or(e.KVBytes, f.Transfer.BytesPerToken); bytes > 0 {
		out.KvBytesPerToken = &bytes
	}
	return out
}

// reachable leaves out a side channel that an engine opened for its own host
// only, as it does by default, while the fleet has others; an address that
// stands for all of the host's becomes the one that others reach.
func reachable(sideChannel, hostAddress string) string {
	host, port, err := net.SplitHostPort(sideChannel)
	if err != nil || hostAddress == "" {
		return sideChannel
	}
	address, err := netip.ParseAddr(host)
	switch {
	case host == "localhost" || err == nil && address.IsLoopback():
		return ""
	case err == nil && address.IsUnspecified():
		return net.JoinHostPort(hostAddress, port)
	}
	return sideChannel
}

// countOn is the side channel of a rank by that of rank 0; empty: there is no
// such port.
func countOn(sideChannel string, rank int) string {
	host, port, err := net.SplitHostPort(sideChannel)
	if err != nil {
		return ""
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n+uint64(rank) > 65535 {
		return ""
	}
	return net.JoinHostPort(host, strconv.FormatUint(n+uint64(rank), 10))
}
