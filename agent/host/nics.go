package host

import (
	"path/filepath"
	"strings"
)

// How near a network card is to a GPU: the nearest thing on the way that both
// share, from near to far.
const (
	NearSwitch     = "switch"
	NearHostBridge = "host_bridge"
	NearNUMANode   = "numa_node"
	NearSystem     = "system"
)

// NICDistance says how near the network interface is to the device with that
// PCI bus id; empty: unknown, as for virtual interfaces and in virtual machines
// that do not show the tree. Unknown is not near.
func (c *Collector) NICDistance(pciBusID, name string) string {
	gpu, ok := c.pciPath("bus", "pci", "devices", kernelBusID(pciBusID))
	if !ok {
		return ""
	}
	nic, ok := c.pciPath("class", "net", name, "device")
	if !ok {
		return ""
	}
	if gpu[0] == nic[0] {
		// Below a root port both hang on the same switch.
		if len(gpu) > 2 && len(nic) > 2 && gpu[1] == nic[1] {
			return NearSwitch
		}
		return NearHostBridge
	}
	gpuNode, nicNode := c.NUMANodeOf(pciBusID), c.numaNode("class", "net", name, "device", "numa_node")
	switch {
	case gpuNode == nil || nicNode == nil:
		return ""
	case *gpuNode == *nicNode:
		return NearNUMANode
	}
	return NearSystem
}

// pciPath is the way from the host bridge down to a device, both included.
func (c *Collector) pciPath(path ...string) ([]string, bool) {
	for _, part := range path {
		if part == "" || part == ".." || strings.ContainsRune(part, '/') {
			return nil, false
		}
	}
	real, err := filepath.EvalSymlinks(filepath.Join(append([]string{c.options.Sys}, path...)...))
	if err != nil {
		return nil, false
	}
	var way []string
	for part := range strings.SplitSeq(real, "/") {
		switch {
		case strings.HasPrefix(part, "pci") && strings.ContainsRune(part, ':'):
			way = []string{part}
		case len(way) > 0 && strings.Count(part, ":") == 2:
			way = append(way, part)
		}
	}
	return way, len(way) > 1
}

// kernelBusID is a PCI bus id as the kernel writes it: NVML writes the domain in
// eight digits, the kernel in four.
func kernelBusID(id string) string {
	domain, rest, ok := strings.Cut(strings.ToLower(id), ":")
	if !ok {
		return ""
	}
	if d, isLong := strings.CutPrefix(domain, "0000"); isLong && len(d) == 4 {
		domain = d
	}
	return domain + ":" + rest
}
