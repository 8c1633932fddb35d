package coordinator

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/explain"
	"waypost/coordinator/outcome"
	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
	waypostv1 "waypost/proto/waypost/v1"
)

// askRecordsWithin is how long other coordinators have to answer from their
// records.
const askRecordsWithin = 3 * time.Second

// The usual reach of questions about the past.
const (
	summarySince = 10 * time.Minute
	reuseSince   = time.Hour
)

// everyone asks all coordinators of the catalogue, this one included. Those
// that do not answer are named with the cause.
func (c *Coordinator) everyone(ctx context.Context, req *waypostv1.AskRecordsRequest) (answers []*waypostv1.AskRecordsResponse, silent []string) {
	ctx, cancel := context.WithTimeout(ctx, askRecordsWithin)
	defer cancel()
	var others []registry.Coordinator
	for _, m := range c.replica.State().Coordinators() {
		if m.Name != c.name {
			others = append(others, m)
		}
	}
	type answer struct {
		resp *waypostv1.AskRecordsResponse
		err  error
	}
	got := make([]chan answer, len(others))
	for i, m := range others {
		got[i] = make(chan answer, 1)
		go func() {
			conn, err := c.peer(m.ClusterAddress)
			if err != nil {
				got[i] <- answer{nil, err}
				return
			}
			resp, err := waypostv1.NewPeerServiceClient(conn).AskRecords(ctx, req)
			got[i] <- answer{resp, err}
		}()
	}
	answers = append(answers, c.askRecords(req, time.Now()))
	for i, m := range others {
		a := <-got[i]
		if a.err != nil {
			silent = append(silent, fmt.Sprintf("%s: %s", m.Name, status.Convert(a.err).Message()))
			continue
		}
		answers = append(answers, a.resp)
	}
	return answers, silent
}

// AskRecords implements the peer service.
func (p *peers) AskRecords(_ context.Context, req *waypostv1.AskRecordsRequest) (*waypostv1.AskRecordsResponse, error) {
	return p.c.askRecords(req, time.Now()), nil
}

// askRecords answers from this coordinator's own records.
func (c *Coordinator) askRecords(req *waypostv1.AskRecordsRequest, now time.Time) *waypostv1.AskRecordsResponse {
	out := &waypostv1.AskRecordsResponse{}
	if q := req.GetList(); q != nil {
		f := filterOf(q, now)
		entries := c.records.List(f)
		if f.RequestID != "" && len(entries) == 0 {
			entries = c.records.ByRequest(f.RequestID, f.Limit)
		}
		out.List = &waypostv1.ListPlacementsResponse{}
		for _, e := range entries {
			out.List.Records = append(out.List.Records, c.recordProto(e, now, f.Limit == 1))
		}
	}
	if q := req.GetSummarize(); q != nil {
		out.Summarize = &waypostv1.SummarizePlacementsResponse{Pools: summaries(c.records.Summary(explain.Filter{Pool: q.GetPool(), Since: since(now, q.SinceMs, summarySince)}))}
	}
	if q := req.GetReuse(); q != nil {
		out.Reuse = &waypostv1.GetReuseResponse{Pools: reuses(c.records.Reuse(explain.Filter{Pool: q.GetPool(), Since: since(now, q.SinceMs, reuseSince)}))}
		for _, p := range out.Reuse.Pools {
			if pm := c.memos.all()[p.GetPool()]; pm != nil {
				p.Memo = pm.reuse()
			}
		}
	}
	if q := req.GetWorker(); q != nil {
		out.Worker = c.part(q, now)
	}
	return out
}

func since(now time.Time, ageMs *float64, usual time.Duration) time.Time {
	if ageMs == nil {
		return now.Add(-usual)
	}
	return now.Add(-time.Duration(min(*ageMs, 1e12) * float64(time.Millisecond)))
}

// checkSince bounds how far back a question may reach.
func checkSince(ageMs *float64) error {
	if ageMs != nil && !(*ageMs > 0 && *ageMs <= 1e12) {
		return api.BadField("since_ms", fmt.Sprintf("%v is not an age above 0 ms", *ageMs))
	}
	return nil
}

func counts[K ~string](m map[K]int) map[string]uint32 {
	out := make(map[string]uint32, len(m))
	for k, n := range m {
		out[string(k)] = uint32(n)
	}
	return out
}

