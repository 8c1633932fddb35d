package ctl

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	waypostv1 "waypost/proto/waypost/v1"
)

func doctorCommand(f *flags) *cobra.Command {
	var host string
	var ports bool
	c := &cobra.Command{
		Use: "doctor", Short: "Named checks, each with the fix to paste", Args: cobra.NoArgs,
		Long: "Run the named checks: engine flags, ports, clocks, driver, permissions, boundary, disk. Each problem comes with its cause and the fix to paste.\n" +
			"Through a coordinator it covers the whole fleet, through the local agent this host. Exit 1 if there is a problem.",
		Example: "  waypost doctor\n  waypost doctor --host gpu-01\n  waypost doctor --ports --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			req := &waypostv1.DoctorRequest{Host: optional(host), Ports: &ports}
			resp, err := ask(cmd, f, req, func(c *grpc.ClientConn) func(context.Context, *waypostv1.DoctorRequest, ...grpc.CallOption) (*waypostv1.DoctorResponse, error) {
				return operator(c).Doctor
			})
			if status.Code(err) == codes.NotFound {
				return unknownHost(cmd, f, host)
			}
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			switch {
			case f.asJSON():
				err = printList(out, f, resp, resp.GetChecks())
			default:
				printDoctor(out, resp)
			}
			if n := problems(resp); err == nil && n > 0 {
				return failed(ExitFailed, "%d problems", n)
			}
			return err
		},
	}
	c.Flags().StringVar(&host, "host", "", "only this host, or the asked coordinator by its name")
	c.Flags().BoolVar(&ports, "ports", false, "try the ports of members and coordinators from the asked process")
	completeFlag(c, "host", completeHosts(f))
	return c
}

// completeHosts offers live host names.
func completeHosts(f *flags) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		names, err := hostNames(cmd, f)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

func hostNames(cmd *cobra.Command, f *flags) ([]string, error) {
	resp, err := ask(cmd, f, &waypostv1.ListHostsRequest{}, func(c *grpc.ClientConn) func(context.Context, *waypostv1.ListHostsRequest, ...grpc.CallOption) (*waypostv1.ListHostsResponse, error) {
		return operator(c).ListHosts
	})
	names := make([]string, 0, len(resp.GetHosts()))
	for _, h := range resp.GetHosts() {
		names = append(names, h.GetName())
	}
	return names, err
}

func unknownHost(cmd *cobra.Command, f *flags, name string) error {
	names, err := hostNames(cmd, f)
	if err != nil {
		return err
	}
	if n := nearest(name, names); n != "" {
		return Usage("no host %q; did you mean %s?", name, n)
	}
	return Usage("no host %q; see: waypost hosts", name)
}

// problems is how many checks found one.
func problems(r *waypostv1.DoctorResponse) (n int) {
	for _, c := range r.GetChecks() {
		if c.GetState() == "problem" {
			n++
		}
	}
	return n
}

// printDoctor prints one line per check, then cause and fix.
func printDoctor(out io.Writer, r *waypostv1.DoctorResponse) {
	marks := map[string]string{"ok": "✓", "problem": "✗", "unknown": "?"}
	wide := 0
	for _, c := range r.GetChecks() {
		wide = max(wide, len(c.GetCheck()))
	}
	counts := map[string]int{}
	for _, c := range r.GetChecks() {
		counts[c.GetState()]++
		mark := marks[c.GetState()]
		if mark == "" {
			mark = "?"
		}
		fmt.Fprintf(out, "%s %-*s  %s  %s\n", mark, wide, c.GetCheck(), c.GetSubject(), oneLine(c.GetWhat()))
		if c.GetCause() != "" {
			fmt.Fprintf(out, "    %s\n", oneLine(c.GetCause()))
		}
		if c.GetFix() == "" {
			continue
		}
		label := "fix:  "
		if c.GetState() == "ok" {
			label = "to change: "
		}
		fmt.Fprintf(out, "    %s%s\n", label, strings.ReplaceAll(c.GetFix(), "\n", "\n    "+strings.Repeat(" ", len(label))))
	}
	fmt.Fprintf(out, "%d checks: %d problems, %d unknown, %d ok. Asked: %s.\n", len(r.GetChecks()), counts["problem"], counts["unknown"], counts["ok"], r.GetAnsweredBy())
}

// oneLine keeps a text that an engine had a part in on one line.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
