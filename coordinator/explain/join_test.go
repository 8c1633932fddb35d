package explain

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"waypost/coordinator/outcome"
	"waypost/coordinator/placement"
)

// A higher source replaces what a lower one said, and never the reverse.
func TestSourcesInRank(t *testing.T) {
	s := newStore(t, Options{})
	s.Add(at(0), entry(1), nil)
	tell := func(source outcome.Source, result string, cached int) Joined {
		o := outcome.NewOutcome(result)
		o.Source, o.CachedTokens = source, cached
		j, err := s.Join("pl_1", o, outcome.Evidence{BlockTokens: 16})
		if err != nil {
			t.Fatal(err)
		}
		return j
	}
	if j := tell(outcome.SourceAgent, outcome.ResultEnded, 0); !j.News || j.Entry.Class != outcome.ClassEvicted {
		t.Errorf("the agent's: %+v", j)
	}
	if j := tell(outcome.SourceCaller, outcome.ResultDone, 512); !j.News || j.Entry.Class != outcome.ClassAsPredicted || j.Former != outcome.ClassEvicted {
		t.Errorf("the caller's after it: %+v", j)
	}
	if j := tell(outcome.SourceAgent, outcome.ResultEnded, 0); j.News {
		t.Errorf("the agent's again: %+v", j)
	}
	if j := tell(outcome.SourceFrontDoor, outcome.ResultDone, 1000); !j.News || j.Entry.Class != outcome.ClassUnderPredicted {
		t.Errorf("the front door's: %+v", j)
	}
	if j := tell(outcome.SourceCaller, outcome.ResultDone, 512); j.News || j.Entry.Outcome.CachedTokens != 1000 {
		t.Errorf("the caller's after all: %+v", j)
	}
	o := outcome.NewOutcome(outcome.ResultEnded)
	if _, err := s.Join("pl_1", o, outcome.Evidence{}); err == nil {
		t.Error("a caller may say that it ended, without how")
	}
}

func TestSettle(t *testing.T) {
	s := newStore(t, Options{})
	s.Add(at(0), entry(1), nil)
	o := outcome.NewOutcome(outcome.ResultDone)
	o.CachedTokens = 0
	j, err := s.Join("pl_1", o, outcome.Evidence{BlockTokens: 16})
	if err != nil || !j.Entry.Provisional {
		t.Fatalf("%+v, %v", j, err)
	}
	e := s.Settle("pl_1", outcome.Evidence{BlockTokens: 16, ProcessChanged: outcome.Yes})
	if e == nil || e.Class != outcome.ClassRestarted || e.Provisional {
		t.Fatalf("%+v", e)
	}
	if s.Settle("pl_1", outcome.Evidence{}) != nil || s.Settle("pl_9", outcome.Evidence{}) != nil {
		t.Error("settled what has no provisional class")
	}
}

// Misses and prediction errors are columns of their own: the classes sum to
// the outcomes, and reused, short and missed tokens to the prompts.
func TestColumnsSumToTotals(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, err := New(Options{})
		if err != nil {
			t.Fatal(err)
		}
		n := rapid.IntRange(0, 40).Draw(t, "entries")
		told := 0
		for i := range n {
			e := entry(i)
			e.PromptTokens = rapid.IntRange(1, 5000).Draw(t, "prompt")
			e.ExpectedTokens = rapid.IntRange(-1, 6000).Draw(t, "expected")
			e.ReachableTokens = rapid.IntRange(-1, e.PromptTokens).Draw(t, "reachable")
			e.LostTo = rapid.SampledFrom([]LostTo{"", LostToLoad, LostToHealth, LostToPolicy}).Draw(t, "lostTo")
			s.Add(at(0), e, nil)
			if !rapid.Bool().Draw(t, "outcome") {
				continue
			}
			told++
			o := outcome.NewOutcome(outcome.ResultDone)
			o.CachedTokens = rapid.IntRange(placement.Unknown, 5000).Draw(t, "actual")
			ev := outcome.Evidence{BlockTokens: 16, ProcessChanged: outcome.Answer(rapid.IntRange(0, 2).Draw(t, "process"))}
			if _, err := s.Join(e.Placement, o, ev); err != nil {
				t.Fatal(err)
			}
		}
		r := s.Reuse(Filter{})["p"]
		if r == nil {
			if n > 0 {
				t.Fatal("no sum")
			}
			return
		}
		misses, right, errors, silent := 0, 0, 0, 0
		for class, k := range r.ByClass {
			switch {
			case class.Mispredicted():
				errors += k
			case class == outcome.ClassCold:
				misses += k
			case class == outcome.ClassNotReported:
				silent += k
			default:
				right += k
			}
		}
		if r.Placements != n || r.Outcomes != told || misses+right+errors+silent != told || r.Reported != told-silent {
			t.Fatalf("%d misses, %d right, %d errors, %d silent of %+v; %d entries, %d told", misses, right, errors, silent, r, n, told)
		}
		if sum := r.ActualTokens + r.ShortTokens + r.MissTokens; sum != r.PromptTokens {
			t.Fatalf("reused %v, short %v, missed %v are not the %v prompt tokens", r.ActualTokens, r.ShortTokens, r.MissTokens, r.PromptTokens)
		}
		if r.ReachableTokens < r.ActualTokens {
			t.Fatalf("reached %v of %v reachable", r.ActualTokens, r.ReachableTokens)
		}
	})
}

