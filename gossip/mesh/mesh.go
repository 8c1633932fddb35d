package mesh

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/prometheus/client_golang/prometheus"

	"waypost/gossip/identity"
)

const (
	defaultMaxMembers = 8192
	// packetBytes is what memberlist puts into one datagram. With IPv6 and UDP
	// headers it stays within the least MTU of IPv6, 1280, which tunnels have.
	packetBytes = 1200
	// packetOverhead: compound header 2, encryption 29 (version, nonce, tag), per
	// message 2 and its type byte 1; the label is extra.
	packetOverhead = 2 + 29 + 2 + 1
	streamTimeout  = 5 * time.Second
	// reclaimAfter is how long after a death its name may come back under another
	// address. The death itself took seconds of silence to be believed.
	reclaimAfter  = time.Second
	leaveTimeout  = 5 * time.Second
	updateTimeout = 5 * time.Second
	updatePause   = time.Second // between two changes of the description
)

// Options of a [Mesh]. Name, Fleet, Role and Listen are required.
type Options struct {
	Name  string // unique and stable: the host's name, or the coordinator's
	Fleet string // processes of another fleet are not spoken to
	Role  Role
	// Version, Process, ClusterAddress and APIAddress are told to the others.
	Version        string
	Process        uint64
	ClusterAddress string
	APIAddress     string

	Listen    string // host:port, TCP and UDP; ":7710", "127.0.0.1:0"
	Advertise string // address, interface, CIDR or "auto"; empty: auto
	// KeyFile holds the keys, one base64 key per line, the first encrypts. Empty
	// is allowed on loopback only.
	KeyFile string
	// PeersFile remembers members over restarts; empty: none.
	PeersFile string
	Join      []string // addresses of members, host:port, tried for ever
	// OnChange is called with the list after it changed, from one goroutine; it
	// must not block. Nil: not called.
	OnChange func([]Member)
	// Local sets the rhythm for members that are all on this host: failures are
	// noticed sooner at the price of more packets.
	Local      bool
	MaxMembers int // bound of the list; zero means 8192

	Logger     *slog.Logger          // nil discards
	Registerer prometheus.Registerer // nil: no metrics
}

