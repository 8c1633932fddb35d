package discover

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"waypost/agent/procnet"
)

// listenAs, when set, makes this program the server of another test.
const listenAs = "WAYPOST_TEST_LISTEN"

func TestMain(m *testing.M) {
	if os.Getenv(listenAs) == "" {
		os.Exit(m.Run())
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(l.Addr())
	// The test ends it by closing its standard input.
	_, _ = bufio.NewReader(os.Stdin).ReadByte()
	_ = l.Close()
}

// A real process with an engine's command line is found in the system's own
// process table while it lives, and no longer.
func TestRealProcess(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The port is not on its command line: it is found by the socket.
	cmd := &exec.Cmd{Path: self, Args: []string{"llama-server", "-m", "waypost-discover-test"}, Env: append(os.Environ(), listenAs+"=1"), Stderr: os.Stderr}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	end := func() {
		if !ended {
			ended = true
			_ = stdin.Close()
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
		}
	}
	defer end()
	address, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	// A port from the kernel's own range would not be taken for a server's.
	s := New(Options{})
	find := func() *Engine {
		r, err := s.Scan()
		if err != nil {
			t.Fatal(err)
		}
		for i := range r.Engines {
			if r.Engines[i].Model == "waypost-discover-test" && r.Engines[i].PID == cmd.Process.Pid {
				return &r.Engines[i]
			}
		}
		return nil
	}
	e := find()
	switch {
	case e == nil:
		t.Fatal("the process is not found")
	case e.Started == 0 || int(e.UID) != os.Getuid():
		t.Errorf("started %d, by %d", e.Started, e.UID)
	case e.Place != Nowhere:
		t.Errorf("it is %s at port %d, but asked for 8080", e.Place, e.Port)
	}
	_, port, _ := strings.Cut(strings.TrimSpace(address), ":")
	if e := again(t, port, cmd.Process.Pid); e.Place != Here || e.URL() != "http://127.0.0.1:"+port {
		t.Errorf("it is %s at %s, want it at port %s", e.Place, e.URL(), port)
	}
	end()
	if find() != nil {
		t.Error("it has ended and is still found")
	}
}

// again is the engine of a process if its command line had named a port.
func again(t *testing.T, port string, pid int) Engine {
	t.Helper()
	s := New(Options{})
	args := []string{"llama-server", "--port", port}
	k, words, _ := classify(args)
	p, err := readProcess(s.proc, pid, args)
	if err != nil {
		t.Fatal(err)
	}
	own, err := procnet.Read(s.proc, "net")
	if err != nil {
		t.Fatal(err)
	}
	return s.engineOf(candidate{p, k, words, false}, own, &Result{})
}

// BenchmarkScan is one look at this machine's own process table.
func BenchmarkScan(b *testing.B) {
	s := New(Options{})
	for b.Loop() {
		if _, err := s.Scan(); err != nil {
			b.Fatal(err)
		}
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(len(entries)), "entries")
}
