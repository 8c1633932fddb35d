package coordinator

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"
	"time"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
)

// intentOf turns a state of the registry into what the fleet obeys. A fleet
// file that this version cannot read leaves the cordons in force and says why
// the rest is not.
func intentOf(state *registry.State) fleet.Intent {
	file := state.Fleet()
	pools := make([]string, 0, len(file.Pools))
	for _, p := range file.Pools {
		pools = append(pools, p.Name)
	}
	return fleet.Intent{
		Version: state.Revision(),
		Pools:   pools,
		Assign: func(id fleet.Identity) fleet.Assignment {
			out := fleet.Assignment{}
			if p := file.PoolOf(id.Name, id.Model); p != nil {
				out.Pool = p.Name
			}
			place := file.HostPlace(id.Host)
			out.Zone, out.Rack = place.Zone, place.Rack
			if c := cordonsOn(state, id.Name, id.Model, id.GPUUUIDs, id.Members); len(c) > 0 {
				out.Cordoned = true
				out.Why = fmt.Sprintf("by %s: %s", c[0].By, c[0].Reason)
			}
			return out
		},
		GroupOf: file.MayShare,
		Way: func(callerZone string, to fleet.Identity) fleet.Way {
			outside := false
			if pool := file.PoolOf(to.Name, to.Model); pool != nil && pool.StayIn.Value != registry.StayInNone {
				// An unknown zone satisfies no rule, the caller's neither.
				zone := file.HostPlace(to.Host).Zone
				outside = zone == "" || zone != callerZone
			}
			if callerZone == "" {
				// Without knowing where the caller is, all ways are alike:
				// what cannot tell workers apart must not change the choice.
				return fleet.Way{Outside: outside}
			}
			path := file.PathBetween(registry.Place{Zone: callerZone, Source: registry.Declared}, file.HostPlace(to.Host))
			return fleet.Way{
				RoundTripMs: 2 * ms(path.Latency.Value),
				SurchargeMs: ms(path.PlaceSurcharge.Value),
				Outside:     outside,
			}
		},
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// policyOf turns the fleet file's policy into the rule's.
func policyOf(file *registry.Fleet) (placement.Policy, error) {
	p := placement.DefaultPolicy()
	theta, err := placement.ThetaOf(string(file.Policy.Objective.Value))
	if err != nil {
		return p, err
	}
	p.Theta = theta
	p.OwnLimitRatio, p.OwnLimitMs = file.Policy.OwnDelayLimit.Value.Ratio, ms(file.Policy.OwnDelayLimit.Value.Plus)
	p.IfInfeasible = placement.IfInfeasible(file.Policy.IfInfeasible.Value)
	p.SilentMs = ms(file.Policy.AgentSilentFor.Value)
	return p, p.Validate()
}

// applyState takes a new state of the registry over.
func (c *Coordinator) applyState(state *registry.State) {
	file := state.Fleet()
	if err := state.FleetProblem(); err != nil {
		c.log.Error("fleet file in force cannot be read by this version; the former policy stays", "event", "policy_stale", "error", err)
	} else if policy, err := policyOf(file); err != nil {
		c.log.Error("policy in force cannot be used by this version; the former one stays", "event", "policy_stale", "error", err)
	} else {
		c.policy.Store(&policy)
		c.fleetFile.Store(file)
	}
	now := time.Now()
	c.note(c.fleet.SetIntent(now, intentOf(state)))
	c.drains.follow(state, now)
	c.pushPolicy(state)
	c.announce(state)
}

// announce tells what operators changed since the state before. What was in
// force when this coordinator started is no news.
func (c *Coordinator) announce(state *registry.State) {
	former := c.announced.Swap(state)
	if former == nil {
		return
	}
	if f := state.FleetFile(); f.Version != former.FleetFile().Version {
		c.log.Info("fleet file applied", "event", "fleet_applied", "version", f.Version, "by", f.By, "message", f.Message)
	}
	before := map[string]registry.Cordon{}
	for _, k := range former.Cordons() {
		before[k.Selector] = k
	}
	for _, k := range state.Cordons() {
		was, known := before[k.Selector]
		delete(before, k.Selector)
		switch {
		case k.Drain && !(known && was.Drain):
			c.log.Info("drain started", "event", "drain_started", "target", k.Selector, "by", k.By, "reason", k.Reason)
		case !known:
			c.log.Info("cordoned", "event", "cordoned", "target", k.Selector, "by", k.By, "reason", k.Reason)
		}
	}
	for _, k := range before {
		c.log.Info("uncordoned", "event", "uncordoned", "target", k.Selector)
	}
}

// whereIs lists the workers that a selector names now.
func (c *Coordinator) whereIs(selector string) []string {
	var out []string
	for _, w := range c.fleet.Workers(time.Now()) {
		if selects(selector, &w) {
			out = append(out, w.Name)
		}
	}
	sort.Strings(out)
	return out
}

// names says whether a selector names a worker.
func names(selector, worker string, gpuUUIDs []string) bool {
	if worker == selector || strings.HasPrefix(worker, selector+"/") {
		return true
	}
	return slices.ContainsFunc(gpuUUIDs, func(u string) bool { return strings.EqualFold(u, selector) })
}

// mayName says whether a selector could name something on a host: a GPU could
// be anywhere.
func mayName(selector, host string) bool {
	s, err := registry.ParseSelector(selector)
	return err == nil && (s.Kind == registry.SelectsGPU || s.Host == host)
}

// finite turns NaN into unset.
func finite(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// counted turns a count with a sentinel below zero or NaN into unset.
func counted[N int | float64 | uint32](n N) *uint32 {
	f := float64(n)
	if math.IsNaN(f) || f < 0 || f > math.MaxUint32 {
		return nil
	}
	u := uint32(f)
	return &u
}

func shortHash(s string) string {
	if len(s) > 8 {
		return s[:8]
	}
	return strings.TrimSpace(s)
}
