package daemon

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// DropFilePages unmaps the pages that this process has mapped of its program's and
// its libraries' files: code and constants. They stay in the system's page cache,
// where other processes share them and the system may take them back, and what is
// needed again is mapped again without a read. Nearly all of a program is touched
// once when it starts, and much of it never again.
func DropFilePages() error {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return fmt.Errorf("pages of files: %w", err)
	}
	ranges, err := cleanRanges(f)
	for _, r := range ranges {
		if _, _, e := syscall.Syscall(syscall.SYS_MADVISE, r.from, r.to-r.from, syscall.MADV_DONTNEED); e != 0 {
			err = errors.Join(err, fmt.Errorf("pages of files: %w", e))
		}
	}
	return errors.Join(err, f.Close())
}

// pageRange is a range of addresses.
type pageRange struct{ from, to uintptr }

// cleanRanges are the mappings of files in a page of smaps that hold nothing but
// what the file does: those that were never written, relocation by a linker
// included.
func cleanRanges(smaps io.Reader) (out []pageRange, err error) {
	var at pageRange
	wanted := false
	lines := bufio.NewScanner(smaps)
	for lines.Scan() {
		line := lines.Bytes()
		if i := bytes.IndexByte(line, '-'); i > 0 && bytes.IndexByte(line, ':') > i {
			fields := strings.Fields(string(line))
			wanted = len(fields) > 5 && len(fields[1]) == 4 && fields[1][1] != 'w' && fields[1][3] == 'p' && fields[5][0] == '/'
			if wanted {
				if at, err = parseRange(fields[0]); err != nil {
					return nil, err
				}
			}
			continue
		}
		if value, ok := bytes.CutPrefix(line, []byte("Anonymous:")); ok && wanted && string(bytes.TrimSpace(value)) == "0 kB" {
			out = append(out, at)
		}
	}
	return out, lines.Err()
}

func parseRange(text string) (r pageRange, err error) {
	from, to, _ := strings.Cut(text, "-")
	a, err := strconv.ParseUint(from, 16, 64)
	if err != nil {
		return r, fmt.Errorf("pages of files: %w", err)
	}
	b, err := strconv.ParseUint(to, 16, 64)
	if err != nil || b < a {
		return r, fmt.Errorf("pages of files: a range %q", text)
	}
	return pageRange{uintptr(a), uintptr(b)}, nil
}
