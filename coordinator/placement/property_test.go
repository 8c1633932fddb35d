package placement

import (
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"

	"waypost/gossip/ledger"
)

// drawFleet draws a request, candidates and a situation. With unknowns, any
// fact of a worker may be missing.
func drawFleet(t *rapid.T, unknowns bool) (Request, []Candidate, Policy, Situation) {
	now := 5e5
	maybe := func(name string, v float64) float64 {
		if unknowns && rapid.IntRange(0, 4).Draw(t, name+" unknown") == 0 {
			return math.NaN()
		}
		return v
	}
	req := Request{
		ID:                   fmt.Sprintf("r%d", rapid.IntRange(0, 1000).Draw(t, "id")),
		PromptTokens:         rapid.SampledFrom([]int{1, 16, 17, 700, 8192, 60_000}).Draw(t, "prompt"),
		OutputTokensExpected: rapid.SampledFrom([]float64{0, 1, 64, 2000}).Draw(t, "output"),
		FirstTokenBudgetMs:   rapid.SampledFrom([]float64{0, 0, 0, 400}).Draw(t, "budget"),
		DeadlineMs:           rapid.SampledFrom([]float64{0, 0, 0, 3000}).Draw(t, "deadline"),
		IfInfeasible:         rapid.SampledFrom([]IfInfeasible{"", "", Reject, RetryAfter}).Draw(t, "infeasible"),
		TenantOver:           rapid.SampledFrom([]string{"", "", "", "over"}).Draw(t, "tenant"),
	}
	policy := DefaultPolicy()
	policy.Theta = rapid.SampledFrom([]float64{0, 1, 5, 20}).Draw(t, "theta")
	sit := Situation{
		NowMs: now, PolicyAgeMs: 50,
		ArrivalsPerMs:    maybe("lambda", rapid.Float64Range(0, .01).Draw(t, "lambda")),
		MeanOutputTokens: maybe("mean", 200),
	}
	var candidates []Candidate
	for i := range rapid.IntRange(1, 9).Draw(t, "workers") {
		w := testWorker(i, fmt.Sprintf("gpu-%02d/vllm-8000/0", i), now)
		w.Decoding = maybe("decoding", float64(rapid.IntRange(0, 200).Draw(t, "decoding")))
		w.ContextTokens = maybe("context", rapid.Float64Range(0, 3e5).Draw(t, "context"))
		w.Live = maybe("live", float64(rapid.IntRange(0, 300).Draw(t, "live")))
		w.HeldBlocks = maybe("held", rapid.Float64Range(0, 21_000).Draw(t, "held"))
		w.ErrorMs = maybe("error", rapid.Float64Range(0, 300).Draw(t, "error"))
		w.LoadAtMs = maybe("age", now-rapid.SampledFrom([]float64{100, 400, 5000, 40_000}).Draw(t, "age"))
		w.View.AtMs = maybe("view age", now-rapid.Float64Range(0, 2e5).Draw(t, "view age"))
		w.View.Kind = rapid.SampledFrom([]ViewKind{ViewLive, ViewInferred, ViewStale, ViewPartial}).Draw(t, "view")
		m := w.Steps.Model()
		w.Steps = ledger.NewSteps(m, 2048, m.DecodeMs(positive(w.Decoding), positive(w.ContextTokens), 320_000))
		queue := maybe("queue", rapid.SampledFrom([]float64{0, 1, 40, 700, 5000}).Draw(t, "queue"))
		w.QueueKnown = !math.IsNaN(queue)
		w.Waiting = ledger.AtLoad(&w.Steps, now-100, queue, rapid.IntRange(0, 2047).Draw(t, "open"))
		if unknowns {
			w.Doubted = rapid.SampledFrom([]Reason{0, 0, 0, 0, ReasonStalled}).Draw(t, "doubted")
			w.Barred = rapid.SampledFrom([]Reason{0, 0, 0, 0, ReasonCordoned}).Draw(t, "barred")
			w.AwaySinceMs = rapid.SampledFrom([]float64{math.NaN(), math.NaN(), now - 5000, now - 90_000}).Draw(t, "away")
			w.BlockTokens = rapid.SampledFrom([]int{16, 64, 0}).Draw(t, "block")
		}
		if rapid.Bool().Draw(t, "connector") {
			w.Transfer = &Transfer{
				Connector: "nixl", SideChannel: "h:1", Fingerprint: rapid.SampledFrom([]string{"a", "a", "b"}).Draw(t, "fingerprint"),
				ExportedTier: TierGPU, BytesPerToken: rapid.SampledFrom([]float64{0, 70_000, 262_144}).Draw(t, "kv"),
			}
		}
		matched := rapid.IntRange(0, req.PromptTokens+100).Draw(t, "matched")
		if unknowns && rapid.IntRange(0, 5).Draw(t, "match unknown") == 0 {
			matched = Unknown
		}
		w.Host = rapid.SampledFrom([]*HostTier{nil, {BytesPerToken: 262_144, BytesPerMs: 18e6}, {BytesPerToken: 70_000, BytesPerMs: 1e3}, {BytesPerToken: 70_000}}).Draw(t, "host")
		candidates = append(candidates, Candidate{
			Worker: &w, MatchedTokens: matched, LowerTokens: rapid.SampledFrom([]int{0, 0, max(matched, 0), max(matched, 0) / 3}).Draw(t, "lower"), Predicted: rapid.Bool().Draw(t, "predicted"),
			DistanceMs:  maybe("distance", rapid.Float64Range(0, 80).Draw(t, "distance")),
			SurchargeMs: rapid.SampledFrom([]float64{0, 0, 15}).Draw(t, "surcharge"),
		})
	}
	for i := range candidates {
		if c := &candidates[i]; c.Transfer != nil && c.MatchedTokens > 0 && len(sit.Sources) < 2 {
			sit.Sources = append(sit.Sources, Source{Worker: c.Worker, Tokens: c.MatchedTokens, Sending: i % 2})
		}
	}
	for i := range candidates {
		for range sit.Sources {
			candidates[i].Paths = append(candidates[i].Paths, Path{
				BytesPerMs: rapid.SampledFrom([]float64{0, 1e5, 3e6, 12e6}).Draw(t, "bandwidth"), LatencyMs: rapid.Float64Range(0, 20).Draw(t, "latency"),
				UnderWay: rapid.IntRange(0, 2).Draw(t, "under way"), Never: rapid.IntRange(0, 9).Draw(t, "never") == 0,
			})
		}
	}
	return req, candidates, policy, sit
}

