package lane

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"waypost/gossip/boundary"
	waypostv1 "waypost/proto/waypost/v1"
)

// A boundary comes back from the wire as it was, and one that is out of bounds
// does not.
func TestBoundaryOnTheWire(t *testing.T) {
	for name, v := range map[string]*boundary.Vector{
		"measured": {Sets: []int{1, 2}, KeyID: 7, Rule: "adapter name, salt", Probes: []boundary.Measurement{
			{Part: boundary.PartRaw, Number: 1, Run: 3, Tokens: []boundary.Token{5, boundary.Masked, 1 << 31}},
			{Part: boundary.PartChat, Number: 2, Run: 1, Tokens: []boundary.Token{}},
		}},
		"declared": {Declared: "qwen3 of may"},
		"nothing":  {},
	} {
		m := BoundaryOf("vllm-8000", v)
		back, err := VectorOf(m)
		if err != nil || m.GetEngine() != "vllm-8000" {
			t.Errorf("%s: %q, %v", name, m.GetEngine(), err)
		}
		if diff := cmp.Diff(v, back); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	long := &waypostv1.EngineBoundary{Probes: []*waypostv1.MeasuredProbe{{Part: new("raw"), Probe: new(uint32(1)), Tokens: make([]uint32, boundary.MaxProbeTokens+1)}}}
	if _, err := VectorOf(long); !errors.Is(err, boundary.ErrVector) {
		t.Errorf("%v", err)
	}
}
