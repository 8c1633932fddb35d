package agent

import (
	"bytes"
	"context"
	"errors"
	"hash/fnv"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// testedEngine is an engine that a self-test can be run on, with the rank that
// mirrors it. It caches whole blocks of 16 tokens.
type testedEngine struct {
	*textEngine
	r *rank
	// silent publishes no block, renamed mirrors under another model's name,
	// wrong reuses so many tokens more, counts so many prompt tokens more;
	// untold tells no cached tokens; fails answers nothing.
	silent, untold, fails bool
	wrong, counts         int
	// before is called before each request is answered.
	before func()

	requests int
	cached   [][]uint32
	// prompts and finished are the engine's counters.
	mu                sync.Mutex
	prompts, finished float64
}

// Complete implements engine.Completer.
func (e *testedEngine) Complete(_ context.Context, prompt string, _ int) (engine.Usage, error) {
	e.requests++
	if e.before != nil {
		e.before()
	}
	time.Sleep(300 * time.Millisecond)
	if e.fails {
		return engine.Usage{}, errors.New("no")
	}
	ids := e.tokens(prompt, true)
	u := engine.Usage{PromptTokens: len(ids) + e.counts}
	for _, c := range e.cached {
		if n := (len(ids) - 1) / 16 * 16; n <= len(c) && string(bytesOf(c[:n])) == string(bytesOf(ids[:n])) {
			u.CachedTokens = n + e.wrong
		}
	}
	e.cached = append(e.cached, ids)
	e.mu.Lock()
	e.prompts, e.finished = e.prompts+float64(len(ids)), e.finished+1
	e.mu.Unlock()
	if e.untold {
		u.CachedTokens = -1
	}
	if !e.silent {
		s := blocktable.Event{Op: blocktable.OpStore, BlockTokens: 16, Tokens: ids[:len(ids)/16*16]}
		for i := range len(ids) / 16 {
			h := fnv.New64a()
			_, _ = h.Write(bytesOf(ids[:16*(i+1)]))
			s.Hashes = append(s.Hashes, h.Sum64())
		}
		e.r.apply(engine.Batch{Received: time.Now(), Events: []blocktable.Event{s}})
	}
	return u, nil
}

func bytesOf(ids []uint32) []byte {
	var b bytes.Buffer
	for _, id := range ids {
		b.Write([]byte{byte(id), byte(id >> 8), byte(id >> 16), byte(id >> 24)})
	}
	return b.Bytes()
}

// load is a reading of the engine's counters with so many requests running.
func (e *testedEngine) load(running int) engine.Load {
	waiting := 0
	e.mu.Lock()
	prompts, finished := e.prompts, e.finished
	e.mu.Unlock()
	return engine.Load{At: time.Now(), Running: &running, Waiting: &waiting, PromptTokens: &prompts, FirstTokens: &finished, Finished: &finished}
}

// newTestedEngine is an engine that has just come up, full coverage and all.
func newTestedEngine() *testedEngine {
	e := &testedEngine{textEngine: qwenLike()}
	e.r = newRank(0, "vllm", "vllm-1", "here", 0, []prefix.ClusterKey{{5}}, 1<<16)
	e.up(7)
	return e
}

func (e *testedEngine) up(mark uint64) {
	e.r.setFacts(engine.Facts{Model: "m", StartMark: mark, BlockTokens: 16, PoolBlocks: 1 << 12, StepTokens: 2048, Capabilities: engine.PublishesEvents})
	e.r.setCoverage(engine.CoverageFull, "")
	e.r.setHealth(true, "")
}

// tester runs the self-test of an engine with counters read each 250 ms, for a
// time; running is how many requests of others there are.
func (e *testedEngine) tester(t *testing.T, log *slog.Logger, running func() int, runFor time.Duration) {
	kept := map[uint64]engine.Capability{}
	s := &selfTester{
		tokenizer: e.textEngine, completer: e, ranks: func() []*rank { return []*rank{e.r} }, log: log, changed: func() {},
		save: func() {
			if w, ok := e.r.export(); ok && len(w.SelfTest) > 0 {
				kept[e.r.process] = engine.CapabilityOf(w.SelfTest)
			}
		},
		done: func(_ string, process uint64) (engine.Capability, bool) { c, ok := kept[process]; return c, ok },
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{}, 2)
	go func() { s.run(ctx); done <- struct{}{} }()
	go func() {
		defer func() { done <- struct{}{} }()
		for ctx.Err() == nil {
			e.r.setLoad(e.load(running()))
			time.Sleep(250 * time.Millisecond)
		}
	}()
	time.Sleep(runFor)
	cancel()
	<-done
	<-done
}

func nobody() int { return 0 }

// What a self-test finds, and what it says when something is not so.
func TestSelfTest(t *testing.T) {
	all := "self-test-events,self-test-keys,self-test-reuse"
	for name, c := range map[string]struct {
		change   func(*testedEngine)
		running  func() int
		want     string // capabilities
		requests int
		says     string
	}{
		"all is well":            {func(*testedEngine) {}, nobody, "cached-tokens," + all, 2, "self-test passed"},
		"no event comes":         {func(e *testedEngine) { e.silent = true }, nobody, "self-test-failed", 1, "no block of the prompt was told"},
		"other reuse":            {func(e *testedEngine) { e.wrong = -16 }, nobody, "cached-tokens,self-test-events,self-test-keys,self-test-failed", 2, "the engine reused 80 tokens, its events say 96"},
		"reuse is not told":      {func(e *testedEngine) { e.untold = true }, nobody, "self-test-events,self-test-keys", 2, "does not report cached tokens"},
		"another tokenizer":      {func(e *testedEngine) { e.counts = 1 }, nobody, "self-test-failed", 1, "counts other tokens"},
		"the engine refuses":     {func(e *testedEngine) { e.fails = true }, nobody, "", 1, "self-test ended early"},
		"requests all the time":  {func(*testedEngine) {}, func() int { return 3 }, "", 0, "never without requests"},
		"no events at all":       {func(e *testedEngine) { e.silent = true; e.r.setCoverage(engine.CoverageNone, "") }, nobody, "cached-tokens", 2, "self-test passed"},
		"its life is not told":   {func(e *testedEngine) { e.r.facts.StartMark = 0 }, nobody, "", 0, ""},
		"blocks are too large":   {func(e *testedEngine) { e.r.facts.BlockTokens = 544 }, nobody, "", 0, "blocks of 544 tokens are too large"},
		"a placement comes amid": {func(e *testedEngine) { e.before = func() { e.r.claim(1) } }, nobody, "self-test-events,self-test-keys", 1, "requests came"},
		"the process ends amid": {func(e *testedEngine) {
			e.before = func() { e.r.setFacts(engine.Facts{Model: "m", StartMark: 8, BlockTokens: 16}) }
		}, func() int { return 1 }, "", 0, ""},
		"mirrored by other names": {func(e *testedEngine) { e.r.facts.Model = "another" }, nobody, "self-test-events,self-test-failed", 1, "under other keys"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			e := newTestedEngine()
			c.change(e)
			e.tester(t, slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})), c.running, 90*time.Second)
			if got := e.r.selfTest.String(); got != c.want || e.requests != c.requests {
				t.Errorf("%s: %q after %d requests, want %q after %d", name, got, e.requests, c.want, c.requests)
			}
			if !strings.Contains(log.String(), c.says) {
				t.Errorf("%s: the log does not say %q:\n%s", name, c.says, log.String())
			}
			if e.r.holding {
				t.Errorf("%s: the estimate is still kept from the engine", name)
			}
		})
	}
}

