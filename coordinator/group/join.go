package group

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// State says how a member is.
type State string

// The states, from the best.
const (
	// OK: its host answers and finds no fault with its GPUs.
	OK State = "ok"
	// Unknown: nothing is known against it, and not enough for it: no host has told
	// of this share yet, or its host knows nothing of its GPUs.
	Unknown State = "unknown"
	// Away: the lane of its host is down.
	Away State = "away"
	// Missing: its host told of this share and tells of it no more, or nobody does
	// although operators say which hosts form the group.
	Missing State = "missing"
	// Fault: a fault of one of its GPUs takes it out.
	Fault State = "gpu_fault"
)

var order = map[State]int{OK: 0, Unknown: 1, Away: 2, Missing: 3, Fault: 4}

// Host is what is known of a host that carries shares, or did.
type Host struct {
	Name string
	// AwaySinceMs is since when its lane is down; NaN: it is up.
	AwaySinceMs float64
	// Looks says that its agent looks for shares: one that is not told is then
	// not there.
	Looks bool
	// Shares are those it told last.
	Shares []Share
}

// Front is the share of the host that serves an engine.
type Front struct {
	Share
	// Host is its host, Names what the host is called: its name and addresses.
	Host  string
	Names []string
	// Rank is the data-parallel rank that is asked about.
	Rank int
	// Declared says that operators list which hosts form the group, so that every
	// share must be told; Settled that there was time to tell it.
	Declared, Settled bool
	// May says whether operators let a host carry a share; nil: any.
	May func(host string) bool
}

// Member is a share of a group besides the front's own.
type Member struct {
	// Part names the share: "node 1" or "ranks 4-7".
	Part string
	// Host carries it; empty: no host tells of it.
	Host string
	// Process marks the life of the share.
	Process uint64
	State   State
	// Why says more; empty: nothing.
	Why string
	// AwaySinceMs is since when its host's lane is down; NaN: it is up, or there is
	// no host.
	AwaySinceMs float64
	GPUUUIDs    []string
}

// String is "node 1 on gpu-02".
func (m *Member) String() string {
	if m.Host == "" {
		return m.Part
	}
	return m.Part + " on " + m.Host
}

// Concerns says whether what a host tells matters to a front whose members were
// past.
func Concerns(f *Front, h *Host, past []Member) bool {
	// Another engine that meets there, or does no more, changes whose helpers are whose.
	if f.Uncounted || h.Name == f.Host || slices.ContainsFunc(past, func(m Member) bool { return m.Host == h.Name }) {
		return true
	}
	return slices.ContainsFunc(h.Shares, func(s Share) bool { return s.sameEngine(&f.Share) && meets(&f.Share, f.Names, &s, false) })
}

// found is a share that could be a member.
type found struct {
	host  *Host
	share *Share
}

// Join finds the members of a front's group besides itself, in the order of
// their parts. past are those that Join found before, while the front's process
// lived: a share that was told and is told no more is missing, and one of two
// hosts that tell of the same share keeps it.
func Join(f *Front, hosts []*Host, past []Member) []Member {
	var shares []found
	for _, h := range hosts {
		for i := range h.Shares {
			s := &h.Shares[i]
			own := h.Name == f.Host && s.Process == f.Process
			if !own && s.Engine == "" && s.sameEngine(&f.Share) && meets(&f.Share, f.Names, s, h.Name == f.Host) {
				shares = append(shares, found{h, s})
			}
		}
	}
	slices.SortStableFunc(shares, func(a, b found) int {
		return cmp.Or(cmp.Compare(a.host.Name, b.host.Name), cmp.Compare(a.share.Process, b.share.Process))
	})
	switch {
	case f.Uncounted:
		return joinHelpers(f, hosts, shares, past)
	case f.byNode():
		return joinNodes(f, hosts, shares, past)
	}
	return joinRank(f, hosts, shares, past)
}

// joinNodes finds all nodes: each works on every request.
func joinNodes(f *Front, hosts []*Host, shares []found, past []Member) []Member {
	out := make([]Member, 0, f.Nodes-1)
	for node := range f.Nodes {
		if node != f.Node {
			out = append(out, member(f, fmt.Sprintf("node %d", node), hosts, shares, past, func(s *Share) bool { return s.Node == node }))
		}
	}
	return out
}

