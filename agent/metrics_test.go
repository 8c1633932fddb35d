package agent

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/engine/kvevents"
	"waypost/gossip/accuracy"
	"waypost/gossip/lane"
)

// series are the values of a worker's series by name, labels beside worker left
// out of account.
func series(t *testing.T, g prometheus.Gatherer, worker string) map[string]float64 {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if len(m.GetLabel()) == 1 && m.GetLabel()[0].GetName() == "worker" && m.GetLabel()[0].GetValue() != worker {
				continue
			}
			// Of the two that it is not the value is 0.
			out[f.GetName()] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return out
}

// What is not known of a worker has no series; what is known has its value.
func TestSeriesOfAWorker(t *testing.T) {
	a := newAgent(t, newKey)
	w, err := a.watch(EngineConfig{Name: "vllm-1", Kind: "vllm", URL: "http://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	a.engines = append(a.engines, w)
	w.Health(false, "connection refused")
	r := w.rank(0)
	const worker = "gpu-01/vllm-1/0"
	got := series(t, a.opt.Gatherer, worker)
	for _, name := range []string{
		"waypost_engine_running", "waypost_engine_waiting", "waypost_engine_queue_seconds", "waypost_engine_kv_used_ratio", "waypost_engine_cached_tokens",
		"waypost_engine_prefill_tokens_per_second", "waypost_engine_step_seconds", "waypost_engine_events_total", "waypost_engine_event_gaps_total",
		"waypost_engine_event_batches_lost_total", "waypost_engine_incarnation", "waypost_view_coverage_ratio", "waypost_view_trust_ratio",
	} {
		if v, ok := got[name]; ok {
			t.Errorf("%s is %v of an engine that was never reached", name, v)
		}
	}
	if v, ok := got["waypost_engine_up"]; !ok || v != 0 {
		t.Errorf("waypost_engine_up is %v, %v", v, ok)
	}
	if v := got["waypost_agent_cpu_seconds_total"]; !(v > 0) {
		t.Errorf("processor time of this process is %v", v)
	}

	r.setFacts(engine.Facts{Model: "m", Ranks: 1, BlockTokens: 16, PoolBlocks: 100, StartMark: 7})
	r.setHealth(true, "")
	r.setCoverage(engine.CoverageFull, "")
	got = series(t, a.opt.Gatherer, worker)
	if v, ok := got["waypost_engine_event_gaps_total"]; !ok || v != 0 {
		t.Errorf("gaps of a stream without one are %v, %v", v, ok)
	}
	if v, ok := got["waypost_view_trust_ratio"]; ok {
		t.Errorf("trust is %v before an outcome", v)
	}
	store := blocktable.Event{Op: blocktable.OpStore, BlockTokens: 16, Hashes: []uint64{1}, Tokens: make([]uint32, 16)}
	r.apply(engine.Batch{Received: time.Now(), Events: []blocktable.Event{store}})
	r.apply(engine.Batch{Seq: 1, Received: time.Now(), Events: []blocktable.Event{store, store}})
	r.count(kvevents.CountGaps, 1)
	r.count(kvevents.CountLost, 41)
	// Ten outcomes that found half of what was expected.
	for range 10 {
		o := accuracy.NewObservation()
		o.ExpectedTokens, o.ActualTokens = 1000, 500
		r.takeOutcomes(1, []lane.Observed{{EngineProcess: r.process, Observation: o}}, time.Now())
	}
	got = series(t, a.opt.Gatherer, worker)
	for name, want := range map[string]float64{
		"waypost_engine_up": 1, "waypost_engine_events_total": 3, "waypost_engine_event_gaps_total": 1, "waypost_engine_event_batches_lost_total": 41,
		"waypost_view_coverage_ratio": 1, "waypost_engine_incarnation": float64(r.process >> 12), "waypost_engine_cached_tokens": 16,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v, %v, want %v", name, v, ok, want)
		}
	}
	// Ten outcomes at one half and four of the prior at one.
	if v, ok := got["waypost_view_trust_ratio"]; !ok || v < .63 || v > .66 {
		t.Errorf("trust is %v, %v", v, ok)
	}
}
