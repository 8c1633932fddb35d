package placement

import (
	"fmt"
	"math"
	"slices"

	"waypost/gossip/ledger"
)

// WhatIfKind says which fact a WhatIf changes.
type WhatIfKind string

// The kinds of change.
const (
	// WhatIfWaits: the worker waits less.
	WhatIfWaits WhatIfKind = "waits"
	// WhatIfHolds: the worker holds more of the prompt.
	WhatIfHolds WhatIfKind = "holds"
	// WhatIfPulls: the worker's way to the source of its pull is faster.
	WhatIfPulls WhatIfKind = "pulls"
	// WhatIfFree: the worker's exclusion falls away.
	WhatIfFree WhatIfKind = "free"
)

// WhatIf is one change of a recorded decision's facts that gives the request
// to another worker.
type WhatIf struct {
	// Worker is the name of the worker that would be chosen.
	Worker string
	// Kind says what would have to change.
	Kind WhatIfKind
	// StartMs is, for WhatIfWaits, the start below which it would be chosen;
	// NowMs is the recorded one.
	StartMs, NowMs float64
	// Tokens is, for WhatIfHolds, the least match; NowTokens the recorded one.
	Tokens, NowTokens int
	// BytesPerMs is, for WhatIfPulls, the bandwidth of the way from which on
	// the worker would be chosen; NowBytesPerMs the recorded one, from Figure.
	BytesPerMs, NowBytesPerMs float64
	Figure                    Figure
	// Reason is, for WhatIfFree, what would have to fall away.
	Reason Reason

	shiftMs float64
	source  int
}

// Sentence says it for a person.
func (w WhatIf) Sentence() string {
	switch w.Kind {
	case WhatIfWaits:
		below := math.Floor(w.StartMs) // a rounded-up bound would promise too much
		if below < 10 {
			below = math.Floor(w.StartMs*10) / 10
		}
		return fmt.Sprintf("%s waits < %s ms (now %s)", w.Worker, number(below), number(w.NowMs))
	case WhatIfHolds:
		now := "now unknown"
		if w.NowTokens != Unknown {
			now = "now " + thousands(w.NowTokens)
		}
		return fmt.Sprintf("%s holds ≥ %s tokens (%s)", w.Worker, thousands(w.Tokens), now)
	}
	if w.Kind == WhatIfPulls {
		return fmt.Sprintf("%s could pull at ≥ %s (now %s, %s)", w.Worker, perSec(w.BytesPerMs), perSec(w.NowBytesPerMs), w.Figure)
	}
	return fmt.Sprintf("%s could be chosen (now %s)", w.Worker, w.Reason)
}

// perSec prints a bandwidth.
func perSec(bytesPerMs float64) string {
	if bytesPerMs < 1e6 {
		return number(bytesPerMs/1e3) + " MB/s"
	}
	return number(bytesPerMs/1e6) + " GB/s"
}

// maxWhatIfs bounds the answer of WouldChange.
const maxWhatIfs = 4

// WouldChange lists changes that would give the request to another worker,
// found by deciding again with the changed fact; d is the recorded decision,
// over the record's candidates.
func (r *Record) WouldChange(d *Decision) []WhatIf {
	if d.Chosen < 0 {
		return nil
	}
	var found []WhatIf
	for _, i := range d.rivals(r.Candidates) {
		if len(found) >= maxWhatIfs {
			break
		}
		if d.Terms[i].Placeable {
			if w, ok := r.waitsLess(d, i); ok {
				found = append(found, w)
			}
			if w, ok := r.holdsMore(d, i); ok {
				found = append(found, w)
			}
			if w, ok := r.pullsFaster(d, i); ok {
				found = append(found, w)
			}
			continue
		}
		w := WhatIf{Worker: r.Candidates[i].Name, Kind: WhatIfFree, Reason: d.Terms[i].Reason}
		if r.flips(w, i) {
			found = append(found, w)
		}
	}
	return found[:min(len(found), maxWhatIfs)]
}

// rivals are the candidates worth asking about, best total first. One that
// the request itself excludes is not.
func (d *Decision) rivals(candidates []Candidate) []int {
	order := make([]int, 0, len(candidates))
	for _, i := range d.cheapest(nil, 2*maxWhatIfs) {
		switch d.Terms[i].Reason {
		case ReasonExcludedByRequest, ReasonSuperseded, ReasonTenant, ReasonTooLong, ReasonNoAdapter, ReasonOutside, ReasonLost:
			continue
		}
		if i != d.Chosen {
			order = append(order, i)
		}
	}
	return order
}

