package agent

import (
	"fmt"
	"strings"

	"waypost/gossip/doctor"
	"waypost/nvml"
)

// The two checks of GPUs.
const (
	checkDriver = "nvml-driver"
	checkFault  = "gpu-fault"
)

// gpuFixes say what to do about a condition of a GPU; HOST and N stand for the
// host and the GPU's index. Xid errors have a fix of their own.
var gpuFixes = map[string]string{
	"gpu_lost":          "reboot HOST; if the GPU stays lost, reseat or replace it",
	"reset_required":    "stop what uses the GPU, then: nvidia-smi --gpu-reset -i N",
	"row_remap_failed":  "replace the GPU: it has no spare rows left",
	"row_remap_pending": "waypost drain HOST, then: nvidia-smi --gpu-reset -i N",
	"nvlink_down":       "nvidia-smi nvlink --status -i N",
	"fabric_down":       "systemctl status nvidia-fabricmanager; nvidia-smi -q -i N",
	"fabric_degraded":   "systemctl status nvidia-fabricmanager; nvidia-smi -q -i N",
	"thermal_throttle":  "see to the cooling: nvidia-smi -q -d TEMPERATURE,PERFORMANCE -i N",
	"hardware_slowdown": "see to cooling and power: nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE -i N",
	"power_brake":       "see to the power supply: nvidia-smi -q -d POWER,PERFORMANCE -i N",
	"power_cap":         "nvidia-smi -q -d POWER -i N",
	"ecc_corrected":     "nvidia-smi -q -d ECC -i N",
	"ecc_uncorrected":   "nvidia-smi -q -d ECC,ROW_REMAPPER -i N",
	"readings_frozen":   "nvidia-smi -i N; if that hangs or shows the same: reboot HOST",
	"nvml_blocked":      "journalctl -k -g 'NVRM|Xid'; a driver that hangs needs a reboot of HOST",
	"version_mismatch":  "reboot HOST, or unload and load the nvidia modules",
	// A GPU whose errors are not told may have any.
	"xid_events_missing": "dmesg | grep Xid on HOST; the agent reads them if its unit may: AmbientCapabilities=CAP_SYSLOG",
}

// checkGPUs tells the state of the driver and of each GPU, by the policy that the
// fleet has.
func (a *Agent) checkGPUs(l *doctor.List) {
	reader := a.gpus.client()
	if reader == nil {
		l.Good(checkDriver, a.name, "GPU facts are switched off: gpu.enabled = \"off\"")
		return
	}
	v, policy := reader.View(), a.truth.policyNow()
	a.checkDriver(l, &v)
	for i := range v.Devices {
		d := &v.Devices[i]
		a.checkGPU(l, &v, d, policy.Judge(v.Status.Code, v.XidState, d))
	}
}

func (a *Agent) checkDriver(l *doctor.List, v *nvml.View) {
	const kernelLog = "journalctl -k -g 'NVRM|Xid'"
	switch v.Status.Code {
	case nvml.StateOK:
		what := fmt.Sprintf("%d GPUs, driver %s", len(v.Devices), orUnknown(v.Driver.DriverVersion))
		if v.XidState != "ok" {
			l.Bad(checkDriver, a.name, what+", and errors of GPUs (Xid) are not told", v.XidState, "systemctl edit waypost-agent\n[Service]\nAmbientCapabilities=CAP_SYSLOG")
			return
		}
		l.Good(checkDriver, a.name, what)
	case nvml.StateNoLibrary, nvml.StateNoGPUs:
		l.Good(checkDriver, a.name, v.Status.Text)
	case nvml.StateNotBuilt:
		l.Add(checkDriver, doctor.Unknown, a.name, v.Status.Text, "", "go build -tags nvml, or run the agent of the package")
	case nvml.StateStarting:
		l.Add(checkDriver, doctor.Unknown, a.name, v.Status.Text, "", "")
	case nvml.StateNoPermission:
		l.Bad(checkDriver, a.name, v.Status.Text, "", "give the agent's unit DeviceAllow=char-nvidia* rw, or remove its DevicePolicy drop-in")
	case nvml.StateVersionMismatch:
		l.Bad(checkDriver, a.name, v.Status.Text, "the driver was upgraded since boot", "reboot this host, or unload and load the nvidia modules")
	case nvml.StateDriverNotLoaded:
		l.Bad(checkDriver, a.name, v.Status.Text, "its library is installed, its kernel module is not loaded", "modprobe nvidia, then "+kernelLog)
	case nvml.StateBlocked:
		l.Bad(checkDriver, a.name, v.Status.Text, "the driver hangs; engines that run are kept, at a price", kernelLog+"; such a driver needs a reboot of the host")
	case nvml.StateCrashed, nvml.StateStale:
		l.Bad(checkDriver, a.name, v.Status.Text, "", "journalctl -u waypost-agent, then "+kernelLog)
	default:
		l.Bad(checkDriver, a.name, v.Status.Text, "", "nvidia-smi, then "+kernelLog)
	}
}

// checkGPU tells the verdict on one GPU, why, and what to do about it.
func (a *Agent) checkGPU(l *doctor.List, v *nvml.View, d *nvml.Device, verdict nvml.Verdict) {
	subject := fmt.Sprintf("%s/%d", a.name, d.Index)
	also := ""
	if len(verdict.Notes) > 0 {
		also = ", also " + strings.Join(verdict.Notes, ", ")
	}
	switch {
	case verdict.Action != nvml.ActionOK:
		effect := map[nvml.Action]string{
			nvml.ActionExclude: "workers on it get no placements", nvml.ActionPrice: "workers on it are placed by their measured speed",
		}[verdict.Action]
		l.Bad(checkFault, subject, verdict.String()+also, effect, a.gpuFix(d, verdict.Reasons))
	case v.Status.Code != nvml.StateOK:
		// What is said of it otherwise would be of a time gone by.
		l.Add(checkFault, doctor.Unknown, subject, "cannot be read now"+also, v.Status.Text, "")
	default:
		l.Good(checkFault, subject, "ok"+also)
	}
}

// gpuFix is what to do about the conditions of a GPU, one line each.
func (a *Agent) gpuFix(d *nvml.Device, reasons []string) string {
	var fixes []string
	told := map[string]bool{}
	for _, r := range reasons {
		fix := gpuFixes[r]
		if strings.HasPrefix(r, "xid_") {
			fix = "waypost gpus HOST; after repair: waypost ack HOST/N --reason \"...\""
		}
		if !told[fix] {
			told[fix] = true
			fixes = append(fixes, strings.NewReplacer("HOST", a.name, "/N", fmt.Sprintf("/%d", d.Index), "-i N", fmt.Sprintf("-i %d", d.Index)).Replace(fix))
		}
	}
	return strings.Join(fixes, "\n")
}
