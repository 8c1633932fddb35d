package registry

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// gpuConditions are the names a list of policy.gpu may hold beside xid:N,…
var gpuConditions = []string{
	"ecc_corrected", "ecc_uncorrected", "fabric_degraded", "fabric_down", "gpu_lost", "hardware_slowdown", "nvlink_down",
	"nvml_blocked", "power_brake", "power_cap", "readings_frozen", "reset_required", "row_remap_failed",
	"row_remap_pending", "thermal_throttle", "version_mismatch", "xid_events_missing",
}

// defaultGPUPolicy excludes what a reset or repair must clear, prices what
// slows down, and ignores what an application causes.
func defaultGPUPolicy() GPUPolicy {
	return GPUPolicy{
		Exclude: Sourced[[]string]{[]string{"xid:48,63,64,74,79,94,95,119,120", "row_remap_failed", "nvlink_down"}, Assumed},
		Price:   Sourced[[]string]{[]string{"thermal_throttle", "power_brake"}, Assumed},
		Ignore:  Sourced[[]string]{[]string{"xid:13,31,43,45,68,109", "ecc_corrected"}, Assumed},
	}
}

func (p *GPUPolicy) lists() []struct {
	key  string
	list *Sourced[[]string]
} {
	return []struct {
		key  string
		list *Sourced[[]string]
	}{{"exclude", &p.Exclude}, {"price", &p.Price}, {"ignore", &p.Ignore}}
}

// readGPUPolicy reads [policy.gpu].
func readGPUPolicy(s *section) GPUPolicy {
	p := defaultGPUPolicy()
	declaredIn := map[string]string{} // condition → list
	for _, l := range p.lists() {
		entries, ok := s.texts(l.key, "xid:79")
		if !ok {
			continue
		}
		for i, entry := range entries {
			conditions, err := gpuConditionsOf(entry)
			if err != nil {
				s.problemAt(l.key, i, "%v", err)
				continue
			}
			for _, c := range conditions {
				if other, dup := declaredIn[c]; dup && other != l.key {
					s.problemAt(l.key, i, "%s is in %s already; keep it in one list", c, other)
				}
				declaredIn[c] = l.key
			}
		}
		*l.list = Sourced[[]string]{entries, Declared}
	}
	for _, l := range p.lists() {
		if l.list.Source == Assumed {
			l.list.Value = withoutConditions(l.list.Value, declaredIn)
		}
	}
	return p
}

// gpuConditionsOf splits an entry into single conditions.
func gpuConditionsOf(entry string) ([]string, error) {
	numbers, isXid := strings.CutPrefix(entry, "xid:")
	if !isXid {
		if !slices.Contains(gpuConditions, entry) {
			return nil, fmt.Errorf("unknown condition %q%s; known are xid:N,… and %s", clip(entry, 40), didYouMean(entry, gpuConditions), strings.Join(gpuConditions, ", "))
		}
		return []string{entry}, nil
	}
	var out []string
	for text := range strings.SplitSeq(numbers, ",") {
		n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 16)
		if err != nil || n == 0 {
			return nil, fmt.Errorf("%q: %q is not an Xid number from 1 to 65535", clip(entry, 60), clip(text, 20))
		}
		out = append(out, "xid:"+strconv.FormatUint(n, 10))
	}
	return out, nil
}

// withoutConditions takes conditions that a file declares elsewhere out of an
// assumed list.
func withoutConditions(entries []string, declared map[string]string) []string {
	var out []string
	for _, entry := range entries {
		conditions, err := gpuConditionsOf(entry)
		if err != nil {
			panic("registry: assumed list: " + err.Error())
		}
		conditions = slices.DeleteFunc(conditions, func(c string) bool { _, ok := declared[c]; return ok })
		switch {
		case len(conditions) == 0:
		case strings.HasPrefix(entry, "xid:"):
			for i, c := range conditions {
				conditions[i] = strings.TrimPrefix(c, "xid:")
			}
			out = append(out, "xid:"+strings.Join(conditions, ","))
		default:
			out = append(out, entry)
		}
	}
	return out
}
