package fleet

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"waypost/agent/queue"
	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// plant is a world with engines that serve, callers that ask and coordinators
// that choose: the setting in which the ledger's protocol was measured. A step
// takes 14 + .05·B + 4e-5·KV + .05·n ms for B streams with KV tokens of context
// and n prompt tokens of at most 2,048; prompts are lognormal.
type plant struct {
	*world
	engines []*simEngine
	o       plantOptions
	// day draws what is asked for: the same in every arm of a comparison.
	day    *rand.Rand
	serial int
	firsts []float64 // times to first token
	errors []float64 // believed less true waiting ms, at all coordinators
	served int
}

type plantOptions struct {
	coordinators, workers int
	perSec, seconds       float64
	meanTokens            float64
	lagMs, pollMs         float64
	lagJumpMs             float64 // to this lag, half-way
	counters, events      bool
	reports               float64 // share of callers that report first token and end
	foreign               float64 // share of requests that no coordinator placed
	late, lost, cancelled float64 // shares
	speedSpread           float64 // ± share by worker
	sizeSigma             float64
	atOnce                bool
	placesCut             bool
	chatter               func(*plant)
}

func baseline() plantOptions {
	return plantOptions{
		coordinators: 4, workers: 8, perSec: 17, seconds: 120, meanTokens: 6000, lagMs: 50, pollMs: 250, counters: true, events: true,
		foreign: .05, lost: .01, cancelled: .02, sizeSigma: .15, atOnce: true,
	}
}

var plantModel = ledger.StepModel{P1MsPerToken: .05, D0Ms: 14, D1MsPerRequest: .05, D2MsPerToken: 4e-5, Source: ledger.SourcePrior}

const (
	plantBudget = 2048
	plantBlock  = 16
	plantPool   = 40_000
)

func newPlant(t fataler, seed uint64, o plantOptions) *plant {
	net := func(r *rand.Rand) float64 {
		if r.IntN(100) == 0 {
			return 50 + 200*r.Float64()
		}
		return 1 + 5*r.Float64()
	}
	p := &plant{o: o, day: rand.New(rand.NewPCG(seed, 1))}
	p.world = newWorld(t, seed, o.coordinators, o.workers, worldOptions{
		laneDelay: func(r *rand.Rand) float64 { return 1 + 5*r.Float64() }, linkDelay: net, loadEvery: 150, atOnce: o.atOnce,
		facts: func(int) (Facts, queue.Facts) {
			return Facts{Ranks: 1, Kind: "vllm", Model: "m", BlockTokens: plantBlock, PoolBlocks: plantPool, StepTokens: plantBudget, MaxRunning: 256},
				queue.Facts{Model: plantModel, StepTokens: plantBudget, BlockTokens: plantBlock, PoolBlocks: plantPool, MaxRunning: 256}
		},
	})
	if o.placesCut {
		for i := range p.coords {
			for j := range i {
				p.linkCut[pair(i, j)] = true
			}
		}
	}
	for i, a := range p.agents {
		speed := 1.0
		if o.workers > 1 {
			speed = 1 - o.speedSpread + 2*o.speedSpread*float64(i)/float64(o.workers-1)
		}
		e := &simEngine{p: p, a: a, speed: speed, lagMs: o.lagMs}
		p.engines = append(p.engines, e)
		if o.counters {
			p.after(p.rng.Float64()*o.pollMs, e.poll)
		}
		p.after(1000, e.tellModel)
	}
	p.after(0, p.arrive)
	return p
}

// arrive makes the next request and the one after.
func (p *plant) arrive() {
	if p.now > p.o.seconds*1000 {
		return
	}
	d := p.day
	p.after(d.ExpFloat64()*1000/p.o.perSec, p.arrive)
	p.serial++
	const sigma = 1.0
	tokens := int(p.o.meanTokens * math.Exp(d.NormFloat64()*sigma-sigma*sigma/2))
	r := &simRequest{serial: p.serial, prompt: min(max(tokens, 20), 60_000), output: 1 + int(200*d.ExpFloat64()), askedMs: p.now, fate: d.Float64()}
	r.believed = max(1, int(float64(r.prompt)*math.Exp(d.NormFloat64()*p.o.sizeSigma)))
	r.delayMs, r.told = 1+3*d.Float64(), d.Float64() < p.o.reports
	where, foreign := d.Uint64(), d.Float64() < p.o.foreign
	if foreign {
		e := p.engines[where%uint64(len(p.engines))]
		p.after(1, func() { e.enter(r) })
		return
	}
	p.place(r, p.coords[where%uint64(len(p.coords))])
}

