package coordinator

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/explain"
	"waypost/coordinator/fleet"
	"waypost/coordinator/outcome"
	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// remember keeps the record of a decision.
func (c *Coordinator) remember(w *work, req *waypostv1.PlaceRequest, request *placement.Request, sit placement.Situation, answer *waypostv1.Placement, now time.Time) {
	d := &w.decision
	e, _ := c.record(w, req, request, sit, answer.GetPlacementId(), now)
	chosen := w.candidates[d.Chosen]
	w.text.worker = answer.GetWorker().GetName()
	c.memos.remember(w, answer.GetPlacementId(), now)
	c.cases.remember(w, req, &e, chosen.BlockTokens, now)
	c.shares.placed(now, request.Pool, answer.GetWorker().GetName(), e.ReachableTokens > 0, e.LostTo == explain.LostToLoad)
	// A pool has the series from its first placement on: a rate needs a 0 to begin at.
	redirected := c.metrics.redirected.WithLabelValues(request.Pool)
	if d.Redirected() {
		redirected.Inc()
	}
	if term := d.DecidingTerm(); term != "" {
		c.metrics.decidingTerm.WithLabelValues(request.Pool, term).Inc()
	}
	for _, m := range d.Marks.Words() {
		c.metrics.marks.WithLabelValues(request.Pool, m).Inc()
	}
}

// record keeps a decision, also one that named nobody, with what it rested on, and
// reports whether it is kept.
func (c *Coordinator) record(w *work, req *waypostv1.PlaceRequest, request *placement.Request, sit placement.Situation, id string, now time.Time) (e explain.Entry, kept bool) {
	d := &w.decision
	e = explain.NewEntry(request, w.candidates, sit, d)
	e.Placement, e.Coordinator, e.MadeAt, e.Attempt, e.InputSource = id, c.name, now, req.GetAttempt(), w.prompt.source
	if d.Chosen >= 0 {
		chosen := w.candidates[d.Chosen]
		e.View = c.shownView(chosen.ID, chosen.View.Kind)
		if e.ExpectedTokens > 0 {
			e.BiasTokens = c.judges.bias(chosen.ID)
		}
	}
	if req.GetIfInfeasible() == "" {
		request.IfInfeasible = w.ask.Policy.IfInfeasible
	}
	kept = c.records.Add(now, e, func() placement.Record {
		return placement.NewRecord(request, w.candidates, w.ask.Policy, sit, d, c.records.KeepCandidates())
	})
	return e, kept
}

// ReportOutcome implements the placement service.
func (p *placements) ReportOutcome(ctx context.Context, req *waypostv1.ReportOutcomeRequest) (*waypostv1.ReportOutcomeResponse, error) {
	c := p.c
	out, err := outcomeOf(req)
	if err != nil {
		return nil, err
	}
	if err := checkTaught(req.GetPromptTokenIds(), req.GetOutputTokenIds()); err != nil {
		return nil, err
	}
	number, err := coordinatorOf(req.GetPlacementId())
	if err != nil {
		return nil, err
	}
	if number != c.number.Load() {
		return p.relayOutcome(ctx, number, req)
	}
	if c.cases.several(req.GetPlacementId()) {
		// The last of the answers finds what the first one computed.
		out.CachedTokens = placement.Unknown
	}
	now := time.Now()
	mark := map[string]ledger.Mark{outcome.ResultDone: ledger.MarkDone, outcome.ResultFailed: ledger.MarkFailed, outcome.ResultCancelled: ledger.MarkGone}[req.GetResult()]
	c.memos.follow(req.GetPlacementId(), req.GetPromptTokenIds())
	// What had ended by itself is still joined to its record below.
	c.fleet.NoteReuse(req.GetPlacementId(), min(out.CachedTokens, ledger.MaxTokens))
	changes, err := c.fleet.Mark(now, req.GetPlacementId(), mark, max(0, out.OutputTokens))
	if err == nil {
		c.note(changes)
	}
	c.sawTransfer(now, c.transfers.Outcome(req.GetPlacementId(), mark == ledger.MarkDone, out.CachedTokens, out.FirstTokenMs))
	joined, err := c.joinOutcome(now, req.GetPlacementId(), out)
	if err != nil {
		return nil, api.BadField("result", err.Error())
	}
	if len(req.GetPromptTokenIds()) > 0 || len(req.GetOutputTokenIds()) > 0 {
		// That a text is not remembered any more is no fault of the report.
		_, _ = c.memos.teach(req.GetPlacementId(), req.GetPromptTokenIds(), req.GetOutputTokenIds(), req.GetMessageJson())
	}
	c.memos.ended(req.GetPlacementId(), out.PromptTokens)
	resp := &waypostv1.ReportOutcomeResponse{Joined: proto.Bool(joined != nil)}
	if joined != nil {
		resp.ReuseClass = proto.String(string(joined.Class))
	}
	return resp, nil
}

