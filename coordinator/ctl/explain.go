package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/outcome"
	rule "waypost/coordinator/placement"
	waypostv1 "waypost/proto/waypost/v1"
)

// explainFlags select decisions.
type explainFlags struct {
	request, pool, tenant, worker, class           string
	last                                           int
	redirected, mispredicted, raw, summary, follow bool
	since                                          time.Duration
	limit                                          uint32
}

func explainCommand(f *flags) *cobra.Command {
	var x explainFlags
	c := &cobra.Command{
		Use: "explain [ID]", Short: "Show why a request went where it went, and what came of it", Args: cobra.MaximumNArgs(1),
		Long: "Show why a request went where it went, and what came of it. Any coordinator answers for all.\n\n" +
			"One decision is shown whole, several as a list, newest first. With --summary decisions are counted by the term that decided; with --follow those of the asked coordinator are shown as they are taken.",
		Example: "  waypost explain pl_c1_9k3f7q2m\n  waypost explain --request chatcmpl-7d1e\n  waypost explain --last 5\n  waypost explain --last --tenant team-a --redirected\n" +
			"  waypost explain --mispredicted --since 10m\n  waypost explain --summary --since 10m\n  waypost explain --follow --redirected",
		ValidArgsFunction: completePlacements(f),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := x.settle(cmd, args)
			switch {
			case err != nil:
				return err
			case x.summary:
				return summarize(cmd, f, &x)
			case x.follow:
				return followPlacements(cmd, f, &x)
			case id != "":
				return explainOne(cmd, f, id, x.raw)
			}
			return explainList(cmd, f, &x)
		},
	}
	fl := c.Flags()
	fl.StringVar(&x.request, "request", "", "the caller's request id")
	fl.IntVar(&x.last, "last", 0, "the newest N that match; without N the newest one")
	fl.Lookup("last").NoOptDefVal = "1"
	fl.StringVar(&x.pool, "pool", "", "only this pool")
	fl.StringVar(&x.tenant, "tenant", "", "only this tenant")
	fl.StringVar(&x.worker, "worker", "", "only this chosen worker")
	fl.StringVar(&x.class, "class", "", "only this class of outcome")
	fl.BoolVar(&x.redirected, "redirected", false, "only those that passed over the worker with most reuse")
	fl.BoolVar(&x.mispredicted, "mispredicted", false, "only those whose outcome differed from the prediction")
	fl.BoolVar(&x.raw, "raw", false, "terms without the weights they have in the total")
	fl.BoolVar(&x.summary, "summary", false, "count decisions by the term that decided")
	fl.BoolVarP(&x.follow, "follow", "f", false, "show decisions and outcomes as they come")
	fl.DurationVar(&x.since, "since", 0, "only at most this old")
	fl.Uint32Var(&x.limit, "limit", 20, "at most so many")
	completeFlag(c, "worker", completeWorkers(f))
	completeFlag(c, "class", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return classWords(), cobra.ShellCompDirectiveNoFileComp
	})
	return c
}

// classWords are the names of the classes.
func classWords() []string {
	out := make([]string, 0, len(outcome.Classes))
	for _, c := range outcome.Classes {
		out = append(out, string(c))
	}
	return out
}

// settle checks how the flags go together; id is the one placement asked for.
func (x *explainFlags) settle(cmd *cobra.Command, args []string) (id string, err error) {
	set := cmd.Flags().Changed
	if len(args) == 1 {
		// --last 5 leaves the 5 as an argument: the flag may stand alone.
		if n, err := strconv.Atoi(args[0]); err == nil && set("last") {
			x.last, args = n, nil
		}
	}
	if set("last") && (x.last < 1 || x.last > 1000) {
		return "", Usage("--last %d: use 1 to 1000", x.last)
	}
	if x.since < 0 {
		return "", Usage("--since %s: must be above 0", x.since)
	}
	if len(args) == 1 {
		for _, name := range []string{"request", "last", "pool", "tenant", "worker", "class", "redirected", "mispredicted", "summary", "follow", "since", "limit"} {
			if set(name) {
				return "", Usage("an ID names one placement; leave out --%s", name)
			}
		}
		return args[0], nil
	}
	for _, one := range []struct {
		on      bool
		name    string
		without []string
	}{
		{x.summary, "summary", []string{"request", "last", "tenant", "worker", "class", "redirected", "mispredicted", "raw", "follow", "limit"}},
		{x.follow, "follow", []string{"request", "last", "class", "raw", "since", "limit"}},
	} {
		for _, name := range one.without {
			if one.on && set(name) {
				return "", Usage("--%s and --%s do not go together", one.name, name)
			}
		}
		if one.on {
			return "", nil
		}
	}
	if x.last == 0 && x.request == "" && !x.redirected && !x.mispredicted && x.since == 0 && x.worker == "" && x.class == "" && x.tenant == "" && x.pool == "" {
		return "", Usage("which placement? give an ID, --request, --last, --redirected, --mispredicted or --since")
	}
	return "", nil
}

