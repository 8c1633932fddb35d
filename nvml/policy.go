package nvml

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Action is what a condition does to a worker on the GPU.
type Action uint8

// The actions, each stronger than the one before.
const (
	ActionOK Action = iota
	// ActionPrice says: place by the measured, lower speed.
	ActionPrice
	// ActionExclude says: no placements.
	ActionExclude
)

// String is ok, price or exclude.
func (a Action) String() string {
	return [...]string{"ok", "price", "exclude"}[min(a, ActionExclude)]
}

// PriceXidFor is how long a priced Xid counts after its newest event. One that
// excludes counts until it is acknowledged or the host is booted anew.
const PriceXidFor = 10 * time.Minute

// conditions are the names a policy list may hold beside xid:N. Those with an
// action act so when no list names them.
var conditions = map[string]Action{
	"gpu_lost":           ActionExclude, // the driver has lost the GPU
	"reset_required":     ActionExclude, // the driver uses the GPU only after a reset
	"fabric_down":        ActionOK,      // follows nvlink_down unless it is named
	"fabric_degraded":    ActionOK,
	"row_remap_failed":   ActionOK,
	"row_remap_pending":  ActionOK,
	"nvlink_down":        ActionOK,
	"thermal_throttle":   ActionOK,
	"hardware_slowdown":  ActionPrice, // at most half the clock, by the library's definition
	"power_brake":        ActionOK,
	"power_cap":          ActionOK,
	"ecc_corrected":      ActionOK,
	"ecc_uncorrected":    ActionOK,
	"readings_frozen":    ActionPrice,
	"nvml_blocked":       ActionPrice,
	"version_mismatch":   ActionOK,
	"xid_events_missing": ActionOK,
}

// Policy says which conditions exclude a worker, slow it down in the price, or
// are only shown. The zero value knows the built-in actions only.
type Policy struct {
	named map[string]Action
	xids  map[uint32]Action
}

// DefaultPolicy is the policy of a fleet whose file says nothing about GPUs.
func DefaultPolicy() *Policy {
	p, err := ParsePolicy(
		[]string{"xid:48,63,64,74,79,94,95,119,120", "row_remap_failed", "nvlink_down"},
		[]string{"thermal_throttle", "power_brake"},
		[]string{"xid:13,31,43,45,68,109", "ecc_corrected"},
	)
	if err != nil {
		panic(err)
	}
	return p
}

// ParsePolicy reads the three lists of the fleet file's policy.gpu. An entry is
// a condition's name or xid:N,N,…. Errors name the list and entry.
func ParsePolicy(exclude, price, ignore []string) (*Policy, error) {
	p := &Policy{named: map[string]Action{}, xids: map[uint32]Action{}}
	lists := []struct {
		name    string
		action  Action
		entries []string
	}{{"exclude", ActionExclude, exclude}, {"price", ActionPrice, price}, {"ignore", ActionOK, ignore}}
	for _, l := range lists {
		for i, entry := range l.entries {
			if err := p.add(entry, l.action); err != nil {
				return nil, fmt.Errorf("policy.gpu.%s[%d]: %w", l.name, i, err)
			}
		}
	}
	return p, nil
}

func (p *Policy) add(entry string, action Action) error {
	numbers, isXid := strings.CutPrefix(entry, "xid:")
	if !isXid {
		if _, ok := conditions[entry]; !ok {
			return fmt.Errorf("unknown condition %q; known are xid:N,… and %s", entry, strings.Join(conditionNames(), ", "))
		}
		return set(p.named, entry, entry, action)
	}
	for text := range strings.SplitSeq(numbers, ",") {
		n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 16)
		if err != nil || n == 0 {
			return fmt.Errorf("%q: %q is not an Xid number from 1 to 65535", entry, text)
		}
		if err := set(p.xids, uint32(n), fmt.Sprintf("xid:%d", n), action); err != nil {
			return err
		}
	}
	return nil
}

func set[K comparable](m map[K]Action, key K, name string, action Action) error {
	if old, ok := m[key]; ok && old != action {
		return fmt.Errorf("%s is in two lists; keep it in one", name)
	}
	m[key] = action
	return nil
}

