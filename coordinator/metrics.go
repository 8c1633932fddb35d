package coordinator

import (
	"math"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"waypost/coordinator/fleet"
	"waypost/gossip/doctor"
	"waypost/gossip/mesh"
)

// metrics are the coordinator's own series; the parts have theirs.
type metrics struct {
	placements   *prometheus.CounterVec
	placeSeconds *prometheus.HistogramVec
	// Tenants that the fleet file does not name share one label.
	tenantUncached, tenantRefused *prometheus.CounterVec
	marks                         *prometheus.CounterVec
	redirected                    *prometheus.CounterVec
	reuseClass                    *prometheus.CounterVec
	reuseTokens                   *prometheus.CounterVec
	decidingTerm                  *prometheus.CounterVec
	// predictionRatio is actual over predicted time to the first token.
	predictionRatio *prometheus.HistogramVec
	ended           *prometheus.CounterVec
	badFrames       *prometheus.CounterVec
	places          *prometheus.CounterVec
	peerLag         prometheus.Histogram
	framesUnsent    prometheus.Counter
	// The text memo: prompts learnt by pool and source, entries exchanged by
	// result, texts that were not asked about and answers that were refused.
	memoLearnt, memoEntries  *prometheus.CounterVec
	memoUnasked, memoRefused prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, c *Coordinator) *metrics {
	f := promauto.With(reg)
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Name: "waypost_" + name, Help: help}, labels)
	}
	gauge := func(name, help string, fn func() float64) {
		f.NewGaugeFunc(prometheus.GaugeOpts{Name: "waypost_" + name, Help: help}, fn)
	}
	recordMetrics(f, c)
	gauge("workers_boundary_differs", "Workers whose boundary is not their pool's.", func() float64 { return float64(c.boundaries.differing()) })
	gauge("ledger_peers_connected", "Other coordinators that are told of placements now.", func() float64 { return float64(c.exchange.Connected()) })
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("waypost_"+name, help, labels, nil)
	}
	reg.MustRegister(newMemoCollector(c))
	reg.MustRegister(&stateCollector{
		c:            c,
		workers:      desc("workers", "Workers by state.", "pool", "state"),
		reservations: desc("reservations", "Open claims of placements made here.", "pool"),
		excluded:     desc("workers_excluded", "Workers that get no placements, or only as a last resort, by reason.", "pool", "reason"),
		headroom:     desc("pool_headroom_ratio", "Headroom left at the pool's best ready worker: 1 when nobody waits, 0 when it waits as long as the pool has headroom for; absent: no wait is known.", "pool"),
		queueAge:     desc("queue_data_age_seconds", "Age of the oldest queue report among the pool's ready workers.", "pool"),
		ledger:       desc("ledger_events_total", "What the ledger put aside or decided by itself, by kind.", "kind"),
		doctor:       desc("doctor_check", "Named checks of this coordinator: 0 ok, 1 problem.", "check"),
		build:        desc("build_info", "Version of this program.", "version"),
	})
	return &metrics{
		placements:     vec("placements_total", "Placement requests by result.", "pool", "result"),
		placeSeconds:   f.NewHistogramVec(prometheus.HistogramOpts{Name: "waypost_placement_seconds", Help: "Time to decide a placement.", Buckets: prometheus.ExponentialBuckets(5e-6, 2, 16)}, []string{"pool"}),
		tenantUncached: vec("tenant_uncached_tokens_total", "Prompt tokens placed for a tenant that no cache was expected to hold.", "tenant"),
		tenantRefused:  vec("tenant_refused_total", "Requests of a tenant that were refused, by reason.", "tenant", "reason"),
		marks:          vec("placement_marks_total", "What was not normal about placements.", "pool", "mark"),
		redirected:     vec("redirected_total", "Placements that passed over the worker with most reuse.", "pool"),
		reuseClass:     vec("reuse_class_total", "Reported outcomes by class.", "pool", "class"),
		reuseTokens:    vec("reuse_tokens_total", "Prompt tokens of reported outcomes.", "pool", "kind"),
		decidingTerm:   vec("placement_deciding_term_total", "Placements by the term in which the choice led most.", "pool", "term"),
		predictionRatio: f.NewHistogramVec(prometheus.HistogramOpts{
			Name: "waypost_first_token_prediction_ratio", Help: "Reported over predicted time to the first token.",
			Buckets: []float64{.25, .5, .75, .9, 1, 1.1, 1.25, 1.5, 2, 4, 8},
		}, []string{"pool"}),
		ended:     vec("reservations_ended_total", "Claims that ended, by how.", "how"),
		badFrames: vec("lane_frames_refused_total", "Frames from agents that were refused.", "kind"),
		places:    vec("ledger_places_total", "Placements told to other coordinators or by them, by what became of them.", "result"),
		peerLag: f.NewHistogram(prometheus.HistogramOpts{
			Name: "waypost_ledger_peer_lag_seconds", Help: "Age of other coordinators' placements when they were taken in.", Buckets: []float64{.001, .003, .01, .03, .1, .3, 1, 3, 10},
		}),
		memoLearnt:   vec("memo_learnt_total", "Prompts given as text whose token ids were learnt, by where these came from.", "pool", "source"),
		memoEntries:  vec("memo_entries_total", "Entries of the text memo exchanged with other coordinators, by result.", "result"),
		memoUnasked:  f.NewCounter(prometheus.CounterOpts{Name: "waypost_memo_unasked_total", Help: "Texts that no engine was asked to tokenise: too many waited."}),
		memoRefused:  f.NewCounter(prometheus.CounterOpts{Name: "waypost_memo_refused_total", Help: "Questions to an engine's tokenizer that it or its agent refused."}),
		framesUnsent: f.NewCounter(prometheus.CounterOpts{Name: "waypost_ledger_frames_unsent_total", Help: "Frames of claims or marks that a lane had no room for; claims are offered again."}),
	}
}