// joinOutcome joins an outcome to its record and learns from it, now or when its
// class is settled. It returns the record; nil: it is not kept here.
func (c *Coordinator) joinOutcome(now time.Time, id string, out outcome.Outcome) (*explain.Entry, error) {
	entry, known := c.records.Get(id)
	if !known || entry.Worker == "" { // nothing was sent anywhere
		_, err := c.records.Join(id, out, outcome.Evidence{})
		return nil, err
	}
	joined, err := c.records.Join(id, out, c.cases.atOnce(entry, &out, now))
	if err != nil || !joined.News {
		return joined.Entry, err
	}
	if joined.Former != "" {
		// The agent's word was counted; who knows better is believed from now on.
		return joined.Entry, nil
	}
	c.judges.ended(now, entry, &out)
	if joined.Entry.Provisional {
		c.cases.settleLater(id, now)
		return joined.Entry, nil
	}
	c.cases.done(id)
	c.learn(now, joined.Entry)
	return joined.Entry, nil
}

// count adds a final outcome to the pool's sums.
func (c *Coordinator) count(now time.Time, e *explain.Entry) {
	c.metrics.reuseClass.WithLabelValues(e.Pool, string(e.Class)).Inc()
	var actual *float64
	if e.Outcome.CachedTokens >= 0 {
		a := float64(e.Outcome.CachedTokens)
		actual = &a
		c.metrics.reuseTokens.WithLabelValues(e.Pool, "actual").Add(a)
		c.metrics.reuseTokens.WithLabelValues(e.Pool, "reachable").Add(max(a, float64(e.ReachableTokens)))
	}
	expected := float64(max(0, e.ExpectedTokens))
	c.metrics.reuseTokens.WithLabelValues(e.Pool, "prompt").Add(float64(e.PromptTokens))
	c.metrics.reuseTokens.WithLabelValues(e.Pool, "expected").Add(expected)
	if ratio := e.Outcome.FirstTokenMs / e.FirstTokenMs; !math.IsNaN(ratio) && !math.IsInf(ratio, 0) {
		c.metrics.predictionRatio.WithLabelValues(e.Pool).Observe(ratio)
	}
	c.shares.reported(now, e.Pool, float64(e.PromptTokens), expected, actual)
}

func (p *placements) relayOutcome(ctx context.Context, number uint32, req *waypostv1.ReportOutcomeRequest) (*waypostv1.ReportOutcomeResponse, error) {
	conn, name, err := p.c.peerByNumber(number)
	if err != nil {
		return nil, api.NotFound("placement_id", err.Error())
	}
	resp, err := waypostv1.NewPeerServiceClient(conn).RelayOutcome(ctx, &waypostv1.RelayOutcomeRequest{Outcome: req})
	if status.Code(err) == codes.Unavailable {
		return nil, api.Unavailable(fmt.Sprintf("the placement was made by %s, which does not answer", name))
	}
	if err != nil {
		return nil, err
	}
	return resp.GetOutcome(), nil
}

