package coordinator

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/gossip/mesh"
	waypostv1 "waypost/proto/waypost/v1"
)

// shareWindow is how far back shares and reuse of a pool are counted, in
// slots of shareSlot.
const (
	shareWindow = 10 * time.Minute
	shareSlot   = 10 * time.Second
	shareSlots  = int(shareWindow / shareSlot)
)

// tally counts placements per worker and reuse per pool over a sliding window.
type tally struct {
	mu    sync.Mutex
	slots [shareSlots]tallySlot
}

type tallySlot struct {
	number  int64
	workers map[poolWorker]int
	pools   map[string]*reuseSum
	// held counts placements of a pool that somebody held a prefix for, bypassed
	// those of them that load took elsewhere.
	held, bypassed map[string]int
	placed         int
}

type poolWorker struct{ pool, worker string }

// reuseSum sums reported outcomes.
type reuseSum struct {
	promptTokens, expectedTokens, actualTokens float64
	actualKnown                                bool
}

func (t *tally) slot(now time.Time) *tallySlot {
	n := now.UnixNano() / int64(shareSlot)
	s := &t.slots[n%int64(shareSlots)]
	if s.number != n {
		*s = tallySlot{number: n, workers: map[poolWorker]int{}, pools: map[string]*reuseSum{}, held: map[string]int{}, bypassed: map[string]int{}}
	}
	return s
}

// placed counts a placement: held says that somebody held a prefix of it,
// bypassed that load took it elsewhere.
func (t *tally) placed(now time.Time, pool, worker string, held, bypassed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.slot(now)
	s.placed++
	s.workers[poolWorker{pool, worker}]++
	if held {
		s.held[pool]++
	}
	if bypassed {
		s.bypassed[pool]++
	}
}

// A pool whose load rule takes more than bypassShare of at least bypassLeast
// placements away from the cache is shown: affinity does not work there.
const (
	bypassShare = .5
	bypassLeast = 20
)

// bypass is the share of a pool's placements that load took away from the worker
// that held most of them, of those that somebody held; few says that there are
// too few to tell.
func (t *tally) bypass(now time.Time, pool string) (share float64, of int, few bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	bypassed := 0
	t.each(now, shareWindow, func(s *tallySlot) {
		of += s.held[pool]
		bypassed += s.bypassed[pool]
	})
	if of < bypassLeast {
		return 0, of, true
	}
	return float64(bypassed) / float64(of), of, false
}

func (t *tally) reported(now time.Time, pool string, promptTokens, expected float64, actual *float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.slot(now)
	sum := s.pools[pool]
	if sum == nil {
		sum = &reuseSum{}
		s.pools[pool] = sum
	}
	sum.add(&reuseSum{promptTokens, expected, 0, false})
	if actual != nil {
		sum.actualTokens += *actual
		sum.actualKnown = true
	}
}

func (r *reuseSum) add(o *reuseSum) {
	r.promptTokens += o.promptTokens
	r.expectedTokens += o.expectedTokens
	r.actualTokens += o.actualTokens
	r.actualKnown = r.actualKnown || o.actualKnown
}

// each calls fn for every slot that is within the window.
func (t *tally) each(now time.Time, window time.Duration, fn func(*tallySlot)) {
	first := now.Add(-window).UnixNano() / int64(shareSlot)
	for i := range t.slots {
		if s := &t.slots[i]; s.number >= first && s.workers != nil {
			fn(s)
		}
	}
}

// of is a worker's share of its pool's placements; unset: there were none.
func (t *tally) of(pool, worker string) *float64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	all, own := 0, 0
	t.each(time.Now(), shareWindow, func(s *tallySlot) {
		for k, n := range s.workers {
			if k.pool == pool {
				all += n
			}
			if k.pool == pool && k.worker == worker {
				own += n
			}
		}
	})
	if all == 0 {
		return nil
	}
	share := float64(own) / float64(all)
	return &share
}

