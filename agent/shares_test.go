package agent

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
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
	a.gpus.reader = gpus
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

// Processes that a launcher started for an engine hold its GPUs: where it is
// served they are the engine's, on other hosts those of one share, and nobody's
// memory is a stranger's.
func TestGPUsOfHelpers(t *testing.T) {
	p := &procTable{}
	env := func(namespace string, rank int) string {
		return fmt.Sprintf("PMIX_NAMESPACE=%s\x00OMPI_COMM_WORLD_RANK=%d\x00OMPI_COMM_WORLD_SIZE=4\x00OMPI_COMM_WORLD_LOCAL_RANK=%d\x00OMPI_COMM_WORLD_LOCAL_SIZE=2", namespace, rank, rank%2)
	}
	const worker = "python3 -m tensorrt_llm.llmapi.mgmn_worker_node"
	e := startEmulator(t)
	port := portOfAddress(t, e.Address())
	p.set(
		engineProcess{pid: 41, args: "trtllm-serve m --port " + port, address: e.Address()},
		engineProcess{pid: 43, args: worker},
		engineProcess{pid: 50, args: worker},
		engineProcess{pid: 51, args: worker},
	)
	for pid, environ := range map[int]string{41: env("5@1", 0), 43: env("5@1", 1), 50: env("7@1", 2), 51: env("7@1", 3)} {
		p.now()[fmt.Sprintf("%d/environ", pid)] = &fstest.MapFile{Data: []byte(environ)}
	}
	a := discovering(t, p, nil)
	view := nvml.View{Status: nvml.Status{Code: nvml.StateOK, Text: "ok"}, XidState: "ok"}
	for i, pid := range []int{41, 43, 50, 51} {
		view.Devices = append(view.Devices, nvml.Device{GPU: nvml.GPU{Index: i, UUID: fmt.Sprint("GPU-", i), Processes: []nvml.Process{held(pid, 70<<30)}}})
	}
	gpus := &fakeGPUs{view: view}
	a.gpus.reader = gpus
	a.discovery.look(time.Now())
	a.lookAtGPUs()
	share := "trtllm(node 1)@mpi-7@1"
	name := "trtllm-" + port
	if got, want := a.truth.gpusOf(share), []string{"GPU-2", "GPU-3"}; !slices.Equal(got, want) {
		t.Errorf("the GPUs of %s are %v, want %v", share, got, want)
	}
	if got := a.truth.gpusOf(name); !slices.Contains(got, "GPU-1") {
		t.Errorf("the GPUs of %s are %v", name, got)
	}
	if got := a.watching()[0].gpuUUIDs(); !slices.Equal(got, []string{"GPU-0", "GPU-1"}) {
		t.Errorf("the engine's GPUs are told as %v", got)
	}
	told := toldShares(a.lanes.hello())
	if !slices.Equal(told, []string{"trtllm engine=" + name + " at mpi-5@1 node 0 of 2 ranks 0+0 of 0 gpus=" + strings.Join(a.truth.gpusOf(name), ","), "trtllm engine= at mpi-7@1 node 1 of 2 ranks 0+0 of 0 gpus=GPU-2,GPU-3"}) {
		t.Errorf("told %q", told)
	}
	gpus.set("GPU-3", func(d *nvml.Device) { d.Lost, d.Xids = true, []nvml.XidSeen{{Xid: 79, Count: 1}} })
	a.lookAtGPUs()
	verdicts := map[uint64]string{}
	for _, l := range a.lanes.load(nil).GetShares() {
		verdicts[l.GetProcess()] = l.GetGpuVerdict()
	}
	for _, s := range a.lanes.hello().GetShares().GetShares() {
		if got, faulty := verdicts[s.GetProcess()], s.GetEngine() == ""; strings.HasPrefix(got, "exclude:xid_79") != faulty {
			t.Errorf("%s at %s: %q", s.GetEngine(), s.GetMeeting(), got)
		}
	}
	if checks := a.checks(time.Now()).Sorted(); finds(checks, "engine-reachable", doctor.OK, "no known kind") || !finds(checks, "engine-reachable", doctor.OK, "pid 50", "node 1 of the engine at mpi-7@1") {
		t.Errorf("%v", checks)
	}
}

// Workers of Ray are told apart from the shares that have a number, which older
// coordinators insist on.
func TestSharesWithoutNumbersAreTold(t *testing.T) {
	p := &procTable{}
	p.set(engineProcess{pid: 30, args: "raylet --gcs-address=10.0.0.1:6379"}, engineProcess{pid: 60, args: "ray::RayWorkerWrapper"})
	p.now()["60/status"] = &fstest.MapFile{Data: []byte("PPid:\t30\nUid:\t0\t0\t0\t0\n")}
	a := discovering(t, p, nil)
	a.discovery.look(time.Now())
	told := a.lanes.hello().GetShares()
	if len(told.GetShares()) > 0 || len(told.GetUncounted()) != 1 {
		t.Fatalf("told %v", told)
	}
	if s := told.GetUncounted()[0]; s.GetMeeting() != "10.0.0.1:6379" || s.GetKind() != "vllm" || s.GetEngine() != "" || s.GetProcess() == 0 {
		t.Errorf("told %v", s)
	}
	if name := a.carried()[60]; name != "vllm(ray workers)@10.0.0.1:6379" {
		t.Errorf("the worker's process is %q", name)
	}
}
