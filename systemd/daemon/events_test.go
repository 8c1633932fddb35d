package daemon

import (
	"bytes"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestEventsAreCounted(t *testing.T) {
	var out bytes.Buffer
	inner, level := NewLogger(&out, "error", "logfmt")
	reg := prometheus.NewRegistry()
	log, err := CountEvents(inner, reg)
	if err != nil {
		t.Fatal(err)
	}
	log.With("host", "gpu-01").Info("lost", "event", "host_lost")
	log.WithGroup("g").Error("lost again", "event", "host_lost", "error", "gone")
	log.Info("unheard of", "event", "gpu-01 did something")
	log.Info("no event")
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if len(families) != 1 || len(families[0].GetMetric()) != len(Events) {
		t.Fatalf("series %v", families)
	}
	for _, m := range families[0].GetMetric() {
		want := 0.
		if m.GetLabel()[0].GetValue() == "host_lost" {
			want = 2
		}
		if got := m.GetCounter().GetValue(); got != want {
			t.Errorf("%s: %v, want %v", m.GetLabel()[0].GetValue(), got, want)
		}
	}
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "lost again") {
		t.Errorf("at level error the log says %q", got)
	}
	level.Set("debug", "logfmt")
	log.Debug("now", "event", "host_left")
	if !strings.Contains(out.String(), "level=DEBUG msg=now") {
		t.Errorf("at level debug the log says %q", out.String())
	}
}
