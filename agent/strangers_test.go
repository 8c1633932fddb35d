package agent

import (
	"fmt"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"waypost/gossip/doctor"
	"waypost/nvml"
)

// A server of no known kind that uses a GPU is proposed as a generic engine and
// not served; one that agent.toml names, engines that are known and what only
// computes are not.
func TestStrangersOnGPUsAreProposed(t *testing.T) {
	p := &procTable{}
	p.set(
		engineProcess{pid: 41, args: "vllm serve m", address: "127.0.0.1:8000"},
		engineProcess{pid: 50, uid: 1000, args: "/usr/bin/python3 -m tgi.server --token sk-secret", address: "127.0.0.1:9000"},
		engineProcess{pid: 60, args: "python3 train.py"},
		engineProcess{pid: 70, args: "text-generation-launcher --port 9100", address: "127.0.0.1:9100"},
		engineProcess{pid: 80, args: "jupyter", address: "127.0.0.1:40000"},
	)
	// The process on the GPU is one that the server started.
	files := p.now()
	files["51/cmdline"] = &fstest.MapFile{Data: []byte("python3\x00shard.py")}
	files["51/status"] = &fstest.MapFile{Data: []byte("PPid:\t50\nUid:\t1000\t1000\t1000\t1000\n")}
	a := discovering(t, p, func(c *Config) { c.Discover.Ignore = []string{"vllm-8000"} })
	gpus := &fakeGPUs{view: nvml.View{Status: nvml.Status{Code: nvml.StateOK, Text: "ok"}, XidState: "ok", Devices: []nvml.Device{
		{GPU: nvml.GPU{UUID: "GPU-a", Processes: []nvml.Process{held(41, 1<<30), held(51, 40<<30), held(60, 1<<30)}}},
		{GPU: nvml.GPU{Index: 1, UUID: "GPU-b", Processes: []nvml.Process{held(51, 30<<30), held(80, 1<<30), {PID: 70}}}},
	}}}
	a.gpus.reader = gpus
	proposed := func() (out []string) {
		a.discovery.look(time.Now())
		for _, c := range a.checks(time.Now()).Sorted() {
			if strings.Contains(c.GetWhat(), "no known kind") {
				if c.GetState() != doctor.OK {
					t.Errorf("%s: %v", c.GetState(), c)
				}
				out = append(out, c.GetWhat()+" | "+c.GetFix())
			}
			if strings.Contains(c.String(), "secret") {
				t.Errorf("a secret is told: %v", c)
			}
		}
		return out
	}
	got := proposed()
	want := []string{
		"found pid 50 (tgi.server), which holds 70.0 GiB on GPU 0, 1 and listens at port 9000: a server of no known kind, not served | [[engine]]\nkind = \"generic\"\nurl = \"http://127.0.0.1:9000\"",
		"found pid 70 (text-generation-launcher), which uses GPU 1 and listens at port 9100: a server of no known kind, not served | [[engine]]\nkind = \"generic\"\nurl = \"http://127.0.0.1:9100\"",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("proposed:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if len(a.watching()) != 0 {
		t.Error("one of them is served")
	}
	w, err := a.watch(EngineConfig{Name: "tgi", Kind: "generic", URL: "http://127.0.0.1:9000"})
	if err != nil {
		t.Fatal(err)
	}
	w.configured = true
	a.engines = append(a.engines, w)
	if got := proposed(); len(got) != 1 || !strings.Contains(got[0], "9100") {
		t.Errorf("with one of them named in agent.toml: %q", got)
	}
	off := a.cfg.Discover
	off.Enabled = false
	a.discovery.reload(off)
	if got := proposed(); len(got) != 0 {
		t.Errorf("nobody looks, proposed %q", got)
	}
}

// An engine in a container is named with the port that publishes it, and known
// again once agent.toml names it.
func TestPublishedEngineIsNamedWithTheFix(t *testing.T) {
	p := &procTable{}
	p.set(engineProcess{pid: 7713, args: "vllm serve m --kv-events-config {\"enable_kv_cache_events\":true,\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\"}", address: "172.17.0.2:8000"})
	files := p.now()
	files["7713/net/tcp"] = files["net/tcp"]
	files["7713/net/fib_trie"] = &fstest.MapFile{Data: []byte("Main:\n |-- 172.17.0.2\n    /32 host LOCAL\n")}
	files["net/tcp"] = &fstest.MapFile{Data: []byte("head\n")}
	proxy := func(pid string, host, inside string) {
		files[pid+"/cmdline"] = &fstest.MapFile{Data: []byte(strings.ReplaceAll("/usr/bin/docker-proxy -proto tcp -host-ip 0.0.0.0 -host-port "+host+" -container-ip 172.17.0.2 -container-port "+inside, " ", "\x00"))}
		files[pid+"/status"] = &fstest.MapFile{Data: []byte("PPid:\t1\nUid:\t0\t0\t0\t0\n")}
	}
	proxy("90", "18000", "8000")
	proxy("91", "15557", "5557")
	a := discovering(t, p, nil)
	a.discovery.look(time.Now())
	if checks := a.checks(time.Now()).Sorted(); !finds(checks, "engine-reachable", doctor.Problem, "gpu-01/vllm-8000", "in another network namespace, its port 8000 is published at 127.0.0.1:18000; set [[engine]] url",
		"without publishing port 5657 as well", "url = \"http://127.0.0.1:18000\"\nkv_events = \"tcp://127.0.0.1:15557\"") {
		t.Errorf("%v", checks)
	}
	if len(a.watching()) != 0 {
		t.Error("it is served unasked")
	}
	named := discovering(t, p, func(c *Config) { c.Engines = []EngineConfig{{Kind: "vllm", URL: "http://127.0.0.1:18000"}} })
	gpus := &fakeGPUs{view: nvml.View{Status: nvml.Status{Code: nvml.StateOK, Text: "ok"}, Devices: []nvml.Device{{GPU: nvml.GPU{UUID: "GPU-a", Processes: []nvml.Process{held(7713, 1<<30)}}}}}}
	named.gpus.reader = gpus
	named.discovery.look(time.Now())
	named.lookAtGPUs()
	if checks := named.checks(time.Now()).Sorted(); finds(checks, "engine-reachable", doctor.Problem, "another network namespace") {
		t.Errorf("%v", checks)
	}
	w := named.watching()[0]
	if e := w.process(); e == nil || e.PID != 7713 {
		t.Errorf("its process is %v", e)
	}
	if got := named.truth.gpusOf(w.target.Name); len(got) != 1 || got[0] != "GPU-a" {
		t.Errorf("its GPUs are %v", got)
	}
}

// An engine in a container that agent.toml names at the container's own address is
// known by its process: its GPUs are its own, as the front of an engine over
// several hosts it is told with its share, and the doctor asks for nothing.
func TestEngineAtAContainersAddressIsKnown(t *testing.T) {
	p := &procTable{}
	p.set(
		engineProcess{pid: 7713, args: "vllm serve m --nnodes 2 --master-addr 10.0.0.4", address: "0.0.0.0:8000"},
		engineProcess{pid: 7800, args: "vllm serve m", address: "0.0.0.0:8000"},
	)
	files := p.now()
	lines := strings.Split(string(files["net/tcp"].Data), "\n")
	for i, pid := range []string{"7713", "7800"} {
		files[pid+"/net/tcp"] = &fstest.MapFile{Data: []byte(lines[0] + "\n" + lines[i+1] + "\n")}
		files[pid+"/net/fib_trie"] = &fstest.MapFile{Data: fmt.Appendf(nil, "Main:\n |-- 172.17.0.%d\n    /32 host LOCAL\n", i+2)}
	}
	files["net/tcp"] = &fstest.MapFile{Data: []byte("head\n")}
	a := discovering(t, p, func(c *Config) { c.Engines = []EngineConfig{{Kind: "vllm", URL: "http://172.17.0.2:8000"}} })
	a.gpus.reader = &fakeGPUs{view: nvml.View{Status: nvml.Status{Code: nvml.StateOK, Text: "ok"}, Devices: []nvml.Device{
		{GPU: nvml.GPU{UUID: "GPU-a", Processes: []nvml.Process{held(7713, 1<<30)}}}, {GPU: nvml.GPU{Index: 1, UUID: "GPU-b", Processes: []nvml.Process{held(7800, 1<<30)}}},
	}}}
	a.discovery.look(time.Now())
	a.lookAtGPUs()
	w := a.watching()[0]
	if e := w.process(); len(a.watching()) != 1 || e == nil || e.PID != 7713 {
		t.Fatalf("%d engines, the process of the first is %v", len(a.watching()), e)
	}
	if got := a.truth.gpusOf(w.target.Name); len(got) != 1 || got[0] != "GPU-a" {
		t.Errorf("its GPUs are %v", got)
	}
	if got := toldShares(a.lanes.hello()); len(got) != 1 || !strings.HasPrefix(got[0], "vllm engine="+w.target.Name+" at 10.0.0.4:29501 node 0 of 2") {
		t.Errorf("told %q", got)
	}
	var elsewhere []string
	for _, c := range a.checks(time.Now()).Sorted() {
		if strings.Contains(c.String(), "another network namespace") {
			elsewhere = append(elsewhere, c.String())
		}
	}
	if len(elsewhere) != 1 || !strings.Contains(elsewhere[0], "pid 7800") {
		t.Errorf("named as not reachable: %q", elsewhere)
	}
}
