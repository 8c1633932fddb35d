package placement

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"waypost/gossip/ledger"
)

// pairWorld is a pool of prefill and decode workers and the ways between them.
func pairWorld(r *rand.Rand, n int) (Request, []Candidate, Policy, Situation, func(from, to *Worker) Path) {
	policy := DefaultPolicy()
	policy.Theta = []float64{0, 5, 20}[r.IntN(3)]
	sit := Situation{NowMs: worldNowMs, ArrivalsPerMs: .002, MeanOutputTokens: 200, PolicyAgeMs: 50}
	req := Request{ID: fmt.Sprint("r", r.IntN(100)), PromptTokens: []int{100, 8192, 30_000}[r.IntN(3)]}
	var candidates []Candidate
	for i := range n {
		w := testWorker(i, fmt.Sprintf("gpu-%02d/vllm-8000/0", i), worldNowMs)
		w.Role = []Role{RolePrefill, RoleDecode}[i%2]
		w.Decoding, w.ContextTokens = float64(r.IntN(80)), float64(r.IntN(200_000))
		w.Live, w.HeldBlocks = w.Decoding, float64(r.IntN(20_500))
		m := w.Steps.Model()
		w.Steps = ledger.NewSteps(m, 8192, m.DecodeMs(w.Decoding, w.ContextTokens, 320_000))
		w.Waiting = ledger.AtLoad(&w.Steps, worldNowMs-50, float64(r.IntN(4))*100, 0)
		w.Transfer = &Transfer{Connector: "nixl", SideChannel: "10.0.0.1:5600", Fingerprint: []string{"a", "a", "a", "b"}[r.IntN(4)], ExportedTier: TierGPU, BytesPerToken: 262_144}
		if r.IntN(8) == 0 {
			w.Doubted = ReasonStalled
		}
		c := Candidate{Worker: &w, DistanceMs: float64(r.IntN(20))}
		if r.IntN(3) == 0 {
			c.MatchedTokens = r.IntN(req.PromptTokens)
		}
		candidates = append(candidates, c)
	}
	seed := r.Uint64()
	path := func(from, to *Worker) Path {
		x := rendezvous(seed, uint64(from.ID)<<32|uint64(to.ID))
		return Path{Link: "l", BytesPerMs: []float64{1.25e6, 12.5e6, 50e6}[x%3], LatencyMs: float64(x >> 8 % 4), Never: x>>16%9 == 0, Off: x>>24%6 == 0}
	}
	return req, candidates, policy, sit, path
}

// The pair is chosen jointly: no prefill and decode worker together are
// cheaper than those that were chosen.
func TestPairIsJoint(t *testing.T) {
	pairs := 0
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 3))
		req, candidates, policy, sit, path := pairWorld(r, rapid.IntRange(2, 24).Draw(t, "workers"))
		policy.TieMs, policy.OwnLimitMs = 0, 1e9
		PairUp(&req, candidates, &policy, sit, path)
		var d Decision
		if err := Decide(&req, candidates, &policy, sit, &d); err != nil {
			t.Fatal(err)
		}
		if d.Chosen < 0 || d.Marks&MarkLastResort != 0 {
			return
		}
		chosen := &d.Terms[d.Chosen]
		if chosen.Partner < 0 || candidates[d.Chosen].Role != RolePrefill {
			t.Fatalf("chose %s alone", candidates[d.Chosen].Name)
		}
		pairs++
		least := math.Inf(1)
		for i := range candidates {
			for j := range candidates {
				from, to := &candidates[i], &candidates[j]
				if from.Role != RolePrefill || to.Role != RoleDecode || to.Doubted != ReasonNone {
					continue
				}
				one := append([]Candidate(nil), candidates...)
				one[i].Partners = []Partner{{
					Worker: to.Worker, MatchedTokens: to.MatchedTokens, Predicted: to.Predicted,
					DistanceMs: to.DistanceMs, SurchargeMs: to.SurchargeMs, Path: path(from.Worker, to.Worker),
				}}
				var e Decision
				if err := Decide(&req, one, &policy, sit, &e); err != nil {
					t.Fatal(err)
				}
				if e.Terms[i].Placeable && e.Terms[i].Partner >= 0 {
					least = min(least, e.Terms[i].TotalMs)
				}
			}
		}
		if math.Abs(chosen.TotalMs-least) > 1e-9*least {
			t.Fatalf("chose a pair of %v ms, there is one of %v ms", chosen.TotalMs, least)
		}
		own := chosen.StartMs + chosen.reachMs() + positive(chosen.RoomMs) + chosen.DoubtMs + chosen.DistanceMs + chosen.HandMs
		if math.Abs(own-chosen.OwnMs) > 1e-9*own || !(chosen.HandMs > 0) || chosen.StallMs != 0 {
			t.Fatalf("own %v of %v, hand-over %v, stall %v", chosen.OwnMs, own, chosen.HandMs, chosen.StallMs)
		}
		record := NewRecord(&req, candidates, &policy, sit, &d, 3)
		var again Decision
		if err := record.Redecide(&again); err != nil {
			t.Fatal(err)
		}
		if a, b := &record.Candidates[again.Chosen], &candidates[d.Chosen]; a.Name != b.Name ||
			a.Partners[again.Terms[again.Chosen].Partner].Worker.Name != b.Partners[chosen.Partner].Worker.Name {
			t.Fatalf("the record decides for %s", a.Name)
		}
	})
	if pairs == 0 {
		t.Error("no pair was ever chosen")
	}
}

