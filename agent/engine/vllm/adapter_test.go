package vllm

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// deadline only keeps a broken test from hanging.
const deadline = 30 * time.Second

// mirror is a sink that keeps a block table per rank, as an agent does.
type mirror struct {
	t       testing.TB
	mu      sync.Mutex
	changed *sync.Cond
	facts   engine.Facts
	up      bool
	reason  string
	ranks   map[int]*mirrored
	busy    map[int]bool // a call of the rank is under way
}

type mirrored struct {
	table, beside *blocktable.Table
	load          engine.Load
	coverage      engine.Coverage
	hint          string
	resets        []engine.ResetCause
	counts        map[string]int
	ages          []time.Duration
}

func newMirror(t testing.TB) *mirror {
	m := &mirror{t: t, ranks: map[int]*mirrored{}, busy: map[int]bool{}}
	m.changed = sync.NewCond(&m.mu)
	return m
}

func (m *mirror) of(rank int) *mirrored {
	r := m.ranks[rank]
	if r == nil {
		r = &mirrored{table: blocktable.New(blocktable.Options{}), counts: map[string]int{}}
		m.ranks[rank] = r
	}
	return r
}

// call runs f for a rank and proves that calls of a rank do not overlap.
func (m *mirror) call(rank int, f func(r *mirrored)) {
	m.mu.Lock()
	if m.busy[rank] {
		m.t.Error("calls of one rank overlap")
	}
	m.busy[rank] = true
	m.mu.Unlock()
	m.mu.Lock()
	f(m.of(rank))
	m.busy[rank] = false
	m.changed.Broadcast()
	m.mu.Unlock()
}

func (m *mirror) Facts(f engine.Facts) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.facts = f
	m.changed.Broadcast()
}

func (m *mirror) Health(up bool, reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.up, m.reason = up, reason
	m.changed.Broadcast()
}

func (m *mirror) Load(rank int, l engine.Load) { m.call(rank, func(r *mirrored) { r.load = l }) }

func (m *mirror) Batch(rank int, b engine.Batch) {
	m.call(rank, func(r *mirrored) {
		table := r.table
		if r.beside != nil {
			table = r.beside
		}
		for i := range b.Events {
			table.Apply(&b.Events[i])
		}
		r.ages = append(r.ages, b.Age)
	})
}

func (m *mirror) Reset(rank int, cause engine.ResetCause) {
	m.call(rank, func(r *mirrored) {
		r.table.Clear()
		r.beside = nil
		r.resets = append(r.resets, cause)
	})
}

func (m *mirror) Coverage(rank int, c engine.Coverage, hint string) {
	m.call(rank, func(r *mirrored) { r.coverage, r.hint = c, hint })
}

func (m *mirror) Counted(rank int, what string, n int) {
	m.call(rank, func(r *mirrored) { r.counts[what] += n })
}

// rebuilder is a mirror that builds beside.
type rebuilder struct{ *mirror }

func (m rebuilder) Rebuild(rank int, cause engine.ResetCause) {
	m.call(rank, func(r *mirrored) { r.beside = blocktable.New(blocktable.Options{}) })
}

func (m rebuilder) Rebuilt(rank int) {
	m.call(rank, func(r *mirrored) { r.table, r.beside = r.beside, nil })
}

// await waits until ok holds.
func (m *mirror) await(what string, ok func() bool) {
	m.t.Helper()
	timer := time.AfterFunc(deadline, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.changed.Broadcast()
	})
	defer timer.Stop()
	end := time.Now().Add(deadline)
	m.mu.Lock()
	defer m.mu.Unlock()
	for !ok() {
		if time.Now().After(end) {
			for n, r := range m.ranks {
				m.t.Logf("rank %d: %s (%s), resets %v, counts %v, %d blocks", n, r.coverage, r.hint, r.resets, r.counts, r.table.Len())
			}
			m.t.Fatalf("%s: not within %s", what, deadline)
		}
		m.changed.Wait()
	}
}

// match is the reuse of the prompt of the named blocks.
func (r *mirrored) match(blocks ...int) int {
	var tokens []uint32
	for _, b := range blocks {
		tokens = append(tokens, uint32(10*b), uint32(10*b+1))
	}
	return r.table.Match(append(tokens, 1), "", "")
}

// watch runs an adapter on the engine until the test ends.
func watch(t *testing.T, f *fakeEngine, o Options, sink engine.Sink) *Adapter {
	t.Helper()
	o.Target.Name, o.Target.URL = "vllm-test", f.url
	o.Logger = slog.New(slog.DiscardHandler)
	a, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, sink) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return a
}

