package generic

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"waypost/agent/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must happen sooner or later.
const patience = time.Minute

func TestScan(t *testing.T) {
	at := time.Unix(5, 0)
	p := scan([]byte(`# HELP x y
vllm:num_requests_running{model_name="m"} 3
vllm:num_requests_waiting{model_name="m"} 2
vllm:kv_cache_usage_perc{model_name="m"} 0.25
vllm:prompt_tokens_total 100
vllm:generation_tokens_total 40
process_start_time_seconds 1.7e9
`))
	l := p.load(at)
	if *l.Running != 3 || *l.Waiting != 2 || *l.KVUsedRatio != .25 || *l.PromptTokens != 100 || *l.GenerationTokens != 40 || p.startMark() == 0 || l.ComputedPromptTokens != nil {
		t.Errorf("%+v", l)
	}
	// Two ranks add up, but for a share.
	p = scan([]byte("sglang:num_running_reqs{dp=\"0\"} 1\nsglang:num_running_reqs{dp=\"1\"} 4\nsglang:token_usage{dp=\"0\"} .5\nsglang:token_usage{dp=\"1\"} .1\n"))
	if l := p.load(at); *l.Running != 5 || l.KVUsedRatio != nil || l.Waiting != nil || p.startMark() != 0 {
		t.Errorf("%+v", l)
	}
	// What cannot be is unknown.
	p = scan([]byte("num_requests_running NaN\nnum_requests_waiting -1\ntoken_usage 3\nprompt_tokens_total 1e300\n"))
	if l := p.load(at); l.Running != nil || l.Waiting != nil || l.KVUsedRatio != nil || l.PromptTokens != nil || p.faults != 3 {
		t.Errorf("%+v, %d faults", l, p.faults)
	}
}

func FuzzScan(f *testing.F) {
	f.Add([]byte("vllm:num_requests_running{a=\"b\"} 3\nprocess_start_time_seconds 1e9\ntoken_usage .5\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		p := scan(text)
		l := p.load(time.Unix(1, 0))
		if l.Running != nil && *l.Running < 0 || l.Waiting != nil && *l.Waiting < 0 || l.KVUsedRatio != nil && !(*l.KVUsedRatio >= 0 && *l.KVUsedRatio <= 1) {
			t.Errorf("%+v", l)
		}
	})
}

// sink notes what an adapter tells.
type sink struct {
	mu     sync.Mutex
	facts  []engine.Facts
	loads  []engine.Load
	health []string
	resets []engine.ResetCause
	hints  []string
}

func (s *sink) with(fn func())            { s.mu.Lock(); defer s.mu.Unlock(); fn() }
func (s *sink) Facts(f engine.Facts)      { s.with(func() { s.facts = append(s.facts, f) }) }
func (s *sink) Load(_ int, l engine.Load) { s.with(func() { s.loads = append(s.loads, l) }) }
func (s *sink) Health(up bool, why string) {
	s.with(func() { s.health = append(s.health, fmt.Sprint(up, " ", why)) })
}
func (s *sink) Batch(int, engine.Batch)          {}
func (s *sink) Reset(_ int, c engine.ResetCause) { s.with(func() { s.resets = append(s.resets, c) }) }
func (s *sink) Counted(int, string, int)         {}
func (s *sink) Coverage(_ int, c engine.Coverage, h string) {
	s.with(func() { s.hints = append(s.hints, string(c)+": "+h) })
}

func (s *sink) eventually(t *testing.T, what string, fn func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		ok := false
		s.with(func() { ok = fn() })
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %+v", what, s)
		}
	}
}

// server answers with a page, or 404 for none.
type server struct {
	mu   sync.Mutex
	page string
}

func (f *server) set(page string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.page = page
}

func (f *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case r.URL.Path == "/v1/models":
		fmt.Fprint(w, `{"data":[{"id":"m","max_model_len":4096},{"id":"adapter"}]}`)
	case r.URL.Path == "/metrics" && f.page != "":
		fmt.Fprint(w, f.page)
	default:
		http.NotFound(w, r)
	}
}

func run(t *testing.T, f *server) (*sink, *httptest.Server) {
	t.Helper()
	front := httptest.NewServer(f)
	a, err := New(Options{engine.Options{Target: engine.Target{URL: front.URL}, Logger: slog.New(slog.DiscardHandler), FactsEvery: time.Hour, PageTimeout: patience}})
	if err != nil {
		t.Fatal(err)
	}
	s := &sink{}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		if err := a.Run(ctx, s); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); done.Wait(); front.Close() })
	return s, front
}

