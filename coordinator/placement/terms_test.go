package placement

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// deletions are the terms of the rule and what the rule is without each. A
// deletion works on priced terms, as if the term were nothing everywhere, or
// on what is known.
var deletions = []struct {
	term  string
	facts func(*scene)
	of    func(p *Policy, t *Terms) (own, total float64)
}{
	{"start", nil, func(_ *Policy, t *Terms) (float64, float64) { return t.StartMs, t.StartMs }},
	{"reuse", func(s *scene) {
		s.sit.Sources = nil
		for i := range s.candidates {
			s.candidates[i].MatchedTokens = 0
		}
	}, nil},
	{"still there", func(s *scene) {
		for i := range s.candidates {
			w := *s.candidates[i].Worker
			w.View.AtMs, w.View.Trust = s.sit.NowMs, 1
			s.candidates[i].Worker = &w
		}
	}, nil},
	{"prefill", nil, func(_ *Policy, t *Terms) (float64, float64) { return t.reachMs(), t.reachMs() }},
	{"load", nil, func(_ *Policy, t *Terms) (float64, float64) {
		return positive(t.LoadMs), positive(t.LoadMs)
	}},
	{"pull", func(s *scene) { s.sit.Sources = nil }, nil},
	{"room", nil, func(_ *Policy, t *Terms) (float64, float64) { return positive(t.RoomMs), positive(t.RoomMs) }},
	{"doubt", nil, func(_ *Policy, t *Terms) (float64, float64) { return t.DoubtMs, t.DoubtMs }},
	{"distance", nil, func(_ *Policy, t *Terms) (float64, float64) {
		return positive(t.DistanceMs), positive(t.DistanceMs)
	}},
	{"hand-over", nil, func(_ *Policy, t *Terms) (float64, float64) { return positive(t.HandMs), positive(t.HandMs) }},
	{"queue", nil, func(_ *Policy, t *Terms) (float64, float64) { return 0, positive(t.QueueMs) }},
	{"gap", nil, func(p *Policy, t *Terms) (float64, float64) { return 0, p.Theta * positive(t.GapMs) }},
	{"stall", nil, func(p *Policy, t *Terms) (float64, float64) { return 0, p.Theta * positive(t.StallMs) }},
	{"assumed", nil, func(_ *Policy, t *Terms) (float64, float64) { return 0, t.AssumedMs }},
	{"own-time limit", func(s *scene) { s.policy.OwnLimitMs = maxBudgetMs }, nil},
	{"budget", func(s *scene) { s.req.FirstTokenBudgetMs, s.req.GapBudgetMs, s.req.DeadlineMs = 0, 0, 0 }, nil},
	{"tie by reuse and hash", func(s *scene) {
		// Without the tie's reach and without the hash the first listed wins.
		s.policy.TieMs = 0
		for i := range s.candidates {
			w := *s.candidates[i].Worker
			w.nameHash = 1
			s.candidates[i].Worker = &w
		}
	}, nil},
}

// chosenWithout decides a scene without a term; empty: nobody is chosen.
func chosenWithout(t *testing.T, s scene, i int) string {
	t.Helper()
	s.candidates = slices.Clone(s.candidates)
	s.decision = Decision{}
	if facts := deletions[i].facts; facts != nil {
		facts(&s)
	}
	d := &s.decision
	if err := Decide(&s.req, s.candidates, &s.policy, s.sit, d); err != nil {
		t.Fatal(err)
	}
	if of := deletions[i].of; of != nil {
		p := newPricer(&s.req, &s.policy, s.sit)
		p.meanLive = d.Survey.MeanLive
		for k := range d.Terms {
			own, total := of(&s.policy, &d.Terms[k])
			d.Terms[k].OwnMs, d.Terms[k].TotalMs = d.Terms[k].OwnMs-own, d.Terms[k].TotalMs-total
		}
		terms, survey := d.Terms, d.Survey
		d.reset(0)
		d.Terms, d.Survey = terms, survey
		d.Survey.BestOwnMs = math.NaN()
		d.settle(&p, s.candidates)
	}
	if d.Chosen < 0 {
		return ""
	}
	return s.candidates[d.Chosen].Name
}

// Every term of the rule earns its place: testdata/terms lists, for each, the
// transcripts whose choice is another one without it. A term that no
// transcript needs is a fault, and a change of the table is seen.
func TestEveryTermFlipsATranscript(t *testing.T) {
	flips := make([][]string, len(deletions))
	files, err := filepath.Glob("testdata/rule/*")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(string(text), "\n")
		datadriven.RunTestFromString(t, string(text), func(t *testing.T, d *datadriven.TestData) string {
			s := parseScene(t, d)
			if Decide(&s.req, s.candidates, &s.policy, s.sit, &s.decision) != nil || s.decision.Chosen < 0 {
				return d.Expected
			}
			chosen := s.candidates[s.decision.Chosen].Name
			for i := range deletions {
				if without := chosenWithout(t, *s, i); without != chosen && without != "" {
					flips[i] = append(flips[i], fmt.Sprintf("%s: %s (%s → %s)", filepath.Base(path), titleOf(lines, d), chosen, without))
				}
			}
			return d.Expected
		})
	}
	datadriven.RunTest(t, "testdata/terms", func(t *testing.T, d *datadriven.TestData) string {
		var b strings.Builder
		for i := range deletions {
			fmt.Fprintf(&b, "%s\n", deletions[i].term)
			if len(flips[i]) == 0 {
				t.Errorf("no transcript needs the term %q", deletions[i].term)
			}
			for _, f := range flips[i] {
				fmt.Fprintf(&b, "  %s\n", f)
			}
		}
		return b.String()
	})
}

// titleOf is the first sentence of the comment above a transcript, or of the
// last one before it with the number of the transcript under it.
func titleOf(lines []string, d *datadriven.TestData) string {
	_, number, _ := strings.Cut(d.Pos, ":")
	var at int
	if _, err := fmt.Sscan(number, &at); err != nil {
		return d.Pos
	}
	title, under := "", 1
	i := min(at, len(lines)) - 2
	for ; i >= 0 && !strings.HasPrefix(lines[i], "#"); i-- {
		if strings.HasPrefix(lines[i], "place ") {
			under++
		}
	}
	for ; i >= 0 && strings.HasPrefix(lines[i], "#"); i-- {
		title = strings.TrimSpace(strings.TrimPrefix(lines[i], "#")) + " " + title
	}
	first, _, _ := strings.Cut(strings.TrimSpace(title), ". ")
	first = strings.TrimSuffix(first, ".")
	if under > 1 {
		first += fmt.Sprintf(" [%d]", under)
	}
	return first
}
