package agent

import (
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"

	"waypost/agent/engine"
	"waypost/nvml"
	"waypost/systemd/daemon"
	"waypost/testbed/emulator"
)

// procTable is a process table that tests change while it is read.
type procTable struct {
	mu    sync.Mutex
	files fstest.MapFS
}

// engineProcess is one engine of a table.
type engineProcess struct {
	pid, uid int
	args     string
	address  string // host:port where it listens
}

func (p *procTable) set(engines ...engineProcess) {
	files := fstest.MapFS{"self": &fstest.MapFile{}, "1/cmdline": &fstest.MapFile{Data: []byte("init")}}
	sockets := "head\n"
	for i, e := range engines {
		dir := fmt.Sprintf("%d/", e.pid)
		files[dir+"cmdline"] = &fstest.MapFile{Data: []byte(strings.ReplaceAll(e.args, " ", "\x00"))}
		files[dir+"status"] = &fstest.MapFile{Data: fmt.Appendf(nil, "PPid:\t1\nUid:\t%d\t%d\t%d\t%d\n", e.uid, e.uid, e.uid, e.uid)}
		if e.address == "" {
			continue
		}
		a := netip.MustParseAddrPort(e.address)
		b := a.Addr().As4()
		sockets += fmt.Sprintf("0: %02X%02X%02X%02X:%04X 0:0 0A 0:0 0:0 0 %d 0 %d 1\n", b[3], b[2], b[1], b[0], a.Port(), e.uid, i+7)
		files[dir+"fd/3"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: fmt.Appendf(nil, "socket:[%d]", i+7)}
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

// discovering is a wired agent that looks for engines in a table when it is told
// to.
func discovering(t *testing.T, p *procTable, change func(*Config)) *Agent {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "prefix.key")
	if err := os.WriteFile(file, fmt.Appendf(nil, "%032x\n", 7), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	cfg.Name, cfg.StateDir, cfg.RunDir, cfg.Prefix.KeyFile, cfg.Mesh.Listen, cfg.GPU.Enabled = "gpu-01", dir, "", file, "127.0.0.1:0", "off"
	if change != nil {
		change(&cfg)
	}
	a, err := New(Options{Config: cfg, Version: "test", Process: 0xa1, Proc: p})
	if err != nil {
		t.Fatal(err)
	}
	a.started.Store(true)
	t.Cleanup(func() {
		a.cancel()
		a.dialer.Close()
		a.tasks.Wait()
	})
	return a
}

func startEmulator(t *testing.T) *emulator.Engine {
	t.Helper()
	e, err := emulator.Start(emulator.Options{Model: "m", BlockTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

func portOfAddress(t *testing.T, address string) string {
	t.Helper()
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// serving is a vLLM process of root's that listens where an emulated engine does.
func serving(t *testing.T, pid int, e *emulator.Engine) engineProcess {
	return engineProcess{pid: pid, args: "vllm serve m --port " + portOfAddress(t, e.Address()), address: e.Address()}
}

// hello is what the agent tells of its workers: names and URLs.
func helloWorkers(a *Agent) (out []string) {
	for _, w := range a.lanes.hello().GetWorkers() {
		out = append(out, fmt.Sprintf("%s/%d %s", w.GetEngine(), w.GetRank(), w.GetUrl()))
	}
	return out
}

func waitHello(t *testing.T, a *Agent, want ...string) {
	t.Helper()
	var diff string
	for range 600 {
		if diff = cmp.Diff(want, helloWorkers(a)); diff == "" {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatal(diff)
}

func TestFoundEngineIsServed(t *testing.T) {
	e, p := startEmulator(t), &procTable{}
	p.set(serving(t, 41, e))
	a := discovering(t, p, nil)
	a.discovery.look(time.Now())
	waitHello(t, a, "vllm-"+portOfAddress(t, e.Address())+"/0 "+e.URL())
}

// An engine that starts again at another port is the same worker moved: its old
// address is told no more.
func TestDSC02EngineMovesToAnotherPort(t *testing.T) {
	e1, e2, p := startEmulator(t), startEmulator(t), &procTable{}
	p.set(serving(t, 41, e1))
	a := discovering(t, p, nil)
	a.discovery.look(time.Now())
	waitHello(t, a, "vllm-"+portOfAddress(t, e1.Address())+"/0 "+e1.URL())
	p.set(serving(t, 57, e2))
	a.discovery.look(time.Now())
	for _, w := range helloWorkers(a) {
		if strings.Contains(w, e1.URL()) {
			t.Errorf("%s is still told after one look", w)
		}
	}
	waitHello(t, a, "vllm-"+portOfAddress(t, e2.Address())+"/0 "+e2.URL())
	if n := len(a.watching()); n != 1 {
		t.Errorf("%d engines are watched, want the one that is there", n)
	}
}

// It is the model that it served last that tells an engine which has moved.
func TestEngineMovesWithItsNewestModel(t *testing.T) {
	e1, e2, p := startEmulator(t), startEmulator(t), &procTable{}
	a := discovering(t, p, nil)
	serve := func(pid int, e *emulator.Engine, model string) {
		one := serving(t, pid, e)
		one.args = strings.Replace(one.args, "serve m", "serve "+model, 1)
		p.set(one)
		a.discovery.look(time.Now())
	}
	serve(41, e1, "m")
	serve(42, e1, "n")
	serve(43, e2, "n")
	if all := a.watching(); len(all) != 1 || all[0].target.URL != e2.URL() {
		t.Errorf("%d engines are watched, want the one that is there", len(all))
	}
}

// Two engines whose command lines name no model are not taken for one that moved.
func TestEnginesOfNoNamedModelAreNotOne(t *testing.T) {
	e1, e2, p := startEmulator(t), startEmulator(t), &procTable{}
	a := discovering(t, p, nil)
	for pid, e := range []*emulator.Engine{e1, e2} {
		p.set(engineProcess{pid: pid + 41, args: "llama-server --port " + portOfAddress(t, e.Address()), address: e.Address()})
		a.discovery.look(time.Now())
	}
	if n := len(a.watching()); n != 2 {
		t.Errorf("%d engines are listed, want the one that is there and the one that is gone", n)
	}
}

// Two engines whose processes began alike, as in two containers, are two lives.
func TestDSC03ProcessMarksOfEqualLives(t *testing.T) {
	e1, e2, p := startEmulator(t), startEmulator(t), &procTable{}
	p.set(serving(t, 41, e1), serving(t, 42, e2))
	a := discovering(t, p, nil)
	a.started.Store(false)
	a.discovery.look(time.Now())
	marks := map[uint64]bool{}
	for _, w := range a.watching() {
		w.Facts(engine.Facts{Model: "m", StartMark: 1, BlockTokens: 16})
	}
	for _, w := range a.lanes.hello().GetWorkers() {
		marks[w.GetEngineProcess()] = true
	}
	if len(marks) != 2 {
		t.Errorf("%d lives, want 2", len(marks))
	}
}

// The cordon of an engine that moves is kept by its GPUs and model, so the hello
// names them.
func TestGPUsOfAnEngineAreTold(t *testing.T) {
	e, p := startEmulator(t), &procTable{}
	p.set(serving(t, 41, e))
	a := discovering(t, p, nil)
	a.discovery.look(time.Now())
	gpus := []nvml.Device{
		{GPU: nvml.GPU{UUID: "GPU-1", Processes: []nvml.Process{{PID: 43}}}},
		{GPU: nvml.GPU{UUID: "GPU-2", Processes: []nvml.Process{{PID: 99}}}},
	}
	parents := func(pid int) (int, bool) { return map[int]int{43: 41}[pid], pid == 43 || pid == 41 }
	if !a.takeGPUs(gpus, parents) || a.takeGPUs(gpus, parents) {
		t.Error("a change must be told once")
	}
	waitHello(t, a, "vllm-"+portOfAddress(t, e.Address())+"/0 "+e.URL())
	if diff := cmp.Diff([]string{"GPU-1"}, a.lanes.hello().GetWorkers()[0].GetGpuUuids()); diff != "" {
		t.Error(diff)
	}
	// A driver that tells no processes takes nothing away.
	gpus[0].Processes = nil
	if a.takeGPUs(gpus, parents) || len(a.watching()[0].gpuUUIDs()) != 1 {
		t.Error("what is not known any more was forgotten")
	}
}

// An engine that ends is lost at once, and in its next life the same worker.
func TestLostEngineComesBackAsItself(t *testing.T) {
	e, p := startEmulator(t), &procTable{}
	p.set(serving(t, 41, e))
	a := discovering(t, p, nil)
	now := time.Now()
	a.discovery.look(now)
	name := "vllm-" + portOfAddress(t, e.Address())
	waitHello(t, a, name+"/0 "+e.URL())
	index := a.ranks()[0].index
	p.set()
	a.discovery.look(now)
	if load := a.lanes.load(nil).GetWorkers(); len(load) != 1 || load[0].GetState() != "lost" || !strings.Contains(load[0].GetStateReason(), "process 41") {
		t.Errorf("load is %v, want lost with the process", load)
	}
	p.set(serving(t, 58, e))
	a.discovery.look(now)
	for range 600 {
		if a.lanes.load(nil).GetWorkers()[0].GetState() == "ready" {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if r := a.ranks(); len(r) != 1 || r[0].index != index || a.lanes.load(nil).GetWorkers()[0].GetState() != "ready" {
		t.Errorf("it is not the same worker, ready again: %v", a.lanes.load(nil).GetWorkers())
	}
	p.set()
	a.discovery.look(now)
	a.discovery.look(now.Add(keepLost))
	if n := len(a.watching()); n != 0 || len(a.ranks()) != 0 || len(helloWorkers(a)) != 0 {
		t.Errorf("%d engines are watched long after it went", n)
	}
}

// An engine that is started again as doctor says, at the same port, is read where
// it publishes now, whether it was seen to be gone or not; so is one that publishes
// no more.
func TestEngineIsReadWhereItsNextLifePublishes(t *testing.T) {
	e := startEmulator(t)
	without := serving(t, 41, e)
	with := serving(t, 58, e)
	with.args += ` --kv-events-config {"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}`
	for _, seen := range []bool{true, false} {
		p := &procTable{}
		a := discovering(t, p, nil)
		for _, life := range []struct {
			engineProcess
			events, replay string
		}{{without, "", ""}, {with, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"}, {without, "", ""}} {
			if seen {
				p.set()
				a.discovery.look(time.Now())
			}
			p.set(life.engineProcess)
			a.discovery.look(time.Now())
			all := a.watching()
			if len(all) != 1 || all[0].target.Events != life.events || all[0].target.Replay != life.replay || all[0].process() == nil {
				t.Fatalf("with %q %d engines are watched, the first is read at %q and %q", life.args, len(all), all[0].target.Events, all[0].target.Replay)
			}
			waitHello(t, a, "vllm-"+portOfAddress(t, e.Address())+"/0 "+e.URL())
		}
	}
}

func TestWhatIsNotServed(t *testing.T) {
	e, p := startEmulator(t), &procTable{}
	port := portOfAddress(t, e.Address())
	names := func(a *Agent) (out []string) {
		for _, w := range a.watching() {
			out = append(out, w.target.Name)
		}
		return out
	}
	ofUser := serving(t, 41, e)
	ofUser.uid = 1000
	p.set(ofUser)
	a := discovering(t, p, nil)
	a.discovery.look(time.Now())
	if got := names(a); got != nil {
		t.Errorf("an engine of an ordinary user is served unasked: %v", got)
	}
	// The line that allows it: the process is then known, the name its own.
	allowed := discovering(t, p, func(c *Config) { c.Engines = []EngineConfig{{Name: "mine", Kind: "vllm", URL: e.URL()}} })
	allowed.discovery.look(time.Now())
	if diff := cmp.Diff([]string{"mine"}, names(allowed)); diff != "" || allowed.watching()[0].process() == nil {
		t.Errorf("%s, process %v", diff, allowed.watching()[0].process())
	}

	p.set(serving(t, 42, e))
	a.discovery.look(time.Now())
	if diff := cmp.Diff([]string{"vllm-" + port}, names(a)); diff != "" {
		t.Error(diff)
	}
	// The port changes hands.
	p.set(ofUser)
	a.discovery.look(time.Now())
	if a.watching()[0].process() != nil {
		t.Error("another user's process is taken for the engine")
	}
	p.set(serving(t, 42, e))
	a.discovery.look(time.Now())
	a.discovery.reload(DiscoverConfig{Enabled: true, Every: daemon.Duration(time.Minute), Ignore: []string{"vllm-" + port}})
	a.discovery.look(time.Now())
	if got := names(a); got != nil {
		t.Errorf("%v is served although it is to be ignored", got)
	}
	a.discovery.reload(DiscoverConfig{Enabled: true, Every: daemon.Duration(time.Minute)})
	a.discovery.look(time.Now())
	if got := names(a); len(got) != 1 {
		t.Error("it is not served again")
	}
	a.discovery.reload(DiscoverConfig{Every: daemon.Duration(time.Minute)})
	a.discovery.look(time.Now())
	if got := names(a); got != nil {
		t.Errorf("%v is served although nothing is looked for", got)
	}
}

func TestDiscoverConfigNamesBadFields(t *testing.T) {
	for _, every := range []time.Duration{0, time.Millisecond, time.Hour} {
		if err := (DiscoverConfig{Every: daemon.Duration(every)}).Validate(); err == nil || !strings.Contains(err.Error(), "1s to 10m") {
			t.Errorf("every %s: %v", every, err)
		}
	}
}
