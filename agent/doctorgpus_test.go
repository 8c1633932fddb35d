package agent

import (
	"strings"
	"testing"
	"time"

	"waypost/gossip/doctor"
	"waypost/nvml"
	waypostv1 "waypost/proto/waypost/v1"
)

// Each state of the driver is told as a problem with what to do about it, as a
// normal state, or as unknown.
func TestDoctorTellsTheDriversState(t *testing.T) {
	for _, c := range []struct {
		code     nvml.StateCode
		text     string
		xidState string
		state    string
		words    []string
	}{
		{nvml.StateOK, "ok", "ok", doctor.OK, []string{"2 GPUs, driver 570.86.15"}},
		{nvml.StateOK, "ok", "events are not supported", doctor.Problem, []string{"errors of GPUs (Xid) are not told", "events are not supported", "CAP_SYSLOG"}},
		{nvml.StateNoLibrary, "no NVIDIA driver", "", doctor.OK, []string{"no NVIDIA driver"}},
		{nvml.StateNoGPUs, "no GPUs", "", doctor.OK, []string{"no GPUs"}},
		{nvml.StateNotBuilt, "no GPU facts: built without -tags nvml", "", doctor.Unknown, []string{"go build -tags nvml"}},
		{nvml.StateStarting, "starting", "", doctor.Unknown, []string{"starting"}},
		{nvml.StateNoPermission, "no permission", "", doctor.Problem, []string{"DeviceAllow=char-nvidia* rw"}},
		{nvml.StateVersionMismatch, "driver/library version mismatch", "", doctor.Problem, []string{"reboot this host"}},
		{nvml.StateDriverNotLoaded, "NVIDIA driver not loaded", "", doctor.Problem, []string{"modprobe nvidia"}},
		{nvml.StateBlocked, "NVML blocked for 12 s in nvmlDeviceGetPowerUsage", "", doctor.Problem, []string{"nvmlDeviceGetPowerUsage", "needs a reboot"}},
		{nvml.StateCrashed, "ended", "", doctor.Problem, []string{"journalctl -u waypost-agent"}},
		{nvml.StateStale, "stale", "", doctor.Problem, []string{"journalctl -u waypost-agent"}},
		{nvml.StateFailed, "NVML cannot be initialized", "", doctor.Problem, []string{"nvidia-smi"}},
	} {
		a, gpus := twoEngines(t)
		gpus.mu.Lock()
		gpus.view.Status, gpus.view.XidState, gpus.view.Driver = nvml.Status{Code: c.code, Text: c.text}, c.xidState, nvml.Driver{DriverVersion: "570.86.15"}
		gpus.mu.Unlock()
		checks := a.checks(time.Now()).Sorted()
		if !finds(checks, "nvml-driver", c.state, append(c.words, "gpu-01", c.text)...) && !(c.code == nvml.StateOK && finds(checks, "nvml-driver", c.state, append(c.words, "gpu-01")...)) {
			t.Errorf("%s: no %s nvml-driver with %q in %v", c.code, c.state, c.words, checks)
		}
		// A GPU that cannot be read is not told to be well.
		if c.code != nvml.StateOK && finds(checks, "gpu-fault", doctor.OK) {
			t.Errorf("%s: a GPU that cannot be read is called ok: %v", c.code, checks)
		}
	}
}

// A fault is told of the GPU that has it, with what follows and what to do; the
// fleet's policy decides what is one.
func TestDoctorTellsFaultsOfGPUs(t *testing.T) {
	a, gpus := twoEngines(t)
	gpus.set("GPU-b", func(d *nvml.Device) { d.Xids = []nvml.XidSeen{{Xid: 31, Age: time.Minute}} })
	checks := a.checks(time.Now()).Sorted()
	for _, subject := range []string{"gpu-01/0", "gpu-01/1"} {
		if !finds(checks, "gpu-fault", doctor.OK, subject) {
			t.Errorf("%s has no fault: %v", subject, checks)
		}
	}
	if !finds(checks, "gpu-fault", doctor.OK, "gpu-01/1", "also xid_31") {
		t.Errorf("an application's error is not told: %v", checks)
	}
	gpus.set("GPU-b", func(d *nvml.Device) {
		d.Xids = append(d.Xids, nvml.XidSeen{Xid: 79, Age: 4 * time.Minute})
		d.Lost = true
	})
	checks = a.checks(time.Now()).Sorted()
	want := []string{"gpu-01/1", "exclude:xid_79,gpu_lost", "get no placements", "waypost ack gpu-01/1 --reason", "reboot gpu-01"}
	if !finds(checks, "gpu-fault", doctor.Problem, want...) || !finds(checks, "gpu-fault", doctor.OK, "gpu-01/0") {
		t.Errorf("%v", checks)
	}
	if n := doctor.Problems(checks)["gpu-fault"]; n != 1 {
		t.Errorf("%d GPUs have a fault, want 1", n)
	}
	// An operator who has seen to it, and a fleet that thinks otherwise.
	gpus.set("GPU-b", func(d *nvml.Device) { d.Lost, d.Xids[1].Acknowledged = false, true })
	if checks = a.checks(time.Now()).Sorted(); finds(checks, "gpu-fault", doctor.Problem) {
		t.Errorf("acknowledged: %v", checks)
	}
	if err := a.truth.setPolicy(&waypostv1.GpuPolicy{Exclude: []string{"xid:31"}}); err != nil {
		t.Fatal(err)
	}
	if checks = a.checks(time.Now()).Sorted(); !finds(checks, "gpu-fault", doctor.Problem, "gpu-01/1", "exclude:xid_31") {
		t.Errorf("the fleet's policy does not decide: %v", checks)
	}
}

// Whatever a policy can name, doctor knows what to do about it.
func TestEveryConditionOfAGPUHasAFix(t *testing.T) {
	_, err := nvml.ParsePolicy([]string{"nonsense"}, nil, nil)
	if err == nil {
		t.Fatal("nonsense is a condition")
	}
	_, list, _ := strings.Cut(err.Error(), "known are xid:N,… and ")
	names := strings.Split(list, ", ")
	if len(names) < 10 {
		t.Fatalf("only %q are known", names)
	}
	a, _ := twoEngines(t)
	for _, name := range append(names, "xid_79") {
		fix := a.gpuFix(&nvml.Device{GPU: nvml.GPU{Index: 3}}, []string{name})
		if fix == "" || strings.Contains(fix, "HOST") || strings.Contains(fix, "-i N") || strings.Contains(fix, "/N") {
			t.Errorf("%s: %q", name, fix)
		}
	}
	if len(gpuFixes) != len(names) {
		t.Errorf("%d fixes for %d conditions", len(gpuFixes), len(names))
	}
}
