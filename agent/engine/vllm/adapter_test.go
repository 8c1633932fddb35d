package vllm

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
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
const deadline = 2 * time.Minute

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
		MaxModelTokens: 2048, MaxRunning: 16, StepTokens: 2048, StartMark: m.facts.StartMark, Transfer: engine.Transfer{Connector: "NixlConnector", ExportedTier: "gpu"},
		Capabilities: engine.TokenizesText | engine.TokenizesChats,
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

// A replay that is never answered is given up for the next one.
func TestReplayThatIsNotAnswered(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	rank.mute = true
	rank.publish(false, stored(0, 1))
	m := newMirror(t)
	watch(t, f, Options{Stream: StreamOptions{ReplayTimeout: 100 * time.Millisecond, RetryMin: 50 * time.Millisecond, RebuildAfter: time.Second, RetryMax: time.Second}}, m)
	rank.awaitAsked(2)
	m.await("said", func() bool { return m.of(0).hint == hintReplaySilent })
	rank.publish(false, stored(1, 2))
	m.await("live batches are taken without it", func() bool { return m.of(0).coverage == engine.CoveragePartial && m.of(0).table.Len() == 1 })
	rank.mu.Lock()
	rank.mute = false
	rank.mu.Unlock()
	m.await("built anew", func() bool { return m.of(0).coverage == engine.CoverageFull && m.of(0).match(1, 2) == 4 })
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
	a, err := New(Options{Options: engine.Options{Target: engine.Target{Name: "e", URL: f.url}, Logger: slog.New(slog.DiscardHandler)}})
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
	// An address of its own on loopback, where nobody else takes the port.
	free, err := net.Listen("tcp", fmt.Sprintf("127.%d.%d.%d:0", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254)))
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