// completePlacements offers the newest placements.
func completePlacements(f *flags) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		resp, err := ask(cmd, f, &waypostv1.ListPlacementsRequest{}, func(c *grpc.ClientConn) func(context.Context, *waypostv1.ListPlacementsRequest, ...grpc.CallOption) (*waypostv1.ListPlacementsResponse, error) {
			return placement(c).ListPlacements
		})
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var ids []string
		for _, r := range resp.GetRecords() {
			ids = append(ids, r.GetPlacement().GetPlacementId())
		}
		return ids, cobra.ShellCompDirectiveNoFileComp
	}
}

func explainOne(cmd *cobra.Command, f *flags, id string, raw bool) error {
	resp, err := ask(cmd, f, &waypostv1.GetPlacementRequest{PlacementId: &id}, func(c *grpc.ClientConn) func(context.Context, *waypostv1.GetPlacementRequest, ...grpc.CallOption) (*waypostv1.GetPlacementResponse, error) {
		return placement(c).GetPlacement
	})
	if err != nil {
		return err
	}
	return showRecords(cmd, f, []*waypostv1.PlacementRecord{resp.GetRecord()}, true, raw)
}

func explainList(cmd *cobra.Command, f *flags, x *explainFlags) error {
	req := &waypostv1.ListPlacementsRequest{
		RequestId: optional(x.request), Pool: optional(x.pool), Tenant: optional(x.tenant), Worker: optional(x.worker), ReuseClass: optional(x.class), SinceMs: sinceMs(x.since), Limit: &x.limit,
	}
	if x.redirected {
		req.Redirected = proto.Bool(true)
	}
	if x.mispredicted {
		req.Mispredicted = proto.Bool(true)
	}
	one := x.last == 1 || x.last == 0 && x.request != ""
	switch {
	case one:
		req.Limit = proto.Uint32(1)
	case x.last > 1:
		req.Limit = proto.Uint32(uint32(x.last))
	}
	resp, err := ask(cmd, f, req, func(c *grpc.ClientConn) func(context.Context, *waypostv1.ListPlacementsRequest, ...grpc.CallOption) (*waypostv1.ListPlacementsResponse, error) {
		return placement(c).ListPlacements
	})
	if err != nil {
		return err
	}
	tellSilent(cmd, f, resp.GetSilent())
	if len(resp.GetRecords()) == 0 {
		return failed(ExitFailed, "no such placement is kept")
	}
	return showRecords(cmd, f, resp.GetRecords(), one, x.raw)
}

func sinceMs(d time.Duration) *float64 {
	if d == 0 {
		return nil
	}
	return proto.Float64(float64(d) / float64(time.Millisecond))
}

// tellSilent names the coordinators whose part of the answer is missing.
func tellSilent(cmd *cobra.Command, f *flags, silent []string) {
	if f.quiet {
		return
	}
	for _, s := range silent {
		fmt.Fprintln(cmd.ErrOrStderr(), "without the records of "+s)
	}
}

