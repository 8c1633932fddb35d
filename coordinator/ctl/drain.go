package ctl

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// drainLookEvery is how often a drain looks at what still runs.
var drainLookEvery = 300 * time.Millisecond

func drainCommand(f *flags) *cobra.Command {
	var reason string
	var dryRun, noWait, local bool
	c := &cobra.Command{
		Use: "drain TARGET", Short: "Stop new placements on a target and wait until nothing runs there", Args: func(cmd *cobra.Command, args []string) error {
			return targetOrLocal(local, args)
		},
		Long: "Stop new placements on a host, engine, worker or GPU and wait until nothing runs there. With --timeout the wait ends after that time with exit code 7; " +
			"without it, it ends when nothing runs. The drain stays either way, until waypost uncordon.\n\n" +
			"With --local the agent of this host asks for it: every coordinator it reaches obeys, without a leader, and the next leader makes a drain of it.",
		Example:           "  waypost drain gpu-02 --reason \"fan swap INC-431\" --timeout 10m\n  waypost drain gpu-02/vllm-8000/0 --reason test --no-wait\n  sudo waypost drain --local",
		ValidArgsFunction: completeWorkers(f),
		Annotations:       map[string]string{timeoutUsage: "how long to wait for what runs; left out: until nothing does"},
		RunE: func(cmd *cobra.Command, args []string) error {
			if local {
				return drainLocal(cmd, f, reason, dryRun)
			}
			if strings.TrimSpace(reason) == "" {
				return Usage("--reason is required: the next person asks why")
			}
			if err := f.check(); err != nil {
				return err
			}
			limit := time.Duration(0)
			if cmd.Flags().Changed("timeout") {
				// It bounds the wait here, not a single answer.
				limit, f.timeout = f.timeout, answerWithin
			}
			began := time.Now()
			req := &waypostv1.CordonTargetRequest{Selector: &args[0], Reason: &reason, DryRun: &dryRun, Drain: proto.Bool(true)}
			resp, err := ask(cmd, f, req, func(c *grpc.ClientConn) func(context.Context, *waypostv1.CordonTargetRequest, ...grpc.CallOption) (*waypostv1.CordonTargetResponse, error) {
				return operator(c).CordonTarget
			})
			if err != nil {
				return noLeader(err, args[0])
			}
			out := cmd.OutOrStdout()
			switch {
			case f.asJSON():
				if err := printJSON(out, resp); err != nil {
					return err
				}
			case dryRun:
				fmt.Fprintf(out, "%s: would stop new placements on %s\n", args[0], whom(resp.GetWorkers()))
			default:
				fmt.Fprintf(out, "%s: no new placements (%s, %s)\n", args[0], inForce(resp), millis(proto.Float64(float64(time.Since(began).Milliseconds()))))
			}
			if dryRun || noWait || len(resp.GetWorkers()) == 0 {
				if !dryRun && !f.asJSON() && len(resp.GetWorkers()) == 0 {
					fmt.Fprintf(out, "Nothing that is here now; the drain is kept. Undo: waypost uncordon %s\n", args[0])
				}
				return nil
			}
			return awaitDrained(cmd, f, args[0], resp.GetWorkers(), began, limit)
		},
	}
	c.Flags().StringVar(&reason, "reason", "", "why; required without --local")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would change")
	c.Flags().BoolVar(&noWait, "no-wait", false, "do not wait for what runs")
	c.Flags().BoolVar(&local, "local", false, "this host, by its agent's own wish: needs no leader")
	return c
}

// targetOrLocal wants a target, or none with --local.
func targetOrLocal(local bool, args []string) error {
	switch {
	case local && len(args) > 0:
		return Usage("--local means this host; leave %q out", args[0])
	case !local && len(args) != 1:
		return Usage("accepts 1 arg(s), received %d", len(args))
	}
	return nil
}

// onAgent asks the agent of this host, unless an address is given.
func onAgent(f *flags) {
	if f.addr == "" {
		f.addr = "unix:" + AgentSocket
	}
}

