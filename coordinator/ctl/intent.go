package ctl

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

func cordonCommand(f *flags) *cobra.Command {
	var reason string
	var dryRun bool
	c := &cobra.Command{
		Use: "cordon TARGET", Short: "Stop new placements on a host, engine, worker or GPU", Args: cobra.ExactArgs(1),
		Example:           "  waypost cordon gpu-02 --reason \"fan swap INC-431\"\n  waypost cordon gpu-02/vllm-8000/0 --reason test --dry-run",
		ValidArgsFunction: completeWorkers(f),
		RunE: func(cmd *cobra.Command, args []string) error {
			if strings.TrimSpace(reason) == "" {
				return Usage("--reason is required: the next person asks why")
			}
			req := &waypostv1.CordonTargetRequest{Selector: &args[0], Reason: &reason, DryRun: &dryRun}
			resp, err := ask(cmd, f, operator, req, waypostv1.OperatorServiceClient.CordonTarget)
			if err != nil {
				return noLeader(err, "")
			}
			if f.asJSON() {
				return printJSON(cmd.OutOrStdout(), resp)
			}
			out := cmd.OutOrStdout()
			switch {
			case dryRun:
				fmt.Fprintf(out, "%s: would stop new placements on %s\n", args[0], whom(resp.GetWorkers()))
			default:
				fmt.Fprintf(out, "%s: no new placements on %s (%s). Undo: waypost uncordon %s\n", args[0], whom(resp.GetWorkers()), inForceOn(resp), args[0])
			}
			return nil
		},
	}
	c.Flags().StringVar(&reason, "reason", "", "why; required")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would change")
	return c
}

// confirmed is an answer that says which coordinators have taken a change over.
type confirmed interface {
	GetAppliedOn() []string
	GetPendingOn() []string
}

// inForce says where a change is in force, and where that is not known.
func inForce(resp confirmed) string {
	applied, pending := resp.GetAppliedOn(), resp.GetPendingOn()
	switch {
	case len(applied)+len(pending) == 0:
		return "on which coordinators it is in force is not known"
	case len(pending) == 0:
		return fmt.Sprintf("all %d coordinators", len(applied))
	case len(applied) == 0:
		return "not confirmed by " + strings.Join(pending, ", ")
	}
	return fmt.Sprintf("in force on %s; not confirmed by %s", strings.Join(applied, ", "), strings.Join(pending, ", "))
}

// inForceOn is inForce where the sentence does not say it before.
func inForceOn(resp confirmed) string {
	if len(resp.GetPendingOn()) == 0 && len(resp.GetAppliedOn()) > 0 {
		return "in force on " + inForce(resp)
	}
	return inForce(resp)
}

const nothingHere = "nothing that is here now"

// whom names the workers that a cordon keeps placements from.
func whom(workers []string) string {
	return cmp.Or(strings.Join(workers, ", "), nothingHere+" (the cordon is kept)")
}

// whomAgain names the workers that one kept placements from.
func whomAgain(workers []string) string {
	return cmp.Or(strings.Join(workers, ", "), nothingHere)
}

