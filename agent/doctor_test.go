package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"waypost/agent/engine"
	"waypost/gossip/doctor"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/systemd/daemon"
)

// finds looks for a check with a state whose text holds some words.
func finds(checks []*waypostv1.Check, check, state string, words ...string) bool {
	for _, c := range checks {
		text := c.GetSubject() + "\n" + c.GetWhat() + "\n" + c.GetCause() + "\n" + c.GetFix()
		ok := c.GetCheck() == check && c.GetState() == state
		for _, w := range words {
			ok = ok && strings.Contains(text, w)
		}
		if ok {
			return true
		}
	}
	return false
}

func TestDoctorNamesWhatWasFound(t *testing.T) {
	p := &procTable{}
	p.set(
		engineProcess{pid: 41, uid: 1000, args: "vllm serve m", address: "127.0.0.1:8000"},
		engineProcess{pid: 42, args: "VLLM::EngineCore", address: "127.0.0.1:5557"},
		engineProcess{pid: 46, uid: 1000, args: "vllm serve m --port 8002 --kv-events-config {\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5558\",\"replay_endpoint\":\"tcp://*:5658\"}", address: "127.0.0.1:8002"},
		engineProcess{pid: 43, args: "llama-server -m x"},
		engineProcess{pid: 44, args: "python3 -m sglang.launch_server --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:20000"},
		engineProcess{pid: 45, args: "trtllm-serve m --port 8001", address: "127.0.0.1:8001"},
	)
	a := discovering(t, p, func(c *Config) { c.Discover.Ignore = []string{"trtllm-8001"} })
	a.discovery.look(time.Now())
	checks := a.checks(time.Now()).Sorted()
	for _, c := range []struct {
		state string
		words []string
	}{
		{doctor.OK, []string{"gpu-01/vllm-8000", "pid 41 (vLLM)", "user 1000", "[[engine]]\nkind = \"vllm\"\nurl = \"http://127.0.0.1:8000\""}},
		{doctor.OK, []string{"gpu-01/vllm-8002", "[[engine]]\nkind = \"vllm\"\nurl = \"http://127.0.0.1:8002\"\nkv_events = \"tcp://127.0.0.1:5558\"\nkv_replay = \"tcp://127.0.0.1:5658\""}},
		{doctor.Problem, []string{"pid 42", "holds ports 5557", "kill 42"}},
		{doctor.Unknown, []string{"gpu-01/llamacpp-8080", "pid 43", "listens nowhere yet"}},
		{doctor.OK, []string{"pid 44", "node 1 of the engine at 10.0.0.1:20000"}},
		{doctor.OK, []string{"gpu-01/trtllm-8001", "discover.ignore"}},
	} {
		if !finds(checks, "engine-reachable", c.state, c.words...) {
			t.Errorf("no %s check with %q in %v", c.state, c.words, checks)
		}
	}
	if len(a.watching()) != 0 {
		t.Error("one of them is served")
	}
}

// A host on which no engine is found says so, unless engines are not looked for or
// are named.
func TestDoctorSaysThatNoEngineWasFound(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Config)
		args   string
		want   bool
	}{
		"none":         {nil, "", true},
		"not looked":   {func(c *Config) { c.Discover.Enabled = false }, "", false},
		"one is named": {func(c *Config) { c.Engines = []EngineConfig{{Name: "x", Kind: "generic", URL: "http://127.0.0.1:1"}} }, "", false},
		"one is there": {nil, "llama-server -m x", false},
	} {
		p := &procTable{}
		p.set()
		if c.args != "" {
			p.set(engineProcess{pid: 41, args: c.args})
		}
		a := discovering(t, p, c.change)
		a.discovery.look(time.Now())
		if got := finds(a.checks(time.Now()).Sorted(), "engine-reachable", doctor.Unknown, "no engine was found"); got != c.want {
			t.Errorf("%s: said %v", name, got)
		}
	}
}

// Where the kernel hides other users' processes, doctor does not say that there is
// no engine: it says that none is found, and what to do.
func TestDoctorNamesHiddenProcesses(t *testing.T) {
	p := &procTable{}
	p.set()
	delete(p.files, "1/cmdline")
	a := discovering(t, p, nil)
	a.discovery.look(time.Now())
	if checks := a.checks(time.Now()).Sorted(); !finds(checks, "engine-reachable", doctor.Problem, "hidden from the agent", "hidepid", "CAP_SYS_PTRACE", "[[engine]]") {
		t.Errorf("checks %v", checks)
	}
}

