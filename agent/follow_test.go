package agent

import (
	"testing"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/llamacpp/slots"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// A cache without events follows from claims: what a request left is told at
// once, what is in use is not, and points by another cluster key name nothing.
func TestCacheFollowsClaims(t *testing.T) {
	key := prefix.ClusterKey{1}
	r := newRank(0, "llamacpp", "llamacpp-1", "gpu-01 http://127.0.0.1:1", 0, []prefix.ClusterKey{key}, 1000)
	r.agentProcess = 7
	r.setFacts(engine.Facts{Model: "m", StartMark: 3, BlockTokens: 16, MaxRunning: 2, Unordered: true, Capabilities: engine.WantsClaimPoints | engine.PinsSlots})
	replay := slots.New(slots.Options{Slots: 2, HostTokens: 0})
	r.setMirror(replay)
	r.setHealth(true, "")
	r.mu.Lock()
	r.estimate.LaneUp(time.Now(), 9)
	r.mu.Unlock()
	points := make([]prefix.Key, 40)
	for i := range points {
		points[i] = prefix.Key(i + 1)
	}
	claim := func(seq uint64, keyID string) {
		t.Helper()
		f := &ledger.ClaimFrame{Coordinator: 9, Agent: 7, Prev: seq - 1, PointsKeyID: keyID, Offers: []ledger.Offer{{Claim: ledger.Claim{
			Seq: seq, EngineProcess: r.process, PromptTokens: 645, UncachedTokens: 645, OutputTokens: 8, Sequences: 1, Points: points,
		}}}}
		if due, err := r.takeClaims(f); err != nil || !due {
			t.Fatalf("due %v, %v", due, err)
		}
	}
	claim(1, key.ID())
	if rep := r.report(time.Now()); rep.cachedBlocks != 0 || len(rep.idleSlots) != 0 {
		t.Errorf("%d blocks of a slot that is in use", rep.cachedBlocks)
	}
	_, before := r.seq()
	if due, err := r.takeMarks(&ledger.MarkFrame{Coordinator: 9, Marks: []ledger.Marked{{Seq: 1, What: ledger.MarkDone, OutputTokens: 8, CachedTokens: new(0)}}}); err != nil || !due {
		t.Fatalf("due %v, %v", due, err)
	}
	if _, seq := r.seq(); seq != before+1 {
		t.Errorf("frame %d after %d: what the request left is not told at once", seq, before)
	}
	if rep := r.report(time.Now()); rep.cachedBlocks != 40 || len(rep.idleSlots) != 0 {
		t.Errorf("%d blocks, %d slots to name before the server confirmed them", rep.cachedBlocks, len(rep.idleSlots))
	}
	r.mu.Lock()
	replay.Observe([]slots.Seen{{Tokens: -1}, {Tokens: 652, Task: 1}})
	replay.Observe([]slots.Seen{{Tokens: 9, Task: 2}, {Tokens: 652, Task: 1}}) // slots keep what they hold
	r.mu.Unlock()
	if idle := r.report(time.Now()).idleSlots; len(idle) != 1 || idle[0] != (ledger.IdleSlot{Slot: 1, DepthTokens: 640, Key: 40}) {
		t.Errorf("%+v", idle)
	}
	claim(2, "another0")
	if rep := r.report(time.Now()); rep.faults["points_of_another_key"] != 1 {
		t.Errorf("%v", rep.faults)
	}
	// A text of which nothing was known becomes known while its request runs.
	if due, err := r.takeClaims(&ledger.ClaimFrame{Coordinator: 9, Agent: 7, Prev: 2, PointsKeyID: key.ID(), Offers: []ledger.Offer{{Claim: ledger.Claim{
		Seq: 3, EngineProcess: r.process, PromptTokens: 500, UncachedTokens: 500, OutputTokens: 8, Sequences: 1,
	}}}}); err != nil || !due {
		t.Fatalf("due %v, %v", due, err)
	}
	text := make([]prefix.Key, 20)
	for i := range text {
		text[i] = prefix.Key(i + 1000)
	}
	for _, by := range []string{"another0", key.ID()} {
		_, err := r.takeMarks(&ledger.MarkFrame{Coordinator: 9, PointsKeyID: by, Learnt: []ledger.LearntPrompt{{Seq: 3, PromptTokens: 325, Points: text}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	before3 := r.report(time.Now())
	if _, err := r.takeMarks(&ledger.MarkFrame{Coordinator: 9, Marks: []ledger.Marked{{Seq: 3, What: ledger.MarkDone, OutputTokens: 8}}}); err != nil {
		t.Fatal(err)
	}
	if rep := r.report(time.Now()); rep.cachedBlocks != before3.cachedBlocks+20 || rep.faults["points_of_another_key"] != 2 {
		t.Errorf("%d blocks after %d, %v", rep.cachedBlocks, before3.cachedBlocks, rep.faults)
	}
	r.reset(engine.ResetRestart)
	if rep := r.report(time.Now()); rep.cachedBlocks != 0 {
		t.Errorf("%d blocks of a process that ended", rep.cachedBlocks)
	}
}
