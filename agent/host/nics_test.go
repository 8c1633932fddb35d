package host

import (
	"os"
	"path/filepath"
	"testing"
)

// sysWith is a sys file system with devices by their path below devices, their
// NUMA node and, for network cards, their interface.
func sysWith(t *testing.T, devices []sysDevice) string {
	t.Helper()
	root := t.TempDir()
	link := func(from, to string) {
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(from, to); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range devices {
		folder := filepath.Join(root, "devices", d.path)
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, "numa_node"), []byte(d.node+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		link(folder, filepath.Join(root, "bus/pci/devices", filepath.Base(d.path)))
		if d.nic != "" {
			link(folder, filepath.Join(root, "class/net", d.nic, "device"))
		}
	}
	return root
}

type sysDevice struct{ path, node, nic string }

func TestNICDistance(t *testing.T) {
	root := sysWith(t, []sysDevice{
		{"pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.0", "0", ""},    // a GPU behind a switch
		{"pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:01.0/0000:1a:00.0", "0", "ib0"}, // the card beside it
		{"pci0000:16/0000:16:02.0/0000:20:00.0", "0", "ib1"},                           // another root port
		{"pci0000:40/0000:40:01.0/0000:41:00.0", "0", "eth0"},                          // another host bridge, same node
		{"pci0000:80/0000:80:01.0/0000:81:00.0", "1", "ib2"},                           // the other side of the machine
		{"pci0000:c0/0000:c0:01.0/0000:c1:00.0", "-1", "eth9"},                         // firmware does not tell
		{"virtual/net/veth", "0", ""},
	})
	if err := os.MkdirAll(filepath.Join(root, "class/net/bond0"), 0o755); err != nil {
		t.Fatal(err)
	}
	c, err := New(Options{Sys: root})
	if err != nil {
		t.Fatal(err)
	}
	const gpu = "00000000:19:00.0"
	for nic, want := range map[string]string{
		"ib0": NearSwitch, "ib1": NearHostBridge, "eth0": NearNUMANode, "ib2": NearSystem, "eth9": "", "bond0": "", "none": "", "../net/ib0": "", "": "",
	} {
		if got := c.NICDistance(gpu, nic); got != want {
			t.Errorf("to %q: %q, want %q", nic, got, want)
		}
	}
	for _, id := range []string{"", "19", "0000:ff:00.0", "../../etc:0"} {
		if got := c.NICDistance(id, "ib0"); got != "" {
			t.Errorf("from %q: %q, want unknown", id, got)
		}
	}
}
