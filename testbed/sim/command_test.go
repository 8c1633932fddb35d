package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"waypost/systemd/daemon"
)

func runCommand(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	c := Command()
	var out, progress bytes.Buffer
	c.SetOut(&out)
	c.SetErr(&progress)
	c.SetArgs(args)
	err = c.Execute()
	return out.String(), progress.String(), err
}

// The same options and seed give the same bytes, and another seed does not.
func TestSeedDecidesARun(t *testing.T) {
	for _, args := range [][]string{
		{"--speedup", "4", "--coordinators", "3", "--evidence", "marks,events"},
		{"--speedup", "4", "--policy", "dynamo-s32", "--slow-workers", "1"},
		{"--speedup", "8", "--copies", "2", "--coordinators", "2", "--cut", "all"},
		{"--model", "ledger", "--scenario", "restarts", "--seconds", "10"},
	} {
		args = append(args, "--json")
		first, _, err := runCommand(t, args...)
		if err != nil {
			t.Fatal(args, err)
		}
		again, _, _ := runCommand(t, args...)
		other, _, _ := runCommand(t, append(args, "--seed", "2")...)
		if first != again {
			t.Errorf("%v: two runs differ:\n%s%s", args, first, again)
		}
		if strings.Replace(other, `"seed":2`, `"seed":1`, 1) == first {
			t.Errorf("%v: the seed changes nothing", args)
		}
	}
}

// Every rule serves the sample, the last object is the summary and progress is
// told.
func TestEveryRuleServesTheSample(t *testing.T) {
	for _, policy := range t2Policies {
		out, progress, err := runCommand(t, "--policy", policy, "--speedup", "6", "--json")
		if err != nil {
			t.Errorf("%s: %v", policy, err)
			continue
		}
		lines := strings.Split(strings.TrimSpace(out), "\n")
		var last struct {
			Summary *struct {
				Policy   string
				Requests int
				TTFTMs   struct{ Mean, P50, P99 float64 }
				E2EMs    struct{ Mean float64 }
				ITLMs    struct{ Mean float64 }
				Reuse    float64
			}
		}
		if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || last.Summary == nil {
			t.Fatalf("%s: %v in %q", policy, err, out)
		}
		s := last.Summary
		if s.Policy != policy || s.Requests != 600 || !(s.TTFTMs.Mean > 20) || !(s.TTFTMs.P99 > s.TTFTMs.P50) ||
			!(s.E2EMs.Mean > s.TTFTMs.Mean) || !(s.ITLMs.Mean > 5) || !(s.Reuse > 0 && s.Reuse < .2) {
			t.Errorf("%s: %+v", policy, s)
		}
		if strings.Count(progress, "\n") < 10 || !strings.HasSuffix(progress, "600 of 600 requests served\n") {
			t.Errorf("%s: progress %q", policy, progress)
		}
	}
}

func TestTable(t *testing.T) {
	for _, test := range []struct{ args, want []string }{
		{
			[]string{"--speedup", "6", "--copies", "2", "--coordinators", "2", "--cut", "place"},
			[]string{"2 coordinators, not shared: place", "mean of 2 copies", "TTFT MEAN", "predicted less true", "evidence: marks", "cache events 1000 ms late"},
		},
		{
			[]string{"--speedup", "6", "--policy", "dynamo-s32", "--crowd", "--slow-workers", "1"},
			[]string{"crowd", "unrelated", "1 workers 1.6× slower", "cache events 0 ms late"},
		},
		{
			[]string{"--model", "ledger", "--scenario", "foreign", "--seconds", "10"},
			[]string{"ledger, foreign", "4 coordinators", "evidence: events", "believed less true waiting", "claims still held 80 s after the end: 0"},
		},
	} {
		out, _, err := runCommand(t, test.args...)
		if err != nil {
			t.Fatal(test.args, err)
		}
		for _, want := range test.want {
			if !strings.Contains(out, want) {
				t.Errorf("%v: %q is not in\n%s", test.args, want, out)
			}
		}
	}
}

