package coordinator

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/explain"
	"waypost/coordinator/placement"
	waypostv1 "waypost/proto/waypost/v1"
)

// ExplainWorker implements the operator service.
func (o *operators) ExplainWorker(ctx context.Context, req *waypostv1.ExplainWorkerRequest) (*waypostv1.ExplainWorkerResponse, error) {
	c := o.c
	if err := checkSince(req.SinceMs); err != nil {
		return nil, err
	}
	w, err := c.fleet.Worker(time.Now(), req.GetWorker())
	if err != nil {
		return nil, api.NotFound("worker", fmt.Sprintf("no worker %.80q; see: waypost workers", req.GetWorker()))
	}
	out := &waypostv1.ExplainWorkerResponse{
		Worker: c.workerProto(&w, c.replica.State()), SinceMs: proto.Float64(ms(summarySince)), Considered: proto.Uint32(0), Chosen: proto.Uint32(0),
		LostBy: map[string]uint32{}, Excluded: map[string]uint32{},
	}
	if req.SinceMs != nil {
		out.SinceMs = req.SinceMs
	}
	answers, silent := c.everyone(ctx, &waypostv1.AskRecordsRequest{Worker: req})
	out.Silent = silent
	even := 0.0
	for _, a := range answers {
		p := a.GetWorker()
		plus(&out.Considered, p.Considered)
		plus(&out.Chosen, p.Chosen)
		out.LostBy, out.Excluded = plusAll(out.LostBy, p.LostBy), plusAll(out.Excluded, p.Excluded)
		even += p.GetEvenShare() * float64(p.GetConsidered())
	}
	if n := out.GetConsidered(); n > 0 {
		out.EvenShare = proto.Float64(even / float64(n))
	}
	out.Present = c.presentPrice(time.Now(), w.Name, w.Pool)
	out.ToChange = c.toChange(out, w.StateWhy)
	return out, nil
}

// part is how a worker fared in the decisions recorded here.
func (c *Coordinator) part(q *waypostv1.ExplainWorkerRequest, now time.Time) *waypostv1.ExplainWorkerResponse {
	f := explain.Filter{Since: since(now, q.SinceMs, summarySince)}
	var known time.Time
	if w, err := c.fleet.Worker(now, q.GetWorker()); err == nil {
		f.Pool, known = w.Pool, now.Add(-time.Duration(w.KnownMs*float64(time.Millisecond)))
	}
	part := c.records.Part(q.GetWorker(), known, f)
	out := &waypostv1.ExplainWorkerResponse{
		Considered: proto.Uint32(uint32(part.Considered)), Chosen: proto.Uint32(uint32(part.Chosen)), LostBy: counts(part.LostBy), Excluded: counts(part.Excluded),
	}
	if part.Considered > 0 {
		out.EvenShare = proto.Float64(part.EvenShare / float64(part.Considered))
	}
	return out
}

// presentPrice prices a worker for the newest recorded request of its pool, as
// things are now; nil: that decision priced it, or there is none.
func (c *Coordinator) presentPrice(now time.Time, worker, pool string) *waypostv1.PresentPrice {
	e := c.records.NewestFull(pool)
	if e == nil || pool == "" || explain.Lists(e, worker) {
		return nil
	}
	w := &work{}
	request := e.Record.Request
	request.ExcludeWorkers, request.ExcludeProcesses = nil, nil
	w.ask.MatchUnknown = true
	for i := range e.Record.Candidates {
		r := &e.Record.Candidates[i]
		w.ask.MatchUnknown = w.ask.MatchUnknown && r.MatchedTokens == placement.Unknown
		// What another engine life held says nothing.
		if id, process, ok := c.fleet.LookupWorker(r.Name); ok && process == r.Process && r.MatchedTokens > 0 {
			w.ask.Matches.Add(id, placement.Held{Tokens: int32(min(r.MatchedTokens, placement.MaxPromptTokens)), Predicted: r.Predicted})
		}
	}
	c.ask(w, now, &request, "", true)
	d := &w.decision
	var err error
	if w.candidates, _, err = c.fleet.Decide(now, &w.ask, w.candidates, d); err != nil {
		c.log.Debug("recorded request cannot be priced now", "placement", e.Placement, "error", err)
		return nil
	}
	out := &waypostv1.PresentPrice{PlacementId: &e.Placement, PromptTokens: counted(e.PromptTokens)}
	for i := range w.candidates {
		switch {
		case w.candidates[i].Name == worker:
			out.Terms = termsProto(&d.Terms[i], w.candidates[i].Worker)
			if by := d.LostBy(i); d.Terms[i].Placeable && by != "" {
				out.LostBy = &by
			}
		case i == d.Chosen:
			out.Chosen = termsProto(&d.Terms[i], w.candidates[i].Worker)
		}
	}
	if out.Terms == nil {
		return nil // it has left the pool
	}
	return out
}

// toChange says what would bring a worker more traffic, the surest first.
func (c *Coordinator) toChange(r *waypostv1.ExplainWorkerResponse, stateWhy string) []string {
	w := r.GetWorker()
	host, _, _ := strings.Cut(w.GetName(), "/")
	var out []string
	switch state := w.GetState(); {
	case w.GetCordon() != nil && (state == "cordoned" || strings.HasPrefix(state, "drain")):
		out = append(out, "take the cordon back: waypost uncordon "+w.GetCordon().GetSelector())
	case state == "failing":
		out = append(out, "find out why it fails what it is given (its engine's log); a probe placement readmits it by itself")
	case state == "probing":
		out = append(out, "nothing: the next placement on it is its probe")
	case state != "ready":
		out = append(out, joinWhy("it must be ready, and is "+state, stateWhy))
	}
	if w.GetPool() == "" {
		out = append(out, "put it into a pool: waypost fleet show")
	}
	if v := w.GetView(); v != "live" && v != "warming" && w.GetState() == "ready" {
		trust := c.policy.Load().InferredTrust
		if w.Trust != nil {
			trust = w.GetTrust()
		}
		s := fmt.Sprintf("a better cache view (now %s, trust %s)", v, strings.TrimPrefix(fmt.Sprintf("%.2f", trust), "0"))
		if w.GetViewHint() != "" {
			s += ": " + w.GetViewHint()
		}
		out = append(out, s)
	} else if w.Trust != nil && w.GetTrust() < .9 {
		out = append(out, fmt.Sprintf("predictions that come true (trust %s): waypost explain --mispredicted --worker %s", strings.TrimPrefix(fmt.Sprintf("%.2f", w.GetTrust()), "0"), w.GetName()))
	}
	if len(out) == 0 && r.GetConsidered() == 0 {
		out = append(out, "requests: no recorded decision had it as a candidate; see: waypost pools, waypost hosts "+host)
	}
	return out
}