func uncordonCommand(f *flags) *cobra.Command {
	var reason string
	var dryRun, local bool
	c := &cobra.Command{
		Use: "uncordon TARGET", Short: "Take a cordon back", Args: func(cmd *cobra.Command, args []string) error {
			return targetOrLocal(local, args)
		},
		Example:           "  waypost uncordon gpu-02\n  sudo waypost uncordon --local",
		ValidArgsFunction: completeWorkers(f),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, target := &waypostv1.UncordonTargetRequest{Reason: optional(reason), DryRun: &dryRun}, ""
			if local {
				onAgent(f)
			} else {
				target = args[0]
				req.Selector = &target
			}
			resp, err := ask(cmd, f, operator, req, waypostv1.OperatorServiceClient.UncordonTarget)
			if err != nil {
				return noLeader(err, "")
			}
			if f.asJSON() {
				return printJSON(cmd.OutOrStdout(), resp)
			}
			switch {
			case !resp.GetRemoved() && local:
				return Usage("this host's agent does not ask to be drained; a drain that a leader made of it ends with: waypost uncordon HOST")
			case !resp.GetRemoved():
				return Usage("no cordon on %q; see: waypost status", target)
			case local && dryRun:
				fmt.Fprintf(cmd.OutOrStdout(), "would no longer ask to be drained: %s\n", whomAgain(resp.GetWorkers()))
			case local:
				fmt.Fprintf(cmd.OutOrStdout(), "no longer asks to be drained: %s\n", whomAgain(resp.GetWorkers()))
			case dryRun:
				fmt.Fprintf(cmd.OutOrStdout(), "%s: would allow placements on %s again\n", target, whomAgain(resp.GetWorkers()))
			default:
				fmt.Fprintf(cmd.OutOrStdout(), "%s: placements on %s allowed again (%s)\n", target, whomAgain(resp.GetWorkers()), inForceOn(resp))
			}
			return nil
		},
	}
	c.Flags().StringVar(&reason, "reason", "", "why")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would change")
	c.Flags().BoolVar(&local, "local", false, "this host's own wish, as long as no leader has made a drain of it")
	return c
}

// noLeader adds what can still be done when nobody leads, to drain a target.
func noLeader(err error, target string) error {
	if status.Code(err) != codes.Unavailable {
		return err
	}
	host, _, _ := strings.Cut(target, "/")
	if host == "" || strings.HasPrefix(host, "GPU-") || strings.HasPrefix(host, "MIG-") || !strings.Contains(Message(err), "no leader") {
		return failed(ExitUnreachable, "%s", Message(err))
	}
	return failed(ExitUnreachable, "%s; on %s itself: waypost drain --local", Message(err), host)
}

func fleetCommand(f *flags) *cobra.Command {
	c := &cobra.Command{
		Use: "fleet", Short: "Show, compare or apply the fleet file",
		Example: "  waypost fleet show > fleet.toml\n  waypost fleet diff fleet.toml\n  waypost fleet apply fleet.toml --message \"RoCE links\"",
	}
	c.AddCommand(fleetShow(f), fleetDiff(f), fleetApply(f))
	return c
}

func fleetShow(f *flags) *cobra.Command {
	return &cobra.Command{
		Use: "show", Short: "Print the fleet file in force", Args: cobra.NoArgs,
		Example: "  waypost fleet show > fleet.toml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := ask(cmd, f, operator, &waypostv1.GetFleetRequest{}, waypostv1.OperatorServiceClient.GetFleet)
			if err != nil {
				return err
			}
			if f.asJSON() {
				return printJSON(cmd.OutOrStdout(), resp)
			}
			if !f.quiet && resp.GetVersion() > 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "version %d, applied by %s at %s (%q)\n", resp.GetVersion(), resp.GetAppliedBy(), resp.GetAppliedAt(), resp.GetMessage())
			}
			fmt.Fprint(cmd.OutOrStdout(), resp.GetToml())
			return nil
		},
	}
}

func fleetDiff(f *flags) *cobra.Command {
	var base uint32
	c := &cobra.Command{
		Use: "diff FILE", Short: "Say what a fleet file would change", Args: cobra.ExactArgs(1),
		Example: "  waypost fleet diff fleet.toml",
		RunE: func(cmd *cobra.Command, args []string) error {
			return putFleet(cmd, f, args[0], cmd.Flags().Changed("base"), base, true, "")
		},
	}
	c.Flags().Uint32Var(&base, "base", 0, "version the file was made from; left out: the one in force")
	return c
}

