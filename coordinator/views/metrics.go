package views

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics count frames, pulls and verifications.
type metrics struct{ prefixFrames, prefixBytes, pulls, answers, verified *prometheus.CounterVec }

func newMetrics(reg prometheus.Registerer, vs *Views) *metrics {
	reg.MustRegister(newViewCollector(vs))
	f := promauto.With(reg)
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Name: "waypost_" + name, Help: help}, labels)
	}
	return &metrics{
		prefixFrames: vec("prefix_frames_total", "Prefix frames by what became of them.", "result"),
		prefixBytes:  vec("prefix_bytes_total", "Bytes of prefix frames, by where they came from: delta, or asked for from an agent or a peer.", "source"),
		pulls:        vec("prefix_pulls_total", "Snapshots and replays asked for, by reason and by whom: agent or peer.", "reason", "source"),
		answers:      vec("prefix_answers_total", "What agents answered when they were asked for their streams: a replay, a snapshot, or nothing where nothing was missing.", "answer"),
		verified:     vec("prefix_verifications_total", "Comparisons of the index with an agent's whole set, by result.", "result"),
	}
}

// viewCollector tells of what is known of caches at the time of asking.
type viewCollector struct {
	vs                                                 *Views
	keys, bytes, inFlight, waiting, sketchAge, viewAge *prometheus.Desc
}

func newViewCollector(vs *Views) *viewCollector {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("waypost_"+name, help, labels, nil)
	}
	return &viewCollector{
		vs:        vs,
		keys:      d("index_keys", "Keys in the prefix index."),
		bytes:     d("index_bytes", "Memory of the prefix index and of the streams that feed it."),
		inFlight:  d("prefix_pulls_in_flight", "Snapshots and replays under way."),
		waiting:   d("prefix_pulls_waiting", "Streams that wait to be asked for."),
		sketchAge: d("sketch_age_seconds", "Age of the oldest sketch that stands in for a lane; absent: none does."),
		viewAge:   d("cache_view_age_seconds", "Age of the oldest cache view of a ready worker; absent: none is known.", "pool"),
	}
}

// Describe implements prometheus.Collector.
func (v *viewCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{v.keys, v.bytes, v.inFlight, v.waiting, v.sketchAge, v.viewAge} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (v *viewCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, x float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, x, labels...)
	}
	vs, now := v.vs, time.Now()
	st := vs.index.Stats()
	_, _, decoderBytes := vs.Size()
	gauge(v.keys, float64(st.Keys))
	gauge(v.bytes, float64(st.Bytes+decoderBytes))
	inFlight, waiting := vs.puller.counts()
	gauge(v.inFlight, float64(inFlight))
	gauge(v.waiting, float64(waiting))
	if age := vs.oldestSketchSec(now); !math.IsNaN(age) {
		gauge(v.sketchAge, age)
	}
	ages := map[string]float64{}
	for _, w := range vs.fleet.Workers(now) {
		if w.State == "ready" && !math.IsNaN(w.ViewAgeMs) {
			ages[w.Pool] = max(ages[w.Pool], w.ViewAgeMs/1000)
		}
	}
	for pool, age := range ages {
		gauge(v.viewAge, age, pool)
	}
}
