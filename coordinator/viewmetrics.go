package coordinator

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// viewCollector tells of what is known of caches at the time of asking.
type viewCollector struct {
	c                                                              *Coordinator
	keys, bytes, inFlight, waiting, sketchAge, viewAge, boundaries *prometheus.Desc
}

func newViewCollector(c *Coordinator) *viewCollector {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("waypost_"+name, help, labels, nil)
	}
	return &viewCollector{
		c:          c,
		keys:       d("index_keys", "Keys in the prefix index."),
		bytes:      d("index_bytes", "Memory of the prefix index and of the streams that feed it."),
		inFlight:   d("prefix_pulls_in_flight", "Snapshots and replays under way."),
		waiting:    d("prefix_pulls_waiting", "Streams that wait to be asked for."),
		sketchAge:  d("sketch_age_seconds", "Age of the oldest sketch that stands in for a lane; absent: none does."),
		viewAge:    d("cache_view_age_seconds", "Age of the oldest cache view of a ready worker; absent: none is known.", "pool"),
		boundaries: d("workers_boundary_differs", "Workers whose boundary is not their pool's."),
	}
}

// Describe implements prometheus.Collector.
func (v *viewCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{v.keys, v.bytes, v.inFlight, v.waiting, v.sketchAge, v.viewAge, v.boundaries} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (v *viewCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, x float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, x, labels...)
	}
	c, now := v.c, time.Now()
	st := c.index.Stats()
	gauge(v.keys, float64(st.Keys))
	gauge(v.bytes, float64(st.Bytes+c.lanes.decoderBytes()))
	inFlight, waiting := c.lanes.puller.counts()
	gauge(v.inFlight, float64(inFlight))
	gauge(v.waiting, float64(waiting))
	if age := c.sketches.oldestSec(now); !math.IsNaN(age) {
		gauge(v.sketchAge, age)
	}
	ages := map[string]float64{}
	for _, w := range c.fleet.Workers(now) {
		if w.State == "ready" && !math.IsNaN(w.ViewAgeMs) {
			ages[w.Pool] = max(ages[w.Pool], w.ViewAgeMs/1000)
		}
	}
	for pool, age := range ages {
		gauge(v.viewAge, age, pool)
	}
	gauge(v.boundaries, float64(c.boundaries.differing()))
}

// decoderBytes is the memory of all decoders.
func (h *lanes) decoderBytes() (n int) {
	h.mu.Lock()
	hosts := make([]*hostLane, 0, len(h.hosts))
	for _, hl := range h.hosts {
		hosts = append(hosts, hl)
	}
	h.mu.Unlock()
	for _, hl := range hosts {
		hl.mu.Lock()
		for _, st := range hl.streams {
			n += st.decoder.MemoryBytes()
		}
		hl.mu.Unlock()
	}
	return n
}
