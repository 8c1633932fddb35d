package nvml

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// These tests drive the real binding, in the real child process, against a
// driver library built here.

// patience bounds how long a test waits for something to happen.
const patience = 60 * time.Second

// tools is what the tests need; err says why there is none.
type tools struct {
	child                 string // built with -tags nvml
	library, old, strange string // driver libraries
	err                   error
}

var buildTools = sync.OnceValue(func() (t tools) {
	if t.err = buildAll(&t); t.err != nil {
		t.err = fmt.Errorf("no test against the real binding: %w", t.err)
	}
	return t
})

func buildAll(t *tools) (err error) {
	for _, tool := range []string{"go", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return err
		}
	}
	if out, err := exec.Command("go", "env", "CGO_ENABLED").Output(); err != nil || strings.TrimSpace(string(out)) != "1" {
		return errors.New("cgo is off")
	}
	module, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		return fmt.Errorf("find go-nvml: %w", err)
	}
	include := filepath.Join(strings.TrimSpace(string(module)), "pkg", "nvml")
	if buildFolder, err = os.MkdirTemp("", "waypost-nvml-"); err != nil {
		return err
	}
	strangeSource := filepath.Join(buildFolder, "strange.c")
	if err := os.WriteFile(strangeSource, []byte("int something_else(void) { return 1; }\n"), 0o600); err != nil {
		return err
	}
	gcc := func(name string, arguments ...string) (string, error) {
		out := filepath.Join(buildFolder, name)
		base := []string{"-shared", "-fPIC", "-O1", "-I", include, "-Wl,-soname,libnvidia-ml.so.1", "-o", out}
		if text, err := exec.Command("gcc", append(base, arguments...)...).CombinedOutput(); err != nil {
			return "", fmt.Errorf("gcc: %w\n%s", err, text)
		}
		return out, nil
	}
	shim := filepath.Join("testdata", "shim.c")
	if t.library, err = gcc("libnvidia-ml.so.1", shim); err != nil {
		return err
	}
	if t.old, err = gcc("libnvidia-ml-old.so.1", "-DOLD_DRIVER", shim); err != nil {
		return err
	}
	if t.strange, err = gcc("strange.so", strangeSource); err != nil {
		return err
	}
	t.child = filepath.Join(buildFolder, "child")
	build := exec.Command("go", "build", "-tags", "nvml", "-o", t.child, "./testdata/child")
	build.Env = append(os.Environ(), "CGO_CFLAGS=-O2 -g -Wno-deprecated-declarations")
	if text, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go build -tags nvml: %w\n%s", err, text)
	}
	return nil
}

func needTools(t *testing.T) tools {
	t.Helper()
	built := buildTools()
	if built.err != nil {
		if strings.Contains(built.err.Error(), "go build -tags nvml") || strings.Contains(built.err.Error(), "gcc: ") {
			t.Fatal(built.err) // there is a compiler, and ours is what fails
		}
		t.Skip(built.err)
	}
	return built
}

// driver is a scripted driver library and a client that reads it.
type driver struct {
	*Client
	t     *testing.T
	state string
}

const twoGPUs = `gpus 2
driver 580.65.06
mem 0 150754820096 644000000 90000000000 60110820096
mem 1 150754820096 644000000 150000000000 110820096
util 0 73 20
util 1 0 0
temp 0 61
temp 1 33
clock 0 1755 1980
clock 1 345 1980
power 0 512345
power 1 71002
ecc 0 12 1
ecc 1 0 0
throttle 0 60
throttle 1 1
remap 0 1 0
remap 1 0 0
mig 0 0
mig 1 0
nvlink 0 0 1
nvlink 0 1 1
nvlink 0 2 0
nvlink 1 0 1
nvlink 1 1 1
nvlink 1 2 1
process 0 4242 60000000000
process 0 4243 -1
`

