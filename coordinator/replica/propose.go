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
	// maxProposals bounds the changes under way on one leader.
	maxProposals = 256
	// retryPause is how long a change waits before it is tried again, unless
	// the leader changes first.
	retryPause = 50 * time.Millisecond
)

// Propose makes a change from any coordinator: on the leader itself, elsewhere
// by Options.Forward. cmd is what registry.Encode returned. An unknown outcome
// is tried again with the same bytes until ctx ends, or Timing.Write after the
// call if it has no deadline. The error is nil once the change is in the log of
// a majority; whether the registry took it is in the result.
func (r *Replica) Propose(ctx context.Context, cmd []byte) (Applied, error) {
	return r.propose(ctx, cmd, r.opts.Forward)
}

// ProposeHere makes a change if this coordinator leads; elsewhere it returns a
// *NotLeaderError or ErrNoLeader. It is what the receiving end of a Forwarder
// calls, so that no change is handed round.
func (r *Replica) ProposeHere(ctx context.Context, cmd []byte) (Applied, error) {
	return r.propose(ctx, cmd, nil)
}

func (r *Replica) propose(ctx context.Context, cmd []byte, forward Forwarder) (Applied, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.opts.Timing.Write)
		defer cancel()
	}
	// What no coordinator of this version could apply does not enter the log.
	if _, _, err := registry.Decode(cmd); err != nil {
		return Applied{}, err
	}
	began := time.Now()
	changed, end := r.leaders.subscribe()
	defer end()
	leaderless := began // since when no leader was seen
	var unknown error   // the newest attempt whose outcome is not known
	for {
		node := r.running()
		if node == nil {
			return Applied{}, r.giveUp(unknown, ErrClosed)
		}
		var err error
		leader, known := r.Leader()
		switch {
		case r.IsLeader():
			var done Applied
			if done, err = r.apply(ctx, node, cmd); err == nil {
				r.metrics.committed(time.Since(began))
				return done, nil
			}
		case known && leader.ID != r.id && forward == nil:
			return Applied{}, r.giveUp(unknown, &NotLeaderError{leader.ClusterAddress, leader.Name})
		case known && leader.ID != r.id:
			var done Applied
			if done, err = forward(ctx, leader.ClusterAddress, cmd); err == nil {
				return done, nil
			}
		default:
			err = ErrNoLeader
		}
		switch {
		case errors.Is(err, ErrBusy), errors.Is(err, registry.ErrInvalid), errors.Is(err, registry.ErrUnknownCommand):
			return Applied{}, r.giveUp(unknown, err)
		case errors.Is(err, ErrNoLeader), errors.Is(err, ErrNotSent):
			if forward == nil || time.Since(leaderless) > r.opts.Timing.LeaderWait {
				return Applied{}, r.giveUp(unknown, r.noLeader(time.Since(leaderless)))
			}
		case errors.Is(err, ErrNotLeader):
			leaderless = time.Now() // somebody leads, or did a moment ago
		default:
			unknown, leaderless = err, time.Now()
		}
		select {
		case <-ctx.Done():
			return Applied{}, r.giveUp(unknown, fmt.Errorf("%w: %w", r.noLeader(time.Since(leaderless)), ctx.Err()))
		case <-r.closing:
			return Applied{}, r.giveUp(unknown, ErrClosed)
		case <-changed:
		case <-time.After(retryPause):
		}
	}
}

// giveUp is the error at the end: an unknown outcome outweighs the reason for
// which no further attempt was made.
func (r *Replica) giveUp(unknown, reason error) error {
	if unknown == nil {
		return reason
	}
	if errors.Is(reason, ErrNotLeader) {
		// As text only: matched, it would say that nothing was done.
		reason = errors.New(reason.Error())
	}
	return fmt.Errorf("%w: %w; proposing it again with the same request id is safe (%w)", ErrUnknownOutcome, unknown, reason)
}

// noLeader explains why a change cannot be made.
func (r *Replica) noLeader(waited time.Duration) error {
	if stalled, failed := r.disk.stalledFor(); stalled > r.opts.Timing.DiskStall || failed != nil {
		cause := "it does not answer"
		if failed != nil {
			cause = failed.Error()
		}
		return fmt.Errorf("%w: the disk under %s takes no writes for %s (%s); changes are refused, placements continue", ErrNoLeader, r.opts.Dir, stalled.Round(100*time.Millisecond), cause)
	}
	voters := r.voters()
	if r.Removed() {
		return fmt.Errorf("%w: this coordinator was removed from its cluster; empty %s to join again as a new one", ErrNoLeader, r.opts.Dir)
	}
	if voters == 0 {
		return fmt.Errorf("%w: this coordinator belongs to no cluster yet; it waits to be joined", ErrNoLeader)
	}
	since := ""
	if waited > 0 {
		since = " for " + waited.Round(100*time.Millisecond).String()
	}
	return fmt.Errorf("%w%s: a majority of the %d coordinators that vote is not in reach; changes are refused, placements continue", ErrNoLeader, since, voters)
}

func (r *Replica) voters() int {
	node := r.running()
	if node == nil {
		return 0
	}
	n := 0
	for _, s := range node.GetConfiguration().Configuration().Servers {
		if s.Suffrage == raft.Voter {
			n++
		}
	}
	return n
}

// apply makes a change on this leader. ErrNotLeader means that it was not made;
// other errors leave it open.
func (r *Replica) apply(ctx context.Context, node *raft.Raft, cmd []byte) (Applied, error) {
	type outcome struct {
		done Applied
		err  error
	}
	ended := make(chan outcome, 1)
	select {
	case r.slots <- struct{}{}:
	default:
		return Applied{}, fmt.Errorf("%w: %d; try again", ErrBusy, maxProposals)
	}
	// Raft knows no contexts. The wait ends when the entry is committed, the
	// leadership lost or the replica stopped; the slot bounds how many wait.
	go func() {
		defer func() { <-r.slots }()
		f := node.Apply(cmd, r.opts.Timing.LeaderWait)
		if err := f.Error(); err != nil {
			ended <- outcome{err: err}
			return
		}
		done, ok := f.Response().(Applied)
		if !ok {
			ended <- outcome{err: fmt.Errorf("entry %d gave %T", f.Index(), f.Response())}
			return
		}
		ended <- outcome{done: done}
	}()
	select {
	case o := <-ended:
		switch {
		case errors.Is(o.err, raft.ErrNotLeader), errors.Is(o.err, raft.ErrEnqueueTimeout), errors.Is(o.err, raft.ErrLeadershipTransferInProgress):
			return Applied{}, fmt.Errorf("%w: %w", ErrNotLeader, o.err)
		case o.err != nil:
			return Applied{}, o.err
		}
		return o.done, nil
	case <-ctx.Done():
		return Applied{}, fmt.Errorf("not committed in time: %w", ctx.Err())
	}
}
