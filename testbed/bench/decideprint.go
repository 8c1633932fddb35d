package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// decideRow is one object of the JSON output.
type decideRow struct {
	Workers             int       `json:"workers"`
	Load                Load      `json:"load"`
	OpenClaimsPerWorker int       `json:"openClaimsPerWorker"`
	Matches             float64   `json:"matches"`
	Priced              float64   `json:"priced"`
	DecideNs            quantiles `json:"decideNs"`
	LookupNs            quantiles `json:"lookupNs"`
	RuleNs              quantiles `json:"ruleNs"`
	RecordNs            quantiles `json:"recordNs"`
	Allocations         float64   `json:"allocations"`
	RecordAllocations   float64   `json:"recordAllocations"`
}

// IsEmpty says that nothing was measured.
func (r *DecideReport) IsEmpty() bool { return len(r.Fleets) == 0 }

// WriteJSON writes one object a line.
func (r *DecideReport) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	for i := range r.Fleets {
		f := &r.Fleets[i]
		if err := e.Encode(decideRow{
			Workers: f.Workers, Load: f.Load, OpenClaimsPerWorker: f.ClaimsPerWorker, Matches: f.Matches, Priced: f.Priced,
			DecideNs: f.Decide, LookupNs: f.Lookup, RuleNs: f.Rule, RecordNs: f.Record, Allocations: f.Allocs, RecordAllocations: f.RecordAllocs,
		}); err != nil {
			return err
		}
	}
	return nil
}

// WriteText writes tables for people.
func (r *DecideReport) WriteText(out io.Writer) error {
	p := &printer{w: tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)}
	p.text("Decisions for prompts of about %d blocks whose names are known, µs p50 / p99", queryBlocks)
	p.line("workers", "load", "claims each", "matches", "priced", "lookup", "rule", "record", "all together", "allocations", "of the record")
	for i := range r.Fleets {
		f := &r.Fleets[i]
		p.line(num(f.Workers), string(f.Load), num(f.ClaimsPerWorker), fmt.Sprintf("%.1f", f.Matches), fmt.Sprintf("%.1f", f.Priced),
			micros(f.Lookup), micros(f.Rule), micros(f.Record), micros(f.Decide), fmt.Sprintf("%.2f", f.Allocs), fmt.Sprintf("%.1f", f.RecordAllocs))
	}
	p.writeTargets(r.targets())
	p.line("")
	if r.Quick {
		p.text("--quick: short windows, and no fleet of 8,000 with 64 claims each; leave it out for the figures that count")
	}
	p.text("took %.0f s; timings are the best of %d windows by the wall clock; records are kept as of a thousand decisions a second", r.Took.Seconds(), repetitions)
	return p.flush()
}

// decideBounds are the figures to reach, µs.
var decideBounds = map[int]struct{ p50, p99 float64 }{1000: {10, 25}, 8000: {40, 100}}

// What a decision may allocate, and how much slower open claims may make it.
const (
	decideAllocs = 2
	claimsFactor = 1.1
)

func (r *DecideReport) targets() (out []target) {
	free := map[int]*Decided{}
	for i := range r.Fleets {
		f := &r.Fleets[i]
		if f.Load == LoadBusy && f.ClaimsPerWorker == 0 {
			free[f.Workers] = f
		}
		bound, ok := decideBounds[f.Workers]
		if !ok {
			continue
		}
		name := fmt.Sprintf("%d workers, %s, %d claims each: ", f.Workers, f.Load, f.ClaimsPerWorker)
		out = append(out, atMostBoth(name+"decision", f.Decide, bound.p50, bound.p99), atMost(name+"its allocations with the record's", "", f.Allocs+f.RecordAllocs, decideAllocs))
		if base := free[f.Workers]; base != nil && f.ClaimsPerWorker > 0 {
			out = append(out, atMost(name+"rule, p50 of that without claims", "×", f.Rule.P50/base.Rule.P50, claimsFactor))
		}
	}
	return out
}
