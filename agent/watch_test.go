package agent

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
)

// Numbers that cannot be are warned of at first and then once in a while, however
// many an engine tells; all of them are counted.
func TestWarningsOfOddNumbersAreSpaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		r := newTestedEngine().r
		w := &watched{log: slog.New(slog.NewTextHandler(&log, nil)), newRank: func(string, int) *rank { return r }}
		warned := func() int { return strings.Count(log.String(), "numbers that cannot be") }
		for i, want := range []int{1, 1, 2, 3} {
			for range 3 {
				for _, what := range []string{engine.CountMetricFaults, engine.CountFactFaults, engine.CountSlotFaults} {
					w.Counted(0, what, 1)
				}
			}
			if got := warned(); got != want {
				t.Errorf("%d warnings at the time %d, want %d", got, i, want)
			}
			if i == 0 {
				time.Sleep(oddEvery - time.Second)
			} else {
				time.Sleep(oddEvery)
			}
		}
		if n := r.faults[engine.CountMetricFaults]; n != 12 {
			t.Errorf("%d faults are counted, want 12", n)
		}
	})
}

// That an engine's cache has windows is known from its events only: the hello is
// sent anew when it turns out, once.
func TestWindowsAreTold(t *testing.T) {
	r := newTestedEngine().r
	r.helloOutdated()
	store := func(group int32, spec blocktable.Spec, window int32) {
		r.apply(engine.Batch{Received: time.Now(), Events: []blocktable.Event{{
			Op: blocktable.OpStore, Medium: blocktable.MediumGPU, Group: group, Spec: spec, WindowTokens: window,
			BlockTokens: 16, Hashes: []uint64{uint64(group) + 1}, Tokens: make([]uint32, 16),
		}}})
	}
	store(0, blocktable.SpecFull, 0)
	if r.identity().windowed || r.helloOutdated() {
		t.Error("windows are told that there are not")
	}
	store(1, blocktable.SpecSlidingWindow, 32)
	if !r.identity().windowed || !r.helloOutdated() || r.helloOutdated() {
		t.Error("windows are not told, or told again and again")
	}
}

// An engine that is started again with fewer ranks answers 400 to whoever names one
// of the others: those do not serve, until it has them again.
func TestRanksThatAreNoMoreDoNotServe(t *testing.T) {
	var ranks []*rank
	told := 0
	w := &watched{
		log: slog.New(slog.DiscardHandler), changed: func() {}, dirty: func(r ...*rank) { told += len(r) },
		newRank: func(_ string, number int) *rank {
			r := newTestedEngine().r
			r.number = number
			ranks = append(ranks, r)
			return r
		},
	}
	serve := func() (out string) {
		for _, r := range ranks {
			out += map[bool]string{true: "u", false: "d"}[r.up]
		}
		return out
	}
	facts := func(n int) { w.Facts(engine.Facts{Model: "m", Ranks: n, StartMark: uint64(n), BlockTokens: 16}) }
	facts(3)
	w.Health(true, "")
	if got := serve(); got != "uuu" {
		t.Fatalf("of three ranks %s", got)
	}
	told = 0
	facts(1)
	if got := serve(); got != "udd" || told != 3 || !strings.Contains(ranks[2].reason, "no rank 2") {
		t.Errorf("of three ranks that became one %s, %d told, the last because %q", got, told, ranks[2].reason)
	}
	w.Health(false, "refused")
	w.Health(true, "")
	if got := serve(); got != "udd" {
		t.Errorf("after an outage %s", got)
	}
	facts(2)
	if got := serve(); got != "uud" || ranks[1].reason != "" {
		t.Errorf("of one rank that became two %s (%s)", got, ranks[1].reason)
	}
	w.Health(false, "refused")
	if got := serve(); got != "ddd" || ranks[2].reason != "refused" {
		t.Errorf("an engine that is down: %s (%s)", got, ranks[2].reason)
	}
}
