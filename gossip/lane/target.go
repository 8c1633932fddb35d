package lane

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var errStalled = errors.New("stalled: nothing could be written")

// aliasPause is waited after a coordinator has preferred another lane of this
// process and, being of an older version, has not said which.
const aliasPause = time.Second

// aliasError says that an address leads to a coordinator with another lane.
type aliasError struct {
	coordinator string
	session     uint64 // of the other lane; 0: the one that is up
}

func (e *aliasError) Error() string {
	return fmt.Sprintf("another address leads to the same coordinator %q", e.coordinator)
}

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

// enterAlias shows whose address it is.
func (t *target) enterAlias(coordinator string) {
	t.enter(StateAlias, nil)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.state.Coordinator = coordinator
}

// await waits for the end of a lane, or until this address is given up.
func (t *target) await(l *Lane) {
	select {
	case <-l.Done():
	case <-t.changed:
		signal(t.changed)
	case <-t.d.ctx.Done():
	}
}

// attempt runs one lane and returns the pause before the next.
func (t *target) attempt() time.Duration {
	// An address that leads to a coordinator with a lane would only replace that
	// lane; it waits until that one ends.
	if name := t.status().Coordinator; name != "" {
		if l := t.d.other(name, t); l != nil {
			t.enterAlias(name)
			t.await(l)
			return t.back.pause(t.rng)
		}
	}
	t.enter(StateConnecting, nil)
	began := time.Now()
	wasUp, err := t.d.runLane(t)
	if t.d.ctx.Err() != nil {
		t.enter(StateDown, context.Canceled)
		return 0
	}
	var refused *refusedError
	var alias *aliasError
	switch {
	case errors.As(err, &alias):
		// The other lane may not be up here yet; what counts is that it is open.
		t.enterAlias(alias.coordinator)
		t.back.reset()
		if l := t.d.laneOf(alias.session); l != nil {
			t.await(l)
		}
		return t.back.pause(t.rng)
	case status.Code(err) == codes.Aborted:
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