func filterOf(q *waypostv1.ListPlacementsRequest, now time.Time) explain.Filter {
	f := explain.Filter{
		RequestID: q.GetRequestId(), Worker: q.GetWorker(), Tenant: q.GetTenant(), Pool: q.GetPool(), Class: outcome.Class(q.GetReuseClass()),
		Redirected: q.GetRedirected(), Mispredicted: q.GetMispredicted(), Limit: int(q.GetLimit()),
	}
	if q.Limit == nil {
		f.Limit = 20
	}
	if q.SinceMs != nil {
		f.Since = since(now, q.SinceMs, 0)
	}
	return f
}

// ListPlacements implements the placement service.
func (p *placements) ListPlacements(ctx context.Context, req *waypostv1.ListPlacementsRequest) (*waypostv1.ListPlacementsResponse, error) {
	if n := req.GetLimit(); req.Limit != nil && (n < 1 || n > explain.MaxList) {
		return nil, api.BadField("limit", fmt.Sprintf("%d: use 1 to %d", n, explain.MaxList))
	}
	if class := req.GetReuseClass(); class != "" && !slices.Contains(outcome.Classes[:], outcome.Class(class)) {
		return nil, api.BadField("reuse_class", fmt.Sprintf("%.40q is not one of %v", class, outcome.Classes))
	}
	if err := checkSince(req.SinceMs); err != nil {
		return nil, err
	}
	if req.GetLocal() {
		return p.c.askRecords(&waypostv1.AskRecordsRequest{List: req}, time.Now()).GetList(), nil
	}
	answers, silent := p.c.everyone(ctx, &waypostv1.AskRecordsRequest{List: req})
	out := &waypostv1.ListPlacementsResponse{Silent: silent}
	for _, a := range answers {
		out.Records = append(out.Records, a.GetList().GetRecords()...)
	}
	slices.SortStableFunc(out.Records, func(a, b *waypostv1.PlacementRecord) int {
		switch x, y := a.GetAgeMs(), b.GetAgeMs(); {
		case x < y:
			return -1
		case x > y:
			return 1
		}
		return 0
	})
	if limit := filterOf(req, time.Now()).Limit; len(out.Records) > limit {
		out.Records = out.Records[:limit]
	}
	return out, nil
}

// GetPlacement implements the placement service.
func (p *placements) GetPlacement(ctx context.Context, req *waypostv1.GetPlacementRequest) (*waypostv1.GetPlacementResponse, error) {
	c := p.c
	number, err := coordinatorOf(req.GetPlacementId())
	if err != nil {
		return nil, err
	}
	var rec *waypostv1.PlacementRecord
	if number == c.number.Load() {
		rec = c.recordOf(req.GetPlacementId())
	} else if rec, err = c.fetchRecord(ctx, number, req.GetPlacementId()); err != nil {
		return nil, err
	}
	if rec == nil {
		return nil, api.NotFound("placement_id", fmt.Sprintf("no record of %s is kept (any more); records are kept for %s", req.GetPlacementId(), c.cfg.Explain.Keep))
	}
	return &waypostv1.GetPlacementResponse{Record: rec}, nil
}

func (c *Coordinator) fetchRecord(ctx context.Context, number uint32, id string) (*waypostv1.PlacementRecord, error) {
	conn, name, err := c.peerByNumber(number)
	if err != nil {
		return nil, api.NotFound("placement_id", err.Error())
	}
	ctx, cancel := context.WithTimeout(ctx, askRecordsWithin)
	defer cancel()
	resp, err := waypostv1.NewPeerServiceClient(conn).FetchPlacement(ctx, &waypostv1.FetchPlacementRequest{PlacementId: &id})
	if code := status.Code(err); code == codes.Unavailable || code == codes.DeadlineExceeded {
		return nil, api.Unavailable(fmt.Sprintf("record is on %s, %s", name, c.goneSince(name)))
	}
	if err != nil || len(resp.GetRecord()) == 0 {
		return nil, err
	}
	rec := &waypostv1.PlacementRecord{}
	if err := proto.Unmarshal(resp.GetRecord(), rec); err != nil {
		return nil, fmt.Errorf("record from %s: %w", name, err)
	}
	return rec, nil
}

