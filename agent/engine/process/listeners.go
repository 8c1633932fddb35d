package process

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Listeners finds the processes that listen on TCP ports of this host. It looks
// through the open files of all processes only when a port's sockets change.
// It is for one goroutine.
type Listeners struct {
	proc  string
	known map[int]portSockets
}

// portSockets are the sockets that listen on a port and who holds them.
type portSockets struct {
	inodes []string
	pids   []int
}

// NewListeners reads a proc file system; empty: /proc.
func NewListeners(proc string) *Listeners {
	if proc == "" {
		proc = "/proc"
	}
	return &Listeners{proc: proc, known: map[int]portSockets{}}
}

// errHidden says that a socket's process could not be seen.
var errHidden = errors.New("who listens there is not visible to this user")

// PIDs are the processes that listen on port, by pid; none without an error:
// nobody listens there.
func (l *Listeners) PIDs(port int) ([]int, error) {
	inodes, err := l.inodes(port)
	if err != nil {
		return nil, err
	}
	if len(inodes) == 0 {
		delete(l.known, port)
		return nil, nil
	}
	if old, ok := l.known[port]; ok && slices.Equal(old.inodes, inodes) && l.alive(old.pids) {
		return old.pids, nil
	}
	pids, err := l.holders(inodes)
	if err != nil {
		return nil, err
	}
	if len(pids) == 0 {
		return nil, fmt.Errorf("port %d: %w", port, errHidden)
	}
	l.known[port] = portSockets{inodes, pids}
	return pids, nil
}

func (l *Listeners) alive(pids []int) bool {
	return !slices.ContainsFunc(pids, func(pid int) bool {
		_, err := os.Stat(filepath.Join(l.proc, strconv.Itoa(pid)))
		return err != nil
	})
}

// inodes are the sockets that listen on port, in order.
func (l *Listeners) inodes(port int) ([]string, error) {
	var inodes []string
	read := 0
	for _, table := range []string{"tcp", "tcp6"} {
		f, err := os.Open(filepath.Join(l.proc, "net", table))
		if err != nil {
			continue // IPv6 may be off
		}
		read++
		inodes = appendListening(inodes, f, port)
		_ = f.Close()
	}
	if read == 0 {
		return nil, fmt.Errorf("no table of TCP sockets below %s", l.proc)
	}
	slices.Sort(inodes)
	return inodes, nil
}

// appendListening adds the sockets of a table that listen on a port.
func appendListening(inodes []string, table io.Reader, port int) []string {
	suffix := fmt.Sprintf(":%04X", port)
	lines := bufio.NewScanner(table)
	for others, n := 0, 0; others < maxOthers && n < maxTableLines && lines.Scan(); n++ {
		// Number, local and remote address, state, and as tenth the inode.
		f := strings.Fields(lines.Text())
		if len(f) < 10 || f[3] != tcpListens {
			others++
			continue
		}
		others = 0
		if strings.HasSuffix(f[1], suffix) && f[9] != "0" {
			inodes = append(inodes, f[9])
		}
	}
	return inodes
}

// holders are the processes that have one of the sockets open.
func (l *Listeners) holders(inodes []string) ([]int, error) {
	entries, err := names(l.proc, maxProcesses)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, name := range entries {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		dir := filepath.Join(l.proc, name, "fd")
		files, err := names(dir, maxFiles)
		if err != nil {
			continue // it ended, or belongs to another user
		}
		for _, f := range files {
			target, err := os.Readlink(filepath.Join(dir, f))
			if err != nil {
				continue
			}
			inode, ok := strings.CutPrefix(target, "socket:[")
			if ok && slices.Contains(inodes, strings.TrimSuffix(inode, "]")) {
				pids = append(pids, pid)
				break
			}
		}
	}
	slices.Sort(pids)
	return pids, nil
}
