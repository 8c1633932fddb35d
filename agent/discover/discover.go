package discover

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"waypost/agent/procnet"
)

const (
	// maxProcesses bounds the processes that one scan looks at, MaxEngines the
	// engines that it tells of.
	maxProcesses = 1 << 15
	MaxEngines   = 128
	// lookAgain is after how many scans a process that was no engine is looked at
	// again: it may have become one.
	lookAgain = 6
	// maxSystemUID is the largest id of a system user, as distributions have it;
	// the dynamic ones are those that the service manager gives out.
	maxSystemUID                 = 999
	minDynamicUID, maxDynamicUID = 61184, 65519
	// firstEphemeralPort is from where the kernel's own choice of ports begins: a
	// server that nobody gave a port listens below.
	firstEphemeralPort = 32768
)

// Options configures a Scanner.
type Options struct {
	// Proc is the process table; nil: the system's at /proc.
	Proc fs.FS
}

// Scanner finds engines. It remembers which processes are none, so that a scan
// costs little. It is used by one goroutine.
type Scanner struct {
	proc fs.FS
	scan int
	// dull are the processes that were no engine, with the scan in which to look
	// again.
	dull map[int]int
	// forwards are the processes that forward ports to containers.
	forwards map[int]forward
	// settings are those of engines besides their command lines.
	settings map[life]*settings
}

// New makes a scanner; nothing is read before Scan.
func New(o Options) *Scanner {
	if o.Proc == nil {
		o.Proc = os.DirFS("/proc")
	}
	return &Scanner{proc: o.Proc, dull: map[int]int{}, forwards: map[int]forward{}, settings: map[life]*settings{}}
}

// Place says where an engine listens.
type Place string

// The places.
const (
	// Here: on this host's own network.
	Here Place = "here"
	// Nowhere: on no port yet.
	Nowhere Place = "nowhere"
	// Elsewhere: in another network namespace.
	Elsewhere Place = "elsewhere"
)

// Engine is one engine process.
type Engine struct {
	// Kind is the engine's kind, Title how people write it.
	Kind, Title string
	// PID is its process, Started the process's start in clock ticks since boot,
	// 0: unknown. Only both together identify a life.
	PID     int
	Started uint64
	// UID is who runs it.
	UID uint32
	// Container says that a container runtime of the system started it.
	Container bool
	// Trusted says that it may be served unasked: root, a system user or a
	// container runs it.
	Trusted bool
	// Place is where it listens, Address on which address, Port on which port.
	// Nowhere it is the port it will listen on.
	Place   Place
	Address netip.Addr
	Port    int
	// ByPort says that its socket was told by port and owner alone, because this
	// process may not see what it holds open.
	ByPort bool
	// Model is the model as the command line names it; empty: it does not.
	Model string
	// Group is its share in an engine that spans hosts; nil: it is of one host.
	Group *Group
	// Helpers are processes that work for it and that it did not start.
	Helpers []int
	job     job
	// Orphan says that it is a part whose engine is gone.
	Orphan bool
	// Ports are those that an orphan holds.
	Ports []int
	// Flags are the words of the command line, after those that stand for its other
	// settings. They may hold keys: they are looked at and never told.
	Flags Flags
	// addresses are those of its own network namespace, forwarded the addresses on
	// this host of its ports, by the port there.
	addresses map[netip.Addr]bool
	forwarded map[int]netip.AddrPort
	// settings are what it was told besides; nil: nothing.
	settings *settings
}

// Name is the engine's name on its host.
func (e *Engine) Name() string { return fmt.Sprintf("%s-%d", e.Kind, e.Port) }

// URL is where this host reaches it.
func (e *Engine) URL() string {
	address := e.Address
	switch {
	case !address.IsValid(), address == netip.IPv4Unspecified():
		address = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case address.IsUnspecified():
		// It may take one family only.
		address = netip.IPv6Loopback()
	}
	return "http://" + netip.AddrPortFrom(address, uint16(e.Port)).String()
}

// Allow are the lines of agent.toml that have the agent serve it: where its events
// are read is not found out for an engine that stands there.
func (e *Engine) Allow() string {
	live, replay := e.Events()
	return configLines(e.Kind, e.URL(), live, replay)
}

// configLines are the lines of agent.toml that name an engine; empty endpoints are
// left out.
func configLines(kind, url, live, replay string) string {
	lines := fmt.Sprintf("[[engine]]\nkind = %q\nurl = %q", kind, url)
	if live != "" {
		lines += fmt.Sprintf("\nkv_events = %q", live)
	}
	if replay != "" {
		lines += fmt.Sprintf("\nkv_replay = %q", replay)
	}
	return lines
}

