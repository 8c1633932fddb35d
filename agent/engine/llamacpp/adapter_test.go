package llamacpp

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"waypost/agent/engine"
	"waypost/agent/engine/enginetest"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must happen sooner or later.
const patience = time.Minute

// fake is a llama.cpp server that answers what a real one answered.
type fake struct {
	mu      sync.Mutex
	version string
	start   string // of the header; empty: no /metrics
	noSlots bool
	sleeps  bool
	loading bool
	asked   map[string]int
	tokens  int // of slot 3; 0: never used
	bodies  []string
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked[r.URL.Path]++
	read := func(name string) []byte { return recorded(panicker{}, f.version, name) }
	refuse := func(code int, text string) {
		w.WriteHeader(code)
		fmt.Fprintf(w, `{"error":{"code":%d,"message":%q}}`, code, text)
	}
	if f.loading {
		refuse(503, "Loading model")
		return
	}
	switch r.URL.Path {
	case "/health":
		fmt.Fprint(w, `{"status":"ok"}`)
	case "/props":
		text := string(read("props.resp.json"))
		if f.sleeps {
			text = strings.Replace(text, `"is_sleeping": false`, `"is_sleeping": true`, 1)
		}
		fmt.Fprint(w, text)
	case "/v1/models":
		_, _ = w.Write(read("models.resp.json"))
	case "/metrics":
		if f.start == "" {
			refuse(501, "Start it with --metrics")
			return
		}
		w.Header().Set("Process-Start-Time-Unix", f.start)
		_, _ = w.Write(read("metrics-busy.resp.txt"))
	case "/slots":
		if f.noSlots {
			refuse(501, "Start it with --slots")
			return
		}
		list := []map[string]any{{"id": 0, "is_processing": false}, {"id": 1, "is_processing": false}, {"id": 2, "is_processing": false}, {"id": 3, "is_processing": false}}
		if f.tokens > 0 {
			list[3]["n_prompt_tokens"] = f.tokens
		}
		_ = json.NewEncoder(w).Encode(list)
	case "/tokenize":
		b, _ := io.ReadAll(r.Body)
		f.bodies = append(f.bodies, string(b))
		fmt.Fprint(w, `{"tokens":[343,341,10]}`)
	case "/apply-template":
		b, _ := io.ReadAll(r.Body)
		f.bodies = append(f.bodies, string(b))
		fmt.Fprint(w, `{"prompt":"<|im_start|>user\nhi<|im_end|>\n"}`)
	default:
		refuse(404, "File Not Found")
	}
}

func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// panicker fails outside of a test's goroutine.
type panicker struct{ testing.TB }

func (panicker) Helper()           {}
func (panicker) Fatal(args ...any) { panic(fmt.Sprint(args...)) }

// sink notes what an adapter tells and drives its mirror.
type sink struct {
	mu     sync.Mutex
	facts  []engine.Facts
	loads  []engine.Load
	health []string
	resets []engine.ResetCause
	hints  []string
	mirror engine.Mirror
	counts map[string]int
}

func (s *sink) Facts(f engine.Facts) { s.with(func() { s.facts = append(s.facts, f) }) }
func (s *sink) Load(_ int, l engine.Load) {
	s.with(func() { s.loads = append(s.loads, l) })
}

func (s *sink) Health(up bool, reason string) {
	s.with(func() { s.health = append(s.health, fmt.Sprint(up, " ", reason)) })
}
func (s *sink) Batch(int, engine.Batch) {}
func (s *sink) Reset(_ int, c engine.ResetCause) {
	s.with(func() {
		s.resets = append(s.resets, c)
		if s.mirror != nil {
			s.mirror.Reset()
		}
	})
}

