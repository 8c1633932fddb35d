package coordinator

import (
	"context"
	"sync"
	"time"

	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// outcomesEvery is how often agents are told of outcomes: a busy worker has many a
// second, each of which would wake its agent and have it report to all coordinators.
const outcomesEvery = 250 * time.Millisecond

// outcomes are those that agents are yet to be told of. The first after a pause is
// told at once, what comes within a period of it together.
type outcomes struct {
	mu      sync.Mutex
	waiting map[string][]lane.Observed // by worker; at most MaxOutcomes each
	ended   bool                       // nothing waits any more
	some    chan struct{}              // one-place flag
}

func newOutcomes() *outcomes {
	return &outcomes{waiting: map[string][]lane.Observed{}, some: make(chan struct{}, 1)}
}

// add puts an outcome to those of its worker. What is returned is to be told now,
// a full lot, or after the end any; nil: nothing is.
func (o *outcomes) add(worker string, observed *lane.Observed) (due []lane.Observed) {
	o.mu.Lock()
	defer o.mu.Unlock()
	list := append(o.waiting[worker], *observed)
	if len(list) >= lane.MaxOutcomes || o.ended {
		delete(o.waiting, worker)
		return list
	}
	o.waiting[worker] = list
	select {
	case o.some <- struct{}{}:
	default:
	}
	return nil
}

// take gives all that wait; last: nothing will again.
func (o *outcomes) take(last bool) map[string][]lane.Observed {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = o.ended || last
	all := o.waiting
	o.waiting = map[string][]lane.Observed{}
	return all
}

// run tells of outcomes until ctx ends, of what waits then too.
func (o *outcomes) run(ctx context.Context, tell func(worker string, list []lane.Observed)) {
	pause := time.NewTimer(outcomesEvery)
	defer pause.Stop()
	for ctx.Err() == nil {
		select {
		case <-o.some:
		case <-ctx.Done():
		}
		for worker, list := range o.take(false) {
			tell(worker, list)
		}
		pause.Reset(outcomesEvery)
		select {
		case <-pause.C:
		case <-ctx.Done():
		}
	}
	for worker, list := range o.take(true) {
		tell(worker, list)
	}
}

// report has a worker's agent told of an outcome, once: one that does not get
// through teaches nothing.
func (h *lanes) report(worker string, o *lane.Observed) {
	if due := h.outcomes.add(worker, o); due != nil {
		h.tellOutcomes(worker, due)
	}
}

func (h *lanes) tellOutcomes(worker string, list []lane.Observed) {
	host, index, ok := h.where(worker)
	if !ok {
		return
	}
	frame := lane.OutcomeFrameOf(h.c.process, index, list)
	if !h.send(host, &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Outcomes{Outcomes: frame}}) {
		h.c.metrics.framesUnsent.Inc()
	}
}
