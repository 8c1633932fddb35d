package poller

import (
	"errors"
	"syscall"
	"time"

	"waypost/agent/engine"
)

const (
	// HealthEvery is how often an engine is asked whether it serves.
	HealthEvery = 5 * time.Second

	refusalsToGone = 2
	errorsToDown   = 5
)

// Change is what a poll says of the engine's process.
type Change int

// The changes.
const (
	Unchanged Change = iota
	// Gone: it has ended.
	Gone
	// Back: one serves again.
	Back
)

// Refused says that a connection was refused.
func Refused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// Vitals turns the outcomes of polls into the health of an engine. The zero
// value has seen none.
type Vitals struct {
	refused, failed int
	gone, up, told  bool
	reason          string
}

// Take takes the outcome of a poll. refused says that an error means that the
// engine's process has ended, as a refused connection does, whatever its other
// sockets still answer; other errors may pass. A repeated error is no answer of
// its own.
func (v *Vitals) Take(err error, refused, repeated bool) Change {
	if err == nil {
		back := v.gone
		v.refused, v.failed, v.gone = 0, 0, false
		if back {
			return Back
		}
		return Unchanged
	}
	v.failed++
	switch {
	case repeated:
	case refused:
		v.refused++
	default:
		v.refused = 0
	}
	if v.refused >= refusalsToGone && !v.gone {
		v.gone = true
		return Gone
	}
	return Unchanged
}

// Tell tells the health after an outcome, if it is another one. known says that
// the engine's facts are known: one of which nothing is known is not up.
func (v *Vitals) Tell(sink engine.Sink, err error, known bool) {
	switch {
	case err == nil:
		v.tell(sink, true, "")
	case v.gone || v.failed >= errorsToDown || !known:
		v.tell(sink, false, err.Error())
	}
}

func (v *Vitals) tell(sink engine.Sink, up bool, reason string) {
	if v.told && up == v.up && (up || reason == v.reason) {
		return
	}
	v.told, v.up, v.reason = true, up, reason
	sink.Health(up, reason)
}
