package ctl

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

func topologyCommand(f *flags) *cobra.Command {
	var from, to string
	c := &cobra.Command{
		Use: "topology", Short: "Show where hosts stand, the links between them, and what moving KV costs", Args: cobra.NoArgs,
		Long: "Show where hosts stand and the links between them, each figure with its source: measured by pulls, declared in the\n" +
			"fleet file, or assumed. Pairs of workers whose pulls were not confirmed are listed. With --from and --to it prices\n" +
			"moving saved KV of 1k, 8k and 64k tokens beside computing it.",
		Example: "  waypost topology\n  waypost topology --from gpu-01 --to gpu-02/vllm-8000/0\n  waypost topology --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if (from == "") != (to == "") {
				return Usage("--from and --to go together: name a host, engine or worker for each")
			}
			resp, err := ask(cmd, f, operator, &waypostv1.GetTopologyRequest{From: optional(from), To: optional(to)}, waypostv1.OperatorServiceClient.GetTopology)
			if status.Code(err) == codes.NotFound {
				return unknownEnd(cmd, f, from, to, err)
			}
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			switch {
			case f.asJSON():
				return printJSON(out, resp)
			case from != "":
				for _, p := range resp.GetPrices() {
					printPrice(out, p)
				}
			default:
				printTopology(out, resp)
			}
			fmt.Fprintf(out, "Asked: %s, fleet file version %d.\n", resp.GetAnsweredBy(), resp.GetPolicyVersion())
			return nil
		},
	}
	c.AddCommand(probeCommand(f))
	c.Flags().StringVar(&from, "from", "", "host, engine or worker that sends")
	c.Flags().StringVar(&to, "to", "", "host, engine or worker that receives")
	completeFlag(c, "from", completeWorkers(f))
	completeFlag(c, "to", completeWorkers(f))
	return c
}

// probeCommand measures the way between two hosts.
func probeCommand(f *flags) *cobra.Command {
	var mib uint32
	var length time.Duration
	c := &cobra.Command{
		Use: "probe FROM TO", Short: "Measure the way from one host to another", Args: cobra.ExactArgs(2),
		Long: "Measure the way from one host to another: the agent of the first sends zeros to that of the second over one TCP connection, through\n" +
			"the port that gossip uses anyway. It loads the link for that time and is never done unasked. What engines reach by their own\n" +
			"connectors may be more, and is measured by their pulls; prices rest on those and on the fleet file, not on this.\n" +
			"The answer is waited for 20 s longer than --for, or as long as --timeout says.",
		Example:           "  waypost topology probe gpu-01 gpu-02\n  waypost topology probe gpu-01 gpu-02 --mib 4096 --for 5s --json",
		ValidArgsFunction: completeHosts(f),
		RunE: func(cmd *cobra.Command, args []string) error {
			if mib < 1 || mib > 16<<10 {
				return Usage("--mib %d: use 1 to %d", mib, 16<<10)
			}
			if length <= 0 || length > 10*time.Second {
				return Usage("--for %s: use more than 0 and up to 10s", length)
			}
			// The answer comes after all was sent.
			if !cmd.Flags().Changed("timeout") {
				f.timeout = max(f.timeout, length+20*time.Second)
			}
			req := &waypostv1.ProbeLinkRequest{From: &args[0], To: &args[1], MaxBytes: proto.Float64(float64(mib) * (1 << 20)), MaxMs: proto.Float64(float64(length) / float64(time.Millisecond))}
			resp, err := ask(cmd, f, operator, req, waypostv1.OperatorServiceClient.ProbeLink)
			if status.Code(err) == codes.NotFound {
				for _, name := range args {
					if host, _, _ := strings.Cut(name, "/"); strings.Contains(Message(err), fmt.Sprintf("%q", host)) {
						return unknownHost(cmd, f, host)
					}
				}
			}
			if err != nil {
				return err
			}
			if f.asJSON() {
				return printJSON(cmd.OutOrStdout(), resp)
			}
			printProbe(cmd.OutOrStdout(), resp)
			return nil
		},
	}
	c.Flags().Uint32Var(&mib, "mib", 1024, "send at most so many MiB")
	c.Flags().DurationVar(&length, "for", 2*time.Second, "send at most for so long")
	return c
}

