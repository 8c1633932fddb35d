package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// What an agent may take.
const (
	agentMaxPercent   = 1.    // of a core per worker
	agentMaxBytes     = 60e6  // with 8 workers of 32k blocks
	agentMaxLoad      = 4.    // questions about load per second and engine
	agentMaxFacts     = 1.    // other questions
	agentBlocksPerSec = 1100. // that a worker stores
)

// IsEmpty says that nothing was measured.
func (r *AgentReport) IsEmpty() bool { return r.Cost == nil }

func (r *AgentReport) targets() []target {
	c := r.Cost
	out := []target{
		near("blocks stored per second and worker", c.BlocksPerSec, agentBlocksPerSec, agentBlocksPerSec/10),
		atMost("event batches lost", "", float64(c.LostBatches), 0),
		atMost("processor time per worker", "% of a core", c.CPUPercent, agentMaxPercent),
		atMost("questions about load per second, the engine asked most", "", c.LoadPerSec, agentMaxLoad*1.01),
		atMost("other questions per second, the engine asked most", "", c.FactsPerSec, agentMaxFacts),
	}
	if c.RSSBytes > 0 {
		out = append(out, atMost(fmt.Sprintf("memory with %d workers of %d blocks", c.Workers, c.PoolBlocks), "MB", float64(c.RSSBytes)/1e6, agentMaxBytes/1e6))
	}
	if c.TextAllowed > 0 {
		out = append(out, atMost("text that engines were asked about, of what is allowed", "×", c.TextAsked/c.TextAllowed, 1))
	}
	return out
}

// agentRow is the JSON output.
type agentRow struct {
	Workers           int      `json:"workers"`
	PoolBlocks        int      `json:"poolBlocks"`
	Seconds           float64  `json:"seconds"`
	BlocksPerSec      float64  `json:"blocksPerSec"`
	EventsPerSec      float64  `json:"eventsPerSec"`
	HeldBlocks        int      `json:"heldBlocks"`
	LostBatches       int      `json:"lostBatches"`
	CPUPercent        float64  `json:"cpuPercentPerWorker"`
	RSSBytes          *int64   `json:"rssBytes"`
	PeakRSSBytes      *int64   `json:"peakRssBytes"`
	LoadPerSec        float64  `json:"loadRequestsPerSec"`
	FactsPerSec       float64  `json:"factRequestsPerSec"`
	TextOfferedBytes  float64  `json:"textOfferedBytes"`
	TextAskedBytes    float64  `json:"textAskedBytes"`
	TextAllowedBytes  *float64 `json:"textAllowedBytes"`
	TextWindowSeconds float64  `json:"textSeconds"`
}

// WriteJSON writes one object.
func (r *AgentReport) WriteJSON(w io.Writer) error {
	c := r.Cost
	row := agentRow{
		Workers: c.Workers, PoolBlocks: c.PoolBlocks, Seconds: c.Seconds, BlocksPerSec: c.BlocksPerSec, EventsPerSec: c.EventsPerSec, HeldBlocks: c.HeldBlocks,
		LostBatches: c.LostBatches, CPUPercent: c.CPUPercent, LoadPerSec: c.LoadPerSec, FactsPerSec: c.FactsPerSec,
		TextOfferedBytes: c.TextOffered, TextAskedBytes: c.TextAsked, TextWindowSeconds: c.TextSeconds,
	}
	if c.RSSBytes > 0 {
		row.RSSBytes, row.PeakRSSBytes = &c.RSSBytes, &c.PeakRSSBytes
	}
	if c.TextAllowed > 0 {
		row.TextAllowedBytes = &c.TextAllowed
	}
	return json.NewEncoder(w).Encode(row)
}

// WriteText writes tables for people.
func (r *AgentReport) WriteText(out io.Writer) error {
	c := r.Cost
	p := &printer{w: tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)}
	p.text("One agent as a process of its own, %d emulated vLLM engines, one coordinator over mutual TLS", c.Workers)
	p.line("workers", "pool blocks", "held", "blocks/s", "events/s", "CPU/worker", "RSS", "peak", "load/s", "facts/s")
	rss, peak := "?", "?"
	if c.RSSBytes > 0 {
		rss, peak = fmt.Sprintf("%.1f MB", float64(c.RSSBytes)/1e6), fmt.Sprintf("%.1f MB", float64(c.PeakRSSBytes)/1e6)
	}
	p.line(num(c.Workers), num(c.PoolBlocks), num(c.HeldBlocks), fmt.Sprintf("%.0f", c.BlocksPerSec), fmt.Sprintf("%.0f", c.EventsPerSec),
		fmt.Sprintf("%.2f %%", c.CPUPercent), rss, peak, fmt.Sprintf("%.2f", c.LoadPerSec), fmt.Sprintf("%.2f", c.FactsPerSec))
	if c.TextAllowed > 0 {
		p.text("\nText: %.1f MB offered in %.0f s, engines asked about %.1f MB, allowed %.1f MB", c.TextOffered/1e6, c.TextSeconds, c.TextAsked/1e6, c.TextAllowed/1e6)
	}
	p.writeTargets(r.targets())
	p.line("")
	if r.Quick {
		p.text("--quick: short windows; leave it out for the figures that count")
	}
	p.text("took %.0f s; rates are of %.0f s once the caches turned over", r.Took.Seconds(), c.Seconds)
	return p.flush()
}

func agentCommand() *cobra.Command {
	var o HostAgent
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Measure what an agent takes of its host and its engines",
		Long: `Measure what an agent takes of its host and its engines.

The agent of this program runs as a process of its own with eight emulated vLLM
engines, which publish real event frames at 1,100 stored blocks per second each,
and one coordinator, which places the requests. Given are its processor time and
memory once the caches turn over, how often each engine is asked, and how much
text engines are asked to tokenise when more is offered than they may be.

The whole takes about two and a half minutes on two cores.`,
		Example: "  waypost testbed bench agent --quick\n  waypost testbed bench agent --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Progress = func(what string) { fmt.Fprintln(cmd.ErrOrStderr(), what) }
			r, err := o.Run(cmd.Context())
			return show(cmd.OutOrStdout(), r, asJSON, err)
		},
	}
	cmd.Flags().BoolVar(&o.Quick, "quick", false, "take about a minute and a half: shorter windows")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}