func (t *tally) reuse(pool string) reuseSum {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out reuseSum
	t.each(time.Now(), shareWindow, func(s *tallySlot) {
		if r := s.pools[pool]; r != nil {
			out.add(r)
		}
	})
	return out
}

func (t *tally) perSec() float64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	// The last whole slot and what has passed of this one.
	now := time.Now()
	n := 0
	t.each(now, shareSlot, func(s *tallySlot) { n += s.placed })
	covered := shareSlot + time.Duration(now.UnixNano()%int64(shareSlot))
	return float64(n) / covered.Seconds()
}

// laneGrace is how long an agent may be alive before it should have a lane.
const laneGrace = 10 * time.Second

// GetStatus implements the operator service.
func (o *operators) GetStatus(context.Context, *waypostv1.GetStatusRequest) (*waypostv1.GetStatusResponse, error) {
	c, now := o.c, time.Now()
	state := c.replica.State()
	p := &problems{}
	out := &waypostv1.GetStatusResponse{
		Fleet: proto.String(state.FleetName()), Leader: proto.String(c.leaderName()), Coordinators: proto.Uint32(uint32(len(state.Coordinators()))),
		PolicyVersion: proto.Uint32(state.FleetFile().Version), PolicyAgeMs: finite(c.policyAgeMs()), PlacementsPerSec: proto.Float64(c.shares.perSec()), AnsweredBy: &c.name,
	}
	hosts := c.fleet.Hosts(now)
	out.Hosts = proto.Uint32(uint32(len(hosts)))
	p.check(out.GetLeader() != "", "error", "coordinators", "no leader: changes are refused, placements continue from local views", nil, "placements continue", "waypost coordinators")
	p.check(state.FleetProblem() == nil, "error", "fleet file", fmt.Sprintf("cannot be read by this version: %v", state.FleetProblem()), nil, "the former policy stays in force", "waypost fleet show")
	c.checkMemos(p)
	problem := c.journalProblem()
	p.check(problem == "", "warning", "decision records", "are kept in memory only: "+problem, nil, "placements go on; records do not survive a restart", "df "+c.cfg.StateDir)
	alive := 0
	for _, m := range c.mesh.Members() {
		if m.Status == mesh.StatusAlive {
			alive++
		}
		since := ms(now.Sub(m.Since))
		if m.Meta.Role == mesh.RoleAgent && m.Status == mesh.StatusAlive && now.Sub(m.Since) > laneGrace {
			_, up := c.laneServer.Session(m.Name)
			p.check(up, "error", m.Name, "its agent is alive but has no lane here", &since, "its workers get no placements from here", "waypost members "+m.Name)
		}
		if m.Status == mesh.StatusRefused {
			// A stranger's packet; the member list shows it.
			continue
		}
		p.check(m.Status == mesh.StatusAlive || m.Status == mesh.StatusLeft, "warning", m.Name, "gossip member is "+string(m.Status), &since, "", "waypost members "+m.Name)
	}
	out.MembersAlive = proto.Uint32(uint32(alive))
	for _, h := range hosts {
		down := h.DownMs
		p.check(h.LaneUp, "error", h.Name, "lane is down: its reports are missing", finite(down), "its workers stay placeable with growing doubt, then as a last resort", "waypost members "+h.Name)
		p.check(h.ConflictWith == 0, "error", h.Name, "another agent claims the same host name", nil, "the first one keeps serving", "waypost members")
	}
	silent := c.laneCheck(now).Problem
	p.check(silent == "", "error", c.name, silent, nil, "it is not ready, and answers with what it knows", "waypost coordinators")
	checkTold(p, c.exchange.Peers(), now)
	c.checkTransfers(p, now)
	workers := c.fleet.Workers(now)
	c.checkGPUs(p, hosts, workers, now)
	for _, w := range workers {
		bad := strings.HasPrefix(w.State, "lost") || strings.HasPrefix(w.State, "stalled") || strings.HasPrefix(w.State, "excluded") || w.State == "failing"
		p.check(!bad, "error", w.Name, joinWhy(w.State, w.StateWhy), nil, "0 new placements", "waypost workers "+w.Name)
		p.check(w.Pool != "", "warning", w.Name, "belongs to no pool: "+c.fleetFile.Load().WhyNoPool(w.Name, w.Facts.Model), nil, "0 placements", "waypost fleet show")
		p.check(!c.judges.disagrees(now, w.Name, w.Process), "warning", w.Name,
			"cache view disagrees with engine: what it reuses is not what is expected (block size, tokenizer or template, salt or adapter rule, lost events)", nil,
			"its view was read anew; credit follows what comes true", "waypost explain --mispredicted --worker "+w.Name)
		p.check(groupFault(&w) == "", "warning", w.Name, groupFault(&w), nil, "it serves; a fault there would not be seen", "waypost workers "+w.Name)
		fault, effect := c.boundaryFault(w.Name)
		p.check(fault == "", "warning", w.Name, fault, nil, effect, "waypost boundary --pool "+w.Pool)
		view := c.viewWord(&w)
		p.check(view == "live" || view == "warming", "warning", w.Name, joinWhy("cache view "+view, w.Facts.CoverageHint), nil, "its reuse is not credited in full", "waypost workers "+w.Name)
	}
	for _, info := range c.fleet.Pools(now) {
		sum := c.shares.reuse(info.Name)
		ps := &waypostv1.PoolStatus{
			Name: &info.Name, Workers: proto.Uint32(uint32(info.Workers)), Ready: proto.Uint32(uint32(info.Ready)),
			PromptTokens: &sum.promptTokens, ExpectedReuseTokens: &sum.expectedTokens,
		}
		if sum.actualKnown {
			ps.ActualReuseTokens = &sum.actualTokens
		}
		out.Pools = append(out.Pools, ps)
		share, of, few := c.shares.bypass(now, info.Name)
		p.check(few || share <= bypassShare, "warning", "pool "+info.Name, fmt.Sprintf("cache bypassed by load rule: %.0f %% of %d placements of the last 10 min whose prefix was held", 100*share, of), nil,
			"they went to workers that cost less by own_delay_limit, waiting and step times", "waypost explain --redirected")
		p.check(info.Ready > 0, "error", "pool "+info.Name, "no worker is ready", nil, "", "waypost workers --pool "+info.Name)
	}
	for _, k := range state.Cordons() {
		out.Cordons = append(out.Cordons, cordonProto(k))
	}
	wishes := unrecorded(c.fleet.DrainWishes(), state)
	for _, host := range slices.Sorted(maps.Keys(wishes)) {
		out.Cordons = append(out.Cordons, cordonProto(wishDrain(host, wishes[host])))
	}
	out.Problems, out.Checks = p.sorted(), proto.Uint32(uint32(p.checked))
	return out, nil
}

func joinWhy(what, why string) string {
	if why == "" {
		return what
	}
	return what + " (" + why + ")"
}

// problems collects what is wrong and counts what was looked at.
type problems struct {
	list    []*waypostv1.Problem
	checked int
}

func (p *problems) check(ok bool, severity, subject, what string, sinceMs *float64, done, next string) {
	p.checked++
	if ok {
		return
	}
	if sinceMs != nil && math.IsNaN(*sinceMs) {
		sinceMs = nil
	}
	p.list = append(p.list, &waypostv1.Problem{Severity: &severity, Subject: &subject, What: &what, SinceMs: sinceMs, Done: &done, Next: &next})
}

// sorted returns errors before warnings, in the order found.
func (p *problems) sorted() []*waypostv1.Problem {
	var errs, rest []*waypostv1.Problem
	for _, x := range p.list {
		if x.GetSeverity() == "error" {
			errs = append(errs, x)
		} else {
			rest = append(rest, x)
		}
	}
	return append(errs, rest...)
}
