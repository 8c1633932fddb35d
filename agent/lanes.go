package agent

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/agent/engine"
	"waypost/gossip/boundary"
	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// tokenizeTimeout bounds one question to an engine's tokenizer, tokenizeAtOnce
// how many run together.
const (
	tokenizeTimeout = 2 * time.Second
	tokenizeAtOnce  = 4
)

// position is how far one coordinator was told one rank's prefix stream.
type position struct {
	epoch uint32
	seq   uint64
}

// lanes answers the agent's lanes: it is their handler and the source of what
// they send.
type lanes struct {
	a *Agent

	mu   sync.Mutex
	told map[*lane.Lane]map[uint32]position
	// toldNews is the news of each rank that a lane has heard.
	toldNews map[*lane.Lane]map[uint32]uint64
	// toldAccuracy is what each lane was told of how right predictions were, and
	// of transfers.
	toldAccuracy map[*lane.Lane]map[uint32]toldAccuracy
	// fresh tells how late frames of a lane come.
	fresh map[*lane.Lane]*lane.Freshness
	// up are the lanes that are up. The lock is held while a rank is told of
	// them, so that each learns of each once.
	up map[*lane.Lane]uint64
	// ahead is how far this host's clock was ahead of that of each lane's
	// coordinator, when it last told the time.
	ahead map[*lane.Lane]time.Duration
	// policy is the newest push of any coordinator.
	policy *waypostv1.PolicyPush
	seq    uint64
	asks   chan struct{}
	// tokenize is what may be asked of engines' tokenizers.
	tokenize allowance
	// pulls are the pulls of each lane that wait for an answer.
	pulls map[*lane.Lane]chan *waypostv1.PrefixPull
	began time.Time
}

func newLanes(a *Agent) *lanes {
	return &lanes{
		a: a, told: map[*lane.Lane]map[uint32]position{}, toldNews: map[*lane.Lane]map[uint32]uint64{}, toldAccuracy: map[*lane.Lane]map[uint32]toldAccuracy{}, up: map[*lane.Lane]uint64{}, fresh: map[*lane.Lane]*lane.Freshness{}, ahead: map[*lane.Lane]time.Duration{},
		asks: make(chan struct{}, tokenizeAtOnce), pulls: map[*lane.Lane]chan *waypostv1.PrefixPull{}, began: time.Now(),
	}
}

// LaneUp implements lane.AgentHandler. The stream goes on from where it is;
// what came before, the coordinator asks for.
func (h *lanes) LaneUp(l *lane.Lane) {
	told := map[uint32]position{}
	for _, r := range h.a.ranks() {
		epoch, seq := r.seq()
		told[r.index] = position{epoch, seq}
	}
	h.mu.Lock()
	h.told[l], h.toldNews[l], h.toldAccuracy[l] = told, map[uint32]uint64{}, map[uint32]toldAccuracy{}
	_, process := l.Coordinator()
	h.up[l] = process
	for _, r := range h.a.ranks() {
		r.laneUp(l, process)
	}
	h.startAnswers(l)
	h.mu.Unlock()
	h.a.log.Info("lane up", "coordinator", name(l), "address", l.Address())
	h.a.sendHostReport(l)
}

// LaneDown implements lane.AgentHandler.
func (h *lanes) LaneDown(l *lane.Lane, cause error) {
	h.mu.Lock()
	delete(h.told, l)
	delete(h.toldNews, l)
	delete(h.toldAccuracy, l)
	delete(h.fresh, l)
	delete(h.up, l)
	delete(h.ahead, l)
	for _, r := range h.a.ranks() {
		r.laneDown(l)
	}
	delete(h.pulls, l)
	h.mu.Unlock()
	h.a.log.Warn("lane down", "coordinator", name(l), "address", l.Address(), "error", cause)
}

func name(l *lane.Lane) string {
	n, _ := l.Coordinator()
	return n
}

