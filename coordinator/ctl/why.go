package ctl

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	waypostv1 "waypost/proto/waypost/v1"
)

func whyCommand(f *flags) *cobra.Command {
	var ago time.Duration
	c := &cobra.Command{
		Use: "why WORKER", Short: "Show why a worker gets, or does not get, traffic", Args: cobra.ExactArgs(1),
		Example:           "  waypost why gpu-01/vllm-8000/0\n  waypost why gpu-01/vllm-8000/0 --since 1h --json",
		ValidArgsFunction: completeWorkers(f),
		RunE: func(cmd *cobra.Command, args []string) error {
			if ago <= 0 {
				return Usage("--since %s: must be above 0", ago)
			}
			req := &waypostv1.ExplainWorkerRequest{Worker: &args[0], SinceMs: sinceMs(ago)}
			resp, err := ask(cmd, f, req, func(c *grpc.ClientConn) func(context.Context, *waypostv1.ExplainWorkerRequest, ...grpc.CallOption) (*waypostv1.ExplainWorkerResponse, error) {
				return operator(c).ExplainWorker
			})
			if status.Code(err) == codes.NotFound {
				return unknownWorker(cmd, f, args[0])
			}
			if err != nil {
				return err
			}
			tellSilent(cmd, f, resp.GetSilent())
			if f.asJSON() {
				return printJSON(cmd.OutOrStdout(), resp)
			}
			printWhy(cmd.OutOrStdout(), resp)
			return nil
		},
	}
	c.Flags().DurationVar(&ago, "since", 10*time.Minute, "how far back to look at decisions")
	return c
}

func printWhy(out io.Writer, r *waypostv1.ExplainWorkerResponse) {
	w := r.GetWorker()
	trust := "trust not learnt yet"
	if w.Trust != nil {
		trust = "trust " + strings.TrimPrefix(fmt.Sprintf("%.2f", w.GetTrust()), "0")
	}
	considered, chosen := r.GetConsidered(), r.GetChosen()
	fmt.Fprintf(out, "%s, cache view %s, %s. Last %s: considered %s", w.GetState(), text(w.GetView()), trust, age(r.SinceMs), count(r.Considered))
	if considered > 0 {
		fmt.Fprintf(out, " · chosen %s", share(chosen, considered))
		if r.EvenShare != nil {
			fmt.Fprintf(out, " (even share %s)", percent(r.EvenShare))
		}
	}
	fmt.Fprintln(out)
	if lost := shares(r.GetLostBy()); lost != "" {
		fmt.Fprintf(out, "Lost by     %s\n", lost)
	}
	if excluded := shares(r.GetExcluded()); excluded != "" {
		fmt.Fprintf(out, "Excluded    %s\n", excluded)
	}
	printGroup(out, w.GetGroup())
	printPresent(out, r)
	printLearnt(func(name, value string) { fmt.Fprintf(out, "%-11s %s\n", name, value) }, w.GetLearnt())
	fmt.Fprintf(out, "Ages        queue data %s\n", age(w.UpdatedMs))
	for i, s := range r.GetToChange() {
		name := "To change"
		if i > 0 {
			name = ""
		}
		fmt.Fprintf(out, "%-11s %s\n", name, s)
	}
}

// printGroup prints what of a group is not as it should be.
func printGroup(out io.Writer, members []*waypostv1.GroupMember) {
	if len(members) == 0 {
		return
	}
	name := "Group"
	for _, m := range members {
		if m.GetState() != "ok" {
			fmt.Fprintf(out, "%-11s %s\n", name, memberText(m))
			name = ""
		}
	}
	if name != "" {
		fmt.Fprintf(out, "%-11s %d hosts, all ok\n", name, len(members))
	}
}

