package fleet

import (
	"fmt"
	"math"
	"slices"
	"time"

	"waypost/coordinator/group"
	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// Report is one load report of a host.
type Report struct {
	// AgentProcess marks the agent's life, LoadSeq numbers its reports.
	AgentProcess, LoadSeq uint64
	// SentMonoNs is the sender's monotonic clock at sending; 0: unknown.
	SentMonoNs uint64
	// PolicyVersion is the version the host obeys, Cordons the selectors it
	// was told.
	PolicyVersion uint64
	Cordons       []string
	// Wish is what the host wants for itself.
	Wish DrainWish
	// Workers are the loads by index.
	Workers []WorkerLoad
	// Shares are the verdicts on the GPUs of shares.
	Shares []ShareVerdict
}

// DrainWish is a host's own wish for no new placements; the zero value is none.
type DrainWish struct {
	// ID tells it from others, at most 64 bytes; Reason says why, at most 512.
	ID, Reason string
}

// WorkerLoad is the load of the worker with an index.
type WorkerLoad struct {
	Index uint32
	ledger.Load
}

const (
	maxCordons       = 4096
	maxSelectorBytes = 512
	maxWishIDBytes   = 64
)

// Claims that a report does not speak of stay on top of it until the report
// must have known them: rule 10 of the ledger's protocol for agents that echo
// claims, and for counters alone the age at which a request that was sent is
// expected to be counted.
const (
	echoGraceMs    = 300
	counterGraceMs = 100
)

func (r *Report) validate() error {
	if len(r.Cordons) > maxCordons {
		return fmt.Errorf("%w: cordons: %d are more than %d", ErrReport, len(r.Cordons), maxCordons)
	}
	for i, selector := range r.Cordons {
		if len(selector) > maxSelectorBytes {
			return fmt.Errorf("%w: cordons[%d]: %d bytes are more than %d", ErrReport, i, len(selector), maxSelectorBytes)
		}
	}
	if w := &r.Wish; len(w.ID) > maxWishIDBytes || len(w.Reason) > maxSelectorBytes {
		return fmt.Errorf("%w: drain_wish: id of %d and reason of %d bytes are more than %d and %d", ErrReport, len(w.ID), len(w.Reason), maxWishIDBytes, maxSelectorBytes)
	}
	if len(r.Workers) > maxWorkersPerHost {
		return fmt.Errorf("%w: workers: %d are more than %d", ErrReport, len(r.Workers), maxWorkersPerHost)
	}
	if len(r.Shares) > group.MaxShares {
		return fmt.Errorf("%w: shares: %d are more than %d", ErrReport, len(r.Shares), group.MaxShares)
	}
	for i := range r.Shares {
		if n := len(r.Shares[i].Verdict); n > maxSelectorBytes {
			return fmt.Errorf("%w: shares[%d].verdict: %d bytes are more than %d", ErrReport, i, n, maxSelectorBytes)
		}
	}
	for i := range r.Workers {
		if err := r.Workers[i].Validate(); err != nil {
			return fmt.Errorf("%w: workers[%d]: %w", ErrReport, i, err)
		}
	}
	return nil
}

// Load takes a load report from a host's lane. A report with a bad field
// changes nothing. A worker's part that names an engine process which is over
// is fenced; one that names a process never seen is the news of a restart.
func (f *Fleet) Load(now time.Time, host string, lane Lane, report Report) (Changes, error) {
	if err := report.validate(); err != nil {
		return Changes{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	var changes Changes
	h := f.hosts[host]
	if h == nil || h.lane != lane || lane == 0 || h.agentProcess != report.AgentProcess {
		return changes, fmt.Errorf("%w: %s", ErrStaleLane, host)
	}
	nowMs := f.Ms(now)
	h.heardMs = nowMs
	if report.LoadSeq <= h.loadSeq {
		f.counts.OldReports++
		return changes, nil
	}
	late := h.late.observe(nowMs, report.SentMonoNs)
	h.loadSeq = report.LoadSeq
	f.counts.Reports++
	told := report.PolicyVersion > h.policyVersion || report.PolicyVersion == h.policyVersion && !slices.Equal(h.cordons, report.Cordons)
	if told {
		h.policyVersion, h.cordons = report.PolicyVersion, slices.Clone(report.Cordons)
	}
	if h.wish != report.Wish {
		told, h.wish, h.wishedMs = true, report.Wish, nowMs
	}
	for i := range report.Workers {
		load := &report.Workers[i]
		w := h.byIndex[load.Index]
		switch {
		case w == nil || w.isPast(load.EngineProcess):
			f.counts.FencedReports++
			continue
		case load.EngineProcess != w.process:
			f.restart(w, load.EngineProcess, nowMs, &changes)
		}
		f.takeLoad(w, &load.Load, nowMs-late)
		f.countEchoes(w, load.Echo, nowMs)
		f.offerAfter(w, load.EchoOf(f.options.Process))
		if w.report.state == ledger.StateLost {
			f.endAll(w, nowMs, &changes)
		}
		w.refold()
		f.publish(w, nowMs, &changes)
	}
	if told {
		for _, w := range h.workers {
			f.publish(w, nowMs, &changes)
		}
		f.publishFrontsOf(h, nowMs, &changes)
	}
	if h.takeVerdicts(report.Shares) {
		f.regroup(h, nowMs, &changes)
	}
	return changes, nil
}

// takeLoad takes the report of one worker, written at writtenMs.
func (f *Fleet) takeLoad(w *worker, l *ledger.Load, writtenMs float64) {
	r := unknownReport()
	r.any = true
	r.writtenMs, r.factsMs = writtenMs, writtenMs
	if l.AgeMs != nil {
		r.factsMs = writtenMs - *l.AgeMs
	}
	if l.CountersAgeMs != nil {
		r.sampledMs = writtenMs - *l.CountersAgeMs
	}
	r.state, r.stateReason, r.gpuVerdict, r.coverage = l.State, l.StateReason, l.GPUVerdict, l.Coverage
	r.queueMs, r.contextTokens, r.gapMs = float(l.QueueMs), float(l.ContextTokens), float(l.GapMs)
	r.decoding, r.live, r.foreign = number(l.Decoding), number(l.Live), number(l.Foreign)
	r.heldBlocks, r.meanOutput, r.finishPerSec = float(l.HeldBlocks), float(l.MeanOutputTokens), float(l.FinishPerSec)
	r.running, r.waiting, r.cachedBlocks = number(l.Running), number(l.Waiting), number(l.CachedBlocks)
	r.kvUsedRatio, r.evictionAgeMs = float(l.KVUsedRatio), float(l.EvictionAgeMs)
	if l.OpenTokens != nil {
		r.openTokens = int(*l.OpenTokens)
	}
	r.basis = l.QueueBasis
	w.report, w.echoes = r, append(w.echoes[:0], l.Echo...)
	w.setSteps()
	f.sizeQueue(w)
	w.rebase()
	f.cover(w, l)
}

// sizeQueue prices the requests that wait on a worker whose agent cannot,
// because it knows no request's size: by the pool's mean claim.
func (f *Fleet) sizeQueue(w *worker) {
	r := &w.report
	pool := f.pools[w.assigned.Pool]
	if pool == nil || !math.IsNaN(r.queueMs) || !(r.foreign > 0) || !(r.foreign == r.waiting) {
		return
	}
	uncached, prompt := pool.uncachedTokens.get(), pool.promptTokens.get()
	if math.IsNaN(uncached) {
		return
	}
	ms := w.steps.PrefillMs(int(prompt-uncached), int(uncached)) + w.steps.DecodeMs()
	r.queueMs = min(max((r.foreign+.5)*ms-(r.writtenMs-r.sampledMs), 0), ledger.MaxQueueMs)
}

func float(v *float64) float64 {
	if v == nil {
		return math.NaN()
	}
	return *v
}

func number(v *uint32) float64 {
	if v == nil {
		return math.NaN()
	}
	return float64(*v)
}

// SetView tells what is known of a worker's cache: how much is seen and how
// old it was when it was sent; the lane's lateness is added. A process that is
// not the worker's changes nothing.
func (f *Fleet) SetView(now time.Time, id WorkerID, process uint64, kind placement.ViewKind, age time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := f.worker(id)
	if w == nil || w.process != process {
		return
	}
	nowMs := f.Ms(now)
	w.view.Kind = kind
	w.view.AtMs = nowMs - w.host.late.lastMs - max(durationMs(age), 0)
	if kind == placement.ViewBlind {
		w.view.AtMs = math.NaN()
	}
	f.dropKeys(w, func(k keptKeys) bool {
		return !math.IsNaN(k.doneMs) && (kind != placement.ViewLive || w.view.AtMs >= k.doneMs+viewLagMs)
	})
	f.publish(w, nowMs, new(Changes))
}

// ViewOf is the kind of view of a worker's cache, and its engine process.
func (f *Fleet) ViewOf(id WorkerID) (kind placement.ViewKind, process uint64, ok bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	w := f.worker(id)
	if w == nil {
		return 0, 0, false
	}
	return w.view.Kind, w.process, true
}

// Followed says whether a worker's agent follows its cache by claims, which then
// carry points.
func (f *Fleet) Followed(id WorkerID) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	w := f.worker(id)
	return w != nil && w.followed
}

// NamesSessions says whether a worker's events name the session of the request
// that stored.
func (f *Fleet) NamesSessions(id WorkerID) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	w := f.worker(id)
	return w != nil && slices.Contains(w.facts.Capabilities, CapabilitySessions)
}

// Reusable takes back the matches of which a worker's engine reuses nothing:
// too small a share of the prompt was found, or what was found has just been
// given to another request that the worker's report does not tell of yet. keyAt
// names the prompt's prefix of a depth.
func (f *Fleet) Reusable(matches *placement.Matches, promptTokens int, keyAt func(depthTokens int) (prefix.Key, bool)) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	matches.Adjust(func(id WorkerID, h placement.Held) placement.Held {
		w := f.worker(id)
		if w == nil || h.Tokens <= 0 {
			return h
		}
		few := w.facts.LeastReuseRatio > 0 && float64(h.Tokens) <= w.facts.LeastReuseRatio*float64(promptTokens)
		if few || w.followed && w.taken(int(h.Tokens), keyAt) {
			return placement.Held{Predicted: h.Predicted}
		}
		return h
	})
}

// taken says whether an open claim that the worker has not echoed begins with the
// same prefix, of some depth.
func (w *worker) taken(depthTokens int, keyAt func(int) (prefix.Key, bool)) bool {
	at := depthTokens/ledger.PointTokens - 1
	if at < 0 {
		return false
	}
	key, ok := keyAt((at + 1) * ledger.PointTokens)
	return ok && slices.ContainsFunc(w.open, func(p *part) bool {
		return p.pending() && at < len(p.Points) && p.Points[at] == key
	})
}

// CapacityTokens is how many tokens of KV cache a worker's engine says it has;
// 0: it does not say.
func (f *Fleet) CapacityTokens(id WorkerID) uint64 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	w := f.worker(id)
	if w == nil {
		return 0
	}
	return uint64(w.facts.PoolBlocks) * uint64(w.facts.BlockTokens)
}

// worker is the worker of a slot; nil if it is free.
func (f *Fleet) worker(id WorkerID) *worker {
	if int(id) >= len(f.slots) {
		return nil
	}
	return f.slots[id]
}
