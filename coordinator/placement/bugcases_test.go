package placement

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// Faults seen in comparable systems, by the names they are listed under: what
// the rule by itself must do about each.

// claimOn adds a claim to a worker the way a fleet does.
func claimOn(c *Candidate, nowMs float64, tokens int) {
	w := *c.Worker
	w.Waiting.Fold(&w.Steps, nowMs, 0, tokens)
	w.OpenClaims++
	w.Live++
	c.Worker = &w
}

// LOD-01: without any load data the own claims spread the work, and the
// explanation says that the queue is unknown.
func TestLOD01MissingLoadIsNotZero(t *testing.T) {
	candidates := idleFleet(4)
	for i := range candidates {
		w := candidates[i].Worker
		w.QueueKnown, w.Live, w.Decoding, w.ContextTokens, w.LoadAtMs = false, math.NaN(), math.NaN(), math.NaN(), math.NaN()
		w.AwaySinceMs = 1e6 - 1
	}
	counts := make([]int, 4)
	for i := range 200 {
		d := place(t, Request{ID: fmt.Sprint("r", i), PromptTokens: 1000}, candidates)
		if because := d.Because(candidates); !strings.Contains(because, "queue unknown") {
			t.Fatalf("because %q", because)
		}
		counts[d.Chosen]++
		w := *candidates[d.Chosen].Worker
		w.Waiting.Fold(&w.Steps, 1e6, 0, 1000)
		w.OpenClaims++
		candidates[d.Chosen].Worker = &w
	}
	for _, n := range counts {
		if n < 40 || n > 60 {
			t.Errorf("spread %v of 200, want within a fifth", counts)
		}
	}
}

// LOD-02: a burst counts at once.
func TestLOD02BurstSpreads(t *testing.T) {
	candidates := idleFleet(5)
	counts := make([]int, 5)
	for i := range 100 {
		d := place(t, Request{ID: fmt.Sprint("r", i), PromptTokens: 1000}, candidates)
		counts[d.Chosen]++
		claimOn(&candidates[d.Chosen], 1e6, 1000)
	}
	for _, n := range counts {
		if n < 15 || n > 25 {
			t.Errorf("spread %v of 100", counts)
		}
	}
}

// LOD-04: requests one at a time do not all go to the first in the list.
func TestLOD04TiesSpread(t *testing.T) {
	candidates := idleFleet(2)
	first := 0
	for i := range 400 {
		if place(t, Request{ID: fmt.Sprint("r", i), PromptTokens: 300}, candidates).Chosen == 0 {
			first++
		}
	}
	if first < 160 || first > 240 {
		t.Errorf("%d of 400 on one of two idle workers", first)
	}
}

// LOD-07: free KV space is an input of its own.
func TestLOD07FullPoolLoses(t *testing.T) {
	candidates := idleFleet(2)
	full, waiting := candidates[0].Worker, candidates[1].Worker
	full.HeldBlocks, full.Live, full.Decoding = 19_600, 30, 30
	waiting.HeldBlocks, waiting.Live, waiting.Waiting.F = 4000, 2, 1e6+150
	d := place(t, Request{ID: "r", PromptTokens: 16_384}, candidates)
	if d.Chosen != 1 || !(d.Terms[0].RoomMs > 0) || d.Terms[1].RoomMs != 0 {
		t.Errorf("chose %d, room %v and %v", d.Chosen, d.Terms[0].RoomMs, d.Terms[1].RoomMs)
	}
}

// LOD-13: a worker whose counters cannot be read gets no more than its share.
func TestLOD13UnknownAttractsNoHerd(t *testing.T) {
	candidates := idleFleet(10)
	for i := range candidates {
		w := candidates[i].Worker
		w.Waiting.F, w.Live, w.Decoding, w.ContextTokens = 1e6+200, 5, 5, 20_000
		if i == 3 {
			w.QueueKnown, w.Waiting.F, w.Live, w.Decoding, w.ContextTokens = false, 0, math.NaN(), math.NaN(), math.NaN()
		}
	}
	n := 0
	for i := range 400 {
		if place(t, Request{ID: fmt.Sprint("r", i), PromptTokens: 800}, candidates).Chosen == 3 {
			n++
		}
	}
	if n > 60 {
		t.Errorf("%d of 400 to the unknown one of ten", n)
	}
	d := place(t, Request{ID: "r", PromptTokens: 800}, candidates)
	if !(d.Terms[3].DoubtMs > 100) || !math.IsNaN(d.Terms[3].GapMs) || !(d.Terms[3].AssumedMs > 0) {
		t.Errorf("its terms do not show the reason: %+v", d.Terms[3])
	}
}

