package summary

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"waypost/gossip/prefix"
)

func someSketch(workers, roots int) *Sketch {
	s := &Sketch{Age: 1500 * time.Millisecond, KeyID: 0xdeadbeef}
	for i := range workers {
		w := WorkerSketch{Name: fmt.Sprintf("vllm-%d/0", 8000+i), State: SketchReady, Load: LoadClassOf(float64(i * 100))}
		for j := range roots {
			w.Roots = append(w.Roots, Root{prefix.Key(1000*i + j + 1), uint32(512 * (j + 1))})
		}
		s.Workers = append(s.Workers, w)
	}
	return s
}

func TestSketchRoundTrip(t *testing.T) {
	for _, s := range []*Sketch{{}, someSketch(1, 0), someSketch(1, 3), someSketch(8, 2), someSketch(64, 0)} {
		b, err := AppendSketch([]byte("head"), s, MaxSketchBytes)
		if err != nil || !strings.HasPrefix(string(b), "head") {
			t.Fatal(err)
		}
		got, err := ParseSketch(b[4:])
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(s, &got); diff != "" {
			t.Error(diff)
		}
	}
}

// TestSketchOfTheVersionBefore: members of the former version are read, their
// session and seq passed over.
func TestSketchOfTheVersionBefore(t *testing.T) {
	want := someSketch(2, 1)
	b, err := AppendSketch(nil, want, MaxSketchBytes)
	if err != nil {
		t.Fatal(err)
	}
	old := append([]byte{1}, b[1:5]...)
	old = binary.AppendUvarint(old, 1<<63) // session
	old = append(binary.AppendUvarint(old, 12345), b[5:]...)
	got, err := ParseSketch(old)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, &got); diff != "" {
		t.Error(diff)
	}
}

// TestSketchFits: all workers always, then roots in turn as far as they fit.
func TestSketchFits(t *testing.T) {
	s := someSketch(4, 50)
	for _, limit := range []int{0, 80, LeastSketchBytes, 300, MaxSketchBytes, 1 << 20} {
		b, err := AppendSketch(nil, s, limit)
		if err != nil {
			t.Fatal(err)
		}
		got, err := ParseSketch(b)
		if err != nil {
			t.Fatal(err)
		}
		roots := 0
		for i, w := range got.Workers {
			roots += len(w.Roots)
			if n, first := len(w.Roots), len(got.Workers[0].Roots); n > first || n < first-1 {
				t.Errorf("limit %d: worker %d has %d roots, the first %d", limit, i, n, first)
			}
		}
		bare, _ := AppendSketch(nil, someSketch(4, 0), limit)
		if len(got.Workers) != 4 || len(b) > max(len(bare), min(limit, MaxSketchBytes)) {
			t.Errorf("limit %d: %d bytes with %d workers", limit, len(b), len(got.Workers))
		}
		if most := min(limit, MaxSketchBytes) - len(bare); most > 12 && roots < most/12 {
			t.Errorf("limit %d: %d roots in %d bytes of room", limit, roots, most)
		}
	}
}

