package daemon

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestProcessMark(t *testing.T) {
	own, err := ProcessMark()
	if err != nil {
		t.Fatal(err)
	}
	again, err := ProcessMarkOf(os.Getpid())
	if err != nil || own == 0 || again != own {
		t.Errorf("marks of this process: %x, then %x, %v", own, again, err)
	}
	if with, err := ProcessMarkOf(os.Getpid(), "publisher-7"); err != nil || with == own {
		t.Errorf("mark with a publisher %x, without %x, %v", with, own, err)
	}
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Skipf("needs a child process to look at: %v", err)
	}
	other, err := ProcessMarkOf(cmd.Process.Pid)
	if err != nil || other == own {
		t.Errorf("mark of a child %x, own %x, %v", other, own, err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	if _, err := ProcessMarkOf(cmd.Process.Pid); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("mark of a dead process: %v", err)
	}
}

func TestProcessMarkDependsOnEachPart(t *testing.T) {
	// A small /proc with one process whose command is hostile.
	mark := func(boot, namespace, start string, pid int, extra ...string) uint64 {
		t.Helper()
		proc := t.TempDir()
		for _, dir := range []string{"sys/kernel/random", "self/ns", "41", "42"} {
			if err := os.MkdirAll(filepath.Join(proc, dir), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		stat := "42 (vllm) 1 2 ) x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 " + start + " 20 21\n"
		for file, text := range map[string]string{"sys/kernel/random/boot_id": boot + "\n", "41/stat": stat, "42/stat": stat} {
			if err := os.WriteFile(filepath.Join(proc, file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink(namespace, filepath.Join(proc, "self/ns/pid")); err != nil {
			t.Fatal(err)
		}
		m, err := markUnder(proc, pid, extra)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	base := mark("boot", "pid:[1]", "1000", 42)
	if mark("boot", "pid:[1]", "1000", 42) != base {
		t.Error("mark is not stable")
	}
	seen := map[uint64]string{base: "base"}
	for what, m := range map[string]uint64{
		"boot id": mark("boot2", "pid:[1]", "1000", 42), "namespace": mark("boot", "pid:[2]", "1000", 42),
		"start time": mark("boot", "pid:[1]", "1001", 42), "pid": mark("boot", "pid:[1]", "1000", 41), "extra": mark("boot", "pid:[1]", "1000", 42, "p"),
	} {
		if other, dup := seen[m]; dup {
			t.Errorf("%s does not change the mark (equal to %s)", what, other)
		}
		seen[m] = what
	}
	if hashMark([]string{"ab", "c"}) == hashMark([]string{"a", "bc"}) {
		t.Error("parts run together")
	}
}

func TestMalformedStat(t *testing.T) {
	dir := t.TempDir()
	for _, stat := range []string{"", "42", "42 (x) S", "42 (x S 1 2 3", "42 (x) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 then 20"} {
		if err := os.WriteFile(filepath.Join(dir, "stat"), []byte(stat), 0o600); err != nil {
			t.Fatal(err)
		}
		if start, err := startTime(dir); err == nil {
			t.Errorf("start time %q from %q", start, stat)
		}
	}
}
