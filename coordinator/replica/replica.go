package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"waypost/coordinator/registry"
)

// Replica is one coordinator's copy of the registry and its part in Raft.
type Replica struct {
	opts    Options
	id      string
	log     *slog.Logger
	hclog   *raftLogger
	stores  *stores
	disk    *diskWatch
	fsm     *fsm
	peers   *progress
	net     transport
	metrics *metrics

	// openNet makes the transport; tests speak through memory.
	openNet func() transport

	slots    chan struct{} // changes in Raft's hands
	leaders  notifier      // the leader changed
	reworked chan struct{} // the catalogue may differ from the configuration

	startMu sync.Mutex
	raft    *raft.Raft
	started chan struct{} // closed once raft is set
	closing chan struct{}
	stop    sync.Once
	stopErr error
	cancel  context.CancelFunc
	loops   sync.WaitGroup
}

// New opens the state directory and reads the state in it. It starts nothing and
// takes the listener only if it succeeds. Errors are ErrInUse, ErrDamaged,
// ErrStateExists or name the option that is wrong.
func New(o Options) (*Replica, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w", err)
	}
	id, err := identity(o.Dir, o.ID)
	if err != nil {
		return nil, err
	}
	hc := newRaftLogger(o.Logger)
	var s *stores
	err = guardDamage(o.Dir, func() (err error) { s, err = openStores(o.Dir, hc); return err })
	if err != nil {
		return nil, err
	}
	r, err := newReplica(o, id, hc, s)
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return r, nil
}

// newReplica builds a replica on stores that are open.
func newReplica(o Options, id string, hc *raftLogger, s *stores) (*Replica, error) {
	exists, err := raft.HasExistingState(s.logs, s.stable, s.snapshots)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrDamaged, o.Dir, err)
	}
	if exists && o.Bootstrap {
		return nil, fmt.Errorf("%w: %s holds the state of coordinator %s already; start without bootstrap to go on with it, or empty it to give it up", ErrStateExists, o.Dir, id)
	}
	start, err := s.load(o.Dir)
	if err != nil {
		return nil, err
	}
	r := &Replica{
		opts: o, id: id, log: o.Logger, hclog: hc, stores: s,
		disk: newDiskWatch(), peers: newProgress(),
		slots: make(chan struct{}, maxProposals), reworked: make(chan struct{}, 1),
		started: make(chan struct{}), closing: make(chan struct{}),
	}
	r.fsm = newFSM(start, s.applied, o.Logger)
	r.openNet = func() transport {
		return raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
			Stream:  &streams{listener: o.Listener, dial: o.Dial, advertise: o.ClusterAddress, conns: map[*trackedConn]struct{}{}},
			MaxPool: 3, MaxRPCsInFlight: 1, Timeout: o.Timing.RPC, Logger: hc,
		})
	}
	if r.metrics, err = newMetrics(r, o.Registerer); err != nil {
		return nil, err
	}
	return r, nil
}

