package ledger

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// A replay up to any moment, handed over as F and K and continued by the fold,
// ends where the replay of the whole list ends: with it the split between an
// agent and a coordinator does not matter. A report does not tell the attention
// part of its open step, so the equality is exact without one.
func TestReplayThenFoldEqualsListReplay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		steps := drawSteps(t)
		steps.model.P2MsPerToken2 = 0
		at := rapid.Float64Range(0, 1e5).Draw(t, "start")
		free := at
		var claims []replayClaim
		for range rapid.IntRange(1, 40).Draw(t, "claims") {
			at += rapid.SampledFrom([]float64{0, 0, .4, 7, 90, 2500}).Draw(t, "gap")
			claims = append(claims, replayClaim{
				madeMs: at,
				tokens: rapid.SampledFrom([]int{1, 15, 16, 17, 511, 2048, 3000, 8191, 8192, 20_000, 90_000}).Draw(t, "tokens"),
				reused: rapid.SampledFrom([]int{0, 16, 4096, 100_000}).Draw(t, "reused"),
			})
		}
		known := rapid.IntRange(0, len(claims)).Draw(t, "known")
		for known > 0 && known < len(claims) && claims[known].madeMs == claims[known-1].madeMs {
			known++ // the report falls between two instants
		}
		built := free
		if known > 0 {
			built = claims[known-1].madeMs
		}
		built += rapid.SampledFrom([]float64{.05, .1, 11, 400, 1e5}).Draw(t, "built")
		if known < len(claims) {
			built = min(built, claims[known].madeMs-.01)
		}
		jobs := make([]Job, 0, known)
		for _, c := range claims[:known] {
			jobs = append(jobs, NewJob(c.madeMs, c.reused, c.tokens))
		}
		replay := NewReplay(&steps, free, jobs)
		replay.Run(built)
		for i, j := range replay.Jobs() {
			if (j.Tokens == 0) != !math.IsNaN(j.EndMs) || i < known-1 && j.EndMs > replay.Jobs()[i+1].EndMs {
				t.Fatalf("job %d: %+v", i, j)
			}
		}
		report := replay.Waiting(built)
		waiting := AtLoad(&steps, built, report.QueueMs(built), report.K)
		for _, c := range claims[known:] {
			waiting.Fold(&steps, c.madeMs, c.reused, c.tokens)
		}
		want := replayRun(replayQueue{steps: steps, freeMs: free}, slices.Clone(claims))
		if want-built > MaxQueueMs {
			return // a report does not tell more
		}
		if got := max(waiting.F, 0); want > built && !near(got, want) {
			t.Fatalf("F = %.12g, the list ends at %.12g", got, want)
		} else if want <= built && known == len(claims) && got > built {
			t.Fatalf("F = %.12g after all was served at %.12g", got, want)
		}
		// RunThrough agrees with the whole replay on the last job.
		all := make([]Job, 0, len(claims))
		for _, c := range claims {
			all = append(all, NewJob(c.madeMs, c.reused, c.tokens))
		}
		through := NewReplay(&steps, free, all)
		if end := through.RunThrough(len(all) - 1); !near(end, want) {
			t.Fatalf("runs through at %.12g, the list ends at %.12g", end, want)
		}
		tokens := 0
		for _, c := range claims {
			tokens += c.tokens
		}
		if through.Work.Tokens != float64(tokens) {
			t.Fatalf("computed %v tokens of %d", through.Work.Tokens, tokens)
		}
		model := steps.Model()
		base, rest := through.Work.priceMs(&model, steps.DecodeMs())
		if idle := through.FreeMs - through.Work.BeganMs; base+rest > idle*(1+1e-9)+1e-6 {
			t.Fatalf("work is priced %v ms in %v ms", base+rest, idle)
		}
	})
}

// A prompt of millions of tokens takes a handful of loops, and ends where the
// walk step by step ends.
func TestReplayOfAHugePrompt(t *testing.T) {
	steps := NewSteps(StepModel{P0Ms: 3, P1MsPerToken: .02, P2MsPerToken2: 1e-9}, 16, 2)
	replay := NewReplay(&steps, 0, []Job{NewJob(0, 100, 1<<22), NewJob(1, 0, 5)})
	replay.Run(50_000)
	if replay.FreeMs < 50_000 || replay.FreeMs > 50_000+steps.fullMs*1.2 {
		t.Fatalf("the step in flight at 50 s ends at %v", replay.FreeMs)
	}
	walked := NewReplay(&steps, 0, []Job{NewJob(0, 100, 1<<22), NewJob(1, 0, 5)})
	for walked.FreeMs <= 50_000 {
		walked.step(walked.FreeMs)
	}
	if !near(replay.FreeMs, walked.FreeMs) || replay.Jobs()[0].Tokens != walked.Jobs()[0].Tokens || replay.Work.Steps != walked.Work.Steps {
		t.Errorf("%v with %d tokens left after %v steps, step by step %v with %d after %v", replay.FreeMs, replay.Jobs()[0].Tokens, replay.Work.Steps,
			walked.FreeMs, walked.Jobs()[0].Tokens, walked.Work.Steps)
	}
	if allocs := testing.AllocsPerRun(10, func() {
		jobs := [2]Job{NewJob(0, 100, 1<<22), NewJob(1, 0, 5)}
		r := NewReplay(&steps, 0, jobs[:])
		r.RunThrough(1)
	}); allocs > 1 {
		t.Errorf("%v allocations", allocs)
	}
}

func BenchmarkReplay128(b *testing.B) {
	prior := PriorFor(Class{Engine: EngineMocker})
	steps := NewSteps(prior.Model, prior.StepTokens, 12)
	source := make([]Job, 128)
	for i := range source {
		source[i] = NewJob(float64(i), 512, 1+(i*337)%6000)
	}
	jobs := make([]Job, 128)
	b.ReportAllocs()
	for b.Loop() {
		copy(jobs, source)
		r := NewReplay(&steps, 0, jobs)
		r.Run(300)
		w := r.Waiting(300)
		sink = w.F
	}
}