func TestFactsAndLoad(t *testing.T) {
	f := newFakeEngine(t, 1)
	f.extra["/server_info"] = `{"vllm_config":{"instance_id":"17","scheduler_config":{"max_num_batched_tokens":2048,"max_num_seqs":16},"kv_transfer_config":{"kv_connector":"NixlConnector"}}}`
	m := newMirror(t)
	watch(t, f, Options{}, m)
	m.await("load", func() bool { return m.up && m.of(0).load.Running != nil })
	m.mu.Lock()
	defer m.mu.Unlock()
	want := engine.Facts{
		Version: "0.32.0", Model: "tiny", Aliases: []string{"sql"}, Ranks: 1, BlockTokens: 2, PoolBlocks: 100,
		MaxModelTokens: 2048, MaxRunning: 16, StepTokens: 2048, StartMark: m.facts.StartMark, ConnectorKinds: []string{"NixlConnector"},
	}
	if diff := cmp.Diff(want, m.facts); diff != "" || m.facts.StartMark == 0 {
		t.Errorf("start mark %d; %s", m.facts.StartMark, diff)
	}
	l := m.of(0).load
	if l.Running == nil || *l.Running != 0 || l.KVUsedRatio != nil || l.PromptTokens != nil {
		t.Errorf("load %+v: what the page lacks must be unknown", l)
	}
}

func TestEventsFromTheBeginning(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	rank.publish(false, stored(0, 1, 2, 3))
	rank.publish(false, removed(3))
	m := newMirror(t)
	watch(t, f, Options{}, m)
	m.await("replay", func() bool { return m.of(0).coverage == engine.CoverageFull && m.of(0).match(1, 2, 3) == 4 })
	rank.awaitSubscriber()
	rank.publish(false, stored(2, 4))
	m.await("a live batch", func() bool { return m.of(0).match(1, 2, 4) == 6 })
	rank.publish(false, cleared(), stored(0, 9))
	m.await("a clear", func() bool { return m.of(0).match(9) == 2 && m.of(0).match(1, 2) == 0 })
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.of(0).resets) != 0 {
		t.Errorf("resets %v", m.of(0).resets)
	}
	for _, age := range m.of(0).ages {
		if age <= 0 {
			t.Errorf("age %v of a batch published long ago", age)
		}
	}
}

func TestGapIsReplayed(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := newMirror(t)
	watch(t, f, Options{}, m)
	rank.awaitSubscriber()
	m.await("start", func() bool { return m.of(0).coverage == engine.CoverageFull })
	rank.publish(false, stored(0, 1))
	rank.publish(true, stored(1, 2))
	rank.publish(false, stored(2, 3))
	m.await("the gap is filled", func() bool { return m.of(0).match(1, 2, 3) == 6 && m.of(0).coverage == engine.CoverageFull })
	m.mu.Lock()
	defer m.mu.Unlock()
	if r := m.of(0); r.counts[CountGaps] != 1 || r.counts[CountMissing] != 1 || len(r.resets) != 0 {
		t.Errorf("counts %v, resets %v", r.counts, r.resets)
	}
}

// A gap nobody can fill: a sink that can keeps its old view until the new one
// stands.
func TestUnfillableGap(t *testing.T) {
	for _, beside := range []bool{true, false} {
		t.Run(fmt.Sprintf("beside=%v", beside), func(t *testing.T) {
			f := newFakeEngine(t, 1)
			rank := f.ranks[0]
			rank.size = 2
			m := newMirror(t)
			var sink engine.Sink = m
			if beside {
				sink = rebuilder{m}
			}
			watch(t, f, Options{}, sink)
			rank.awaitSubscriber()
			m.await("start", func() bool { return m.of(0).coverage == engine.CoverageFull })
			rank.publish(false, stored(0, 1))
			m.await("first", func() bool { return m.of(0).match(1) == 2 })
			for h := 2; h < 6; h++ {
				rank.publish(true, stored(0, h))
			}
			rank.publish(false, stored(0, 6))
			m.await("rebuilt from what the ring holds", func() bool {
				r := m.of(0)
				return r.match(6) == 2 && r.match(5) == 2 && r.match(1) == 0 && r.coverage == engine.CoveragePartial && r.hint == hintLate
			})
			m.mu.Lock()
			defer m.mu.Unlock()
			if want := map[bool]int{true: 0, false: 1}[beside]; len(m.of(0).resets) != want {
				t.Errorf("resets %v, want %d", m.of(0).resets, want)
			}
		})
	}
}