func summarize(cmd *cobra.Command, f *flags, x *explainFlags) error {
	req := &waypostv1.SummarizePlacementsRequest{SinceMs: sinceMs(x.since), Pool: optional(x.pool)}
	resp, err := ask(cmd, f, req, func(c *grpc.ClientConn) func(context.Context, *waypostv1.SummarizePlacementsRequest, ...grpc.CallOption) (*waypostv1.SummarizePlacementsResponse, error) {
		return placement(c).SummarizePlacements
	})
	if err != nil {
		return err
	}
	tellSilent(cmd, f, resp.GetSilent())
	out := cmd.OutOrStdout()
	switch {
	case f.asJSON():
		return printList(out, f, resp, resp.GetPools())
	case len(resp.GetPools()) == 0:
		fmt.Fprintln(out, "No decisions.")
	}
	for _, p := range resp.GetPools() {
		fmt.Fprintf(out, "Pool %s  %s decisions: %s redirected, %s with an outcome, %s mispredicted\n", p.GetPool(), count(p.Placed), count(p.Redirected), count(p.Reported), count(p.Mispredicted))
		t := newTable("DECIDED BY", ">DECISIONS", ">SHARE")
		for _, k := range byCount(p.GetDecidingTerms()) {
			name := k.name
			if name == "" {
				name = "only choice"
			}
			t.row(name, thousands(float64(k.n)), share(k.n, p.GetPlaced()))
		}
		t.print(out)
		if len(p.GetMarks()) > 0 {
			var parts []string
			for _, k := range byCount(p.GetMarks()) {
				parts = append(parts, fmt.Sprintf("%s %s", k.name, thousands(float64(k.n))))
			}
			fmt.Fprintf(out, "Not normal: %s\n", strings.Join(parts, ", "))
		}
	}
	return nil
}

// counted is one line of a count.
type counted struct {
	name string
	n    uint32
}

// byCount lists counts, largest first.
func byCount(m map[string]uint32) []counted {
	out := make([]counted, 0, len(m))
	for name, n := range m {
		out = append(out, counted{name, n})
	}
	slices.SortFunc(out, func(a, b counted) int {
		if a.n != b.n {
			return int(b.n) - int(a.n)
		}
		return strings.Compare(a.name, b.name)
	})
	return out
}

func share(n, of uint32) string {
	if of == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100*float64(n)/float64(of))
}

// followPlacements shows decisions as they are taken, until interrupted.
func followPlacements(cmd *cobra.Command, f *flags, x *explainFlags) error {
	req := &waypostv1.WatchPlacementsRequest{Pool: optional(x.pool), Tenant: optional(x.tenant), Worker: optional(x.worker)}
	if x.redirected {
		req.Redirected = proto.Bool(true)
	}
	if x.mispredicted {
		req.Mispredicted = proto.Bool(true)
	}
	conn, err := f.dial()
	if err != nil {
		return err
	}
	// The stream is over by then; a failing close changes nothing.
	defer func() { _ = conn.Close() }()
	stream, err := placement(conn).WatchPlacements(cmd.Context(), req)
	if err != nil {
		return unreachable(conn, err)
	}
	out := cmd.OutOrStdout()
	for {
		e, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF), cmd.Context().Err() != nil:
			return nil
		case err != nil:
			return unreachable(conn, err)
		case f.asJSON():
			if err := printJSON(out, e); err != nil {
				return err
			}
			continue
		}
		if e.GetMissed() > 0 {
			fmt.Fprintf(out, "(%d more came faster than they could be shown)\n", e.GetMissed())
		}
		printEvent(out, e)
	}
}

// printEvent is one line: a decision with its reason, or what became of it.
func printEvent(out io.Writer, e *waypostv1.WatchPlacementsResponse) {
	r := e.GetRecord()
	p := r.GetPlacement()
	if e.GetKind() == "outcome" {
		fmt.Fprintf(out, "%s  outcome  %s  %s\n", p.GetPlacementId(), p.GetWorker().GetName(), outcomeLine(r))
		return
	}
	fmt.Fprintf(out, "%s  placed   %s  %s prompt tokens, %s; %s\n", p.GetPlacementId(), p.GetWorker().GetName(), count(r.PromptTokens), expectation(p.GetExpected(), nil), p.GetBecause())
}

func showRecords(cmd *cobra.Command, f *flags, records []*waypostv1.PlacementRecord, full, raw bool) error {
	out := cmd.OutOrStdout()
	switch {
	case f.asJSON() && full:
		return printJSON(out, records[0])
	case f.asJSON():
		return printList(out, f, &waypostv1.ListPlacementsResponse{Records: records}, records)
	case full:
		printRecord(out, records[0], raw)
	default:
		t := newTable("PLACEMENT", ">AGE", "WORKER", "TENANT", ">PROMPT", ">EXPECTED", ">REUSED", "CLASS", "REQUEST")
		for _, r := range records {
			var reused *uint32
			if r.GetOutcome() != nil {
				reused = r.GetOutcome().CachedTokens
			}
			t.row(r.GetPlacement().GetPlacementId(), age(r.AgeMs), r.GetPlacement().GetWorker().GetName(), text(r.GetTenant()), count(r.PromptTokens),
				count(r.GetPlacement().GetExpected().ReuseTokens), count(reused), text(r.GetReuseClass()), r.GetRequestId())
		}
		t.print(out)
	}
	return nil
}

