package coordinator

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// keptEvents is how many events are remembered.
const keptEvents = 4096

// Bounds of what is kept of one event.
const (
	maxEventFields = 16
	maxEventText   = 512
)

// event is a line of the log that names what happened.
type event struct {
	rev     uint64
	at      time.Time
	level   slog.Level
	name    string
	message string
	fields  map[string]string
}

// eventTap is a log handler that keeps the lines with a key "event", whatever
// level the log itself is kept at.
type eventTap struct {
	slog.Handler
	keep func(*event)
	// attrs are those of the loggers made with With.
	attrs []slog.Attr
}

// Enabled implements slog.Handler.
func (t *eventTap) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo || t.Handler.Enabled(ctx, level)
}

// Handle implements slog.Handler.
func (t *eventTap) Handle(ctx context.Context, r slog.Record) error {
	e := &event{at: r.Time, level: r.Level, message: clip(r.Message), fields: map[string]string{}}
	take := func(a slog.Attr) bool {
		switch v := clip(a.Value.Resolve().String()); {
		case a.Key == "event":
			e.name = v
		case len(e.fields) < maxEventFields:
			e.fields[a.Key] = v
		}
		return true
	}
	for _, a := range t.attrs {
		take(a)
	}
	r.Attrs(take)
	if e.name != "" {
		t.keep(e)
	}
	if t.Handler.Enabled(ctx, r.Level) {
		return t.Handler.Handle(ctx, r)
	}
	return nil
}

// WithAttrs implements slog.Handler.
func (t *eventTap) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &eventTap{Handler: t.Handler.WithAttrs(attrs), keep: t.keep, attrs: append(t.attrs[:len(t.attrs):len(t.attrs)], attrs...)}
}

// WithGroup implements slog.Handler. What is logged in a group is kept by its
// own name.
func (t *eventTap) WithGroup(name string) slog.Handler {
	return &eventTap{Handler: t.Handler.WithGroup(name), keep: t.keep, attrs: t.attrs}
}

// clip makes a text one that a message can carry.
func clip(s string) string {
	if len(s) > maxEventText {
		return strings.ToValidUTF8(s[:maxEventText], "")
	}
	return strings.ToValidUTF8(s, "")
}

// eventRing keeps the newest events.
type eventRing struct {
	mu     sync.Mutex
	events []*event
	// lost is the rev of the newest event that is not kept any more.
	lost uint64
}

// add keeps an event; rev is taken under the lock, so that revs grow along the
// ring.
func (r *eventRing) add(e *event, rev func() uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.rev = rev()
	r.events = append(r.events, e)
	if n := len(r.events) - keptEvents; n > 0 {
		r.lost = r.events[n-1].rev
		clear(r.events[:n])
		r.events = r.events[n:]
	}
}

// after are the events after a rev; whole is false if some of them are not kept
// any more.
func (r *eventRing) after(rev uint64) (out []*event, whole bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := len(r.events)
	for i > 0 && r.events[i-1].rev > rev {
		i--
	}
	return append(out, r.events[i:]...), rev >= r.lost
}
