package coordinator

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/fleet"
	"waypost/coordinator/group"
	"waypost/coordinator/registry"
	waypostv1 "waypost/proto/waypost/v1"
)

// sharesOf are the shares that a hello tells of; looks says that its agent looks
// for them.
func sharesOf(m *waypostv1.AgentHello) (shares []group.Share, looks bool) {
	take := func(list []*waypostv1.GroupShare, uncounted bool) {
		for _, s := range list {
			shares = append(shares, group.Share{
				Process: s.GetProcess(), Kind: s.GetKind(), Engine: s.GetEngine(), Meeting: s.GetMeeting(), Node: int(s.GetNode()), Nodes: int(s.GetNodes()),
				FirstRank: int(s.GetFirstRank()), LocalRanks: int(s.GetLocalRanks()), Ranks: int(s.GetRanks()), Uncounted: uncounted, GPUUUIDs: s.GetGpuUuids(),
			})
		}
	}
	take(m.GetShares().GetShares(), false)
	take(m.GetShares().GetUncounted(), true)
	return shares, m.Shares != nil
}

// cordonsOn are the cordons that name a worker or a host or GPU that carries a
// share of its engine.
func cordonsOn(state *registry.State, worker, model string, gpuUUIDs []string, members []group.Member) []registry.Cordon {
	out := state.CordonsFor(worker, model, gpuUUIDs)
	for i := range members {
		if m := &members[i]; m.Host != "" {
			for _, k := range state.CordonsFor(m.Host, "", m.GPUUUIDs) {
				if !slices.ContainsFunc(out, func(o registry.Cordon) bool { return o.Selector == k.Selector }) {
					out = append(out, k)
				}
			}
		}
	}
	return out
}

// selects says whether a selector names a worker, or a host or GPU that carries a
// share of its engine.
func selects(selector string, w *fleet.WorkerInfo) bool {
	return names(selector, w.Name, w.Facts.GPUUUIDs) || slices.ContainsFunc(w.Members, func(m group.Member) bool { return m.SelectedBy(selector) })
}

// groupProto is a worker's group with its own share first; nil: its engine is of
// one host.
func groupProto(w *fleet.WorkerInfo, nowMs float64) []*waypostv1.GroupMember {
	if w.Front == nil || w.Front.Uncounted && len(w.Members) == 0 {
		return nil
	}
	part := fmt.Sprintf("node %d", w.Front.Node)
	switch {
	case w.Front.Uncounted:
		part = group.HelpersPart
	case w.Front.Nodes == 0:
		part = fmt.Sprintf("ranks %d-%d", w.Front.FirstRank, w.Front.FirstRank+w.Front.LocalRanks-1)
	}
	own, reasons := ownState(w.GPUVerdict)
	out := []*waypostv1.GroupMember{{Part: &part, Host: &w.Host, State: proto.String(string(own)), Why: &reasons, GpuUuids: w.Facts.GPUUUIDs}}
	for i := range w.Members {
		m := &w.Members[i]
		member := &waypostv1.GroupMember{Part: &m.Part, Host: &m.Host, State: proto.String(string(m.State)), Why: &m.Why, GpuUuids: m.GPUUUIDs}
		if !math.IsNaN(m.AwaySinceMs) {
			member.AwayMs = proto.Float64(nowMs - m.AwaySinceMs)
		}
		out = append(out, member)
	}
	return out
}

// ownState is what a verdict on GPUs says of a front's own share.
func ownState(verdict string) (state group.State, why string) {
	action, reasons, _ := strings.Cut(verdict, ":")
	switch action {
	case "exclude":
		return group.Fault, strings.TrimSpace(reasons)
	case "ok", "price":
		return group.OK, strings.TrimSpace(reasons)
	}
	return group.Unknown, "the state of its GPUs is not known"
}

// groupFault says what is not known of a worker's group though it serves; empty:
// all is known, or its state tells.
func groupFault(w *fleet.WorkerInfo) string {
	h := group.HealthOf(w.Members)
	if h.State != group.Unknown {
		return ""
	}
	return "its group is not known whole: " + h.Why
}

// uuidsOf are the UUIDs of a GPU and of its instances.
func uuidsOf(g *waypostv1.Gpu) []string {
	uuids := []string{g.GetUuid()}
	for _, i := range g.GetInstances() {
		uuids = append(uuids, i.GetUuid())
	}
	return uuids
}
