package agent

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/enginetest"
	"waypost/testbed/emulator/profile"

	"github.com/google/go-cmp/cmp"
)

// emulated starts an engine of a kind and returns its URL. A kind that has no
// emulator yet fails: its adapter would be trusted untried.
func emulated(t *testing.T, kind Kind) string {
	t.Helper()
	of := map[Kind]profile.Kind{"sglang": profile.SGLang, "trtllm": profile.TensorRTLLM, "llamacpp": profile.LlamaCpp}
	if kind == "vllm" || kind == "generic" {
		return startEmulator(t).URL()
	}
	o, err := profile.Of(of[kind], "")
	if err != nil {
		t.Fatalf("%s: %v", kind, err)
	}
	o.Model = "m"
	e, err := profile.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e.URL()
}

// lie answers a question whose true answer is status, header and body.
type lie func(w http.ResponseWriter, r *http.Request, truth *httptest.ResponseRecorder)

// liar stands before an engine and lies while it has a lie.
type liar struct {
	*httptest.Server
	lie  atomic.Pointer[lie]
	lied atomic.Int64
}

func newLiar(t *testing.T, engineURL string) *liar {
	l := &liar{}
	client := &http.Client{Transport: &http.Transport{}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	t.Cleanup(client.CloseIdleConnections)
	l.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		truth := httptest.NewRecorder()
		req, err := http.NewRequestWithContext(r.Context(), r.Method, engineURL+r.URL.RequestURI(), r.Body)
		if err != nil {
			panic(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		defer resp.Body.Close()
		for k, v := range resp.Header {
			truth.Header()[k] = v
		}
		truth.Header().Del("Content-Length")
		truth.WriteHeader(resp.StatusCode)
		if _, err := io.Copy(truth, resp.Body); err != nil {
			panic(http.ErrAbortHandler)
		}
		if tell := l.lie.Load(); tell != nil {
			l.lied.Add(1)
			(*tell)(w, r, truth)
			return
		}
		pass(w, truth, truth.Body.Bytes())
	}))
	t.Cleanup(func() {
		l.CloseClientConnections()
		l.Close()
	})
	return l
}

func pass(w http.ResponseWriter, truth *httptest.ResponseRecorder, body []byte) {
	for k, v := range truth.Header() {
		w.Header()[k] = v
	}
	w.WriteHeader(truth.Code)
	_, _ = w.Write(body)
}

