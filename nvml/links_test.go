package nvml

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Unknown is never near: only a word of the driver on the pair, or links of
// both to switches, make a fast way, and only while something can pass.
func TestWayBetween(t *testing.T) {
	path := func(nvlink *bool, ancestor string) []Path { return []Path{{To: 1, NVLink: nvlink, Ancestor: ancestor}} }
	toSwitch := []LinkPeer{{Kind: PeerSwitch, Links: 2}}
	for _, c := range []struct {
		name string
		a, b GPU
		want string
	}{
		{"nothing known", GPU{}, GPU{}, "unknown"},
		{"driver says nvlink", GPU{Paths: path(new(true), AncestorSystem)}, GPU{}, "nvlink"},
		{"driver says none", GPU{Paths: path(new(false), AncestorSwitch)}, GPU{}, "pcie (switch)"},
		{"driver says none, links to switches", GPU{Paths: path(new(false), AncestorSwitch), NVLinkPeers: toSwitch}, GPU{NVLinkPeers: toSwitch}, "pcie (switch)"},
		{"no word on nvlink", GPU{Paths: path(nil, AncestorNUMANode)}, GPU{}, "nvlink unknown, pcie (numa_node)"},
		{"no word on pcie", GPU{Paths: path(new(false), "")}, GPU{}, "no nvlink"},
		{"both at switches", GPU{NVLinkPeers: toSwitch}, GPU{NVLinkPeers: toSwitch}, "nvlink"},
		{"one at a switch", GPU{NVLinkPeers: toSwitch}, GPU{NVLinkPeers: []LinkPeer{{Kind: PeerGPU, Links: 2}}}, "unknown"},
		{"links down", GPU{Paths: path(new(true), AncestorSwitch), NVLinkUp: new(0)}, GPU{}, "pcie (switch)"},
		{"fabric not up at the other end", GPU{Paths: path(new(true), AncestorBoard)}, GPU{Fabric: &Fabric{State: FabricNotStarted}}, "pcie (board)"},
		{"fabric failed", GPU{Paths: path(new(true), AncestorBoard), Fabric: &Fabric{State: FabricCompleted, Failure: "timeout"}}, GPU{}, "pcie (board)"},
		{"lost", GPU{Paths: path(new(true), AncestorHostBridge)}, GPU{Lost: true}, "pcie (host_bridge)"},
	} {
		c.b.Index = 1
		if got := WayBetween(&Device{GPU: c.a}, &Device{GPU: c.b}).String(); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestSetFabric(t *testing.T) {
	cluster := [16]uint8{15: 7}
	for _, c := range []struct {
		name          string
		state, status int
		cluster       [16]uint8
		want          *Fabric
		missing       string
	}{
		{name: "none", missing: "not supported"},
		{name: "a state of a later driver", state: 9, missing: "state 9"},
		{name: "not started", state: 1, cluster: cluster, want: &Fabric{State: FabricNotStarted}},
		{name: "in progress, status has no meaning", state: 2, status: 999, want: &Fabric{State: FabricInProgress}},
		{name: "completed without a cluster", state: 3, want: &Fabric{State: FabricCompleted}},
		{name: "completed", state: 3, cluster: cluster, want: &Fabric{State: FabricCompleted, ClusterUUID: "00000000000000000000000000000007", Clique: new(uint32(4))}},
		{name: "failed", state: 3, status: codeTimeout, want: &Fabric{State: FabricCompleted, Failure: "timeout"}},
	} {
		var g GPU
		g.setFabric(c.state, c.status, c.cluster, 4)
		if diff := cmp.Diff(c.want, g.Fabric); diff != "" || g.Missing["fabric"] != c.missing {
			t.Errorf("%s: missing %q (-want +got):\n%s", c.name, g.Missing["fabric"], diff)
		}
	}
	for mask, want := range map[uint32]*bool{0: nil, 1: new(true), 2: new(false), 3: nil, 5: new(true)} {
		if got := degraded(mask); !cmp.Equal(want, got) {
			t.Errorf("health mask %d: %v", mask, got)
		}
	}
}

// What a link to the host carries, and when it is the way there.
func TestHostLinks(t *testing.T) {
	for l, want := range map[PCIeLink]float64{{1, 16}: 4, {2, 1}: .5, {3, 16}: 15.75, {4, 16}: 31.51, {4, 4}: 7.88, {5, 16}: 63.02, {6, 16}: 121, {0, 16}: 0, {-1, 1}: 0, {60, 16}: 0, {5, 0}: 0} {
		if got, known := l.BytesPerSec(); math.Abs(got/1e9-want) > .006 || known != (want > 0) {
			t.Errorf("%v carries %.3f GB/s (known %t), want %.3f", l, got/1e9, known, want)
		}
	}
	link := &PCIeLink{4, 16}
	for name, c := range map[string]struct {
		gpu  GPU
		want string
	}{
		"known":           {GPU{PCIe: link, NVLinkPeers: []LinkPeer{{Kind: PeerSwitch, Links: 18}}}, "PCIe 4.0 x16"},
		"unknown":         {GPU{}, ""},
		"NVLink to a CPU": {GPU{PCIe: link, NVLinkPeers: []LinkPeer{{Kind: PeerCPU, Links: 10}}}, ""},
	} {
		if l, ok := c.gpu.HostLink(); ok != (c.want != "") || ok && l.String() != c.want {
			t.Errorf("%s: %v, %v", name, l, ok)
		}
	}
}

// Words for the library's numbers; one of a later driver is unknown.
func TestLinkWords(t *testing.T) {
	kinds := map[int]string{0: PeerGPU, 1: PeerCPU, 2: PeerSwitch, 3: "", 255: ""}
	for kind, want := range kinds {
		if got := peerKind(kind); got != want {
			t.Errorf("device type %d is %q, want %q", kind, got, want)
		}
	}
	levels := map[int]string{
		0: AncestorBoard, 10: AncestorSwitch, 20: AncestorSwitches, 30: AncestorHostBridge, 40: AncestorNUMANode, 50: AncestorSystem, 60: "", -1: "",
	}
	for level, want := range levels {
		if got := ancestorWord(level); got != want {
			t.Errorf("level %d is %q, want %q", level, got, want)
		}
	}
	got := peersOf(map[LinkPeer]int{{Kind: PeerSwitch, PCIBusID: "b"}: 2, {Kind: PeerGPU}: 1, {Kind: PeerSwitch, PCIBusID: "a"}: 4})
	if want := []LinkPeer{{PeerGPU, "", 1}, {PeerSwitch, "a", 4}, {PeerSwitch, "b", 2}}; !cmp.Equal(want, got) {
		t.Errorf("peers %+v", got)
	}
}
