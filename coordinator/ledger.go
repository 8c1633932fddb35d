package coordinator

import (
	"errors"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/fleet"
	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// wakeShipping lets what waits in the ledger be sent at once.
func (c *Coordinator) wakeShipping() {
	select {
	case c.shipC <- struct{}{}:
	default:
	}
}

// shipping sends claims and marks to the workers' agents and placements to the
// other coordinators as soon as there are some. What comes while one lot is
// sent makes the next, and what waits at the end the last: of placements that may
// not go any more, but other coordinators learn of them by the agents' echo.
func (c *Coordinator) shipping() {
	for {
		select {
		case <-c.tellCtx.Done():
			c.shipLot()
			return
		case <-c.shipC:
			c.shipLot()
		}
	}
}

func (c *Coordinator) shipLot() {
	now := time.Now()
	out := c.fleet.TakeOutgoing(now)
	for i := range out.Hosts {
		c.lanes.ship(&out.Hosts[i])
	}
	c.exchange.Tell(now, out.Places)
}

// ship sends the frames of one host on the lane they were made for. Claims that
// do not get through are offered again; marks are not.
func (h *lanes) ship(f *fleet.HostFrames) {
	hl := h.host(f.Host)
	hl.mu.Lock()
	s, open := hl.session, hl.open && hl.lane == f.Lane
	hl.mu.Unlock()
	if !open {
		return
	}
	send := func(m *waypostv1.ConnectResponse) (sent bool) {
		err := s.Send(m)
		if err != nil && !errors.Is(err, lane.ErrLaneDown) {
			h.c.metrics.framesUnsent.Inc()
			h.c.log.Debug("frame of claims or marks not sent", "host", f.Host, "error", err)
		}
		return err == nil
	}
	for i := range f.Claims {
		if slices.ContainsFunc(f.Claims[i].Offers, func(o ledger.Offer) bool { return len(o.Points) > 0 }) {
			f.Claims[i].PointsKeyID = h.c.prefixKey.ID()
		}
		for _, frame := range lane.ClaimFramesOf(f.Claims[i].Index, &f.Claims[i].ClaimFrame) {
			if !send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Claims{Claims: frame}}) {
				h.c.fleet.Unsent(f.Host, f.Lane, &f.Claims[i])
				break
			}
		}
	}
	for i := range f.Marks {
		if len(f.Marks[i].Learnt) > 0 {
			f.Marks[i].PointsKeyID = h.c.prefixKey.ID()
		}
		for _, frame := range lane.MarkFramesOf(f.Marks[i].Index, &f.Marks[i].MarkFrame) {
			send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Marks{Marks: frame}})
		}
	}
}

// takeLearnt takes what a worker's agent folded of outcomes and transfers.
func (h *lanes) takeLearnt(hl *hostLane, s *lane.Session, w *waypostv1.WorkerLoad) {
	hl.mu.Lock()
	l := hl.lane
	hl.mu.Unlock()
	id, process, ok := h.c.fleet.LaneWorker(s.Host(), l, w.GetIndex())
	if !ok {
		return
	}
	now := time.Now()
	h.c.takeTransfers(now, id, w)
	if w.GetAccuracy() == nil || process != w.GetEngineProcess() {
		return
	}
	report, err := lane.AccuracyReportOf(w.GetAccuracy())
	if err != nil {
		h.c.metrics.badFrames.WithLabelValues("accuracy").Inc()
		h.c.log.Debug("what outcomes taught about a worker is refused", "host", s.Host(), "error", err)
		return
	}
	h.c.judges.reported(now, id, process, report)
}

// younger takes back what the lane added to an age: the fleet keeps a lane's
// lateness by itself.
func younger(ageMs *float64, late time.Duration) *float64 {
	if ageMs == nil {
		return nil
	}
	return proto.Float64(max(*ageMs-ms(late), 0))
}

// placedElsewhere is the answer to an attempt that another coordinator placed
// not long ago: that placement, so that no caller that asks twice counts twice.
// Its reservation stands where it was made. nil: its worker is not there any
// more, so the attempt is placed anew.
func (c *Coordinator) placedElsewhere(now time.Time, by *fleet.PlacedBy) *waypostv1.PlaceResponse {
	if by == nil || by.Placement == "" || c.fleet.Ms(now)-by.AtMs > ms(c.reservationTTL) {
		return nil
	}
	id, process, ok := c.fleet.LookupWorker(by.Worker)
	if !ok || process != by.Process {
		return nil
	}
	return &waypostv1.PlaceResponse{Answer: &waypostv1.PlaceResponse_Placement{Placement: &waypostv1.Placement{
		PlacementId: &by.Placement, Worker: c.reach(id),
		Because: proto.String("another coordinator placed this attempt already; its reservation stands"),
	}}}
}

// superseded reports whether a placement gave way to a peer's of the same
// attempt.
func superseded(changes fleet.Changes, placementID string) bool {
	for i := range changes.Ended {
		if e := &changes.Ended[i]; e.Placement == placementID && e.How == fleet.EndSuperseded {
			return true
		}
	}
	return false
}