// HelpersPart names the shares of an engine that counts neither nodes nor ranks.
const HelpersPart = "ray workers"

// joinHelpers finds the hosts whose processes meet where the front's do, each a
// member. If another engine is served there too, nobody tells which of the two they
// help: that is said, and none is a member.
func joinHelpers(f *Front, hosts []*Host, shares []found, past []Member) (out []Member) {
	shares = slices.DeleteFunc(shares, func(c found) bool { return c.host.Name == f.Host })
	if others := rivals(f, hosts); len(others) > 0 {
		if len(shares) == 0 {
			return nil
		}
		return []Member{{
			Part: HelpersPart, State: Unknown, AwaySinceMs: math.NaN(),
			Why: fmt.Sprintf("%s at %s too, and nobody tells whose the workers on %s are", strings.Join(others, ", "), f.Meeting, strings.Join(hostsOf(shares), ", ")),
		}}
	}
	var refused []string
	for i := range shares {
		c := &shares[i]
		switch {
		case f.May != nil && !f.May(c.host.Name):
			refused = append(refused, c.host.Name)
		case len(out) > 0 && out[len(out)-1].Host == c.host.Name:
			out[len(out)-1].add("another user's are on the host as well")
		default:
			m := Member{Part: HelpersPart, AwaySinceMs: math.NaN()}
			m.take(c)
			out = append(out, m)
		}
	}
	for i := range past {
		if p := &past[i]; p.Host != "" && !slices.Contains(refused, p.Host) && !slices.ContainsFunc(out, func(m Member) bool { return m.Host == p.Host }) {
			m := Member{Part: HelpersPart, AwaySinceMs: math.NaN()}
			m.gone(p, hosts)
			out = append(out, m)
		}
	}
	slices.SortStableFunc(out, func(a, b Member) int { return cmp.Compare(a.Host, b.Host) })
	if len(refused) > 0 || len(out) == 0 && f.Declared && f.Settled {
		m := Member{Part: HelpersPart, State: Unknown, AwaySinceMs: math.NaN()}
		m.untold(f, refused)
		if len(out) > 0 {
			m.State = Unknown // the engine may do without
		}
		out = append(out, m)
	}
	return out
}

// rivals are other engines that are served by processes which meet where the
// front's do.
func rivals(f *Front, hosts []*Host) (names []string) {
	for _, h := range hosts {
		for i := range h.Shares {
			s := &h.Shares[i]
			if s.Engine != "" && !(h.Name == f.Host && s.Process == f.Process) && s.sameEngine(&f.Share) && meets(&f.Share, f.Names, s, h.Name == f.Host) {
				names = append(names, h.Name+"/"+s.Engine)
			}
		}
	}
	return names
}

func hostsOf(shares []found) (names []string) {
	for i := range shares {
		names = append(names, shares[i].host.Name)
	}
	return slices.Compact(names)
}

// joinRank finds the host of the front's rank, if that is another one.
func joinRank(f *Front, hosts []*Host, shares []found, past []Member) []Member {
	if f.Rank >= f.FirstRank && f.Rank < f.FirstRank+f.LocalRanks || f.Rank >= f.Ranks {
		return nil
	}
	part := fmt.Sprintf("rank %d", f.Rank)
	return []Member{member(f, part, hosts, shares, past, func(s *Share) bool {
		return f.Rank >= s.FirstRank && f.Rank < s.FirstRank+s.LocalRanks
	})}
}

// member finds who carries one part.
func member(f *Front, part string, hosts []*Host, shares []found, past []Member, is func(*Share) bool) Member {
	m := Member{Part: part, State: Unknown, AwaySinceMs: math.NaN()}
	was := slices.IndexFunc(past, func(p Member) bool { return p.Part == part && p.Host != "" })
	var refused, others []string
	var best *found
	for i := range shares {
		c := &shares[i]
		switch {
		case !is(c.share):
			continue
		case f.May != nil && c.host.Name != f.Host && !f.May(c.host.Name):
			refused = append(refused, c.host.Name)
			continue
		case best == nil:
		case rank(c, was, past) > rank(best, was, past):
			others = append(others, best.host.Name)
			best = c
			continue
		default:
			others = append(others, c.host.Name)
			continue
		}
		best = c
	}
	switch {
	case best != nil:
		m.take(best)
		if len(others) > 0 {
			slices.Sort(others) // the past does not decide their order
			m.add("told of by " + strings.Join(others, ", ") + " as well")
		}
	case was >= 0:
		m.gone(&past[was], hosts)
	default:
		m.untold(f, refused)
	}
	return m
}