// place lets a coordinator choose the worker with the least own time.
func (p *plant) place(r *simRequest, c *coord) {
	candidates, _, err := c.f.Candidates(at(p.now), Query{}, nil)
	if err != nil {
		p.t.Fatalf("Candidates: %v", err)
	}
	believed := r.believed
	best, least := -1, math.Inf(1)
	for i := range candidates {
		w := candidates[i].Worker
		if w.Barred != placement.ReasonNone {
			continue
		}
		// Ties go by slot and serial, not always to the first.
		own := w.Waiting.OwnMs(&w.Steps, p.now, 0, believed) + float64((int(w.ID)+r.serial)%len(candidates))*1e-6
		if own < least {
			best, least = i, own
		}
	}
	if best < 0 {
		return
	}
	e := p.engines[slices.IndexFunc(p.agents, func(a *agent) bool { return a.worker() == candidates[best].Name })]
	id := fmt.Sprint("r", r.serial)
	keys, depths := []prefix.Key{p.key(r, plantBlock)}, []uint32{plantBlock}
	if tip := believed / plantBlock * plantBlock; tip > plantBlock {
		// The true tip: a coordinator knows the tokens; only what is cached is
		// uncertain.
		if tip = r.prompt / plantBlock * plantBlock; tip > plantBlock {
			keys, depths = append(keys, p.key(r, tip)), append(depths, uint32(tip))
		}
	}
	made, ok := c.place(e.a, id, ledger.Claim{
		PromptTokens: max(r.prompt, believed), UncachedTokens: believed, OutputTokens: 200, Keys: keys, KeyDepths: depths,
	})
	if !ok {
		return
	}
	r.c, r.f, r.id, r.engine = c, c.f, id, made.EngineProcess
	delay := r.delayMs
	switch u := r.fate; {
	case u < p.o.lost:
		return
	case u < p.o.lost+p.o.cancelled:
		r.cancelled = true
		p.after(delay*100, func() {
			e.leave(r)
			c.tell(r.f, id, ledger.MarkGone, 0)
		})
	case u < p.o.lost+p.o.cancelled+p.o.late:
		delay *= 700
	}
	p.after(delay, func() { e.enter(r) })
}

func (p *plant) key(r *simRequest, depth int) prefix.Key {
	return prefix.Key((uint64(r.serial)<<20 | uint64(depth)) * 0x9e3779b97f4a7c15)
}

// simRequest is a request at an engine.
type simRequest struct {
	serial         int
	id             string
	c              *coord
	f              *Fleet
	engine         uint64
	prompt, output int
	believed       int // tokens to compute, as the coordinator is told
	askedMs        float64
	delayMs, fate  float64
	told           bool
	cancelled      bool

	computed, out int
}

// simEngine serves first in, first out, in steps of chunked prefill with
// decoding.
type simEngine struct {
	p                *plant
	a                *agent
	speed            float64
	lagMs            float64
	waiting, running []*simRequest
	busy             bool
	leftWaiting      int                 // when the step in flight began
	taken            map[*simRequest]int // tokens of the step in flight
	life             int
	finished         float64
	stepEndMs        float64
	past             []reading
}

// reading is what the counters said at the end of a step.
type reading struct {
	ms               float64
	running, waiting int
	finished         float64
}

func (e *simEngine) enter(r *simRequest) {
	if r.engine != 0 && r.engine != e.a.engine || r.cancelled && r.computed < 0 {
		return
	}
	e.waiting = append(e.waiting, r)
	e.step()
}

