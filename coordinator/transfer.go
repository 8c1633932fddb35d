package coordinator

import (
	"math"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/structpb"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/prefixindex"
	"waypost/coordinator/registry"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of what is remembered of pulls.
const (
	maxKeptPaths    = 65_536
	maxAwaitedPulls = 16_384
)

// transfers is what this coordinator knows of pulls of saved KV: the ways of
// the fleet file, the transfers it asked for and what became of them.
type transfers struct {
	mu      sync.Mutex
	started time.Time
	book    placement.Pulls
	file    *registry.Fleet
	paths   map[hostPair]keptPath
	fastest float64
	awaited map[string]awaitedPull // by placement
	order   []string               // of awaited, oldest first
}

type hostPair struct{ from, to string }

// keptPath is a path with what its ends have in common.
type keptPath struct {
	placement.Path
	sameZone, sameRack bool
}

// awaitedPull is a pull of which no outcome came yet.
type awaitedPull struct {
	pair placement.Pair
	// least is the reuse from which on the pull must have worked.
	least int
}

func newTransfers(now time.Time) *transfers {
	return &transfers{started: now, paths: map[hostPair]keptPath{}, awaited: map[string]awaitedPull{}}
}

func (t *transfers) ms(now time.Time) float64 { return ms(now.Sub(t.started)) }

// use takes another fleet file.
func (t *transfers) use(file *registry.Fleet) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if file == t.file {
		return
	}
	t.file = file
	clear(t.paths)
	t.fastest = bytesPerMs(file.PathBetween(registry.Place{Zone: "z"}, registry.Place{Zone: "z"}))
	for i := range file.Links {
		t.fastest = max(t.fastest, float64(file.Links[i].BandwidthBytesPerSec.Value)/1000)
	}
}

func bytesPerMs(p registry.Path) float64 { return float64(p.BandwidthBytesPerSec.Value) / 1000 }

// path is the way between two workers now, for a pool that stays in a part of
// the fleet.
func (t *transfers) path(nowMs float64, from, to *placement.Worker, stay registry.StayIn) placement.Path {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := hostPair{hostOf(from.Name), hostOf(to.Name)}
	kept, ok := t.paths[key]
	if !ok && t.file != nil {
		if len(t.paths) >= maxKeptPaths {
			clear(t.paths)
		}
		a, b := t.file.HostPlace(key.from), t.file.HostPlace(key.to)
		kept = keptPath{pathOf(t.file.PathBetween(a, b)), a.Zone != "" && a.Zone == b.Zone, a.Rack != "" && a.Rack == b.Rack}
		t.paths[key] = kept
	}
	path := kept.Path
	path.Never = path.Never || stay != registry.StayInNone && !kept.sameZone || stay == registry.StayInRack && !kept.sameRack
	path.UnderWay = t.book.UnderWay(nowMs, path.Link)
	path.Off = t.book.Off(nowMs, placement.Pair{From: from.Name, To: to.Name})
	return path
}

// pathOf puts a path of the fleet file into the rule's words.
func pathOf(p registry.Path) placement.Path {
	out := placement.Path{
		Link: p.Name, BytesPerMs: bytesPerMs(p), LatencyMs: ms(p.Latency.Value), SurchargeMs: ms(p.PlaceSurcharge.Value),
		Never: p.Transfer.Value == registry.TransferNever,
	}
	if p.BandwidthBytesPerSec.Source == registry.Declared {
		out.Figure = placement.FigureDeclared
	}
	return out
}

func hostOf(worker string) string {
	host, _, _ := strings.Cut(worker, "/")
	return host
}

func (t *transfers) sending(nowMs float64, w *placement.Worker) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.book.Sending(nowMs, w.Name)
}

// begin notes a pull that an answer asks for.
func (t *transfers) begin(now time.Time, id string, d *placement.Decision, candidates []placement.Candidate, sit placement.Situation) {
	terms, to := &d.Terms[d.Chosen], &candidates[d.Chosen]
	if terms.Pull.Note != placement.PullTaken {
		return
	}
	from := sit.Sources[terms.Pull.Source].Worker
	pair := placement.Pair{From: from.Name, To: to.Name}
	t.mu.Lock()
	defer t.mu.Unlock()
	nowMs := t.ms(now)
	t.book.Begin(nowMs, nowMs+terms.StartMs+terms.Pull.TransferMs, pair, to.Paths[terms.Pull.Source].Link)
	if len(t.order) >= maxAwaitedPulls {
		delete(t.awaited, t.order[0])
		t.order = t.order[1:]
	}
	t.order = append(t.order, id)
	t.awaited[id] = awaitedPull{pair, max(terms.ReuseTokens, 0) + (terms.Pull.Tokens+1)/2}
}

// outcome takes what a placement really reused, and whether it was served; it
// returns the pair if that switched it on or off.
func (t *transfers) outcome(now time.Time, id string, done bool, cachedTokens int) (pair placement.Pair, switched, off bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	a, ok := t.awaited[id]
	if !ok || !done || cachedTokens < 0 {
		return pair, false, false
	}
	delete(t.awaited, id)
	nowMs := t.ms(now)
	switched = t.book.Outcome(nowMs, a.pair, cachedTokens >= a.least)
	return a.pair, switched, t.book.Off(nowMs, a.pair)
}

// pullPlan puts the pull of a decision into the API's words; nil: nothing is
// pulled.
func (c *Coordinator) pullPlan(d *placement.Decision, sit placement.Situation) *waypostv1.PullPlan {
	pull := &d.Terms[d.Chosen].Pull
	if pull.Note != placement.PullTaken {
		return nil
	}
	return &waypostv1.PullPlan{
		Source: c.reach(sit.Sources[pull.Source].ID), Tokens: counted(pull.Tokens), TransferMs: finite(pull.TransferMs),
	}
}

