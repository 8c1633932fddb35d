package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"waypost/coordinator/explain"
	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/prefixindex"
	"waypost/gossip/ledger"
)

// Decide says how the decision is measured.
type Decide struct {
	// Quick takes shorter windows and leaves out 8,000 workers with claims.
	Quick bool
	// Progress is told what is being measured; nil: nobody is.
	Progress func(what string)
}

// Load is the kind of work that a measured fleet has.
type Load string

// The loads: every worker with its own queue and batch, a third of them idle,
// nothing to do anywhere.
const (
	LoadBusy  Load = "busy"
	LoadMixed Load = "mixed"
	LoadIdle  Load = "idle"
)

// Decided is what one decision costs in one fleet.
type Decided struct {
	Workers int
	Load    Load
	// ClaimsPerWorker are open at every worker.
	ClaimsPerWorker int
	// Matches are the workers that hold something of a prompt, Priced those
	// that a decision prices in full, on average.
	Matches, Priced float64
	// Lookup, Rule and Record are the parts of Decide: finding who holds what,
	// the terms of all workers and the choice, and the record.
	Lookup, Rule, Record, Decide quantiles
	// Allocs are those of a decision without the record, RecordAllocs those of
	// the record.
	Allocs, RecordAllocs float64
}

// DecideReport is what was measured.
type DecideReport struct {
	Quick  bool
	Fleets []Decided
	Took   time.Duration
}

// decideBlocks is the pool of each worker, decidePause the virtual time from
// one decision to the next: a thousand placements a second decide which
// records are kept in full.
const (
	decideBlocks = 4096
	decidePause  = time.Millisecond
)

// claimCounts are the numbers of open claims per worker, which must not
// matter.
var claimCounts = []int{0, 8, 64}

// decidePlan is one size of the benchmark.
type decidePlan struct {
	workers []int
	fillMs  float64
	window  time.Duration
	// most claims in a fleet.
	claims int
}

func (o Decide) plan() decidePlan {
	if o.Quick {
		return decidePlan{workers: []int{100, 1000, 8000}, fillMs: 60_000, window: 100 * time.Millisecond, claims: 64_000}
	}
	return decidePlan{workers: []int{100, 1000, 8000}, fillMs: 100_000, window: 500 * time.Millisecond, claims: 512_000}
}

// Run measures one number of workers after the other. With an error it returns
// what was measured before.
func (o Decide) Run(ctx context.Context) (*DecideReport, error) {
	began, p := time.Now(), o.plan()
	r := &DecideReport{Quick: o.Quick}
	err := o.run(ctx, p, r)
	r.Took = time.Since(began)
	return r, err
}

func (o Decide) run(ctx context.Context, p decidePlan, r *DecideReport) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for _, workers := range p.workers {
		o.say("the caches of %d workers", workers)
		x := &indexBench{opt: indexOptions{fleetOptions{workload: "mix", workers: workers, blocks: decideBlocks, requestsPerSecond: mixPerWorker / 8, fillMs: p.fillMs, seed: benchSeed}, p.window}}
		for _, step := range []func() error{x.live, x.prepareQueries, x.fill} {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := step(); err != nil {
				return fmt.Errorf("%d workers: %w", workers, err)
			}
		}
		x.lives = nil
		x.warm()
		for _, load := range []Load{LoadBusy, LoadMixed, LoadIdle} {
			for _, claims := range claimCounts {
				if claims*workers > p.claims || claims > 0 && load != LoadBusy {
					continue
				}
				if err := ctx.Err(); err != nil {
					return err
				}
				o.say("decisions over %d workers, %s, %d open claims each", workers, load, claims)
				one, err := benchDecide(x, load, claims)
				if err != nil {
					return fmt.Errorf("%d workers, %s, %d claims each: %w", workers, load, claims, err)
				}
				r.Fleets = append(r.Fleets, one)
			}
		}
	}
	return nil
}

func (o Decide) say(format string, args ...any) {
	if o.Progress != nil {
		o.Progress(fmt.Sprintf(format, args...))
	}
}

// decider takes decisions as a coordinator does: index, fleet and record.
type decider struct {
	x          *indexBench
	fleet      *fleet.Fleet
	records    *explain.Store
	now        time.Time // of the fleet
	recordAt   time.Time
	policy     placement.Policy
	request    placement.Request
	ask        fleet.Ask
	candidates []placement.Candidate
	sit        placement.Situation
	decision   placement.Decision
	ids        []string
	next       int
	err        error
}

