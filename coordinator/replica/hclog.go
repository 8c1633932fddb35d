package replica

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
)

// repeatEvery is how often a message that repeats is logged.
const repeatEvery = time.Minute

// maxRepeated bounds the messages whose repetitions are counted.
const maxRepeated = 128

// raftLogger writes what Raft logs to slog. What Raft calls information is
// debugging to an operator; a peer that does not answer is a warning, not an
// error. A message about the same peer is written once and then at most once a
// minute, with the count of those left out.
type raftLogger struct {
	to      *slog.Logger
	name    string
	implied []any
	repeats *repeats
}

var _ hclog.Logger = (*raftLogger)(nil)

// repeats counts messages by text and peer.
type repeats struct {
	mu   sync.Mutex
	seen map[string]repeat
	// closing makes everything debugging: what breaks while the replica is
	// stopped is no news.
	closing atomic.Bool
}

type repeat struct {
	loggedAt time.Time
	left     int
}

func newRaftLogger(to *slog.Logger) *raftLogger {
	return &raftLogger{to: to, repeats: &repeats{seen: map[string]repeat{}}}
}

// pass says whether a message is due, and how many like it were left out.
func (r *repeats) pass(key string, now time.Time) (bool, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, known := r.seen[key]
	if known && now.Sub(e.loggedAt) < repeatEvery {
		e.left++
		r.seen[key] = e
		return false, 0
	}
	if !known && len(r.seen) >= maxRepeated {
		clear(r.seen)
	}
	r.seen[key] = repeat{loggedAt: now}
	return true, e.left
}

// Log writes one message.
func (l *raftLogger) Log(level hclog.Level, msg string, args ...any) {
	to := slogLevel(level, msg)
	if l.repeats.closing.Load() {
		to = slog.LevelDebug
	}
	if !l.to.Enabled(context.Background(), to) {
		return
	}
	attrs := attributes(append(append([]any{}, l.implied...), args...))
	if to > slog.LevelDebug {
		due, left := l.repeats.pass(msg+peerOf(attrs), time.Now())
		if !due {
			return
		}
		if left > 0 {
			attrs = append(attrs, slog.Int("repeated", left))
		}
	}
	l.to.LogAttrs(context.Background(), to, "raft: "+msg, attrs...)
}

// aboutPeers are parts of Raft's errors over peers and strangers: none of them
// is a fault of this process.
var aboutPeers = []string{"heartbeat", "appendEntries", "requestVote", "requestPreVote", "incoming command", "accept connection"}

func slogLevel(level hclog.Level, msg string) slog.Level {
	switch {
	case level >= hclog.Error && slices.ContainsFunc(aboutPeers, func(p string) bool { return strings.Contains(msg, p) }):
		return slog.LevelWarn
	case level >= hclog.Error:
		return slog.LevelError
	case level == hclog.Warn:
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

// attributes pairs keys and values as hclog hands them over.
func attributes(args []any) []slog.Attr {
	attrs := make([]slog.Attr, 0, len(args)/2+1)
	for ; len(args) >= 2; args = args[2:] {
		value := args[1]
		if f, ok := value.(hclog.Format); ok && len(f) > 0 {
			value = fmt.Sprintf(fmt.Sprint(f[0]), f[1:]...)
		}
		attrs = append(attrs, slog.Any(fmt.Sprint(args[0]), value))
	}
	if len(args) == 1 {
		attrs = append(attrs, slog.Any("extra", args[0]))
	}
	return attrs
}

// peerOf is what tells messages about different peers apart.
func peerOf(attrs []slog.Attr) string {
	var b strings.Builder
	for _, a := range attrs {
		switch a.Key {
		case "peer", "server-id", "server-addr", "id":
			b.WriteString("\x00" + a.Value.String())
		}
	}
	return b.String()
}

// Trace writes a message of the lowest level.
func (l *raftLogger) Trace(msg string, args ...any) { l.Log(hclog.Trace, msg, args...) }

// Debug writes a debugging message.
func (l *raftLogger) Debug(msg string, args ...any) { l.Log(hclog.Debug, msg, args...) }

// Info writes an information.
func (l *raftLogger) Info(msg string, args ...any) { l.Log(hclog.Info, msg, args...) }

// Warn writes a warning.
func (l *raftLogger) Warn(msg string, args ...any) { l.Log(hclog.Warn, msg, args...) }

// Error writes an error.
func (l *raftLogger) Error(msg string, args ...any) { l.Log(hclog.Error, msg, args...) }

// IsTrace says whether such messages are written; likewise the following.
func (l *raftLogger) IsTrace() bool { return l.IsDebug() }

// IsDebug says whether debugging messages are written.
func (l *raftLogger) IsDebug() bool { return l.to.Enabled(context.Background(), slog.LevelDebug) }

// IsInfo says whether information is written.
func (l *raftLogger) IsInfo() bool { return l.IsDebug() }

// IsWarn says whether warnings are written.
func (l *raftLogger) IsWarn() bool { return l.to.Enabled(context.Background(), slog.LevelWarn) }

// IsError says whether errors are written.
func (l *raftLogger) IsError() bool { return l.to.Enabled(context.Background(), slog.LevelError) }

// ImpliedArgs are those of With.
func (l *raftLogger) ImpliedArgs() []any { return l.implied }

// With returns a logger that adds the arguments to every message.
func (l *raftLogger) With(args ...any) hclog.Logger {
	c := *l
	c.implied = append(append([]any{}, l.implied...), args...)
	return &c
}

// Name is the logger's name.
func (l *raftLogger) Name() string { return l.name }

// Named returns a logger with a longer name.
func (l *raftLogger) Named(name string) hclog.Logger {
	if l.name != "" {
		name = l.name + "." + name
	}
	return l.ResetNamed(name)
}

// ResetNamed returns a logger with another name.
func (l *raftLogger) ResetNamed(name string) hclog.Logger {
	c := *l
	c.name = name
	return &c
}

// SetLevel does nothing: the level is that of the slog handler.
func (l *raftLogger) SetLevel(hclog.Level) {}

// GetLevel is the level of the slog handler.
func (l *raftLogger) GetLevel() hclog.Level {
	switch {
	case l.IsDebug():
		return hclog.Debug
	case l.IsWarn():
		return hclog.Warn
	}
	return hclog.Error
}

// StandardLogger writes lines as debugging messages.
func (l *raftLogger) StandardLogger(opts *hclog.StandardLoggerOptions) *log.Logger {
	return log.New(l.StandardWriter(opts), "", 0)
}

// StandardWriter writes lines as debugging messages.
func (l *raftLogger) StandardWriter(*hclog.StandardLoggerOptions) io.Writer { return lineWriter{l} }

type lineWriter struct{ l *raftLogger }

func (w lineWriter) Write(p []byte) (int, error) {
	w.l.Debug(strings.TrimRight(string(p), "\n"))
	return len(p), nil
}