func (s *sink) Coverage(_ int, c engine.Coverage, hint string) {
	s.with(func() { s.hints = append(s.hints, string(c)+": "+hint) })
}
func (s *sink) Counted(_ int, what string, n int) { s.with(func() { s.counts[what] += n }) }
func (s *sink) Mirror(_ int, m engine.Mirror)     { s.with(func() { s.mirror = m }) }
func (s *sink) Update(_ int, change func())       { s.with(change) }
func (s *sink) with(fn func())                    { s.mu.Lock(); defer s.mu.Unlock(); fn() }
func (s *sink) last(fn func() bool) (ok bool)     { s.with(func() { ok = fn() }); return ok }
func (s *sink) eventually(t *testing.T, what string, fn func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !s.last(fn); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: %+v", what, s)
		}
	}
}

// run reads a fake server until the test ends.
func run(t *testing.T, f *fake) (*sink, *Adapter, *httptest.Server) {
	t.Helper()
	return runWith(t, f, func(*Adapter) {})
}

// serveAt serves at an address; the caller closes it.
func serveAt(t *testing.T, f *fake, address string) *httptest.Server {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(f)
	server.Listener.Close()
	server.Listener = l
	server.Start()
	return server
}

// runWith runs an adapter that change has changed.
func runWith(t *testing.T, f *fake, change func(*Adapter)) (*sink, *Adapter, *httptest.Server) {
	t.Helper()
	f.asked = map[string]int{}
	server := serveAt(t, f, enginetest.AnyPort())
	a, err := New(Options{engine.Options{Target: engine.Target{Name: "llamacpp-1", URL: server.URL}, Logger: slog.New(slog.DiscardHandler), FactsEvery: time.Hour, PageTimeout: patience}})
	if err != nil {
		t.Fatal(err)
	}
	change(a)
	s := &sink{counts: map[string]int{}}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		if err := a.Run(ctx, s); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); done.Wait(); server.Close() })
	return s, a, server
}

func TestServerIsRead(t *testing.T) {
	for _, v := range versions {
		f := &fake{version: v, start: "1518463437"}
		s, a, _ := run(t, f)
		s.eventually(t, "load and mirror", func() bool { return len(s.loads) > 0 && s.mirror != nil })
		s.with(func() {
			if got := s.facts[0]; got.Model != "tiny.gguf" || got.StartMark != startMark("1518463437") || !got.Capabilities.Has(engine.WantsClaimPoints|engine.PinsSlots|engine.ReportsCachedTokens) {
				t.Errorf("%+v", got)
			}
			if l := s.loads[0]; *l.Running != 4 || *l.Waiting != 2 || l.KVUsedRatio != nil {
				t.Errorf("%+v", l)
			}
			if !slices.Equal(s.hints, []string{"none: " + hintFollowed}) || !slices.Equal(s.health, []string{"true "}) {
				t.Errorf("%v, %v", s.hints, s.health)
			}
		})
		ids, err := a.Render(t.Context(), []byte(`{"messages":[{"role":"user","content":"hi"}],"temperature":1}`))
		if err != nil || !slices.Equal(ids, []uint32{343, 341, 10}) {
			t.Fatalf("%v, %v", ids, err)
		}
		f.set(func() {
			if len(f.bodies) != 2 || !strings.Contains(f.bodies[0], `"messages"`) || !strings.Contains(f.bodies[1], `"add_special":true`) || !strings.Contains(f.bodies[1], `"parse_special":true`) {
				t.Errorf("%q", f.bodies)
			}
		})
		if _, err := a.Render(t.Context(), []byte(`{"prompt":"secret"}`)); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%v", err)
		}
	}
}

// The content of slots is checked against what the server says of them.
func TestSlotsAreCompared(t *testing.T) {
	f := &fake{version: "b11434", start: "1"}
	// What a slot loses is not in a host cache.
	s, _, _ := runWith(t, f, func(a *Adapter) { a.o.Target.HostCacheMiB = new(int) })
	s.eventually(t, "mirror", func() bool { return s.mirror != nil })
	keys := make([]prefix.Key, 20)
	for i := range keys {
		keys[i] = prefix.Key(i + 1)
	}
	id := ledger.ClaimID{Coordinator: 1, Seq: 1}
	f.set(func() { f.tokens = 323 })
	s.with(func() {
		s.mirror.Begin(id, keys, 320, -1)
		s.mirror.Done(id, 4, 0)
		if s.mirror.Blocks() != 20 {
			t.Errorf("%d blocks", s.mirror.Blocks())
		}
	})
	f.set(func() { f.tokens = 99 }) // somebody else's request
	s.eventually(t, "what the slot does not hold is not claimed", func() bool { return s.mirror.Blocks() == 0 })
}

