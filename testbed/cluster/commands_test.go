package cluster

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestVersionSaysNothingElse(t *testing.T) {
	t.Parallel()
	r := run(t, "version")
	if r.code != 0 || r.errOut != "" || !strings.HasPrefix(r.out, "waypost ") {
		t.Errorf("version: exit %d, stdout %q, stderr %q", r.code, r.out, r.errOut)
	}
	r = run(t, "version", "--json")
	var v struct{ Version string }
	if err := json.Unmarshal([]byte(r.out), &v); err != nil || v.Version == "" || r.errOut != "" {
		t.Errorf("version --json: %v, stdout %q, stderr %q", err, r.out, r.errOut)
	}
}

// TestEveryCommandExplainsItself walks the help of the whole program.
func TestEveryCommandExplainsItself(t *testing.T) {
	t.Parallel()
	seen := 0
	var walk func(path []string)
	walk = func(path []string) {
		r := run(t, append(path, "--help")...)
		if r.code != 0 || r.errOut != "" {
			t.Errorf("%v --help: exit %d, stderr %q", path, r.code, r.errOut)
		}
		if len(path) > 0 {
			seen++
			if !strings.Contains(r.out, "Examples:\n  ") {
				t.Errorf("%v --help shows no example:\n%s", path, r.out)
			}
		}
		_, list, found := strings.Cut(r.out, "Available Commands:\n")
		if !found {
			return
		}
		list, _, _ = strings.Cut(list, "\n\n")
		for _, line := range strings.Split(list, "\n") {
			name := strings.Fields(line)[0]
			if len(path) == 0 && (name == "completion" || name == "help") {
				continue // the library's own
			}
			walk(append(append([]string(nil), path...), name))
		}
	}
	walk(nil)
	if seen < 18 {
		t.Errorf("only %d commands were found", seen)
	}
}

func TestCompletion(t *testing.T) {
	t.Parallel()
	for _, shell := range []string{"bash", "zsh", "fish"} {
		r := run(t, "completion", shell)
		if r.code != 0 || r.errOut != "" || !strings.Contains(r.out, "waypost") {
			t.Errorf("completion %s: exit %d, %d bytes, stderr %q", shell, r.code, len(r.out), r.errOut)
		}
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("needs bash to read the script")
	}
	cmd := exec.Command(bash, "-n")
	cmd.Stdin = strings.NewReader(run(t, "completion", "bash").out)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("bash cannot read its completion: %v %s", err, out)
	}
	// What the script asks for at a tab.
	r := run(t, "__complete", "co")
	r.wants(t, "completing a command", 0, "cordon", "coordinator")
}

func TestUsageErrors(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		args  []string
		texts []string
	}{
		{"unknown command", []string{"placee"}, []string{"placee"}},
		{"unknown command of a group", []string{"inspect", "indx", "gpu-01/vllm-1/0"}, []string{"indx", "index, stream"}},
		{"unknown flag", []string{"place", "--tokns", "3"}, []string{"--tokns", "waypost place --help"}},
		{"missing argument", []string{"cordon", "--reason", "x"}, []string{"arg"}},
		{"bad output", []string{"workers", "-o", "xml"}, []string{"xml", "table, wide, json or jsonl"}},
		{"bad duration", []string{"workers", "--timeout", "soon"}, []string{"soon"}},
		{"fleet file missing", []string{"fleet", "diff", "nowhere.toml"}, []string{"nowhere.toml"}},
		{"replay without files", []string{"replay"}, []string{"frames"}},
		{"dev with two coordinators", []string{"dev", "--coordinators", "2"}, []string{"1 or 3"}},
	} {
		run(t, c.args...).wants(t, c.name, 2, c.texts...)
	}
	r := run(t, "workers")
	r.wants(t, "no fleet known", 3, "--addr", "WAYPOST_ADDR")
}

