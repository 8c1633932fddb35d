package sim

import (
	"math"
	"math/rand/v2"
	"slices"

	"waypost/testbed/sim/cluster"
	"waypost/testbed/sim/rules"
	"waypost/testbed/sim/truth"
	"waypost/testbed/sim/vtime"
)

// The linear engine's settings.
const (
	linearStepTokens = 2048
	linearPoolBlocks = 1 << 17
)

// ledgerRequest is one request of a run of model ledger.
type ledgerRequest struct {
	*ledgerArrival
	id     int
	worker int
	engine *truth.Request
	sent   bool
	over   bool // it was given up, lost with its engine, or never sent
}

// gauge is what an engine's metrics said at the end of a step.
type gauge struct {
	atMs     float64
	counters truth.Counters
}

// ledgerRun is one run of model ledger.
type ledgerRun struct {
	clock    vtime.Clock
	engines  []*truth.Engine
	stepEnds []float64 // of the step in flight
	// lives counts the lives of an engine: what was asked of a former one is
	// void.
	lives []int
	// believed multiplies what the rules take a worker's prefill to last.
	believed []float64
	requests []ledgerRequest
	byEngine map[*truth.Request]*ledgerRequest
	place    func(r *ledgerRequest) int
	lagMs    float64
	history  [][]gauge
	endMs    float64                   // of the arrivals
	progress func(done, all int) error // an error ends the run
	err      error

	cluster  *cluster.Cluster
	evidence evidence
	waits    []float64

	rng *rand.Rand
	// off are believed less true waiting ms of workers at placements.
	off    []float64
	belief func(worker int) float64
	// residue is what the ledger held when all was over.
	residue int
}

func newLedgerRun(arrivals []ledgerArrival, believed []float64, lagMs float64, seed uint64) (*ledgerRun, error) {
	n := len(believed)
	run := &ledgerRun{
		requests: make([]ledgerRequest, len(arrivals)), byEngine: map[*truth.Request]*ledgerRequest{},
		engines: make([]*truth.Engine, n), stepEnds: make([]float64, n), lives: make([]int, n), believed: believed,
		history: make([][]gauge, n), lagMs: lagMs, rng: rand.New(rand.NewPCG(seed, 6)),
	}
	for w := range believed {
		run.newEngine(w)
	}
	for i := range arrivals {
		r := &run.requests[i]
		*r = ledgerRequest{ledgerArrival: &arrivals[i], id: i, engine: &truth.Request{Prompt: arrivals[i].prompt, OutputTokens: arrivals[i].outputTokens}}
		run.byEngine[r.engine] = r
		run.clock.At(warmUpMs+r.atMs, func() { run.arrive(r) })
		run.endMs = warmUpMs + r.atMs
	}
	return run, run.err
}

func (run *ledgerRun) newEngine(w int) {
	e, err := truth.New(truth.Options{StepTokens: linearStepTokens, PoolBlocks: linearPoolBlocks, StepTime: truth.Linear})
	run.fail(err)
	run.engines[w], run.history[w] = e, []gauge{{}}
	run.lives[w]++
}

func (run *ledgerRun) fail(err error) {
	if err != nil && run.err == nil {
		run.err = err
	}
}

func (run *ledgerRun) arrive(r *ledgerRequest) {
	if run.progress != nil {
		run.fail(run.progress(r.id+1, len(run.requests)))
	}
	if r.fate == fateForeign {
		run.send(r, r.foreignTo)
		return
	}
	if run.belief != nil && r.id%beliefEvery == 0 {
		if run.cluster != nil {
			run.waits = run.cluster.Waits(0, run.waits)
		}
		for w := range run.engines {
			run.off = append(run.off, run.belief(w)-run.waitMs(w))
		}
	}
	w := run.place(r)
	switch r.fate {
	case fateNever:
		r.over = true
		return
	case fateCancelled:
		run.clock.After(r.giveUpMs, func() { run.giveUp(r) })
	}
	run.send(r, w)
}

