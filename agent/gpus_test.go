package agent

import (
	"context"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"waypost/agent/engine"
	"waypost/gossip/doctor"
	"waypost/nvml"
	waypostv1 "waypost/proto/waypost/v1"
)

// fakeGPUs are GPUs by script.
type fakeGPUs struct {
	mu   sync.Mutex
	view nvml.View
}

func (f *fakeGPUs) Run(ctx context.Context) error { <-ctx.Done(); return nil }
func (f *fakeGPUs) Changed() <-chan struct{}      { return nil }

func (f *fakeGPUs) View() nvml.View {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.view
	v.Devices = slices.Clone(v.Devices)
	for i := range v.Devices {
		v.Devices[i].Xids = slices.Clone(v.Devices[i].Xids)
	}
	return v
}

func (f *fakeGPUs) Acknowledge(uuid string) bool {
	return f.set(uuid, func(d *nvml.Device) {
		for i := range d.Xids {
			d.Xids[i].Acknowledged = true
		}
	})
}

func (f *fakeGPUs) set(uuid string, change func(*nvml.Device)) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.view.Devices, func(d nvml.Device) bool { return d.UUID == uuid })
	if i >= 0 {
		change(&f.view.Devices[i])
	}
	return i >= 0
}

func held(pid int, bytes uint64) nvml.Process {
	return nvml.Process{PID: uint32(pid), MemoryBytes: &bytes}
}

// twoEngines is an agent with two engines, the processes of which are this one
// and none, and two GPUs.
func twoEngines(t *testing.T) (*Agent, *fakeGPUs) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	a := newAgent(t, newKey)
	gpus := &fakeGPUs{view: nvml.View{Status: nvml.Status{Code: nvml.StateOK, Text: "ok"}, XidState: "ok", Devices: []nvml.Device{
		{GPU: nvml.GPU{UUID: "GPU-a", Processes: []nvml.Process{held(os.Getpid(), 70<<30), held(1, 5<<30)}}},
		{GPU: nvml.GPU{Index: 1, UUID: "GPU-b", Processes: []nvml.Process{}}},
	}}}
	a.gpus.reader = gpus
	for i, url := range []string{"http://" + l.Addr().String(), "http://127.0.0.1:1"} {
		e := EngineConfig{Name: fmt.Sprintf("vllm-%d", i), Kind: "vllm", URL: url}
		w, err := a.watch(e)
		if err != nil {
			t.Fatal(err)
		}
		w.ranks = []*rank{w.newRank(e.Name, 0)}
		w.ranks[0].setFacts(engine.Facts{Model: "m", StartMark: 7, BlockTokens: 16, PoolBlocks: 1 << 20, StepTokens: 2048})
		a.engines = append(a.engines, w)
	}
	if _, err := os.Stat("/proc/net/tcp"); err != nil {
		t.Skip("needs /proc")
	}
	view := gpus.View()
	a.truth.look(&view, a.urls(), nil)
	return a, gpus
}

// The doctor judges GPUs as placements do: by the fleet's policy, not by the one
// that is in force until a coordinator is heard.
func TestDoctorJudgesByTheFleetsPolicy(t *testing.T) {
	a, gpus := twoEngines(t)
	gpus.set("GPU-a", func(d *nvml.Device) { d.Xids = []nvml.XidSeen{{Xid: 79, Count: 1}} })
	if checks := a.checks(time.Now()).Sorted(); !finds(checks, "gpu-fault", doctor.Problem, "xid_79") {
		t.Fatalf("not seen: %v", checks)
	}
	if err := a.truth.setPolicy(&waypostv1.GpuPolicy{Ignore: []string{"xid:79"}}); err != nil {
		t.Fatal(err)
	}
	if checks := a.checks(time.Now()).Sorted(); finds(checks, "gpu-fault", doctor.Problem, "xid_79") {
		t.Errorf("what the fleet ignores is a problem still: %v", checks)
	}
}

