package sim

import (
	"slices"

	"waypost/agent/queue"
	"waypost/testbed/sim/cluster"
	"waypost/testbed/sim/prompt"
	"waypost/testbed/sim/rules"
	"waypost/testbed/sim/truth"
	"waypost/testbed/sim/vtime"
)

// served is one request of a run and what became of it.
type served struct {
	*arrival
	id     int
	worker int
	engine truth.Request
}

// t2 is one run of model T2.
type t2 struct {
	clock    vtime.Clock
	engines  []*truth.Engine
	steps    []func() // per worker: its step in flight ends
	requests []served
	byEngine map[*truth.Request]*served
	router   rules.Router
	// noticeMs and eventMs are how late notices and cache events are told.
	noticeMs, eventMs float64
	// caches hears of cache events, system of counters too; nil: nobody does.
	caches   cacheListener
	system   system
	evidence evidence
	left     int                       // requests that have not ended
	progress func(done, all int) error // an error ends the run
	stopped  error                     // by progress
}

// cacheListener hears of cache events.
type cacheListener interface {
	Stored(worker int, name uint32)
	Removed(worker int, name uint32)
}

// system is a rule with agents, which go on by themselves.
type system interface {
	rules.Router
	cacheListener
	Start()
	Sample(worker int, counters *cluster.Counters)
	Stores(worker int, atMs float64, stores []queue.Store)
	// Expected is the predicted first-token time of a request, ms.
	Expected(id int) float64
	Stop()
	Err() error
}

// pollMs is the period of an agent's reading of its engine's gauges.
const pollMs = 250

func newT2(arrivals []arrival, slowdowns []float64) (*t2, error) {
	run := &t2{requests: make([]served, len(arrivals)), byEngine: make(map[*truth.Request]*served, len(arrivals))}
	for w, slowdown := range slowdowns {
		e, err := truth.New(truth.Options{BlockTokens: prompt.BlockTokens, StepTime: truth.Slower(truth.Mocker, slowdown)})
		if err != nil {
			return nil, err
		}
		run.engines = append(run.engines, e)
		run.steps = append(run.steps, func() { run.endStep(w) })
	}
	for i := range arrivals {
		r := &run.requests[i]
		*r = served{arrival: &arrivals[i], id: i, engine: truth.Request{Prompt: arrivals[i].prompt, OutputTokens: arrivals[i].outputTokens}}
		run.byEngine[&r.engine] = r
	}
	return run, nil
}

// run serves all requests.
func (run *t2) run() error {
	var err error
	var arrive func(i int)
	arrive = func(i int) {
		if i+1 < len(run.requests) {
			run.clock.At(run.requests[i+1].atMs, func() { arrive(i + 1) })
		}
		if e := run.accept(&run.requests[i]); e != nil && err == nil {
			err = e
		}
	}
	run.left = len(run.requests)
	if run.system != nil {
		run.system.Start()
		run.poll()
	}
	if len(run.requests) > 0 {
		run.clock.At(run.requests[0].atMs, func() { arrive(0) })
	}
	for err == nil && run.clock.Next() {
		if run.system != nil {
			err = run.system.Err()
		}
		if err == nil {
			err = run.stopped
		}
	}
	return err
}

func (run *t2) accept(r *served) error {
	r.worker = run.router.Place(run.clock.NowMs(), rules.Query{ID: r.id, Prompt: r.prompt})
	e := run.engines[r.worker]
	if err := e.Add(&r.engine); err != nil {
		return err
	}
	if !e.InStep() {
		// An idle engine begins when all arrivals of the instant are queued.
		run.clock.After(0, func() { run.beginStep(r.worker) })
	}
	return nil
}

func (run *t2) beginStep(w int) {
	if ms, ok := run.engines[w].Begin(); ok {
		run.clock.After(ms, run.steps[w])
	}
}

func (run *t2) endStep(w int) {
	now := run.clock.NowMs()
	o := run.engines[w].Finish(now)
	run.publish(w, o.Cache)
	if run.evidence.stores && run.system != nil {
		if stores := storesOf(o.Cache); len(stores) > 0 {
			run.clock.After(storeMs, func() { run.system.Stores(w, now, stores) })
		}
	}
	run.notice(o)
	if run.left -= len(o.Done); run.left == 0 && run.system != nil {
		run.system.Stop()
	}
	if run.progress != nil && len(o.Done) > 0 {
		run.stopped = run.progress(len(run.requests)-run.left, len(run.requests))
	}
	run.beginStep(w)
}

// notice tells of first tokens and ends when their notices are due.
func (run *t2) notice(o *truth.Outcome) {
	if !run.evidence.marks {
		return
	}
	now := run.clock.NowMs()
	for _, q := range o.First {
		id := run.byEngine[q].id
		run.late(run.noticeMs, func() { run.router.First(run.clock.NowMs(), id, now) })
	}
	for _, q := range o.Done {
		id, tokens := run.byEngine[q].id, q.OutputTokens
		run.late(run.noticeMs, func() { run.router.Done(run.clock.NowMs(), id, now, tokens) })
	}
}

// late does something after a delay, without one at once.
func (run *t2) late(ms float64, do func()) {
	if ms > 0 {
		run.clock.After(ms, do)
		return
	}
	do()
}

// publish tells of cache events when they are due.
func (run *t2) publish(w int, events []truth.CacheEvent) {
	if run.caches == nil || len(events) == 0 {
		return
	}
	kept := slices.Clone(events)
	run.late(run.eventMs, func() {
		for _, e := range kept {
			if e.Removed {
				run.caches.Removed(w, e.Name)
			} else {
				run.caches.Stored(w, e.Name)
			}
		}
	})
}

// poll reads the counters of all engines.
func (run *t2) poll() {
	if run.left == 0 {
		return
	}
	for w, e := range run.engines {
		run.system.Sample(w, countersOf(e.Counters()))
	}
	run.clock.After(pollMs, run.poll)
}

// trueCache looks into the engines: what a peer's own replay gives its rule.
type trueCache []*truth.Engine

// Depth implements rules.CacheView.
func (c trueCache) Depth(worker int, p *prompt.Prompt) int { return c[worker].Cached(p) }
