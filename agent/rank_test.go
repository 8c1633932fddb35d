package agent

import (
	"testing"
	"time"

	"waypost/agent/engine"
	"waypost/gossip/ledger"
)

// What is told of an engine as it comes, sleeps, does not answer and ends. Only
// of an engine that has ended its reservations end with it: one that does not
// answer may run them all the same.
func TestRankState(t *testing.T) {
	none, yes, no := 0, true, false
	r := testRank(nil)
	for _, step := range []struct {
		name   string
		do     func()
		state  ledger.State
		reason string
	}{
		{"nothing is known", func() {}, ledger.StateStarting, "not reached yet"},
		{"its facts are known", func() { r.setFacts(testFacts) }, ledger.StateStarting, "not reached yet"},
		{"it serves", func() { r.setHealth(true, "") }, ledger.StateReady, ""},
		{"it sleeps", func() {
			r.setLoad(engine.Load{At: time.Now(), Running: &none, Waiting: &none, Sleeping: &yes})
		}, ledger.StateSleeping, "the engine sleeps"},
		{"it is awake", func() { r.setLoad(engine.Load{At: time.Now(), Running: &none, Waiting: &none, Sleeping: &no}) }, ledger.StateReady, ""},
		{"it does not answer", func() { r.setHealth(false, "no answer") }, ledger.StateStalled, "no answer"},
		{"it answers", func() { r.setHealth(true, "") }, ledger.StateReady, ""},
		{"its process ends", func() { r.reset(engine.ResetGone); r.setHealth(false, "refused") }, ledger.StateLost, "refused"},
		{"another one begins", func() { r.setHealth(true, "") }, ledger.StateReady, ""},
		{"it is read no more", func() { r.leave(); r.setHealth(false, "process 4 exited") }, ledger.StateLost, "process 4 exited"},
	} {
		step.do()
		if got := r.report(time.Now()).load; got.State != step.state || got.StateReason != step.reason {
			t.Errorf("%s: %q %q, want %q %q", step.name, got.State, got.StateReason, step.state, step.reason)
		}
	}
}