// pullPatch is what the caller adds to the body so that the engine pulls: the
// parameters of vLLM's offloading connector, the one general way to read
// another engine's blocks. nil: the connector needs none that is known.
func pullPatch(id string, from *placement.Worker) *structpb.Struct {
	host, port, err := net.SplitHostPort(from.Transfer.SideChannel)
	number, bad := strconv.ParseUint(port, 10, 16)
	if err != nil || bad != nil || from.Transfer.Connector != offloadingConnector {
		return nil
	}
	source := structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
		"kv_request_id": structpb.NewStringValue(id), "remote_host": structpb.NewStringValue(host), "remote_port": structpb.NewNumberValue(float64(number)),
	}})
	return &structpb.Struct{Fields: map[string]*structpb.Value{
		"kv_transfer_params": structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{"remote_kv_source": source}}),
	}}
}

const offloadingConnector = "OffloadingConnector"

// transferOf reads what an agent says of an engine's connector.
func transferOf(w *waypostv1.WorkerFacts) *placement.Transfer {
	t := w.GetTransfer()
	if t == nil {
		return nil
	}
	return &placement.Transfer{
		Connector: t.GetConnector(), SideChannel: t.GetSideChannel(), Fingerprint: t.GetFingerprint(),
		ExportedTier: t.GetExportedTier(), BytesPerToken: t.GetKvBytesPerToken(),
	}
}

// ask puts a request, what its prompt matches and the ways of the fleet
// together.
func (c *Coordinator) ask(w *work, now time.Time, request *placement.Request, callerZone string, whole bool) {
	t := c.transfers
	nowMs := t.ms(now)
	w.ask.Pool, w.ask.CallerZone = request.Pool, callerZone
	w.ask.Request, w.ask.Policy, w.ask.Whole = request, c.policy.Load(), whole
	w.ask.PolicyVersion, w.ask.PolicyAgeMs = c.replica.State().FleetFile().Version, c.policyAgeMs()
	stay := registry.StayInNone
	w.ask.Path = func(from, to *placement.Worker) placement.Path { return t.path(nowMs, from, to, stay) }
	w.ask.Sending = func(from *placement.Worker) int { return t.sending(nowMs, from) }
	file := c.fleetFile.Load()
	t.use(file)
	w.ask.FastestBytesPerMs = t.fastestNow()
	c.judgeTenant(now, request, file)
	request.MaxTransferMs = 0
	if pool, ok := file.Pool(request.Pool); ok {
		stay = pool.StayIn.Value
		if ttft, ok := pool.TTFT.Get(); ok {
			// Nobody has headroom who waits longer than the pool's first token may.
			w.policy = *w.ask.Policy
			w.policy.HeadroomMs = ms(ttft)
			w.ask.Policy = &w.policy
		}
		if limit, ok := pool.MaxTransfer.Get(); ok {
			// A limit of nothing forbids every transfer; 0 is no limit.
			request.MaxTransferMs = max(ms(limit), math.SmallestNonzeroFloat64)
		}
	}
}

func (t *transfers) fastestNow() float64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.fastest
}

// match asks the index how much of the prompt each worker holds. It returns
// the deepest prefix that any of them holds.
func (p *placements) match(w *work) (deepest int) {
	w.ask.MatchUnknown = !w.prompt.keyed
	w.ask.Matches = w.ask.Matches[:0]
	if !w.prompt.keyed {
		return 0
	}
	p.c.index.Groups(&w.prompt.probe, func(g *prefixindex.Group) {
		if g.Unverified {
			return // its boundary is not its pool's
		}
		m := placement.Match{Tokens: int(g.Tokens), GPUTokens: int(g.GPUTokens), HostTokens: int(g.HostTokens), Predicted: g.Predicted}
		for id := range g.Workers.All {
			m.Worker = placement.WorkerID(id)
			w.ask.Matches = append(w.ask.Matches, m)
		}
	})
	w.ask.Matches = p.c.sketches.credit(p.c.fleet, &w.prompt.probe, w.ask.Matches)
	for _, m := range w.ask.Matches {
		deepest = max(deepest, m.Tokens)
	}
	return deepest
}

// patched adds what makes the engine pull to the way to reach it.
func patched(ref *waypostv1.WorkerRef, id string, d *placement.Decision, sit placement.Situation) {
	if pull := &d.Terms[d.Chosen].Pull; ref != nil && pull.Note == placement.PullTaken {
		ref.BodyPatch = pullPatch(id, sit.Sources[pull.Source].Worker)
	}
}

// decodes is the worker that decodes what the chosen one prefills: itself, or
// its partner of a pair.
func decodes(chosen *placement.Candidate, t *placement.Terms) *placement.Worker {
	if t.Partner >= 0 {
		return chosen.Partners[t.Partner].Worker
	}
	return chosen.Worker
}

// decodeClaim is the second claim of a pair; nil: there is one worker. The
// decode worker computes the last token of the prompt itself.
func decodeClaim(chosen *placement.Candidate, t *placement.Terms, r *placement.Request, outputTokens float64) *fleet.DecodeClaim {
	if t.Partner < 0 {
		return nil
	}
	w := chosen.Partners[t.Partner].Worker
	return &fleet.DecodeClaim{Worker: w.ID, Claim: ledger.Claim{
		EngineProcess: w.Process, PromptTokens: r.PromptTokens + r.GeneratedTokens, UncachedTokens: 1, OutputTokens: outputTokens, Sequences: 1,
	}}
}
