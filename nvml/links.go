package nvml

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"slices"
)

// peerKind is what an NVLink device type of the library stands for.
func peerKind(kind int) string {
	switch kind {
	case 0:
		return PeerGPU
	case 1:
		return PeerCPU
	case 2:
		return PeerSwitch
	}
	return ""
}

// peersOf lists peers with the number of links to each, in a fixed order.
func peersOf(counts map[LinkPeer]int) []LinkPeer {
	var peers []LinkPeer
	for p, n := range counts {
		p.Links = n
		peers = append(peers, p)
	}
	slices.SortFunc(peers, func(a, b LinkPeer) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.PCIBusID, b.PCIBusID))
	})
	return peers
}

// laneBytesPerSec is what one lane carries one way by generation, after the coding
// of the line (PCI Express Base Specification): 8 of 10 bits up to generation 2,
// 128 of 130 up to 5, 242 of 256 bytes from 6 on.
var laneBytesPerSec = [...]float64{0, 2.5e9 * .8 / 8, 5e9 * .8 / 8, 8e9 * 128 / 130 / 8, 16e9 * 128 / 130 / 8, 32e9 * 128 / 130 / 8, 64e9 * 242 / 256 / 8, 128e9 * 242 / 256 / 8}

// BytesPerSec is what a link carries one way at most; false: unknown, as of a
// generation that is not known here.
func (l PCIeLink) BytesPerSec() (rate float64, known bool) {
	if l.Generation < 1 || l.Generation >= len(laneBytesPerSec) || l.Lanes < 1 {
		return 0, false
	}
	return laneBytesPerSec[l.Generation] * float64(l.Lanes), true
}

// String is "PCIe 4.0 x16" for example.
func (l PCIeLink) String() string { return fmt.Sprintf("PCIe %d.0 x%d", l.Generation, l.Lanes) }

// HostLink is a GPU's link to the memory of its host; false: it is not known, or
// the GPU is linked to a CPU by NVLink too, which carries more.
func (g *GPU) HostLink() (PCIeLink, bool) {
	if g.PCIe == nil || slices.ContainsFunc(g.NVLinkPeers, func(p LinkPeer) bool { return p.Kind == PeerCPU }) {
		return PCIeLink{}, false
	}
	return *g.PCIe, true
}

// ancestorWord is a topology level of the library; empty for one of a later
// driver.
func ancestorWord(level int) string {
	switch level {
	case 0:
		return AncestorBoard
	case 10:
		return AncestorSwitch
	case 20:
		return AncestorSwitches
	case 30:
		return AncestorHostBridge
	case 40:
		return AncestorNUMANode
	case 50:
		return AncestorSystem
	}
	return ""
}

// setFabric enters what the library says of the fabric: state and status by
// their numbers, a cluster of zeros for none.
func (g *GPU) setFabric(state, status int, cluster [16]uint8, clique uint32) {
	states := map[int]string{1: FabricNotStarted, 2: FabricInProgress, 3: FabricCompleted}
	word, ok := states[state]
	if !ok {
		g.miss("fabric", map[bool]string{true: "not supported", false: fmt.Sprintf("state %d", state)}[state == 0])
		return
	}
	g.Fabric = &Fabric{State: word}
	if word != FabricCompleted {
		return // what else is told has no meaning yet
	}
	if status != codeSuccess {
		g.Fabric.Failure = wordsOf(status)
	}
	if cluster != [16]uint8{} {
		g.Fabric.ClusterUUID, g.Fabric.Clique = hex.EncodeToString(cluster[:]), &clique
	}
}

// degraded reads the lowest two bits of the library's health mask.
func degraded(mask uint32) *bool {
	switch mask & 3 {
	case 1:
		return new(true)
	case 2:
		return new(false)
	}
	return nil
}

// Way is how two GPUs of a host reach each other.
type Way struct {
	// NVLink says that they do over NVLink, directly or through switches; nil:
	// unknown. Unknown and false are both no reason to expect a fast link.
	NVLink *bool
	// Ancestor is their nearest common ancestor on PCIe; empty: unknown.
	Ancestor string
}

// String is "nvlink", "pcie (switch)" or "unknown" for example.
func (w Way) String() string {
	switch {
	case w.NVLink != nil && *w.NVLink:
		return "nvlink"
	case w.Ancestor != "" && w.NVLink != nil:
		return "pcie (" + w.Ancestor + ")"
	case w.Ancestor != "":
		return "nvlink unknown, pcie (" + w.Ancestor + ")"
	case w.NVLink != nil:
		return "no nvlink"
	}
	return "unknown"
}

// WayBetween is how a reaches b. The driver's word on the pair counts first;
// without it links of both to switches do. A fabric that is not up, or a GPU
// whose links are all down, carries nothing whatever else is said.
func WayBetween(a, b *Device) Way {
	var w Way
	if i := slices.IndexFunc(a.Paths, func(p Path) bool { return p.To == b.Index }); i >= 0 {
		w.NVLink, w.Ancestor = a.Paths[i].NVLink, a.Paths[i].Ancestor
	}
	if w.NVLink == nil && a.linkedToSwitch() && b.linkedToSwitch() {
		w.NVLink = new(true)
	}
	if w.NVLink != nil && *w.NVLink && (a.linksDead() || b.linksDead()) {
		w.NVLink = new(false)
	}
	return w
}

func (d *Device) linkedToSwitch() bool {
	return slices.ContainsFunc(d.NVLinkPeers, func(p LinkPeer) bool { return p.Kind == PeerSwitch && p.Links > 0 })
}

func (d *Device) linksDead() bool {
	return d.Lost || d.Fabric != nil && !d.Fabric.Up() || d.NVLinkUp != nil && *d.NVLinkUp == 0
}