// The same hashes come back after a restart, so only the numbers, the replay
// and the process's start can show it.
func TestRestartWithEqualHashes(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := newMirror(t)
	watch(t, f, Options{}, m)
	rank.awaitSubscriber()
	rank.publish(false, stored(0, 1, 2))
	m.await("first life", func() bool { return m.of(0).match(1, 2) == 4 })
	f.restart()
	m.await("no credit of the first life", func() bool {
		return m.of(0).match(1, 2) == 0 && m.of(0).coverage == engine.CoverageFull
	})
	rank.awaitSubscriber()
	rank.publish(false, stored(0, 1))
	m.await("second life", func() bool { return m.of(0).match(1, 2) == 2 && m.of(0).match(1) == 2 })
	m.await("facts of the second life", func() bool { return m.facts.StartMark != 0 })
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.of(0).resets[0] != engine.ResetRestart {
		t.Errorf("resets %v", m.of(0).resets)
	}
}

// Without a replay socket the process's start time tells.
func TestRestartByStartTime(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	f.extra["/kv_event_sources"] = fmt.Sprintf(`{"0":{"endpoint":"tcp://*:%d","replay_endpoint":null}}`, rank.pubPort())
	m := newMirror(t)
	watch(t, f, Options{}, m)
	rank.awaitSubscriber()
	m.await("connected", func() bool { return m.of(0).hint == hintNoReplay })
	rank.publish(false, stored(0, 1))
	m.await("first life", func() bool { return m.of(0).match(1) == 2 && m.of(0).coverage == engine.CoverageFull })
	f.set(func() { f.start += 50 })
	m.await("reset", func() bool { return m.of(0).match(1) == 0 && len(m.of(0).resets) == 1 })
	if m.of(0).resets[0] != engine.ResetRestart {
		t.Errorf("resets %v", m.of(0).resets)
	}
}

func TestDroppedConnection(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := newMirror(t)
	watch(t, f, Options{}, m)
	rank.awaitSubscriber()
	rank.publish(false, stored(0, 1))
	m.await("connected", func() bool { return m.of(0).match(1) == 2 })
	rank.cut()
	rank.publish(true, stored(1, 2)) // while nobody listens
	m.await("what was missed", func() bool { return m.of(0).match(1, 2) == 4 && m.of(0).coverage == engine.CoverageFull })
	if len(m.of(0).resets) != 0 {
		t.Errorf("resets %v: the process is the same", m.of(0).resets)
	}
}

func TestTwoRanksAreTwoWorkers(t *testing.T) {
	f := newFakeEngine(t, 2)
	m := newMirror(t)
	watch(t, f, Options{}, m)
	for i, rank := range f.ranks {
		rank.awaitSubscriber()
		rank.publish(false, stored(0, i+1))
	}
	m.await("each has its own", func() bool {
		return m.of(0).match(1) == 2 && m.of(0).match(2) == 0 && m.of(1).match(1) == 0 && m.of(1).match(2) == 2
	})
	m.await("loads", func() bool { return m.of(1).load.Running != nil })
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.facts.Ranks != 2 || *m.of(1).load.Running != 1 {
		t.Errorf("ranks %d, running on rank 1 %v", m.facts.Ranks, *m.of(1).load.Running)
	}
}

// An engine whose API server was killed alone: its engine process still
// publishes and answers replays, but nothing can be sent there.
func TestOrphanedEngineProcess(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := newMirror(t)
	watch(t, f, Options{}, m)
	rank.awaitSubscriber()
	rank.publish(false, stored(0, 1))
	m.await("alive", func() bool { return m.of(0).match(1) == 2 && m.up })
	f.stopHTTP()
	m.await("gone", func() bool {
		return !m.up && m.of(0).match(1) == 0 && m.of(0).coverage == engine.CoverageNone
	})
	rank.publish(false, stored(1, 2))
	rank.publish(false, stored(0, 5))
	f.serveAgain()
	m.await("back", func() bool {
		return m.up && m.of(0).match(1, 2) == 4 && m.of(0).match(5) == 2 && m.of(0).coverage == engine.CoverageFull
	})
	m.mu.Lock()
	defer m.mu.Unlock()
	if diff := cmp.Diff([]engine.ResetCause{engine.ResetGone}, m.of(0).resets); diff != "" {
		t.Error(diff)
	}
}

func TestSleepClears(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := newMirror(t)
	watch(t, f, Options{}, m)
	rank.awaitSubscriber()
	rank.publish(false, stored(0, 1))
	m.await("awake", func() bool { return m.of(0).match(1) == 2 && m.of(0).load.Sleeping != nil })
	f.set(func() { f.asleep = true })
	m.await("asleep", func() bool { return m.of(0).match(1) == 0 && *m.of(0).load.Sleeping })
	f.set(func() { f.asleep = false })
	rank.publish(false, cleared(), stored(0, 2))
	m.await("awake again", func() bool { return m.of(0).match(2) == 2 && !*m.of(0).load.Sleeping })
}