func TestReplayOfShippedRecordings(t *testing.T) {
	t.Parallel()
	dir, err := filepath.Abs(filepath.Join("..", "replay", "testdata"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"two-turns", "hybrid-two-turns", "long-sequential-cut"} {
		r := run(t, "replay", "--engine", "vllm", "--json", "--frames", filepath.Join(dir, name+".frames.jsonl"), "--requests", filepath.Join(dir, name+".requests.jsonl"))
		lines := strings.Split(strings.TrimSpace(r.out), "\n")
		var last struct {
			Summary struct{ Requests, Equal, Over, Under int }
		}
		if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || r.code != 0 || r.errOut != "" {
			t.Errorf("%s: exit %d, %v, stderr %q", name, r.code, err, r.errOut)
		}
		if s := last.Summary; s.Requests == 0 || s.Equal != s.Requests || s.Over != 0 || s.Under != 0 {
			t.Errorf("%s: %+v, want all equal", name, s)
		}
	}
}

// devSummary is the last object of dev --json.
type devSummary struct {
	Placements          *int
	ExpectedReuseTokens *int
	ActualReuseTokens   *int
	Equal               *int
	PredictionErrors    *int
	Failed, Refused     *int
	TTFTMs              map[string]*float64
	Baseline            *struct {
		Policy string
		TTFTMs map[string]*float64
	}
}

func TestDevTellsWhatHappened(t *testing.T) {
	t.Parallel()
	takeSlot(t)
	tmp := t.TempDir()
	r := runWith(t, []string{"TMPDIR=" + tmp}, "dev", "--duration", "5s", "--json", "--engines", "2")
	if r.code != 0 {
		t.Fatalf("dev: exit %d\n%s", r.code, r.errOut)
	}
	placements, equal := 0, 0
	var last []byte
	lines := bufio.NewScanner(strings.NewReader(r.out))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		last = bytes.Clone(lines.Bytes())
		var p struct {
			PlacementID         string
			Worker, Class       string
			ExpectedReuseTokens *int
			ActualReuseTokens   *int
			Summary             *json.RawMessage
		}
		if err := json.Unmarshal(last, &p); err != nil {
			t.Fatalf("%s: %v", last, err)
		}
		if p.Summary != nil {
			continue
		}
		placements++
		if p.PlacementID == "" || p.Worker == "" || p.Class == "" || p.ExpectedReuseTokens == nil || p.ActualReuseTokens == nil {
			t.Errorf("a placement without its fields: %s", last)
		} else if *p.ExpectedReuseTokens == *p.ActualReuseTokens {
			equal++
		}
	}
	var out struct{ Summary devSummary }
	if err := json.Unmarshal(last, &out); err != nil {
		t.Fatal(err)
	}
	s := out.Summary
	if s.Placements == nil || s.ExpectedReuseTokens == nil || s.ActualReuseTokens == nil || s.Equal == nil || s.PredictionErrors == nil || s.Baseline == nil ||
		s.TTFTMs["p50"] == nil || s.TTFTMs["p99"] == nil || s.Baseline.TTFTMs["p50"] == nil || s.Baseline.TTFTMs["p99"] == nil {
		t.Fatalf("the summary lacks fields: %s", last)
	}
	if s.Baseline.Policy != "round-robin" {
		t.Errorf("baseline policy %q", s.Baseline.Policy)
	}
	if *s.Placements != placements || *s.Equal != equal || placements < 5 {
		t.Errorf("%d placements of which %d equal were told, the summary says %s", placements, equal, last)
	}
	empty(t, tmp)
}

// A mixed fleet serves without a failure, and more than one kind is used.
func TestDevRunsAMixedFleet(t *testing.T) {
	t.Parallel()
	takeSlot(t)
	r := runWith(t, []string{"TMPDIR=" + t.TempDir()}, "dev", "--duration", "5s", "--json", "--engines", "4", "--kinds", "vllm,sglang,trtllm,llamacpp", "--rate", "8")
	if r.code != 0 {
		t.Fatalf("dev: exit %d\n%s", r.code, r.errOut)
	}
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	kinds := map[string]bool{}
	for _, l := range lines[:len(lines)-1] {
		var p struct{ Worker string }
		if err := json.Unmarshal([]byte(l), &p); err != nil {
			t.Fatalf("%s: %v", l, err)
		}
		kinds[strings.Split(p.Worker, "/")[1]] = true
	}
	var out struct{ Summary devSummary }
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &out); err != nil {
		t.Fatal(err)
	}
	if s := out.Summary; s.Placements == nil || *s.Placements < 5 || s.Failed == nil || *s.Failed > 0 || len(kinds) < 2 {
		t.Errorf("kinds %v, summary %s", kinds, lines[len(lines)-1])
	}
}

// empty wants nothing to be left in a directory.
func empty(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

func TestDevEndsCleanlyOnInterrupt(t *testing.T) {
	t.Parallel()
	takeSlot(t)
	tmp := t.TempDir()
	cmd := exec.Command(program(t), "dev", "--json", "--engines", "1")
	cmd.Env, cmd.Dir = append(cleanEnv(), "TMPDIR="+tmp), t.TempDir()
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	giveUp := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer giveUp.Stop()
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		t.Errorf("no placement: %v\n%s", lines.Err(), errOut.String())
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	summary := false
	for lines.Scan() {
		summary = strings.HasPrefix(lines.Text(), `{"summary":`)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("after an interrupt: %v\n%s", err, errOut.String())
	}
	if !summary {
		t.Error("an interrupted run does not end with its summary")
	}
	empty(t, tmp)
}

// A benchmark that is interrupted ends by itself, says why, and prints what it
// measured so far.
func TestInterruptedBenchmarkPrintsWhatItHas(t *testing.T) {
	t.Parallel()
	takeSlot(t)
	cmd := exec.Command(program(t), "testbed", "bench", "decide", "--quick", "--json")
	cmd.Env, cmd.Dir = cleanEnv(), t.TempDir()
	var out bytes.Buffer
	cmd.Stdout = &out
	progress, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	giveUp := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer giveUp.Stop()
	lines := bufio.NewScanner(progress)
	last, told := "", 0
	for lines.Scan() {
		// The first fleet is measured when the second one is begun.
		if last = lines.Text(); strings.Contains(last, "workers") {
			if told++; told == 2 {
				if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(last, "interrupt signal received") {
		t.Errorf("after an interrupt: %v, says %q", err, last)
	}
	if !strings.Contains(out.String(), `"workers":`) {
		t.Errorf("what was measured is lost: %q", out.String())
	}
}