// HOT-01: a shared system prompt does not send everything to its first holder: at
// three times what one worker can serve it is copied where waiting costs more than
// computing it again, the reason gives both costs, and nobody waits long.
func TestHOT01HotPrefixSpreads(t *testing.T) {
	const shared, prompt, requests = 2000, 2200, 400
	candidates := idleFleet(8)
	policy := DefaultPolicy()
	steps := &candidates[0].Worker.Steps
	warmMs, recomputeMs := steps.PrefillMs(shared, prompt-shared), steps.PrefillMs(0, prompt)
	r := rand.New(rand.NewPCG(1, 1))
	used, waits, copied := map[int]bool{}, []float64(nil), 0
	for i, now := 0, 1e6; i < requests; i, now = i+1, now+r.ExpFloat64()*warmMs/3 {
		for k := range candidates {
			w := candidates[k].Worker
			w.LoadAtMs, w.View.AtMs = now-100, now-400
		}
		var d Decision
		req := Request{ID: fmt.Sprint("r", i), PromptTokens: prompt, SharedKey: 9}
		if err := Decide(&req, candidates, &policy, Situation{NowMs: now, ArrivalsPerMs: math.NaN(), MeanOutputTokens: 64}, &d); err != nil {
			t.Fatal(err)
		}
		used[d.Chosen], waits = true, append(waits, d.Terms[d.Chosen].StartMs)
		c := &candidates[d.Chosen]
		if d.Redirected() {
			copied++
			if because := d.Because(candidates); !strings.Contains(because, "whose wait (") || !strings.Contains(because, "costs more than computing 2,200 tokens (") {
				t.Errorf("the reason does not give both costs: %q", because)
			}
		}
		w := *c.Worker
		w.Waiting.Fold(&w.Steps, now, max(0, d.Terms[d.Chosen].ReuseTokens), d.Terms[d.Chosen].UncachedTokens)
		c.Worker, c.MatchedTokens, c.Predicted = &w, shared, true
	}
	slices.Sort(waits)
	if p95 := waits[len(waits)*95/100]; len(used) < 4 || copied != len(used)-1 || p95 > ownLimit(recomputeMs, &policy) {
		t.Errorf("%d of 8 workers used, copied %d times, p95 wait %.0f ms where computing takes %.0f", len(used), copied, p95, recomputeMs)
	}
}

// HOT-03: equal scores are decided the same way each time, and the holder keeps
// the prompt afterwards.
func TestHOT03RepeatsStay(t *testing.T) {
	candidates := idleFleet(6)
	req := Request{ID: "r", PromptTokens: 3000, SharedKey: 77}
	first := place(t, req, candidates).Chosen
	candidates[first].MatchedTokens = 3000
	for i := range 20 {
		req.ID = fmt.Sprint("again-", i)
		if d := place(t, req, candidates); d.Chosen != first {
			t.Fatalf("repeat %d went to %d, the first to %d", i, d.Chosen, first)
		}
	}
}

// HOT-04: a limit is a limit: the policy's answer, never a silent normal pick.
func TestHOT04AllOverLimit(t *testing.T) {
	candidates := idleFleet(3)
	for i := range candidates {
		candidates[i].Worker.Waiting.F = 1e6 + 5000
	}
	for answer, want := range map[IfInfeasible]RefusalReason{Reject: RefusedDeadline, RetryAfter: RefusedOverLimit, BestEffort: ""} {
		d := place(t, Request{ID: "r", PromptTokens: 900, FirstTokenBudgetMs: 400, IfInfeasible: answer}, candidates)
		if d.Refusal.Reason != want || (d.Chosen >= 0) != (want == "") || want == "" && d.Marks&MarkOverLimit == 0 {
			t.Errorf("%s: refusal %q, chosen %d, marks %v", answer, d.Refusal.Reason, d.Chosen, d.Marks.Words())
		}
		if want == RefusedOverLimit && !(d.Refusal.RetryAfterMs > 4000 && d.Refusal.RetryAfterMs < 5200) {
			t.Errorf("retry after %v ms", d.Refusal.RetryAfterMs)
		}
	}
}

