package agent

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"waypost/agent/engine"
	"waypost/nvml"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/systemd/daemon"
)

// What the configuration says goes before what the engine says, rank by rank.
func TestTransferFacts(t *testing.T) {
	told := engine.Transfer{
		Connector: "OffloadingConnector", SideChannel: "0.0.0.0:5710", Fingerprint: "f1", ExportedTier: "host", BytesPerToken: 131072,
	}
	facts := func(connector, channel, fingerprint, tier string, bytes float64) *waypostv1.TransferFacts {
		out := &waypostv1.TransferFacts{Connector: &connector, SideChannel: &channel, Fingerprint: &fingerprint, ExportedTier: &tier}
		if bytes > 0 {
			out.KvBytesPerToken = proto.Float64(bytes)
		}
		return out
	}
	for _, c := range []struct {
		name    string
		config  EngineConfig
		engine  engine.Transfer
		address string
		rank    int
		want    *waypostv1.TransferFacts
		role    string
	}{
		{name: "nothing known"},
		{name: "a role without a connector", config: EngineConfig{Role: "decode"}, role: "decode"},
		{name: "all from the engine", engine: told, address: "10.0.0.7", want: facts("OffloadingConnector", "10.0.0.7:5710", "f1", "host", 131072)},
		{name: "the second rank counts the port on", engine: told, address: "10.0.0.7", rank: 1, want: facts("OffloadingConnector", "10.0.0.7:5711", "f1", "host", 131072)},
		{
			name: "a channel of its own host only reaches nobody", address: "10.0.0.7",
			engine: engine.Transfer{Connector: "NixlConnector", Role: "prefill", SideChannel: "localhost:5600", ExportedTier: "gpu"},
			want:   facts("NixlConnector", "", "", "gpu", 0), role: "prefill",
		},
		{
			name:   "a fleet on one host reaches it there",
			engine: engine.Transfer{Connector: "NixlConnector", SideChannel: "127.0.0.1:5600"},
			want:   facts("NixlConnector", "127.0.0.1:5600", "", "", 0),
		},
		{
			name: "the configuration goes before the engine", engine: told, address: "10.0.0.7",
			config: EngineConfig{Role: "prefill", KVConnector: "X", KVSideChannel: "ib0:9", KVFingerprint: "mine", KVExported: "gpu", KVBytes: 7},
			want:   facts("X", "ib0:9", "mine", "gpu", 7), role: "prefill",
		},
		{name: "no port is left", engine: told, config: EngineConfig{KVSideChannel: "h:65535"}, rank: 1, want: facts("OffloadingConnector", "", "f1", "host", 131072)},
	} {
		got, role := transferOf(&c.config, &engine.Facts{Transfer: c.engine}, c.address, c.rank)
		if diff := cmp.Diff(c.want, got, protocmp.Transform()); diff != "" || role != c.role {
			t.Errorf("%s: role %q\n%s", c.name, role, diff)
		}
	}
}

func TestTransferConfigIsChecked(t *testing.T) {
	for want, e := range map[string]EngineConfig{
		"engine[0].kv_connector: ":        {KVConnector: strings.Repeat("x", 257)},
		"engine[0].kv_fingerprint: ":      {KVFingerprint: "a\nb"},
		"engine[0].kv_bytes_per_token: ":  {KVBytes: -1},
		"engine[0].kv_host_bytes_per_sec": {KVHostRate: -1},
		"engine[0].host_cache_mib: -2: ":  {HostCacheMiB: daemon.OptionalInt{Value: -2, Set: true}},
	} {
		e.URL, e.Kind = "http://127.0.0.1:8000", "vllm"
		c := Config{Engines: []EngineConfig{e}}
		if err := c.validateEngines(); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s…", err, want)
		}
	}
}

// What reading from host memory takes is told where the engine does it, with the
// source of each number and none that nobody knows.
func TestHostTierFacts(t *testing.T) {
	reads := engine.Facts{Capabilities: engine.ReadsHostTier, Transfer: engine.Transfer{BytesPerToken: 131072}}
	for name, c := range map[string]struct {
		config  EngineConfig
		facts   engine.Facts
		link    *nvml.PCIeLink
		windows bool
		want    *waypostv1.HostTierFacts
	}{
		"windows":     {facts: reads, windows: true, want: &waypostv1.HostTierFacts{KvBytesPerToken: proto.Float64(131072), LinkBytesPerSec: proto.Float64(18e9), LinkSource: proto.String("assumed"), Uncounted: proto.String("hybrid model: the engine does not tell which blocks of its windows are there")}},
		"a wide link": {facts: reads, link: &nvml.PCIeLink{Generation: 5, Lanes: 16}, want: &waypostv1.HostTierFacts{KvBytesPerToken: proto.Float64(131072), LinkBytesPerSec: proto.Float64(18e9), LinkSource: proto.String("assumed"), Link: proto.String("PCIe 5.0 x16")}},
		// Of 128 of 130 bits at 8 GT/s on 8 lanes 50/64 are reached.
		"a narrow link":           {facts: reads, link: &nvml.PCIeLink{Generation: 3, Lanes: 8}, want: &waypostv1.HostTierFacts{KvBytesPerToken: proto.Float64(131072), LinkBytesPerSec: proto.Float64(6.153846153846153e9), LinkSource: proto.String("assumed"), Link: proto.String("PCIe 3.0 x8")}},
		"of a later generation":   {facts: reads, link: &nvml.PCIeLink{Generation: 9, Lanes: 1}, want: &waypostv1.HostTierFacts{KvBytesPerToken: proto.Float64(131072), LinkBytesPerSec: proto.Float64(18e9), LinkSource: proto.String("assumed"), Link: proto.String("PCIe 9.0 x1")}},
		"configured, with a link": {config: EngineConfig{KVHostRate: 5e10}, facts: reads, link: &nvml.PCIeLink{Generation: 3, Lanes: 8}, want: &waypostv1.HostTierFacts{KvBytesPerToken: proto.Float64(131072), LinkBytesPerSec: proto.Float64(5e10), LinkSource: proto.String("declared"), Link: proto.String("PCIe 3.0 x8")}},
		"it does not":             {config: EngineConfig{KVBytes: 7, KVHostRate: 1e9}, facts: engine.Facts{Transfer: reads.Transfer}},
		"assumed":                 {facts: reads, want: &waypostv1.HostTierFacts{KvBytesPerToken: proto.Float64(131072), LinkBytesPerSec: proto.Float64(18e9), LinkSource: proto.String("assumed")}},
		"configured":              {config: EngineConfig{KVBytes: 7, KVHostRate: 5e10}, facts: reads, want: &waypostv1.HostTierFacts{KvBytesPerToken: proto.Float64(7), LinkBytesPerSec: proto.Float64(5e10), LinkSource: proto.String("declared")}},
		"no size of a KV":         {facts: engine.Facts{Capabilities: engine.ReadsHostTier}, want: &waypostv1.HostTierFacts{LinkBytesPerSec: proto.Float64(18e9), LinkSource: proto.String("assumed")}},
	} {
		if diff := cmp.Diff(c.want, hostTierOf(&c.config, &c.facts, c.link, c.windows), protocmp.Transform()); diff != "" {
			t.Errorf("%s:\n%s", name, diff)
		}
	}
}
