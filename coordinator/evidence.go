package coordinator

import (
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/explain"
	"waypost/coordinator/fleet"
	"waypost/coordinator/outcome"
	"waypost/coordinator/placement"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// settleAfter is when the evidence on an outcome is taken to be in: engines
// tell events within milliseconds, frames of the cache view come every second,
// and a restart is seen by the next reading of the engine.
const settleAfter = 3 * time.Second

const (
	// answerWithin is how long an agent has to answer, maxAsked how often it is
	// asked at most: a question goes with a lane that is opened anew.
	answerWithin = time.Second
	maxAsked     = 3
	// maxOpenCases bounds the placements whose prefixes are remembered,
	// maxUnsaltedKeys the keys of a salted prompt without its salt.
	maxOpenCases    = 65_536
	maxUnsaltedKeys = 64
	// caseLife is how long a placement without an outcome is remembered.
	caseLife = 15 * time.Minute
)

// cases gathers evidence on placements: what their prefixes were, until their
// outcome has its class. Keys stay in memory.
type cases struct {
	c *Coordinator
	// after is settleAfter, or what a test sets.
	after time.Duration
	asks  agentAsks[*waypostv1.EvidenceReply]

	mu    sync.Mutex
	open  map[string]*placed
	order []*placed // by time, for the bound and the end of life
	due   []*placed // waiting for settleAfter, by time
	// gaps is when frames of a worker's view were last missing.
	gaps map[fleet.WorkerID]time.Time
	wake chan struct{}
}

// placed is what is remembered of one placement.
type placed struct {
	id            string
	at            time.Time
	worker        string
	process       uint64
	viewAgeMs     float64
	expected, tip *waypostv1.EvidencePoint
	unsalted      []*waypostv1.EvidencePoint
	lengthExact   bool
	several       bool // answers: usage tells of one of them
	dueAt         time.Time
	// ended says that nobody reported the outcome: the agent's word is asked.
	ended bool
	asked int // how often the agent was
}

func newCases(c *Coordinator, after time.Duration) *cases {
	return &cases{
		c: c, after: after, open: map[string]*placed{},
		gaps: map[fleet.WorkerID]time.Time{}, wake: make(chan struct{}, 1),
	}
}

// remember keeps what a placement's outcome will be compared with.
func (k *cases) remember(w *work, req *waypostv1.PlaceRequest, e *explain.Entry, blockTokens int, now time.Time) {
	p := &placed{
		id: e.Placement, at: now, worker: e.Worker, process: e.Process, viewAgeMs: e.ViewAgeMs,
		lengthExact: !w.prompt.estimated && w.prompt.source != "unknown", several: w.text.several,
	}
	if w.prompt.keyed {
		p.expected = w.prompt.point(max(e.ExpectedTokens, 0))
		tip := w.prompt.sure
		if blockTokens > 0 {
			tip -= tip % blockTokens
		}
		p.tip = w.prompt.point(tip)
		if salt := req.GetCacheSalt(); salt != "" {
			p.unsalted = k.withoutSalt(w, e.Pool, req.GetAdapter(), tip)
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.open[p.id] = p
	k.order = append(k.order, p)
	for len(k.order) > 0 {
		oldest := k.order[0]
		_, open := k.open[oldest.id]
		if open && len(k.open) <= maxOpenCases && len(k.order) <= 4*maxOpenCases && now.Sub(oldest.at) <= caseLife {
			return
		}
		delete(k.open, oldest.id)
		k.order[0] = nil
		k.order = k.order[1:]
	}
}

// withoutSalt names the prompt's prefixes as an engine would that ignores
// salts. The probe is done with its own domain by then.
func (k *cases) withoutSalt(w *work, pool, adapter string, tip int) []*waypostv1.EvidencePoint {
	keyer := k.c.keyers.of(prefix.Domain{Model: k.c.modelOf(pool), Adapter: adapter})
	w.prompt.probe.Rekey(keyer)
	var out []*waypostv1.EvidencePoint
	for depth := prefix.ChunkTokens; depth < tip && len(out) < maxUnsaltedKeys-1; depth += prefix.ChunkTokens {
		if p := w.prompt.point(depth); p != nil {
			out = append(out, p)
		}
	}
	if p := w.prompt.point(tip); p != nil {
		out = append(out, p)
	}
	return out
}

// point names a prefix of the prompt; nil: it has no key.
func (p *prompt) point(depthTokens int) *waypostv1.EvidencePoint {
	key, ok := p.probe.At(depthTokens)
	if !ok {
		return nil
	}
	return &waypostv1.EvidencePoint{Depth: proto.Uint32(uint32(depthTokens)), Key: proto.Uint64(uint64(key))}
}

// several says whether a placement asked for several answers.
func (k *cases) several(id string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.open[id]
	return p != nil && p.several
}

// lost notes that frames of a worker's view were missing.
func (k *cases) lost(worker fleet.WorkerID, now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.gaps[worker] = now
}

// atOnce is the evidence that is there when an outcome comes. What may still
// turn up is unknown.
func (k *cases) atOnce(e *explain.Entry, o *outcome.Outcome, now time.Time) outcome.Evidence {
	k.mu.Lock()
	p := k.open[e.Placement]
	k.mu.Unlock()
	return k.known(p, e, o, now)
}

// known is what this coordinator knows itself; p is nil if the placement is
// not remembered.
func (k *cases) known(p *placed, e *explain.Entry, o *outcome.Outcome, now time.Time) outcome.Evidence {
	var ev outcome.Evidence
	w, err := k.c.fleet.Worker(now, e.Worker)
	if err != nil {
		return ev
	}
	ev.BlockTokens = w.Facts.BlockTokens
	if w.Process != e.Process {
		ev.ProcessChanged = outcome.Yes
	}
	if p == nil {
		return ev
	}
	if p.lengthExact && o.PromptTokens != placement.Unknown && o.PromptTokens != e.PromptTokens {
		// The engine counts other tokens than we placed: it renders otherwise.
		ev.BoundaryDiffers = outcome.Yes
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if at, ok := k.gaps[w.ID]; ok && at.After(p.viewAt()) {
		ev.StreamLost = outcome.Yes
	}
	return ev
}

// viewAt is when the view was true that was decided on.
func (p *placed) viewAt() time.Time {
	if !(p.viewAgeMs > 0) {
		return p.at
	}
	return p.at.Add(-time.Duration(p.viewAgeMs * float64(time.Millisecond)))
}

// settleLater has an outcome's class settled once the evidence is in.
func (k *cases) settleLater(id string, now time.Time) { k.later(id, now, false) }

// endedUnreported has the agent asked about a placement that ended without an
// outcome.
func (k *cases) endedUnreported(id string, now time.Time) { k.later(id, now, true) }

func (k *cases) later(id string, now time.Time, ended bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.open[id]
	if p == nil {
		p = &placed{id: id, at: now}
	}
	if !p.dueAt.IsZero() {
		p.ended = p.ended && ended
		return
	}
	if len(k.due) >= maxOpenCases { // agents answer too slowly: its class stays provisional
		return
	}
	p.ended = ended
	k.wait(p, now)
}

// wait has a placement settled in a while. The lock is held.
func (k *cases) wait(p *placed, now time.Time) {
	p.dueAt = now.Add(k.after)
	k.due = append(k.due, p)
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// again puts off what an agent gave no answer about, unless it was asked often
// enough or too much waits.
func (k *cases) again(p *placed, now time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p.asked++; p.asked >= maxAsked || len(k.due) >= maxOpenCases {
		return false
	}
	k.wait(p, now)
	return true
}

// done forgets a placement whose class is final.
func (k *cases) done(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p := k.open[id]; p != nil && p.dueAt.IsZero() {
		delete(k.open, id)
	}
}

// settleAtOnce bounds the agents that are asked at the same time.
const settleAtOnce = 32

// run settles what is due until the coordinator ends; then what waits keeps
// its provisional class.
func (k *cases) run() {
	var group sync.WaitGroup
	defer group.Wait()
	room := make(chan struct{}, settleAtOnce)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		next, wait := k.nextDue(time.Now())
		if next == nil {
			timer.Reset(wait)
			select {
			case <-k.c.ctx.Done():
				return
			case <-k.wake:
			case <-timer.C:
			}
			continue
		}
		select {
		case <-k.c.ctx.Done():
			return
		case room <- struct{}{}:
			group.Go(func() {
				defer func() { <-room }()
				k.settle(next)
			})
		}
	}
}

// nextDue takes the next placement that is due, or says how long to wait.
func (k *cases) nextDue(now time.Time) (next *placed, wait time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.due) == 0 {
		return nil, time.Hour
	}
	if wait = k.due[0].dueAt.Sub(now); wait > 0 {
		return nil, wait
	}
	next = k.due[0]
	k.due[0] = nil
	k.due = k.due[1:]
	delete(k.open, next.id)
	return next, 0
}

// settle asks the worker's agent what the engine's events say, and gives the
// outcome its final class. An agent that does not answer is asked again; if it
// never does, what only it knows is left unknown.
func (k *cases) settle(p *placed) {
	reply := k.ask(p)
	now := time.Now()
	if reply == nil && k.again(p, now) {
		return
	}
	e, ok := k.c.records.Get(p.id)
	if !ok {
		return
	}
	if p.ended {
		k.conclude(p, e, reply, now)
		return
	}
	if e.Outcome == nil {
		return
	}
	ev := k.weigh(p, e, reply, now)
	if settled := k.c.records.Settle(p.id, ev); settled != nil {
		k.c.learn(now, settled)
	}
}

// conclude takes the agent's word for what became of a placement.
func (k *cases) conclude(p *placed, e *explain.Entry, reply *waypostv1.EvidenceReply, now time.Time) {
	o := outcome.NewOutcome(outcome.ResultEnded)
	o.Source = outcome.SourceAgent
	if reply != nil && reply.ReusedTokens != nil {
		o.CachedTokens = min(int(reply.GetReusedTokens()), e.PromptTokens)
	}
	if joined, err := k.c.records.Join(p.id, o, outcome.Evidence{}); err != nil || !joined.News {
		return
	}
	e, ok := k.c.records.Get(p.id)
	if !ok {
		return
	}
	if settled := k.c.records.Settle(p.id, k.weigh(p, e, reply, now)); settled != nil {
		e = settled
	}
	k.c.learn(now, e)
}

// weigh puts together what is known.
func (k *cases) weigh(p *placed, e *explain.Entry, reply *waypostv1.EvidenceReply, now time.Time) outcome.Evidence {
	ev := k.known(p, e, e.Outcome, now)
	if reply == nil || reply.EngineProcess == nil {
		return ev
	}
	if ev.ProcessChanged == outcome.NotKnown {
		ev.ProcessChanged = outcome.AnswerOf(reply.GetEngineProcess() != e.Process)
	}
	tell(&ev.StreamLost, reply.EventsLost)
	tell(&ev.EvictedSince, reply.Removed)
	tell(&ev.WorkerHeld, reply.Held)
	tell(&ev.StoredAgain, reply.StoredAgain)
	tell(&ev.BoundaryDiffers, reply.NamedOtherwise)
	if n := reply.GetUnsaltedTokens(); n > 0 && int(n)+ev.BlockTokens+prefix.ChunkTokens > e.Outcome.CachedTokens && e.Outcome.CachedTokens > max(e.ExpectedTokens, 0) {
		// A salted request found what only the unsalted prompt has listed.
		ev.BoundaryDiffers = outcome.Yes
	}
	return ev
}

// tell adds what an agent knows; nobody's yes is taken back.
func tell(a *outcome.Answer, fact *bool) {
	if fact != nil && *a != outcome.Yes {
		*a = outcome.AnswerOf(*fact)
	}
}

// ask asks the agent of the placement's worker; nil: no answer.
func (k *cases) ask(p *placed) *waypostv1.EvidenceReply {
	host, index, ok := k.c.lanes.where(p.worker)
	if !ok {
		return nil
	}
	s := k.c.lanes.session(host)
	if s == nil {
		return nil
	}
	msg := &waypostv1.EvidenceAsk{
		Index: &index, EngineProcess: &p.process, DecidedAgeMs: proto.Float64(ms(time.Since(p.at))),
		Expected: p.expected, Tip: p.tip, Unsalted: p.unsalted,
	}
	if p.viewAgeMs > 0 {
		msg.ViewAgeMs = &p.viewAgeMs
	}
	reply, err := k.asks.ask(k.c.ctx, s, answerWithin, func(id uint32) *waypostv1.ConnectResponse {
		msg.AskId = &id
		return &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Evidence{Evidence: msg}}
	})
	if err != nil {
		return nil
	}
	return reply
}