// Result is what one scan found.
type Result struct {
	// Engines are in the order of their process ids.
	Engines []Engine
	// Limited says what this process may not see; empty: it sees all.
	Limited string
	// Hidden says that processes of other users are not seen at all.
	Hidden bool
	// Over is how many processes or engines were left out over the bounds.
	Over int
}

// Scan looks at all processes. The error says that the process table cannot be
// read at all.
func (s *Scanner) Scan() (Result, error) {
	s.scan++
	entries, err := fs.ReadDir(s.proc, ".")
	if err != nil {
		return Result{}, fmt.Errorf("discover: the process table cannot be read: %w", err)
	}
	own, err := procnet.Read(s.proc, "net")
	if err != nil {
		return Result{}, fmt.Errorf("discover: the listening sockets cannot be read: %w", err)
	}
	out := Result{Hidden: s.hidden(entries)}
	found := map[int]candidate{}
	var helpers []helper
	dull, forwards := map[int]int{}, map[int]forward{}
	looked := 0
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid <= 0 {
			continue
		}
		if looked++; looked > maxProcesses {
			out.Over++
			continue
		}
		if next, known := s.dull[pid]; known && s.scan < next {
			dull[pid] = next
			if fw, is := s.forwards[pid]; is {
				forwards[pid] = fw
			}
			continue
		}
		c, help, fw, ok := s.look(pid)
		if help != nil {
			helpers = append(helpers, *help)
			continue
		}
		if fw != nil && len(forwards) < maxForwards {
			forwards[pid] = *fw
		}
		if !ok {
			// Spread over the scans, so that each costs alike.
			dull[pid] = s.scan + 1 + (pid+s.scan)%lookAgain
			continue
		}
		found[pid] = c
	}
	s.dull, s.forwards = dull, forwards
	maps.DeleteFunc(s.settings, func(l life, _ *settings) bool { c, known := found[l.pid]; return !known || c.started != l.started })
	for _, pid := range slices.Sorted(maps.Keys(found)) {
		c := found[pid]
		up := ancestor(s.proc, c, found)
		if c.part && up || !c.part && up && sameEngine(s.proc, c, found) {
			continue
		}
		if len(out.Engines) == MaxEngines {
			out.Over++
			continue
		}
		e := s.engineOf(c, own, &out)
		if e.Orphan && len(e.Ports) == 0 {
			continue // it ends, and holds nothing that another one needs
		}
		out.Engines = append(out.Engines, e)
	}
	slices.SortFunc(helpers, func(a, b helper) int { return cmp.Compare(a.pid, b.pid) })
	s.join(helpers, &out)
	return out, nil
}

// hidden says whether the table shows this process's own entry and not the first
// process, or not what that runs: the kernel then hides other users' processes.
func (s *Scanner) hidden(entries []fs.DirEntry) bool {
	listed := func(name string) bool {
		return slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Name() == name })
	}
	if !listed("self") {
		return false // it is no table of the kernel's
	}
	_, err := readArgs(s.proc, 1)
	return !listed("1") || errors.Is(err, fs.ErrPermission)
}

// candidate is a process with an engine's command line.
type candidate struct {
	process
	kind  *kind
	words []string
	part  bool
}

// look reads one process; false: it is no engine, but may help one, or be one that
// forwards ports to containers.
func (s *Scanner) look(pid int) (candidate, *helper, *forward, bool) {
	args, err := readArgs(s.proc, pid)
	if err != nil {
		return candidate{}, nil, nil, false // it is gone, or hidden from this process
	}
	if fw, ok := forwardOf(pid, args); ok {
		return candidate{}, nil, &fw, false
	}
	k, words, part := classify(args)
	helps, head := helperOf(args), headOf(args)
	if k == nil && helps == nil && head == "" {
		return candidate{}, nil, nil, false
	}
	p, err := readProcess(s.proc, pid, args)
	switch {
	case err != nil:
		return candidate{}, nil, nil, false
	case head != "":
		return candidate{}, &helper{process: p, raylet: head}, nil, false
	case k == nil:
		return candidate{}, &helper{process: p, kind: helps, job: s.jobOf(pid)}, nil, false
	}
	return candidate{p, k, words, part}, nil, nil, true
}

// Parent is the parent of a process; ok is false if there is no such process.
func (s *Scanner) Parent(pid int) (parent int, ok bool) {
	p, err := readProcess(s.proc, pid, nil)
	return p.parent, err == nil
}

// Boot names the life of the host's kernel; empty: not known.
func (s *Scanner) Boot() string {
	text, err := readSome(s.proc, "sys/kernel/random/boot_id", maxStatusBytes)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(text)
}

// maxAncestors bounds the walk from a process to its ancestors.
const maxAncestors = 32