// printPresent prints what a worker that was not priced would cost now.
func printPresent(out io.Writer, r *waypostv1.ExplainWorkerResponse) {
	if n := r.GetLostBy()["not_priced"]; n > 0 {
		fmt.Fprintf(out, "Not priced  in %s of %s decisions: a lower bound of its price was above all that could win\n", thousands(float64(n)), count(r.Considered))
	}
	p := r.GetPresent()
	t := p.GetTerms()
	if t == nil {
		return
	}
	fmt.Fprintf(out, "Now         for %s (%s prompt tokens, none counted as held): ", p.GetPlacementId(), count(p.PromptTokens))
	switch c := p.GetChosen(); {
	case t.GetExcluded() != "":
		fmt.Fprintf(out, "excluded: %s\n", t.GetExcluded())
	case c == nil:
		fmt.Fprintf(out, "start %s + prefill %s, total %s: it would be chosen\n", millis(t.StartMs), millis(t.PrefillMs), millis(t.TotalMs))
	default:
		fmt.Fprintf(out, "start %s + prefill %s, total %s; %s would be chosen with %s, by %s\n", millis(t.StartMs), millis(t.PrefillMs), millis(t.TotalMs), c.GetWorker(), millis(c.TotalMs), text(p.GetLostBy()))
	}
}

// shares prints counts as parts of their sum, largest first.
func shares(m map[string]uint32) string {
	total := uint32(0)
	for _, n := range m {
		total += n
	}
	var parts []string
	for _, k := range byCount(m) {
		parts = append(parts, fmt.Sprintf("%s %s", strings.ReplaceAll(k.name, "_", " "), share(k.n, total)))
	}
	return strings.Join(parts, " · ")
}

// printLearnt prints what outcomes taught about a worker.
func printLearnt(line func(name, value string), l *waypostv1.Learnt) {
	if l == nil {
		return
	}
	var parts []string
	for _, e := range l.GetErrors() {
		parts = append(parts, fmt.Sprintf("%s %+.0f ± %.0f ms", e.GetTerm(), e.GetBiasMs(), e.GetMeanMs()))
	}
	if len(parts) > 0 {
		line("Errors", strings.Join(parts, " · "))
	}
	reuse := fmt.Sprintf("%.1f outcomes", l.GetOutcomes())
	if l.GetBiasTokens() != 0 {
		reuse += fmt.Sprintf(" · constant bias %+d tokens", l.GetBiasTokens())
	}
	switch n := l.GetResyncs(); {
	case n == 1:
		reuse += " · view asked for anew once"
	case n > 1:
		reuse += fmt.Sprintf(" · view asked for anew %d times", n)
	}
	line("Reuse", reuse)
	if l.GetBreaker() != "closed" {
		s := l.GetBreaker() + " for " + age(l.FailingMs)
		if l.NextProbeMs != nil {
			s += ", next probe in " + age(l.NextProbeMs)
		}
		line("Breaker", s)
	}
}

func reuseCommand(f *flags) *cobra.Command {
	var ago time.Duration
	var pool string
	c := &cobra.Command{
		Use: "reuse", Short: "Set expected against actual reuse, and say what was lost to what", Args: cobra.NoArgs,
		Long: "Set expected against actual reuse, and say what was lost to what.\n\n" +
			"COLD are misses: nothing was expected and nothing was found. UNDER to FALSE POS are prediction errors. Together with AS PREDICTED and NOT REPORTED they are all requests with an outcome.",
		Example: "  waypost reuse --since 1h\n  waypost reuse --pool qwen3-32b --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if ago <= 0 {
				return Usage("--since %s: must be above 0", ago)
			}
			req := &waypostv1.GetReuseRequest{SinceMs: sinceMs(ago), Pool: optional(pool)}
			resp, err := ask(cmd, f, req, func(c *grpc.ClientConn) func(context.Context, *waypostv1.GetReuseRequest, ...grpc.CallOption) (*waypostv1.GetReuseResponse, error) {
				return operator(c).GetReuse
			})
			if err != nil {
				return err
			}
			tellSilent(cmd, f, resp.GetSilent())
			out := cmd.OutOrStdout()
			if f.asJSON() {
				return printList(out, f, resp, resp.GetPools())
			}
			printReuse(out, resp.GetPools(), f.output == "wide")
			printMemo(out, resp.GetPools())
			return nil
		},
	}
	c.Flags().DurationVar(&ago, "since", time.Hour, "how far back to look at decisions")
	c.Flags().StringVar(&pool, "pool", "", "only this pool")
	return c
}