// startDriver runs a client on a library until the test ends.
func startDriver(t *testing.T, executable, library, state string, options Options) *driver {
	t.Helper()
	d := &driver{t: t, state: filepath.Join(t.TempDir(), "state")}
	d.write(state)
	d.start(executable, library, options)
	return d
}

// start runs the client on the driver's state until the test ends.
func (d *driver) start(executable, library string, options Options) {
	t := d.t
	t.Helper()
	options.Executable, options.Library = executable, library
	options.Environ = append(options.Environ, "FAKE_NVML="+d.state)
	if options.Poll == 0 {
		options.Poll = minPoll
	}
	if options.BlockedAfterPolls == 0 {
		// Only tests of a hung driver want to see one on a busy machine.
		options.BlockedAfterPolls = int(patience / options.Poll)
	}
	if options.FrozenAfter == 0 {
		options.FrozenAfter = time.Hour // the script's readings stand still
	}
	var err error
	if d.Client, err = New(options); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = d.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(patience):
			t.Error("Run does not end")
		}
	})
}

// write replaces the script in one step, as a reader may look at any time.
func (d *driver) write(state string) {
	d.t.Helper()
	if err := os.WriteFile(d.state+".new", []byte(state), 0o600); err != nil {
		d.t.Fatal(err)
	}
	if err := os.Rename(d.state+".new", d.state); err != nil {
		d.t.Fatal(err)
	}
}

