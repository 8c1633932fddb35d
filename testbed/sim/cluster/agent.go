package cluster

import (
	"waypost/agent/queue"
	"waypost/coordinator/fleet"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// engineKind and engineName name the engines; servedModel is the pool.
const (
	engineKind  = "vllm"
	engineName  = "vllm-8000"
	servedModel = "m"
)

// agent is the agent of one worker's host.
type agent struct {
	cluster   *Cluster
	worker    int
	estimator *queue.Estimator
	// process and engine mark its own and its engine's life.
	process, engine uint64
	session         uint64
	loadSeq         uint64
	lanes           map[*coordinator]*lane
	model           ledger.StepModel // as last told
	reportMs        float64          // when it reported last
	soon            bool             // a report at once is scheduled
}

// lane is the stream between an agent and a coordinator. What is sent on it
// arrives in order.
type lane struct {
	id           fleet.Lane
	downMs, upMs float64   // when the newest frame to the agent, the coordinator arrives
	shown        queue.End // by the newest report
}

func newAgent(c *Cluster, worker int) (*agent, error) {
	a := &agent{cluster: c, worker: worker, engine: c.processMark()}
	return a, a.restart()
}

// restart begins another life: what it knew is gone.
func (a *agent) restart() error {
	o := &a.cluster.options
	a.process = a.cluster.processMark()
	a.lanes = map[*coordinator]*lane{}
	prior := o.Model
	if len(o.PriorFactors) > 0 {
		prior = prior.Scaled(o.PriorFactors[a.worker])
	}
	a.loadSeq, a.model, a.soon = 0, prior, false
	e, err := queue.New(queue.Options{AgentProcess: a.process, Facts: queue.Facts{
		Model: prior, StepTokens: o.StepTokens, BlockTokens: o.BlockTokens, PoolBlocks: o.PoolBlocks, MaxRunning: o.MaxRunning,
	}})
	if err != nil {
		return err
	}
	e.SetProcess(a.engine)
	a.estimator = e
	return nil
}

// hello introduces the host.
func (a *agent) hello() fleet.Hello {
	o := &a.cluster.options
	model := a.model
	return fleet.Hello{
		Host: hostName(a.worker), AgentProcess: a.process, Session: a.session,
		Workers: []fleet.Facts{{
			Engine: engineName, Ranks: 1, Kind: engineKind, EngineProcess: a.engine, Model: servedModel,
			BlockTokens: o.BlockTokens, PoolBlocks: o.PoolBlocks, MaxRunning: o.MaxRunning, StepTokens: o.StepTokens,
			Coverage: "full", StepModel: &model,
		}},
	}
}

// openLane opens the lane to a coordinator; the first report goes out on it.
func (a *agent) openLane(k *coordinator) {
	now := a.cluster.clock.NowMs()
	a.session++
	id, _, err := k.fleet.OpenLane(at(now), a.hello())
	if err != nil {
		a.cluster.fail(err)
		return
	}
	a.lanes[k] = &lane{id: id, downMs: now, upMs: now}
	a.estimator.LaneUp(at(now), k.process)
	a.reportTo(k, a.load())
}

// closeLane loses the lane.
func (a *agent) closeLane(k *coordinator) {
	l := a.lanes[k]
	if l == nil {
		return
	}
	now := a.cluster.clock.NowMs()
	delete(a.lanes, k)
	k.fleet.CloseLane(at(now), hostName(a.worker), l.id)
	a.estimator.LaneDown(at(now), k.process)
}

// tick reports by the period.
func (a *agent) tick() {
	if a.cluster.stopped {
		return
	}
	a.report()
	a.cluster.clock.After(a.cluster.options.LoadMs, a.tick)
}

// heard reports at once: what was heard is news, or it may have moved the queue
// and that jumped.
func (a *agent) heard(news, moved bool) {
	if !a.cluster.options.AtOnce || a.soon || !news && !(moved && a.jumped()) {
		return
	}
	a.soon = true
	process := a.process
	a.cluster.clock.At(a.reportMs+atOnceMs, func() {
		if a.process == process {
			a.soon = false
			a.report()
		}
	})
}

// jumped reports whether the queue's end is another than any coordinator was shown.
func (a *agent) jumped() bool {
	end := a.estimator.End(at(a.cluster.clock.NowMs()))
	for _, l := range a.lanes {
		if end.JumpedFrom(l.shown) {
			return true
		}
	}
	return false
}

// load builds a report.
func (a *agent) load() fleet.Report {
	now := a.cluster.clock.NowMs()
	a.loadSeq++
	l := a.estimator.Load(at(now))
	l.EngineProcess, l.Coverage = a.engine, "full"
	return fleet.Report{
		AgentProcess: a.process, LoadSeq: a.loadSeq, SentMonoNs: uint64(now*1e6) + 1,
		Workers: []fleet.WorkerLoad{{Load: l}},
	}
}

// report sends a report on all lanes, and the step model if it is another.
func (a *agent) report() {
	a.reportMs = a.cluster.clock.NowMs()
	if m := a.estimator.StepModel(); m != a.model && !a.cluster.options.FixedSpeeds {
		a.model = m
		for _, k := range a.cluster.coordinators {
			a.send(k, func(id fleet.Lane, nowMs float64) error {
				_, err := k.fleet.UpdateHello(at(nowMs), id, a.hello())
				return err
			})
		}
	}
	r := a.load()
	for _, k := range a.cluster.coordinators {
		a.reportTo(k, r)
	}
}

func (a *agent) reportTo(k *coordinator, r fleet.Report) {
	if l := a.lanes[k]; l != nil {
		l.shown = a.estimator.Shown()
	}
	a.send(k, func(id fleet.Lane, nowMs float64) error {
		if _, err := k.fleet.Load(at(nowMs), hostName(a.worker), id, r); err != nil {
			return err
		}
		k.flush()
		return nil
	})
}

// send lets something happen at a coordinator when it has travelled there, if
// the lane is still the same.
func (a *agent) send(k *coordinator, deliver func(id fleet.Lane, nowMs float64) error) {
	l := a.lanes[k]
	if l == nil {
		return
	}
	clock := a.cluster.clock
	l.upMs = max(l.upMs, clock.NowMs()+a.cluster.travelMs())
	clock.At(l.upMs, func() {
		if a.lanes[k] == l {
			a.cluster.fail(deliver(l.id, clock.NowMs()))
		}
	})
}

// take takes frames of claims and marks.
func (a *agent) take(f *fleet.HostFrames) {
	now := at(a.cluster.clock.NowMs())
	news, moved := false, false
	for i := range f.Claims {
		in, err := a.estimator.Claims(now, &f.Claims[i].ClaimFrame)
		a.cluster.fail(err)
		news = news || in.Taken+in.Fenced > 0
	}
	for i := range f.Marks {
		m, err := a.estimator.Marks(now, &f.Marks[i].MarkFrame)
		a.cluster.fail(err)
		moved = moved || m
	}
	a.heard(news, moved)
}

// Counters are what an engine's metrics say. A count below 0 is not told.
type Counters struct {
	Running, Waiting                        int
	HeldBlocks                              int
	PromptTokens, ComputedTokens, Generated float64
	FirstTokens, Finished                   float64
}

// Sample tells an agent of a reading of its engine's counters.
func (c *Cluster) Sample(worker int, counters *Counters) {
	a := c.agents[worker]
	s := queue.Sample{At: at(c.clock.NowMs())}
	if counters.Running >= 0 {
		running, waiting := counters.Running, counters.Waiting
		s.Running, s.Waiting = &running, &waiting
		prompt, computed, generated := counters.PromptTokens, counters.ComputedTokens, counters.Generated
		first, finished := counters.FirstTokens, counters.Finished
		s.PromptTokens, s.ComputedPromptTokens, s.GenerationTokens = &prompt, &computed, &generated
		s.FirstTokens, s.Finished = &first, &finished
	}
	if counters.HeldBlocks >= 0 {
		used := float64(counters.HeldBlocks) / float64(c.options.PoolBlocks)
		s.KVUsedRatio = &used
	}
	a.estimator.Sample(s)
	a.heard(false, true)
}

// Stores tells an agent of blocks that its engine stored, published at a
// moment.
func (c *Cluster) Stores(worker int, atMs float64, stores []queue.Store) {
	a := c.agents[worker]
	a.heard(false, a.estimator.Stores(at(atMs), stores))
}

// KeyOf is the prefix key of a block's name.
func KeyOf(name uint32) prefix.Key { return prefix.Key(name) }