// HOT-06: a worker without any cache joins two that are nearly busy: load
// brings it in, and it is not flooded either.
func TestHOT06NewWorkerIsBroughtIn(t *testing.T) {
	const sessions, history, turn = 40, 4000, 500
	candidates := idleFleet(3)
	holds := [3]map[int]bool{{}, {}, {}}
	for s := range sessions {
		holds[s%2][s] = true
	}
	warmMs := candidates[0].Worker.Steps.PrefillMs(history, turn)
	r := rand.New(rand.NewPCG(1, 1))
	counts := [3]int{}
	policy := DefaultPolicy()
	for now := 1e6; now < 1e6+120_000; now += r.ExpFloat64() * warmMs / (2 * .9) {
		session := r.IntN(sessions)
		for i := range candidates {
			candidates[i].MatchedTokens = 0
			if holds[i][session] {
				candidates[i].MatchedTokens = history
			}
			w := candidates[i].Worker
			w.LoadAtMs, w.View.AtMs = now-100, now-400
		}
		var d Decision
		req := Request{ID: fmt.Sprint("r", now), PromptTokens: history + turn, SharedKey: uint64(session + 1)}
		if err := Decide(&req, candidates, &policy, Situation{NowMs: now, ArrivalsPerMs: math.NaN(), MeanOutputTokens: 64}, &d); err != nil {
			t.Fatal(err)
		}
		counts[d.Chosen]++
		w := *candidates[d.Chosen].Worker
		w.Waiting.Fold(&w.Steps, now, int(d.Terms[d.Chosen].ReuseTokens), d.Terms[d.Chosen].UncachedTokens)
		candidates[d.Chosen].Worker = &w
		holds[d.Chosen][session] = true
	}
	share := float64(counts[2]) / float64(counts[0]+counts[1]+counts[2])
	if share < .15 || share > .45 {
		t.Errorf("the new worker carries %.0f%% after two minutes: %v", share*100, counts)
	}
}

// HOT-07: the explanation names the term that decided against the cache.
func TestHOT07DecidingTermIsNamed(t *testing.T) {
	candidates := idleFleet(2)
	candidates[0].MatchedTokens, candidates[0].Worker.Waiting.F = 4096, 1e6+900
	d := place(t, Request{ID: "r", PromptTokens: 4096}, candidates)
	if d.Chosen != 1 || !d.Redirected() || d.DecidingTerm() != "start" {
		t.Errorf("chose %d, redirected %v, deciding %q", d.Chosen, d.Redirected(), d.DecidingTerm())
	}
}

// WRK-05: a continuation excludes the engine life it lost, and prices what was
// generated again behind the prompt.
func TestWRK05Continuation(t *testing.T) {
	candidates := idleFleet(2)
	candidates[0].MatchedTokens = 4096
	req := Request{ID: "r", PromptTokens: 4096, GeneratedTokens: 100, ExcludeProcesses: []uint64{candidates[0].Worker.Process}}
	d := place(t, req, candidates)
	if d.Chosen != 1 || d.Terms[0].Reason != ReasonSuperseded || d.Terms[1].UncachedTokens != 4196 {
		t.Errorf("chose %d, reason %s, %d tokens to compute", d.Chosen, d.Terms[0].Reason, d.Terms[1].UncachedTokens)
	}
}

// WRK-07: an operator's will is obeyed to the last worker, a guess is not.
func TestWRK07WillAndGuess(t *testing.T) {
	candidates := idleFleet(4)
	for i := range candidates {
		candidates[i].Worker.Barred = ReasonCordoned
	}
	d := place(t, Request{ID: "r", PromptTokens: 10}, candidates)
	if got := d.RefusalDetail(candidates); d.Chosen >= 0 || !strings.HasPrefix(got, "no eligible worker: all cordoned: gpu-000/vllm-8000/0, ") {
		t.Errorf("all cordoned: chosen %d, %q", d.Chosen, got)
	}
	for i := range candidates {
		candidates[i].Worker.Barred, candidates[i].Worker.Doubted = ReasonNone, ReasonStalled
	}
	if d := place(t, Request{ID: "r", PromptTokens: 10}, candidates); d.Chosen < 0 || d.Marks&MarkLastResort == 0 {
		t.Errorf("all stalled: chosen %d, marks %v", d.Chosen, d.Marks.Words())
	}
}

