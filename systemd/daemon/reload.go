package daemon

import (
	"log/slog"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// ReloadMetrics are the two series that tell whether the configuration in force
// is the one in the file.
type ReloadMetrics struct {
	ok   prometheus.Gauge
	last prometheus.Gauge
}

// NewReloadMetrics registers the series; the load at the start counts as a success.
func NewReloadMetrics(reg prometheus.Registerer) (*ReloadMetrics, error) {
	m := &ReloadMetrics{
		ok: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "waypost_config_last_reload_successful",
			Help: "1 if the last reading of the configuration was good, 0 if the old one was kept.",
		}),
		last: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "waypost_config_last_reload_success_timestamp_seconds",
			Help: "Unix time of the last good reading of the configuration.",
		}),
	}
	for _, c := range []prometheus.Collector{m.ok, m.last} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	m.Done(nil)
	return m, nil
}

// Done notes the result of a reading.
func (m *ReloadMetrics) Done(err error) {
	if err != nil {
		m.ok.Set(0)
		return
	}
	m.ok.Set(1)
	m.last.Set(float64(time.Now().UnixNano()) / 1e9)
}

// WarnRestart says which settings differ between the configuration that a daemon
// was started with and the one read now, and need a restart.
func WarnRestart(log *slog.Logger, started, now any) {
	var keys []string
	for _, c := range Diff(started, now) {
		if !c.Reloadable {
			keys = append(keys, c.Key)
		}
	}
	if len(keys) > 0 {
		log.Warn("settings have changed that a reload does not take over; restart to use them", "settings", strings.Join(keys, " "))
	}
}
