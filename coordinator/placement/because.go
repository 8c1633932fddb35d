package placement

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Because is one sentence: the reason that decided, in the words and figures
// of the terms.
func (d *Decision) Because(candidates []Candidate) string {
	if d.Chosen < 0 {
		return d.RefusalDetail(candidates)
	}
	c, t := &candidates[d.Chosen], &d.Terms[d.Chosen]
	var b strings.Builder
	if d.Marks&MarkLastResort != 0 {
		fmt.Fprintf(&b, "last resort, nothing better is left: %s is %s; ", c.Name, why(c.Worker, t.Reason))
	}
	switch rival := d.rival(); {
	case d.Redirected() && rival < 0:
		most, mt := &candidates[d.MostReuse], &d.Terms[d.MostReuse]
		fmt.Fprintf(&b, "the only worker that may be chosen; the longest prefix (%s tokens) is on %s, %s",
			thousands(mt.ReuseTokens), most.Name, d.passedOver(most.Worker, t, mt))
	case rival < 0:
		b.WriteString("the only worker that may be chosen")
	case d.Redirected():
		most, mt := &candidates[d.MostReuse], &d.Terms[d.MostReuse]
		fmt.Fprintf(&b, "lowest total; the longest prefix (%s tokens) is on %s, %s",
			thousands(mt.ReuseTokens), most.Name, d.passedOver(most.Worker, t, mt))
	case d.Tied && d.Terms[rival].ReuseTokens < t.ReuseTokens:
		fmt.Fprintf(&b, "equal to %s within the tie; it holds more of the prompt (%s tokens)", candidates[rival].Name, thousands(t.ReuseTokens))
	case d.Tied:
		b.WriteString("equal to others within the tie; decided by the hash of the prompt or request and the worker")
	case t.ReuseTokens > 0 && d.Chosen == d.MostReuse:
		fmt.Fprintf(&b, "lowest total; holds %s of the prompt's tokens, which saves more than it waits (%s ms)", thousands(t.ReuseTokens), number(t.StartMs))
	default:
		fmt.Fprintf(&b, "lowest total; against %s the %s decides (%s ms less)", candidates[rival].Name, d.DecidingTerm(), number(d.leadOf(rival)))
	}
	switch {
	case t.ReuseTokens == Unknown:
		b.WriteString("; reuse unknown")
	case d.MostReuse < 0:
		b.WriteString("; no worker is known to hold a prefix")
	}
	if t.Pull.Note == PullTaken {
		fmt.Fprintf(&b, "; pulling %s tokens (%s ms at %s MB/s, %s) costs less than computing them (%s ms)",
			thousands(t.Pull.Tokens), number(t.Pull.TransferMs), number(t.Pull.BytesPerMs/1000), t.Pull.Figure, number(t.PrefillMs-t.ComputeMs))
	}
	if t.Partner >= 0 {
		fmt.Fprintf(&b, "; decoded by %s (hand-over %s ms)", c.Partners[t.Partner].Worker.Name, number(t.HandMs))
	}
	if d.Marks&MarkQueueUnknown != 0 {
		b.WriteString("; queue unknown, counted by own claims")
	}
	return b.String()
}

// passedOver says what kept the holder of the longest prefix from winning.
func (d *Decision) passedOver(w *Worker, chosen, most *Terms) string {
	if !most.Placeable {
		return "which could not be chosen: " + why(w, most.Reason)
	}
	if most.Missed != BudgetNone && chosen.Missed == BudgetNone {
		return "which would miss the " + most.Missed.String()
	}
	if most.OverLimit {
		return fmt.Sprintf("whose own time (%s ms) is over the limit", number(most.OwnMs))
	}
	name, delta := d.largest(most, chosen, "")
	if name != "start" {
		return fmt.Sprintf("whose %s costs %s ms more", name, number(delta))
	}
	instead := fmt.Sprintf("computing %s tokens (%s ms)", thousands(chosen.UncachedTokens), number(chosen.ComputeMs))
	if chosen.Pull.Note == PullTaken {
		instead = fmt.Sprintf("pulling %s tokens (%s ms)", thousands(chosen.Pull.Tokens), number(chosen.Pull.TransferMs))
	}
	if delta > chosen.reachMs()-most.reachMs() {
		return fmt.Sprintf("whose wait (%s ms) costs more than %s", number(most.StartMs), instead)
	}
	second, more := d.largest(most, chosen, name)
	return fmt.Sprintf("whose wait (%s ms) and %s (%s ms more) cost more than %s", number(most.StartMs), second, number(more), instead)
}

// rival is the candidate the choice was made against: the best fallback; -1
// if there is none.
func (d *Decision) rival() int {
	if d.fallbackCount == 0 {
		return -1
	}
	return d.fallbacks[0]
}

// DecidingTerm is the term in which the chosen leads its rival most; empty
// without a rival.
func (d *Decision) DecidingTerm() string {
	rival := d.rival()
	if d.Chosen < 0 || rival < 0 {
		return ""
	}
	name, _ := d.largest(&d.Terms[rival], &d.Terms[d.Chosen], "")
	return name
}

// leadOf is the lead of the chosen over a candidate in the deciding term.
func (d *Decision) leadOf(rival int) float64 {
	_, delta := d.largest(&d.Terms[rival], &d.Terms[d.Chosen], "")
	return delta
}

