package vllm

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginetest"
	"waypost/agent/engine/kvevents"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// watch runs an adapter on the engine until the test ends.
func watch(t *testing.T, f *fakeEngine, o Options, sink engine.Sink) *Adapter {
	t.Helper()
	o.Target.Name, o.Target.URL = "vllm-test", f.URL
	o.Logger = slog.New(slog.DiscardHandler)
	a, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	enginetest.Watch(t, a, sink)
	return a
}

func TestFactsAndLoad(t *testing.T) {
	f := newFakeEngine(t, 1)
	f.extra["/server_info"] = `{"vllm_config":{"instance_id":"17","scheduler_config":{"max_num_batched_tokens":2048,"max_num_seqs":16},"kv_transfer_config":{"kv_connector":"NixlConnector"}}}`
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	m.Await("load", func() bool {
		return m.Up && m.Of(0).Load.Running != nil && m.Known.Capabilities.Has(engine.ReplaysEvents)
	})
	m.Mu.Lock()
	defer m.Mu.Unlock()
	want := engine.Facts{
		Version: "0.32.0", Model: "tiny", Aliases: []string{"sql"}, Ranks: 1, BlockTokens: 2, PoolBlocks: 100,
		MaxModelTokens: 2048, MaxRunning: 16, StepTokens: 2048, StartMark: m.Known.StartMark, Transfer: engine.Transfer{Connector: "NixlConnector", ExportedTier: "gpu"},
		Capabilities: engine.TokenizesText | engine.TokenizesChats | engine.ReplaysEvents | engine.NamesSessions,
	}
	if diff := cmp.Diff(want, m.Known); diff != "" || m.Known.StartMark == 0 {
		t.Errorf("start mark %d; %s", m.Known.StartMark, diff)
	}
	l := m.Of(0).Load
	if l.Running == nil || *l.Running != 0 || l.KVUsedRatio != nil || l.PromptTokens != nil {
		t.Errorf("load %+v: what the page lacks must be unknown", l)
	}
}

// TestConfigurationThatFails: a server that crashes over its own configuration
// route, as vLLM does in an environment without pip, is read without it; one that
// cannot list its models is asked for facts seldom.
func TestConfigurationThatFails(t *testing.T) {
	f := newFakeEngine(t, 1)
	var asked, pages atomic.Int64
	f.routes = map[string]http.HandlerFunc{
		"/server_info": func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "AttributeError", http.StatusInternalServerError)
		},
	}
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	m.Await("facts without the configuration", func() bool { return m.Up && m.Known.Model == "tiny" && m.Known.StepTokens == 0 })

	broken := newFakeEngine(t, 1)
	broken.routes = map[string]http.HandlerFunc{
		"/v1/models": func(w http.ResponseWriter, _ *http.Request) {
			asked.Add(1)
			http.Error(w, "no", http.StatusInternalServerError)
		},
	}
	broken.metrics = func(w http.ResponseWriter) { pages.Add(1); fmt.Fprintln(w, "process_start_time_seconds 1") }
	m = enginetest.NewMirror(t)
	began := time.Now()
	watch(t, broken, Options{}, m)
	for deadline := began.Add(time.Minute); pages.Load() < 12 || asked.Load() < 2; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the counters were read %d times, the models %d times", pages.Load(), asked.Load())
		}
	}
	// A second at least lies between two looks.
	if n, limit := asked.Load(), 1+int64(time.Since(began).Seconds()); n > limit {
		t.Errorf("models were asked for %d times, want at most %d, in %d readings", n, limit, pages.Load())
	}
}

func TestEventsFromTheBeginning(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	rank.Publish(false, enginetest.Stored(0, 1, 2, 3))
	rank.Publish(false, enginetest.Removed(3))
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	m.Await("replay", func() bool { return m.Of(0).Coverage == engine.CoverageFull && m.Of(0).Match(1, 2, 3) == 4 })
	rank.AwaitSubscriber()
	rank.Publish(false, enginetest.Stored(2, 4))
	m.Await("a live batch", func() bool { return m.Of(0).Match(1, 2, 4) == 6 })
	rank.Publish(false, enginetest.Cleared(), enginetest.Stored(0, 9))
	m.Await("a clear", func() bool { return m.Of(0).Match(9) == 2 && m.Of(0).Match(1, 2) == 0 })
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if len(m.Of(0).Resets) != 0 {
		t.Errorf("resets %v", m.Of(0).Resets)
	}
	for _, age := range m.Of(0).Ages {
		if age <= 0 {
			t.Errorf("age %v of a batch published long ago", age)
		}
	}
}