func printProbe(out io.Writer, r *waypostv1.ProbeLinkResponse) {
	l := r.GetLink()
	fmt.Fprintf(out, "%s → %s   %s over one TCP connection: %s in %s, first answer after %s\n", r.GetFrom(), r.GetTo(), rate(r.BytesPerSec), size(r.Bytes), millis(r.TookMs), latency(r.AnswerMs))
	fmt.Fprintf(out, "Prices rest on   %s, %s %s, latency %s %s\n", l.GetName(), rate(l.BytesPerSec), l.GetBandwidthSource(), latency(l.LatencyMs), l.GetLatencySource())
	fmt.Fprintf(out, "Asked: %s.\n", r.GetAnsweredBy())
}

// unknownEnd names what is nearest to an end that nobody knows.
func unknownEnd(cmd *cobra.Command, f *flags, from, to string, cause error) error {
	all, err := listWorkers(cmd, f, &waypostv1.ListWorkersRequest{})
	if err != nil {
		return err
	}
	var names []string
	for _, w := range all {
		host, _, _ := strings.Cut(w.GetName(), "/")
		names = append(names, w.GetName(), host)
	}
	for _, end := range []struct{ flag, name string }{{"--from", from}, {"--to", to}} {
		if strings.Contains(Message(cause), fmt.Sprintf("%q", end.name)) {
			if n := nearest(end.name, names); n != "" && n != end.name {
				return Usage("%s: no worker of %q; did you mean %s?", end.flag, end.name, n)
			}
			return Usage("%s: no worker of %q; see: waypost workers", end.flag, end.name)
		}
	}
	return cause
}

func printTopology(out io.Writer, r *waypostv1.GetTopologyResponse) {
	zone, rack := "\x00", ""
	for _, h := range r.GetHosts() {
		source := h.GetSource()
		if h.GetZone() != zone {
			zone, rack = h.GetZone(), "\x00"
			fmt.Fprintf(out, "zone %s (%s)\n", orUnknown(zone), source)
		}
		if h.GetRack() != rack {
			rack = h.GetRack()
			fmt.Fprintf(out, "  rack %s\n", orUnknown(rack))
		}
		connectors := "no KV connector"
		if n := len(h.GetPulls()); n > 0 {
			connectors = strings.Join(h.GetPulls(), " ")
		}
		if h.GetNuma() != "" {
			connectors += "   (" + h.GetNuma() + ")"
		}
		fmt.Fprintf(out, "    %s   %s\n", h.GetName(), connectors)
	}
	fmt.Fprintln(out)
	t := newTable("LINK", ">BANDWIDTH", "SOURCE", ">STATED", ">MEASURED", ">PULLS", ">AGE", ">LATENCY", "SOURCE", "TRANSFER", ">SURCHARGE", ">UNDER WAY")
	for _, l := range r.GetLinks() {
		t.row(l.GetName(), rate(l.BytesPerSec), l.GetBandwidthSource(), rate(l.StatedBytesPerSec), rate(l.MeasuredBytesPerSec), count(l.MeasuredPulls), age(l.MeasuredAgeMs),
			latency(l.LatencyMs), l.GetLatencySource(), l.GetTransfer(), millis(l.SurchargeMs), count(l.UnderWay))
	}
	t.print(out)
	if len(r.GetPairs()) > 0 {
		fmt.Fprintln(out)
		t := newTable("FROM", "TO", ">MEASURED", ">PULLS", ">AGE", "STATE")
		for _, p := range r.GetPairs() {
			t.row(p.GetFrom(), p.GetTo(), rate(p.MeasuredBytesPerSec), count(p.MeasuredPulls), age(p.MeasuredAgeMs), pairState(p))
		}
		t.print(out)
	}
}

