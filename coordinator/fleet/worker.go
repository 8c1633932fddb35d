package fleet

import (
	"math"
	"strings"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
)

// maxPastProcesses bounds the remembered engine lives of a worker.
const maxPastProcesses = 8

// worker is one schedulable engine rank.
type worker struct {
	id   WorkerID
	name string
	host *host

	facts      Facts
	followed   bool // its agent follows its cache by claims, as facts say
	listed     bool // in the newest hello
	unlistedMs float64
	process    uint64
	past       []uint64 // engine lives that are over
	assigned   Assignment

	model      ledger.StepModel
	stepTokens int
	steps      ledger.Steps // at the decode load of the report

	addedMs float64 // when it was first heard of
	report  report
	view    placement.View
	errorMs ewma
	judged  Judgement

	seq      uint64        // last own claim seq
	open     []*part       // claims by time made: own open ones, and peers'
	echoes   []ledger.Echo // of the newest report
	echoing  bool          // its agents echo claims
	group    *grouped      // nil: its engine is of one host
	counted  []counted     // arrivals of peers' claims
	keptKeys []keptKeys    // predicted keys of peers' claims
	offer    offering
	ownModel ledger.StepModel // as its agent tells it; model is equalised
	base     ledger.Waiting   // by the newest report that told a queue
	waiting  ledger.Waiting   // base and the open claims on top
	state    stateWord

	snapshot *placement.Worker
}

func newWorker(id WorkerID, name string, h *host, seq uint64) *worker {
	w := &worker{
		id: id, name: name, host: h, seq: seq, report: unknownReport(),
		view: placement.View{AtMs: math.NaN(), Trust: math.NaN(), EvictionAgeMs: math.NaN()},
	}
	blank := placement.NewWorker(id, name)
	w.snapshot = &blank
	return w
}

// report is the newest load report of a worker, in values: NaN is unknown.
type report struct {
	any bool
	// writtenMs is when it was written, factsMs when its oldest fact was
	// true (if it does not say, when it was written), sampledMs when the
	// engine's counters were read; on the fleet's clock.
	writtenMs, factsMs, sampledMs float64

	state       ledger.State
	stateReason string
	gpuVerdict  string
	coverage    string

	queueMs, decoding, contextTokens, gapMs, live, heldBlocks, foreign float64
	meanOutput, finishPerSec, evictionAgeMs                            float64
	running, waiting, kvUsedRatio, cachedBlocks                        float64
	openTokens                                                         int
	basis                                                              ledger.Basis
	// foldedLive counts claims that were folded into the report for room.
	foldedLive float64
}

func unknownReport() report {
	nan := math.NaN()
	return report{
		writtenMs: nan, factsMs: nan, sampledMs: nan,
		queueMs: nan, decoding: nan, contextTokens: nan, gapMs: nan, live: nan, heldBlocks: nan, foreign: nan,
		meanOutput: nan, finishPerSec: nan, evictionAgeMs: nan,
		running: nan, waiting: nan, kvUsedRatio: nan, cachedBlocks: nan,
	}
}

// setSteps prices steps at the report's decode load, which its agent carried
// to the moment of writing; it is held until the next report. What is unknown
// is left out.
func (w *worker) setSteps() {
	r := &w.report
	decoding, context := zeroIfUnknown(r.decoding), zeroIfUnknown(r.contextTokens)
	pool := float64(w.facts.PoolBlocks) * float64(w.facts.BlockTokens)
	w.steps = ledger.NewSteps(w.model, w.stepTokens, w.model.DecodeMs(decoding, context, pool))
}

func zeroIfUnknown(v float64) float64 {
	if math.IsNaN(v) {
		return 0
	}
	return v
}

// rebase takes the waiting work from the report. A report that does not tell
// the queue leaves the walk from the last one that did: starting it anew would
// let claims wait again that were served long ago.
func (w *worker) rebase() {
	r := &w.report
	if !math.IsNaN(r.queueMs) {
		w.base = ledger.AtLoad(&w.steps, r.writtenMs, r.queueMs, r.openTokens)
	}
}

// refold computes the waiting work anew: the report, then every claim that is
// not in it, in the order they were made.
func (w *worker) refold() {
	w.waiting = w.base
	for _, p := range w.open {
		if p.waits() {
			w.waiting.Fold(&w.steps, p.MadeMs, p.ReusedTokens(), p.UncachedTokens)
		}
	}
}

