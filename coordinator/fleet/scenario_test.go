package fleet

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// days runs the same days with two or more arms and returns one plant per arm,
// with what all its days measured.
func days(t *testing.T, seeds int, arms ...func(*plantOptions)) []*plant {
	t.Helper()
	if testing.Short() {
		t.Skip("days of an emulated fleet take some seconds each; left out with -short")
	}
	var sums []*plant
	for _, change := range arms {
		o := baseline()
		change(&o)
		sum := newPlant(t, 1, o).run()
		for seed := 2; seed <= seeds; seed++ {
			p := newPlant(t, uint64(seed), o).run()
			sum.firsts, sum.errors = append(sum.firsts, p.firsts...), append(sum.errors, p.errors...)
		}
		sums = append(sums, sum)
	}
	return sums
}

func (p *plant) String() string {
	return fmt.Sprintf("first token %.0f ms, waits off by %.0f / %.0f ms (p50 / p95), bias %.0f", p.meanFirst(), p.errorAt(.5), p.errorAt(.95), p.bias())
}

// The signal lag of the counters is learnt, whatever it is and when it jumps,
// so that counters late by seconds do no harm: the run is not worse than one
// without any.
func TestCountersOfAnyAge(t *testing.T) {
	t.Parallel()
	only := func(lag, jump float64) func(*plantOptions) {
		return func(o *plantOptions) { o.events, o.lagMs, o.lagJumpMs, o.coordinators = false, lag, jump, 2 }
	}
	byTime := func(o *plantOptions) { o.events, o.counters, o.coordinators = false, false, 2 }
	arms := days(t, 2, byTime, only(50, 0), only(1000, 0), only(5000, 0), only(100, 5000))
	for i, truth := range []float64{math.NaN(), 50, 1000, 5000, 5000} {
		p := arms[i]
		t.Log(p)
		for _, a := range p.agents {
			// Claims show up one transit and one step later; 120 s are 480
			// readings, and those after the jump 240.
			if got := a.est.LagMs(); i > 0 && !(got >= truth && got <= truth+250) {
				t.Errorf("lag %v is learnt as %v", truth, got)
			}
		}
		if p.meanFirst() > 1.15*arms[0].meanFirst() {
			t.Errorf("lag %v: first token %.0f ms, by time only %.0f", truth, p.meanFirst(), arms[0].meanFirst())
		}
	}
}

// Coordinators that do not hear of each other meet through the agents, as long
// as these report at once.
func TestCoordinatorsCutFromEachOther(t *testing.T) {
	t.Parallel()
	k8 := func(cut, atOnce bool) func(*plantOptions) {
		return func(o *plantOptions) { o.coordinators, o.placesCut, o.atOnce = 8, cut, atOnce }
	}
	arms := days(t, 4, k8(false, true), k8(true, true), k8(true, false))
	for _, p := range arms {
		t.Log(p)
	}
	whole, cut, late := arms[0], arms[1], arms[2]
	if cut.meanFirst() > 1.05*whole.meanFirst() {
		t.Errorf("first token %.0f ms cut from each other, %.0f ms not", cut.meanFirst(), whole.meanFirst())
	}
	if cut.errorAt(.95) > 1.2*whole.errorAt(.95) {
		t.Errorf("p95 error %.0f ms cut from each other, %.0f ms not", cut.errorAt(.95), whole.errorAt(.95))
	}
	if late.meanFirst() < 1.1*cut.meanFirst() {
		t.Errorf("first token %.0f ms without reports at once, %.0f with: the test shows nothing", late.meanFirst(), cut.meanFirst())
	}
}