// unaskedTokenizer tells no ids, and counts how often it is asked.
type unaskedTokenizer struct {
	*textEngine
	asked int
}

func (u *unaskedTokenizer) Tokenize(context.Context, string, bool) ([]uint32, error) {
	u.asked++
	return nil, errors.New("404 Not Found")
}

// A test that cannot begin is given up with its patience: the engine is not asked
// for ever, and why it was not tested is said.
func TestSelfTestThatCannotBeginIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		e, u := newTestedEngine(), &unaskedTokenizer{}
		s := &selfTester{
			tokenizer: u, completer: e, ranks: func() []*rank { return []*rank{e.r} }, changed: func() {}, save: func() {},
			done: func(string, uint64) (engine.Capability, bool) { return 0, false }, log: slog.New(slog.NewTextHandler(&log, nil)),
		}
		ctx, cancel := context.WithCancel(t.Context())
		var done sync.WaitGroup
		done.Go(func() { s.run(ctx) })
		for range 600 {
			e.r.setLoad(e.load(0))
			time.Sleep(time.Second)
		}
		cancel()
		done.Wait()
		if u.asked == 0 || u.asked > int(selfTestPatience/selfTestAgain)+1 || e.requests != 0 {
			t.Errorf("%d questions, %d requests within ten minutes", u.asked, e.requests)
		}
		if n := strings.Count(log.String(), "self-test not run"); n != 1 || !strings.Contains(log.String(), "404 Not Found") {
			t.Errorf("the log says %d times that it was not run:\n%s", n, log.String())
		}
	})
}

