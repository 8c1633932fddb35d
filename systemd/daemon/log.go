package daemon

import (
	"context"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
)

// LogSettings are what of a logger can be changed at run time. It is safe for
// concurrent use.
type LogSettings struct {
	level slog.LevelVar
	json  atomic.Bool
}

// Set changes level and format of the lines from now on.
func (s *LogSettings) Set(level LogLevel, format LogFormat) {
	s.level.Set(level.Level())
	s.json.Store(format == "json")
}

// NewLogger returns the logger of a daemon and what changes its settings. The
// journal stamps lines itself, so that under a service manager (JOURNAL_STREAM is
// set) they carry no time.
func NewLogger(w io.Writer, level LogLevel, format LogFormat) (*slog.Logger, *LogSettings) {
	s := &LogSettings{}
	s.Set(level, format)
	opts := &slog.HandlerOptions{Level: &s.level}
	if os.Getenv("JOURNAL_STREAM") != "" {
		opts.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) == 0 && a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}
	}
	w = &wholeLines{w: w}
	return slog.New(&formats{s: s, logfmt: slog.NewTextHandler(w, opts), json: slog.NewJSONHandler(w, opts)}), s
}

// wholeLines keeps lines of both formats apart: each handler has a lock of its own.
type wholeLines struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *wholeLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// formats writes lines in the format that is set when they are.
type formats struct {
	s            *LogSettings
	logfmt, json slog.Handler
}

func (f *formats) Enabled(ctx context.Context, l slog.Level) bool { return f.logfmt.Enabled(ctx, l) }

func (f *formats) Handle(ctx context.Context, r slog.Record) error {
	if f.s.json.Load() {
		return f.json.Handle(ctx, r)
	}
	return f.logfmt.Handle(ctx, r)
}

func (f *formats) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &formats{s: f.s, logfmt: f.logfmt.WithAttrs(attrs), json: f.json.WithAttrs(attrs)}
}

func (f *formats) WithGroup(name string) slog.Handler {
	return &formats{s: f.s, logfmt: f.logfmt.WithGroup(name), json: f.json.WithGroup(name)}
}

// Level returns the level as slog has it; an unknown word is info.
func (l LogLevel) Level() slog.Level {
	switch l {
	case "debug":
		return slog.LevelDebug
	case "warn":
		return slog.LevelWarn
	case "error":
		return slog.LevelError
	default:
		return slog.LevelInfo
	}
}