// until waits for a view that ok accepts.
func (d *driver) until(what string, ok func(View) bool) View {
	d.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		v := d.View()
		if ok(v) {
			return v
		}
		if time.Now().After(deadline) {
			d.t.Fatalf("no %s in %v; last view: %+v", what, patience, v)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func inState(code StateCode) func(View) bool {
	return func(v View) bool { return v.Status.Code == code }
}

func uuid(i int) string { return fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i) }

// cmpReadings compares what a driver says and no moment of arrival.
var cmpReadings = cmpopts.IgnoreFields(XidSeen{}, "Age")

func TestRealBindingReads(t *testing.T) {
	b := needTools(t)
	d := startDriver(t, b.child, b.library, twoGPUs, Options{})
	v := d.until("readings", inState(StateOK))
	notTold := map[string]string{"fabric": "not supported", "nvlinkPeers": "not supported", "paths": "not supported", "pcie": "not supported"}
	want := []Device{{
		GPU: GPU{
			Index: 0, UUID: uuid(0), Name: "Fake H200", PCIBusID: "00000000:1B:00.0", MIG: new(false),
			MemoryTotalBytes: new(uint64(150754820096)), MemoryUsedBytes: new(uint64(60110820096)),
			MemoryFreeBytes: new(uint64(90000000000)), MemoryReservedBytes: new(uint64(644000000)),
			UtilizationRatio: new(0.73), TemperatureCelsius: new(61.0), SMClockMHz: new(1755.0), SMClockMaxMHz: new(1980.0),
			ThrottleReasons: []string{ThrottleThermal, ThrottleHardwareThermal}, PowerWatts: new(512.345),
			ECCCorrected: new(uint64(12)), ECCUncorrected: new(uint64(1)), RowRemapPending: new(true), RowRemapFailed: new(false),
			NVLinkUp: new(2), NVLinkTotal: new(3),
			Processes: []Process{{PID: 4242, MemoryBytes: new(uint64(60000000000))}, {PID: 4243}}, Missing: notTold,
		},
		LinksExpected: new(3),
	}, {
		GPU: GPU{
			Index: 1, UUID: uuid(1), Name: "Fake H200", PCIBusID: "00000000:1C:00.0", MIG: new(false),
			MemoryTotalBytes: new(uint64(150754820096)), MemoryUsedBytes: new(uint64(110820096)),
			MemoryFreeBytes: new(uint64(150000000000)), MemoryReservedBytes: new(uint64(644000000)),
			UtilizationRatio: new(0.0), TemperatureCelsius: new(33.0), SMClockMHz: new(345.0), SMClockMaxMHz: new(1980.0),
			ThrottleReasons: []string{ThrottleIdle}, PowerWatts: new(71.002),
			ECCCorrected: new(uint64(0)), ECCUncorrected: new(uint64(0)), RowRemapPending: new(false), RowRemapFailed: new(false),
			NVLinkUp: new(3), NVLinkTotal: new(3), Processes: []Process{}, Missing: notTold,
		},
		LinksExpected: new(3),
	}}
	if diff := cmp.Diff(want, v.Devices, cmpReadings); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if v.Driver != (Driver{"580.65.06", "13.580.00.00"}) || v.XidState != "ok" {
		t.Errorf("driver %+v, Xid state %q", v.Driver, v.XidState)
	}
	if got := v.Judge(DefaultPolicy(), []string{uuid(0)}).String(); got != "exclude:nvlink_down(gpu_0)" {
		t.Errorf("verdict on GPU 0: %s", got)
	}

	d.write(strings.Replace(twoGPUs, "temp 1 33", "temp 1 34", 1))
	d.until("changed temperature", func(v View) bool {
		return v.Status.Code == StateOK && *v.Devices[1].TemperatureCelsius == 34
	})
}

func TestRealBindingXid(t *testing.T) {
	b := needTools(t)
	d := startDriver(t, b.child, b.library, twoGPUs+"xid 0 31\n", Options{})
	d.until("readings", inState(StateOK))
	d.write(twoGPUs + "xid 0 31\nxid 1 79\n")
	v := d.until("Xid on GPU 1", func(v View) bool { return len(v.Devices) == 2 && len(v.Devices[1].Xids) > 0 })
	if diff := cmp.Diff([]XidSeen{{Xid: 79, Count: 1}}, v.Devices[1].Xids, cmpReadings); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if len(v.Devices[0].Xids) != 0 {
		t.Errorf("GPU 0 got %+v", v.Devices[0].Xids)
	}
	d.write(twoGPUs + "xid 0 31\nxid 1 79\nxid -1 48\n")
	d.until("Xid without a GPU on both", func(v View) bool { return len(v.Devices[0].Xids) == 1 && len(v.Devices[1].Xids) == 2 })
}

// A library with the functions of an old driver: what it lacks is unknown and
// says so; nothing that it lacks is called, for that would end the process.
func TestGPU11OldDriver(t *testing.T) {
	b := needTools(t)
	d := startDriver(t, b.child, b.old, twoGPUs, Options{})
	g := d.until("readings", inState(StateOK)).Devices[0].GPU
	want := GPU{
		Index: 0, UUID: uuid(0), Name: "Fake H200", PCIBusID: "0000:1B:00.0",
		MemoryTotalBytes: new(uint64(150754820096)), MemoryUsedBytes: new(uint64(60754820096)), MemoryFreeBytes: new(uint64(90000000000)),
		UtilizationRatio: new(0.73), TemperatureCelsius: new(61.0), SMClockMHz: new(1755.0), SMClockMaxMHz: new(1980.0),
		ThrottleReasons: []string{ThrottleThermal, ThrottleHardwareThermal}, PowerWatts: new(512.345),
		ECCCorrected: new(uint64(12)), ECCUncorrected: new(uint64(1)), NVLinkUp: new(2), NVLinkTotal: new(3),
		Processes: []Process{{PID: 4242, MemoryBytes: new(uint64(60000000000))}, {PID: 4243}},
		Missing: map[string]string{
			"rowRemapPending": "not in this driver", "rowRemapFailed": "not in this driver", "mig": "not in this driver",
			"fabric": "not in this driver", "nvlinkPeers": "not in this driver", "paths": "not in this driver", "pcie": "not supported",
		},
	}
	if diff := cmp.Diff(want, g); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	d.until("second reading", func(v View) bool { return v.Status.Code == StateOK })
}

// What the driver does not support is unknown, never zero.
func TestRealBindingNotSupported(t *testing.T) {
	b := needTools(t)
	d := startDriver(t, b.child, b.library, "gpus 1\nfail nvmlDeviceGetPciInfo_v3 3\nfail nvmlDeviceGetComputeRunningProcesses_v3 4\n"+
		"fail nvmlDeviceGetSupportedEventTypes 3\n", Options{})
	v := d.until("readings", func(v View) bool { return v.Status.Code == StateOK && v.XidState != "ok" })
	want := GPU{
		UUID: uuid(0), Name: "Fake H200", ThrottleReasons: []string{},
		Missing: map[string]string{
			"pciBusId": "not supported", "memory": "not supported", "utilizationRatio": "not supported",
			"temperatureCelsius": "not supported", "smClockMHz": "not supported", "smClockMaxMHz": "not supported",
			"powerWatts": "not supported", "eccCorrected": "not supported", "eccUncorrected": "not supported",
			"rowRemapPending": "not supported", "rowRemapFailed": "not supported", "mig": "not supported",
			"nvlinkTotal": "not supported", "pcie": "not supported", "fabric": "not supported", "processes": "no permission", "xids": "not supported",
		},
	}
	if diff := cmp.Diff(want, v.Devices[0].GPU); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if v.XidState != "not supported" {
		t.Errorf("Xid state %q", v.XidState)
	}
	if got := v.Judge(DefaultPolicy(), []string{uuid(0)}).String(); got != "ok" {
		t.Errorf("a GPU that cannot be read is not eligible: %s", got)
	}
}

func TestRealBindingHungCall(t *testing.T) {
	b := needTools(t)
	d := startDriver(t, b.child, b.library, twoGPUs, Options{Poll: 100 * time.Millisecond, BlockedAfterPolls: 30})
	d.until("readings", inState(StateOK))
	d.write(twoGPUs + "slow nvmlDeviceGetPowerUsage 3600000\n")
	// A child that a busy machine keeps from speaking is blocked as well: it is
	// replaced, and the next one names the call.
	v := d.until("blocked in the call", func(v View) bool {
		return v.Status.Code == StateBlocked && strings.HasPrefix(v.Status.Text, "NVML blocked: nvmlDeviceGetPowerUsage on GPU 0 does not return (")
	})
	if len(v.Devices) != 2 || v.Devices[0].Name != "Fake H200" || v.Devices[0].MemoryUsedBytes != nil || v.Devices[0].TemperatureCelsius != nil {
		t.Errorf("devices %+v", v.Devices)
	}
	d.write(twoGPUs)
	d.until("readings again", inState(StateOK))
}

func TestRealBindingSlow(t *testing.T) {
	b := needTools(t)
	d := startDriver(t, b.child, b.library, twoGPUs+"slow nvmlInit_v2 300\nslow nvmlDeviceGetTemperatureV 100\n", Options{})
	v := d.until("readings", inState(StateOK))
	if *v.Devices[1].TemperatureCelsius != 33 {
		t.Errorf("temperature %v", *v.Devices[1].TemperatureCelsius)
	}
}

func TestRealBindingInitFails(t *testing.T) {
	b := needTools(t)
	notLibrary := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	if err := os.WriteFile(notLibrary, []byte("not a library\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, library, state string
		want                 Status
	}{
		{"driver not loaded", b.library, "fail nvmlInit_v2 9\n", initStatus(codeDriverNotLoaded, "")},
		{"version mismatch", b.library, "fail nvmlInit_v2 18\n", initStatus(codeVersionMismatch, "")},
		{"no permission", b.library, "fail nvmlInit_v2 4\n", initStatus(codeNoPermission, "")},
		{"unknown", b.library, "fail nvmlInit_v2 999\n", Status{StateFailed, "NVML cannot be initialized: unknown driver error"}},
		{"no GPU", b.library, "gpus 0\n", Status{StateNoGPUs, "no GPUs"}},
		{"cannot count", b.library, "fail nvmlDeviceGetCount_v2 999\n", Status{StateFailed, "NVML cannot list GPUs: unknown driver error"}},
		{"no file", "/nowhere/libnvidia-ml.so.1", "", Status{StateNoLibrary, "no NVIDIA driver (/nowhere/libnvidia-ml.so.1 not found or not a library)"}},
		{"not a library", notLibrary, "", Status{StateNoLibrary, "no NVIDIA driver (" + notLibrary + " not found or not a library)"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := startDriver(t, b.child, c.library, c.state, Options{})
			v := d.until("state", func(v View) bool { return v.Status.Code != StateStarting })
			if v.Status != c.want || len(v.Devices) != 0 {
				t.Errorf("got %+v with %d GPUs, want %+v", v.Status, len(v.Devices), c.want)
			}
		})
	}
}

// On most hosts without a GPU the loader finds no library at all.
func TestGPU04WithoutLibrary(t *testing.T) {
	b := needTools(t)
	d := startDriver(t, b.child, "", "", Options{})
	v := d.until("state", func(v View) bool { return v.Status.Code != StateStarting })
	if v.Status.Code == StateOK || v.Status.Code == StateDriverNotLoaded || v.Status.Code == StateNoGPUs {
		t.Skip("needs a host without an NVIDIA driver")
	}
	if want := (Status{StateNoLibrary, "no NVIDIA driver (libnvidia-ml.so.1 not found)"}); v.Status != want {
		t.Errorf("got %+v, want %+v", v.Status, want)
	}
}

func TestGPU09DriverLateAtBoot(t *testing.T) {
	b := needTools(t)
	d := startDriver(t, b.child, b.library, "fail nvmlInit_v2 9\n", Options{})
	d.until("state", inState(StateDriverNotLoaded))
	d.write(twoGPUs)
	d.until("readings without a restart", inState(StateOK))
}

// The loader ends a process that calls a function which is not there. The
// parent lives on and says what happened.
func TestRealBindingLoaderEndsChild(t *testing.T) {
	b := needTools(t)
	d := startDriver(t, b.child, b.strange, "", Options{})
	v := d.until("crashed state", inState(StateCrashed))
	if !strings.HasPrefix(v.Status.Text, "the NVML child ended: exit status 127: ") || !strings.Contains(v.Status.Text, "undefined symbol: nvmlInit") {
		t.Errorf("text %q", v.Status.Text)
	}
}

func TestRealBindingLostGPU(t *testing.T) {
	b := needTools(t)
	d := startDriver(t, b.child, b.library, twoGPUs, Options{})
	d.until("readings", inState(StateOK))
	d.write(twoGPUs + "lost 1\nxid 1 79\n")
	v := d.until("loss, event and a new child", func(v View) bool {
		return v.Status.Code == StateOK && v.Devices[1].Lost && len(v.Devices[1].Xids) == 1 && v.Devices[1].Missing["handle"] != ""
	})
	if v.Devices[1].UUID != uuid(1) || v.Devices[1].Name != "Fake H200" || v.Devices[1].PowerWatts != nil || v.Devices[1].Processes != nil {
		t.Errorf("lost GPU %+v", v.Devices[1])
	}
	if v.Devices[0].MemoryUsedBytes == nil || *v.Devices[0].TemperatureCelsius != 61 {
		t.Errorf("the GPU that works is not read: %+v", v.Devices[0])
	}
	if got := v.Judge(DefaultPolicy(), []string{uuid(1)}).String(); got != "exclude:xid_79(gpu_1),gpu_lost(gpu_1)" {
		t.Errorf("verdict %s", got)
	}
}

// What the library prints gets to no frame, and immediate binding asked for by
// the environment does not reach the child.
func TestRealBindingKeepsChildClean(t *testing.T) {
	b := needTools(t)
	t.Setenv("LD_BIND_NOW", "1")
	d := startDriver(t, b.child, b.library, twoGPUs+"print NVRM: this is no frame\n", Options{})
	d.until("readings", inState(StateOK))
}

// A program that ignores the command nvml and is its own child starts no
// third one.
func TestChildStartsNoChild(t *testing.T) {
	t.Setenv(childMark, "1")
	d := startDriver(t, "/bin/true", "", "", Options{})
	v := d.until("state", func(v View) bool { return v.Status.Code != StateStarting })
	if want := (Status{StateFailed, "the NVML child cannot be started: this process is an NVML child itself"}); v.Status != want {
		t.Errorf("got %+v, want %+v", v.Status, want)
	}
}

func TestRealStartFails(t *testing.T) {
	d := startDriver(t, "/nowhere/waypost", "", "", Options{})
	v := d.until("state", func(v View) bool { return v.Status.Code != StateStarting })
	if v.Status.Code != StateFailed || !strings.Contains(v.Status.Text, "/nowhere/waypost: no such file or directory") {
		t.Errorf("%+v", v.Status)
	}
}

func TestChildEndsWithParent(t *testing.T) {
	b := needTools(t)
	for _, c := range []struct {
		name, state string
		stop        bool // the child cannot see the end of its input
	}{
		{name: "working"},
		{name: "inside a driver call", state: "slow nvmlInit_v2 3600000\n"},
		{name: "stopped", stop: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			folder := t.TempDir()
			pidFile, state := filepath.Join(folder, "pid"), filepath.Join(folder, "state")
			if err := os.WriteFile(state, []byte(twoGPUs+"pidfile "+pidFile+"\n"+c.state), 0o600); err != nil {
				t.Fatal(err)
			}
			parent := exec.Command(b.child, "parent", b.library)
			parent.Env = append(os.Environ(), "FAKE_NVML="+state)
			if err := parent.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = parent.Wait() }()
			defer func() { _ = parent.Process.Kill() }()
			pid := 0
			waitFor(t, "pid of the child", func() bool {
				text, _ := os.ReadFile(pidFile)
				n, err := strconv.Atoi(strings.TrimSpace(string(text)))
				pid = n
				return err == nil && strings.HasSuffix(string(text), "\n")
			})
			if c.stop {
				if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
			}
			if err := parent.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "end of the child", func() bool { return !running(pid) })
		})
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no %s in %v", what, patience)
		}
	}
}

