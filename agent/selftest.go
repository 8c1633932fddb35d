package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/queue"
	"waypost/gossip/prefix"
)

const (
	// selfTestPatience is how long after an engine comes up it is waited for a
	// moment without requests; one that has none is not tested.
	selfTestPatience = time.Minute
	// selfTestAgain is the least time between two tries to begin.
	selfTestAgain = 5 * time.Second
	// selfTestEvents is how long events of the probe are waited for,
	// selfTestRequest bounds one request, selfTestSettle how long counters may
	// take to show that it has ended.
	selfTestEvents  = 5 * time.Second
	selfTestRequest = 20 * time.Second
	selfTestSettle  = 3 * time.Second
	// maxSelfTestTokens bounds the probe prompt: it must hold two blocks.
	maxSelfTestTokens = 1024
	// selfTestBegun stands for a test whose result was not written.
	selfTestBegun = "begun"
)

// selfTestBits are what a self-test can say.
const selfTestBits = engine.SelfTestEvents | engine.SelfTestKeys | engine.SelfTestReuse | engine.SelfTestFailed

// selfTester runs one tiny prompt twice on an engine that has just come up and
// compares what happens with what should.
type selfTester struct {
	tokenizer engine.Tokenizer
	completer engine.Completer
	// ranks are those of the engine that are known.
	ranks func() []*rank
	// done is what an earlier agent found out about an engine life.
	done func(name string, process uint64) (engine.Capability, bool)
	// save keeps what was begun and what came of it; changed tells it.
	save, changed func()
	// every is the time between looks at the engine; 0: 1 s.
	every time.Duration
	log   *slog.Logger
}

var (
	errLoaded     = errors.New("requests came")
	errNoUsage    = errors.New("the engine does not say how many tokens the prompt has")
	errOtherCount = errors.New("the engine counts other tokens of the prompt than its tokenizer")
)

// lifeTest is how far the test of one rank's present engine life is.
type lifeTest struct {
	process uint64
	// since is from when patience counts.
	since time.Time
	// putOff is why the test could not begin though the engine had no requests, nil:
	// it was not so; putOffAt is when it was tried last.
	putOff   error
	putOffAt time.Time
}

// run tests each life of each rank once, one rank after the other, until ctx ends.
func (s *selfTester) run(ctx context.Context) {
	every := s.every
	if every <= 0 {
		every = time.Second
	}
	t := time.NewTicker(every)
	defer t.Stop()
	lives := map[*rank]*lifeTest{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		ranks := s.ranks()
		for _, r := range ranks {
			if lives[r] == nil {
				lives[r] = &lifeTest{}
			}
			if s.look(ctx, r, ranks, lives[r]) {
				// The others have waited for this one, not for the engine.
				for _, l := range lives {
					l.since = time.Now()
				}
			}
		}
	}
}

// look tests a rank if it is time; true: it was tested.
func (s *selfTester) look(ctx context.Context, r *rank, ranks []*rank, l *lifeTest) bool {
	now, ready := r.readyForSelfTest()
	if now == 0 {
		return false
	}
	if now != l.process {
		*l = lifeTest{process: now, since: time.Now()}
		if bits, ok := s.done(r.local(), now); ok {
			r.tested(now, bits)
			s.changed()
		}
	}
	if r.wasTested(now) {
		return false
	}
	if !r.addressed(len(ranks)) {
		r.tested(now, 0)
		s.log.Info("self-test not run: requests cannot name a rank of this engine", "rank", r.number, "ranks", len(ranks))
		return false
	}
	if ready && othersIdle(r, ranks) && (r.publishes() || time.Since(l.since) > selfTestEvents) && time.Since(l.putOffAt) > selfTestAgain {
		// Events may begin a moment after the engine answers.
		if l.putOff = s.test(ctx, r, ranks, now); l.putOff == nil {
			return true
		}
		l.putOffAt = time.Now()
	}
	if time.Since(l.since) <= selfTestPatience {
		return false
	}
	r.tested(now, 0)
	if l.putOff != nil {
		s.log.Info("self-test not run", "rank", r.number, "patience", selfTestPatience, "error", l.putOff)
	} else {
		s.log.Info("self-test not run: the engine was never without requests", "rank", r.number, "patience", selfTestPatience)
	}
	return false
}

// othersIdle says that the other ranks of the engine have no requests: they share
// its host, and often its steps.
func othersIdle(r *rank, ranks []*rank) bool {
	for _, other := range ranks {
		if other != r {
			if process, idle := other.readyForSelfTest(); process == 0 || !idle {
				return false
			}
		}
	}
	return true
}