// Terms are finite and not negative, unknown ones are shown as unknown, and
// they add up to the total.
func TestTermsAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		req, candidates, policy, sit := drawFleet(t, true)
		var d Decision
		if err := Decide(&req, candidates, &policy, sit, &d); err != nil {
			t.Fatal(err)
		}
		for i := range d.Terms {
			w, terms := candidates[i].Worker, &d.Terms[i]
			for name, v := range map[string]float64{
				"start": terms.StartMs, "prefill": terms.PrefillMs, "doubt": terms.DoubtMs,
				"own": terms.OwnMs, "assumed": terms.AssumedMs, "total": terms.TotalMs,
			} {
				if !(v >= 0) || math.IsInf(v, 0) {
					t.Fatalf("%s: %s = %v", w.Name, name, v)
				}
			}
			known := func(name string, v float64, want bool) float64 {
				if math.IsNaN(v) == want || v < 0 || math.IsInf(v, 0) {
					t.Fatalf("%s: %s = %v, known should be %v", w.Name, name, v, want)
				}
				if !want {
					return 0
				}
				return v
			}
			room := known("room", terms.RoomMs, !math.IsNaN(w.Live) || !math.IsNaN(w.HeldBlocks) && w.BlockTokens > 0)
			distance := known("distance", terms.DistanceMs, !math.IsNaN(candidates[i].DistanceMs))
			queue := known("queue", terms.QueueMs, !math.IsNaN(sit.ArrivalsPerMs))
			gap := known("gap", terms.GapMs, !math.IsNaN(w.Decoding) && !math.IsNaN(w.ContextTokens))
			stall := known("stall", terms.StallMs, !math.IsNaN(w.Live))
			known("pull", terms.PullMs, terms.Pull.Note >= PullDearer)
			load := known("load", terms.LoadMs, terms.HostTokens > 0 && !math.IsNaN(w.Host.readMs(1)))
			if terms.HostTokens < 0 || terms.HostTokens > max(terms.ReuseTokens, 0) || terms.HostTokens > 0 && terms.HostTokens >= candidates[i].LowerTokens+max(w.BlockTokens, 1) {
				t.Fatalf("%s: %d of %d reused tokens are read back, %d are in host memory", w.Name, terms.HostTokens, terms.ReuseTokens, candidates[i].LowerTokens)
			}
			reach := terms.PrefillMs
			if terms.Pull.Asked() {
				reach = terms.PullMs
			}
			own := terms.StartMs + reach + load + room + terms.DoubtMs + distance
			total := own + queue + policy.Theta*(gap+stall) + terms.AssumedMs
			if math.Abs(own-terms.OwnMs) > 1e-9*own || math.Abs(total-terms.TotalMs) > 1e-9*total {
				t.Fatalf("%s: own %v of %v, total %v of %v", w.Name, own, terms.OwnMs, total, terms.TotalMs)
			}
			if pull := &terms.Pull; pull.Note >= PullDearer {
				source := &sit.Sources[pull.Source]
				moved := pull.Behind + pull.Tokens
				if source.Name == w.Name || moved > source.Tokens || moved >= req.PromptTokens || !(pull.TransferMs > 0) || math.IsInf(pull.TransferMs, 0) {
					t.Fatalf("%s: pulls %+v from %s, which holds %d", w.Name, *pull, source.Name, source.Tokens)
				}
				if pull.Behind > max(terms.ReuseTokens, 0) || pull.Note == PullSpare && (pull.Behind != 0 || terms.StillThere == 1) {
					t.Fatalf("%s: pulls %+v behind its own %d, there with %v", w.Name, *pull, terms.ReuseTokens, terms.StillThere)
				}
			}
			if terms.ReuseTokens == Unknown != (candidates[i].MatchedTokens == Unknown) {
				t.Fatalf("%s: match %d gives reuse %d", w.Name, candidates[i].MatchedTokens, terms.ReuseTokens)
			}
			if terms.ReuseTokens >= req.PromptTokens || terms.ReuseTokens > candidates[i].MatchedTokens ||
				terms.ReuseTokens > 0 && w.BlockTokens > 0 && terms.ReuseTokens%w.BlockTokens != 0 {
				t.Fatalf("%s: reuse %d of a match of %d in blocks of %d", w.Name, terms.ReuseTokens, candidates[i].MatchedTokens, w.BlockTokens)
			}
		}
		checkChoice(t, &d, candidates)
	})
}

