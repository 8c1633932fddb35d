package process

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"waypost/agent/procnet"
)

// Listeners finds the processes that listen at TCP addresses of this host. It
// looks through the open files of all processes only when an address's sockets
// change. It is for one goroutine.
type Listeners struct {
	proc  string
	known map[netip.AddrPort]holders
}

// holders are the sockets that listen at an address and who holds them.
type holders struct {
	inodes []uint64
	pids   []int
}

// NewListeners reads a proc file system; empty: /proc.
func NewListeners(proc string) *Listeners {
	if proc == "" {
		proc = "/proc"
	}
	return &Listeners{proc: proc, known: map[netip.AddrPort]holders{}}
}

// errHidden says that a socket's process could not be seen.
var errHidden = errors.New("who listens there is not visible to this user")

// PIDs are the processes to which a connection to an address comes, by pid: of
// several that listen at its port those that listen nearest to it. An address
// without a host is the loopback one of either family. None without an error:
// nobody listens there.
func (l *Listeners) PIDs(at netip.AddrPort) ([]int, error) {
	sockets, err := procnet.Read(os.DirFS(l.proc), "net")
	if err != nil {
		return nil, fmt.Errorf("the listening sockets cannot be read: %w", err)
	}
	inodes := sockets.Serving(at)
	if len(inodes) == 0 {
		delete(l.known, at)
		return nil, nil
	}
	if old, ok := l.known[at]; ok && slices.Equal(old.inodes, inodes) && l.alive(old.pids) {
		return old.pids, nil
	}
	pids, err := l.holders(inodes)
	if err != nil {
		return nil, err
	}
	if len(pids) == 0 {
		return nil, fmt.Errorf("port %d: %w", at.Port(), errHidden)
	}
	l.known[at] = holders{inodes, pids}
	return pids, nil
}

func (l *Listeners) alive(pids []int) bool {
	return !slices.ContainsFunc(pids, func(pid int) bool {
		_, err := os.Stat(filepath.Join(l.proc, strconv.Itoa(pid)))
		return err != nil
	})
}

// holders are the processes that have one of the sockets open.
func (l *Listeners) holders(inodes []uint64) ([]int, error) {
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
			number, ok := strings.CutPrefix(target, "socket:[")
			inode, err := strconv.ParseUint(strings.TrimSuffix(number, "]"), 10, 64)
			if ok && err == nil && slices.Contains(inodes, inode) {
				pids = append(pids, pid)
				break
			}
		}
	}
	slices.Sort(pids)
	return pids, nil
}
