package replica

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"

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
	t.Parallel()
	c := newCluster(t)
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
}

func TestFollowerTakesChanges(t *testing.T) {
	t.Parallel()
	c, n := three(t)
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
}

// TestLeaderDies: writers go on from the other coordinators while the leader is
// killed, again and again; every change that was answered is there at the end,
// once, and every one that was given up is there at most once.
func TestLeaderDies(t *testing.T) {
	t.Parallel()
	c, n := three(t)
	var answered, unknown sync.Map
	var stop atomic.Bool
	var count atomic.Int64
	var writers sync.WaitGroup
	for w := range 3 {
		writers.Go(func() {
			for i := w; !stop.Load(); i += 3 {
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
						t.Errorf("%s lives and did not get change %d through: %v", via.name, i, err)
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
}

func TestAllRestart(t *testing.T) {
	t.Parallel()
	c, n := three(t)
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
}

func TestMinorityRefusesChanges(t *testing.T) {
	t.Parallel()
	c, n := three(t)
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
}

// TestNoLeaderIsSaid: with two of three gone, the third logs it once and serves
// its metrics without inventing an age.
func TestNoLeaderIsSaid(t *testing.T) {
	t.Parallel()
	c, n := three(t)
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
}

func TestStopEndsEverything(t *testing.T) {
	t.Parallel()
	c, n := three(t)
	l := c.leader(n...)
	stranger, err := net.Dial("tcp", l.address)
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
}

func TestRemove(t *testing.T) {
	t.Parallel()
	c, n := three(t)
	l := c.leader(n...)
	var gone, stays *node
	for _, x := range n {
		if x != l && gone == nil {
			gone = x
		} else if x != l {
			stays = x
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := l.RemoveCoordinator(ctx, l.name, "anna"); !errors.Is(err, registry.ErrRefused) || !strings.Contains(err.Error(), "leads") {
		t.Errorf("the leader removed itself: %v", err)
	}
	if err := l.RemoveCoordinator(ctx, "nobody", "anna"); !errors.Is(err, registry.ErrRefused) {
		t.Errorf("somebody unknown was removed: %v", err)
	}
	if err := gone.RemoveCoordinator(ctx, stays.name, "anna"); !errors.Is(err, ErrNotLeader) {
		t.Errorf("a follower removed one: %v", err)
	}
	// With one of three dead, removing a living one would end all changes.
	stays.crash()
	c.eventually("the leader misses it", func() bool { return !l.situation(l.raft).answers(stays.ID()) })
	if err := l.RemoveCoordinator(ctx, gone.name, "anna"); !errors.Is(err, ErrUnsafe) {
		t.Errorf("a removal that leaves no majority: %v", err)
	}
	stays.open(false)
	c.eventually("it answers again", func() bool { return l.situation(l.raft).answers(stays.ID()) })
	if l = c.leader(n...); l == gone {
		gone = n[0]
		if gone == l {
			gone = n[1]
		}
	}
	if err := l.RemoveCoordinator(ctx, gone.name, "anna"); err != nil {
		t.Fatal(err)
	}
	// Two voters are never left: the other becomes a non-voter.
	c.eventually("one voter", func() bool { return l.roles() == "leader nonvoter" })
	propose(t, l, cordon(t, 1))
	// The removed one cannot come back under its id, a new one gets a new number.
	if _, err := l.JoinCluster(ctx, gone.JoinRequest()); !errors.Is(err, registry.ErrRefused) || !strings.Contains(err.Error(), "was removed by anna") {
		t.Errorf("the removed one joined: %v", err)
	}
	gone.crash()
	fresh := c.add(true)
	if number := c.join(fresh, l); number != 4 {
		t.Errorf("the new one has number %d, want 4", number)
	}
	c.eventually("three voters again", func() bool { return l.roles() == "leader voter voter" })
}

func TestNewAddressKeepsTheSeat(t *testing.T) {
	t.Parallel()
	c, n := three(t)
	l := c.leader(n...)
	moved := n[0]
	if moved == l {
		moved = n[1]
	}
	old := moved.address
	moved.crash()
	moved.address = "127.0.0.1:0"
	moved.open(false)
	if moved.address == old {
		t.Fatal("the address did not change")
	}
	if reason := moved.NeedsJoin(); !strings.Contains(reason, old) || !strings.Contains(reason, moved.address) {
		t.Errorf("reason to join: %q", reason)
	}
	c.join(moved, l)
	propose(t, l, cordon(t, 1))
	c.same(n...)
	c.eventually("three voters at their addresses", func() bool {
		for _, m := range l.Members() {
			if m.ID == moved.ID() && m.ClusterAddress != moved.address {
				return false
			}
		}
		return l.roles() == "leader voter voter"
	})
	if moved.NeedsJoin() != "" {
		t.Errorf("it still wants to join: %s", moved.NeedsJoin())
	}
}

func TestSingleCoordinatorMoves(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	a := c.add(true)
	c.leader(a)
	propose(t, a, cordon(t, 1))
	a.crash()
	a.address = "127.0.0.1:0"
	a.open(false)
	c.leader(a)
	c.eventually("catalogue and Raft have the new address", func() bool {
		m := a.Members()
		return len(m) == 1 && m[0].ClusterAddress == a.address && string(a.raft.GetConfiguration().Configuration().Servers[0].Address) == a.address
	})
	b := c.add(true)
	c.join(b, a)
	c.same(a, b)
}

// TestOldStateDoesNotEnterANewCluster: a coordinator that kept state of a lost
// cluster is not taken into one that was made anew; that would roll it back.
func TestOldStateDoesNotEnterANewCluster(t *testing.T) {
	t.Parallel()
	old := newCluster(t)
	a := old.add(true)
	old.leader(a)
	propose(t, a, cordon(t, 1))
	fresh := newCluster(t)
	b := fresh.add(true)
	fresh.leader(b)
	propose(t, b, cordon(t, 2))
	_, err := b.JoinCluster(t.Context(), a.JoinRequest())
	if !errors.Is(err, ErrOtherCluster) || !strings.Contains(err.Error(), a.State().ClusterID()) || !strings.Contains(err.Error(), "empty its state directory") {
		t.Errorf("%v", err)
	}
	fresh.eventually("the new cluster is in order", func() bool { return len(b.State().Coordinators()) > 0 })
	if _, there := b.State().Coordinator(a.ID()); there || len(b.raft.GetConfiguration().Configuration().Servers) != 1 {
		t.Errorf("it is in the new cluster: %+v", b.Members())
	}
}

func TestFollowerFarBehindCatchesUp(t *testing.T) {
	t.Parallel()
	c, n := three(t)
	l := c.leader(n...)
	behind := n[0]
	if behind == l {
		behind = n[1]
	}
	behind.crash()
	// The log it would need is gone on the others.
	trail := raft.ReloadableConfig{TrailingLogs: 10, SnapshotInterval: time.Hour, SnapshotThreshold: 1 << 30, HeartbeatTimeout: 500 * time.Millisecond, ElectionTimeout: 500 * time.Millisecond}
	for i := range 300 {
		propose(t, l, cordon(t, i))
	}
	for _, x := range n {
		if x == behind {
			continue
		}
		if err := x.raft.ReloadConfig(trail); err != nil {
			t.Fatal(err)
		}
		c.eventually(x.name+" has a snapshot", func() bool {
			err := x.raft.Snapshot().Error()
			first, _ := x.stores.logs.FirstIndex()
			return err == nil && first > 100
		})
	}
	behind.open(false)
	c.same(n...)
	if got := len(behind.State().Cordons()); got != 300 {
		t.Errorf("%d cordons", got)
	}
	// And from its own disk.
	hash := behind.State().Hash()
	behind.crash()
	behind.open(false)
	if behind.State().Hash() != hash {
		t.Error("after a restart from the installed snapshot the state is another one")
	}
}

func TestStrangerOnThePort(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	a := c.add(true)
	c.leader(a)
	for _, junk := range []string{"GET / HTTP/1.1\r\n\r\n", "\x00\xdf\xff\xff\xff\xff", "\x05", strings.Repeat("\xff", 4096)} {
		conn, err := net.Dial("tcp", a.address)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(conn, junk)
		conn.Close()
	}
	propose(t, a, cordon(t, 1))
}

func TestOptionsAreChecked(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	base := (&node{c: c, name: "c-1", dir: t.TempDir(), address: "127.0.0.1:0", logs: &recorder{}}).options(true)
	defer base.Listener.Close()
	for want, change := range map[string]func(*Options){
		"dir":             func(o *Options) { o.Dir = "" },
		"name":            func(o *Options) { o.Name = "" },
		"cluster address": func(o *Options) { o.ClusterAddress = "" },
		"cluster_address": func(o *Options) { o.ClusterAddress = "10.0.0.1" },
		"api_address":     func(o *Options) { o.APIAddress = "x" },
		"listener":        func(o *Options) { o.Listener = nil },
		"dial":            func(o *Options) { o.Dial = nil },
		"logger":          func(o *Options) { o.Logger = nil },
		"registerer":      func(o *Options) { o.Registerer = nil },
	} {
		o := base
		change(&o)
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

func TestIdentityIsKept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	id, err := identity(dir, "")
	if err != nil || len(id) != 36 {
		t.Fatalf("%q, %v", id, err)
	}
	if again, err := identity(dir, ""); err != nil || again != id {
		t.Errorf("%q, %v, was %q", again, err, id)
	}
	if _, err := identity(dir, "other"); err == nil || !strings.Contains(err.Error(), "belongs to coordinator "+id) {
		t.Errorf("another identity: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, idFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := identity(dir, ""); !errors.Is(err, ErrDamaged) {
		t.Errorf("an empty identity: %v", err)
	}
	if given, err := identity(t.TempDir(), "given"); err != nil || given != "given" {
		t.Errorf("%q, %v", given, err)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	a := c.add(true)
	reg := a.opts.Registerer.(*prometheus.Registry)
	c.leader(a)
	propose(t, a, command(t, "fleet", registry.PutFleet{TOML: "# one"}))
	got := scrape(t, reg)
	for name, want := range map[string]float64{"waypost_raft_state": 2, "waypost_raft_peers": 1, "waypost_policy_version": 1, "waypost_raft_last_contact_seconds": 0, "waypost_policy_age_seconds": 0} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s is %v (there %v), want %v", name, v, ok, want)
		}
	}
	if got["waypost_raft_term"] < 1 || got["waypost_raft_commit_seconds"] < 1 {
		t.Errorf("term %v, commits %v", got["waypost_raft_term"], got["waypost_raft_commit_seconds"])
	}
	b := c.add(true)
	alone := scrape(t, b.opts.Registerer.(*prometheus.Registry))
	for _, unknown := range []string{"waypost_raft_last_contact_seconds", "waypost_policy_age_seconds"} {
		if v, there := alone[unknown]; there {
			t.Errorf("%s is %v on a coordinator that never heard a leader", unknown, v)
		}
	}
}

// scrape returns gauges by value and histograms by count.
func scrape(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			out[f.GetName()] = m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return out
}

// TestEntriesCountOnce: what the state includes from the start is not applied
// again when Raft hands it over anew.
func TestEntriesCountOnce(t *testing.T) {
	f := newFSM(emptyView(), nil, discard())
	first := &raft.Log{Index: 5, Data: cordon(t, 1)}
	if _, ok := f.Apply(first).(Applied); !ok {
		t.Fatal("a new entry is not applied")
	}
	before := f.now.Load()
	f.Apply(&raft.Log{Index: 4, Data: cordon(t, 2)})
	f.Apply(first)
	if f.now.Load() != before {
		t.Errorf("the state went from %d to %d", before.index, f.now.Load().index)
	}
}