// A GPU's fault is put on the engine that uses it and on no other one; a GPU that
// fell off the bus tells no processes and is still its engine's.
func TestVerdictIsOfTheEnginesOwnGPUs(t *testing.T) {
	a, gpus := twoEngines(t)
	if got := a.truth.gpusOf("vllm-0"); !slices.Equal(got, []string{"GPU-a"}) {
		t.Fatalf("GPUs of the first engine: %v", got)
	}
	if got := a.gpuVerdicts()("vllm-0"); got != "ok" {
		t.Errorf("first engine: %q", got)
	}
	if got := a.gpuVerdicts()("vllm-1"); got != "" {
		t.Errorf("second engine, whose GPUs are not known: %q", got)
	}
	gpus.set("GPU-b", func(d *nvml.Device) { d.Lost = true })
	if got := a.gpuVerdicts()("vllm-0"); got != "ok" {
		t.Errorf("after a fault on another GPU: %q", got)
	}
	gpus.set("GPU-a", func(d *nvml.Device) {
		d.Lost, d.Processes, d.Xids = true, nil, []nvml.XidSeen{{Xid: 79, Count: 1}}
	})
	view := gpus.View()
	a.truth.look(&view, a.urls(), nil)
	if got := a.gpuVerdicts()("vllm-0"); got != "exclude:xid_79(gpu_0),gpu_lost(gpu_0)" {
		t.Errorf("after a fault on its GPU: %q", got)
	}
	load := a.lanes.load(nil)
	if got := []string{load.GetWorkers()[0].GetGpuVerdict(), load.GetWorkers()[1].GetGpuVerdict()}; got[0] != "exclude:xid_79(gpu_0),gpu_lost(gpu_0)" || got[1] != "" {
		t.Errorf("in LOAD: %q", got)
	}
	hello := a.lanes.hello()
	if got := hello.GetWorkers()[0].GetGpuUuids(); !slices.Equal(got, []string{"GPU-a"}) {
		t.Errorf("in the hello: %v", got)
	}
}

// An engine on an instance of a GPU that is lost is told like one on the whole GPU,
// while it is lost and once it is back; one on an instance that is known to hold
// none of its processes any more is not.
func TestVerdictOnAnInstanceIsOfItsGPU(t *testing.T) {
	a, gpus := twoEngines(t)
	look := func(change func(*nvml.Device)) string {
		gpus.set("GPU-a", change)
		view := gpus.View()
		a.truth.look(&view, a.urls(), nil)
		return a.gpuVerdicts()("vllm-0")
	}
	ours := []nvml.Process{held(os.Getpid(), 20<<30)}
	whole := func(d *nvml.Device) {
		d.Lost, d.Processes = false, ours
		d.Instances = []nvml.Instance{{UUID: "MIG-0", Processes: []nvml.Process{}}, {Index: 1, UUID: "MIG-1", Processes: ours}}
	}
	lost := func(d *nvml.Device) { // as the book keeps it
		d.Lost, d.Processes = true, nil
		d.Instances = []nvml.Instance{{UUID: "MIG-0"}, {Index: 1, UUID: "MIG-1"}}
		d.Xids = []nvml.XidSeen{{Xid: 79, Count: 1}}
	}
	for _, tc := range []struct {
		name   string
		change func(*nvml.Device)
		want   string
	}{
		{"before", whole, "ok"},
		{"lost", lost, "exclude:xid_79(gpu_0),gpu_lost(gpu_0)"},
		{"lost still", lost, "exclude:xid_79(gpu_0),gpu_lost(gpu_0)"},
		{"back, its processes not told yet", func(d *nvml.Device) {
			whole(d)
			d.Processes, d.Instances[1].Processes = []nvml.Process{}, nil
		}, "exclude:xid_79(gpu_0)"},
		{"back", whole, "exclude:xid_79(gpu_0)"},
		{"acknowledged", func(d *nvml.Device) { d.Xids[0].Acknowledged = true }, "ok"},
		{"not on it any more", func(d *nvml.Device) { d.Processes, d.Instances[1].Processes = []nvml.Process{}, []nvml.Process{} }, ""},
	} {
		if got := look(tc.change); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
		if got := a.truth.gpusOf("vllm-0"); tc.want != "" && !slices.Equal(got, []string{"MIG-1"}) {
			t.Errorf("%s: it uses %v, want its instance", tc.name, got)
		}
	}
}

