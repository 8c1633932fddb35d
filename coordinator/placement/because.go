package placement

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Because is one sentence: the reason that decided, in the words and figures
// of the terms. It is made once for a decision.
func (d *Decision) Because(candidates []Candidate) string {
	if d.because != "" {
		return d.because
	}
	if d.Chosen < 0 {
		return d.RefusalDetail(candidates)
	}
	var room [512]byte
	b := d.appendBecause(room[:0], candidates)
	if d.scratch == nil {
		d.because = string(b)
	} else {
		d.because = d.scratch.texts.keep(b)
	}
	return d.because
}

// textRoom is the memory that sentences are cut out of.
const textRoom = 16 << 10

// texts keeps sentences side by side, so that not each of them is memory of
// its own.
type texts struct{ room strings.Builder }

func (t *texts) keep(b []byte) string {
	if t.room.Cap()-t.room.Len() < len(b) {
		t.room = strings.Builder{}
		t.room.Grow(max(textRoom, len(b)))
	}
	from := t.room.Len()
	t.room.Write(b)
	return t.room.String()[from:]
}

func (d *Decision) appendBecause(b []byte, candidates []Candidate) []byte {
	c, t := &candidates[d.Chosen], &d.Terms[d.Chosen]
	if d.Marks&MarkLastResort != 0 {
		b = appendAll(b, "last resort, nothing better is left: ", c.Name, " is ", why(c.Worker, t.Reason), "; ")
	}
	switch rival := d.rival(); {
	case d.Redirected():
		first := "lowest total"
		if rival < 0 {
			first = "the only worker that may be chosen"
		}
		most, mt := &candidates[d.MostReuse], &d.Terms[d.MostReuse]
		b = appendThousands(appendAll(b, first, "; the longest prefix ("), mt.ReuseTokens)
		b = d.appendPassedOver(appendAll(b, " tokens) is on ", most.Name, ", "), most.Worker, t, mt)
	case rival < 0:
		b = append(b, "the only worker that may be chosen"...)
	case d.Tied && d.Terms[rival].ReuseTokens < t.ReuseTokens:
		b = appendAll(b, "equal to ", candidates[rival].Name, " within the tie; it holds more of the prompt (")
		b = append(appendThousands(b, t.ReuseTokens), " tokens)"...)
	case d.Tied:
		b = append(b, "equal to others within the tie; decided by the hash of the prompt or request and the worker"...)
	case t.ReuseTokens > 0 && d.Chosen == d.MostReuse:
		b = appendThousands(append(b, "lowest total; holds "...), t.ReuseTokens)
		b = appendNumber(append(b, " of the prompt's tokens, which saves more than it waits ("...), t.StartMs)
		b = append(b, " ms)"...)
	default:
		name, lead := d.largest(&d.Terms[rival], t)
		b = appendNumber(appendAll(b, "lowest total; against ", candidates[rival].Name, " the ", name, " decides ("), lead)
		b = append(b, " ms less)"...)
	}
	switch {
	case t.ReuseTokens == Unknown:
		b = append(b, "; reuse unknown"...)
	case d.MostReuse < 0:
		b = append(b, "; no worker is known to hold a prefix"...)
	}
	if t.LoadMs > 0 {
		b = appendThousands(append(b, "; reading "...), t.HostTokens)
		b = append(b, " tokens from host memory takes "...)
		if t.Pull.Asked() {
			b = append(b, "on average "...) // they may be gone
		}
		b = appendNumber(b, t.LoadMs)
		b = appendAll(b, " ms (", c.Host.Figure.String(), " bandwidth")
		if c.Host.Link != "" {
			b = appendAll(b, " of ", c.Host.Link)
		}
		b = append(b, ')')
	}
	switch t.Pull.Note {
	case PullTaken:
		b = append(appendThousands(append(b, "; pulling "...), t.Pull.Tokens), " tokens"...)
		b = t.Pull.appendWay(b)
		switch spares := t.PrefillMs - t.ComputeMs; {
		case t.Pull.Behind < t.ReuseTokens:
			b = append(b, " costs less than reading back what is in host memory and computing the rest"...)
		case t.Pull.TransferMs < spares:
			b = append(appendNumber(append(b, " costs less than computing them ("...), spares), " ms)"...)
		default:
			b = append(appendNumber(append(b, " costs less than computing them ("...), spares), " ms), doubt and the streams beside them counted"...)
		}
	case PullSpare:
		b = append(appendNumber(append(b, "; its own are still there with a probability of "...), 100*t.StillThere), " %, else "...)
		b = append(t.Pull.appendWay(append(appendThousands(b, t.Pull.Tokens), " tokens are pulled"...)), " and not computed"...)
	}
	if t.Partner >= 0 {
		b = appendAll(b, "; decoded by ", c.Partners[t.Partner].Worker.Name, " (hand-over ")
		b = append(appendNumber(b, t.HandMs), " ms)"...)
	}
	if d.Marks&MarkQueueUnknown != 0 {
		b = append(b, "; queue unknown, counted by own claims"...)
	}
	return b
}

