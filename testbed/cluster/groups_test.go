package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/agent"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/systemd/daemon"
	"waypost/testbed/emulator"
)

// procTable is a host's process table that a test changes while agents read it.
type procTable struct {
	mu    sync.Mutex
	files fstest.MapFS
}

// set makes a table of engines, each a command line that listens at an address or
// nowhere.
func (p *procTable) set(engines map[int][2]string) {
	files, sockets := fstest.MapFS{}, "head\n"
	for pid, e := range engines {
		dir := fmt.Sprintf("%d/", pid)
		files[dir+"cmdline"] = &fstest.MapFile{Data: []byte(strings.ReplaceAll(e[0], " ", "\x00"))}
		files[dir+"status"] = &fstest.MapFile{Data: []byte("PPid:\t1\nUid:\t0\t0\t0\t0\n")}
		if e[1] == "" {
			continue
		}
		a := netip.MustParseAddrPort(e[1])
		b := a.Addr().As4()
		sockets += fmt.Sprintf("0: %02X%02X%02X%02X:%04X 0:0 0A 0:0 0:0 0 0 0 %d 1\n", b[3], b[2], b[1], b[0], a.Port(), pid)
		files[dir+"fd/3"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: fmt.Appendf(nil, "socket:[%d]", pid)}
	}
	files["net/tcp"] = &fstest.MapFile{Data: []byte(sockets)}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.files = files
}

func (p *procTable) now() fstest.MapFS {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.files
}

func (p *procTable) Open(name string) (fs.File, error)          { return p.now().Open(name) }
func (p *procTable) ReadDir(name string) ([]fs.DirEntry, error) { return p.now().ReadDir(name) }
func (p *procTable) ReadLink(name string) (string, error)       { return p.now().ReadLink(name) }
func (p *procTable) Lstat(name string) (fs.FileInfo, error)     { return p.now().Lstat(name) }

// groupRig is an engine over the first two hosts, served at the first, and one
// of its own on the third.
type groupRig struct {
	*rig
	second *procTable
}

// under makes a process the child of another one.
func (p *procTable) under(pid, parent int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.files[fmt.Sprintf("%d/status", pid)] = &fstest.MapFile{Data: fmt.Appendf(nil, "PPid:\t%d\nUid:\t0\t0\t0\t0\n", parent)}
}

const (
	sharePID  = 4242 // as the process on the fake driver's first GPU
	shareLine = "/usr/local/bin/vllm serve Llama-3.1-8B --headless --nnodes 2 --node-rank 1 --master-addr 10.99.0.1"
)

// newGroupRig is three hosts whose agents, which are not started, look for engines
// in process tables, empty so far. The second carries a part of an engine, and
// serves nothing.
func newGroupRig(t *testing.T, change func(i int, cfg *agent.Config)) (*groupRig, []*procTable) {
	t.Helper()
	g := &groupRig{second: &procTable{}}
	tables := []*procTable{{}, g.second, {}}
	for _, p := range tables {
		p.set(nil)
	}
	g.rig = start(t, 3, 1, emulator.Options{BlockTokens: 16}, func(o *Options) {
		o.LateAgents = true
		o.Proc = func(i int) fs.FS { return tables[i] }
		o.ChangeAgent = func(i int, cfg *agent.Config) {
			cfg.Discover = agent.DiscoverConfig{Enabled: true, Every: daemon.Duration(time.Second)}
			if i == 1 {
				cfg.Engines = nil
			}
			if change != nil {
				change(i, cfg)
			}
		}
	})
	return g, tables
}

func startGroup(t *testing.T, change func(i int, cfg *agent.Config)) *groupRig {
	t.Helper()
	g, tables := newGroupRig(t, change)
	g.second.set(map[int][2]string{sharePID: {shareLine, ""}})
	address := strings.TrimPrefix(g.Engines[0].URL(), "http://")
	_, port, _ := strings.Cut(address, ":")
	tables[0].set(map[int][2]string{4100: {"/usr/local/bin/vllm serve Llama-3.1-8B --nnodes 2 --master-addr 10.99.0.1 --port " + port, address}})
	for i := range tables {
		if err := g.StartAgent(i); err != nil {
			t.Fatal(err)
		}
	}
	g.eventually("the single engine is not ready", func() string { return notLive(g.worker(0, WorkerName(2, 0))) })
	return g
}