// addressed says that a request can be sent to the rank: it is the only one, or
// the engine lets requests name it.
func (r *rank) addressed(ranks int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return ranks == 1 && r.facts.Ranks <= 1 || r.facts.RankHeader != ""
}

// askedRank is the rank that the test's requests name; below 0: none.
func (r *rank) askedRank() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.facts.RankHeader == "" {
		return -1
	}
	return r.number
}

// test runs the test once and keeps its result. It is kept that it was begun
// before anything is asked, so that no life is tested twice. putOff says why
// nothing was asked that takes a place in the engine's batch: it may be tried again
// while patience lasts.
func (s *selfTester) test(ctx context.Context, r *rank, ranks []*rank, process uint64) (putOff error) {
	ctx, cancel := context.WithTimeout(ctx, 2*selfTestRequest+selfTestEvents)
	defer cancel()
	prompt, ids, err := s.prompt(ctx, process, r.number, r.blockTokens())
	if err == nil && !r.hold(process) {
		err = errLoaded
	}
	if err != nil {
		s.log.Debug("self-test put off", "error", err)
		return err
	}
	r.tested(process, 0)
	s.save()
	bits, err := s.twice(ctx, r, ranks, prompt, ids)
	r.settle(ctx)
	r.release()
	r.tested(process, bits)
	s.save()
	s.changed()
	switch {
	case err == nil:
		s.log.Info("self-test passed", "rank", r.number, "found", bits.String())
	case bits.Has(engine.SelfTestFailed):
		s.log.Warn("self-test failed", "rank", r.number, "found", (bits &^ engine.SelfTestFailed).String(), "error", err)
	default:
		s.log.Info("self-test ended early", "rank", r.number, "found", bits.String(), "error", err)
	}
	return nil
}

// prompt makes a prompt of two blocks and a bit that no other life or rank of any
// engine was asked.
func (s *selfTester) prompt(ctx context.Context, process uint64, number, blockTokens int) (string, []uint32, error) {
	want := 2*blockTokens + blockTokens/2 + 1
	if want > maxSelfTestTokens {
		return "", nil, fmt.Errorf("blocks of %d tokens are too large for a tiny prompt", blockTokens)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Self-test %016x/%d of the cache.", process, number)
	for i := 1; ; i++ {
		for range want {
			fmt.Fprintf(&b, " %d", i)
		}
		ids, err := s.tokenizer.Tokenize(ctx, b.String(), true)
		if err != nil || len(ids) >= want && len(ids) <= 8*maxSelfTestTokens {
			return b.String(), ids, err
		}
		if i == 4 || len(ids) > 8*maxSelfTestTokens {
			return "", nil, fmt.Errorf("a prompt of %d bytes has %d tokens", b.Len(), len(ids))
		}
	}
}

// twice runs the prompt twice. An error says why a bit is missing.
func (s *selfTester) twice(ctx context.Context, r *rank, ranks []*rank, prompt string, ids []uint32) (bits engine.Capability, err error) {
	used, err := s.complete(ctx, prompt, r.askedRank())
	switch {
	case err != nil:
		return 0, err
	case used.PromptTokens == 0:
		return 0, errNoUsage
	case used.PromptTokens != len(ids):
		return engine.SelfTestFailed, fmt.Errorf("%w: %d, %d", errOtherCount, used.PromptTokens, len(ids))
	}
	predicted, keys := 0, false
	if r.publishes() {
		if predicted, keys = s.awaitEvents(ctx, r, ids); predicted == 0 {
			return engine.SelfTestFailed, fmt.Errorf("no block of the prompt was told within %s", selfTestEvents)
		}
		bits |= engine.SelfTestEvents
		if !keys {
			return bits | engine.SelfTestFailed, errors.New("the mirror holds the blocks under other keys than the coordinators'")
		}
		bits |= engine.SelfTestKeys
	}
	if !r.held() || !othersIdle(r, ranks) {
		return bits, errLoaded
	}
	used, err = s.complete(ctx, prompt, r.askedRank())
	switch {
	case err != nil:
		return bits, err
	case used.CachedTokens < 0:
		return bits, errors.New("the engine does not report cached tokens")
	}
	bits |= engine.ReportsCachedTokens
	switch {
	case predicted == 0:
		return bits, nil // nothing to compare with
	case used.CachedTokens != predicted:
		return bits | engine.SelfTestFailed, fmt.Errorf("the engine reused %d tokens, its events say %d", used.CachedTokens, predicted)
	}
	return bits | engine.SelfTestReuse, nil
}

func (s *selfTester) complete(ctx context.Context, prompt string, rank int) (engine.Usage, error) {
	ctx, cancel := context.WithTimeout(ctx, selfTestRequest)
	defer cancel()
	return s.completer.Complete(ctx, prompt, rank)
}

// awaitEvents waits until the mirror holds the whole blocks of the prompt, or as
// many as come in time. It returns how much the engine should reuse, and whether
// the keys are those that a coordinator makes of the same tokens.
func (s *selfTester) awaitEvents(ctx context.Context, r *rank, ids []uint32) (predicted int, keys bool) {
	ctx, cancel := context.WithTimeout(ctx, selfTestEvents)
	defer cancel()
	t := time.NewTicker(20 * time.Millisecond)
	defer t.Stop()
	whole := 0
	if block := r.blockTokens(); block > 0 {
		whole = (len(ids) - 1) / block * block
	}
	for {
		held, sameKeys := r.holds(ids)
		if held >= whole {
			return r.reused(held), sameKeys
		}
		select {
		case <-ctx.Done():
			return r.reused(held), sameKeys
		case <-t.C:
		}
	}
}

// readyForSelfTest is the engine's life, 0: it is not up or its life not told,
// and whether it has no requests, by its own counters and by claims.
func (r *rank) readyForSelfTest() (process uint64, ready bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.known || !r.up || r.facts.StartMark == 0 || r.facts.BlockTokens == 0 || r.estimate == nil {
		return 0, false
	}
	return r.process, r.idle()
}

// idle says that the newest counters and claims know of no request.
func (r *rank) idle() bool {
	open, _ := r.estimate.OpenClaims()
	l := &r.latest
	return open == 0 && l.Running != nil && *l.Running == 0 && l.Waiting != nil && *l.Waiting == 0 && (l.Sleeping == nil || !*l.Sleeping) && time.Since(l.At) < 3*time.Second
}

func (r *rank) blockTokens() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.facts.BlockTokens
}

