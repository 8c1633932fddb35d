package placement

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
)

func place(t testing.TB, req Request, candidates []Candidate) *Decision {
	t.Helper()
	return placeUnder(t, DefaultPolicy(), req, candidates)
}

func placeUnder(t testing.TB, policy Policy, req Request, candidates []Candidate) *Decision {
	t.Helper()
	sit := Situation{NowMs: 1e6, ArrivalsPerMs: math.NaN(), MeanOutputTokens: 64, PolicyAgeMs: 10}
	var d Decision
	if err := Decide(&req, candidates, &policy, sit, &d); err != nil {
		t.Fatal(err)
	}
	return &d
}

func idleFleet(n int) []Candidate {
	candidates := make([]Candidate, n)
	for i := range candidates {
		w := testWorker(i, fmt.Sprintf("gpu-%03d/vllm-8000/0", i), 1e6)
		candidates[i].Worker = &w
	}
	return candidates
}

// Ties are broken by spread: idle equal workers share requests that have
// nothing in common, each request going to one place from everywhere.
func TestTiesSpread(t *testing.T) {
	candidates := idleFleet(4)
	counts := make([]int, 4)
	for i := range 400 {
		d := place(t, Request{ID: fmt.Sprint("req-", i), PromptTokens: 900}, candidates)
		counts[d.Chosen]++
	}
	for i, n := range counts {
		if n < 60 || n > 140 {
			t.Errorf("worker %d got %d of 400: %v", i, n, counts)
		}
	}
}

// Among equally loaded workers the holder of the prefix is always taken.
func TestCacheDecidesAmongEquals(t *testing.T) {
	candidates := idleFleet(4)
	candidates[2].MatchedTokens = 896
	for i := range 100 {
		if d := place(t, Request{ID: fmt.Sprint("req-", i), PromptTokens: 1000}, candidates); d.Chosen != 2 {
			t.Fatalf("request %d went to %d", i, d.Chosen)
		}
	}
}

// When a worker goes, only its own requests move.
func TestLosingAWorkerMovesOnlyItsRequests(t *testing.T) {
	candidates := idleFleet(3)
	moved, lost := 0, 0
	for i := range 90 {
		req := Request{ID: fmt.Sprint("session-", i), PromptTokens: 900}
		before := candidates[place(t, req, candidates).Chosen].Name
		after := candidates[1:][place(t, req, candidates[1:]).Chosen].Name
		switch {
		case before == candidates[0].Name:
			lost++
		case before != after:
			moved++
		}
	}
	if moved != 0 || lost < 15 {
		t.Errorf("%d of the other sessions moved, %d were on the lost worker", moved, lost)
	}
}

// The second-best holder is preferred to giving the cache up.
func TestNextBestHolder(t *testing.T) {
	candidates := idleFleet(3)
	candidates[0].MatchedTokens, candidates[1].MatchedTokens = 8192, 8192
	candidates[0].Worker.Waiting.F = 1e6 + 900
	candidates[1].Worker.Waiting.F = 1e6 + 150
	if d := place(t, Request{ID: "r", PromptTokens: 8192}, candidates); d.Chosen != 1 {
		t.Errorf("chose %d, want the half loaded holder", d.Chosen)
	}
}

func TestDecideNamesBadFields(t *testing.T) {
	good := Request{ID: "r", PromptTokens: 10}
	for field, change := range map[string]func(*Request){
		"requestId":            func(r *Request) { r.ID = strings.Repeat("x", 257) },
		"input":                func(r *Request) { r.PromptTokens = MaxPromptTokens + 1 },
		"outputTokensMax":      func(r *Request) { r.OutputTokensMax = -1 },
		"outputTokensExpected": func(r *Request) { r.OutputTokensExpected = math.NaN() },
		"generatedTokens":      func(r *Request) { r.GeneratedTokens = -1 },
		"deadlineMs":           func(r *Request) { r.DeadlineMs = math.Inf(1) },
		"firstTokenBudgetMs":   func(r *Request) { r.FirstTokenBudgetMs = -1 },
		"gapBudgetMs":          func(r *Request) { r.GapBudgetMs = math.NaN() },
		"ifInfeasible":         func(r *Request) { r.IfInfeasible = "no" },
		"exclude":              func(r *Request) { r.ExcludeWorkers = make([]string, 1025) },
	} {
		req, policy := good, DefaultPolicy()
		change(&req)
		err := Decide(&req, nil, &policy, Situation{}, new(Decision))
		var bad *FieldError
		if !errors.Is(err, ErrRequest) || !errors.As(err, &bad) || bad.Field != field {
			t.Errorf("%s: error %v", field, err)
		}
	}
	for field, change := range map[string]func(*Policy){
		"policy.theta":             func(p *Policy) { p.Theta = -1 },
		"policy.tieMs":             func(p *Policy) { p.TieMs = math.NaN() },
		"policy.priorOutputTokens": func(p *Policy) { p.PriorOutputTokens = 0 },
		"policy.ifInfeasible":      func(p *Policy) { p.IfInfeasible = "" },
	} {
		policy := DefaultPolicy()
		change(&policy)
		err := Decide(&good, nil, &policy, Situation{}, new(Decision))
		var bad *FieldError
		if !errors.Is(err, ErrPolicy) || !errors.As(err, &bad) || bad.Field != field {
			t.Errorf("%s: error %v", field, err)
		}
	}
	policy := DefaultPolicy()
	if err := Decide(&good, make([]Candidate, 2), &policy, Situation{}, new(Decision)); err == nil || !strings.Contains(err.Error(), "candidates[0]") {
		t.Errorf("a candidate without worker: %v", err)
	}
	if _, err := ThetaOf("fast"); !errors.Is(err, ErrPolicy) {
		t.Errorf("unknown objective: %v", err)
	}
}

