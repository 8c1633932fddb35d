package lane

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"waypost/gossip/nonblock"
	waypostv1 "waypost/proto/waypost/v1"
)

// Source says where a coordinator's address is known from.
type Source int

// The sources, in the order in which they are kept when there are too many.
const (
	FromConfig    Source = iota // [mesh] join and the like
	FromCatalogue               // pushed by a coordinator
	FromMesh                    // seen among the gossip members
	sources
)

const (
	defaultLoadEvery     = 200 * time.Millisecond
	defaultLoadGap       = 20 * time.Millisecond
	defaultStallAfter    = 2 * time.Second
	defaultHelloTimeout  = 5 * time.Second
	defaultBackoffLeast  = 100 * time.Millisecond
	defaultBackoffMost   = 5 * time.Second
	defaultRefusedPause  = 30 * time.Second
	defaultMaxAddresses  = 16
	steadyAfter          = 5 * time.Second // a lane that lived this long starts its back-off anew
	maxAddressBytes      = 256 + 6
	maxRefusedTextBytes  = 512
	maxCoordinatorsNamed = 64 // values of the coordinator label
)

// AgentHandler takes what coordinators send. Calls for one lane come one after
// the other; those for different lanes come together. They must not block for
// long: a lane reads nothing meanwhile.
type AgentHandler interface {
	// LaneUp is called once the hellos are exchanged.
	LaneUp(*Lane)
	// Frame is called for each frame after the hello. The lateness of the frame
	// has been added to the ages in it.
	Frame(*Lane, *waypostv1.ConnectResponse)
	// LaneDown is called once for each LaneUp, after the last Frame.
	LaneDown(l *Lane, cause error)
}

// DialerOptions of a [Dialer]. Hello, Load and Handler are required.
type DialerOptions struct {
	// Hello returns a new hello with the facts of the moment; the lane sets
	// session and protocol. The host must be the name in the certificate.
	Hello func() *waypostv1.AgentHello
	// Load builds a new LOAD for a lane at the moment of writing. Nil: nothing
	// is known yet, ask again in a period.
	Load func(*Lane) *waypostv1.Load
	// News builds a LOAD of those workers only of which the lane has not heard
	// the news; nil, the result: there are none. Nil, the function: Load.
	News    func(*Lane) *waypostv1.Load
	Handler AgentHandler
	// TLS is the client configuration; it must demand the coordinator role. Nil
	// dials in clear, to loopback addresses only.
	TLS *tls.Config
	// Coalescer reads lanes, and its ticks are when LOADs are written; nil: neither
	// waits for ticks.
	Coalescer *nonblock.Coalescer

	LoadEvery    time.Duration // period of LOAD; zero means 200 ms
	LoadGap      time.Duration // least distance of two LOADs; zero means 20 ms
	StallAfter   time.Duration // a lane that cannot write for so long is closed; zero means 2 s
	HelloTimeout time.Duration // for the connection and the coordinator's hello; zero means 5 s
	BackoffLeast time.Duration // first pause after a failure; zero means 100 ms
	BackoffMost  time.Duration // longest pause after failures; zero means 5 s
	RefusedPause time.Duration // pause after a coordinator refused the lane; zero means 30 s
	MaxAddresses int           // bound of addresses tried; zero means 16

	Logger     *slog.Logger          // nil discards
	Registerer prometheus.Registerer // nil keeps the metrics private
}

