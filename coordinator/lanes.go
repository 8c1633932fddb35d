package coordinator

import (
	"errors"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/prefixindex"
	"waypost/coordinator/registry"
	"waypost/gossip/boundary"
	"waypost/gossip/lane"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// lanes takes in what agents say.
type lanes struct {
	c *Coordinator

	mu    sync.Mutex
	hosts map[string]*hostLane
	pulls uint32 // the number of the latest pull

	puller *puller
}

// hostLane is what a coordinator keeps per host beside the fleet: its prefix
// streams and its last host report. It outlives a lane, so that an agent that
// comes back continues where it was.
type hostLane struct {
	// heardNs is when a frame came last, in ns since the coordinator began; 0:
	// never.
	heardNs atomic.Int64

	mu      sync.Mutex
	session *lane.Session
	open    bool
	lane    fleet.Lane
	streams map[uint32]*stream
	report  *waypostv1.HostReport
	// reportAt is when the report came, ahead how far the host's clock was ahead
	// of this one then.
	reportAt time.Time
	ahead    time.Duration
}

// stream is the prefix stream of one worker.
type stream struct {
	// verification is under way; nil: none.
	verification *verification

	worker  fleet.WorkerID
	process uint64
	decoder *summary.Decoder
	// pull is the id of the pull that is not answered yet; 0: none. wanted says
	// that there is one, or will be.
	pull   uint32
	wanted bool
	// asked is when the latest pull was sent.
	asked time.Time
	// short is why the stream is not known to be whole, by what came since the
	// latest pull was sent; empty: it is.
	short string
	// distrusted says that all of the view is to be read anew, not what is
	// missing of it; distrustPull is the pull that asks for that.
	distrusted   bool
	distrustPull uint32
	// peerAsked says that the peers were asked for a copy.
	peerAsked bool
	// untoldMs is the age of the oldest change that the agent has not told, by
	// the latest report; nil: the agent does not say.
	untoldMs *float64
	// viewKind is what was seen of the cache last, viewAt when it was true.
	viewKind placement.ViewKind
	viewAt   time.Time
	// coverage is what the agent says the engine's events show; retainedTokens
	// how much of what was placed the index keeps where that is not all.
	coverage       string
	retainedTokens uint64
	// frames, resyncs and bytes are what `inspect` tells.
	frames, resyncs          map[string]uint32
	streamBytes, pulledBytes uint64
	resyncReason             string
}

func newLanes(c *Coordinator) (*lanes, error) {
	h := &lanes{c: c, hosts: map[string]*hostLane{}}
	var err error
	h.puller, err = newPuller(h)
	return h, err
}

func (h *lanes) host(name string) *hostLane {
	h.mu.Lock()
	defer h.mu.Unlock()
	hl := h.hosts[name]
	if hl == nil {
		hl = &hostLane{streams: map[uint32]*stream{}}
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
	hl.mu.Unlock()
	h.c.note(changes)
	h.c.boundaries.changed()
	h.sync(hl, s, true)
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
		h.puller.drop(s.Host())
		h.stale(hl)
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
		p := fr.Prefixes
		if p.GetPullId()&verifyPulls != 0 {
			h.takeVerified(hl, s, p)
			return
		}
		for _, frame := range p.GetFrames() {
			h.takePrefix(hl, s, p.GetIndex(), p.GetEngineProcess(), frame, fromAgent)
		}
		h.puller.progress(p.GetPullId())
		if p.GetLast() {
			h.answered(hl, s, p.GetIndex(), p.GetPullId())
		}
		h.follow(hl, s, p.GetIndex(), p.GetEngineProcess(), nil)
	case *waypostv1.ConnectRequest_Host:
		h.takeHost(hl, s.Host(), fr.Host)
	case *waypostv1.ConnectRequest_AckGpu:
		h.c.acks.answered(fr.AckGpu)
	case *waypostv1.ConnectRequest_Evidence:
		h.c.cases.answered(fr.Evidence)
	case *waypostv1.ConnectRequest_TokenizeReply:
		h.c.memos.ask.answered(fr.TokenizeReply)
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
	h.sync(hl, s, false)
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
		h.covered(hl, s, w)
		if w.GetAccuracy() != nil || len(w.GetTransfers()) > 0 {
			h.takeLearnt(hl, s, w)
		}
		if len(w.GetPrefixFrame()) > 0 {
			h.takePrefix(hl, s, w.GetIndex(), w.GetEngineProcess(), w.GetPrefixFrame(), fromDelta)
		} else {
			h.heard(hl, s, w.GetIndex())
		}
		h.follow(hl, s, w.GetIndex(), w.GetEngineProcess(), w.GetPrefixFrame())
	}
}

// streamOf returns the prefix stream that a lane means by an index. A worker
// with a new engine process starts a stream of its own; what the old one said
// is forgotten with it.
func (h *lanes) streamOf(hl *hostLane, s *lane.Session, index uint32) *stream {
	id, process, ok := h.c.fleet.LaneWorker(s.Host(), hl.lane, index)
	if !ok {
		return nil
	}
	st := hl.streams[index]
	if st == nil || st.worker != id || st.process != process {
		if st != nil {
			st.verification.fail(errRestarted)
		}
		st = &stream{worker: id, process: process, frames: map[string]uint32{}, resyncs: map[string]uint32{}}
		st.decoder = summary.NewDecoder(h.c.index.WorkerSink(prefixindex.WorkerID(id)))
		st.decoder.RequireKey(h.c.prefixKey)
		hl.streams[index] = st
	}
	return st
}

// forget gives up what belongs to hosts and engine lives that the fleet does not
// know any more: the mirror of a cache takes megabytes.
func (h *lanes) forget() {
	h.mu.Lock()
	hosts := maps.Clone(h.hosts)
	h.mu.Unlock()
	for name, hl := range hosts {
		hl.mu.Lock()
		for index, st := range hl.streams {
			if _, process, ok := h.c.fleet.ViewOf(st.worker); !ok || process != st.process {
				st.verification.fail(errRestarted)
				delete(hl.streams, index)
			}
		}
		hl.mu.Unlock()
		h.mu.Lock()
		// A host that comes is known to the fleet before it asks for its entry.
		if !h.c.fleet.HasHost(name) {
			delete(h.hosts, name)
		}
		h.mu.Unlock()
	}
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
			Coverage: w.GetCoverage(), CoverageHint: w.GetCoverageHint(), Capabilities: w.GetCapabilities(), GPUUUIDs: w.GetGpuUuids(), Boundary: w.GetBoundary(), Vector: vectors[w.GetEngine()], Transfer: transferOf(w), Role: w.GetRole(),
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
