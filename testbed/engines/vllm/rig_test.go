package vllm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"waypost/agent"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/cluster"
	"waypost/testbed/engines"
)

const (
	// patience bounds what must happen sooner or later, startPatience a start of
	// the server; they decide no pass.
	patience      = 2 * time.Minute
	startPatience = 6 * time.Minute

	model   = "tiny"
	adapter = "tiny-lora"
	worker  = "gpu-01/" + cluster.EngineName + "/0"

	// blockTokens is the only block size of vLLM's CPU attention that is not
	// larger, poolBlocks what fits fewer prompts than the test sends.
	blockTokens = 32
	poolBlocks  = 700
)

// rig is a real server with a real agent, each a process, and a coordinator.
type rig struct {
	t      *testing.T
	server *engines.Process
	agent  *engines.Process
	*cluster.Cluster
	*engines.Client
	writer *engines.Writer
	// events and replay are the server's endpoints, mirror a block table of the
	// present life.
	events, replay string
	mirror         *mirror
	// placed sets expectations of placements against what was reused, blocks
	// those of the block table.
	placed, blocks *engines.Table
	overlaps       *overlaps
	// n numbers the requests.
	n *atomic.Int64
}

// port is a free port.
func port(t *testing.T) string {
	t.Helper()
	p, err := engines.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// logTo is a file for what a process writes.
func logTo(t *testing.T, name string) *os.File {
	t.Helper()
	dir := os.Getenv("WAYPOST_TEST_LOG")
	if dir == "" {
		dir = t.TempDir()
	}
	f, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

// prepare makes server, agent and coordinator, and starts the server and the
// coordinator.
func prepare(t *testing.T) *rig {
	t.Helper()
	home := os.Getenv("WAYPOST_VLLM")
	if home == "" {
		t.Skip("WAYPOST_VLLM names no folder with a vLLM server and a model; .ci/run vllm installs both")
	}
	r := &rig{t: t, writer: engines.NewWriter(1, 3, 150), placed: &engines.Table{}, blocks: &engines.Table{}, overlaps: &overlaps{open: map[*span]bool{}}, n: &atomic.Int64{}}
	http8, pub, replay := port(t), port(t), port(t)
	r.events, r.replay = "tcp://127.0.0.1:"+pub, "tcp://127.0.0.1:"+replay
	events, err := json.Marshal(map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:" + pub, "replay_endpoint": "tcp://*:" + replay, "buffer_steps": 10000, "topic": "kv@tiny",
	})
	if err != nil {
		t.Fatal(err)
	}
	r.server = &engines.Process{
		Path: filepath.Join(home, "venv", "bin", "python"), URL: "http://127.0.0.1:" + http8, Health: "/health", Log: logTo(t, "server.log"),
		Env: []string{
			"HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "VLLM_SERVER_DEV_MODE=1",
			"VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "VLLM_ENABLE_V1_MULTIPROCESSING=0",
		},
		Args: []string{
			"-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", http8,
			"--model", filepath.Join(home, "model"), "--served-model-name", model, "--dtype", "bfloat16", "--enforce-eager",
			"--max-model-len", "4096", "--max-num-seqs", "16", "--block-size", fmt.Sprint(blockTokens), "--num-gpu-blocks-override", fmt.Sprint(poolBlocks),
			"--enable-prefix-caching", "--enable-prompt-tokens-details",
			"--enable-lora", "--lora-modules", adapter + "=" + filepath.Join(home, "lora"), "--max-lora-rank", "8",
			"--kv-events-config", string(events),
		},
	}
	r.startServer()
	t.Cleanup(func() {
		pid := r.server.PID()
		if err := r.server.Kill(); err != nil {
			t.Errorf("kill: %v", err)
		}
		if err := engines.Ended(pid, patience); pid != 0 && err != nil {
			t.Error(err)
		}
	})
	c, err := cluster.Start(t.Context(), cluster.Options{
		Dir: t.TempDir(), Coordinators: 1, Version: "0.0.0-test", LateAgents: true,
		External: []agent.EngineConfig{{Name: cluster.EngineName, Kind: "vllm", URL: r.server.URL}},
	})
	if err != nil {
		t.Fatal(err)
	}
	r.Cluster = c
	r.Client = &engines.Client{Placement: c.Placement(0), HTTP: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	r.prepareAgent()
	return r
}

// startServer starts the server, and a mirror of its new life.
func (r *rig) startServer() {
	r.t.Helper()
	begin := time.Now()
	if err := r.server.Start(r.t.Context(), startPatience); err != nil {
		r.t.Fatal(err)
	}
	r.t.Logf("vLLM serves after %.0f s", time.Since(begin).Seconds())
	if r.mirror == nil {
		r.t.Cleanup(func() { r.mirror.close() })
	} else {
		r.mirror.close()
	}
	r.mirror = watch(r.events, r.replay)
}

// killServer ends all processes of the server and waits until its ports are
// free.
func (r *rig) killServer(pid int) {
	r.t.Helper()
	if err := r.server.Kill(); err != nil {
		r.t.Fatal(err)
	}
	if err := engines.Ended(pid, patience); err != nil {
		r.t.Fatal(err)
	}
	for _, address := range []string{r.events, r.replay} {
		r.eventually("a port of the engine is still in use", func() string {
			l, err := net.Listen("tcp", strings.TrimPrefix(address, "tcp://"))
			if err != nil {
				return err.Error()
			}
			return errText(l.Close())
		})
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// prepareAgent builds the program and writes the agent's configuration.
func (r *rig) prepareAgent() {
	r.t.Helper()
	dir := r.t.TempDir()
	program, file, metrics := filepath.Join(dir, "waypost"), filepath.Join(dir, "agent.toml"), port(r.t)
	if out, err := exec.Command("go", "build", "-o", program, "waypost").CombinedOutput(); err != nil {
		r.t.Fatalf("%v: %s", err, out)
	}
	c := r.AgentConfig(0)
	text := fmt.Sprintf(`name = %q
state_dir = %q
run_dir = ""
[tls]
ca_file = %q
cert_file = %q
key_file = %q
[mesh]
listen = "127.0.0.1:0"
key_file = %q
fleet = %q
join = [%q]
[cluster]
coordinators = [%q]
[prefix]
key_file = %q
[gpu]
enabled = "off"
[discover]
enabled = false
[metrics]
listen = "127.0.0.1:%s"
[[engine]]
name = %q
kind = "vllm"
url = %q
kv_events = %q
kv_replay = %q
`, c.Name, c.StateDir, c.TLS.CAFile, c.TLS.CertFile, c.TLS.KeyFile, c.Mesh.KeyFile, c.Mesh.Fleet, c.Mesh.Join[0], c.Cluster.Coordinators[0], c.Prefix.KeyFile,
		metrics, cluster.EngineName, r.server.URL, r.events, r.replay)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
	r.agent = &engines.Process{
		Path: program, Args: []string{"agent", "--config", file}, URL: "http://127.0.0.1:" + metrics, Health: "/healthz", Log: logTo(r.t, "agent.log"),
	}
	r.t.Cleanup(func() {
		if err := r.agent.Kill(); err != nil {
			r.t.Errorf("kill the agent: %v", err)
		}
	})
}

// startAgent starts the agent and waits until its worker is ready with a live
// view.
func (r *rig) startAgent() {
	r.t.Helper()
	if err := r.agent.Start(r.t.Context(), patience); err != nil {
		r.t.Fatal(err)
	}
	if err := r.WaitReady(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}

// worker is the worker as the coordinator shows it; nil: not at all.
func (r *rig) worker() *waypostv1.Worker {
	name := worker
	resp, err := r.Operator(0).ListWorkers(r.t.Context(), &waypostv1.ListWorkersRequest{Name: &name})
	if err != nil || len(resp.GetWorkers()) != 1 {
		return nil
	}
	return resp.GetWorkers()[0]
}

// waitDown waits until the worker is not used any more.
func (r *rig) waitDown() {
	r.t.Helper()
	r.eventually("the death is not seen", func() string {
		if r.worker().GetState() != "ready" {
			return ""
		}
		return "still ready"
	})
}

// waitBlind waits until the worker's view is not live any more.
func (r *rig) waitBlind() {
	r.t.Helper()
	r.eventually("the agent's death is not seen", func() string {
		if w := r.worker(); w.GetState() != "ready" || w.GetView() != "live" {
			return ""
		}
		return "still ready with a live view"
	})
}

// waitLife waits until the worker is ready in another life than a former one.
func (r *rig) waitLife(former string) {
	r.t.Helper()
	r.eventually("the new engine life is not used", func() string {
		w := r.worker()
		if w.GetState() != "ready" || w.GetIncarnation() == former {
			return w.GetState() + " " + w.GetIncarnation()
		}
		return ""
	})
}

// eventually waits until fn answers "".
func (r *rig) eventually(what string, fn func() string) {
	r.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		state := fn()
		if state == "" {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("%s: %s", what, state)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// liveAt tells when the view of a new engine life is live, once.
func (r *rig) liveAt(ctx context.Context, former string) <-chan time.Time {
	out := make(chan time.Time, 1)
	go func() {
		for ctx.Err() == nil {
			if w := r.worker(); w != nil && w.GetIncarnation() != former && w.GetState() == "ready" && w.GetView() == "live" {
				out <- time.Now()
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	return out
}

// post asks the server itself.
func (r *rig) post(path string, body, answer any) {
	r.t.Helper()
	if err := r.Ask(r.server.URL+path, body, answer); err != nil {
		r.t.Fatal(err)
	}
}

// asked counts the requests that the server has logged: GET /metrics, which
// tells load, and other GETs, which tell facts and health. Nobody but the agent
// sends such while the test does not start the server.
func (r *rig) asked() (load, facts int) {
	r.t.Helper()
	b, err := os.ReadFile(r.server.Log.Name())
	if err != nil {
		r.t.Fatal(err)
	}
	load = bytes.Count(b, []byte(`"GET /metrics HTTP/`))
	return load, bytes.Count(b, []byte(`"GET /`)) - load
}

// The kinds of differences; there is no other.
const (
	kindNone     = "equal"
	kindInFlight = "computed by another request of the same moment"
	kindEvicted  = "evicted between look and admission"
	kindReset    = "the reset is told with the next step"
	kindOther    = "of no known kind"
)

// overlaps knows which requests are under way at the same time.
type overlaps struct {
	mu   sync.Mutex
	open map[*span]bool
}

// span is a request under way with those that were while it was.
type span struct {
	request *engines.Request
	others  []*engines.Request
}

func (o *overlaps) begin(q *engines.Request) *span {
	o.mu.Lock()
	defer o.mu.Unlock()
	s := &span{request: q}
	for other := range o.open {
		s.others = append(s.others, other.request)
		other.others = append(other.others, q)
	}
	o.open[s] = true
	return s
}

func (o *overlaps) end(s *span) []*engines.Request {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.open, s)
	return s.others
}

// sharing is how many tokens a prompt has in common with the longest such
// beginning among some others.
func sharing(q *engines.Request, others []*engines.Request) (most int) {
	for _, o := range others {
		if o == q || o.Adapter != q.Adapter || o.Salt != q.Salt {
			continue
		}
		n := 0
		for n < min(len(q.Tokens), len(o.Tokens)) && q.Tokens[n] == o.Tokens[n] {
			n++
		}
		most = max(most, n)
	}
	return most
}