// appendWay says what moving takes, and by what.
func (p *Pull) appendWay(b []byte) []byte {
	b = appendNumber(append(b, " ("...), p.TransferMs)
	b = appendNumber(append(b, " ms at "...), p.BytesPerMs/1000)
	return appendAll(b, " MB/s, ", p.Figure.String(), ")")
}

// appendPassedOver says what kept the holder of the longest prefix from
// winning.
func (d *Decision) appendPassedOver(b []byte, w *Worker, chosen, most *Terms) []byte {
	if !most.Placeable {
		return appendAll(b, "which could not be chosen: ", why(w, most.Reason))
	}
	if most.Missed != BudgetNone && chosen.Missed == BudgetNone {
		return appendAll(b, "which would miss the ", most.Missed.String())
	}
	if most.OverLimit {
		return append(appendNumber(append(b, "whose own time ("...), most.OwnMs), " ms) is over the limit"...)
	}
	name, delta := d.largest(most, chosen)
	if name != "start" {
		return append(appendNumber(appendAll(b, "whose ", name, " costs "), delta), " ms more"...)
	}
	b = appendNumber(append(b, "whose wait ("...), most.StartMs)
	if delta > chosen.reachMs()-most.reachMs() {
		b = append(b, " ms) costs more than "...)
	} else {
		second, more := d.largestBut(most, chosen, name)
		b = append(appendNumber(appendAll(b, " ms) and ", second, " ("), more), " ms more) cost more than "...)
	}
	verb, tokens, ms := "computing ", chosen.UncachedTokens, chosen.ComputeMs
	switch chosen.Pull.Note {
	case PullTaken:
		verb, tokens, ms = "pulling ", chosen.Pull.Tokens, chosen.Pull.TransferMs
	case PullSpare:
		return append(appendNumber(append(b, "pulling what is gone and computing the rest ("...), chosen.PullMs), " ms)"...)
	}
	b = append(appendThousands(append(b, verb...), tokens), " tokens ("...)
	return append(appendNumber(b, ms), " ms)"...)
}

func appendAll(b []byte, texts ...string) []byte {
	for _, text := range texts {
		b = append(b, text...)
	}
	return b
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
	name, _ := d.largest(&d.Terms[rival], &d.Terms[d.Chosen])
	return name
}

// largest is the term in which worse exceeds better most.
func (d *Decision) largest(worse, better *Terms) (string, float64) {
	return d.largestBut(worse, better, "")
}

// largestBut is the term in which worse exceeds better most, weighted as in the
// total, but for the one named. Terms that either does not know are left out.
func (d *Decision) largestBut(worse, better *Terms, but string) (string, float64) {
	name, most := "total", math.Inf(-1)
	for _, f := range [...]struct {
		name          string
		worse, better float64
		weight        float64
	}{
		{"start", worse.StartMs, better.StartMs, 1},
		{worse.reachName(better), worse.reachMs(), better.reachMs(), 1},
		{"load", positive(worse.LoadMs), positive(better.LoadMs), 1},
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
	if t.Pull.Asked() || better.Pull.Asked() {
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
	if d.adapter != "" && byReason[ReasonNoAdapter] != nil {
		return "no worker serves adapter " + d.adapter + " and could be chosen: " + strings.Join(parts, "; ")
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

// PassedOver is why a candidate that could be chosen was left aside whatever its
// total: its own time is over the limit, or it misses a budget that the chosen
// keeps, or for which the request was refused. It is empty for all others.
func (d *Decision) PassedOver(i int, policy *Policy) string {
	t := &d.Terms[i]
	if i == d.Chosen || !t.Placeable {
		return ""
	}
	switch {
	case t.Missed != BudgetNone && (d.Chosen < 0 || d.Terms[d.Chosen].Missed == BudgetNone):
		return "misses the " + t.Missed.String()
	case t.OverLimit && d.Chosen >= 0 && !d.Terms[d.Chosen].OverLimit:
		return fmt.Sprintf("own time over limit %s (best + %s%% + %s ms)", number(ownLimit(d.Survey.BestOwnMs, policy)),
			strconv.FormatFloat(policy.OwnLimitRatio*100, 'f', -1, 64), strconv.FormatFloat(policy.OwnLimitMs, 'f', -1, 64))
	}
	return ""
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
func number(ms float64) string { return string(appendNumber(nil, ms)) }

func appendNumber(b []byte, ms float64) []byte {
	switch size := math.Abs(ms); {
	case math.IsNaN(ms):
		return append(b, '?')
	case size < 9.95:
		return strconv.AppendFloat(b, ms, 'f', 1, 64)
	case size < 1<<53:
		return strconv.AppendInt(b, int64(math.RoundToEven(ms)), 10)
	}
	return strconv.AppendFloat(b, ms, 'f', 0, 64)
}

// appendThousands prints a count with separators.
func appendThousands(b []byte, n int) []byte {
	from := len(b)
	b = strconv.AppendInt(b, int64(n), 10)
	for i := len(b) - 3; i > from; i -= 3 {
		b = slices.Insert(b, i, ',')
	}
	return b
}

func thousands(n int) string { return string(appendThousands(nil, n)) }