// eachAncestor calls fn for the ancestors of a process, the nearest first, until
// fn is done.
func eachAncestor(proc fs.FS, c candidate, found map[int]candidate, fn func(pid int) (done bool)) {
	pid := c.parent
	for range maxAncestors {
		if pid <= 1 && found[pid].kind == nil || pid <= 0 || fn(pid) {
			return
		}
		if up, known := found[pid]; known {
			pid = up.parent
			continue
		}
		p, err := readProcess(proc, pid, nil)
		if err != nil {
			return
		}
		pid = p.parent
	}
}

// ancestor says whether a process of the same kind of engine started this one.
func ancestor(proc fs.FS, c candidate, found map[int]candidate) (yes bool) {
	eachAncestor(proc, c, found, func(pid int) bool {
		up, known := found[pid]
		yes = known && up.kind.name == c.kind.name
		return yes
	})
	return yes
}

// sameEngine says whether a process is a copy of the engine that started it: one
// with the same command line has not taken a title of its own yet.
func sameEngine(proc fs.FS, c candidate, found map[int]candidate) (yes bool) {
	eachAncestor(proc, c, found, func(pid int) bool {
		up, known := found[pid]
		yes = known && slices.Equal(up.args, c.args)
		return yes
	})
	return yes
}

// engineOf works out where an engine listens and who runs it.
func (s *Scanner) engineOf(c candidate, own procnet.Sockets, out *Result) Engine {
	trusted := c.container || systemUser(c.uid)
	more := &settings{}
	if !c.part {
		more = s.settingsOf(&c, trusted)
	}
	f := more.under(c.words)
	e := Engine{
		Kind: c.kind.name, Title: c.kind.title, PID: c.pid, Started: c.started, UID: c.uid, Container: c.container,
		Trusted: trusted, Place: Nowhere, Model: cmp.Or(c.kind.modelOf(c.words), c.kind.modelOf(more.words)), settings: more, Group: groupOf(c.kind.name, f), Flags: f, Orphan: c.part,
	}
	var asked bool
	e.Port, asked = c.kind.portOf(f)
	held, err := readInodes(s.proc, c.pid)
	if errors.Is(err, fs.ErrPermission) {
		out.Limited = "this process may not see what other users' processes hold open (it lacks CAP_SYS_PTRACE), so engines are told by command line, port and owner"
		e.ByPort = true
	}
	theirs := own
	if !slices.ContainsFunc(slices.Collect(maps.Keys(held)), func(inode uint64) bool { _, here := own[inode]; return here }) {
		// It may be in another network namespace.
		if all, err := procnet.Read(s.proc, strconv.Itoa(c.pid)+"/net"); err == nil {
			theirs = all
		}
	}
	mine := func(k procnet.Socket) bool { return held[k.Inode] || held == nil && k.UID == c.effective }
	if e.Orphan {
		for _, inode := range slices.Sorted(maps.Keys(theirs)) {
			if held[inode] {
				e.Ports = append(e.Ports, int(theirs[inode].Address.Port()))
			}
		}
		slices.Sort(e.Ports)
		e.Ports = slices.Compact(e.Ports)
		return e
	}
	socket, ok := choose(theirs, mine, e.Port, asked || held == nil, f)
	if !ok {
		return e
	}
	e.Place, e.Address, e.Port = Here, socket.Address.Addr(), int(socket.Address.Port())
	if _, here := own[socket.Inode]; !here {
		e.Place, e.addresses = Elsewhere, s.localAddresses(c.pid)
		e.forwarded = s.published(e.addresses)
	}
	return e
}

// choose finds the socket of an engine's server among those that are its own: at
// the port it asks for, else, if the command line names none, its only one that
// can be it.
func choose(all procnet.Sockets, mine func(procnet.Socket) bool, port int, named bool, f Flags) (procnet.Socket, bool) {
	var at, other []procnet.Socket
	for _, inode := range slices.Sorted(maps.Keys(all)) {
		k := all[inode]
		switch {
		case !mine(k):
		case int(k.Address.Port()) == port:
			at = append(at, k)
		case k.Address.Port() < firstEphemeralPort && !eventPort(int(k.Address.Port()), f):
			other = append(other, k)
		}
	}
	if len(at) == 0 && !named {
		at = other
		if len(at) != 1 {
			return procnet.Socket{}, false
		}
	}
	if len(at) == 0 {
		return procnet.Socket{}, false
	}
	// One that is reached at the loopback address before one that is not.
	return slices.MinFunc(at, func(a, b procnet.Socket) int {
		return cmp.Or(cmp.Compare(distance(a), distance(b)), cmp.Compare(a.Inode, b.Inode))
	}), true
}

func distance(k procnet.Socket) int {
	switch a := k.Address.Addr(); {
	case a.IsUnspecified():
		return 0
	case a.IsLoopback():
		return 1
	}
	return 2
}

// systemUser says whether root or a system user has an id.
func systemUser(uid uint32) bool {
	return uid <= maxSystemUID || uid >= minDynamicUID && uid <= maxDynamicUID
}