// until waits for a state of the group's worker and of its second member.
func (g *groupRig) until(state, member string) {
	g.t.Helper()
	g.eventually("state "+state+" of the worker with "+member, func() string {
		w := g.worker(0, WorkerName(0, 0))
		told := []string{w.GetState()}
		for _, m := range w.GetGroup() {
			told = append(told, m.GetPart()+" on "+m.GetHost()+": "+m.GetState()+" "+m.GetWhy())
		}
		if w.GetState() == state && len(told) == 3 && strings.HasPrefix(told[2], member) {
			return ""
		}
		return "it is " + strings.Join(told, "; ")
	})
}

// placedOn is where new requests go.
func (g *groupRig) placedOn(n int) (workers []string) {
	g.t.Helper()
	for i := range n {
		p, err := g.place(0, ask{tokens: tokens(uint32(100*n+i), 64), exclude: []string{}})
		if err != nil {
			g.t.Fatal(err)
		}
		workers = append(workers, p.GetWorker().GetName())
	}
	slices.Sort(workers)
	return slices.Compact(workers)
}

// Two agents tell their shares of one engine, and the coordinator makes one
// worker of them: a share that ends takes it out and is back with it, a lane that
// is lost is doubt, a drain of the second host is a drain of the worker, and a
// restart of everything finds the same again.
func TestEngineOverTwoHosts(t *testing.T) {
	t.Parallel()
	g := startGroup(t, nil)
	member := "node 1 on " + HostName(1)
	// Nothing is known of GPUs that nobody looks at: unknown, and no fault.
	g.until("ready", member+": unknown the state of its GPUs is not known")

	g.second.set(nil)
	g.until("excluded:group_incomplete", member+": missing its process is gone")
	if on := g.placedOn(4); !slices.Equal(on, []string{WorkerName(2, 0)}) {
		t.Errorf("placed on %v", on)
	}
	gone := member + ": its process is gone"
	why, err := g.Operator(0).ExplainWorker(t.Context(), &waypostv1.ExplainWorkerRequest{Worker: proto.String(WorkerName(0, 0))})
	if err != nil || len(why.GetWorker().GetGroup()) != 2 || !slices.Contains(why.GetToChange(), "it must be ready, and is excluded:group_incomplete ("+gone+")") {
		t.Errorf("why: %v, %v", why, err)
	}
	status, err := g.Operator(0).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
	if err != nil || !slices.ContainsFunc(status.GetProblems(), func(p *waypostv1.Problem) bool {
		return p.GetSubject() == WorkerName(0, 0) && p.GetWhat() == "excluded:group_incomplete ("+gone+")"
	}) {
		t.Errorf("status: %v, %v", status.GetProblems(), err)
	}
	g.second.set(map[int][2]string{sharePID + 1: {shareLine, ""}})
	g.until("ready", member+": unknown")

	// A drain of the host that carries a share is one of the worker.
	if _, err := g.Operator(0).CordonTarget(t.Context(), &waypostv1.CordonTargetRequest{Selector: proto.String(HostName(1)), Reason: proto.String("fan"), Drain: proto.Bool(true)}); err != nil {
		t.Fatal(err)
	}
	g.until("drained", member)
	if on := g.placedOn(2); !slices.Equal(on, []string{WorkerName(2, 0)}) {
		t.Errorf("placed on %v while the second host is drained", on)
	}
	if _, err := g.Operator(0).UncordonTarget(t.Context(), &waypostv1.UncordonTargetRequest{Selector: proto.String(HostName(1)), Reason: proto.String("fan is in")}); err != nil {
		t.Fatal(err)
	}
	g.until("ready", member)

	if err := g.StopAgent(1); err != nil {
		t.Fatal(err)
	}
	g.until("away", member+": away the host's lane is lost")
	if err := g.StartAgent(1); err != nil {
		t.Fatal(err)
	}
	g.until("ready", member)

	if err := g.StopCoordinator(0); err != nil {
		t.Fatal(err)
	}
	if err := g.StartCoordinator(0); err != nil {
		t.Fatal(err)
	}
	g.until("ready", member)
	g.second.set(nil)
	g.until("excluded:group_incomplete", member+": missing")
}

