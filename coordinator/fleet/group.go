package fleet

import (
	"fmt"
	"math"
	"net/url"
	"slices"
	"strings"

	"waypost/coordinator/group"
	"waypost/coordinator/placement"
)

// shareGraceMs is how long after a front appears its group may be incomplete
// though operators list its hosts: lanes come up one after another.
const shareGraceMs = 15_000

// ShareVerdict is what a host says of the GPUs of one of its shares.
type ShareVerdict struct {
	// Process marks the share's life, Verdict is as in [ledger.Load.GPUVerdict].
	Process uint64
	Verdict string
}

// grouped is what a worker whose engine spans hosts has beside others.
type grouped struct {
	front *group.Share
	// process is the engine life that members were found in, sinceMs when it was
	// first known.
	process uint64
	sinceMs float64
	members []group.Member
	hosts   []*host // of the members, each once
	health  group.Health
	settled bool
}

// validateShares names the first field of a hello's shares that is out of range.
func (h *Hello) validateShares(bad func(string, string, ...any) error) error {
	if len(h.Shares) > group.MaxShares {
		return bad("shares", "%d are more than %d", len(h.Shares), group.MaxShares)
	}
	seen := map[uint64]bool{}
	for i := range h.Shares {
		s := &h.Shares[i]
		if fault := s.Fault(); fault != "" {
			return bad(fmt.Sprintf("shares[%d]", i), "%s", fault)
		}
		if seen[s.Process] {
			return bad(fmt.Sprintf("shares[%d].process", i), "%016x is told twice", s.Process)
		}
		seen[s.Process] = true
	}
	return nil
}

// takeShares takes what a hello tells of shares. What their GPUs were said to be
// stays until the next report.
func (h *host) takeShares(hello *Hello) {
	before := h.shares
	h.shares, h.looks = slices.Clone(hello.Shares), hello.LooksForShares
	for i := range h.shares {
		s := &h.shares[i]
		s.GPUUUIDs, s.Verdict = slices.Clone(s.GPUUUIDs), ""
		if k := slices.IndexFunc(before, func(old group.Share) bool { return old.Process == s.Process }); k >= 0 {
			s.Verdict = before[k].Verdict
		}
	}
}

// takeVerdicts takes what a report says of the GPUs of shares, and tells whether
// it is news. A share that it does not speak of is not known.
func (h *host) takeVerdicts(list []ShareVerdict) (news bool) {
	for i := range h.shares {
		s, verdict := &h.shares[i], ""
		for _, v := range list {
			if v.Process == s.Process {
				verdict = v.Verdict
			}
		}
		news = news || s.Verdict != verdict
		s.Verdict = verdict
	}
	return news
}

// asGroupHost is the host as groups see it.
func (h *host) asGroupHost() *group.Host {
	g := &group.Host{Name: h.name, AwaySinceMs: math.NaN(), Looks: h.looks, Shares: h.shares}
	if h.lane == 0 {
		g.AwaySinceMs = h.downSinceMs
	}
	return g
}

// regroup finds the members of the groups that a host has to do with anew; nil:
// of all groups.
func (f *Fleet) regroup(about *host, nowMs float64, changes *Changes) {
	var hosts []*group.Host
	var asked *group.Host
	if about != nil {
		asked = about.asGroupHost()
	}
	for _, w := range f.fronts {
		front := f.frontOf(w, nowMs)
		if front == nil || asked != nil && !group.Concerns(front, asked, w.group.members) {
			continue
		}
		if hosts == nil {
			hosts = f.sharingHosts()
		}
		members := group.Join(front, hosts, w.group.members)
		w.group.settled = front.Settled
		if group.Equal(members, w.group.members) {
			continue
		}
		w.group.members, w.group.health, w.group.hosts = members, group.HealthOf(members), nil
		for i := range members {
			if h := f.hosts[members[i].Host]; h != nil && h != w.host && !slices.Contains(w.group.hosts, h) {
				w.group.hosts = append(w.group.hosts, h)
			}
		}
		f.assign(w)
		f.publish(w, nowMs, changes)
	}
}

// sharingHosts are the hosts that a group may have to do with.
func (f *Fleet) sharingHosts() []*group.Host {
	hosts := []*group.Host{}
	member := map[*host]bool{}
	for _, w := range f.fronts {
		for _, h := range w.group.hosts {
			member[h] = true
		}
	}
	for _, h := range f.hosts {
		if len(h.shares) > 0 || member[h] {
			hosts = append(hosts, h.asGroupHost())
		}
	}
	slices.SortFunc(hosts, func(a, b *group.Host) int { return strings.Compare(a.Name, b.Name) })
	return hosts
}

