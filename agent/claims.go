package agent

import (
	"fmt"
	"math"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/queue"
	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// estimateFacts gives the facts of the engine to the queue estimate, which is
// made with the first ones: with what was learnt before a restart of the agent,
// and with the lanes that are up already. The lock is held.
func (r *rank) estimateFacts() {
	facts := queue.Facts{
		Model: ledger.PriorFor(ledger.Class{Engine: r.kind, Model: r.facts.Model}).Model, StepTokens: r.facts.StepTokens,
		Unordered:   r.facts.Unordered,
		BlockTokens: r.facts.BlockTokens, PoolBlocks: r.facts.PoolBlocks, MaxRunning: r.facts.MaxRunning,
	}
	if r.estimate == nil {
		estimate, err := queue.New(queue.Options{Facts: facts, AgentProcess: r.agentProcess, NoProgressAfter: r.noProgressAfter})
		if err != nil {
			// The adapter bounds the facts; what is left to refuse leaves the
			// queue unknown.
			r.faults["facts_refused"]++
			return
		}
		r.estimate = estimate
		r.relearn()
		r.toldModel = r.stepModel()
		for _, coordinator := range r.lanes {
			r.estimate.LaneUp(time.Now(), coordinator)
		}
	} else if err := r.estimate.SetFacts(facts); err != nil {
		r.faults["facts_refused"]++
	}
	r.estimate.SetProcess(r.process)
}

// setNoProgressAfter sets how long the worker may show no sign of life while it
// has requests; 0: the estimate's own.
func (r *rank) setNoProgressAfter(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.noProgressAfter = d
	if r.estimate != nil {
		r.estimate.SetNoProgressAfter(d)
	}
}

// relearn starts from what was learnt before, if it is of this worker.
func (r *rank) relearn() {
	if r.restore == nil {
		return
	}
	state, ok := r.restore(r.facts, r.process)
	if !ok {
		return
	}
	if err := r.estimate.Import(state); err != nil {
		r.faults["learnt_refused"]++
	}
}

// stepModel is the step model in force: learnt, or the prior of the class.
func (r *rank) stepModel() ledger.StepModel {
	if r.estimate == nil {
		return ledger.PriorFor(ledger.Class{Engine: r.kind, Model: r.facts.Model}).Model
	}
	return r.estimate.StepModel()
}

// helloOutdated reports once that the hello says something else than what is known
// now: another step model is in force than when it was asked last, or the engine
// turned out to have windows, or none.
func (r *rank) helloOutdated() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	model := r.stepModel()
	if !r.known || model == r.toldModel && r.windowed() == r.toldWindowed {
		return false
	}
	r.toldModel, r.toldWindowed = model, r.windowed()
	return true
}

// windowed says that groups of the engine's cache hold only the last blocks of a
// prefix, as its events tell.
func (r *rank) windowed() bool { return r.table != nil && r.table.Windowed() }

// laneUp and laneDown tell of a lane; how far a coordinator's claims were taken
// in is remembered while it has one.
func (r *rank) laneUp(l *lane.Lane, coordinator uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, known := r.lanes[l]; known {
		return
	}
	r.lanes[l] = coordinator
	if r.estimate != nil {
		r.estimate.LaneUp(time.Now(), coordinator)
	}
}

func (r *rank) laneDown(l *lane.Lane) {
	r.mu.Lock()
	defer r.mu.Unlock()
	coordinator, known := r.lanes[l]
	if !known {
		return
	}
	delete(r.lanes, l)
	delete(r.shown, l)
	if r.estimate != nil {
		r.estimate.LaneDown(time.Now(), coordinator)
	}
}

// takeClaims takes claims in. due says that a load report is worth sending at
// once: of every claim that was taken in or fenced, whatever it adds, as
// coordinators that do not hear of each other do by the echo.
func (r *rank) takeClaims(f *ledger.ClaimFrame) (due bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.estimate == nil {
		// Nothing was reported of this worker yet, so nothing can be meant.
		return false, nil
	}
	if len(f.Offers) > 0 {
		r.endHold()
	}
	now := time.Now()
	in, err := r.estimate.Claims(now, f)
	if err != nil {
		return false, err
	}
	if in.Taken > 0 {
		r.followClaims(now, f)
		r.wanted.claims(f)
	}
	return in.Taken+in.Fenced > 0, nil
}

// takeMarks takes marks on claims.
func (r *rank) takeMarks(f *ledger.MarkFrame) (due bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.estimate == nil {
		return false, nil
	}
	now := time.Now()
	moved, err := r.estimate.Marks(now, f)
	if err != nil {
		return false, err
	}
	return r.followMarks(now, f) || moved && r.due(now), nil
}