// claim takes a claim as from a coordinator.
func (r *rank) claim(seq uint64) {
	_, _ = r.takeClaims(&ledger.ClaimFrame{
		Coordinator: 9, Agent: r.agentProcess, Prev: seq - 1,
		Offers: []ledger.Offer{{Claim: ledger.Claim{Seq: seq, EngineProcess: r.process, PromptTokens: 100, UncachedTokens: 100, OutputTokens: 10, Sequences: 1}}},
	})
}

// The queue estimate is what it would be without the test: no foreign request,
// no speed, no mean.
func TestSelfTestDoesNotDisturbTheQueue(t *testing.T) {
	type seen struct {
		queueMs, foreign float64
		output, finish   float64
	}
	watch := func(with bool) (out seen) {
		synctest.Test(t, func(t *testing.T) {
			e := newTestedEngine()
			samples := 0
			running := func() int {
				samples++
				load := e.r.report(time.Now()).load
				if load.QueueMs != nil {
					out.queueMs += *load.QueueMs
				}
				if load.Foreign != nil {
					out.foreign += float64(*load.Foreign)
				}
				if load.FinishPerSec != nil {
					out.finish += *load.FinishPerSec
				}
				if load.MeanOutputTokens != nil {
					out.output = *load.MeanOutputTokens
				}
				return 0
			}
			if !with {
				e.r.selfTestOf = e.r.process // as if it were done
			}
			e.tester(t, slog.New(slog.DiscardHandler), running, 30*time.Second)
			if (e.requests == 2) != with || samples < 100 {
				t.Errorf("%d requests, %d readings", e.requests, samples)
			}
		})
		return out
	}
	without, with := watch(false), watch(true)
	if with != without {
		t.Errorf("with the test %+v, without %+v", with, without)
	}
}

// An engine life is tested once, the next one again.
func TestSelfTestOncePerLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestedEngine()
		e.tester(t, slog.New(slog.DiscardHandler), nobody, 5*time.Minute)
		if e.requests != 2 {
			t.Errorf("%d requests of one life", e.requests)
		}
		before := e.r.selfTest
		e.r.setHealth(false, "gone")
		e.up(8)
		e.r.mu.Lock()
		kept := e.r.selfTestOf == e.r.process
		e.r.mu.Unlock()
		if kept || before == 0 {
			t.Error("the next life has the result of the former")
		}
		e.tester(t, slog.New(slog.DiscardHandler), nobody, time.Minute)
		if e.requests != 4 {
			t.Errorf("%d requests of two lives", e.requests)
		}
	})
}

