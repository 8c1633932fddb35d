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
	waypostv1 "waypost/proto/waypost/v1"
)

// judges keep what outcomes taught about the workers and tell the fleet.
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
}

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

// observe learns from a final outcome.
func (j *judges) observe(now time.Time, e *explain.Entry) {
	o := observationOf(e)
	j.mu.Lock()
	w := j.of(e.Worker, e.Process)
	resync := false
	if w != nil {
		nowMs := j.c.fleet.Ms(now)
		if f, err := j.c.fleet.Worker(now, e.Worker); err == nil {
			o.BlockTokens = f.Facts.BlockTokens
		}
		bias := w.BiasTokens()
		w.Observe(nowMs, &o)
		resync = w.ResyncDue(nowMs)
		if w.BiasTokens() != bias {
			j.setBias(w.id, w.BiasTokens())
		}
		j.tell(now, e.Worker, w)
	}
	j.mu.Unlock()
	if resync {
		j.c.lanes.distrust(e.Worker)
	}
}

// observationOf sets an outcome against its prediction, term by term.
func observationOf(e *explain.Entry) outcome.Observation {
	nan := math.NaN()
	out := outcome.Observation{
		Class: e.Class, ExpectedTokens: e.ExpectedTokens, ActualTokens: e.Outcome.CachedTokens,
		ReuseMs: nan, WaitMs: nan, FirstTokenMs: nan, GapMs: nan,
	}
	if e.ExpectedTokens > 0 {
		out.ExpectedTokens -= e.BiasTokens
	}
	o := e.Outcome
	out.FirstTokenMs = o.FirstTokenMs - e.FirstTokenMs
	if e.ExpectedTokens >= 0 && o.CachedTokens >= 0 && e.UncachedTokens > 0 {
		out.ReuseMs = float64(e.ExpectedTokens-o.CachedTokens) * e.PrefillMs / float64(e.UncachedTokens)
		out.WaitMs = out.FirstTokenMs - out.ReuseMs
	}
	if o.OutputTokens > 1 {
		out.GapMs = (o.DurationMs-o.FirstTokenMs)/float64(o.OutputTokens-1) - e.GapMs
	}
	return out
}

// setBias publishes the biases anew.
func (j *judges) setBias(id fleet.WorkerID, tokens int) {
	next := slices.Clone(*j.biases.Load())
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
func (j *judges) debit(matches []placement.Match) {
	biases := *j.biases.Load()
	if len(biases) == 0 {
		return
	}
	for i := range matches {
		if m := &matches[i]; m.Tokens > 0 && int(m.Worker) < len(biases) {
			m.Tokens = max(0, m.Tokens+int(min(biases[m.Worker], 0)))
		}
	}
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

// tell puts what is known of a worker into the fleet.
func (j *judges) tell(now time.Time, name string, w *judged) {
	nowMs := j.c.fleet.Ms(now)
	out := fleet.Judgement{Trust: math.NaN()}
	info, err := j.c.fleet.Worker(now, name)
	if err != nil {
		return
	}
	// Below a twentieth of an outcome the prior of the view says it all.
	if w.Outcomes(nowMs) > .05 {
		out.Trust = w.Trust(nowMs, j.c.policy.Load().PriorTrust(info.View))
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
			if w.BiasTokens() != 0 {
				j.setBias(w.id, 0)
			}
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
	out := &waypostv1.Learnt{
		Outcomes: proto.Float64(w.Outcomes(nowMs)), BiasTokens: proto.Int32(int32(w.BiasTokens())), Resyncs: proto.Uint32(uint32(w.Resyncs())),
		Breaker: proto.String(w.Breaker(nowMs).String()), FailingMs: finite(w.FailingMs(nowMs)), NextProbeMs: finite(w.NextProbeMs(nowMs)),
	}
	for _, e := range w.Errors(nowMs) {
		out.Errors = append(out.Errors, &waypostv1.TermError{Term: proto.String(e.Term.String()), BiasMs: &e.BiasMs, MeanMs: &e.MeanMs, Outcomes: &e.Weight})
	}
	return out
}

// learn takes a final outcome: counters, shares, and what it teaches about the
// worker.
func (c *Coordinator) learn(now time.Time, e *explain.Entry) {
	c.count(now, e)
	c.judges.observe(now, e)
}
