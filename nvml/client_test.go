package nvml

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// host is a client with fake children in virtual time.
type host struct {
	*Client
	t          *testing.T
	script     *script
	starts     atomic.Int64
	instead    atomic.Pointer[func() (process, error)] // starts another kind of child
	unkillable atomic.Bool
	children   []*fakeProcess
	log        bytes.Buffer
	registry   *prometheus.Registry
}

// run runs f beside a client in a bubble of virtual time and then ends it.
func run(t *testing.T, s *script, options Options, f func(h *host)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s.xids = make(chan XidEvent, 8) // in the bubble, for virtual time
		h := &host{t: t, script: s, registry: prometheus.NewRegistry()}
		options.Executable = "fake"
		options.Registerer = h.registry
		options.Logger = slog.New(slog.NewTextHandler(&h.log, nil))
		c, err := New(options)
		if err != nil {
			t.Fatal(err)
		}
		h.Client = c
		c.start = func() (process, error) {
			h.starts.Add(1)
			if f := h.instead.Load(); f != nil {
				return (*f)()
			}
			return h.startFake(), nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Run(ctx) }()
		f(h)
		began := time.Now()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		if took := time.Since(began); took > closeGrace+killGrace {
			t.Errorf("Run took %v to end", took)
		}
		for _, p := range h.children { // the kernel lets go
			select {
			case <-p.exited:
			default:
				if !p.unkillable {
					t.Error("Run left a child behind that was about to end")
				}
			}
			p.end(-1, "signal: killed")
			p.child.workers.Wait()
		}
		synctest.Wait()
	})
}

func (h *host) startFake() *fakeProcess {
	p := startFake(h.script, h.options.Poll, h.unkillable.Load())
	h.children = append(h.children, p)
	return p
}

func (h *host) after(d time.Duration) View {
	time.Sleep(d)
	synctest.Wait()
	return h.View()
}

func (h *host) want(v View, code StateCode, text string) {
	h.t.Helper()
	if v.Status.Code != code || v.Status.Text != text {
		h.t.Errorf("state %s %q, want %s %q", v.Status.Code, v.Status.Text, code, text)
	}
	if code != StateOK {
		for _, d := range v.Devices {
			if d.MemoryUsedBytes != nil || d.PowerWatts != nil || d.Processes != nil {
				h.t.Errorf("%s shows old values as current: %+v", code, d.GPU)
			}
		}
	}
}

func TestClientReads(t *testing.T) {
	run(t, newScript(gpu(0, "GPU-a"), gpu(1, "GPU-b")), Options{}, func(h *host) {
		if v := h.View(); v.Status.Code != StateOK { // the child may have read already
			h.want(v, StateStarting, "NVML is starting")
		}
		v := h.after(1500 * time.Millisecond)
		h.want(v, StateOK, "ok")
		if len(v.Devices) != 2 || *v.Devices[1].MemoryUsedBytes != 60 || v.Driver.DriverVersion != "580" || v.XidState != "ok" {
			t.Errorf("view %+v", v)
		}
		if *v.Age != 500*time.Millisecond {
			t.Errorf("age %v, want that of the reading 0.5 s ago", *v.Age)
		}
		<-h.Changed()
		h.script.xids <- XidEvent{UUID: "GPU-b", Xid: 79}
		<-h.Changed()
		v = h.View()
		if got := v.Judge(DefaultPolicy(), []string{"GPU-a", "GPU-b"}).String(); got != "exclude:xid_79(gpu_1)" {
			t.Errorf("verdict after Xid 79: %s", got)
		}
		if h.Acknowledge("GPU-x") || !h.Acknowledge("GPU-b") {
			t.Error("acknowledge does not tell known from unknown")
		}
		v = h.View()
		if got := v.Judge(DefaultPolicy(), []string{"GPU-a", "GPU-b"}).String(); got != "ok" {
			t.Errorf("verdict after the acknowledgement: %s", got)
		}
		h.after(time.Hour)
		if n := h.starts.Load(); n != 1 {
			t.Errorf("%d children in an hour without a fault", n)
		}
	})
}