func TestSummaryAndPart(t *testing.T) {
	s := newStore(t, Options{})
	req, candidates, policy, sit, d := decide(t, 3, 900)
	for i := range 4 {
		e := NewEntry(&req, candidates, sit, d)
		e.Placement = entry(i).Placement
		s.Add(at(float64(i)), e, func() placement.Record {
			return placement.NewRecord(&req, candidates, &policy, sit, d, 8)
		})
	}
	sum := s.Summary(Filter{Since: at(1)})["p"]
	if sum.Placed != 3 || sum.Redirected != 3 || sum.Terms[d.DecidingTerm()] != 3 {
		t.Errorf("%+v", sum)
	}
	chosen := candidates[d.Chosen].Name
	if p := s.Part(chosen, at(0), Filter{}); p.Considered != 4 || p.Chosen != 4 || len(p.LostBy) != 0 || p.EvenShare < 1.3 || p.EvenShare > 1.4 {
		t.Errorf("the chosen: %+v", p)
	}
	// The holder of the prefix waits five seconds: beyond any limit.
	if p := s.Part(candidates[1].Name, at(0), Filter{}); p.Considered != 4 || p.Chosen != 0 || p.LostBy["own-time limit"] != 4 {
		t.Errorf("the one passed over: %+v", p)
	}
	if p := s.Part("nobody", at(0), Filter{}); p.Considered != 0 {
		t.Errorf("nobody: %+v", p)
	}
	candidates[1].Worker.Barred = placement.ReasonCordoned
	if err := placement.Decide(&req, candidates, &policy, sit, d); err != nil {
		t.Fatal(err)
	}
	e := NewEntry(&req, candidates, sit, d)
	e.Placement = "pl_9"
	s.Add(at(9), e, func() placement.Record { return placement.NewRecord(&req, candidates, &policy, sit, d, 8) })
	if p := s.Part(candidates[1].Name, at(0), Filter{Since: at(8)}); p.Excluded["cordoned"] != 1 {
		t.Errorf("cordoned: %+v", p)
	}
	// What was refused is counted by itself, and no outcome is joined to it.
	hurry := req
	hurry.FirstTokenBudgetMs, hurry.IfInfeasible = 1, placement.Reject
	if err := placement.Decide(&hurry, candidates, &policy, sit, d); err != nil || d.Chosen >= 0 {
		t.Fatalf("chose %d, %v", d.Chosen, err)
	}
	e = NewEntry(&hurry, candidates, sit, d)
	e.Placement = "pl_10"
	w, _ := s.Watch(Filter{})
	s.Add(at(10), e, func() placement.Record { return placement.NewRecord(&hurry, candidates, &policy, sit, d, 8) })
	if got := <-w.Events; got.Kind != EventRefused || got.Entry.Refused != placement.RefusedDeadline {
		t.Errorf("told %s of %+v", got.Kind, got.Entry)
	}
	s.Unwatch(w)
	if sum := s.Summary(Filter{Since: at(9)})["p"]; sum.Placed != 1 || len(sum.Refused) != 1 || sum.Refused["deadline_impossible"] != 1 {
		t.Errorf("with a refusal: %+v", sum)
	}
	if p := s.Part(chosen, at(0), Filter{Since: at(10)}); p.Considered != 1 || p.Chosen != 0 || p.EvenShare != 0 || p.LostBy[LostRefused] != 1 {
		t.Errorf("its part in a refusal: %+v", p)
	}
	if p := s.Part(candidates[1].Name, at(0), Filter{Since: at(10)}); p.Excluded["cordoned"] != 1 {
		t.Errorf("the cordoned one's part in a refusal: %+v", p)
	}
	if j, err := s.Join("pl_10", outcome.NewOutcome(outcome.ResultDone), outcome.Evidence{}); err != nil || j.Entry != nil || j.News {
		t.Errorf("an outcome of a refusal: %+v, %v", j, err)
	}
	if r := s.Reuse(Filter{Since: at(10)}); len(r) != 0 {
		t.Errorf("reuse of a refusal: %v", r)
	}
	if p := s.Part("gpu-77/vllm-8000/0", at(0), Filter{Pool: "p"}); p.Considered != 0 {
		t.Errorf("records that list all candidates do not list it: %+v", p)
	}
	if got, _ := s.Get("pl_9"); got.LostTo != LostToPolicy || got.ReachableTokens < 800 {
		t.Errorf("reachable %d, lost to %q", got.ReachableTokens, got.LostTo)
	}
}

