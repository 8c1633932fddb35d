package fleet

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"

	"waypost/agent/queue"
	"waypost/gossip/ledger"
)

// world is coordinators (this package) and agents (agent/queue) in virtual
// time, with lanes and links between them that delay, lose, double and cut.
// Nothing in it knows how the two decide; it carries their frames.
type world struct {
	t     fataler
	rng   *rand.Rand
	now   float64
	due   happenings
	order int

	coords []*coord
	agents []*agent
	// linkCut says which coordinators cannot talk to each other.
	linkCut map[[2]int]bool
	mark    uint64 // last process mark given out

	options worldOptions
	// observers of the tests
	onTaken func(a *agent, coordinator uint64, seqs []uint64)
	frames  int
}

// worldOptions says how bad the network is. Times are ms.
type worldOptions struct {
	laneDelay, linkDelay func(*rand.Rand) float64
	// loss and double are shares of frames on lanes and links.
	laneLoss, linkLoss, double float64
	loadEvery                  float64
	// atOnce sends a report when claims were taken in.
	atOnce bool
	facts  func(worker int) (Facts, queue.Facts)
	// highestSeq makes agents take frames whatever is missing before them: the
	// echo is then the highest seq seen.
	highestSeq bool
	// ageless keeps claims that no report echoes.
	ageless bool
}

// happening is something at a moment.
type happening struct {
	ms    float64
	order int
	do    func()
}

type happenings []happening

func (h happenings) Len() int { return len(h) }
func (h happenings) Less(i, j int) bool {
	return h[i].ms < h[j].ms || h[i].ms == h[j].ms && h[i].order < h[j].order
}
func (h happenings) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *happenings) Push(x any)   { *h = append(*h, x.(happening)) }
func (h *happenings) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = happening{}
	*h = old[:len(old)-1]
	return last
}

func (w *world) after(ms float64, do func()) {
	w.order++
	heap.Push(&w.due, happening{w.now + max(ms, 0), w.order, do})
}

// until lets everything happen up to a moment.
func (w *world) until(ms float64) {
	for len(w.due) > 0 && w.due[0].ms <= ms {
		h := heap.Pop(&w.due).(happening)
		w.now = h.ms
		h.do()
	}
	w.now = ms
}

func (w *world) process() uint64 {
	w.mark++
	// Any order of marks may decide who stays.
	return w.mark<<32 | uint64(w.rng.Uint32())
}

// coord is one coordinator.
type coord struct {
	w       *world
	index   int
	process uint64
	f       *Fleet
	lanes   []*lane // by agent
	sending bool
	bornMs  float64
}

// agent is one host with one engine.
type agent struct {
	w       *world
	index   int
	host    string
	name    string // of its worker
	process uint64
	engine  uint64
	est     *queue.Estimator
	state   queue.State // kept over a restart
	lanes   []*lane     // by coordinator
	loadSeq uint64
	bornMs  float64
}

// lane is the lane of an agent to a coordinator.
type lane struct {
	a       *agent
	c       *coord
	up, cut bool
	life    int // a frame of a former life does not arrive
	session uint64
	id      Lane
	upMs    float64
	lastMs  float64 // of the last report
	waiting bool    // a report at once is on its way out
}

func newWorld(t fataler, seed uint64, coordinators, workers int, o worldOptions) *world {
	w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 7)), linkCut: map[[2]int]bool{}, options: o}
	for i := range coordinators {
		w.coords = append(w.coords, &coord{w: w, index: i})
	}
	for i := range workers {
		host := fmt.Sprintf("gpu-%02d", i)
		w.agents = append(w.agents, &agent{w: w, index: i, host: host, name: WorkerName(host, "e", 0), engine: w.process()})
	}
	for _, c := range w.coords {
		c.start()
	}
	for _, a := range w.agents {
		a.start()
	}
	for _, a := range w.agents {
		for _, c := range w.coords {
			l := &lane{a: a, c: c}
			a.lanes, c.lanes = append(a.lanes, l), append(c.lanes, l)
			l.open()
			w.after(w.rng.Float64()*o.loadEvery, l.beat)
		}
	}
	return w
}

func (c *coord) start() {
	c.process, c.bornMs = c.w.process(), c.w.now
	c.f = newFleet(c.w.t, func(o *Options) { o.Process = c.process })
	if c.w.options.ageless {
		c.f.graceMs = 1e18
	}
	c.tick(c.f)
}

func (c *coord) tick(f *Fleet) {
	c.w.after(1000, func() {
		if c.f == f {
			f.Tick(at(c.w.now))
			c.tick(f)
		}
	})
}

