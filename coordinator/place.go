package coordinator

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/prefixindex"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// maxDecides bounds deciding again when the chosen worker changed between
// decision and claim, or another placement became its probe. Each time that
// worker is out of the choice, so a request that loses so often has asked a whole
// fleet; with fewer tries, of many requests that come when several workers are to
// be probed, most would be refused although others could serve them.
// maxBatch bounds the requests of one batch; maxNameLen the bytes of a name;
// maxTokenizeBudgetMs the time for making tokens of a text.
const (
	maxDecides          = prefixindex.MaxWorkers
	maxBatch            = 256
	maxNameLen          = 256
	maxTokenizeBudgetMs = 1000
)

// placements serves the placement API.
type placements struct {
	waypostv1.UnimplementedPlacementServiceServer
	c *Coordinator
}

// work is the memory of one decision, used again.
type work struct {
	prompt     prompt
	text       text
	tokens     []uint32
	candidates []placement.Candidate
	ask        fleet.Ask
	policy     placement.Policy
	decision   placement.Decision
	keys       []prefix.Key
	depths     []uint32
	from       netip.Addr // of the caller; invalid: not known
}

var works = sync.Pool{New: func() any { return &work{} }}

// Place implements the placement service.
func (p *placements) Place(ctx context.Context, req *waypostv1.PlaceRequest) (*waypostv1.PlaceResponse, error) {
	c, started := p.c, time.Now()
	resp, pool, err := p.placeInTurn(req, api.CallerOf(ctx).Address)
	result := "placed"
	switch {
	case err != nil:
		result = "bad_request"
	case resp.GetRefused() != nil:
		result = resp.GetRefused().GetReason()
	}
	c.metrics.placements.WithLabelValues(pool, result).Inc()
	if t := resp.GetRefused(); t != nil {
		c.metrics.tenantRefused.WithLabelValues(c.tenantLabel(req.GetTenant()), t.GetReason()).Inc()
	}
	c.metrics.placeSeconds.WithLabelValues(pool).Observe(time.Since(started).Seconds())
	return resp, err
}

// placeInTurn decides one request, if not too many are being decided. It returns
// the pool for the counters.
func (p *placements) placeInTurn(req *waypostv1.PlaceRequest, from netip.Addr) (*waypostv1.PlaceResponse, string, error) {
	select {
	case p.c.inFlight <- struct{}{}:
		defer func() { <-p.c.inFlight }()
	default:
		return &waypostv1.PlaceResponse{Answer: &waypostv1.PlaceResponse_Refused{Refused: &waypostv1.Refusal{
			Reason: proto.String("busy"), RetryAfterMs: proto.Float64(50), Detail: proto.String("this coordinator decides as many placements at once as [limits] places_in_flight allows; ask another one"),
		}}}, "", nil
	}
	w := works.Get().(*work)
	defer func() {
		w.text.forget()
		works.Put(w)
	}()
	w.from = from
	return p.place(w, req)
}

// place decides one request. It returns the pool for the counters.
func (p *placements) place(w *work, req *waypostv1.PlaceRequest) (*waypostv1.PlaceResponse, string, error) {
	c := p.c
	if err := checkNames(req); err != nil {
		return nil, "", err
	}
	pool, err := c.fleet.PoolName(req.GetPool())
	if err != nil {
		return nil, "", c.poolError(err, req.GetPool())
	}
	if fault := c.fleetFile.Load().SaltFault(req.GetTenant(), req.GetCacheSalt()); fault != "" {
		return nil, pool, api.BadField("cache_salt", fault)
	}
	request, err := requestOf(req, pool)
	if err != nil {
		return nil, pool, err
	}
	if request.CallerZone == "" && w.from.IsValid() {
		request.CallerZone, _ = c.fleetFile.Load().ZoneOfAddr(w.from)
	}
	domain := prefix.Domain{Model: c.modelOf(pool), Adapter: req.GetAdapter(), Salt: req.GetCacheSalt()}
	keyer := c.keyers.of(domain)
	if w.tokens, err = w.prompt.read(req.GetInput(), keyer, c.prefixKey.ID(), w.tokens); err != nil {
		return nil, pool, err
	}
	w.text.request, w.text.learnt, w.text.domain = nil, false, domain
	if w.prompt.text {
		if _, err := w.text.readText(req.GetInput()); err != nil {
			return nil, pool, err
		}
		if err := c.memos.look(w, pool, keyer); err != nil {
			return nil, pool, err
		}
	}
	key := fleet.RequestKey{Tenant: req.GetTenant(), ID: request.ID}
	if req.GetReserve() {
		if c.number.Load() == 0 {
			// A placement id names its coordinator by number.
			return nil, pool, api.Unavailable("this coordinator is not part of a cluster yet, so it cannot reserve; ask another one, or see: waypost coordinators")
		}
		admission, err := c.fleet.Admit(key, req.GetAttempt())
		if err != nil {
			return nil, pool, admitError(err)
		}
		if admission.Stored != nil {
			if stored, ok := admission.Stored.Answer.(*waypostv1.PlaceResponse); ok {
				return stored, pool, nil
			}
		}
		if elsewhere := c.placedElsewhere(time.Now(), admission.PlacedBy); elsewhere != nil {
			return elsewhere, pool, nil
		}
		request.ExcludeProcesses = admission.ExcludeProcesses
	}
	if w.prompt.text {
		c.memos.ask.first(w, req, keyer)
	}
	request.PromptTokens, request.LengthEstimated = w.prompt.tokens, w.prompt.estimated
	for range maxDecides {
		resp, again, err := p.decide(w, req, &request, key)
		if err != nil || !again {
			return resp, pool, err
		}
	}
	return nil, pool, api.Unavailable("the chosen worker changed while it was being reserved, as often as a fleet has workers; ask again")
}