func TestGapIsReplayed(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	rank.AwaitSubscriber()
	m.Await("start", func() bool { return m.Of(0).Coverage == engine.CoverageFull })
	rank.Publish(false, enginetest.Stored(0, 1))
	rank.Publish(true, enginetest.Stored(1, 2))
	rank.Publish(false, enginetest.Stored(2, 3))
	m.Await("the gap is filled", func() bool { return m.Of(0).Match(1, 2, 3) == 6 && m.Of(0).Coverage == engine.CoverageFull })
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if r := m.Of(0); r.Counts[kvevents.CountGaps] != 1 || r.Counts[kvevents.CountMissing] != 1 || len(r.Resets) != 0 {
		t.Errorf("counts %v, resets %v", r.Counts, r.Resets)
	}
}

// A gap nobody can fill: a sink that can keeps its old view until the new one
// stands.
func TestUnfillableGap(t *testing.T) {
	for _, beside := range []bool{true, false} {
		t.Run(fmt.Sprintf("beside=%v", beside), func(t *testing.T) {
			f := newFakeEngine(t, 1)
			rank := f.ranks[0]
			rank.SetRing(2)
			m := enginetest.NewMirror(t)
			var sink engine.Sink = m
			if beside {
				sink = enginetest.Rebuilder{Mirror: m}
			}
			watch(t, f, Options{}, sink)
			rank.AwaitSubscriber()
			m.Await("start", func() bool { return m.Of(0).Coverage == engine.CoverageFull })
			rank.Publish(false, enginetest.Stored(0, 1))
			m.Await("first", func() bool { return m.Of(0).Match(1) == 2 })
			for h := 2; h < 6; h++ {
				rank.Publish(true, enginetest.Stored(0, h))
			}
			rank.Publish(false, enginetest.Stored(0, 6))
			m.Await("rebuilt from what the ring holds", func() bool {
				r := m.Of(0)
				return r.Match(6) == 2 && r.Match(5) == 2 && r.Match(1) == 0 && r.Coverage == engine.CoveragePartial && strings.Contains(r.Hint, "buffer_steps")
			})
			m.Mu.Lock()
			defer m.Mu.Unlock()
			if want := map[bool]int{true: 0, false: 1}[beside]; len(m.Of(0).Resets) != want {
				t.Errorf("resets %v, want %d", m.Of(0).Resets, want)
			}
		})
	}
}

// The same hashes come back after a restart, so only the numbers, the replay
// and the process's start can show it.
func TestRestartWithEqualHashes(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	rank.AwaitSubscriber()
	rank.Publish(false, enginetest.Stored(0, 1, 2))
	m.Await("first life", func() bool { return m.Of(0).Match(1, 2) == 4 })
	f.restart()
	m.Await("no credit of the first life", func() bool {
		return m.Of(0).Match(1, 2) == 0 && m.Of(0).Coverage == engine.CoverageFull
	})
	rank.AwaitSubscriber()
	rank.Publish(false, enginetest.Stored(0, 1))
	m.Await("second life", func() bool { return m.Of(0).Match(1, 2) == 2 && m.Of(0).Match(1) == 2 })
	m.Await("facts of the second life", func() bool { return m.Known.StartMark != 0 })
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Of(0).Resets[0] != engine.ResetRestart {
		t.Errorf("resets %v", m.Of(0).Resets)
	}
}

// Without a replay socket the process's start time tells.
func TestRestartByStartTime(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	f.extra["/kv_event_sources"] = fmt.Sprintf(`{"0":{"endpoint":"tcp://*:%d","replay_endpoint":null}}`, rank.Port())
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	rank.AwaitSubscriber()
	m.Await("connected", func() bool { return strings.HasPrefix(m.Of(0).Hint, "the engine replays no events") })
	rank.Publish(false, enginetest.Stored(0, 1))
	m.Await("first life", func() bool { return m.Of(0).Match(1) == 2 && m.Of(0).Coverage == engine.CoverageFull })
	f.set(func() { f.start += 50 })
	m.Await("reset", func() bool { return m.Of(0).Match(1) == 0 && len(m.Of(0).Resets) == 1 })
	if m.Of(0).Resets[0] != engine.ResetRestart {
		t.Errorf("resets %v", m.Of(0).Resets)
	}
}