func TestSketchRefuses(t *testing.T) {
	long := someSketch(1, 0)
	long.Workers[0].Name = strings.Repeat("x", 65)
	nameless := someSketch(1, 0)
	nameless.Workers[0].Name = ""
	state := someSketch(1, 0)
	state.Workers[0].State = sketchStates
	fat := someSketch(30, 0)
	for i := range fat.Workers {
		fat.Workers[i].Name = strings.Repeat(string(rune('a'+i)), 60)
	}
	for name, s := range map[string]*Sketch{"long name": long, "no name": nameless, "state": state, "too many": someSketch(65, 0), "beyond a packet": fat} {
		if b, err := AppendSketch([]byte{1}, s, MaxSketchBytes); !errors.Is(err, ErrSketch) || len(b) != 1 {
			t.Errorf("%s: %v, %d bytes", name, err, len(b))
		}
	}
	good, _ := AppendSketch(nil, someSketch(2, 1), MaxSketchBytes)
	twice, _ := AppendSketch(nil, &Sketch{Workers: []WorkerSketch{{Name: "a"}, {Name: "a"}}}, MaxSketchBytes)
	crowd := binary.AppendUvarint([]byte{SketchVersion, 0, 0, 0, 0, 0}, MaxSketchWorkers+1)
	for i := range MaxSketchWorkers + 1 {
		crowd = append(crowd, 2, byte('a'+i/26), byte('a'+i%26), byte(SketchReady), 0)
	}
	for name, b := range map[string][]byte{
		"too many": crowd,
		"empty":    nil, "version": append([]byte{9}, good[1:]...), "cut": good[:len(good)-1], "one name twice": twice,
		"rest": append(append([]byte(nil), good...), 0), "too long": make([]byte, MaxSketchBytes+1),
	} {
		if s, err := ParseSketch(b); !errors.Is(err, ErrSketch) || len(s.Workers) != 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestLoadClasses(t *testing.T) {
	for ms, want := range map[float64]LoadClass{-1: 0, 0: 1, 0.9: 1, 1: 2, 1.9: 2, 2: 3, 1000: 11, 1e12: maxLoadClass, math.Inf(1): maxLoadClass} {
		if got := LoadClassOf(ms); got != want {
			t.Errorf("%v ms: class %d, want %d", ms, got, want)
		}
	}
	if LoadClassOf(math.NaN()) != 0 {
		t.Error("not a number is known")
	}
	for c := LoadClass(1); c <= maxLoadClass; c++ {
		below, ok := c.BelowMs()
		if !ok || c < maxLoadClass && (LoadClassOf(below) != c+1 || LoadClassOf(below-0.5) != c && c > 1) {
			t.Errorf("class %d: below %v ms", c, below)
		}
	}
	if _, ok := LoadClass(0).BelowMs(); ok {
		t.Error("an unknown load has a bound")
	}
}

// TestRhythm: all sketches together use half of what a node can send, whatever
// the number of members.
func TestRhythm(t *testing.T) {
	for members, about := range map[int]time.Duration{20: 2 * time.Second, 100: 12 * time.Second, 1000: 160 * time.Second} {
		if got := SketchRhythm(members, LeastSketchBytes); got < about*3/4 || got > about*5/4 {
			t.Errorf("%d members: every %v, want about %v", members, got, about)
		}
	}
	for members := 1; members < 20000; members += 1 + members/7 {
		size := SketchLimit(members)
		rhythm := SketchRhythm(members, size)
		perNode := float64(members*size) * copies(members) / rhythm.Seconds()
		if perNode > 11_000*1.001 || size < LeastSketchBytes || size > MaxSketchBytes || rhythm < time.Second {
			t.Errorf("%d members: %d bytes every %v is %.0f B/s per node", members, size, rhythm, perNode)
		}
		if size > LeastSketchBytes && rhythm > 2*time.Second+time.Second/10 {
			t.Errorf("%d members: %d bytes every %v", members, size, rhythm)
		}
	}
	if SketchRhythm(0, 0) != time.Second || SketchRhythm(-5, 100) != time.Second {
		t.Error("an empty mesh has no rhythm")
	}
}

func FuzzSketch(f *testing.F) {
	for _, s := range []*Sketch{{}, someSketch(1, 1), someSketch(8, 3)} {
		b, err := AppendSketch(nil, s, MaxSketchBytes)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		if len(b) > 5 { // as the former version had it
			f.Add(append(append([]byte{1}, b[1:5]...), append([]byte{7, 9}, b[5:]...)...))
		}
	}
	two, err := AppendSketch(nil, &Sketch{Workers: []WorkerSketch{{Name: "a"}, {Name: "a"}}}, MaxSketchBytes)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(two)
	f.Add([]byte{9})
	f.Add([]byte{SketchVersion, 0, 0, 0, 0, 0, 1, 0, byte(SketchReady), 0})
	f.Add([]byte{SketchVersion, 0, 0, 0, 0, 0, 1, 1, 'a', 99, 99})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseSketch(b)
		if err != nil {
			if !errors.Is(err, ErrSketch) {
				t.Fatal(err)
			}
			return
		}
		again, err := AppendSketch(nil, &s, MaxSketchBytes)
		if err != nil {
			t.Fatalf("read but not written: %v", err)
		}
		if same, err := ParseSketch(again); err != nil || !sameButCut(&s, &same) {
			t.Fatalf("%v: %s", err, cmp.Diff(s, same))
		}
	})
}

// sameButCut compares all but roots, which may take more room when written anew.
func sameButCut(a, b *Sketch) bool {
	if len(a.Workers) != len(b.Workers) || a.Age != b.Age || a.KeyID != b.KeyID {
		return false
	}
	for i := range a.Workers {
		x, y := a.Workers[i], b.Workers[i]
		if x.Name != y.Name || x.State != y.State || x.Load != y.Load || len(y.Roots) > len(x.Roots) {
			return false
		}
	}
	return true
}
