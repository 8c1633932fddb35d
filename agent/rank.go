package agent

import (
	"encoding/binary"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/queue"
	"waypost/gossip/accuracy"
	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// rank is one worker of this host: one rank of one engine with its mirror of
// the block table, its prefix stream and its queue estimate. All methods may
// be called from any goroutine.
type rank struct {
	index  uint32
	kind   string
	engine string
	number int
	// endpoint tells this engine apart from all others of the fleet: host
	// and URL.
	endpoint string

	// agentProcess marks the agent's life: frames of claims name it.
	agentProcess uint64
	// restore is what was learnt of this worker before a restart of the agent,
	// restoreAccuracy what was learnt of one of its engine lives.
	restore         func(engine.Facts, uint64) (queue.State, bool)
	restoreAccuracy func(uint64) (accuracy.State, bool)
	// restoreTransfers is what was kept of transfers to this worker.
	restoreTransfers func() transferLog

	// news counts what coordinators want to hear of at once.
	news atomic.Uint64

	mu  sync.Mutex
	key prefix.ClusterKey
	// rotated is the other cluster key while the key is changed; empty: none.
	rotated []prefix.ClusterKey
	// told are the ages of what the latest frames left untold.
	told frameAges
	// maxBlocks bounds the mirror: this worker's share of the host's memory.
	maxBlocks int
	facts     engine.Facts
	known     bool
	process   uint64
	table     *blocktable.Table
	encoder   *summary.Encoder
	// accuracy is how right predictions about the engine life accuracyOf were.
	accuracy   *accuracy.Worker
	accuracyOf uint64
	// transfers are those to this worker that were seen; nil: not asked for yet.
	transfers *transferLog
	// recorder turns what the mirror gains into evidence of claims.
	recorder *queue.Recorder
	// lanes are those that are up, with their coordinator's process mark.
	lanes map[*lane.Lane]uint64
	// shown is what the newest LOAD on each of them showed.
	shown map[*lane.Lane]shown
	// toldModel is the step model of the newest hello, toldWindowed whether it said
	// that there are windows.
	toldModel    ledger.StepModel
	toldWindowed bool
	// beside is a mirror under construction that replaces table when it is
	// complete; nil: none.
	beside *blocktable.Table
	// follow mirrors the cache of an engine that publishes nothing, by the
	// claims on it; nil: its events are mirrored.
	follow   engine.Mirror
	estimate *queue.Estimator
	// wanted are the prompts of which coordinators want to hear what is stored.
	wanted wantedPrompts
	// noProgressAfter is the fleet's bound for a worker without progress; 0:
	// the estimate's own.
	noProgressAfter time.Duration
	coverage        engine.Coverage
	hint            string
	// up says that the engine serves, gone that its process has ended; an engine
	// that does neither does not answer. Until health is heard of, nothing is
	// known. reason says more.
	up, gone, heard bool
	reason          string
	faults          map[string]int
	// events counts the events of the engine's cache that were taken in.
	events uint64
	// overPool says that the engine announces copies that do not exist.
	overPool bool
	// began is the zero of the clock of the mirror's history.
	began time.Time
	// lostAt is when events were last lost, resyncedAt when the view was last
	// read again because a coordinator was wrong about it.
	lostAt, resyncedAt time.Time
	asks               limiter
	// latest is the newest reading of the counters. While holding is set a
	// self-test runs, and the estimate is told of neither counters nor events.
	latest  engine.Load
	holding bool
	// selfTest is what the self-test of the engine life selfTestOf found.
	selfTest   engine.Capability
	selfTestOf uint64
}

// shown is what a LOAD showed: when the queue ends, and what news had counted when it
// was built.
type shown struct {
	end  queue.End
	news uint64
}

func newRank(index uint32, kind, engineName, endpoint string, number int, keys []prefix.ClusterKey, maxBlocks int) *rank {
	return &rank{
		index: index, kind: kind, engine: engineName, endpoint: endpoint, number: number, key: keys[0], rotated: keys[1:], maxBlocks: maxBlocks,
		coverage: engine.CoverageNone, reason: "not reached yet", faults: map[string]int{}, lanes: map[*lane.Lane]uint64{}, shown: map[*lane.Lane]shown{}, began: time.Now(),
	}
}

// setFacts takes the facts of the engine. A changed model is another key
// domain, so the mirror begins anew.
func (r *rank) setFacts(f engine.Facts) {
	r.mu.Lock()
	defer r.mu.Unlock()
	newModel := !r.known || f.Model != r.facts.Model
	r.facts, r.known = f, true
	former := r.process
	if r.process = processMark(r.endpoint, r.number, f.StartMark, r.process); r.process != former {
		r.latest, r.holding = engine.Load{}, false
	}
	if newModel {
		r.mirror(r.newTable())
	}
	r.table.SetPool(f.PoolBlocks)
	r.followHost()
	r.estimateFacts()
}

// followHost lets the mirrors follow blocks into host memory, if the engine reads
// them back from there.
func (r *rank) followHost() {
	on := r.facts.Capabilities.Has(engine.ReadsHostTier)
	for _, t := range []*blocktable.Table{r.table, r.beside} {
		if t != nil {
			t.FollowHost(on)
		}
	}
	// What is told of anew was not computed now.
	r.recorder.Take()
}

// processMark identifies an engine life by what the engine tells of its start;
// one that tells nothing gets a mark of this agent's own.
func processMark(endpoint string, number int, start, former uint64) uint64 {
	if start == 0 {
		if former != 0 {
			return former
		}
		return rand.Uint64() | 1
	}
	h := fnv.New64a()
	// A hash does not fail.
	_, _ = h.Write([]byte(endpoint))
	_, _ = h.Write(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64([]byte{0}, uint64(number)), start))
	return h.Sum64() | 1
}

