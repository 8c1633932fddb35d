package events

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// Kept is how many events are remembered.
const Kept = 4096

// Bounds of what is kept of one event.
const (
	maxFields = 16
	maxText   = 512
)

// Event is a line of the log that names what happened.
type Event struct {
	// Rev is its place in the stream that watchers get.
	Rev     uint64
	At      time.Time
	Level   slog.Level
	Name    string
	Message string
	Fields  map[string]string
}

// Tap is a log handler that keeps the lines with a key "event", whatever level
// the log itself is kept at.
type Tap struct {
	slog.Handler
	// Keep takes the events; it must not log.
	Keep func(*Event)
	// attrs are those of the loggers made with With.
	attrs []slog.Attr
}

// Enabled implements slog.Handler.
func (t *Tap) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo || t.Handler.Enabled(ctx, level)
}

// Handle implements slog.Handler.
func (t *Tap) Handle(ctx context.Context, r slog.Record) error {
	e := &Event{At: r.Time, Level: r.Level, Message: clip(r.Message), Fields: map[string]string{}}
	take := func(a slog.Attr) bool {
		switch v := clip(a.Value.Resolve().String()); {
		case a.Key == "event":
			e.Name = v
		case len(e.Fields) < maxFields:
			e.Fields[a.Key] = v
		}
		return true
	}
	for _, a := range t.attrs {
		take(a)
	}
	r.Attrs(take)
	if e.Name != "" {
		t.Keep(e)
	}
	if t.Handler.Enabled(ctx, r.Level) {
		return t.Handler.Handle(ctx, r)
	}
	return nil
}

// WithAttrs implements slog.Handler.
func (t *Tap) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &Tap{Handler: t.Handler.WithAttrs(attrs), Keep: t.Keep, attrs: append(t.attrs[:len(t.attrs):len(t.attrs)], attrs...)}
}

// WithGroup implements slog.Handler. What is logged in a group is kept by its
// own name.
func (t *Tap) WithGroup(name string) slog.Handler {
	return &Tap{Handler: t.Handler.WithGroup(name), Keep: t.Keep, attrs: t.attrs}
}

// clip makes a text one that a message can carry.
func clip(s string) string {
	if len(s) > maxText {
		return strings.ToValidUTF8(s[:maxText], "")
	}
	return strings.ToValidUTF8(s, "")
}

// Ring keeps the newest events. The zero value is empty.
type Ring struct {
	mu     sync.Mutex
	events []*Event
	// lost is the rev of the newest event that is not kept any more.
	lost uint64
}

// Add keeps an event; rev is taken under the lock, so that revs grow along the
// ring.
func (r *Ring) Add(e *Event, rev func() uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.Rev = rev()
	r.events = append(r.events, e)
	if n := len(r.events) - Kept; n > 0 {
		r.lost = r.events[n-1].Rev
		clear(r.events[:n])
		r.events = r.events[n:]
	}
}

// After are the events after a rev; whole is false if some of them are not kept
// any more.
func (r *Ring) After(rev uint64) (out []*Event, whole bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := len(r.events)
	for i > 0 && r.events[i-1].Rev > rev {
		i--
	}
	return append(out, r.events[i:]...), rev >= r.lost
}
