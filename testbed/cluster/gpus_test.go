package cluster

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/agent"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/systemd/daemon"
	"waypost/testbed/emulator"
)

// driverDir holds what fakeDriver built; TestMain removes it.
var driverDir string

// fakeDriver builds the NVML child and a driver library that plays a scenario,
// once for all tests.
var fakeDriver = sync.OnceValues(func() (folder string, err error) {
	for _, tool := range []string{"go", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return "", errNoCompiler
		}
	}
	if out, err := exec.Command("go", "env", "CGO_ENABLED").Output(); err != nil || strings.TrimSpace(string(out)) != "1" {
		return "", errNoCompiler
	}
	if folder, err = os.MkdirTemp("", "waypost-gpus-"); err != nil {
		return "", err
	}
	driverDir = folder
	module, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		return folder, err
	}
	include := filepath.Join(strings.TrimSpace(string(module)), "pkg", "nvml")
	library := exec.Command("gcc", "-shared", "-fPIC", "-O1", "-I", include, "-Wl,-soname,libnvidia-ml.so.1",
		"-o", filepath.Join(folder, "libnvidia-ml.so.1"), filepath.Join("..", "..", "nvml", "testdata", "shim.c"))
	child := exec.Command("go", "build", "-tags", "nvml", "-o", filepath.Join(folder, "child"), "../../nvml/testdata/child")
	child.Env = append(os.Environ(), "CGO_CFLAGS=-O2 -g -Wno-deprecated-declarations")
	for _, build := range []*exec.Cmd{library, child} {
		if out, err := build.CombinedOutput(); err != nil {
			return folder, fmt.Errorf("%v: %w\n%s", build.Args, err, out)
		}
	}
	return folder, nil
})

var errNoCompiler = errors.New("no cgo: the driver library of the test cannot be built")

// gpuRig is a cluster whose first host has two GPUs by scenario, the first of
// which its engine uses.
type gpuRig struct {
	*rig
	scenario, base string
}

