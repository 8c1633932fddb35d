package core_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"waypost/testbed/emulator/core"
)

func options() core.Options {
	return core.Options{BlockTokens: 4, PoolBlocks: 11, MaxModelTokens: 40, StepTokens: 16, MaxRunning: 4, StepTime: core.Llama8BH100}
}

func newCore(t *testing.T, o core.Options) *core.Core {
	t.Helper()
	c, err := core.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// prompt is n tokens that differ from those of any other name.
func prompt(name byte, n int) []uint32 {
	p := make([]uint32, n)
	for i := range p {
		p[i] = uint32(name)<<16 | uint32(i)
	}
	return p
}

func request(id string, p []uint32, maxTokens int) core.Request {
	return core.Request{ID: id, Prompt: p, MaxTokens: maxTokens, Generate: func(i int) (uint32, bool) { return uint32(len(p)*1000 + i), false }}
}

func add(t *testing.T, c *core.Core, r core.Request) *core.Sequence {
	t.Helper()
	s, err := c.Add(r, 0)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// step runs one step and describes its tokens and events.
func step(t *testing.T, c *core.Core) string {
	t.Helper()
	if _, ok := c.Schedule(0); !ok {
		return "idle"
	}
	out, ok := c.Finish(time.Millisecond)
	if !ok {
		t.Fatal("no step to finish")
	}
	var words []string
	for _, e := range out.Events {
		words = append(words, fmt.Sprintf("%s*%d", e.Op, len(e.Hashes)))
	}
	for _, o := range out.Outputs {
		words = append(words, fmt.Sprintf("%s:%d%s", o.Sequence.ID(), o.Index, o.Finish))
	}
	return strings.Join(words, " ")
}

func steps(t *testing.T, c *core.Core) []string {
	t.Helper()
	var got []string
	for range 200 {
		s := step(t, c)
		if s == "idle" {
			return got
		}
		got = append(got, s)
	}
	t.Fatal("the core does not come to rest")
	return nil
}

func check(t *testing.T, got, want []string) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("steps (-want +got):\n%s", d)
	}
}

func TestChunkedPrefillFillsTheBudget(t *testing.T) {
	c := newCore(t, options())
	add(t, c, request("a", prompt('a', 20), 2))
	add(t, c, request("b", prompt('b', 6), 1))
	check(t, steps(t, c), []string{
		"BlockStored*4", // 16 of a's 20
		"BlockStored*1 BlockStored*1 a:0 b:0length", // the rest of a and all of b
		"a:1length",
	})
}

func TestWaitingIsFirstInFirstOut(t *testing.T) {
	o := options()
	o.MaxRunning = 1
	c := newCore(t, o)
	big := add(t, c, request("big", prompt('a', 15), 3))
	add(t, c, request("small", prompt('b', 3), 1))
	if step(t, c); c.Status().Running != 1 || c.Status().Waiting != 1 {
		t.Fatalf("status %+v: want one running, one waiting", c.Status())
	}
	got := steps(t, c)
	if last := got[len(got)-1]; last != "small:0length" || big.Finish() != core.FinishLength {
		t.Errorf("last step %q: want small after big has ended", last)
	}
}

// A request whose whole prompt does not fit is not begun, and those behind it
// wait although they would fit.
func TestNobodyOvertakesWhatDoesNotFit(t *testing.T) {
	c := newCore(t, options())
	add(t, c, request("a", prompt('a', 24), 4)) // 6 of 10 blocks, 7 when it has answered
	step(t, c)
	step(t, c)
	add(t, c, request("b", prompt('b', 20), 1)) // 5 blocks
	add(t, c, request("c", prompt('c', 2), 1))
	if got := step(t, c); got != "a:1" {
		t.Errorf("step %q: want a alone", got)
	}
	if s := c.Status(); s.Waiting != 2 {
		t.Errorf("waiting %d: want 2", s.Waiting)
	}
}

// The first piece of the prompt would fit, the whole does not.
func TestWholePromptMustFit(t *testing.T) {
	o := options()
	o.StepTokens = 8
	c := newCore(t, o)
	add(t, c, request("a", prompt('a', 24), 12)) // 6 to 9 of 10 blocks
	for range 3 {
		step(t, c)
	}
	b := add(t, c, request("b", prompt('b', 20), 1)) // 5 blocks, of which a step makes 2
	if got := step(t, c); got != "a:1" || c.Status().Waiting != 1 {
		t.Errorf("step %q, status %+v: want b waiting", got, c.Status())
	}
	if steps(t, c); b.Finish() != core.FinishLength {
		t.Errorf("b ended with %q", b.Finish())
	}
}

