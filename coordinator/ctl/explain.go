package ctl

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

func explainCommand(f *flags) *cobra.Command {
	var (
		request, tenant, worker, class      string
		last, redirected, mispredicted, raw bool
		since                               time.Duration
		limit                               uint32
	)
	c := &cobra.Command{
		Use: "explain [ID]", Short: "Show why a request went where it went, and what came of it", Args: cobra.MaximumNArgs(1),
		Example: "  waypost explain pl_c1_9k3f7q2m\n  waypost explain --request chatcmpl-7d1e\n  waypost explain --last --tenant team-a --redirected\n  waypost explain --mispredicted --since 10m",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				resp, err := ask(cmd, f, &waypostv1.GetPlacementRequest{PlacementId: &args[0]}, func(c *grpc.ClientConn) func(context.Context, *waypostv1.GetPlacementRequest, ...grpc.CallOption) (*waypostv1.GetPlacementResponse, error) {
					return placement(c).GetPlacement
				})
				if err != nil {
					return err
				}
				return showRecords(cmd, f, []*waypostv1.PlacementRecord{resp.GetRecord()}, true, raw)
			}
			one := last || request != ""
			if !one && !redirected && !mispredicted && since == 0 && worker == "" && class == "" {
				return Usage("which placement? give an ID, --request, --last, --redirected, --mispredicted or --since")
			}
			req := &waypostv1.ListPlacementsRequest{
				RequestId: optional(request), Tenant: optional(tenant), Worker: optional(worker), ReuseClass: optional(class),
			}
			if redirected {
				req.Redirected = proto.Bool(true)
			}
			if mispredicted {
				req.Mispredicted = proto.Bool(true)
			}
			if since > 0 {
				req.SinceMs = proto.Float64(float64(since) / float64(time.Millisecond))
			}
			if one {
				limit = 1
			}
			req.Limit = &limit
			resp, err := ask(cmd, f, req, func(c *grpc.ClientConn) func(context.Context, *waypostv1.ListPlacementsRequest, ...grpc.CallOption) (*waypostv1.ListPlacementsResponse, error) {
				return placement(c).ListPlacements
			})
			if err != nil {
				return err
			}
			if len(resp.GetRecords()) == 0 {
				return failed(ExitFailed, "no such placement is kept here")
			}
			return showRecords(cmd, f, resp.GetRecords(), one, raw)
		},
	}
	fl := c.Flags()
	fl.StringVar(&request, "request", "", "the caller's request id")
	fl.BoolVar(&last, "last", false, "the newest one that matches")
	fl.StringVar(&tenant, "tenant", "", "only this tenant")
	fl.StringVar(&worker, "worker", "", "only this chosen worker")
	fl.StringVar(&class, "class", "", "only this class of outcome")
	fl.BoolVar(&redirected, "redirected", false, "only those that passed over the worker with most reuse")
	fl.BoolVar(&mispredicted, "mispredicted", false, "only those whose outcome differed from the prediction")
	fl.BoolVar(&raw, "raw", false, "terms without the weights they have in the total")
	fl.DurationVar(&since, "since", 0, "only at most this old")
	fl.Uint32Var(&limit, "limit", 20, "at most so many")
	return c
}

func showRecords(cmd *cobra.Command, f *flags, records []*waypostv1.PlacementRecord, full, raw bool) error {
	out := cmd.OutOrStdout()
	switch {
	case f.output == "jsonl":
		return printLines(out, records)
	case f.asJSON() && full:
		return printJSON(out, records[0])
	case f.asJSON():
		return printJSON(out, &waypostv1.ListPlacementsResponse{Records: records})
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
	if b.GetInputSource() == "unknown" {
		exact = "estimated from the text"
	}
	fmt.Fprintf(out, "Request    %s, tenant %s, %s prompt tokens (%s), %s output tokens expected\n",
		text(r.GetPool()), text(r.GetTenant()), count(r.PromptTokens), exact, number(r.OutputTokensExpected))
	if len(b.GetMarks()) > 0 {
		fmt.Fprintf(out, "Marks      %s\n", strings.Join(b.GetMarks(), ", "))
	}
	fmt.Fprintf(out, "Chosen     %s   %s\n", p.GetWorker().GetName(), expectation(p.GetExpected(), r.PromptTokens))
	fmt.Fprintf(out, "Because    %s\n\n", p.GetBecause())
	termTable(out, p, raw)
	if len(r.GetWouldChange()) > 0 {
		fmt.Fprintf(out, "Would change if   %s\n", strings.Join(r.GetWouldChange(), " · "))
	}
	o := r.GetOutcome()
	if o == nil {
		fmt.Fprintln(out, "Outcome    not reported yet")
		return
	}
	reused := "reuse not told"
	if o.CachedTokens != nil && p.GetExpected() != nil && p.GetExpected().ReuseTokens != nil {
		reused = fmt.Sprintf("reused %s of %s expected", count(o.CachedTokens), count(p.GetExpected().ReuseTokens))
	}
	first := ""
	if o.FirstTokenMs != nil {
		first = " · first token " + millis(o.FirstTokenMs)
		if e := p.GetExpected(); e != nil && e.GetFirstTokenMs() > 0 {
			first += fmt.Sprintf(" (%+.0f%%)", 100*(o.GetFirstTokenMs()/e.GetFirstTokenMs()-1))
		}
	}
	tail := ""
	if o.OutputTokens != nil {
		tail = fmt.Sprintf(" · %s tokens", count(o.OutputTokens))
	}
	took := ""
	if o.DurationMs != nil {
		took = " in " + millis(o.DurationMs)
	}
	fmt.Fprintf(out, "Outcome    %s: %s%s%s, %s%s\n", reused, strings.ReplaceAll(r.GetReuseClass(), "_", " "), first, tail, o.GetResult(), took)
}
