package registry

import "testing"

// Without groups any host may carry a share of any other's engine, and none must
// be told of; with some, those of one group, and all must.
func TestMayShare(t *testing.T) {
	declared, may := EmptyFleet().MayShare("gpu-01")
	if declared || may != nil {
		t.Errorf("declared %v, any host %v", declared, may == nil)
	}
	f := mustFleet(t, "[[group]]\nname = \"a\"\nhosts = [\"gpu-0[1-2]\"]\n[[group]]\nname = \"b\"\nhosts = [\"gpu-02\", \"gpu-03\"]\n")
	for _, c := range []struct {
		front    string
		declared bool
		with     map[string]bool
	}{
		{"gpu-01", true, map[string]bool{"gpu-02": true, "gpu-03": false}},
		{"gpu-02", true, map[string]bool{"gpu-01": true, "gpu-03": true, "gpu-04": false}},
		{"gpu-04", false, map[string]bool{"gpu-01": false, "gpu-05": false}},
	} {
		declared, may := f.MayShare(c.front)
		if declared != c.declared {
			t.Errorf("%s is in a group: %v", c.front, declared)
		}
		for other, want := range c.with {
			if may(other) != want {
				t.Errorf("%s carries a share of %s's engine: %v", other, c.front, may(other))
			}
		}
	}
}
