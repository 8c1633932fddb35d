package discover

import (
	"net/netip"
	"strings"
	"testing"
)

const (
	enableVLLM   = `--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'`
	enableSGLang = `--kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'`
)

func engineOf(t *testing.T, args ...string) *Engine {
	t.Helper()
	k, words, part := classify(args)
	if k == nil || part {
		t.Fatalf("%q is no engine", args)
	}
	port, _ := k.portOf(words)
	return &Engine{Kind: k.name, Title: k.title, Flags: words, Port: port, Place: Here, Address: netip.IPv4Unspecified()}
}

// Each wrong flag is named by its check, with the fix for the engine's version;
// the right flags leave nothing to say.
func TestWrongFlagsAreNamedWithTheFix(t *testing.T) {
	right := []string{
		"vllm", "serve", "m", "--enable-prompt-tokens-details", "--kv-events-config",
		`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}`,
	}
	config := func(json string, more ...string) []string {
		return append([]string{"vllm", "serve", "m", "--enable-prompt-tokens-details", "--kv-events-config", json}, more...)
	}
	sglang := func(args ...string) []string {
		return append([]string{"python3", "-m", "sglang.launch_server", "--model-path", "m", "--enable-cache-report", "--page-size", "16"}, args...)
	}
	for _, c := range []struct {
		name, version string
		args          []string
		check, fix    string // empty: no problem at all
	}{
		{"right", "0.32.0", right, "", ""},
		{"right, with dots", "0.32.0", []string{
			"vllm", "serve", "m", "--enable-prompt-tokens-details", "--kv-events-config.enable_kv_cache_events", "true",
			"--kv-events-config.replay_endpoint=tcp://*:5657",
		}, "", ""},
		{"no events configured", "0.32.0", []string{"vllm", "serve", "m", "--enable-prompt-tokens-details"}, CheckEvents, enableVLLM},
		{"events not enabled", "0.32.0", config(`{"publisher":"zmq","replay_endpoint":"tcp://*:5657"}`), CheckEvents, enableVLLM},
		{"publisher null", "0.32.0", config(`{"enable_kv_cache_events":true,"publisher":"null","replay_endpoint":"tcp://*:5657"}`), CheckEvents, enableVLLM},
		{"publisher left out is right today", "0.12.0", config(`{"enable_kv_cache_events":true,"replay_endpoint":"tcp://*:5657"}`), "", ""},
		{"publisher left out was null", "0.11.0", config(`{"enable_kv_cache_events":true,"replay_endpoint":"tcp://*:5657"}`), CheckEvents, enableVLLM},
		{"endpoint dials", "0.32.0", config(`{"enable_kv_cache_events":true,"endpoint":"tcp://127.0.0.1:5557","replay_endpoint":"tcp://*:5657"}`), CheckEvents, enableVLLM},
		{"0.0.0.0 dials as well", "0.32.0", config(`{"enable_kv_cache_events":true,"endpoint":"tcp://0.0.0.0:5557","replay_endpoint":"tcp://*:5657"}`), CheckEvents, enableVLLM},
		{"no replay", "0.32.0", config(`{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557"}`), CheckReplay, enableVLLM},
		{
			"ports of ranks collide", "0.32.0",
			config(`{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}`, "--data-parallel-size", "2"), CheckReplay, enableVLLM,
		},
		{
			"many ranks need more room", "0.32.0",
			config(`{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}`, "-dp", "256"), CheckReplay, `"replay_endpoint":"tcp://*:5813"`,
		},
		{"prefix caching off", "0.32.0", append(right[:len(right):len(right)], "--no-enable-prefix-caching"), CheckEvents, "start it without --no-enable-prefix-caching"},
		{"reuse not told", "0.32.0", append([]string{"vllm", "serve", "m"}, right[4:]...), CheckCachedTokens, "--enable-prompt-tokens-details"},
		{"no counters", "0.32.0", append(right[:len(right):len(right)], "--disable-log-stats"), CheckBlockSize, "start it without --disable-log-stats"},
		{"hashes that cannot be sent", "0.10.1", append(right[:len(right):len(right)], "--prefix-caching-hash-algo", "sha256"), CheckEvents, "--prefix-caching-hash-algo builtin"},
		{"the same hashes can be sent later", "0.10.2", append(right[:len(right):len(right)], "--prefix-caching-hash-algo", "sha256"), "", ""},
		{"too old for events", "0.8.5", right, CheckEvents, "upgrade to vLLM 0.9.0 or newer"},
		{"no JSON", "0.32.0", config(`{enable`), CheckEvents, enableVLLM},
		{"a key the agent does not have", "0.32.0", append(right[:len(right):len(right)], "--api-key", "sk-secret"), CheckReachable, "api_key_file"},

		{"SGLang right", "0.5.23", sglang("--kv-events-config", `{"publisher":"zmq","endpoint":"tcp://0.0.0.0:5557","replay_endpoint":"tcp://*:5657"}`), "", ""},
		{"SGLang without events", "0.5.23", sglang(), CheckEvents, enableSGLang},
		{"SGLang's publisher is null unless set", "0.5.23", sglang("--kv-events-config", `{"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}`), CheckEvents, enableSGLang},
		{"vLLM's key given to SGLang", "0.5.23", sglang("--kv-events-config", `{"enable_kv_cache_events":true,"publisher":"zmq","replay_endpoint":"tcp://*:5657"}`), CheckEvents, enableSGLang},
		{"SGLang dials", "0.5.23", sglang("--kv-events-config", `{"publisher":"zmq","endpoint":"tcp://127.0.0.1:5557","replay_endpoint":"tcp://*:5657"}`), CheckEvents, enableSGLang},
		{"SGLang without replay", "0.5.23", sglang("--kv-events-config", `{"publisher":"zmq"}`), CheckReplay, enableSGLang},
		{"no radix cache", "0.5.23", sglang("--disable-radix-cache"), CheckEvents, "start it without --disable-radix-cache"},
		{"small pages", "0.5.23", sglang("--kv-events-config", `{"publisher":"zmq","replay_endpoint":"tcp://*:5657"}`, "--page-size", "1"), CheckBlockSize, "--page-size 16"},
		{
			"replicas on one port", "0.5.14",
			sglang("--kv-events-config", `{"publisher":"zmq","replay_endpoint":"tcp://*:5657"}`, "--dp-size", "2"), CheckEvents, "upgrade to SGLang 0.5.15",
		},
		{"replicas on ports of their own", "0.5.15", sglang("--kv-events-config", `{"publisher":"zmq","replay_endpoint":"tcp://*:5657"}`, "--dp-size", "2"), "", ""},

		{"TensorRT-LLM without events", "", []string{"trtllm-serve", "m"}, CheckEvents, "event_buffer_max_size: 16384"},
		{"llama.cpp right", "", []string{"llama-server", "-m", "m", "--metrics"}, "", ""},
		{"llama.cpp without counters", "", []string{"llama-server", "-m", "m"}, CheckReachable, "--metrics"},
		{"llama.cpp keeps nothing", "", []string{"llama-server", "-m", "m", "--metrics", "--no-cache-prompt"}, CheckCachedTokens, "--no-cache-prompt"},
		{"llama.cpp hides its slots", "", []string{"llama-server", "-m", "m", "--metrics", "--no-slots"}, CheckBlockSize, "--no-slots"},
	} {
		t.Run(c.name, func(t *testing.T) {
			named := false
			for _, a := range engineOf(t, c.args...).Advise(Known{Version: c.version}) {
				if strings.Contains(a.What+a.Cause+a.Fix, "sk-secret") {
					t.Errorf("a key is told: %+v", a)
				}
				switch {
				case a.State != Problem:
				case a.Check == c.check && strings.Contains(a.Fix, c.fix):
					named = true
				default:
					t.Errorf("unexpected: %+v", a)
				}
			}
			if named != (c.check != "") {
				t.Errorf("%s is not named with %s", c.check, c.fix)
			}
		})
	}
}

