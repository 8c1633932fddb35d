package discover

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"strconv"
	"strings"
)

const (
	// maxSocketLines bounds the sockets of one network namespace that are looked
	// at, maxListening the listening ones that are kept.
	maxSocketLines = 1 << 20
	maxListening   = 1 << 14
	// maxOthers is after how many sockets in a row that do not listen the rest is
	// left out: the kernel lists those that listen first, and the walk through all
	// connections is what costs.
	maxOthers = 256
)

// socket is one listening TCP socket.
type socket struct {
	address netip.AddrPort
	uid     uint32
	inode   uint64
}

// sockets are the listening sockets of one network namespace by inode.
type sockets map[uint64]socket

// readSockets reads the listening sockets that a directory of the process table
// shows: "net" for the reader's own namespace, "PID/net" for a process's.
func readSockets(proc fs.FS, dir string) (sockets, error) {
	out := sockets{}
	err4 := readSocketFile(proc, dir+"/tcp", out)
	err6 := readSocketFile(proc, dir+"/tcp6", out)
	if err4 != nil && err6 != nil {
		return nil, err4
	}
	return out, nil
}

func readSocketFile(proc fs.FS, name string, out sockets) error {
	f, err := proc.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := parseSockets(f, out); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// parseSockets adds the listening sockets of a table to out. A line that cannot
// be read is passed over: one odd line must not hide an engine.
func parseSockets(r io.Reader, out sockets) error {
	lines := bufio.NewScanner(r)
	others := 0
	for n := 0; others < maxOthers && n < maxSocketLines && len(out) < maxListening && lines.Scan(); n++ {
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
			out[inode] = socket{address, uint32(uid), inode}
		}
	}
	return lines.Err()
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