// decide takes one decision and reserves the choice. again says that the
// chosen worker changed meanwhile.
func (p *placements) decide(w *work, req *waypostv1.PlaceRequest, request *placement.Request, key fleet.RequestKey) (resp *waypostv1.PlaceResponse, again bool, err error) {
	c, now := p.c, time.Now()
	var sit placement.Situation
	request.SharedKey = w.prompt.deepestKey(p.match(w))
	c.ask(w, now, request, request.CallerZone, req.GetExplain() == "full")
	w.candidates, sit, err = c.fleet.Decide(now, &w.ask, w.candidates, &w.decision)
	if errors.Is(err, placement.ErrRequest) || errors.Is(err, placement.ErrPolicy) {
		return nil, false, fieldError(err)
	}
	if err != nil {
		return nil, false, c.poolError(err, request.Pool)
	}
	d := &w.decision
	if d.Chosen < 0 {
		refused := refusal(d, w.candidates)
		if req.GetReserve() {
			id := c.newPlacementID()
			if _, kept := c.record(w, req, request, sit, id, now); kept {
				refused.PlacementId = &id
			}
		}
		return &waypostv1.PlaceResponse{Answer: &waypostv1.PlaceResponse_Refused{Refused: refused}}, false, nil
	}
	answer := c.answer(w, req, request, sit)
	resp = &waypostv1.PlaceResponse{Answer: &waypostv1.PlaceResponse_Placement{Placement: answer}}
	if !req.GetReserve() {
		return resp, false, nil
	}
	if chosen := w.candidates[d.Chosen].Worker; d.Marks&placement.MarkLastResort == 0 && !c.judges.takeProbe(now, chosen.Name, chosen.Process) {
		// Another placement is the worker's probe.
		return nil, true, nil
	}
	answer.PlacementId = proto.String(c.newPlacementID())
	patched(answer, &w.candidates[d.Chosen], &d.Terms[d.Chosen], sit)
	answer.ReservationTtlMs = proto.Float64(ms(c.reservationTTL))
	chosen, terms := w.candidates[d.Chosen], &d.Terms[d.Chosen]
	held := max(0, terms.ReuseTokens)
	w.keys, w.depths = w.prompt.newPart(held, chosen.BlockTokens, w.keys[:0], w.depths[:0])
	var points []prefix.Key
	var slot *uint32
	if c.fleet.Followed(chosen.ID) {
		points = w.prompt.claimPoints()
		slot = c.slots.choose(chosen.ID, held, w.prompt.probe.At)
		pinSlot(answer.GetWorker(), slot)
	}
	session := c.sessionFor(w, &chosen, terms, answer)
	claim, stored, changes, err := c.fleet.Claim(now, fleet.NewClaim{
		Key: key, Attempt: req.GetAttempt(), Placement: answer.GetPlacementId(), Worker: chosen.ID,
		Claim: ledger.Claim{
			EngineProcess: chosen.Process, PromptTokens: request.PromptTokens + request.GeneratedTokens, UncachedTokens: terms.UncachedTokens,
			OutputTokens: c.expectedOutput(request, sit), Sequences: 1, Keys: slices.Clone(w.keys), KeyDepths: slices.Clone(w.depths), AfterKey: uint64(w.prompt.after(held)),
			Points: points, Slot: slot, Session: session,
		},
		Decode:          decodeClaim(&chosen, terms, request, c.expectedOutput(request, sit)),
		ExpectedFirstMs: d.FirstTokenMs, Answer: resp,
	})
	c.note(changes)
	switch {
	case errors.Is(err, fleet.ErrFenced) || errors.Is(err, fleet.ErrBarred):
		return nil, true, nil
	case errors.Is(err, fleet.ErrOlderAttempt):
		return nil, false, admitError(err)
	case err != nil:
		return nil, false, err
	case stored:
		if s, ok := claim.Answer.(*waypostv1.PlaceResponse); ok {
			return s, false, nil
		}
	}
	if superseded(changes, answer.GetPlacementId()) {
		// A peer told of the same attempt between the question and the claim.
		if admission, err := c.fleet.Admit(key, req.GetAttempt()); err == nil {
			if elsewhere := c.placedElsewhere(now, admission.PlacedBy); elsewhere != nil {
				return elsewhere, false, nil
			}
		}
	}
	c.placedFor(now, request, terms.UncachedTokens)
	c.metrics.tenantUncached.WithLabelValues(c.tenantLabel(request.Tenant)).Add(float64(terms.UncachedTokens))
	c.transfers.Begin(now, answer.GetPlacementId(), d, w.candidates, w.ask.Policy, request.PromptTokens, sit)
	c.remember(w, req, request, sit, answer, now)
	return resp, false, nil
}