func TestWatch(t *testing.T) {
	s := newStore(t, Options{})
	w, ok := s.Watch(Filter{Tenant: "team-a"})
	if !ok {
		t.Fatal("no watcher")
	}
	s.Add(at(0), entry(0), nil)
	s.Add(at(0), entry(1, func(e *Entry) { e.Tenant = "other" }), nil)
	o := outcome.NewOutcome(outcome.ResultDone)
	if _, err := s.Join("pl_0", o, outcome.Evidence{}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []EventKind{EventPlaced, EventOutcome} {
		if ev := <-w.Events; ev.Kind != want || ev.Entry.Placement != "pl_0" {
			t.Errorf("%+v, want %s", ev, want)
		}
	}
	for i := range watchBuffer + 50 {
		s.Add(at(0), entry(10+i), nil)
	}
	for range watchBuffer {
		<-w.Events
	}
	s.Add(at(0), entry(5), nil)
	if ev := <-w.Events; ev.Missed != 50 {
		t.Errorf("missed %d, want 50", ev.Missed)
	}
	s.Unwatch(w)
	s.Add(at(0), entry(6), nil)
	select {
	case ev := <-w.Events:
		t.Errorf("told %+v after Unwatch", ev)
	default:
	}
	for range maxWatchers {
		if _, ok := s.Watch(Filter{}); !ok {
			t.Fatal("too few watchers")
		}
	}
	if _, ok := s.Watch(Filter{}); ok {
		t.Error("watchers are not bounded")
	}
}

// A record of a large fleet lists those that mattered: the others took part
// nevertheless, and why they lost is what the record counts.
func TestPartOfAWorkerThatIsNotListed(t *testing.T) {
	const asked = "gpu-99/vllm-8000/0"
	for _, test := range []struct {
		name    string
		exclude func(i int) placement.Reason
		want    string
	}{
		{"its price was too high", func(int) placement.Reason { return placement.ReasonNone }, "lost not_priced"},
		{"excluded like the others", func(i int) placement.Reason {
			if i > 0 {
				return placement.ReasonCordoned
			}
			return placement.ReasonNone
		}, "excluded cordoned"},
		{"excluded, nobody knows how", func(i int) placement.Reason {
			switch {
			case i == 0:
				return placement.ReasonNone
			case i%2 == 0:
				return placement.ReasonSuperseded
			}
			return placement.ReasonCordoned
		}, "excluded several"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newStore(t, Options{})
			req, candidates, policy, sit, d := decide(t, 100, 0)
			for i := range candidates {
				candidates[i].Worker.Barred = test.exclude(i)
				candidates[i].Worker.Waiting.F += float64(i)
			}
			if err := placement.Decide(&req, candidates, &policy, sit, d); err != nil {
				t.Fatal(err)
			}
			e := NewEntry(&req, candidates, sit, d)
			e.Placement = "pl_1"
			s.Add(at(5), e, func() placement.Record { return placement.NewRecord(&req, candidates, &policy, sit, d, 4) })
			if newest := s.NewestFull("p"); newest == nil || Lists(newest, asked) || s.NewestFull("q") != nil {
				t.Fatalf("newest %v", newest)
			}
			p := s.Part(asked, at(4), Filter{Pool: "p"})
			got := ""
			for k, n := range p.LostBy {
				got += fmt.Sprintf("lost %s", k)
				if n != 1 {
					t.Errorf("%d times", n)
				}
			}
			for k := range p.Excluded {
				got += fmt.Sprintf("excluded %s", k)
			}
			if p.Considered != 1 || p.Chosen != 0 || p.EvenShare != .01 || got != test.want {
				t.Errorf("%s: %+v", got, p)
			}
			for name, p := range map[string]Part{
				"another pool": s.Part(asked, at(4), Filter{Pool: "q"}), "no pool": s.Part(asked, at(4), Filter{}), "not known yet": s.Part(asked, at(6), Filter{Pool: "p"}),
			} {
				if p.Considered != 0 {
					t.Errorf("%s: %+v", name, p)
				}
			}
		})
	}
}
