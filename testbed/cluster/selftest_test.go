package cluster

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// finished is how many requests an engine has finished.
func (r *rig) finished(engine int) (n int) {
	r.t.Helper()
	resp, err := r.client.Get(r.Engines[engine].URL() + "/metrics")
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^vllm:request_success_total\{[^}]*\} (\S+)$`).FindAllStringSubmatch(string(page), -1) {
		v, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			r.t.Fatal(err)
		}
		n += int(v)
	}
	return n
}

// An engine that comes up is tested once: its events arrive, under the keys of
// the coordinators, and what it reuses is what they say. Neither the queue nor
// the outcomes know of it, and a new agent does not test the same life again.
func TestSelfTestOnConnect(t *testing.T) {
	r := start(t, 1, 1, emulator.Options{}, func(o *Options) { o.SelfTest = true })
	worker := func() *waypostv1.Worker { return r.worker(0, WorkerName(0, 0)) }
	passed := func() string {
		var tests []string
		for _, c := range worker().GetCapabilities() {
			if strings.HasPrefix(c, "self-test") {
				tests = append(tests, c)
			}
		}
		if !slices.Equal(tests, []string{"self-test-events", "self-test-keys", "self-test-reuse"}) {
			return fmt.Sprint(tests)
		}
		return ""
	}
	r.eventually("the self-test passes", passed)
	if n := r.finished(0); n != 2 {
		t.Errorf("%d requests, want 2", n)
	}
	if w := worker(); w.GetLive() != 0 || w.GetPendingClaims() != 0 || w.GetLearnt().GetOutcomes() != 0 || w.GetSpeedSource() != "prior" {
		t.Errorf("the test is seen in the queue or in what was learnt: %v", w)
	}
	if err := r.StopAgent(0); err != nil {
		t.Fatal(err)
	}
	if err := r.StartAgent(0); err != nil {
		t.Fatal(err)
	}
	if err := r.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.eventually("the new agent knows the result", passed)
	if n := r.finished(0); n != 2 {
		t.Errorf("%d requests after the agent's restart, want 2", n)
	}
}

// Each rank of a data-parallel engine is tested by itself.
func TestSelfTestOfEachRank(t *testing.T) {
	const ranks = 2
	r := start(t, 1, 1, emulator.Options{Ranks: ranks}, func(o *Options) { o.SelfTest = true })
	for rank := range ranks {
		r.eventually("the self-test of a rank passes", func() string {
			capabilities := r.worker(0, WorkerName(0, rank)).GetCapabilities()
			for _, want := range []string{"self-test-events", "self-test-keys", "self-test-reuse"} {
				if !slices.Contains(capabilities, want) {
					return fmt.Sprint("rank ", rank, ": ", capabilities)
				}
			}
			return ""
		})
	}
	if n := r.finished(0); n != 2*ranks {
		t.Errorf("%d requests, want 2 for each rank", n)
	}
}