func pairState(p *waypostv1.TransferPair) string {
	switch {
	case p.GetOff():
		return fmt.Sprintf("OFF: %d pulls in a row not confirmed, tries again in %s", p.GetUnconfirmed(), age(p.OffForMs))
	case p.GetUnconfirmed() > 0:
		return fmt.Sprintf("on, the last %d not confirmed", p.GetUnconfirmed())
	}
	return "on"
}

func printPrice(out io.Writer, p *waypostv1.TransferPrice) {
	perToken := unknown
	if p.KvBytesPerToken != nil {
		perToken = size(p.KvBytesPerToken)
	}
	limit := ""
	if p.MaxTransferMs != nil {
		limit = ", at most " + millis(p.MaxTransferMs) + " by the pool"
	}
	fmt.Fprintf(out, "%s → %s\n", p.GetFrom(), p.GetTo())
	fmt.Fprintf(out, "  %s, %s %s, latency %s, %s per token%s\n", p.GetLink(), rate(p.BytesPerSec), p.GetBandwidthSource(), latency(p.LatencyMs), perToken, limit)
	if p.GetReason() != "" {
		fmt.Fprintf(out, "  nothing can be pulled: %s\n", p.GetReason())
	}
	t := newTable(">TOKENS", ">MOVE", ">COMPUTE", "CHEAPER")
	for _, c := range p.GetCosts() {
		t.row(count(c.Tokens), millis(c.TransferMs), millis(c.ComputeMs), cheaper(p, c))
	}
	t.print(out)
	fmt.Fprintln(out)
}

// cheaper says what a request would do whose worker computes at once.
func cheaper(p *waypostv1.TransferPrice, c *waypostv1.TransferCost) string {
	switch {
	case c.TransferMs == nil || c.ComputeMs == nil:
		return unknown
	case c.GetTransferMs() >= c.GetComputeMs():
		return "compute"
	case p.MaxTransferMs != nil && c.GetTransferMs() > p.GetMaxTransferMs():
		return "move, but over the pool's max_transfer"
	}
	return "move"
}

// rate prints a bandwidth.
func rate(v *float64) string {
	if v == nil {
		return unknown
	}
	return size(v) + "/s"
}

// transferText says how a worker's saved KV may travel.
func transferText(t *waypostv1.TransferFacts) string {
	if t == nil || t.GetConnector() == "" {
		return "none"
	}
	exports := "exports nothing"
	if t.GetExportedTier() != "" {
		exports = "exports " + t.GetExportedTier() + " memory"
	}
	perToken := unknown
	if t.KvBytesPerToken != nil {
		perToken = size(t.KvBytesPerToken)
	}
	return fmt.Sprintf("%s at %s, %s, %s per token, fingerprint %s", t.GetConnector(), orUnknown(t.GetSideChannel()), exports, perToken, orUnknown(t.GetFingerprint()))
}

// hostTierText says what reading saved KV back from host memory takes.
func hostTierText(h *waypostv1.HostTierFacts) string {
	if h.GetUncounted() != "" {
		return "not counted (" + h.GetUncounted() + ")"
	}
	perToken := unknown
	if h.KvBytesPerToken != nil {
		perToken = size(h.KvBytesPerToken)
	}
	source := orUnknown(h.GetLinkSource())
	if h.GetLink() != "" {
		source += "; " + h.GetLink() + " by NVML"
	}
	return fmt.Sprintf("reused, %s per token at %s (%s)", perToken, rate(h.LinkBytesPerSec), source)
}

func orUnknown(s string) string {
	if s == "" {
		return unknown
	}
	return s
}

// latency prints a way's latency, which may be far below a millisecond.
func latency(v *float64) string {
	if v != nil && *v > 0 && *v < 1 {
		return fmt.Sprintf("%.0f µs", *v*1000)
	}
	return millis(v)
}