// What stands in a file is not known; it is not taken for missing.
func TestFlagsInAFileAreUnknown(t *testing.T) {
	for _, args := range [][]string{{"vllm", "serve", "--config", "c.yaml"}, {"trtllm-serve", "m", "--extra_llm_api_options", "c.yaml"}, {"sglang", "serve", "--config", "c.yaml"}} {
		unknown := false
		for _, a := range engineOf(t, args...).Advise(Known{}) {
			if a.State == Problem {
				t.Errorf("%q: %+v", args, a)
			}
			unknown = unknown || a.State == Unknown && a.Check == CheckEvents
		}
		if !unknown {
			t.Errorf("%q: its events are not unknown", args)
		}
	}
}

func TestLoopbackEngineIsNamed(t *testing.T) {
	e := engineOf(t, "llama-server", "-m", "m", "--metrics")
	e.Address = netip.MustParseAddr("127.0.0.1")
	a := e.Advise(Known{})
	if last := a[len(a)-1]; last.Check != CheckReachable || last.Fix != "--host 0.0.0.0" {
		t.Errorf("%+v", a)
	}
	for _, a := range e.Advise(Known{Local: true}) {
		if a.State == Problem {
			t.Errorf("callers on this host reach it: %+v", a)
		}
	}
}

// The endpoints to read events at come from the flags where they make the engine
// listen.
func TestEventEndpoints(t *testing.T) {
	for _, c := range []struct{ config, live, replay string }{
		{`{"enable_kv_cache_events":true,"endpoint":"tcp://*:6000","replay_endpoint":"tcp://*:6100"}`, "tcp://127.0.0.1:6000", "tcp://127.0.0.1:6100"},
		{`{"enable_kv_cache_events":true}`, "tcp://127.0.0.1:5557", ""},
		{`{"enable_kv_cache_events":true,"endpoint":"tcp://127.0.0.1:6000"}`, "", ""},
		{`{"enable_kv_cache_events":true,"endpoint":"ipc:///x"}`, "", ""},
		{`{"enable_kv_cache_events":false}`, "", ""},
		{`{"enable_kv_cache_events":true,"publisher":"null"}`, "", ""},
		{`{`, "", ""},
	} {
		live, replay := engineOf(t, "vllm", "serve", "m", "--kv-events-config", c.config).Events()
		if live != c.live || replay != c.replay {
			t.Errorf("%s: %q, %q", c.config, live, replay)
		}
	}
}
