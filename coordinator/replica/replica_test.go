package replica

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"waypost/coordinator/registry"
)

func TestOneCoordinator(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	a := c.add(true)
	c.leader(a)
	changed, end := a.Subscribe()
	defer end()
	done := propose(t, a, cordon(t, 1))
	<-changed
	if a.AppliedIndex() < done.Index || len(a.State().CordonsFor("host-000001/e/0", "", nil)) != 1 {
		t.Errorf("applied %d of %d, cordons %v", a.AppliedIndex(), done.Index, a.State().Cordons())
	}
	c.eventually("it is in the catalogue", func() bool {
		self, ok := a.State().Coordinator(a.ID())
		return ok && self.Number == 1 && self.Name == "c-1" && self.ClusterAddress == a.address && a.State().ClusterID() != "" && a.State().FleetName() == "default"
	})
	if age, known := a.LastContact(); !known || age != 0 {
		t.Errorf("a majority of one answered %v ago, known %v", age, known)
	}
	if reason := a.NeedsJoin(); reason != "" {
		t.Errorf("the only coordinator wants to join: %s", reason)
	}
	// A conflict is a result, not an error.
	res, err := a.Propose(t.Context(), command(t, "late", registry.PutFleet{BaseVersion: 4}))
	if err != nil || !errors.Is(res.Result.Err(), registry.ErrConflict) {
		t.Errorf("%+v, %v", res, err)
	}
	// What nobody could apply does not enter the log.
	last := a.raft.LastIndex()
	for _, bad := range []string{"", "\x02{}", "\x01{}", "\x01" + `{"kind":"?","request_id":"1","at_ms":0,"by":"a","body":{}}`} {
		if _, err := a.Propose(t.Context(), []byte(bad)); !errors.Is(err, registry.ErrInvalid) && !errors.Is(err, registry.ErrUnknownCommand) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if a.raft.LastIndex() != last {
		t.Error("an unreadable command is in the log")
	}
}

func TestBootstrapIsRefusedOverState(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	a := c.add(true)
	c.leader(a)
	c.eventually("it is in the catalogue", func() bool { _, ok := a.State().Coordinator(a.ID()); return ok })
	propose(t, a, cordon(t, 1))
	id, hash := a.ID(), a.State().Hash()
	a.crash()
	o := a.options(true)
	_, err := New(o)
	if !errors.Is(err, ErrStateExists) || !strings.Contains(err.Error(), a.dir) || !strings.Contains(err.Error(), id) {
		t.Fatalf("bootstrap over state: %v", err)
	}
	o.Listener.Close()
	a.open(false)
	if a.ID() != id {
		t.Errorf("identity %s, was %s", a.ID(), id)
	}
	c.leader(a)
	if a.State().Hash() != hash {
		t.Error("the state is another one")
	}
}

func TestWaitsToBeJoined(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.add(true)
	b := c.add(true)
	if reason := b.NeedsJoin(); !strings.Contains(reason, "belongs to no cluster") {
		t.Errorf("reason to join: %q", reason)
	}
	_, err := b.ProposeHere(t.Context(), cordon(t, 1))
	if !errors.Is(err, ErrNoLeader) || !strings.Contains(err.Error(), "waits to be joined") {
		t.Errorf("a change without a cluster: %v", err)
	}
	if _, known := b.LastContact(); known {
		t.Error("it heard from a leader that is not there")
	}
}

// TestVotersComeInPairs: the second coordinator stays a non-voter, the third
// makes both voters, the fourth waits for the fifth, a sixth never votes, and
// one that does not wish to vote never does.
func TestVotersComeInPairs(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
		a := c.add(true)
		wantNumber := uint32(1)
		join := func(voter bool) {
			wantNumber++
			n := c.add(voter)
			if number := c.join(n, a); number != wantNumber {
				t.Errorf("%s has number %d, want %d", n.name, number, wantNumber)
			}
			if again := c.join(n, a); again != wantNumber {
				t.Errorf("%s joined again as %d", n.name, again)
			}
			// Everything is where the leader knows it to be, so that what does not
			// happen next does not happen for another reason.
			c.eventually(n.name+" has the log", func() bool { return n.State().Hash() == a.State().Hash() })
		}
		settled := func(want string) {
			t.Helper()
			c.eventually(want, func() bool { return a.roles() == want })
			if next, ok := plan(a.situation(a.raft)); ok {
				// The plan may have been made before the last peer was heard.
				c.eventually("nothing to do", func() bool { next, ok = plan(a.situation(a.raft)); return !ok })
				if a.roles() != want {
					t.Errorf("after %+v the roles are %q, want %q", next, a.roles(), want)
				}
			}
		}
		c.leader(a)
		settled("leader")
		join(true)
		settled("leader nonvoter")
		join(false)
		settled("leader nonvoter nonvoter")
		join(true)
		settled("leader voter voter nonvoter")
		join(true)
		settled("leader voter voter nonvoter nonvoter")
		join(true)
		settled("leader voter voter voter voter nonvoter")
		for _, m := range a.Members() {
			if m.Name == "c-3" && m.Role != "nonvoter" {
				t.Errorf("c-3 did not wish to vote and is %s", m.Role)
			}
			if !m.Self && (!m.LastContactKnown || m.MatchIndex == 0) {
				t.Errorf("the leader knows nothing of %s: %+v", m.Name, m)
			}
		}
	})
}

