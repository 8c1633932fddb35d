package replica

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"waypost/coordinator/registry"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func plainText(b *bytes.Buffer, level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

func TestRaftLogger(t *testing.T) {
	var b bytes.Buffer
	l := newRaftLogger(plainText(&b, slog.LevelDebug)).With("node", "c-1").Named("snap")
	l.Info("entering follower state", "leader", hclog.Fmt("%s at %d", "x", 3))
	l.Error("failed to heartbeat to", "peer", "10.0.0.1:7711", "error", errors.New("refused"))
	l.Error("failed to take snapshot", "error", errors.New("full"))
	l.Warn("odd", "lonely")
	l.Trace("t")
	l.StandardLogger(nil).Print("a line")
	want := `level=DEBUG msg="raft: entering follower state" node=c-1 leader="x at 3"
level=WARN msg="raft: failed to heartbeat to" node=c-1 peer=10.0.0.1:7711 error=refused
level=ERROR msg="raft: failed to take snapshot" node=c-1 error=full
level=WARN msg="raft: odd" node=c-1 extra=lonely
level=DEBUG msg="raft: t" node=c-1
level=DEBUG msg="raft: a line" node=c-1
`
	if got := b.String(); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if l.Name() != "snap" || l.Named("x").Name() != "snap.x" || l.ResetNamed("y").Name() != "y" || len(l.ImpliedArgs()) != 2 {
		t.Errorf("name %q, implied %v", l.Name(), l.ImpliedArgs())
	}
	if !l.IsTrace() || !l.IsDebug() || !l.IsInfo() || !l.IsWarn() || !l.IsError() || l.GetLevel() != hclog.Debug {
		t.Error("levels of a debugging logger")
	}
	quiet := newRaftLogger(plainText(&b, slog.LevelWarn))
	quiet.SetLevel(hclog.Trace)
	if quiet.IsInfo() || !quiet.IsWarn() || quiet.GetLevel() != hclog.Warn || newRaftLogger(discard()).GetLevel() != hclog.Error {
		t.Error("levels of a quiet logger")
	}
}

// TestRaftLoggerRepeats: an hour without a peer is a line a minute, with the
// count of those left out, and does not hide another peer.
func TestRaftLoggerRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		l := newRaftLogger(plainText(&b, slog.LevelInfo))
		for range 3600 * 4 {
			l.Error("failed to heartbeat to", "peer", "a", "backoff time", time.Second, "error", "refused")
			time.Sleep(250 * time.Millisecond)
		}
		l.Error("failed to heartbeat to", "peer", "b", "error", "refused")
		lines := strings.Split(strings.TrimSpace(b.String()), "\n")
		if len(lines) != 61 || strings.Contains(lines[0], "repeated") || !strings.Contains(lines[1], "repeated=239") || !strings.Contains(lines[60], "peer=b") {
			t.Errorf("%d lines:\n%s\n%s\n…\n%s", len(lines), lines[0], lines[1], lines[len(lines)-1])
		}
		for i := range 10 * maxRepeated {
			l.Warn("w", "peer", fmt.Sprint(i))
		}
		if n := len(l.repeats.seen); n > maxRepeated {
			t.Errorf("%d messages remembered", n)
		}
	})
}

func FuzzDecodeView(f *testing.F) {
	var b bytes.Buffer
	state, _ := registry.Empty().Apply(command(f, "1", registry.SetCordon{Selector: "h", Reason: "r"}))
	if err := (&view{state, 7}).encode(&b); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add([]byte(viewHeader + " 1\nwaypost-registry 1\n{}"))
	f.Add([]byte(strings.Repeat("x", 10000)))
	f.Fuzz(func(t *testing.T, data []byte) {
		v, err := decodeView(bytes.NewReader(data))
		if err != nil {
			return
		}
		var out bytes.Buffer
		if err := v.encode(&out); err != nil {
			t.Fatal(err)
		}
		again, err := decodeView(&out)
		if err != nil || again.index != v.index || again.state.Hash() != v.state.Hash() {
			t.Fatalf("it does not survive: %v", err)
		}
	})
}
