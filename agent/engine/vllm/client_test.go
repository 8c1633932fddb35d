package vllm

import (
	"bytes"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/enginetest"
	"waypost/agent/engine/kvevents"

	"github.com/google/go-cmp/cmp"
)

// Bad answers make the engine down with the reason, and cost bounded memory
// and time; a good one makes it up again.
func TestBadAnswers(t *testing.T) {
	endless := func(w http.ResponseWriter) {
		line := []byte(strings.Repeat("vllm:x 1\n", 1000))
		for {
			if _, err := w.Write(line); err != nil {
				return
			}
		}
	}
	for name, test := range map[string]struct {
		answer func(w http.ResponseWriter)
		reason string
	}{
		"endless": {endless, "too large"},
		"slow": {func(w http.ResponseWriter) {
			w.Write([]byte("vllm:"))
			w.(http.Flusher).Flush()
			time.Sleep(engine.DefaultPageTimeout + engine.DefaultPageTimeout/2)
		}, "deadline"},
		"redirect":   {func(w http.ResponseWriter) { w.Header().Set("Location", "http://192.0.2.1/"); w.WriteHeader(302) }, "redirects"},
		"compressed": {func(w http.ResponseWriter) { w.Header().Set("Content-Encoding", "gzip"); w.Write([]byte("x")) }, "compressed"},
		"error":      {func(w http.ResponseWriter) { http.Error(w, strings.Repeat("x", 1<<20), 500) }, "answered 500"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFakeEngine(t, 1)
			f.metrics = test.answer
			m := enginetest.NewMirror(t)
			watch(t, f, Options{}, m)
			m.Await("down", func() bool { return !m.Up && strings.Contains(m.Reason, test.reason) })
			if len(m.Reason) > 1000 {
				t.Errorf("a reason of %d bytes", len(m.Reason))
			}
			f.set(func() { f.metrics = nil })
			m.Await("up", func() bool { return m.Up })
		})
	}
}

