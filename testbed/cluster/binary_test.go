package cluster

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// binaryDir holds the built program; TestMain removes it.
var binaryDir string

// buildBinary builds the program once for all tests, as a newcomer's first
// build does: without cgo.
var buildBinary = sync.OnceValues(func() (string, error) {
	var err error
	if binaryDir, err = os.MkdirTemp("", "waypost-test-"); err != nil {
		return "", err
	}
	path := filepath.Join(binaryDir, "waypost")
	cmd := exec.Command("go", "build", "-o", path, "waypost")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", errors.Join(err, errors.New(string(out)))
	}
	return path, nil
})

// program is the path of the built program.
func program(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("builds and runs the real program; left out with -short")
	}
	path, err := buildBinary()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// ran is what a finished command left behind.
type ran struct {
	code        int
	out, errOut string
}

// run runs the program to its end, for as long as patience lasts.
func run(t *testing.T, args ...string) ran {
	t.Helper()
	return runWith(t, nil, args...)
}

// runWith is run with some variables in the environment. One that does not end in
// time is killed, and says so.
func runWith(t *testing.T, env []string, args ...string) ran {
	t.Helper()
	path := program(t) // the first one builds it, which takes its time
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = 10 * time.Second // processes of its own may hold the pipes
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.Env, cmd.Dir = &out, &errOut, append(cleanEnv(), env...), t.TempDir()
	err := cmd.Run()
	if ctx.Err() != nil {
		t.Fatalf("%v did not end within %v: %v\n%s%s", args, patience, err, out.String(), errOut.String())
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%v: %v", args, err)
	}
	return ran{cmd.ProcessState.ExitCode(), out.String(), errOut.String()}
}

// cleanEnv is the environment without settings of Waypost.
func cleanEnv() []string {
	var out []string
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "WAYPOST_") {
			out = append(out, e)
		}
	}
	return out
}

// wants checks the exit code and that the given texts were said.
func (r ran) wants(t *testing.T, what string, code int, texts ...string) {
	t.Helper()
	all := r.out + r.errOut
	if r.code != code {
		t.Errorf("%s: exit %d, want %d\n%s", what, r.code, code, all)
	}
	for _, text := range texts {
		if !strings.Contains(all, text) {
			t.Errorf("%s: %q is not said in\n%s", what, text, all)
		}
	}
}