// stateCollector tells the state of workers, pools and ledger at the time of
// asking.
type stateCollector struct {
	c                                                                          *Coordinator
	workers, excluded, headroom, reservations, queueAge, ledger, build, doctor *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (s *stateCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{s.workers, s.excluded, s.headroom, s.reservations, s.queueAge, s.ledger, s.build, s.doctor} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (s *stateCollector) Collect(ch chan<- prometheus.Metric) {
	type key struct{ pool, state string }
	counts, excluded, ages, waits := map[key]int{}, map[key]int{}, map[string]float64{}, map[string]float64{}
	for _, w := range s.c.fleet.Workers(time.Now()) {
		counts[key{w.Pool, w.State}]++
		if w.State != "ready" {
			excluded[key{w.Pool, strings.TrimPrefix(w.State, "excluded:")}]++
		} else if best, known := waits[w.Pool]; !math.IsNaN(w.WaitMs) && (!known || w.WaitMs < best) {
			waits[w.Pool] = w.WaitMs
		}
		if w.State == "ready" && !math.IsNaN(w.UpdatedMs) {
			ages[w.Pool] = max(ages[w.Pool], w.UpdatedMs)
		}
	}
	for k, n := range counts {
		ch <- prometheus.MustNewConstMetric(s.workers, prometheus.GaugeValue, float64(n), k.pool, k.state)
	}
	for k, n := range excluded {
		ch <- prometheus.MustNewConstMetric(s.excluded, prometheus.GaugeValue, float64(n), k.pool, k.state)
	}
	for pool, wait := range waits {
		ch <- prometheus.MustNewConstMetric(s.headroom, prometheus.GaugeValue, s.c.headroom(pool, wait), pool)
	}
	for pool, age := range ages {
		ch <- prometheus.MustNewConstMetric(s.queueAge, prometheus.GaugeValue, age/1000, pool)
	}
	for pool, n := range s.c.fleet.Reservations() {
		ch <- prometheus.MustNewConstMetric(s.reservations, prometheus.GaugeValue, float64(n), pool)
	}
	n := s.c.fleet.Counts()
	for kind, v := range map[string]uint64{
		"report": n.Reports, "fenced_report": n.FencedReports, "old_report": n.OldReports, "fenced_claim": n.FencedClaims, "folded_claim": n.FoldedClaims,
		"superseded_claim": n.SupersededClaims, "duplicate_mark": n.DuplicateMarks, "unknown_mark": n.UnknownMarks, "lost_mark": n.LostMarks,
		"lost_place": n.LostPlaces, "duplicate_place": n.DuplicatePlaces, "unknown_place": n.UnknownPlaces, "fenced_place": n.FencedPlaces,
		"older_place": n.OlderPlaces, "own_place": n.OwnPlaces,
	} {
		ch <- prometheus.MustNewConstMetric(s.ledger, prometheus.CounterValue, float64(v), kind)
	}
	ch <- prometheus.MustNewConstMetric(s.build, prometheus.GaugeValue, 1, s.c.opt.Version)
	l := &doctor.List{}
	s.c.checkSelf(l, time.Now())
	for check, n := range doctor.Problems(l.Sorted()) {
		ch <- prometheus.MustNewConstMetric(s.doctor, prometheus.GaugeValue, float64(min(n, 1)), check)
	}
}

// note tells what a call changed in the fleet, and lets be sent what follows
// from it.
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
	c.wakeShipping()
	for i := range ch.Ended {
		e := &ch.Ended[i]
		c.views.Unretain(e)
		c.metrics.ended.WithLabelValues(string(e.How)).Inc()
		if e.How == fleet.EndExpired || e.How == fleet.EndWorkerLost {
			c.cases.endedUnreported(e.Placement, time.Now())
		}
	}
}

// readSketches hands over what the mesh says of hosts without a lane.
func (c *Coordinator) readSketches(now time.Time) {
	c.views.TakeSketches(now, slices.DeleteFunc(c.mesh.Sketches(), func(m mesh.Sketch) bool {
		_, up := c.laneServer.Session(m.Name)
		return up || m.Name == c.name
	}))
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
			c.noteLate(time.Since(now))
			c.note(c.fleet.Tick(now))
			c.lanes.forget()
			c.views.Forget()
			c.readSketches(now)
			c.judges.tick(now)
			c.checkDrains(now)
			c.records.Trim(now)
			c.api.UpdateHealth()
		}
	}
}