// RelayOutcome implements the peer service.
func (p *peers) RelayOutcome(ctx context.Context, req *waypostv1.RelayOutcomeRequest) (*waypostv1.RelayOutcomeResponse, error) {
	number, err := coordinatorOf(req.GetOutcome().GetPlacementId())
	if err != nil || number != p.c.number.Load() {
		return nil, api.NotFound("placement_id", "the placement was not made here")
	}
	out, err := p.c.placements.ReportOutcome(ctx, req.GetOutcome())
	return &waypostv1.RelayOutcomeResponse{Outcome: out}, err
}

// coordinatorOf reads the coordinator's number out of a placement id.
func coordinatorOf(id string) (uint32, error) {
	rest, ok := strings.CutPrefix(id, "pl_c")
	digits, _, found := strings.Cut(rest, "_")
	n, err := strconv.ParseUint(digits, 10, 32)
	if !ok || !found || err != nil {
		return 0, api.BadField("placement_id", fmt.Sprintf("%.80q is not a placement id such as pl_c1_9k3f7q2m", id))
	}
	return uint32(n), nil
}

// outcomeOf checks a report and puts it into the store's words.
func outcomeOf(req *waypostv1.ReportOutcomeRequest) (outcome.Outcome, error) {
	switch req.GetResult() {
	case outcome.ResultDone, outcome.ResultFailed, outcome.ResultCancelled:
	default:
		return outcome.Outcome{}, api.BadField("result", fmt.Sprintf("%.40q: use done, failed or cancelled", req.GetResult()))
	}
	o := outcome.NewOutcome(req.GetResult())
	switch req.GetErrorClass() {
	case "", outcome.ErrorWorker, outcome.ErrorClient, outcome.ErrorOverload, outcome.ErrorTimeout:
		o.ErrorClass = req.GetErrorClass()
	default:
		return o, api.BadField("error_class", fmt.Sprintf("%.40q: use worker, client, overload or timeout", req.GetErrorClass()))
	}
	if req.HttpStatus != nil {
		if s := req.GetHttpStatus(); s < 100 || s > 599 {
			return o, api.BadField("http_status", fmt.Sprintf("%d is not an HTTP status", s))
		}
		o.HTTPStatus = int(req.GetHttpStatus())
	}
	var err error
	if o.FirstTokenMs, err = optionalMs("first_token_ms", req.FirstTokenMs); err != nil {
		return o, err
	}
	if o.DurationMs, err = optionalMs("duration_ms", req.DurationMs); err != nil {
		return o, err
	}
	for _, f := range []struct {
		field string
		value *uint32
		to    *int
	}{{"cached_tokens", req.CachedTokens, &o.CachedTokens}, {"prompt_tokens", req.PromptTokens, &o.PromptTokens}, {"output_tokens", req.OutputTokens, &o.OutputTokens}} {
		if f.value == nil {
			continue
		}
		if *f.value > math.MaxInt32 {
			return o, api.BadField(f.field, fmt.Sprintf("%d is not a number of tokens", *f.value))
		}
		*f.to = int(*f.value)
	}
	return o, nil
}

func optionalMs(field string, v *float64) (float64, error) {
	if v == nil {
		return math.NaN(), nil
	}
	if !(*v >= 0) || math.IsInf(*v, 0) {
		return 0, api.BadField(field, fmt.Sprintf("%v is not a time in ms", *v))
	}
	return *v, nil
}

// RenewPlacement implements the placement service.
func (p *placements) RenewPlacement(ctx context.Context, req *waypostv1.RenewPlacementRequest) (*waypostv1.RenewPlacementResponse, error) {
	if number, err := coordinatorOf(req.GetPlacementId()); err == nil && number != p.c.number.Load() {
		resp, err := p.c.relayReservation(ctx, number, &waypostv1.RelayReservationRequest{What: &waypostv1.RelayReservationRequest_Renew{Renew: req}})
		return resp.GetRenew(), err
	}
	ttl, err := p.c.fleet.Renew(time.Now(), req.GetPlacementId())
	if err != nil {
		return nil, p.c.noClaim(req.GetPlacementId(), err)
	}
	return &waypostv1.RenewPlacementResponse{ReservationTtlMs: proto.Float64(ms(ttl))}, nil
}