func TestEngineIsRead(t *testing.T) {
	f := &server{page: "num_requests_running 2\nprocess_start_time_seconds 10\n"}
	s, front := run(t, f)
	s.eventually(t, "load", func() bool { return len(s.loads) > 0 })
	s.with(func() {
		if got := s.facts[0]; got.Model != "m" || !slices.Equal(got.Aliases, []string{"adapter"}) || got.MaxModelTokens != 4096 || got.StartMark == 0 || got.Capabilities != 0 {
			t.Errorf("%+v", got)
		}
		if !slices.Equal(s.hints, []string{"none: " + hint}) || !slices.Equal(s.health, []string{"true "}) || *s.loads[0].Running != 2 {
			t.Errorf("%v, %v, %+v", s.hints, s.health, s.loads[0])
		}
	})
	f.set("num_requests_running 0\nprocess_start_time_seconds 11\n")
	s.eventually(t, "a restart", func() bool { return slices.Contains(s.resets, engine.ResetRestart) && len(s.facts) == 2 })
	front.Close()
	s.eventually(t, "its end", func() bool {
		return slices.Contains(s.resets, engine.ResetGone) && strings.HasPrefix(s.health[len(s.health)-1], "false ")
	})
}

func TestEngineWithoutCounters(t *testing.T) {
	s, front := run(t, &server{})
	s.eventually(t, "facts", func() bool { return len(s.facts) == 1 && len(s.health) == 1 })
	front.Close()
	s.eventually(t, "its end is seen by the list of models", func() bool { return strings.HasPrefix(s.health[len(s.health)-1], "false ") })
	s.with(func() {
		if len(s.loads) != 0 {
			t.Errorf("%+v was never told", s.loads[0])
		}
	})
}

// A page without the time of the process's start says nothing of a restart.
func TestPageWithoutAStartIsNoRestart(t *testing.T) {
	const started = "process_start_time_seconds 1.7e9\n"
	pages := []string{started, "num_requests_running 1\n", started, "process_start_time_seconds 1.8e9\n"}
	asked := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
			return
		}
		fmt.Fprint(w, pages[asked])
		asked++
	}))
	defer srv.Close()
	a, err := New(Options{Options: engine.Options{Target: engine.Target{Name: "x", URL: srv.URL}, PageTimeout: patience, Logger: slog.New(slog.DiscardHandler)}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.client.Close()
	s := &sink{}
	p := &reading{a: a, sink: s}
	for i, want := range []int{0, 0, 0, 1} {
		p.poll(t.Context())
		if len(s.resets) != want {
			t.Errorf("after page %d: resets %v, want %d", i, s.resets, want)
		}
	}
	for _, f := range s.facts[:len(s.facts)-1] {
		if f.StartMark != s.facts[0].StartMark {
			t.Errorf("the mark changed to %x without a restart", f.StartMark)
		}
	}
}

// A page that was missing is asked for again with the rhythm of the facts, and
// not more often.
func TestMissingPageIsAskedForAgain(t *testing.T) {
	asked, shown := 0, false
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/v1/models":
			fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
			return
		case shown:
			fmt.Fprint(w, "num_requests_running 3\n")
		default:
			http.NotFound(w, r)
		}
		asked++
	}))
	defer srv.Close()
	a, err := New(Options{Options: engine.Options{Target: engine.Target{Name: "x", URL: srv.URL}, FactsEvery: time.Hour, PageTimeout: patience, Logger: slog.New(slog.DiscardHandler)}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.client.Close()
	s := &sink{}
	r := &reading{a: a, sink: s}
	for i, step := range []struct {
		later time.Duration // since the page was asked for last
		shown bool
		asked int
		loads int
	}{
		{0, false, 1, 0},
		{0, false, 1, 0},
		{time.Hour - time.Minute, true, 1, 0},
		{time.Hour, false, 2, 0},
		{0, true, 2, 0},
		{time.Hour, true, 3, 1},
		{0, true, 4, 2}, // it is there: read as often as any
	} {
		r.missedAt, shown = r.missedAt.Add(-step.later), step.shown
		r.poll(t.Context())
		if asked != step.asked || len(s.loads) != step.loads {
			t.Errorf("step %d: asked for the page %d times and told %d loads, want %d and %d", i, asked, len(s.loads), step.asked, step.loads)
		}
	}
}
