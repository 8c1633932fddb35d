package coordinator

import (
	"context"
	"fmt"
	"math"
	"time"

	"waypost/coordinator/api"
	"waypost/coordinator/fleet"
	"waypost/gossip/doctor"
	waypostv1 "waypost/proto/waypost/v1"
)

const (
	// policyOldMs is how old the word of a leader may be.
	policyOldMs = 10_000
	// lateMs is how late the coordinator's own clock work may run.
	lateMs = 250
)

// Doctor implements the operator service: the checks of this coordinator and
// those that the agents make.
func (o *operators) Doctor(ctx context.Context, req *waypostv1.DoctorRequest) (*waypostv1.DoctorResponse, error) {
	c, now := o.c, time.Now()
	l := &doctor.List{}
	hosts := c.fleet.Hosts(now)
	asked := req.GetHost()
	if asked == "" || asked == c.name {
		c.checkSelf(l, now)
	}
	known := asked == "" || asked == c.name
	for i := range hosts {
		if asked == "" || asked == hosts[i].Name {
			known = true
			c.checkHost(l, &hosts[i], now)
		}
	}
	if !known {
		return nil, api.NotFound("host", fmt.Sprintf("no host %q; see: waypost hosts", asked))
	}
	if req.GetPorts() {
		l.Ports(ctx, c.name, doctor.Targets(c.mesh.Members()))
	}
	return &waypostv1.DoctorResponse{Checks: l.Sorted(), AnsweredBy: &c.name}, nil
}

// checkSelf looks at what this coordinator knows of itself and the mesh.
func (c *Coordinator) checkSelf(l *doctor.List, now time.Time) {
	l.Mesh(c.name, c.opt.Version, c.mesh.Members())
	if c.identity != nil {
		l.Certificate(c.name, c.identity.NotAfter(), now)
	}
	l.Disk(c.name, c.cfg.StateDir, nil)
	if problem := c.journalProblem(); problem != "" {
		l.Bad("disk", c.name, "decision records are kept in memory only", problem, "df "+c.cfg.StateDir)
	}
	if leader := c.leaderName(); leader == "" {
		l.Bad("raft-quorum", c.name, "no leader is known: changes are refused, placements continue", "most voters are down or cut off", "waypost coordinators")
	} else {
		l.Good("raft-quorum", c.name, leader+" leads")
	}
	switch age := c.policyAgeMs(); {
	case math.IsNaN(age):
		l.Bad("policy-age", c.name, "it has never heard of a leader", "", "waypost coordinators")
	case age > policyOldMs:
		l.Bad("policy-age", c.name, fmt.Sprintf("last heard of a leader %.0f s ago", age/1000), "it places by the policy it has", "waypost coordinators")
	default:
		l.Good("policy-age", c.name, "its policy is current")
	}
	if err := c.replica.State().FleetProblem(); err != nil {
		l.Bad("policy-age", c.name, "the fleet file cannot be read by this version", err.Error(), "waypost fleet show")
	}
	if silent := c.laneCheck(now).Problem; silent != "" {
		l.Bad("lane", c.name, silent, "", "waypost members")
	}
	if late := float64(c.late.Load()) / 1e6; late > lateMs {
		l.Bad("coordinator-cpu", c.name, fmt.Sprintf("its own work ran %.0f ms late within the last minute", late), "other programs take its processors",
			"systemctl set-property waypost-coordinator CPUWeight=1000")
	} else {
		l.Good("coordinator-cpu", c.name, "its own work runs in time")
	}
}

// noteLate keeps how late a tick of every second was handled: the worst, which
// fades within about a minute.
func (c *Coordinator) noteLate(late time.Duration) {
	c.late.Store(max(int64(late), c.late.Load()*9/10))
}

// checkHost looks at a host: what its agent found, and what only a coordinator
// sees.
func (c *Coordinator) checkHost(l *doctor.List, h *fleet.HostInfo, now time.Time) {
	if h.LaneUp {
		l.Good("lane", h.Name, "its lane to "+c.name+" is up")
	} else {
		l.Bad("lane", h.Name, "its lane to "+c.name+" is down", "its reports are missing", "on "+h.Name+": waypost doctor --ports")
	}
	if h.ConflictWith != 0 {
		l.Bad("lane", h.Name, "another agent claims the same host name", "the first one keeps serving", "set name in agent.toml of one of them")
	}
	hl := c.lanes.host(h.Name)
	hl.mu.Lock()
	report, at, ahead := hl.report, hl.reportAt, hl.ahead
	hl.mu.Unlock()
	if report == nil {
		l.Add("engine-reachable", doctor.Unknown, h.Name, "its agent has not told its checks yet", "", "")
	} else {
		l.Take(report.GetChecks(), ms(now.Sub(at)))
		if report.WallUnixMs != nil && h.LaneUp {
			l.Clock(h.Name, c.name, ahead)
		}
	}
	for _, worker := range h.Workers {
		if fault, effect := c.boundaryFault(worker); fault != "" {
			l.Bad("boundary", worker, fault, effect, "waypost boundary")
		} else {
			l.Good("boundary", worker, "agrees with its pool, as far as it is told")
		}
	}
}

// takeReport keeps a host's report and how far its clock is ahead. It returns
// the report before.
func (hl *hostLane) takeReport(r *waypostv1.HostReport, now time.Time) (former *waypostv1.HostReport) {
	const mostMs = 1e15
	hl.mu.Lock()
	defer hl.mu.Unlock()
	former, hl.report, hl.reportAt = hl.report, r, now
	if at := r.GetWallUnixMs(); at > 0 && at < mostMs {
		hl.ahead = time.UnixMilli(int64(at)).Sub(now).Round(time.Millisecond)
	} else {
		r.WallUnixMs = nil
	}
	return former
}
