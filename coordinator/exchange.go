package coordinator

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/registry"
	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of the exchange with one other coordinator.
const (
	// maxPlacesQueued bounds the placements that wait for a stream, maxPlaceAge
	// how long: later the peer has heard of them through the agents.
	maxPlacesQueued = 4096
	maxPlaceAge     = 5 * time.Second
	// placesBytes is the size at which a message is full.
	placesBytes = 256 << 10
	// exchangePause is the first pause after a failure, exchangePauseMost the
	// longest; exchangeGreeting is for the peer's first word.
	exchangePause     = 100 * time.Millisecond
	exchangePauseMost = 3 * time.Second
	exchangeGreeting  = 5 * time.Second
	// exchangeEvery is how often a peer hears how many hosts are heard here.
	exchangeEvery = time.Second
)

// exchange tells the other coordinators of placements made here, each on a
// stream of its own. A lost placement is not repeated: its claim comes back in
// the report of the worker's agent.
type exchange struct {
	c *Coordinator
	// inbound counts the streams of peers that are open here.
	inbound atomic.Int32
	// cut is for tests: nothing is told.
	cut atomic.Bool

	mu    sync.Mutex
	links map[string]*link // by cluster address
}

// link is the way to one other coordinator.
type link struct {
	x             *exchange
	name, address string
	ctx           context.Context
	cancel        context.CancelFunc
	wake          chan struct{}

	mu    sync.Mutex
	queue []placeOut
	// memo waits too, memoBytes of it; allowance is how many bytes more may come,
	// since allowedAt.
	memo      []*waypostv1.MemoEntry
	memoBytes float64
	allowance float64
	allowedAt time.Time
	up        bool
	since     time.Time // of up or its opposite
}

// setUp notes whether the peer is told, and returns whether it was.
func (l *link) setUp(up bool) (was bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if was = l.up; was != up {
		l.up, l.since = up, time.Now()
	}
	return was
}

func (l *link) state() (up bool, since time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.up, l.since
}

// placeOut is a placement that waits, and since when.
type placeOut struct {
	since time.Time
	ledger.Placed
}

func newExchange(c *Coordinator) *exchange { return &exchange{c: c, links: map[string]*link{}} }

// follow makes the links those to the members of the registry's catalogue.
func (x *exchange) follow(state *registry.State) {
	x.mu.Lock()
	defer x.mu.Unlock()
	wanted := map[string]bool{}
	for _, m := range state.Coordinators() {
		if m.Name == x.c.name || len(wanted) >= maxPeers {
			continue
		}
		wanted[m.ClusterAddress] = true
		if x.links[m.ClusterAddress] == nil {
			l := &link{x: x, name: m.Name, address: m.ClusterAddress, wake: make(chan struct{}, 1), since: time.Now()}
			l.ctx, l.cancel = context.WithCancel(x.c.ctx)
			x.links[m.ClusterAddress] = l
			x.c.tasks.Go(l.run)
		}
	}
	for address, l := range x.links {
		if !wanted[address] {
			l.cancel()
			delete(x.links, address)
		}
	}
}

// connected counts the peers that are told now.
func (x *exchange) connected() (n int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, l := range x.links {
		if up, _ := l.state(); up {
			n++
		}
	}
	return n
}

// check tells of peers that could not be told for a while.
func (x *exchange) check(p *problems, now time.Time) {
	x.mu.Lock()
	links := slices.SortedFunc(maps.Values(x.links), func(a, b *link) int { return strings.Compare(a.name, b.name) })
	x.mu.Unlock()
	for _, l := range links {
		up, since := l.state()
		age := ms(now.Sub(since))
		p.check(up || now.Sub(since) < laneGrace, "warning", l.name, "is not told of placements made here", &age,
			"it hears of them in the reports of the workers' agents", "waypost coordinators")
	}
}