// frontOf is a worker's share in its group.
func (f *Fleet) frontOf(w *worker, nowMs float64) *group.Front {
	g := w.group
	if g == nil {
		return nil
	}
	out := &group.Front{Share: *g.front, Host: w.host.name, Names: []string{w.host.name}, Rank: w.facts.Rank, Settled: nowMs-g.sinceMs >= shareGraceMs}
	if u, err := url.Parse(w.facts.URL); err == nil && u.Hostname() != "" {
		out.Names = append(out.Names, u.Hostname())
	}
	if f.intent.GroupOf != nil {
		out.Declared, out.May = f.intent.GroupOf(w.host.name)
	}
	return out
}

// setFront takes whether a worker's engine spans hosts, by its host's shares. A
// new life of the engine starts without members: what an earlier one's were says
// nothing.
func (f *Fleet) setFront(w *worker, nowMs float64) {
	i := slices.IndexFunc(w.host.shares, func(s group.Share) bool { return s.Engine == w.facts.Engine })
	if i < 0 || !w.listed {
		if w.group != nil {
			f.dropFront(w)
			f.assign(w)
		}
		return
	}
	front := w.host.shares[i]
	switch {
	case w.group == nil:
		w.group = &grouped{sinceMs: nowMs, process: w.process, health: group.Health{State: group.OK, AwaySinceMs: math.NaN()}}
		f.fronts = append(f.fronts, w)
	case w.group.process != w.process || w.group.front.Process != front.Process:
		*w.group = grouped{sinceMs: nowMs, process: w.process, health: group.Health{State: group.OK, AwaySinceMs: math.NaN()}}
		f.assign(w)
	}
	w.group.front = &front
}

func (f *Fleet) dropFront(w *worker) {
	if w.group != nil {
		w.group = nil
		f.fronts = slices.DeleteFunc(f.fronts, func(other *worker) bool { return other == w })
	}
}

// settleGroups lets shares that had time to be told and were not count.
func (f *Fleet) settleGroups(nowMs float64, changes *Changes) {
	for _, w := range f.fronts {
		if !w.group.settled && nowMs-w.group.sinceMs >= shareGraceMs {
			f.regroup(nil, nowMs, changes)
			return
		}
	}
}

// publishFrontsOf publishes the workers elsewhere that a host carries a share of.
func (f *Fleet) publishFrontsOf(h *host, nowMs float64, changes *Changes) {
	for _, w := range f.fronts {
		if slices.Contains(w.group.hosts, h) {
			f.publish(w, nowMs, changes)
		}
	}
}

// groupCordon is what the hosts of a worker's group were told or want for
// themselves.
func (w *worker) groupCordon(ownVersion uint64) (bool, string) {
	if w.group == nil {
		return false, ""
	}
	for _, h := range w.group.hosts {
		if h.wish.ID != "" && !(h.policyVersion <= ownVersion && w.assigned.Cordoned) {
			return true, "by " + h.name + " itself (drain --local), which carries a share: " + h.wish.Reason
		}
		if h.policyVersion <= ownVersion {
			continue
		}
		for _, selector := range h.cordons {
			for i := range w.group.members {
				if m := &w.group.members[i]; m.Host == h.name && m.SelectedBy(selector) {
					return true, "as " + h.name + ", which carries a share, was told by a newer policy: " + selector
				}
			}
		}
	}
	return false, ""
}

// groupDoubt is what was observed against the members of a worker's group.
func (w *worker) groupDoubt() (placement.Reason, string) {
	if w.group == nil {
		return placement.ReasonNone, ""
	}
	switch h := &w.group.health; h.State {
	case group.Fault:
		return placement.ReasonGPUFault, h.Why
	case group.Missing:
		return placement.ReasonGroupIncomplete, h.Why
	default:
		return placement.ReasonNone, ""
	}
}

// awaySinceMs is since when the worker's host, or one that carries a share of its
// engine, is away; NaN: none is.
func (w *worker) awaySinceMs() float64 {
	since := math.NaN()
	if w.group != nil {
		since = w.group.health.AwaySinceMs
	}
	if w.host.lane == 0 && !(since < w.host.downSinceMs) {
		since = w.host.downSinceMs
	}
	return since
}

// GroupWorkers are the workers whose engines have a share on a GPU, by name.
func (f *Fleet) GroupWorkers(uuids ...string) (names []string) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, w := range f.fronts {
		for i := range w.group.members {
			m := &w.group.members[i]
			if slices.ContainsFunc(m.GPUUUIDs, func(u string) bool { return slices.Contains(uuids, u) }) {
				names = append(names, w.name)
				break
			}
		}
	}
	slices.Sort(names)
	return names
}

// memberList are the other shares of the worker's engine; nil: it is of one host.
func (w *worker) memberList() []group.Member {
	if w.group == nil {
		return nil
	}
	return slices.Clone(w.group.members)
}
