package engines

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// stat is what the kernel tells of a process.
type stat struct {
	name          string
	state         byte
	parent, group int
	cpu           time.Duration
}

// userHz is the unit of times in /proc, which is fixed for user space.
const userHz = 100

// readStat reads /proc/PID/stat.
func readStat(pid int) (s stat, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return s, err
	}
	// The name may hold anything, the last parenthesis ends it.
	text := string(b)
	from, to := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if from < 0 || to < from {
		return s, fmt.Errorf("/proc/%d/stat cannot be read", pid)
	}
	s.name = text[from+1 : to]
	f := strings.Fields(text[to+1:])
	if len(f) < 13 {
		return s, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(f))
	}
	s.state = f[0][0]
	var ticks int
	for _, n := range []struct {
		at  int
		add *int
	}{{1, &s.parent}, {2, &s.group}, {11, &ticks}, {12, &ticks}} {
		v, err := strconv.Atoi(f[n.at])
		if err != nil {
			return s, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		*n.add += v
	}
	s.cpu = time.Duration(ticks) * time.Second / userHz
	return s, nil
}

// alive lists the processes of a group that have not ended.
func alive(group int) (pids []int) {
	paths, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil
	}
	for _, p := range paths {
		pid, err := strconv.Atoi(filepath.Base(p))
		if err != nil {
			continue
		}
		if s, err := readStat(pid); err == nil && s.group == group && s.state != 'Z' && s.state != 'X' {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Children are the processes that the process started and that live, by id.
func (p *Process) Children() (pids []int) {
	for _, pid := range alive(p.PID()) {
		if pid != p.PID() {
			pids = append(pids, pid)
		}
	}
	return pids
}

// KillAlone ends the process at once, but not its children, and waits for that.
// Kill ends those later.
func (p *Process) KillAlone() error {
	err := syscall.Kill(p.PID(), syscall.SIGKILL)
	<-p.done
	return err
}

// KillChildren ends the children at once, and not the process.
func (p *Process) KillChildren() error {
	var errs []error
	for _, pid := range p.Children() {
		if err := syscall.Kill(pid, syscall.SIGKILL); !errors.Is(err, syscall.ESRCH) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Ended waits until no process of the group of a process lives.
func Ended(pid int, within time.Duration) error {
	for deadline := time.Now().Add(within); ; time.Sleep(20 * time.Millisecond) {
		left := alive(pid)
		if len(left) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v have not ended", left)
		}
	}
}

// Usage is what a process has used.
type Usage struct {
	// CPU is its processor time.
	CPU time.Duration
	// RSSBytes is its resident memory, MostRSSBytes the most of it ever.
	RSSBytes, MostRSSBytes int64
}

// Used is what the process has used so far, without its children.
func (p *Process) Used() (u Usage, err error) {
	s, err := readStat(p.PID())
	if err != nil {
		return u, err
	}
	u.CPU = s.cpu
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		return u, err
	}
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(line, ":")
		var to *int64
		switch key {
		case "VmRSS":
			to = &u.RSSBytes
		case "VmHWM":
			to = &u.MostRSSBytes
		default:
			continue
		}
		kb, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
		if err != nil {
			return u, fmt.Errorf("/proc/%d/status: %w", p.PID(), err)
		}
		*to = kb << 10
	}
	return u, nil
}
