package summary

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestBadFramesLeaveNoTrace: each frame of a stream comes first with one more
// operation, on a run that is not there.
func TestBadFramesLeaveNoTrace(t *testing.T) {
	f := follow(t, Options{Blocks: manyTable{}})
	rng := rand.New(rand.NewPCG(5, 5))
	refused := 0
	for range 300 {
		churn(f, rng, 1+rng.IntN(4))
		f.now = f.now.Add(time.Second)
		b := f.Delta(f.now)
		if b == nil {
			continue
		}
		before, _ := f.d.Snapshot()
		tree := f.d.tree
		if got, err := f.d.Apply(append(b[:len(b):len(b)], 0xff, 0x7f)); !errors.Is(err, ErrFrame) {
			t.Fatalf("%v, %v", got, err)
		}
		refused++
		after, _ := f.d.Snapshot()
		if diff := cmp.Diff(before, after); diff != "" {
			t.Fatal(diff)
		}
		if is := &f.d.tree; is.live != tree.live || is.keys != tree.keys || is.digest != tree.digest || len(is.runs) != len(tree.runs) {
			t.Fatalf("%+v, before %+v", is, tree)
		}
		if err := consistent(&f.d.tree, f.sink); err != nil {
			t.Fatal(err)
		}
		f.take(b)
	}
	if refused < 100 {
		t.Errorf("%d frames refused", refused)
	}
}

func TestBadFramesAreUndone(t *testing.T) {
	for _, c := range []struct {
		name     string
		first, s *script
	}{
		{"deleted, its parent as well", nil, ops().del(2).del(1)},
		{"deleted and begun anew", nil, ops().del(2).root(600, 1, 2, 3, 4, 9, 9).root(200, 1, 2, 3)},
		{"begun where a number was free", ops().del(2), ops().root(600, 1, 2, 3, 4, 9, 9)},
		{"forked", nil, ops().fork(1, 20).raw(8, 8).uv(30<<1|1).raw(7, 7)},
		{"grown and trimmed", nil, ops().ext(1, 500, 1, 2, 3).trim(1, 500, 5, 5)},
		{"limited", nil, ops().usable(1).uv(16, 0, 3, 32, 4, 64)},
	} {
		for _, flags := range []uint8{0, flagClear} {
			d, sink := goodDecoder(t)
			if c.first != nil {
				if _, err := d.Apply(deltaFrame(2, 0, 0, c.first)); err != nil {
					t.Fatal(err)
				}
				d.have = true // as if the digest had been right
			}
			before, _ := d.Snapshot()
			if got, err := d.Apply(deltaFrame(d.seq+1, flags, 0, c.s.raw(0xff, 0x7f))); !errors.Is(err, ErrFrame) {
				t.Errorf("%s: %v, %v", c.name, got, err)
			}
			after, _ := d.Snapshot()
			if diff := cmp.Diff(before, after); diff != "" {
				t.Errorf("%s: %s", c.name, diff)
			}
			if err := consistent(&d.tree, sink); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		}
	}
}
