package exchange

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

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
	// MaxPeers bounds the coordinators that are told.
	MaxPeers = 64
	// placesBytes is the size at which a message is full.
	placesBytes = 256 << 10
	// Pause is the first pause after a failure, PauseMost the longest; Greeting is
	// for the peer's first word.
	Pause     = 100 * time.Millisecond
	PauseMost = 3 * time.Second
	Greeting  = 5 * time.Second
	// Every is how often a peer hears how many hosts are heard here.
	Every = time.Second
)

// Options wires an [Exchange]. All are required but Logger.
type Options struct {
	// Name is this coordinator's, which it does not tell itself anything.
	Name string
	// Process is this coordinator's mark, not 0.
	Process uint64
	// Began is the zero of the clock in messages.
	Began time.Time
	// Dial returns the connection to a coordinator; it does not wait for it.
	Dial func(clusterAddress string) (*grpc.ClientConn, error)
	// HostsHeard is how many hosts' lanes bring something.
	HostsHeard func() int
	// Met runs whenever a peer has answered the first word, beside its stream.
	Met func(ctx context.Context, clusterAddress string)
	// Places and MemoEntries count what is told, by result: sent or lost.
	Places, MemoEntries *prometheus.CounterVec
	// Logger takes what an operator cares about; nil: nobody does.
	Logger *slog.Logger
}

// Exchange tells the other coordinators of placements made here, each on a
// stream of its own. A lost placement is not repeated: its claim comes back in
// the report of the worker's agent.
type Exchange struct {
	opt Options
	// cut is for tests: nothing is told.
	cut atomic.Bool

	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	mu    sync.Mutex
	links map[string]*link // by cluster address
}

// link is the way to one other coordinator.
type link struct {
	x             *Exchange
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

// New makes an exchange with nobody; it starts nothing.
func New(opt Options) (*Exchange, error) {
	if opt.Name == "" || opt.Process == 0 || opt.Dial == nil || opt.HostsHeard == nil || opt.Met == nil || opt.Places == nil || opt.MemoEntries == nil {
		return nil, errors.New("exchange: Name, Process, Dial, HostsHeard, Met, Places and MemoEntries are required")
	}
	if opt.Logger == nil {
		opt.Logger = slog.New(slog.DiscardHandler)
	}
	x := &Exchange{opt: opt, links: map[string]*link{}}
	x.ctx, x.cancel = context.WithCancel(context.Background())
	return x, nil
}

// Stop ends all streams, and waits for that. Nobody is followed any more.
func (x *Exchange) Stop() {
	x.mu.Lock()
	x.cancel()
	x.mu.Unlock()
	x.tasks.Wait()
}

// Follow tells the members of the registry's catalogue, and no others.
func (x *Exchange) Follow(state *registry.State) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.ctx.Err() != nil {
		return
	}
	wanted := map[string]bool{}
	for _, m := range state.Coordinators() {
		if m.Name == x.opt.Name || len(wanted) >= MaxPeers {
			continue
		}
		wanted[m.ClusterAddress] = true
		if x.links[m.ClusterAddress] == nil {
			l := &link{x: x, name: m.Name, address: m.ClusterAddress, wake: make(chan struct{}, 1), since: time.Now()}
			l.ctx, l.cancel = context.WithCancel(x.ctx)
			x.links[m.ClusterAddress] = l
			x.tasks.Go(l.run)
		}
	}
	for address, l := range x.links {
		if !wanted[address] {
			l.cancel()
			delete(x.links, address)
		}
	}
}

// Connected counts the peers that are told now.
func (x *Exchange) Connected() (n int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, l := range x.links {
		if up, _ := l.state(); up {
			n++
		}
	}
	return n
}

// Peer is another coordinator: whether it is told, and since when it is or is
// not.
type Peer struct {
	Name  string
	Up    bool
	Since time.Time
}

// Peers are the coordinators that are followed, by name.
func (x *Exchange) Peers() []Peer {
	x.mu.Lock()
	links := slices.SortedFunc(maps.Values(x.links), func(a, b *link) int { return strings.Compare(a.name, b.name) })
	x.mu.Unlock()
	out := make([]Peer, len(links))
	for i, l := range links {
		out[i].Name = l.name
		out[i].Up, out[i].Since = l.state()
	}
	return out
}

// Cut stops telling anything, or goes on. For tests.
func (x *Exchange) Cut(cut bool) { x.cut.Store(cut) }

// Tell tells every peer of placements made here.
func (x *Exchange) Tell(now time.Time, places []ledger.Placed) {
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

func (x *Exchange) lost(n int) { x.opt.Places.WithLabelValues("lost").Add(float64(n)) }

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
	pause := Pause
	for l.ctx.Err() == nil {
		began := time.Now()
		err := l.stream()
		if l.setUp(false) && l.ctx.Err() == nil {
			l.x.opt.Logger.Warn("placements are not told to a coordinator any more", "event", "ledger_peer_lost", "peer", l.name, "error", err)
		}
		if time.Since(began) > PauseMost {
			pause = Pause
		}
		select {
		case <-l.ctx.Done():
		case <-time.After(pause/2 + rand.N(pause/2)):
		}
		pause = min(2*pause, PauseMost)
	}
}

// stream tells the peer until something fails.
func (l *link) stream() error {
	conn, err := l.x.opt.Dial(l.address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(l.ctx)
	defer cancel()
	greeting := time.AfterFunc(Greeting, cancel)
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
	l.x.tasks.Go(func() { l.x.opt.Met(l.x.ctx, l.address) })
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
	beat := time.NewTicker(Every)
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
				p.AgeMs = min(p.AgeMs+float64(now.Sub(p.since))/float64(time.Millisecond), ledger.MaxClaimAgeMs)
				frame := lane.PlaceFrameOf(&p.Placed)
				size += proto.Size(frame)
				frames = append(frames, frame)
			}
			if err := l.send(s, frames); err != nil {
				l.x.lost(len(frames) + len(waiting))
				return err
			}
			l.x.opt.Places.WithLabelValues("sent").Add(float64(len(frames)))
		}
	}
}

type placesStream = grpc.BidiStreamingClient[waypostv1.ExchangePlacementsRequest, waypostv1.ExchangePlacementsResponse]

func (l *link) send(s placesStream, frames []*waypostv1.PlaceFrame) error {
	opt := &l.x.opt
	return s.Send(&waypostv1.ExchangePlacementsRequest{
		Coordinator: &opt.Process, Places: frames, SentMonoNs: proto.Uint64(uint64(time.Since(opt.Began))), HostsHeard: proto.Uint32(uint32(opt.HostsHeard())),
	})
}