// An engine in another network namespace is named with the fix, until agent.toml
// names the engine.
func TestDoctorNamesAnotherNamespace(t *testing.T) {
	p := &procTable{}
	p.set(engineProcess{pid: 7713, args: "vllm serve m --port 8000", address: "127.0.0.1:8000"})
	files := p.now()
	// The socket is in the process's own list only.
	files["7713/net/tcp"] = files["net/tcp"]
	delete(files, "net/tcp")
	empty := &procTable{}
	empty.set()
	files["net/tcp"] = empty.now()["net/tcp"]

	a := discovering(t, p, nil)
	a.discovery.look(time.Now())
	want := []string{"gpu-01/vllm-8000", "found pid 7713 (vLLM) in another network namespace, port 8000 not reachable from the host; publish it or set [[engine]] url", "[[engine]]"}
	if checks := a.checks(time.Now()).Sorted(); !finds(checks, "engine-reachable", doctor.Problem, want...) {
		t.Errorf("%v", checks)
	}
	configured := discovering(t, p, func(c *Config) { c.Engines = []EngineConfig{{Kind: "vllm", URL: "http://172.17.0.2:8000"}} })
	configured.discovery.look(time.Now())
	if checks := configured.checks(time.Now()).Sorted(); finds(checks, "engine-reachable", doctor.Problem, "another network namespace") {
		t.Errorf("%v", checks)
	}
}

// What is seen goes before what the flags say: a view that is live needs no
// advice, one that stays empty although the flags are right is a problem.
func TestDoctorBelievesTheStream(t *testing.T) {
	const right = `--kv-events-config {"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"} --enable-prompt-tokens-details`
	const wrong = `--kv-events-config {"enable_kv_cache_events":true,"endpoint":"tcp://127.0.0.1:5557","replay_endpoint":"tcp://*:5657"}`
	for _, c := range []struct {
		name, flags     string
		coverage        engine.Coverage
		hint            string
		check, state    string
		words           []string
		noOtherProblems bool
	}{
		{"live", right, engine.CoverageFull, "", "engine-events", doctor.OK, []string{"cache view live"}, true},
		{"live against the flags", wrong + " --enable-prompt-tokens-details", engine.CoverageFull, "", "engine-events", doctor.OK, []string{"cache view live"}, true},
		{"wrong flags", wrong, engine.CoverageNone, "no event publisher answers", "engine-events", doctor.Problem, []string{"dials tcp://127.0.0.1:5557", `"endpoint":"tcp://*:5557"`}, false},
		{
			"silent", right, engine.CoverageNone, "no event came while the engine computed prompts: check that prefix caching is on", "engine-events", doctor.Problem,
			[]string{"no event of the engine's cache arrives", "check that prefix caching is on"},
			false,
		},
		{"replay lost", right, engine.CoveragePartial, "earlier events are gone: raise buffer_steps in --kv-events-config", "engine-replay", doctor.Problem, []string{"raise buffer_steps"}, false},
		{"catching up", right, engine.CoveragePartial, "reading the engine's history of events", "engine-events", doctor.Unknown, []string{"history"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &procTable{}
			p.set(engineProcess{pid: 41, args: "vllm serve m " + c.flags, address: "0.0.0.0:18000"})
			a := discovering(t, p, nil)
			a.started.Store(false) // the test says what is seen
			a.discovery.look(time.Now())
			w := a.watching()[0]
			w.Facts(engine.Facts{Model: "m", Version: "0.32.0", BlockTokens: 16, StartMark: 1})
			w.Health(true, "")
			w.Coverage(0, c.coverage, c.hint)
			checks := a.checks(time.Now()).Sorted()
			if !finds(checks, c.check, c.state, append(c.words, "gpu-01/vllm-18000")...) {
				t.Errorf("no %s %s with %q in %v", c.state, c.check, c.words, checks)
			}
			for _, k := range checks {
				if c.noOtherProblems && k.GetState() == doctor.Problem && strings.HasPrefix(k.GetCheck(), "engine-") {
					t.Errorf("unexpected: %v", k)
				}
			}
		})
	}
}

func TestDoctorThroughTheLocalSocket(t *testing.T) {
	p := &procTable{}
	p.set(engineProcess{pid: 41, args: "vllm serve m", address: "127.0.0.1:8000"})
	run := t.TempDir()
	a := discovering(t, p, func(c *Config) { c.RunDir, c.Metrics.Listen = run, "" })
	a.started.Store(false)
	if err := a.startLocal(); err != nil {
		t.Fatal(err)
	}
	defer a.stopLocal(t.Context())
	conn, err := grpc.NewClient("unix:"+filepath.Join(run, SocketName), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := waypostv1.NewOperatorServiceClient(conn)
	ports := true
	resp, err := client.Doctor(t.Context(), &waypostv1.DoctorRequest{Ports: &ports})
	if err != nil {
		t.Fatal(err)
	}
	for _, check := range []string{"engine-reachable", "nvml-driver", "mesh-udp", "mesh-key", "lane", "disk", "ports", "version-skew"} {
		if !finds(resp.GetChecks(), check, doctor.OK) && !finds(resp.GetChecks(), check, doctor.Problem) {
			t.Errorf("%s was not checked: %v", check, resp.GetChecks())
		}
	}
	if !finds(resp.GetChecks(), "engine-events", doctor.Problem, "--kv-events-config") {
		t.Errorf("the flag that raises the coverage is not named: %v", resp.GetChecks())
	}
	other := "gpu-02"
	if _, err := client.Doctor(t.Context(), &waypostv1.DoctorRequest{Host: &other}); err == nil || !strings.Contains(err.Error(), "ask a coordinator about gpu-02") {
		t.Errorf("asked about another host: %v", err)
	}
}

func TestDoctorSeesTheDiskAndTheMetricSaysSo(t *testing.T) {
	p := &procTable{}
	p.set()
	a := discovering(t, p, nil)
	metric := func() float64 {
		a.keepChecks(time.Now())
		if err := testutil.GatherAndCompare(a.opt.Gatherer, strings.NewReader("# HELP waypost_doctor_check Named checks: 0 ok, 1 problem.\n# TYPE waypost_doctor_check gauge\nwaypost_doctor_check{check=\"disk\"} 1\n"), "waypost_doctor_check"); err == nil {
			t.Error("other checks have no series")
		}
		families, err := a.opt.Gatherer.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				if f.GetName() == "waypost_doctor_check" && m.GetLabel()[0].GetValue() == "disk" {
					return m.GetGauge().GetValue()
				}
			}
		}
		return -1
	}
	if got := metric(); got != 0 {
		t.Errorf("the disk is %v, want 0", got)
	}
	a.cfg.StateDir = filepath.Join(a.cfg.StateDir, "none")
	if got := metric(); got != 1 {
		t.Errorf("a state directory that cannot be written is %v, want 1", got)
	}
	if checks := a.kept(); !finds(checks, "disk", doctor.Problem, "cannot be written", "chown waypost: "+a.cfg.StateDir) {
		t.Errorf("%v", checks)
	}
}