// A preempted request comes back before one that was never admitted, and the
// step that preempts admits nobody.
func TestPreemptedComesBackFirst(t *testing.T) {
	o := options()
	o.PoolBlocks, o.MaxModelTokens, o.MaxRunning = 7, 24, 2 // 6 usable blocks
	c := newCore(t, o)
	add(t, c, request("a", prompt('a', 11), 8))
	b := add(t, c, request("b", prompt('b', 7), 8))
	add(t, c, request("x", prompt('x', 2), 2))
	check(t, steps(t, c), []string{
		"BlockStored*2 BlockStored*1 a:0",
		"BlockStored*1 a:1 b:0",
		"BlockStored*1 a:2 b:1",
		"a:3", // b loses its 3 blocks to a's fourth; x would fit and is not let in
		"a:4", // b needs 3 blocks and 2 are free; x still waits behind it
		"BlockStored*1 a:5",
		"BlockRemoved*1 a:6", // a's fifth block: the tail of what b left cached
		"a:7length",
		"BlockRemoved*1 BlockStored*1 BlockRemoved*1 b:2 x:0", // b first, hitting its head
		"b:3 x:1length",
		"b:4",
		"BlockStored*1 b:5",
		"b:6",
		"b:7length",
	})
	if b.Preemptions() != 1 {
		t.Errorf("%d preemptions: want 1", b.Preemptions())
	}
}

func TestPreemptsTheLastAdmitted(t *testing.T) {
	o := options()
	o.PoolBlocks, o.MaxModelTokens = 7, 24 // 6 usable blocks
	c := newCore(t, o)
	a := add(t, c, request("a", prompt('a', 11), 8))
	b := add(t, c, request("b", prompt('b', 7), 8))
	for b.Preemptions() == 0 {
		if step(t, c) == "idle" {
			t.Fatal("nobody was preempted")
		}
	}
	if a.Preemptions() != 0 || c.Status().Waiting != 1 || c.Status().Counters.Preemptions != 1 {
		t.Errorf("status %+v: want b waiting, preempted once", c.Status())
	}
	steps(t, c)
	if a.OutputTokens() != 8 || b.OutputTokens() != 8 {
		t.Errorf("outputs %d and %d: want 8 and 8", a.OutputTokens(), b.OutputTokens())
	}
	if q := c.Status().Counters.QueriedTokens; q != 18 {
		t.Errorf("queried tokens %d: a readmission counts again, want 18", q)
	}
}

func TestTwoEqualPromptsAtOnce(t *testing.T) {
	c := newCore(t, options())
	a := add(t, c, request("a", prompt('a', 14), 1))
	b := add(t, c, request("b", prompt('a', 14), 1))
	check(t, steps(t, c), []string{"BlockStored*3 a:0length b:0length"})
	if a.CachedTokens() != 0 || b.CachedTokens() != 12 {
		t.Errorf("cached %d and %d: want 0 and 12", a.CachedTokens(), b.CachedTokens())
	}
}

func TestAbortKeepsBlocksCached(t *testing.T) {
	c := newCore(t, options())
	add(t, c, request("a", prompt('a', 14), 20))
	step(t, c)
	if !c.Abort("a") || c.Abort("a") || c.Abort("b") {
		t.Error("Abort must report whether the request was live")
	}
	if !c.Idle() || c.Status().UsedBlocks != 0 || c.Status().CachedBlocks != 3 {
		t.Errorf("status %+v: want nothing used and 3 blocks cached", c.Status())
	}
	if s := add(t, c, request("b", prompt('a', 14), 1)); step(t, c) != "b:0length" || s.CachedTokens() != 12 {
		t.Errorf("cached %d after the abort: want 12", s.CachedTokens())
	}
}

func TestAbortWithinAStep(t *testing.T) {
	c := newCore(t, options())
	a := add(t, c, request("a", prompt('a', 14), 20))
	c.Schedule(0)
	c.Abort("a")
	out, _ := c.Finish(0)
	if len(out.Outputs) != 0 || a.Finish() != core.FinishAbort || c.Status().UsedBlocks != 0 {
		t.Errorf("outputs %d, finish %q, status %+v: want none, abort, nothing used", len(out.Outputs), a.Finish(), c.Status())
	}
}

func TestResetIsAnnouncedWithTheNextStep(t *testing.T) {
	c := newCore(t, options())
	add(t, c, request("a", prompt('a', 9), 5))
	step(t, c)
	if c.Reset(false) {
		t.Error("Reset succeeds while a request holds blocks")
	}
	if !c.Reset(true) {
		t.Error("Reset with eviction fails")
	}
	if s := c.Status(); s.CachedBlocks != 0 || s.Counters.Preemptions != 1 {
		t.Errorf("status %+v: want nothing cached and one preemption", s)
	}
	if got, want := step(t, c), "AllBlocksCleared*0 BlockStored*2 a:1"; got != want {
		t.Errorf("step %q, want %q", got, want)
	}
}