func TestUnauthorised(t *testing.T) {
	keys := make(chan string, 1)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case keys <- r.Header.Get("Authorization"):
		default:
		}
		w.WriteHeader(401)
	}))
	defer s.Close()
	a, err := New(Options{Options: engine.Options{Target: engine.Target{URL: s.URL, APIKey: "secret\n"}, Logger: slog.New(slog.DiscardHandler)}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.client.Close()
	if _, err := a.Tokenize(t.Context(), "x", true); enginehttp.Status(err) != 401 {
		t.Error(err)
	}
	if got := <-keys; got != "Bearer secret" {
		t.Errorf("authorization %q", got)
	}
}

func TestTokenizeAndRender(t *testing.T) {
	var got string
	answer := `{"count":3,"max_model_len":2048,"tokens":[1,4294967295,3],"token_strs":null}`
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got = r.URL.Path + " " + string(b)
		io.WriteString(w, answer)
	}))
	defer s.Close()
	a, err := New(Options{Options: engine.Options{Target: engine.Target{URL: s.URL}, Logger: slog.New(slog.DiscardHandler)}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.client.Close()
	check := func(tokens []uint32, err error, want string) {
		t.Helper()
		if diff := cmp.Diff([]uint32{1, 1<<32 - 1, 3}, tokens); diff != "" || err != nil || got != want {
			t.Errorf("%v; sent %s, want %s; %s", err, got, want, diff)
		}
	}
	tokens, err := a.Tokenize(t.Context(), "x", true)
	check(tokens, err, `/tokenize {"add_special_tokens":true,"prompt":"x"}`)
	tokens, err = a.Render(t.Context(), []byte(`{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":4,"stream":true,"reasoning_effort":"low","documents":[{"text":"d"}],"chat_template_kwargs":{"a":1}}`))
	check(tokens, err, `/tokenize {"chat_template_kwargs":{"a":1,"documents":[{"text":"d"}],"enable_thinking":true,"reasoning_effort":"low"},"messages":[{"role":"user","content":"x"}],"model":"m"}`)
	tokens, err = a.Render(t.Context(), []byte(`{"messages":[1],"reasoning_effort":"low","documents":null,"chat_template_kwargs":{"enable_thinking":false,"reasoning_effort":"high"}}`))
	check(tokens, err, `/tokenize {"chat_template_kwargs":{"enable_thinking":false,"reasoning_effort":"high"},"messages":[1]}`)
	tokens, err = a.Render(t.Context(), []byte(`{"messages":[1],"reasoning_effort":null,"documents":null}`))
	check(tokens, err, `/tokenize {"messages":[1]}`)
	for _, bad := range []string{`{}`, `[]`, `{"messages":[],"x":`, `{"messages":[],"reasoning_effort":"low","chat_template_kwargs":3}`} {
		if _, err := a.Render(t.Context(), []byte(bad)); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
	for _, answer = range []string{`{}`, `{"tokens":[4294967296]}`, `{"tokens":[-1]}`, `x`} {
		if _, err := a.Tokenize(t.Context(), "x", false); err == nil {
			t.Errorf("answer %s was accepted", answer)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, target := range []string{"", "127.0.0.1:8000", "ftp://x", "http://"} {
		if _, err := New(Options{Options: engine.Options{Target: engine.Target{URL: target}, Logger: slog.New(slog.DiscardHandler)}}); err == nil {
			t.Errorf("URL %q was accepted", target)
		}
	}
	if _, err := New(Options{Options: engine.Options{Target: engine.Target{URL: "http://x"}}}); err == nil {
		t.Error("no logger was accepted")
	}
}

func TestPlans(t *testing.T) {
	yes, no, replay, null := true, false, "tcp://*:5657", "null"
	target := engine.Target{URL: "http://10.1.1.1:8000"}
	with := func(events, replay string) engine.Target {
		t := target
		t.Events, t.Replay = events, replay
		return t
	}
	star := []publisher{{Enabled: &yes, Endpoint: "tcp://*:5557", Replay: &replay}}
	tests := []struct {
		name   string
		target engine.Target
		known  knowledge
		rank   int
		want   kvevents.Plan
	}{
		{"configured", with("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"), knowledge{}, 0, kvevents.Plan{Events: "tcp://127.0.0.1:5557", Replay: "tcp://127.0.0.1:5657"}},
		{"configured, rank 2", with("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"), knowledge{}, 2, kvevents.Plan{Named: 2, Events: "tcp://127.0.0.1:5559", Replay: "tcp://127.0.0.1:5659"}},
		{"to listen", with("tcp://*:5557", ""), knowledge{}, 0, kvevents.Plan{Events: "tcp://*:5557", Listen: true}},
		{"asked", target, knowledge{sources: star}, 0, kvevents.Plan{ReplayTold: true, EventsTold: true, Events: "tcp://10.1.1.1:5557", Replay: "tcp://10.1.1.1:5657"}},
		{"asked by the configuration, rank 1", target, knowledge{sources: star, configured: true}, 1, kvevents.Plan{ReplayTold: true, EventsTold: true, Named: 1, Events: "tcp://10.1.1.1:5558", Replay: "tcp://10.1.1.1:5658"}},
		{"configured, and the engine tells of a replay", with("tcp://127.0.0.1:5557", ""), knowledge{sources: star}, 0, kvevents.Plan{ReplayTold: true, Events: "tcp://127.0.0.1:5557", Replay: "tcp://10.1.1.1:5657"}},
		{"configured to listen, but the engine binds", with("tcp://*:5557", ""), knowledge{sources: star}, 0, kvevents.Plan{ReplayTold: true, EventsTold: true, Events: "tcp://10.1.1.1:5557", Replay: "tcp://10.1.1.1:5657"}},
		{"a plain address", target, knowledge{sources: []publisher{{Endpoint: "tcp://127.0.0.1:5557"}}}, 0, kvevents.Plan{Events: "tcp://127.0.0.1:5557", Either: true, EventsTold: true}},
		{"off", target, knowledge{sources: []publisher{{Enabled: &no, Endpoint: "tcp://*:5557"}}}, 0, kvevents.Plan{Hint: dialect.HintNoEvents()}},
		{"without a publisher", target, knowledge{sources: []publisher{{Enabled: &yes, Kind: &null, Endpoint: "tcp://*:5557"}}}, 0, kvevents.Plan{Hint: dialect.HintNoEvents()}},
		{"unset in the configuration", target, knowledge{configured: true}, 0, kvevents.Plan{Hint: dialect.HintNoEvents()}},
		{"unknown", target, knowledge{}, 0, kvevents.Plan{Hint: dialect.HintUnknown()}},
	}
	for _, test := range tests {
		if got := planFor(test.target, &test.known, test.rank); !cmp.Equal(got, test.want) {
			t.Errorf("%s: %+v, want %+v", test.name, got, test.want)
		}
	}
}

// The forms of the list of publishers.
func TestSources(t *testing.T) {
	for body, want := range map[string]int{
		`{"0":{"endpoint":"tcp://*:5557"},"1":{"endpoint":"tcp://*:5558"}}`: 2,
		`[{"data_parallel_rank":0,"endpoint":"tcp://10.0.0.1:5557"}]`:       1,
		`{}`: 0,
		`{"x":{"endpoint":"tcp://*:5557"},"9223372036854775808":{"endpoint":"tcp://*:5558"}}`: 0,
		`{"x":{"endpoint":"tcp://*:5557"},"0":{"endpoint":"tcp://*:5557"}}`:                   1,
		`{"x":{},"01":{"endpoint":"tcp://*:5557"},"1":{"endpoint":"tcp://*:5557"}}`:           1,
		`5`: -1,
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, body) }))
		c, err := enginehttp.New(enginehttp.Options{URL: s.URL})
		if err != nil {
			t.Fatal(err)
		}
		var k knowledge
		err = client{c}.learnSources(t.Context(), &k)
		if got := len(k.sources); (err != nil) != (want < 0) || want >= 0 && got != want {
			t.Errorf("%s: %d sources, %v", body, got, err)
		}
		if odd := strings.Contains(body, `"x"`); odd != (k.faults > 0) {
			t.Errorf("%s: %d ranks that cannot be", body, k.faults)
		}
		c.Close()
		s.Close()
	}
}

