package agent

import (
	"math"
	"testing"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// A sketch goes out at the rhythm of the mesh's size, and at once when a state
// changes.
func TestSketchRhythm(t *testing.T) {
	ready := []summary.WorkerSketch{{Name: "a/0", State: summary.SketchReady, Load: 3}}
	busier := []summary.WorkerSketch{{Name: "a/0", State: summary.SketchReady, Load: 9}}
	lost := []summary.WorkerSketch{{Name: "a/0", State: summary.SketchLost}}
	for _, members := range []int{1, 20, 1000} {
		rhythm := summary.SketchRhythm(members, summary.SketchLimit(members))
		now := time.Now()
		s := &sketcher{}
		for i, step := range []struct {
			after   time.Duration
			workers []summary.WorkerSketch
			want    bool
		}{
			{0, ready, true},
			{rhythm / 2, busier, false},
			{rhythm / 4, lost, true},
			{rhythm / 2, lost, false},
			{rhythm / 2, lost, true},
			{1, append(lost, ready...), true},
		} {
			now = now.Add(step.after)
			if got := s.due(now, step.workers, members); got != step.want {
				t.Errorf("%d members, step %d: due %v", members, i, got)
			}
		}
	}
}

func TestRankSketch(t *testing.T) {
	a := newAgent(t, newKey)
	r := a.addRank()
	t0 := time.Now()
	prompt := store(1, 100)
	r.apply(engine.Batch{Events: []blocktable.Event{prompt}, Received: t0})
	r.tick(t0)
	w, _ := r.sketch(t0, 8)
	k, ok := keyAt(prompt.Tokens, 1536)
	if !ok || w.Name != "vllm-8000/0" || w.State != summary.SketchReady || len(w.Roots) != 1 || w.Roots[0].DepthTokens != 1536 || w.Roots[0].Key != k {
		t.Errorf("%+v, want the root %x", w, k)
	}
	r.setHealth(false, "no answer")
	if w, _ := r.sketch(t0, 8); w.State != summary.SketchStalled {
		t.Errorf("an engine that does not answer: state %v", w.State)
	}
	r.reset(engine.ResetGone)
	if w, _ := r.sketch(t0, 8); w.State != summary.SketchLost {
		t.Errorf("state %v", w.State)
	}
	r.setCoverage(engine.CoverageNone, "")
	if w, _ := r.sketch(t0, 8); len(w.Roots) != 0 {
		t.Error("roots of a cache that nobody sees")
	}
}

func keyAt(tokens []uint32, depth int) (prefix.Key, bool) {
	p := &prefix.Probe{}
	p.ResetTokens(tokens, prefix.NewKeyer(newKey, prefix.Domain{Model: "m"}))
	return p.At(depth)
}

// How long a worker may show no progress is the fleet's to say: workers that
// are known hear of it, and those that come later.
func TestNoProgressIsOfTheFleet(t *testing.T) {
	a := newAgent(t, newKey)
	known := a.addRank()
	for ms, want := range map[float64]time.Duration{42_000: 42 * time.Second, .5: 500 * time.Microsecond, -1: 0, math.NaN(): 0, math.Inf(1): 0} {
		a.lanes.takePolicy(&waypostv1.PolicyPush{NoProgressMs: &ms})
		later := a.addRank()
		if known.noProgressAfter != want || later.noProgressAfter != want {
			t.Errorf("%v ms: %v, %v for a later one, want %v", ms, known.noProgressAfter, later.noProgressAfter, want)
		}
	}
}

func TestCordonedWorkersDrain(t *testing.T) {
	a := newAgent(t, newKey)
	a.engines = []*watched{{target: engine.Target{Name: "x"}, gpus: []string{"GPU-a", "GPU-b"}}, {target: engine.Target{Name: "y"}, gpus: []string{"GPU-c"}}}
	for selector, want := range map[string][3]bool{
		"gpu-01": {true, true, true}, "gpu-01/x": {true, true, false}, "gpu-01/x/1": {false, true, false}, "gpu-02": {}, "": {},
		"gpu-b": {true, true, false}, "GPU-c": {false, false, true}, "GPU-d": {},
	} {
		a.lanes.takePolicy(&waypostv1.PolicyPush{Cordons: []*waypostv1.Cordon{{Selector: &selector}}})
		on := a.lanes.cordonedHere()
		if got := [3]bool{on("x", 0), on("x", 1), on("y", 0)}; got != want {
			t.Errorf("%q cordons %v, want %v", selector, got, want)
		}
	}
}
