package sglang

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/enginetest"
	"waypost/agent/engine/kvevents"
	"waypost/agent/engine/poller"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// exchange is a recorded question with its answer.
type exchange struct {
	Method, Path string
	Status       int
	Request      json.RawMessage
	Response     json.RawMessage
}

func exchanges(t testing.TB) (out []exchange) {
	t.Helper()
	text, err := os.ReadFile("testdata/answers.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var e exchange
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		out = append(out, e)
	}
	return out
}

// fake answers as the recorded engine did, with events on ports of its own.
type fake struct {
	*enginetest.Server
	mu      sync.Mutex
	answers map[string]string
	ranks   []*enginetest.Publisher
	asked   map[string]int
	bodies  []string
}

func newFake(t testing.TB, ranks int) *fake {
	f := &fake{answers: map[string]string{}, asked: map[string]int{}}
	for range ranks {
		p := enginetest.NewPublisher(t)
		t.Cleanup(p.Close)
		f.ranks = append(f.ranks, p)
	}
	for _, e := range exchanges(t) {
		if e.Status == 200 && f.answers[e.Path] == "" {
			f.answers[e.Path] = string(e.Response)
		}
	}
	page, err := os.ReadFile("testdata/metrics.txt")
	if err != nil {
		t.Fatal(err)
	}
	f.answers["/metrics"] = string(page)
	if ranks > 0 {
		f.setting("kv_events_config", fmt.Sprintf(`{"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}`, f.ranks[0].Port(), f.ranks[0].ReplayPort()))
	}
	f.Server = enginetest.NewServer(t, f.handle)
	return f
}

// setting changes one of the server's settings.
func (f *fake) setting(key string, value any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all map[string]any
	if err := json.Unmarshal([]byte(f.answers["/server_info"]), &all); err != nil {
		panic(err)
	}
	all[key] = value
	b, err := json.Marshal(all)
	if err != nil {
		panic(err)
	}
	f.answers["/server_info"] = string(b)
}

func (f *fake) set(path, answer string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if answer == "" {
		delete(f.answers, path)
		return
	}
	f.answers[path] = answer
}

func (f *fake) handle(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	f.mu.Lock()
	answer, ok := f.answers[r.URL.Path]
	f.asked[r.URL.Path]++
	if len(body) > 0 {
		f.bodies = append(f.bodies, string(body))
	}
	f.mu.Unlock()
	if !ok {
		http.NotFound(w, r)
		return
	}
	io.WriteString(w, answer)
}

func watch(t *testing.T, f *fake, sink engine.Sink) *Adapter {
	t.Helper()
	a, err := New(Options{Options: engine.Options{Target: engine.Target{Name: "sglang-test", URL: f.URL}, Logger: slog.New(slog.DiscardHandler), FactsEvery: 500 * time.Millisecond}})
	if err != nil {
		t.Fatal(err)
	}
	enginetest.Watch(t, a, sink)
	return a
}

