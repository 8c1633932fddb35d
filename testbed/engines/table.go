package engines

import (
	"fmt"
	"io"
	"sync"
)

// Result is one request: what its placement expected and what happened.
type Result struct {
	// Phase names the part of the run it belongs to.
	Phase string
	// Prompt, Expected and Actual are tokens: of the prompt, of it expected to
	// be reused (-1: nothing was said), and reused.
	Prompt, Expected, Actual int
	// Class is what the coordinator calls the difference.
	Class string
}

// Row sums the results of a phase.
type Row struct {
	Phase                                   string
	Requests                                int
	Prompt, Expected, Actual, Covered, Over int
	// Unknown counts requests of which nothing was expected for want of
	// knowledge.
	Unknown int
	Classes map[string]int
}

// Recall is the share of reused tokens that was expected; 1 if none were.
func (r *Row) Recall() float64 { return ratio(r.Covered, r.Actual, 1) }

// OverRatio is the share of prompt tokens that were expected in vain.
func (r *Row) OverRatio() float64 { return ratio(r.Over, r.Prompt, 0) }

func ratio(part, whole int, empty float64) float64 {
	if whole == 0 {
		return empty
	}
	return float64(part) / float64(whole)
}

// Table collects results. It is safe for concurrent use.
type Table struct {
	mu      sync.Mutex
	order   []string
	rows    map[string]*Row
	results []Result
}

// Add takes a result.
func (t *Table) Add(r Result) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.results = append(t.results, r)
	row := t.rows[r.Phase]
	if row == nil {
		if t.rows == nil {
			t.rows = map[string]*Row{}
		}
		row = &Row{Phase: r.Phase, Classes: map[string]int{}}
		t.rows[r.Phase] = row
		t.order = append(t.order, r.Phase)
	}
	row.add(r)
}

func (r *Row) add(res Result) {
	r.Requests++
	r.Prompt += res.Prompt
	r.Actual += res.Actual
	r.Classes[res.Class]++
	if res.Expected < 0 {
		r.Unknown++
		return
	}
	r.Expected += res.Expected
	r.Covered += min(res.Expected, res.Actual)
	r.Over += max(0, res.Expected-res.Actual)
}

// Row is the sum of a phase; no phase: of all but those named in except.
func (t *Table) Row(phase string, except ...string) Row {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := Row{Phase: phase, Classes: map[string]int{}}
	for _, r := range t.results {
		skip := phase != "" && r.Phase != phase
		for _, e := range except {
			skip = skip || r.Phase == e
		}
		if !skip {
			out.add(r)
		}
	}
	return out
}

// Print writes the table.
func (t *Table) Print(w io.Writer) {
	t.mu.Lock()
	rows := make([]Row, 0, len(t.order)+1)
	all := Row{Phase: "all", Classes: map[string]int{}}
	for _, name := range t.order {
		rows = append(rows, *t.rows[name])
	}
	for _, r := range t.results {
		all.add(r)
	}
	t.mu.Unlock()
	fmt.Fprintf(w, "%-28s %9s %9s %9s %9s %8s %8s %8s\n", "phase", "requests", "prompt", "expected", "reused", "found", "too many", "unknown")
	for _, r := range append(rows, all) {
		fmt.Fprintf(w, "%-28s %9d %9d %9d %9d %7.2f%% %7.2f%% %8d\n", r.Phase, r.Requests, r.Prompt, r.Expected, r.Actual, 100*r.Recall(), 100*r.OverRatio(), r.Unknown)
	}
	fmt.Fprintf(w, "classes: %v\n", all.Classes)
}
