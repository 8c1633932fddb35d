package ctl

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	waypostv1 "waypost/proto/waypost/v1"
)

func workersCommand(f *flags) *cobra.Command {
	req := &waypostv1.ListWorkersRequest{}
	var pool, host, state string
	var watch bool
	c := &cobra.Command{
		Use: "workers [NAME]", Short: "List workers, or show one", Args: cobra.MaximumNArgs(1),
		Example:           "  waypost workers\n  waypost workers gpu-01/vllm-8000/0\n  waypost workers --pool qwen3-32b --json",
		ValidArgsFunction: completeWorkers(f),
		RunE: func(cmd *cobra.Command, args []string) error {
			req.Pool, req.Host, req.State = optional(pool), optional(host), optional(state)
			if len(args) == 1 {
				req.Name = &args[0]
			}
			interval := time.Duration(0)
			if watch {
				interval = time.Second
			}
			return every(cmd, interval, func() error { return printWorkers(cmd, f, req) })
		},
	}
	c.Flags().StringVar(&pool, "pool", "", "only this pool")
	c.Flags().StringVar(&host, "host", "", "only this host")
	c.Flags().StringVar(&state, "state", "", "only this state, ready for example")
	c.Flags().BoolVar(&watch, "watch", false, "print again every second")
	return c
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func printWorkers(cmd *cobra.Command, f *flags, req *waypostv1.ListWorkersRequest) error {
	list, err := listWorkers(cmd, f, req)
	if err != nil {
		return err
	}
	if req.Name != nil && len(list) == 0 {
		return unknownWorker(cmd, f, req.GetName())
	}
	out := cmd.OutOrStdout()
	switch {
	case f.asJSON():
		return printList(out, f, &waypostv1.ListWorkersResponse{Workers: list}, list)
	case req.Name != nil:
		printWorker(out, list[0])
	default:
		workerTable(out, list, f.output == "wide")
	}
	return nil
}

func unknownWorker(cmd *cobra.Command, f *flags, name string) error {
	all, err := listWorkers(cmd, f, &waypostv1.ListWorkersRequest{})
	if err != nil {
		return err
	}
	names := make([]string, 0, len(all))
	for _, w := range all {
		names = append(names, w.GetName())
	}
	if n := nearest(name, names); n != "" {
		return Usage("no worker %q; did you mean %s?", name, n)
	}
	return Usage("no worker %q; see: waypost workers", name)
}

func workerTable(out io.Writer, list []*waypostv1.Worker, wide bool) {
	head := []string{"WORKER", "POOL", "STATE", ">WAIT", ">RUN", ">WAITING", ">KV USED", ">CACHED", "VIEW", ">TRUST", ">PREFILL", ">STEP", ">SHARE", ">UPDATED"}
	if wide {
		head = append(head, "URL", "INCARNATION", "BOUNDARY", "MODEL", "ENGINE", "GPUS")
	}
	t := newTable(head...)
	for _, w := range list {
		prefill, _, _ := strings.Cut(prefillSpeed(w), " (")
		trust := unknown
		if w.Trust != nil {
			trust = strings.TrimPrefix(fmt.Sprintf("%.2f", w.GetTrust()), "0")
		}
		row := []string{
			w.GetName(), text(w.GetPool()), w.GetState(), millis(w.WaitMs), count(w.Running), count(w.Waiting), percent(w.KvUsedRatio),
			short(w.CachedTokens), text(w.GetView()), trust, prefill, millis(w.StepMs), percent(w.Share), age(w.UpdatedMs),
		}
		if wide {
			row = append(row, text(w.GetUrl()), text(w.GetIncarnation()), text(w.GetBoundary()), text(w.GetModel()),
				strings.TrimSpace(w.GetEngine()+" "+w.GetEngineVersion()), text(strings.Join(w.GetGpuUuids(), ",")))
		}
		t.row(row...)
	}
	t.print(out)
}

// prefillSpeed is the speed of a long prefill and where it comes from.
func prefillSpeed(w *waypostv1.Worker) string {
	if w.PrefillTokensPerSec == nil {
		return unknown
	}
	speed := fmt.Sprintf("%.1f k/s", w.GetPrefillTokensPerSec()/1000)
	if w.GetSpeedSource() == "" {
		return speed
	}
	return speed + " (" + w.GetSpeedSource() + ")"
}

func printWorker(out io.Writer, w *waypostv1.Worker) {
	line := func(name, value string) { fmt.Fprintf(out, "%-13s %s\n", name, value) }
	line("Worker", w.GetName())
	line("Pool", text(w.GetPool()))
	line("State", w.GetState())
	if c := w.GetCordon(); c != nil {
		line("Cordon", fmt.Sprintf("%s by %s at %s: %s", c.GetSelector(), c.GetBy(), c.GetAt(), c.GetReason()))
	}
	for i, m := range w.GetGroup() {
		line([]string{"Group", ""}[min(i, 1)], memberText(m))
	}
	line("Engine", strings.TrimSpace(fmt.Sprintf("%s %s, %s, incarnation %s", w.GetEngine(), w.GetEngineVersion(), w.GetModel(), w.GetIncarnation())))
	line("Reached at", w.GetUrl())
	for _, k := range slices.Sorted(maps.Keys(w.GetHeaders())) {
		line("", k+": "+w.GetHeaders()[k])
	}
	basis := ""
	if w.GetQueueBasis() != "" {
		basis = " by " + w.GetQueueBasis()
	}
	line("Queue", fmt.Sprintf("wait %s%s, running %s, waiting %s", millis(w.WaitMs), basis, count(w.Running), count(w.Waiting)))
	line("Claims", fmt.Sprintf("live %s, placed here %s, not reported yet %s", count(w.Live), count(w.OpenClaims), count(w.PendingClaims)))
	line("Speed", fmt.Sprintf("prefill %s, step %s", prefillSpeed(w), millis(w.StepMs)))
	line("KV", fmt.Sprintf("used %s of %s blocks of %s tokens, %s tokens cached", percent(w.KvUsedRatio), count(w.PoolBlocks), count(w.BlockTokens), short(w.CachedTokens)))
	line("Cache view", text(w.GetView()))
	if w.GetViewHint() != "" {
		line("", "better: "+w.GetViewHint())
	}
	if w.Trust != nil {
		line("Trust", fmt.Sprintf("%.2f on cache credit", w.GetTrust()))
	}
	printLearnt(line, w.GetLearnt())
	if w.GetRole() != "" {
		line("Role", w.GetRole()+" only")
	}
	line("KV transfer", transferText(w.GetTransfer()))
	if h := w.GetHostTier(); h != nil {
		line("Host tier", hostTierText(h))
	}
	line("Capabilities", text(strings.Join(w.GetCapabilities(), ", ")))
	line("GPUs", text(strings.Join(w.GetGpuUuids(), ", ")))
	line("Updated", age(w.UpdatedMs)+" ago")
}

// memberText is a share of an engine that spans hosts.
func memberText(m *waypostv1.GroupMember) string {
	s := m.GetPart()
	if m.GetHost() != "" {
		s += " on " + m.GetHost()
	}
	s += ": " + m.GetState()
	if m.AwayMs != nil {
		s += " for " + age(m.AwayMs)
	}
	if m.GetWhy() != "" {
		s += ", " + m.GetWhy()
	}
	return s
}

func hostsCommand(f *flags) *cobra.Command {
	return &cobra.Command{
		Use: "hosts [NAME]", Short: "List hosts with their GPUs, or show one", Args: cobra.MaximumNArgs(1),
		Example: "  waypost hosts\n  waypost hosts gpu-01 --json",
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &waypostv1.ListHostsRequest{}
			if len(args) == 1 {
				req.Name = &args[0]
			}
			resp, err := ask(cmd, f, operator, req, waypostv1.OperatorServiceClient.ListHosts)
			if err != nil {
				return err
			}
			if req.Name != nil && len(resp.GetHosts()) == 0 {
				return Usage("no host %q; see: waypost hosts", req.GetName())
			}
			if f.asJSON() {
				return printList(cmd.OutOrStdout(), f, resp, resp.GetHosts())
			}
			t := newTable("HOST", "ZONE", "RACK", "AGENT", "LANE", ">UPDATED", ">LOAD", ">MEM FREE", "GPUS", "WORKERS")
			for _, h := range resp.GetHosts() {
				lane := "down"
				if h.GetLaneUp() {
					lane = "up"
				}
				gpus := h.GetGpuState()
				if len(h.GetGpus()) > 0 {
					gpus = fmt.Sprintf("%d × %s", len(h.GetGpus()), h.GetGpus()[0].GetModel())
				}
				load := unknown
				if h.GetFacts() != nil && h.GetFacts().Load_1M != nil {
					load = fmt.Sprintf("%.1f", h.GetFacts().GetLoad_1M())
				}
				var free *float64
				if h.GetFacts() != nil {
					free = h.GetFacts().MemoryAvailableBytes
				}
				t.row(h.GetName(), text(h.GetZone()), text(h.GetRack()), text(h.GetAgentVersion()), lane, age(h.UpdatedMs), load, short(free), text(gpus), text(strings.Join(h.GetWorkers(), " ")))
			}
			t.print(cmd.OutOrStdout())
			return nil
		},
	}
}