// Workers half as fast to half again as slow as the prior says: evidence keeps
// the error bounded, whichever it is, and the speed is learnt.
func TestWrongSpeeds(t *testing.T) {
	t.Parallel()
	spread := func(counters, events bool, reports float64) func(*plantOptions) {
		return func(o *plantOptions) {
			o.speedSpread, o.counters, o.events, o.reports, o.coordinators = .5, counters, events, reports, 2
		}
	}
	arms := days(t, 2, spread(true, true, 0), spread(true, false, 0), spread(false, true, 0), spread(false, false, 1), spread(false, false, 0))
	for i, p := range arms {
		t.Log(p)
		if i < 4 && p.errorAt(.95) > 1500 {
			t.Errorf("arm %d: p95 error %.0f ms", i, p.errorAt(.95))
		}
		if i == 4 {
			continue
		}
		for j, a := range p.agents {
			model, truth := a.est.StepModel(), plantModel.Scaled(p.engines[j].speed)
			got, want := model.PrefillMs(2048)+model.DecodeMs(8, 40_000, 0), truth.PrefillMs(2048)+truth.DecodeMs(8, 40_000, 0)
			if (i == 0 || i == 2 || i == 3) && math.Abs(math.Log(got/want)) > .2 {
				t.Errorf("arm %d, worker %d: a full step is learnt as %.0f ms, takes %.0f", i, j, got, want)
			}
		}
	}
	for i, want := range []ledger.Basis{ledger.BasisEvidence, ledger.BasisCounters, ledger.BasisEvidence, ledger.BasisEvidence, ledger.BasisTime} {
		for _, info := range arms[i].coords[0].f.Workers(at(arms[i].now)) {
			if info.QueueBasis != want {
				t.Errorf("arm %d: the queue of %s rests on %q, want %q", i, info.Name, info.QueueBasis, want)
				break
			}
		}
	}
}

// A coordinator that restarts every 20 s chooses as well as one that runs on,
// once it has the first report of each agent.
func TestCoordinatorRestarts(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("a day of an emulated fleet takes some seconds; left out with -short")
	}
	o := baseline()
	o.perSec = 19
	var own, best, worst float64
	o.chatter = func(p *plant) {
		var again func()
		again = func() {
			c, other := p.coords[0], p.coords[1]
			c.restart()
			p.after(170, func() {
				pick := func(c *coord) (least int, own []float64) {
					for i, a := range p.agents {
						w := c.f.byName[a.worker()].snapshot
						own = append(own, w.Waiting.OwnMs(&w.Steps, p.now, 0, 4000))
						if own[i] < own[least] {
							least = i
						}
					}
					return least, own
				}
				chosen, _ := pick(c)
				least, times := pick(other)
				own, best, worst = own+times[chosen], best+times[least], worst+slices.Max(times)
			})
			p.after(20_000, again)
		}
		p.after(20_000, again)
	}
	for seed := range uint64(6) {
		newPlant(t, seed, o).run()
	}
	if own > 1.1*best {
		t.Errorf("it chooses %.0f ms where the others choose %.0f", own, best)
	}
	if worst < 1.5*best {
		t.Errorf("the choices are alike (%.0f to %.0f ms): the test shows nothing", best, worst)
	}
}

// All parties restart now and then, engines too: claims are not lost for long
// and nothing of them stays.
func TestPartiesRestart(t *testing.T) {
	t.Parallel()
	restarts := func(o *plantOptions) {
		o.seconds = 90
		o.chatter = func(p *plant) {
			var again func()
			again = func() {
				if p.now > 60_000 {
					return
				}
				switch p.rng.IntN(4) {
				case 0:
					p.agents[p.rng.IntN(len(p.agents))].restart()
				case 1:
					p.coords[p.rng.IntN(len(p.coords))].restart()
				default:
					if p.rng.IntN(4) == 0 {
						p.engines[p.rng.IntN(len(p.engines))].restart()
					}
				}
				p.after(p.rng.ExpFloat64()*1500, again)
			}
			p.after(5000, again)
		}
	}
	arms := days(t, 2, func(o *plantOptions) { o.seconds = 90 }, restarts)
	t.Log(arms[0])
	t.Log(arms[1])
	if arms[1].meanFirst() > 1.25*arms[0].meanFirst() {
		t.Errorf("first token %.0f ms with restarts, %.0f without", arms[1].meanFirst(), arms[0].meanFirst())
	}
	p := arms[1]
	p.until(p.now + 200_000)
	for _, a := range p.agents {
		if open, kept := a.est.OpenClaims(); open+kept != 0 {
			t.Errorf("agent %d keeps %d claims", a.index, kept)
		}
		for _, c := range p.coords {
			if w := c.f.byName[a.worker()]; c.wait(a) != 0 || w.snapshot.Live != 0 || len(w.open) != 0 {
				t.Errorf("coordinator %d believes in %v ms, %v live of worker %d, %d claims", c.index, c.wait(a), w.snapshot.Live, a.index, len(w.open))
			}
		}
	}
}

