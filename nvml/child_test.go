package nvml

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestBackOff(t *testing.T) {
	for attempt := range 70 {
		want := min(minBackOff<<min(attempt, 10), maxBackOff)
		if d := backOff(attempt); d > want || d < want*9/10 {
			t.Errorf("attempt %d: %v, want up to a tenth below %v", attempt, d, want)
		}
	}
}

func TestChildEnviron(t *testing.T) {
	got := childEnviron([]string{"PATH=/bin", "LD_BIND_NOW=1", "NOTIFY_SOCKET=/run/x", "WATCHDOG_USEC=1", "LD_LIBRARY_PATH=/l"}, []string{"A=b"})
	if diff := cmp.Diff([]string{"PATH=/bin", "LD_LIBRARY_PATH=/l", "A=b"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestTail(t *testing.T) {
	var tl tail
	if tl.lastLine() != "" {
		t.Error("something from nothing")
	}
	for i := range 10000 {
		fmt.Fprintf(&tl, "line %d\n", i)
	}
	if got := tl.lastLine(); got != "line 9999" || len(tl.kept) > maxTailBytes {
		t.Errorf("%q, %d bytes kept", got, len(tl.kept))
	}
	_, _ = tl.Write(bytes.Repeat([]byte{0xff}, 1<<20))
	if got := tl.lastLine(); len(tl.kept) > maxTailBytes || strings.Contains(got, "\xff") {
		t.Errorf("%d bytes kept, line of %d", len(tl.kept), len(got))
	}
}
