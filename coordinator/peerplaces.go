package coordinator

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"waypost/coordinator/api"
	"waypost/coordinator/exchange"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// checkTold tells of peers that could not be told of placements for a while.
func checkTold(p *problems, peers []exchange.Peer, now time.Time) {
	for _, o := range peers {
		age := ms(now.Sub(o.Since))
		p.check(o.Up || now.Sub(o.Since) < laneGrace, "warning", o.Name, "is not told of placements made here", &age,
			"it hears of them in the reports of the workers' agents", "waypost coordinators")
	}
}

// ExchangePlacements implements the peer service: it takes what a peer placed.
func (p *peers) ExchangePlacements(stream waypostv1.PeerService_ExchangePlacementsServer) error {
	c := p.c
	if err := c.checkPeer(stream.Context()); err != nil {
		return err
	}
	// A peer's stream lasts as long as the peer: a graceful end of the server would
	// wait for it.
	ended := make(chan error, 1)
	go func() { ended <- p.takePlaces(stream) }()
	select {
	case err := <-ended:
		return err
	case <-c.ctx.Done():
		return api.Unavailable("this coordinator stops")
	}
}

// takePlaces takes what a peer placed until its stream ends.
func (p *peers) takePlaces(stream waypostv1.PeerService_ExchangePlacementsServer) error {
	c := p.c
	defer p.inbound.Add(-1)
	if p.inbound.Add(1) > maxPeers {
		return status.Errorf(codes.ResourceExhausted, "more than %d coordinators tell their placements", maxPeers)
	}
	var fresh lane.Freshness
	process := uint64(0)
	hears := c.hearing.of(peerName(stream.Context()))
	defer c.hearing.end(hears)
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		late := fresh.Observe(m.GetSentMonoNs(), int64(time.Since(c.began)))
		switch {
		case m.GetCoordinator() == 0:
			return status.Error(codes.InvalidArgument, "coordinator: is 0; the coordinator must send its process mark")
		case process == 0:
			process = m.GetCoordinator()
			if err := stream.Send(&waypostv1.ExchangePlacementsResponse{Coordinator: &c.process}); err != nil {
				return err
			}
		case m.GetCoordinator() != process:
			return status.Errorf(codes.InvalidArgument, "coordinator: %016x is not the stream's %016x", m.GetCoordinator(), process)
		}
		if m.HostsHeard != nil {
			c.hearing.told(hears, m.GetHostsHeard(), time.Now().Add(-late))
		}
		c.memos.take(m.GetMemo())
		for _, f := range m.GetPlaces() {
			c.takePlace(process, f, late)
		}
	}
}

// takePlace takes a peer's placement. One that is refused does not end the
// stream: the next ones are as good.
func (c *Coordinator) takePlace(process uint64, f *waypostv1.PlaceFrame, late time.Duration) {
	placed := lane.PlacedOf(f)
	placed.AgeMs += ms(late)
	changes, err := c.fleet.Placed(time.Now(), process, placed)
	if err != nil {
		c.metrics.places.WithLabelValues("refused").Inc()
		c.log.Debug("placement of a peer refused", "coordinator", markHex(process), "error", err)
		return
	}
	c.metrics.places.WithLabelValues("taken").Inc()
	c.metrics.peerLag.Observe(placed.AgeMs / 1000)
	c.note(changes)
}

// CutPlaces stops telling the other coordinators of placements, or goes on. For
// tests.
func (c *Coordinator) CutPlaces(cut bool) { c.exchange.Cut(cut) }

// relayReservation asks the coordinator that made a placement: callers may ask
// any.
func (c *Coordinator) relayReservation(ctx context.Context, number uint32, req *waypostv1.RelayReservationRequest) (*waypostv1.RelayReservationResponse, error) {
	conn, name, err := c.peerByNumber(number)
	if err != nil {
		return nil, api.NotFound("placement_id", err.Error())
	}
	resp, err := waypostv1.NewPeerServiceClient(conn).RelayReservation(ctx, req)
	if status.Code(err) == codes.Unavailable {
		return nil, api.Unavailable("the reservation is held by " + name + ", which does not answer")
	}
	return resp, err
}

// RelayReservation implements the peer service.
func (p *peers) RelayReservation(ctx context.Context, req *waypostv1.RelayReservationRequest) (*waypostv1.RelayReservationResponse, error) {
	id := req.GetRenew().GetPlacementId()
	if req.GetRenew() == nil {
		id = req.GetRelease().GetPlacementId()
	}
	// Relayed once: who relays to the wrong one gets an answer, not a round trip.
	if number, err := coordinatorOf(id); err != nil || number != p.c.number.Load() {
		return nil, api.NotFound("placement_id", "the placement was not made here")
	}
	out := &waypostv1.RelayReservationResponse{}
	if req.GetRenew() != nil {
		resp, err := p.c.placements.RenewPlacement(ctx, req.GetRenew())
		out.What = &waypostv1.RelayReservationResponse_Renew{Renew: resp}
		return out, err
	}
	resp, err := p.c.placements.ReleasePlacement(ctx, req.GetRelease())
	out.What = &waypostv1.RelayReservationResponse_Release{Release: resp}
	return out, err
}
