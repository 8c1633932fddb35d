// Command child is the smallest program with the NVML child in it, for tests.
// Its command parent keeps a child running as an agent does.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"waypost/nvml"
)

func main() {
	root := &cobra.Command{Use: "child", SilenceUsage: true}
	root.AddCommand(nvml.Command(), &cobra.Command{
		Use:  "parent LIBRARY",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := nvml.New(nvml.Options{Library: args[0]})
			if err != nil {
				return err
			}
			return c.Run(cmd.Context())
		},
	})
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