// Whoever is no longer waited for stops, in the middle of a run.
func TestInterruptEndsARun(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, args := range [][]string{{"--policy", "round-robin"}, {}, {"--model", "ledger", "--seconds", "5"}} {
		c := Command()
		c.SilenceErrors, c.SilenceUsage = true, true
		c.SetOut(io.Discard)
		c.SetErr(io.Discard)
		c.SetArgs(args)
		if err := c.ExecuteContext(ctx); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "requests served") {
			t.Errorf("%v: %v", args, err)
		}
	}
}

func TestBadOptionsNameTheFlag(t *testing.T) {
	notATrace := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(notATrace, []byte(`{"timestamp":-1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		flag string
		args []string
	}{
		{"--policy", []string{"--policy", "best"}},
		{"--model", []string{"--model", "t3"}},
		{"--workers", []string{"--workers", "0"}},
		{"--coordinators", []string{"--coordinators", "65"}},
		{"--coordinators", []string{"--coordinators", "2", "--policy", "dynamo"}},
		{"--copies", []string{"--copies", "0"}},
		{"--cut", []string{"--cut", "everything"}},
		{"--evidence", []string{"--evidence", "rumours"}},
		{"--objective", []string{"--objective", "fast"}},
		{"--slow-workers", []string{"--slow-workers", "9"}},
		{"--slow-factor", []string{"--slow-factor", "0"}},
		{"--prior-scale", []string{"--prior-scale", "0"}},
		{"--notice-delay", []string{"--notice-delay", "-1s"}},
		{"--set", []string{"--set", "luck=7"}},
		{"--set", []string{"--set", "theta=many"}},
		{"--set", []string{"--set", "theta=-1"}},
		{"--speedup", []string{"--speedup", "-1"}},
		{"--trace", []string{"--trace", "/nonexistent"}},
		{"--trace", []string{"--trace", notATrace}},
		{"--event-delay", []string{"--event-delay", "1h"}},
		{"--seconds", []string{"--seconds", "9"}},
		{"--workers", []string{"--model", "ledger", "--workers", "4"}},
		{"--scenario", []string{"--model", "ledger", "--scenario", "flood"}},
		{"--seconds", []string{"--model", "ledger", "--seconds", "0"}},
		{"--policy", []string{"--model", "ledger", "--policy", "dynamo"}},
		{"--coordinators", []string{"--model", "ledger", "--coordinators", "0"}},
	} {
		_, _, err := runCommand(t, test.args...)
		var field *daemon.FieldError
		if !errors.As(err, &field) || field.Field != test.flag {
			t.Errorf("%v: error %v, want one that names %s", test.args, err, test.flag)
		}
	}
}

// Older notices, nothing shared, wrong speeds: what is told to make things
// worse does, so the options reach what they name.
func TestOptionsReachTheRun(t *testing.T) {
	mean := func(args ...string) float64 {
		out, _, err := runCommand(t, append(args, "--speedup", "6", "--json")...)
		if err != nil {
			t.Fatal(args, err)
		}
		var s struct{ Summary Summary }
		if err := json.Unmarshal([]byte(out), &s); err != nil {
			t.Fatal(err)
		}
		return s.Summary.TTFTMs.Mean
	}
	good := mean("--coordinators", "4")
	for _, args := range [][]string{
		{"--coordinators", "4", "--cut", "all"},
		{"--coordinators", "4", "--cut", "place,at-once"},
		{"--slow-workers", "4", "--slow-factor", "3"},
		{"--workers", "6"},
	} {
		if bad := mean(args...); bad < 1.05*good {
			t.Errorf("%v: mean TTFT %.1f is not worse than %.1f", args, bad, good)
		}
	}
	if known, late := mean("--policy", "dynamo-s32"), mean("--policy", "dynamo-s32", "--notice-delay", "3s", "--event-delay", "5s"); late < 1.05*known {
		t.Errorf("a peer's rule with old information: mean TTFT %.1f against %.1f", late, known)
	}
	if a, b := mean("--unique"), mean(); a < b {
		t.Errorf("without any reuse mean TTFT is %.1f, with it %.1f", a, b)
	}
}