func fleetApply(f *flags) *cobra.Command {
	var base uint32
	var message string
	var dryRun bool
	c := &cobra.Command{
		Use: "apply FILE", Short: "Make a fleet file the one in force", Args: cobra.ExactArgs(1),
		Example: "  waypost fleet apply fleet.toml --base 6 --message \"RoCE links\"",
		RunE: func(cmd *cobra.Command, args []string) error {
			return putFleet(cmd, f, args[0], cmd.Flags().Changed("base"), base, dryRun, message)
		},
	}
	c.Flags().Uint32Var(&base, "base", 0, "version the file was made from; left out: the one in force")
	c.Flags().StringVarP(&message, "message", "m", "", "why")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would change")
	return c
}

func putFleet(cmd *cobra.Command, f *flags, path string, hasBase bool, base uint32, dryRun bool, message string) error {
	b, err := readFile(path)
	if err != nil {
		return Usage("%w", err)
	}
	if !hasBase {
		now, err := ask(cmd, f, operator, &waypostv1.GetFleetRequest{}, waypostv1.OperatorServiceClient.GetFleet)
		if err != nil {
			return err
		}
		base = now.GetVersion()
	}
	if message == "" && !dryRun {
		message = "applied from " + pathOf(path)
	}
	req := &waypostv1.PutFleetRequest{Toml: proto.String(string(b)), BaseVersion: &base, DryRun: &dryRun, Message: &message}
	resp, err := ask(cmd, f, operator, req, waypostv1.OperatorServiceClient.PutFleet)
	if err != nil {
		return noLeader(err, "")
	}
	if f.asJSON() {
		return printJSON(cmd.OutOrStdout(), resp)
	}
	out := cmd.OutOrStdout()
	for _, line := range resp.GetChanges() {
		fmt.Fprintln(out, "  "+line)
	}
	if len(resp.GetChanges()) == 0 {
		fmt.Fprintln(out, "  no change")
	}
	if dryRun {
		printEffect(out, resp.GetEffect())
	} else {
		fmt.Fprintf(out, "  applied version %d (was %d); in force on %d of %d coordinators\n", resp.GetVersion(), base, resp.GetAppliedOn(), resp.GetCoordinators())
	}
	return nil
}

// printEffect says what recorded placements would have become.
func printEffect(out io.Writer, e *waypostv1.FleetEffect) {
	if e == nil {
		return
	}
	window := age(e.WindowMs)
	if e.GetDecided() == 0 {
		fmt.Fprintf(out, "  Effect on the last %s: unknown, %s keeps no placement with its inputs (%s without)\n", window, e.GetAnsweredBy(), count(e.LeftOut))
		return
	}
	of := count(e.Decided)
	if e.GetLeftOut() > 0 {
		of += " of " + thousands(float64(e.GetDecided()+e.GetLeftOut()))
	}
	fmt.Fprintf(out, "  Effect on the last %s (%s recorded placements of %s, re-decided): %s (%.1f%%) choose another worker, %s become infeasible\n",
		window, of, e.GetAnsweredBy(), count(e.Changed), 100*float64(e.GetChanged())/float64(e.GetDecided()), count(e.Infeasible))
	fmt.Fprintf(out, "  First token %s → %s expected, mean of those still placed\n", millis(e.FirstTokenBeforeMs), millis(e.FirstTokenAfterMs))
	if len(e.GetWorst()) == 0 {
		return
	}
	t := newTable("  WORST", "WORKER", "WOULD GET", ">FIRST TOKEN", ">WOULD BE")
	for _, w := range e.GetWorst() {
		gets, after := w.GetNewWorker(), millis(w.FirstTokenAfterMs)
		if w.GetRefused() != "" {
			gets, after = "none: "+w.GetRefused(), "-"
		}
		t.row("  "+w.GetPlacementId(), w.GetWorker(), gets, millis(w.FirstTokenBeforeMs), after)
	}
	t.print(out)
}

func pathOf(path string) string {
	if path == "-" {
		return "standard input"
	}
	return path[strings.LastIndexByte(path, os.PathSeparator)+1:]
}
