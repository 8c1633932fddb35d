package nvml

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// process is a started child.
type process interface {
	// Frames is what it writes.
	Frames() io.Reader
	// CloseInput tells it that its parent is gone.
	CloseInput()
	// Kill ends it; a process inside the kernel may live on.
	Kill()
	// Close gives its pipes back: Frames ends.
	Close()
	// Exited is closed when it has ended; Exit may then be asked.
	Exited() <-chan struct{}
	// Exit says how it ended, in words, and its exit code, -1 for a signal.
	Exit() (code int, words string)
}

// command is what to run as a child.
type command struct {
	executable string
	arguments  []string
	environ    []string
}

// childEnviron is the environment for a child: the parent's without what would
// harm it. Immediate binding ends it at start, because the library's symbols
// exist only later; the service manager's socket is the parent's alone.
func childEnviron(parent, extra []string) []string {
	env := slices.DeleteFunc(slices.Clone(parent), func(v string) bool {
		return strings.HasPrefix(v, "LD_BIND_NOW=") || strings.HasPrefix(v, "NOTIFY_SOCKET=") ||
			strings.HasPrefix(v, "WATCHDOG_")
	})
	return append(env, extra...)
}

// startProcess starts cmd. The thread that starts a child is kept until the
// child ends: the kernel takes the end of that thread for the parent's death.
func startProcess(cmd command) (process, error) {
	frames, framesEnd, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p := &osProcess{frames: frames, exited: make(chan struct{})}
	p.cmd = exec.Command(cmd.executable, cmd.arguments...)
	p.cmd.Env = cmd.environ
	p.cmd.Stdout = framesEnd
	p.cmd.Stderr = &p.stderr
	p.cmd.WaitDelay = time.Second
	p.cmd.SysProcAttr = childAttributes()
	p.input, err = p.cmd.StdinPipe()
	if err != nil {
		_ = frames.Close()
		_ = framesEnd.Close()
		return nil, err
	}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		_ = framesEnd.Close()
		started <- err
		if err != nil {
			return
		}
		_ = p.cmd.Wait()
		close(p.exited)
	}()
	if err := <-started; err != nil {
		_ = frames.Close()
		return nil, err
	}
	return p, nil
}

type osProcess struct {
	cmd    *exec.Cmd
	frames *os.File
	input  io.WriteCloser
	stderr tail
	exited chan struct{}
}

func (p *osProcess) Frames() io.Reader       { return p.frames }
func (p *osProcess) CloseInput()             { _ = p.input.Close() }
func (p *osProcess) Kill()                   { _ = p.cmd.Process.Kill() }
func (p *osProcess) Exited() <-chan struct{} { return p.exited }

func (p *osProcess) Close() {
	_ = p.input.Close()
	_ = p.frames.Close()
}

func (p *osProcess) Exit() (code int, words string) {
	state := p.cmd.ProcessState
	words = state.String()
	if line := p.stderr.lastLine(); line != "" {
		words = fmt.Sprintf("%s: %s", words, line)
	}
	return state.ExitCode(), words
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	kept []byte
}

const maxTailBytes = 4096

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, b[max(0, len(b)-maxTailBytes):]...)
	t.kept = t.kept[max(0, len(t.kept)-maxTailBytes):]
	return len(b), nil
}

// lastLine is the last line that says something.
func (t *tail) lastLine() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	kept := bytes.TrimSpace(t.kept)
	if i := bytes.LastIndexByte(kept, '\n'); i >= 0 {
		kept = kept[i+1:]
	}
	return strings.ToValidUTF8(string(kept[:min(len(kept), maxTextBytes)]), "?")
}