// A prefix held by a prefill worker makes nobody prefer a decode worker for
// its cache: decode is chosen by load, prefill by cache.
func TestPrefixCreditStaysWithItsRole(t *testing.T) {
	candidates := idleFleet(4)
	for i := range candidates {
		candidates[i].Role = []Role{RolePrefill, RoleDecode}[i%2]
		candidates[i].Transfer = &Transfer{Connector: "nixl", SideChannel: "h:1", Fingerprint: "f", ExportedTier: TierGPU, BytesPerToken: 70_000}
	}
	candidates[2].MatchedTokens = 4096
	busy := candidates[1].Worker
	busy.Decoding, busy.ContextTokens = 60, 200_000
	req := Request{ID: "r", PromptTokens: 4200}
	policy := DefaultPolicy()
	sit := Situation{NowMs: 1e6, ArrivalsPerMs: math.NaN(), MeanOutputTokens: 64, PolicyAgeMs: 10}
	PairUp(&req, candidates, &policy, sit, func(_, _ *Worker) Path { return Path{Link: "rack", BytesPerMs: 12.5e6} })
	d := place(t, req, candidates)
	if d.Chosen != 2 || candidates[2].Partners[d.Terms[2].Partner].Worker != candidates[3].Worker {
		t.Errorf("chose %d with partner %d, want the holder and the idle decode worker", d.Chosen, d.Terms[2].Partner)
	}
}

// A large pool with roles is priced whole, pairs and all.
func TestBoardPairsUp(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	req, candidates, policy, sit, path := pairWorld(r, 200)
	var board Board
	q := Query{Way: path}
	for i := range candidates {
		board.Set(candidates[i].Worker)
		q.Ways = append(q.Ways, Way{RoundTripMs: candidates[i].DistanceMs})
		q.Matches.Add(candidates[i].ID, Held{Tokens: int32(candidates[i].MatchedTokens)})
	}
	var a, b Decision
	got, err := board.Decide(&req, &policy, sit, &q, nil, &a)
	if err != nil {
		t.Fatal(err)
	}
	PairUp(&req, candidates, &policy, sit, path)
	if err := Decide(&req, candidates, &policy, sit, &b); err != nil {
		t.Fatal(err)
	}
	if a.Chosen < 0 || got[a.Chosen].Name != candidates[b.Chosen].Name || a.Terms[a.Chosen].Partner < 0 || a.FirstTokenMs != b.FirstTokenMs {
		t.Errorf("board %v, candidates %v", a.Chosen, b.Chosen)
	}
}

// Equal holders of a popular prefix share the sending, whatever their number.
func TestSourcesSpread(t *testing.T) {
	const holders, requests = 9, 900
	var board Board
	var matches Matches
	for i := range holders + 1 {
		w := testWorker(i, fmt.Sprintf("gpu-%02d/vllm-8000/0", i), 1e6)
		w.Transfer = &Transfer{Connector: "nixl", SideChannel: "h:1", Fingerprint: "f", ExportedTier: TierGPU, BytesPerToken: 70_000}
		if i > 0 {
			w.Waiting.F = 1e6 + 5000
			matches.Add(w.ID, Held{Tokens: 8192, GPUTokens: 8192})
		}
		board.Set(&w)
	}
	policy := DefaultPolicy()
	q := Query{Matches: matches, Paths: func(_ *Worker, dst []Path) []Path {
		for range MaxSources {
			dst = append(dst, Path{Link: "rack", BytesPerMs: 12.5e6})
		}
		return dst
	}}
	counts := make([]int, holders+1)
	for i := range requests {
		req := Request{ID: fmt.Sprint("req-", i), PromptTokens: 8192}
		sit := Situation{NowMs: 1e6, MeanOutputTokens: 64}
		sit.Sources = board.AppendSources(nil, &req, &matches, func(*Worker) int { return 0 })
		var d Decision
		candidates, err := board.Decide(&req, &policy, sit, &q, nil, &d)
		if err != nil {
			t.Fatal(err)
		}
		pull := &d.Terms[d.Chosen].Pull
		if candidates[d.Chosen].ID != 0 || pull.Note != PullTaken {
			t.Fatalf("request %d went to %s, %s", i, candidates[d.Chosen].Name, pull.Note)
		}
		counts[sit.Sources[pull.Source].ID]++
	}
	for id := 1; id <= holders; id++ {
		if n := counts[id]; n < requests/holders/2 || n > requests/holders*2 {
			t.Errorf("sources %v", counts[1:])
		}
	}
	// Whoever sends already comes after those that do not.
	sending := map[WorkerID]int{3: 1, 5: 2}
	req := Request{ID: "r", PromptTokens: 8192}
	for _, s := range board.AppendSources(nil, &req, &matches, func(w *Worker) int { return sending[w.ID] }) {
		if sending[s.ID] > 0 {
			t.Errorf("%s sends %d already and was preferred", s.Name, s.Sending)
		}
	}
	var deeper Matches
	deeper.Add(5, Held{Tokens: 8192, GPUTokens: 8100})
	s := board.AppendSources(nil, &req, &deeper, func(*Worker) int { return 0 })
	if len(s) != 1 || s[0].Tokens != 8100 {
		t.Fatalf("sources %+v", s)
	}
	// Who is taken out gets no new work, sending included.
	cordoned := *s[0].Worker
	cordoned.Barred = ReasonCordoned
	board.Set(&cordoned)
	if s := board.AppendSources(nil, &req, &deeper, func(*Worker) int { return 0 }); len(s) != 0 {
		t.Errorf("a cordoned worker is to send: %+v", s)
	}
}
