package coordinator

import (
	"testing"
	"time"

	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// replayOr answers a pull as agents do: what is missing after a position, or a
// snapshot.
func (c *cache) replayOr(p *waypostv1.PrefixPull) [][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.HaveSeq != nil && p.GetEpoch() == c.encoder.Epoch() {
		if frames, ok := c.encoder.Replay(p.GetHaveSeq()); ok {
			return append([][]byte{}, frames...) // an answer, if nothing is missing
		}
	}
	return c.encoder.Snapshot()
}

// twoCoordinators are a cluster; the second one knows of the first.
func twoCoordinators(t *testing.T) (first, second *one) {
	t.Helper()
	first = startOne(t)
	second = startOneOf(t, "c-2", first)
	eventually(t, "the second has joined", func() bool { return second.Joined() && len(second.peers.CopyPeers()) == 1 })
	return first, second
}

// A coordinator that knows nothing takes over what a peer knows, and asks the
// agent only for what happened since. What left the agent's ring meanwhile comes
// as a snapshot.
func TestPeerCopyIsPreferred(t *testing.T) {
	for name, ring := range map[string]int{"replay": 0, "too old for the ring": 1} {
		answered := map[string]float64{"replay": 1, "snapshot": -1}
		if ring > 0 {
			answered = map[string]float64{"replay": -1, "snapshot": 1}
		}
		t.Run(name, func(t *testing.T) {
			first, second := twoCoordinators(t)
			c := newCache(1)
			c.encoder = summary.NewEncoder(summary.Options{Key: testKey, Blocks: c.forest, Epoch: 1, ReplayBytes: ring})
			c.forest.Listener = c.encoder
			old := c.grow(100)
			c.delta()
			a := &fakeAgent{workers: 1, pulled: c.replayOr}
			a.connect(t, first)
			eventually(t, "the first knows", func() bool { return first.held(old) == 1600 })
			a.dialer.Close()

			grown := c.grow(50)
			for c.delta() == nil { // until the heartbeat is over
			}
			b := &fakeAgent{workers: 1, pulled: c.replayOr}
			b.connect(t, second)
			eventually(t, "the second knows what happened since", func() bool { return second.held(grown) == len(grown) })
			if n := second.metric(t, "waypost_prefix_pulls_total{new,peer}"); n != 1 {
				t.Errorf("%v copies asked for", n)
			}
			if n := second.metric(t, "waypost_prefix_bytes_total{peer}"); n < 20 {
				t.Errorf("%v bytes from the peer", n)
			}
			b.mu.Lock()
			p := b.pulls[0]
			b.mu.Unlock()
			if p.GetHaveSeq() != 1 || p.GetEpoch() != 1 {
				t.Errorf("the agent was asked from seq %d of epoch %d", p.GetHaveSeq(), p.GetEpoch())
			}
			for kind, want := range answered {
				if n := second.metric(t, "waypost_prefix_answers_total{"+kind+"}"); n != want && (want < 0 || n < want) { // more on a slow machine
					t.Errorf("%v answers are a %s, want %v", n, kind, want)
				}
			}
		})
	}
}

// A peer that knows nothing, or another process's cache, costs nothing but the
// question: the agent sends a snapshot.
func TestPeerWithoutACopy(t *testing.T) {
	first, second := twoCoordinators(t)
	c := newCache(1)
	tokens := c.grow(100)
	c.delta()
	a := &fakeAgent{workers: 1, pulled: c.replayOr}
	a.connect(t, first)
	eventually(t, "the first knows", func() bool { return first.held(tokens) == 1600 })
	if frames, _, err := second.peers.FetchCopy(t.Context(), first.ClusterAddress(), "gpu-01/vllm-8000/0", 100); err != nil || len(frames) == 0 {
		t.Errorf("%d frames, error %v", len(frames), err)
	}
	for worker, process := range map[string]uint64{"gpu-01/vllm-8000/0": 101, "gpu-02/vllm-8000/0": 100, "": 0} {
		if frames, _, err := second.peers.FetchCopy(t.Context(), first.ClusterAddress(), worker, process); err != nil || len(frames) != 0 {
			t.Errorf("%q process %d: %d frames, error %v", worker, process, len(frames), err)
		}
	}
	a.dialer.Close()
	b := &fakeAgent{workers: 1, pulled: c.replayOr}
	eventually(t, "the lane is down", func() bool { return first.lanes.session("gpu-01") == nil })
	first.fleet.Tick(time.Now().Add(25 * time.Hour))
	first.views.Forget()
	b.connect(t, second)
	eventually(t, "the second knows", func() bool { return second.held(tokens) == 1600 })
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pulls[0].HaveSeq != nil {
		t.Error("a replay was asked for although nothing was known")
	}
}

// A peer that failed is left alone for a while.
func TestFailedPeerIsNotAskedAtOnce(t *testing.T) {
	first, second := twoCoordinators(t)
	if _, err := second.peer(first.ClusterAddress()); err != nil {
		t.Fatal(err)
	}
	second.peers.muted(first.ClusterAddress())
	second.peers.muted("127.0.0.1:1") // never dialled: not remembered
	if got := second.peers.CopyPeers(); len(got) != 0 {
		t.Errorf("asks %v", got)
	}
	if len(second.peers.mute) != 1 {
		t.Errorf("%d addresses remembered", len(second.peers.mute))
	}
}