// checkChoice says what must hold of any choice.
func checkChoice(t *rapid.T, d *Decision, candidates []Candidate) {
	if d.Chosen < 0 {
		for i := range d.Terms {
			if d.Terms[i].Placeable && d.Refusal.Reason == RefusedNoneEligible {
				t.Fatalf("refused although %s could be chosen", candidates[i].Name)
			}
		}
		return
	}
	chosen := &d.Terms[d.Chosen]
	if !chosen.Placeable || chosen.Reason.Firm() {
		t.Fatalf("chose %s, which is %s", candidates[d.Chosen].Name, chosen.Reason)
	}
	if chosen.Reason != ReasonNone && d.Marks&(MarkLastResort|MarkPanicFloor) == 0 {
		t.Fatalf("chose %s, which is %s, without a mark", candidates[d.Chosen].Name, chosen.Reason)
	}
	for _, i := range d.Fallbacks() {
		if i == d.Chosen || !d.Terms[i].Placeable {
			t.Fatalf("fallback %s", candidates[i].Name)
		}
	}
}

// Making the chosen worker better keeps it chosen: less queue, more reuse,
// nearer.
func TestBetterNeverLoses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		req, candidates, policy, sit := drawFleet(t, false)
		if len(sit.Sources) > 1 {
			policy.TieMs = 0 // within it sources are equal
		}
		for i := range candidates {
			candidates[i].Worker.AwaySinceMs = math.NaN()
		}
		var d Decision
		if err := Decide(&req, candidates, &policy, sit, &d); err != nil {
			t.Fatal(err)
		}
		if d.Chosen < 0 {
			t.Skip("refused")
		}
		better := append([]Candidate(nil), candidates...)
		c := &better[d.Chosen]
		w := *c.Worker
		c.Worker = &w
		change := rapid.SampledFrom([]string{"queue", "reuse", "distance"}).Draw(t, "change")
		switch change {
		case "queue":
			w.Waiting.Shift(-rapid.Float64Range(0, 6000).Draw(t, "less"))
		case "reuse":
			c.MatchedTokens = rapid.IntRange(c.MatchedTokens, max(req.PromptTokens, c.MatchedTokens)).Draw(t, "more")
		case "distance":
			c.DistanceMs *= rapid.Float64Range(0, 1).Draw(t, "nearer")
		}
		var again Decision
		if err := Decide(&req, better, &policy, sit, &again); err != nil {
			t.Fatal(err)
		}
		if again.Chosen != d.Chosen {
			t.Fatalf("%s lost to %s after its %s improved: total %v → %v against %v → %v",
				c.Name, better[again.Chosen].Name, change, d.Terms[d.Chosen].TotalMs, again.Terms[d.Chosen].TotalMs,
				d.Terms[again.Chosen].TotalMs, again.Terms[again.Chosen].TotalMs)
		}
	})
}

