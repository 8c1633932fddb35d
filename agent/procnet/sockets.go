package procnet

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

const (
	// maxLines bounds the sockets of one network namespace that are looked at,
	// maxListening the listening ones that are kept.
	maxLines     = 1 << 20
	maxListening = 1 << 14
	// maxOthers is after how many sockets in a row that do not listen the rest is
	// left out: the kernel lists those that listen first, and the walk through all
	// connections is what costs.
	maxOthers = 256
)

// Socket is one listening TCP socket.
type Socket struct {
	// Address is where it listens.
	Address netip.AddrPort
	// UID is the user that it belongs to.
	UID uint32
	// Inode is its number in the links of the processes that hold it.
	Inode uint64
}

// Sockets are the listening sockets of one network namespace by inode.
type Sockets map[uint64]Socket

// Read reads the listening sockets that a directory of a process table shows:
// "net" for the reader's own network namespace, "PID/net" for a process's.
func Read(proc fs.FS, dir string) (Sockets, error) {
	out := Sockets{}
	err4 := readFile(proc, dir+"/tcp", out)
	err6 := readFile(proc, dir+"/tcp6", out)
	if err4 != nil && err6 != nil {
		return nil, err4
	}
	return out, nil
}

func readFile(proc fs.FS, name string, out Sockets) error {
	f, err := proc.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := parse(f, out); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// parse adds the listening sockets of a table to out. A line that cannot
// be read is passed over: one odd line must not hide an engine.
func parse(r io.Reader, out Sockets) error {
	lines := bufio.NewScanner(r)
	others := 0
	for n := 0; others < maxOthers && n < maxLines && len(out) < maxListening && lines.Scan(); n++ {
		// sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
		const listening = "0A"
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || fields[3] != listening {
			others++
			continue
		}
		others = 0
		address, ok := parseAddress(fields[1])
		uid, err := strconv.ParseUint(fields[7], 10, 32)
		inode, err2 := strconv.ParseUint(fields[9], 10, 64)
		if ok && err == nil && err2 == nil && inode != 0 {
			out[inode] = Socket{address, uint32(uid), inode}
		}
	}
	return lines.Err()
}

// Serving are the sockets that a connection to an address comes to, by inode in
// order: of those at its port the ones that listen nearest to it, at the address
// itself before all addresses. An address without a host is this host's loopback
// of either family.
func (s Sockets) Serving(at netip.AddrPort) []uint64 {
	var out []uint64
	best := 0
	for _, inode := range slices.Sorted(maps.Keys(s)) {
		k := s[inode]
		n := nearness(k.Address.Addr(), at.Addr().Unmap())
		if k.Address.Port() != at.Port() || n == 0 || n < best {
			continue
		}
		if n > best {
			best, out = n, nil
		}
		out = append(out, inode)
	}
	return out
}

// nearness is how near a socket that listens at an address is to another; 0: it
// does not listen there.
func nearness(listens, at netip.Addr) int {
	switch {
	case listens == at, !at.IsValid() && listens.IsLoopback():
		return 3
	case listens.IsUnspecified() && (!at.IsValid() || listens.Is4() == at.Is4()):
		return 2
	case listens == netip.IPv6Unspecified():
		return 1 // it takes the older family as well, unless it is told not to
	}
	return 0
}

// parseAddress reads "0100007F:1F40": 32-bit words as the machine stores them.
func parseAddress(s string) (netip.AddrPort, bool) {
	host, port, ok := strings.Cut(s, ":")
	p, err := strconv.ParseUint(port, 16, 16)
	words, err2 := hex.DecodeString(host)
	if !ok || err != nil || err2 != nil {
		return netip.AddrPort{}, false
	}
	for i := 0; i+4 <= len(words); i += 4 {
		binary.NativeEndian.PutUint32(words[i:], binary.BigEndian.Uint32(words[i:]))
	}
	addr, ok := netip.AddrFromSlice(words)
	return netip.AddrPortFrom(addr.Unmap(), uint16(p)), ok
}