// Frame implements lane.AgentHandler.
func (h *lanes) Frame(l *lane.Lane, f *waypostv1.ConnectResponse) {
	late := h.late(l, f)
	switch fr := f.GetFrame().(type) {
	case *waypostv1.ConnectResponse_Pull:
		h.queuePull(l, fr.Pull)
	case *waypostv1.ConnectResponse_Evidence:
		h.answerEvidence(l, fr.Evidence, late)
	case *waypostv1.ConnectResponse_Claims:
		h.takeClaims(l, fr.Claims)
	case *waypostv1.ConnectResponse_Marks:
		h.takeMarks(l, fr.Marks)
	case *waypostv1.ConnectResponse_Outcomes:
		h.takeOutcomes(l, fr.Outcomes)
	case *waypostv1.ConnectResponse_Transfers:
		h.takeTransfers(l, fr.Transfers)
	case *waypostv1.ConnectResponse_Policy:
		h.takeClock(l, fr.Policy)
		h.takePolicy(fr.Policy)
	case *waypostv1.ConnectResponse_AckGpu:
		h.a.takeAck(l, fr.AckGpu)
	case *waypostv1.ConnectResponse_LinkProbe:
		h.a.takeLinkProbe(l, fr.LinkProbe)
	case *waypostv1.ConnectResponse_Boundary:
		if w := h.a.watchedOf(fr.Boundary.GetIndex()); w != nil {
			w.prober.again(boundary.Part(fr.Boundary.GetPart()), int(fr.Boundary.GetProbe()))
		}
	case *waypostv1.ConnectResponse_Tokenize:
		t := fr.Tokenize
		h.ask(l, t.GetAskId(), t.GetIndex(), len(t.GetPrompt()), func(ctx context.Context, w *watched) ([]uint32, error) {
			tokenizer, err := w.tokenizer()
			if err != nil {
				return nil, err
			}
			return tokenizer.Tokenize(ctx, t.GetPrompt(), t.GetAddSpecialTokens())
		})
	case *waypostv1.ConnectResponse_Render:
		r := fr.Render
		h.ask(l, r.GetAskId(), r.GetIndex(), len(r.GetChatJson()), func(ctx context.Context, w *watched) ([]uint32, error) {
			tokenizer, err := w.tokenizer()
			if err != nil {
				return nil, err
			}
			return tokenizer.Render(ctx, []byte(r.GetChatJson()))
		})
	}
}

// enlist makes a new rank known and tells it of the lanes that are up.
func (h *lanes) enlist(make func() *rank) *rank {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := make()
	r.setNoProgressAfter(noProgressAfter(h.policy))
	for l, process := range h.up {
		r.laneUp(l, process)
	}
	return r
}

// takePolicy keeps the newest policy and dials the coordinators it names.
func (h *lanes) takePolicy(p *waypostv1.PolicyPush) {
	h.mu.Lock()
	h.a.wish.recorded(p.GetRecordedDrainWish())
	newer := h.policy == nil || p.GetPolicyVersion() >= h.policy.GetPolicyVersion()
	if newer {
		h.policy = p
		for _, r := range h.a.ranks() {
			r.setNoProgressAfter(noProgressAfter(p))
		}
	}
	h.mu.Unlock()
	if !newer {
		return
	}
	if err := h.a.truth.setPolicy(p.GetGpu()); err != nil {
		h.a.log.Warn("the fleet's policy on GPUs cannot be read by this version; the former one stays", "event", "policy_stale", "error", err)
	}
	if err := h.a.dialer.SetAddresses(lane.FromCatalogue, p.GetCoordinators()); err != nil {
		h.a.log.Warn("coordinator catalogue refused", "error", err)
	}
}

// takeClock notes how far this host's clock is from a coordinator's. It decides
// nothing.
func (h *lanes) takeClock(l *lane.Lane, p *waypostv1.PolicyPush) {
	at := p.GetWallUnixMs()
	if !(at > 0 && at < 1e15) {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, up := h.up[l]; up {
		h.ahead[l] = time.Since(time.UnixMilli(int64(at))).Round(time.Millisecond)
	}
}

// clocks is how far this host's clock is ahead of each coordinator's.
func (h *lanes) clocks() map[string]time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := map[string]time.Duration{}
	for l, ahead := range h.ahead {
		out[name(l)] = ahead
	}
	return out
}