func (r *rank) publishes() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.coverage != engine.CoverageNone
}

// hold keeps what the engine's counters and events say from the queue estimate
// while the engine has no requests but the self-test's. It reports false if it
// has others.
func (r *rank) hold(process uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holding = r.process == process && r.idle()
	return r.holding
}

func (r *rank) held() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.holding
}

// release lets the queue estimate go on from the newest counters: what the test
// added to them teaches nothing.
func (r *rank) release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.endHold()
}

// endHold ends a hold. The lock is held.
func (r *rank) endHold() {
	if r.holding && r.estimate != nil && !r.latest.At.IsZero() {
		r.estimate.Rebase(queue.Sample(r.latest))
	}
	r.holding = false
}

// settle waits until counters that were read later show that the test's requests
// have ended.
func (r *rank) settle(ctx context.Context) {
	ended := time.Now()
	t := time.NewTicker(20 * time.Millisecond)
	defer t.Stop()
	for time.Since(ended) < selfTestSettle {
		r.mu.Lock()
		settled := !r.holding || r.latest.At.After(ended.Add(time.Second)) && r.estimate != nil && r.idle()
		r.mu.Unlock()
		if settled {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// holds is how much of a prompt the mirror says the engine would reuse, and
// whether it holds it under the key that a coordinator makes of it.
func (r *rank) holds(ids []uint32) (tokens int, keys bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.table == nil {
		return 0, false
	}
	tokens = r.table.Match(ids, "", "")
	var probe prefix.Probe
	probe.ResetTokens(ids, prefix.NewKeyer(r.key, prefix.Domain{Model: r.facts.Model}))
	key, ok := probe.At(tokens)
	if !ok {
		return tokens, false
	}
	h, nowMs := r.table.History(), r.ms(time.Now())
	h.SetNow(nowMs)
	told := h.Ask(&blocktable.Asked{Key: r.key, ViewMs: nowMs, DecidedMs: nowMs, Expected: blocktable.Place{DepthTokens: uint32(tokens), Key: key}})
	return tokens, told.Held != nil && *told.Held
}

// reused is what an engine reuses of a match: some compute its last block again.
func (r *rank) reused(match int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.facts.Capabilities.Has(engine.RecomputesLastBlock) {
		return max(0, match-r.facts.BlockTokens)
	}
	return match
}

// tested keeps what a self-test of an engine life found.
func (r *rank) tested(process uint64, bits engine.Capability) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.process == process {
		r.selfTestOf, r.selfTest = process, bits
	}
}

func (r *rank) wasTested(process uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.selfTestOf == process
}