// An engine over Ray has its workers on the second host as a member: they say which
// cluster they are of, and no more. A second engine in the cluster makes that
// ambiguous, and it is said.
func TestEngineOverRayOnTwoHosts(t *testing.T) {
	t.Parallel()
	const (
		raylet   = "/opt/ray/core/src/ray/raylet/raylet --gcs-address=10.99.0.1:6379"
		overRay  = "/usr/local/bin/vllm serve Llama-3.1-8B --distributed-executor-backend ray --port "
		worker   = "ray::RayWorkerWrapper.execute_method"
		rayletID = 4000
	)
	g, tables := newGroupRig(t, nil)
	workers := func(p *procTable, on bool) {
		procs := map[int][2]string{rayletID: {raylet, ""}}
		if on {
			procs[sharePID] = [2]string{worker, ""}
		}
		p.set(procs)
		if on {
			p.under(sharePID, rayletID)
		}
	}
	workers(g.second, true)
	serve := func(i int) {
		address := strings.TrimPrefix(g.Engines[i].URL(), "http://")
		_, port, _ := strings.Cut(address, ":")
		tables[i].set(map[int][2]string{rayletID: {raylet, ""}, 4100: {overRay + port, address}})
	}
	serve(0)
	for i := range tables {
		if err := g.StartAgent(i); err != nil {
			t.Fatal(err)
		}
	}
	member := "ray workers on " + HostName(1)
	g.until("ready", member+": unknown the state of its GPUs is not known")
	workers(g.second, false)
	g.until("excluded:group_incomplete", member+": missing its process is gone")
	workers(g.second, true)
	g.until("ready", member+": unknown")

	serve(2)
	g.until("ready", "ray workers on : unknown "+WorkerName(2, 0)[:strings.LastIndexByte(WorkerName(2, 0), '/')]+" at 10.99.0.1:6379 too")
}

// A fault of a GPU on the second host takes the worker at the first out, and its
// acknowledgement brings it back.
func TestGPUFaultOfTheSecondHost(t *testing.T) {
	t.Parallel()
	folder, err := fakeDriver()
	if errors.Is(err, errNoCompiler) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	healthy, err := os.ReadFile(filepath.Join("..", "..", "nvml", "testdata", "scenarios", "healthy.txt"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	gpus := &gpuRig{scenario: filepath.Join(dir, "scenario.txt"), base: string(healthy)}
	if !strings.Contains(gpus.base, fmt.Sprintf("process 0 %d ", sharePID)) {
		t.Fatalf("process %d is on no GPU of the scenario", sharePID)
	}
	gpus.write(t, "")
	helper := filepath.Join(dir, "helper")
	script := fmt.Sprintf("#!/bin/sh\nexport FAKE_NVML=%s LD_LIBRARY_PATH=%s\nexec %s \"$@\"\n", gpus.scenario, folder, filepath.Join(folder, "child"))
	if err := os.WriteFile(helper, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	g := startGroup(t, func(i int, cfg *agent.Config) {
		if i == 1 {
			// A driver that is slower than its polls allow is blocked, and tells no faults.
			cfg.GPU = agent.GPUConfig{Enabled: "auto", Poll: daemon.Duration(time.Second), Helper: helper}
		}
	})
	member := "node 1 on " + HostName(1)
	g.until("ready", member+": ok")
	g.eventually("the GPU is not told to be the worker's", func() string {
		resp, err := g.Operator(0).ListGpus(t.Context(), &waypostv1.ListGpusRequest{Host: proto.String(HostName(1))})
		if err == nil && len(resp.GetGpus()) > 0 && slices.Equal(resp.GetGpus()[0].GetWorkers(), []string{WorkerName(0, 0)}) {
			return ""
		}
		return fmt.Sprint(resp, err)
	})
	gpus.write(t, "xid 0 79\n")
	g.until("excluded:gpu_fault", member+": gpu_fault xid_79(gpu_0)")
	if on := g.placedOn(4); !slices.Equal(on, []string{WorkerName(2, 0)}) {
		t.Errorf("placed on %v", on)
	}
	g.eventually("not acknowledged", func() string {
		if _, err := g.Operator(0).AckGpu(t.Context(), &waypostv1.AckGpuRequest{Gpu: proto.String(HostName(1) + "/0"), Reason: proto.String("reseated")}); err != nil {
			return err.Error()
		}
		return ""
	})
	g.until("ready", member+": ok")
}
