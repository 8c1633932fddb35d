package discover

import (
	"errors"
	"io"
	"io/fs"
	"regexp"
	"strconv"
	"strings"
)

const (
	maxArgsBytes   = 64 << 10 // of a command line
	maxStatusBytes = 16 << 10 // of a status file or control group list
	maxFiles       = 1 << 14  // open files of an engine that are looked at
)

// process is what the process table tells of one process.
type process struct {
	pid, parent int
	args        []string
	// uid runs it, effective is what its sockets belong to.
	uid, effective uint32
	// started is its start in clock ticks since boot; 0: unknown.
	started uint64
	// container says that a runtime of the system put it into a container.
	container bool
}

// readSome reads at most limit bytes of a file.
func readSome(proc fs.FS, name string, limit int64) (string, error) {
	f, err := proc.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit))
	return string(b), err
}

// readArgs is the command line of a process. One that has set a title has it in
// one piece, filled up with zeros.
func readArgs(proc fs.FS, pid int) ([]string, error) {
	text, err := readSome(proc, strconv.Itoa(pid)+"/cmdline", maxArgsBytes)
	if err != nil {
		return nil, err
	}
	text = strings.TrimRight(text, "\x00")
	if text == "" {
		return nil, nil // a kernel thread, or a process that ends
	}
	return strings.Split(text, "\x00"), nil
}

// readProcess reads what is needed of an engine's process besides its command
// line.
func readProcess(proc fs.FS, pid int, args []string) (process, error) {
	p := process{pid: pid, args: args}
	dir := strconv.Itoa(pid)
	status, err := readSome(proc, dir+"/status", maxStatusBytes)
	if err != nil {
		return p, err
	}
	known := 0
	for line := range strings.Lines(status) {
		key, value, _ := strings.Cut(line, ":")
		fields := strings.Fields(value)
		switch {
		case key == "PPid" && len(fields) == 1:
			if p.parent, err = strconv.Atoi(fields[0]); err == nil {
				known++
			}
		case key == "Uid" && len(fields) >= 2:
			uid, err := strconv.ParseUint(fields[0], 10, 32)
			effective, err2 := strconv.ParseUint(fields[1], 10, 32)
			if err == nil && err2 == nil {
				p.uid, p.effective = uint32(uid), uint32(effective)
				known++
			}
		}
	}
	if known != 2 {
		return p, errors.New("its status names no parent or no owner")
	}
	if stat, err := readSome(proc, dir+"/stat", maxStatusBytes); err == nil {
		p.started = startOf(stat)
	}
	if groups, err := readSome(proc, dir+"/cgroup", maxStatusBytes); err == nil {
		p.container = inContainer(groups)
	}
	return p, nil
}

// startOf is the start time in a stat line: the 20th field after the program's
// name, which stands in parentheses and may hold any character.
func startOf(stat string) uint64 {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return 0
	}
	started, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return 0
	}
	return started
}

// runtimes is what container runtimes of the system name their groups.
var runtimes = regexp.MustCompile(`/(docker|libpod|lxc|kubepods|kubepods\.slice|crio|machine\.slice)/|` +
	`/(docker|libpod|crio|cri-containerd|nerdctl)-[^/]*\.scope|/lxc\.payload\.|:(cri-containerd|docker|crio):`)

// inContainer tells from a process's control groups whether a container runtime
// of the system started it. Below user.slice users name groups as they like, so
// what stands there is theirs, also if it is called a container.
func inContainer(groups string) bool {
	for line := range strings.Lines(groups) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 || strings.HasPrefix(parts[2], "/user.slice/") {
			continue
		}
		if runtimes.MatchString(parts[2]) {
			return true
		}
	}
	return false
}

// readInodes are the sockets that a process holds open. ErrPermission: it is
// another user's, and this one may not look.
func readInodes(proc fs.FS, pid int) (map[uint64]bool, error) {
	dir := strconv.Itoa(pid) + "/fd"
	entries, err := fs.ReadDir(proc, dir)
	if err != nil {
		return nil, err
	}
	out := map[uint64]bool{}
	for _, e := range entries[:min(len(entries), maxFiles)] {
		link, err := fs.ReadLink(proc, dir+"/"+e.Name())
		if errors.Is(err, fs.ErrPermission) {
			return nil, err
		}
		if err != nil {
			continue // closed meanwhile
		}
		if number, ok := strings.CutPrefix(link, "socket:["); ok {
			if inode, err := strconv.ParseUint(strings.TrimSuffix(number, "]"), 10, 64); err == nil {
				out[inode] = true
			}
		}
	}
	return out, nil
}
