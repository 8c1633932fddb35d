package agent

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"waypost/agent/engine"
	"waypost/agent/engine/kvevents"
	"waypost/gossip/doctor"
	"waypost/gossip/ledger"
	"waypost/systemd/daemon"
)

// collector tells the series of this host's workers. They come from here only:
// a coordinator would repeat them for every worker it sees.
type collector struct {
	a *Agent

	up, running, waiting, queue, kvUsed, step, cached, incarnation, coverage, faults *prometheus.Desc
	prefill, lag, claims, claimEvents, events, gaps, lost, trust                     *prometheus.Desc
	build, doctor, cpu, probes                                                       *prometheus.Desc
}

func newCollector(a *Agent) *collector {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("waypost_"+name, help, labels, nil)
	}
	return &collector{
		a:           a,
		up:          d("engine_up", "Whether the engine serves and makes progress.", "worker"),
		running:     d("engine_running", "Requests in the running batch; absent: unknown.", "worker"),
		waiting:     d("engine_waiting", "Requests that wait for admission; absent: unknown.", "worker"),
		queue:       d("engine_queue_seconds", "Time until the waiting prefills end; absent: unknown.", "worker"),
		kvUsed:      d("engine_kv_used_ratio", "Share of KV blocks referenced; absent: unknown.", "worker"),
		step:        d("engine_step_seconds", "Present gap between tokens; absent: unknown.", "worker"),
		cached:      d("engine_cached_tokens", "Tokens in unbroken cached prefixes; absent: no events.", "worker"),
		incarnation: d("engine_incarnation", "Changes with each process life of the engine; absent: not reached yet.", "worker"),
		coverage:    d("view_coverage_ratio", "How much of the cache the events show: 1 full, 0.5 partial, 0 none; absent: not reached yet.", "worker"),
		faults:      d("engine_event_faults_total", "Faults of the event stream, by kind: gaps, missing batches, damage, resets.", "worker", "kind"),
		prefill:     d("engine_prefill_tokens_per_second", "Speed of a full prefill step by the step model in force.", "worker"),
		lag:         d("engine_signal_lag_seconds", "Learnt lag of the engine's counters; absent: not known.", "worker"),
		claims:      d("claims", "Placements known here: open ones wait for their first token, kept ones are remembered.", "worker", "state"),
		claimEvents: d("claim_events_total", "What became of claims, marks and their evidence, by kind.", "worker", "kind"),
		doctor:      d("doctor_check", "Named checks: 0 ok, 1 problem.", "check"),
		events:      d("engine_events_total", "Events of the engine's cache that were taken in; absent: it tells none.", "worker"),
		gaps:        d("engine_event_gaps_total", "Jumps of the number of the engine's event batches; absent: it tells none.", "worker"),
		lost:        d("engine_event_batches_lost_total", "Event batches that were missed and that the engine has no more; absent: it tells none.", "worker"),
		trust:       d("view_trust_ratio", "Factor on credit for the worker's cache: the share of expected tokens that was found; absent: too few outcomes.", "worker"),
		cpu:         d("agent_cpu_seconds_total", "Processor time of the agent's process, without that of the driver's child; absent: the system does not tell."),
		probes:      d("boundary_requests_total", "Requests to an engine's tokenizer that measure its hashing boundary: when it comes up one question a second for eight seconds, later one every two minutes.", "engine"),
		build:       d("build_info", "Version of this program.", "version"),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.up, c.running, c.waiting, c.queue, c.kvUsed, c.step, c.cached, c.incarnation, c.coverage, c.faults, c.prefill, c.lag, c.claims, c.claimEvents, c.events, c.gaps, c.lost, c.trust, c.build, c.doctor, c.cpu, c.probes} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(c.build, 1, c.a.opt.Version)
	for check, n := range doctor.Problems(c.a.kept()) {
		gauge(c.doctor, float64(min(n, 1)), check)
	}
	if cpu, known := daemon.ProcessCPU(); known {
		ch <- prometheus.MustNewConstMetric(c.cpu, prometheus.CounterValue, cpu.Seconds())
	}
	now := time.Now()
	for _, w := range c.a.watching() {
		if w.prober != nil {
			ch <- prometheus.MustNewConstMetric(c.probes, prometheus.CounterValue, float64(w.prober.requests.Load()), c.a.subject(w.target.Name))
		}
		for _, r := range w.all() {
			rep := r.report(now)
			worker := c.a.workerName(r)
			up := 0.0
			if rep.load.State == ledger.StateReady {
				up = 1
			}
			gauge(c.up, up, worker)
			count := func(d *prometheus.Desc, v *uint32) {
				if v != nil {
					gauge(d, float64(*v), worker)
				}
			}
			count(c.running, rep.load.Running)
			count(c.waiting, rep.load.Waiting)
			for d, ms := range map[*prometheus.Desc]*float64{c.queue: rep.load.QueueMs, c.step: rep.load.GapMs} {
				if ms != nil {
					gauge(d, *ms/1000, worker)
				}
			}
			if rep.load.KVUsedRatio != nil {
				gauge(c.kvUsed, *rep.load.KVUsedRatio, worker)
			}
			if rep.coverage != engine.CoverageNone && rep.blockTokens > 0 {
				gauge(c.cached, float64(rep.cachedBlocks*rep.blockTokens), worker)
			}
			if rep.known {
				gauge(c.incarnation, float64(rep.process>>12), worker)
				gauge(c.coverage, map[engine.Coverage]float64{engine.CoverageFull: 1, engine.CoveragePartial: 0.5}[rep.coverage], worker)
			}
			if !math.IsNaN(rep.trust) {
				gauge(c.trust, rep.trust, worker)
			}
			if rep.eventful {
				for d, n := range map[*prometheus.Desc]uint64{c.events: rep.events, c.gaps: uint64(rep.faults[kvevents.CountGaps]), c.lost: uint64(rep.faults[kvevents.CountLost])} {
					ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), worker)
				}
			}
			for kind, n := range rep.faults {
				ch <- prometheus.MustNewConstMetric(c.faults, prometheus.CounterValue, float64(n), worker, kind)
			}
			if rep.claims.known {
				c.collectClaims(ch, &rep.claims, worker)
			}
		}
	}
}

