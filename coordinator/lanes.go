package coordinator

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/prefixindex"
	"waypost/coordinator/registry"
	"waypost/gossip/lane"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// prefixFormats are the versions of the prefix frame format understood here.
var prefixFormats = []uint32{1}

// pullAgainAfter is how long an answer to a pull may take before it is asked
// for again, pullGap the least time between two pulls of one stream.
const (
	pullAgainAfter = 3 * time.Second
	pullGap        = 200 * time.Millisecond
)

// lanes takes in what agents say.
type lanes struct {
	c *Coordinator

	mu    sync.Mutex
	hosts map[string]*hostLane
	pulls uint32
}

// hostLane is what a coordinator keeps per host beside the fleet: its prefix
// streams and its last host report. It outlives a lane, so that an agent that
// comes back continues where it was.
type hostLane struct {
	mu      sync.Mutex
	session *lane.Session
	open    bool
	lane    fleet.Lane
	streams map[uint32]*stream
	report  *waypostv1.HostReport
}

// stream is the prefix stream of one worker.
type stream struct {
	worker  fleet.WorkerID
	process uint64
	decoder *summary.Decoder
	asked   time.Time
	// pull is the id of the pull that is not answered yet; 0: none.
	pull uint32
	// coverage is what the agent says the engine's events show.
	coverage string
	// frames, resyncs and bytes are what `inspect` tells.
	frames, resyncs          map[string]uint32
	streamBytes, pulledBytes uint64
	resyncReason             string
}

func newLanes(c *Coordinator) *lanes { return &lanes{c: c, hosts: map[string]*hostLane{}} }

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
	hello := helloOf(s)
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
	h.sync(hl, s)
	h.sendPolicy(s, h.c.replica.State())
	h.c.log.Info("lane up", "event", "host_joined", "host", s.Host(), "workers", len(hello.Workers))
	return nil
}

// agree checks what must agree before a word of the stream is believed.
func (h *lanes) agree(hello *waypostv1.AgentHello) error {
	ours := h.c.prefixKey.ID()
	found := false
	for _, id := range hello.GetPrefixKeyIds() {
		found = found || id == ours
	}
	if !found {
		return fmt.Errorf("prefix keys differ: host %s has %v, this coordinator %s has %s; give both the same [prefix] key_file", hello.GetHost(), hello.GetPrefixKeyIds(), h.c.name, ours)
	}
	for _, f := range prefixFormats {
		if f == hello.GetPrefixFormat() {
			return nil
		}
	}
	return fmt.Errorf("prefix frame formats differ: host %s sends %d, this coordinator %s understands %v; upgrade the older one", hello.GetHost(), hello.GetPrefixFormat(), h.c.name, prefixFormats)
}

