package coordinator

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/explain"
	"waypost/coordinator/fleet"
	"waypost/coordinator/outcome"
	"waypost/coordinator/placement"
	"waypost/gossip/accuracy"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// judges keep what outcomes taught about the workers and tell the fleet. How
// right predictions were is folded by the workers' agents, which hear of it from
// all coordinators; what is done about a worker that fails is decided here.
type judges struct {
	c *Coordinator

	mu      sync.Mutex
	workers map[string]*judged
	// biases are the learnt ones by worker, for decisions; empty as long as all
	// are 0.
	biases atomic.Pointer[[]int32]
}

// judged is one engine life.
type judged struct {
	id      fleet.WorkerID
	process uint64
	*outcome.Worker
	// accuracy is what its agent told last, at accuracyMs.
	accuracy   accuracy.Report
	accuracyMs float64
}

var accuracyLimits = accuracy.DefaultLimits()

func newJudges(c *Coordinator) *judges {
	j := &judges{c: c, workers: map[string]*judged{}}
	j.biases.Store(new([]int32))
	return j
}

// of is the record of a worker's engine life; nil: the life is over.
func (j *judges) of(name string, process uint64) *judged {
	id, now, ok := j.c.fleet.LookupWorker(name)
	if !ok || now != process {
		return nil
	}
	w := j.workers[name]
	if w == nil || w.process != process {
		w = &judged{id: id, process: process, Worker: outcome.NewWorker(outcome.DefaultLimits())}
		j.workers[name] = w
	}
	return w
}

// ended tells how a request ended on a worker.
func (j *judges) ended(now time.Time, e *explain.Entry, o *outcome.Outcome) {
	if o.Result != outcome.ResultDone && !o.WorkerFault() {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	w := j.of(e.Worker, e.Process)
	if w == nil {
		return
	}
	w.Ended(j.c.fleet.Ms(now), o.WorkerFault())
	j.tell(now, e.Worker, w)
}

// observe learns from a final outcome, and has the worker's agent learn.
func (j *judges) observe(now time.Time, e *explain.Entry) {
	o := observationOf(e)
	resync, lacking := false, false
	j.mu.Lock()
	if w := j.of(e.Worker, e.Process); w != nil {
		nowMs := j.c.fleet.Ms(now)
		if !e.SpareSource {
			w.Observe(nowMs, e.Class, o.ExpectedTokens, e.Outcome.CachedTokens)
		}
		resync, lacking = w.ResyncDue(nowMs)
	}
	j.mu.Unlock()
	j.c.lanes.report(e.Worker, o)
	if resync {
		j.c.views.Distrust(e.Worker, lacking)
	}
}

// reported takes what a worker's agent folded of all coordinators' outcomes.
func (j *judges) reported(now time.Time, id fleet.WorkerID, process uint64, r accuracy.Report) {
	w, ok := j.c.fleet.Endpoint(id)
	if !ok || w.Process != process {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	known := j.of(w.Name, process)
	if known == nil {
		return
	}
	known.accuracy, known.accuracyMs = r, j.c.fleet.Ms(now)
	j.setBias(id, r.BiasTokens)
	j.tell(now, w.Name, known)
}

// observationOf sets an outcome against its prediction, term by term. Reuse beside a
// spare source may be the source's: it says nothing of the worker's view.
func observationOf(e *explain.Entry) *lane.Observed {
	out := &lane.Observed{EngineProcess: e.Process, Observation: accuracy.NewObservation()}
	o := e.Outcome
	out.FirstTokenMs = o.FirstTokenMs - e.FirstTokenMs
	if !e.SpareSource && e.ExpectedTokens >= 0 && o.CachedTokens >= 0 && e.UncachedTokens > 0 {
		out.ReuseMs = float64(e.ExpectedTokens-o.CachedTokens) * e.PrefillMs / float64(e.UncachedTokens)
		out.WaitMs = out.FirstTokenMs - out.ReuseMs
	}
	if o.OutputTokens > 1 {
		out.GapMs = (o.DurationMs-o.FirstTokenMs)/float64(o.OutputTokens-1) - e.GapMs
	}
	if e.SpareSource {
		return out
	}
	if out.ExpectedTokens = e.ExpectedTokens; e.ExpectedTokens > 0 {
		out.ExpectedTokens -= e.BiasTokens
	}
	if e.Class != outcome.ClassRestarted {
		// What a new process does not hold is no error of the view.
		out.ActualTokens = o.CachedTokens
	}
	return out
}

// setBias publishes the biases anew.
func (j *judges) setBias(id fleet.WorkerID, tokens int) {
	before := *j.biases.Load()
	if int(id) < len(before) && before[id] == int32(tokens) || int(id) >= len(before) && tokens == 0 {
		return
	}
	next := slices.Clone(before)
	if tokens != 0 && int(id) >= len(next) {
		next = append(next, make([]int32, int(id)+1-len(next))...)
	}
	if int(id) < len(next) {
		next[id] = int32(tokens)
	}
	if !slices.ContainsFunc(next, func(t int32) bool { return t != 0 }) {
		next = nil
	}
	j.biases.Store(&next)
}

// bias is what a worker's engine constantly reuses less than is listed, at
// most 0.
func (j *judges) bias(id fleet.WorkerID) int {
	if biases := *j.biases.Load(); int(id) < len(biases) {
		return int(min(biases[id], 0))
	}
	return 0
}

// debit takes from the matches what workers' engines constantly reuse less than
// is listed.
func (j *judges) debit(matches *placement.Matches) {
	biases := *j.biases.Load()
	if len(biases) == 0 {
		return
	}
	matches.Adjust(func(id placement.WorkerID, h placement.Held) placement.Held {
		if h.Tokens > 0 && int(id) < len(biases) {
			h.Tokens = max(0, h.Tokens+min(biases[id], 0))
			h.LowerTokens = min(h.LowerTokens, h.Tokens)
		}
		return h
	})
}

// takeProbe asks whether a placement may go to a chosen worker.
func (j *judges) takeProbe(now time.Time, name string, process uint64) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	w := j.workers[name]
	if w == nil || w.process != process {
		return true
	}
	nowMs := j.c.fleet.Ms(now)
	if w.Breaker(nowMs) == outcome.BreakerClosed {
		return true // as nearly always; the fleet knows
	}
	ok := w.TakeProbe(nowMs)
	j.tell(now, name, w)
	return ok
}

// disagrees says whether predictions about a worker went wrong of late.
func (j *judges) disagrees(now time.Time, name string, process uint64) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	w := j.workers[name]
	return w != nil && w.process == process && w.Disagrees(j.c.fleet.Ms(now))
}

