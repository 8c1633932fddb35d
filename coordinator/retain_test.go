package coordinator

import (
	"sync/atomic"
	"testing"

	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// Of an engine whose events do not show all, what was placed there stays
// expected after its claim, least recently used out first, as long as it fits
// the cache that the engine reports.
func TestPlacementsAreRetainedWithoutEvents(t *testing.T) {
	for _, c := range []struct {
		coverage string
		blocks   uint32
		kept     bool // after the claims
	}{{"none", 210, true}, {"partial", 210, true}, {"full", 210, false}, {"none", 0, false}} {
		t.Run(c.coverage, func(t *testing.T) {
			o := startOne(t)
			var full atomic.Bool
			a := &fakeAgent{
				workers: 1, pulled: func(*waypostv1.PrefixPull) [][]byte { return [][]byte{} },
				facts: func(f *waypostv1.WorkerFacts) { f.Coverage, f.PoolBlocks = &c.coverage, &c.blocks },
				state: func(_ int, l *ledger.Load) {
					if l.Coverage = c.coverage; full.Load() {
						l.Coverage = "full"
					}
				},
			}
			a.start(t, o)
			eventually(t, "the coverage is known", func() bool {
				st, ok := o.stream()
				return ok && st.Coverage == c.coverage && o.Joined()
			})
			ws, err := waypostv1.NewOperatorServiceClient(o.conn).ListWorkers(t.Context(), &waypostv1.ListWorkersRequest{})
			if err != nil || len(ws.GetWorkers()) != 1 {
				t.Fatalf("%v, %v", ws, err)
			}
			if view := ws.GetWorkers()[0].GetView(); (view == "inferred") != c.kept {
				t.Errorf("the view is called %s", view)
			}
			prompt := func(i int) []uint32 {
				tokens := ascending(1600)
				tokens[0] = uint32(1000 + i)
				return tokens
			}
			expect := func(when string, i, want int) {
				t.Helper()
				if got := o.held(prompt(i)); got != want {
					t.Errorf("%s: %d tokens of prompt %d expected, want %d", when, got, i, want)
				}
			}
			kept := 0
			if c.kept {
				kept = 1600
			}
			serve := func(i int, result string) {
				t.Helper()
				p := o.place(t, &waypostv1.PlaceRequest{RequestId: new(randomName(8)), Input: &waypostv1.Input{TokenIds: prompt(i)}})
				expect("placed", i, 1600)
				if view := p.GetBasis().GetCacheView(); c.coverage == "none" && (view == "inferred") != c.kept {
					t.Errorf("the answer calls the view %s", view)
				}
				rec, err := waypostv1.NewPlacementServiceClient(o.conn).GetPlacement(t.Context(), &waypostv1.GetPlacementRequest{PlacementId: p.PlacementId})
				if view := rec.GetRecord().GetPlacement().GetBasis().GetCacheView(); err != nil || view != p.GetBasis().GetCacheView() {
					t.Errorf("the record calls the view %s, the answer %s; %v", view, p.GetBasis().GetCacheView(), err)
				}
				if _, err := waypostv1.NewPlacementServiceClient(o.conn).ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: &result}); err != nil {
					t.Fatal(err)
				}
			}
			serve(1, "done")
			expect("done", 1, kept)
			serve(2, "failed")
			expect("failed: it may never have been prefilled", 2, 0)
			serve(2, "done")
			expect("both fit", 1, kept)
			expect("both fit", 2, kept)
			serve(1, "done") // the latest used now
			serve(3, "done")
			expect("what was used last", 1, kept)
			expect("what was used last", 3, kept)
			if got := o.held(prompt(2)); got > 512 {
				t.Errorf("%d tokens of what does not fit beside it", got)
			}
			full.Store(true)
			eventually(t, "an engine that shows all is believed", func() bool { return o.held(prompt(1)) == 0 })
		})
	}
}