// LaneDown implements lane.CoordinatorHandler.
func (h *lanes) LaneDown(s *lane.Session, cause error) {
	hl := h.host(s.Host())
	hl.mu.Lock()
	l, open := hl.lane, hl.open && hl.session == s
	if open {
		hl.open, hl.session = false, nil
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
	switch fr := f.GetFrame().(type) {
	case *waypostv1.ConnectRequest_Hello:
		h.takeHello(hl, s)
	case *waypostv1.ConnectRequest_Load:
		h.takeLoad(hl, s, fr.Load, f.GetSentMonoNs(), late)
	case *waypostv1.ConnectRequest_Prefixes:
		p := fr.Prefixes
		for _, frame := range p.GetFrames() {
			h.takePrefix(hl, s, p.GetIndex(), p.GetEngineProcess(), frame)
		}
		if p.GetLast() {
			h.answered(hl, s, p.GetIndex(), p.GetPullId())
		}
	case *waypostv1.ConnectRequest_Host:
		hl.mu.Lock()
		hl.report = fr.Host
		hl.mu.Unlock()
	case *waypostv1.ConnectRequest_Evidence:
		h.c.cases.answered(fr.Evidence)
	case *waypostv1.ConnectRequest_TokenizeReply:
		// Nobody asks yet: text requests come with the text memo.
	}
}

func (h *lanes) takeHello(hl *hostLane, s *lane.Session) {
	hl.mu.Lock()
	l := hl.lane
	hl.mu.Unlock()
	changes, err := h.c.fleet.UpdateHello(time.Now(), l, helloOf(s))
	if err != nil {
		h.c.log.Warn("hello refused", "host", s.Host(), "error", err)
		return
	}
	h.c.note(changes)
	h.sync(hl, s)
}

func (h *lanes) takeLoad(hl *hostLane, s *lane.Session, load *waypostv1.Load, sentMonoNs uint64, late time.Duration) {
	hl.mu.Lock()
	l := hl.lane
	hl.mu.Unlock()
	r := fleet.Report{
		AgentProcess: load.GetAgentProcess(), LoadSeq: load.GetLoadSeq(), SentMonoNs: sentMonoNs, PolicyVersion: uint64(load.GetPolicyVersion()), Cordons: load.GetCordons(),
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
		h.covered(hl, s, w.GetIndex(), w.GetCoverage())
		if len(w.GetPrefixFrame()) > 0 {
			h.takePrefix(hl, s, w.GetIndex(), w.GetEngineProcess(), w.GetPrefixFrame())
		} else {
			h.heard(hl, s, w.GetIndex())
		}
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
		st = &stream{worker: id, process: process, frames: map[string]uint32{}, resyncs: map[string]uint32{}}
		st.decoder = summary.NewDecoder(h.c.index.WorkerSink(prefixindex.WorkerID(id)))
		st.decoder.RequireKey(h.c.prefixKey)
		hl.streams[index] = st
	}
	return st
}

// takePrefix applies one frame of a worker's stream and asks for what is
// missing.
func (h *lanes) takePrefix(hl *hostLane, s *lane.Session, index uint32, process uint64, frame []byte) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	st := h.streamOf(hl, s, index)
	if st == nil {
		return
	}
	if st.process != process {
		h.c.metrics.badFrames.WithLabelValues("fenced").Inc()
		return
	}
	st.streamBytes += uint64(len(frame))
	if st.pull != 0 {
		st.pulledBytes += uint64(len(frame))
	}
	result, err := st.decoder.Apply(frame)
	if err != nil {
		h.c.metrics.badFrames.WithLabelValues("prefix").Inc()
		h.c.log.Warn("prefix frame refused", "host", s.Host(), "index", index, "error", err)
		h.pull(hl, s, index, st, "damage")
		return
	}
	st.frames[result.String()]++
	h.c.metrics.prefixFrames.WithLabelValues(result.String()).Inc()
	switch result {
	case summary.Applied:
		h.view(st)
	case summary.Gap:
		h.pull(hl, s, index, st, "gap")
	case summary.DigestMismatch:
		h.pull(hl, s, index, st, "digest")
		h.view(st)
	}
}

// answered notes that all of an answer came: what is wrong from now on may be
// asked for again.
func (h *lanes) answered(hl *hostLane, s *lane.Session, index, pull uint32) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	if st := h.streamOf(hl, s, index); st != nil && st.pull == pull {
		st.pull = 0
		if _, _, ok := st.decoder.Have(); ok {
			h.view(st)
		}
	}
}

// heard notes that a report came without a frame: nothing changed since the
// last one, or since the lane is up; what changed before that, only the answer
// to a pull tells.
func (h *lanes) heard(hl *hostLane, s *lane.Session, index uint32) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	st := h.streamOf(hl, s, index)
	if st == nil {
		return
	}
	if _, _, ok := st.decoder.Have(); !ok || st.pull != 0 {
		h.pull(hl, s, index, st, "missing")
		return
	}
	h.view(st)
}

// covered notes how much of its cache a worker's engine shows.
func (h *lanes) covered(hl *hostLane, s *lane.Session, index uint32, coverage string) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	if st := h.streamOf(hl, s, index); st != nil {
		st.coverage = coverage
	}
}