// What bounds reading back from host memory is the least link of the engine's own
// GPUs, as far as all of them are known.
func TestHostLinkIsOfTheEnginesOwnGPUs(t *testing.T) {
	view := nvml.View{Devices: []nvml.Device{
		{GPU: nvml.GPU{UUID: "GPU-a", PCIe: &nvml.PCIeLink{Generation: 5, Lanes: 16}}},
		{GPU: nvml.GPU{UUID: "GPU-b", PCIe: &nvml.PCIeLink{Generation: 4, Lanes: 8}}},
		{GPU: nvml.GPU{UUID: "GPU-c"}},
		{GPU: nvml.GPU{UUID: "GPU-later", PCIe: &nvml.PCIeLink{Generation: 60, Lanes: 1}}},
		{GPU: nvml.GPU{UUID: "GPU-mig", PCIe: &nvml.PCIeLink{Generation: 3, Lanes: 4}, Instances: []nvml.Instance{{UUID: "MIG-0"}, {UUID: "MIG-1"}}}},
	}}
	for _, c := range []struct {
		uuids []string
		want  string
	}{
		{nil, ""},
		{[]string{"GPU-a"}, "PCIe 5.0 x16"},
		{[]string{"GPU-a", "GPU-b"}, "PCIe 4.0 x8"},
		{[]string{"GPU-a", "GPU-c"}, ""},
		{[]string{"GPU-z"}, ""},
		{[]string{"GPU-a", "GPU-z"}, ""},
		{[]string{"MIG-1"}, "PCIe 3.0 x4"},
		{[]string{"GPU-a", "MIG-0", "MIG-1"}, "PCIe 3.0 x4"},
		{[]string{"GPU-a", "MIG-2"}, ""},
		// What a link of a later generation carries is not known.
		{[]string{"GPU-later"}, "PCIe 60.0 x1"},
		{[]string{"GPU-a", "GPU-b", "GPU-later"}, "PCIe 4.0 x8"},
		{[]string{"GPU-later", "GPU-b", "GPU-a"}, "PCIe 4.0 x8"},
	} {
		if l, ok := hostLink(&view, c.uuids); ok != (c.want != "") || ok && l.String() != c.want {
			t.Errorf("%v: %v, %v; want %q", c.uuids, l, ok, c.want)
		}
	}
	// The hello tells it, and a change of it alone is worth a new hello.
	a, gpus := twoEngines(t)
	told := func(w *watched) *waypostv1.HostTierFacts {
		f := engine.Facts{Capabilities: engine.ReadsHostTier}
		return hostTierOf(w.config, &f, a.truth.linkOf(w.target.Name), false)
	}
	first, second := a.watching()[0], a.watching()[1]
	if h := told(first); h.Link != nil {
		t.Errorf("before it is known: %v", h)
	}
	gpus.set("GPU-a", func(d *nvml.Device) { d.PCIe = &nvml.PCIeLink{Generation: 3, Lanes: 4} })
	now := gpus.View()
	if !a.truth.look(&now, a.urls(), nil) {
		t.Error("its link changed unnoticed")
	}
	if h := told(first); h.GetLink() != "PCIe 3.0 x4" || h.GetLinkBytesPerSec() >= 4e9 {
		t.Errorf("first engine: %v", h)
	}
	if h := told(second); h.Link != nil {
		t.Errorf("second engine, whose GPUs are not known: %v", h)
	}
	if a.truth.look(&now, a.urls(), nil) {
		t.Error("the same again counts as a change")
	}
}

