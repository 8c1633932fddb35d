package engines

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"
)

// Process is a server process that a test starts, kills and starts again.
type Process struct {
	// Path, Args and Env are the program, its arguments and what is added to
	// the environment.
	Path string
	Args []string
	Env  []string
	// URL is where it serves; Health the path that answers 200 once it does.
	URL, Health string
	// Log takes what it writes; nil: nobody.
	Log *os.File

	cmd  *exec.Cmd
	done chan struct{}
}

// FreePort is a port of the loopback interface that nobody listens on now.
func FreePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	return port, l.Close()
}

// Start starts the process and waits until it serves, for at most within.
func (p *Process) Start(ctx context.Context, within time.Duration) error {
	p.cmd = exec.Command(p.Path, p.Args...)
	p.cmd.Env = append(os.Environ(), p.Env...)
	p.cmd.Stdout, p.cmd.Stderr = p.Log, p.Log
	// A group of its own: its children end with it.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		// How it ended is its caller's doing.
		_ = cmd.Wait()
		close(done)
	}(p.cmd, p.done)
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.URL+p.Health, nil)
		if err != nil {
			return err
		}
		if resp, err := client.Do(req); err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended before it served", p.Path)
		case <-ctx.Done():
			return fmt.Errorf("%s does not serve: %w", p.Path, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// PID is the process id; 0: it does not run.
func (p *Process) PID() int {
	if p.cmd == nil || p.cmd.Process == nil {
		return 0
	}
	return p.cmd.Process.Pid
}

// Kill ends the process and its children at once and waits for that.
func (p *Process) Kill() error {
	if p.cmd == nil || p.cmd.Process == nil {
		return nil
	}
	err := syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
	p.cmd = nil
	if errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return err
}