// A call that never returns: named within 10 s, values unknown, the child
// replaced; when the driver answers again so does the view.
func TestClientHungCall(t *testing.T) {
	run(t, newScript(gpu(0, "GPU-a"), gpu(1, "GPU-b")), Options{}, func(h *host) {
		h.script.xids <- XidEvent{UUID: "GPU-a", Xid: 79}
		h.after(10 * time.Second)
		h.script.set(func(s *script) { s.hang = "nvmlDeviceGetTemperature" })
		v := h.after(8 * time.Second)
		if v.Status.Code != StateBlocked || !strings.HasPrefix(v.Status.Text, "NVML blocked: nvmlDeviceGetTemperature on GPU 0 does not return (") {
			t.Errorf("after 8 s: %+v", v.Status)
		}
		h.want(v, v.Status.Code, v.Status.Text)
		if len(v.Devices) != 2 || v.Devices[0].Name != "H200" || len(v.Devices[0].Xids) != 1 {
			t.Errorf("what is known of the GPUs was lost: %+v", v.Devices)
		}
		if got := v.Judge(DefaultPolicy(), []string{"GPU-b"}).String(); got != "price:nvml_blocked(gpu_1)" {
			t.Errorf("verdict %s", got)
		}
		if !strings.Contains(h.log.String(), "event=nvml_blocked") {
			t.Errorf("no event in the log: %s", h.log.String())
		}
		before := h.starts.Load()
		v = h.after(10 * time.Minute)
		if n := h.starts.Load() - before; n < 5 || n > 15 {
			t.Errorf("%d children in 10 minutes of a hung driver, want one a minute or so", n)
		}
		if v.Since < 10*time.Minute {
			t.Errorf("blocked since %v: the state flaps", v.Since)
		}
		h.script.set(func(s *script) { s.hang = "" })
		v = h.after(maxBackOff + 10*time.Second)
		h.want(v, StateOK, "ok")
		if *v.Devices[0].MemoryUsedBytes != 60 || len(v.Devices[0].Xids) != 1 {
			t.Errorf("after recovery: %+v", v.Devices[0])
		}
	})
}

func TestClientHungInit(t *testing.T) {
	s := newScript(gpu(0, "GPU-a"))
	s.hangOpen = true
	run(t, s, Options{}, func(h *host) {
		v := h.after(7 * time.Second)
		if v.Status.Code != StateBlocked || !strings.Contains(v.Status.Text, "nvmlInit does not return") {
			t.Errorf("%+v", v.Status)
		}
	})
}

// A driver that is slow but goes on is not blocked, and the age says how slow.
func TestClientSlowDriver(t *testing.T) {
	s := newScript(gpu(0, "GPU-a"), gpu(1, "GPU-b"), gpu(2, "GPU-c"), gpu(3, "GPU-d"))
	s.call = 3 * time.Second
	run(t, s, Options{}, func(h *host) {
		h.after(13 * time.Second)
		for range 100 {
			v := h.after(time.Second)
			h.want(v, StateOK, "ok")
			if *v.Age > 13*time.Second {
				t.Fatalf("age %v", *v.Age)
			}
		}
		if n := h.starts.Load(); n != 1 {
			t.Errorf("%d children", n)
		}
	})
}

// A child that says nothing, from its start or suddenly, as when it is stopped.
func TestClientSilentChild(t *testing.T) {
	const text = "NVML blocked: the NVML child is silent ("
	s := newScript(gpu(0, "GPU-a"))
	s.mute = true
	run(t, s, Options{}, func(h *host) {
		v := h.after(startLimit - time.Second)
		h.want(v, StateStarting, "NVML is starting")
		v = h.after(2 * time.Second)
		if v.Status.Code != StateBlocked || !strings.HasPrefix(v.Status.Text, text) {
			t.Errorf("silent from the start: %+v", v.Status)
		}
		s.set(func(s *script) { s.mute = false })
		h.want(h.after(20*time.Second), StateOK, "ok")
		s.set(func(s *script) { s.mute = true })
		v = h.after(7 * time.Second)
		if v.Status.Code != StateBlocked || !strings.HasPrefix(v.Status.Text, text) {
			t.Errorf("suddenly silent: %+v", v.Status)
		}
		h.want(v, v.Status.Code, v.Status.Text)
		s.set(func(s *script) { s.mute = false })
		h.want(h.after(20*time.Second), StateOK, "ok")
	})
}

// sleepyHandler keeps who logs a warning for a time, as a machine that stands still
// does.
type sleepyHandler struct {
	slog.Handler
	sleep time.Duration
}

func (sleepyHandler) Enabled(context.Context, slog.Level) bool { return true }

func (s sleepyHandler) Handle(_ context.Context, r slog.Record) error {
	if r.Level == slog.LevelWarn && strings.HasPrefix(r.Message, "GPU reported") {
		time.Sleep(s.sleep)
	}
	return nil
}

