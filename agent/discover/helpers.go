package discover

import (
	"fmt"
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
	for i := range out.Engines {
		e := &out.Engines[i]
		if e.Kind != "trtllm" || e.Orphan {
			continue
		}
		if e.job = s.jobOf(e.PID); e.job.nodes > 1 && e.job.node == 0 {
			e.Group = &Group{Meeting: e.job.name, Nodes: e.job.nodes, Front: true}
		}
	}
	for i := range helpers {
		h := &helpers[i]
		var of *Engine
		several := false
		for k := range out.Engines {
			e := &out.Engines[k]
			// Whoever runs a process can call it a helper; an engine's are its user's.
			if e.Kind != h.kind.name || e.Orphan || e.UID != h.uid || !(h.kind.name == "vllm" && isOverRay(e.Flags) || h.job.name != "" && e.job.name == h.job.name) {
				continue
			}
			several = of != nil
			of = e
		}
		switch {
		case several: // nobody tells which of them it works for
		case of != nil:
			of.Helpers = append(of.Helpers, h.pid)
		case h.job.nodes <= 1:
		case len(out.Engines) == MaxEngines:
			out.Over++
		default:
			out.Engines = append(out.Engines, Engine{
				Kind: h.kind.name, Title: h.kind.title, PID: h.pid, Started: h.started, UID: h.uid, Container: h.container,
				Trusted: h.container || systemUser(h.uid), Place: Nowhere, job: h.job,
				Group: &Group{Meeting: h.job.name, Node: h.job.node, Nodes: h.job.nodes},
			})
		}
	}
}
