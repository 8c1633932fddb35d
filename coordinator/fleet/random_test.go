package fleet

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"

	"waypost/agent/queue"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

var randomSteps = flag.Int("ledger.steps", envSteps(), "steps of the random test of the ledger (or by WAYPOST_LEDGER_STEPS)")

func envSteps() int {
	if n, err := strconv.Atoi(os.Getenv("WAYPOST_LEDGER_STEPS")); err == nil && n > 0 {
		return n
	}
	return 100_000
}

// The bounds of what the random test demands, ms. A claim is at every connected
// coordinator within two reports and 450 ms; with a fifth of all frames lost,
// within settleMs.
const settleMs = 5000

// truth is a claim as the test knows it.
type truth struct {
	id      string
	c       *coord
	f       *Fleet // the coordinator process that made it
	a       *agent
	seq     uint64
	process uint64 // coordinator's
	engine  uint64
	madeMs  float64
	ended   bool // at the coordinator
}

// chaos drives a world at random and checks it.
type chaos struct {
	*world
	serial int
	open   []*truth
	// took says which claims an agent process took in, by agent process,
	// coordinator process and seq, and by worker for any of its agents.
	took map[[2]uint64]map[uint64]bool
	// changedMs is when a lane or a party last changed.
	changedMs float64
	checks    int
}

func newChaos(t fataler, seed uint64, change ...func(*worldOptions)) *chaos {
	delay := func(r *rand.Rand) float64 {
		if r.IntN(20) == 0 {
			return r.Float64() * 400 // out of order
		}
		return 1 + r.Float64()*20
	}
	o := worldOptions{
		laneDelay: delay, linkDelay: delay, laneLoss: .2, linkLoss: .2, double: .2, loadEvery: 150, atOnce: true,
		facts: func(int) (Facts, queue.Facts) {
			m := ledger.StepModel{P0Ms: 5, P1MsPerToken: .1, D0Ms: 5}
			return Facts{Ranks: 1, Kind: "vllm", Model: "m", BlockTokens: 16, PoolBlocks: 4000, StepTokens: 1000},
				queue.Facts{Model: m, StepTokens: 1000, BlockTokens: 16, PoolBlocks: 4000}
		},
	}
	for _, f := range change {
		f(&o)
	}
	x := &chaos{world: newWorld(t, seed, 3, 2, o), took: map[[2]uint64]map[uint64]bool{}}
	x.onTaken = func(a *agent, coordinator uint64, seqs []uint64) {
		for _, process := range []uint64{a.process, uint64(a.index)} {
			key := [2]uint64{process, coordinator}
			if x.took[key] == nil {
				x.took[key] = map[uint64]bool{}
			}
			for _, seq := range seqs {
				x.took[key][seq] = true
			}
		}
	}
	for _, a := range x.agents {
		x.poll(a)
	}
	return x
}

// poll reads counters that follow the truth, with some lag.
func (x *chaos) poll(a *agent) {
	x.after(200, func() {
		running, waiting := 0, 0
		for _, c := range x.open {
			if c.a == a && !c.ended {
				if x.now-c.madeMs > 300 {
					running++
				} else {
					waiting++
				}
			}
		}
		finished := float64(x.serial)
		a.est.Sample(queue.Sample{At: at(x.now), Running: &running, Waiting: &waiting, Finished: &finished})
		x.poll(a)
	})
}