// bench is a small plant that a test drives by hand.
func bench(t *testing.T, coordinators, workers int, change ...func(*plantOptions)) *plant {
	t.Helper()
	o := baseline()
	o.coordinators, o.workers, o.perSec, o.foreign, o.lost, o.cancelled, o.sizeSigma, o.lagMs = coordinators, workers, 1e-9, 0, 0, 0, 0, 0
	for _, f := range change {
		f(&o)
	}
	p := newPlant(t, 1, o)
	p.until(300) // first reports
	return p
}

// ask places a request of so many tokens on a worker and sends it.
func (p *plant) ask(c *coord, worker, tokens int, change ...func(*ledger.Claim, *simRequest)) *simRequest {
	p.serial++
	r := &simRequest{serial: p.serial, prompt: tokens, output: 20, askedMs: p.now, id: fmt.Sprint("r", p.serial), c: c, f: c.f}
	claim := ledger.Claim{PromptTokens: tokens, UncachedTokens: tokens, OutputTokens: 20}
	for _, depth := range []int{plantBlock, tokens / plantBlock * plantBlock} {
		if depth > 0 && depth <= tokens && (len(claim.KeyDepths) == 0 || depth > int(claim.KeyDepths[0])) {
			claim.Keys, claim.KeyDepths = append(claim.Keys, p.key(r, depth)), append(claim.KeyDepths, uint32(depth))
		}
	}
	for _, f := range change {
		f(&claim, r)
	}
	made, ok := c.place(p.agents[worker], r.id, claim)
	if !ok {
		p.t.Fatalf("request %s was not placed", r.id)
	}
	r.engine = made.EngineProcess
	e := p.engines[worker]
	p.after(2, func() { e.enter(r) })
	return r
}

// An agent is replaced between a report and the offer that follows it, on the
// same lane address: two reports later no claim is missing.
func TestAgentReplacedBetweenReportAndOffer(t *testing.T) {
	p := bench(t, 2, 1)
	a, c := p.agents[0], p.coords[0]
	p.ask(c, 0, 4000)
	p.until(p.now + 400)
	// Claims whose frames are still to be sent when the agent goes.
	for range 3 {
		p.ask(c, 0, 3000)
	}
	a.restart()
	p.ask(c, 0, 3000)
	p.until(p.now + 2*150 + 30)
	if got, want := a.upto(c.process), uint64(5); got != want {
		t.Errorf("the new agent echoes %d of %d claims", got, want)
	}
	open, _ := a.est.OpenClaims()
	for _, c := range p.coords {
		if got, truth := c.wait(a), p.engines[0].trueWait(); math.Abs(got-truth) > 250 {
			t.Errorf("coordinator %d believes in %.0f ms, true are %.0f; the agent has %d open", c.index, got, truth, open)
		}
	}
}

