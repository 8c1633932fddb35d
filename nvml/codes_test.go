package nvml

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestThrottleWords(t *testing.T) {
	for _, c := range []struct {
		mask uint64
		want []string
	}{
		{0, []string{}},
		{1, []string{"idle"}},
		{0x48, []string{"hardware slowdown", "hardware thermal slowdown"}},
		{0x80, []string{"power brake"}},
		{0x24, []string{"power cap", "thermal slowdown"}},
		{1 << 40, []string{"reason 0x10000000000"}},
	} {
		if diff := cmp.Diff(c.want, throttleWords(c.mask)); diff != "" {
			t.Errorf("mask %#x (-want +got):\n%s", c.mask, diff)
		}
	}
	if got := len(throttleWords(^uint64(0))); got != 64 {
		t.Errorf("all bits give %d words, want one per bit", got)
	}
}

func TestInitStatus(t *testing.T) {
	for _, c := range []struct {
		code    int
		library string
		want    Status
	}{
		{codeLibraryNotFound, "", Status{StateNoLibrary, "no NVIDIA driver (libnvidia-ml.so.1 not found)"}},
		{codeLibraryNotFound, "/x/y.so", Status{StateNoLibrary, "no NVIDIA driver (/x/y.so not found or not a library)"}},
		{codeDriverNotLoaded, "", Status{StateDriverNotLoaded, "NVIDIA driver not loaded"}},
		{codeVersionMismatch, "", Status{StateVersionMismatch, "driver/library version mismatch: reload the NVIDIA driver or reboot"}},
		{codeNoPermission, "", Status{StateNoPermission, "no permission to use the NVIDIA driver: allow /dev/nvidiactl and /dev/nvidia*"}},
		{codeGPUNotFound, "", Status{StateNoGPUs, "no GPUs"}},
		{codeUnknown, "", Status{StateFailed, "NVML cannot be initialized: unknown driver error"}},
		{4711, "", Status{StateFailed, "NVML cannot be initialized: driver error 4711"}},
	} {
		got := initStatus(c.code, c.library)
		if got != c.want {
			t.Errorf("code %d: got %+v, want %+v", c.code, got, c.want)
		}
		if err := got.check(); err != nil {
			t.Errorf("code %d: a child may not report it: %v", c.code, err)
		}
	}
	if err := new(statusNotBuilt()).check(); err != nil {
		t.Errorf("not built: a child may not report it: %v", err)
	}
}

func TestUnknownIsNotZero(t *testing.T) {
	g := &GPU{}
	if v := known(g, "powerWatts", codeSuccess, 0.0); v == nil || *v != 0 {
		t.Errorf("a known 0 became %v", v)
	}
	if v := known(g, "memory", codeNotSupported, uint64(0)); v != nil {
		t.Errorf("not supported became %v", *v)
	}
	if v := known(g, "temperatureCelsius", codeFunctionNotFound, 0.0); v != nil {
		t.Errorf("a missing function became %v", *v)
	}
	want := map[string]string{"memory": "not supported", "temperatureCelsius": "not in this driver"}
	if diff := cmp.Diff(want, g.Missing); diff != "" {
		t.Errorf("reasons (-want +got):\n%s", diff)
	}
	if g.Lost {
		t.Error("lost without a loss")
	}
	known(g, "eccCorrected", codeGPUIsLost, uint64(0))
	if !g.Lost {
		t.Error("a lost GPU was not noticed")
	}
}

func TestNeedsRebuild(t *testing.T) {
	for code := range 40 {
		want := code == codeUninitialized || code == codeDriverNotLoaded || code == codeGPUIsLost || code == codeVersionMismatch
		if needsRebuild(code) != want {
			t.Errorf("code %d (%s): got %v", code, wordsOf(code), !want)
		}
	}
}

func TestMergeProcesses(t *testing.T) {
	got := mergeProcesses(
		[]Process{{PID: 30, MemoryBytes: new(uint64(5))}, {PID: 10}, {PID: 20, MemoryBytes: new(uint64(7))}},
		[]Process{{PID: 10, MemoryBytes: new(uint64(1))}, {PID: 20, MemoryBytes: new(uint64(6))}, {PID: 30}},
	)
	want := []Process{{PID: 10, MemoryBytes: new(uint64(1))}, {PID: 20, MemoryBytes: new(uint64(7))}, {PID: 30, MemoryBytes: new(uint64(5))}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := mergeProcesses(nil, nil); got == nil || len(got) != 0 {
		t.Errorf("no process is %#v, want known and empty", got)
	}
	if processMemory(valueNotAvailable) != nil {
		t.Error("the library's mark for unknown became a number")
	}
}

// The order of the lists does not matter, and the result is bounded.
func TestMergeProcessesLaws(t *testing.T) {
	process := rapid.Custom(func(t *rapid.T) Process {
		p := Process{PID: rapid.Uint32Range(1, 2000).Draw(t, "pid")}
		if rapid.Bool().Draw(t, "known") {
			p.MemoryBytes = new(rapid.Uint64Range(0, 9).Draw(t, "bytes"))
		}
		return p
	})
	rapid.Check(t, func(t *rapid.T) {
		a := rapid.SliceOfN(process, 0, 700).Draw(t, "a")
		b := rapid.SliceOfN(process, 0, 700).Draw(t, "b")
		ab, ba := mergeProcesses(a, b), mergeProcesses(b, a)
		if diff := cmp.Diff(ab, ba); diff != "" {
			t.Fatalf("order matters:\n%s", diff)
		}
		if len(ab) > maxProcesses {
			t.Fatalf("%d processes", len(ab))
		}
	})
}

func TestDescribeXid(t *testing.T) {
	for xid, want := range map[uint32]XidClass{31: XidApplication, 79: XidHardware, 65000: XidUnclassified} {
		class, words := DescribeXid(xid)
		if class != want || (words == "") != (want == XidUnclassified) {
			t.Errorf("%d: %s %q", xid, class, words)
		}
	}
}
