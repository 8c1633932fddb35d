package agent

import (
	"math"
	"strings"
	"testing"
	"time"

	"waypost/gossip/mesh"
	waypostv1 "waypost/proto/waypost/v1"
)

// What a coordinator asks for is checked before anything is sent.
func TestLinkProbeAsks(t *testing.T) {
	good := func() *waypostv1.LinkProbeAsk {
		return &waypostv1.LinkProbeAsk{Token: []byte("0123456789abcdef"), MaxBytes: new(1e6), MaxMs: new(1500.)}
	}
	token, limits, err := linkProbeOf(good())
	if err != nil || token != mesh.ProbeToken([]byte("0123456789abcdef")) || limits != (mesh.ProbeLimits{Bytes: 1e6, Time: 1500 * time.Millisecond}) {
		t.Errorf("%v, %v, %v", token, limits, err)
	}
	for want, change := range map[string]func(*waypostv1.LinkProbeAsk){
		"token has 0":       func(a *waypostv1.LinkProbeAsk) { a.Token = nil },
		"token has 15":      func(a *waypostv1.LinkProbeAsk) { a.Token = a.Token[1:] },
		"token has 17":      func(a *waypostv1.LinkProbeAsk) { a.Token = append(a.Token, 0) },
		"max_bytes: 0":      func(a *waypostv1.LinkProbeAsk) { a.MaxBytes = nil },
		"max_bytes: NaN":    func(a *waypostv1.LinkProbeAsk) { a.MaxBytes = new(math.NaN()) },
		"max_bytes: 1e+300": func(a *waypostv1.LinkProbeAsk) { a.MaxBytes = new(1e300) },
		"max_ms: 0":         func(a *waypostv1.LinkProbeAsk) { a.MaxMs = nil },
		"max_ms: NaN":       func(a *waypostv1.LinkProbeAsk) { a.MaxMs = new(math.NaN()) },
		"max_ms: 10000.5":   func(a *waypostv1.LinkProbeAsk) { a.MaxMs = new(10_000.5) },
	} {
		a := good()
		change(a)
		if _, _, err := linkProbeOf(a); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", a, err, want)
		}
	}
}
