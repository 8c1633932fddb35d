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
	"waypost/gossip/boundary"
	"waypost/gossip/ledger"
)

// Lane is one lane of a host, as handed out by OpenLane.
type Lane uint64

// Hello introduces a host. The caller has checked that the certificate says
// the same host.
type Hello struct {
	// Host is the host's name.
	Host string
	// AgentProcess marks the agent's life.
	AgentProcess uint64
	// Session is the number of the lane within the agent's life; a newer one
	// wins.
	Session uint64
	// Version is the agent's version.
	Version string
	// ZoneHint and RackHint are what the host says of itself.
	ZoneHint, RackHint string
	// EchoesClaims says that the agent takes claims in and echoes them. Of one
	// that does not, counters decide how long a claim counts on top of them.
	EchoesClaims bool
	// Workers are the host's workers.
	Workers []Facts
	// Shares are what the host carries of engines that span hosts.
	// LooksForShares says that the agent looks for them: one that is not told is
	// then not there.
	Shares         []group.Share
	LooksForShares bool
}

// Facts is what seldom changes about a worker. A count of 0 is unknown.
type Facts struct {
	// Index names the worker in the frames of the lane.
	Index uint32
	// Engine is the engine's name on the host; Rank of Ranks behind one
	// endpoint.
	Engine      string
	Rank, Ranks int
	// Kind and EngineVersion say what it is.
	Kind, EngineVersion string
	// EngineProcess marks its life; equality only.
	EngineProcess uint64
	// Model is the served model, Aliases other names and adapters.
	Model   string
	Aliases []string
	// URL is where callers reach it, Headers select the rank.
	URL     string
	Headers map[string]string
	// BlockTokens is the number of tokens per KV block, PoolBlocks the blocks,
	// MaxModelTokens the longest prompt and answer, MaxRunning the largest
	// batch, StepTokens the prefill tokens per step, WindowTokens the sliding
	// window.
	BlockTokens, PoolBlocks, MaxModelTokens, MaxRunning, StepTokens, WindowTokens int
	// Coverage is how much of the cache the events show, CoverageHint what
	// would raise it.
	Coverage, CoverageHint string
	// Capabilities were seen to work.
	Capabilities []string
	// GPUUUIDs are the GPUs its processes use.
	GPUUUIDs []string
	// Boundary names the hashing boundary; Vector is what was measured or
	// declared of it, nil: nothing. It is never changed.
	Boundary string
	Vector   *boundary.Vector
	// StepModel prices its steps; nil: the prior of its class.
	StepModel *ledger.StepModel
	// Transfer says how its saved KV may travel; nil: not at all.
	Transfer *placement.Transfer
	// HostTier says what reading its saved KV back from host memory takes; nil:
	// it does not, or that is not known.
	HostTier *placement.HostTier
	// Role is what it serves of a request: "prefill", "decode", or empty for
	// all of it.
	Role string
	// LeastReuseRatio is the share of a prompt that must be found for any of it
	// to be reused; 0: anything that is found is.
	LeastReuseRatio float64
}

// CapabilityClaimPoints is that of a worker whose engine publishes nothing: its
// agent follows the cache by claims, which carry points, and tells it on the
// prefix stream. Nothing is predicted of it, for a slot that is in use serves
// nobody else, and what was placed is not kept.
const CapabilityClaimPoints = "claim-points"

// CapabilitySessions is that of a worker whose events name the session of the
// request that stored.
const CapabilitySessions = "event-sessions"

// Bounds of a hello.
const (
	maxWorkersPerHost = 256
	maxNameBytes      = 128
	maxTextBytes      = 1024
	maxListEntries    = 256
	maxCount          = math.MaxInt32
)