func (e *simEngine) leave(r *simRequest) {
	gone := func(o *simRequest) bool { return o == r }
	e.waiting = slices.DeleteFunc(e.waiting, gone)
	e.running = slices.DeleteFunc(e.running, gone)
	r.computed = -1
}

// step begins the next step if there is work.
func (e *simEngine) step() {
	if e.busy || len(e.waiting)+len(e.running) == 0 {
		return
	}
	e.busy = true
	budget, prefill, streams, context := plantBudget, 0, 0, 0
	taken := map[*simRequest]int{}
	for _, r := range e.running {
		if r.computed == r.prompt {
			streams++
			context += r.prompt + r.out
		} else if n := min(budget, r.prompt-r.computed); n > 0 {
			taken[r], budget, prefill = n, budget-n, prefill+n
		}
	}
	for budget > 0 && len(e.waiting) > 0 {
		r := e.waiting[0]
		e.waiting, e.running = e.waiting[1:], append(e.running, r)
		n := min(budget, r.prompt)
		taken[r], budget, prefill = n, budget-n, prefill+n
	}
	model := plantModel
	took := (model.DecodeMs(float64(streams), float64(context), 0) + model.PrefillMs(prefill)) * e.speed
	e.leftWaiting = len(e.waiting)
	life := e.life
	e.stepEndMs, e.taken = e.p.now+took, taken
	e.p.after(took, func() {
		if e.life == life {
			e.endStep(taken)
		}
	})
}

func (e *simEngine) endStep(taken map[*simRequest]int) {
	e.busy, e.taken = false, nil
	var stores []queue.Store
	var left []*simRequest
	for _, r := range e.running {
		n, prefilled := taken[r]
		switch {
		case prefilled:
			from := r.computed / plantBlock * plantBlock
			r.computed += n
			if to := r.computed / plantBlock * plantBlock; to > from {
				stores = append(stores, e.stored(r, from, to))
			}
			if r.computed == r.prompt {
				e.first(r)
				r.out = 1
			}
		case r.computed == r.prompt:
			r.out++
			if total := r.prompt + r.out; total%plantBlock == 0 {
				stores = append(stores, e.stored(r, total-plantBlock, total))
			}
		}
		if r.out >= r.output {
			e.finished++
			e.p.served++
			e.end(r)
			continue
		}
		left = append(left, r)
	}
	e.running = left
	e.note()
	if e.p.o.events && len(stores) > 0 {
		now := e.p.now
		est := e.a.est
		e.p.after(5, func() {
			if e.a.est == est {
				est.Stores(at(now), stores)
			}
		})
	}
	e.step()
}

// stored is the store event of a request's blocks.
func (e *simEngine) stored(r *simRequest, from, to int) queue.Store {
	s := queue.Store{}
	if from > 0 {
		s.Parent = e.p.key(r, from)
	}
	for d := from + plantBlock; d <= to; d += plantBlock {
		s.Points = append(s.Points, queue.Point{Key: e.p.key(r, d), DepthTokens: d})
	}
	return s
}

func (e *simEngine) first(r *simRequest) {
	e.p.firsts = append(e.p.firsts, e.p.now-r.askedMs)
	if r.told && r.f != nil {
		e.p.after(3, func() {
			if _, open := r.f.Open(r.id); open {
				r.c.tell(r.f, r.id, ledger.MarkFirst, 0)
			}
		})
	}
}

func (e *simEngine) end(r *simRequest) {
	if r.told && r.f != nil {
		e.p.after(3, func() {
			if _, open := r.f.Open(r.id); open {
				r.c.tell(r.f, r.id, ledger.MarkDone, r.out)
			}
		})
	}
}

// note keeps what the counters say from now on, at the end of a step: what came
// while it ran is not looked at yet.
func (e *simEngine) note() {
	e.past = append(e.past, reading{e.p.now, len(e.running), e.leftWaiting, e.finished})
	if len(e.past) > 4000 {
		e.past = e.past[:copy(e.past, e.past[2000:])]
	}
}