func TestDroppedConnection(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	rank.AwaitSubscriber()
	rank.Publish(false, enginetest.Stored(0, 1))
	m.Await("connected", func() bool { return m.Of(0).Match(1) == 2 })
	rank.Cut()
	rank.Publish(true, enginetest.Stored(1, 2)) // while nobody listens
	m.Await("what was missed", func() bool { return m.Of(0).Match(1, 2) == 4 && m.Of(0).Coverage == engine.CoverageFull })
	if len(m.Of(0).Resets) != 0 {
		t.Errorf("resets %v: the process is the same", m.Of(0).Resets)
	}
}

// A replay that is never answered is given up for the next one.
func TestReplayThatIsNotAnswered(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	rank.SetMute(true)
	rank.Publish(false, enginetest.Stored(0, 1))
	m := enginetest.NewMirror(t)
	watch(t, f, Options{Stream: kvevents.StreamOptions{ReplayTimeout: 100 * time.Millisecond, RetryMin: 50 * time.Millisecond, RebuildAfter: time.Second, RetryMax: time.Second}}, m)
	rank.AwaitAsked(2)
	m.Await("said", func() bool { return strings.Contains(m.Of(0).Hint, "replay socket does not answer") })
	rank.Publish(false, enginetest.Stored(1, 2))
	m.Await("live batches are taken without it", func() bool { return m.Of(0).Coverage == engine.CoveragePartial && m.Of(0).Table.Len() == 1 })
	rank.SetMute(false)
	m.Await("built anew", func() bool { return m.Of(0).Coverage == engine.CoverageFull && m.Of(0).Match(1, 2) == 4 })
}

func TestTwoRanksAreTwoWorkers(t *testing.T) {
	f := newFakeEngine(t, 2)
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	for i, rank := range f.ranks {
		rank.AwaitSubscriber()
		rank.Publish(false, enginetest.Stored(0, i+1))
	}
	m.Await("each has its own", func() bool {
		return m.Of(0).Match(1) == 2 && m.Of(0).Match(2) == 0 && m.Of(1).Match(1) == 0 && m.Of(1).Match(2) == 2
	})
	m.Await("loads", func() bool { return m.Of(1).Load.Running != nil })
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Known.Ranks != 2 || *m.Of(1).Load.Running != 1 {
		t.Errorf("ranks %d, running on rank 1 %v", m.Known.Ranks, *m.Of(1).Load.Running)
	}
}

// IDN-03: of four ranks one publishes. The others are listed as silent, with
// what to check, and none is credited with what the one holds.
func TestIDN03SilentRanks(t *testing.T) {
	f := newFakeEngine(t, 4)
	for _, silent := range f.ranks[1:] {
		silent.Close()
	}
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	f.ranks[0].AwaitSubscriber()
	f.ranks[0].Publish(false, enginetest.Stored(0, 1))
	m.Await("one full, three silent", func() bool {
		for n := 1; n < 4; n++ {
			if r := m.Of(n); r.Coverage != engine.CoverageNone || !strings.Contains(r.Hint, fmt.Sprint(f.ranks[n].Port())) || r.Match(1) != 0 {
				return false
			}
		}
		return m.Of(0).Coverage == engine.CoverageFull && m.Of(0).Match(1) == 2
	})
}

// An engine whose API server was killed alone: its engine process still
// publishes and answers replays, but nothing can be sent there.
func TestOrphanedEngineProcess(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	rank.AwaitSubscriber()
	rank.Publish(false, enginetest.Stored(0, 1))
	m.Await("alive", func() bool { return m.Of(0).Match(1) == 2 && m.Up })
	f.Stop()
	m.Await("gone", func() bool {
		return !m.Up && m.Of(0).Match(1) == 0 && m.Of(0).Coverage == engine.CoverageNone
	})
	rank.Publish(false, enginetest.Stored(1, 2))
	rank.Publish(false, enginetest.Stored(0, 5))
	f.Again()
	m.Await("back", func() bool {
		return m.Up && m.Of(0).Match(1, 2) == 4 && m.Of(0).Match(5) == 2 && m.Of(0).Coverage == engine.CoverageFull
	})
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if diff := cmp.Diff([]engine.ResetCause{engine.ResetGone}, m.Of(0).Resets); diff != "" {
		t.Error(diff)
	}
}