// drainLocal has this host's agent wish for a drain.
func drainLocal(cmd *cobra.Command, f *flags, reason string, dryRun bool) error {
	onAgent(f)
	if strings.TrimSpace(reason) == "" {
		reason = "waypost drain --local"
	}
	resp, err := ask(cmd, f, &waypostv1.CordonTargetRequest{Reason: &reason, DryRun: &dryRun, Drain: proto.Bool(true)}, func(c *grpc.ClientConn) func(context.Context, *waypostv1.CordonTargetRequest, ...grpc.CallOption) (*waypostv1.CordonTargetResponse, error) {
		return operator(c).CordonTarget
	})
	if err != nil {
		return err
	}
	out, host := cmd.OutOrStdout(), resp.GetCordon().GetSelector()
	if f.asJSON() {
		return printJSON(out, resp)
	}
	heard := "no coordinator hears it; each will when it does"
	if n := len(resp.GetPendingOn()); n > 0 {
		heard = "told to " + strings.Join(resp.GetPendingOn(), ", ")
	}
	if dryRun {
		fmt.Fprintf(out, "%s: would ask for no new placements on %s\n", host, whom(resp.GetWorkers()))
		return nil
	}
	fmt.Fprintf(out, "%s: asks for no new placements (%s)\n", host, heard)
	fmt.Fprintf(out, "Kept over restarts; a leader makes a drain of it. See: waypost workers --state draining. Undo: waypost uncordon --local before, waypost uncordon %s after\n", host)
	return nil
}

// awaitDrained shows what still runs on the workers until nothing does, the
// limit is over, or somebody stops watching.
func awaitDrained(cmd *cobra.Command, f *flags, target string, workers []string, began time.Time, limit time.Duration) error {
	progress := &drainProgress{out: cmd.OutOrStdout(), quiet: f.asJSON(), alone: len(workers) == 1}
	var over <-chan time.Time
	if limit > 0 {
		t := time.NewTimer(time.Until(began.Add(limit)))
		defer t.Stop()
		over = t.C
	}
	tick := time.NewTicker(drainLookEvery)
	defer tick.Stop()
	for {
		list, err := listWorkers(cmd, f, &waypostv1.ListWorkersRequest{})
		if err != nil && cmd.Context().Err() == nil {
			progress.end()
			return fmt.Errorf("still draining, but what runs is not known: %w", err)
		}
		of := slices.DeleteFunc(list, func(w *waypostv1.Worker) bool { return !slices.Contains(workers, w.GetName()) })
		done := err == nil
		for _, w := range of {
			if c := w.GetCordon(); c == nil || !c.GetDrain() {
				progress.end()
				return failed(ExitConflict, "%s: somebody took the drain back", w.GetName())
			}
			done = progress.show(w) && done
		}
		if done {
			progress.end()
			if f.asJSON() {
				return printJSON(cmd.OutOrStdout(), &waypostv1.ListWorkersResponse{Workers: of})
			}
			fmt.Fprintf(cmd.OutOrStdout(), "drained in %s. Safe to stop. Undo: waypost uncordon %s\n", time.Since(began).Round(time.Second), target)
			return nil
		}
		select {
		case <-cmd.Context().Done():
			progress.end()
			return failed(ExitTimeout, "no longer watching; %s is still draining. See: waypost workers --state draining. Undo: waypost uncordon %s", target, target)
		case <-over:
			progress.end()
			return failed(ExitTimeout, "%s is still draining after %s: %s. It goes on; see: waypost workers --state draining", target, limit, progress.rest(of))
		case <-tick.C:
		}
	}
}

// drainProgress prints counts as they change: of one worker along a line, of
// several a line each.
type drainProgress struct {
	out          io.Writer
	quiet, alone bool
	last         map[string]string // by worker
	open         bool
}

// show prints a worker's count if it is another one, and reports whether the
// worker is drained.
func (p *drainProgress) show(w *waypostv1.Worker) (drained bool) {
	left := unknown
	if w.InFlight != nil {
		left = fmt.Sprint(w.GetInFlight())
	}
	drained = w.GetState() == "drained"
	if p.last == nil {
		p.last = map[string]string{}
	}
	before, shown := p.last[w.GetName()]
	if p.last[w.GetName()] = left; p.quiet || shown && before == left {
		return drained
	}
	switch {
	case !p.alone:
		fmt.Fprintf(p.out, "%s: %s running\n", w.GetName(), left)
	case !shown:
		_, name, _ := strings.Cut(w.GetName(), "/")
		fmt.Fprintf(p.out, "%s: %s running", name, left)
		p.open = true
	default:
		fmt.Fprintf(p.out, " … %s", left)
	}
	return drained
}

// end ends the line that is open.
func (p *drainProgress) end() {
	if p.open {
		fmt.Fprintln(p.out)
		p.open = false
	}
}

// rest names the workers that are not drained.
func (p *drainProgress) rest(workers []*waypostv1.Worker) string {
	var out []string
	for _, w := range workers {
		if w.GetState() != "drained" {
			out = append(out, fmt.Sprintf("%s %s running", w.GetName(), p.last[w.GetName()]))
		}
	}
	if len(out) == 0 {
		return "what runs is not known"
	}
	return strings.Join(out, ", ")
}