// restart replaces the coordinator by a new process.
func (c *coord) restart() {
	for _, l := range c.lanes {
		l.close()
	}
	c.start()
	for _, l := range c.lanes {
		l.open()
	}
}

func (a *agent) start() {
	a.process, a.loadSeq, a.bornMs = a.w.process(), 0, a.w.now
	_, facts := a.w.options.facts(a.index)
	est, err := queue.New(queue.Options{Facts: facts, AgentProcess: a.process})
	if err != nil {
		a.w.t.Fatalf("queue.New: %v", err)
	}
	if err := est.Import(a.state); err != nil {
		a.w.t.Fatalf("Import: %v", err)
	}
	est.SetProcess(a.engine)
	a.est = est
}

// restart replaces the agent by a new process that keeps what was learnt.
func (a *agent) restart() {
	a.state = a.est.Export()
	for _, l := range a.lanes {
		l.close()
	}
	a.start()
	for _, l := range a.lanes {
		l.open()
	}
}

// restartEngine gives the engine a new life.
func (a *agent) restartEngine() {
	a.engine = a.w.process()
	a.est.SetProcess(a.engine)
	for _, l := range a.lanes {
		if l.up {
			if _, err := l.c.f.UpdateHello(at(a.w.now), l.id, a.hello(l)); err != nil {
				a.w.t.Fatalf("UpdateHello: %v", err)
			}
		}
	}
}

func (a *agent) hello(l *lane) Hello {
	facts, _ := a.w.options.facts(a.index)
	facts.Index, facts.Engine, facts.EngineProcess = 0, "e", a.engine
	model := a.est.StepModel()
	facts.StepModel = &model
	return Hello{Host: a.host, AgentProcess: a.process, Session: l.session, EchoesClaims: true, Workers: []Facts{facts}}
}

func (a *agent) worker() string { return a.name }

func (l *lane) open() {
	if l.up || l.cut {
		return
	}
	w := l.a.w
	l.session++
	id, _, err := l.c.f.OpenLane(at(w.now), l.a.hello(l))
	if err != nil {
		w.t.Fatalf("OpenLane: %v", err)
	}
	l.up, l.id, l.upMs, l.waiting = true, id, w.now, false
	l.life++
	l.a.est.LaneUp(at(w.now), l.c.process)
	l.report()
}

func (l *lane) close() {
	if !l.up {
		return
	}
	w := l.a.w
	l.up = false
	l.life++
	l.c.f.CloseLane(at(w.now), l.a.host, l.id)
	l.a.est.LaneDown(at(w.now), l.c.process)
}

func (l *lane) setCut(cut bool) {
	if l.cut = cut; cut {
		l.close()
	} else {
		l.open()
	}
}

// beat sends reports in rhythm.
func (l *lane) beat() {
	l.report()
	l.a.w.after(l.a.w.options.loadEvery, l.beat)
}

// carry delivers on the lane: late, perhaps twice, perhaps not.
func (l *lane) carry(do func(delayMs float64)) {
	w := l.a.w
	w.frames++
	life := l.life
	times := 1
	if w.rng.Float64() < w.options.double {
		times = 2
	}
	for range times {
		if w.rng.Float64() < w.options.laneLoss {
			continue
		}
		delay := w.options.laneDelay(w.rng)
		w.after(delay, func() {
			if l.life == life && l.up {
				do(delay)
			}
		})
	}
}

// report sends one load report.
func (l *lane) report() {
	if !l.up {
		return
	}
	w, a := l.a.w, l.a
	a.loadSeq++
	l.lastMs, l.waiting = w.now, false
	load := a.est.Load(at(w.now))
	load.EngineProcess = a.engine
	if err := load.Validate(); err != nil {
		w.t.Fatalf("report: %v", err)
	}
	report := Report{
		AgentProcess: a.process, LoadSeq: a.loadSeq, SentMonoNs: uint64((w.now + 1000) * 1e6),
		Workers: []WorkerLoad{{Load: load}},
	}
	l.carry(func(float64) {
		if _, err := l.c.f.Load(at(w.now), a.host, l.id, report); err != nil {
			w.t.Fatalf("Load: %v", err)
		}
		l.c.flush()
	})
}

// reportSoon sends a report at once, but no more than one in 20 ms.
func (l *lane) reportSoon() {
	if l.waiting || !l.up {
		return
	}
	l.waiting = true
	life := l.life
	l.a.w.after(l.lastMs+20-l.a.w.now, func() {
		if l.waiting && l.life == life {
			l.report()
		}
	})
}

