package fleet

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"waypost/coordinator/group"
	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
)

// WorkerInfo is all that is known of a worker, for people. NaN is unknown,
// ages are ms.
type WorkerInfo struct {
	// ID, Name and Host say which.
	ID         WorkerID
	Name, Host string
	// Process marks its engine's life.
	Process uint64
	// KnownMs is for how long it has been known here.
	KnownMs float64
	// Pool, Zone and Rack are what intent makes of it.
	Pool, Zone, Rack string
	// State is the state word, StateWhy says more.
	State, StateWhy string
	// Wish is what its host, or one that carries a share of its engine, wants for
	// itself: WishHost, known for WishMs.
	Wish     DrainWish
	WishHost string
	WishMs   float64
	// Facts are as the agent told them.
	Facts Facts
	// WaitMs is the expected wait of a new request; unknown while no report
	// tells the queue.
	WaitMs float64
	// QueueBasis is what the reported queue rests on; empty: not told.
	QueueBasis ledger.Basis
	// Running, Waiting and KVUsedRatio are the engine's counters.
	Running, Waiting, KVUsedRatio float64
	// Live counts requests, claims on top included; OpenClaims are the claims
	// open here.
	Live       float64
	OpenClaims int
	// InFlight counts what a drain waits for: Live of a worker that is heard, 0
	// of one whose engine is gone; unknown otherwise.
	InFlight float64
	// PendingClaims counts the claims of all coordinators on top of the report.
	PendingClaims float64
	// StepMs is the present decode step, PrefillTokensPerSec the speed of a
	// long prefill by the step model in force.
	StepMs, PrefillTokensPerSec float64
	// SpeedSource says whether that speed is a prior or learnt.
	SpeedSource ledger.Source
	// CachedBlocks is the number of blocks in its table.
	CachedBlocks float64
	// ErrorMs is the mean error of first-token predictions.
	ErrorMs float64
	// View is what is known of its cache, ViewAgeMs how old.
	View      placement.ViewKind
	ViewAgeMs float64
	// Trust is the learnt factor on cache credit.
	Trust float64
	// UpdatedMs is the age of its last report's facts.
	UpdatedMs float64
	// GPUVerdict is what was reported of its GPUs.
	GPUVerdict string
	// Front is its own share of an engine that spans hosts, nil: it is of one;
	// Members are the other shares.
	Front   *group.Share
	Members []group.Member
	// Snapshot is what decisions see.
	Snapshot *placement.Worker
}

// HostInfo is what is known of a host, for people.
type HostInfo struct {
	Name string
	// LaneUp says whether its lane is up; DownMs since when not.
	LaneUp bool
	DownMs float64
	// AgentProcess marks its agent's life.
	AgentProcess uint64
	Version      string
	// UpdatedMs is the age of the last frame, LatenessMs that of the last
	// report on its way.
	UpdatedMs, LatenessMs float64
	// Workers are the names of its workers.
	Workers []string
	// PolicyVersion is the version the host obeys.
	PolicyVersion uint64
	// ConflictWith marks another agent that claims the host's name; 0: none
	// in the last minute.
	ConflictWith uint64
	// ZoneHint and RackHint are what it says of itself.
	ZoneHint, RackHint string
}

// conflictShownMs is how long a refused agent is shown.
const conflictShownMs = 60_000

// Workers lists all workers by name.
func (f *Fleet) Workers(now time.Time) []WorkerInfo {
	f.mu.RLock()
	defer f.mu.RUnlock()
	infos := make([]WorkerInfo, 0, len(f.byName))
	for _, name := range slices.Sorted(maps.Keys(f.byName)) {
		infos = append(infos, f.byName[name].info(f.Ms(now)))
	}
	return infos
}

// Snapshots are all workers as decisions see them, by name.
func (f *Fleet) Snapshots() []*placement.Worker {
	f.mu.RLock()
	defer f.mu.RUnlock()
	out := make([]*placement.Worker, 0, len(f.byName))
	for _, name := range slices.Sorted(maps.Keys(f.byName)) {
		out = append(out, f.byName[name].snapshot)
	}
	return out
}

// Worker is one worker by name.
func (f *Fleet) Worker(now time.Time, name string) (WorkerInfo, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	w := f.byName[name]
	if w == nil {
		return WorkerInfo{}, fmt.Errorf("%w: %q", ErrUnknownWorker, name)
	}
	return w.info(f.Ms(now)), nil
}

// Member is a worker of a pool by its place in it, counted around: its name and
// host, and whether it is ready; of is how many there are, 0 of a pool that is
// unknown. Where many are looked for one that serves, it is cheaper than Workers.
func (f *Fleet) Member(pool string, place int) (name, host string, ready bool, of int) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	p, err := f.pool(pool)
	if err != nil || len(p.workers) == 0 {
		return "", "", false, 0
	}
	w := f.worker(p.workers[place%len(p.workers)])
	return w.name, w.host.name, w.state.word == "ready", len(p.workers)
}

// Endpoint is how to reach a worker.
type Endpoint struct {
	Name    string
	Process uint64
	URL     string
	// Headers must not be changed.
	Headers map[string]string
}

// Endpoint is how to reach the worker of a slot.
func (f *Fleet) Endpoint(id WorkerID) (Endpoint, bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	w := f.worker(id)
	if w == nil {
		return Endpoint{}, false
	}
	return Endpoint{Name: w.name, Process: w.process, URL: w.facts.URL, Headers: w.facts.Headers}, true
}