// WRK-13: slow is not dead when nothing else is there.
func TestWRK13TheOnlyWorkerStarts(t *testing.T) {
	candidates := idleFleet(1)
	candidates[0].Worker.Doubted, candidates[0].Worker.DoubtedWhy = ReasonStarting, "compiling"
	candidates[0].MatchedTokens = 512
	d := place(t, Request{ID: "r", PromptTokens: 900}, candidates)
	if d.Chosen != 0 || d.Marks&MarkLastResort == 0 || d.Terms[0].ReuseTokens != 512 || !strings.Contains(d.Because(candidates), "compiling") {
		t.Errorf("chosen %d, marks %v, because %q", d.Chosen, d.Marks.Words(), d.Because(candidates))
	}
}

// TOP-03: transfer and recompute are always compared, and the point where they
// meet is given.
func TestTOP03SwitchPoint(t *testing.T) {
	const kvBytes = 131_072 // an 8B model
	candidates := idleFleet(2)
	for i := range candidates {
		candidates[i].Worker.Transfer = &Transfer{Connector: "p2p", SideChannel: "h:1", Fingerprint: "f", ExportedTier: TierGPU, BytesPerToken: kvBytes}
	}
	candidates[1].Worker.Waiting.F, candidates[1].MatchedTokens = 1e6+4000, 2000
	policy := DefaultPolicy()
	sit := Situation{NowMs: 1e6, MeanOutputTokens: 64, Sources: []Source{{Worker: candidates[1].Worker, Tokens: 2000}}}
	pull := func(bytesPerMs float64) Pull {
		candidates[0].Paths = []Path{{Link: "l", BytesPerMs: bytesPerMs, LatencyMs: .1}}
		var d Decision
		if err := Decide(&Request{ID: "r", PromptTokens: 2100}, candidates, &policy, sit, &d); err != nil {
			t.Fatal(err)
		}
		return d.Terms[0].Pull
	}
	slow, fast := pull(125_000), pull(12_500_000) // 1 and 100 Gbit/s
	if slow.Note != PullDearer || fast.Note != PullTaken {
		t.Fatalf("at 1 Gbit/s %q, at 100 %q", slow.Note, fast.Note)
	}
	at := slow.PaysFromBytesPerMs
	if below, above := pull(at*.999), pull(at*1.001); below.Note != PullDearer || above.Note != PullTaken {
		t.Errorf("switch point %v: below %q, above %q", at, below.Note, above.Note)
	}
}

// TOP-06: the price of a transfer is the pair's own: a path measured at half
// the speed costs more, and with equal rest the faster one is chosen.
func TestTOP06SlowPairCostsMore(t *testing.T) {
	candidates := idleFleet(3)
	for i := range candidates {
		candidates[i].Worker.Transfer = &Transfer{Connector: "p2p", SideChannel: "h:1", Fingerprint: "f", ExportedTier: TierGPU, BytesPerToken: 262_144}
	}
	holder := candidates[0].Worker
	holder.Waiting.F, candidates[0].MatchedTokens = 1e6+4000, 8000
	policy := DefaultPolicy()
	sit := Situation{NowMs: 1e6, MeanOutputTokens: 64, Sources: []Source{{Worker: holder, Tokens: 8000}}}
	var rates LinkRates
	path := func(to *Worker) Path {
		return rates.Measured(1e6, Pair{holder.Name, to.Name}, Path{Link: "nvlink", BytesPerMs: 24e6, LatencyMs: .1, Figure: FigureDeclared})
	}
	for _, slow := range []int{1, 2} {
		rates = LinkRates{}
		for range MeasuredTransfers {
			for i, bytesPerMs := range map[int]float64{slow: 12e6, 3 - slow: 24e6} {
				rates.Note(1e6, "nvlink", Pair{holder.Name, candidates[i].Worker.Name}, bytesPerMs*80, 80, 0)
			}
		}
		candidates[1].Paths, candidates[2].Paths = []Path{path(candidates[1].Worker)}, []Path{path(candidates[2].Worker)}
		var d Decision
		if err := Decide(&Request{ID: "r", PromptTokens: 8100}, candidates, &policy, sit, &d); err != nil {
			t.Fatal(err)
		}
		fast := 3 - slow
		if d.Chosen != fast || !(d.Terms[slow].PullMs > d.Terms[fast].PullMs) {
			t.Errorf("chose %d, pulls cost %v and %v ms; %d has the slow path", d.Chosen, d.Terms[1].PullMs, d.Terms[2].PullMs, slow)
		}
	}
}

