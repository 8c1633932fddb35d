package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// manager plays the service manager: it returns what the daemon sends.
func manager(t *testing.T) (receive func() string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	return func() string {
		t.Helper()
		buf := make([]byte, 4096)
		conn.SetReadDeadline(time.Now().Add(time.Minute))
		n, err := conn.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		return string(buf[:n])
	}
}

func TestNotifier(t *testing.T) {
	receive := manager(t)
	n := NewNotifier(nil)
	n.Ready()
	n.Status("agent: 1 engine,\nREADY=1")
	n.Status("agent: 1 engine,\nREADY=1")
	n.Reloading()
	n.Stopping()
	for _, want := range []string{"READY=1", "STATUS=agent: 1 engine, READY=1", "RELOADING=1", "STOPPING=1"} {
		if got := receive(); got != want {
			t.Errorf("service manager got %q, want %q", got, want)
		}
	}
}

func TestNotifierWithoutManager(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	var out strings.Builder
	n := NewNotifier(slog.New(slog.NewTextHandler(&out, nil)))
	n.Ready()
	n.Watchdog(t.Context(), func() bool { t.Error("asked although there is no watchdog"); return true })
	if out.Len() != 0 {
		t.Errorf("logged %q", out.String())
	}
	t.Setenv("NOTIFY_SOCKET", "/nonexistent/notify")
	n.Ready()
	n.Stopping()
	if got := strings.Count(out.String(), "service manager cannot be told"); got != 1 {
		t.Errorf("a broken socket is logged %d times, want once: %s", got, out.String())
	}
}

func TestWatchdogBarksOnlyWhileAlive(t *testing.T) {
	receive := manager(t)
	t.Setenv("WATCHDOG_USEC", "4000")
	t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
	var alive atomic.Bool
	var asked atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	n := NewNotifier(nil)
	go func() {
		defer close(done)
		n.Watchdog(ctx, func() bool { asked.Add(1); return alive.Load() })
	}()
	for asked.Load() < 3 {
		time.Sleep(time.Millisecond)
	}
	n.Status("marker") // nothing may be before it
	if got := receive(); got != "STATUS=marker" {
		t.Errorf("service manager got %q from a daemon that makes no progress", got)
	}
	alive.Store(true)
	if got := receive(); got != "WATCHDOG=1" {
		t.Errorf("service manager got %q", got)
	}
	cancel()
	<-done
}

func TestLogger(t *testing.T) {
	t.Setenv("JOURNAL_STREAM", "")
	for _, tt := range []struct {
		format, journal string
		want            []string
		unwanted        string
	}{
		{"logfmt", "", []string{"time=", `level=WARN msg="lane down" event=lane_down`}, "{"},
		{"logfmt", "9:1", []string{`level=WARN msg="lane down" event=lane_down`}, "time="},
		{"json", "9:1", []string{`{"level":"WARN","msg":"lane down","event":"lane_down"}`}, `"time"`},
	} {
		t.Setenv("JOURNAL_STREAM", tt.journal)
		var out strings.Builder
		log, settings := NewLogger(&out, "warn", LogFormat(tt.format))
		log.Info("not shown")
		log.Warn("lane down", "event", "lane_down")
		for _, want := range tt.want {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%+v wrote %q", tt, out.String())
			}
		}
		if strings.Contains(out.String(), tt.unwanted) || strings.Contains(out.String(), "not shown") {
			t.Errorf("%+v wrote %q", tt, out.String())
		}
		out.Reset()
		of := log.With("part", "mesh").WithGroup("peer")
		other := LogFormat("json")
		want := `"part":"mesh","peer":{"name":"gpu-02"}`
		if tt.format == "json" {
			other, want = "logfmt", "part=mesh peer.name=gpu-02"
		}
		settings.Set("debug", other)
		of.Debug("shown now", "name", "gpu-02")
		if got := out.String(); !strings.Contains(got, "shown now") || !strings.Contains(got, want) {
			t.Errorf("level and format did not change: %q", got)
		}
	}
	for word, want := range map[LogLevel]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError} {
		if word.Level() != want || !slices.Contains(word.Allowed(), string(word)) {
			t.Errorf("level %q is %v", word, word.Level())
		}
	}
}

func TestSignals(t *testing.T) {
	ctx, reload, stop := Signals(t.Context())
	defer stop()
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	<-reload
	if ctx.Err() != nil {
		t.Error("SIGHUP ended the context")
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	if cause := context.Cause(ctx); cause.Error() != "received terminated" {
		t.Errorf("cause %v", cause)
	}
	stop()
}

// TestSecondSignalKills runs a child that ignores the end of its context.
func TestSecondSignalKills(t *testing.T) {
	if os.Getenv("DAEMON_TEST_STUBBORN") != "" {
		ctx, _, _ := Signals(context.Background())
		os.Stdout.WriteString("ready\n")
		<-ctx.Done()
		os.Stdout.WriteString("ending\n")
		select {} // a shutdown that hangs
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^TestSecondSignalKills$")
	cmd.Env = append(os.Environ(), "DAEMON_TEST_STUBBORN=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(2*time.Minute, func() { cmd.Process.Kill() })
	defer timer.Stop()
	buf := make([]byte, 64)
	for _, want := range []string{"ready\n", "ending\n"} {
		n, err := out.Read(buf)
		if err != nil || string(buf[:n]) != want {
			t.Fatalf("child said %q, %v; want %q", buf[:n], err, want)
		}
		cmd.Process.Signal(syscall.SIGTERM)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("child ended with %v, want death by the second SIGTERM", err)
	}
}

func TestReloadMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	m, err := NewReloadMetrics(reg)
	if err != nil {
		t.Fatal(err)
	}
	if testutil.ToFloat64(m.ok) != 1 || testutil.ToFloat64(m.last) == 0 {
		t.Error("the first load does not count")
	}
	before := testutil.ToFloat64(m.last)
	m.Done(errors.New("bad file"))
	if testutil.ToFloat64(m.ok) != 0 || testutil.ToFloat64(m.last) != before {
		t.Error("a failure must set the gauge to 0 and keep the time")
	}
}