func membersCommand(f *flags) *cobra.Command {
	var from string
	var watch bool
	c := &cobra.Command{
		Use: "members [NAME]", Short: "List gossip members as the asked process sees them", Args: cobra.MaximumNArgs(1),
		Long:    "List gossip members as the asked process sees them. On a host of the fleet this works through the local agent with every coordinator down.",
		Example: "  waypost members\n  waypost members --addr unix:/run/waypost/agent.sock",
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &waypostv1.ListMembersRequest{From: optional(from)}
			interval := time.Duration(0)
			if watch {
				interval = time.Second
			}
			return every(cmd, interval, func() error {
				resp, err := ask(cmd, f, operator, req, waypostv1.OperatorServiceClient.ListMembers)
				if err != nil {
					return err
				}
				if len(args) == 1 {
					if resp, err = onlyMember(resp, args[0]); err != nil {
						return err
					}
				}
				if f.asJSON() {
					return printList(cmd.OutOrStdout(), f, resp, resp.GetMembers())
				}
				memberTable(cmd.OutOrStdout(), resp)
				return nil
			})
		},
	}
	c.Flags().StringVar(&from, "from", "", "ask for that member's own view")
	c.Flags().BoolVar(&watch, "watch", false, "print again every second")
	return c
}

func onlyMember(resp *waypostv1.ListMembersResponse, name string) (*waypostv1.ListMembersResponse, error) {
	var names []string
	for _, m := range resp.GetMembers() {
		if m.GetName() == name {
			return &waypostv1.ListMembersResponse{Members: []*waypostv1.Member{m}, AnsweredBy: resp.AnsweredBy}, nil
		}
		names = append(names, m.GetName())
	}
	if n := nearest(name, names); n != "" {
		return nil, Usage("no member %q; did you mean %s?", name, n)
	}
	return nil, Usage("no member %q; see: waypost members", name)
}

