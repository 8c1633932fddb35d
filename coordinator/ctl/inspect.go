package ctl

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	waypostv1 "waypost/proto/waypost/v1"
)

func inspectCommand(f *flags) *cobra.Command {
	c := &cobra.Command{
		Use: "inspect", Short: "Show what a coordinator holds of a worker's cache, and verify it",
		Example: "  waypost inspect stream gpu-01/vllm-8000/0\n  waypost inspect index gpu-01/vllm-8000/0 --verify",
	}
	c.AddCommand(
		inspectVerb(f, "index", "Show the keys of a worker in the prefix index", printIndex),
		inspectVerb(f, "stream", "Show the prefix stream of a worker: frames, runs, resyncs and why", printStream),
	)
	return c
}

// inspectVerb is one of two views on the same answer.
func inspectVerb(f *flags, name, short string, show func(io.Writer, *waypostv1.InspectWorkerResponse)) *cobra.Command {
	var verify bool
	c := &cobra.Command{
		Use: name + " WORKER", Short: short, Args: cobra.ExactArgs(1),
		Long: short + ". With --verify the agent is asked for its whole set and the index is compared with it, key by key;\n" +
			"exit 1 if anything differs, 3 if the agent cannot be asked, 7 if it does not answer in time.",
		Example:           fmt.Sprintf("  waypost inspect %s gpu-01/vllm-8000/0\n  waypost inspect %s gpu-01/vllm-8000/0 --verify --json", name, name),
		ValidArgsFunction: completeWorkers(f),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &waypostv1.InspectWorkerRequest{Worker: &args[0], Verify: &verify}
			resp, err := ask(cmd, f, operator, req, waypostv1.OperatorServiceClient.InspectWorker)
			if status.Code(err) == codes.NotFound {
				return unknownWorker(cmd, f, args[0])
			}
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if f.asJSON() {
				err = printJSON(out, resp)
			} else {
				show(out, resp)
				printComparison(out, resp.GetComparison())
				fmt.Fprintf(out, "Asked: %s.\n", resp.GetAnsweredBy())
			}
			if n := differing(resp.GetComparison()); err == nil && n > 0 {
				return failed(ExitFailed, "%s differs from what its agent has in %s keys", args[0], thousands(float64(n)))
			}
			return err
		},
	}
	c.Flags().BoolVar(&verify, "verify", false, "compare with the agent's whole set; exit 1 if it differs")
	return c
}

// differing is the number of keys that are not equal on both sides.
func differing(c *waypostv1.StreamComparison) uint32 {
	return c.GetMissing() + c.GetExtra() + c.GetExtents()
}

// fact prints a line of a page.
func fact(out io.Writer, name, value string) { fmt.Fprintf(out, "%-12s %s\n", name, value) }

func printInspected(out io.Writer, r *waypostv1.InspectWorkerResponse) {
	fact(out, "Worker", fmt.Sprintf("%s, incarnation %s", r.GetWorker(), text(r.GetIncarnation())))
	fact(out, "Cache view", fmt.Sprintf("%s, coverage %s, %s old", text(r.GetView()), text(r.GetCoverage()), age(r.AgeMs)))
}

func printIndex(out io.Writer, r *waypostv1.InspectWorkerResponse) {
	printInspected(out, r)
	fact(out, "Keys", fmt.Sprintf("%s in the index, predicted ones included; the stream tells %s in %s runs", count(r.Keys), count(r.StreamKeys), count(r.Runs)))
	fact(out, "Whole index", fmt.Sprintf("%s workers, %s keys, %s", count(r.IndexWorkers), count(r.IndexKeys), size(r.IndexBytes)))
	printResync(out, r)
}

func printStream(out io.Writer, r *waypostv1.InspectWorkerResponse) {
	printInspected(out, r)
	up := "lane down"
	if r.GetLaneUp() {
		up = "lane up"
	}
	at := "no snapshot yet"
	if r.Epoch != nil {
		at = fmt.Sprintf("epoch %d, frame %s", r.GetEpoch(), thousands(r.GetSeq()))
	}
	fact(out, "Stream", at+", "+up)
	fact(out, "Holds", fmt.Sprintf("%s runs, %s keys, %s in the decoder", count(r.Runs), count(r.StreamKeys), size(r.DecoderBytes)))
	fact(out, "Received", fmt.Sprintf("%s, of these %s asked for", size(r.StreamBytes), size(r.PulledBytes)))
	fact(out, "Frames", text(tallied(r.GetFrames())))
	fact(out, "Resyncs", text(tallied(r.GetResyncs())))
	printResync(out, r)
}

func printResync(out io.Writer, r *waypostv1.InspectWorkerResponse) {
	last := "none"
	if r.GetLastResyncReason() != "" {
		last = fmt.Sprintf("%s ago: %s", age(r.LastResyncMs), r.GetLastResyncReason())
	}
	fact(out, "Last resync", last)
}

func printComparison(out io.Writer, c *waypostv1.StreamComparison) {
	if c == nil {
		return
	}
	var snapshot *float64
	if c.SnapshotBytes != nil {
		v := float64(c.GetSnapshotBytes())
		snapshot = &v
	}
	result := fmt.Sprintf("equal, all %s keys", count(c.Equal))
	if n := differing(c); n > 0 {
		result = fmt.Sprintf("DIFFERS in %s keys: %s missing here, %s extra here, %s of another extent; %s equal",
			thousands(float64(n)), count(c.Missing), count(c.Extra), count(c.Extents), count(c.Equal))
	}
	fact(out, "Verified", result)
	fact(out, "", fmt.Sprintf("compared at epoch %d, frame %s, with a snapshot of %s", c.GetEpoch(), thousands(c.GetSeq()), size(snapshot)))
	if len(c.GetKeys()) == 0 {
		return
	}
	t := newTable("HOW", "KEY", ">TOKENS")
	for _, k := range c.GetKeys() {
		t.row(k.GetHow(), k.GetKey(), count(k.DepthTokens))
	}
	t.print(out)
}

// tallied prints counts by name, the most frequent first.
func tallied(counts map[string]uint32) string {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b))
	})
	parts := make([]string, 0, len(names))
	for _, n := range names {
		parts = append(parts, thousands(float64(counts[n]))+" "+n)
	}
	return strings.Join(parts, ", ")
}

// size prints bytes.
func size(v *float64) string {
	if v == nil {
		return unknown
	}
	switch x := *v; {
	case x >= 1e9:
		return fmt.Sprintf("%.1f GB", x/1e9)
	case x >= 1e6:
		return fmt.Sprintf("%.1f MB", x/1e6)
	case x >= 1e3:
		return fmt.Sprintf("%.1f kB", x/1e3)
	default:
		return fmt.Sprintf("%.0f B", x)
	}
}