// noProgressAfter is the bound that a policy names; 0: none that can be used.
func noProgressAfter(p *waypostv1.PolicyPush) time.Duration {
	const mostMs = 86_400_000
	if ms := p.GetNoProgressMs(); ms > 0 && ms <= mostMs {
		return time.Duration(ms * float64(time.Millisecond))
	}
	return 0
}

// tellNews has coordinators hear at once of workers with news. The others wait
// for the next period: a host where requests begin all the time does not tell of
// each of its workers with every one.
func (h *lanes) tellNews(ranks ...*rank) {
	for _, r := range ranks {
		r.news.Add(1)
	}
	h.a.dialer.KickNews()
}

// withNews are the workers that a LOAD for a lane is about: all, or those with
// news that it has not heard. They count as heard, as what is built from here on
// has the news in it.
func (h *lanes) withNews(l *lane.Lane, all bool) []*rank {
	ranks := h.a.ranks()
	h.mu.Lock()
	defer h.mu.Unlock()
	heard := h.toldNews[l]
	return slices.DeleteFunc(ranks, func(r *rank) bool {
		news := r.news.Load()
		if !all && news == heard[r.index] {
			return true
		}
		if heard != nil { // else the lane is down
			heard[r.index] = news
		}
		return false
	})
}

// load builds a LOAD for one lane at the moment of writing.
func (h *lanes) load(l *lane.Lane) *waypostv1.Load { return h.loadOf(l, h.withNews(l, true)) }

// loadNews is a LOAD of the workers with news; nil: there are none.
func (h *lanes) loadNews(l *lane.Lane) *waypostv1.Load {
	ranks := h.withNews(l, false)
	if len(ranks) == 0 {
		return nil
	}
	return h.loadOf(l, ranks)
}

func (h *lanes) loadOf(l *lane.Lane, ranks []*rank) *waypostv1.Load {
	now := time.Now()
	h.mu.Lock()
	h.seq++
	seq := h.seq
	policy := h.policy
	told := h.told[l]
	h.mu.Unlock()
	out := &waypostv1.Load{AgentProcess: &h.a.process, LoadSeq: &seq, DrainWish: h.a.wish.proto()}
	if policy != nil {
		out.PolicyVersion = policy.PolicyVersion
		for _, c := range policy.GetCordons() {
			out.Cordons = append(out.Cordons, c.GetSelector())
		}
	}
	verdict := h.a.gpuVerdicts()
	out.Shares = h.a.sharesLoad(verdict)
	for _, r := range ranks {
		rep := r.tellLoad(l, now)
		cached := uint32(rep.cachedBlocks)
		rep.load.Coverage = string(rep.coverage)
		if rep.coverage != engine.CoverageNone || rep.cachedBlocks > 0 {
			rep.load.CachedBlocks = &cached
		}
		rep.load.GPUVerdict = verdict(r.engine)
		w := lane.WorkerLoadOf(r.index, &rep.load)
		for i := range rep.idleSlots {
			s := &rep.idleSlots[i]
			w.IdleSlots = append(w.IdleSlots, &waypostv1.IdleSlot{Slot: &s.Slot, Depth: &s.DepthTokens, Key: proto.Uint64(uint64(s.Key))})
		}
		w.PrefixFrame, w.PrefixAgeMs = h.nextFrame(r, told, now)
		w.Accuracy = h.nextAccuracy(l, r, now)
		h.addTransfers(l, r, w, now)
		out.Workers = append(out.Workers, w)
	}
	return out
}

// ask runs a question to an engine's tokenizer beside the lane and sends the
// answer. The text stays in memory.
func (h *lanes) ask(l *lane.Lane, id, index uint32, bytes int, fn func(context.Context, *watched) ([]uint32, error)) {
	reply := &waypostv1.TokenizeReply{AskId: &id}
	w := h.a.watchedOf(index)
	if w == nil {
		reply.Error = proto.String("no such worker")
		h.reply(l, reply)
		return
	}
	if why := h.mayAsk(time.Now(), bytes); why != "" {
		reply.Error = &why
		h.reply(l, reply)
		return
	}
	h.a.tasks.Go(func() {
		defer func() { <-h.asks }()
		ctx, cancel := context.WithTimeout(h.a.ctx, tokenizeTimeout)
		defer cancel()
		ids, err := fn(ctx, w)
		if err != nil {
			reply.Error = proto.String(err.Error())
		} else {
			reply.TokenIds = ids
		}
		h.reply(l, reply)
	})
}