func TestFollowerTakesChanges(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
		n := c.three()
		l := c.leader(n...)
		for i, follower := range n {
			if follower == l {
				continue
			}
			done := propose(t, follower, cordon(t, i))
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			for _, other := range n {
				if err := other.WaitApplied(ctx, done.Index); err != nil {
					t.Errorf("%s: %v", other.name, err)
				}
				if len(other.State().CordonsFor(fmt.Sprintf("host-%06d/e/0", i), "", nil)) != 1 {
					t.Errorf("%s has applied %d and not the cordon", other.name, done.Index)
				}
			}
			_, err := follower.ProposeHere(ctx, cordon(t, i+10))
			var nl *NotLeaderError
			if !errors.As(err, &nl) || nl.LeaderAddress != l.address || nl.LeaderName != l.name || !errors.Is(err, ErrNotLeader) {
				t.Errorf("%s: %v, want it to name %s at %s", follower.name, err, l.name, l.address)
			}
			if age, known := follower.LastContact(); !known || age > patience {
				t.Errorf("%s heard from the leader %v ago, known %v", follower.name, age, known)
			}
		}
		// A request id counts once, wherever it is proposed.
		one := propose(t, n[0], cordon(t, 99))
		for _, other := range n[1:] {
			again := propose(t, other, cordon(t, 99))
			if !again.Result.Duplicate || again.Result.Revision != one.Result.Revision {
				t.Errorf("%s made it again: %+v, first %+v", other.name, again.Result, one.Result)
			}
		}
		// A leader that cannot read the command ends the change, it is not retried.
		for _, other := range n {
			if other != l {
				tries := 0
				_, err := other.propose(t.Context(), cordon(t, 50), func(context.Context, string, []byte) (Applied, error) {
					tries++
					return Applied{}, registry.ErrUnknownCommand
				})
				if !errors.Is(err, registry.ErrUnknownCommand) || tries != 1 {
					t.Errorf("%s tried %d times: %v", other.name, tries, err)
				}
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := n[0].WaitApplied(ctx, 1<<40); !errors.Is(err, context.Canceled) {
			t.Errorf("waiting for the future: %v", err)
		}
	})
}

// TestLeaderDies: writers go on from the other coordinators while the leader is
// killed, again and again; every change that was answered is there at the end,
// once, and every one that was given up is there at most once.
func TestLeaderDies(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
		n := c.three()
		var answered, unknown sync.Map
		var stop atomic.Bool
		var count atomic.Int64
		var writers sync.WaitGroup
		for w := range 3 {
			writers.Go(func() {
				for i := w; !stop.Load(); i += 3 {
					time.Sleep(5 * time.Millisecond) // the registry holds 4096 cordons
					// A writer at a dead coordinator goes to the next one.
					for k := 0; ; k++ {
						via := n[(w+k)%3]
						c.mu.Lock()
						r := via.Replica
						c.mu.Unlock()
						ctx, cancel := context.WithTimeout(context.Background(), patience)
						done, err := r.Propose(ctx, cordon(t, i))
						cancel()
						if err == nil && done.Result.Err() == nil {
							answered.Store(i, true)
							count.Add(1)
							break
						}
						select {
						case <-r.closing:
						default:
							t.Errorf("%s lives and did not get change %d through: %v", via.name, i, errors.Join(err, done.Result.Err()))
						}
						unknown.Store(i, true)
						if stop.Load() {
							return
						}
					}
				}
			})
		}
		progress := func(what string) {
			from := count.Load()
			c.eventually(what, func() bool { return count.Load() >= from+30 })
		}
		progress("writes before")
		for round := range 3 {
			l := c.leader(n...)
			l.crash()
			progress(fmt.Sprintf("writes after %s died, round %d", l.name, round))
			l.isolate(false)
			fresh := &node{c: c, name: l.name, dir: l.dir, address: l.address, voter: true, logs: l.logs}
			fresh.open(false)
			c.mu.Lock()
			l.Replica = fresh.Replica
			c.mu.Unlock()
			progress("writes after it returned")
		}
		stop.Store(true)
		writers.Wait()
		c.same(n...)
		made := map[string]int{}
		for _, cordon := range n[0].State().Cordons() {
			made[cordon.Selector]++
		}
		changes := map[string]int{}
		for _, a := range n[0].State().Audit(registry.AuditEntries) {
			if a.Kind == registry.KindSetCordon {
				changes[a.Detail]++
			}
		}
		lost := 0
		answered.Range(func(i, _ any) bool {
			if made[fmt.Sprintf("host-%06d", i)] == 0 {
				lost++
			}
			return true
		})
		for detail, times := range changes {
			if times != 1 {
				t.Errorf("%q was made %d times", detail, times)
			}
		}
		if total := count.Load(); lost > 0 || total < 100 {
			t.Errorf("%d of %d answered changes are lost", lost, total)
		}
		t.Logf("%d changes answered over 3 deaths of the leader, %d lost", count.Load(), lost)
	})
}