// running says whether a process is there and not only waits to be reaped.
func running(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(after, "Z") && !strings.HasPrefix(after, "X")
}

// The plain build has the command, no cgo and no binding, and says so.
func TestPlainBuild(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skipf("needs the go command: %v", err)
	}
	plain := filepath.Join(t.TempDir(), "child")
	build := exec.Command("go", "build", "-o", plain, "./testdata/child")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil || len(text) > 0 {
		t.Fatalf("CGO_ENABLED=0 go build: %v\n%s", err, text)
	}
	list := exec.Command("go", "list", "-deps", ".")
	list.Env = append(os.Environ(), "CGO_ENABLED=1")
	deps, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(deps), "go-nvml") {
		t.Error("without -tags nvml the binding is built in, with its compiler warnings")
	}
	d := startDriver(t, plain, "", "", Options{})
	v := d.until("state", func(v View) bool { return v.Status.Code != StateStarting })
	if want := (Status{StateNotBuilt, "no GPU facts: built without -tags nvml"}); v.Status != want {
		t.Errorf("got %+v, want %+v", v.Status, want)
	}
	if Built {
		return
	}
	c, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.Run(ctx); err != nil || c.View().Status != statusNotBuilt() {
		t.Errorf("without a helper: %v, %+v", err, c.View().Status)
	}
}

func TestCommandRefusesFlags(t *testing.T) {
	for _, arguments := range [][]string{{"--poll", "1ms"}, {"--poll", "1h"}, {"extra"}, {"--unknown"}} {
		cmd := Command()
		cmd.SetArgs(arguments)
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		if err := cmd.Execute(); err == nil {
			t.Errorf("%v: no error", arguments)
		}
	}
	if !Command().Hidden {
		t.Error("the child's command is not hidden")
	}
}
