package discover

import (
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"waypost/agent/procnet"
)

// maxProgramBytes bounds the name of a program that is told.
const maxProgramBytes = 64

// Server is a process of no known engine that listens.
type Server struct {
	// PID is its process, Program what it runs: a file's or a module's name, none of
	// its arguments.
	PID     int
	Program string
	// Address is where this host reaches it at the lowest of its ports, Others are
	// the rest of them.
	Address netip.AddrPort
	Others  []int
}

// URL is where this host reaches it.
func (s *Server) URL() string { return "http://" + here(s.Address).String() }

// ServerOf finds the server that a process works for: itself, or the nearest of
// those that started it, which listens on a port that a server chooses. false:
// there is none, or it is not reached from this host, or an engine that is known
// has started it.
func (s *Scanner) ServerOf(pid int) (Server, bool) {
	own, err := procnet.Read(s.proc, "net")
	if err != nil {
		return Server{}, false
	}
	for range maxAncestors {
		if pid <= 1 {
			return Server{}, false
		}
		args, err := readArgs(s.proc, pid)
		if err != nil || len(args) == 0 {
			return Server{}, false
		}
		if k, _, _ := classify(args); k != nil || helperOf(args) != nil {
			return Server{}, false
		}
		if at := s.listens(pid, own); len(at) > 0 {
			out := Server{PID: pid, Program: programName(args), Address: at[0]}
			for _, a := range at[1:] {
				if !slices.Contains(out.Others, int(a.Port())) && a.Port() != at[0].Port() {
					out.Others = append(out.Others, int(a.Port()))
				}
			}
			return out, true
		}
		p, err := readProcess(s.proc, pid, nil)
		if err != nil {
			return Server{}, false
		}
		pid = p.parent
	}
	return Server{}, false
}

// listens is where a process is reached from this host, by port: on the host's
// own network, or where its container's ports are published.
func (s *Scanner) listens(pid int, own procnet.Sockets) (at []netip.AddrPort) {
	held, err := readInodes(s.proc, pid)
	if err != nil {
		return nil
	}
	for inode := range held {
		if k, here := own[inode]; here && k.Address.Port() < firstEphemeralPort {
			at = append(at, k.Address)
		}
	}
	if len(at) == 0 && len(s.forwards) > 0 {
		if theirs, err := procnet.Read(s.proc, strconv.Itoa(pid)+"/net"); err == nil {
			published := s.published(s.localAddresses(pid))
			for inode := range held {
				if k, there := theirs[inode]; there {
					if a, ok := published[int(k.Address.Port())]; ok {
						at = append(at, a)
					}
				}
			}
		}
	}
	slices.SortFunc(at, func(a, b netip.AddrPort) int { return int(a.Port()) - int(b.Port()) })
	return at
}

// programName is what a command line runs, without its arguments.
func programName(args []string) string {
	program, module, _ := programOf(args)
	name := program
	switch {
	case module != "":
		name = module
	case name == "":
		name = path.Base(args[0])
	}
	// One that has set a title has it in one piece, arguments and all.
	name, _, _ = strings.Cut(name, " ")
	return strings.ToValidUTF8(name[:min(len(name), maxProgramBytes)], "")
}
