package coordinator

import (
	"testing"
	"time"

	"waypost/coordinator/pull"
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
	eventually(t, "the second has joined", func() bool { return second.Joined() && len(second.copyPeers()) == 1 })
	return first, second
}

// A coordinator that knows nothing takes over what a peer knows, and asks the
// agent only for what happened since. What left the agent's ring meanwhile comes
// as a snapshot.
func TestPeerCopyIsPreferred(t *testing.T) {
	for name, ring := range map[string]int{"replay": 0, "too old for the ring": 1} {
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
	if frames, _, err := second.fetchCopy(first.ClusterAddress(), "gpu-01/vllm-8000/0", 100); err != nil || len(frames) == 0 {
		t.Errorf("%d frames, error %v", len(frames), err)
	}
	for worker, process := range map[string]uint64{"gpu-01/vllm-8000/0": 101, "gpu-02/vllm-8000/0": 100, "": 0} {
		if frames, _, err := second.fetchCopy(first.ClusterAddress(), worker, process); err != nil || len(frames) != 0 {
			t.Errorf("%q process %d: %d frames, error %v", worker, process, len(frames), err)
		}
	}
	a.dialer.Close()
	b := &fakeAgent{workers: 1, pulled: c.replayOr}
	forgetful := first.lanes.host("gpu-01")
	forgetful.mu.Lock()
	forgetful.streams = map[uint32]*stream{}
	forgetful.mu.Unlock()
	b.connect(t, second)
	eventually(t, "the second knows", func() bool { return second.held(tokens) == 1600 })
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pulls[0].HaveSeq != nil {
		t.Error("a replay was asked for although nothing was known")
	}
}

// What a peer sends and is wrong changes nothing, and is left to the agent.
func TestBadPeerCopyIsLeftToTheAgent(t *testing.T) {
	o := startOne(t)
	c := newCache(1)
	tokens := c.grow(100)
	c.delta()
	a := newSlowAgent(nil)
	a.dialSlow(t, o)
	p, l := a.next(t)
	hl := o.lanes.host("gpu-01")
	ask := pull.Ask{Stream: pull.Stream{Host: "gpu-01"}, ID: p.GetPullId(), Reason: "new"}
	good := c.snapshot()
	other := newCache(2)
	other.encoder = summary.NewEncoder(summary.Options{Key: [16]byte{9}, Blocks: other.forest, Epoch: 2})
	other.forest.Listener = other.encoder
	other.grow(10)
	other.delta()
	for name, frames := range map[string][][]byte{
		"noise": {{1, 2, 3}}, "another key": other.snapshot(), "cut": {good[0][:len(good[0])-3]}, "another digest": {otherDigest(t, good[0])},
	} {
		if o.lanes.takeCopy(hl, hl.session, ask, 100, frames, 0) {
			t.Errorf("%s was taken", name)
		}
	}
	ask.ID++
	if o.lanes.takeCopy(hl, hl.session, ask, 100, good, 0) {
		t.Error("a copy was taken for a pull that is over")
	}
	if n := o.metric(t, "waypost_index_keys"); n != 0 {
		t.Errorf("%v keys of copies that are wrong", n)
	}
	ask.ID--
	if !o.lanes.takeCopy(hl, hl.session, ask, 100, good, 3*time.Second) {
		t.Error("a good copy was not taken")
	}
	if got := o.held(tokens); got != 1600 {
		t.Errorf("%d tokens by the copy", got)
	}
	answer(t, l, p, true)
	eventually(t, "the agent's answer ends the pull", func() bool { return o.placed(t, tokens).GetBasis().GetCacheView() == "live" })
	hl.mu.Lock()
	defer hl.mu.Unlock()
	if again := hl.streams[0].resyncs; len(again) != 1 || again["new"] != 1 {
		t.Errorf("the agent was asked for what the peer sent wrong: %v", again)
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
	if got := second.copyPeers(); len(got) != 0 {
		t.Errorf("asks %v", got)
	}
	if len(second.peers.mute) != 1 {
		t.Errorf("%d addresses remembered", len(second.peers.mute))
	}
}
