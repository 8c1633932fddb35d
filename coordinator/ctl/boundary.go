package ctl

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	waypostv1 "waypost/proto/waypost/v1"
)

func boundaryCommand(f *flags) *cobra.Command {
	var pool string
	c := &cobra.Command{
		Use: "boundary", Short: "Show which workers turn text into the same blocks", Args: cobra.NoArgs,
		Long: "Show which workers turn text into the same blocks, by the token ids that their engines make of fixed probes.\n" +
			"Workers of group 1 are most of the pool; of the others the first probe and token that differ are shown. They\n" +
			"are placed by load and earn no prefix credit. A worker that differs by the adapter and salt rule alone is\n" +
			"credited for requests with neither.",
		Example: "  waypost boundary\n  waypost boundary --pool qwen3-32b --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			req := &waypostv1.GetBoundaryRequest{Pool: optional(pool)}
			resp, err := ask(cmd, f, operator, req, waypostv1.OperatorServiceClient.GetBoundary)
			if status.Code(err) == codes.NotFound {
				return Usage("no pool %q; see: waypost status", pool)
			}
			if err != nil {
				return err
			}
			if f.asJSON() {
				return printJSON(cmd.OutOrStdout(), resp)
			}
			printBoundaries(cmd.OutOrStdout(), resp)
			return nil
		},
	}
	c.Flags().StringVar(&pool, "pool", "", "only this pool")
	return c
}

func printBoundaries(out io.Writer, r *waypostv1.GetBoundaryResponse) {
	if len(r.GetPools()) == 0 {
		fmt.Fprintln(out, "No pools.")
	}
	for i, p := range r.GetPools() {
		if i > 0 {
			fmt.Fprintln(out)
		}
		fmt.Fprintf(out, "Pool %s  %s\n", p.GetPool(), boundarySummary(p.GetWorkers()))
		if len(p.GetWorkers()) == 0 {
			continue
		}
		t := newTable("WORKER", ">GROUP", "STATE", "BOUNDARY", ">PROBES", "SETS", "DATES", "CREDIT", "FIRST DIFFERENCE")
		for _, w := range p.GetWorkers() {
			dates, credit := "-", "no"
			if w.GetDateDependent() {
				dates = "masked"
			}
			if w.GetCredited() {
				credit = "yes"
			}
			t.row(w.GetWorker(), count(w.Group), w.GetState(), text(w.GetBoundary()), count(w.Probes), text(setNumbers(w.GetSets())), dates, credit, firstDifference(w))
		}
		t.print(out)
		for _, w := range p.GetWorkers() {
			if w.GetWhy() != "" {
				fmt.Fprintf(out, "! %s  %s\n", w.GetWorker(), w.GetWhy())
			}
		}
	}
}

// boundarySummary counts the workers by state, in the order they are listed.
func boundarySummary(workers []*waypostv1.WorkerBoundary) string {
	counts, order := map[string]int{}, []string{}
	for _, w := range workers {
		if counts[w.GetState()] == 0 {
			order = append(order, w.GetState())
		}
		counts[w.GetState()]++
	}
	parts := make([]string, 0, len(order))
	for _, s := range order {
		word := s
		if plural := map[string]string{"agrees": "agree", "differs": "differ"}[s]; plural != "" && counts[s] > 1 {
			word = plural
		}
		parts = append(parts, fmt.Sprintf("%d %s", counts[s], word))
	}
	noun := "workers"
	if len(workers) == 1 {
		noun = "worker"
	}
	return strings.TrimSuffix(fmt.Sprintf("%d %s: %s", len(workers), noun, strings.Join(parts, ", ")), ": ")
}

func setNumbers(sets []uint32) string {
	words := make([]string, len(sets))
	for i, s := range sets {
		words[i] = fmt.Sprint(s)
	}
	return strings.Join(words, ",")
}

// firstDifference is the part, probe and token that differ first.
func firstDifference(w *waypostv1.WorkerBoundary) string {
	if w.GetPart() == "" {
		return "-"
	}
	s := w.GetPart()
	if w.Probe != nil {
		s += fmt.Sprintf(" probe %d", w.GetProbe())
	}
	if w.FirstDifference != nil {
		s += fmt.Sprintf(" token %d", w.GetFirstDifference())
	}
	return s
}
