package replica

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/prometheus/client_golang/prometheus"
)

// memory is three coordinators over Raft's own transport in memory, for virtual
// time.
type memory struct {
	nodes []*Replica
	nets  []*raft.InmemTransport
	logs  *recorder
}

func newMemory(t *testing.T) *memory {
	m := &memory{logs: &recorder{}}
	log := slog.New(slog.NewTextHandler(m.logs, nil))
	for i := range 3 {
		store := raft.NewInmemStore()
		_, net := raft.NewInmemTransportWithTimeout(raft.ServerAddress(fmt.Sprintf("m%d:1", i)), 500*time.Millisecond)
		o := Options{
			Name: fmt.Sprintf("m%d", i), ClusterAddress: fmt.Sprintf("m%d:1", i), Voter: true, Bootstrap: i == 0, FleetName: "default",
			Logger: log, Registerer: prometheus.NewRegistry(), Forward: m.forward, Timing: Timing{}.withDefaults(),
		}
		r, err := newReplica(o, fmt.Sprintf("id-%d", i), newRaftLogger(log), &stores{
			logs: store, stable: store, snapshots: raft.NewInmemSnapshotStore(), applied: nil, close: func() error { return nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		r.openNet = func() transport { return net }
		m.nodes, m.nets = append(m.nodes, r), append(m.nets, net)
	}
	for i := range m.nets {
		m.connect(i)
	}
	for _, r := range m.nodes {
		if err := r.Start(); err != nil {
			t.Fatal(err)
		}
	}
	a := m.leader(t)
	for _, r := range m.nodes {
		if r != a {
			if _, err := a.JoinCluster(t.Context(), r.JoinRequest()); err != nil {
				t.Fatal(err)
			}
		}
	}
	for a.voters() != 3 {
		time.Sleep(50 * time.Millisecond)
	}
	return m
}

func (m *memory) connect(i int) {
	for j, other := range m.nets {
		if i != j {
			m.nets[i].Connect(other.LocalAddr(), other)
			other.Connect(m.nets[i].LocalAddr(), m.nets[i])
		}
	}
}

func (m *memory) cut(i int) {
	m.nets[i].DisconnectAll()
	for _, other := range m.nets {
		other.Disconnect(m.nets[i].LocalAddr())
	}
}

func (m *memory) forward(ctx context.Context, address string, cmd []byte) (Applied, error) {
	for _, r := range m.nodes {
		if r.opts.ClusterAddress == address {
			return r.ProposeHere(ctx, cmd)
		}
	}
	return Applied{}, ErrNotSent
}

// leader waits, in virtual time, for a leader that is not among the excluded.
func (m *memory) leader(t *testing.T, except ...*Replica) *Replica {
	t.Helper()
	for range 4000 {
	nodes:
		for _, r := range m.nodes {
			for _, e := range except {
				if r == e {
					continue nodes
				}
			}
			if r.IsLeader() {
				return r
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("no leader after 20 s of virtual time\n%s", m.logs)
	return nil
}

func (m *memory) stop(t *testing.T) {
	for _, r := range m.nodes {
		r.opts.Timing.Transfer = time.Millisecond // nobody takes over any more
		if err := r.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}
	time.Sleep(time.Minute) // Raft lets a transfer that nobody answers run out
}

// failoverRounds is how often the leader is cut off; WAYPOST_FAILOVER_ROUNDS asks
// for more.
func failoverRounds() int {
	if n, err := strconv.Atoi(os.Getenv("WAYPOST_FAILOVER_ROUNDS")); err == nil && n > 0 {
		return n
	}
	return 20
}

// TestFailoverInAboutASecond measures, in virtual time, from cutting the leader
// off to another one that takes a change.
func TestFailoverInAboutASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory(t)
		var sum, worst time.Duration
		rounds := failoverRounds()
		for round := range rounds {
			old := m.leader(t)
			i := 0
			for m.nodes[i] != old {
				i++
			}
			m.cut(i)
			began := time.Now()
			next := m.leader(t, old)
			if _, err := next.Propose(t.Context(), cordon(t, round)); err != nil {
				t.Fatal(err)
			}
			took := time.Since(began)
			sum, worst = sum+took, max(worst, took)
			for old.IsLeader() {
				time.Sleep(10 * time.Millisecond)
			}
			term := next.raft.CurrentTerm()
			time.Sleep(2 * time.Minute) // the longer the fault, the longer the pauses between tries, up to 10 s
			m.connect(i)
			for old.State().Hash() != next.State().Hash() {
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(10 * time.Second)
			if got := m.leader(t); got != next || next.raft.CurrentTerm() != term {
				t.Fatalf("round %d: healing the fault made another election: term %d, was %d", round, next.raft.CurrentTerm(), term)
			}
		}
		t.Logf("failover: mean %v, worst %v of %d", sum/time.Duration(rounds), worst, rounds)
		if mean := sum / time.Duration(rounds); mean > 1200*time.Millisecond {
			t.Errorf("mean failover takes %v", mean)
		}
		if worst > 3*time.Second {
			t.Errorf("worst failover takes %v", worst)
		}
		m.stop(t)
	})
}

// TestPreVoteKeepsTheLeader: one that was cut off for long does not end the term
// of the others when it returns; its own term did not run away.
func TestPreVoteKeepsTheLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory(t)
		l := m.leader(t)
		i := 0
		for m.nodes[i] == l {
			i++
		}
		term := l.raft.CurrentTerm()
		m.cut(i)
		time.Sleep(10 * time.Minute)
		if got := m.nodes[i].raft.CurrentTerm(); got != term {
			t.Errorf("cut off, its term went from %d to %d: the pre-vote is off", term, got)
		}
		m.connect(i)
		time.Sleep(time.Minute)
		if m.leader(t) != l || l.raft.CurrentTerm() != term {
			t.Errorf("term %d, was %d", l.raft.CurrentTerm(), term)
		}
		m.stop(t)
	})
}

// TestStopHandsOver: a leader that is stopped leaves another one behind, without
// the time it takes to miss it.
func TestStopHandsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory(t)
		l := m.leader(t)
		began := time.Now()
		if err := l.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		next := m.leader(t, l)
		if took := time.Since(began); took > l.opts.Timing.Heartbeat/2 {
			t.Errorf("the next leader is there after %v, it was not handed over", took)
		}
		if _, err := next.Propose(t.Context(), cordon(t, 1)); err != nil {
			t.Error(err)
		}
		m.stop(t)
	})
}

// TestPolicyAge: followers know the age of what they have, and a leader without
// a majority does not pass for a fresh one.
func TestPolicyAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory(t)
		l := m.leader(t)
		time.Sleep(time.Second)
		for _, r := range m.nodes {
			if age, known := r.LastContact(); !known || age > 200*time.Millisecond {
				t.Errorf("%s: age %v, known %v", r.opts.Name, age, known)
			}
		}
		i := 0
		for m.nodes[i] != l {
			i++
		}
		m.cut(i)
		time.Sleep(300 * time.Millisecond) // within its lease
		if age, known := l.LastContact(); !l.IsLeader() || !known || age < 250*time.Millisecond {
			t.Errorf("leads %v: age %v, known %v", l.IsLeader(), age, known)
		}
		time.Sleep(10 * time.Minute)
		if age, known := l.LastContact(); known && age < 9*time.Minute {
			t.Errorf("after ten minutes alone its policy is %v old", age)
		}
		m.stop(t)
	})
}