// waitsLess finds the start below which candidate i would be chosen.
func (r *Record) waitsLess(d *Decision, i int) (WhatIf, bool) {
	c := &r.Candidates[i]
	w := WhatIf{Worker: c.Name, Kind: WhatIfWaits, NowMs: d.Terms[i].StartMs}
	low, high := 0.0, c.Waiting.QueueMs(r.Situation.NowMs)
	w.shiftMs = high
	if high <= 0 || !r.flips(w, i) {
		return w, false
	}
	for range 40 {
		w.shiftMs = (low + high) / 2
		if r.flips(w, i) {
			high = w.shiftMs
		} else {
			low = w.shiftMs
		}
	}
	w.shiftMs = high
	changed := r.Apply(w)
	var again Decision
	if changed.Redecide(&again) != nil {
		return w, false
	}
	w.StartMs = again.Terms[i].StartMs
	return w, w.StartMs < w.NowMs
}

// holdsMore finds the least match with which candidate i would be chosen.
func (r *Record) holdsMore(d *Decision, i int) (WhatIf, bool) {
	c := &r.Candidates[i]
	block := max(c.BlockTokens, 1)
	w := WhatIf{Worker: c.Name, Kind: WhatIfHolds, NowTokens: d.Terms[i].ReuseTokens}
	low := max(w.NowTokens, 0) / block
	high := (r.Request.PromptTokens + r.Request.GeneratedTokens - 1) / block
	w.Tokens = high * block
	if high <= low || !r.flips(w, i) {
		return w, false
	}
	for high-low > 1 {
		middle := low + (high-low)/2
		w.Tokens = middle * block
		if r.flips(w, i) {
			high = middle
		} else {
			low = middle
		}
	}
	w.Tokens = high * block
	return w, true
}

// maxBytesPerMs is a bandwidth beyond any link: 1 TB/s.
const maxBytesPerMs = 1e9

// pullsFaster finds the bandwidth from which on candidate i would be chosen,
// in steps of a tenth.
func (r *Record) pullsFaster(d *Decision, i int) (WhatIf, bool) {
	c, pull := &r.Candidates[i], &d.Terms[i].Pull
	if pull.Note < PullDearer {
		return WhatIf{}, false
	}
	path := &c.Paths[pull.Source]
	w := WhatIf{Worker: c.Name, Kind: WhatIfPulls, NowBytesPerMs: path.BytesPerMs, Figure: path.Figure, source: pull.Source}
	if w.BytesPerMs = maxBytesPerMs; !r.flips(w, i) {
		return w, false
	}
	const step = 1.1
	low, high := 0, int(math.Ceil(math.Log(maxBytesPerMs/path.BytesPerMs)/math.Log(step)))
	at := func(steps int) float64 { return path.BytesPerMs * math.Pow(step, float64(steps)) }
	for high-low > 1 {
		middle := (low + high) / 2
		if w.BytesPerMs = at(middle); r.flips(w, i) {
			high = middle
		} else {
			low = middle
		}
	}
	w.BytesPerMs = at(high)
	return w, high > 0 && r.flips(w, i)
}

// flips reports whether the change gives the request to candidate i.
func (r *Record) flips(w WhatIf, i int) bool {
	changed := r.Apply(w)
	var d Decision
	return changed.Redecide(&d) == nil && d.Chosen == i
}

// Apply returns the record with the change made.
func (r *Record) Apply(w WhatIf) Record {
	changed := *r
	changed.Candidates = slices.Clone(r.Candidates)
	i := slices.IndexFunc(changed.Candidates, func(c Candidate) bool { return c.Name == w.Worker })
	if i < 0 {
		return changed
	}
	c := &changed.Candidates[i]
	worker := *c.Worker
	c.Worker = &worker
	now := r.Situation.NowMs
	switch w.Kind {
	case WhatIfWaits:
		if w.shiftMs >= worker.Waiting.QueueMs(now) {
			worker.Waiting = ledger.Waiting{F: now, S: now}
		} else {
			worker.Waiting.Shift(-w.shiftMs)
		}
	case WhatIfHolds:
		c.MatchedTokens, c.LowerTokens = w.Tokens, 0
		if worker.View.Kind == ViewBlind {
			c.Predicted = true
		}
	case WhatIfPulls:
		c.Paths = slices.Clone(c.Paths)
		c.Paths[w.source].BytesPerMs = w.BytesPerMs
	case WhatIfFree:
		worker.Barred, worker.Doubted, worker.AwaySinceMs = ReasonNone, ReasonNone, math.NaN()
		if w.Reason.ofAge() {
			worker.LoadAtMs = now
		}
	}
	return changed
}
