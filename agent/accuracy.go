package agent

import (
	"math"
	"time"

	"waypost/agent/engine"
	"waypost/gossip/accuracy"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// accuracyEvery is how often a lane hears again what outcomes taught, though
// nothing came to it: what is old counts less.
const accuracyEvery = 10 * time.Second

// toldAccuracy is what one lane was told last of what was learnt of one worker.
type toldAccuracy struct {
	process, version uint64
	at               time.Time
	// transfers is the seq of the last transfer told.
	transfers uint64
}

// accuracyNow is how right predictions about the present engine life were. A
// new life starts with nothing; one that a former agent knew, with what it knew.
// The lock is held.
func (r *rank) accuracyNow() *accuracy.Worker {
	if r.accuracy != nil && r.accuracyOf == r.process {
		return r.accuracy
	}
	r.accuracy, r.accuracyOf = accuracy.New(accuracy.DefaultLimits()), r.process
	if r.restoreAccuracy != nil {
		if state, ok := r.restoreAccuracy(r.process); ok {
			if err := r.accuracy.Import(r.ms(time.Now()), state); err != nil {
				r.faults["learnt_refused"]++
			}
		}
	}
	return r.accuracy
}

// trustNow is the factor on credit for the present engine life's cache; NaN: too
// few outcomes were seen. The lock is held.
func (r *rank) trustNow(now time.Time) float64 {
	if !r.known {
		return math.NaN()
	}
	report := r.accuracyNow().Report(r.ms(now))
	if report.Outcomes == 0 {
		return math.NaN()
	}
	prior := accuracy.PriorInferred
	switch r.coverage {
	case engine.CoverageFull:
		prior = accuracy.PriorLive
	case engine.CoveragePartial:
		prior = accuracy.PriorPartial
	}
	limits := accuracy.DefaultLimits()
	return report.Trust(&limits, 0, prior)
}

// takeOutcomes learns from what a coordinator saw of the present engine life.
func (r *rank) takeOutcomes(coordinator uint64, list []lane.Observed, now time.Time) (news bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range list {
		if o := &list[i]; r.known && o.EngineProcess == r.process {
			o.BlockTokens = r.facts.BlockTokens
			r.accuracyNow().Observe(r.ms(now), coordinator, &o.Observation)
			news = true
		}
	}
	return news
}

// accuracyAfter is what outcomes taught, if a lane that was told before needs
// to hear it.
func (r *rank) accuracyAfter(told toldAccuracy, now time.Time) (*waypostv1.WorkerAccuracy, toldAccuracy) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.known {
		return nil, told
	}
	a := r.accuracyNow()
	if a.Version() == told.version && r.process == told.process && now.Sub(told.at) < accuracyEvery {
		return nil, told
	}
	report := a.Report(r.ms(now))
	if told.at.IsZero() && report.Empty() {
		return nil, told
	}
	told.process, told.version, told.at = r.process, a.Version(), now
	return lane.AccuracyOf(&report), told
}

// takeOutcomes hands outcomes to the worker they are of, and reports back at
// once: all coordinators learn of them there.
func (h *lanes) takeOutcomes(l *lane.Lane, f *waypostv1.OutcomeFrame) {
	h.hand(l, "outcomes", f.GetIndex(), f.GetCoordinator(), func(r *rank) (bool, error) {
		list, err := lane.ObservationsOf(f)
		if err != nil {
			return false, err
		}
		return r.takeOutcomes(f.GetCoordinator(), list, time.Now()), nil
	})
}

// nextAccuracy is what a lane has yet to hear of how right predictions about a
// worker were.
func (h *lanes) nextAccuracy(l *lane.Lane, r *rank, now time.Time) *waypostv1.WorkerAccuracy {
	h.mu.Lock()
	defer h.mu.Unlock()
	told := h.toldAccuracy[l]
	if told == nil {
		return nil // the lane is down
	}
	m, next := r.accuracyAfter(told[r.index], now)
	told[r.index] = next
	return m
}
