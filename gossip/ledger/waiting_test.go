package ledger

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func drawModel(t *rapid.T) StepModel {
	return StepModel{
		P0Ms:          rapid.Float64Range(0, 50).Draw(t, "p0"),
		P1MsPerToken:  rapid.Float64Range(0, .2).Draw(t, "p1"),
		QMsPerToken2:  rapid.Float64Range(0, 1e-5).Draw(t, "q"),
		P2MsPerToken2: rapid.SampledFrom([]float64{0, 1.4e-7, 5.7e-6}).Draw(t, "p2"),
		D0Ms:          rapid.Float64Range(0, 30).Draw(t, "d0"),
		D1MsPerRequest: rapid.Float64Range(0, .4).
			Draw(t, "d1"),
		D2MsPerToken: rapid.Float64Range(0, 1e-4).Draw(t, "d2"),
		D3Ms:         rapid.Float64Range(-40, 40).Draw(t, "d3"),
	}
}

func drawSteps(t *rapid.T) Steps {
	m := drawModel(t)
	decode := m.DecodeMs(rapid.Float64Range(0, 256).Draw(t, "decoding"), rapid.Float64Range(0, 2e6).Draw(t, "context"), 1e6)
	return NewSteps(m, rapid.SampledFrom([]int{1, 16, 512, 2048, 8192}).Draw(t, "budget"), decode)
}

func near(got, want float64) bool {
	return math.Abs(got-want) <= 1e-9*max(1, math.Abs(want))
}

// The fold and Own equal the replay of the whole list, whatever the order of
// sizes, gaps and equal time stamps.
func TestFoldEqualsListReplay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		steps := drawSteps(t)
		built := rapid.Float64Range(0, 1e6).Draw(t, "built")
		queue := rapid.SampledFrom([]float64{0, 3.5, 700, 20_000}).Draw(t, "queue")
		open := rapid.IntRange(0, 9000).Draw(t, "open")
		waiting := AtLoad(&steps, built, queue, open)
		reference := replayAtLoad(steps, built, queue, open)

		at := built
		var claims []replayClaim
		for range rapid.IntRange(0, 40).Draw(t, "claims") {
			at += rapid.SampledFrom([]float64{0, 0, .4, 7, 90, 2500}).Draw(t, "gap")
			c := replayClaim{
				madeMs: at,
				tokens: rapid.SampledFrom([]int{1, 15, 16, 17, 511, 2048, 3000, 8191, 8192, 20_000}).Draw(t, "tokens"),
				reused: rapid.SampledFrom([]int{0, 16, 4096, 100_000}).Draw(t, "reused"),
			}
			claims = append(claims, c)
			waiting.Fold(&steps, c.madeMs, c.reused, c.tokens)
		}
		want := replayRun(*reference, slices.Clone(claims))
		if !near(waiting.F, want) {
			t.Fatalf("F = %.12g, replay ends at %.12g", waiting.F, want)
		}
		if waiting.K < 0 || waiting.K >= steps.budget {
			t.Fatalf("K = %d with a step budget of %d", waiting.K, steps.budget)
		}

		now := at + rapid.SampledFrom([]float64{0, 1, 50, 4000, 1e5}).Draw(t, "after")
		next := replayClaim{madeMs: now, tokens: rapid.IntRange(1, 30_000).Draw(t, "next"), reused: 512}
		own := waiting.OwnMs(&steps, now, next.reused, next.tokens)
		wantOwn := replayRun(*reference, append(slices.Clone(claims), next)) - now
		if now >= waiting.F {
			wantOwn += steps.decodeMs / 2 // the decode step in flight
		}
		wantOwn = max(wantOwn, steps.PrefillMs(next.reused, next.tokens))
		// Both are differences of times: as exact as those are.
		if math.Abs(own-wantOwn) > 1e-9*max(1, now+wantOwn) {
			t.Fatalf("own = %.12g, replay says %.12g", own, wantOwn)
		}
	})
}

// Claims made before the report but not in it count from the report on.
func TestFoldNeverDrainsTimeBeforeTheReport(t *testing.T) {
	steps := NewSteps(StepModel{P1MsPerToken: 1}, 1000, 0)
	waiting := AtLoad(&steps, 5000, 0, 0)
	waiting.Fold(&steps, 4200, 0, 300)
	if waiting.F != 5300 {
		t.Fatalf("F = %v, want 5300: the claim is not begun before the report was built", waiting.F)
	}
	// The open step of this report began at 4960: what is new cannot join it.
	waiting = AtLoad(&steps, 5000, 10, 50)
	waiting.Fold(&steps, 4950, 0, 300)
	if waiting.F != 5310 || waiting.K != 300 {
		t.Fatalf("F = %v, K = %v, want 5310 and 300: a step of its own", waiting.F, waiting.K)
	}
}