// The lane of one coordinator is down for 20 s while placements go on: its
// peers' belief does not drift, and once its lane is up nothing is left.
func TestOneLaneDown(t *testing.T) {
	p := bench(t, 3, 1)
	a := p.agents[0]
	c := p.coords[0]
	c.lanes[0].setCut(true)
	until := p.now + 20_000
	sum, n := 0.0, 0
	for p.now < until {
		p.ask(p.coords[p.rng.IntN(3)], 0, 1000+p.rng.IntN(3000))
		p.until(p.now + 250 + 100*p.rng.Float64())
		for _, peer := range p.coords[1:] {
			sum += peer.wait(a) - p.engines[0].trueWait()
			n++
		}
	}
	if bias := sum / float64(n); math.Abs(bias) > 50 {
		t.Errorf("the peers are off by %.0f ms on average", bias)
	}
	c.lanes[0].setCut(false)
	p.until(p.now + 90_000)
	for _, c := range p.coords {
		if w := c.f.byName[a.worker()]; c.wait(a) != 0 || w.snapshot.Live != 0 {
			t.Errorf("coordinator %d believes in %.0f ms and %v live", c.index, c.wait(a), w.snapshot.Live)
		}
	}
}

// A report two seconds old drains what it told, and nothing that was made since.
func TestOldReportDrainsNothingNew(t *testing.T) {
	r := newRig(t, 1)
	r.load(0, "gpu-00", echoing(500))
	r.f.CloseLane(at(1), "gpu-00", r.lanes["gpu-00"])
	r.claim(2000, "a", worker0, 300)
	r.placed(2000, peer1, placed(1, 0, 200))
	if got := r.snapshot(worker0).Waiting.QueueMs(2000); got != 500 {
		t.Errorf("queue %v, want the 500 that were made now", got)
	}
}

// Foreign bursts on an idle worker are seen with the next reading and end no
// claims.
func TestForeignBursts(t *testing.T) {
	p := bench(t, 2, 1)
	a, e, c := p.agents[0], p.engines[0], p.coords[0]
	for range 40 { // the lag and the mean claim are learnt
		p.ask(c, 0, 2000)
		p.until(p.now + 260)
	}
	p.until(p.now + 3000)
	for range 20 {
		p.serial++
		e.enter(&simRequest{serial: p.serial, prompt: 2000, output: 5, askedMs: p.now})
	}
	p.until(p.now + 600) // two readings and the learnt lag
	truth := e.trueWait()
	for _, c := range p.coords {
		if got := c.wait(a); got < .6*truth || got > 1.4*truth {
			t.Errorf("coordinator %d believes in %.0f ms of a foreign burst of %.0f", c.index, got, truth)
		}
	}
	// Claims placed behind it wait whole; what waits may be them.
	p.ask(c, 0, 2000)
	p.ask(c, 0, 2000)
	p.until(p.now + 520)
	open, _ := a.est.OpenClaims()
	load := a.est.Load(at(p.now))
	if open != 2 || load.Foreign == nil || int32(*load.Foreign) < 0 {
		t.Errorf("%d claims open while %d requests wait; foreign %v", open, len(e.waiting), load.Foreign)
	}
	p.until(p.now + 30_000)
	if load := a.est.Load(at(p.now)); *load.Foreign != 0 || *load.QueueMs != 0 {
		t.Errorf("foreign %d, queue %v after all was served", *load.Foreign, *load.QueueMs)
	}
}