// answer puts a decision into the API's words.
func (c *Coordinator) answer(w *work, req *waypostv1.PlaceRequest, request *placement.Request, sit placement.Situation) *waypostv1.Placement {
	d := &w.decision
	chosen := w.candidates[d.Chosen]
	out := &waypostv1.Placement{
		Worker:   c.reach(decodes(&chosen, &d.Terms[d.Chosen]).ID),
		Pull:     c.pullPlan(d, sit),
		Expected: &waypostv1.Expected{ReuseTokens: counted(d.Terms[d.Chosen].ExpectedReuseTokens()), FirstTokenMs: finite(d.FirstTokenMs), FirstTokenP90Ms: finite(d.FirstTokenP90Ms)},
		Because:  proto.String(d.Because(w.candidates)),
		Basis: &waypostv1.Basis{
			PolicyVersion: &sit.PolicyVersion, PolicyAgeMs: finite(sit.PolicyAgeMs), QueueAgeMs: finite(sit.NowMs - chosen.LoadAtMs), Theta: finite(c.policy.Load().Theta),
			CacheViewAgeMs: finite(sit.NowMs - chosen.View.AtMs), CacheView: proto.String(c.shownView(chosen.ID, chosen.View.Kind).String()), InputSource: proto.String(w.prompt.source), Marks: d.Marks.Words(),
			UnpricedWorkers: proto.Uint32(uint32(d.Survey.Unpriced)), ExcludedWorkers: excludedWorkers(&d.Survey),
		},
	}
	if d.Terms[d.Chosen].Partner >= 0 {
		out.PrefillWorker = c.reach(chosen.ID)
	}
	for _, i := range d.Fallbacks() {
		if len(out.Fallbacks) < 3 {
			out.Fallbacks = append(out.Fallbacks, c.reach(w.candidates[i].ID))
		}
	}
	if e := req.GetExplain(); e == "terms" || e == "full" {
		out.Terms = termsOf(d, w.candidates, w.ask.Policy)
	}
	return out
}

// termsOf lists the terms of all candidates, best first, the chosen one on top.
func termsOf(d *placement.Decision, candidates []placement.Candidate, policy *placement.Policy) []*waypostv1.Terms {
	out := make([]*waypostv1.Terms, 0, len(d.Terms))
	for _, i := range d.Ranked() {
		t := termsProto(&d.Terms[i], candidates[i].Worker)
		if why := d.PassedOver(i, policy); why != "" {
			t.PassedOver = &why
		}
		out = append(out, t)
	}
	return out
}