// beliefEvery is at how many placements beliefs are compared once.
const beliefEvery = 8

func (run *ledgerRun) giveUp(r *ledgerRequest) {
	if r.engine.LastMs == 0 {
		r.over = true
		run.engines[r.worker].Cancel(r.engine)
	}
}

func (run *ledgerRun) send(r *ledgerRequest, w int) {
	r.worker, r.sent = w, true
	if err := run.engines[w].Add(r.engine); err != nil {
		run.fail(err)
		return
	}
	if !run.engines[w].InStep() {
		run.clock.After(0, func() { run.begin(w) })
	}
}

func (run *ledgerRun) begin(w int) {
	if ms, ok := run.engines[w].Begin(); ok {
		life := run.lives[w]
		run.stepEnds[w] = run.clock.NowMs() + ms
		run.clock.After(ms, func() {
			if run.lives[w] == life {
				run.end(w)
			}
		})
	}
}

func (run *ledgerRun) end(w int) {
	now := run.clock.NowMs()
	o := run.engines[w].Finish(now)
	run.note(w, now)
	if c := run.cluster; c != nil {
		for _, e := range o.Cache {
			if e.Removed {
				c.Removed(w, e.Name)
			} else {
				c.Stored(w, e.Name)
			}
		}
		if stores := storesOf(o.Cache); run.evidence.stores && len(stores) > 0 {
			life := run.lives[w]
			run.clock.After(storeMs, func() {
				if run.lives[w] == life {
					c.Stores(w, now, stores)
				}
			})
		}
		if run.evidence.marks {
			run.report(o)
		}
	}
	run.begin(w)
}

// report lets callers tell of first tokens and ends at once.
func (run *ledgerRun) report(o *truth.Outcome) {
	now := run.clock.NowMs()
	for _, q := range o.First {
		run.cluster.First(now, run.byEngine[q].id, now)
	}
	for _, q := range o.Done {
		run.cluster.Done(now, run.byEngine[q].id, now, q.OutputTokens)
	}
}

func (run *ledgerRun) placeByCluster(r *ledgerRequest) int {
	return run.cluster.Place(run.clock.NowMs(), rules.Query{ID: r.id, Prompt: r.prompt, SizeFactor: r.sizeError})
}

// poll reads a worker's counters.
func (run *ledgerRun) poll(w int) {
	if run.clock.NowMs() > run.endMs+residueMs {
		return
	}
	run.cluster.Sample(w, countersOf(run.metrics(w)))
	run.clock.After(pollMs, func() { run.poll(w) })
}

// redrawLanes draws which lanes are down.
func (run *ledgerRun) redrawLanes(share float64, coordinators int) {
	for k := range coordinators {
		for w := range run.engines {
			run.cluster.SetLane(k, w, run.rng.Float64() >= share)
		}
	}
	if run.clock.NowMs() < run.endMs {
		run.clock.After(lanesEveryMs, func() { run.redrawLanes(share, coordinators) })
	}
}

// restartParty restarts an agent and a coordinator.
func (run *ledgerRun) restartParty(coordinators int) {
	run.cluster.RestartAgent(run.rng.IntN(len(run.engines)))
	run.cluster.RestartCoordinator(run.rng.IntN(coordinators))
	if run.clock.NowMs() < run.endMs {
		run.clock.After(partyRestartMs, func() { run.restartParty(coordinators) })
	}
}

// restartEngine restarts an engine: its cache and what it serves are lost.
func (run *ledgerRun) restartEngine() {
	w := run.rng.IntN(len(run.engines))
	for i := range run.requests {
		if r := &run.requests[i]; r.sent && r.worker == w && r.engine.LastMs == 0 {
			r.over = true
		}
	}
	run.newEngine(w)
	if run.cluster != nil {
		run.cluster.RestartEngine(w)
	}
	if run.clock.NowMs() < run.endMs {
		run.clock.After(engineRestartMs, run.restartEngine)
	}
}