// reuseColumns are the classes in the order of the table.
var reuseColumns = [...]struct{ head, class string }{
	{">AS PREDICTED", "as_predicted"},
	{">COLD", "cold"},
	{">UNDER", "under_predicted"},
	{">EVICTED", "evicted_since_view"},
	{">STALE", "view_stale"},
	{">RESTARTED", "restarted"},
	{">BOUNDARY", "boundary"},
	{">FALSE POS", "false_positive"},
	{">NOT REPORTED", "not_reported"},
}

func printReuse(out io.Writer, pools []*waypostv1.PoolReuse, wide bool) {
	head := []string{"POOL", ">REQUESTS", ">REACHED", ">REACHABLE", ">EXPECTED"}
	for _, c := range reuseColumns {
		head = append(head, c.head)
	}
	if wide {
		head = append(head, ">OUTCOMES", ">PROMPT TOK", ">SHORT TOK", ">MISS TOK")
	}
	t := newTable(head...)
	for _, p := range pools {
		row := []string{p.GetPool(), count(p.Requests), tokenShare(p.ActualTokens, p), tokenShare(p.ReachableTokens, p), tokenShare(p.ExpectedTokens, p)}
		for _, c := range reuseColumns {
			part := "-"
			if p.GetOutcomes() > 0 {
				part = fmt.Sprintf("%.1f%%", 100*float64(p.GetClasses()[c.class])/float64(p.GetOutcomes()))
			}
			row = append(row, part)
		}
		if wide {
			row = append(row, count(p.Outcomes), short(p.PromptTokens), short(p.ShortTokens), short(p.MissTokens))
		}
		t.row(row...)
	}
	t.print(out)
	for _, p := range pools {
		if p.GetPromptTokens() == 0 {
			continue
		}
		points := func(why string) string { return fmt.Sprintf("%.1f", 100*p.GetLostTokens()[why]/p.GetPromptTokens()) }
		worst := ""
		if w := p.GetWorst(); w != nil && w.GetPromptTokens() > 0 {
			worst = fmt.Sprintf("   Worst worker: %s (expected %.1f%%, got %.1f%%, n = %s)", w.GetWorker(),
				100*w.GetExpectedTokens()/w.GetPromptTokens(), 100*w.GetActualTokens()/w.GetPromptTokens(), count(w.Outcomes))
		}
		name := ""
		if len(pools) > 1 {
			name = p.GetPool() + ": "
		}
		fmt.Fprintf(out, "%sLost to: load %s points · health %s · policy %s.%s\n", name, points("load"), points("health"), points("policy"), worst)
	}
}

// printMemo says how requests given as text found their tokens.
func printMemo(out io.Writer, pools []*waypostv1.PoolReuse) {
	for _, p := range pools {
		m := p.GetMemo()
		if m == nil {
			continue
		}
		part := func(v, of float64) string {
			if of == 0 {
				return unknown
			}
			return fmt.Sprintf("%.1f%%", 100*v/of)
		}
		var learnt []string
		for _, source := range slices.Sorted(maps.Keys(m.GetLearnt())) {
			learnt = append(learnt, fmt.Sprintf("%s %.0f", source, m.GetLearnt()[source]))
		}
		name := ""
		if len(pools) > 1 {
			name = p.GetPool() + ": "
		}
		over := unknown
		if m.GetKnownTokens() > 0 {
			over = fmt.Sprintf("%.2f%%", 100*m.GetOverTokens()/m.GetKnownTokens())
		}
		fmt.Fprintf(out, "%sText memo: %s.   Hits %s of %.0f · covers %s of the tokens known, %s too many · learnt from %s · %.1f MB\n",
			name, m.GetState(), part(m.GetHits(), m.GetLookups()), m.GetLookups(), part(m.GetCoveredTokens(), m.GetKnownTokens()), over, strings.Join(learnt, ", "), m.GetBytes()/1e6)
	}
}

// tokenShare is a part of the prompt tokens whose reuse was told.
func tokenShare(v *float64, p *waypostv1.PoolReuse) string {
	if v == nil || p.GetPromptTokens() == 0 {
		return unknown
	}
	return fmt.Sprintf("%.1f%%", 100**v/p.GetPromptTokens())
}
