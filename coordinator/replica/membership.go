package replica

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"waypost/coordinator/registry"
)

const (
	// membershipPoll is how often it is looked whether a wanted membership is
	// there.
	membershipPoll = 20 * time.Millisecond
	// stepTimeout bounds one change of the Raft configuration.
	stepTimeout = 2 * time.Second
	// quorumLostAfter is how many Timing.Heartbeat there may be no leader before
	// it is said: an election takes about three.
	quorumLostAfter = 6
)

// JoinRequest is what a coordinator says to be added.
type JoinRequest struct {
	ID, Name, ClusterAddress, APIAddress string
	// Voter says whether it wishes to vote.
	Voter bool
	// ClusterID is the cluster it has state of; empty if it has none.
	ClusterID string
}

// JoinRequest returns this coordinator's own.
func (r *Replica) JoinRequest() JoinRequest {
	return JoinRequest{
		ID: r.id, Name: r.opts.Name, ClusterAddress: r.opts.ClusterAddress, APIAddress: r.opts.APIAddress,
		Voter: r.opts.Voter, ClusterID: r.State().ClusterID(),
	}
}

// NeedsJoin says why this coordinator should ask the leader of a cluster to add
// it, or to take its new address; empty if there is no need. One that was
// removed from its cluster has none: coming back is the operator's to say.
func (r *Replica) NeedsJoin() string {
	node := r.running()
	if node == nil {
		return ""
	}
	servers := node.GetConfiguration().Configuration().Servers
	if len(servers) == 0 {
		return "it belongs to no cluster yet"
	}
	for _, s := range servers {
		if string(s.ID) == r.id && string(s.Address) != r.opts.ClusterAddress && node.State() != raft.Leader {
			return fmt.Sprintf("the cluster knows it at %s, it is at %s now", s.Address, r.opts.ClusterAddress)
		}
	}
	if c, ok := r.State().Coordinator(r.id); ok && (c.Name != r.opts.Name || c.APIAddress != r.opts.APIAddress) && node.State() != raft.Leader {
		return "its name or API address changed"
	}
	return ""
}

// Removed says whether this coordinator was taken out of its cluster.
func (r *Replica) Removed() bool {
	node := r.running()
	if node == nil {
		return false
	}
	servers := node.GetConfiguration().Configuration().Servers
	for _, s := range servers {
		if string(s.ID) == r.id {
			return false
		}
	}
	return len(servers) > 0
}

// JoinCluster adds a coordinator, as a non-voter first, or takes its new
// address. It returns its number once Raft has it. Asking again changes nothing.
// It works on the leader; elsewhere it returns a *NotLeaderError or ErrNoLeader.
func (r *Replica) JoinCluster(ctx context.Context, req JoinRequest) (number uint32, err error) {
	own, err := r.settledCluster(ctx)
	if err != nil {
		return 0, err
	}
	if req.ClusterID != "" && req.ClusterID != own {
		return 0, fmt.Errorf("%w: %s has the state of cluster %s, this is %s; empty its state directory if it shall give that up", ErrOtherCluster, req.Name, req.ClusterID, own)
	}
	body := registry.RegisterCoordinator{ID: req.ID, Name: req.Name, ClusterAddress: req.ClusterAddress, APIAddress: req.APIAddress, Voter: req.Voter}
	done, err := r.proposeOwn(ctx, body, r.opts.Name)
	if err != nil {
		return 0, err
	}
	if err := done.Result.Err(); err != nil {
		return 0, err
	}
	in := func(servers []raft.Server) bool {
		for _, s := range servers {
			if string(s.ID) == req.ID && string(s.Address) == req.ClusterAddress {
				return true
			}
		}
		return false
	}
	return done.Result.Number, r.waitConfiguration(ctx, in)
}

// settledCluster is the id of the cluster this coordinator leads. A leader that
// has just made the cluster names it in a moment.
func (r *Replica) settledCluster(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, r.opts.Timing.Write)
	defer cancel()
	changed, end := r.Subscribe()
	defer end()
	for {
		if !r.IsLeader() {
			return "", r.elsewhere()
		}
		if id := r.State().ClusterID(); id != "" {
			return id, nil
		}
		select {
		case <-changed:
		case <-time.After(membershipPoll): // the leadership may be lost meanwhile
		case <-ctx.Done():
			return "", fmt.Errorf("the new cluster is not named yet: %w", ctx.Err())
		}
	}
}

