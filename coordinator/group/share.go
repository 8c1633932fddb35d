package group

import (
	"fmt"
	"net/netip"
	"strings"
)

// Bounds of what a host may tell.
const (
	// MaxShares is how many shares a host may tell of, MaxNodes how many nodes or
	// data-parallel ranks an engine may have.
	MaxShares = 64
	MaxNodes  = 1024
	// maxTextBytes bounds each text, maxGPUs the GPUs of a share.
	maxTextBytes = 512
	maxGPUs      = 64
)

// Share is what one host carries of an engine that spans hosts.
type Share struct {
	// Process marks the life of the share's process, not 0. Equality only.
	Process uint64
	// Kind is the engine's kind, Engine its name where this host serves it; empty:
	// another one does.
	Kind, Engine string
	// Meeting is where the engine's processes meet, host:port, as the command line
	// of each says.
	Meeting string
	// Node is the host's number, from 0, of Nodes; Nodes 0: the engine does not
	// count nodes.
	Node, Nodes int
	// Of Ranks data-parallel ranks those from FirstRank on are carried here,
	// LocalRanks of them. Ranks 0: the engine does not spread ranks over hosts.
	FirstRank, LocalRanks, Ranks int
	// Uncounted says that the engine counts neither hosts nor ranks: whoever meets
	// there helps it. Nodes and Ranks are 0 then.
	Uncounted bool
	// GPUUUIDs are the GPUs that its processes use; none: not known.
	GPUUUIDs []string
	// Verdict is what its host says of these GPUs: ok, price or exclude, with
	// reasons after a colon; empty: not known.
	Verdict string
}

// Fault says which field of a share cannot be and why; empty: none.
func (s *Share) Fault() string {
	switch {
	case s.Process == 0:
		return "process: is 0; the agent must send the process mark"
	case s.Kind == "" || len(s.Kind) > maxTextBytes:
		return fmt.Sprintf("kind: %d bytes are not 1 to %d", len(s.Kind), maxTextBytes)
	case len(s.Engine) > maxTextBytes:
		return fmt.Sprintf("engine: %d bytes are more than %d", len(s.Engine), maxTextBytes)
	case s.Meeting == "" || len(s.Meeting) > maxTextBytes:
		return fmt.Sprintf("meeting: %d bytes are not 1 to %d", len(s.Meeting), maxTextBytes)
	case s.Nodes < 0 || s.Nodes > MaxNodes:
		return fmt.Sprintf("nodes: %d is not in 0 to %d", s.Nodes, MaxNodes)
	case s.Node < 0 || s.Nodes > 0 && s.Node >= s.Nodes || s.Node >= MaxNodes:
		return fmt.Sprintf("node: %d of %d", s.Node, s.Nodes)
	case s.Ranks < 0 || s.Ranks > MaxNodes:
		return fmt.Sprintf("ranks: %d is not in 0 to %d", s.Ranks, MaxNodes)
	case s.FirstRank < 0 || s.LocalRanks < 0 || s.FirstRank > s.Ranks || s.LocalRanks > s.Ranks-s.FirstRank:
		return fmt.Sprintf("localRanks: %d from %d on of %d", s.LocalRanks, s.FirstRank, s.Ranks)
	case s.Uncounted && (s.Nodes > 0 || s.Ranks > 0):
		return fmt.Sprintf("uncounted: %d nodes and %d ranks are told; leave them out", s.Nodes, s.Ranks)
	case !s.Uncounted && s.Nodes == 0 && s.Ranks == 0:
		return "nodes: neither nodes nor ranks are told"
	case len(s.GPUUUIDs) > maxGPUs:
		return fmt.Sprintf("gpuUuids: %d entries are more than %d", len(s.GPUUUIDs), maxGPUs)
	case len(s.Verdict) > maxTextBytes:
		return fmt.Sprintf("verdict: %d bytes are more than %d", len(s.Verdict), maxTextBytes)
	}
	return ""
}

// byNode says whether the engine counts nodes: then all of them work on every
// request.
func (s *Share) byNode() bool { return s.Nodes > 0 }

// sameEngine says whether a front's share and another's are of engines that
// could be one.
func (s *Share) sameEngine(o *Share) bool {
	return s.Kind == o.Kind && s.Nodes == o.Nodes && s.Ranks == o.Ranks && s.Uncounted == o.Uncounted
}

// splitMeeting cuts host:port; an IPv6 address may stand in brackets.
func splitMeeting(text string) (host, port string) {
	i := strings.LastIndexByte(text, ':')
	if i < 0 || strings.Contains(text[i:], "]") {
		return strings.ToLower(strings.Trim(text, "[]")), ""
	}
	return strings.ToLower(strings.Trim(text[:i], "[]")), text[i+1:]
}

// local says whether a host part means the host that says it.
func local(host string) bool {
	if host == "" || host == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && (a.IsLoopback() || a.IsUnspecified())
}

// meets says whether the processes behind a share meet at a front's meeting
// point: the texts are equal, or the share names the front's host in other words.
// Names are those of the front's host. A share that names its own host meets
// nobody elsewhere.
func meets(front *Share, names []string, s *Share, sameHost bool) bool {
	at, port := splitMeeting(front.Meeting)
	host, itsPort := splitMeeting(s.Meeting)
	switch {
	case port != itsPort:
		return false
	case local(host):
		return sameHost && local(at)
	case host == at:
		return true
	}
	for _, n := range names {
		if strings.EqualFold(strings.Trim(n, "[]"), host) && (local(at) || isOneOf(names, at)) {
			return true
		}
	}
	return false
}

func isOneOf(names []string, host string) bool {
	for _, n := range names {
		if strings.EqualFold(strings.Trim(n, "[]"), host) {
			return true
		}
	}
	return false
}