// An engine restarts with claims in flight; claims for the old life come after
// it, and marks of the old life late: nothing of it stays.
func TestEngineRestartLeavesNothing(t *testing.T) {
	p := bench(t, 2, 1)
	a, c := p.agents[0], p.coords[0]
	var asked []*simRequest
	for range 5 {
		asked = append(asked, p.ask(c, 0, 4000))
	}
	p.until(p.now + 100)
	old := a.engine
	late := p.ask(c, 0, 4000) // its frame is under way when the engine goes
	p.engines[0].restart()
	p.until(p.now + 300)
	if open, _ := a.est.OpenClaims(); open != 0 {
		t.Errorf("%d claims open", open)
	}
	// A peer that does not know yet told a placement for the old life, and the
	// issuer sends a mark of it.
	a.marks(ledger.MarkFrame{Coordinator: c.process, Marks: []ledger.Marked{{Seq: 6, What: ledger.MarkDone, AgeMs: 50}}}, 0)
	frame := ledger.ClaimFrame{Coordinator: c.process, Agent: a.process, Prev: a.upto(c.process), Offers: []ledger.Offer{{
		Claim: ledger.Claim{Seq: 7, EngineProcess: old, PromptTokens: 4000, UncachedTokens: 4000},
	}}}
	a.claims(frame, 0)
	if got := a.est.Counts().FencedClaims; got == 0 || a.upto(c.process) != 7 {
		t.Errorf("%d claims fenced, echo %d: want it echoed and over", got, a.upto(c.process))
	}
	for _, r := range append(asked, late) {
		if how, ok := c.f.Ended(r.id); !ok || how != EndWorkerLost {
			t.Errorf("%s ended as %q", r.id, how)
		}
	}
	p.until(p.now + 1000)
	for _, c := range p.coords {
		if w := c.f.byName[a.worker()]; c.wait(a) != 0 || w.snapshot.Live != 0 || len(w.open) != 0 {
			t.Errorf("coordinator %d believes in %.0f ms, %v live, %d claims", c.index, c.wait(a), w.snapshot.Live, len(w.open))
		}
	}
	if load := a.est.Load(at(p.now)); *load.Live != 0 || *load.QueueMs != 0 {
		t.Errorf("the agent reports %v ms and %d live", *load.QueueMs, *load.Live)
	}
}

// Odd requests: the believed wait stays within one request's time of the truth.
func TestOddRequests(t *testing.T) {
	single := func(tokens int) float64 {
		steps := ledger.NewSteps(plantModel, plantBudget, plantModel.D0Ms)
		return steps.IdleMs(0, tokens) + 60
	}
	for _, test := range []struct {
		name  string
		limit float64
		ask   func(*plant)
	}{
		{"four answers each", single(3000), func(p *plant) {
			for range 6 {
				p.ask(p.coords[0], 0, 3000, func(c *ledger.Claim, _ *simRequest) { c.Sequences = 4 })
			}
		}},
		{"a hundred thousand tokens in fifty chunks", single(4000), func(p *plant) {
			p.ask(p.coords[0], 0, 100_000)
			p.ask(p.coords[0], 0, 4000)
		}},
		{"tails of five tokens", single(2000), func(p *plant) {
			for i := range 8 {
				p.ask(p.coords[0], 0, 2000-i%2*1995)
			}
		}},
		{"equal prompts at once", single(3000), func(p *plant) {
			first := p.ask(p.coords[0], 0, 3000)
			for range 3 { // the others reuse its blocks
				p.ask(p.coords[0], 0, 1, func(c *ledger.Claim, r *simRequest) {
					c.PromptTokens, c.UncachedTokens = 3000, 1
					c.Keys, c.KeyDepths = []prefix.Key{p.key(first, 2992)}, []uint32{2992}
				})
			}
		}},
		{"preemption", single(5000), func(p *plant) {
			for range 4 {
				p.ask(p.coords[0], 0, 5000)
			}
			p.after(700, p.engines[0].preempt)
		}},
	} {
		for _, arm := range []struct {
			name   string
			change func(*plantOptions)
		}{
			{"events and counters", func(*plantOptions) {}},
			{"events", func(o *plantOptions) { o.counters = false }},
			{"counters", func(o *plantOptions) { o.events = false }},
		} {
			t.Run(test.name+"/"+arm.name, func(t *testing.T) {
				p := bench(t, 2, 1, arm.change)
				p.agents[0].state.LagMs = ptr(150.0)
				p.agents[0].restart()
				p.until(p.now + 300)
				test.ask(p)
				worst := 0.0
				for range 120 {
					p.until(p.now + 60)
					off := p.coords[1].wait(p.agents[0]) - p.engines[0].trueWait()
					if math.Abs(off) > math.Abs(worst) {
						worst = off
					}
				}
				if math.Abs(worst) > test.limit {
					t.Errorf("off by %.0f ms, one request takes %.0f", worst, test.limit)
				}
			})
		}
	}
}
