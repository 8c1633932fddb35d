package lane

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var (
	errAlias   = errors.New("another address leads to the same coordinator")
	errStalled = errors.New("stalled: nothing could be written")
)

// aliasPause is waited after the coordinator has preferred another lane of this
// process: by then that lane is known here and this address waits for its end.
const aliasPause = time.Second

// refusedError is a coordinator's no.
type refusedError struct{ why string }

func (e *refusedError) Error() string { return "refused by the coordinator: " + e.why }

// target dials one address for as long as it is wanted.
type target struct {
	d       *Dialer
	address string
	rng     *rand.Rand // of the run goroutine
	back    backoff
	changed chan struct{} // one-place flag: wanted changed

	mu     sync.Mutex
	wanted bool
	state  LaneStatus
}

func newTarget(d *Dialer, address string) *target {
	return &target{
		d: d, address: address, rng: newRand(), wanted: true, changed: make(chan struct{}, 1),
		back:  backoff{least: d.opts.BackoffLeast, most: d.opts.BackoffMost},
		state: LaneStatus{Address: address, State: StateConnecting, Since: time.Now()},
	}
}

func (t *target) setWanted(wanted bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.wanted != wanted {
		t.wanted = wanted
		signal(t.changed)
	}
}

func (t *target) isWanted() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.wanted
}

func (t *target) status() LaneStatus {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state
}

// enter changes the state shown; err nil keeps the last failure shown.
func (t *target) enter(state LaneState, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state.State != state {
		t.state.State, t.state.Since = state, time.Now()
	}
	t.state.Session = 0
	if err != nil {
		t.state.Error = err.Error()
	}
}

func (t *target) enterUp(l *Lane) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.state = LaneStatus{Address: t.address, Coordinator: l.name, State: StateUp, Since: time.Now(), Session: l.session}
}

func (t *target) run() {
	defer t.d.wg.Done()
	for {
		pause := t.attempt()
		timer := time.NewTimer(pause)
		for waiting := true; waiting && t.d.ctx.Err() == nil && t.isWanted(); {
			select {
			case <-timer.C:
				waiting = false
			case <-t.changed:
			case <-t.d.ctx.Done():
			}
		}
		timer.Stop()
		if (t.d.ctx.Err() != nil || !t.isWanted()) && t.d.forget(t) {
			return
		}
	}
}

// attempt runs one lane and returns the pause before the next.
func (t *target) attempt() time.Duration {
	// An address that leads to a coordinator with a lane would only replace that
	// lane; it waits until that one ends.
	if l := t.d.other(t.status().Coordinator, t); l != nil {
		t.enter(StateAlias, nil)
		select {
		case <-l.Done():
		case <-t.changed:
			signal(t.changed)
		case <-t.d.ctx.Done():
		}
		return t.back.pause(t.rng)
	}
	t.enter(StateConnecting, nil)
	began := time.Now()
	wasUp, err := t.d.runLane(t)
	if t.d.ctx.Err() != nil {
		t.enter(StateDown, context.Canceled)
		return 0
	}
	var refused *refusedError
	switch {
	case errors.Is(err, errAlias), status.Code(err) == codes.Aborted:
		t.enter(StateAlias, nil)
		t.back.reset()
		return aliasPause/2 + jitter(aliasPause, t.rng)
	case errors.As(err, &refused):
		t.enter(StateRefused, err)
		t.d.metrics.refused.Inc()
		t.d.log.Warn("lane refused", "coordinator", t.address, "reason", refused.why, "retry_in", t.d.opts.RefusedPause)
		return jitter(t.d.opts.RefusedPause, t.rng)
	}
	t.enter(StateDown, err)
	if wasUp && time.Since(began) > steadyAfter {
		t.back.reset()
	}
	if wasUp {
		t.d.log.Warn("lane down", "coordinator", t.address, "error", err)
	} else {
		t.d.log.Debug("lane not reached", "coordinator", t.address, "error", err)
	}
	return t.back.pause(t.rng)
}