func (o *DialerOptions) setDefaults() error {
	if o.Hello == nil || o.Load == nil || o.Handler == nil {
		return errors.New("lane dialer: Hello, Load and Handler are required")
	}
	for _, d := range []struct {
		name  string
		value *time.Duration
		unset time.Duration
	}{
		{"LoadEvery", &o.LoadEvery, defaultLoadEvery},
		{"LoadGap", &o.LoadGap, defaultLoadGap},
		{"StallAfter", &o.StallAfter, defaultStallAfter},
		{"HelloTimeout", &o.HelloTimeout, defaultHelloTimeout},
		{"BackoffLeast", &o.BackoffLeast, defaultBackoffLeast},
		{"BackoffMost", &o.BackoffMost, defaultBackoffMost},
		{"RefusedPause", &o.RefusedPause, defaultRefusedPause},
	} {
		if *d.value == 0 {
			*d.value = d.unset
		}
		if *d.value < 0 {
			return fmt.Errorf("lane dialer: %s is negative: %v", d.name, *d.value)
		}
	}
	if o.MaxAddresses == 0 {
		o.MaxAddresses = defaultMaxAddresses
	}
	if o.MaxAddresses < 0 {
		return fmt.Errorf("lane dialer: MaxAddresses is negative: %d", o.MaxAddresses)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// Dialer keeps lanes to the coordinators of the fleet.
type Dialer struct {
	opts    DialerOptions
	log     *slog.Logger
	metrics *agentMetrics
	began   time.Time // zero of the monotonic clock in frames
	// helloChanges counts the calls of HelloChanged. Every lane compares it with
	// the count its last hello was built at, so that a change reaches lanes too
	// that are about to be up.
	helloChanges atomic.Uint64

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	dial   func(ctx context.Context, address string) (net.Conn, error) // nil: TCP

	mu       sync.Mutex
	started  bool
	closed   bool
	lists    [sources][]string
	targets  map[string]*target // by address
	up       map[string]*Lane   // by coordinator name
	sessions uint64             // number of the last session
	lanes    map[uint64]*Lane   // by session, from before the dial to the end
	crowded  bool               // said that there are too many addresses
}

// NewDialer checks the options; it starts nothing.
func NewDialer(opts DialerOptions) (*Dialer, error) {
	if err := opts.setDefaults(); err != nil {
		return nil, err
	}
	m, err := newAgentMetrics(opts.Registerer)
	if err != nil {
		return nil, fmt.Errorf("lane dialer: %w", err)
	}
	d := &Dialer{opts: opts, log: opts.Logger, metrics: m, began: time.Now(), targets: map[string]*target{}, up: map[string]*Lane{}, lanes: map[uint64]*Lane{}}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d, nil
}

// SetAddresses replaces the coordinator addresses (host:port) of one source.
// The union of all sources is dialled, at most MaxAddresses of it. A lane that
// is up stays up when its address disappears.
func (d *Dialer) SetAddresses(from Source, addresses []string) error {
	if from < 0 || from >= sources {
		return fmt.Errorf("lane: unknown address source %d", from)
	}
	var errs []error
	var good []string
	for _, a := range addresses {
		if err := checkAddress(a, d.opts.TLS == nil); err != nil {
			errs = append(errs, err)
		} else if !slices.Contains(good, a) && len(good) < d.opts.MaxAddresses {
			good = append(good, a)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lists[from] = good
	d.retarget()
	return errors.Join(errs...)
}

// checkAddress returns an error unless the address can be dialled.
func checkAddress(address string, clear bool) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" || len(address) > maxAddressBytes {
		return fmt.Errorf("lane: coordinator address %.80q: want host:port", address)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("lane: coordinator address %.80q: port must be 1 to 65535", address)
	}
	if clear && !isLoopback(address) {
		return fmt.Errorf("lane: coordinator address %.80q is not on loopback and there is no certificate: set [tls]", address)
	}
	return nil
}

// retarget starts and ends targets so that they are the union of the lists.
// Called with mu held.
func (d *Dialer) retarget() {
	if !d.started || d.closed {
		return
	}
	var want []string
	total := 0
	for _, list := range d.lists {
		for _, a := range list {
			if slices.Contains(want, a) {
				continue
			}
			if total++; len(want) < d.opts.MaxAddresses {
				want = append(want, a)
			}
		}
	}
	if crowded := total > len(want); crowded != d.crowded {
		d.crowded = crowded
		if crowded {
			d.log.Warn("more coordinator addresses than lanes, some are left out", "addresses", total, "limit", d.opts.MaxAddresses)
		}
	}
	for a, t := range d.targets {
		t.setWanted(slices.Contains(want, a))
	}
	for _, a := range want {
		if d.targets[a] == nil {
			t := newTarget(d, a)
			d.targets[a] = t
			d.wg.Add(1)
			go t.run()
		}
	}
}

// forget drops a target whose goroutine is about to end. It reports false when
// the address became wanted again meanwhile.
func (d *Dialer) forget(t *target) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed && t.isWanted() {
		return false
	}
	delete(d.targets, t.address)
	return true
}

// Start begins to dial.
func (d *Dialer) Start() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.started || d.closed {
		return
	}
	d.started = true
	d.retarget()
}

// Close ends all lanes and waits for them.
func (d *Dialer) Close() {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	d.cancel()
	d.wg.Wait()
}