// view tells the fleet how good the worker's cache view is: that of a stream
// whose engine shows nothing is blind, however fresh it is.
func (h *lanes) view(st *stream) {
	kind := placement.ViewWarming
	_, _, have := st.decoder.Have()
	switch {
	case st.coverage == "none":
		kind = placement.ViewBlind
	case have && st.coverage == "partial":
		kind = placement.ViewPartial
	case have && st.coverage == "full":
		kind = placement.ViewLive
	}
	h.c.setView(st.worker, st.process, kind, st.decoder.Age())
}

// sync asks for the stream of every worker whose position is not known to
// continue. What was asked for on a former lane is not answered any more.
func (h *lanes) sync(hl *hostLane, s *lane.Session) {
	hl.mu.Lock()
	defer hl.mu.Unlock()
	for _, w := range s.Hello().GetWorkers() {
		if st := h.streamOf(hl, s, w.GetIndex()); st != nil {
			st.asked = time.Time{}
			h.pull(hl, s, w.GetIndex(), st, "new")
		}
	}
}

// pull asks for a replay from where the stream stands, or for a snapshot,
// unless an answer is still to come.
func (h *lanes) pull(hl *hostLane, s *lane.Session, index uint32, st *stream, reason string) {
	wait := pullGap
	if st.pull != 0 {
		wait = pullAgainAfter
	}
	if time.Since(st.asked) < wait {
		return
	}
	st.asked = time.Now()
	if reason == "gap" || reason == "digest" || reason == "damage" {
		h.c.cases.lost(st.worker, st.asked)
	}
	st.resyncs[reason]++
	st.resyncReason = reason
	h.c.metrics.pulls.WithLabelValues(reason).Inc()
	h.mu.Lock()
	h.pulls = max(1, h.pulls+1)
	id := h.pulls
	h.mu.Unlock()
	st.pull = id
	p := &waypostv1.PrefixPull{PullId: &id, Index: &index, EngineProcess: &st.process, Reason: &reason}
	if epoch, seq, ok := st.decoder.Have(); ok {
		p.Epoch, p.HaveSeq = &epoch, &seq
	}
	// The lane may be gone; the next one syncs again.
	_ = s.Send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Pull{Pull: p}})
}

// sendPolicy tells a host what it must obey.
func (h *lanes) sendPolicy(s *lane.Session, state *registry.State) {
	p := &waypostv1.PolicyPush{PolicyVersion: proto.Uint32(uint32(state.Revision()))}
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
func helloOf(s *lane.Session) fleet.Hello {
	m := s.Hello()
	out := fleet.Hello{
		Host: s.Host(), AgentProcess: m.GetAgentProcess(), Session: m.GetSession(), Version: m.GetVersion(),
		ZoneHint: m.GetZoneHint(), RackHint: m.GetRackHint(), EchoesClaims: true,
	}
	for _, w := range m.GetWorkers() {
		f := fleet.Facts{
			Index: w.GetIndex(), Engine: w.GetEngine(), Rank: int(w.GetRank()), Ranks: int(w.GetRanks()), Kind: w.GetKind(), EngineVersion: w.GetEngineVersion(),
			EngineProcess: w.GetEngineProcess(), Model: w.GetModel(), Aliases: w.GetAliases(), URL: w.GetUrl(), Headers: w.GetHeaders(),
			BlockTokens: int(w.GetBlockTokens()), PoolBlocks: int(w.GetPoolBlocks()), MaxModelTokens: int(w.GetMaxModelTokens()),
			MaxRunning: int(w.GetMaxRunning()), StepTokens: int(w.GetStepTokens()), WindowTokens: int(w.GetWindowTokens()),
			Coverage: w.GetCoverage(), CoverageHint: w.GetCoverageHint(), Capabilities: w.GetCapabilities(), GPUUUIDs: w.GetGpuUuids(), Boundary: w.GetBoundary(), Transfer: transferOf(w), Role: w.GetRole(),
		}
		if w.GetStepModel() != nil {
			m := lane.ModelOf(w.GetStepModel())
			f.StepModel = &m
		}
		out.Workers = append(out.Workers, f)
	}
	return out
}
