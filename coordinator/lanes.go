package coordinator

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/fleet"
	"waypost/coordinator/registry"
	"waypost/gossip/boundary"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// lanes takes in what agents say.
type lanes struct {
	c *Coordinator

	mu    sync.Mutex
	hosts map[string]*hostLane

	outcomes *outcomes
}

// hostLane is what a coordinator keeps per host beside the fleet and the views:
// its lane and its last host report, which outlives a lane.
type hostLane struct {
	// heardNs is when a frame came last, in ns since the coordinator began; 0:
	// never.
	heardNs atomic.Int64

	mu      sync.Mutex
	session *lane.Session
	open    bool
	lane    fleet.Lane
	report  *waypostv1.HostReport
	// reportAt is when the report came, ahead how far the host's clock was ahead
	// of this one then.
	reportAt time.Time
	ahead    time.Duration
}

func newLanes(c *Coordinator) *lanes {
	return &lanes{c: c, hosts: map[string]*hostLane{}, outcomes: newOutcomes()}
}

func (h *lanes) host(name string) *hostLane {
	h.mu.Lock()
	defer h.mu.Unlock()
	hl := h.hosts[name]
	if hl == nil {
		hl = &hostLane{}
		h.hosts[name] = hl
	}
	return hl
}

// LaneUp implements lane.CoordinatorHandler.
func (h *lanes) LaneUp(s *lane.Session) error {
	if err := h.agree(s.Hello()); err != nil {
		h.c.log.Warn("lane refused", "host", s.Host(), "error", err)
		return err
	}
	hello := helloOf(s, h.boundariesOf(s))
	l, changes, err := h.c.fleet.OpenLane(time.Now(), hello)
	if err != nil {
		h.c.log.Warn("lane refused", "host", s.Host(), "error", err)
		return err
	}
	hl := h.host(s.Host())
	hl.mu.Lock()
	hl.session, hl.lane, hl.open = s, l, true
	h.c.views.LaneUp(s, l) // in one with the above: two may come up at once
	hl.mu.Unlock()
	h.c.note(changes)
	h.c.boundaries.changed()
	h.c.views.Sync(s, true)
	h.sendPolicy(s, h.c.replica.State())
	h.c.log.Info("lane up", "event", "host_joined", "host", s.Host(), "workers", len(hello.Workers))
	return nil
}

// LaneDown implements lane.CoordinatorHandler.
func (h *lanes) LaneDown(s *lane.Session, cause error) {
	hl := h.host(s.Host())
	hl.mu.Lock()
	l, open := hl.lane, hl.open && hl.session == s
	if open {
		hl.open, hl.session = false, nil
		h.c.views.LaneDown(s)
	}
	hl.mu.Unlock()
	if open {
		h.c.note(h.c.fleet.CloseLane(time.Now(), s.Host(), l))
	}
	h.c.log.Warn("lane down", "event", "host_lost", "host", s.Host(), "error", cause)
}

// Frame implements lane.CoordinatorHandler.
func (h *lanes) Frame(s *lane.Session, f *waypostv1.ConnectRequest, late time.Duration) {
	hl := h.host(s.Host())
	hl.heardNs.Store(int64(time.Since(h.c.began)))
	switch fr := f.GetFrame().(type) {
	case *waypostv1.ConnectRequest_Hello:
		h.takeHello(hl, s)
	case *waypostv1.ConnectRequest_Load:
		h.takeLoad(hl, s, fr.Load, f.GetSentMonoNs(), late)
	case *waypostv1.ConnectRequest_Prefixes:
		h.c.views.TakePulled(s, fr.Prefixes)
	case *waypostv1.ConnectRequest_Host:
		h.takeHost(hl, s.Host(), fr.Host)
	case *waypostv1.ConnectRequest_AckGpu:
		h.c.acks.answered(s.Host(), fr.AckGpu.GetAskId(), fr.AckGpu)
	case *waypostv1.ConnectRequest_LinkProbe:
		h.c.linkProbes.answered(s.Host(), fr.LinkProbe.GetAskId(), fr.LinkProbe)
	case *waypostv1.ConnectRequest_Evidence:
		h.c.cases.asks.answered(s.Host(), fr.Evidence.GetAskId(), fr.Evidence)
	case *waypostv1.ConnectRequest_TokenizeReply:
		h.c.memos.ask.asks.answered(s.Host(), fr.TokenizeReply.GetAskId(), fr.TokenizeReply)
	case *waypostv1.ConnectRequest_StoredPrompt:
		h.c.memos.stored(s.Host(), fr.StoredPrompt)
	}
}

func (h *lanes) takeHello(hl *hostLane, s *lane.Session) {
	hl.mu.Lock()
	l := hl.lane
	hl.mu.Unlock()
	changes, err := h.c.fleet.UpdateHello(time.Now(), l, helloOf(s, h.boundariesOf(s)))
	if err != nil {
		h.c.log.Warn("hello refused", "host", s.Host(), "error", err)
		return
	}
	h.c.note(changes)
	h.c.boundaries.changed()
	h.c.views.Sync(s, false)
}

