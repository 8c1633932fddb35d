package llamacpp

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"waypost/agent"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/cluster"
	"waypost/testbed/engines"
)

const (
	// patience bounds what must happen sooner or later; it decides no pass.
	patience = 2 * time.Minute
	host     = "gpu-01"
	engine   = "llamacpp-1"
	worker   = host + "/" + engine + "/0"
)

// rig is a real server with a real agent and coordinator.
type rig struct {
	t      *testing.T
	server *engines.Process
	*cluster.Cluster
	*engines.Client
	table  *engines.Table
	writer *engines.Writer
	// name and n name the requests.
	name string
	n    int
}

// startServer runs the server with some flags.
func startServer(t *testing.T, flags ...string) *rig {
	t.Helper()
	program, model := os.Getenv("WAYPOST_LLAMA_SERVER"), os.Getenv("WAYPOST_LLAMA_MODEL")
	if program == "" || model == "" {
		t.Skip("WAYPOST_LLAMA_SERVER and WAYPOST_LLAMA_MODEL name no llama.cpp server and model; .ci/run llamacpp installs both")
	}
	port, err := engines.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "server.log"))
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, table: &engines.Table{}, writer: engines.NewWriter(1, 3, 45)}
	r.server = &engines.Process{
		Path: program, Env: []string{"LD_LIBRARY_PATH=" + filepath.Dir(program)}, URL: "http://127.0.0.1:" + port, Health: "/health", Log: log,
		Args: append([]string{"-m", model, "--host", "127.0.0.1", "--port", port, "--slots", "--metrics", "-ngl", "0", "-t", "1", "--no-warmup", "--seed", "1"}, flags...),
	}
	if err := r.server.Start(t.Context(), patience); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.server.Kill(); err != nil {
			t.Errorf("kill: %v", err)
		}
		if err := log.Close(); err != nil {
			t.Error(err)
		}
		if path := os.Getenv("WAYPOST_TEST_LOG"); path != "" && t.Failed() {
			text, _ := os.ReadFile(log.Name())
			_ = os.WriteFile(path, text, 0o600)
		}
	})
	return r
}