func TestResync(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := newMirror(t)
	a := watch(t, f, Options{}, rebuilder{m})
	rank.awaitSubscriber()
	rank.publish(false, stored(0, 1))
	m.await("stored", func() bool { return m.of(0).match(1) == 2 && m.of(0).coverage == engine.CoverageFull })
	m.mu.Lock()
	m.of(0).table.Clear() // the view went wrong
	m.mu.Unlock()
	a.Resync(0)
	a.Resync(7) // no such rank
	m.await("rebuilt", func() bool { return m.of(0).match(1) == 2 && m.of(0).beside == nil })
}

// An adapter can be run again: it begins anew with a reset.
func TestRunAgain(t *testing.T) {
	f := newFakeEngine(t, 1)
	f.ranks[0].publish(false, stored(0, 1))
	m := newMirror(t)
	a, err := New(Options{Target: engine.Target{Name: "e", URL: f.url}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for life := range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx, m) }()
		m.await("full", func() bool {
			return m.of(0).coverage == engine.CoverageFull && m.of(0).match(1) == 2 && len(m.of(0).resets) == life
		})
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		m.mu.Lock()
		m.of(0).coverage = ""
		m.mu.Unlock()
	}
	if got := m.of(0).table.Copies(); got != 1 {
		t.Errorf("%d copies: the second life was added to the first", got)
	}
}

// An engine with a plain address connects to the agent.
func TestEngineThatConnects(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	free.Close()
	f := newFakeEngine(t, 1)
	f.extra["/kv_event_sources"] = fmt.Sprintf(`{"0":{"endpoint":"tcp://%s","replay_endpoint":null}}`, address)
	m := newMirror(t)
	watch(t, f, Options{}, m)
	rank := f.ranks[0]
	var c net.Conn
	for c == nil {
		if c, err = net.Dial("tcp", address); err != nil {
			time.Sleep(10 * time.Millisecond)
		}
	}
	rank.wg.Go(func() {
		in := bufio.NewReader(c)
		if zmtpGreet(c, in, "PUB") == nil {
			rank.subscriber(c, in)
		}
	})
	defer c.Close()
	rank.awaitSubscriber()
	rank.publish(false, stored(0, 1))
	m.await("a batch", func() bool { return m.of(0).match(1) == 2 })
}

