package placement

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"waypost/gossip/ledger"
)

// fleetsForFigures are the fleets of the figures: busy as at half load, with a
// few holders of the prompt and a system prompt that all hold.
func fleetForFigures(n int, m mix) *boardWorld {
	w := newBoardWorld(rand.New(rand.NewPCG(1, 2)), n, m)
	w.policy = DefaultPolicy()
	w.req = Request{ID: "bench", PromptTokens: 8192, OutputTokensExpected: 200}
	w.sit = Situation{NowMs: worldNowMs, ArrivalsPerMs: .002, MeanOutputTokens: 200, PolicyAgeMs: 10}
	w.query = Query{}
	r := rand.New(rand.NewPCG(3, 4))
	var shallow Matches
	for i, worker := range w.workers {
		c := *worker
		c.LoadAtMs = worldNowMs - r.Float64()*250
		c.HeldBlocks = r.Float64() * 15_000
		c.ErrorMs = r.Float64() * 50
		c.View = View{Kind: ViewLive, AtMs: worldNowMs - 400, Trust: math.NaN(), EvictionAgeMs: math.NaN()}
		if r.Float64() >= m.idle {
			model := c.Steps.Model()
			c.Decoding = float64(r.IntN(50))
			c.Live, c.ContextTokens = c.Decoding+float64(r.IntN(4)), c.Decoding*4000
			c.Steps = ledger.NewSteps(model, 8192, model.DecodeMs(c.Decoding, c.ContextTokens, 320_000))
			c.Waiting = ledger.AtLoad(&c.Steps, worldNowMs-100, r.ExpFloat64()*200, r.IntN(2047))
		} else {
			c.HeldBlocks, c.ErrorMs = 0, math.NaN()
		}
		switch {
		case m.matched < 0: // nobody holds anything
		case i%100 == 7:
			w.query.Matches.Add(c.ID, Held{Tokens: 4096})
		case r.Float64() < m.matched:
			shallow.Add(c.ID, Held{Tokens: 1024})
		}
		w.board.Set(&c)
	}
	for id, held := range shallow.All() {
		w.query.Matches.Add(id, held)
	}
	return w
}

// The search must stay a search: few of 1,000 workers are priced, and deciding
// again allocates nothing.
func TestSearchIsBounded(t *testing.T) {
	for _, f := range figureFleets {
		w := fleetForFigures(1000, f.mix)
		var d Decision
		dst := w.decide(t, nil, &d)
		if len(dst) > SearchAbove {
			t.Errorf("%s: %d of 1,000 priced, want at most %d", f.name, len(dst), SearchAbove)
		}
		if d.Chosen < 0 || d.Survey.Unpriced+len(dst) != 1000 {
			t.Errorf("%s: chosen %d, %d priced and %d not", f.name, d.Chosen, len(dst), d.Survey.Unpriced)
		}
		if n := testing.AllocsPerRun(20, func() { dst = w.decide(t, dst, &d) }); n > 0 {
			t.Errorf("%s: %v allocations per decision, want none", f.name, n)
		}
		t.Logf("%s: %d of 1,000 priced", f.name, len(dst))
	}
}

// Open claims are three numbers in the worker: their count is no input of a
// decision, so it cannot cost anything. What could is their count in Live.
func TestSearchDoesNotGrowWithClaims(t *testing.T) {
	w := fleetForFigures(1000, mix{alike: 1})
	var d Decision
	before := len(w.decide(t, nil, &d))
	for _, worker := range slices.Clone(w.board.Workers()) {
		c := *worker
		for range 200 {
			c.Waiting.Fold(&c.Steps, worldNowMs-10, 0, 100)
		}
		c.OpenClaims, c.Live = 200, c.Live+200
		w.board.Set(&c)
	}
	if after := len(w.decide(t, nil, &d)); after > before+SearchAbove/2 {
		t.Errorf("%d priced with 200 claims per worker, %d without", after, before)
	}
}

func BenchmarkBoard(b *testing.B) {
	for _, n := range []int{100, 1000, 8000} {
		for _, f := range figureFleets {
			b.Run(fmt.Sprintf("%s/%d", f.name, n), func(b *testing.B) {
				w := fleetForFigures(n, f.mix)
				var d Decision
				var dst []Candidate
				took := make([]time.Duration, 0, 1<<20)
				b.ReportAllocs()
				for b.Loop() {
					w.req.ID = "bench"
					started := time.Now()
					dst = w.decide(b, dst, &d)
					if len(took) < cap(took) {
						took = append(took, time.Since(started))
					}
				}
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
				b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
				b.ReportMetric(float64(len(dst)), "priced")
			})
		}
	}
}

// BenchmarkBoardSet is what every change of a worker costs its pool's board.
func BenchmarkBoardSet(b *testing.B) {
	w := fleetForFigures(1000, mix{alike: 1})
	workers := slices.Clone(w.board.Workers())
	i := 0
	b.ReportAllocs()
	for b.Loop() {
		w.board.Set(workers[i%len(workers)])
		i++
	}
}