// watched runs the adapter of a kind on the liar.
func (l *liar) watched(t *testing.T, kind Kind, m *enginetest.Mirror) {
	t.Helper()
	a, err := newAdapter(kind, engine.Options{
		Target: engine.Target{Name: "liar", Kind: string(kind), URL: l.URL}, Logger: slog.New(slog.DiscardHandler),
		LoadEvery: engine.MinLoadEvery, FactsEvery: engine.MinLoadEvery, PageTimeout: 30 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	enginetest.Watch(t, a, m)
}

var (
	inJSON = regexp.MustCompile(`([:\[,]\s*)-?[0-9][-+.0-9eE]*`)
	inPage = regexp.MustCompile(`(?m)^([^#\n].*) \S+$`)
	inText = regexp.MustCompile(`="-?[0-9][.0-9]*"`)
)

// falsified is an answer with another number in the place of each.
func falsified(body []byte, number string) []byte {
	if json.Valid(body) {
		return inJSON.ReplaceAll(body, []byte("${1}"+number))
	}
	return inText.ReplaceAll(inPage.ReplaceAll(body, []byte("${1} "+number)), []byte(`="`+number+`"`))
}

// bounded fails if facts or load hold what no engine can have. The mirror's lock
// is held.
func bounded(t *testing.T, m *enginetest.Mirror) {
	t.Helper()
	f := m.Known
	if diff := cmp.Diff(f.Bounded(), f, cmp.FilterValues(func(a, b []string) bool { return len(a)+len(b) == 0 }, cmp.Ignore()),
		cmp.FilterValues(func(a, b []engine.RankFacts) bool { return len(a)+len(b) == 0 }, cmp.Ignore())); diff != "" {
		t.Errorf("facts that cannot be: %s", diff)
	}
	for rank := range f.Ranks {
		l := m.Of(rank).Load
		for name, v := range map[string]*float64{
			"prompt tokens": l.PromptTokens, "computed": l.ComputedPromptTokens, "generated": l.GenerationTokens, "first tokens": l.FirstTokens,
			"first token seconds": l.FirstTokenSeconds, "finished": l.Finished, "preemptions": l.Preemptions,
		} {
			if v != nil && !(*v >= 0 && *v < 1<<63) {
				t.Errorf("rank %d: %s %v", rank, name, *v)
			}
		}
		for name, n := range map[string]*int{"running": l.Running, "waiting": l.Waiting} {
			if n != nil && *n < 0 {
				t.Errorf("rank %d: %s %d", rank, name, *n)
			}
		}
		if l.KVUsedRatio != nil && !(*l.KVUsedRatio >= 0 && *l.KVUsedRatio <= 1) {
			t.Errorf("rank %d: %v of the KV in use", rank, *l.KVUsedRatio)
		}
		if l.At.After(time.Now()) {
			t.Errorf("rank %d: a reading of the future", rank)
		}
	}
}

// An engine of any kind that puts numbers into its answers that cannot be, in
// the place of every number there is, is watched on without them, which is
// counted; once it tells the truth it is believed. At first sight it is the same.
func TestNumbersThatCannotBe(t *testing.T) {
	lies := map[string]struct {
		number  string
		counted bool
	}{
		"negative": {"-1", true}, "no number": {"NaN", true}, "infinite": {"Infinity", true}, "2^63": {"9223372036854775808", true},
		"below -2^63": {"-9223372036854775809", true}, "more than a float holds": {"1e400", true}, "2^62": {"4611686018427387904", false}, "a half": {"0.5", false},
	}
	for _, kind := range kinds() {
		for name, c := range lies {
			if testing.Short() && name != "2^63" && name != "no number" {
				continue
			}
			t.Run(kind+" "+name, func(t *testing.T) {
				t.Parallel()
				l := newLiar(t, emulated(t, Kind(kind)))
				tell := lie(func(w http.ResponseWriter, _ *http.Request, truth *httptest.ResponseRecorder) {
					pass(w, truth, falsified(truth.Body.Bytes(), c.number))
				})
				counts := func(m *enginetest.Mirror) (n int) {
					for _, what := range []string{engine.CountMetricFaults, engine.CountFactFaults, engine.CountSlotFaults} {
						n += m.Of(0).Counts[what]
					}
					return n
				}
				// seen waits until every route has told lies for some rounds.
				seen := func(m *enginetest.Mirror) {
					from := l.lied.Load()
					m.Await("lies are told and counted", func() bool { return l.lied.Load() > from+20 && (!c.counted || counts(m) > 0) })
				}
				known := enginetest.NewMirror(t)
				l.watched(t, Kind(kind), known)
				truth := func() bool { return known.Up && known.Of(0).Load.Running != nil }
				known.Await("the truth", truth)
				known.Mu.Lock()
				before := known.Known
				known.Mu.Unlock()
				l.lie.Store(&tell)
				stranger := enginetest.NewMirror(t)
				l.watched(t, Kind(kind), stranger)
				stranger.Await("watched from the first sight", func() bool { return stranger.Up && stranger.Known.Model == "m" })
				for _, m := range []*enginetest.Mirror{known, stranger} {
					seen(m)
					m.Mu.Lock()
					bounded(t, m)
					if !m.Up {
						t.Errorf("taken for down: %s", m.Reason)
					}
					if n := m.Of(0).Load.Running; n != nil && *n >= 0 {
						t.Errorf("%d requests run, by %s", *n, c.number)
					}
					m.Mu.Unlock()
				}
				l.lie.Store(nil)
				known.Await("the truth again", func() bool {
					f := known.Known
					f.Capabilities, f.StartMark = before.Capabilities, before.StartMark
					return truth() && cmp.Equal(f, before)
				})
			})
		}
	}
}

// written counts what an answer without end got rid of.
type written struct {
	http.ResponseWriter
	n int64
}

func (w *written) Write(b []byte) (int, error) {
	n, err := w.ResponseWriter.Write(b)
	w.n += int64(n)
	return n, err
}

// An engine of any kind whose answers do not end, do not come, are bombs or lead
// elsewhere is down for that reason: nobody else is asked, no more of an answer is
// taken than a page may have, and afterwards it is up.
func TestAnswersThatHarm(t *testing.T) {
	var elsewhere atomic.Int64
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	t.Cleanup(other.Close)
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	for range 64 {
		if _, err := z.Write(make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	// What is under way when a reader gives up lies in buffers of the sockets.
	const most = enginehttp.MaxPageBytes + 24<<20
	fill := func(t *testing.T, w http.ResponseWriter, block string) {
		out := &written{ResponseWriter: w}
		for b := bytes.Repeat([]byte(block), 1000); out.n <= most; {
			if _, err := out.Write(b); err != nil {
				return
			}
		}
		t.Errorf("%d bytes of one answer were taken", out.n)
	}
	hold := func(r *http.Request) { <-r.Context().Done() }
	harms := map[string]func(t *testing.T, w http.ResponseWriter, r *http.Request, truth *httptest.ResponseRecorder){
		"never begins": func(_ *testing.T, _ http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) { hold(r) },
		"never ends": func(_ *testing.T, w http.ResponseWriter, r *http.Request, truth *httptest.ResponseRecorder) {
			_, _ = w.Write(truth.Body.Bytes()[:truth.Body.Len()/2])
			w.(http.Flusher).Flush()
			hold(r)
		},
		"endless": func(t *testing.T, w http.ResponseWriter, _ *http.Request, _ *httptest.ResponseRecorder) {
			fill(t, w, " ")
		},
		"an endless error": func(t *testing.T, w http.ResponseWriter, _ *http.Request, _ *httptest.ResponseRecorder) {
			w.WriteHeader(http.StatusInternalServerError)
			fill(t, w, "error ")
		},
		"endless headers": func(_ *testing.T, w http.ResponseWriter, _ *http.Request, _ *httptest.ResponseRecorder) {
			for i := range 1000 {
				w.Header().Set(fmt.Sprintf("X-%d", i), strings.Repeat("x", 1000))
			}
		},
		"a bomb": func(_ *testing.T, w http.ResponseWriter, _ *http.Request, _ *httptest.ResponseRecorder) {
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = w.Write(bomb.Bytes())
		},
		"leads to another host": func(_ *testing.T, w http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) {
			http.Redirect(w, r, other.URL+r.URL.Path, http.StatusTemporaryRedirect)
		},
		"another page": func(_ *testing.T, w http.ResponseWriter, _ *http.Request, _ *httptest.ResponseRecorder) {
			_, _ = io.WriteString(w, "<html>a proxy's sign-in page</html>")
		},
		"nesting without end": func(_ *testing.T, w http.ResponseWriter, _ *http.Request, _ *httptest.ResponseRecorder) {
			_, _ = io.WriteString(w, strings.Repeat(`{"data":[`, 100_000))
		},
	}
	t.Run("harms", func(t *testing.T) {
		for _, kind := range kinds() {
			for name, harm := range harms {
				// Of many megabytes the client's own tests have their share.
				if testing.Short() && strings.Contains(name, "endless") {
					continue
				}
				t.Run(kind+" "+name, func(t *testing.T) {
					t.Parallel()
					l := newLiar(t, emulated(t, Kind(kind)))
					tell := lie(func(w http.ResponseWriter, r *http.Request, truth *httptest.ResponseRecorder) { harm(t, w, r, truth) })
					l.lie.Store(&tell)
					a, err := newAdapter(Kind(kind), engine.Options{
						Target: engine.Target{Name: "liar", Kind: kind, URL: l.URL}, Logger: slog.New(slog.DiscardHandler),
						LoadEvery: engine.MinLoadEvery, FactsEvery: engine.MinLoadEvery, PageTimeout: engine.DefaultPageTimeout,
					})
					if err != nil {
						t.Fatal(err)
					}
					m := enginetest.NewMirror(t)
					enginetest.Watch(t, a, m)
					m.Await("down, with the reason", func() bool { return !m.Up && m.Reason != "" })
					m.Mu.Lock()
					if len(m.Reason) > 1000 {
						t.Errorf("a reason of %d bytes", len(m.Reason))
					}
					m.Mu.Unlock()
					l.lie.Store(nil)
					m.Await("up", func() bool { return m.Up && m.Known.Model == "m" })
				})
			}
		}
	})
	if n := elsewhere.Load(); n > 0 {
		t.Errorf("another host was asked %d times", n)
	}
}