// Terms of the improved worker never grow, whatever is unknown around it.
func TestBetterNeverCostsMore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		req, candidates, policy, sit := drawFleet(t, true)
		if len(sit.Sources) > 1 {
			policy.TieMs = 0 // within it sources are equal
		}
		i := rapid.IntRange(0, len(candidates)-1).Draw(t, "which")
		var before, after Decision
		if err := Decide(&req, candidates, &policy, sit, &before); err != nil {
			t.Fatal(err)
		}
		w := *candidates[i].Worker
		candidates[i].Worker = &w
		reuse := rapid.Bool().Draw(t, "reuse") && candidates[i].MatchedTokens != Unknown
		if reuse {
			matched := candidates[i].MatchedTokens
			more := rapid.IntRange(0, max(req.PromptTokens-matched, 0)).Draw(t, "more")
			candidates[i].MatchedTokens = matched + more
			// The rest in host memory stays, or some of it comes to the GPU.
			candidates[i].LowerTokens = rapid.IntRange(0, candidates[i].LowerTokens).Draw(t, "lower after")
		} else {
			w.Waiting.Shift(-rapid.Float64Range(0, 6000).Draw(t, "less"))
		}
		if err := Decide(&req, candidates, &policy, sit, &after); err != nil {
			t.Fatal(err)
		}
		was, is := &before.Terms[i], &after.Terms[i]
		if is.TotalMs > was.TotalMs*(1+1e-12) {
			t.Fatalf("%s: total %v → %v", w.Name, was.TotalMs, is.TotalMs)
		}
	})
}

// A source never costs: a worker that may pull is priced at most as it would be
// without.
func TestSourcesNeverCost(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		req, candidates, policy, sit := drawFleet(t, true)
		if len(sit.Sources) > 1 {
			policy.TieMs = 0 // within it sources are equal
		}
		var with, without Decision
		if err := Decide(&req, candidates, &policy, sit, &with); err != nil {
			t.Fatal(err)
		}
		sit.Sources = nil
		if err := Decide(&req, candidates, &policy, sit, &without); err != nil {
			t.Fatal(err)
		}
		for i := range with.Terms {
			is, was := &with.Terms[i], &without.Terms[i]
			if is.TotalMs > was.TotalMs*(1+1e-12) {
				t.Fatalf("%s: total %v with sources, %v without", candidates[i].Name, is.TotalMs, was.TotalMs)
			}
			if !is.Pull.Asked() && is.TotalMs != was.TotalMs {
				t.Fatalf("%s: pulls nothing and costs %v in place of %v", candidates[i].Name, is.TotalMs, was.TotalMs)
			}
		}
	})
}

// A match in host memory costs no less than one in GPU memory and no more than
// none, whatever reading it back takes, and in parts it lies between. What is not
// still there, and what could be pulled in its place, are matters of their own.
func TestHostMemoryIsBetweenNoneAndGPU(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		req, candidates, policy, sit := drawFleet(t, true)
		i := rapid.IntRange(0, len(candidates)-1).Draw(t, "which")
		c := &candidates[i]
		sit.Sources = nil
		c.Worker.View.AtMs, c.Worker.View.Trust = sit.NowMs, 1
		tokens := max(c.MatchedTokens, 0)
		var last float64
		for step, match := range [][2]int{{tokens, 0}, {tokens, tokens / 3}, {tokens, tokens}, {0, 0}} {
			c.MatchedTokens, c.LowerTokens = match[0], match[1]
			var d Decision
			if err := Decide(&req, candidates, &policy, sit, &d); err != nil {
				t.Fatal(err)
			}
			total := d.Terms[i].TotalMs
			if step > 0 && total < last*(1-1e-12) {
				t.Fatalf("%d tokens, %d of them in host memory: total %v, with more in GPU memory %v", match[0], match[1], total, last)
			}
			last = total
		}
	})
}