// What this process slept through is no silence of the child, whose word waits to
// be read.
func TestClientSleptItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := slog.New(sleepyHandler{slog.DiscardHandler, time.Minute})
		c, err := New(Options{Executable: "fake", Logger: log})
		if err != nil {
			t.Fatal(err)
		}
		dead := &fakeProcess{exited: make(chan struct{})}
		close(dead.exited)
		w := &watch{client: c, process: dead, messages: make(chan *message, 1), failed: make(chan error, 1)}
		for range 30 {
			again := make(chan bool)
			w.messages <- &message{Xid: &XidEvent{UUID: "GPU-a", Xid: 79}} // a warning
			go func() { again <- w.follow(t.Context()) }()
			time.Sleep(time.Second)
			w.messages <- &message{Status: &Status{Code: StateNoGPUs, Text: "no GPUs"}} // while it sleeps
			time.Sleep(time.Minute)
			w.failed <- errors.New("closed")
			<-again
		}
		if n := testutil.ToFloat64(c.metrics.blocks); n != 0 {
			t.Errorf("silent %v times of 30", n)
		}
	})
}

func TestClientCrash(t *testing.T) {
	run(t, newScript(gpu(0, "GPU-a")), Options{}, func(h *host) {
		h.after(2 * time.Second)
		h.script.set(func(s *script) { s.crash = "exit status 127: symbol lookup error: undefined symbol: nvmlX" })
		v := h.after(1500 * time.Millisecond)
		h.want(v, StateCrashed, "the NVML child ended: exit status 127: symbol lookup error: undefined symbol: nvmlX")
		h.script.set(func(s *script) { s.crash = "" })
		h.want(h.after(20*time.Second), StateOK, "ok")
		if got := testutil.ToFloat64(h.metrics.crashes); got < 1 {
			t.Errorf("%v crashes counted", got)
		}
	})
}

func TestClientWithoutDriver(t *testing.T) {
	s := newScript(gpu(0, "GPU-a"))
	s.status = new(initStatus(codeLibraryNotFound, ""))
	run(t, s, Options{}, func(h *host) {
		h.want(h.after(time.Second/2), StateNoLibrary, "no NVIDIA driver (libnvidia-ml.so.1 not found)")
		v := h.after(time.Hour)
		h.want(v, StateNoLibrary, "no NVIDIA driver (libnvidia-ml.so.1 not found)")
		if n := h.starts.Load(); n < 50 || n > 90 {
			t.Errorf("%d children in an hour without a driver, want about one a minute", n)
		}
		if v.Devices == nil || len(v.Devices) != 0 || v.Age != nil {
			t.Errorf("GPUs from nowhere: %+v", v)
		}
		s.set(func(s *script) { s.status = nil }) // installed later
		h.want(h.after(maxBackOff+time.Second), StateOK, "ok")
	})
}

// At boot the driver may not be ready for some seconds.
func TestClientDriverLateAtBoot(t *testing.T) {
	s := newScript(gpu(0, "GPU-a"))
	s.status = new(initStatus(codeDriverNotLoaded, ""))
	run(t, s, Options{}, func(h *host) {
		h.want(h.after(5*time.Second), StateDriverNotLoaded, "NVIDIA driver not loaded")
		s.set(func(s *script) { s.status = nil })
		h.want(h.after(5*time.Second), StateOK, "ok")
	})
}

func TestClientDriverUpgraded(t *testing.T) {
	s := newScript(gpu(0, "GPU-a"))
	run(t, s, Options{}, func(h *host) {
		h.after(2 * time.Second)
		s.set(func(s *script) {
			s.rebuild, s.status = "GPU 0: driver/library version mismatch", new(initStatus(codeVersionMismatch, ""))
		})
		v := h.after(10 * time.Second)
		h.want(v, StateVersionMismatch, "driver/library version mismatch: reload the NVIDIA driver or reboot")
		if got := v.Judge(DefaultPolicy(), []string{"GPU-a"}); got.String() != "ok" || !cmp.Equal(got.Notes, []string{"version_mismatch(gpu_0)"}) {
			t.Errorf("verdict %s %v: what runs stays usable and is flagged", got, got.Notes)
		}
	})
}

