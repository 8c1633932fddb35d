package coordinator

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"waypost/coordinator/fleet"
)

// metrics are the coordinator's own series; the parts have theirs.
type metrics struct {
	placements   *prometheus.CounterVec
	placeSeconds prometheus.Histogram
	marks        *prometheus.CounterVec
	redirected   *prometheus.CounterVec
	reuseClass   *prometheus.CounterVec
	reuseTokens  *prometheus.CounterVec
	decidingTerm *prometheus.CounterVec
	// predictionRatio is actual over predicted time to the first token.
	predictionRatio *prometheus.HistogramVec
	ended           *prometheus.CounterVec
	badFrames       *prometheus.CounterVec
	prefixFrames    *prometheus.CounterVec
	pulls           *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer, c *Coordinator) *metrics {
	f := promauto.With(reg)
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Name: "waypost_" + name, Help: help}, labels)
	}
	gauge := func(name, help string, fn func() float64) {
		f.NewGaugeFunc(prometheus.GaugeOpts{Name: "waypost_" + name, Help: help}, fn)
	}
	gauge("reservations", "Open claims of placements made here.", func() float64 { return float64(c.fleet.OpenClaims()) })
	gauge("index_keys", "Keys in the prefix index.", func() float64 { return float64(c.index.Stats().Keys) })
	recordMetrics(f, c)
	reg.MustRegister(&stateCollector{
		c:       c,
		workers: prometheus.NewDesc("waypost_workers", "Workers by state.", []string{"pool", "state"}, nil),
		build:   prometheus.NewDesc("waypost_build_info", "Version of this program.", []string{"version"}, nil),
	})
	return &metrics{
		placements:   vec("placements_total", "Placement requests by result.", "pool", "result"),
		placeSeconds: f.NewHistogram(prometheus.HistogramOpts{Name: "waypost_placement_seconds", Help: "Time to decide a placement.", Buckets: prometheus.ExponentialBuckets(5e-6, 2, 16)}),
		marks:        vec("placement_marks_total", "What was not normal about placements.", "pool", "mark"),
		redirected:   vec("redirected_total", "Placements that passed over the worker with most reuse.", "pool"),
		reuseClass:   vec("reuse_class_total", "Reported outcomes by class.", "pool", "class"),
		reuseTokens:  vec("reuse_tokens_total", "Prompt tokens of reported outcomes.", "pool", "kind"),
		decidingTerm: vec("placement_deciding_term_total", "Placements by the term in which the choice led most.", "pool", "term"),
		predictionRatio: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "waypost_first_token_prediction_ratio", Help: "Reported over predicted time to the first token.",
			Buckets: []float64{.25, .5, .75, .9, 1, 1.1, 1.25, 1.5, 2, 4, 8},
		}, []string{"pool"}),
		ended:        vec("reservations_ended_total", "Claims that ended, by how.", "how"),
		badFrames:    vec("lane_frames_refused_total", "Frames from agents that were refused.", "kind"),
		prefixFrames: vec("prefix_frames_total", "Prefix frames by what became of them.", "result"),
		pulls:        vec("prefix_pulls_total", "Snapshots and replays asked for, by reason.", "reason"),
	}
}

// stateCollector counts workers by pool and state at the time of asking.
type stateCollector struct {
	c              *Coordinator
	workers, build *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (s *stateCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- s.workers
	ch <- s.build
}

// Collect implements prometheus.Collector.
func (s *stateCollector) Collect(ch chan<- prometheus.Metric) {
	type key struct{ pool, state string }
	counts := map[key]int{}
	for _, w := range s.c.fleet.Workers(time.Now()) {
		counts[key{w.Pool, w.State}]++
	}
	for k, n := range counts {
		ch <- prometheus.MustNewConstMetric(s.workers, prometheus.GaugeValue, float64(n), k.pool, k.state)
	}
	ch <- prometheus.MustNewConstMetric(s.build, prometheus.GaugeValue, 1, s.c.opt.Version)
}

// note tells what a call changed in the fleet.
func (c *Coordinator) note(ch fleet.Changes) {
	for _, r := range ch.Restarted {
		c.log.Info("engine restarted", "event", "engine_restarted", "worker", r.Worker, "old", markHex(r.Old), "new", markHex(r.New))
	}
	for _, s := range ch.States {
		event := "worker_returned"
		if s.To != "ready" {
			event = "worker_excluded"
		}
		c.log.Info("worker state", "event", event, "worker", s.Name, "from", s.From, "to", s.To, "cause", s.Why)
	}
	for _, e := range ch.Ended {
		c.metrics.ended.WithLabelValues(string(e.How)).Inc()
		if e.How == fleet.EndExpired || e.How == fleet.EndWorkerLost {
			c.cases.endedUnreported(e.Placement, time.Now())
		}
	}
}

// tick drives what happens by itself.
func (c *Coordinator) tick() {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case now := <-t.C:
			c.note(c.fleet.Tick(now))
			c.judges.tick(now)
			c.records.Trim(now)
		}
	}
}
