package events

import (
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
)

// Events are kept at whatever level the log is, with what loggers add, and
// nothing else is.
func TestTap(t *testing.T) {
	var kept []*Event
	quiet := slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelError})
	log := slog.New(&Tap{Handler: quiet, Keep: func(e *Event) { kept = append(kept, e) }}).With("host", "gpu-01")
	log.Info("no event")
	log.WithGroup("g").With("a", 1).Warn(strings.Repeat("x", 2*maxText), "event", "view_gap", "missing", 41)
	if len(kept) != 1 || kept[0].Name != "view_gap" || kept[0].Fields["host"] != "gpu-01" || kept[0].Fields["missing"] != "41" || kept[0].Fields["a"] != "1" || len(kept[0].Message) != maxText || kept[0].Level != slog.LevelWarn {
		t.Errorf("kept %+v", kept)
	}
	if log.Enabled(t.Context(), slog.LevelDebug) {
		t.Error("debug lines are made for nobody")
	}
}

// A ring keeps the newest, in order, and says whether what is asked for is whole.
func TestRing(t *testing.T) {
	r, rev := &Ring{}, uint64(0)
	next := func() uint64 { rev++; return rev }
	for i := range Kept + 10 {
		r.Add(&Event{Name: fmt.Sprint(i)}, next)
	}
	for _, c := range []struct {
		after uint64
		first string
		n     int
		whole bool
	}{
		{0, "10", Kept, false}, {9, "10", Kept, false}, {10, "10", Kept, true}, {11, "11", Kept - 1, true}, {Kept + 10, "", 0, true},
	} {
		got, whole := r.After(c.after)
		if len(got) != c.n || whole != c.whole || c.n > 0 && got[0].Name != c.first {
			t.Errorf("after %d: %d events, whole %v, want %+v", c.after, len(got), whole, c)
		}
	}
}