func termsProto(t *placement.Terms, w *placement.Worker) *waypostv1.Terms {
	out := &waypostv1.Terms{
		Worker: &w.Name, ReuseTokens: counted(t.ReuseTokens), StartMs: finite(t.StartMs), PrefillMs: finite(t.PrefillMs), PullMs: finite(t.PullMs),
		RoomMs: finite(t.RoomMs), DoubtMs: finite(t.DoubtMs), DistanceMs: finite(t.DistanceMs), OwnMs: finite(t.OwnMs), QueueMs: finite(t.QueueMs),
		GapMs: finite(t.GapMs), StallMs: finite(t.StallMs), TotalMs: finite(t.TotalMs), HandMs: finite(t.HandMs),
	}
	if t.HostTokens > 0 {
		out.HostTokens, out.LoadMs = counted(t.HostTokens), finite(t.LoadMs)
	}
	if note := t.Pull.Note.String(); note != "" {
		out.PullNote = &note
	}
	if ex := t.Excluded(w); ex != "" {
		out.Excluded = &ex
	}
	return out
}

// reach says how to reach a worker.
func (c *Coordinator) reach(id fleet.WorkerID) *waypostv1.WorkerRef {
	e, ok := c.fleet.Endpoint(id)
	if !ok {
		return nil
	}
	return &waypostv1.WorkerRef{Name: &e.Name, Incarnation: proto.String(markHex(e.Process)), Url: &e.URL, Headers: maps.Clone(e.Headers)}
}

func markHex(process uint64) string { return fmt.Sprintf("%016x", process) }

// excludedWorkers counts who could not be chosen, by reason.
func excludedWorkers(survey *placement.Survey) map[string]uint32 {
	out := map[string]uint32{}
	for reason, n := range survey.Reasons {
		if r := placement.Reason(reason); r != placement.ReasonNone && n > 0 {
			out[r.String()] = uint32(n)
		}
	}
	return out
}

func refusal(d *placement.Decision, candidates []placement.Candidate) *waypostv1.Refusal {
	out := &waypostv1.Refusal{
		Reason: proto.String(string(d.Refusal.Reason)), RetryAfterMs: finite(d.Refusal.RetryAfterMs), Detail: proto.String(d.RefusalDetail(candidates)),
		Workers: map[string]uint32{},
	}
	for reason, n := range d.RefusedWorkers() {
		out.Workers[reason] = uint32(n)
	}
	return out
}

// expectedOutput is the answer length a claim is sized with.
func (c *Coordinator) expectedOutput(r *placement.Request, sit placement.Situation) float64 {
	out := r.OutputTokensExpected
	if out == 0 {
		out = sit.MeanOutputTokens
	}
	if math.IsNaN(out) || out <= 0 {
		out = c.policy.Load().PriorOutputTokens
	}
	if r.OutputTokensMax > 0 {
		out = min(out, float64(r.OutputTokensMax))
	}
	return max(1, out)
}

// PlaceBatch implements the placement service.
func (p *placements) PlaceBatch(ctx context.Context, req *waypostv1.PlaceBatchRequest) (*waypostv1.PlaceBatchResponse, error) {
	n := len(req.GetRequests())
	if n == 0 || n > maxBatch {
		return nil, api.BadField("requests", fmt.Sprintf("%d requests: use 1 to %d", n, maxBatch))
	}
	out := &waypostv1.PlaceBatchResponse{}
	for i, r := range req.GetRequests() {
		resp, err := p.Place(ctx, r)
		if err != nil {
			// The others stand: what was reserved for them must reach the caller.
			resp = &waypostv1.PlaceResponse{Answer: &waypostv1.PlaceResponse_Refused{Refused: &waypostv1.Refusal{
				Reason: proto.String("bad_request"), Detail: proto.String(fmt.Sprintf("requests[%d].%s: %s", i, api.FieldOf(err), status.Convert(err).Message())),
			}}}
		}
		out.Responses = append(out.Responses, resp)
	}
	return out, nil
}

