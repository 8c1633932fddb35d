package prefix

import (
	"slices"
	"testing"
)

func TestMask(t *testing.T) {
	key, other := ClusterKey{1}, ClusterKey{2}
	plain := []uint64{7, 7, 0, 1 << 63}
	masked := slices.Clone(plain)
	key.Mask("a", masked)
	for i := range plain {
		if masked[i] == plain[i] || i > 0 && masked[i] == masked[i-1] {
			t.Errorf("value %d is not hidden", i)
		}
	}
	for _, wrong := range []struct {
		key  ClusterKey
		name string
	}{{other, "a"}, {key, "b"}} {
		got := slices.Clone(masked)
		wrong.key.Mask(wrong.name, got)
		for i := range got {
			if got[i] == plain[i] {
				t.Errorf("value %d is shown by another key or name", i)
			}
		}
	}
	key.Mask("a", masked)
	if !slices.Equal(masked, plain) {
		t.Errorf("shown again: %v", masked)
	}
}

// PointsOf tells what a probe of the same tokens looks up.
func TestPointsOfIsWhatProbesLookUp(t *testing.T) {
	tokens := make([]uint32, 2*ChunkTokens+5*PointTokens+3)
	for i := range tokens {
		tokens[i] = uint32(i * i)
	}
	keyer := NewKeyer(ClusterKey{3}, Domain{Model: "m"})
	var p Probe
	p.ResetTokens(tokens, keyer)
	points := PointsOf(nil, tokens)
	if len(points) != len(tokens)/PointTokens {
		t.Fatalf("%d points", len(points))
	}
	for i, c := range points {
		depth := (i + 1) * PointTokens
		if want, ok := p.At(depth); !ok || keyer.Key(c, uint32(depth)) != want {
			t.Errorf("the point at %d tokens is another one", depth)
		}
	}
}
