package ctl

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	waypostv1 "waypost/proto/waypost/v1"
)

func gpusCommand(f *flags) *cobra.Command {
	return &cobra.Command{
		Use: "gpus [HOST]", Short: "List GPUs with their health and what policy makes of it", Args: cobra.MaximumNArgs(1),
		Long: "List GPUs with their health and what policy makes of it. With a host, what else is known of its GPUs: memory of processes that belong to no engine, " +
			"instances, links, distance of network cards and why something is unknown. ? is unknown.",
		Example: "  waypost gpus\n  waypost gpus gpu-02\n  waypost gpus --json",
		RunE: func(cmd *cobra.Command, args []string) error {
			all, err := listGPUs(cmd, f)
			if err != nil {
				return err
			}
			resp := all
			if len(args) == 1 {
				if resp = gpusOf(all, args[0]); len(resp.GetGpus())+len(resp.GetWithout()) == 0 {
					return unknownGPUHost(args[0], all)
				}
			}
			if f.asJSON() {
				err := printList(cmd.OutOrStdout(), f, resp, resp.GetGpus())
				if err == nil && f.output == "jsonl" {
					err = printLines(cmd.OutOrStdout(), resp.GetWithout())
				}
				return err
			}
			printGPUs(cmd.OutOrStdout(), resp, len(args) == 1)
			return nil
		},
	}
}

func listGPUs(cmd *cobra.Command, f *flags) (*waypostv1.ListGpusResponse, error) {
	return ask(cmd, f, operator, &waypostv1.ListGpusRequest{}, waypostv1.OperatorServiceClient.ListGpus)
}

func gpusOf(all *waypostv1.ListGpusResponse, host string) *waypostv1.ListGpusResponse {
	out := &waypostv1.ListGpusResponse{}
	for _, g := range all.GetGpus() {
		if g.GetHost() == host {
			out.Gpus = append(out.Gpus, g)
		}
	}
	for _, h := range all.GetWithout() {
		if h.GetHost() == host {
			out.Without = append(out.Without, h)
		}
	}
	return out
}

func unknownGPUHost(name string, all *waypostv1.ListGpusResponse) error {
	var names []string
	for _, g := range all.GetGpus() {
		names = append(names, g.GetHost())
	}
	for _, h := range all.GetWithout() {
		names = append(names, h.GetHost())
	}
	if n := nearest(name, names); n != "" {
		return Usage("no host %q with GPUs; did you mean %s?", name, n)
	}
	return Usage("no host %q with GPUs; see: waypost hosts", name)
}

func printGPUs(w io.Writer, resp *waypostv1.ListGpusResponse, whole bool) {
	if len(resp.GetGpus()) > 0 {
		t := newTable("GPU", "UUID", "MODEL", "MEM USED", "TEMP", "CLOCK", "ECC UNC", "XID", "NVLINK", "VERDICT", "WORKERS")
		for _, g := range resp.GetGpus() {
			m := g.GetGpu()
			t.row(g.GetName(), shortUUID(m.GetUuid()), text(m.GetModel()), gib(m.MemoryUsedBytes), with("%.0f°", m.TemperatureCelsius),
				with("%.0f MHz", m.SmClockMhz), with("%.0f", m.EccUncorrected), newestXid(m), links(m), verdictText(m), text(strings.Join(g.GetWorkers(), " ")))
		}
		t.print(w)
	}
	for _, h := range resp.GetWithout() {
		fmt.Fprintf(w, "%s: %s\n", h.GetHost(), h.GetGpuState())
	}
	if whole {
		for _, g := range resp.GetGpus() {
			printGPU(w, g)
		}
	}
}

// printGPU prints what the list has no room for.
func printGPU(w io.Writer, g *waypostv1.HostGpu) {
	m := g.GetGpu()
	fmt.Fprintf(w, "\n%s  %s  told %s ago\n", g.GetName(), text(m.GetUuid()), age(g.AgeMs))
	line := func(what, value string) {
		if value != "" {
			fmt.Fprintf(w, "  %-10s %s\n", what, value)
		}
	}
	line("Memory", fmt.Sprintf("%s of %s used, %s by processes of no engine here", gib(m.MemoryUsedBytes), gib(m.MemoryTotalBytes), gib(m.ForeignMemoryBytes)))
	for _, p := range m.GetInstances() {
		line("Instance", fmt.Sprintf("%d  %s  %s  %s of %s used; how busy it is no driver tells", p.GetIndex(), text(p.GetUuid()), text(p.GetModel()), gib(p.MemoryUsedBytes), gib(p.MemoryTotalBytes)))
	}
	line("Throttled", strings.Join(m.GetThrottleReasons(), ", "))
	for _, x := range m.GetXids() {
		state := ""
		if x.GetAcknowledged() {
			state = ", acknowledged"
		}
		line("Xid", fmt.Sprintf("%d  %s, %s, %s ago, seen %.0f×%s", x.GetXid(), text(x.GetMeans()), text(x.GetClass()), age(x.AgeMs), x.GetCount(), state))
	}
	line("Fabric", m.GetFabric())
	for _, way := range m.GetWays() {
		line("Way", fmt.Sprintf("to GPU %d: %s", way.GetTo(), way.GetWay()))
	}
	numa := unknown
	if m.NumaNode != nil {
		numa = fmt.Sprint(m.GetNumaNode())
	}
	line("NUMA node", numa)
	for _, n := range m.GetNics() {
		line("Network", n.GetInterface()+": "+distanceText(n.GetDistance()))
	}
	line("Notes", strings.Join(m.GetNotes(), "; "))
	for _, field := range slices.Sorted(maps.Keys(m.GetMissing())) {
		line("Unknown", field+": "+m.GetMissing()[field])
	}
	if strings.HasPrefix(m.GetVerdict(), "exclude:xid") {
		line("Next", "after repair: "+fmt.Sprintf("waypost ack %s --reason …", g.GetName()))
	}
}