// publish makes a new snapshot of the worker and notes a change of its state.
func (f *Fleet) publish(w *worker, nowMs float64, changes *Changes) {
	s := placement.NewWorker(w.id, w.name)
	s.Process = w.process
	s.Steps = w.steps
	s.BlockTokens, s.PoolBlocks = w.facts.BlockTokens, w.facts.PoolBlocks
	s.Transfer, s.Host, s.Served = w.facts.Transfer, w.facts.HostTier, w.facts.Aliases
	s.Role, _ = placement.RoleOf(w.facts.Role)
	s.MaxModelTokens, s.MaxRunning = w.facts.MaxModelTokens, w.facts.MaxRunning
	s.Waiting = w.waiting
	r := &w.report
	s.QueueKnown = !math.IsNaN(r.queueMs)
	s.LoadAtMs = r.factsMs
	s.Decoding, s.ContextTokens, s.GapMs = r.decoding, r.contextTokens, r.gapMs
	s.MeanOutputTokens, s.FinishPerSec = r.meanOutput, r.finishPerSec
	pending, blocks := w.pending()
	s.OpenClaims = pending
	s.Live = r.live + pending
	s.HeldBlocks = r.heldBlocks + blocks
	s.ErrorMs = w.errorMs.get()
	s.View = w.view
	s.View.EvictionAgeMs = r.evictionAgeMs
	s.AwaySinceMs = w.awaySinceMs()
	s.Barred, s.BarredWhy = w.barred(f.intent.Version)
	s.Doubted, s.DoubtedWhy = w.doubted()
	w.snapshot = &s
	if p := f.pools[w.assigned.Pool]; p != nil && p.board.Has(w.id) {
		p.board.Set(&s)
	}

	state := w.stateWord()
	if state != w.state {
		if w.state.word != "" && state.word != w.state.word {
			changes.States = append(changes.States, StateChange{Worker: w.id, Name: w.name, From: w.state.word, To: state.word, Why: state.why})
		}
		w.state = state
	}
}

// pending counts the live requests and the KV blocks of claims that are not
// in the report.
func (w *worker) pending() (requests, blocks float64) {
	requests = w.report.foldedLive
	for _, p := range w.open {
		if !p.pending() {
			continue
		}
		requests += float64(p.Sequences)
		if w.facts.BlockTokens > 0 {
			blocks += float64((p.UncachedTokens+w.facts.BlockTokens-1)/w.facts.BlockTokens + 1)
		}
	}
	return requests, blocks
}

// barred is what no need relaxes: a cordon, or that the worker is gone.
func (w *worker) barred(ownVersion uint64) (placement.Reason, string) {
	if cordoned, why := w.cordon(ownVersion); cordoned {
		return placement.ReasonCordoned, why
	}
	switch {
	case !w.listed:
		return placement.ReasonLost, "its agent lists it no more"
	case w.report.state == ledger.StateLost:
		return placement.ReasonLost, w.report.stateReason
	}
	return placement.ReasonNone, ""
}

// doubted is what was observed against the worker.
func (w *worker) doubted() (placement.Reason, string) {
	r := &w.report
	if reason, ok := strings.CutPrefix(r.gpuVerdict, "exclude"); ok {
		return placement.ReasonGPUFault, strings.TrimLeft(reason, ": ")
	}
	switch r.state {
	case "", ledger.StateReady, ledger.StateLost:
		if reason, why := w.groupDoubt(); reason != placement.ReasonNone {
			return reason, why
		}
		if w.judged.Failing {
			return placement.ReasonFailing, w.judged.Why
		}
		return placement.ReasonNone, ""
	case ledger.StateStarting:
		return placement.ReasonStarting, r.stateReason
	case ledger.StateSleeping:
		return placement.ReasonSleeping, r.stateReason
	case ledger.StateStalled:
		return placement.ReasonStalled, r.stateReason
	}
	why := string(r.state)
	if r.stateReason != "" {
		why += ": " + r.stateReason
	}
	return placement.ReasonNotReady, why
}

// stateWord is the state that people see.
type stateWord struct{ word, why string }

func (w *worker) stateWord() stateWord {
	s := w.snapshot
	switch {
	case s.Barred != placement.ReasonNone:
		return stateWord{s.Barred.String(), s.BarredWhy}
	case w.host.lane == 0:
		return stateWord{"away", "the host's lane is lost"}
	case s.Doubted == placement.ReasonGPUFault || s.Doubted == placement.ReasonGroupIncomplete:
		return stateWord{"excluded:" + s.Doubted.String(), s.DoubtedWhy}
	case !math.IsNaN(s.AwaySinceMs):
		return stateWord{"away", w.group.health.Why}
	case s.Doubted == placement.ReasonNotReady:
		return stateWord{string(w.report.state), w.report.stateReason}
	case s.Doubted != placement.ReasonNone:
		return stateWord{s.Doubted.String(), s.DoubtedWhy}
	case !w.report.any:
		return stateWord{"starting", "no report yet"}
	case w.judged.Probing:
		return stateWord{"probing", w.judged.Why}
	}
	return stateWord{"ready", ""}
}

// isPast reports whether a process mark is that of a life that is over.
func (w *worker) isPast(process uint64) bool {
	for _, p := range w.past {
		if p == process {
			return true
		}
	}
	return false
}