// An unreadable process table is a problem of its own, and what was found before
// stays.
func TestDoctorSaysThatItCannotLook(t *testing.T) {
	p := &procTable{}
	p.set(engineProcess{pid: 41, args: "vllm serve m", address: "127.0.0.1:8000"})
	a := discovering(t, p, nil)
	a.started.Store(false)
	a.discovery.look(time.Now())
	delete(p.now(), "net/tcp")
	a.discovery.look(time.Now())
	if checks := a.checks(time.Now()).Sorted(); !finds(checks, "engine-reachable", doctor.Problem, "engines are not looked for") || len(a.watching()) != 1 {
		t.Errorf("%v, %d engines", checks, len(a.watching()))
	}
}

func TestDoctorNeverTellsKeys(t *testing.T) {
	p := &procTable{}
	p.set(engineProcess{pid: 41, args: "vllm serve m --api-key sk-secret", address: "127.0.0.1:8000"})
	a := discovering(t, p, nil)
	a.started.Store(false)
	a.discovery.look(time.Now())
	checks := a.checks(time.Now()).Sorted()
	if strings.Contains(fmt.Sprint(checks), "sk-secret") {
		t.Error("a key of an engine is told")
	}
	if !finds(checks, "engine-reachable", doctor.Problem, "wants a key", "api_key_file") {
		t.Errorf("%v", checks)
	}
}

// A block's size is the engine's own word, told with where it comes from; one
// that the engine does not tell is named as missing, and nothing stands in for it.
// The agent's configuration cannot say another one.
func TestIDN02BlockSizeIsTheEnginesWord(t *testing.T) {
	for _, c := range []struct {
		blockTokens int
		state       string
		words       []string
	}{
		{16, doctor.OK, []string{"gpu-01/vllm-18000", "16 tokens per block, as the engine says"}},
		{128, doctor.OK, []string{"gpu-01/vllm-18000", "128 tokens per block, as the engine says"}},
		{0, doctor.Problem, []string{"gpu-01/vllm-18000", "does not tell the size of its blocks", "--disable-log-stats"}},
	} {
		p := &procTable{}
		p.set(engineProcess{pid: 41, args: "vllm serve m", address: "0.0.0.0:18000"})
		a := discovering(t, p, nil)
		a.started.Store(false)
		a.discovery.look(time.Now())
		w := a.watching()[0]
		w.Facts(engine.Facts{Model: "m", Version: "0.32.0", BlockTokens: c.blockTokens, StartMark: 1})
		w.Health(true, "")
		if checks := a.checks(time.Now()).Sorted(); !finds(checks, "engine-block-size", c.state, c.words...) {
			t.Errorf("%d: no %s with %q in %v", c.blockTokens, c.state, c.words, checks)
		}
		if n := int(a.hostFacts(t).GetBlockTokens()); n != c.blockTokens {
			t.Errorf("coordinators are told %d tokens per block, the engine says %d", n, c.blockTokens)
		}
	}
	file := filepath.Join(t.TempDir(), "agent.toml")
	if err := os.WriteFile(file, []byte("[[engine]]\nkind = \"vllm\"\nurl = \"http://127.0.0.1:8000\"\nblock_size = 32\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	if _, err := daemon.Load(&cfg, daemon.LoadOptions{File: file, MustExist: true}); err == nil || !strings.Contains(err.Error(), "block_size") {
		t.Errorf("a block size of the configuration's own: %v", err)
	}
}

// hostFacts are the facts of the first worker, as coordinators are told them.
func (a *Agent) hostFacts(t *testing.T) *waypostv1.WorkerFacts {
	t.Helper()
	workers := a.lanes.hello().GetWorkers()
	if len(workers) != 1 {
		t.Fatalf("%d workers are told", len(workers))
	}
	return workers[0]
}