// tell tells every peer of placements made here.
func (x *exchange) tell(now time.Time, places []ledger.Placed) {
	if len(places) == 0 {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, l := range x.links {
		if x.cut.Load() {
			x.lost(len(places))
		} else {
			l.push(now, places)
		}
	}
}

func (x *exchange) lost(n int) { x.c.metrics.places.WithLabelValues("lost").Add(float64(n)) }

// push queues placements; the oldest make room.
func (l *link) push(now time.Time, places []ledger.Placed) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range places {
		l.queue = append(l.queue, placeOut{now, places[i]})
	}
	if over := len(l.queue) - maxPlacesQueued; over > 0 {
		l.queue = slices.Delete(l.queue, 0, over)
		l.x.lost(over)
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// take hands over what waits and is not too old to be of use.
func (l *link) take(now time.Time) []placeOut {
	l.mu.Lock()
	defer l.mu.Unlock()
	queue := l.queue
	l.queue = nil
	old := 0
	for old < len(queue) && now.Sub(queue[old].since) > maxPlaceAge {
		old++
	}
	l.x.lost(old)
	return queue[old:]
}

// run keeps a stream to the peer.
func (l *link) run() {
	pause := exchangePause
	for l.ctx.Err() == nil {
		began := time.Now()
		err := l.stream()
		if l.setUp(false) && l.ctx.Err() == nil {
			l.x.c.log.Warn("placements are not told to a coordinator any more", "event", "ledger_peer_lost", "peer", l.name, "error", err)
		}
		if time.Since(began) > exchangePauseMost {
			pause = exchangePause
		}
		select {
		case <-l.ctx.Done():
		case <-time.After(pause/2 + rand.N(pause/2)):
		}
		pause = min(2*pause, exchangePauseMost)
	}
}

// stream tells the peer until something fails.
func (l *link) stream() error {
	conn, err := l.x.c.peer(l.address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(l.ctx)
	defer cancel()
	greeting := time.AfterFunc(exchangeGreeting, cancel)
	defer greeting.Stop()
	s, err := waypostv1.NewPeerServiceClient(conn).ExchangePlacements(ctx)
	if err != nil {
		return err
	}
	if err := l.send(s, nil); err != nil {
		return err
	}
	if _, err := s.Recv(); err != nil {
		return err
	}
	if !greeting.Stop() {
		return context.DeadlineExceeded
	}
	l.setUp(true)
	l.x.c.tasks.Go(func() { l.x.c.copyMemo(l.address) })
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		// The peer says nothing more: what comes is the end of the stream.
		_, err = s.Recv()
	}()
	failed := l.write(s, ended)
	cancel()
	<-ended
	if failed != nil {
		return failed
	}
	return err
}

// write sends what is queued until the stream has ended.
func (l *link) write(s placesStream, ended <-chan struct{}) error {
	beat := time.NewTicker(exchangeEvery)
	defer beat.Stop()
	for {
		select {
		case <-ended:
			return nil
		case <-l.ctx.Done():
			return l.ctx.Err()
		case <-beat.C:
			if err := l.send(s, nil); err != nil {
				return err
			}
			continue
		case <-l.wake:
		}
		if err := l.writeMemo(s); err != nil {
			return err
		}
		now := time.Now()
		for waiting := l.take(now); len(waiting) > 0; {
			var frames []*waypostv1.PlaceFrame
			for size := 0; len(waiting) > 0 && size < placesBytes; waiting = waiting[1:] {
				p := &waiting[0]
				p.AgeMs = min(p.AgeMs+ms(now.Sub(p.since)), ledger.MaxClaimAgeMs)
				frame := lane.PlaceFrameOf(&p.Placed)
				size += proto.Size(frame)
				frames = append(frames, frame)
			}
			if err := l.send(s, frames); err != nil {
				l.x.lost(len(frames) + len(waiting))
				return err
			}
			l.x.c.metrics.places.WithLabelValues("sent").Add(float64(len(frames)))
		}
	}
}

type placesStream = grpc.BidiStreamingClient[waypostv1.ExchangePlacementsRequest, waypostv1.ExchangePlacementsResponse]

func (l *link) send(s placesStream, frames []*waypostv1.PlaceFrame) error {
	c := l.x.c
	return s.Send(&waypostv1.ExchangePlacementsRequest{
		Coordinator: &c.process, Places: frames, SentMonoNs: proto.Uint64(uint64(time.Since(c.began))), HostsHeard: proto.Uint32(uint32(c.lanes.heardHosts(time.Now()))),
	})
}

// ExchangePlacements implements the peer service: it takes what a peer placed.
func (p *peers) ExchangePlacements(stream waypostv1.PeerService_ExchangePlacementsServer) error {
	c := p.c
	if err := c.checkPeer(stream.Context()); err != nil {
		return err
	}
	defer c.exchange.inbound.Add(-1)
	if c.exchange.inbound.Add(1) > maxPeers {
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
func (c *Coordinator) CutPlaces(cut bool) { c.exchange.cut.Store(cut) }

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