// requestOf checks the fields of a request and puts them into the rule's words.
func requestOf(req *waypostv1.PlaceRequest, pool string) (placement.Request, error) {
	r := placement.Request{
		ID: req.GetRequestId(), Tenant: req.GetTenant(), Pool: pool, Adapter: req.GetAdapter(), OutputTokensMax: int(req.GetOutputTokensMax()),
		OutputTokensExpected: float64(req.GetOutputTokensExpected()), GeneratedTokens: int(req.GetGeneratedTokens()),
		IfInfeasible: placement.IfInfeasible(req.GetIfInfeasible()), ExcludeWorkers: req.GetExclude(), CallerZone: req.GetCallerZone(),
	}
	if r.ID == "" {
		r.ID = "req-" + randomName(10)
	}
	var err error
	if r.DeadlineMs, err = budget("deadline_ms", req.DeadlineMs); err != nil {
		return r, err
	}
	if r.FirstTokenBudgetMs, err = budget("first_token_budget_ms", req.FirstTokenBudgetMs); err != nil {
		return r, err
	}
	if r.GapBudgetMs, err = budget("gap_budget_ms", req.GapBudgetMs); err != nil {
		return r, err
	}
	if req.GetAttempt() == 0 {
		return r, api.BadField("attempt", "attempts count from 1")
	}
	// A 0 that is given would read as none.
	if req.OutputTokensMax != nil && r.OutputTokensMax == 0 {
		return r, api.BadField("output_tokens_max", "0 is not a number of tokens from 1; leave it out for no limit")
	}
	if req.OutputTokensExpected != nil && r.OutputTokensExpected == 0 {
		return r, api.BadField("output_tokens_expected", "0 is not a number of tokens from 1; leave it out for the learnt mean")
	}
	if v := req.TokenizeBudgetMs; v != nil && !(*v >= 0 && *v <= maxTokenizeBudgetMs) {
		return r, api.BadField("tokenize_budget_ms", fmt.Sprintf("%v is not a time from 0 to %d ms", *v, maxTokenizeBudgetMs))
	}
	switch req.GetExplain() {
	case "", "none", "terms", "full":
	default:
		return r, api.BadField("explain", fmt.Sprintf("%.40q: use none, terms or full", req.GetExplain()))
	}
	return r, nil
}

// checkNames bounds the texts of a request.
func checkNames(req *waypostv1.PlaceRequest) error {
	for _, f := range []struct{ field, value string }{
		{"request_id", req.GetRequestId()},
		{"pool", req.GetPool()},
		{"tenant", req.GetTenant()},
		{"adapter", req.GetAdapter()},
		{"cache_salt", req.GetCacheSalt()},
		{"caller_zone", req.GetCallerZone()},
	} {
		if len(f.value) > maxNameLen {
			return api.BadField(f.field, fmt.Sprintf("%d bytes are more than %d", len(f.value), maxNameLen))
		}
	}
	for i, name := range req.GetExclude() {
		if len(name) > maxNameLen {
			return api.BadField(fmt.Sprintf("exclude[%d]", i), fmt.Sprintf("%d bytes are more than %d", len(name), maxNameLen))
		}
	}
	return nil
}

// fieldError names the field that the rule refuses.
func fieldError(err error) error {
	var fe *placement.FieldError
	if errors.As(err, &fe) {
		return api.BadField(protoName(fe.Field), fe.Detail)
	}
	return err
}

// protoName is a field of the rule in the words of the API: requestId is
// request_id.
func protoName(field string) string {
	var b strings.Builder
	for _, r := range field {
		if unicode.IsUpper(r) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

func admitError(err error) error {
	if errors.Is(err, fleet.ErrOlderAttempt) {
		return api.Conflict("attempt", err.Error())
	}
	return err
}

// poolError says which pools there are.
func (c *Coordinator) poolError(err error, pool string) error {
	if !errors.Is(err, fleet.ErrUnknownPool) {
		return err
	}
	var names []string
	for _, p := range c.fleet.Pools(time.Now()) {
		names = append(names, p.Name)
	}
	switch {
	case len(names) == 0:
		return api.NotFound("pool", "no worker has joined yet, so there is no pool; see: waypost members")
	case pool == "":
		return api.BadField("pool", "there are several pools; name one of: "+strings.Join(names, ", "))
	default:
		return api.NotFound("pool", fmt.Sprintf("no pool %.80q; pools: %s", pool, strings.Join(names, ", ")))
	}
}

// newPlacementID names a placement; the coordinator's number says who has the
// record.
func (c *Coordinator) newPlacementID() string {
	return fmt.Sprintf("pl_c%d_%s", c.number.Load(), randomName(13))
}

func randomName(chars int) string {
	var b [16]byte
	// The system's random source does not fail.
	_, _ = rand.Read(b[:])
	return strings.ToLower(base32.HexEncoding.WithPadding(base32.NoPadding).EncodeToString(b[:]))[:chars]
}
