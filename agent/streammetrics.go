package agent

import (
	"github.com/prometheus/client_golang/prometheus"

	"waypost/gossip/summary"
)

// streamCollector tells the series of this host's prefix streams: what the agent
// says it tells, to be held against what a coordinator says it has.
type streamCollector struct {
	a *Agent

	keys, runs, frames, bytes *prometheus.Desc
}

func newStreamCollector(a *Agent) *streamCollector {
	d := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("waypost_prefix_stream_"+name, help, []string{"worker"}, nil)
	}
	return &streamCollector{
		a:      a,
		keys:   d("keys", "Keys that the prefix stream tells; a key told twice counts twice."),
		runs:   d("runs", "Unbranched segments of the prefix tree that the stream tells."),
		frames: d("frames_total", "Frames of the present prefix stream."),
		bytes:  d("bytes_total", "Bytes of these frames, each counted once whatever the number of coordinators."),
	}
}

// Describe implements prometheus.Collector.
func (c *streamCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.keys, c.runs, c.frames, c.bytes} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *streamCollector) Collect(ch chan<- prometheus.Metric) {
	for _, r := range c.a.ranks() {
		s, ok := r.streamStats()
		if !ok {
			continue
		}
		worker := c.a.workerName(r)
		ch <- prometheus.MustNewConstMetric(c.keys, prometheus.GaugeValue, float64(s.Keys), worker)
		ch <- prometheus.MustNewConstMetric(c.runs, prometheus.GaugeValue, float64(s.Runs), worker)
		ch <- prometheus.MustNewConstMetric(c.frames, prometheus.CounterValue, float64(s.Frames), worker)
		ch <- prometheus.MustNewConstMetric(c.bytes, prometheus.CounterValue, float64(s.Bytes), worker)
	}
}

// streamStats are the counters of the rank's prefix stream; false: there is none
// yet.
func (r *rank) streamStats() (summary.Stats, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.encoder == nil {
		return summary.Stats{}, false
	}
	return r.encoder.Stats(), true
}
