package coordinator

import (
	"slices"
	"strings"
	"testing"

	waypostv1 "waypost/proto/waypost/v1"
)

// TestDistrustAsksForAllOfAView distrusts a view while another pull of it is
// under way: once that is answered, all is asked for, once.
func TestDistrustAsksForAllOfAView(t *testing.T) {
	c := startOne(t)
	const worker = "gpu-01/vllm-8000/0"
	cache := newCache(1)
	tokens := cache.grow(10)
	cache.delta()
	asked := false
	a := &fakeAgent{workers: 1, pulled: func(p *waypostv1.PrefixPull) [][]byte {
		if !asked {
			asked = true
			c.views.Distrust(worker, false)
		}
		return cache.replayOr(p)
	}}
	a.start(t, c)
	eventually(t, "a second pull", func() bool { _, n := a.counts(); return n >= 2 })
	eventually(t, "the view is there", func() bool { return c.held(tokens) == 160 })
	loads, _ := a.counts()
	eventually(t, "some more reports", func() bool { now, _ := a.counts(); return now > loads+20 })
	a.mu.Lock()
	defer a.mu.Unlock()
	if first, second := a.pulls[0], a.pulls[1]; len(a.pulls) != 2 || first.GetReason() != "new" || second.GetReason() != "distrust" || second.HaveSeq != nil {
		t.Errorf("pulls %v", a.pulls)
	}
}

// A view that promised too much while a pull is out that asks for what it lacks is
// asked for once more: the agent is to drop what is wrong of it.
func TestDistrustOfAllFollowsThatOfWhatIsLacking(t *testing.T) {
	c := startOne(t)
	const worker = "gpu-01/vllm-8000/0"
	cache := newCache(1)
	cache.grow(10)
	cache.delta()
	n := 0
	a := &fakeAgent{workers: 1, pulled: func(p *waypostv1.PrefixPull) [][]byte {
		if n++; n <= 2 {
			c.views.Distrust(worker, n == 1) // while this pull is out
		}
		return cache.replayOr(p)
	}}
	a.start(t, c)
	eventually(t, "a third pull", func() bool { _, n := a.counts(); return n >= 3 })
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, lacking := range []bool{false, true, false} {
		if p := a.pulls[i]; p.GetLacking() != lacking || (i > 0) != (p.GetReason() == "distrust") {
			t.Errorf("pull %d: %v", i, p)
		}
	}
}

// An engine that reuses much of prompts of which nothing was expected is at odds
// with its view: within 20 requests an operator is told, and the view is asked for
// anew so that the next predictions are right. One whose reuse is a little more
// than expected is not.
func TestTRU07DisagreementIsShownAndRepaired(t *testing.T) {
	const worker, prompt = "gpu-01/vllm-8000/0", 4096
	for name, c := range map[string]struct {
		reused uint32
		shown  bool
	}{"nearly all": {4000, true}, "a block more": {16, false}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := startOne(t)
			a := &fakeAgent{workers: 1, pulled: newCache(1).replayOr}
			a.start(t, o)
			joined(t, o)
			at := func() string {
				resp, err := waypostv1.NewOperatorServiceClient(o.conn).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
				if err != nil {
					t.Fatal(err)
				}
				for _, p := range resp.GetProblems() {
					if p.GetSubject() == worker && strings.Contains(p.GetWhat(), "cache view disagrees with engine") {
						return p.GetNext()
					}
				}
				return ""
			}
			eventually(t, "a live view", func() bool { return o.held(ascending(prompt)) == 0 && at() == "" })
			for i := range uint32(20) {
				tokens := ascending(prompt)
				for k := range tokens {
					tokens[k] += i * 100_000
				}
				p := o.place(t, &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: tokens}})
				if n := p.GetExpected().GetReuseTokens(); n != 0 {
					t.Fatalf("%d tokens were expected", n)
				}
				if _, err := waypostv1.NewPlacementServiceClient(o.conn).ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{
					PlacementId: p.PlacementId, Result: new("done"), CachedTokens: new(c.reused), PromptTokens: new(uint32(prompt)),
				}); err != nil {
					t.Fatal(err)
				}
			}
			// What was wrong is classed once evidence on it was waited for.
			series := "waypost_reuse_class_total{under_predicted," + testModel + "}"
			eventually(t, "all are classed", func() bool { return o.metric(t, series) == 20 })
			want := ""
			if c.shown {
				want = "waypost explain --mispredicted --worker " + worker
			}
			if next := at(); next != want {
				t.Errorf("next: %q, want %q", next, want)
			}
			if c.shown {
				eventually(t, "the view is asked for anew", func() bool {
					a.mu.Lock()
					defer a.mu.Unlock()
					return slices.ContainsFunc(a.pulls, func(p *waypostv1.PrefixPull) bool { return p.GetReason() == "distrust" && p.HaveSeq == nil })
				})
			}
		})
	}
}