// poll reads the counters as they were some time ago, as an engine shows them.
func (e *simEngine) poll() {
	p := e.p
	lag := e.lagMs
	if p.o.lagJumpMs > 0 && p.now > p.o.seconds*500 {
		lag = p.o.lagJumpMs
	}
	shown := reading{}
	for i := len(e.past) - 1; i >= 0; i-- {
		if e.past[i].ms <= p.now-lag {
			shown = e.past[i]
			break
		}
	}
	e.a.est.Sample(queue.Sample{At: at(p.now), Running: &shown.running, Waiting: &shown.waiting, Finished: &shown.finished})
	p.after(p.o.pollMs, e.poll)
}

// tellModel tells coordinators of a step model that has changed.
func (e *simEngine) tellModel() {
	for _, l := range e.a.lanes {
		if w := l.c.f.byName[e.a.worker()]; l.up && w != nil && w.ownModel != e.a.est.StepModel() {
			if _, err := l.c.f.UpdateHello(at(e.p.now), l.id, e.a.hello(l)); err != nil {
				e.p.t.Fatalf("UpdateHello: %v", err)
			}
		}
	}
	e.p.after(1000, e.tellModel)
}

// preempt puts the youngest running request back to the head of the queue; all
// that was computed of it is lost.
func (e *simEngine) preempt() {
	if len(e.running) == 0 {
		return
	}
	r := e.running[len(e.running)-1]
	e.running = e.running[:len(e.running)-1]
	delete(e.taken, r)
	r.computed, r.out = 0, 0
	e.waiting = slices.Insert(e.waiting, 0, r)
}

// restart gives the engine a new life; what it served is lost.
func (e *simEngine) restart() {
	e.life++
	e.waiting, e.running, e.busy, e.finished, e.past = nil, nil, false, 0, nil
	e.a.restartEngine()
}

// trueWait is the time until the prefill of what the engine has is done, at
// its present decode load.
func (e *simEngine) trueWait() float64 {
	tokens, streams, context := 0, 0, 0
	for _, r := range e.running {
		if r.computed == r.prompt {
			streams++
			context += r.prompt + r.out
		} else {
			tokens += r.prompt - r.computed - e.taken[r]
		}
	}
	for _, r := range e.waiting {
		tokens += r.prompt
	}
	wait := 0.0
	if tokens > 0 || len(e.taken) > 0 {
		wait = max(e.stepEndMs-e.p.now, 0)
	}
	if tokens > 0 {
		model := plantModel
		steps := ledger.NewSteps(model, plantBudget, model.DecodeMs(float64(streams), float64(context), 0))
		w := ledger.AtLoad(&steps, 0, 0, 0)
		w.Fold(&steps, 0, 0, tokens)
		wait += w.QueueMs(0) * e.speed
	}
	return wait
}

// watch compares what coordinators believe with the truth.
func (p *plant) watch() {
	p.after(97, func() {
		for _, e := range p.engines {
			truth := e.trueWait()
			for _, c := range p.coords {
				if c.lanes[e.a.index].up {
					p.errors = append(p.errors, c.wait(e.a)-truth)
				}
			}
		}
		p.watch()
	})
}

// run lets the day pass and returns the plant.
func (p *plant) run() *plant {
	p.watch()
	if p.o.chatter != nil {
		p.o.chatter(p)
	}
	p.until(p.o.seconds * 1000)
	return p
}

func (p *plant) meanFirst() float64 {
	sum := 0.0
	for _, v := range p.firsts {
		sum += v
	}
	return sum / float64(len(p.firsts))
}

// errorAt is a quantile of the absolute error of the believed wait, bias its
// mean.
func (p *plant) errorAt(q float64) float64 {
	abs := make([]float64, len(p.errors))
	for i, v := range p.errors {
		abs[i] = math.Abs(v)
	}
	slices.Sort(abs)
	return abs[int(q*float64(len(abs)-1))]
}

func (p *plant) bias() float64 {
	sum := 0.0
	for _, v := range p.errors {
		sum += v
	}
	return sum / float64(len(p.errors))
}