// TRU-03: credit shrinks with the age of a view and is gone once the view is as
// old as blocks live in the cache; a worker without contact for longer than the
// bound is no free choice, and the reason is told.
func TestTRU03CreditEndsWithoutContact(t *testing.T) {
	policy := DefaultPolicy()
	last := 2.
	for _, ageMs := range []float64{0, 30_000, 60_000, policy.UnknownEvictionAgeMs, 3_600_000} {
		candidates := idleFleet(2)
		w := candidates[0].Worker
		w.View.AtMs, w.View.EvictionAgeMs = 1e6-ageMs, math.NaN()
		candidates[0].MatchedTokens = 8000
		d := place(t, Request{ID: "r", PromptTokens: 8192}, candidates)
		got := d.Terms[0].StillThere
		if got >= last {
			t.Errorf("at %v ms the blocks are there with %v, before with %v", ageMs, got, last)
		}
		if ageMs < policy.UnknownEvictionAgeMs && d.Chosen != 0 {
			t.Errorf("at %v ms the holder is not chosen", ageMs)
		}
		if ageMs >= policy.UnknownEvictionAgeMs {
			if got != 0 {
				t.Errorf("at %v ms credit is left: %v", ageMs, got)
			}
			// What it would save stands under doubt, all of it.
			if held, cold := &d.Terms[0], &d.Terms[1]; held.OwnMs < cold.OwnMs-1 {
				t.Errorf("at %v ms the holder costs %.1f ms, one that holds nothing %.1f", ageMs, held.OwnMs, cold.OwnMs)
			}
			break
		}
		last = got
	}
	candidates := idleFleet(2)
	w := candidates[0].Worker
	w.AwaySinceMs = 1e6 - policy.AwayBoundMs - 1
	candidates[0].MatchedTokens = 8000
	d := place(t, Request{ID: "r", PromptTokens: 8192}, candidates)
	if d.Chosen != 1 || d.Terms[0].Reason != ReasonAway {
		t.Errorf("chosen %d, the one without contact is %v", d.Chosen, d.Terms[0].Reason)
	}
}

// TOK-03: that nothing of a prompt shorter than a block can be reused is said, and
// is nobody's fault.
func TestTOK03ShorterThanABlock(t *testing.T) {
	for tokens, want := range map[int]bool{1: true, 15: true, 16: true, 17: false, 4000: false} {
		candidates := idleFleet(2)
		for i := range candidates {
			candidates[i].Worker.BlockTokens = 16
			candidates[i].MatchedTokens = tokens
		}
		for _, estimated := range []bool{false, true} {
			d := place(t, Request{ID: "r", PromptTokens: tokens, LengthEstimated: estimated}, candidates)
			if got := slices.Contains(d.Marks.Words(), "shorter_than_block"); got != (want && !estimated) {
				t.Errorf("%d tokens, estimated %v: marks %v", tokens, estimated, d.Marks.Words())
			}
			if reuse := d.Terms[d.Chosen].ReuseTokens; want && reuse != 0 {
				t.Errorf("%d tokens: %d of them are expected to be reused", tokens, reuse)
			}
		}
	}
}

// IDN-01: workers are compared in tokens: 8 blocks of 16 are less than 4 of 64,
// whichever is listed first.
func TestIDN01MoreTokensInFewerBlocksWin(t *testing.T) {
	for _, first := range []int{0, 1} {
		candidates := idleFleet(2)
		small, large := &candidates[first], &candidates[1-first]
		small.Worker.BlockTokens, small.MatchedTokens = 16, 8*16
		large.Worker.BlockTokens, large.MatchedTokens = 64, 4*64
		d := place(t, Request{ID: "r", PromptTokens: 2000}, candidates)
		if d.Chosen != 1-first || d.Terms[first].ReuseTokens != 128 || d.Terms[1-first].ReuseTokens != 256 {
			t.Errorf("worker %d is chosen, reuse %d and %d", d.Chosen, d.Terms[0].ReuseTokens, d.Terms[1].ReuseTokens)
		}
	}
}