// validate names the first field that is out of range.
func (h *Hello) validate() error {
	bad := func(field, format string, args ...any) error {
		return fmt.Errorf("%w: %s: %s", ErrHello, field, fmt.Sprintf(format, args...))
	}
	if fault := nameFault(h.Host); fault != "" {
		return bad("host", "%s", fault)
	}
	if h.AgentProcess == 0 {
		return bad("agentProcess", "is 0; the agent must send its process mark")
	}
	if len(h.Workers) > maxWorkersPerHost {
		return bad("workers", "%d are more than %d", len(h.Workers), maxWorkersPerHost)
	}
	if err := h.validateShares(bad); err != nil {
		return err
	}
	indices, names := map[uint32]bool{}, map[string]bool{}
	for i := range h.Workers {
		w := &h.Workers[i]
		field := func(name string) string { return fmt.Sprintf("workers[%d].%s", i, name) }
		if fault := nameFault(w.Engine); fault != "" {
			return bad(field("engine"), "%s", fault)
		}
		if w.Index >= maxWorkersPerHost || indices[w.Index] {
			return bad(field("index"), "%d is used twice or not below %d", w.Index, maxWorkersPerHost)
		}
		if w.Rank < 0 || w.Rank >= maxWorkersPerHost {
			return bad(field("rank"), "%d is not in 0 to %d", w.Rank, maxWorkersPerHost-1)
		}
		name := WorkerName(h.Host, w.Engine, w.Rank)
		if names[name] {
			return bad(field("engine"), "%s is listed twice", name)
		}
		indices[w.Index], names[name] = true, true
		if w.EngineProcess == 0 {
			return bad(field("engineProcess"), "is 0; the agent must send the engine's process mark")
		}
		if err := w.validateRest(bad, field); err != nil {
			return err
		}
	}
	return nil
}

func (w *Facts) validateRest(bad func(string, string, ...any) error, field func(string) string) error {
	for _, c := range [...]struct {
		name  string
		value int
	}{
		{"blockTokens", w.BlockTokens},
		{"poolBlocks", w.PoolBlocks},
		{"maxModelTokens", w.MaxModelTokens},
		{"maxRunning", w.MaxRunning},
		{"stepTokens", w.StepTokens},
		{"windowTokens", w.WindowTokens},
	} {
		if c.value < 0 || c.value > maxCount {
			return bad(field(c.name), "%d is not in 0 to %d", c.value, maxCount)
		}
	}
	for _, c := range [...]struct{ name, value string }{
		{"kind", w.Kind},
		{"engineVersion", w.EngineVersion},
		{"model", w.Model},
		{"url", w.URL},
		{"coverage", w.Coverage},
		{"coverageHint", w.CoverageHint},
		{"boundary", w.Boundary},
	} {
		if len(c.value) > maxTextBytes {
			return bad(field(c.name), "%d bytes are more than %d", len(c.value), maxTextBytes)
		}
	}
	for _, c := range [...]struct {
		name string
		n    int
	}{
		{"aliases", len(w.Aliases)},
		{"headers", len(w.Headers)},
		{"capabilities", len(w.Capabilities)},
		{"gpuUuids", len(w.GPUUUIDs)},
	} {
		if c.n > maxListEntries {
			return bad(field(c.name), "%d entries are more than %d", c.n, maxListEntries)
		}
	}
	if !(w.LeastReuseRatio >= 0 && w.LeastReuseRatio <= 1) {
		return bad(field("leastReuseRatio"), "%v is not in 0 to 1", w.LeastReuseRatio)
	}
	if _, ok := placement.RoleOf(w.Role); !ok {
		return bad(field("role"), "%.40q is not prefill or decode; leave it out for both", w.Role)
	}
	if w.Transfer != nil {
		if fault := w.Transfer.Fault(); fault != "" {
			return bad(field("transfer"), "%s", fault)
		}
	}
	if w.HostTier != nil {
		if fault := w.HostTier.Fault(); fault != "" {
			return bad(field("hostTier"), "%s", fault)
		}
	}
	if w.StepModel != nil {
		if err := w.StepModel.Validate(); err != nil {
			return bad(field("stepModel"), "%v", err)
		}
	}
	return nil
}

// nameFault says what is wrong with a part of a worker's name.
func nameFault(s string) string {
	switch {
	case s == "":
		return "is empty"
	case len(s) > maxNameBytes:
		return fmt.Sprintf("%d bytes are more than %d", len(s), maxNameBytes)
	case strings.ContainsAny(s, "/ \t\n"):
		return fmt.Sprintf("%q holds a slash or white space", s)
	}
	return ""
}

// WorkerName is host/engine/rank.
func WorkerName(host, engine string, rank int) string {
	return fmt.Sprintf("%s/%s/%d", host, engine, rank)
}