func TestExpectedOutput(t *testing.T) {
	candidates := idleFleet(1)
	for _, test := range []struct {
		req       Request
		learnt    float64 // mean answer of the pool
		want      float64
		source    OutputSource
		estimated bool
	}{
		{Request{PromptTokens: 10}, 64, 64, OutputMean, false},
		{Request{PromptTokens: 10, OutputTokensMax: 64}, 64, 64, OutputMean, false},
		{Request{PromptTokens: 10, OutputTokensMax: 63}, 64, 63, OutputLimit, false},
		{Request{PromptTokens: 10, OutputTokensExpected: 300}, 64, 300, OutputRequest, false},
		{Request{PromptTokens: 10, OutputTokensExpected: 300, OutputTokensMax: 100}, 64, 100, OutputLimit, false},
		{Request{PromptTokens: 10, OutputTokensExpected: 300, GeneratedTokens: 120}, 64, 180, OutputRequest, false},
		{Request{PromptTokens: 10, GeneratedTokens: 120}, 64, 1, OutputMean, false},
		{Request{PromptTokens: 10, LengthEstimated: true}, 64, 64, OutputMean, true},
		{Request{PromptTokens: 10}, math.NaN(), DefaultPolicy().PriorOutputTokens, OutputPrior, true},
		{Request{PromptTokens: 10, OutputTokensMax: 5}, math.NaN(), 5, OutputLimit, true},
		{Request{PromptTokens: 10, OutputTokensExpected: 9}, math.NaN(), 9, OutputRequest, false},
	} {
		policy, d := DefaultPolicy(), &Decision{}
		sit := Situation{NowMs: 1e6, ArrivalsPerMs: math.NaN(), MeanOutputTokens: test.learnt, PolicyAgeMs: 1}
		if err := Decide(&test.req, candidates, &policy, sit, d); err != nil {
			t.Fatal(err)
		}
		r := NewRecord(&test.req, candidates, &policy, sit, d, 64)
		if d.OutputTokens != test.want || r.OutputSource() != test.source || (d.Marks&MarkEstimatedLength != 0) != test.estimated {
			t.Errorf("%+v, mean %v: %v tokens by %s, marks %v", test.req, test.learnt, d.OutputTokens, r.OutputSource(), d.Marks.Words())
		}
	}
}

// A worker whose total could win is passed over for its own time or a budget
// only, and the words say which.
func TestPassedOver(t *testing.T) {
	policy := DefaultPolicy()
	policy.Theta = 400
	candidates := idleFleet(3)
	busy := candidates[0].Worker
	busy.Live, busy.Decoding, busy.ContextTokens, candidates[0].MatchedTokens = 60, 60, 120_000, 16_384
	sit := Situation{NowMs: 1e6, ArrivalsPerMs: math.NaN(), MeanOutputTokens: 64, PolicyAgeMs: 1}
	decide := func(req Request) (d Decision) {
		t.Helper()
		if err := Decide(&req, candidates, &policy, sit, &d); err != nil {
			t.Fatal(err)
		}
		return d
	}
	d := decide(Request{ID: "r", PromptTokens: 16_384})
	limit := ownLimit(d.Terms[0].OwnMs, &policy)
	if want := fmt.Sprintf("own time over limit %.0f (best + 50%% + 200 ms)", limit); d.Chosen != 0 || !(d.Terms[1].TotalMs < d.Terms[0].TotalMs) || d.PassedOver(1, &policy) != want {
		t.Errorf("chose %d, passed over: %q, want %q", d.Chosen, d.PassedOver(1, &policy), want)
	}
	if got := d.PassedOver(0, &policy); got != "" {
		t.Errorf("the chosen was passed over: %q", got)
	}
	d = decide(Request{ID: "r", PromptTokens: 16_384, FirstTokenBudgetMs: 300})
	if got := d.PassedOver(2, &policy); got != "misses the first-token budget" {
		t.Errorf("over a budget: %q", got)
	}
	candidates[1].Worker.Barred = ReasonCordoned
	if d = decide(Request{ID: "r", PromptTokens: 16_384}); d.PassedOver(1, &policy) != "" {
		t.Errorf("a cordoned worker: %q", d.PassedOver(1, &policy))
	}
	candidates[0].Worker.Barred, candidates[2].Worker.Barred = ReasonCordoned, ReasonCordoned
	if d = decide(Request{ID: "r", PromptTokens: 16_384}); d.Chosen >= 0 || d.PassedOver(0, &policy) != "" {
		t.Errorf("nobody was chosen: %q", d.PassedOver(0, &policy))
	}
}