// elsewhere says who leads instead of this coordinator.
func (r *Replica) elsewhere() error {
	if leader, known := r.Leader(); known && leader.ID != r.id {
		return &NotLeaderError{leader.ClusterAddress, leader.Name}
	}
	return r.noLeader(0)
}

// RemoveCoordinator takes a coordinator out for good, by id or name. It refuses
// the leader itself, and a step after which no majority would answer. It works
// on the leader only, like JoinCluster.
func (r *Replica) RemoveCoordinator(ctx context.Context, idOrName, by string) error {
	node := r.running()
	switch {
	case node == nil:
		return ErrClosed
	case !r.IsLeader():
		return r.elsewhere()
	}
	var target registry.Coordinator
	for _, c := range r.State().Coordinators() {
		if c.ID == idOrName || c.Name == idOrName {
			target = c
		}
	}
	switch {
	case target.ID == "":
		return fmt.Errorf("%w: no coordinator is named %q", registry.ErrRefused, idOrName)
	case target.ID == r.id:
		return fmt.Errorf("%w: %s leads; stop it, then remove it on another coordinator", registry.ErrRefused, target.Name)
	}
	if s := r.situation(node); !s.removable(target.ID) {
		return fmt.Errorf("%w: of the voters other than %s no majority answers; bring them back first", ErrUnsafe, target.Name)
	}
	done, err := r.proposeOwn(ctx, registry.RemoveCoordinator{ID: target.ID}, by)
	if err != nil {
		return err
	}
	if err := done.Result.Err(); err != nil {
		return err
	}
	return r.waitConfiguration(ctx, func(servers []raft.Server) bool {
		for _, s := range servers {
			if string(s.ID) == target.ID {
				return false
			}
		}
		return true
	})
}

func (s *situation) removable(id string) bool {
	for _, v := range s.voters() {
		if string(v.ID) == id {
			return s.majorityWithout(id)
		}
	}
	return true
}

// proposeOwn makes a change in this coordinator's name, on the leader.
func (r *Replica) proposeOwn(ctx context.Context, body registry.Body, by string) (Applied, error) {
	cmd, err := registry.Encode(registry.Stamp{RequestID: newUUID(), At: time.Now(), By: by, Via: r.opts.Name}, body)
	if err != nil {
		return Applied{}, err
	}
	return r.ProposeHere(ctx, cmd)
}

// waitConfiguration waits until the Raft configuration is as wanted.
func (r *Replica) waitConfiguration(ctx context.Context, wanted func([]raft.Server) bool) error {
	ctx, cancel := context.WithTimeout(ctx, r.opts.Timing.Write)
	defer cancel()
	select {
	case r.reworked <- struct{}{}:
	default:
	}
	poll := time.NewTicker(membershipPoll)
	defer poll.Stop()
	for {
		node := r.running()
		if node == nil {
			return ErrClosed
		}
		if wanted(node.GetConfiguration().Configuration().Servers) {
			return nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return fmt.Errorf("the change is recorded and the leader still works on it: %w", ctx.Err())
		}
	}
}

// lead does the leader's work whenever this replica leads.
func (r *Replica) lead(ctx context.Context) {
	stopWork := func() {}
	defer func() { stopWork() }()
	for {
		select {
		case <-ctx.Done():
			return
		case leads := <-r.raft.LeaderCh():
			// Only the newest value is kept: leading again is leading anew.
			stopWork()
			stopWork = func() {}
			if !leads {
				continue
			}
			r.peers.reset()
			work, cancel := context.WithCancel(ctx)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				r.work(work)
			}()
			stopWork = func() { cancel(); <-ended }
		}
	}
}

// work brings the catalogue and the Raft configuration in order, again and again.
func (r *Replica) work(ctx context.Context) {
	tick := time.NewTicker(r.opts.Timing.Reconcile)
	defer tick.Stop()
	ready := false
	for {
		if !ready {
			if err := r.settle(ctx); err == nil {
				ready = true
			} else if due, left := r.hclog.repeats.pass("settle", time.Now()); due && ctx.Err() == nil {
				r.log.Warn("the new leader cannot put itself into the catalogue yet", "error", err, "repeated", left)
			}
		}
		for ready && r.reconcile(ctx) {
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-r.reworked:
		}
	}
}

