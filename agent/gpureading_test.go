package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"waypost/systemd/daemon"
)

// The reading of GPUs is switched on, changed and switched off while the agent runs,
// without a trace in what it tells.
func TestGPUsAreReadAsSettingsSay(t *testing.T) {
	reg := prometheus.NewRegistry()
	a := discovering(t, &procTable{}, nil)
	a.opt.Registerer = reg
	series := func() (n int) {
		all, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	cfg := a.cfg.GPU
	reload := func() {
		t.Helper()
		if err := a.gpus.reload(a, cfg); err != nil {
			t.Fatal(err)
		}
	}
	state := func() string { return a.hostReport().GetGpuState() }
	if !strings.Contains(state(), "switched off") || series() != 0 {
		t.Fatalf("%q, %d series", state(), series())
	}
	reload()
	select {
	case <-a.gpus.changed:
		t.Error("the same settings change something")
	default:
	}
	// A program that cannot be started is enough to see that it is tried.
	cfg.Enabled, cfg.Helper, cfg.Poll = "auto", "/nonexistent", daemon.Duration(500*time.Millisecond)
	reload()
	<-a.gpus.changed
	first := a.gpus.client()
	if first == nil || strings.Contains(state(), "switched off") || series() == 0 {
		t.Fatalf("%q, %d series", state(), series())
	}
	for !strings.Contains(state(), "cannot be started") {
		<-a.gpus.changed // it runs
	}
	n := series()
	cfg.Poll = daemon.Duration(time.Second)
	reload()
	if second := a.gpus.client(); second == nil || second == first || series() != n {
		t.Errorf("%d series, %d before", series(), n)
	}
	cfg.Enabled = "off"
	reload()
	if !strings.Contains(state(), "switched off") || series() != 0 {
		t.Errorf("%q, %d series", state(), series())
	}
	a.cancel()
	cfg.Enabled = "auto"
	reload()
	if a.gpus.client() != nil {
		t.Error("an agent that has ended reads GPUs")
	}
}