func TestSkippedCacheReadStoresAgain(t *testing.T) {
	c := newCore(t, options())
	add(t, c, request("a", prompt('a', 9), 1))
	step(t, c)
	r := request("b", prompt('a', 9), 1)
	r.SkipCacheRead = true
	b := add(t, c, r)
	if got := step(t, c); got != "BlockStored*2 b:0length" || b.CachedTokens() != 0 || c.Status().CachedBlocks != 4 {
		t.Errorf("step %q, cached %d, status %+v: want the blocks stored again", got, b.CachedTokens(), c.Status())
	}
}

func TestEndToken(t *testing.T) {
	c := newCore(t, options())
	r := request("a", prompt('a', 3), 10)
	r.Generate = func(i int) (uint32, bool) { return 7, i == 2 }
	add(t, c, r)
	check(t, steps(t, c), []string{"a:0", "BlockStored*1 a:1", "a:2stop"})
}

func TestModelLimitEndsTheAnswer(t *testing.T) {
	c := newCore(t, options())
	s := add(t, c, request("a", prompt('a', 35), 100))
	steps(t, c)
	if s.OutputTokens() != 5 || s.Finish() != core.FinishLength {
		t.Errorf("%d tokens, finish %q: want 5, length", s.OutputTokens(), s.Finish())
	}
}

func TestEvictSilently(t *testing.T) {
	c := newCore(t, options())
	add(t, c, request("a", prompt('a', 14), 1))
	step(t, c)
	if n := c.EvictSilently(2); n != 2 {
		t.Fatalf("evicted %d: want 2", n)
	}
	s := add(t, c, request("b", prompt('a', 14), 1))
	if got := step(t, c); got != "BlockStored*2 b:0length" || s.CachedTokens() != 4 {
		t.Errorf("step %q, cached %d: want the tail gone without a removal", got, s.CachedTokens())
	}
	if n := c.EvictSilently(100); n != 3 {
		t.Errorf("evicted %d: want the 3 that are cached", n)
	}
}

func TestRefusals(t *testing.T) {
	c := newCore(t, options())
	good := request("a", prompt('a', 3), 1)
	add(t, c, good)
	for name, change := range map[string]func(*core.Request){
		"empty":      func(r *core.Request) { r.Prompt = nil },
		"40 tokens":  func(r *core.Request) { r.Prompt = prompt('a', 40) },
		"MaxTokens":  func(r *core.Request) { r.MaxTokens = 0 },
		"Generate":   func(r *core.Request) { r.Generate = nil },
		`id "a" is`:  func(r *core.Request) { r.ID = "a" },
		"limit with": func(r *core.Request) { r.Prompt = prompt('b', 41) },
	} {
		r := good
		r.ID = "b"
		change(&r)
		if _, err := c.Add(r, 0); !errors.Is(err, core.ErrRequest) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestOptionErrors(t *testing.T) {
	for name, change := range map[string]func(*core.Options){
		"BlockTokens":      func(o *core.Options) { o.BlockTokens = 0 },
		"StepTokens":       func(o *core.Options) { o.StepTokens = -1 },
		"MaxRunning":       func(o *core.Options) { o.MaxRunning = 0 },
		"raise PoolBlocks": func(o *core.Options) { o.MaxModelTokens = 41 },
		"no coefficient":   func(o *core.Options) { o.StepTime = core.StepTime{} },
	} {
		o := options()
		change(&o)
		if _, err := core.New(o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestStepTime(t *testing.T) {
	o := options()
	o.BlockTokens, o.PoolBlocks, o.MaxModelTokens, o.StepTokens = 16, 1001, 16000, 8192
	o.StepTime = core.StepTime{P0: 2, P1: .01, P2: 1e-6, D0: 5, D1: .5, D2: 1e-3}
	c := newCore(t, o)
	durations := func() time.Duration {
		s, ok := c.Schedule(0)
		if !ok {
			t.Fatal("idle")
		}
		c.Finish(0)
		return s.Duration.Round(time.Microsecond)
	}
	ms := func(v float64) time.Duration {
		return time.Duration(v * float64(time.Millisecond)).Round(time.Microsecond)
	}
	add(t, c, request("a", prompt('a', 10000), 3))
	for i, want := range []time.Duration{
		ms(2 + .01*8192 + 1e-6*8192*8192),                 // the first piece of the prompt
		ms(2 + .01*1808 + 1e-6*(10000.*10000-8192.*8192)), // the rest; its first token is no decode
		ms(5 + .5 + 1e-3*10001),
	} {
		if got := durations(); got != want {
			t.Errorf("step %d takes %v, want %v", i, got, want)
		}
	}
	add(t, c, request("b", prompt('a', 10000), 1)) // all but the last block cached
	if got, want := durations(), ms(2+.01*16+1e-6*(10000.*10000-9984.*9984)+5+.5+1e-3*10002); got != want {
		t.Errorf("a mixed step takes %v, want %v", got, want)
	}
}