func printRecord(out io.Writer, r *waypostv1.PlacementRecord, raw bool) {
	p := r.GetPlacement()
	b := p.GetBasis()
	fmt.Fprintf(out, "Placement  %s  request %s  %s ago by %s, policy v%d (%s old), queue data %s, cache view %s\n",
		p.GetPlacementId(), r.GetRequestId(), age(r.AgeMs), r.GetCoordinator(), b.GetPolicyVersion(), age(b.PolicyAgeMs), age(b.QueueAgeMs), age(b.CacheViewAgeMs))
	exact := "exact"
	switch b.GetInputSource() {
	case "unknown":
		exact = "estimated from the text"
	case "memo":
		exact = "estimated from the text; its beginning is known"
	}
	fmt.Fprintf(out, "Request    %s, tenant %s, %s prompt tokens (%s), %s output tokens expected%s\n",
		text(r.GetPool()), text(r.GetTenant()), count(r.PromptTokens), exact, number(r.OutputTokensExpected), outputSource(r.GetOutputTokensSource()))
	if len(b.GetMarks()) > 0 {
		fmt.Fprintf(out, "Marks      %s\n", strings.Join(b.GetMarks(), ", "))
	}
	fmt.Fprintf(out, "Chosen     %s   %s\n", p.GetWorker().GetName(), expectation(p.GetExpected(), r.PromptTokens))
	fmt.Fprintf(out, "Because    %s\n\n", p.GetBecause())
	termTable(out, p, raw)
	if len(r.GetWouldChange()) > 0 {
		fmt.Fprintf(out, "Would change if   %s\n", strings.Join(r.GetWouldChange(), " · "))
	}
	fmt.Fprintf(out, "Outcome    %s\n", outcomeLine(r))
}

// outputSource says in brackets where an expected length comes from.
func outputSource(word string) string {
	switch rule.OutputSource(word) {
	case rule.OutputRequest:
		return " (the request says so)"
	case rule.OutputLimit:
		return " (the request's limit)"
	case rule.OutputMean:
		return " (the pool's mean)"
	case rule.OutputPrior:
		return " (nothing learnt yet)"
	}
	return ""
}

// outcomeLine says what became of a placement beside what was expected.
func outcomeLine(r *waypostv1.PlacementRecord) string {
	o, e := r.GetOutcome(), r.GetPlacement().GetExpected()
	if o == nil {
		return "not reported yet"
	}
	reused := "reuse not told"
	if o.CachedTokens != nil && e != nil && e.ReuseTokens != nil {
		reused = fmt.Sprintf("reused %s of %s expected", count(o.CachedTokens), count(e.ReuseTokens))
	} else if o.CachedTokens != nil {
		reused = fmt.Sprintf("reused %s, none known to expect", count(o.CachedTokens))
	}
	class := strings.ReplaceAll(r.GetReuseClass(), "_", " ")
	if r.GetProvisional() {
		class += " (provisional: evidence is gathered)"
	}
	first := ""
	if o.FirstTokenMs != nil {
		first = " · first token " + millis(o.FirstTokenMs)
		if e != nil && e.GetFirstTokenMs() > 0 {
			first += fmt.Sprintf(" (%+.0f%%)", 100*(o.GetFirstTokenMs()/e.GetFirstTokenMs()-1))
		}
	}
	tail := ""
	if o.OutputTokens != nil {
		tail = fmt.Sprintf(" · %s tokens", count(o.OutputTokens))
	}
	end := o.GetResult()
	if o.GetErrorClass() != "" {
		end += " (" + o.GetErrorClass() + ")"
	}
	if o.DurationMs != nil {
		end += " in " + millis(o.DurationMs)
	}
	if r.GetOutcomeSource() == "agent" {
		end += ", as the agent concludes: nobody reported it"
	}
	return fmt.Sprintf("%s: %s%s%s, %s", reused, class, first, tail, end)
}
