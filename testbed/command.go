package testbed

import (
	"github.com/spf13/cobra"

	"waypost/testbed/bench"
	"waypost/testbed/enginefaults"
	"waypost/testbed/sim"
)

// Command is "waypost testbed".
func Command() *cobra.Command {
	c := &cobra.Command{
		Use:     "testbed",
		Short:   "Judge and measure Waypost without GPUs",
		Example: "  waypost testbed sim --workers 8 --speedup 4 --policy waypost",
		Args:    cobra.NoArgs,
	}
	c.AddCommand(sim.Command(), bench.Command(), enginefaults.EngineCommand(), enginefaults.ListCommand())
	return c
}
