package bench

import (
	"fmt"

	"github.com/spf13/cobra"
)

// Command is "waypost testbed bench".
func Command() *cobra.Command {
	benches := &cobra.Command{
		Use: "bench", Short: "Run a benchmark and print what it measured", Args: cobra.NoArgs,
		Example: "  waypost testbed bench summaries --quick",
	}
	benches.AddCommand(summariesCommand())
	return benches
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
			if err != nil {
				return err
			}
			if asJSON {
				return r.WriteJSON(cmd.OutOrStdout())
			}
			return r.WriteText(cmd.OutOrStdout())
		},
	}
	cmd.Flags().BoolVar(&s.Quick, "quick", false, "take less than a minute: shorter workloads, smaller caches, less churn")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object per workload and number of workers")
	cmd.Flags().StringVar(&s.Trace, "trace", "", "Mooncake's conversation trace `FILE`; without it the shipped sample stands in")
	return cmd
}