// A GPU falls off the bus: the others are read on, the event arrives, and the
// library is loaded anew now and then until the GPU is back.
func TestClientLostGPU(t *testing.T) {
	s := newScript(gpu(0, "GPU-a"), gpu(1, "GPU-b"))
	run(t, s, Options{}, func(h *host) {
		h.after(40 * time.Second)
		lost := GPU{Index: 1, UUID: "GPU-b", Lost: true}
		s.set(func(s *script) { s.gpus, s.rebuild = []GPU{gpu(0, "GPU-a"), lost}, "GPU 1: GPU is lost" })
		s.xids <- XidEvent{UUID: "GPU-b", Xid: 79}
		time.Sleep(2500 * time.Millisecond)
		s.set(func(s *script) { s.rebuild = "" }) // the next child knows it as lost from the start
		for range 10 {
			v := h.after(time.Second)
			h.want(v, StateOK, "ok")
			if *v.Age > 3*time.Second || *v.Devices[0].MemoryUsedBytes != 60 {
				t.Fatalf("the GPU that works is not read on: %+v", v)
			}
			if got := v.Judge(DefaultPolicy(), []string{"GPU-b"}).String(); got != "exclude:xid_79(gpu_1),gpu_lost(gpu_1)" {
				t.Fatalf("verdict %s", got)
			}
		}
		if n := h.starts.Load(); n != 2 {
			t.Errorf("%d children after the loss, want 2", n)
		}
		v := h.after(10 * time.Minute)
		h.want(v, StateOK, "ok")
		if n := h.starts.Load(); n < 8 || n > 13 {
			t.Errorf("%d children in 10 minutes with a lost GPU, want one a minute", n)
		}
		s.set(func(s *script) { s.gpus = []GPU{gpu(0, "GPU-a"), gpu(1, "GPU-b")} })
		if v := h.after(2 * lostRetry); v.Devices[1].Lost || v.Devices[1].MemoryUsedBytes == nil {
			t.Errorf("a repaired GPU is not back: %+v", v.Devices[1])
		}
	})
}

func TestClientNoGPUs(t *testing.T) {
	run(t, newScript(), Options{}, func(h *host) {
		h.want(h.after(2*time.Second), StateNoGPUs, "no GPUs")
	})
}

func TestClientXidEventsMissing(t *testing.T) {
	s := newScript(gpu(0, "GPU-a"))
	s.xidErr = errors.New("no permission")
	run(t, s, Options{}, func(h *host) {
		v := h.after(5 * time.Second)
		h.want(v, StateOK, "ok")
		if v.XidState != "no permission" {
			t.Errorf("Xid state %q", v.XidState)
		}
		s.set(func(s *script) { s.xidErr = nil })
		if v := h.after(5 * time.Second); v.XidState != "ok" {
			t.Errorf("Xid state %q after recovery", v.XidState)
		}
	})
}

// A wait for events that never returns leaves the readings alone.
func TestClientXidWaitHangs(t *testing.T) {
	s := newScript(gpu(0, "GPU-a"))
	s.hangXid = true
	run(t, s, Options{}, func(h *host) {
		v := h.after(time.Minute)
		h.want(v, StateOK, "ok")
		if v.XidState != "waiting for events does not return" {
			t.Errorf("Xid state %q", v.XidState)
		}
	})
}

func TestClientFrozenReadings(t *testing.T) {
	s := newScript(gpu(0, "GPU-a"))
	run(t, s, Options{FrozenAfter: 10 * time.Second}, func(h *host) {
		if v := h.after(time.Minute); v.Devices[0].FrozenFor != 0 {
			t.Errorf("moving readings are frozen")
		}
		s.set(func(s *script) { s.still = true })
		if v := h.after(9 * time.Second); v.Devices[0].FrozenFor != 0 {
			t.Errorf("frozen after 9 s, limit 10 s")
		}
		v := h.after(3 * time.Second)
		if v.Devices[0].FrozenFor == 0 || v.Devices[0].MemoryUsedBytes != nil {
			t.Errorf("frozen readings are shown: %+v", v.Devices[0])
		}
		if got := v.Judge(DefaultPolicy(), []string{"GPU-a"}).String(); got != "price:readings_frozen(gpu_0)" {
			t.Errorf("verdict %s", got)
		}
	})
}

// rawProcess writes given bytes and ends.
type rawProcess struct {
	io.Reader
	exited chan struct{}
}

func (p rawProcess) Frames() io.Reader       { return p.Reader }
func (p rawProcess) CloseInput()             {}
func (p rawProcess) Kill()                   {}
func (p rawProcess) Close()                  {}
func (p rawProcess) Exited() <-chan struct{} { return p.exited }
func (p rawProcess) Exit() (int, string)     { return 0, "exit status 0" }