func TestAllRestart(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
		n := c.three()
		for i := range 20 {
			propose(t, n[i%3], cordon(t, i))
		}
		c.same(n...)
		hash := n[0].State().Hash()
		for _, x := range n {
			x.crash()
		}
		// In another order; and the first one alone still has what it had.
		n[2].open(false)
		if n[2].State().Hash() != hash {
			t.Errorf("alone after the restart it has %d of 20 cordons", len(n[2].State().Cordons()))
		}
		if _, known := n[2].Leader(); known {
			t.Error("one of three has a leader")
		}
		n[0].open(false)
		n[1].open(false)
		c.leader(n...)
		c.same(n...)
		if n[0].State().Hash() != hash {
			t.Error("the state after the restart is another one")
		}
		propose(t, n[1], cordon(t, 100))
		if got := c.leader(n...).roles(); got != "leader voter voter" {
			t.Errorf("roles %q", got)
		}
	})
}

func TestMinorityRefusesChanges(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
		n := c.three()
		propose(t, n[0], cordon(t, 1))
		c.same(n...)
		l := c.leader(n...)
		var rest []*node
		for _, x := range n {
			if x != l {
				rest = append(rest, x)
			}
		}
		l.isolate(true)
		next := c.leader(rest...)
		if next == l {
			t.Fatal("the leader that was cut off leads on")
		}
		c.eventually("the old leader steps down", func() bool { return !l.IsLeader() })
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := l.Propose(ctx, cordon(t, 2))
		if !errors.Is(err, ErrNoLeader) || errors.Is(err, ErrUnknownOutcome) || !strings.Contains(err.Error(), "majority of the 3 coordinators") || !strings.Contains(err.Error(), "placements continue") {
			t.Errorf("a change on the minority side: %v", err)
		}
		// It still has what it had, and says since when it is on its own.
		if len(l.State().CordonsFor("host-000001/e/0", "", nil)) != 1 {
			t.Error("the minority side forgot a cordon")
		}
		if _, known := l.LastContact(); !known {
			t.Error("it does not say since when it is on its own")
		}
		propose(t, rest[0], cordon(t, 3))
		l.isolate(false)
		c.leader(n...)
		c.same(n...)
		if got := len(n[0].State().Cordons()); got != 2 {
			t.Errorf("%d cordons, want the two that were answered", got)
		}
	})
}

// TestNoLeaderIsSaid: with two of three gone, the third logs it once and serves
// its metrics without inventing an age.
func TestNoLeaderIsSaid(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
		n := c.three()
		l := c.leader(n...)
		var last *node
		for _, x := range n {
			if x != l && last == nil {
				last = x
				continue
			}
			x.crash()
		}
		c.eventually("quorum_lost is logged", func() bool { return strings.Contains(last.logs.String(), "event=quorum_lost voters=3") })
		_, err := last.ProposeHere(t.Context(), cordon(t, 1))
		if !errors.Is(err, ErrNoLeader) {
			t.Errorf("%v", err)
		}
		l.open(false)
		c.eventually("quorum_back is logged", func() bool { return strings.Contains(last.logs.String(), "event=quorum_back") })
		if n := strings.Count(last.logs.String(), "event=quorum_lost"); n != 1 {
			t.Errorf("quorum_lost is logged %d times", n)
		}
	})
}

func TestStopEndsEverything(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
		n := c.three()
		l := c.leader(n...)
		stranger, err := c.connect(t.Context(), l.address)
		if err != nil {
			t.Fatal(err)
		}
		defer stranger.Close()
		fmt.Fprint(stranger, "\x03")
		if err := l.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := l.Stop(t.Context()); err != nil {
			t.Errorf("a second stop: %v", err)
		}
		var rest []*node
		for _, x := range n {
			if x != l {
				rest = append(rest, x)
			}
		}
		c.leader(rest...)
		stranger.SetReadDeadline(time.Now().Add(patience))
		if _, err := stranger.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a connection outlives the replica: %v", err)
		}
		if _, err := l.Propose(t.Context(), cordon(t, 1)); !errors.Is(err, ErrClosed) {
			t.Errorf("a change after the stop: %v", err)
		}
		if l.Members() != nil || l.IsLeader() || l.Start() == nil {
			t.Error("a stopped replica acts as if it ran")
		}
		propose(t, rest[0], cordon(t, 2))
	})
}