// act does one random thing.
func (x *chaos) act() {
	r := x.rng
	c, a := x.coords[r.IntN(len(x.coords))], x.agents[r.IntN(len(x.agents))]
	switch n := r.IntN(1000); {
	case n < 300:
		x.claim(c, a)
	case n < 550:
		x.evidence()
	case n < 570: // unknown evidence
		seq := 1 + r.Uint64N(100_000)
		a.marks(ledger.MarkFrame{Coordinator: c.process + uint64(r.IntN(2)), Marks: []ledger.Marked{{Seq: seq, What: ledger.MarkDone}}}, 0)
		a.est.Stores(at(x.now), []queue.Store{{Points: []queue.Point{{Key: prefix.Key(r.Uint64() | 1), DepthTokens: 16}}}})
	case n < 575: // a placement for an engine life that nobody knows
		x.link(c.process+1, c, ledger.Placed{Worker: a.worker(), RequestID: fmt.Sprint("odd", x.serial), Attempt: 1, Offer: ledger.Offer{
			Claim: ledger.Claim{Seq: 1 + r.Uint64N(5), EngineProcess: r.Uint64() | 1, PromptTokens: 200, UncachedTokens: 200},
		}})
	case n < 578:
		x.changedMs = x.now
		l := c.lanes[a.index]
		l.setCut(!l.cut)
	case n < 581:
		key := pair(r.IntN(len(x.coords)), r.IntN(len(x.coords)))
		x.linkCut[key] = !x.linkCut[key]
	case n < 582 && r.IntN(3) == 0:
		x.changedMs = x.now
		a.restart()
	case n < 583 && r.IntN(3) == 0:
		x.changedMs = x.now
		for _, t := range x.open {
			t.ended = t.ended || t.c == c
		}
		c.restart()
	case n < 584 && r.IntN(3) == 0:
		x.changedMs = x.now
		a.restartEngine()
	}
}

func (x *chaos) claim(c *coord, a *agent) {
	x.serial++
	id := fmt.Sprint("r", x.serial)
	tokens := 1 + x.rng.IntN(900)
	claim := ledger.Claim{PromptTokens: tokens, UncachedTokens: tokens, OutputTokens: 20, Keys: []prefix.Key{x.key(x.serial)}, KeyDepths: []uint32{uint32(tokens)}}
	made, ok := c.place(a, id, claim)
	if !ok {
		return
	}
	x.open = append(x.open, &truth{id: id, c: c, f: c.f, a: a, seq: made.Seq, process: c.process, engine: made.EngineProcess, madeMs: x.now})
}

func (x *chaos) key(serial int) prefix.Key { return prefix.Key(uint64(serial)*0x9e3779b97f4a7c15 | 1) }

// evidence tells something of one open claim, perhaps twice: a store, a mark,
// or nothing at all.
func (x *chaos) evidence() {
	if len(x.open) == 0 {
		return
	}
	i := x.rng.IntN(min(len(x.open), 12))
	t := x.open[i]
	forget := func() { x.open = append(x.open[:i], x.open[i+1:]...) }
	if t.ended || t.c.f != t.f {
		t.ended = true
		forget()
		return
	}
	if _, open := t.f.Open(t.id); !open {
		t.ended = true
		forget()
		return
	}
	switch x.rng.IntN(10) {
	case 0, 1, 2:
		serial, _ := strconv.Atoi(t.id[1:])
		for range 1 + x.rng.IntN(2) {
			t.a.est.Stores(at(x.now-x.rng.Float64()*20), []queue.Store{{Points: []queue.Point{{Key: x.key(serial), DepthTokens: 900}}}})
		}
	case 3, 4:
		t.c.tell(t.f, t.id, ledger.MarkFirst, 0)
	case 5, 6, 7:
		t.c.tell(t.f, t.id, ledger.MarkDone, 20)
		t.c.tell(t.f, t.id, ledger.MarkFailed, 0) // a second end
		t.ended = true
		forget()
	case 8:
		t.c.tell(t.f, t.id, ledger.MarkGone, 0)
		t.ended = true
		forget()
	case 9: // nobody ever says anything of it again
		forget()
	}
}

