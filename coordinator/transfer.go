package coordinator

import (
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/prefixindex"
	"waypost/coordinator/registry"
	"waypost/coordinator/transfers"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// pullPlan puts the pull of a decision into the API's words; nil: nothing is
// pulled.
func (c *Coordinator) pullPlan(d *placement.Decision, sit placement.Situation) *waypostv1.PullPlan {
	pull := &d.Terms[d.Chosen].Pull
	if !pull.Asked() {
		return nil
	}
	return plannedPull(pull, c.reach(sit.Sources[pull.Source].ID))
}

func plannedPull(pull *placement.Pull, source *waypostv1.WorkerRef) *waypostv1.PullPlan {
	plan := &waypostv1.PullPlan{Source: source, Tokens: counted(pull.Tokens), TransferMs: finite(pull.TransferMs)}
	if pull.Note == placement.PullSpare {
		plan.OnlyIfGone = proto.Bool(true)
	}
	return plan
}

// nixlConnector reads what a prefill worker left for its partner.
const nixlConnector = "NixlConnector"

func hostOf(worker string) string {
	host, _, _ := strings.Cut(worker, "/")
	return host
}

// sourceParams names a worker to the offloading connector; nil: it cannot be
// reached.
func sourceParams(id string, from *placement.Worker) *structpb.Value {
	if from.Transfer == nil || from.Transfer.Connector != transfers.OffloadingConnector {
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
	if t.Pull.Asked() {
		addParam(computes, "remote_kv_source", sourceParams(id, sit.Sources[t.Pull.Source].Worker))
	}
}

func pairParams(id string, prefill, decode *waypostv1.WorkerRef, from *placement.Worker) {
	if from.Transfer == nil {
		return
	}
	switch from.Transfer.Connector {
	case transfers.OffloadingConnector:
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

// hostTierOf reads what an agent says of an engine's way to the host's memory.
func hostTierOf(w *waypostv1.WorkerFacts) *placement.HostTier {
	h := w.GetHostTier()
	if h == nil {
		return nil
	}
	out := &placement.HostTier{BytesPerToken: h.GetKvBytesPerToken(), BytesPerMs: h.GetLinkBytesPerSec() / bytesPerMsSec, Link: h.GetLink(), Uncounted: h.GetUncounted()}
	if h.GetLinkSource() == placement.FigureDeclared.String() {
		out.Figure = placement.FigureDeclared
	}
	return out
}

// hostTierProto is hostTierOf turned round; nil: nothing is known.
func hostTierProto(h *placement.HostTier) *waypostv1.HostTierFacts {
	if h == nil {
		return nil
	}
	out := &waypostv1.HostTierFacts{LinkSource: proto.String(h.Figure.String())}
	if h.Link != "" {
		out.Link = &h.Link
	}
	if h.Uncounted != "" {
		out.Uncounted = &h.Uncounted
	}
	if h.BytesPerToken > 0 {
		out.KvBytesPerToken = &h.BytesPerToken
	}
	if h.BytesPerMs > 0 {
		out.LinkBytesPerSec = proto.Float64(h.BytesPerMs * bytesPerMsSec)
	}
	return out
}

// ask puts a request, what its prompt matches and the ways of the fleet
// together.
func (c *Coordinator) ask(w *work, now time.Time, request *placement.Request, callerZone string, whole bool) {
	t := c.transfers
	nowMs := t.Ms(now)
	w.ask.Pool, w.ask.CallerZone = request.Pool, callerZone
	w.ask.Request, w.ask.Policy, w.ask.Whole = request, c.policy.Load(), whole
	w.ask.PolicyVersion, w.ask.PolicyAgeMs = c.replica.State().FleetFile().Version, c.policyAgeMs()
	stay := registry.StayInNone
	w.ask.Path = func(from, to *placement.Worker) placement.Path { return t.Path(nowMs, from, to, stay) }
	w.ask.Sending = func(from *placement.Worker) int { return t.Sending(nowMs, from) }
	file := c.fleetFile.Load()
	t.Use(file)
	w.ask.FastestBytesPerMs = t.Fastest()
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

// match asks the index how much of the prompt each worker holds. It returns
// the deepest prefix that any of them holds.
func (p *placements) match(w *work) (deepest int) {
	// Whoever holds a prompt that is to be computed afresh reuses nothing of it.
	w.ask.MatchUnknown = !w.prompt.keyed && !w.text.afresh
	w.ask.Matches.Reset()
	if !w.prompt.keyed || w.text.afresh {
		return 0
	}
	p.c.index.Groups(&w.prompt.probe, func(g *prefixindex.Group) {
		if g.Unverified {
			return // its boundary is not its pool's
		}
		// What lies behind what is known of a text belongs to another prompt.
		sure := int32(min(w.prompt.sure, placement.MaxPromptTokens))
		held := placement.Held{Tokens: min(int32(g.Tokens), sure), GPUTokens: min(int32(g.GPUTokens), sure), HostTokens: min(int32(g.HostTokens), sure), Predicted: g.Predicted}
		// What is on disk is not credited: nobody says what reading it takes.
		held.Tokens = min(held.Tokens, held.HostTokens)
		held.LowerTokens = held.Tokens - min(held.GPUTokens, held.Tokens)
		first, words := g.Workers.Bitmap()
		w.ask.Matches.AddSet(held, first, words)
	})
	p.c.views.Credit(&w.prompt.probe, &w.ask.Matches)
	p.c.fleet.Reusable(&w.ask.Matches, w.prompt.tokens, w.prompt.probe.At)
	deepest = w.ask.Matches.DeepestTokens()
	p.c.judges.debit(&w.ask.Matches)
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