// Start joins in. The replica runs until Stop.
func (r *Replica) Start() error {
	r.startMu.Lock()
	defer r.startMu.Unlock()
	select {
	case <-r.closing:
		return ErrClosed
	case <-r.started:
		return errors.New("replica: it was started already")
	default:
	}
	t := r.opts.Timing
	conf := raft.DefaultConfig()
	conf.LocalID = raft.ServerID(r.id)
	conf.HeartbeatTimeout, conf.ElectionTimeout, conf.LeaderLeaseTimeout, conf.CommitTimeout = t.Heartbeat, t.Election, t.Lease, t.Commit
	conf.SnapshotInterval, conf.SnapshotThreshold, conf.TrailingLogs = t.SnapshotInterval, snapshotThreshold, trailingLogs
	conf.Logger = r.hclog
	conf.NoLegacyTelemetry = true
	conf.NoSnapshotRestoreOnStart = true // New has read it, and the log behind it
	conf.ShutdownOnRemove = false        // a removed coordinator says so instead of vanishing

	logs, err := raft.NewLogCache(cachedLogs, watchedLogs{r.stores.logs, r.disk})
	if err != nil {
		return fmt.Errorf("log cache: %w", err)
	}
	stable := watchedStable{r.stores.stable, r.disk, r.log, r.closing}
	r.net = &observed{transport: r.openNet(), peers: r.peers, disk: r.disk, diskStall: t.DiskStall}
	if r.opts.Bootstrap {
		self := raft.Server{Suffrage: raft.Voter, ID: conf.LocalID, Address: raft.ServerAddress(r.opts.ClusterAddress)}
		if err := raft.BootstrapCluster(conf, logs, stable, r.stores.snapshots, r.net, raft.Configuration{Servers: []raft.Server{self}}); err != nil {
			return errors.Join(fmt.Errorf("bootstrap: %w", err), r.net.Close())
		}
	}
	node, err := raft.NewRaft(conf, r.fsm, logs, stable, r.stores.snapshots, r.net)
	if err != nil {
		return errors.Join(fmt.Errorf("%w: %s: %w", ErrDamaged, r.opts.Dir, err), r.net.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.raft, r.cancel = node, cancel
	close(r.started)
	r.loops.Go(func() { r.watchLeader(ctx) })
	r.loops.Go(func() { r.lead(ctx) })
	return nil
}

// running returns Raft, or nil before Start and after Stop.
func (r *Replica) running() *raft.Raft {
	select {
	case <-r.closing:
		return nil
	default:
	}
	select {
	case <-r.started:
		return r.raft
	default:
		return nil
	}
}

// Stop hands leadership over, once, to a follower that answers, and ends
// everything. ctx bounds the wait for a disk that hangs. Further calls return
// the first one's error.
func (r *Replica) Stop(ctx context.Context) error {
	r.stop.Do(func() { r.stopErr = r.shutdown(ctx) })
	return r.stopErr
}

func (r *Replica) shutdown(ctx context.Context) error {
	node := r.running()
	if node != nil && node.State() == raft.Leader {
		r.handOver(node)
	}
	r.hclog.repeats.closing.Store(true)
	r.startMu.Lock()
	close(r.closing)
	r.startMu.Unlock()
	defer r.metrics.unregister()
	if node == nil {
		return errors.Join(r.opts.Listener.Close(), r.stores.close())
	}
	r.cancel()
	done := make(chan error, 1)
	go func() {
		// The network first: an exchange with a peer that does not answer would
		// hold Raft until its timeout.
		ended := node.Shutdown()
		err := r.net.Close()
		err = errors.Join(err, ended.Error())
		r.loops.Wait()
		done <- errors.Join(err, r.stores.close())
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("replica: the disk or a peer still holds it: %w", ctx.Err())
	}
}

// handOver makes the voter that is furthest and answers the leader. It is tried
// once: without it, the others elect a leader after they miss this one.
func (r *Replica) handOver(node *raft.Raft) {
	var best raft.Server
	var bestMatch uint64
	for _, s := range node.GetConfiguration().Configuration().Servers {
		p, ok := r.peers.get(string(s.ID))
		if s.Suffrage == raft.Voter && string(s.ID) != r.id && ok && time.Since(p.at) <= r.freshFor() && p.match > bestMatch {
			best, bestMatch = s, p.match
		}
	}
	if bestMatch == 0 {
		return
	}
	done := make(chan error, 1)
	go func() { done <- node.LeadershipTransferToServer(best.ID, best.Address).Error() }()
	select {
	case err := <-done:
		if err != nil {
			r.log.Info("leadership was not handed over; the others elect a leader", "to", best.ID, "error", err)
		}
	case <-time.After(r.opts.Timing.Transfer):
	}
}

// freshFor is the age up to which a follower counts as answering.
func (r *Replica) freshFor() time.Duration { return 2 * r.opts.Timing.Heartbeat }

// ID is the identity for life.
func (r *Replica) ID() string { return r.id }

// State is the registry as far as the log is applied here. It never changes;
// call again for a newer one.
func (r *Replica) State() *registry.State { return r.fsm.now.Load().state }

// AppliedIndex is the index of the last change applied here.
func (r *Replica) AppliedIndex() uint64 { return r.fsm.now.Load().index }

// Subscribe returns a channel that gets a value after the state changed, and the
// function that ends it. Changes that come before the reader looks are one value.
func (r *Replica) Subscribe() (<-chan struct{}, func()) { return r.fsm.changed.subscribe() }

// WaitApplied returns once the change at an index (of an Applied) is applied
// here, or with the error of ctx.
func (r *Replica) WaitApplied(ctx context.Context, index uint64) error {
	changed, end := r.fsm.changed.subscribe()
	defer end()
	for r.AppliedIndex() < index {
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("applied up to %d, waiting for %d: %w", r.AppliedIndex(), index, ctx.Err())
		case <-r.closing:
			return ErrClosed
		}
	}
	return nil
}

// IsLeader says whether this coordinator leads and can write.
func (r *Replica) IsLeader() bool {
	node := r.running()
	return node != nil && node.State() == raft.Leader && !r.diskStalled()
}

func (r *Replica) diskStalled() bool {
	stalled, _ := r.disk.stalledFor()
	return stalled > r.opts.Timing.DiskStall
}

// DiskStalledFor is how long the write to the log under way has taken; 0 if
// there is none.
func (r *Replica) DiskStalledFor() time.Duration {
	stalled, _ := r.disk.stalledFor()
	return stalled
}

// Leader returns the leader, false if none is known. Name and API address are
// empty while the catalogue does not have it.
func (r *Replica) Leader() (registry.Coordinator, bool) {
	node := r.running()
	if node == nil {
		return registry.Coordinator{}, false
	}
	address, id := node.LeaderWithID()
	if address == "" {
		return registry.Coordinator{}, false
	}
	c, ok := r.State().Coordinator(string(id))
	if !ok {
		c = registry.Coordinator{ID: string(id)}
	}
	c.ClusterAddress = string(address)
	return c, true
}

// LastContact is how long ago this coordinator last heard from a leader, false
// if never. For the leader itself it is how long ago a majority answered.
func (r *Replica) LastContact() (time.Duration, bool) {
	node := r.running()
	if node == nil {
		return 0, false
	}
	if node.State() == raft.Leader {
		return r.majorityAge(node)
	}
	at := node.LastContact()
	if at.IsZero() {
		return 0, false
	}
	return time.Since(at), true
}

// majorityAge is the age of the answer that completes a majority.
func (r *Replica) majorityAge(node *raft.Raft) (time.Duration, bool) {
	var ages []time.Duration
	voters := 0
	for _, s := range node.GetConfiguration().Configuration().Servers {
		if s.Suffrage != raft.Voter {
			continue
		}
		voters++
		if string(s.ID) == r.id {
			ages = append(ages, 0)
		} else if p, ok := r.peers.get(string(s.ID)); ok {
			ages = append(ages, time.Since(p.at))
		}
	}
	if len(ages) <= voters/2 {
		return 0, false
	}
	slices.Sort(ages)
	return ages[voters/2], true
}

// Member is one coordinator as this one sees it.
type Member struct {
	registry.Coordinator
	// Role is leader, voter or nonvoter; empty if Raft does not have it yet.
	Role string
	// Self says that it is the one asked.
	Self bool
	// MatchIndex is the log index known to be there, the leader's own included;
	// only the leader knows it.
	MatchIndex uint64
	// LastContact is how long ago it answered the leader, false if unknown; only
	// the leader knows it.
	LastContact      time.Duration
	LastContactKnown bool
}

// Members are the coordinators of catalogue and Raft configuration, by number,
// those without one last.
func (r *Replica) Members() []Member {
	node := r.running()
	if node == nil {
		return nil
	}
	_, leader := node.LeaderWithID()
	leading := node.State() == raft.Leader
	members := map[string]*Member{}
	var out []*Member
	for _, c := range r.State().Coordinators() {
		m := &Member{Coordinator: c, Self: c.ID == r.id}
		members[c.ID], out = m, append(out, m)
	}
	for _, s := range node.GetConfiguration().Configuration().Servers {
		id := string(s.ID)
		m := members[id]
		if m == nil {
			m = &Member{Coordinator: registry.Coordinator{ID: id, ClusterAddress: string(s.Address)}, Self: id == r.id}
			out = append(out, m)
		}
		switch {
		case s.ID == leader:
			m.Role = "leader"
		case s.Suffrage == raft.Voter:
			m.Role = "voter"
		default:
			m.Role = "nonvoter"
		}
		if p, ok := r.peers.get(id); ok && leading {
			m.MatchIndex, m.LastContact, m.LastContactKnown = p.match, time.Since(p.at), true
		}
		if leading && m.Self {
			m.MatchIndex, m.LastContactKnown = node.LastIndex(), true
		}
	}
	list := make([]Member, len(out))
	for i, m := range out {
		list[i] = *m
	}
	return list
}