// goneSince says what the mesh knows of a coordinator that does not answer.
func (c *Coordinator) goneSince(name string) string {
	for _, m := range c.mesh.Members() {
		if m.Name == name && m.Status != "alive" {
			d := time.Since(m.Since)
			if d >= 2*time.Minute {
				return fmt.Sprintf("%s %.0f min ago", m.Status, d.Minutes())
			}
			return fmt.Sprintf("%s %.0f s ago", m.Status, d.Seconds())
		}
	}
	return "which does not answer"
}

// SummarizePlacements implements the placement service.
func (p *placements) SummarizePlacements(ctx context.Context, req *waypostv1.SummarizePlacementsRequest) (*waypostv1.SummarizePlacementsResponse, error) {
	if err := checkSince(req.SinceMs); err != nil {
		return nil, err
	}
	answers, silent := p.c.everyone(ctx, &waypostv1.AskRecordsRequest{Summarize: req})
	byPool := map[string]*waypostv1.DecisionSummary{}
	out := &waypostv1.SummarizePlacementsResponse{Silent: silent}
	for _, a := range answers {
		for _, s := range a.GetSummarize().GetPools() {
			sum := byPool[s.GetPool()]
			if sum == nil {
				byPool[s.GetPool()] = s
				out.Pools = append(out.Pools, s)
				continue
			}
			plus(&sum.Placed, s.Placed)
			plus(&sum.Redirected, s.Redirected)
			plus(&sum.Reported, s.Reported)
			plus(&sum.Mispredicted, s.Mispredicted)
			sum.DecidingTerms, sum.Marks, sum.Refused = plusAll(sum.DecidingTerms, s.DecidingTerms), plusAll(sum.Marks, s.Marks), plusAll(sum.Refused, s.Refused)
		}
	}
	slices.SortFunc(out.Pools, func(a, b *waypostv1.DecisionSummary) int { return strings.Compare(a.GetPool(), b.GetPool()) })
	return out, nil
}

// plus adds a count to another; unset counts as none.
func plus[N uint32 | float64](to **N, n *N) {
	if n == nil {
		return
	}
	if *to == nil {
		*to = new(N)
	}
	**to += *n
}

func plusAll[N uint32 | float64](to, from map[string]N) map[string]N {
	if to == nil {
		return from
	}
	for k, n := range from {
		to[k] += n
	}
	return to
}

func summaries(sums map[string]*explain.Summary) []*waypostv1.DecisionSummary {
	var out []*waypostv1.DecisionSummary
	for pool, s := range sums {
		out = append(out, &waypostv1.DecisionSummary{
			Pool: &pool, Placed: proto.Uint32(uint32(s.Placed)), Redirected: proto.Uint32(uint32(s.Redirected)), Reported: proto.Uint32(uint32(s.Reported)),
			Mispredicted: proto.Uint32(uint32(s.Mispredicted)), DecidingTerms: counts(s.Terms), Marks: counts(s.Marks), Refused: counts(s.Refused),
		})
	}
	return out
}

// GetReuse implements the operator service.
func (o *operators) GetReuse(ctx context.Context, req *waypostv1.GetReuseRequest) (*waypostv1.GetReuseResponse, error) {
	if err := checkSince(req.SinceMs); err != nil {
		return nil, err
	}
	answers, silent := o.c.everyone(ctx, &waypostv1.AskRecordsRequest{Reuse: req})
	byPool := map[string]*waypostv1.PoolReuse{}
	out := &waypostv1.GetReuseResponse{Silent: silent}
	for _, a := range answers {
		for _, s := range a.GetReuse().GetPools() {
			sum := byPool[s.GetPool()]
			if sum == nil {
				byPool[s.GetPool()] = s
				out.Pools = append(out.Pools, s)
				continue
			}
			plus(&sum.Requests, s.Requests)
			plus(&sum.Outcomes, s.Outcomes)
			for _, f := range [...]struct{ to, from **float64 }{
				{&sum.PromptTokens, &s.PromptTokens},
				{&sum.ExpectedTokens, &s.ExpectedTokens},
				{&sum.ActualTokens, &s.ActualTokens},
				{&sum.ReachableTokens, &s.ReachableTokens},
				{&sum.ShortTokens, &s.ShortTokens},
				{&sum.MissTokens, &s.MissTokens},
			} {
				plus(f.to, *f.from)
			}
			sum.Memo = plusMemo(sum.Memo, s.Memo)
			sum.Classes, sum.LostTokens = plusAll(sum.Classes, s.Classes), plusAll(sum.LostTokens, s.LostTokens)
			// The worst that any coordinator names; each sees its own share.
			if wrongBy(s.Worst) > wrongBy(sum.Worst) {
				sum.Worst = s.Worst
			}
		}
	}
	slices.SortFunc(out.Pools, func(a, b *waypostv1.PoolReuse) int { return strings.Compare(a.GetPool(), b.GetPool()) })
	return out, nil
}

