package fleet

import (
	"math"
	"slices"
	"strings"
	"time"

	"waypost/coordinator/group"
	"waypost/coordinator/placement"
)

// Intent is what operators want of the fleet, as the registry of this
// coordinator has it. The functions are called under the fleet's lock, when a
// worker appears or the intent changes; they must be pure and must not call
// the fleet.
type Intent struct {
	// Version grows with every change of cordons or policy. It is compared
	// with the version that hosts report.
	Version uint64
	// Pools are the declared pools; others exist by assignment.
	Pools []string
	// Assign says what intent makes of a worker; nil: one pool per served
	// model, no zones, no cordons.
	Assign func(Identity) Assignment
	// GroupOf says which hosts may carry shares of engines that a host serves:
	// declared, that operators list them, may, whether one is listed; nil: no host
	// is listed anywhere, and any may.
	GroupOf func(host string) (declared bool, may func(other string) bool)
	// Way prices the way from a caller's zone to a worker; nil: unknown.
	Way func(callerZone string, to Identity) Way
}

// Identity is what intent may look at.
type Identity struct {
	// Name is host/engine/rank.
	Name, Host, Engine string
	Rank               int
	// Model is the served model, Boundary the hash of its boundary.
	Model, Boundary string
	// GPUUUIDs are the GPUs its processes use.
	GPUUUIDs []string
	// Members are the other shares of an engine that spans hosts.
	Members []group.Member
	// ZoneHint and RackHint are what the host says; Raft outranks them.
	ZoneHint, RackHint string
}

// Assignment is what intent makes of a worker.
type Assignment struct {
	// Pool is the pool it serves; empty: none.
	Pool string
	// Zone and Rack are where it stands; empty: unknown.
	Zone, Rack string
	// Cordoned says that it gets no new placements, Why who wants it and why.
	Cordoned bool
	Why      string
}

// Way is the price of the way to a worker.
type Way = placement.Way

// zoneWays are the ways from a zone by slot. open: all workers' are known and none
// is Outside; alike: they are open and all the same.
type zoneWays struct {
	list        []Way
	open, alike bool
}

// maxCallerZones bounds the zones that ways are kept for.
const maxCallerZones = 64

// SetIntent takes a new state of the registry. It returns the workers whose
// state changed by it.
func (f *Fleet) SetIntent(now time.Time, intent Intent) Changes {
	f.mu.Lock()
	defer f.mu.Unlock()
	intent.Pools = slices.Clone(intent.Pools)
	f.intent = intent
	clear(f.ways)
	for _, name := range intent.Pools {
		if f.pools[name] == nil {
			f.pools[name] = &pool{}
		}
	}
	for name, p := range f.pools {
		if len(p.workers) == 0 && !slices.Contains(intent.Pools, name) {
			delete(f.pools, name)
		}
	}
	var changes Changes
	nowMs := f.Ms(now)
	for _, w := range f.slots {
		if w != nil {
			f.assign(w)
			f.publish(w, nowMs, &changes)
		}
	}
	f.regroup(nil, nowMs, &changes)
	return changes
}

func (w *worker) identity() Identity {
	return Identity{
		Name: w.name, Host: w.host.name, Engine: w.facts.Engine, Rank: w.facts.Rank,
		Model: w.facts.Model, Boundary: w.facts.Boundary, GPUUUIDs: w.facts.GPUUUIDs,
		Members: w.memberList(), ZoneHint: w.host.zone, RackHint: w.host.rack,
	}
}

// assign asks the intent about a worker.
func (f *Fleet) assign(w *worker) {
	next := Assignment{Pool: w.facts.Model}
	if f.intent.Assign != nil {
		next = f.intent.Assign(w.identity())
	}
	if next.Pool != w.assigned.Pool {
		f.leave(w)
	}
	w.assigned = next
	f.join(w)
}

// cordon reports whether the newer of this coordinator's intent and the
// host's word cordons the worker. A host that was told a newer state than we
// have stays as it was told, on both sides of a partition.
func (w *worker) cordon(ownVersion uint64) (bool, string) {
	if cordoned, why := w.groupCordon(ownVersion); cordoned {
		return true, why
	}
	h := w.host
	if h.wish.ID != "" && !(h.policyVersion <= ownVersion && w.assigned.Cordoned) {
		return true, "by the host itself (drain --local): " + h.wish.Reason
	}
	if h.policyVersion <= ownVersion {
		return w.assigned.Cordoned, w.assigned.Why
	}
	for _, selector := range h.cordons {
		if w.selectedBy(selector) {
			return true, "as the host was told by a newer policy: " + selector
		}
	}
	return false, ""
}

// selectedBy reports whether a selector (host, host/engine, host/engine/rank
// or a GPU UUID) names the worker.
func (w *worker) selectedBy(selector string) bool {
	if selector == w.host.name || selector == w.name {
		return true
	}
	if host, engine, ok := strings.Cut(selector, "/"); ok {
		return host == w.host.name && engine == w.facts.Engine
	}
	return slices.ContainsFunc(w.facts.GPUUUIDs, func(uuid string) bool { return strings.EqualFold(uuid, selector) })
}

// buildWays prices the ways from a caller's zone and keeps them until the fleet
// or the intent changes. The caller holds the lock.
func (f *Fleet) buildWays(zone string) zoneWays {
	if len(f.ways) >= maxCallerZones {
		clear(f.ways)
	}
	list, open, alike, first := make([]Way, len(f.slots)), f.intent.Way != nil, true, -1
	for i, w := range f.slots {
		list[i] = Way{RoundTripMs: math.NaN()}
		if w != nil && f.intent.Way != nil {
			way := f.intent.Way(zone, w.identity())
			if way.SurchargeMs > 0 {
				list[i].SurchargeMs = way.SurchargeMs
			}
			if way.RoundTripMs >= 0 {
				list[i].RoundTripMs = way.RoundTripMs
			}
			list[i].Outside = way.Outside
			open = open && way.RoundTripMs >= 0 && !way.Outside
			if first < 0 {
				first = i
			}
			alike = alike && list[i] == list[first]
		}
	}
	ways := zoneWays{list, open, open && alike}
	f.ways[zone] = ways
	return ways
}