// rank prefers a host whose lane is up, then the one that had the part before,
// then the lower name, which comes first.
func rank(c *found, was int, past []Member) (n int) {
	if math.IsNaN(c.host.AwaySinceMs) {
		n += 2
	}
	if was >= 0 && past[was].Host == c.host.Name {
		n++
	}
	return n
}

func (m *Member) add(why string) {
	if m.Why != "" {
		m.Why += "; "
	}
	m.Why += why
}

// take is the state of a share that is told of.
func (m *Member) take(c *found) {
	s := c.share
	m.Host, m.Process, m.GPUUUIDs, m.AwaySinceMs = c.host.Name, s.Process, s.GPUUUIDs, c.host.AwaySinceMs
	action, reasons, _ := strings.Cut(s.Verdict, ":")
	switch {
	case action == "exclude":
		m.State, m.Why = Fault, strings.TrimSpace(reasons)
	case !math.IsNaN(m.AwaySinceMs):
		m.State, m.Why = Away, "the host's lane is lost"
	case action == "ok":
		m.State = OK
	case action == "price":
		m.State, m.Why = OK, strings.TrimSpace(reasons)
	default:
		m.State, m.Why = Unknown, "the state of its GPUs is not known"
	}
}

// gone is the state of a share that was told of and is no more.
func (m *Member) gone(was *Member, hosts []*Host) {
	m.Host, m.Process, m.GPUUUIDs = was.Host, was.Process, was.GPUUUIDs
	i := slices.IndexFunc(hosts, func(h *Host) bool { return h.Name == was.Host })
	switch {
	case i < 0:
		m.State, m.Why = Missing, "the host is known no more"
	case !math.IsNaN(hosts[i].AwaySinceMs):
		m.State, m.Why, m.AwaySinceMs = Away, "the host's lane is lost", hosts[i].AwaySinceMs
	case !hosts[i].Looks:
		m.State, m.Why = Unknown, "the host's agent does not look for it"
	default:
		m.State, m.Why = Missing, "its process is gone"
	}
}

// untold is the state of a share that nobody has told of.
func (m *Member) untold(f *Front, refused []string) {
	m.Why = "no host tells of it"
	if len(refused) > 0 {
		m.Why = fmt.Sprintf("%s tells of it, and no [[group]] of the fleet file has it together with %s", strings.Join(slices.Compact(refused), ", "), f.Host)
	}
	if f.Declared && f.Settled {
		m.State = Missing
	}
}

// Health is what members mean for the worker that they belong to.
type Health struct {
	// State is the worst of theirs, Why which member it is and why.
	State State
	Why   string
	// AwaySinceMs is since when the first of them is away; NaN: none is.
	AwaySinceMs float64
}

// HealthOf is the health of the worst member; of none it is OK.
func HealthOf(members []Member) Health {
	h := Health{State: OK, AwaySinceMs: math.NaN()}
	for i := range members {
		m := &members[i]
		if order[m.State] > order[h.State] {
			h.State, h.Why = m.State, m.String()
			if m.Why != "" {
				h.Why += ": " + m.Why
			}
		}
		if m.AwaySinceMs < h.AwaySinceMs || math.IsNaN(h.AwaySinceMs) {
			h.AwaySinceMs = m.AwaySinceMs
		}
	}
	return h
}

// Equal says whether two lists of members are the same.
func Equal(a, b []Member) bool {
	return slices.EqualFunc(a, b, func(x, y Member) bool {
		return x.Part == y.Part && x.Host == y.Host && x.Process == y.Process && x.State == y.State && x.Why == y.Why &&
			(x.AwaySinceMs == y.AwaySinceMs || math.IsNaN(x.AwaySinceMs) && math.IsNaN(y.AwaySinceMs)) && slices.Equal(x.GPUUUIDs, y.GPUUUIDs)
	})
}

// SelectedBy says whether an operator's selector names the member: its host or
// one of its GPUs.
func (m *Member) SelectedBy(selector string) bool {
	return m.Host != "" && selector == m.Host || slices.ContainsFunc(m.GPUUUIDs, func(u string) bool { return strings.EqualFold(u, selector) })
}
