package sim

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// LedgerSummary is the result of a run of model ledger.
type LedgerSummary struct {
	Policy string `json:"policy"`
	Figures
	// WaitingMs are believed less true waiting ms of the workers, sampled at
	// placements; nil: the rule believes nothing.
	WaitingMs *Error `json:"waitingMs,omitempty"`
	// Residue counts claims that were still held 80 s after the last arrival.
	Residue   int         `json:"residue"`
	TTFTMeans []float64   `json:"ttftMeansMs"`
	Scope     LedgerScope `json:"scope"`
}

// LedgerScope says what the figures hold for.
type LedgerScope struct {
	Model        string  `json:"model"`
	Scenario     string  `json:"scenario"`
	Workers      int     `json:"workers"`
	Coordinators int     `json:"coordinators"`
	Seconds      float64 `json:"seconds"`
	Cut          string  `json:"cut,omitempty"`
	Evidence     string  `json:"evidence,omitempty"`
	Copies       int     `json:"copies"`
	Seed         uint64  `json:"seed"`
}

// add takes one seed's run into the means with a weight.
func (s *LedgerSummary) add(run *ledgerRun, weight float64) {
	var ttft []float64
	var e2e, gapSum, gaps, reused, prompt float64
	for i := range run.requests {
		r := &run.requests[i]
		if r.over || r.fate == fateForeign || r.engine.LastMs == 0 {
			continue
		}
		ttft = append(ttft, r.engine.FirstMs-warmUpMs-r.atMs)
		e2e += r.engine.LastMs - warmUpMs - r.atMs
		gapSum += r.engine.LastMs - r.engine.FirstMs
		gaps += float64(r.outputTokens - 1)
		reused += float64(r.engine.ReusedTokens)
		prompt += float64(r.prompt.Tokens)
	}
	n := float64(len(ttft))
	d := describe(ttft)
	s.Requests += len(ttft)
	s.TTFTMeans = append(s.TTFTMeans, d.Mean)
	s.TTFTMs.Mean += weight * d.Mean
	s.TTFTMs.P50 += weight * d.P50
	s.TTFTMs.P95 += weight * d.P95
	s.TTFTMs.P99 += weight * d.P99
	s.E2EMs.Mean += weight * e2e / n
	s.ITLMs.Mean += weight * gapSum / gaps
	s.Reuse += weight * reused / prompt
	s.Residue += run.residue
}

func (s *LedgerSummary) writeJSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(map[string]*LedgerSummary{"summary": s})
}

func (s *LedgerSummary) writeTable(w io.Writer) error {
	c := &s.Scope
	fmt.Fprintf(w, "%s, %s · %d workers · %d coordinators · %s", c.Model, c.Scenario, c.Workers, c.Coordinators, s.Policy)
	if c.Cut != "" {
		fmt.Fprintf(w, ", not shared: %s", c.Cut)
	}
	if c.Evidence != "" {
		fmt.Fprintf(w, " · evidence: %s", c.Evidence)
	}
	fmt.Fprintf(w, " · %g s · %d seeds from %d\n\n", c.Seconds, c.Copies, c.Seed)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "REQUESTS\tTTFT MEAN\tP50\tP95\tP99\tITL\tE2E\tREUSE\t")
	fmt.Fprintf(t, "%d\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t%.0f\t%.3f\t\n", s.Requests, s.TTFTMs.Mean, s.TTFTMs.P50, s.TTFTMs.P95, s.TTFTMs.P99, s.ITLMs.Mean, s.E2EMs.Mean, s.Reuse)
	if err := t.Flush(); err != nil {
		return err
	}
	if e := s.WaitingMs; e != nil {
		fmt.Fprintf(w, "\nbelieved less true waiting: mean %.0f ms, absolute p50 %.0f, p95 %.0f\n", e.Bias, e.P50, e.P95)
	}
	_, err := fmt.Fprintf(w, "claims still held 80 s after the end: %d\n", s.Residue)
	return err
}