// Hosts have a few workers each; benchIDs is more than the records hold.
const (
	workersPerHost = 8
	benchIDs       = 1 << 17
	recordBytes    = 32 << 20
)

func benchDecide(x *indexBench, load Load, claims int) (Decided, error) {
	out := Decided{Workers: x.opt.workers, Load: load, ClaimsPerWorker: claims}
	d, err := newDecider(x, load, claims)
	if err != nil {
		return out, err
	}
	matches, priced := 0, 0
	for i := range x.long {
		d.lookup(i)
		d.rule(i)
		matches, priced = matches+d.ask.Matches.Len(), priced+len(d.candidates)
		if d.err != nil {
			return out, d.err
		}
		if d.decision.Chosen < 0 {
			return out, fmt.Errorf("request %d was refused: %s", i, d.decision.RefusalDetail(d.candidates))
		}
	}
	out.Matches, out.Priced = float64(matches)/float64(len(x.long)), float64(priced)/float64(len(x.long))
	// In turns: a second in which something else slows the machine is not all that
	// there is of one part.
	var decides, lookups, rules, records []quantiles
	for range repetitions {
		decides = append(decides, timeFor(x.opt.window, func(i int) {
			d.lookup(i)
			d.rule(i)
			d.record()
		}))
		lookups = append(lookups, timeFor(x.opt.window, d.lookup))
		d.lookup(0)
		rules = append(rules, timeFor(x.opt.window, func(int) { d.rule(0) }))
		records = append(records, timeFor(x.opt.window, func(int) { d.record() }))
	}
	out.Decide, out.Lookup, out.Rule, out.Record = best(decides), best(lookups), best(rules), best(records)
	out.Allocs = float64(allocations(func() {
		for i := range countedDecisions {
			d.lookup(i)
			d.rule(i)
		}
	})) / countedDecisions
	out.RecordAllocs = float64(allocations(func() {
		for range countedDecisions {
			d.record()
		}
	})) / countedDecisions
	return out, d.err
}

// lookup asks the index, as a coordinator does.
func (d *decider) lookup(i int) {
	d.ask.Matches.Reset()
	d.x.index.Groups(&d.x.long[i%len(d.x.long)].probe, func(g *prefixindex.Group) {
		if g.Unverified {
			return
		}
		held := placement.Held{Tokens: int32(g.Tokens), GPUTokens: int32(g.GPUTokens), HostTokens: int32(g.HostTokens), Predicted: g.Predicted}
		first, words := g.Workers.Bitmap()
		d.ask.Matches.AddSet(held, first, words)
	})
}

// rule prices all workers and chooses.
func (d *decider) rule(i int) {
	d.request.PromptTokens = len(d.x.long[i%len(d.x.long)].tokens)
	var err error
	if d.candidates, d.sit, err = d.fleet.Decide(d.now, &d.ask, d.candidates, &d.decision); err != nil {
		d.err = err
	}
}

// record keeps the decision.
func (d *decider) record() {
	d.next++
	d.recordAt = d.recordAt.Add(decidePause)
	e := explain.NewEntry(&d.request, d.candidates, d.sit, &d.decision)
	e.Placement, e.Coordinator, e.MadeAt, e.Attempt, e.InputSource = d.ids[d.next%len(d.ids)], coordinatorID, d.recordAt, 1, "tokens"
	d.records.Add(d.recordAt, e, func() placement.Record {
		return placement.NewRecord(&d.request, d.candidates, &d.policy, d.sit, &d.decision, d.records.KeepCandidates())
	})
}

func newDecider(x *indexBench, load Load, claims int) (*decider, error) {
	d := &decider{x: x, now: epochStart.Add(time.Second), recordAt: epochStart, policy: placement.DefaultPolicy()}
	d.request = placement.Request{ID: "request", Pool: benchModel}
	d.ask = fleet.Ask{Query: fleet.Query{Pool: benchModel}, Request: &d.request, Policy: &d.policy}
	for i := range benchIDs {
		d.ids = append(d.ids, fmt.Sprintf("pl_c1_%013d", i))
	}
	var err error
	if d.records, err = explain.New(explain.Options{MaxBytes: recordBytes}); err != nil {
		return nil, err
	}
	if d.fleet, err = fleet.New(fleet.Options{Epoch: epochStart, Process: 1, MaxClaims: max(1, claims) * x.opt.workers}); err != nil {
		return nil, err
	}
	// As in a fleet file without zones: no way is nearer than another.
	d.fleet.SetIntent(epochStart, fleet.Intent{Version: 1, Assign: func(id fleet.Identity) fleet.Assignment { return fleet.Assignment{Pool: id.Model} }, Way: func(string, fleet.Identity) fleet.Way { return fleet.Way{} }})
	rng := rand.New(rand.NewPCG(x.opt.seed, 13))
	for first := 0; first < x.opt.workers; first += workersPerHost {
		if err := d.addHost(first, min(workersPerHost, x.opt.workers-first), load, rng); err != nil {
			return nil, err
		}
	}
	for w := range x.opt.workers {
		for i := range claims {
			if err := d.claim(w, i); err != nil {
				return nil, err
			}
		}
	}
	return d, nil
}