// What processes of no engine hold is told only where no engine's process can be
// among them, and a claim about KV that does not fit is shown.
func TestForeignMemoryAndHeadroom(t *testing.T) {
	a, gpus := twoEngines(t)
	reported := func() *waypostv1.Gpu {
		view := gpus.View()
		a.truth.look(&view, a.urls(), nil)
		return a.hostReport().GetGpus()[0]
	}
	if g := reported(); g.ForeignMemoryBytes != nil {
		t.Errorf("an engine is not found, yet %v bytes are foreign", g.GetForeignMemoryBytes())
	}
	a.engines = a.engines[:1]
	g := reported()
	if g.ForeignMemoryBytes == nil || g.GetForeignMemoryBytes() != 5<<30 || !slices.Equal(g.GetEngines(), []string{"vllm-0"}) {
		t.Errorf("foreign %v, engines %v", g.ForeignMemoryBytes, g.GetEngines())
	}
	engines := map[uint32]string{}
	for _, p := range g.GetProcesses() {
		engines[p.GetPid()] = p.GetEngine()
	}
	if want := map[uint32]string{uint32(os.Getpid()): "vllm-0", 1: ""}; !cmp.Equal(want, engines) {
		t.Errorf("processes %v", engines)
	}
	if len(g.GetNotes()) != 0 {
		t.Errorf("notes %v", g.GetNotes())
	}
	a.engines[0].config.KVBytes = 5000 // times 16 Mi tokens: 78.1 GiB
	if g := reported(); len(g.GetNotes()) != 1 || g.GetNotes()[0] != "kv_headroom: vllm-0 says its KV takes 78.1 GiB, its processes hold 70.0 GiB" {
		t.Errorf("notes %v", g.GetNotes())
	}
	gpus.set("GPU-a", func(d *nvml.Device) { d.Processes[0].MemoryBytes = nil }) // unified memory
	if g := reported(); len(g.GetNotes()) != 0 {
		t.Errorf("what the processes hold is unknown: %v", g.GetNotes())
	}
	gpus.set("GPU-a", func(d *nvml.Device) { d.Processes = append(d.Processes[:1:1], nvml.Process{PID: 1}) })
	if g := reported(); g.ForeignMemoryBytes != nil {
		t.Errorf("foreign memory of an unknown size is %v", g.GetForeignMemoryBytes())
	}
}

// The fleet's policy reaches the host; one that cannot be read changes nothing.
func TestGPUPolicyOfTheFleetIsObeyed(t *testing.T) {
	a, gpus := twoEngines(t)
	gpus.set("GPU-a", func(d *nvml.Device) { d.Xids = []nvml.XidSeen{{Xid: 79, Count: 1}, {Xid: 31, Count: 1}} })
	for _, c := range []struct {
		policy *waypostv1.GpuPolicy
		want   string
	}{
		{nil, "exclude:xid_79(gpu_0)"},
		{&waypostv1.GpuPolicy{Price: []string{"xid:79"}, Ignore: []string{"xid:31"}}, "price:xid_79(gpu_0)"},
		{&waypostv1.GpuPolicy{Exclude: []string{"xid:31"}, Ignore: []string{"xid:79"}}, "exclude:xid_31(gpu_0)"},
		{nil, "exclude:xid_31(gpu_0)"},
		{&waypostv1.GpuPolicy{Exclude: []string{"of_a_later_version"}}, "exclude:xid_31(gpu_0)"},
		{&waypostv1.GpuPolicy{}, "ok"},
	} {
		a.lanes.takePolicy(&waypostv1.PolicyPush{Gpu: c.policy})
		if got := a.gpuVerdicts()("vllm-0"); got != c.want {
			t.Errorf("%v: %q, want %q", c.policy, got, c.want)
		}
	}
}

