package agent

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"waypost/agent/engine"
	"waypost/gossip/ledger"
	"waypost/gossip/mesh"
	"waypost/gossip/summary"
)

const (
	// sketchLook is how often it is looked at whether a sketch is due; a change of
	// health or drain state is sent as soon as it is seen.
	sketchLook = time.Second
	// sketchRoots is how many prefixes of a worker a sketch may name; how many fit
	// depends on the number of members.
	sketchRoots = 64
)

// sketcher decides when a sketch is sent.
type sketcher struct {
	sent   time.Time             // zero: never
	states []summary.SketchState // of the latest one
}

// due says whether a sketch with these workers is to be sent now in a mesh of so
// many members: its rhythm is over, or a worker's state is another one.
func (s *sketcher) due(now time.Time, workers []summary.WorkerSketch, members int) bool {
	states := make([]summary.SketchState, len(workers))
	for i := range workers {
		states[i] = workers[i].State
	}
	rhythm := summary.SketchRhythm(members, summary.SketchLimit(members))
	if !s.sent.IsZero() && now.Sub(s.sent) < rhythm && slices.Equal(states, s.states) {
		return false
	}
	s.sent, s.states = now, states
	return true
}

// sketching tells the mesh of this host's workers until the agent ends.
func (a *Agent) sketching() {
	t := time.NewTicker(sketchLook)
	defer t.Stop()
	s := &sketcher{}
	for {
		a.sketch(s, time.Now())
		select {
		case <-a.ctx.Done():
			return
		case <-t.C:
		}
	}
}

// sketch sends a sketch if one is due.
func (a *Agent) sketch(s *sketcher, now time.Time) {
	members := 0
	for _, m := range a.mesh.Members() {
		if m.Status == mesh.StatusAlive {
			members++
		}
	}
	sk := summary.Sketch{KeyID: a.prefixKeys[0].IDUint32()}
	cordoned := a.lanes.cordonedHere()
	verdict := a.gpuVerdicts()
	for _, r := range a.ranks() {
		w, age := r.sketch(now, sketchRoots)
		if w.State != summary.SketchLost && strings.HasPrefix(verdict(r.engine), "exclude") {
			w.State = summary.SketchFaulty
		} else if w.State == summary.SketchReady && cordoned(r.engine, r.number) {
			w.State = summary.SketchDraining
		}
		sk.Age = max(sk.Age, age)
		if len(sk.Workers) < summary.MaxSketchWorkers {
			sk.Workers = append(sk.Workers, w)
		}
	}
	if len(sk.Workers) == 0 || !s.due(now, sk.Workers, members) {
		return
	}
	b, err := summary.AppendSketch(nil, &sk, min(summary.SketchLimit(members), a.mesh.MaxSketchBytes()))
	if err == nil {
		err = a.mesh.SetSketch(b)
	}
	if err != nil {
		a.log.Debug("no sketch for the mesh", "error", err)
	}
}

// cordonedHere returns who of this host's workers the newest policy cordons.
func (h *lanes) cordonedHere() func(engineName string, number int) bool {
	gpus := map[string][]string{}
	for _, w := range h.a.watching() {
		gpus[w.target.Name] = w.gpuUUIDs()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	selectors := map[string]bool{}
	for _, c := range h.policy.GetCordons() {
		selectors[c.GetSelector()] = true
	}
	host := h.a.name
	if h.a.wish.proto() != nil {
		selectors[host] = true
	}
	return func(engineName string, number int) bool {
		name := host + "/" + engineName
		if selectors[host] || selectors[name] || selectors[name+"/"+strconv.Itoa(number)] {
			return true
		}
		for selector := range selectors {
			if slices.ContainsFunc(gpus[engineName], func(uuid string) bool { return strings.EqualFold(uuid, selector) }) {
				return true
			}
		}
		return false
	}
}

// sketch is what a sketch says of the rank, and how old that is.
func (r *rank) sketch(now time.Time, roots int) (w summary.WorkerSketch, age time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rep := r.loadReport(now)
	w = summary.WorkerSketch{Name: r.engine + "/" + strconv.Itoa(r.number), State: sketchStates[rep.load.State]}
	if q := rep.load.QueueMs; q != nil {
		w.Load = summary.LoadClassOf(*q)
	}
	if rep.load.AgeMs != nil {
		age = time.Duration(*rep.load.AgeMs * float64(time.Millisecond))
	}
	if r.encoder != nil && r.coverage != engine.CoverageNone {
		w.Roots = r.encoder.HotRoots(roots)
	}
	return w, age
}

// sketchStates are the states of a load report in a sketch; one that is not
// here is unknown.
var sketchStates = map[ledger.State]summary.SketchState{
	ledger.StateReady: summary.SketchReady, ledger.StateStarting: summary.SketchStarting,
	ledger.StateLost: summary.SketchLost, ledger.StateStalled: summary.SketchStalled,
}