// collectClaims tells the series of a worker's claims.
func (c *collector) collectClaims(ch chan<- prometheus.Metric, n *claimCounts, worker string) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append([]string{worker}, labels...)...)
	}
	if !math.IsNaN(n.prefillTokensPerSec) {
		gauge(c.prefill, n.prefillTokensPerSec)
	}
	if !math.IsNaN(n.lagMs) {
		gauge(c.lag, n.lagMs/1000)
	}
	gauge(c.claims, float64(n.open), "open")
	gauge(c.claims, float64(n.kept), "kept")
	for kind, v := range map[string]uint64{
		"taken": n.TakenClaims, "duplicate": n.DuplicateClaims, "fenced": n.FencedClaims, "dropped": n.DroppedClaims, "inferred": n.InferredClaims,
		"ended": n.EndedClaims, "frame_gap": n.FrameGaps, "frame_ignored": n.FramesIgnored, "coordinator_refused": n.CoordinatorsRefused,
		"duplicate_mark": n.DuplicateMarks, "unknown_mark": n.UnknownMarks, "foreign_store": n.ForeignStores, "bad_reading": n.BadReadings,
		"counter_reset": n.CounterResets,
	} {
		ch <- prometheus.MustNewConstMetric(c.claimEvents, prometheus.CounterValue, float64(v), worker, kind)
	}
}

// workerName is the name of a worker of this host.
func (a *Agent) workerName(r *rank) string {
	return fmt.Sprintf("%s/%s/%d", a.name, r.engine, r.number)
}

// gpuCollector tells the verdicts on this host's GPUs.
type gpuCollector struct {
	a       *Agent
	verdict *prometheus.Desc
}

func newGPUCollector(a *Agent) *gpuCollector {
	return &gpuCollector{a: a, verdict: prometheus.NewDesc("waypost_gpu_verdict",
		"What policy makes of a GPU: 0 ok, 1 priced, 2 excluded, with the conditions that led to it.", []string{"gpu", "uuid", "reason"}, nil)}
}

// Describe implements prometheus.Collector.
func (c *gpuCollector) Describe(ch chan<- *prometheus.Desc) { ch <- c.verdict }

// Collect implements prometheus.Collector. There is one series per GPU: one with
// an old reason does not stay.
func (c *gpuCollector) Collect(ch chan<- prometheus.Metric) {
	reader := c.a.gpus.client()
	if reader == nil {
		return
	}
	view := reader.View()
	c.a.truth.mu.Lock()
	policy := c.a.truth.policy
	c.a.truth.mu.Unlock()
	for i := range view.Devices {
		d := &view.Devices[i]
		v := policy.Judge(view.Status.Code, view.XidState, d)
		ch <- prometheus.MustNewConstMetric(c.verdict, prometheus.GaugeValue, float64(v.Action), fmt.Sprintf("%s/%d", c.a.name, d.Index), d.UUID, strings.Join(v.Reasons, ","))
	}
}
