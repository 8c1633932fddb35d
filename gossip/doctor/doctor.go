package doctor

import (
	"slices"
	"strings"

	waypostv1 "waypost/proto/waypost/v1"
)

// The states of a check. Unknown says that it could not be looked at.
const (
	OK      = "ok"
	Problem = "problem"
	Unknown = "unknown"
)

// Names are the checks, in the order in which they are shown.
var Names = []string{
	"engine-reachable", "engine-events", "engine-replay", "engine-cached-tokens", "engine-block-size", "boundary", "tokenizer-probe",
	"nvml-driver", "gpu-fault", "mesh-udp", "mesh-key", "lane", "ports", "clock-skew", "cert-expiry", "disk", "raft-quorum", "policy-age",
	"version-skew", "coordinator-cpu",
}

// MaxChecks bounds the checks of one host.
const MaxChecks = 512

// maxText bounds each text of a check: engines and users name things.
const maxText = 2048

// List collects checks. Beyond MaxChecks those that found nothing make room.
type List struct {
	checks []*waypostv1.Check
}

// Add adds a check.
func (l *List) Add(check, state, subject, what, cause, fix string) {
	clip := func(s string) *string {
		// No message takes a text that is no UTF-8, as a command line may be, or
		// one that ends within a character.
		s = strings.ToValidUTF8(s[:min(len(s), maxText)], "?")
		return &s
	}
	l.checks = append(l.checks, &waypostv1.Check{Check: &check, State: &state, Subject: clip(subject), What: clip(what), Cause: clip(cause), Fix: clip(fix)})
}

// Good adds a check that found nothing wrong, Bad one that did.
func (l *List) Good(check, subject, what string) { l.Add(check, OK, subject, what, "", "") }

// Bad adds a problem with what to do about it.
func (l *List) Bad(check, subject, what, cause, fix string) {
	l.Add(check, Problem, subject, what, cause, fix)
}

// Take adds checks that another process made, ageMs ago. Names and states that
// are none are left out.
func (l *List) Take(checks []*waypostv1.Check, ageMs float64) {
	for _, c := range checks[:min(len(checks), MaxChecks)] {
		if !slices.Contains(Names, c.GetCheck()) || !slices.Contains(states, c.GetState()) {
			continue
		}
		l.Add(c.GetCheck(), c.GetState(), c.GetSubject(), c.GetWhat(), c.GetCause(), c.GetFix())
		l.checks[len(l.checks)-1].AgeMs = &ageMs
	}
}

// states are the states, those to look at first.
var states = []string{Problem, Unknown, OK}

// Sorted are the checks, problems first, then what is unknown, each by name and
// subject.
func (l *List) Sorted() []*waypostv1.Check {
	out := slices.Clone(l.checks)
	rank := func(c *waypostv1.Check) int {
		return slices.Index(states, c.GetState())*len(Names) + slices.Index(Names, c.GetCheck())
	}
	slices.SortStableFunc(out, func(a, b *waypostv1.Check) int {
		if d := rank(a) - rank(b); d != 0 {
			return d
		}
		switch {
		case a.GetSubject() < b.GetSubject():
			return -1
		case a.GetSubject() > b.GetSubject():
			return 1
		}
		return 0
	})
	return out
}

// Bounded are the first MaxChecks of Sorted.
func (l *List) Bounded() []*waypostv1.Check {
	out := l.Sorted()
	return out[:min(len(out), MaxChecks)]
}

// Problems is how many problems each check found; a check that was made and found
// none has 0.
func Problems(checks []*waypostv1.Check) map[string]int {
	out := map[string]int{}
	for _, c := range checks {
		n := 0
		if c.GetState() == Problem {
			n = 1
		}
		out[c.GetCheck()] += n
	}
	return out
}
