package coordinator

import (
	"fmt"
	"math"
	"testing"
	"time"

	waypostv1 "waypost/proto/waypost/v1"
)

// What is kept of a host goes when the fleet forgets the host.
func TestStreamsOfForgottenHostsAreGivenUp(t *testing.T) {
	c := startOne(t)
	words := newCache(1)
	words.grow(8)
	a := &fakeAgent{workers: 1, pulled: func(*waypostv1.PrefixPull) [][]byte { return words.snapshot() }}
	a.start(t, c)
	held := func() (hosts, streams, bytes int) {
		hosts, streams, bytes = c.views.Size()
		c.lanes.mu.Lock()
		defer c.lanes.mu.Unlock()
		return hosts + len(c.lanes.hosts), streams, bytes
	}
	eventually(t, "the stream", func() bool { hosts, streams, bytes := held(); return hosts == 2 && streams == 1 && bytes > 0 })
	c.lanes.forget() // the host is there: nothing goes
	c.views.Forget()
	if hosts, streams, _ := held(); hosts != 2 || streams != 1 {
		t.Fatalf("%d entries, %d streams of a host that is there", hosts, streams)
	}
	a.dialer.Close()
	eventually(t, "the lane is down", func() bool { return c.lanes.session("gpu-01") == nil })
	c.fleet.Tick(time.Now().Add(25 * time.Hour))
	eventually(t, "all is given up", func() bool { hosts, streams, bytes := held(); return hosts+streams+bytes == 0 })
	// It may come back.
	again := &fakeAgent{workers: 1, pulled: a.pulled}
	again.start(t, c)
	eventually(t, "the stream again", func() bool { _, streams, bytes := held(); return streams == 1 && bytes > 0 })
}

// Coordinators that are replaced for years leave room for the next one.
func TestConnectionsToReplacedCoordinatorsAreClosed(t *testing.T) {
	c := startOne(t, func(cfg *Config) { cfg.Cluster.Join = nil })
	for i := range 3 * maxPeers {
		if _, err := c.peer(fmt.Sprintf("127.0.0.1:%d", i+1)); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	c.peers.mu.Lock()
	defer c.peers.mu.Unlock()
	if n := len(c.peers.conns); n > maxPeers {
		t.Errorf("%d connections, the bound is %d", n, maxPeers)
	}
}

// Outcomes that come faster than agents answer do not pile up without end.
func TestOutcomesThatWaitAreBounded(t *testing.T) {
	k := newCases(nil, time.Hour)
	for i := range maxOpenCases + 10 {
		k.settleLater(fmt.Sprint("pl_c1_", i), time.Now())
	}
	if len(k.due) != maxOpenCases {
		t.Errorf("%d wait, the bound is %d", len(k.due), maxOpenCases)
	}
}

// An age that is none is not taken for a view that is fresh.
func TestAgeThatIsNone(t *testing.T) {
	c := startOne(t)
	words := newCache(1)
	words.grow(8)
	a := &fakeAgent{
		workers: 1, pulled: func(*waypostv1.PrefixPull) [][]byte { return words.snapshot() },
		ageMs: func() *float64 { return new(math.NaN()) },
	}
	a.start(t, c)
	eventually(t, "a view of a known age", func() bool {
		st, ok := c.stream()
		return ok && st.DecoderBytes > 0 && st.UntoldMs == nil && !st.ViewAt.IsZero() && !st.ViewAt.After(time.Now())
	})
}