// evidence tells the estimate what an applied batch says of the queue and of
// the age of cached blocks. What was replayed says nothing of the present. It
// reports whether the queue may be another one now. The lock is held.
func (r *rank) evidence(b *engine.Batch) (moved bool) {
	stores := r.recorder.Take()
	if b.Replayed || r.estimate == nil || r.holding {
		return false
	}
	at, tokens := b.Received.Add(-b.Age), 0
	for i := range b.Events {
		e := &b.Events[i]
		switch {
		case e.Op == blocktable.OpStore:
			tokens += len(e.Tokens)
			if e.Medium == blocktable.MediumGPU {
				r.estimate.BlocksStored(at, e.Hashes)
			}
		case e.Op == blocktable.OpRemove && e.Medium == blocktable.MediumGPU:
			r.estimate.BlocksRemoved(at, e.Hashes)
		case e.Op == blocktable.OpClear:
			r.estimate.CacheCleared()
		}
	}
	r.estimate.Stored(at, tokens)
	return len(stores) > 0 && r.estimate.Stores(at, stores)
}

// due says that a load report is worth sending at once, after a fact: that the
// queue's end jumped from what the newest LOAD of any of the lanes showed. That
// may be a LOAD of the period, so that a drift is told by those alone; and it is
// held against each lane, as their periods begin at moments of their own and what
// one was told the others were not. The lock is held.
//
// A lane that no LOAD was built for since the latest news has one to come, which
// tells what is known by then: it is not asked about, and if there are only such
// lanes the queue is not looked at. Without a lane it is nevertheless: what is
// learnt of the engine's speed rests on it.
func (r *rank) due(now time.Time) bool {
	news := r.news.Load()
	told := len(r.lanes) == 0
	for _, s := range r.shown {
		told = told || s.news == news
	}
	if !told {
		return false
	}
	end := r.estimate.End(now)
	for _, s := range r.shown {
		if s.news == news && end.JumpedFrom(s.end) {
			return true
		}
	}
	return false
}

// claimCounts is what the metrics tell of a worker's claims.
type claimCounts struct {
	queue.Counts
	// known says that there is an estimate; Open claims wait for their first
	// token, kept ones are remembered.
	known      bool
	open, kept int
	// lagMs is the learnt lag of the counters; NaN: not known.
	lagMs float64
	// prefillTokensPerSec is the speed of a full prefill step.
	prefillTokensPerSec float64
}

func (r *rank) claimCounts() claimCounts {
	c := claimCounts{Counts: r.estimate.Counts(), known: true, lagMs: r.estimate.LagMs(), prefillTokensPerSec: math.NaN()}
	c.open, c.kept = r.estimate.OpenClaims()
	steps := ledger.NewSteps(r.estimate.StepModel(), r.facts.StepTokens, 0)
	if ms := steps.PrefillMs(0, steps.BudgetTokens()); ms > 0 {
		c.prefillTokensPerSec = float64(steps.BudgetTokens()) / ms * 1000
	}
	return c
}

// takeClaims hands a frame of claims to its worker and reports back at once:
// coordinators that do not hear of each other meet in these reports.
func (h *lanes) takeClaims(l *lane.Lane, f *waypostv1.ClaimFrame) {
	h.hand(l, "claims", f.GetIndex(), f.GetCoordinator(), func(r *rank) (bool, error) {
		claims := lane.ClaimsOf(f)
		return r.takeClaims(&claims)
	})
}

func (h *lanes) takeMarks(l *lane.Lane, f *waypostv1.MarkFrame) {
	h.hand(l, "marks", f.GetIndex(), f.GetCoordinator(), func(r *rank) (bool, error) {
		marks := lane.MarksOf(f)
		return r.takeMarks(&marks)
	})
}

// hand hands a frame to the worker it names. A coordinator speaks for itself
// only.
func (h *lanes) hand(l *lane.Lane, kind string, index uint32, coordinator uint64, take func(*rank) (due bool, err error)) {
	due, err := false, error(nil)
	r := h.a.rank(index)
	_, process := l.Coordinator()
	switch {
	case r == nil:
		err = fmt.Errorf("index: %d is no worker of this host", index)
	case coordinator != process:
		err = fmt.Errorf("coordinator: %016x is not the lane's %016x", coordinator, process)
	default:
		due, err = take(r)
	}
	if err != nil {
		h.a.framesRefused.WithLabelValues(kind).Inc()
		h.a.log.Debug("frame of a coordinator refused", "kind", kind, "coordinator", name(l), "error", err)
		return
	}
	if due {
		h.tellNews(r)
	}
}