// mayAsk takes one of the places of questions to tokenizers and its share of the
// budget; why says why not. A question that is not asked costs nothing.
func (h *lanes) mayAsk(now time.Time, bytes int) (why string) {
	select {
	case h.asks <- struct{}{}:
	default:
		return "busy: too many questions to the tokenizer at once"
	}
	if !h.tokenize.take(now, bytes) {
		<-h.asks
		return "over budget: too much text for the tokenizer at once"
	}
	return ""
}

func (h *lanes) reply(l *lane.Lane, r *waypostv1.TokenizeReply) {
	if err := l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_TokenizeReply{TokenizeReply: r}}); err != nil {
		h.a.log.Debug("tokenizer answer not sent", "error", err)
	}
}

// hello introduces the host with the facts of the moment.
func (h *lanes) hello() *waypostv1.AgentHello {
	a := h.a
	out := &waypostv1.AgentHello{
		Host: &a.name, AgentProcess: &a.process, Shares: a.sharesHello(), Version: &a.opt.Version, PrefixKeyIds: a.keyIDs(),
		PrefixFormat: proto.Uint32(summary.Version), ZoneHint: &a.cfg.Hint.Zone, RackHint: &a.cfg.Hint.Rack,
	}
	for _, w := range a.watching() {
		name, told := (*string)(nil), false
		vector := w.prober.vector()
		if vector != nil {
			name = optionalText(vector.Fingerprint())
		}
		for _, r := range w.all() {
			if id := r.identity(); id.known {
				facts := workerFacts(w, id)
				facts.HostTier = hostTierOf(w.config, &id.facts, a.truth.linkOf(w.target.Name), id.windowed)
				facts.Boundary, told = name, true
				if id.facts.Ranks <= 1 { // which rank uses which of an engine's GPUs nobody tells
					if seen := a.truth.gpusOf(w.target.Name); len(seen) > 0 {
						facts.GpuUuids = seen
					}
				}
				out.Workers = append(out.Workers, facts)
			}
		}
		if told && vector != nil {
			out.Boundaries = append(out.Boundaries, lane.BoundaryOf(w.target.Name, vector))
		}
	}
	return out
}

func workerFacts(w *watched, id rankFacts) *waypostv1.WorkerFacts {
	f := id.facts
	prior := ledger.PriorFor(ledger.Class{Engine: w.target.Kind, Model: f.Model})
	out := &waypostv1.WorkerFacts{
		Index: &id.index, Engine: &id.engine, Rank: proto.Uint32(uint32(id.number)), Ranks: proto.Uint32(uint32(max(1, f.Ranks))),
		Kind: &w.target.Kind, EngineVersion: &f.Version, EngineProcess: &id.process, Model: &f.Model, Aliases: f.Aliases, Url: &w.advertise,
		Coverage: proto.String(string(id.coverage)), CoverageHint: &id.hint, StepModel: lane.StepModelOf(&id.model),
		BlockTokens: known(f.BlockTokens), PoolBlocks: known(f.PoolBlocks), MaxModelTokens: known(f.MaxModelTokens),
		MaxRunning: known(f.MaxRunning), StepTokens: known(f.StepTokens), GpuUuids: w.gpuUUIDs(),
	}
	transfer, role := transferOf(w.config, &f, w.hostAddress, id.number)
	out.Transfer, out.Role = transfer, optionalText(role)
	if f.StepTokens == 0 {
		out.StepTokens = known(prior.StepTokens)
	}
	if f.LeastReuseRatio > 0 {
		out.LeastReuseRatio = &f.LeastReuseRatio
	}
	if f.RankHeader != "" {
		out.Headers = map[string]string{f.RankHeader: strconv.Itoa(id.number)}
	}
	out.Capabilities = w.prober.able(f.Capabilities).With(engine.PublishesEvents, id.coverage != engine.CoverageNone).Names()
	return out
}

// optionalText is nil for an empty text.
func optionalText(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// known is nil for a count that is not known.
func known(n int) *uint32 {
	if n <= 0 {
		return nil
	}
	return proto.Uint32(uint32(n))
}