// settle applies everything that was committed before this term, then names the
// cluster if it is new and puts this coordinator into the catalogue as it is now.
func (r *Replica) settle(ctx context.Context) error {
	if err := r.raft.Barrier(r.opts.Timing.LeaderWait).Error(); err != nil {
		return err
	}
	if r.State().ClusterID() == "" {
		if err := r.ensure(ctx, registry.InitCluster{ClusterID: newUUID(), Fleet: r.opts.FleetName}); err != nil {
			return err
		}
	}
	self := registry.RegisterCoordinator{ID: r.id, Name: r.opts.Name, ClusterAddress: r.opts.ClusterAddress, APIAddress: r.opts.APIAddress, Voter: r.opts.Voter}
	return r.ensure(ctx, self)
}

func (r *Replica) ensure(ctx context.Context, body registry.Body) error {
	if c, ok := r.State().Coordinator(r.id); ok {
		if want, is := body.(registry.RegisterCoordinator); is && c == (registry.Coordinator{
			Number: c.Number, ID: want.ID, Name: want.Name, ClusterAddress: want.ClusterAddress, APIAddress: want.APIAddress, Voter: want.Voter,
		}) {
			return nil
		}
	}
	done, err := r.proposeOwn(ctx, body, r.opts.Name)
	if err != nil {
		return err
	}
	return done.Result.Err()
}

// situation is what the leader knows now.
func (r *Replica) situation(node *raft.Raft) *situation {
	s := &situation{
		self: r.id, servers: node.GetConfiguration().Configuration().Servers, catalogue: r.State().Coordinators(),
		peers: map[string]follower{}, commit: node.CommitIndex(), freshFor: r.freshFor(),
	}
	for _, v := range s.servers {
		if p, ok := r.peers.get(string(v.ID)); ok {
			s.peers[string(v.ID)] = follower{p.match, time.Since(p.at)}
		}
	}
	return s
}

// reconcile makes one step towards the catalogue and says whether it did.
func (r *Replica) reconcile(ctx context.Context) bool {
	if ctx.Err() != nil {
		return false
	}
	next, ok := plan(r.situation(r.raft))
	if !ok {
		return false
	}
	id, address := raft.ServerID(next.id), raft.ServerAddress(next.address)
	var f raft.IndexFuture
	switch next.kind {
	case stepAddNonvoter:
		f = r.raft.AddNonvoter(id, address, 0, stepTimeout)
	case stepPromote:
		f = r.raft.AddVoter(id, address, 0, stepTimeout)
	case stepReaddress:
		// Both keep what the server is; adding under a known id moves it.
		if next.voter {
			f = r.raft.AddVoter(id, address, 0, stepTimeout)
		} else {
			f = r.raft.AddNonvoter(id, address, 0, stepTimeout)
		}
	case stepDemote:
		f = r.raft.DemoteVoter(id, 0, stepTimeout)
	case stepRemove:
		f = r.raft.RemoveServer(id, 0, stepTimeout)
	}
	name := next.id
	if c, ok := r.State().Coordinator(next.id); ok {
		name = c.Name
	}
	if err := f.Error(); err != nil {
		gone := errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipLost) || errors.Is(err, raft.ErrRaftShutdown)
		if due, left := r.hclog.repeats.pass("step\x00"+string(next.kind)+name, time.Now()); due && !gone {
			r.log.Warn("the Raft configuration could not be changed", "coordinator", name, "step", string(next.kind), "error", err, "repeated", left)
		}
		return false
	}
	r.log.Info("the Raft configuration changed", "coordinator", name, "step", string(next.kind), "voters", r.voters())
	return true
}

// watchLeader wakes those who wait for a leader and says when it changes.
func (r *Replica) watchLeader(ctx context.Context) {
	seen := make(chan raft.Observation, 16)
	observer := raft.NewObserver(seen, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.LeaderObservation)
		return ok
	})
	r.raft.RegisterObserver(observer)
	defer r.raft.DeregisterObserver(observer)
	tick := time.NewTicker(r.opts.Timing.Heartbeat)
	defer tick.Stop()
	var last string
	lost, leaderless := false, time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-seen:
			r.leaders.notify()
		case <-tick.C:
		}
		leader, known := r.Leader()
		switch {
		case known:
			if lost {
				r.log.Info("a leader is there again", "event", "quorum_back", "leader", leader.Name)
			}
			if leader.ID != last {
				r.log.Info("leader", "event", "leader_changed", "leader", leader.Name, "id", leader.ID, "term", r.raft.CurrentTerm())
			}
			last, lost, leaderless = leader.ID, false, time.Now()
		case !lost && time.Since(leaderless) > quorumLostAfter*r.opts.Timing.Heartbeat && r.voters() > 0:
			lost = true
			r.log.Error("no leader", "event", "quorum_lost", "voters", r.voters(), "effect", "placements continue, changes refused")
		}
	}
}
