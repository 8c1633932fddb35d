package daemon

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Only what is as in its file is let go of: not what was written, by the program or
// a linker, and nothing that is shared or of no file.
func TestCleanRanges(t *testing.T) {
	const smaps = `00400000-0106c000 r-xp 00000000 fe:00 1234 /opt/way post/waypost
Size:              12720 kB
Rss:               11056 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
0106c000-01e53000 r--p 00c6c000 fe:00 1234 /opt/way post/waypost
Rss:               13148 kB
Anonymous:             0 kB
01e53000-01e54000 r--p 01a53000 fe:00 1234 /opt/way post/waypost
Anonymous:             4 kB
01e54000-01eda000 rw-p 01a54000 fe:00 1234 /opt/way post/waypost
Anonymous:             0 kB
01f00000-01f01000 r--s 00000000 fe:00 1234 /opt/way post/waypost
Anonymous:             0 kB
3a124000-3a145000 r--p 00000000 00:00 0 [heap]
Anonymous:             0 kB
7fecffc18000-7fecffc3e000 r--p 00000000 fe:00 99 /usr/lib/libc.so.6
Anonymous:             0 kB
7fecffc3f000-7fecffc40000 r--p 00000000 00:00 0
Anonymous:             0 kB
7fecffd00000-7fecffd02000 r-xp 00000000 00:00 0                                  [vdso]
Anonymous:             0 kB
`
	got, err := cleanRanges(strings.NewReader(smaps))
	want := []pageRange{{0x400000, 0x106c000}, {0x106c000, 0x1e53000}, {0x7fecffc18000, 0x7fecffc3e000}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%x, %v, want %x", got, err, want)
	}
	if got, err := cleanRanges(strings.NewReader("zz-1 r-xp 0 fe:00 1 /a\nAnonymous: 0 kB\n")); err == nil {
		t.Errorf("a range of no addresses is %x", got)
	}
}

// A process runs on, and has fewer pages of files mapped than before.
func TestDropFilePages(t *testing.T) {
	mapped := func() int {
		text, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if value, ok := strings.CutPrefix(line, "RssFile:"); ok {
				n, err := strconv.Atoi(strings.Fields(value)[0])
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
		}
		t.Skip("this system does not tell how much of a file is mapped")
		return 0
	}
	before := mapped()
	if err := DropFilePages(); err != nil {
		t.Fatal(err)
	}
	if after := mapped(); after >= before {
		t.Errorf("%d KiB of files are mapped, before %d", after, before)
	}
}