// check returns what is wrong, empty if nothing is.
func (x *chaos) check() string {
	x.checks++
	var faults []string
	wrong := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	for _, c := range x.coords {
		for _, a := range x.agents {
			w := c.f.byName[a.worker()]
			if w == nil {
				continue // its lane was not up in this coordinator's life
			}
			s := w.snapshot
			if q := s.Waiting.QueueMs(x.now); !(q >= 0) || math.IsInf(q, 0) || s.Live < 0 || s.HeldBlocks < 0 || s.OpenClaims < 0 {
				wrong("coordinator %d, worker %d: queue %v, live %v, held %v", c.index, a.index, q, s.Live, s.HeldBlocks)
			}
			seen := map[[2]uint64]bool{}
			pending := map[uint64]int{}
			for _, p := range w.open {
				id := [2]uint64{p.coordinator, p.Seq}
				if seen[id] {
					wrong("coordinator %d, worker %d: claim %x/%d twice", c.index, a.index, p.coordinator, p.Seq)
				}
				seen[id] = true
				if !p.pending() {
					continue
				}
				pending[p.coordinator]++
				if p.Seq <= w.echoOf(p.coordinator) && !math.IsNaN(w.report.queueMs) && w.report.any {
					wrong("coordinator %d, worker %d: claim %x/%d counts although the report covers it", c.index, a.index, p.coordinator, p.Seq)
				}
				if age := x.now - w.report.writtenMs; age < 500 && x.now-p.MadeMs > 1500 && !math.IsNaN(w.report.queueMs) {
					wrong("coordinator %d, worker %d: still waits for claim %x/%d made %.0f ms ago, which no report speaks of; others believe %.0f ms less", c.index, a.index, p.coordinator, p.Seq, x.now-p.MadeMs, w.steps.PrefillMs(0, p.UncachedTokens))
				}
			}
			for coordinator, n := range pending {
				if n > maxPending {
					wrong("coordinator %d, worker %d: %d claims of %x on top", c.index, a.index, n, coordinator)
				}
			}
			if len(w.counted) > maxCoordinators || len(w.keptKeys) > maxKeptKeys || len(w.offer.marks) > maxMarksWaiting {
				wrong("coordinator %d, worker %d: bounds", c.index, a.index)
			}
		}
	}
	for _, c := range x.coords {
		if fault := boardFault(c.f); fault != "" {
			wrong("coordinator %d: %s", c.index, fault)
		}
	}
	x.checkClaims(wrong)
	if len(faults) == 0 {
		return ""
	}
	return fmt.Sprintf("at %.0f ms: %s", x.now, strings.Join(faults, "\n"))
}

// checkClaims holds every open claim against all coordinators.
func (x *chaos) checkClaims(wrong func(string, ...any)) {
	for _, t := range x.open {
		if t.ended || t.c.f != t.f || t.a.engine != t.engine {
			continue
		}
		own := t.f.byName[t.a.worker()]
		var p *part
		for _, o := range own.open {
			if o.c != nil && o.Seq == t.seq {
				p = o
			}
		}
		if p == nil {
			if _, open := t.f.Open(t.id); open {
				wrong("claim %s is open and on no worker", t.id)
			}
			continue
		}
		// The own claim counts, or an agent really has it, or it is offered on.
		echoed := p.Seq <= own.echoOf(t.process)
		host := own.host
		if echoed && !x.took[[2]uint64{uint64(t.a.index), t.process}][p.Seq] && !p.first {
			wrong("claim %s (%x/%d): the echo %d of agent %x covers it, but it never took it in: it is lost", t.id, t.process, p.Seq, own.echoOf(t.process), host.agentProcess)
		}
		// A report that tells no queue leaves the walk from the last one that did.
		if !p.pending() && !echoed && !p.first && !p.folded && !math.IsNaN(own.report.queueMs) && own.report.writtenMs-p.MadeMs <= echoGraceMs {
			wrong("claim %s (%x/%d) counts nowhere %.0f ms after it was made", t.id, t.process, p.Seq, x.now-p.MadeMs)
		}
		// Settled for long: every connected coordinator hears of it from the agent.
		if p.echoed && !x.took[[2]uint64{t.a.process, t.process}][p.Seq] {
			continue // it was at a former agent process
		}
		l := t.c.lanes[t.a.index]
		if x.now-max(t.madeMs, t.a.bornMs, l.upMs, x.changedMs) < settleMs || !l.up || x.now-t.madeMs > offerableMs-settleMs {
			continue
		}
		for _, c := range x.coords {
			other := c.lanes[t.a.index]
			if !other.up || x.now-max(other.upMs, c.bornMs) < settleMs {
				continue
			}
			if c.f.byName[t.a.worker()].echoOf(t.process) < t.seq {
				wrong("claim %s (%x/%d) made %.0f ms ago is not in the report at coordinator %d", t.id, t.process, t.seq, x.now-t.madeMs, c.index)
			}
		}
	}
}

