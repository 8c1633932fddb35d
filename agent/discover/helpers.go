package discover

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
)

// helper is a process that works for an engine which did not start it: a
// launcher started both, or a cluster's own service did.
type helper struct {
	process
	kind *kind
	job  job
	// raylet is, of Ray's own service on a host, where its cluster's head is; empty:
	// it is none.
	raylet string
}

// job is a launcher's job that a process belongs to; the zero value: none.
type job struct {
	// name is the same for all its processes, on every host.
	name string
	// node is this host's number of nodes; 0 nodes: not known.
	node, nodes int
}

// helperKinds are how helpers are known: the engine's kind, the modules that they
// run, or how their titles begin.
var helperKinds = []struct {
	kind    string
	modules []string
	title   string
}{
	{kind: "trtllm", modules: []string{"tensorrt_llm.llmapi.mgmn_worker_node", "tensorrt_llm.llmapi.mgmn_leader_node"}},
	{kind: "vllm", title: "ray::RayWorkerWrapper"},
}

// helperOf is the kind of engine that a command line works for; nil: none.
func helperOf(args []string) *kind {
	if len(args) == 0 {
		return nil
	}
	_, module, _ := programOf(args)
	for _, h := range helperKinds {
		if module != "" && slices.Contains(h.modules, module) || h.title != "" && strings.HasPrefix(args[0], h.title) {
			return &kinds[slices.IndexFunc(kinds, func(k kind) bool { return k.name == h.kind })]
		}
	}
	return nil
}

// headOf is where the head of a Ray cluster is, host:port, as the command line of its
// service on this host says; empty: it is no such service, or does not say.
func headOf(args []string) string {
	if len(args) == 0 {
		return ""
	}
	program, _, rest := programOf(args)
	if program != "raylet" {
		return ""
	}
	head, _ := Flags(rest).Get("--gcs-address", "--address")
	if host, port, err := net.SplitHostPort(head); err != nil || host == "" || port == "" {
		return ""
	}
	return head
}

// jobOf reads a process's environment for the job that a launcher put it into.
// Open MPI tells ranks and how many of them are on each host, from which the
// hosts follow where ranks fill one host after the other; Slurm tells the hosts.
func (s *Scanner) jobOf(pid int) (j job) {
	text, err := readSome(s.proc, strconv.Itoa(pid)+"/environ", maxEnvironBytes)
	if err != nil {
		return j
	}
	env := map[string]string{}
	for variable := range strings.SplitSeq(text, "\x00") {
		name, value, _ := strings.Cut(variable, "=")
		if strings.HasPrefix(name, "OMPI_COMM_WORLD_") || strings.HasPrefix(name, "SLURM_") || name == "PMIX_NAMESPACE" {
			env[name] = value
		}
	}
	number := func(name string) int {
		n, err := strconv.Atoi(env[name])
		if err != nil || n < 0 {
			return -1
		}
		return n
	}
	rank, local := number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_LOCAL_RANK")
	size, localSize := number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_LOCAL_SIZE")
	switch {
	case size > 0 && env["PMIX_NAMESPACE"] != "":
		j.name = "mpi-" + env["PMIX_NAMESPACE"]
		if localSize > 0 && local >= 0 && size%localSize == 0 && rank >= local && rank < size && (rank-local)%localSize == 0 {
			j.node, j.nodes = (rank-local)/localSize, size/localSize
		}
	case env["SLURM_JOB_ID"] != "" && env["SLURM_STEP_ID"] != "":
		j.name = fmt.Sprintf("slurm-%s.%s", env["SLURM_JOB_ID"], env["SLURM_STEP_ID"])
		if node, nodes := number("SLURM_NODEID"), number("SLURM_STEP_NUM_NODES"); node >= 0 && node < nodes {
			j.node, j.nodes = node, nodes
		}
	}
	return j
}

// isOverRay says whether a command line has the engine's work done by Ray.
func isOverRay(f Flags) bool {
	v, _ := f.Get("--distributed-executor-backend")
	return v == "ray"
}

// join gives helpers to the engines that they work for. Those of a job whose
// engine another host serves are this host's share of it.
func (s *Scanner) join(helpers []helper, out *Result) {
	heads := headsOf(helpers)
	for i := range out.Engines {
		e := &out.Engines[i]
		if e.Kind == "vllm" && !e.Orphan && e.Group == nil && isOverRay(e.Flags) {
			if head := heads.only(e.UID); head != "" {
				e.Group = &Group{Meeting: head, Uncounted: true, Front: true}
			}
		}
		if e.Kind != "trtllm" || e.Orphan {
			continue
		}
		if e.job = s.jobOf(e.PID); e.job.nodes > 1 && e.job.node == 0 {
			e.Group = &Group{Meeting: e.job.name, Nodes: e.job.nodes, Front: true}
		}
	}
	for i := range helpers {
		h := &helpers[i]
		if h.raylet != "" {
			continue
		}
		head := ""
		if h.kind.name == "vllm" {
			head = s.headFor(h, heads)
		}
		var of *Engine
		several := false
		for k := range out.Engines {
			e := &out.Engines[k]
			// Whoever runs a process can call it a helper; an engine's are its user's.
			if e.Kind != h.kind.name || e.Orphan || e.UID != h.uid || !(h.kind.name == "vllm" && servesRay(e, head) || h.job.name != "" && e.job.name == h.job.name) {
				continue
			}
			several = of != nil
			of = e
		}
		switch {
		case several: // nobody tells which of them it works for
		case of != nil:
			of.Helpers = append(of.Helpers, h.pid)
		case h.job.nodes <= 1 && head == "":
		case len(out.Engines) == MaxEngines:
			out.Over++
		default:
			g := &Group{Meeting: head, Uncounted: true}
			if head == "" {
				g = &Group{Meeting: h.job.name, Node: h.job.node, Nodes: h.job.nodes}
			}
			out.Engines = append(out.Engines, Engine{
				Kind: h.kind.name, Title: h.kind.title, PID: h.pid, Started: h.started, UID: h.uid, Container: h.container,
				Trusted: h.container || systemUser(h.uid), Place: Nowhere, job: h.job, Group: g,
			})
		}
	}
}

// servesRay says whether an engine, or this host's share of one, is that of a worker
// of the Ray cluster with a head; empty: its head is not known.
func servesRay(e *Engine, head string) bool {
	if e.Group != nil && e.Group.Uncounted {
		return e.Group.Meeting == head || head == "" && e.Group.Front
	}
	return isOverRay(e.Flags)
}

// heads are Ray's services on this host by process.
type heads map[int]*helper

func headsOf(helpers []helper) heads {
	out := heads{}
	for i := range helpers {
		if h := &helpers[i]; h.raylet != "" {
			out[h.pid] = h
		}
	}
	return out
}

// only is the head of the cluster that a user's services on this host are of; empty:
// there is none, or there are several.
func (hs heads) only(uid uint32) (head string) {
	for _, h := range hs {
		switch {
		case h.uid != uid:
		case head != "" && head != h.raylet:
			return ""
		default:
			head = h.raylet
		}
	}
	return head
}

// headFor is the head of the cluster whose service on this host started a worker, as
// the same user; empty: not known.
func (s *Scanner) headFor(h *helper, hs heads) string {
	for pid, n := h.parent, 0; pid > 1 && n < maxAncestors; n++ {
		if up, is := hs[pid]; is {
			if up.uid == h.uid {
				return up.raylet
			}
			return ""
		}
		parent, ok := s.Parent(pid)
		if !ok {
			return ""
		}
		pid = parent
	}
	return ""
}