func TestFactsOfTheRecordedEngine(t *testing.T) {
	f := newFake(t, 1)
	m := enginetest.NewMirror(t)
	watch(t, f, m)
	m.Await("facts and load", func() bool {
		return m.Up && m.Known.Capabilities.Has(engine.ReplaysEvents) && m.Of(0).Load.Finished != nil
	})
	m.Mu.Lock()
	defer m.Mu.Unlock()
	want := engine.Facts{
		Version: "0.5.23", Model: "tiny", Ranks: 1, BlockTokens: 16, PoolBlocks: 128, MaxModelTokens: 2048, MaxRunning: 1024, StepTokens: 4096,
		StartMark: m.Known.StartMark,
		Capabilities: engine.ReportsCachedTokens | engine.OmitsZeroCachedTokens | engine.StoresLate | engine.TokenizesText | engine.TokenizesChats |
			engine.OmitsAdapters | engine.ReplaysEvents,
	}
	if diff := cmp.Diff(want, m.Known); diff != "" || m.Known.StartMark == 0 {
		t.Errorf("start mark %d; %s", m.Known.StartMark, diff)
	}
	n := func(v float64) *float64 { return &v }
	k := 0
	load := m.Of(0).Load
	wantLoad := engine.Load{
		At: load.At, Running: &k, Waiting: &k, KVUsedRatio: n(0), PromptTokens: n(2562), ComputedPromptTokens: n(1358), GenerationTokens: n(214),
		FirstTokens: n(22), FirstTokenSeconds: n(2.7685147309580316 + 1.7661358060008752), Finished: n(22),
	}
	if diff := cmp.Diff(wantLoad, load); diff != "" {
		t.Error(diff)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.asked["/health"] > 0 {
		t.Error("the route that generates a token was asked")
	}
}

// The recorded frames through real sockets give the cache that they tell of.
func TestRecordedEvents(t *testing.T) {
	text, err := os.ReadFile("testdata/replay.frames.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	batches := map[string][]byte{}
	s := bufio.NewScanner(bytes.NewReader(text))
	s.Buffer(nil, 16<<20)
	for s.Scan() {
		var line struct {
			Kind  string
			Parts []string
		}
		if err := json.Unmarshal(s.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		if k := len(line.Parts); (line.Kind == "live" || line.Kind == "replay") && line.Parts[k-2] != "ffffffffffffffff" {
			b, err := hex.DecodeString(line.Parts[k-1])
			if err != nil {
				t.Fatal(err)
			}
			batches[line.Parts[k-2]] = b
		}
	}
	numbers := slices.Sorted(maps.Keys(batches))
	want := blocktable.New(blocktable.Options{})
	d := kvevents.NewDecoder()
	f := newFake(t, 1)
	m := enginetest.NewMirror(t)
	for i, n := range numbers {
		if n != fmt.Sprintf("%016x", i) {
			t.Fatalf("batch %s is the %dth: the recording is not whole", n, i)
		}
		b, err := d.Decode(batches[n])
		if err != nil || b.Damaged+b.Unknown > 0 {
			t.Fatalf("%s: %v %+v", n, err, b)
		}
		for k := range b.Events {
			want.Apply(&b.Events[k])
		}
		if i == len(numbers)/2 {
			watch(t, f, m)
			m.Await("the first half by replay", func() bool { return m.Of(0).Coverage == engine.CoverageFull })
			f.ranks[0].AwaitSubscriber()
		}
		f.ranks[0].PublishRaw(i%5 == 4, batches[n]) // some are lost and asked for again
	}
	if want.Len() == 0 || want.BlockTokens() != 16 {
		t.Fatalf("%d blocks of %d tokens", want.Len(), want.BlockTokens())
	}
	m.Await("all of it", func() bool {
		r := m.Of(0)
		return r.Coverage == engine.CoverageFull && r.Table.Len() == want.Len() && r.Table.Attached() == want.Attached() && r.Table.Copies() == want.Copies()
	})
}

// Ranks count ports on, tell their load each, and have pools of their own.
func TestRanks(t *testing.T) {
	f := newFake(t, 0)
	f.setting("dp_size", 2)
	f.setting("kv_events_config", nil)
	f.set("/v1/loads", `{"timestamp":"2026-11-29T18:10:26+00:00","loads":[
		{"dp_rank":1,"num_running_reqs":2,"num_waiting_reqs":1,"max_total_num_tokens":1600,"token_usage":0.5},
		{"dp_rank":0,"num_running_reqs":7,"num_waiting_reqs":0,"max_total_num_tokens":2048,"token_usage":0.25}]}`)
	m := enginetest.NewMirror(t)
	watch(t, f, m)
	m.Await("two ranks", func() bool {
		return m.Known.Ranks == 2 && m.Of(1).Load.Running != nil && m.Of(0).Load.Running != nil && m.Of(1).Coverage == engine.CoverageNone && m.Of(1).Hint != ""
	})
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if r0, r1 := m.Of(0).Load, m.Of(1).Load; *r0.Running != 7 || *r1.Running != 2 || *r1.Waiting != 1 || *r1.KVUsedRatio != .5 || r0.PromptTokens != nil {
		t.Errorf("%+v %+v", r0, r1)
	}
	if m.Known.RankHeader != "X-Data-Parallel-Rank" || m.Known.Of(0).PoolBlocks != 128 || m.Known.Of(1).PoolBlocks != 100 {
		t.Errorf("%+v", m.Known)
	}
	if !strings.Contains(m.Of(0).Hint, `"publisher":"zmq"`) {
		t.Errorf("hint %q", m.Of(0).Hint)
	}
}

func TestPlans(t *testing.T) {
	text := func(s string) *string { return &s }
	target := engine.Target{URL: "http://10.1.1.1:30000"}
	configured := target
	configured.Events, configured.Replay = "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"
	for _, test := range []struct {
		name   string
		target engine.Target
		info   *serverInfo
		rank   int
		want   kvevents.Plan
	}{
		{"asked", target, &serverInfo{EventsConfig: text(`{"publisher":"zmq","endpoint":"tcp://*:5580","replay_endpoint":"tcp://*:5590"}`)}, 0, kvevents.Plan{Events: "tcp://10.1.1.1:5580", Replay: "tcp://10.1.1.1:5590", EventsTold: true, ReplayTold: true}},
		{"rank 3, bound by 0.0.0.0", target, &serverInfo{EventsConfig: text(`{"publisher":"zmq","endpoint":"tcp://0.0.0.0:5580"}`)}, 3, kvevents.Plan{Events: "tcp://10.1.1.1:5583", Named: 3, EventsTold: true}},
		{"the default endpoint", target, &serverInfo{EventsConfig: text(`{"publisher":"zmq"}`)}, 0, kvevents.Plan{Events: "tcp://10.1.1.1:5557", EventsTold: true}},
		{"the flag without a publisher", target, &serverInfo{EventsConfig: text(`{"endpoint":"tcp://*:5580"}`)}, 0, kvevents.Plan{Hint: dialect.HintNoEvents()}},
		{"no flag", target, &serverInfo{}, 0, kvevents.Plan{Hint: dialect.HintNoEvents()}},
		{"no flag, whatever the agent is told", configured, &serverInfo{}, 0, kvevents.Plan{Hint: dialect.HintNoEvents()}},
		{"a flag that cannot be read", target, &serverInfo{EventsConfig: text("file.json")}, 0, kvevents.Plan{Hint: dialect.HintUnknown()}},
		{"no settings", configured, nil, 1, kvevents.Plan{Events: "tcp://127.0.0.1:5558", Replay: "tcp://127.0.0.1:5658", Named: 1}},
		{"no prefix cache", target, &serverInfo{NoCache: true, EventsConfig: text(`{"publisher":"zmq"}`)}, 0, kvevents.Plan{Hint: hintNoCache}},
		{"inside the process", target, &serverInfo{EventsConfig: text(`{"publisher":"zmq","endpoint":"inproc://x"}`)}, 0, kvevents.Plan{Hint: "the engine publishes KV events at inproc://x, which is inside its process or host only: give it an endpoint such as tcp://*:5557"}},
	} {
		if diff := cmp.Diff(test.want, planFor(test.target, test.info, test.rank)); diff != "" {
			t.Errorf("%s: %s", test.name, diff)
		}
	}
}

// An engine that is started again with events switched on is read with them.
func TestEventsSwitchedOn(t *testing.T) {
	f := newFake(t, 1)
	var config string
	f.mu.Lock()
	var all map[string]any
	err := json.Unmarshal([]byte(f.answers["/server_info"]), &all)
	f.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	config = all["kv_events_config"].(string)
	f.setting("kv_events_config", nil)
	m := enginetest.NewMirror(t)
	watch(t, f, m)
	m.Await("no events", func() bool { return m.Of(0).Coverage == engine.CoverageNone && m.Of(0).Hint == dialect.HintNoEvents() })
	f.ranks[0].Publish(false, enginetest.Stored(0, 1))
	f.setting("kv_events_config", config)
	m.Await("full", func() bool { return m.Of(0).Coverage == engine.CoverageFull && m.Of(0).Match(1) == 2 })
	// Another life on the same ports, told by what its start took.
	f.setting("startup_time", map[string]float64{"tokenizer_e2e": 1.5})
	m.Await("restart", func() bool { return slices.Contains(m.Of(0).Resets, engine.ResetRestart) })
}

// Releases before the newest routes.
func TestOldRoutes(t *testing.T) {
	f := newFake(t, 0)
	f.mu.Lock()
	info := f.answers["/server_info"]
	f.mu.Unlock()
	f.set("/get_server_info", info)
	f.set("/server_info", "")
	f.set("/v1/loads", "")
	f.set("/get_load", `[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2,"num_tokens":100,"ts_tic":1.5}]`)
	m := enginetest.NewMirror(t)
	watch(t, f, m)
	m.Await("old load", func() bool {
		return m.Up && m.Of(0).Load.Running != nil && *m.Of(0).Load.Running == 3 && *m.Of(0).Load.Waiting == 2
	})
	f.set("/get_load", "")
	m.Await("the page's", func() bool {
		l := m.Of(0).Load
		return l.Running != nil && *l.Running == 0 && l.KVUsedRatio != nil && *l.KVUsedRatio == 0.01
	})
	f.set("/metrics", "")
	m.Await("unknown is not zero", func() bool { return m.Up && m.Of(0).Load.Running == nil && m.Of(0).Load.PromptTokens == nil })
}

func TestLoads(t *testing.T) {
	now := time.Unix(2000, 0)
	for _, test := range []struct {
		name, body string
		ranks      int
		running    string
		age        time.Duration
		faults     int
		bad        bool
	}{
		{name: "fresh", body: `{"timestamp":"2026-11-29T18:10:26.5+00:00","loads":[{"timestamp":1795975826.25,"num_running_reqs":1}]}`, ranks: 1, running: "1", age: 250 * time.Millisecond},
		{name: "a clock that is ahead", body: `{"timestamp":"2026-11-29T18:10:26.5+00:00","loads":[{"timestamp":1795975999,"num_running_reqs":1}]}`, ranks: 1, running: "1"},
		{name: "a clock of another age", body: `{"timestamp":"2026-11-29T18:10:26.5+00:00","loads":[{"timestamp":1,"num_running_reqs":1}]}`, ranks: 1, running: "1"},
		{name: "negative", body: `{"loads":[{"num_running_reqs":-1}]}`, ranks: 1, running: "?", faults: 1},
		{name: "2^63", body: `{"loads":[{"num_running_reqs":9223372036854775808}]}`, ranks: 1, running: "?", faults: 1},
		{name: "more than can run", body: `{"loads":[{"num_running_reqs":4e9}]}`, ranks: 1, running: "?"},
		{name: "of another type", body: `{"loads":[{"num_running_reqs":"5","num_waiting_reqs":{"a":1}}]}`, ranks: 1, running: "?", faults: 2},
		{name: "null", body: `{"loads":[{"num_running_reqs":null}]}`, ranks: 1, running: "?"},
		{name: "ranks that cannot be", body: `{"loads":[{"dp_rank":-1},{"dp_rank":1000000000},{"dp_rank":2,"num_running_reqs":3}]}`, ranks: 3, running: "?", faults: 2},
		{name: "none", body: `{"loads":[]}`},
		{name: "no list", body: `{"loads":5}`, bad: true},
		{name: "no JSON", body: `<html>`, bad: true},
		{name: "empty", body: ``, bad: true},
	} {
		l, err := parseLoads([]byte(test.body), now)
		if (err != nil) != test.bad || len(l.byRank) != test.ranks || l.faults != test.faults {
			t.Errorf("%s: %v, %d ranks, %d faults", test.name, err, len(l.byRank), l.faults)
			continue
		}
		if test.ranks == 0 {
			continue
		}
		got := "?"
		if n := l.byRank[0].Running.Count(); n != nil {
			got = fmt.Sprint(*n)
		}
		if age := now.Sub(l.at[0]).Round(time.Millisecond); got != test.running || age != test.age {
			t.Errorf("%s: running %s, age %v", test.name, got, age)
		}
	}
}

func TestPage(t *testing.T) {
	var p totals
	p.scan([]byte(`sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 3
sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 3
sglang:num_running_reqs{dp_rank="1",tp_rank="2"} 4
sglang:num_queue_reqs{dp_rank="1",priority=""} 9
sglang:num_queue_reqs{dp_rank="1",priority="5"} 2
sglang:num_queue_reqs{dp_rank="x"} 2
sglang:token_usage{dp_rank="1"} NaN
sglang:prompt_tokens_total{is_streaming="true"} 5
sglang:prompt_tokens_total{is_streaming="false"} 6
other:prompt_tokens_total 7
`))
	if len(p.gauges) != 2 || p.gauges[0].running.V != 3 || p.gauges[1].running.V != 4 || p.gauges[1].waiting.V != 9 || p.gauges[1].usage.Known || p.prompt.V != 11 || p.faults != 2 {
		t.Errorf("%+v", p)
	}
}

func TestTokenizeAndRender(t *testing.T) {
	f := newFake(t, 0)
	m := enginetest.NewMirror(t)
	a := watch(t, f, m)
	m.Await("model", func() bool { return m.Known.Model != "" })
	for _, e := range exchanges(t) {
		if e.Path != "/tokenize" || e.Status != 200 || bytes.Contains(e.Response, []byte("[[")) {
			continue
		}
		var request struct {
			Prompt   string
			Messages json.RawMessage
			Special  *bool `json:"add_special_tokens"`
		}
		var answer struct{ Tokens []uint32 }
		if err := json.Unmarshal(e.Request, &request); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(e.Response, &answer); err != nil {
			t.Fatal(err)
		}
		f.set("/tokenize", string(e.Response))
		var got []uint32
		var err error
		if request.Messages != nil {
			got, err = a.Render(t.Context(), []byte(strings.Replace(string(e.Request), "{", `{"stream":true,"max_tokens":3,`, 1)))
		} else {
			got, err = a.Tokenize(t.Context(), request.Prompt, request.Special == nil || *request.Special)
		}
		if diff := cmp.Diff(answer.Tokens, got); err != nil || diff != "" || len(got) == 0 {
			t.Errorf("%v %s", err, diff)
		}
		f.mu.Lock()
		sent := f.bodies[len(f.bodies)-1]
		f.mu.Unlock()
		if !strings.Contains(sent, `"model":"tiny"`) || strings.Contains(sent, "max_tokens") {
			t.Errorf("sent %s", sent)
		}
	}
	for _, bad := range []string{"", "[]", "{}", `{"messages":`} {
		if _, err := a.Render(t.Context(), []byte(bad)); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
	f.set("/tokenize", "{}")
	if _, err := a.Tokenize(t.Context(), "x", true); err == nil {
		t.Error("an answer without tokens was accepted")
	}
}

func TestNewRefuses(t *testing.T) {
	if _, err := New(Options{}); err == nil {
		t.Error("no logger was accepted")
	}
	if _, err := New(Options{Options: engine.Options{Logger: slog.New(slog.DiscardHandler)}}); err == nil {
		t.Error("no URL was accepted")
	}
}

// The hierarchical cache keeps in host memory what it reads back.
func TestReadsHostTier(t *testing.T) {
	for _, on := range []bool{true, false} {
		var k poller.Known
		i := serverInfo{HostTier: on}
		i.facts(&k)
		if got := k.Facts.Capabilities.Has(engine.ReadsHostTier); got != on {
			t.Errorf("hierarchical cache %v: reads host memory %v", on, got)
		}
	}
}

func TestTransfer(t *testing.T) {
	i := serverInfo{Mode: "prefill", Backend: "mooncake", ModelPath: "m", Version: "0.5.23", DType: "bfloat16"}
	p := i.transfer(16)
	i.Mode = "decode"
	d := i.transfer(16)
	if p.Role != "prefill" || d.Role != "decode" || p.Fingerprint == "" || p.Fingerprint != d.Fingerprint || p.Connector != "mooncake" {
		t.Errorf("%+v %+v", p, d)
	}
	i.DType = "float16"
	if i.transfer(16).Fingerprint == d.Fingerprint || i.transfer(32).Fingerprint == i.transfer(16).Fingerprint {
		t.Error("engines that differ have one fingerprint")
	}
	i.Mode = "null"
	if (i.transfer(16) != engine.Transfer{}) {
		t.Error("an engine that serves all of a request gives KV away")
	}
}

// Whatever an engine answers about its load, readings are counts, shares and times
// of ranks that can be. The seeds are recorded answers.
func FuzzLoad(f *testing.F) {
	for _, e := range exchanges(f) {
		if strings.HasPrefix(e.Path, "/v1/loads") || e.Path == "/get_load" {
			f.Add([]byte(e.Response))
		}
	}
	page, err := os.ReadFile("testdata/metrics.txt")
	if err != nil {
		f.Fatal(err)
	}
	for part := range bytes.SplitSeq(page, []byte("\n# HELP ")) {
		if bytes.Contains(part, []byte("sglang:")) && len(part) < 3000 {
			f.Add(part)
		}
	}
	f.Add([]byte(`{"timestamp":"soon","loads":[{"dp_rank":-1},{"dp_rank":1,"num_running_reqs":-3,"token_usage":2},{"dp_rank":0,"num_running_reqs":1}]}`))
	f.Add([]byte("sglang:num_running_reqs{dp_rank=\"1\"} 3\nsglang:num_running_reqs{priority=\"\"} 4\nsglang:num_running_reqs{priority=\"2\"} 1\nsglang:num_running_reqs{dp_rank=\"x\"} 1\n"))
	f.Add([]byte(`[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2,"num_tokens":100,"ts_tic":1.5}]`))
	now := time.Unix(1_800_000_000, 0)
	f.Fuzz(func(t *testing.T, text []byte) {
		var s source
		var err error
		s.loads, err = parseLoads(enginehttp.Finite(bytes.Clone(text)), now)
		if err == nil && (len(s.loads.byRank) > engine.MaxRanks || len(s.loads.byRank) != len(s.loads.at)) {
			t.Fatalf("%d ranks, %d times", len(s.loads.byRank), len(s.loads.at))
		}
		s.totals.scan(text)
		if len(s.totals.gauges) > engine.MaxRanks {
			t.Fatalf("%d ranks", len(s.totals.gauges))
		}
		for rank := range max(len(s.loads.byRank), len(s.totals.gauges)) {
			l := s.load(rank)
			for _, v := range []*float64{l.PromptTokens, l.ComputedPromptTokens, l.GenerationTokens, l.Finished, l.FirstTokens, l.FirstTokenSeconds, l.KVUsedRatio} {
				if v != nil && !(*v >= 0) {
					t.Fatalf("a reading of %v", *v)
				}
			}
			if l.Running != nil && *l.Running < 0 || l.Waiting != nil && *l.Waiting < 0 || l.At.After(now) {
				t.Fatalf("%+v", l)
			}
		}
		var k engine.Facts
		s.fill(&k)
	})
}

// Whatever a server says of its settings, facts are bounded and each rank has a
// plan. The seed is the recorded answer.
func FuzzFacts(f *testing.F) {
	for _, e := range exchanges(f) {
		if e.Path != "/server_info" {
			continue
		}
		// Of hundreds of settings those that are read.
		var info serverInfo
		if err := json.Unmarshal(e.Response, &info); err != nil {
			f.Fatal(err)
		}
		var all map[string]any
		if err := json.Unmarshal(e.Response, &all); err != nil {
			f.Fatal(err)
		}
		of := reflect.TypeOf(info)
		read := map[string]any{}
		for i := range of.NumField() {
			if name := of.Field(i).Tag.Get("json"); all[name] != nil {
				read[name] = all[name]
			}
		}
		text, err := json.Marshal(read)
		if err != nil || len(read) < 10 {
			f.Fatalf("%v, %d settings", err, len(read))
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var info serverInfo
		if _, err := enginehttp.Decode(bytes.Clone(text), &info); err != nil {
			return
		}
		var k poller.Known
		info.facts(&k)
		got := k.Facts.Bounded()
		if got.Ranks < 1 || got.Ranks > engine.MaxRanks || got.BlockTokens < 0 || got.PoolBlocks < 0 || got.PoolBlocks > engine.MaxPoolBlocks {
			t.Fatalf("%+v", got)
		}
		for rank := range got.Ranks {
			if p := planFor(engine.Target{URL: "http://127.0.0.1:30000"}, &info, rank); p.Named != rank || len(p.Others) >= engine.MaxRanks {
				t.Fatalf("rank %d: %+v", rank, p)
			}
		}
	})
}

// A list without end is refused before its members are read.
func TestLoadsWithoutEnd(t *testing.T) {
	list := "[" + strings.Repeat("{},", enginehttp.MaxMembers) + "{}]"
	for _, body := range []string{list, `{"loads":` + list + `}`} {
		if _, err := parseLoads([]byte(body), time.Now()); !errors.Is(err, enginehttp.ErrTooMany) {
			t.Errorf("error %v", err)
		}
	}
}
