package daemon

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
)

// Events are the words of what happened: values of the log key "event" and of
// the label of waypost_events_total.
var Events = []string{
	"host_joined", "host_left", "host_suspect", "host_lost", "host_conflict", "key_refused",
	"engine_found", "engine_lost", "engine_restarted", "engine_stalled", "engine_recovered",
	"view_gap", "view_resync", "view_partial", "view_disagrees", "boundary_differs",
	"gpu_fault", "gpu_cleared", "gpu_acked", "nvml_blocked", "worker_excluded", "worker_returned",
	"drain_started", "drain_done", "cordoned", "uncordoned", "fleet_applied",
	"leader_changed", "quorum_lost", "quorum_back", "policy_stale", "ledger_peer_lost", "tenant_throttled",
	"cert_expiring", "key_rotated", "upgrade_finalized",
}

// CountEvents returns a logger that counts the lines that carry an event, also
// those that the level keeps out of the log. Every event has a series from the
// start; a word that is none of Events is logged and not counted.
func CountEvents(log *slog.Logger, reg prometheus.Registerer) (*slog.Logger, error) {
	vec := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "waypost_events_total", Help: "What happened, by event."}, []string{"event"})
	if err := reg.Register(vec); err != nil {
		return nil, err
	}
	counters := make(map[string]prometheus.Counter, len(Events))
	for _, e := range Events {
		counters[e] = vec.WithLabelValues(e)
	}
	return slog.New(&eventCounter{log.Handler(), counters}), nil
}

// eventCounter counts what passes to the next handler.
type eventCounter struct {
	next     slog.Handler
	counters map[string]prometheus.Counter
}

// Enabled implements slog.Handler.
func (h *eventCounter) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo || h.next.Enabled(ctx, level)
}

// Handle implements slog.Handler.
func (h *eventCounter) Handle(ctx context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key != "event" {
			return true
		}
		if c, ok := h.counters[a.Value.String()]; ok {
			c.Inc()
		}
		return false
	})
	if !h.next.Enabled(ctx, r.Level) {
		return nil
	}
	return h.next.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h *eventCounter) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &eventCounter{h.next.WithAttrs(attrs), h.counters}
}

// WithGroup implements slog.Handler.
func (h *eventCounter) WithGroup(name string) slog.Handler {
	return &eventCounter{h.next.WithGroup(name), h.counters}
}