// start runs the server with some flags, and a cluster around it without its
// agent.
func start(t *testing.T, flags ...string) *rig {
	t.Helper()
	r := startServer(t, flags...)
	o := cluster.Options{
		Dir: t.TempDir(), Coordinators: 1, Version: "0.0.0-test", PageTimeout: 30 * time.Second, LateAgents: true,
		External: []agent.EngineConfig{{Name: engine, Kind: "llamacpp", URL: r.server.URL}},
	}
	if os.Getenv("WAYPOST_TEST_LOG") != "" {
		o.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	c, err := cluster.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	r.Cluster = c
	r.Client = &engines.Client{Placement: c.Placement(0), HTTP: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}}
	t.Cleanup(func() {
		r.HTTP.CloseIdleConnections()
		if err := c.Stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return r
}

func (r *rig) startAgent() {
	r.t.Helper()
	if err := r.StartAgent(0); err != nil {
		r.t.Fatal(err)
	}
	if err := r.WaitReady(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}

// post asks the server itself.
func (r *rig) post(path string, body, answer any) {
	r.t.Helper()
	if err := r.Ask(r.server.URL+path, body, answer); err != nil {
		r.t.Fatal(err)
	}
}

// tokens are the token ids that the server makes of a chat.
func (r *rig) tokens(c *engines.Chat) []uint32 {
	r.t.Helper()
	var text struct{ Prompt string }
	r.post("/apply-template", map[string]any{"messages": c.Messages}, &text)
	var ids struct{ Tokens []uint32 }
	r.post("/tokenize", map[string]any{"content": text.Prompt, "add_special": true, "parse_special": true}, &ids)
	return ids.Tokens
}

// request is the next turn of a chat: as a chat, or as token ids, streamed or
// not.
func (r *rig) request(c *engines.Chat, kind, output int) *engines.Request {
	r.n++
	q := &engines.Request{ID: fmt.Sprintf("%sr-%d", r.name, r.n), Tokens: r.tokens(c), Output: output, Stream: kind%2 == 1}
	q.Body = map[string]any{"model": "tiny", "max_tokens": output, "temperature": 0, "seed": 1}
	if kind%3 == 2 {
		q.Path, q.Body["prompt"] = "/v1/completions", q.Tokens
	} else {
		q.Path, q.Body["messages"] = "/v1/chat/completions", c.Messages
	}
	return q
}

// serve sends the next turn of a chat and waits until Waypost knows of its end.
func (r *rig) serve(phase string, c *engines.Chat, q *engines.Request) engines.Result {
	a, p, class, err := r.Serve(r.t.Context(), q)
	if err != nil {
		r.t.Errorf("%s: %v", q.ID, err)
		return engines.Result{}
	}
	if a.Prompt != len(q.Tokens) || a.Cached < 0 {
		r.t.Errorf("%s: the server saw %d prompt tokens and reused %d, placed were %d", q.ID, a.Prompt, a.Cached, len(q.Tokens))
	}
	res := engines.Result{Phase: phase, Prompt: a.Prompt, Expected: -1, Actual: a.Cached, Class: class}
	if e := p.GetExpected(); e.ReuseTokens != nil {
		res.Expected = int(e.GetReuseTokens())
	}
	r.table.Add(res)
	if os.Getenv("WAYPOST_TEST_VERBOSE") != "" {
		r.t.Logf("%-10s %s prompt %5d expected %5d reused %5d %s", phase, q.ID, res.Prompt, res.Expected, res.Actual, class)
	}
	c.Messages = append(c.Messages, engines.Message{Role: "assistant", Content: a.Text})
	return res
}

// settle waits until the view has caught up with the latest request: what it
// left is expected. Where others overwrite it meanwhile, that never comes, so
// this gives up soon.
func (r *rig) settle(tokens []uint32) {
	want := (len(tokens) - 1) / 16 * 16
	for range 400 {
		if r.Expects(r.t.Context(), tokens, "") >= want {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	if os.Getenv("WAYPOST_TEST_VERBOSE") != "" {
		r.t.Logf("%sr-%d: what it left is not expected", r.name, r.n)
	}
}

// next makes the question after an answer, or another chat when one is long.
func (r *rig) next(c *engines.Chat, longest int) *engines.Chat {
	if len(r.tokens(c)) > longest {
		return r.writer.Begin(120 + r.writer.Rand().IntN(200))
	}
	last := c.Messages[len(c.Messages)-1]
	c.Messages = c.Messages[:len(c.Messages)-1]
	r.writer.Continue(c, last.Content, 20+r.writer.Rand().IntN(60))
	return c
}

// chats sends so many requests of a set of chats, one at a time.
func (r *rig) chats(phase string, chats []*engines.Chat, requests int) {
	r.t.Helper()
	for i := range requests {
		// Some chats are livelier than others.
		at := r.writer.Rand().IntN(1 + r.writer.Rand().IntN(len(chats)))
		c := chats[at]
		q := r.request(c, i, 12)
		r.serve(phase, c, q)
		r.settle(q.Tokens)
		chats[at] = r.next(c, 2500)
	}
}

func (r *rig) begin(n int) []*engines.Chat {
	chats := make([]*engines.Chat, n)
	for i := range chats {
		chats[i] = r.writer.Begin(120 + r.writer.Rand().IntN(300))
	}
	return chats
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

func (r *rig) incarnation() (string, string) {
	name := worker
	resp, err := r.Operator(0).ListWorkers(r.t.Context(), &waypostv1.ListWorkersRequest{Name: &name})
	if err != nil || len(resp.GetWorkers()) != 1 {
		return "", ""
	}
	return resp.GetWorkers()[0].GetIncarnation(), resp.GetWorkers()[0].GetState()
}

func TestReuse(t *testing.T) {
	for _, c := range []struct {
		name  string
		flags []string
	}{
		{"own buffers", []string{"--parallel", "4", "-c", "16384", "--cache-ram", "6"}},
		{"shared buffer", []string{"-c", "16384", "--cache-ram", "6"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			reuse(t, c.flags)
		})
	}
}

func reuse(t *testing.T, flags []string) {
	r := start(t, flags...)
	// The agent comes late: the slots hold what nobody told it of.
	for _, c := range r.begin(6) {
		var out json.RawMessage
		r.post("/v1/chat/completions", map[string]any{"messages": c.Messages, "max_tokens": 4}, &out)
	}
	r.startAgent()
	chats := r.begin(14)
	r.chats("one at a time", chats, 200)

	// Four callers at once, each with chats of its own.
	var callers sync.WaitGroup
	for k := range 4 {
		own := &rig{t: t, server: r.server, Cluster: r.Cluster, Client: r.Client, table: r.table, writer: engines.NewWriter(uint64(10+k), 3, 45), name: fmt.Sprintf("caller-%d-", k)}
		callers.Go(func() { own.chats("four callers at once", own.begin(3), 15) })
	}
	callers.Wait()

	// The server dies and comes back: nothing that it held is expected.
	former, _ := r.incarnation()
	if err := r.server.Kill(); err != nil {
		t.Fatal(err)
	}
	r.eventually("the death is not seen", func() string {
		if _, state := r.incarnation(); !strings.HasPrefix(state, "ready") {
			return ""
		}
		return "still ready"
	})
	if err := r.server.Start(t.Context(), patience); err != nil {
		t.Fatal(err)
	}
	r.eventually("the new process is not used", func() string {
		now, state := r.incarnation()
		if state != "ready" || now == former {
			return state + " " + now
		}
		return ""
	})
	for i, c := range chats {
		q := r.request(c, i, 12)
		// A system prompt may be there again.
		if res := r.serve("after kill -9", c, q); i == 0 && res.Expected > 0 || res.Expected > 320 {
			t.Errorf("%d tokens expected of a cache that ended with its process", res.Expected)
		}
		r.settle(q.Tokens)
		chats[i] = r.next(c, 2500)
	}
	r.chats("after its restart", chats, 70)

	// The agent dies and comes back: what it knew is unknown, and learnt anew.
	if err := r.StopAgent(0); err != nil {
		t.Fatal(err)
	}
	r.startAgent()
	r.chats("after the agent's restart", chats, 60)

	var b strings.Builder
	r.table.Print(&b)
	t.Logf("llama.cpp, %s\n%s", strings.Join(flags, " "), b.String())
	all, steady := r.table.Row(""), r.table.Row("", "after the agent's restart")
	if all.Requests < 300 {
		t.Errorf("%d requests, want at least 300", all.Requests)
	}
	if steady.Recall() < .95 {
		t.Errorf("%.2f %% of what was reused was expected, want 95 %%", 100*steady.Recall())
	}
	if all.OverRatio() > .01 {
		t.Errorf("%.2f %% of the prompts' tokens were expected in vain, want at most 1 %%", 100*all.OverRatio())
	}
	if all.Actual < all.Prompt/3 {
		t.Errorf("only %d of %d tokens were reused: the test proves little", all.Actual, all.Prompt)
	}
}

// Without a host cache what a request overwrites is lost, and which slot that is the
// server decides by tokens between two points and by the order of ends that are told
// late: what it may be is not promised.
func TestCallersWithoutAHostCache(t *testing.T) {
	t.Parallel()
	r := start(t, "--parallel", "4", "-c", "16384", "--cache-ram", "0")
	r.startAgent()
	for n := 1; n <= 4; n++ {
		var callers sync.WaitGroup
		for k := range n {
			own := &rig{t: t, server: r.server, Cluster: r.Cluster, Client: r.Client, table: r.table, writer: engines.NewWriter(uint64(100*n+k), 3, 45), name: fmt.Sprintf("caller-%d-%d-", n, k)}
			callers.Go(func() { own.chats(fmt.Sprintf("callers at once: %d", n), own.begin(3), 80/n) })
		}
		callers.Wait()
	}
	var b strings.Builder
	r.table.Print(&b)
	t.Logf("llama.cpp without a host cache\n%s", b.String())
	all := r.table.Row("")
	if all.OverRatio() > .01 {
		t.Errorf("%.2f %% of the prompts' tokens were expected in vain, want at most 1 %%", 100*all.OverRatio())
	}
	// How much of more than one caller's is expected depends on how pages fall between
	// their requests.
	one := r.table.Row("callers at once: 1")
	t.Logf("%.2f %% of what was reused was expected, of one caller %.2f %%", 100*all.Recall(), 100*one.Recall())
	if one.Recall() < .8 {
		t.Errorf("%.2f %% of what one caller reused was expected, want at least 80 %%", 100*one.Recall())
	}
}
