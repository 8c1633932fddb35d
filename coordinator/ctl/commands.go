package ctl

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	waypostv1 "waypost/proto/waypost/v1"
)

// Options wires the commands.
type Options struct {
	// Version is this program's version.
	Version string
	// ClientTLS makes the client's TLS configuration from files.
	ClientTLS TLSLoader
	// Sockets are the local sockets to try, in order; nil: the defaults.
	Sockets []string
}

// Commands returns the commands that ask a fleet.
func Commands(opt Options) []*cobra.Command {
	f := &flags{clientTLS: opt.ClientTLS, sockets: opt.Sockets}
	if f.sockets == nil {
		f.sockets = []string{CoordinatorSocket, AgentSocket}
	}
	cmds := []*cobra.Command{
		statusCommand(f), workersCommand(f), membersCommand(f), placeCommand(f), outcomeCommand(f), explainCommand(f), whyCommand(f), reuseCommand(f),
		cordonCommand(f), uncordonCommand(f), drainCommand(f), fleetCommand(f), coordinatorsCommand(f), hostsCommand(f), gpusCommand(f), ackCommand(f), doctorCommand(f),
		inspectCommand(f), topologyCommand(f), eventsCommand(f), boundaryCommand(f),
	}
	for _, c := range cmds {
		f.register(c)
	}
	return append(cmds, versionCommand(opt.Version))
}

func versionCommand(version string) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		Example: "  waypost version",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON {
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "{\"version\":%q}\n", version)
				return err
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "waypost", version)
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

// completeWorkers offers live worker, engine and host names.
func completeWorkers(f *flags) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		list, err := listWorkers(cmd, f, &waypostv1.ListWorkersRequest{})
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names := make([]string, 0, len(list))
		for _, w := range list {
			names = append(names, w.GetName())
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeFlag has a flag's values completed. The error says that the command
// has no such flag, which its author would see at once.
func completeFlag(c *cobra.Command, flag string, fn cobra.CompletionFunc) {
	if err := c.RegisterFlagCompletionFunc(flag, fn); err != nil {
		panic(err)
	}
}

func listWorkers(cmd *cobra.Command, f *flags, req *waypostv1.ListWorkersRequest) ([]*waypostv1.Worker, error) {
	resp, err := ask(cmd, f, operator, req, waypostv1.OperatorServiceClient.ListWorkers)
	return resp.GetWorkers(), err
}

// every calls fn now and then again each interval until the command ends or
// fn fails; a zero interval means once.
func every(cmd *cobra.Command, interval time.Duration, fn func() error) error {
	if err := fn(); err != nil || interval == 0 {
		return err
	}
	t := time.NewTicker(interval)
	defer t.Stop()
	for {
		select {
		case <-cmd.Context().Done():
			return nil
		case <-t.C:
			if err := fn(); err != nil {
				return err
			}
		}
	}
}