func TestDecisionIsReusable(t *testing.T) {
	policy := DefaultPolicy()
	sit := Situation{NowMs: 1e6, MeanOutputTokens: 64}
	req := Request{ID: "r", PromptTokens: 1000}
	var d Decision
	for _, n := range []int{5, 1, 0, 3} {
		candidates := idleFleet(n)
		if err := Decide(&req, candidates, &policy, sit, &d); err != nil {
			t.Fatal(err)
		}
		if len(d.Terms) != n || (d.Chosen >= 0) != (n > 0) || d.Survey.Candidates != n {
			t.Errorf("%d candidates: %d terms, chosen %d", n, len(d.Terms), d.Chosen)
		}
	}
}

// A shortened record keeps the smallest allowed total even when it neither
// won nor is a fallback: without it the tie would reach further.
func TestRecordKeepsTheLeastTotal(t *testing.T) {
	candidates := idleFleet(7)
	policy := DefaultPolicy()
	policy.TieMs = 1
	req := Request{ID: "r", PromptTokens: 1000, FirstTokenBudgetMs: 500}
	for i := range 3 { // cheapest in total, but over the budget
		candidates[i].Worker.Waiting.F = 1e6 + 600
	}
	for i := 3; i < 7; i++ {
		candidates[i].Worker.Live = 170
	}
	candidates[4].MatchedTokens, candidates[5].MatchedTokens = 16, 32
	candidates[6].DistanceMs = 50
	d := placeUnder(t, policy, req, candidates)
	least := d.Terms[3].TotalMs
	candidates[4].DistanceMs = least + .9 - d.Terms[4].TotalMs
	candidates[5].DistanceMs = least + 1.5 - d.Terms[5].TotalMs
	d = placeUnder(t, policy, req, candidates)
	if d.Chosen != 4 || d.MostReuse != 5 || d.Fallbacks()[2] != 2 {
		t.Fatalf("chose %d, most reuse on %d, fallbacks %v: not the case under test", d.Chosen, d.MostReuse, d.Fallbacks())
	}
	sit := Situation{NowMs: 1e6, ArrivalsPerMs: math.NaN(), MeanOutputTokens: 64, PolicyAgeMs: 10}
	record := NewRecord(&req, candidates, &policy, sit, d, 1)
	var again Decision
	if err := record.Redecide(&again); err != nil {
		t.Fatal(err)
	}
	if got := record.Candidates[again.Chosen].Name; got != candidates[4].Name {
		t.Errorf("decided again for %s, first for %s", got, candidates[4].Name)
	}
}

func benchmarkDecide(b *testing.B, n int) {
	candidates := idleFleet(n)
	for i := range candidates {
		w := candidates[i].Worker
		w.Waiting.F = 1e6 + float64(i*37%900)
		w.Live = float64(i % 40)
		candidates[i].MatchedTokens = i * 97 % 4096
	}
	req := Request{ID: "bench", PromptTokens: 8192, OutputTokensExpected: 200}
	policy := DefaultPolicy()
	sit := Situation{NowMs: 1e6, ArrivalsPerMs: .002, MeanOutputTokens: 200, PolicyAgeMs: 10}
	var d Decision
	b.ReportAllocs()
	for b.Loop() {
		if err := Decide(&req, candidates, &policy, sit, &d); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecide100(b *testing.B)  { benchmarkDecide(b, 100) }
func BenchmarkDecide1000(b *testing.B) { benchmarkDecide(b, 1000) }
func BenchmarkBecause(b *testing.B) {
	candidates := idleFleet(100)
	candidates[3].MatchedTokens = 512
	d := place(b, Request{ID: "r", PromptTokens: 8192}, candidates)
	b.ReportAllocs()
	for b.Loop() {
		d.Because(candidates)
	}
}
