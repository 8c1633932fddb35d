package cluster

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"waypost/agent"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// engineProcessEnv holds the options of an emulated engine when this program is
// to be one, in a process of its own.
const engineProcessEnv = "WAYPOST_TEST_ENGINE"

// runEngineProcess is the engine until its standard input ends.
func runEngineProcess(options string) error {
	var o emulator.Options
	if err := json.Unmarshal([]byte(options), &o); err != nil {
		return err
	}
	e, err := emulator.Start(o)
	if err != nil {
		return err
	}
	defer e.Close()
	_, err = os.Stdin.Read(make([]byte, 1))
	if err != nil && err.Error() != "EOF" {
		return err
	}
	return nil
}

// loopbackPort is a port of the loopback address that nobody uses now.
func loopbackPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// startVLLM runs an emulated engine whose command line is that of vLLM; end ends
// it.
func startVLLM(t *testing.T) (port string, pid int, end func()) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	port, events, replay := loopbackPort(t), loopbackPort(t), loopbackPort(t)
	options, err := json.Marshal(emulator.Options{
		Model: "Llama-3.1-8B", BlockTokens: 16, Address: "127.0.0.1:" + port, EventsAddress: "127.0.0.1:" + events, ReplayAddress: "127.0.0.1:" + replay,
	})
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%s","replay_endpoint":"tcp://*:%s"}`, events, replay)
	cmd := &exec.Cmd{
		Path: self, Args: []string{"/usr/local/bin/vllm", "serve", "Llama-3.1-8B", "--port", port, "--kv-events-config", config},
		Env: append(cleanEnv(), engineProcessEnv+"="+string(options)), Stderr: os.Stderr,
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	end = func() {
		if !ended {
			ended = true
			_ = stdin.Close()
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(end)
	return port, cmd.Process.Pid, end
}

// A real agent finds a real process that was not named to it, serves it, and
// says so; when the process ends, the worker is lost with its process.
func TestEngineProcessIsFoundAndServed(t *testing.T) {
	t.Parallel()
	if uid := os.Getuid(); uid > 999 {
		t.Skipf("user %d runs this: engines of ordinary users are not served unasked", uid)
	}
	p := startProcesses(t, 1)
	p.eventually("the configured engine is not ready", func() string { return notLive(p.worker(0, WorkerName(0, 0))) })
	port, pid, end := startVLLM(t)
	name := HostName(0) + "/vllm-" + port

	file := filepath.Join(p.dir, "agent.toml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	p.write(file, strings.Replace(string(text), "[discover]\nenabled = false\n", "[discover]\nenabled = true\nevery = \"1s\"\n", 1))
	p.agent.signal(syscall.SIGHUP)
	p.eventually("the process is not found", func() string { return notLive(p.worker(0, name+"/0")) })

	socket := "unix:" + filepath.Join(p.dir, "run", agent.SocketName)
	run(t, "doctor", "--addr", socket).wants(t, "doctor through the agent", 1,
		"engine-reachable", "http://127.0.0.1:"+port+" serves Llama-3.1-8B", "✓ engine-events", name+"  cache view live", "✗ engine-cached-tokens", "fix:  --enable-prompt-tokens-details")
	p.eventually("the coordinator does not tell the host's checks", func() string {
		r := p.cli(0, "viewer", "doctor", "--host", HostName(0))
		if r.code == 1 && strings.Contains(r.out, name) && strings.Contains(r.out, "--enable-prompt-tokens-details") {
			return ""
		}
		return r.out + r.errOut
	})
	p.cli(0, "viewer", "doctor", "--host", "gpu-1").wants(t, "doctor about a stranger", 2, "did you mean gpu-01?")

	end()
	p.eventually("the worker of a process that has ended is not lost", func() string {
		resp, err := p.Operator(0).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
		for _, problem := range resp.GetProblems() {
			if problem.GetSubject() == name+"/0" && strings.Contains(problem.GetWhat(), fmt.Sprintf("lost (process %d exited", pid)) {
				return ""
			}
		}
		return fmt.Sprint(resp.GetProblems(), err)
	})
	p.agent.signal(syscall.SIGTERM)
	<-p.agent.done
	for _, word := range []string{"event=engine_found", "event=engine_lost"} {
		if !strings.Contains(p.agent.log.String(), word) {
			t.Errorf("%s is not in the agent's log", word)
		}
	}
}

// An agent that stands still long enough to be taken for gone is there again as
// itself when it goes on, without a restart.
func TestDSC05StoppedAgentComesBackAsItself(t *testing.T) {
	t.Parallel()
	p := startProcesses(t, 1)
	p.eventually("the worker is not ready", func() string { return notLive(p.worker(0, WorkerName(0, 0))) })
	host := func() *waypostv1.Host {
		resp, err := p.Operator(0).ListHosts(t.Context(), &waypostv1.ListHostsRequest{})
		if err != nil || len(resp.GetHosts()) != 1 {
			return nil
		}
		return resp.GetHosts()[0]
	}
	before := p.worker(0, WorkerName(0, 0)).GetIncarnation()
	p.agent.signal(syscall.SIGSTOP)
	defer p.agent.signal(syscall.SIGCONT)
	p.eventually("the silence is not seen", func() string {
		if h := host(); h == nil || h.GetLaneUp() {
			return "the lane is up"
		}
		return ""
	})
	p.agent.signal(syscall.SIGCONT)
	p.eventually("the agent does not come back", func() string {
		if h := host(); h == nil || !h.GetLaneUp() {
			return "the lane is down"
		}
		return notLive(p.worker(0, WorkerName(0, 0)))
	})
	p.eventually("it is no member again", func() string {
		resp, err := p.Operator(0).ListMembers(t.Context(), &waypostv1.ListMembersRequest{})
		for _, m := range resp.GetMembers() {
			if m.GetName() == HostName(0) && m.GetStatus() == "alive" {
				return ""
			}
		}
		return fmt.Sprint(resp, err)
	})
	if after := p.worker(0, WorkerName(0, 0)).GetIncarnation(); after != before || p.agent.ended() {
		t.Errorf("incarnation %s, was %s; agent ended: %v", after, before, p.agent.ended())
	}
}