// addHost opens the lane of a host and brings its first report.
func (d *decider) addHost(first, workers int, load Load, rng *rand.Rand) error {
	host := hostName(first / workersPerHost)
	hello := fleet.Hello{Host: host, AgentProcess: uint64(first + 1), Session: 1, EchoesClaims: true}
	report := fleet.Report{AgentProcess: hello.AgentProcess, LoadSeq: 1}
	for i := range workers {
		hello.Workers = append(hello.Workers, fleet.Facts{
			Index: uint32(i), Engine: fmt.Sprintf("vllm-%d", 8000+i), Ranks: 1, Kind: "vllm", EngineProcess: uint64(100 + i), Model: benchModel,
			URL: fmt.Sprintf("http://%s:%d", host, 8000+i), BlockTokens: blockTokens, PoolBlocks: poolBlocks, MaxModelTokens: 131_072, MaxRunning: 256, StepTokens: 8192, Coverage: "full",
		})
		report.Workers = append(report.Workers, fleet.WorkerLoad{Index: uint32(i), Load: workOf(load, uint64(100+i), rng)})
	}
	lane, _, err := d.fleet.OpenLane(epochStart, hello)
	if err != nil {
		return err
	}
	if _, err := d.fleet.Load(epochStart.Add(900*time.Millisecond), host, lane, report); err != nil {
		return err
	}
	for i := range workers {
		id, process, ok := d.fleet.LaneWorker(host, lane, uint32(i))
		if !ok || int(id) != first+i {
			return fmt.Errorf("worker %d of %s is in slot %d (%v): want %d", i, host, id, ok, first+i)
		}
		d.fleet.SetView(d.now, id, process, placement.ViewLive, 100*time.Millisecond)
	}
	return nil
}

// workOf is what a worker reports.
func workOf(load Load, process uint64, rng *rand.Rand) ledger.Load {
	l := ledger.Load{
		EngineProcess: process, State: ledger.StateReady, Coverage: "full", AgeMs: new(0.), CountersAgeMs: new(0.),
		QueueMs: new(0.), OpenTokens: new(uint32(0)), Decoding: new(uint32(0)), ContextTokens: new(0.), Live: new(uint32(0)), HeldBlocks: new(0.), MeanOutputTokens: new(300.),
	}
	queueMs, live, context, rest := 1000*rng.Float64(), uint32(1+rng.IntN(40)), 1000+6000*rng.Float64(), rng.IntN(3)
	if load == LoadIdle || load == LoadMixed && rest == 0 {
		return l
	}
	l.QueueMs, l.OpenTokens, l.Decoding, l.Live = &queueMs, new(uint32(queueMs*prefillTokensPerMs)), &live, &live
	l.ContextTokens, l.HeldBlocks = new(float64(live)*context), new(float64(live)*context/blockTokens)
	return l
}

// claim opens a claim.
func (d *decider) claim(worker, i int) error {
	name := fmt.Sprintf("%d-%d", worker, i)
	info, ok := d.fleet.Endpoint(fleet.WorkerID(worker))
	if !ok {
		return fmt.Errorf("no worker in slot %d", worker)
	}
	_, _, _, err := d.fleet.Claim(d.now, fleet.NewClaim{
		Key: fleet.RequestKey{Tenant: "t", ID: name}, Attempt: 1, Placement: "pl_" + name, Worker: fleet.WorkerID(worker),
		Claim: ledger.Claim{EngineProcess: info.Process, PromptTokens: 2000, UncachedTokens: 100 + (worker*37+i*11)%900, OutputTokens: 300, Sequences: 1},
	})
	return err
}