// setMaxBlocks bounds the mirror from now on.
func (r *rank) setMaxBlocks(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.maxBlocks = n
	for _, t := range []*blocktable.Table{r.table, r.beside} {
		if t != nil {
			t.SetMaxBlocks(n)
		}
	}
}

// newTable makes an empty mirror that remembers what happens to it.
func (r *rank) newTable() *blocktable.Table {
	t := blocktable.New(blocktable.Options{Model: r.facts.Model, MaxBlocks: r.maxBlocks, ExpectBlocks: min(r.facts.PoolBlocks, r.maxBlocks), PoolBlocks: r.facts.PoolBlocks, FollowHost: r.facts.Capabilities.Has(engine.ReadsHostTier), Seed: rand.Uint64()})
	blocktable.NewHistory(t)
	return t
}

// mirror makes a table the rank's mirror, with a stream of its own.
func (r *rank) mirror(t *blocktable.Table) {
	r.table, r.beside, r.follow = t, nil, nil
	r.encoder = r.newEncoder(t)
	r.recorder = queue.NewRecorder(r.key, t, r.encoder)
	t.Listen(r.recorder.ForTable())
	// What the table holds already says nothing of the present.
	r.recorder.Take()
}

// setLoad takes a reading of the counters. due says that a load report is worth
// sending at once.
func (r *rank) setLoad(l engine.Load) (due bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.latest = l
	if r.estimate == nil || r.holding {
		return false
	}
	r.estimate.Sample(queue.Sample(l))
	return r.due(time.Now())
}

func (r *rank) setHealth(up bool, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.up, r.reason, r.heard = up, reason, true
	r.gone = r.gone && !up
}

// leave takes the engine for gone: it is read no more.
func (r *rank) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gone = true
}

func (r *rank) setCoverage(c engine.Coverage, hint string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.coverage, r.hint = c, hint
}

func (r *rank) count(what string, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults[what] += n
	r.lostEvents(what, time.Now())
}

// apply mirrors one event batch. whole is false when the engine announced more
// copies than it can hold: then the mirror claims too much and must be rebuilt
// from the beginning. due says that a load report is worth sending at once: that
// is asked only where the batch told something of the queue, as most tell of
// answers that grow and of blocks that went.
func (r *rank) apply(b engine.Batch) (whole, due bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told.changed(&b)
	r.events += uint64(len(b.Events))
	table := r.table
	if r.beside != nil {
		table = r.beside
	}
	if table == nil {
		return true, false
	}
	table.History().SetNow(r.ms(b.Received.Add(-b.Age)))
	table.ApplyAll(b.Events)
	r.wanted.stored(table, &b)
	due = r.evidence(&b) && r.due(time.Now())
	return !table.OverPool(), due
}

// reset forgets the rank's cache.
func (r *rank) reset(cause engine.ResetCause) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults["reset_"+string(cause)]++
	r.gone = r.gone || cause == engine.ResetGone
	r.beside = nil
	if r.table != nil {
		r.table.Clear()
		r.table.CountCopies(!r.overPool)
	}
	if r.follow != nil {
		r.follow.Reset()
		r.followed(time.Now())
	}
	if cause == engine.ResetRestart && r.facts.StartMark == 0 {
		// Else the facts of the new process say so, before or after this.
		r.process = rand.Uint64() | 1
	}
	if r.estimate != nil {
		r.estimate.CacheCleared()
		r.estimate.SetProcess(r.process)
	}
}

// tooMany notes that some announced copies do not exist, so that the next
// mirror stops counting copies. It reports whether this is news.
func (r *rank) tooMany() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	news := !r.overPool
	r.overPool = true
	r.faults["over_pool"]++
	return news
}

