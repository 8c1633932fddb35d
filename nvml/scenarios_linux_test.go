package nvml

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// scenario is a file of the fake library with what it must lead to: the state
// of the host and the verdict on each GPU, at first and, if the file changes
// with time, after that.
type scenario struct {
	name, path string
	gives      []string
}

const scenarioFolder = "testdata/scenarios"

func scenarios(t *testing.T) []scenario {
	t.Helper()
	paths, err := filepath.Glob(scenarioFolder + "/*.txt")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	var all []scenario
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		s := scenario{name: strings.TrimSuffix(filepath.Base(path), ".txt"), path: path}
		for line := range strings.Lines(string(text)) {
			for _, label := range []string{"# gives: ", "# then: "} {
				if gives, ok := strings.CutPrefix(line, label); ok {
					s.gives = append(s.gives, strings.TrimSpace(gives))
				}
			}
		}
		if len(s.gives) == 0 {
			t.Fatalf("%s does not say what it gives", path)
		}
		all = append(all, s)
	}
	return all
}

// summary is a view in the words of a scenario.
func summary(v *View) string {
	words := []string{string(v.Status.Code)}
	for i := range v.Devices {
		verdict := DefaultPolicy().Judge(v.Status.Code, v.XidState, &v.Devices[i])
		word := verdict.String()
		if len(verdict.Notes) > 0 {
			word += "+" + strings.Join(verdict.Notes, ",")
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

// play runs a scenario on the real binding. It stands at its beginning.
func play(t *testing.T, name string, options Options) *driver {
	t.Helper()
	b := needTools(t)
	d := &driver{t: t, state: filepath.Join(t.TempDir(), name+".txt")}
	for _, file := range []string{name, "healthy"} {
		text, err := os.ReadFile(filepath.Join(scenarioFolder, file+".txt"))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(filepath.Dir(d.state), file+".txt"), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d.at(-time.Hour)
	d.start(b.child, b.library, options)
	return d
}

// at sets the scenario's clock: below 0 is its beginning for as long.
func (d *driver) at(age time.Duration) {
	d.t.Helper()
	written := time.Now().Add(-age)
	if err := os.Chtimes(d.state, written, written); err != nil {
		d.t.Fatal(err)
	}
}

// untilGives waits for what a scenario must lead to.
func (d *driver) untilGives(want string) View {
	d.t.Helper()
	return d.until(want, func(v View) bool { return summary(&v) == want })
}

// Each fault kind has a scenario that leads to its state and verdict through the
// real binding.
func TestScenarios(t *testing.T) {
	needTools(t)
	for _, s := range scenarios(t) {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			var o Options
			switch s.name {
			case "frozen":
				o.FrozenAfter = 200 * time.Millisecond
			case "hung-call":
				o.Poll, o.BlockedAfterPolls = 100*time.Millisecond, 30
			}
			d := play(t, s.name, o)
			for i, gives := range s.gives {
				if i > 0 {
					d.at(time.Hour)
				}
				d.untilGives(gives)
			}
		})
	}
}

// No condition that policy can name and no state that a host can be in is
// without a scenario.
func TestScenariosCoverEveryFault(t *testing.T) {
	var all strings.Builder
	for _, s := range scenarios(t) {
		all.WriteString(strings.Join(s.gives, " ") + " ")
	}
	words := strings.FieldsFunc(all.String(), func(r rune) bool { return strings.ContainsRune(" :+,", r) })
	for _, c := range conditionNames() {
		if !slices.Contains(words, c) {
			t.Errorf("no scenario for the condition %s", c)
		}
	}
	for state := range reportable {
		if state != StateNotBuilt && state != StateNoLibrary && !slices.Contains(words, string(state)) { // those two need no library
			t.Errorf("no scenario for the state %s", state)
		}
	}
}

// Instances of a split GPU are listed with their own memory; how busy they are
// is unknown, and an engine on an instance is judged by its GPU.
func TestGPU10MIGInstancesAreListed(t *testing.T) {
	d := play(t, "mig", Options{})
	v := d.untilGives("ok ok")
	g := v.Devices[0].GPU
	id := func(part string) string { return "MIG-00000000-0000-0000-" + part + "-000000000000" }
	name := "NVIDIA H100 80GB HBM3 MIG 1g.18gb"
	bytes := func(n uint64) *uint64 { return &n }
	want := []Instance{
		{
			UUID: id("0000"), Name: name, MemoryTotalBytes: bytes(10737418240), MemoryUsedBytes: bytes(10000000000), MemoryFreeBytes: bytes(737418240),
			Processes: []Process{{PID: 5001, MemoryBytes: bytes(9900000000)}},
		},
		{
			Index: 2, UUID: id("0002"), Name: name, MemoryTotalBytes: bytes(10737418240), MemoryUsedBytes: bytes(0), MemoryFreeBytes: bytes(10737418240),
			Processes: []Process{},
		},
		{
			Index: 3, UUID: id("0003"), Name: name, MemoryTotalBytes: bytes(42949672960), MemoryUsedBytes: bytes(35000000000), MemoryFreeBytes: bytes(7949672960),
			Processes: []Process{{PID: 5002, MemoryBytes: bytes(34000000000)}},
		},
	}
	if diff := cmp.Diff(want, g.Instances); diff != "" {
		t.Errorf("instances (-want +got):\n%s", diff)
	}
	if g.UtilizationRatio != nil || g.Missing["utilizationRatio"] != "not supported" {
		t.Errorf("utilization %v, missing %v", g.UtilizationRatio, g.Missing)
	}
	if want := []Process{{PID: 5001, MemoryBytes: bytes(9900000000)}, {PID: 5002, MemoryBytes: bytes(34000000000)}}; !cmp.Equal(want, g.Processes) {
		t.Errorf("processes of the GPU %+v", g.Processes)
	}
	hot := v
	hot.Devices = slices.Clone(v.Devices)
	hot.Devices[0].ThrottleReasons = []string{ThrottleThermal}
	if got := hot.Judge(DefaultPolicy(), []string{id("0003")}).String(); got != "price:thermal_throttle(gpu_0)" {
		t.Errorf("verdict on an engine on an instance: %s", got)
	}
}

// An engine on an instance is judged by its GPU also while that GPU is lost, when
// no instance can be listed, and once it is back.
func TestInstancesOfALostGPUStayKnown(t *testing.T) {
	d := play(t, "mig-fell-off-the-bus", Options{})
	v := d.untilGives("ok ok")
	whole := v.Devices[0].Instances
	on := []string{whole[1].UUID}
	d.at(90 * time.Second)
	v = d.untilGives("ok exclude:xid_79,gpu_lost")
	if got := v.Judge(DefaultPolicy(), on).String(); got != "exclude:xid_79(gpu_0),gpu_lost(gpu_0)" {
		t.Errorf("verdict while it is lost: %s", got)
	}
	kept := v.Devices[0].Instances
	if len(kept) != len(whole) {
		t.Fatalf("instances while it is lost: %+v", kept)
	}
	for i := range kept {
		if w, k := whole[i], kept[i]; k.Index != w.Index || k.UUID != w.UUID || k.Name != w.Name || k.MemoryUsedBytes != nil || k.Processes != nil || k.Missing["values"] == "" {
			t.Errorf("instance while it is lost: %+v", k)
		}
	}
	d.at(time.Hour)
	v = d.untilGives("ok exclude:xid_79")
	if got := v.Judge(DefaultPolicy(), on).String(); got != "exclude:xid_79(gpu_0)" {
		t.Errorf("verdict once it is back: %s", got)
	}
	if diff := cmp.Diff(whole, v.Devices[0].Instances); diff != "" {
		t.Errorf("instances once it is back (-before +now):\n%s", diff)
	}
}

// A GPU without memory of its own stays eligible; its memory is unknown.
func TestGPU01UnifiedMemoryIsUnknown(t *testing.T) {
	v := play(t, "unified-memory", Options{}).untilGives("ok ok")
	g := v.Devices[0].GPU
	if g.MemoryTotalBytes != nil || g.MemoryUsedBytes != nil || g.MemoryFreeBytes != nil || g.Missing["memory"] != "not supported" {
		t.Errorf("memory %v %v %v, missing %v", g.MemoryTotalBytes, g.MemoryUsedBytes, g.MemoryFreeBytes, g.Missing)
	}
	if len(g.Processes) != 1 || g.Processes[0].MemoryBytes != nil {
		t.Errorf("processes %+v", g.Processes)
	}
	if got := v.Judge(DefaultPolicy(), []string{g.UUID}).String(); got != "ok" {
		t.Errorf("verdict %s", got)
	}
}

// Without PCI data and links the topology is unknown, not near.
func TestGPU07VirtualMachine(t *testing.T) {
	v := play(t, "virtual-machine", Options{}).untilGives("ok ok ok")
	for i := range v.Devices {
		g := v.Devices[i].GPU
		if g.PCIBusID != "" || g.NVLinkTotal != nil || g.NVLinkPeers != nil || g.Paths != nil || g.PCIe != nil || g.Fabric != nil {
			t.Errorf("GPU %d: %+v", i, g)
		}
		for _, field := range []string{"pciBusId", "nvlinkTotal", "paths", "fabric"} {
			if g.Missing[field] == "" {
				t.Errorf("GPU %d: nothing says why %s is unknown: %v", i, field, g.Missing)
			}
		}
	}
	if w := WayBetween(&v.Devices[0], &v.Devices[1]); w.String() != "unknown" {
		t.Errorf("way between the GPUs: %s", w)
	}
}

// What the links lead to and how GPUs reach each other; a fabric that is not up
// carries nothing although the links say they are active.
func TestTopologyFacts(t *testing.T) {
	d := play(t, "healthy", Options{})
	v := d.untilGives("ok ok ok")
	g := v.Devices[0].GPU
	if want := []LinkPeer{{PeerSwitch, "00000000:07:00.0", 1}, {PeerSwitch, "00000000:08:00.0", 1}}; !cmp.Equal(want, g.NVLinkPeers) {
		t.Errorf("peers %+v", g.NVLinkPeers)
	}
	if want := []Path{{To: 1, NVLink: new(true), Ancestor: AncestorSystem}}; !cmp.Equal(want, g.Paths) {
		t.Errorf("paths %+v", g.Paths)
	}
	if l, ok := g.HostLink(); !ok || l != (PCIeLink{5, 16}) || v.Devices[1].PCIe.Lanes != 8 {
		t.Errorf("links to the host %v and %v", l, v.Devices[1].PCIe)
	}
	want := &Fabric{State: FabricCompleted, ClusterUUID: "0102030405060708090a0b0c0d0e0f10", Clique: new(uint32(1)), DegradedBandwidth: new(false)}
	if diff := cmp.Diff(want, g.Fabric); diff != "" {
		t.Errorf("fabric (-want +got):\n%s", diff)
	}
	if w := WayBetween(&v.Devices[0], &v.Devices[1]); w.String() != "nvlink" {
		t.Errorf("way %s", w)
	}
	down := play(t, "fabric-down", Options{}).untilGives("ok exclude:fabric_down exclude:fabric_down")
	if w := WayBetween(&down.Devices[0], &down.Devices[1]); w.String() != "pcie (system)" {
		t.Errorf("way while the fabric is down: %s", w)
	}
	if f := down.Devices[0].Fabric; f.State != FabricInProgress || f.ClusterUUID != "" || f.Clique != nil {
		t.Errorf("fabric in progress %+v", f)
	}
}

// The kernel's log tells of an error where the driver library tells none, and
// says so; a client ends while it waits for the log.
func TestKernelLogBesideTheLibrary(t *testing.T) {
	log := filepath.Join(t.TempDir(), "kmsg")
	if err := syscall.Mkfifo(log, 0o600); err != nil {
		t.Skipf("needs a file system with named pipes: %v", err)
	}
	writer, err := os.OpenFile(log, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	d := play(t, "no-xid-events", Options{KernelLog: log})
	d.until("errors that arrive by the log alone", func(v View) bool {
		return summary(&v) == "ok ok ok" && strings.HasPrefix(v.KernelLogState, "ok; ")
	})
	uptime := sinceBoot()
	if uptime <= 0 {
		t.Skip("needs /proc/uptime")
	}
	fmt.Fprintf(writer, "4,1,%d,-;NVRM: Xid (PCI:0000:1c:00): 79, pid=1, GPU has fallen off the bus.\n", uptime.Microseconds())
	v := d.untilGives("ok ok exclude:xid_79")
	if !strings.HasPrefix(v.KernelLogState, "ok; ") || v.Devices[1].Xids[0].Age > time.Hour {
		t.Errorf("log %q, errors %+v", v.KernelLogState, v.Devices[1].Xids)
	}
}

// Readings that stand still are unknown and say since when; the GPU is not ok.
func TestGPU03FrozenReadingsAreNotCurrent(t *testing.T) {
	v := play(t, "frozen", Options{FrozenAfter: 200 * time.Millisecond}).untilGives("ok price:readings_frozen price:readings_frozen")
	for i := range v.Devices {
		d := &v.Devices[i]
		if d.FrozenFor < 200*time.Millisecond || d.PowerWatts != nil || d.MemoryUsedBytes != nil || d.Missing["values"] != "readings stand still" {
			t.Errorf("GPU %d: frozen for %v, %+v", i, d.FrozenFor, d.GPU)
		}
	}
}

// A driver that was upgraded under the agent is a state with a name and the fix;
// engines that still run stay eligible unless policy says else.
func TestGPU05VersionMismatchIsNamed(t *testing.T) {
	v := play(t, "version-mismatch", Options{}).untilGives("version_mismatch")
	if v.Status.Text != "driver/library version mismatch: reload the NVIDIA driver or reboot" {
		t.Errorf("text %q", v.Status.Text)
	}
	d := play(t, "driver-upgraded", Options{})
	d.untilGives("ok ok ok")
	d.at(time.Hour)
	v = d.untilGives("version_mismatch ok+version_mismatch ok+version_mismatch")
	strict, err := ParsePolicy([]string{"version_mismatch"}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := v.Judge(strict, []string{uuid(0)}).String(); got != "exclude:version_mismatch(gpu_0)" {
		t.Errorf("by a policy that excludes it: %s", got)
	}
}

// Corrected errors are a note whatever their number; one that was not corrected
// and a row that cannot be replaced exclude.
func TestGPU06CorrectedErrorsAreNotFatal(t *testing.T) {
	v := play(t, "ecc-corrected", Options{}).untilGives("ok ok+ecc_corrected ok")
	if n := v.Devices[0].ECCCorrected; n == nil || *n != 10000 {
		t.Errorf("corrected %v", n)
	}
	play(t, "row-remap-failed", Options{}).untilGives("ok exclude:row_remap_failed+ecc_uncorrected ok")
}
