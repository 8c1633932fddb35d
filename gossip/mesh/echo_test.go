package mesh

import (
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// propagation is how many echoes were timed, and the sum of their times.
func propagation(t *testing.T, g prometheus.Gatherer) (n uint64, sec float64) {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "waypost_mesh_propagation_seconds" {
			h := f.GetMetric()[0].GetHistogram()
			return h.GetSampleCount(), h.GetSampleSum()
		}
	}
	t.Fatal("no waypost_mesh_propagation_seconds")
	return 0, 0
}

// A member times its own news: by its own clock, until another one hands it back.
func TestPropagationIsTimed(t *testing.T) {
	t.Parallel()
	a, b, _ := three(t)
	began := time.Now()
	sent := 0
	eventually(t, "an echo", func() bool {
		if err := b.SetSketch([]byte{byte(sent)}); err != nil {
			t.Fatal(err)
		}
		sent++
		n, _ := propagation(t, b.reg)
		return n > 0
	})
	if n, sec := propagation(t, b.reg); n > uint64(sent) || !(sec > 0) || sec > float64(n)*time.Since(began).Seconds() {
		t.Errorf("%d echoes of %d sketches in %v s, %v after the first", n, sent, sec, time.Since(began))
	}
	// One that sends none has none, whoever else's it passes on.
	if n, _ := propagation(t, a.reg); n != 0 {
		t.Errorf("a member without a sketch timed %d", n)
	}
}

func TestEchoes(t *testing.T) {
	reg := prometheus.NewRegistry()
	e := newEchoes()
	reg.MustRegister(e.seconds)
	now := time.Now()
	e.heard(0, now) // none was sent
	for seq := range uint64(echoesKept + 1) {
		e.sent(seq+1, now)
	}
	e.heard(1, now.Add(time.Second)) // too old to be remembered
	e.heard(99, now)
	e.heard(3, now.Add(2*time.Second))
	e.heard(3, now.Add(5*time.Second)) // the second hand it came through
	e.heard(echoesKept+1, now.Add(time.Second/2))
	if n, sec := propagation(t, reg); n != 2 || sec != 2.5 {
		t.Errorf("%d echoes in %v s, want 2 in 2.5", n, sec)
	}
}

// Every reason for which gossip is thrown away has a series.
func TestEveryReasonIsCounted(t *testing.T) {
	for _, r := range refusals {
		if !slices.Contains(dropReasons, r.reason) {
			t.Errorf("%q has no series", r.reason)
		}
	}
}