func TestClientStrangeChild(t *testing.T) {
	for _, c := range []struct{ says, want string }{
		{"Usage:\n  waypost [command]\n", "bad frame from the NVML child: length 1433624935, allowed is 1 to 1048576"},
		{"\x00\x00\x00\x14{\"v\":2,\"busy\":{} }   ", "bad frame from the NVML child: protocol version 2, this agent speaks 1; install both from one version"},
		{"", "the NVML child ended: exit status 0"},
	} {
		run(t, newScript(), Options{}, func(h *host) {
			h.instead.Store(new(func() (process, error) {
				exited := make(chan struct{})
				close(exited)
				return rawProcess{strings.NewReader(c.says), exited}, nil
			}))
			h.want(h.after(5*time.Second), StateCrashed, c.want)
			h.after(time.Hour)
			if n := h.starts.Load(); n > 90 {
				t.Errorf("%d children in an hour", n)
			}
		})
	}
}

func TestClientCannotStart(t *testing.T) {
	run(t, newScript(gpu(0, "GPU-a")), Options{}, func(h *host) {
		h.instead.Store(new(func() (process, error) {
			return nil, errors.New("fork/exec /usr/libexec/waypost/nvml: no such file or directory")
		}))
		h.after(2 * time.Second)
		h.script.set(func(s *script) { s.crash = "exit status 1" })
		h.want(h.after(5*time.Second), StateFailed,
			"the NVML child cannot be started: fork/exec /usr/libexec/waypost/nvml: no such file or directory")
	})
}

// A helper built without the library says so once and is not started again.
func TestClientHelperNotBuilt(t *testing.T) {
	s := newScript()
	s.status = new(statusNotBuilt())
	run(t, s, Options{}, func(h *host) {
		h.want(h.after(time.Hour), StateNotBuilt, "no GPU facts: built without -tags nvml")
		if n := h.starts.Load(); n != 1 {
			t.Errorf("%d children", n)
		}
	})
}

// Even if nothing follows the child any more, old values are not shown as new.
func TestViewStale(t *testing.T) {
	run(t, newScript(gpu(0, "GPU-a")), Options{}, func(h *host) {
		h.after(2 * time.Second)
		h.mu.Lock()
		h.book.at = h.book.at.Add(-time.Minute)
		h.mu.Unlock()
		h.want(h.View(), StateStale, "GPU data stale 60 s")
	})
}

func TestNewErrors(t *testing.T) {
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{Poll: time.Millisecond}, "gpu.poll is 1ms, allowed is 50ms to 1m0s"},
		{Options{Poll: time.Hour}, "gpu.poll is 1h0m0s"},
		{Options{BlockedAfterPolls: -1}, "blocked after -1 polls"},
	} {
		if _, err := New(c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %q", err, c.want)
		}
	}
}

func TestMetrics(t *testing.T) {
	s := newScript(gpu(0, "GPU-a"), gpu(1, "GPU-b"))
	s.call = 250 * time.Millisecond // from the first call, which comes at once
	run(t, s, Options{}, func(h *host) {
		h.script.xids <- XidEvent{UUID: "GPU-a", Xid: 79}
		h.after(1600 * time.Millisecond)
		want := `
# HELP waypost_gpu_xids_total Xid events by class.
# TYPE waypost_gpu_xids_total counter
waypost_gpu_xids_total{class="hardware"} 1
# HELP waypost_nvml_blocked_seconds How long the driver has not answered; 0 while it does.
# TYPE waypost_nvml_blocked_seconds gauge
waypost_nvml_blocked_seconds 0
# HELP waypost_nvml_blocked_total NVML children ended because a driver call did not return.
# TYPE waypost_nvml_blocked_total counter
waypost_nvml_blocked_total 0
# HELP waypost_nvml_call_seconds Time of calls into the driver library.
# TYPE waypost_nvml_call_seconds summary
waypost_nvml_call_seconds_sum{call="nvmlDeviceGetUUID"} 1
waypost_nvml_call_seconds_count{call="nvmlDeviceGetUUID"} 4
# HELP waypost_nvml_child_crashes_total NVML children that ended by themselves.
# TYPE waypost_nvml_child_crashes_total counter
waypost_nvml_child_crashes_total 0
# HELP waypost_nvml_child_starts_total NVML child processes started.
# TYPE waypost_nvml_child_starts_total counter
waypost_nvml_child_starts_total 1
`
		if err := testutil.GatherAndCompare(h.registry, strings.NewReader(want)); err != nil {
			t.Error(err)
		}
		h.script.set(func(s *script) { s.hang = "nvmlDeviceGetUUID" })
		h.after(30 * time.Second)
		families, err := h.registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "waypost_nvml_blocked_seconds" {
				if s := f.GetMetric()[0].GetGauge().GetValue(); s < 20 || s > 30 {
					t.Errorf("blocked for %v s, hung for 30 s", s)
				}
			}
		}
	})
}
