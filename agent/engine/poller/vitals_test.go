package poller

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"waypost/agent/engine"
)

// healthSink notes what is told of an engine's health; nothing else may be.
type healthSink struct {
	engine.Sink
	told []string
}

func (s *healthSink) Health(up bool, reason string) {
	s.told = append(s.told, fmt.Sprintf("%v %s", up, reason))
}

func TestVitals(t *testing.T) {
	slow, refused := errors.New("slow"), fmt.Errorf("dial: %w", syscall.ECONNREFUSED)
	type poll struct {
		err      error
		repeated bool
		unknown  bool // nothing is known of the engine yet
		want     Change
	}
	times := func(n int, p poll) (out []poll) {
		for range n {
			out = append(out, p)
		}
		return out
	}
	for name, c := range map[string]struct {
		polls []poll
		told  []string
	}{
		"it serves, told once":            {times(3, poll{}), []string{"true "}},
		"errors may pass":                 {append(times(4, poll{err: slow}), poll{}), []string{"true "}},
		"but not five in a row":           {append(times(6, poll{err: slow}), poll{}), []string{"false slow", "true "}},
		"of an engine of no known facts":  {[]poll{{err: slow, unknown: true}}, []string{"false slow"}},
		"one refusal is no end":           {[]poll{{err: refused}, {err: slow}, {err: refused}, {}}, []string{"true "}},
		"two are, and an answer is a new": {[]poll{{}, {err: refused}, {err: refused, want: Gone}, {err: refused}, {want: Back}, {}}, []string{"true ", "false dial: connection refused", "true "}},
		"a repeated one is no answer":     {[]poll{{err: refused}, {err: refused, repeated: true}, {err: refused, want: Gone}}, []string{"false dial: connection refused"}},
	} {
		var v Vitals
		s := &healthSink{}
		for i, p := range c.polls {
			if got := v.Take(p.err, Refused(p.err), p.repeated); got != p.want {
				t.Errorf("%s: poll %d says %d, want %d", name, i, got, p.want)
			}
			v.Tell(s, p.err, !p.unknown)
		}
		if diff := cmp.Diff(c.told, s.told); diff != "" {
			t.Errorf("%s: told (-want +got):\n%s", name, diff)
		}
	}
}