// startBeside begins a new mirror beside the old one, which serves on.
func (r *rank) startBeside(cause engine.ResetCause) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.known {
		return
	}
	r.faults["rebuild_"+string(cause)]++
	r.beside = r.newTable()
	r.beside.CountCopies(!r.overPool)
}

// finishBeside makes the new mirror the rank's.
func (r *rank) finishBeside() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.beside != nil {
		r.mirror(r.beside)
	}
}

// tick builds the next frame of the prefix stream.
func (r *rank) tick(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.encoder != nil {
		r.nextDelta(now)
	}
}

// seq returns the epoch and number of the latest frame.
func (r *rank) seq() (epoch uint32, seq uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.encoder == nil {
		return 0, 0
	}
	return r.encoder.Epoch(), r.encoder.Seq()
}

// framesAfter returns the frames after a position of the stream; ok is false
// if only a snapshot helps.
func (r *rank) framesAfter(epoch uint32, seq uint64) (frames [][]byte, process uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.encoder == nil || r.encoder.Epoch() != epoch {
		return nil, r.process, false
	}
	frames, ok = r.encoder.Replay(seq)
	return frames, r.process, ok
}

// snapshot returns frames that rebuild everything and the position they equal.
func (r *rank) snapshot() (frames [][]byte, process uint64, epoch uint32, seq uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.encoder == nil {
		return nil, r.process, 0, 0
	}
	return r.encoder.Snapshot(), r.process, r.encoder.Epoch(), r.encoder.Seq()
}

// loadReport is what LOAD tells of the rank at a moment.
type loadReport struct {
	load         ledger.Load
	coverage     engine.Coverage
	cachedBlocks int
	idleSlots    []ledger.IdleSlot
}

// report is what the metrics tell of the rank beside that.
type report struct {
	loadReport
	process     uint64
	blockTokens int
	faults      map[string]int
	claims      claimCounts
	// known says that the engine was reached.
	known bool
	// events counts the events of its cache; eventful says that it has some.
	events   uint64
	eventful bool
	// trust is the factor on credit for its cache; NaN: nothing was learnt.
	trust float64
}

func (r *rank) report(now time.Time) report {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := report{
		loadReport: r.loadReport(now),
		process:    r.process, faults: maps.Clone(r.faults), blockTokens: r.facts.BlockTokens, known: r.known, trust: r.trustNow(now),
		events: r.events, eventful: r.events > 0 || r.coverage != engine.CoverageNone && r.follow == nil,
	}
	if r.estimate != nil {
		out.claims = r.claimCounts()
	}
	return out
}

// tellLoad is what a LOAD that goes out on a lane tells of the rank.
func (r *rank) tellLoad(l *lane.Lane, now time.Time) loadReport {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.loadReport(now)
	if _, up := r.lanes[l]; up && r.estimate != nil {
		// What was counted by now happened before, so that the report has it.
		r.shown[l] = shown{r.estimate.Shown(), r.news.Load()}
	}
	return out
}

func (r *rank) loadReport(now time.Time) loadReport {
	out := loadReport{coverage: r.coverage}
	if r.estimate != nil {
		out.load = r.estimate.Load(now)
	}
	out.load.EngineProcess = r.process
	switch {
	case !r.known || !r.heard:
		out.load.State, out.load.StateReason = ledger.StateStarting, r.reason
	case r.gone:
		out.load.State, out.load.StateReason = ledger.StateLost, r.reason
	case !r.up:
		// What it runs may run on: only an end ends reservations.
		out.load.State, out.load.StateReason = ledger.StateStalled, r.reason
	case r.estimate == nil:
		out.load.State = ledger.StateReady
	}
	switch {
	case r.follow != nil:
		out.cachedBlocks = r.follow.Blocks()
		if r.facts.Capabilities.Has(engine.PinsSlots) {
			out.idleSlots = r.follow.Idle()
		}
	case r.table != nil:
		out.cachedBlocks = r.table.Attached()
	}
	return out
}

// rankFacts is what the hello tells of the rank.
type rankFacts struct {
	index    uint32
	engine   string
	number   int
	facts    engine.Facts
	known    bool
	process  uint64
	coverage engine.Coverage
	hint     string
	// model is the step model in force.
	model ledger.StepModel
	// windowed says that groups of its cache hold only the last blocks of a prefix.
	windowed bool
}

func (r *rank) identity() rankFacts {
	r.mu.Lock()
	defer r.mu.Unlock()
	facts := r.facts
	if r.selfTestOf == r.process {
		facts.Capabilities |= r.selfTest
	}
	return rankFacts{r.index, r.engine, r.number, facts, r.known, r.process, r.coverage, r.hint, r.stepModel(), r.windowed()}
}