// note keeps what the metrics say, as long as a poll may ask for it.
func (run *ledgerRun) note(w int, now float64) {
	h := append(run.history[w], gauge{now, run.engines[w].Counters()})
	old := 0
	for old+1 < len(h) && h[old+1].atMs < now-run.lagMs-1000 {
		old++
	}
	run.history[w] = h[old:]
}

// metrics is what a poll reads now: the newest step end older than the lag.
func (run *ledgerRun) metrics(w int) truth.Counters {
	h := run.history[w]
	at, _ := slices.BinarySearchFunc(h, run.clock.NowMs()-run.lagMs, func(g gauge, ms float64) int {
		if g.atMs <= ms {
			return -1
		}
		return 1
	})
	return h[max(at-1, 0)].counters
}

// waitMs is the true time until a request that comes to a worker now would
// begin its prefill.
func (run *ledgerRun) waitMs(w int) float64 {
	e := run.engines[w]
	wait := e.Backlog()
	if wait == 0 && !e.Prefills() {
		return 0 // a decode step in flight is not a queue
	}
	if e.InStep() {
		wait += run.stepEnds[w] - run.clock.NowMs()
	}
	return wait
}

// leastWait is the rule of affinity and wait: the least waiting and prefill
// time, one of the equal ones at random.
func (run *ledgerRun) leastWait(r *ledgerRequest, wait func(w int) float64) int {
	best, least, equal := 0, math.Inf(1), 0
	for w, e := range run.engines {
		cost := wait(w) + run.believed[w]*.05*float64(e.Uncached(r.prompt))
		switch {
		case cost < least:
			best, least, equal = w, cost, 1
		case cost == least:
			equal++
			if run.rng.IntN(equal) == 0 {
				best = w
			}
		}
	}
	return best
}

// oracle knows the truth.
func (run *ledgerRun) oracle() {
	run.place = func(r *ledgerRequest) int {
		return run.leastWait(r, run.waitMs)
	}
}

// raw believes the engines' waiting counts as the newest report has them,
// times a mean request.
func (run *ledgerRun) raw(loadMs float64) {
	n := len(run.engines)
	waiting, reported := make([]float64, n), make([]float64, n)
	mean := 0.0
	for w := range n {
		var poll, report func()
		poll = func() {
			waiting[w] = float64(run.metrics(w).Waiting)
			v := waiting[w]
			run.clock.After(1+5*run.rng.Float64(), func() { reported[w] = v })
			if run.clock.NowMs() < run.endMs {
				run.clock.After(pollMs, poll)
			}
		}
		report = func() {
			v := waiting[w]
			run.clock.After(1+5*run.rng.Float64(), func() { reported[w] = v })
			if run.clock.NowMs() < run.endMs {
				run.clock.After(loadMs, report)
			}
		}
		run.clock.After(run.rng.Float64()*pollMs, poll)
		run.clock.After(run.rng.Float64()*loadMs, report)
	}
	run.belief = func(w int) float64 { return reported[w] * mean * run.believed[w] }
	run.place = func(r *ledgerRequest) int {
		w := run.leastWait(r, run.belief)
		ms := (.05*float64(run.engines[w].Uncached(r.prompt)) + 14) * r.sizeError
		if mean == 0 {
			mean = ms
		}
		mean += (ms - mean) / 20
		return w
	}
}

// run serves all requests and lets the ledger come to rest.
func (run *ledgerRun) run() error {
	if c := run.cluster; c != nil {
		run.clock.At(run.endMs+residueMs, func() {
			run.residue = c.Residue()
			c.Stop()
		})
	}
	for run.err == nil && run.clock.Next() {
		if run.cluster != nil {
			run.fail(run.cluster.Err())
		}
	}
	return run.err
}