// A stored record, also a shortened one, gives the same choice again; and a
// quoted what-if really gives the request to the worker it names.
func TestRecordDecidesAgain(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		req, candidates, policy, sit := drawFleet(t, true)
		var d Decision
		if err := Decide(&req, candidates, &policy, sit, &d); err != nil {
			t.Fatal(err)
		}
		keep := rapid.SampledFrom([]int{1, 3, 64}).Draw(t, "keep")
		record := NewRecord(&req, candidates, &policy, sit, &d, keep)
		var again Decision
		if err := record.Redecide(&again); err != nil {
			t.Fatal(err)
		}
		if (again.Chosen < 0) != (d.Chosen < 0) || again.Marks != d.Marks || again.Refusal.Reason != d.Refusal.Reason ||
			again.Refusal.RetryAfterMs != d.Refusal.RetryAfterMs && !math.IsNaN(d.Refusal.RetryAfterMs) {
			t.Fatalf("again %d %v, first %d %v", again.Chosen, again.Marks.Words(), d.Chosen, d.Marks.Words())
		}
		if d.Chosen < 0 {
			return
		}
		if got, want := record.Candidates[again.Chosen].Name, candidates[d.Chosen].Name; got != want {
			t.Fatalf("kept %d of %d candidates: again %s, first %s", len(record.Candidates), len(candidates), got, want)
		}
		if got, want := again.Terms[again.Chosen].TotalMs, d.Terms[d.Chosen].TotalMs; got != want {
			t.Fatalf("total again %v, first %v", got, want)
		}
		for _, w := range record.WouldChange(&again) {
			changed := record.Apply(w)
			var flipped Decision
			if err := changed.Redecide(&flipped); err != nil {
				t.Fatal(err)
			}
			if flipped.Chosen < 0 || changed.Candidates[flipped.Chosen].Name != w.Worker || w.Worker == candidates[d.Chosen].Name {
				t.Fatalf("%q does not flip the choice", w.Sentence())
			}
		}
	})
}

// The order of candidates does not matter: all coordinators agree.
func TestOrderDoesNotMatter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		req, candidates, policy, sit := drawFleet(t, true)
		shuffled := rapid.Permutation(candidates).Draw(t, "order")
		var a, b Decision
		if err := Decide(&req, candidates, &policy, sit, &a); err != nil {
			t.Fatal(err)
		}
		if err := Decide(&req, shuffled, &policy, sit, &b); err != nil {
			t.Fatal(err)
		}
		if (a.Chosen < 0) != (b.Chosen < 0) || a.Chosen >= 0 && candidates[a.Chosen].Name != shuffled[b.Chosen].Name {
			t.Fatalf("chose %d and %d", a.Chosen, b.Chosen)
		}
	})
}

// A record that was read back may lack what decisions had when it was written: it
// is no record then, or decides for nobody.
func TestIncompleteRecords(t *testing.T) {
	candidates := idleFleet(2)
	policy := DefaultPolicy()
	sit := Situation{NowMs: 1e6, ArrivalsPerMs: math.NaN(), MeanOutputTokens: 64, PolicyAgeMs: 1}
	req := Request{ID: "r", PromptTokens: 2000}
	var d Decision
	if err := Decide(&req, candidates, &policy, sit, &d); err != nil {
		t.Fatal(err)
	}
	made := func() Record { return NewRecord(&req, candidates, &policy, sit, &d, 64) }
	r := made()
	if !r.Restored() {
		t.Error("a whole record is none")
	}
	r.Candidates = r.Candidates[:0]
	if err := r.Redecide(&d); err != nil || d.Chosen >= 0 || d.Refusal.Reason != RefusedNoneEligible {
		t.Errorf("without candidates: chose %d, refused for %q, %v", d.Chosen, d.Refusal.Reason, err)
	}
	r = made()
	r.Candidates[1].Worker = &Worker{Name: "gpu-07/vllm-8000/0"}
	if r.Restored() {
		t.Error("a record is whole whose worker has no steps")
	}
	r.Candidates[1].Worker = nil
	if r.Restored() {
		t.Error("a record is whole that lacks a worker")
	}
}