func TestSleepClears(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	rank.AwaitSubscriber()
	rank.Publish(false, enginetest.Stored(0, 1))
	m.Await("awake", func() bool { return m.Of(0).Match(1) == 2 && m.Of(0).Load.Sleeping != nil })
	f.set(func() { f.asleep = true })
	m.Await("asleep", func() bool { return m.Of(0).Match(1) == 0 && *m.Of(0).Load.Sleeping })
	f.set(func() { f.asleep = false })
	rank.Publish(false, enginetest.Cleared(), enginetest.Stored(0, 2))
	m.Await("awake again", func() bool { return m.Of(0).Match(2) == 2 && !*m.Of(0).Load.Sleeping })
}

func TestResync(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	m := enginetest.NewMirror(t)
	a := watch(t, f, Options{}, enginetest.Rebuilder{Mirror: m})
	rank.AwaitSubscriber()
	rank.Publish(false, enginetest.Stored(0, 1))
	m.Await("stored", func() bool { return m.Of(0).Match(1) == 2 && m.Of(0).Coverage == engine.CoverageFull })
	m.Mu.Lock()
	m.Of(0).Table.Clear() // the view went wrong
	m.Mu.Unlock()
	a.Resync(0, false)
	a.Resync(7, false) // no such rank
	m.Await("rebuilt", func() bool { return m.Of(0).Match(1) == 2 && m.Of(0).Beside == nil })
}

// An adapter can be run again: it begins anew with a reset.
func TestRunAgain(t *testing.T) {
	f := newFakeEngine(t, 1)
	f.ranks[0].Publish(false, enginetest.Stored(0, 1))
	m := enginetest.NewMirror(t)
	a, err := New(Options{Options: engine.Options{Target: engine.Target{Name: "e", URL: f.URL}, Logger: slog.New(slog.DiscardHandler)}})
	if err != nil {
		t.Fatal(err)
	}
	for life := range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx, m) }()
		m.Await("full", func() bool {
			return m.Of(0).Coverage == engine.CoverageFull && m.Of(0).Match(1) == 2 && len(m.Of(0).Resets) == life
		})
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		m.Mu.Lock()
		m.Of(0).Coverage = ""
		m.Mu.Unlock()
	}
	if got := m.Of(0).Table.Copies(); got != 1 {
		t.Errorf("%d copies: the second life was added to the first", got)
	}
}

// An engine with a plain address connects to the agent.
func TestEngineThatConnects(t *testing.T) {
	address := enginetest.FreeAddress(t)
	f := newFakeEngine(t, 1)
	f.extra["/kv_event_sources"] = fmt.Sprintf(`{"0":{"endpoint":"tcp://%s","replay_endpoint":null}}`, address)
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	rank := f.ranks[0]
	c := rank.Dial(address)
	defer c.Close()
	rank.AwaitSubscriber()
	rank.Publish(false, enginetest.Stored(0, 1))
	m.Await("a batch", func() bool { return m.Of(0).Match(1) == 2 })
}

func TestNoEventsIsSaid(t *testing.T) {
	for _, test := range []struct{ sources, hint string }{
		{`{"0":{"enable_kv_cache_events":false,"publisher":"null","endpoint":"tcp://*:5557"}}`, dialect.HintNoEvents()},
		{"", dialect.HintUnknown()},
	} {
		f := newFakeEngine(t, 1)
		if test.sources != "" {
			f.extra["/kv_event_sources"] = test.sources
		} else {
			f.extra["/kv_event_sources"] = "{}"
		}
		m := enginetest.NewMirror(t)
		watch(t, f, Options{}, m)
		m.Await("coverage", func() bool { return m.Of(0).Coverage == engine.CoverageNone && m.Of(0).Hint == test.hint })
		m.Await("load goes on", func() bool { return m.Of(0).Load.Waiting != nil })
	}
}
