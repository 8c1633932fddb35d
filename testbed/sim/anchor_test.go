package sim

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"waypost/testbed/workload"
)

// whole reads a trace of the reference data, from WAYPOST_SHARED or the folder
// shared beside the repository.
func whole(t *testing.T, name string) *workload.Trace {
	t.Helper()
	dir := os.Getenv("WAYPOST_SHARED")
	if dir == "" {
		root, err := os.Getwd()
		if err != nil {
			t.Fatal(err)
		}
		for {
			if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil {
				break
			}
			if filepath.Dir(root) == root {
				t.Fatal("no go.mod above the test")
			}
			root = filepath.Dir(root)
		}
		dir = filepath.Join(root, "..", "shared")
	}
	file := filepath.Join(dir, "traces", name)
	if _, err := os.Stat(file); err != nil {
		t.Skipf("the whole trace %s is not here: set WAYPOST_SHARED to the reference data to check against the peer's own replay", name)
	}
	tr, _, err := openTrace(file)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

const (
	conversationTrace = "mooncake_fast25_conversation.jsonl"
	syntheticTrace    = "mooncake_fast25_synthetic.jsonl"
)

// options are the defaults of the command.
func options(policy string, speedup float64) T2Options {
	return T2Options{
		Policy: policy, Workers: 8, Coordinators: 1, Speedup: speedup, Spread: true, Copies: 1, Seed: 1,
		SlowFactor: 1.6, CrowdStartSec: -1, NoticeMs: -1, EventMs: -1, Theta: 5, Learn: true, PriorScale: 1,
		Evidence: evidence{marks: true},
	}
}

func runOf(t *testing.T, tr *workload.Trace, o T2Options) *Summary {
	t.Helper()
	s, err := RunT2(tr, o, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// within reports a figure that is not within a share of the wanted one; a
// wanted 0 is not known.
func within(t *testing.T, name string, got, want, share float64) {
	t.Helper()
	if want != 0 && math.Abs(got-want) > share*want {
		t.Errorf("%s is %.4f, want %.4f within %g %%", name, got, want, 100*share)
	}
}

// long says that the runs which take half a minute and more are wanted.
func long() bool { return os.Getenv("WAYPOST_SIM_LONG") != "" }

// Dynamo 1.6.1's own replay of the whole conversation trace under round robin
// (reuse of first admissions where readmissions occur).
func TestRoundRobinIsThePeersReplay(t *testing.T) {
	tr := whole(t, conversationTrace)
	for _, row := range []struct{ speedup, mean, p99, reuse, e2e float64 }{
		{1, 246.8, 1776, .0817, 2820},
		{2, 278.1, 2011, .0817, 3798},
		{4, 417.1, 2703, .0813, 9320},
		{5, 646.0, 4009, 0, 0},
		{6, 3487, 21152, .0788, 0},
		{7, 26133, 68937, .0781, 0},
	} {
		if !long() && row.speedup != 1 && row.speedup != 4 && row.speedup != 6 {
			continue
		}
		s := runOf(t, tr, options(policyRoundRobin, row.speedup))
		name := func(what string) string { return fmt.Sprintf("%s at 8×%v", what, row.speedup) }
		within(t, name("mean TTFT"), s.TTFTMs.Mean, row.mean, .01)
		within(t, name("p99 TTFT"), s.TTFTMs.P99, row.p99, .01)
		within(t, name("reuse"), s.Reuse, row.reuse, .01)
		within(t, name("mean E2E"), s.E2EMs.Mean, row.e2e, .01)
		if row.speedup == 7 {
			within(t, "readmissions at 8×7", s.Preemptions, 165, .05)
		}
	}
	tr = whole(t, syntheticTrace)
	for _, row := range []struct{ speedup, mean, reuse float64 }{{1, 301.5, .112}, {2, 345.6, 0}, {3, 442.4, 0}} {
		if !long() && row.speedup != 1 {
			continue
		}
		o := options(policyRoundRobin, row.speedup)
		o.Spread = false
		s := runOf(t, tr, o)
		within(t, "mean TTFT, synthetic", s.TTFTMs.Mean, row.mean, .01)
		within(t, "reuse, synthetic", s.Reuse, row.reuse, .01)
	}
}

// The same replay under Dynamo's selector, at its default and at S = 32.
func TestDynamoIsThePeersReplay(t *testing.T) {
	tr := whole(t, conversationTrace)
	for _, row := range []struct{ speedup, one, tuned float64 }{
		{1, 209.6, 196.1},
		{2, 228.5, 207.7},
		{3, 248.5, 216.8},
		{4, 278.6, 228.0},
		{5, 330.7, 255.1},
		{6, 410, 305.9},
		{6.5, 465, 342},
	} {
		if !long() && row.speedup != 4 {
			continue
		}
		for policy, want := range map[string]float64{policyDynamo: row.one, policyDynamo32: row.tuned} {
			s := runOf(t, tr, options(policy, row.speedup))
			within(t, fmt.Sprintf("%s mean TTFT at 8×%v", policy, row.speedup), s.TTFTMs.Mean, want, .03)
		}
	}
}

// Production's rule with old information against the better of the peer's two
// settings with everything instantaneous, over the whole trace.
func TestWaypostAgainstThePeer(t *testing.T) {
	if !long() {
		t.Skip("several runs of 12,031 requests: set WAYPOST_SIM_LONG=1; TestWaypostOnTheSample is the short form")
	}
	tr := whole(t, conversationTrace)
	means := map[float64]float64{}
	for _, row := range []struct{ speedup, mean, e2e float64 }{{4, 228.4, 6961}, {5, 254.6, 12332}, {6, 307, 21243}} {
		o := options(policyWaypost, row.speedup)
		o.Copies = 3
		s := runOf(t, tr, o)
		means[row.speedup] = s.TTFTMs.Mean
		if s.TTFTMs.Mean > 1.005*row.mean {
			t.Errorf("mean TTFT at ×%v is %.1f, want at most .5 %% above %.1f", row.speedup, s.TTFTMs.Mean, row.mean)
		}
		if s.E2EMs.Mean > .9*row.e2e {
			t.Errorf("mean E2E at ×%v is %.0f, want 10 %% below %.0f", row.speedup, s.E2EMs.Mean, row.e2e)
		}
	}
	for _, coordinators := range []int{4, 8} {
		for _, cut := range []cuts{{}, {place: true}} {
			o := options(policyWaypost, 4)
			o.Copies, o.Coordinators, o.Cut = 3, coordinators, cut
			within(t, fmt.Sprintf("mean TTFT at 8×4 of %d coordinators, not shared: %q", coordinators, cut), runOf(t, tr, o).TTFTMs.Mean, means[4], .01)
		}
	}
	o := options(policyWaypost, 4)
	o.Coordinators, o.Cut.all = 4, true
	if got := runOf(t, tr, o).TTFTMs.Mean; got < 1.2*means[4] {
		t.Errorf("mean TTFT of 4 coordinators that share nothing is %.1f: not worse than %.1f, so sharing would be of no use", got, means[4])
	}
}

// The engine and the peer's selector, found right over the whole trace, keep to
// what they gave over the sample then: whole traces are not at hand everywhere.
func TestSampleIsAsItWas(t *testing.T) {
	tr, err := workload.Sample()
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		policy                          string
		speedup, mean, p99, e2e, reused float64
	}{
		{policyRoundRobin, 1, 290.6, 1919.1, 3045.0, .0492},
		{policyRoundRobin, 4, 493.84, 2903.6, 8906.4, .0492},
		{policyRoundRobin, 8, 1615.24, 6704.9, 18700.9, .0492},
		{policyDynamo, 4, 329.7, 1898.4, 8029.7, .1076},
		{policyDynamo, 8, 586.63, 2329.4, 17627.5, .1135},
		{policyDynamo32, 4, 289.19, 1909.4, 7711.6, .1387},
		{policyDynamo32, 8, 558.36, 2315.1, 17788.6, .1098},
	} {
		s := runOf(t, tr, options(row.policy, row.speedup))
		name := func(what string) string { return fmt.Sprintf("%s of %s at 8×%v", what, row.policy, row.speedup) }
		within(t, name("mean TTFT"), s.TTFTMs.Mean, row.mean, .01)
		within(t, name("p99 TTFT"), s.TTFTMs.P99, row.p99, .01)
		within(t, name("mean E2E"), s.E2EMs.Mean, row.e2e, .01)
		within(t, name("reuse"), s.Reuse, row.reused, .01)
	}
}

// What the whole trace shows of production's rule, over the sample: level or
// better in first tokens, clearly better end to end, several coordinators as
// good as one, nothing shared clearly worse.
func TestWaypostOnTheSample(t *testing.T) {
	tr, err := workload.Sample()
	if err != nil {
		t.Fatal(err)
	}
	run := func(policy string, speedup float64, coordinators int, cut cuts) *Summary {
		o := options(policy, speedup)
		o.Copies = 3
		o.Coordinators, o.Cut = coordinators, cut
		return runOf(t, tr, o)
	}
	for _, speedup := range []float64{4, 6} {
		one, tuned := run(policyDynamo, speedup, 1, cuts{}), run(policyDynamo32, speedup, 1, cuts{})
		s := run(policyWaypost, speedup, 1, cuts{})
		if best := min(one.TTFTMs.Mean, tuned.TTFTMs.Mean); s.TTFTMs.Mean > 1.01*best {
			t.Errorf("mean TTFT at ×%v is %.1f, the peer's better setting has %.1f", speedup, s.TTFTMs.Mean, best)
		}
		if best := min(one.E2EMs.Mean, tuned.E2EMs.Mean); s.E2EMs.Mean > .93*best {
			t.Errorf("mean E2E at ×%v is %.0f, the peer's better setting has %.0f", speedup, s.E2EMs.Mean, best)
		}
		for _, cut := range []cuts{{}, {place: true}} {
			within(t, fmt.Sprintf("mean TTFT at ×%v of 4 coordinators, not shared: %q", speedup, cut), run(policyWaypost, speedup, 4, cut).TTFTMs.Mean, s.TTFTMs.Mean, .03)
		}
		if got := run(policyWaypost, speedup, 4, cuts{all: true}).TTFTMs.Mean; got < 1.2*s.TTFTMs.Mean {
			t.Errorf("mean TTFT at ×%v of 4 coordinators that share nothing is %.1f: not worse than %.1f", speedup, got, s.TTFTMs.Mean)
		}
	}
}