func TestAcknowledge(t *testing.T) {
	a, gpus := twoEngines(t)
	gpus.set("GPU-a", func(d *nvml.Device) { d.Xids = []nvml.XidSeen{{Xid: 79, Count: 1}} })
	ack := func(index *uint32, uuid string, dryRun bool) *waypostv1.AckGpuReply {
		return a.acknowledge(&waypostv1.AckGpu{Index: index, Uuid: &uuid, DryRun: &dryRun, By: proto.String("anna"), Reason: proto.String("reseated")})
	}
	for i, want := range []struct {
		reply   *waypostv1.AckGpuReply
		xids    int
		verdict string
		open    string
	}{
		{ack(proto.Uint32(0), "", true), 1, "ok", "exclude:xid_79(gpu_0)"},
		{ack(nil, "GPU-a", false), 1, "ok", "ok"},
		{ack(proto.Uint32(0), "", false), 0, "ok", "ok"},
	} {
		if want.reply.GetError() != "" || len(want.reply.GetXids()) != want.xids || want.reply.GetVerdict() != want.verdict {
			t.Errorf("%d: %v", i, want.reply)
		}
	}
	if got := a.gpuVerdicts()("vllm-0"); got != "ok" {
		t.Errorf("afterwards: %q", got)
	}
	for _, r := range []*waypostv1.AckGpuReply{ack(proto.Uint32(9), "", false), ack(nil, "GPU-z", false), ack(nil, "", false)} {
		if !strings.Contains(r.GetError(), "no such GPU was seen on gpu-01") {
			t.Errorf("unknown GPU: %v", r)
		}
	}
	gpus.set("GPU-a", func(d *nvml.Device) { d.Lost, d.Xids = true, []nvml.XidSeen{{Xid: 79, Count: 2}} })
	if r := ack(proto.Uint32(0), "", false); r.GetVerdict() != "exclude:gpu_lost" {
		t.Errorf("a GPU that is still lost: %v", r)
	}
	a.gpus.reader = nil
	if r := ack(proto.Uint32(0), "", false); !strings.Contains(r.GetError(), "switched off") {
		t.Errorf("switched off: %v", r)
	}
}

// The metric shows what holds now: an error that was dealt with leaves no series
// behind.
func TestGPU02VerdictMetricFades(t *testing.T) {
	a, gpus := twoEngines(t)
	reg := prometheus.NewRegistry()
	if err := reg.Register(newGPUCollector(a)); err != nil {
		t.Fatal(err)
	}
	series := func() map[string]float64 {
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]float64{}
		for _, m := range families[0].GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			out[strings.Join(labels, " ")] = m.GetGauge().GetValue()
		}
		return out
	}
	const other = "gpu=gpu-01/1 reason= uuid=GPU-b"
	for _, step := range []struct {
		xids []nvml.XidSeen
		want map[string]float64
	}{
		{nil, map[string]float64{"gpu=gpu-01/0 reason= uuid=GPU-a": 0, other: 0}},
		{[]nvml.XidSeen{{Xid: 31, Count: 1}}, map[string]float64{"gpu=gpu-01/0 reason= uuid=GPU-a": 0, other: 0}},
		{[]nvml.XidSeen{{Xid: 79, Count: 1}}, map[string]float64{"gpu=gpu-01/0 reason=xid_79 uuid=GPU-a": 2, other: 0}},
		{[]nvml.XidSeen{{Xid: 79, Count: 1, Age: time.Hour, Acknowledged: true}}, map[string]float64{"gpu=gpu-01/0 reason= uuid=GPU-a": 0, other: 0}},
	} {
		gpus.set("GPU-a", func(d *nvml.Device) { d.Xids = step.xids })
		if diff := cmp.Diff(step.want, series()); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", step.xids, diff)
		}
	}
}