func conditionNames() []string {
	names := make([]string, 0, len(conditions))
	for name := range conditions {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (p *Policy) actionOf(condition string) Action {
	if a, ok := p.named[condition]; ok {
		return a
	}
	if condition == "fabric_down" { // no link carries anything then
		return p.actionOf("nvlink_down")
	}
	return conditions[condition]
}

// Verdict is what policy makes of a GPU.
type Verdict struct {
	Action Action
	// Reasons are the conditions that led to Action, "xid_79" for example.
	Reasons []string
	// Notes are the other conditions that hold: less severe or only shown.
	Notes []string
}

// String is "ok", or the action and its reasons: "exclude:xid_79,nvlink_down".
func (v Verdict) String() string {
	if v.Action == ActionOK {
		return v.Action.String()
	}
	return v.Action.String() + ":" + strings.Join(v.Reasons, ",")
}

// add takes a condition in.
func (v *Verdict) add(action Action, condition string) {
	switch {
	case action > v.Action:
		v.Notes = append(v.Notes, v.Reasons...)
		v.Action, v.Reasons = action, []string{condition}
	case action == v.Action && action != ActionOK:
		v.Reasons = append(v.Reasons, condition)
	default:
		v.Notes = append(v.Notes, condition)
	}
}

// Judge says what the policy makes of a GPU in a view with the given state.
// Unknown values are no condition: a GPU that cannot be read stays eligible
// unless an event, a loss or the state speaks against it.
func (p *Policy) Judge(state StateCode, xidState string, d *Device) Verdict {
	var v Verdict
	for _, x := range d.Xids {
		action := p.xids[x.Xid]
		if x.Acknowledged || action == ActionPrice && x.Age > PriceXidFor {
			action = ActionOK
		}
		v.add(action, fmt.Sprintf("xid_%d", x.Xid))
	}
	for _, c := range conditionsOf(state, xidState, d) {
		v.add(p.actionOf(c), c)
	}
	return v
}

// conditionsOf are the conditions that hold, in a fixed order.
func conditionsOf(state StateCode, xidState string, d *Device) []string {
	yes := func(b *bool) bool { return b != nil && *b }
	above0 := func(n *uint64) bool { return n != nil && *n > 0 }
	throttled := func(reasons ...string) bool {
		return slices.ContainsFunc(reasons, func(r string) bool { return slices.Contains(d.ThrottleReasons, r) })
	}
	var c []string
	check := func(holds bool, name string) {
		if holds {
			c = append(c, name)
		}
	}
	check(d.Lost, "gpu_lost")
	check(d.ResetRequired, "reset_required")
	check(yes(d.RowRemapFailed), "row_remap_failed")
	check(yes(d.RowRemapPending), "row_remap_pending")
	check(d.NVLinkUp != nil && d.LinksExpected != nil && *d.NVLinkUp < *d.LinksExpected, "nvlink_down")
	check(d.Fabric != nil && !d.Fabric.Up(), "fabric_down")
	check(d.Fabric != nil && yes(d.Fabric.DegradedBandwidth), "fabric_degraded")
	check(throttled(ThrottleThermal, ThrottleHardwareThermal), "thermal_throttle")
	check(throttled(ThrottleHardware), "hardware_slowdown")
	check(throttled(ThrottlePowerBrake), "power_brake")
	check(throttled(ThrottlePowerCap), "power_cap")
	check(above0(d.ECCUncorrected), "ecc_uncorrected")
	check(above0(d.ECCCorrected), "ecc_corrected")
	check(d.FrozenFor > 0, "readings_frozen")
	check(state == StateBlocked || state == StateStale || state == StateCrashed, "nvml_blocked")
	check(state == StateVersionMismatch, "version_mismatch")
	check(state == StateOK && xidState != "ok", "xid_events_missing")
	return c
}

// IsOneOf says whether the GPU or one of its instances has one of the UUIDs.
func (d *Device) IsOneOf(uuids []string) bool {
	return slices.Contains(uuids, d.UUID) || slices.ContainsFunc(d.Instances, func(i Instance) bool { return slices.Contains(uuids, i.UUID) })
}

// Judge is the verdict on a worker that uses the GPUs with these UUIDs: that
// of the worst of them, its reasons with the GPU's index. A UUID that was never
// seen adds nothing.
func (v *View) Judge(p *Policy, uuids []string) Verdict {
	var worst Verdict
	for i := range v.Devices {
		d := &v.Devices[i]
		if !d.IsOneOf(uuids) {
			continue
		}
		one := p.Judge(v.Status.Code, v.XidState, d)
		for _, r := range one.Reasons {
			worst.add(one.Action, fmt.Sprintf("%s(gpu_%d)", r, d.Index))
		}
		for _, n := range one.Notes {
			worst.add(ActionOK, fmt.Sprintf("%s(gpu_%d)", n, d.Index))
		}
	}
	return worst
}