func TestNoEventsIsSaid(t *testing.T) {
	for _, test := range []struct{ sources, hint string }{
		{`{"0":{"enable_kv_cache_events":false,"publisher":"null","endpoint":"tcp://*:5557"}}`, hintNoEvents},
		{"", hintUnknown},
	} {
		f := newFakeEngine(t, 1)
		if test.sources != "" {
			f.extra["/kv_event_sources"] = test.sources
		} else {
			f.extra["/kv_event_sources"] = "{}"
		}
		m := newMirror(t)
		watch(t, f, Options{}, m)
		m.await("coverage", func() bool { return m.of(0).coverage == engine.CoverageNone && m.of(0).hint == test.hint })
		m.await("load goes on", func() bool { return m.of(0).load.Waiting != nil })
	}
}

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
			time.Sleep(1500 * time.Millisecond)
		}, "deadline"},
		"redirect":   {func(w http.ResponseWriter) { w.Header().Set("Location", "http://192.0.2.1/"); w.WriteHeader(302) }, "redirects"},
		"compressed": {func(w http.ResponseWriter) { w.Header().Set("Content-Encoding", "gzip"); w.Write([]byte("x")) }, "compressed"},
		"error":      {func(w http.ResponseWriter) { http.Error(w, strings.Repeat("x", 1<<20), 500) }, "answered 500"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFakeEngine(t, 1)
			f.metrics = test.answer
			m := newMirror(t)
			watch(t, f, Options{}, m)
			m.await("down", func() bool { return !m.up && strings.Contains(m.reason, test.reason) })
			if len(m.reason) > 1000 {
				t.Errorf("a reason of %d bytes", len(m.reason))
			}
			f.set(func() { f.metrics = nil })
			m.await("up", func() bool { return m.up })
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
	a, err := New(Options{Target: engine.Target{URL: s.URL, APIKey: "secret\n"}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer a.client.close()
	if _, err := a.Tokenize(t.Context(), "x", true); statusOf(err) != 401 {
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
	a, err := New(Options{Target: engine.Target{URL: s.URL}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer a.client.close()
	check := func(tokens []uint32, err error, want string) {
		t.Helper()
		if diff := cmp.Diff([]uint32{1, 1<<32 - 1, 3}, tokens); diff != "" || err != nil || got != want {
			t.Errorf("%v; sent %s, want %s; %s", err, got, want, diff)
		}
	}
	tokens, err := a.Tokenize(t.Context(), "x", true)
	check(tokens, err, `/tokenize {"add_special_tokens":true,"prompt":"x"}`)
	tokens, err = a.Render(t.Context(), []byte(`{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":4,"stream":true,"reasoning_effort":"low","chat_template_kwargs":{"a":1}}`))
	check(tokens, err, `/tokenize {"chat_template_kwargs":{"a":1,"reasoning_effort":"low"},"messages":[{"role":"user","content":"x"}],"model":"m"}`)
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
		if _, err := New(Options{Target: engine.Target{URL: target}, Logger: slog.New(slog.DiscardHandler)}); err == nil {
			t.Errorf("URL %q was accepted", target)
		}
	}
	if _, err := New(Options{Target: engine.Target{URL: "http://x"}}); err == nil {
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
	star := []source{{Enabled: &yes, Endpoint: "tcp://*:5557", Replay: &replay}}
	tests := []struct {
		name   string
		target engine.Target
		known  knowledge
		rank   int
		want   plan
	}{
		{"configured", with("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"), knowledge{}, 0, plan{events: "tcp://127.0.0.1:5557", replay: "tcp://127.0.0.1:5657"}},
		{"configured, rank 2", with("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"), knowledge{}, 2, plan{events: "tcp://127.0.0.1:5559", replay: "tcp://127.0.0.1:5659"}},
		{"to listen", with("tcp://*:5557", ""), knowledge{}, 0, plan{events: "tcp://*:5557", listen: true}},
		{"asked", target, knowledge{sources: star}, 0, plan{events: "tcp://10.1.1.1:5557", replay: "tcp://10.1.1.1:5657"}},
		{"asked by the configuration, rank 1", target, knowledge{sources: star, configured: true}, 1, plan{events: "tcp://10.1.1.1:5558", replay: "tcp://10.1.1.1:5658"}},
		{"configured, and the engine tells of a replay", with("tcp://127.0.0.1:5557", ""), knowledge{sources: star}, 0, plan{events: "tcp://127.0.0.1:5557", replay: "tcp://10.1.1.1:5657"}},
		{"configured to listen, but the engine binds", with("tcp://*:5557", ""), knowledge{sources: star}, 0, plan{events: "tcp://10.1.1.1:5557", replay: "tcp://10.1.1.1:5657"}},
		{"a plain address", target, knowledge{sources: []source{{Endpoint: "tcp://127.0.0.1:5557"}}}, 0, plan{events: "tcp://127.0.0.1:5557", either: true}},
		{"off", target, knowledge{sources: []source{{Enabled: &no, Endpoint: "tcp://*:5557"}}}, 0, plan{hint: hintNoEvents}},
		{"without a publisher", target, knowledge{sources: []source{{Enabled: &yes, Publisher: &null, Endpoint: "tcp://*:5557"}}}, 0, plan{hint: hintNoEvents}},
		{"unset in the configuration", target, knowledge{configured: true}, 0, plan{hint: hintNoEvents}},
		{"unknown", target, knowledge{}, 0, plan{hint: hintUnknown}},
	}
	for _, test := range tests {
		if got := planFor(test.target, &test.known, test.rank); got != test.want {
			t.Errorf("%s: %+v, want %+v", test.name, got, test.want)
		}
	}
}

// The forms of the list of publishers.
func TestSources(t *testing.T) {
	for body, want := range map[string]int{
		`{"0":{"endpoint":"tcp://*:5557"},"1":{"endpoint":"tcp://*:5558"}}`: 2,
		`[{"data_parallel_rank":0,"endpoint":"tcp://10.0.0.1:5557"}]`:       1,
		`{}`:                                0,
		`{"x":{"endpoint":"tcp://*:5557"}}`: -1,
		`5`:                                 -1,
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, body) }))
		c, err := newClient(s.URL, "")
		if err != nil {
			t.Fatal(err)
		}
		var k knowledge
		err = c.learnSources(t.Context(), &k)
		if got := len(k.sources); (err != nil) != (want < 0) || want >= 0 && got != want {
			t.Errorf("%s: %d sources, %v", body, got, err)
		}
		c.close()
		s.Close()
	}
}