func memberTable(out io.Writer, resp *waypostv1.ListMembersResponse) {
	t := newTable("NAME", "ADDRESS", "ROLE", "STATUS", "SINCE", "RTT", "VERSION", ">PROTO", "KEY", "LANE", "NOTE")
	byStatus := map[string]int{}
	for _, m := range resp.GetMembers() {
		rtt := "-"
		if m.RttMs != nil {
			rtt = millis(m.RttMs)
		}
		t.row(m.GetName(), m.GetAddress(), m.GetRole(), m.GetStatus(), age(m.SinceMs), rtt, m.GetVersion(), count(m.Protocol), text(m.GetKeyId()), text(m.GetLane()), m.GetNote())
		byStatus[m.GetStatus()]++
	}
	t.print(out)
	var parts []string
	for _, s := range []string{"alive", "suspect", "lost", "left"} {
		if byStatus[s] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", byStatus[s], s))
		}
	}
	fmt.Fprintf(out, "%d members: %s. Asked: %s.\n", len(resp.GetMembers()), strings.Join(parts, ", "), resp.GetAnsweredBy())
}

func coordinatorsCommand(f *flags) *cobra.Command {
	return &cobra.Command{
		Use: "coordinators", Short: "List coordinators and who leads", Args: cobra.NoArgs,
		Example: "  waypost coordinators",
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := ask(cmd, f, operator, &waypostv1.ListCoordinatorsRequest{}, waypostv1.OperatorServiceClient.ListCoordinators)
			if err != nil {
				return err
			}
			if f.asJSON() {
				return printList(cmd.OutOrStdout(), f, resp, resp.GetCoordinators())
			}
			t := newTable("NAME", ">NUMBER", "ROLE", "CLUSTER", "API", ">APPLIED", ">LAST CONTACT")
			for _, m := range resp.GetCoordinators() {
				t.row(m.GetName(), count(m.Number), m.GetRole(), text(m.GetClusterAddress()), text(m.GetApiAddress()), number(m.AppliedIndex), millis(m.LastContactMs))
			}
			t.print(cmd.OutOrStdout())
			return nil
		},
	}
}
