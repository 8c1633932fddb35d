package discover

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// Group is the share that a process has in an engine which spans hosts.
type Group struct {
	// Meeting is where its processes meet, host:port, the same for all of them.
	Meeting string
	// Node is this host's number, Nodes how many there are; Nodes 0: they are not
	// counted.
	Node, Nodes int
	// Of Ranks data-parallel ranks those from FirstRank on are here, LocalRanks of
	// them; Ranks 0: they are not spread over hosts.
	FirstRank, LocalRanks, Ranks int
	// Uncounted says that the engine counts neither: its processes on other hosts
	// say which cluster they belong to, which is Meeting, and nothing more.
	Uncounted bool
	// Front says that requests go to this host.
	Front bool
}

// Part names the share: "node 1" or "ranks 2-3".
func (g *Group) Part() string {
	if g.Uncounted {
		return "ray workers"
	}
	if g.Nodes > 0 {
		return fmt.Sprintf("node %d", g.Node)
	}
	if g.LocalRanks == 0 {
		return "no ranks"
	}
	return fmt.Sprintf("ranks %d-%d", g.FirstRank, g.FirstRank+g.LocalRanks-1)
}

// groupOf is the share that a command line tells of; nil: the engine is of one
// host, or its kind does not spread over hosts by command lines.
func groupOf(kind string, f Flags) *Group {
	switch kind {
	case "vllm":
		return vllmGroup(f)
	case "sglang":
		nodes, _ := f.Int("--nnodes")
		node, _ := f.Int("--node-rank")
		if nodes <= 1 || node < 0 || node >= nodes {
			return nil
		}
		return &Group{Meeting: meeting(f, "--dist-init-addr", "--nccl-init-addr"), Node: node, Nodes: nodes, Front: node == 0}
	}
	return nil
}

// Ports at which vLLM's processes meet unless told otherwise: those of tensor and
// pipeline parallel nodes, and those of data-parallel ranks.
const (
	vllmMasterPort = 29501
	vllmRanksPort  = 29550
)

func vllmGroup(f Flags) *Group {
	headless := f.Has("--headless")
	if nodes, _ := f.Int("--nnodes", "-n"); nodes > 1 {
		node, _ := f.Int("--node-rank", "-r")
		if node < 0 || node >= nodes {
			return nil
		}
		return &Group{Meeting: meetingAt(f, "--master-addr", "--master-port", vllmMasterPort), Node: node, Nodes: nodes, Front: node == 0 && !headless}
	}
	ranks, _ := f.Int("--data-parallel-size", "-dp")
	local, told := f.Int("--data-parallel-size-local", "-dpl")
	first, _ := f.Int("--data-parallel-start-rank", "-dpr")
	if !told && headless {
		local = ranks - first
	}
	// Where each host serves its own ranks, none depends on another.
	ownFront := f.Has("--data-parallel-rank", "-dpn", "--data-parallel-external-lb", "-dpe", "--data-parallel-hybrid-lb", "-dph")
	if ranks <= 1 || ownFront || !headless && (!told || local >= ranks) || first < 0 || local < 0 || first > ranks || local > ranks-first {
		return nil
	}
	return &Group{
		Meeting:   meetingAt(f, "--data-parallel-address", "--data-parallel-rpc-port", vllmRanksPort, "-dpa", "-dpp"),
		FirstRank: first, LocalRanks: local, Ranks: ranks, Front: !headless,
	}
}

// meeting is the host:port of the first of some flags that is there.
func meeting(f Flags, flags ...string) string {
	v, _ := f.Get(flags...)
	return strings.TrimPrefix(v, "tcp://")
}

// meetingAt puts a meeting point together from a flag for the host and one for
// the port; more are further names of the two.
func meetingAt(f Flags, host, port string, usual int, more ...string) string {
	hosts, ports := []string{host}, []string{port}
	if len(more) == 2 {
		hosts, ports = append(hosts, more[0]), append(ports, more[1])
	}
	h, _ := f.Get(hosts...)
	if h == "" {
		h = "127.0.0.1"
	}
	p, ok := f.Int(ports...)
	if !ok {
		p = usual
	}
	return net.JoinHostPort(strings.Trim(h, "[]"), strconv.Itoa(p))
}
