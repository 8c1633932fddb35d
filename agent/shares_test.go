package agent

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"waypost/gossip/doctor"
	"waypost/nvml"
	waypostv1 "waypost/proto/waypost/v1"
)

// told are the shares of a hello in short.
func toldShares(h *waypostv1.AgentHello) (out []string) {
	for _, s := range h.GetShares().GetShares() {
		out = append(out, fmt.Sprintf("%s engine=%s at %s node %d of %d ranks %d+%d of %d gpus=%s", s.GetKind(), s.GetEngine(), s.GetMeeting(), s.GetNode(), s.GetNodes(),
			s.GetFirstRank(), s.GetLocalRanks(), s.GetRanks(), strings.Join(s.GetGpuUuids(), ",")))
	}
	return out
}

// What a host carries of engines over several hosts is told, its own engine's
// share with the engine's name; what an ordinary user runs is not.
func TestSharesAreTold(t *testing.T) {
	p := &procTable{}
	set := func(more ...engineProcess) {
		p.set(append(more,
			engineProcess{pid: 41, args: "vllm serve m --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless"},
			engineProcess{pid: 42, uid: 1000, args: "vllm serve m --nnodes 2 --node-rank 1 --master-addr 10.0.0.2 --headless"},
			engineProcess{pid: 43, args: "vllm serve m --headless --data-parallel-size 4 --data-parallel-size-local 2 --data-parallel-start-rank 2 --data-parallel-address 10.0.0.3"},
		)...)
	}
	set()
	a := discovering(t, p, nil)
	if h := a.lanes.hello(); h.Shares != nil {
		t.Errorf("before the first look: %v", h.GetShares())
	}
	a.discovery.look(time.Now())
	member := "vllm engine= at 10.0.0.1:29501 node 1 of 2 ranks 0+0 of 0 gpus="
	ranks := "vllm engine= at 10.0.0.3:29550 node 0 of 0 ranks 2+2 of 4 gpus="
	first := a.lanes.hello()
	if got := toldShares(first); !slices.Equal(got, []string{member, ranks}) {
		t.Errorf("told %q", got)
	}
	if checks := a.checks(time.Now()).Sorted(); !finds(checks, "engine-reachable", doctor.OK, "pid 42", "node 1 of the engine at 10.0.0.2:29501", "not told to coordinators: user 1000") {
		t.Errorf("what is not told is not named: %v", checks)
	}

	// Another agent of the same host knows the same lives; after a reboot or a
	// restart of the process it is another life.
	again := discovering(t, p, nil)
	again.discovery.look(time.Now())
	mark := first.GetShares().GetShares()[0].GetProcess()
	if got := again.lanes.hello().GetShares().GetShares()[0].GetProcess(); got != mark || mark == 0 {
		t.Errorf("mark %x, was %x", got, mark)
	}
	files := p.now()
	files["sys/kernel/random/boot_id"] = files["net/tcp"]
	again.discovery.look(time.Now())
	if got := again.lanes.hello().GetShares().GetShares()[0].GetProcess(); got == mark {
		t.Error("the mark is the same after a reboot")
	}

	// The front's own share has its engine's name; one that is not watched is not
	// told.
	e := startEmulator(t)
	port := portOfAddress(t, strings.TrimPrefix(e.URL(), "http://"))
	set(engineProcess{pid: 40, args: "vllm serve m --nnodes 2 --master-addr 10.0.0.4 --port " + port, address: "127.0.0.1:" + port})
	a.discovery.look(time.Now())
	front := "vllm engine=vllm-" + port + " at 10.0.0.4:29501 node 0 of 2 ranks 0+0 of 0 gpus="
	if got := toldShares(a.lanes.hello()); !slices.Equal(got, []string{front, member, ranks}) {
		t.Errorf("told %q", got)
	}
	p.set()
	a.discovery.look(time.Now())
	if h := a.lanes.hello(); h.Shares == nil || len(h.GetShares().GetShares()) != 0 {
		t.Errorf("all are gone, told %v", h.Shares)
	}
	// Nobody looks: that is not the same as none.
	off := a.cfg.Discover
	off.Enabled = false
	a.discovery.reload(off)
	a.discovery.look(time.Now())
	if h := a.lanes.hello(); h.Shares != nil {
		t.Errorf("nobody looks, told %v", h.Shares)
	}
}

// The GPUs of a share are those of its process, what it holds is no stranger's
// memory, and a GPU that fell off the bus is still the share's.
func TestSharesGPUs(t *testing.T) {
	p := &procTable{}
	p.set(engineProcess{pid: 4242, args: "vllm serve m --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless"})
	a := discovering(t, p, nil)
	gpus := &fakeGPUs{view: nvml.View{Status: nvml.Status{Code: nvml.StateOK, Text: "ok"}, XidState: "ok", Devices: []nvml.Device{
		{GPU: nvml.GPU{UUID: "GPU-a", Processes: []nvml.Process{held(4242, 70<<30)}}},
		{GPU: nvml.GPU{Index: 1, UUID: "GPU-b", Processes: []nvml.Process{}}},
	}}}
	a.gpus = gpus
	a.discovery.look(time.Now())
	verdict := func() string {
		loads := a.lanes.load(nil).GetShares()
		if len(loads) != 1 || loads[0].GetProcess() != a.lanes.hello().GetShares().GetShares()[0].GetProcess() {
			t.Fatalf("loads %v", loads)
		}
		return loads[0].GetGpuVerdict()
	}
	a.lookAtGPUs()
	if got := toldShares(a.lanes.hello()); !strings.HasSuffix(got[0], "gpus=GPU-a") {
		t.Errorf("told %q", got)
	}
	if got := verdict(); got != "ok" {
		t.Errorf("verdict %q", got)
	}
	if g := a.hostReport().GetGpus()[0]; g.ForeignMemoryBytes == nil || g.GetForeignMemoryBytes() != 0 {
		t.Errorf("foreign memory %v", g.ForeignMemoryBytes)
	}
	gpus.set("GPU-b", func(d *nvml.Device) { d.Lost = true })
	if got := verdict(); got != "ok" {
		t.Errorf("a fault of another GPU is the share's: %q", got)
	}
	gpus.set("GPU-a", func(d *nvml.Device) {
		d.Lost, d.Processes, d.Xids = true, nil, []nvml.XidSeen{{Xid: 79, Count: 1}}
	})
	a.lookAtGPUs()
	if got := verdict(); got != "exclude:xid_79(gpu_0),gpu_lost(gpu_0)" {
		t.Errorf("verdict %q", got)
	}
}
