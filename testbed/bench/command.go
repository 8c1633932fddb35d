package bench

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
)

// Command is "waypost testbed bench".
func Command() *cobra.Command {
	benches := &cobra.Command{
		Use: "bench", Short: "Run a benchmark and print what it measured", Args: cobra.NoArgs,
		Example: "  waypost testbed bench summaries --quick\n  waypost testbed bench decide --quick\n  waypost testbed bench place --quick\n  waypost testbed bench agent --quick",
	}
	benches.AddCommand(summariesCommand(), decideCommand(), placeCommand(), coordinatorsCommand(), agentCommand())
	return benches
}

// report is what a benchmark measured.
type report interface {
	IsEmpty() bool
	WriteText(io.Writer) error
	WriteJSON(io.Writer) error
}

// show writes a report, also of a run that failed late: what was measured is
// not lost.
func show(out io.Writer, r report, asJSON bool, err error) error {
	if err != nil && r.IsEmpty() {
		return err
	}
	write := r.WriteText
	if asJSON {
		write = r.WriteJSON
	}
	return errors.Join(err, write(out))
}

func decideCommand() *cobra.Command {
	var d Decide
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "decide",
		Short: "Measure one placement decision over 100 to 8,000 workers",
		Long: `Measure one placement decision over 100 to 8,000 workers.

Simulated engines fill the production index; the production fleet holds a report
and open claims of every worker. A decision is the lookup of a prompt of about
16,000 tokens, the terms of all workers, the choice, and its record. Given are
the time of each part, the allocations, and whether the number of open claims
matters.

The whole takes about three minutes and up to 3 GB on two cores.`,
		Example: "  waypost testbed bench decide --quick\n  waypost testbed bench decide --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d.Progress = func(what string) { fmt.Fprintln(cmd.ErrOrStderr(), what) }
			r, err := d.Run(cmd.Context())
			return show(cmd.OutOrStdout(), r, asJSON, err)
		},
	}
	cmd.Flags().BoolVar(&d.Quick, "quick", false, "take about a minute: shorter windows, fewer claims over 8,000 workers")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object per number of workers, load and number of open claims")
	return cmd
}

func summariesCommand() *cobra.Command {
	var s Summaries
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "summaries",
		Short: "Measure prefix summaries and the coordinator's index",
		Long: `Measure prefix summaries and the coordinator's index.

Engines simulated in virtual time feed the production block tables, encoders,
decoders and index. Measured are the bytes of streams and snapshots, what a
router loses by them, lookups with and without a writer, updates, memory before
and after churn, and the cold start of a coordinator over real lanes. Reference
structures take the same workloads: raw engine events, an exact index over
single blocks, and a Bloom filter per worker.

The whole takes about a quarter of an hour and up to 8 GB on two cores.`,
		Example: "  waypost testbed bench summaries --quick --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s.Progress = func(what string) { fmt.Fprintln(cmd.ErrOrStderr(), what) }
			r, err := s.Run(cmd.Context())
			return show(cmd.OutOrStdout(), r, asJSON, err)
		},
	}
	cmd.Flags().BoolVar(&s.Quick, "quick", false, "take about a minute: shorter workloads, smaller caches, less churn")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object per workload and number of workers")
	cmd.Flags().StringVar(&s.Trace, "trace", "", "Mooncake's conversation trace `FILE`; without it the shipped sample stands in")
	return cmd
}

func placeCommand() *cobra.Command {
	var o Place
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "place",
		Short: "Measure placements over gRPC and JSON",
		Long: `Measure placements over gRPC and JSON.

A production coordinator sees 64 and 1,000 simulated workers over lanes, their
caches filled with chains of 16,000 tokens. Callers ask for prompts of 1,024 and
16,000 token ids with a reservation and release it. Everything runs on loopback
in clear, callers and coordinator in one process.

The whole takes about three minutes on two cores.`,
		Example: "  waypost testbed bench place --quick\n  waypost testbed bench place --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Progress = func(what string) { fmt.Fprintln(cmd.ErrOrStderr(), what) }
			r, err := o.Run(cmd.Context())
			return show(cmd.OutOrStdout(), r, asJSON, err)
		},
	}
	cmd.Flags().BoolVar(&o.Quick, "quick", false, "take about half a minute: shorter windows, smaller caches")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object per number of workers, prompt size and transport")
	return cmd
}

func coordinatorsCommand() *cobra.Command {
	var o Coordinators
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "coordinators",
		Short: "Compare several coordinators behind round robin with one",
		Long: `Compare several coordinators behind round robin with one.

The same arrivals go to emulated engines with their agents, placed by one
coordinator, by four in turn, and by four that cannot tell each other what they
placed. All parts are the production ones, over mutual TLS on loopback, in real
time: let nothing else run meanwhile. Given is the mean time to the first token,
placing included.

The whole takes about a quarter of an hour.`,
		Example: "  waypost testbed bench coordinators --quick\n  waypost testbed bench coordinators --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Progress = func(what string) { fmt.Fprintln(cmd.ErrOrStderr(), what) }
			r, err := o.Run(cmd.Context())
			return show(cmd.OutOrStdout(), r, asJSON, err)
		},
	}
	cmd.Flags().BoolVar(&o.Quick, "quick", false, "take about three minutes: one short round")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object per number of coordinators")
	return cmd
}