// tell puts what is known of a worker into the fleet.
func (j *judges) tell(now time.Time, name string, w *judged) {
	nowMs := j.c.fleet.Ms(now)
	out := fleet.Judgement{Trust: math.NaN()}
	info, err := j.c.fleet.Worker(now, name)
	if err != nil {
		return
	}
	// Below a twentieth of an outcome the prior of the view says it all.
	if age := nowMs - w.accuracyMs; w.accuracy.OutcomesAfter(&accuracyLimits, age) > .05 {
		out.Trust = w.accuracy.Trust(&accuracyLimits, age, j.c.policy.Load().PriorTrust(info.View))
	}
	switch state := w.Breaker(nowMs); {
	case state == outcome.BreakerOpen:
		out.Failing = true
		out.Why = "it fails what it is given; a probe placement follows"
	case state == outcome.BreakerProbing && !w.Placeable(nowMs):
		out.Failing = true
		out.Why = "a probe placement is under way"
	case state == outcome.BreakerProbing:
		out.Probing = true
		out.Why = "the next placement is a probe"
	}
	j.c.note(j.c.fleet.Judge(now, w.id, w.process, out))
}

// tick lets trust return to its prior and probes come due.
func (j *judges) tick(now time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for name, w := range j.workers {
		id, process, ok := j.c.fleet.LookupWorker(name)
		if !ok || process != w.process || id != w.id {
			j.setBias(w.id, 0)
			delete(j.workers, name)
			continue
		}
		j.tell(now, name, w)
	}
}

// learnt puts what is known of a worker into the API's words; nil: nothing.
func (j *judges) learnt(now time.Time, name string, process uint64) *waypostv1.Learnt {
	j.mu.Lock()
	defer j.mu.Unlock()
	w := j.workers[name]
	if w == nil || w.process != process {
		return nil
	}
	nowMs := j.c.fleet.Ms(now)
	return &waypostv1.Learnt{
		Outcomes: proto.Float64(w.accuracy.OutcomesAfter(&accuracyLimits, nowMs-w.accuracyMs)), BiasTokens: proto.Int32(int32(w.accuracy.BiasTokens)),
		Errors: lane.TermErrorsOf(w.accuracy.Errors), Resyncs: proto.Uint32(uint32(w.Resyncs())),
		Breaker: proto.String(w.Breaker(nowMs).String()), FailingMs: finite(w.FailingMs(nowMs)), NextProbeMs: finite(w.NextProbeMs(nowMs)),
	}
}

// learn takes a final outcome: counters, shares, and what it teaches about the
// worker.
func (c *Coordinator) learn(now time.Time, e *explain.Entry) {
	c.count(now, e)
	c.judges.observe(now, e)
}