// largest is the term in which worse exceeds better most, weighted as in the
// total, but for the one named. Terms that either does not know are left out.
func (d *Decision) largest(worse, better *Terms, but string) (string, float64) {
	name, most := "total", math.Inf(-1)
	for _, f := range [...]struct {
		name          string
		worse, better float64
		weight        float64
	}{
		{"start", worse.StartMs, better.StartMs, 1},
		{worse.reachName(better), worse.reachMs(), better.reachMs(), 1},
		{"hand-over", handMs(worse.HandMs), handMs(better.HandMs), 1},
		{"room", worse.RoomMs, better.RoomMs, 1},
		{"doubt", worse.DoubtMs, better.DoubtMs, 1},
		{"distance", worse.DistanceMs, better.DistanceMs, 1},
		{"queue", worse.QueueMs, better.QueueMs, 1},
		{"gap", worse.GapMs, better.GapMs, d.theta},
		{"stall", worse.StallMs, better.StallMs, d.theta},
		{"assumed gap and stall", worse.AssumedMs, better.AssumedMs, 1},
	} {
		if delta := f.weight * (f.worse - f.better); delta > most && f.name != but {
			name, most = f.name, delta
		}
	}
	return name, most
}

// reachName is the term that reachMs is compared under.
func (t *Terms) reachName(better *Terms) string {
	if t.Pull.Note == PullTaken || better.Pull.Note == PullTaken {
		return "pull"
	}
	return "prefill"
}

// handMs is a hand-over, 0 where there is none.
func handMs(v float64) float64 {
	if math.IsNaN(v) {
		return 0
	}
	return v
}

// maxNamed bounds the worker names in a refusal.
const maxNamed = 5

// RefusalDetail is one sentence for a person: what excluded the workers, by
// name.
func (d *Decision) RefusalDetail(candidates []Candidate) string {
	if d.Refusal.Reason == RefusedTenantOverShare {
		if math.IsNaN(d.Refusal.RetryAfterMs) {
			return d.tenantOver + "; ask again when one of its requests has ended"
		}
		return fmt.Sprintf("%s, and the pool has no headroom: the best worker waits %s ms", d.tenantOver, number(d.refusedWaitMs))
	}
	if d.Refusal.Reason != RefusedNoneEligible {
		best := math.NaN()
		for i := range d.Terms {
			if t := &d.Terms[i]; t.Placeable && !(best <= t.OwnMs) {
				best = t.OwnMs
			}
		}
		return fmt.Sprintf("no worker meets the budget; the best first-token time is %s ms", number(best))
	}
	if len(candidates) == 0 {
		return "no eligible worker: the pool has no workers"
	}
	if d.tenantBarred != "" {
		return "no eligible worker: " + d.tenantBarred
	}
	byReason := map[Reason][]string{}
	for i := range candidates {
		if i < len(d.Terms) {
			r := d.Terms[i].Reason
			byReason[r] = append(byReason[r], candidates[i].Name+detail(candidates[i].Worker, r))
		}
	}
	reasons := make([]Reason, 0, len(byReason))
	for r := range byReason {
		reasons = append(reasons, r)
	}
	slices.Sort(reasons)
	parts := make([]string, 0, len(reasons))
	for _, r := range reasons {
		names := byReason[r]
		more := ""
		if n := len(names) - maxNamed; n > 0 {
			names, more = names[:maxNamed], fmt.Sprintf(" and %d more", n)
		}
		parts = append(parts, fmt.Sprintf("%s: %s%s", r, strings.Join(names, ", "), more))
	}
	if len(reasons) == 1 {
		return "no eligible worker: all " + parts[0]
	}
	return "no eligible worker: " + strings.Join(parts, "; ")
}

// RefusedWorkers counts the workers per reason.
func (d *Decision) RefusedWorkers() map[string]int {
	counts := map[string]int{}
	for r, n := range d.Survey.Reasons {
		if r := Reason(r); r != ReasonNone && n > 0 {
			counts[r.String()] = n
		}
	}
	if d.Refusal.Reason == RefusedDeadline || d.Refusal.Reason == RefusedOverLimit {
		for i := range d.Terms {
			if d.Terms[i].Placeable && d.Terms[i].Missed != BudgetNone {
				counts["over_limit"]++
			}
		}
	}
	return counts
}

// Excluded is the text of a candidate's exclusion: the reason and what the
// fleet says of it. It is empty for a worker that could be chosen.
func (t *Terms) Excluded(w *Worker) string {
	if t.Placeable {
		return ""
	}
	return why(w, t.Reason)
}

// why is a reason with what the fleet says of it.
func why(w *Worker, r Reason) string { return r.String() + detail(w, r) }

// detail is what the fleet says of a reason, in brackets.
func detail(w *Worker, r Reason) string {
	switch {
	case r == w.Barred && w.BarredWhy != "":
		return " (" + w.BarredWhy + ")"
	case r == w.Doubted && w.DoubtedWhy != "":
		return " (" + w.DoubtedWhy + ")"
	}
	return ""
}

// number prints ms without decimals from 10 up, with one below.
func number(ms float64) string {
	if math.IsNaN(ms) {
		return "?"
	}
	if math.Abs(ms) < 9.95 {
		return strconv.FormatFloat(ms, 'f', 1, 64)
	}
	return strconv.FormatFloat(ms, 'f', 0, 64)
}

// thousands prints a count with separators.
func thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
