package process

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Bounds of one look: a host with more is not looked through to the end.
const (
	maxProcesses  = 1 << 16
	maxFiles      = 1 << 16 // of one process
	maxTextBytes  = 1 << 20 // a command line, or an environment
	maxTableLines = 1 << 18
	// maxOthers is after how many sockets in a row that do not listen the rest is
	// left out: the kernel lists those that listen first.
	maxOthers = 256
)

// tcpListens is the state of a listening socket in the kernel's table.
const tcpListens = "0A"

// Process is how a process was started.
type Process struct {
	// Args is its command line, the program first.
	Args []string
	// Env is its environment by name; nil: it may not be read.
	Env map[string]string
	// Dir is its directory in the proc file system.
	Dir string
}

// Path is where this process reaches a file that p names: by p's working
// directory and by its own root directory, which in a container is another.
func (p *Process) Path(name string) string {
	if filepath.IsAbs(name) {
		return filepath.Join(p.Dir, "root", name)
	}
	return filepath.Join(p.Dir, "cwd", name)
}

// Local is the port of a URL that names this host, as the loopback address or
// as one of its own.
func Local(engineURL string) (port int, ok bool) {
	u, err := url.Parse(engineURL)
	if err != nil {
		return 0, false
	}
	text := u.Port()
	if text == "" {
		text = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, false
	}
	if u.Hostname() == "localhost" {
		return int(n), true
	}
	a, err := netip.ParseAddr(u.Hostname())
	if err != nil {
		return 0, false
	}
	if a.IsLoopback() {
		return int(n), true
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return 0, false
	}
	for _, o := range own {
		if p, err := netip.ParsePrefix(o.String()); err == nil && p.Addr() == a.Unmap() {
			return int(n), true
		}
	}
	return 0, false
}

// Listening finds the process that listens on a TCP port, in a proc file
// system; empty: /proc. When several processes hold the socket, as workers of
// one server do, it is the one with the lowest id that is found. ok is false if
// nobody listens, or the rights to see who are missing.
func Listening(proc string, port int) (p Process, ok bool) {
	l := NewListeners(proc)
	pids, err := l.PIDs(port)
	if err != nil || len(pids) == 0 {
		return Process{}, false
	}
	p.Dir = filepath.Join(l.proc, strconv.Itoa(pids[0]))
	args, err := text(filepath.Join(p.Dir, "cmdline"))
	if err != nil || args == "" {
		return Process{}, false
	}
	p.Args = strings.Split(strings.TrimSuffix(args, "\x00"), "\x00")
	if env, err := text(filepath.Join(p.Dir, "environ")); err == nil {
		p.Env = map[string]string{}
		for _, line := range strings.Split(env, "\x00") {
			if name, value, ok := strings.Cut(line, "="); ok {
				p.Env[name] = value
			}
		}
	}
	return p, true
}

// names are what a directory holds, so many at most.
func names(dir string, most int) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	out, err := d.Readdirnames(most)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return out, err
}

func text(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxTextBytes))
	return string(b), err
}