// wrongBy is by how many tokens the expectation of a worker was wrong in all.
func wrongBy(w *waypostv1.WorkerReuse) float64 {
	return math.Abs(w.GetExpectedTokens() - w.GetActualTokens())
}

func reuses(sums map[string]*explain.Reuse) []*waypostv1.PoolReuse {
	var out []*waypostv1.PoolReuse
	for pool, s := range sums {
		r := &waypostv1.PoolReuse{
			Pool: &pool, Requests: proto.Uint32(uint32(s.Placements)), Outcomes: proto.Uint32(uint32(s.Outcomes)), Classes: counts(s.ByClass),
			PromptTokens: &s.PromptTokens, ExpectedTokens: &s.ExpectedTokens, ActualTokens: &s.ActualTokens, ReachableTokens: &s.ReachableTokens,
			ShortTokens: &s.ShortTokens, MissTokens: &s.MissTokens, LostTokens: map[string]float64{},
		}
		for why, tokens := range s.LostTokens {
			r.LostTokens[string(why)] = tokens
		}
		for name, w := range s.Workers {
			one := &waypostv1.WorkerReuse{
				Worker: &name, Outcomes: proto.Uint32(uint32(w.Reported)), PromptTokens: &w.PromptTokens, ExpectedTokens: &w.ExpectedTokens, ActualTokens: &w.ActualTokens,
			}
			if d, most := wrongBy(one), wrongBy(r.Worst); d > most || d > 0 && d == most && name < r.Worst.GetWorker() {
				r.Worst = one
			}
		}
		out = append(out, r)
	}
	return out
}

// WatchPlacements implements the placement service.
func (p *placements) WatchPlacements(req *waypostv1.WatchPlacementsRequest, stream waypostv1.PlacementService_WatchPlacementsServer) error {
	c := p.c
	f := explain.Filter{Pool: req.GetPool(), Tenant: req.GetTenant(), Worker: req.GetWorker(), Redirected: req.GetRedirected(), Mispredicted: req.GetMispredicted()}
	w, ok := c.records.Watch(f)
	if !ok {
		return status.Error(codes.ResourceExhausted, "too many watch this coordinator already; ask another one")
	}
	defer c.records.Unwatch(w)
	for {
		select {
		case <-c.ctx.Done():
			return api.Unavailable("this coordinator stops; watch another one")
		case <-stream.Context().Done():
			return nil
		case e := <-w.Events:
			msg := &waypostv1.WatchPlacementsResponse{Kind: proto.String(string(e.Kind)), Record: c.recordProto(e.Entry, time.Now(), false)}
			if e.Missed > 0 {
				msg.Missed = proto.Uint32(uint32(e.Missed))
			}
			if err := stream.Send(msg); err != nil {
				return err
			}
		}
	}
}

// recordOf is the record of a placement made here; nil: not kept.
func (c *Coordinator) recordOf(id string) *waypostv1.PlacementRecord {
	e, ok := c.records.Find(id)
	if !ok {
		return nil
	}
	return c.recordProto(e, time.Now(), true)
}