// Whatever comes in, nothing negative or undefined comes out.
func TestWaitingStaysFinite(t *testing.T) {
	odd := []float64{math.NaN(), math.Inf(1), math.Inf(-1), -5, 0, 1, 1e6, 1e300}
	rapid.Check(t, func(t *rapid.T) {
		steps := drawSteps(t)
		waiting := AtLoad(&steps, rapid.SampledFrom(odd[3:7]).Draw(t, "built"), rapid.SampledFrom(odd).Draw(t, "queue"), rapid.IntRange(-5, 1<<30).Draw(t, "open"))
		for range rapid.IntRange(0, 5).Draw(t, "claims") {
			waiting.Fold(&steps, rapid.SampledFrom(odd[:7]).Draw(t, "made"), rapid.IntRange(-10, 1<<24).Draw(t, "reused"), rapid.IntRange(-10, 1<<30).Draw(t, "tokens"))
		}
		for _, now := range odd[3:] {
			own := waiting.OwnMs(&steps, now, rapid.IntRange(-1, 1<<24).Draw(t, "ownReused"), rapid.IntRange(-1, 1<<30).Draw(t, "ownTokens"))
			if !(own >= 0) || math.IsInf(own, 0) || !(waiting.QueueMs(now) >= 0) {
				t.Fatalf("own %v, queue %v at %v", own, waiting.QueueMs(now), now)
			}
		}
	})
}

// More tokens to compute, or a longer queue, never shortens the own time.
func TestOwnIsMonotone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		steps := drawSteps(t)
		waiting := AtLoad(&steps, 0, rapid.Float64Range(0, 3000).Draw(t, "queue"), rapid.IntRange(0, 8191).Draw(t, "open"))
		now := rapid.Float64Range(0, 4000).Draw(t, "now")
		n := 20_000
		u := rapid.IntRange(1, n-1).Draw(t, "tokens")
		more := rapid.IntRange(u, n).Draw(t, "more")
		less, larger := waiting.OwnMs(&steps, now, n-u, u), waiting.OwnMs(&steps, now, n-more, more)
		if less > larger*(1+1e-12) {
			t.Fatalf("own(%d tokens) = %v above own(%d tokens) = %v", u, less, more, larger)
		}
		behind := waiting
		behind.Fold(&steps, 0, 0, rapid.IntRange(1, 9000).Draw(t, "claim"))
		if longer := behind.OwnMs(&steps, now, n-u, u); longer < less-steps.decodeMs/2-1e-9 {
			t.Fatalf("own fell from %v to %v behind one more claim", less, longer)
		}
	})
}

// The worked numbers of the formulas: P = 10 + 1·n, D = 2, budget 100.
func TestFoldByHand(t *testing.T) {
	steps := NewSteps(StepModel{P0Ms: 10, P1MsPerToken: 1}, 100, 2)
	waiting := AtLoad(&steps, 1000, 200, 40) // S = 1200 − 50 − 2
	if waiting.S != 1148 || waiting.F != 1200 || waiting.K != 40 {
		t.Fatalf("at load: %+v", waiting)
	}
	waiting.Fold(&steps, 1100, 0, 30) // joins: 70 tokens in the open step
	if waiting.S != 1148 || waiting.F != 1148+82 || waiting.K != 70 {
		t.Fatalf("joined: %+v", waiting)
	}
	waiting.Fold(&steps, 1148, 0, 50) // joins and closes it: 20 open behind a full step
	if waiting.S != 1148+112 || waiting.F != 1148+112+32 || waiting.K != 20 {
		t.Fatalf("closed: %+v", waiting)
	}
	waiting.Fold(&steps, 1270, 0, 5) // the open step has begun: a step of its own
	if waiting.S != 1292 || waiting.F != 1292+17 || waiting.K != 5 {
		t.Fatalf("behind: %+v", waiting)
	}
	if got := waiting.OwnMs(&steps, 1300, 0, 5); got != 1309-1300+17 {
		t.Fatalf("own in the last step = %v", got)
	}
	if got, idle := waiting.OwnMs(&steps, 1400, 0, 5), steps.IdleMs(0, 5); got != 1+17 || idle != got {
		t.Fatalf("own when idle = %v, on an idle worker %v", got, idle)
	}
}

func BenchmarkOwn(b *testing.B) {
	prior := PriorFor(Class{Engine: EngineMocker})
	steps := NewSteps(prior.Model, prior.StepTokens, 12)
	waiting := AtLoad(&steps, 1000, 300, 4000)
	b.ReportAllocs()
	var sum float64
	for i := range b.N {
		sum += waiting.OwnMs(&steps, 1000+float64(i&1023), 512, 1+i&4095)
	}
	sink = sum
}

func BenchmarkFold(b *testing.B) {
	prior := PriorFor(Class{Engine: EngineMocker})
	steps := NewSteps(prior.Model, prior.StepTokens, 12)
	waiting := AtLoad(&steps, 1000, 300, 4000)
	b.ReportAllocs()
	for i := range b.N {
		waiting.Fold(&steps, 1000+float64(i), 512, 1+i&4095)
	}
	sink = waiting.F
}

var sink float64