// flush sends what waits at a coordinator, gathered for a moment.
func (c *coord) flush() {
	if c.sending {
		return
	}
	c.sending = true
	f := c.f
	c.w.after(c.w.rng.Float64()*3, func() {
		c.sending = false
		if c.f == f {
			c.send(f.TakeOutgoing(at(c.w.now)))
		}
	})
}

func (c *coord) send(out Outgoing) {
	w := c.w
	for _, h := range out.Hosts {
		a := w.agents[slices.IndexFunc(w.agents, func(a *agent) bool { return a.host == h.Host })]
		l := c.lanes[a.index]
		if !l.up || l.id != h.Lane {
			continue
		}
		for _, frame := range h.Claims {
			l.carry(func(delay float64) { a.claims(frame.ClaimFrame, delay) })
		}
		for _, frame := range h.Marks {
			l.carry(func(delay float64) { a.marks(frame.MarkFrame, delay) })
		}
	}
	for _, p := range out.Places {
		for _, peer := range w.coords {
			if peer != c && !w.linkCut[pair(c.index, peer.index)] {
				w.link(c.process, peer, p)
			}
		}
	}
}

func pair(a, b int) [2]int { return [2]int{min(a, b), max(a, b)} }

// link carries a placement to a peer.
func (w *world) link(from uint64, to *coord, p ledger.Placed) {
	times := 1
	if w.rng.Float64() < w.options.double {
		times = 2
	}
	for range times {
		if w.rng.Float64() < w.options.linkLoss {
			continue
		}
		delay := w.options.linkDelay(w.rng)
		f := to.f
		w.after(delay, func() {
			if to.f != f {
				return
			}
			late := p
			late.AgeMs += delay
			if _, err := f.Placed(at(w.now), from, late); err != nil {
				w.t.Fatalf("Placed: %v", err)
			}
			to.flush()
		})
	}
}

// claims delivers a frame of claims to the agent.
func (a *agent) claims(frame ledger.ClaimFrame, delay float64) {
	frame.Offers = slices.Clone(frame.Offers)
	for i := range frame.Offers {
		frame.Offers[i].AgeMs += delay
	}
	if a.w.options.highestSeq {
		frame.Prev = 0
	}
	before := a.upto(frame.Coordinator)
	in, err := a.est.Claims(at(a.w.now), &frame)
	if err != nil {
		a.w.t.Fatalf("Claims: %v", err)
	}
	if a.w.onTaken != nil && !in.Gap && !in.Ignored && !in.Full {
		var seqs []uint64
		for _, o := range frame.Offers {
			if o.Seq > before {
				seqs = append(seqs, o.Seq)
			}
		}
		a.w.onTaken(a, frame.Coordinator, seqs)
	}
	if in.Taken > 0 && a.w.options.atOnce {
		for _, l := range a.lanes {
			l.reportSoon()
		}
	}
}

func (a *agent) upto(coordinator uint64) uint64 {
	load := a.est.Load(at(a.w.now))
	return load.EchoOf(coordinator)
}

func (a *agent) marks(frame ledger.MarkFrame, delay float64) {
	frame.Marks = slices.Clone(frame.Marks)
	for i := range frame.Marks {
		frame.Marks[i].AgeMs += delay
	}
	if _, err := a.est.Marks(at(a.w.now), &frame); err != nil {
		a.w.t.Fatalf("Marks: %v", err)
	}
}

// place puts a claim on a worker; false if the coordinator refuses it.
func (c *coord) place(a *agent, id string, claim ledger.Claim) (OpenClaim, bool) {
	slot, process, ok := c.f.LookupWorker(a.worker())
	if !ok {
		return OpenClaim{}, false
	}
	claim.EngineProcess = process
	made, stored, _, err := c.f.Claim(at(c.w.now), NewClaim{Key: RequestKey{ID: id}, Attempt: 1, Placement: id, Worker: slot, Claim: claim})
	if err != nil || stored {
		return OpenClaim{}, false
	}
	c.flush()
	return made, true
}

// tell reports a mark to the coordinator that placed it.
func (c *coord) tell(f *Fleet, id string, mark ledger.Mark, outputTokens int) {
	if c.f != f {
		return // another process; nobody knows the placement
	}
	if _, err := f.Mark(at(c.w.now), id, mark, outputTokens); err != nil {
		c.w.t.Fatalf("Mark: %v", err)
	}
	c.flush()
}

// wait is what a coordinator believes that a worker's queue takes.
func (c *coord) wait(a *agent) float64 {
	w := c.f.byName[a.worker()]
	if w == nil {
		return 0
	}
	return w.snapshot.Waiting.QueueMs(c.w.now)
}