func (o *Options) check() error {
	if err := identity.CheckName(o.Name); err != nil {
		return fmt.Errorf("mesh: %w", err)
	}
	if o.Fleet == "" || len(o.Fleet) > memberlist.LabelMaxSize {
		return fmt.Errorf("mesh: fleet name has %d bytes, want 1 to %d", len(o.Fleet), memberlist.LabelMaxSize)
	}
	host, _, err := net.SplitHostPort(o.Listen)
	if err != nil {
		return fmt.Errorf("mesh.listen %q: %w", o.Listen, err)
	}
	if ip := net.ParseIP(host); o.KeyFile == "" && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return fmt.Errorf("mesh.key_file is not set and mesh.listen %q is not on loopback: gossip without a key would take orders from anyone", o.Listen)
	}
	for _, a := range o.Join {
		if err := checkHostPort(a); err != nil {
			return fmt.Errorf("mesh.join: %w", err)
		}
	}
	if o.MaxMembers == 0 {
		o.MaxMembers = defaultMaxMembers
	}
	if o.MaxMembers < 0 {
		return fmt.Errorf("mesh: MaxMembers is negative: %d", o.MaxMembers)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

func checkHostPort(a string) error {
	host, port, err := net.SplitHostPort(a)
	if err != nil || host == "" {
		return fmt.Errorf("address %.80q: want host:port", a)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("address %.80q: port must be 1 to 65535", a)
	}
	return nil
}

// Mesh is this process's membership.
type Mesh struct {
	opts         Options
	log          *slog.Logger
	keyring      *memberlist.Keyring // nil: not encrypted
	life         uint32
	tune         func(*memberlist.Config) // in tests
	leaveTimeout time.Duration

	list      *memberlist.Memberlist
	transport *transport
	merge     *mergeGate
	readEvery time.Duration
	queue     *memberlist.TransmitLimitedQueue
	sketches  *sketchStore
	counts    counts
	echoes    echoes
	address   string // advertised
	chosen    string // why
	sketchSeq atomic.Uint64
	alive     atomic.Int64 // members alive, this one included
	started   atomic.Bool

	events   chan event
	overflow atomic.Bool // an event was lost: read the whole list
	remeta   chan struct{}
	// someoneLost wakes the join loop.
	someoneLost chan struct{}

	metaMu sync.Mutex
	meta   Meta

	mu      sync.Mutex // guards table and join
	table   *table
	join    JoinStatus
	stopped bool

	ctx        context.Context
	cancel     context.CancelFunc
	joinCtx    context.Context
	joinCancel context.CancelFunc
	wg         sync.WaitGroup
	joinWg     sync.WaitGroup
}

// New checks the options and reads the keys; it starts nothing.
func New(opts Options) (*Mesh, error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	m := &Mesh{
		leaveTimeout: leaveTimeout,
		opts:         opts, log: opts.Logger, life: rand.Uint32N(1<<32-1) + 1, merge: &mergeGate{},
		sketches: newSketchStore(opts.MaxMembers), echoes: newEchoes(), table: newTable(opts.Name, opts.MaxMembers),
		events: make(chan event, eventQueue), remeta: make(chan struct{}, 1), someoneLost: make(chan struct{}, 1),
		join: JoinStatus{Seeds: len(opts.Join), Alone: true, Since: time.Now()},
	}
	m.meta = Meta{
		Role: opts.Role, Protocol: Protocol, Version: opts.Version, Process: opts.Process, Life: m.life,
		ClusterAddress: opts.ClusterAddress, APIAddress: opts.APIAddress,
	}
	if err := m.meta.check(); err != nil {
		return nil, err
	}
	if opts.KeyFile != "" {
		keys, err := readKeys(opts.KeyFile)
		if err != nil {
			return nil, err
		}
		if m.keyring, err = memberlist.NewKeyring(keys, keys[0]); err != nil {
			return nil, fmt.Errorf("mesh.key_file %s: %w", opts.KeyFile, err)
		}
		m.meta.KeyID = fingerprint(keys[0])
	}
	// The queue must exist before the library may call back.
	m.queue = &memberlist.TransmitLimitedQueue{RetransmitMult: 4, NumNodes: func() int { return max(1, int(m.alive.Load())) }}
	if opts.Registerer != nil {
		if err := opts.Registerer.Register(m); err != nil {
			return nil, fmt.Errorf("mesh: %w", err)
		}
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.joinCtx, m.joinCancel = context.WithCancel(m.ctx)
	return m, nil
}

// Start binds the sockets, begins to gossip and to join.
func (m *Mesh) Start() error {
	host, port, _ := net.SplitHostPort(m.opts.Listen)
	if host == "localhost" {
		host = "127.0.0.1"
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return fmt.Errorf("mesh.listen %q: %w", m.opts.Listen, err)
	}
	chosen, err := ChooseAddress(m.opts.Advertise, host)
	if err != nil {
		return err
	}
	bridge := newLogBridge(m.log, m.noteRefused, m.noteUDPLost)
	logger := bridge.logger()
	nt, err := bind(&memberlist.NetTransportConfig{BindAddrs: []string{host}, BindPort: int(n), Logger: logger})
	if err != nil {
		return fmt.Errorf("mesh.listen %s: %w", m.opts.Listen, err)
	}
	m.transport = newTransport(nt, m.opts.Fleet, &m.counts.bytesIn, &m.counts.bytesOut, func() { m.counts.drop("stream_limit") })
	m.address = netip.AddrPortFrom(chosen.Addr, uint16(nt.GetAutoBindPort())).String()
	m.chosen = chosen.Reason

	conf := memberlist.DefaultLANConfig()
	if m.opts.Local {
		conf = memberlist.DefaultLocalConfig()
	}
	conf.Name, conf.Label = m.opts.Name, m.opts.Fleet
	conf.Transport, conf.Logger, conf.Keyring = m.transport, logger, m.keyring
	conf.BindAddr, conf.BindPort = host, nt.GetAutoBindPort()
	conf.AdvertiseAddr, conf.AdvertisePort = chosen.Addr.String(), nt.GetAutoBindPort()
	conf.UDPBufferSize = packetBytes
	// What fills packets is encrypted or random, and unpacking is one more thing
	// that a member could be made to do.
	conf.EnableCompression = false
	conf.TCPTimeout, conf.DeadNodeReclaimTime = streamTimeout, reclaimAfter
	conf.DelegateProtocolVersion, conf.DelegateProtocolMin, conf.DelegateProtocolMax = Protocol, ProtocolMin, Protocol
	d := &delegate{m}
	conf.Delegate, conf.Events, conf.Conflict, conf.Alive, conf.Ping, conf.Merge = d, d, d, d, d, m.merge
	if m.tune != nil {
		m.tune(conf)
	}
	m.readEvery = min(max(readGap, conf.ProbeInterval), time.Second)
	if m.list, err = memberlist.Create(conf); err != nil {
		return fmt.Errorf("mesh: %w", errors.Join(err, m.transport.Shutdown()))
	}
	m.started.Store(true)
	m.log.Info("mesh member", "name", m.opts.Name, "address", m.address, "chosen", m.chosen, "key", m.currentMeta().KeyID)
	m.wg.Go(m.loop)
	m.wg.Go(m.updateLoop)
	m.joinWg.Go(m.joinLoop)
	return nil
}

// bind opens the sockets. A free TCP port may be taken for UDP, so a port chosen
// by the system is tried a few times.
func bind(conf *memberlist.NetTransportConfig) (nt *memberlist.NetTransport, err error) {
	for range 10 {
		if nt, err = memberlist.NewNetTransport(conf); err == nil || conf.BindPort != 0 {
			return nt, err
		}
	}
	return nil, err
}

// Address returns the advertised address and why it was chosen; empty before Start.
func (m *Mesh) Address() (hostPort, reason string) { return m.address, m.chosen }

// Members returns the list, by name, this process included.
func (m *Mesh) Members() []Member {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.table.members()
}

// JoinStatus tells how joining goes.
type JoinStatus struct {
	Alone   bool // no other member is alive
	Seeds   int  // addresses configured
	Reached int  // of these, answered at the last try
	Since   time.Time
	Error   string // of the last try; empty: somebody answered
}

// String renders the status for people: "alone, 0 of 3 seeds reachable".
func (s JoinStatus) String() string {
	if !s.Alone {
		return "joined"
	}
	return fmt.Sprintf("alone, %d of %d seeds reachable", s.Reached, s.Seeds)
}

// JoinStatus returns how joining goes.
func (m *Mesh) JoinStatus() JoinStatus {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.join
}

func (m *Mesh) currentMeta() Meta {
	m.metaMu.Lock()
	defer m.metaMu.Unlock()
	return m.meta
}

// changeMeta is called with metaMu held.
func (m *Mesh) changeMeta(next Meta) {
	if next == m.meta {
		return
	}
	m.meta = next
	select {
	case m.remeta <- struct{}{}:
	default:
	}
}

// ReloadKeys reads the key file again: new keys decrypt at once, the first one
// encrypts, others are dropped. A bad file changes nothing.
func (m *Mesh) ReloadKeys() error {
	if m.keyring == nil {
		return nil
	}
	keys, err := readKeys(m.opts.KeyFile)
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, k := range keys {
		wanted[string(k)] = true
		if err := m.keyring.AddKey(k); err != nil {
			return fmt.Errorf("mesh.key_file %s: %w", m.opts.KeyFile, err)
		}
	}
	if err := m.keyring.UseKey(keys[0]); err != nil {
		return fmt.Errorf("mesh.key_file %s: %w", m.opts.KeyFile, err)
	}
	for _, k := range m.keyring.GetKeys() {
		if !wanted[string(k)] {
			if err := m.keyring.RemoveKey(k); err != nil {
				return fmt.Errorf("mesh.key_file %s: %w", m.opts.KeyFile, err)
			}
		}
	}
	m.metaMu.Lock()
	defer m.metaMu.Unlock()
	next := m.meta
	next.KeyID = fingerprint(keys[0])
	m.changeMeta(next)
	return nil
}

// MaxSketchBytes is the largest payload that SetSketch takes.
func (m *Mesh) MaxSketchBytes() int {
	return packetBytes - packetOverhead - (2 + len(m.opts.Fleet)) - sketchHead - len(m.opts.Name)
}

// SetSketch gossips a new sketch of this member. It replaces the former one
// everywhere, also where that has not been sent yet.
func (m *Mesh) SetSketch(payload []byte) error {
	if limit := m.MaxSketchBytes(); len(payload) > limit {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrSketchTooBig, len(payload), limit)
	}
	f := sketchFrame{m.opts.Name, m.life, m.sketchSeq.Add(1), append([]byte(nil), payload...)}
	now := time.Now()
	m.sketches.take(f, 0, m.life, true, now)
	m.echoes.sent(f.seq, now)
	m.queue.QueueBroadcast(sketchBroadcast{f.name, f.encode()})
	return nil
}

// Sketches returns the newest sketch of every listed member that has sent one in
// its present life, this process included.
func (m *Mesh) Sketches() []Sketch {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sketches.all(func(name string) (uint32, bool) {
		life, _, ok := m.table.life(name)
		return life, ok
	})
}

// Leave says goodbye and returns when the goodbye is out, or ctx or five seconds
// end. The sockets stay open until Stop.
func (m *Mesh) Leave(ctx context.Context) error {
	m.joinCancel()
	m.joinWg.Wait()
	timeout := m.leaveTimeout
	if d, ok := ctx.Deadline(); ok {
		timeout = max(time.Millisecond, min(timeout, time.Until(d)))
	}
	if err := m.list.Leave(timeout); err != nil {
		return fmt.Errorf("mesh: leave: %w", err)
	}
	return nil
}

// Stop ends the membership without a goodbye: the others take it for lost, which
// is right for a restart. It is called once, after a Start that returned nil.
func (m *Mesh) Stop() error {
	m.mu.Lock()
	again := m.stopped
	m.stopped = true
	m.mu.Unlock()
	if again {
		return nil
	}
	m.cancel()
	m.joinWg.Wait()
	err := m.list.Shutdown()
	m.wg.Wait()
	m.savePeers()
	if m.opts.Registerer != nil {
		m.opts.Registerer.Unregister(m)
	}
	return err
}

// updateLoop tells the others of changes of the description.
func (m *Mesh) updateLoop() {
	for {
		select {
		case <-m.remeta:
		case <-m.ctx.Done():
			return
		}
		if err := m.list.UpdateNode(updateTimeout); err != nil && m.ctx.Err() == nil {
			// The change is in our state and travels with the next exchange.
			m.log.Debug("description not broadcast in time", "error", err)
		}
		select {
		case <-time.After(updatePause):
		case <-m.ctx.Done():
			return
		}
	}
}
