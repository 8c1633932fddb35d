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
	maxProcesses = 1 << 16
	maxFiles     = 1 << 16 // of one process
	maxTextBytes = 1 << 20 // a command line, or an environment
)

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

// Local is the address of a URL that names this host: the loopback address or one
// of its own. "localhost" is an address without a host.
func Local(engineURL string) (at netip.AddrPort, ok bool) {
	u, err := url.Parse(engineURL)
	if err != nil {
		return at, false
	}
	text := u.Port()
	if text == "" {
		text = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return at, false
	}
	if u.Hostname() == "localhost" {
		return netip.AddrPortFrom(netip.Addr{}, uint16(port)), true
	}
	a, err := netip.ParseAddr(u.Hostname())
	if err != nil {
		return at, false
	}
	at = netip.AddrPortFrom(a.Unmap(), uint16(port))
	if a.IsLoopback() {
		return at, true
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return at, false
	}
	for _, o := range own {
		if p, err := netip.ParsePrefix(o.String()); err == nil && p.Addr() == at.Addr() {
			return at, true
		}
	}
	return at, false
}

// Listening finds the process to which a connection to an address of this host
// comes, in a proc file system; empty: /proc. When several processes hold the
// socket, as workers of one server do, it is the one with the lowest id that is
// found. ok is false if nobody listens, or the rights to see who are missing.
func Listening(proc string, at netip.AddrPort) (p Process, ok bool) {
	l := NewListeners(proc)
	pids, err := l.PIDs(at)
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
