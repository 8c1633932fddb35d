package host

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"waypost/nvml"
)

// maxDepth bounds the walk from a process to its ancestors.
const maxDepth = 64

// Parents tells the parent of a process; ok is false when there is no such
// process or its parent cannot be read.
type Parents func(pid int) (parent int, ok bool)

// ProcParents reads parents from a proc file system; empty: /proc.
func ProcParents(proc string) Parents {
	if proc == "" {
		proc = "/proc"
	}
	return func(pid int) (int, bool) {
		text, err := file(proc, strconv.Itoa(pid), "stat")
		if err != nil {
			return 0, false
		}
		parent, err := parentOf(text)
		return parent, err == nil
	}
}

// parentOf finds the parent in a process's stat line: the second field after
// the program's name, which stands in parentheses and may hold any character.
func parentOf(stat string) (int, error) {
	end := strings.LastIndexByte(stat, ')')
	if end < 0 {
		return 0, fmt.Errorf("no program name in %q", stat[:min(len(stat), 64)])
	}
	fields := strings.Fields(stat[end+1:])
	if len(fields) < 2 {
		return 0, fmt.Errorf("no parent in %q", stat[:min(len(stat), 64)])
	}
	parent, err := strconv.ParseUint(fields[1], 10, 31)
	if err != nil {
		return 0, fmt.Errorf("parent is %q", fields[1])
	}
	return int(parent), nil
}

// EngineGPUs is what the GPUs' process lists tell about engines.
type EngineGPUs struct {
	// UUIDs are, by engine process, the GPUs that it or a process it started
	// holds memory on, in order of index; instances of a split GPU by their own
	// UUID.
	UUIDs map[int][]string
	// MemoryBytes is, by engine process, what its processes hold over all GPUs; an
	// engine is missing where that is not known of each of them.
	MemoryBytes map[int]uint64
	// Complete says that all process lists were known: an engine that is not
	// in UUIDs is then known to hold no GPU.
	Complete bool
	// Owner is the engine process of each process on a GPU that has one.
	Owner map[uint32]int
	// Foreign are, by GPU, the processes that belong to no engine, by pid.
	Foreign map[string][]nvml.Process
}

// MapGPUs finds the engine of every process on a GPU: its nearest ancestor
// among engines, itself included. It asks only for the ancestors of processes
// on GPUs, a handful per engine. Process ids must be of the host's namespace,
// as the driver's are.
func MapGPUs(engines []int, gpus []nvml.Device, parents Parents) EngineGPUs {
	m := EngineGPUs{
		UUIDs: map[int][]string{}, MemoryBytes: map[int]uint64{}, Complete: true, Owner: map[uint32]int{}, Foreign: map[string][]nvml.Process{},
	}
	unknown := map[int]bool{}
	for i := range gpus {
		g := &gpus[i]
		if g.Processes == nil {
			m.Complete = false
		}
		for _, p := range g.Processes {
			engine, ok := engineOf(int(p.PID), engines, parents)
			if !ok {
				m.Foreign[g.UUID] = append(m.Foreign[g.UUID], p)
				continue
			}
			m.Owner[p.PID] = engine
			for _, uuid := range holds(g, p.PID) {
				if !slices.Contains(m.UUIDs[engine], uuid) {
					m.UUIDs[engine] = append(m.UUIDs[engine], uuid)
				}
			}
			if p.MemoryBytes == nil {
				unknown[engine] = true
			} else {
				m.MemoryBytes[engine] += *p.MemoryBytes
			}
		}
	}
	for engine := range unknown {
		delete(m.MemoryBytes, engine)
	}
	return m
}

// holds are the UUIDs of the instances that a process is on, or of the GPU.
func holds(g *nvml.Device, pid uint32) []string {
	var uuids []string
	for _, part := range g.Instances {
		if part.UUID != "" && slices.ContainsFunc(part.Processes, func(p nvml.Process) bool { return p.PID == pid }) {
			uuids = append(uuids, part.UUID)
		}
	}
	if len(uuids) == 0 {
		return []string{g.UUID}
	}
	return uuids
}

func engineOf(pid int, engines []int, parents Parents) (int, bool) {
	for range maxDepth {
		if slices.Contains(engines, pid) {
			return pid, true
		}
		parent, ok := parents(pid)
		if !ok || parent <= 1 {
			return 0, false
		}
		pid = parent
	}
	return 0, false
}