func TestRestartIsSeen(t *testing.T) {
	f := &fake{version: "b11434", start: "1"}
	s, _, _ := run(t, f)
	s.eventually(t, "facts", func() bool { return len(s.facts) == 1 })
	f.set(func() { f.start = "2" })
	s.eventually(t, "the new life", func() bool {
		return len(s.facts) == 2 && s.facts[1].StartMark == startMark("2") && slices.Contains(s.resets, engine.ResetRestart)
	})
}

func TestServerWithoutMetricsOrSlots(t *testing.T) {
	f := &fake{version: "b10434"}
	s, _, _ := run(t, f)
	s.eventually(t, "load from the slots", func() bool { return len(s.loads) > 0 && *s.loads[0].Running == 0 && s.loads[0].Waiting == nil })
	f = &fake{version: "b10434", noSlots: true}
	s, _, _ = run(t, f)
	s.eventually(t, "facts", func() bool { return len(s.facts) > 0 && len(s.health) > 0 })
	f = &fake{version: "b10434", start: "1", noSlots: true}
	s, _, _ = run(t, f)
	s.eventually(t, "load from the counters", func() bool { return len(s.loads) > 0 })
}

// What loads its model serves nobody yet, and what sleeps is left asleep: only
// /props, /v1/models and /health do not wake it.
func TestLoadingAndSleeping(t *testing.T) {
	f := &fake{version: "b11434", start: "1", loading: true}
	s, _, _ := run(t, f)
	s.eventually(t, "loading", func() bool { return len(s.health) > 0 && strings.HasPrefix(s.health[0], "false ") })
	f.set(func() { f.loading, f.sleeps = false, true })
	s.eventually(t, "sleeping", func() bool { return len(s.loads) > 0 && s.loads[len(s.loads)-1].Sleeping != nil })
	var before int
	f.set(func() { before = f.asked["/slots"] + f.asked["/metrics"] })
	loads := 0
	s.with(func() { loads = len(s.loads) })
	s.eventually(t, "asked further", func() bool { return len(s.loads) > loads+2 })
	f.set(func() {
		if now := f.asked["/slots"] + f.asked["/metrics"]; now != before {
			t.Errorf("asked %d times what wakes it", now-before)
		}
		f.sleeps = false
	})
	s.eventually(t, "awake", func() bool { l := s.loads[len(s.loads)-1]; return l.Running != nil })
}

func TestDeadServer(t *testing.T) {
	f := &fake{version: "b11434", start: "1"}
	s, _, server := run(t, f)
	s.eventually(t, "facts", func() bool { return len(s.facts) == 1 })
	address := server.Listener.Addr().String()
	server.Close()
	s.eventually(t, "its end", func() bool {
		return slices.Contains(s.resets, engine.ResetGone) && strings.HasPrefix(s.health[len(s.health)-1], "false ")
	})
	f.set(func() { f.start = "2" })
	t.Cleanup(serveAt(t, f, address).Close)
	s.eventually(t, "the next life", func() bool {
		return s.health[len(s.health)-1] == "true " && s.facts[len(s.facts)-1].StartMark == startMark("2")
	})
}

func TestBadTarget(t *testing.T) {
	if _, err := New(Options{engine.Options{Target: engine.Target{URL: "ftp://x"}, Logger: slog.New(slog.DiscardHandler)}}); err == nil {
		t.Error("an engine is not reached by FTP")
	}
	if _, err := New(Options{engine.Options{Target: engine.Target{URL: "http://127.0.0.1:1"}}}); err == nil {
		t.Error("no logger")
	}
}