// Kick asks for a LOAD on every lane at once, at most one per 20 ms.
func (d *Dialer) Kick() {
	for _, l := range d.Lanes() {
		l.Kick()
	}
}

// KickNews asks for a LOAD of the workers with news on every lane at once, at
// most one per 20 ms.
func (d *Dialer) KickNews() {
	for _, l := range d.Lanes() {
		l.KickNews()
	}
}

// HelloChanged sends the hello again on every lane, with its facts of then: on
// those that are up at once, on those that exchange hellos now afterwards.
func (d *Dialer) HelloChanged() {
	d.helloChanges.Add(1)
	for _, l := range d.Lanes() {
		signal(l.wake)
	}
}

// Lanes returns the lanes that are up, by coordinator name.
func (d *Dialer) Lanes() []*Lane {
	d.mu.Lock()
	defer d.mu.Unlock()
	lanes := make([]*Lane, 0, len(d.up))
	for _, l := range d.up {
		lanes = append(lanes, l)
	}
	slices.SortFunc(lanes, func(a, b *Lane) int {
		if a.name < b.name {
			return -1
		}
		return 1
	})
	return lanes
}

// LaneState is the state word of an address.
type LaneState string

// The states.
const (
	StateConnecting LaneState = "connecting" // being dialled
	StateUp         LaneState = "up"         // the hellos are exchanged
	StateDown       LaneState = "down"       // waits for the next dial; Error says why
	StateRefused    LaneState = "refused"    // the coordinator said no; Error says why
	StateAlias      LaneState = "alias"      // leads to a coordinator that has a lane already
)

// LaneStatus is what is known of one coordinator address.
type LaneStatus struct {
	Address     string
	Coordinator string // its name; empty: never reached
	State       LaneState
	Since       time.Time // of the state
	Error       string    // last failure; empty: none since it was up
	Session     uint64    // 0: not up
}

// Status returns the state of every address, by address.
func (d *Dialer) Status() []LaneStatus {
	d.mu.Lock()
	targets := make([]*target, 0, len(d.targets))
	for _, t := range d.targets {
		targets = append(targets, t)
	}
	d.mu.Unlock()
	status := make([]LaneStatus, len(targets))
	for i, t := range targets {
		status[i] = t.status()
	}
	slices.SortFunc(status, func(a, b LaneStatus) int {
		if a.Address < b.Address {
			return -1
		}
		return 1
	})
	return status
}

// open makes a lane that is about to be dialled. It is numbered and noted in one
// go: whoever has a later number names it as open.
func (d *Dialer) open(address string) *Lane {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sessions++
	l := newLane(d, address, d.sessions)
	d.lanes[l.session] = l
	return l
}

// shut notes that a lane has ended.
func (d *Dialer) shut(l *Lane) {
	d.mu.Lock()
	delete(d.lanes, l.session)
	d.mu.Unlock()
	close(l.done)
}

// openBefore returns the sessions that are open and older than the given one,
// the newest of them if there are too many to tell.
func (d *Dialer) openBefore(session uint64) []uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	var older []uint64
	for n := range d.lanes {
		if n < session {
			older = append(older, n)
		}
	}
	slices.Sort(older)
	return older[max(0, len(older)-maxOpenSessions):]
}

// claimUp makes a lane the one to its coordinator and closes an older one, which
// the coordinator does not hold any more. It reports false when a newer lane is
// up: the coordinator has taken that one since it greeted this one.
func (d *Dialer) claimUp(l *Lane) bool {
	d.mu.Lock()
	old := d.up[l.name]
	if old != nil && old.session > l.session {
		d.mu.Unlock()
		return false
	}
	d.up[l.name] = l
	d.mu.Unlock()
	if old != nil {
		old.end(&aliasError{l.name, l.session})
	}
	return true
}

func (d *Dialer) releaseUp(l *Lane) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.up[l.name] == l {
		delete(d.up, l.name)
	}
}

// other returns the lane that another address has to the named coordinator.
func (d *Dialer) other(name string, t *target) *Lane {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l := d.up[name]; l != nil && l.address != t.address {
		return l
	}
	return nil
}

// laneOf returns the lane with the session number, nil when it has ended.
func (d *Dialer) laneOf(session uint64) *Lane {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lanes[session]
}

func newRand() *rand.Rand { return rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())) }
