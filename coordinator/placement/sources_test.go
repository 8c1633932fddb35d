package placement

import (
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"
)

// drawBesideSources draws a worker that may pull from one or two others, every
// way of which is open, and the match it has of the prompt.
func drawBesideSources(t *rapid.T) (req Request, candidates []Candidate, sit Situation) {
	now := 5e5
	req = Request{ID: "r1", PromptTokens: rapid.SampledFrom([]int{700, 8192, 60_000}).Draw(t, "prompt"), OutputTokensExpected: 64}
	sit = Situation{NowMs: now, PolicyAgeMs: 50, MeanOutputTokens: 200, ArrivalsPerMs: rapid.SampledFrom([]float64{math.NaN(), 0, .002}).Draw(t, "lambda")}
	trust := rapid.Float64Range(0, 1)
	perToken := rapid.SampledFrom([]float64{1000, 70_000, 262_144}).Draw(t, "kv")
	for i := range rapid.IntRange(2, 3).Draw(t, "workers") {
		w := testWorker(i, fmt.Sprintf("gpu-%02d/vllm-8000/0", i), now)
		w.View.Trust = trust.Draw(t, "trust")
		if w.Live = float64(rapid.IntRange(0, 60).Draw(t, "live")); rapid.IntRange(0, 3).Draw(t, "live unknown") == 0 {
			w.Live = math.NaN()
		}
		w.Transfer = &Transfer{Connector: "nixl", SideChannel: "h:1", Fingerprint: "a", ExportedTier: TierGPU, BytesPerToken: perToken}
		w.Host = rapid.SampledFrom([]*HostTier{nil, {BytesPerToken: perToken, BytesPerMs: 18e6}, {BytesPerToken: perToken, BytesPerMs: 1e6}}).Draw(t, "host")
		matched := rapid.IntRange(0, req.PromptTokens).Draw(t, "matched")
		candidates = append(candidates, Candidate{Worker: &w, MatchedTokens: matched})
		if i > 0 {
			sit.Sources = append(sit.Sources, Source{Worker: &w, Tokens: matched})
		}
	}
	candidates[0].LowerTokens = rapid.IntRange(0, candidates[0].MatchedTokens).Draw(t, "lower")
	for range sit.Sources {
		candidates[0].Paths = append(candidates[0].Paths, Path{BytesPerMs: rapid.SampledFrom([]float64{1e6, 12e6, 100e6}).Draw(t, "bandwidth"), LatencyMs: .1})
	}
	return req, candidates, sit
}

// strictPolicy takes no two sources for equal: within the tie the hash decides
// between them.
func strictPolicy() Policy {
	policy := DefaultPolicy()
	policy.TieMs = 0
	return policy
}

// A source never costs, and more reuse never makes a worker dearer beside one, block by block, however
// little of its own or of the source's is believed, be it in GPU memory or to be
// read back.
func TestMoreReuseNeverCostsBesideASource(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		req, candidates, sit := drawBesideSources(t)
		policy := strictPolicy()
		c := &candidates[0]
		price := func() Terms {
			var d Decision
			if err := Decide(&req, candidates, &policy, sit, &d); err != nil {
				t.Fatal(err)
			}
			return d.Terms[0]
		}
		before, was, lower := price(), c.MatchedTokens, c.LowerTokens
		sources := sit.Sources
		sit.Sources = nil
		if without := price(); before.TotalMs > without.TotalMs*(1+1e-12) {
			t.Fatalf("total %v with sources, %v without", before.TotalMs, without.TotalMs)
		}
		sit.Sources = sources
		for range 8 {
			switch rapid.IntRange(0, 2).Draw(t, "change") {
			case 0:
				c.MatchedTokens += rapid.IntRange(0, max(req.PromptTokens-c.MatchedTokens, 0)).Draw(t, "more")
			case 1:
				c.LowerTokens -= rapid.IntRange(0, c.LowerTokens).Draw(t, "read")
			default:
				more := rapid.IntRange(0, max(req.PromptTokens-c.MatchedTokens, 0)).Draw(t, "more in host memory")
				c.MatchedTokens, c.LowerTokens = c.MatchedTokens+more, c.LowerTokens+more
			}
			after := price()
			if after.TotalMs > before.TotalMs*(1+1e-12) {
				t.Fatalf("%d tokens held, %d in host memory: total %v (%s); with %d, %d: %v (%s)", was, lower, before.TotalMs, before.Pull.Note,
					c.MatchedTokens, c.LowerTokens, after.TotalMs, after.Pull.Note)
			}
			before, was, lower = after, c.MatchedTokens, c.LowerTokens
		}
	})
}

// A worker that is believed more is never dearer, and neither is one whose source
// is. Left out is host memory, which may take longer to read than what of it is gone
// takes to move.
func TestBeliefNeverCosts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		req, candidates, sit := drawBesideSources(t)
		policy := strictPolicy()
		candidates[0].LowerTokens = 0
		var before, after Decision
		if err := Decide(&req, candidates, &policy, sit, &before); err != nil {
			t.Fatal(err)
		}
		w := candidates[rapid.IntRange(0, len(candidates)-1).Draw(t, "whose")].Worker
		w.View.Trust = rapid.Float64Range(w.View.Trust, 1).Draw(t, "more trust")
		if err := Decide(&req, candidates, &policy, sit, &after); err != nil {
			t.Fatal(err)
		}
		if was, is := before.Terms[0].TotalMs, after.Terms[0].TotalMs; is > was*(1+1e-12) {
			t.Fatalf("%s believed more: total %v → %v", w.Name, was, is)
		}
	})
}
