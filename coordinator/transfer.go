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
	rates   placement.LinkRates
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
	// link carries it, beside others; of its predicted time fixedMs do not
	// depend on the bandwidth, and otherMs stand beside it before the first
	// token.
	link                     string
	others                   int
	bytes                    float64
	wireMs, fixedMs, otherMs float64
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
		kept = wayOf(t.file, key.from, key.to)
		t.paths[key] = kept
	}
	path := kept.path(from, to, stay)
	path.UnderWay = t.book.UnderWay(nowMs, path.Link)
	pair := placement.Pair{From: from.Name, To: to.Name}
	path.Off = t.book.Off(nowMs, pair)
	return t.rates.Measured(nowMs, pair, path)
}

// wayOf is the path between two hosts of a fleet file.
func wayOf(file *registry.Fleet, from, to string) keptPath {
	a, b := file.HostPlace(from), file.HostPlace(to)
	return keptPath{pathOf(file.PathBetween(a, b)), a.Zone != "" && a.Zone == b.Zone, a.Rack != "" && a.Rack == b.Rack}
}

// path is the way between two workers of the hosts, for a pool that stays in a
// part of the fleet.
func (k *keptPath) path(from, to *placement.Worker, stay registry.StayIn) placement.Path {
	path := k.Path
	path.Never = path.Never || stay != registry.StayInNone && !k.sameZone || stay == registry.StayInRack && !k.sameRack
	// A prefill worker hands its prompt over; else the engine must be able to
	// read what it is told to.
	path.Never = path.Never || to.Role != placement.RoleDecode && !readsAtWill(from)
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

// begin notes the transfer that an answer asks for: a pull, or the hand-over of
// a pair.
func (t *transfers) begin(now time.Time, id string, d *placement.Decision, candidates []placement.Candidate, policy *placement.Policy, promptTokens int, sit placement.Situation) {
	terms, to := &d.Terms[d.Chosen], &candidates[d.Chosen]
	a := awaitedPull{otherMs: math.NaN()}
	var path *placement.Path
	var startMs, transferMs float64
	switch {
	case terms.Partner >= 0:
		q := &to.Partners[terms.Partner]
		a.pair, path = placement.Pair{From: to.Name, To: q.Name}, &q.Path
		a.least = (promptTokens + 1) / 2
		startMs, transferMs = terms.StartMs+terms.PrefillMs, terms.HandMs
	case terms.Pull.Note == placement.PullTaken:
		from := sit.Sources[terms.Pull.Source].Worker
		a.pair, path = placement.Pair{From: from.Name, To: to.Name}, &to.Paths[terms.Pull.Source]
		a.least = max(terms.ReuseTokens, 0) + (terms.Pull.Tokens+1)/2
		startMs, transferMs = terms.StartMs, terms.Pull.TransferMs
		a.bytes = float64(terms.Pull.Tokens) * from.Transfer.BytesPerToken
		a.wireMs = a.bytes / terms.Pull.BytesPerMs
		a.fixedMs = policy.TransferSetupMs + max(path.LatencyMs, 0)
		a.others = max(path.UnderWay, sit.Sources[terms.Pull.Source].Sending)
		a.otherMs = d.FirstTokenMs - transferMs
	default:
		return
	}
	a.link = path.Link
	t.mu.Lock()
	defer t.mu.Unlock()
	nowMs := t.ms(now)
	t.book.Begin(nowMs, nowMs+startMs+transferMs, a.pair, a.link)
	if len(t.order) >= maxAwaitedPulls {
		delete(t.awaited, t.order[0])
		t.order = t.order[1:]
	}
	t.order = append(t.order, id)
	t.awaited[id] = a
}

// seen is the time a confirmed pull took on the way, by its first token less
// what else was predicted to stand before it; false: that tells nothing, since
// the rest outweighs it.
func (a *awaitedPull) seen(firstTokenMs float64) (wireMs float64, ok bool) {
	wireMs = firstTokenMs - max(a.otherMs, 0) - a.fixedMs
	if !(max(wireMs, a.wireMs) >= a.otherMs) {
		return 0, false
	}
	// A prediction that was too long cannot make a link infinitely fast.
	return max(wireMs, a.wireMs/10), true
}

// seenTransfer is what became of a transfer that was asked for. Bytes are 0 if
// its time tells nothing of the link.
type seenTransfer struct {
	pair          placement.Pair
	confirmed     bool
	bytes, wireMs float64
	others        int
}

// outcome takes what a placement really reused, and whether it was served. It
// returns what that tells of a transfer; nil: nothing. firstTokenMs is NaN if the
// report does not tell it.
func (t *transfers) outcome(id string, done bool, cachedTokens int, firstTokenMs float64) *seenTransfer {
	t.mu.Lock()
	defer t.mu.Unlock()
	a, ok := t.awaited[id]
	if !ok || !done || cachedTokens < 0 {
		return nil
	}
	delete(t.awaited, id)
	seen := &seenTransfer{pair: a.pair, confirmed: cachedTokens >= a.least, others: a.others}
	if wireMs, ok := a.seen(firstTokenMs); ok && seen.confirmed {
		seen.bytes, seen.wireMs = a.bytes, wireMs
	}
	return seen
}

// learn takes what became of a transfer at a moment, here or at another
// coordinator; it reports whether that switched the pair on or off.
func (t *transfers) learn(nowMs, atMs float64, seen *seenTransfer) (switched, off bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if seen.bytes > 0 {
		link := ""
		if t.file != nil {
			way := wayOf(t.file, hostOf(seen.pair.From), hostOf(seen.pair.To))
			link = way.Link
		}
		t.rates.Note(atMs, link, seen.pair, seen.bytes, seen.wireMs, seen.others)
		if s, ok := t.rates.OfPair(nowMs, seen.pair); ok {
			t.fastest = max(t.fastest, s.BytesPerMs)
		}
		if s, ok := t.rates.OfLink(nowMs, link); ok {
			t.fastest = max(t.fastest, s.BytesPerMs)
		}
	}
	switched = t.book.Outcome(atMs, seen.pair, seen.confirmed)
	return switched, t.book.Off(nowMs, seen.pair)
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

// Connectors that a caller can make send: the offloading connector reads what
// any named peer holds, NIXL what a prefill worker left for its partner.
const (
	offloadingConnector = "OffloadingConnector"
	nixlConnector       = "NixlConnector"
)

// readsAtWill says whether an engine can be told to read a worker's blocks.
func readsAtWill(from *placement.Worker) bool {
	t := from.Transfer
	return t == nil || t.Connector == offloadingConnector
}

// sourceParams names a worker to the offloading connector; nil: it cannot be
// reached.
func sourceParams(id string, from *placement.Worker) *structpb.Value {
	if from.Transfer == nil || from.Transfer.Connector != offloadingConnector {
		return nil
	}
	host, port, err := net.SplitHostPort(from.Transfer.SideChannel)
	number, bad := strconv.ParseUint(port, 10, 16)
	if err != nil || bad != nil {
		return nil
	}
	return structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
		"kv_request_id": structpb.NewStringValue(id), "remote_host": structpb.NewStringValue(host), "remote_port": structpb.NewNumberValue(float64(number)),
	}})
}