// distanceText says what a GPU and a network card share.
func distanceText(distance string) string {
	switch distance {
	case "switch":
		return "behind the same PCIe switch"
	case "host_bridge":
		return "behind the same PCIe host bridge"
	case "numa_node":
		return "on the same NUMA node"
	case "system":
		return "on another NUMA node"
	}
	return text(distance)
}

func shortUUID(uuid string) string {
	const keep = len("GPU-8a1f")
	if len(uuid) > keep {
		return uuid[:keep] + "…"
	}
	return text(uuid)
}

func gib(bytes *float64) string {
	if bytes == nil {
		return unknown
	}
	return fmt.Sprintf("%.1f GiB", *bytes/(1<<30))
}

func with(format string, v *float64) string {
	if v == nil {
		return unknown
	}
	return fmt.Sprintf(format, *v)
}

// newestXid is the newest error that nobody has dealt with.
func newestXid(m *waypostv1.Gpu) string {
	xids := m.GetXids()
	for i := len(xids) - 1; i >= 0; i-- {
		if x := xids[i]; !x.GetAcknowledged() {
			return fmt.Sprintf("%d, %s", x.GetXid(), age(x.AgeMs))
		}
	}
	return "-"
}

func links(m *waypostv1.Gpu) string {
	switch {
	case m.NvlinkUp == nil:
		return unknown
	case m.NvlinkTotal == nil:
		return fmt.Sprintf("%d/%s", m.GetNvlinkUp(), unknown)
	}
	return fmt.Sprintf("%d/%d", m.GetNvlinkUp(), m.GetNvlinkTotal())
}

// verdictText is a verdict as people read it: "excluded: xid_79".
func verdictText(m *waypostv1.Gpu) string {
	if m.GetVerdict() == "" {
		return unknown
	}
	action, reasons, _ := strings.Cut(m.GetVerdict(), ":")
	reasons = strings.ReplaceAll(reasons, ",", ", ")
	switch action {
	case "exclude":
		return "excluded: " + reasons
	case "price":
		return "priced: " + reasons
	}
	return text(action)
}

func ackCommand(f *flags) *cobra.Command {
	var reason string
	var dryRun bool
	c := &cobra.Command{
		Use: "ack HOST/GPU", Short: "Say that a GPU's errors so far were dealt with", Args: cobra.ExactArgs(1),
		Long: "Say that a GPU's errors so far were dealt with: they exclude its workers no more. A condition that lasts, as a GPU that is still off the bus, goes on to exclude. " +
			"Without it a reboot of the host clears them as well. The host keeps it, so no leader is needed.",
		Example: "  waypost ack gpu-02/1 --reason \"reseated\"\n  waypost ack gpu-02/1 --reason test --dry-run",
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			resp, err := listGPUs(cmd, f)
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			var names []string
			for _, g := range resp.GetGpus() {
				names = append(names, g.GetName())
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if strings.TrimSpace(reason) == "" {
				return Usage("--reason is required: the next person asks why")
			}
			req := &waypostv1.AckGpuRequest{Gpu: &args[0], Reason: &reason, DryRun: &dryRun}
			resp, err := ask(cmd, f, operator, req, waypostv1.OperatorServiceClient.AckGpu)
			if err != nil {
				return err
			}
			if f.asJSON() {
				return printJSON(cmd.OutOrStdout(), resp)
			}
			printAck(cmd.OutOrStdout(), resp, dryRun)
			return nil
		},
	}
	c.Flags().StringVar(&reason, "reason", "", "why; required")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would change")
	return c
}

func printAck(w io.Writer, resp *waypostv1.AckGpuResponse, dryRun bool) {
	var xids []string
	for _, x := range resp.GetXids() {
		xids = append(xids, fmt.Sprint(x))
	}
	verb := "acknowledged"
	if dryRun {
		verb = "would acknowledge"
	}
	what := "nothing: no error is open"
	if len(xids) > 0 {
		what = "Xid " + strings.Join(xids, ", ")
	}
	fmt.Fprintf(w, "%s: %s %s; the GPU is then %s\n", resp.GetGpu(), verb, what, verdictText(&waypostv1.Gpu{Verdict: resp.Verdict}))
}
