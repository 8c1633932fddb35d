package daemon

import (
	"io"
	"log/slog"
	"os"
)

// NewLogger returns the logger of a daemon and the variable that changes its
// level at run time. The journal stamps lines itself, so that under a service
// manager (JOURNAL_STREAM is set) they carry no time.
func NewLogger(w io.Writer, level LogLevel, format LogFormat) (*slog.Logger, *slog.LevelVar) {
	v := &slog.LevelVar{}
	v.Set(level.Level())
	opts := &slog.HandlerOptions{Level: v}
	if os.Getenv("JOURNAL_STREAM") != "" {
		opts.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) == 0 && a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}
	}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts)), v
	}
	return slog.New(slog.NewTextHandler(w, opts)), v
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