// host is one machine with an agent.
type host struct {
	name         string
	lane         Lane // 0: down
	downSinceMs  float64
	heardMs      float64
	agentProcess uint64
	session      uint64
	version      string
	zone, rack   string // hints
	loadSeq      uint64
	late         lateness
	byIndex      map[uint32]*worker
	workers      []*worker

	conflictWith uint64
	conflictAtMs float64 // NaN: never

	// shares are what it told last, also while its lane is down.
	shares []group.Share
	looks  bool

	// policyVersion is the newest that it was told of, cordons its selectors. Both
	// outlive the agent: that a newer policy exists, and what it wants of the host,
	// stays true while the next agent has not heard of it.
	policyVersion uint64
	cordons       []string
	// wish is the host's own, known since wishedMs. It outlives the agent that
	// told it until the next one tells its own.
	wish     DrainWish
	wishedMs float64
}

// OpenLane takes a host's introduction and makes this lane the host's. A
// newer session of the same agent takes the place of the older one. Another
// agent under the same host name is refused with ErrConflict while the lane
// of the first is heard from; the first keeps serving.
func (f *Fleet) OpenLane(now time.Time, hello Hello) (Lane, Changes, error) {
	if err := hello.validate(); err != nil {
		return 0, Changes{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	nowMs := f.Ms(now)
	h := f.hosts[hello.Host]
	if h == nil {
		if len(f.hosts) >= f.options.MaxHosts {
			return 0, Changes{}, fmt.Errorf("%w: %d hosts are known, the bound", ErrFull, len(f.hosts))
		}
		h = &host{name: hello.Host, conflictAtMs: math.NaN(), downSinceMs: nowMs}
	}
	if h.lane != 0 && h.agentProcess == hello.AgentProcess && hello.Session < h.session {
		return 0, Changes{}, fmt.Errorf("%w: %s: session %d, the newest is %d", ErrStaleSession, h.name, hello.Session, h.session)
	}
	if h.lane != 0 && h.agentProcess != hello.AgentProcess && nowMs-h.heardMs <= durationMs(f.options.LaneSilent) {
		h.conflictWith, h.conflictAtMs = hello.AgentProcess, nowMs
		f.counts.Conflicts++
		return 0, Changes{}, fmt.Errorf("%w: %s: agent %016x serves it, agent %016x is refused", ErrConflict, h.name, h.agentProcess, hello.AgentProcess)
	}
	if err := f.roomFor(h, &hello); err != nil {
		return 0, Changes{}, err
	}
	if h.agentProcess != hello.AgentProcess {
		h.loadSeq = 0
	}
	f.hosts[h.name] = h
	f.lanes++
	h.lane, h.session, h.agentProcess = Lane(f.lanes), hello.Session, hello.AgentProcess
	h.late = lateness{}
	var changes Changes
	f.introduce(h, &hello, nowMs, &changes)
	return h.lane, changes, nil
}

// UpdateHello takes changed identity facts on a lane that is open.
func (f *Fleet) UpdateHello(now time.Time, lane Lane, hello Hello) (Changes, error) {
	if err := hello.validate(); err != nil {
		return Changes{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.hosts[hello.Host]
	if h == nil || h.lane != lane || lane == 0 {
		return Changes{}, fmt.Errorf("%w: %s", ErrStaleLane, hello.Host)
	}
	if h.agentProcess != hello.AgentProcess {
		return Changes{}, fmt.Errorf("%w: agentProcess: %016x is not the lane's %016x", ErrHello, hello.AgentProcess, h.agentProcess)
	}
	if err := f.roomFor(h, &hello); err != nil {
		return Changes{}, err
	}
	var changes Changes
	f.introduce(h, &hello, f.Ms(now), &changes)
	return changes, nil
}

// roomFor reports whether the new workers of a hello fit into the bounds.
func (f *Fleet) roomFor(h *host, hello *Hello) error {
	fresh := 0
	for i := range hello.Workers {
		if f.byName[WorkerName(h.name, hello.Workers[i].Engine, hello.Workers[i].Rank)] == nil {
			fresh++
		}
	}
	if len(f.byName)+fresh > f.options.MaxWorkers {
		return fmt.Errorf("%w: %d workers are known, %d more are over the bound of %d", ErrFull, len(f.byName), fresh, f.options.MaxWorkers)
	}
	if stale := len(h.workers) + fresh; stale > 4*maxWorkersPerHost {
		return fmt.Errorf("%w: %s has %d workers, remembered ones included", ErrFull, h.name, stale)
	}
	return nil
}

// introduce takes the facts of a validated hello.
func (f *Fleet) introduce(h *host, hello *Hello, nowMs float64, changes *Changes) {
	h.version, h.zone, h.rack = hello.Version, hello.ZoneHint, hello.RackHint
	h.heardMs = nowMs
	h.downSinceMs = math.NaN()
	h.takeShares(hello)
	h.byIndex = make(map[uint32]*worker, len(hello.Workers))
	listed := map[*worker]bool{}
	var moved []ledger.Class
	for i := range hello.Workers {
		w, remodelled := f.introduceWorker(h, &hello.Workers[i], nowMs, changes)
		h.byIndex[w.facts.Index] = w
		listed[w] = true
		w.echoing = w.echoing || hello.EchoesClaims
		if class := w.class(); remodelled && !slices.Contains(moved, class) {
			moved = append(moved, class)
		}
	}
	for _, class := range moved {
		if f.speedsDiffer(class) {
			f.equalise(class, nowMs, changes)
		}
	}
	for _, w := range h.workers {
		if !listed[w] && w.listed {
			w.listed, w.unlistedMs = false, nowMs
		}
		f.setFront(w, nowMs)
		f.publish(w, nowMs, changes)
	}
	f.regroup(h, nowMs, changes)
}

// introduceWorker takes the facts of one worker and reports whether its step
// model is another one.
func (f *Fleet) introduceWorker(h *host, facts *Facts, nowMs float64, changes *Changes) (w *worker, remodelled bool) {
	name := WorkerName(h.name, facts.Engine, facts.Rank)
	w = f.byName[name]
	fresh := w == nil
	if fresh {
		w = f.addWorker(h, name, nowMs)
		changes.Appeared = append(changes.Appeared, w.id)
	}
	old := w.facts
	w.facts, w.listed = copyFacts(facts), true
	w.followed = slices.Contains(facts.Capabilities, CapabilityClaimPoints)
	if fresh {
		w.process = facts.EngineProcess
	} else if w.process != facts.EngineProcess {
		f.restart(w, facts.EngineProcess, nowMs, changes)
	}
	if fresh || old.Model != facts.Model || old.Boundary != facts.Boundary || !slices.Equal(old.GPUUUIDs, facts.GPUUUIDs) {
		f.assign(w)
	}
	remodelled = w.setModel() || fresh
	w.rebase()
	w.refold()
	return w, remodelled
}

// copyFacts copies what the caller may change later.
func copyFacts(facts *Facts) Facts {
	c := *facts
	c.Aliases, c.Capabilities, c.GPUUUIDs = slices.Clone(c.Aliases), slices.Clone(c.Capabilities), slices.Clone(c.GPUUUIDs)
	c.Headers = maps.Clone(c.Headers)
	if c.StepModel != nil {
		model := *c.StepModel
		c.StepModel = &model
	}
	if c.Transfer != nil {
		transfer := *c.Transfer
		c.Transfer = &transfer
	}
	if c.HostTier != nil {
		host := *c.HostTier
		c.HostTier = &host
	}
	return c
}

// addWorker gives a new worker a slot.
func (f *Fleet) addWorker(h *host, name string, nowMs float64) *worker {
	id := WorkerID(len(f.slots))
	if n := len(f.free); n > 0 {
		id, f.free = f.free[n-1], f.free[:n-1]
	} else {
		f.slots = append(f.slots, nil)
	}
	w := newWorker(id, name, h, f.claims.lastRemovedSeq)
	w.addedMs = nowMs
	f.slots[id], f.byName[name] = w, w
	h.workers = append(h.workers, w)
	clear(f.ways)
	return w
}

// CloseLane tells that a lane is lost: the host is away. A lane that is not
// the host's any more changes nothing.
func (f *Fleet) CloseLane(now time.Time, host string, lane Lane) Changes {
	f.mu.Lock()
	defer f.mu.Unlock()
	var changes Changes
	h := f.hosts[host]
	if h == nil || h.lane != lane || lane == 0 {
		return changes
	}
	nowMs := f.Ms(now)
	h.lane, h.downSinceMs = 0, nowMs
	for _, w := range h.workers {
		f.publish(w, nowMs, &changes)
	}
	f.regroup(h, nowMs, &changes)
	return changes
}

// removeHost forgets a host and frees its slots: nobody expects it back. Its
// claims end.
func (f *Fleet) removeHost(h *host, nowMs float64, changes *Changes) {
	for _, w := range slices.Clone(h.workers) {
		f.removeWorker(w, nowMs, changes)
	}
	delete(f.hosts, h.name)
	f.regroup(h, nowMs, changes)
}

// HasHost says whether a host is known: its lane is up, or was not long ago.
func (f *Fleet) HasHost(host string) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.hosts[host] != nil
}

// removeWorker frees a worker's slot.
func (f *Fleet) removeWorker(w *worker, nowMs float64, changes *Changes) {
	f.endAll(w, nowMs, changes)
	f.dropPeers(w, func(*part) bool { return true })
	w.keptKeys = nil
	f.dropFront(w)
	f.leave(w)
	f.options.Predicted.Drop(w.id)
	h := w.host
	h.workers = slices.DeleteFunc(h.workers, func(other *worker) bool { return other == w })
	if h.byIndex[w.facts.Index] == w {
		delete(h.byIndex, w.facts.Index)
	}
	delete(f.byName, w.name)
	w.listed = false
	f.slots[w.id] = nil
	f.free = append(f.free, w.id)
	f.claims.lastRemovedSeq = max(f.claims.lastRemovedSeq, w.seq)
	clear(f.ways)
	changes.Removed = append(changes.Removed, w.id)
}

// LaneWorker is the worker that a lane means by an index, with its engine
// process.
func (f *Fleet) LaneWorker(host string, lane Lane, index uint32) (id WorkerID, process uint64, ok bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	h := f.hosts[host]
	if h == nil || h.lane != lane || lane == 0 {
		return 0, 0, false
	}
	w := h.byIndex[index]
	if w == nil {
		return 0, 0, false
	}
	return w.id, w.process, true
}

// lateness turns send times of one lane into lateness: the excess of
// (receive − send) over its minimum in the last one to two windows. Neither
// clock's zero matters, and drift is forgotten with the window.
type lateness struct {
	any          bool
	lastSentNs   uint64
	windowMs     float64 // start of the current window
	current, old float64 // minima of receive − send, ms
	lastMs       float64 // newest lateness
}

// latenessWindowMs is the length of one window.
const latenessWindowMs = 30_000

// observe takes a frame and returns its lateness in ms. A send time of 0 is
// unknown and as late as the last one.
func (l *lateness) observe(receivedMs float64, sentNs uint64) float64 {
	if sentNs == 0 {
		return l.lastMs
	}
	diff := receivedMs - float64(sentNs)/1e6
	if !l.any || sentNs < l.lastSentNs {
		// A clock that went back is another clock.
		*l = lateness{any: true, windowMs: receivedMs, current: diff, old: math.Inf(1)}
	}
	l.lastSentNs = sentNs
	if receivedMs-l.windowMs >= latenessWindowMs {
		l.windowMs, l.old, l.current = receivedMs, l.current, diff
	}
	l.current = min(l.current, diff)
	l.lastMs = diff - min(l.current, l.old)
	return l.lastMs
}

func durationMs(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// restart takes a new engine process: nothing of the old one waits, is held
// or is cached any more.
func (f *Fleet) restart(w *worker, process uint64, nowMs float64, changes *Changes) {
	changes.Restarted = append(changes.Restarted, Restart{Worker: w.id, Old: w.process, New: process})
	f.endAll(w, nowMs, changes)
	w.past = append(w.past, w.process)
	if n := len(w.past) - maxPastProcesses; n > 0 {
		w.past = slices.Delete(w.past, 0, n)
	}
	w.process = process
	// Claims that peers made for the old life are over; one that names a life
	// not seen here yet stays, for a peer may know first.
	f.dropPeers(w, func(p *part) bool { return w.isPast(p.EngineProcess) })
	w.keptKeys = w.keptKeys[:0]
	w.report, w.base = unknownReport(), ledger.Waiting{}
	w.view = placement.View{AtMs: math.NaN(), Trust: math.NaN(), EvictionAgeMs: math.NaN()}
	w.errorMs, w.judged = ewma{}, Judgement{}
	f.options.Predicted.Drop(w.id)
}