// Whatever an engine says of its configuration, its list of publishers and its
// models, each rank has a plan and facts are bounded.
func FuzzFacts(f *testing.F) {
	f.Add([]byte(`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657","buffer_steps":10000,"topic":"kv@test"},"1":{"endpoint":"tcp://*:5558"}}`))
	f.Add([]byte(`[{"data_parallel_rank":0,"endpoint":"tcp://10.0.0.1:5557"}]`))
	f.Add([]byte(`{"vllm_config":{"instance_id":"17","scheduler_config":{"max_num_batched_tokens":2048,"max_num_seqs":16},"kv_transfer_config":{"kv_connector":"OffloadingConnector","kv_role":"kv_both"},"kv_events_config":{"endpoint":"tcp://*:5557"},"cache_config":{"block_size":32,"kv_cache_memory_bytes":1e9,"kv_cache_size_tokens":3200}},"vllm_env":{"VLLM_P2P_SIDE_CHANNEL_HOST":"10.0.0.1","VLLM_P2P_SIDE_CHANNEL_PORT":5710}}`))
	f.Add([]byte(`{"vllm_config":{"model_config":{"model":"tiny","dtype":"bfloat16","revision":"r"},"cache_config":{"block_size":16,"kv_cache_layout":"HND"},"parallel_config":{"tensor_parallel_size":2},"kv_transfer_config":{"kv_connector":"OffloadingConnector","kv_role":"kv_producer","kv_connector_extra_config":{"p2p":true}}},"vllm_env":{"VLLM_P2P_SIDE_CHANNEL_HOST":"10.0.0.1","VLLM_P2P_SIDE_CHANNEL_PORT":5710}}`))
	f.Add([]byte(`{"vllm_config":{"kv_transfer_config":{"kv_connector":"NixlConnector","kv_role":"kv_consumer"},"speculative_config":{"method":"eagle"}},"vllm_env":{"VLLM_NIXL_SIDE_CHANNEL_HOST":"10.0.0.1","VLLM_NIXL_SIDE_CHANNEL_PORT":70000}}`))
	f.Add([]byte(`{"vllm_config":{"kv_transfer_config":{"kv_connector":"NixlConnector"}},"vllm_env":[]}`))
	f.Add([]byte(`{"data":[{"id":"tiny","parent":null,"max_model_len":2048},{"id":"sql","parent":"tiny"}]}`))
	var text atomic.Pointer[[]byte]
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" && !bytes.Contains(*text.Load(), []byte(`"data"`)) {
			io.WriteString(w, `{"data":[{"id":"tiny"}]}`)
			return
		}
		w.Write(*text.Load())
	}))
	f.Cleanup(s.Close)
	c, err := enginehttp.New(enginehttp.Options{URL: s.URL})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(c.Close)
	f.Fuzz(func(t *testing.T, answer []byte) {
		text.Store(&answer)
		k, err := client{c}.learn(t.Context())
		if err != nil {
			return
		}
		if got := k.facts.Bounded(); got.StepTokens < 0 || got.MaxRunning < 0 || !(got.Transfer.BytesPerToken >= 0) || len(k.sources) > engine.MaxRanks {
			t.Fatalf("%+v, %d publishers", got, len(k.sources))
		}
		for rank := range max(1, len(k.sources)) {
			planFor(engine.Target{URL: "http://127.0.0.1:8000"}, &k, rank)
		}
	})
}