// quiesce heals everything, stops new work and waits 200 s: nothing may be
// left, and all coordinators believe the same.
func (x *chaos) quiesce() string {
	for _, c := range x.coords {
		for _, l := range c.lanes {
			if l.cut {
				l.setCut(false)
			}
		}
	}
	clear(x.linkCut)
	x.open = nil // nobody says anything of them any more
	x.until(x.now + 200_000)
	x.took = map[[2]uint64]map[uint64]bool{}
	x.changedMs = x.now
	var faults []string
	wrong := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	for _, a := range x.agents {
		if open, kept := a.est.OpenClaims(); open != 0 || kept != 0 {
			wrong("agent %d keeps %d claims, %d open", a.index, kept, open)
		}
		for _, c := range x.coords {
			w := c.f.byName[a.worker()]
			if wait := c.wait(a); wait != 0 || w.snapshot.Live != 0 || len(w.open) != 0 || c.f.OpenClaims() != 0 || c.f.claims.peerParts != 0 || len(w.keptKeys) != 0 {
				wrong("coordinator %d believes in %v ms and %v live requests of worker %d; %d claims left, %d of its own", c.index, wait, w.snapshot.Live, a.index, len(w.open), c.f.OpenClaims())
			}
		}
	}
	return strings.Join(faults, "\n")
}

// run does so many steps and returns the step and the fault that came first.
func (x *chaos) run(steps int) (int, string) {
	for step := 1; step <= steps; step++ {
		x.until(x.now + x.rng.ExpFloat64()*8)
		x.act()
		if step%3 == 0 {
			if fault := x.check(); fault != "" {
				return step, fault
			}
		}
		if step%10_000 == 0 {
			if fault := x.quiesce(); fault != "" {
				return step, "200 s after quiescence: " + fault
			}
		}
	}
	return steps, ""
}

// The random test of the protocol: three coordinators, two workers, a fifth of
// all frames lost, doubled or out of order, lanes and links cut, every party
// restarting, evidence doubled and unknown.
func TestLedgerAtRandom(t *testing.T) {
	t.Parallel()
	steps := *randomSteps
	if testing.Short() {
		steps = min(steps, 20_000)
	}
	// Several worlds: a world that came into a rare state early shows more.
	const worlds = 5
	for seed := range uint64(worlds) {
		x := newChaos(t, 100+seed)
		if step, fault := x.run(steps / worlds); fault != "" {
			t.Fatalf("world %d, step %d: %s", seed, step, fault)
		}
		if x.checks < steps/worlds/4 || x.frames < steps/worlds/4 {
			t.Errorf("%d checks, %d frames: the test tested nothing", x.checks, x.frames)
		}
	}
}

// The test finds the two known faults of such a protocol: an echo that is the
// highest seq seen, and claims that are waited for without a limit of age.
func TestLedgerAtRandomFindsKnownFaults(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*worldOptions)
		want   string
	}{
		{"highest seq", func(o *worldOptions) { o.highestSeq = true }, "it is lost"},
		{"no limit of age", func(o *worldOptions) { o.ageless = true }, "still waits for"},
	} {
		t.Run(test.name, func(t *testing.T) {
			step, fault := newChaos(t, 100, test.change).run(20_000)
			if !strings.Contains(fault, test.want) {
				t.Errorf("found %q after %d steps", fault, step)
			}
			t.Logf("found at step %d", step)
		})
	}
}
