package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"waypost/coordinator/registry"
)

// Sentinel errors of this package.
var (
	// ErrNoLeader: no leader is known, so no change can be made.
	ErrNoLeader = errors.New("no leader")
	// ErrNotLeader: another coordinator leads; see NotLeaderError.
	ErrNotLeader = errors.New("not the leader")
	// ErrUnknownOutcome: the change may or may not have been made. The same
	// bytes can be proposed again, the request id keeps it from counting twice.
	ErrUnknownOutcome = errors.New("outcome unknown")
	// ErrNotSent: a Forwarder's command cannot have reached the other side.
	ErrNotSent = errors.New("not sent")
	// ErrStateExists: bootstrap was asked for over existing state.
	ErrStateExists = errors.New("state exists")
	// ErrDamaged: the state on disk cannot be read.
	ErrDamaged = errors.New("state on disk is damaged")
	// ErrInUse: another process uses the state directory.
	ErrInUse = errors.New("state directory is in use")
	// ErrOtherCluster: the coordinator belongs to another cluster.
	ErrOtherCluster = errors.New("other cluster")
	// ErrUnsafe: the cluster could not take changes after this one.
	ErrUnsafe = errors.New("would leave the cluster without a majority")
	// ErrBusy: too many changes are under way.
	ErrBusy = errors.New("too many changes under way")
	// ErrClosed: the replica was stopped or not started.
	ErrClosed = errors.New("replica is not running")
)

// NotLeaderError says whom to ask. It matches ErrNotLeader.
type NotLeaderError struct {
	// LeaderAddress is the cluster address of the leader.
	LeaderAddress string
	// LeaderName is empty if the catalogue does not have it yet.
	LeaderName string
}

// Error names the leader.
func (e *NotLeaderError) Error() string {
	return fmt.Sprintf("not the leader; %s at %s is", e.LeaderName, e.LeaderAddress)
}

// Is makes it match ErrNotLeader.
func (e *NotLeaderError) Is(target error) bool { return target == ErrNotLeader }

// Applied is a change that was made.
type Applied struct {
	// Index of the log it was applied at; see WaitApplied.
	Index uint64
	// Result of the registry.
	Result registry.Result
}

// Forwarder hands an encoded command to the coordinator at a cluster address. It
// returns a *NotLeaderError or ErrNoLeader if that one does not lead, ErrNotSent
// if it cannot have got there, and registry.ErrInvalid or ErrUnknownCommand if
// that one cannot read the command, which ends the change; any other error
// counts as an unknown outcome.
type Forwarder func(ctx context.Context, leaderAddress string, cmd []byte) (Applied, error)

// Timing are the time constants of a replica. The zero value of a field stands
// for its default.
type Timing struct {
	// Heartbeat is how long a follower hears nothing before it suspects the
	// leader; the suspicion comes after one to two of them. Default 500 ms: a
	// new leader is there about a second after the old one died.
	Heartbeat time.Duration
	// Election is how long a candidate waits for votes. Default 500 ms.
	Election time.Duration
	// Lease is how long a leader without a majority goes on, at most Heartbeat.
	// Default 400 ms.
	Lease time.Duration
	// Commit is how often an idle leader tells followers how far it is. Default 50 ms.
	Commit time.Duration
	// RPC bounds one exchange between two coordinators. Default 3 s.
	RPC time.Duration
	// Reconcile is how often the leader compares catalogue and configuration.
	// Default 200 ms.
	Reconcile time.Duration
	// Write bounds a change whose caller sets no deadline. Default 10 s.
	Write time.Duration
	// LeaderWait is how long a change waits for a leader. Default 3 s.
	LeaderWait time.Duration
	// DiskStall is how long one write to the log may take before the replica
	// stops speaking as the leader. Default 3 s.
	DiskStall time.Duration
	// SnapshotInterval is how often it is looked whether a snapshot is due.
	// Default 2 min.
	SnapshotInterval time.Duration
	// Transfer bounds handing leadership over when stopping. Default 2 s.
	Transfer time.Duration
}

// snapshotThreshold is the log entries after which a snapshot is due, and
// trailingLogs those kept behind it for followers that lag.
const (
	snapshotThreshold = 2048
	trailingLogs      = 2048
)

func (t Timing) withDefaults() Timing {
	for _, f := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&t.Heartbeat, 500 * time.Millisecond},
		{&t.Election, 500 * time.Millisecond},
		{&t.Lease, 400 * time.Millisecond},
		{&t.Commit, 50 * time.Millisecond},
		{&t.RPC, 3 * time.Second},
		{&t.Reconcile, 200 * time.Millisecond},
		{&t.Write, 10 * time.Second},
		{&t.LeaderWait, 3 * time.Second},
		{&t.DiskStall, 3 * time.Second},
		{&t.SnapshotInterval, 2 * time.Minute},
		{&t.Transfer, 2 * time.Second},
	} {
		if *f.v == 0 {
			*f.v = f.def
		}
	}
	return t
}

// Options describe one replica.
type Options struct {
	// Dir is the state directory; it is made if it is missing.
	Dir string
	// ID is the identity for life. Empty: the one kept in Dir, made at the
	// first start.
	ID string
	// Name is the coordinator's name in the catalogue.
	Name string
	// ClusterAddress is the host:port at which the others reach Listener.
	ClusterAddress string
	// APIAddress is the host:port of the API, for the catalogue; may be empty.
	APIAddress string
	// Voter says whether this coordinator wishes to vote.
	Voter bool
	// Bootstrap makes a new cluster of this coordinator alone. It is an error
	// if Dir holds state already. Without it and without state, the replica
	// waits to be joined to a cluster.
	Bootstrap bool
	// FleetName is what a new cluster's fleet is called. Default "default".
	FleetName string
	// Listener takes the connections of the other replicas; the replica closes it.
	Listener net.Listener
	// Dial connects to the Listener of the replica at a cluster address.
	Dial func(ctx context.Context, address string) (net.Conn, error)
	// Forward reaches the leader from a follower. Nil: Propose on a follower
	// returns a *NotLeaderError.
	Forward Forwarder
	// Logger and Registerer are required.
	Logger     *slog.Logger
	Registerer prometheus.Registerer
	Timing     Timing
}

func (o *Options) check() error {
	for _, f := range []struct {
		name    string
		missing bool
	}{
		{"dir", o.Dir == ""},
		{"name", o.Name == ""},
		{"cluster address", o.ClusterAddress == ""},
		{"listener", o.Listener == nil},
		{"dial", o.Dial == nil},
		{"logger", o.Logger == nil},
		{"registerer", o.Registerer == nil},
	} {
		if f.missing {
			return fmt.Errorf("replica: %s is missing", f.name)
		}
	}
	// The same checks as on the way into the log, but at the start and by name.
	id := o.ID
	if id == "" {
		id = "new"
	}
	_, err := registry.Encode(
		registry.Stamp{RequestID: "check", At: time.Now(), By: o.Name},
		registry.RegisterCoordinator{ID: id, Name: o.Name, ClusterAddress: o.ClusterAddress, APIAddress: o.APIAddress},
	)
	if err != nil {
		return fmt.Errorf("replica: %w", err)
	}
	if o.FleetName == "" {
		o.FleetName = "default"
	}
	o.Timing = o.Timing.withDefaults()
	return nil
}