func (h *lanes) takeLoad(hl *hostLane, s *lane.Session, load *waypostv1.Load, sentMonoNs uint64, late time.Duration) {
	hl.mu.Lock()
	l := hl.lane
	hl.mu.Unlock()
	r := fleet.Report{
		AgentProcess: load.GetAgentProcess(), LoadSeq: load.GetLoadSeq(), SentMonoNs: sentMonoNs, PolicyVersion: uint64(load.GetPolicyVersion()), Cordons: load.GetCordons(),
		Wish: fleet.DrainWish{ID: load.GetDrainWish().GetId(), Reason: load.GetDrainWish().GetReason()},
	}
	for _, s := range load.GetShares() {
		r.Shares = append(r.Shares, fleet.ShareVerdict{Process: s.GetProcess(), Verdict: s.GetGpuVerdict()})
	}
	for _, w := range load.GetWorkers() {
		l := lane.LoadOf(w)
		l.AgeMs, l.CountersAgeMs = younger(l.AgeMs, late), younger(l.CountersAgeMs, late)
		r.Workers = append(r.Workers, fleet.WorkerLoad{Index: w.GetIndex(), Load: l})
	}
	changes, err := h.c.fleet.Load(time.Now(), s.Host(), l, r)
	if err != nil {
		h.c.metrics.badFrames.WithLabelValues("load").Inc()
		h.c.log.Debug("load report refused", "host", s.Host(), "error", err)
		return
	}
	h.c.note(changes)
	for _, w := range load.GetWorkers() {
		if id, ok := h.c.views.TakeCoverage(s, w); ok {
			h.c.slots.report(id, w.GetIdleSlots())
		}
		if w.GetAccuracy() != nil || len(w.GetTransfers()) > 0 {
			h.takeLearnt(hl, s, w)
		}
		h.c.views.TakeLoad(s, w)
	}
}

// forget gives up what belongs to hosts that the fleet does not know any more.
func (h *lanes) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name := range h.hosts {
		// A host that comes is known to the fleet before it asks for its entry.
		if !h.c.fleet.HasHost(name) {
			delete(h.hosts, name)
		}
	}
}

// where is the lane and index of a worker.
func (h *lanes) where(worker string) (host string, index uint32, ok bool) {
	w, err := h.c.fleet.Worker(time.Now(), worker)
	if err != nil {
		return "", 0, false
	}
	return w.Host, w.Facts.Index, true
}

// send puts a frame on a host's lane; false: it is down or stuck.
func (h *lanes) send(host string, f *waypostv1.ConnectResponse) bool {
	s := h.session(host)
	return s != nil && s.Send(f) == nil
}

func (h *lanes) session(host string) *lane.Session {
	h.mu.Lock()
	hl := h.hosts[host]
	h.mu.Unlock()
	if hl == nil {
		return nil
	}
	hl.mu.Lock()
	defer hl.mu.Unlock()
	return hl.session
}

// sendPolicy tells a host what it must obey.
func (h *lanes) sendPolicy(s *lane.Session, state *registry.State) {
	p := &waypostv1.PolicyPush{
		PolicyVersion: proto.Uint32(uint32(state.Revision())), NoProgressMs: finite(ms(h.c.fleetFile.Load().Policy.NoProgressFor.Value)),
		Gpu:        gpuPolicyProto(h.c.fleetFile.Load()),
		WallUnixMs: proto.Float64(float64(time.Now().UnixMilli())),
	}
	if id := h.c.drains.recorded(s.Host()); id != "" {
		p.RecordedDrainWish = &id
	}
	for _, c := range state.Cordons() {
		if mayName(c.Selector, s.Host()) {
			p.Cordons = append(p.Cordons, cordonProto(c))
		}
	}
	for _, m := range state.Coordinators() {
		p.Coordinators = append(p.Coordinators, m.ClusterAddress)
	}
	if err := s.Send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Policy{Policy: p}}); errors.Is(err, lane.ErrQueueFull) {
		h.c.log.Warn("policy not pushed: the lane is stuck", "host", s.Host())
	}
}

// pushPolicy tells every host of a new state.
func (c *Coordinator) pushPolicy(state *registry.State) {
	for _, s := range c.laneServer.Sessions() {
		c.lanes.sendPolicy(s, state)
	}
}

// helloOf turns a hello into the fleet's words.
func helloOf(s *lane.Session, vectors map[string]*boundary.Vector) fleet.Hello {
	m := s.Hello()
	out := fleet.Hello{
		Host: s.Host(), AgentProcess: m.GetAgentProcess(), Session: m.GetSession(), Version: m.GetVersion(),
		ZoneHint: m.GetZoneHint(), RackHint: m.GetRackHint(), EchoesClaims: true,
	}
	out.Shares, out.LooksForShares = sharesOf(m)
	for _, w := range m.GetWorkers() {
		f := fleet.Facts{
			Index: w.GetIndex(), Engine: w.GetEngine(), Rank: int(w.GetRank()), Ranks: int(w.GetRanks()), Kind: w.GetKind(), EngineVersion: w.GetEngineVersion(),
			EngineProcess: w.GetEngineProcess(), Model: w.GetModel(), Aliases: w.GetAliases(), URL: w.GetUrl(), Headers: w.GetHeaders(),
			BlockTokens: int(w.GetBlockTokens()), PoolBlocks: int(w.GetPoolBlocks()), MaxModelTokens: int(w.GetMaxModelTokens()),
			MaxRunning: int(w.GetMaxRunning()), StepTokens: int(w.GetStepTokens()), WindowTokens: int(w.GetWindowTokens()),
			Coverage: w.GetCoverage(), CoverageHint: w.GetCoverageHint(), Capabilities: w.GetCapabilities(), GPUUUIDs: w.GetGpuUuids(), Boundary: w.GetBoundary(), Vector: vectors[w.GetEngine()], Transfer: transferOf(w), HostTier: hostTierOf(w), Role: w.GetRole(),
			LeastReuseRatio: w.GetLeastReuseRatio(),
		}
		if w.GetStepModel() != nil {
			m := lane.ModelOf(w.GetStepModel())
			f.StepModel = &m
		}
		out.Workers = append(out.Workers, f)
	}
	return out
}