// ReleasePlacement implements the placement service.
func (p *placements) ReleasePlacement(ctx context.Context, req *waypostv1.ReleasePlacementRequest) (*waypostv1.ReleasePlacementResponse, error) {
	if number, err := coordinatorOf(req.GetPlacementId()); err == nil && number != p.c.number.Load() {
		resp, err := p.c.relayReservation(ctx, number, &waypostv1.RelayReservationRequest{What: &waypostv1.RelayReservationRequest_Release{Release: req}})
		return resp.GetRelease(), err
	}
	_, open := p.c.fleet.Open(req.GetPlacementId())
	changes, err := p.c.fleet.Mark(time.Now(), req.GetPlacementId(), ledger.MarkGone, 0)
	if err != nil {
		return nil, p.c.noClaim(req.GetPlacementId(), err)
	}
	p.c.note(changes)
	return &waypostv1.ReleasePlacementResponse{Released: &open}, nil
}

func (c *Coordinator) noClaim(id string, err error) error {
	if !errors.Is(err, fleet.ErrUnknownPlacement) {
		return err
	}
	if _, err := coordinatorOf(id); err != nil {
		return err
	}
	return api.NotFound("placement_id", fmt.Sprintf("no open reservation %.80q here", id))
}

// LearnTokens implements the placement service.
func (p *placements) LearnTokens(ctx context.Context, req *waypostv1.LearnTokensRequest) (*waypostv1.LearnTokensResponse, error) {
	number, err := coordinatorOf(req.GetPlacementId())
	if err != nil {
		return nil, err
	}
	if number != p.c.number.Load() {
		return p.relayLearn(ctx, number, req)
	}
	return p.learnHere(req)
}

func (p *placements) learnHere(req *waypostv1.LearnTokensRequest) (*waypostv1.LearnTokensResponse, error) {
	if err := checkTaught(req.GetPromptTokenIds(), req.GetOutputTokenIds()); err != nil {
		return nil, err
	}
	learnt, reason := p.c.memos.teach(req.GetPlacementId(), req.GetPromptTokenIds(), req.GetOutputTokenIds(), req.GetMessageJson())
	out := &waypostv1.LearnTokensResponse{Learnt: &learnt}
	if reason != "" {
		out.Reason = &reason
	}
	return out, nil
}

// checkTaught bounds the ids that an engine is said to have returned.
func checkTaught(prompt, output []uint32) error {
	for _, f := range []struct {
		field string
		ids   []uint32
	}{{"prompt_token_ids", prompt}, {"output_token_ids", output}} {
		if len(f.ids) > placement.MaxPromptTokens {
			return api.BadField(f.field, fmt.Sprintf("%d tokens are more than %d", len(f.ids), placement.MaxPromptTokens))
		}
	}
	return nil
}

func (p *placements) relayLearn(ctx context.Context, number uint32, req *waypostv1.LearnTokensRequest) (*waypostv1.LearnTokensResponse, error) {
	conn, name, err := p.c.peerByNumber(number)
	if err != nil {
		return nil, api.NotFound("placement_id", err.Error())
	}
	resp, err := waypostv1.NewPeerServiceClient(conn).RelayLearn(ctx, &waypostv1.RelayLearnRequest{Learn: req})
	if status.Code(err) == codes.Unavailable {
		return nil, api.Unavailable(fmt.Sprintf("the placement was made by %s, which does not answer", name))
	}
	return resp.GetLearn(), err
}

// RelayLearn implements the peer service.
func (p *peers) RelayLearn(_ context.Context, req *waypostv1.RelayLearnRequest) (*waypostv1.RelayLearnResponse, error) {
	number, err := coordinatorOf(req.GetLearn().GetPlacementId())
	if err != nil || number != p.c.number.Load() {
		return nil, api.NotFound("placement_id", "the placement was not made here")
	}
	out, err := p.c.placements.learnHere(req.GetLearn())
	return &waypostv1.RelayLearnResponse{Learn: out}, err
}
