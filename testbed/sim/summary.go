package sim

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// Summary is the result of a run of model T2.
type Summary struct {
	Policy string `json:"policy"`
	Figures
	// Classes describe the classes of a workload that has several.
	Classes map[string]Figures `json:"classes,omitempty"`
	// TTFTMeans are the mean first-token times of the copies.
	TTFTMeans []float64 `json:"ttftMeansMs,omitempty"`
	Scope     Scope     `json:"scope"`
}

// Scope says what the figures hold for.
type Scope struct {
	Model        string  `json:"model"`
	Trace        string  `json:"trace"`
	Workers      int     `json:"workers"`
	SlowWorkers  int     `json:"slowWorkers,omitempty"`
	SlowFactor   float64 `json:"slowFactor,omitempty"`
	Speedup      float64 `json:"speedup"`
	Coordinators int     `json:"coordinators"`
	Cut          string  `json:"cut,omitempty"`
	Evidence     string  `json:"evidence,omitempty"`
	Copies       int     `json:"copies"`
	Seed         uint64  `json:"seed"`
	NoticeMs     float64 `json:"noticeMs"`
	EventMs      float64 `json:"eventMs"`
}

func (s *Summary) writeJSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(map[string]*Summary{"summary": s})
}

func (s *Summary) writeTable(w io.Writer) error {
	c := &s.Scope
	fmt.Fprintf(w, "%s · %s · %d workers · ×%g · %s", c.Model, c.Trace, c.Workers, c.Speedup, s.Policy)
	if c.Coordinators > 1 {
		fmt.Fprintf(w, " · %d coordinators", c.Coordinators)
	}
	if c.Cut != "" {
		fmt.Fprintf(w, ", not shared: %s", c.Cut)
	}
	if c.Evidence != "" {
		fmt.Fprintf(w, " · evidence: %s", c.Evidence)
	}
	if c.SlowWorkers > 0 {
		fmt.Fprintf(w, " · %d workers %g× slower", c.SlowWorkers, c.SlowFactor)
	}
	fmt.Fprintf(w, " · notices %g ms, cache events %g ms late · seed %d", c.NoticeMs, c.EventMs, c.Seed)
	if c.Copies > 1 {
		fmt.Fprintf(w, " · mean of %d copies, arrivals moved by 0 to %d ms", c.Copies, copyJitterMs)
	}
	fmt.Fprint(w, "\n\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "CLASS\tREQUESTS\tTTFT MEAN\tP50\tP95\tP99\tITL\tE2E\tREUSE\tPREEMPTED\t")
	row := func(class string, f *Figures) {
		fmt.Fprintf(t, "%s\t%d\t%.1f\t%.1f\t%.0f\t%.0f\t%.2f\t%.0f\t%.4f\t%.1f\t\n", class, f.Requests,
			f.TTFTMs.Mean, f.TTFTMs.P50, f.TTFTMs.P95, f.TTFTMs.P99, f.ITLMs.Mean, f.E2EMs.Mean, f.Reuse, f.Preemptions)
	}
	row("all", &s.Figures)
	for _, class := range []string{classNameCrowd, classNameUnrelated} {
		if f, ok := s.Classes[class]; ok {
			row(class, &f)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if p := s.PredictionMs; p != nil {
		fmt.Fprintf(w, "\npredicted less true TTFT: mean %.1f ms, absolute p50 %.1f, p95 %.1f\n", p.Bias, p.P50, p.P95)
	}
	if len(s.TTFTMeans) > 1 {
		fmt.Fprintf(w, "\nTTFT means of the copies: %.1f\n", s.TTFTMeans)
	}
	return nil
}