// newGPUs are two GPUs by scenario, of which process uses the first; helper reads
// them.
func newGPUs(t *testing.T, process int) (g *gpuRig, helper string) {
	t.Helper()
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
	g = &gpuRig{scenario: filepath.Join(dir, "scenario.txt")}
	g.base = strings.Replace(string(healthy), "process 0 4242 ", fmt.Sprintf("process 0 %d ", process), 1)
	helper = filepath.Join(dir, "helper")
	script := fmt.Sprintf("#!/bin/sh\nexport FAKE_NVML=%s LD_LIBRARY_PATH=%s\nexec %s \"$@\"\n", g.scenario, folder, filepath.Join(folder, "child"))
	if err := os.WriteFile(helper, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	g.write(t, "")
	return g, helper
}

// gpuPoll is the default. Five polls of silence stand for a driver that hangs, and
// on a busy machine a child may well be silent for a second.
const gpuPoll = time.Second

func startGPUs(t *testing.T) *gpuRig {
	t.Helper()
	// The emulated engine runs in this process.
	g, helper := newGPUs(t, os.Getpid())
	g.rig = start(t, 2, 1, emulator.Options{BlockTokens: 16}, func(o *Options) {
		o.ChangeAgent = func(i int, cfg *agent.Config) {
			if i == 0 {
				cfg.GPU = agent.GPUConfig{Enabled: "auto", Poll: daemon.Duration(gpuPoll), Helper: helper}
			}
		}
	})
	return g
}

// write adds lines to what the driver says, in one step.
func (g *gpuRig) write(t *testing.T, lines string) {
	t.Helper()
	if err := os.WriteFile(g.scenario+".new", []byte(lines+g.base), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(g.scenario+".new", g.scenario); err != nil {
		t.Fatal(err)
	}
}

// gpus are the host's as an operator sees them.
func (g *gpuRig) gpus() (first *waypostv1.HostGpu, state string) {
	resp, err := g.Operator(0).ListGpus(g.t.Context(), &waypostv1.ListGpusRequest{Host: proto.String(HostName(0))})
	if err != nil {
		g.t.Fatal(err)
	}
	state = "ok"
	if len(resp.GetWithout()) > 0 {
		state = resp.GetWithout()[0].GetGpuState()
	}
	if len(resp.GetGpus()) > 0 {
		first = resp.GetGpus()[0]
	}
	return first, state
}

func (g *gpuRig) untilState(want string) {
	g.t.Helper()
	g.eventually("state of the worker is not "+want, func() string {
		if got := g.worker(0, WorkerName(0, 0)).GetState(); got != want {
			return got
		}
		return ""
	})
}

func (g *gpuRig) untilGPU(what string, ok func(gpu *waypostv1.HostGpu, state string) bool) {
	g.t.Helper()
	g.eventually("no "+what, func() string {
		gpu, state := g.gpus()
		if gpu != nil && ok(gpu, state) {
			return ""
		}
		return fmt.Sprint(gpu, " ", state)
	})
}

// An application's error is news and no more; one of the GPU takes the worker
// that uses it out, until it is acknowledged, also over a restart of the agent.
func TestGPU02XidsDecideAndAreAcknowledged(t *testing.T) {
	t.Parallel()
	g := startGPUs(t)
	workers := fmt.Sprintf("%s/0", EngineName)
	g.untilGPU("GPU of the engine", func(gpu *waypostv1.HostGpu, state string) bool {
		return state == "ok" && gpu.GetGpu().GetVerdict() == "ok" && strings.Join(gpu.GetWorkers(), " ") == workers
	})
	g.eventually("the worker's GPU is not known", func() string {
		if uuids := g.worker(0, WorkerName(0, 0)).GetGpuUuids(); len(uuids) != 1 {
			return fmt.Sprint(uuids)
		}
		return ""
	})
	// An error of the GPU that no engine uses, and one of an application.
	g.write(t, "xid 1 79\nxid 0 31\n")
	g.untilGPU("news of an application's error, which is no verdict", func(gpu *waypostv1.HostGpu, _ string) bool {
		return len(gpu.GetGpu().GetXids()) == 1 && gpu.GetGpu().GetVerdict() == "ok"
	})
	g.untilState("ready")
	g.write(t, "xid 1 79\nxid 0 31\nxid 0 79\n")
	g.untilState("excluded:gpu_fault")
	for i := range 4 {
		g.eventually("placed on the excluded one", func() string {
			p, err := g.place(0, ask{tokens: tokens(uint32(10+i), 64)})
			if err != nil {
				t.Fatal(err)
			}
			// Where the other one is in doubt as well, as on a machine that is busy,
			// an observation is set aside.
			if other := g.worker(0, WorkerName(1, 0)); other.GetState() != "ready" {
				return "the other one is " + other.GetState()
			}
			if p.GetWorker().GetName() != WorkerName(1, 0) {
				return p.GetBecause()
			}
			for _, term := range p.GetTerms() {
				if term.GetWorker() == WorkerName(0, 0) && !strings.Contains(term.GetExcluded(), "xid_79(gpu_0)") {
					return fmt.Sprintf("excluded because %q", term.GetExcluded())
				}
			}
			return ""
		})
	}
	if err := g.StopAgent(0); err != nil {
		t.Fatal(err)
	}
	if err := g.StartAgent(0); err != nil {
		t.Fatal(err)
	}
	g.untilGPU("error after a restart of the agent", func(gpu *waypostv1.HostGpu, _ string) bool {
		return gpu.GetAgeMs() < 60_000 && strings.HasPrefix(gpu.GetGpu().GetVerdict(), "exclude:xid_79")
	})
	g.untilState("excluded:gpu_fault")
	var resp *waypostv1.AckGpuResponse
	g.eventually("not acknowledged", func() string { // the lane comes back
		var err error
		if resp, err = g.Operator(0).AckGpu(t.Context(), &waypostv1.AckGpuRequest{Gpu: proto.String(HostName(0) + "/0"), Reason: proto.String("reseated")}); err != nil {
			return err.Error()
		}
		return ""
	})
	if resp.GetVerdict() != "ok" {
		t.Errorf("acknowledged: %v", resp)
	}
	g.untilState("ready")
}

// A driver call that never returns is told as such; the host stays, its worker
// is eligible, placing answers, and the agent ends.
func TestGPU08HungDriverStopsNothing(t *testing.T) {
	t.Parallel()
	g := startGPUs(t)
	g.untilGPU("GPU", func(_ *waypostv1.HostGpu, state string) bool { return state == "ok" })
	g.write(t, "slow nvmlDeviceGetPowerUsage 3600000\n")
	g.untilGPU("blocked driver", func(gpu *waypostv1.HostGpu, state string) bool {
		m := gpu.GetGpu()
		return strings.HasPrefix(state, "NVML blocked") && m.GetVerdict() == "price:nvml_blocked" && m.MemoryUsedBytes == nil && m.TemperatureCelsius == nil
	})
	g.untilState("ready")
	p, err := g.place(0, ask{tokens: tokens(1, 64), exclude: []string{WorkerName(1, 0)}})
	if err != nil || p.GetWorker().GetName() != WorkerName(0, 0) {
		t.Errorf("placed on %s: %v", p.GetWorker().GetName(), err)
	}
	if err := g.StopAgent(0); err != nil {
		t.Errorf("the agent does not end: %v", err)
	}
}