// recordProto puts an entry into the API's words. With whole, terms and
// counterfactuals are computed again from the record's inputs.
func (c *Coordinator) recordProto(e *explain.Entry, now time.Time, whole bool) *waypostv1.PlacementRecord {
	out := &waypostv1.PlacementRecord{
		Placement: &waypostv1.Placement{
			PlacementId: &e.Placement, Worker: &waypostv1.WorkerRef{Name: &e.Worker, Incarnation: proto.String(markHex(e.Process))}, Because: &e.Because,
			Expected: &waypostv1.Expected{ReuseTokens: counted(e.ExpectedTokens), FirstTokenMs: finite(e.FirstTokenMs), FirstTokenP90Ms: finite(e.FirstTokenP90Ms)},
			Basis: &waypostv1.Basis{
				CacheView: proto.String(e.View.String()), CacheViewAgeMs: finite(e.ViewAgeMs), QueueAgeMs: finite(e.QueueAgeMs), InputSource: &e.InputSource, Marks: e.Marks.Words(),
			},
		},
		RequestId: &e.RequestID, Attempt: &e.Attempt, Tenant: &e.Tenant, Pool: &e.Pool, PromptTokens: counted(e.PromptTokens), OutputTokensExpected: finite(e.OutputTokens),
		Coordinator: &e.Coordinator, AgeMs: proto.Float64(ms(now.Sub(e.MadeAt))),
	}
	if e.DecidingTerm != "" {
		out.DecidingTerm = &e.DecidingTerm
	}
	out.Redirected, out.ReachableTokens = &e.Redirected, counted(float64(e.ReachableTokens))
	if e.Outcome != nil {
		out.Outcome, out.ReuseClass = outcomeProto(e), proto.String(string(e.Class))
		out.OutcomeSource, out.Provisional = proto.String(e.Outcome.Source.String()), &e.Provisional
	}
	if e.Worker == "" {
		out.Placement.Worker, out.Refusal = nil, &waypostv1.Refusal{Reason: proto.String(string(e.Refused)), Detail: &e.Because, PlacementId: &e.Placement}
	}
	out.Placement.Basis.PolicyVersion = &e.PolicyVersion
	if !e.Full {
		return out
	}
	sit := e.Record.Situation
	out.Placement.Basis.Theta = finite(e.Record.Policy.Theta)
	out.Placement.Basis.UnpricedWorkers, out.Placement.Basis.ExcludedWorkers = proto.Uint32(uint32(e.Record.Survey.Unpriced)), excludedWorkers(&e.Record.Survey)
	out.Placement.Basis.PolicyVersion, out.Placement.Basis.PolicyAgeMs = &sit.PolicyVersion, finite(sit.PolicyAgeMs)
	if !whole {
		return out
	}
	var d placement.Decision
	if err := e.Record.Redecide(&d); err != nil {
		c.log.Error("record cannot be decided again", "placement", e.Placement, "error", err)
		return out
	}
	out.Placement.Terms, out.OutputTokensSource = termsOf(&d, e.Record.Candidates, &e.Record.Policy), proto.String(string(e.Record.OutputSource()))
	if d.Chosen < 0 {
		out.Refusal = refusal(&d, e.Record.Candidates)
		out.Refusal.Detail, out.Refusal.PlacementId = &e.Because, &e.Placement
	} else {
		recordedWay(out.Placement, &e.Record.Candidates[d.Chosen], &d.Terms[d.Chosen], sit)
	}
	for _, w := range e.Record.WouldChange(&d) {
		out.WouldChange = append(out.WouldChange, w.Sentence())
	}
	return out
}

// recordedWay names the workers that a recorded placement goes through: the
// source of its pull, and both of a pair.
func recordedWay(p *waypostv1.Placement, chosen *placement.Candidate, t *placement.Terms, sit placement.Situation) {
	named := func(w *placement.Worker) *waypostv1.WorkerRef {
		return &waypostv1.WorkerRef{Name: &w.Name, Incarnation: proto.String(markHex(w.Process))}
	}
	if t.Pull.Asked() {
		p.Pull = plannedPull(&t.Pull, named(sit.Sources[t.Pull.Source].Worker))
	}
	if t.Partner >= 0 {
		p.PrefillWorker, p.Worker = named(chosen.Worker), named(decodes(chosen, t))
	}
}

func outcomeProto(e *explain.Entry) *waypostv1.ReportOutcomeRequest {
	o := e.Outcome
	out := &waypostv1.ReportOutcomeRequest{
		PlacementId: &e.Placement, Result: &o.Result, FirstTokenMs: finite(o.FirstTokenMs), DurationMs: finite(o.DurationMs),
		CachedTokens: counted(o.CachedTokens), PromptTokens: counted(o.PromptTokens), OutputTokens: counted(o.OutputTokens),
	}
	if o.HTTPStatus > 0 {
		out.HttpStatus = proto.Uint32(uint32(o.HTTPStatus))
	}
	if o.ErrorClass != "" {
		out.ErrorClass = &o.ErrorClass
	}
	return out
}
