package coordinator

import (
	"cmp"
	"math"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/explain"
	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
	"waypost/coordinator/transfers"
	waypostv1 "waypost/proto/waypost/v1"
)

// effectWindow is how far back placements are decided again, worstTold how many
// are told one by one.
const (
	effectWindow = 10 * time.Minute
	worstTold    = 5
)

// effectOf decides the placements of the last minutes again under a fleet
// file. Both decisions, as it was and as it would be, are taken from the kept
// candidates, so that nothing but the file makes the difference. What a record
// cannot tell stays as it was: how much a tenant had under way, and workers
// that the file would newly bring into the pool.
func (c *Coordinator) effectOf(now time.Time, next *registry.Fleet) (*waypostv1.FleetEffect, error) {
	policy, err := policyOf(next)
	if err != nil {
		return nil, err
	}
	since := now.Add(-effectWindow)
	models := map[string]string{}
	for _, w := range c.fleet.Workers(now) {
		models[w.Name] = w.Facts.Model
	}
	u := underFile{file: next, policy: policy, models: models}
	sum := effect{}
	recorded := 0
	for _, r := range c.records.Reuse(explain.Filter{Since: since}) {
		recorded += r.Placements
	}
	for _, e := range c.records.List(explain.Filter{Since: since, Limit: explain.MaxList}) {
		if e.Full {
			sum.add(e.Placement, e.Record, &u)
		}
	}
	out := sum.proto()
	out.WindowMs, out.LeftOut, out.AnsweredBy = proto.Float64(ms(effectWindow)), proto.Uint32(uint32(max(0, recorded-sum.decided))), &c.name
	return out, nil
}

// underFile puts records under another fleet file.
type underFile struct {
	file   *registry.Fleet
	policy placement.Policy
	// models are the served models by worker; a worker that is not here keeps
	// its pool.
	models map[string]string
}

// record is a record as it would have been; what it shares with r is not
// changed.
func (u *underFile) record(r *placement.Record) placement.Record {
	out := *r
	if out.Request.IfInfeasible == r.Policy.IfInfeasible {
		out.Request.IfInfeasible = "" // the policy's answer, not the request's
	}
	out.Policy = u.policy
	stay := registry.StayInNone
	out.Request.MaxTransferMs, out.Request.TenantBarred = 0, ""
	pool := u.pool(r)
	if pool != nil {
		stay = pool.StayIn.Value
		out.Request.MaxTransferMs = maxTransferMs(pool)
		out.Policy.HeadroomMs = headroomMs(&out.Policy, pool)
		out.Request.TenantBarred = tenantBarred(pool, r.Request.Tenant)
	}
	out.Candidates = slices.Clone(r.Candidates)
	for i := range out.Candidates {
		u.candidate(&out, &out.Candidates[i], pool, stay)
	}
	return out
}

// pool is the record's pool: that of its name, or if the file has none, as
// where it first names the pool of a model, the one its workers would be in.
// nil: none.
func (u *underFile) pool(r *placement.Record) *registry.Pool {
	if pool, ok := u.file.Pool(r.Request.Pool); ok {
		return pool
	}
	for i := range r.Candidates {
		if pool := u.file.PoolOf(r.Candidates[i].Name, u.models[r.Candidates[i].Name]); pool != nil {
			return pool
		}
	}
	return nil
}

func (u *underFile) candidate(r *placement.Record, c *placement.Candidate, pool *registry.Pool, stay registry.StayIn) {
	c.Worker = u.worker(c.Worker, pool)
	to := u.file.HostPlace(hostOf(c.Name))
	c.Outside = stay != registry.StayInNone && (to.Zone == "" || to.Zone != r.Request.CallerZone)
	c.SurchargeMs = 0
	if zone := r.Request.CallerZone; zone != "" {
		way := u.file.PathBetween(registry.Place{Zone: zone, Source: registry.Declared}, to)
		c.DistanceMs, c.SurchargeMs = 2*ms(way.Latency.Value), ms(way.PlaceSurcharge.Value)
	}
	c.Paths = slices.Clone(c.Paths)
	for k := range c.Paths {
		if k < len(r.Situation.Sources) {
			c.Paths[k] = u.path(r.Situation.Sources[k].Worker, c.Worker, c.Paths[k], stay)
		}
	}
	c.Partners = slices.Clone(c.Partners)
	for k := range c.Partners {
		q := &c.Partners[k]
		q.Worker = u.worker(q.Worker, pool)
		q.Path = u.path(c.Worker, q.Worker, q.Path, stay)
	}
}

