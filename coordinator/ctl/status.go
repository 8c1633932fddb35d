package ctl

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	waypostv1 "waypost/proto/waypost/v1"
)

func statusCommand(f *flags) *cobra.Command {
	var check bool
	c := &cobra.Command{
		Use: "status", Short: "The one screen: problems first", Args: cobra.NoArgs,
		Example: "  waypost status\n  waypost status --check   # exit 1 on any problem",
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := ask(cmd, f, operator, &waypostv1.GetStatusRequest{}, waypostv1.OperatorServiceClient.GetStatus)
			if err != nil {
				return err
			}
			if f.asJSON() {
				err = printJSON(cmd.OutOrStdout(), resp)
			} else {
				printStatus(cmd.OutOrStdout(), resp)
			}
			if err == nil && check && len(resp.GetProblems()) > 0 {
				return failed(ExitFailed, "%d problems", len(resp.GetProblems()))
			}
			return err
		},
	}
	c.Flags().BoolVar(&check, "check", false, "exit 1 if there is any problem")
	return c
}

func printStatus(out io.Writer, s *waypostv1.GetStatusResponse) {
	leader := "no leader known"
	if s.GetLeader() != "" {
		leader = "leader " + s.GetLeader()
	}
	fmt.Fprintf(out, "Fleet %s   %d hosts   %d coordinators (%s)   policy v%d   %.1f placements/s   gossip: %d alive\n",
		text(s.GetFleet()), s.GetHosts(), s.GetCoordinators(), leader, s.GetPolicyVersion(), s.GetPlacementsPerSec(), s.GetMembersAlive())
	for _, p := range s.GetPools() {
		reuse := "nothing reported yet"
		if p.ActualReuseTokens != nil && p.GetPromptTokens() > 0 {
			reuse = fmt.Sprintf("reuse %.0f%% reached, %.0f%% expected", 100*p.GetActualReuseTokens()/p.GetPromptTokens(), 100*p.GetExpectedReuseTokens()/p.GetPromptTokens())
		}
		fmt.Fprintf(out, "Pool %s  %d workers: %d ready   %s\n", p.GetName(), p.GetWorkers(), p.GetReady(), reuse)
	}
	fmt.Fprintln(out)
	if len(s.GetProblems()) == 0 {
		fmt.Fprintf(out, "No problems. Checked %d things.\n", s.GetChecks())
	} else {
		fmt.Fprintln(out, "PROBLEMS")
	}
	for _, p := range s.GetProblems() {
		mark := "!"
		if p.GetSeverity() == "error" {
			mark = "✗"
		}
		since := ""
		if p.SinceMs != nil {
			since = ", " + age(p.SinceMs) + " ago"
		}
		fmt.Fprintf(out, "%s %s  %s%s\n", mark, p.GetSubject(), p.GetWhat(), since)
		if p.GetDone() != "" || p.GetNext() != "" {
			fmt.Fprintf(out, "    done: %s     next: %s\n", text(p.GetDone()), text(p.GetNext()))
		}
	}
	if len(s.GetCordons()) == 0 {
		fmt.Fprintln(out, "INTENT   no cordons, no drains.")
		return
	}
	fmt.Fprintln(out, "INTENT")
	for _, c := range s.GetCordons() {
		kind := "cordon"
		if c.GetDrain() {
			kind = "drain"
		}
		fmt.Fprintf(out, "  %s %s  by %s at %s: %s\n", kind, c.GetSelector(), c.GetBy(), c.GetAt(), c.GetReason())
	}
}