// LookupWorker is the slot and engine process of a worker by name.
func (f *Fleet) LookupWorker(name string) (id WorkerID, process uint64, ok bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	w := f.byName[name]
	if w == nil {
		return 0, 0, false
	}
	return w.id, w.process, true
}

// Hosts lists all hosts by name.
func (f *Fleet) Hosts(now time.Time) []HostInfo {
	f.mu.RLock()
	defer f.mu.RUnlock()
	nowMs := f.Ms(now)
	infos := make([]HostInfo, 0, len(f.hosts))
	for _, name := range slices.Sorted(maps.Keys(f.hosts)) {
		h := f.hosts[name]
		info := HostInfo{
			Name: name, LaneUp: h.lane != 0, DownMs: math.NaN(), AgentProcess: h.agentProcess, Version: h.version,
			UpdatedMs: nowMs - h.heardMs, LatenessMs: h.late.lastMs, PolicyVersion: h.policyVersion,
			ZoneHint: h.zone, RackHint: h.rack,
		}
		if h.lane == 0 {
			info.DownMs = nowMs - h.downSinceMs
		}
		if nowMs-h.conflictAtMs <= conflictShownMs {
			info.ConflictWith = h.conflictWith
		}
		for _, w := range h.workers {
			info.Workers = append(info.Workers, w.name)
		}
		slices.SortFunc(info.Workers, strings.Compare)
		infos = append(infos, info)
	}
	return infos
}

// PoolInfo is one pool in short.
type PoolInfo struct {
	Name string
	// Workers are in it, Ready of them have the state word ready.
	Workers, Ready int
	// ArrivalsPerSec are the placements claimed here.
	ArrivalsPerSec float64
}

// Pools lists all pools by name.
func (f *Fleet) Pools(now time.Time) []PoolInfo {
	f.mu.RLock()
	defer f.mu.RUnlock()
	infos := make([]PoolInfo, 0, len(f.pools))
	for _, name := range slices.Sorted(maps.Keys(f.pools)) {
		p := f.pools[name]
		info := PoolInfo{Name: name, Workers: len(p.workers), ArrivalsPerSec: zeroIfUnknown(p.arrivals.value(f.Ms(now))) * 1000}
		for _, id := range p.workers {
			if f.slots[id].state.word == "ready" {
				info.Ready++
			}
		}
		infos = append(infos, info)
	}
	return infos
}

// own counts the claims made here that are open.
func (w *worker) own() (n int) {
	for _, p := range w.open {
		if p.c != nil {
			n++
		}
	}
	return n
}

// info is what is known of the worker.
func (w *worker) info(nowMs float64) WorkerInfo {
	r, s := &w.report, w.snapshot
	info := WorkerInfo{
		ID: w.id, Name: w.name, Host: w.host.name, Process: w.process, KnownMs: nowMs - w.addedMs,
		Pool: w.assigned.Pool, Zone: w.assigned.Zone, Rack: w.assigned.Rack,
		State: w.state.word, StateWhy: w.state.why, Facts: copyFacts(&w.facts),
		WaitMs: math.NaN(), Running: r.running, Waiting: r.waiting, KVUsedRatio: r.kvUsedRatio,
		Live: s.Live, OpenClaims: w.own(), PendingClaims: s.OpenClaims, SpeedSource: w.model.Source, QueueBasis: r.basis, StepMs: r.gapMs, CachedBlocks: r.cachedBlocks,
		ErrorMs: s.ErrorMs, View: w.view.Kind, ViewAgeMs: nowMs - w.view.AtMs, Trust: w.view.Trust,
		UpdatedMs: nowMs - r.factsMs, GPUVerdict: r.gpuVerdict, Snapshot: s, Members: w.memberList(),
	}
	wishing := w.host
	if w.group != nil {
		front := *w.group.front
		info.Front = &front
		for _, h := range w.group.hosts {
			if wishing.wish.ID == "" && h.wish.ID != "" {
				wishing = h
			}
		}
	}
	info.Wish, info.WishHost, info.WishMs = wishing.wish, wishing.name, nowMs-wishing.wishedMs
	switch {
	case r.state == ledger.StateLost:
		info.InFlight = 0
	case w.host.lane != 0:
		info.InFlight = s.Live
	default:
		info.InFlight = math.NaN()
	}
	if s.QueueKnown {
		info.WaitMs = w.waiting.QueueMs(nowMs)
	}
	if math.IsNaN(info.StepMs) && w.steps.DecodeMs() > 0 {
		info.StepMs = w.steps.DecodeMs()
	}
	budget := w.steps.BudgetTokens()
	if ms := w.steps.PrefillMs(0, budget); ms > 0 {
		info.PrefillTokensPerSec = float64(budget) / ms * 1000
	} else {
		info.PrefillTokensPerSec = math.NaN()
	}
	return info
}

// DrainWishes are the hosts that want no new placements for themselves.
func (f *Fleet) DrainWishes() map[string]DrainWish {
	f.mu.RLock()
	defer f.mu.RUnlock()
	out := map[string]DrainWish{}
	for name, h := range f.hosts {
		if h.wish.ID != "" {
			out[name] = h.wish
		}
	}
	return out
}