// worker is the worker as the file sees it: barred if it would leave the pool.
func (u *underFile) worker(w *placement.Worker, pool *registry.Pool) *placement.Worker {
	model, known := u.models[w.Name]
	if !known || w.Barred != placement.ReasonNone {
		return w
	}
	if p := u.file.PoolOf(w.Name, model); p != nil && pool != nil && p.Name == pool.Name {
		return w
	}
	out := *w
	out.Barred, out.BarredWhy = placement.ReasonOutside, "the file takes it out of the pool"
	return &out
}

// path is the way of saved KV under the file; what was measured stays.
func (u *underFile) path(from, to *placement.Worker, was placement.Path, stay registry.StayIn) placement.Path {
	path := transfers.UnderFile(u.file, from, to, stay)
	path.UnderWay, path.Off = was.UnderWay, was.Off
	if was.Figure == placement.FigureMeasured {
		path.BytesPerMs, path.Figure = was.BytesPerMs, was.Figure
	}
	return path
}

// effect sums up what became of records.
type effect struct {
	decided, changed, infeasible, placed int
	beforeMs, afterMs                    float64 // over the placed
	worst                                []*waypostv1.EffectExample
}

// add decides a record as it was and as it would be. A record that says
// nothing of a choice is left out.
func (s *effect) add(id string, r *placement.Record, u *underFile) {
	var was, now placement.Decision
	next := u.record(r)
	if placement.Decide(&r.Request, r.Candidates, &r.Policy, r.Situation, &was) != nil || was.Chosen < 0 ||
		placement.Decide(&next.Request, next.Candidates, &next.Policy, next.Situation, &now) != nil {
		return
	}
	s.decided++
	example := &waypostv1.EffectExample{
		PlacementId: &id, Worker: &r.Candidates[was.Chosen].Name, FirstTokenBeforeMs: finite(was.FirstTokenMs), NewWorker: proto.String(""), Refused: proto.String(""),
	}
	if now.Chosen < 0 {
		s.infeasible++
		example.Refused = proto.String(string(now.Refusal.Reason))
		s.worst = append(s.worst, example)
		return
	}
	if !math.IsNaN(was.FirstTokenMs + now.FirstTokenMs) {
		s.placed++
		s.beforeMs, s.afterMs = s.beforeMs+was.FirstTokenMs, s.afterMs+now.FirstTokenMs
	}
	if now.Chosen != was.Chosen {
		s.changed++
		example.NewWorker, example.FirstTokenAfterMs = &next.Candidates[now.Chosen].Name, finite(now.FirstTokenMs)
		s.worst = append(s.worst, example)
	}
}

// proto tells the sums and the worst examples: those nobody may serve, then
// those whose first token comes latest compared with before.
func (s *effect) proto() *waypostv1.FleetEffect {
	out := &waypostv1.FleetEffect{
		Decided: proto.Uint32(uint32(s.decided)), Changed: proto.Uint32(uint32(s.changed)), Infeasible: proto.Uint32(uint32(s.infeasible)),
	}
	if n := float64(s.placed); n > 0 {
		out.FirstTokenBeforeMs, out.FirstTokenAfterMs = proto.Float64(s.beforeMs/n), proto.Float64(s.afterMs/n)
	}
	loss := func(e *waypostv1.EffectExample) float64 {
		if e.GetRefused() != "" {
			return math.Inf(1)
		}
		return e.GetFirstTokenAfterMs() - e.GetFirstTokenBeforeMs()
	}
	slices.SortStableFunc(s.worst, func(a, b *waypostv1.EffectExample) int {
		return cmp.Or(cmp.Compare(loss(b), loss(a)), cmp.Compare(a.GetPlacementId(), b.GetPlacementId()))
	})
	out.Worst = s.worst[:min(len(s.worst), worstTold)]
	return out
}
