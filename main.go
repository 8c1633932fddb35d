// Waypost picks the worker for each request of a fleet of LLM inference
// engines. This file composes the commands of the parts.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"waypost/agent"
	"waypost/coordinator"
	"waypost/coordinator/ctl"
	"waypost/gossip/identity"
	"waypost/nvml"
	"waypost/testbed"
	"waypost/testbed/dev"
	"waypost/testbed/replay"
)

// version is set when packages are built.
var version = "0.1.0-dev"

func main() {
	root := &cobra.Command{Use: "waypost", Short: "Pick the worker for each request of a fleet of LLM inference engines"}
	root.AddCommand(ctl.Commands(ctl.Options{Version: version, ClientTLS: identity.APIClient})...)
	root.AddCommand(agent.Command(version), coordinator.Command(version), nvml.Command(), dev.Command(version), replay.Command(), testbed.Command())
	// The first signal ends what runs, so that what was measured or shown so far
	// is not lost; a second one ends the process.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(ctl.Execute(ctx, root, os.Args[1:], os.Stderr))
}
