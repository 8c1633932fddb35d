package replica

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"

	"waypost/coordinator/registry"
)

func TestRemove(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
		n := c.three()
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
	})
}

func TestNewAddressKeepsTheSeat(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
		n := c.three()
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
	})
}

func TestSingleCoordinatorMoves(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
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
	})
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
	virtual(t, func(t *testing.T, c *cluster) {
		n := c.three()
		l := c.leader(n...)
		behind := n[0]
		if behind == l {
			behind = n[1]
		}
		behind.crash()
		// The log it would need is gone on the others.
		trail := raft.ReloadableConfig{TrailingLogs: 10, SnapshotInterval: time.Hour, SnapshotThreshold: 1 << 30, HeartbeatTimeout: 500 * time.Millisecond, ElectionTimeout: 500 * time.Millisecond}
		for i := range 150 {
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
		if got := len(behind.State().Cordons()); got != 150 {
			t.Errorf("%d cordons", got)
		}
		// And from its own disk.
		hash := behind.State().Hash()
		behind.crash()
		behind.open(false)
		if behind.State().Hash() != hash {
			t.Error("after a restart from the installed snapshot the state is another one")
		}
	})
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