// rankedEngine is an engine of several ranks, each with a cache and events of its
// own. It serves a request on the rank that it names, or always on the first.
type rankedEngine struct {
	ranks   []*testedEngine
	ignores bool
	// asked are the ranks that requests named.
	asked []int
}

func (e *rankedEngine) Complete(ctx context.Context, prompt string, rank int) (engine.Usage, error) {
	e.asked = append(e.asked, rank)
	if rank < 0 || e.ignores {
		rank = 0
	}
	return e.ranks[rank].Complete(ctx, prompt, rank)
}

func newRankedEngine(n int, header string) *rankedEngine {
	e := &rankedEngine{}
	for i := range n {
		one := newTestedEngine()
		one.r = newRank(uint32(i), "vllm", "vllm-1", "here", i, []prefix.ClusterKey{{5}}, 1<<16)
		one.r.setFacts(engine.Facts{Model: "m", StartMark: 7, BlockTokens: 16, PoolBlocks: 1 << 12, StepTokens: 2048, Ranks: n, RankHeader: header, Capabilities: engine.PublishesEvents})
		one.r.setCoverage(engine.CoverageFull, "")
		one.r.setHealth(true, "")
		e.ranks = append(e.ranks, one)
	}
	return e
}

// test runs the self-test of all ranks for a time; running are how many requests
// of others each rank has.
func (e *rankedEngine) test(t *testing.T, log *slog.Logger, running func(rank int) int, runFor time.Duration) {
	s := &selfTester{
		tokenizer: e.ranks[0].textEngine, completer: e, log: log, changed: func() {}, save: func() {},
		ranks: func() (out []*rank) {
			for _, one := range e.ranks {
				out = append(out, one.r)
			}
			return out
		},
		done: func(string, uint64) (engine.Capability, bool) { return 0, false },
	}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { s.run(ctx) })
	done.Go(func() {
		for ctx.Err() == nil {
			for i, one := range e.ranks {
				one.r.setLoad(one.load(running(i)))
			}
			time.Sleep(250 * time.Millisecond)
		}
	})
	time.Sleep(runFor)
	cancel()
	done.Wait()
}

// Each data-parallel rank is tested with requests that name it, while none of the
// engine's ranks has others.
func TestSelfTestOfRanks(t *testing.T) {
	const all = "cached-tokens,self-test-events,self-test-keys,self-test-reuse"
	for name, c := range map[string]struct {
		header  string
		ignores bool
		running func(int) int
		want    []string
		asked   []int
		says    string
	}{
		"each by its name":          {header: "X-Rank", want: []string{all, all, all}, asked: []int{0, 0, 1, 1, 2, 2}, says: "self-test passed"},
		"the name is not obeyed":    {header: "X-Rank", ignores: true, want: []string{all, "self-test-failed", "self-test-failed"}, asked: []int{0, 0, 1, 2}, says: "no block of the prompt was told"},
		"ranks have no name":        {want: []string{"", "", ""}, says: "requests cannot name a rank"},
		"another rank has requests": {header: "X-Rank", running: func(rank int) int { return rank / 2 }, want: []string{"", "", ""}, says: "never without requests"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			e := newRankedEngine(3, c.header)
			e.ignores = c.ignores
			running := c.running
			if running == nil {
				running = func(int) int { return 0 }
			}
			e.test(t, slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})), running, 3*time.Minute)
			var got []string
			for _, one := range e.ranks {
				got = append(got, one.r.selfTest.String())
			}
			if !slices.Equal(got, c.want) || !slices.Equal(e.asked, c.asked) {
				t.Errorf("%s: found %q by requests to %v, want %q by %v", name, got, e.asked, c.want, c.asked)
			}
			if !strings.Contains(log.String(), c.says) {
				t.Errorf("%s: the log does not say %q:\n%s", name, c.says, log.String())
			}
		})
	}
}