// addParam adds one of vLLM's transfer parameters to what the caller adds to
// the body; a nil value adds nothing.
func addParam(ref *waypostv1.WorkerRef, name string, value *structpb.Value) {
	if ref == nil || value == nil {
		return
	}
	if ref.BodyPatch == nil {
		ref.BodyPatch = &structpb.Struct{Fields: map[string]*structpb.Value{
			"kv_transfer_params": structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{}}),
		}}
	}
	ref.BodyPatch.GetFields()["kv_transfer_params"].GetStructValue().GetFields()[name] = value
}

// patched adds what makes the engines move saved KV to the ways to reach them:
// the source of a pull to the engine that computes the prompt, each other to
// the two of a pair. A NIXL decode worker is given what its prefill worker
// answers, by the caller.
func patched(answer *waypostv1.Placement, chosen *placement.Candidate, t *placement.Terms, sit placement.Situation) {
	id := answer.GetPlacementId()
	computes := answer.GetWorker()
	if t.Partner >= 0 {
		computes = answer.GetPrefillWorker()
		pairParams(id, computes, answer.GetWorker(), chosen.Worker)
	}
	if t.Pull.Note == placement.PullTaken {
		addParam(computes, "remote_kv_source", sourceParams(id, sit.Sources[t.Pull.Source].Worker))
	}
}

func pairParams(id string, prefill, decode *waypostv1.WorkerRef, from *placement.Worker) {
	if from.Transfer == nil {
		return
	}
	switch from.Transfer.Connector {
	case offloadingConnector:
		addParam(prefill, "remote_decoder", structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{"kv_request_id": structpb.NewStringValue(id)}}))
		addParam(decode, "remote_prefiller", sourceParams(id, from))
	case nixlConnector:
		addParam(prefill, "do_remote_decode", structpb.NewBoolValue(true))
		addParam(prefill, "do_remote_prefill", structpb.NewBoolValue(false))
		for _, name := range []string{"remote_engine_id", "remote_block_ids", "remote_host", "remote_port"} {
			addParam(prefill, name, structpb.NewNullValue())
		}
	}
}

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

// transferProto is transferOf turned round; nil: nothing is known.
func transferProto(t *placement.Transfer) *waypostv1.TransferFacts {
	if t == nil {
		return nil
	}
	out := &waypostv1.TransferFacts{Connector: &t.Connector, SideChannel: &t.SideChannel, Fingerprint: &t.Fingerprint, ExportedTier: &t.ExportedTier}
	if t.BytesPerToken > 0 {
		out.KvBytesPerToken = &t.BytesPerToken
	}
	return out
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
		if limit := headroomMs(w.ask.Policy, pool); limit != w.ask.Policy.HeadroomMs {
			w.policy = *w.ask.Policy
			w.policy.HeadroomMs = limit
			w.ask.Policy = &w.policy
		}
		request.MaxTransferMs = maxTransferMs(pool)
	}
}

// maxTransferMs is a pool's limit of a transfer; 0: none.
func maxTransferMs(pool *registry.Pool) float64 {
	limit, ok := pool.MaxTransfer.Get()
	if !ok {
		return 0
	}
	// A limit of nothing forbids every transfer; 0 is no limit.
	return max(ms(limit), math.SmallestNonzeroFloat64)
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
		// What lies behind what is known of a text belongs to another prompt.
		sure := w.prompt.sure
		m := placement.Match{Tokens: min(int(g.Tokens), sure), GPUTokens: min(int(g.GPUTokens), sure), HostTokens: min(int(g.HostTokens), sure), Predicted: g.Predicted}
		for id := range g.Workers.All {
			m.Worker = placement.WorkerID(id)
			w.ask.Matches = append(w.ask.Matches, m)
		}
	})
	w.ask.Matches = p.c.views.Credit(&w.prompt.probe, w.ask.Matches)
	p.c.fleet.Reusable(w.ask.Matches, w.prompt.tokens, w.prompt.probe.At)
	for i := range w.ask.Matches {
		deepest = max(deepest, w.ask.Matches[i].Tokens)
	}
	p.c.judges.debit(w.ask.Matches)
	return deepest
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
