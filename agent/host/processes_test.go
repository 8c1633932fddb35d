package host

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"waypost/nvml"
)

func device(uuid string, pids ...uint32) nvml.Device {
	d := nvml.Device{GPU: nvml.GPU{UUID: uuid, Processes: []nvml.Process{}}}
	for _, pid := range pids {
		d.Processes = append(d.Processes, nvml.Process{PID: pid})
	}
	return d
}

// The fixture: engine 100 → 200 → 201, engine 300 → 301, and 400 and 401, each
// the other's parent. The names hold parentheses and spaces.
func TestMapGPUs(t *testing.T) {
	unknown := nvml.Device{GPU: nvml.GPU{UUID: "GPU-e"}}
	for _, c := range []struct {
		name    string
		engines []int
		gpus    []nvml.Device
		want    EngineGPUs
	}{
		{
			name: "workers of two engines", engines: []int{100, 300},
			gpus: []nvml.Device{device("GPU-a", 201), device("GPU-b", 200, 201), device("GPU-c", 301), device("GPU-d")},
			want: EngineGPUs{UUIDs: map[int][]string{100: {"GPU-a", "GPU-b"}, 300: {"GPU-c"}}, Complete: true},
		},
		{
			name: "the engine itself", engines: []int{100}, gpus: []nvml.Device{device("GPU-a", 100)},
			want: EngineGPUs{UUIDs: map[int][]string{100: {"GPU-a"}}, Complete: true},
		},
		{
			name: "an engine started by an engine", engines: []int{100, 200}, gpus: []nvml.Device{device("GPU-a", 201)},
			want: EngineGPUs{UUIDs: map[int][]string{200: {"GPU-a"}}, Complete: true},
		},
		{
			name: "two engines on one GPU", engines: []int{100, 300}, gpus: []nvml.Device{device("GPU-a", 201, 301)},
			want: EngineGPUs{UUIDs: map[int][]string{100: {"GPU-a"}, 300: {"GPU-a"}}, Complete: true},
		},
		{
			name: "foreign and vanished", engines: []int{100}, gpus: []nvml.Device{device("GPU-a", 201, 301, 999)},
			want: EngineGPUs{UUIDs: map[int][]string{100: {"GPU-a"}}, Complete: true, Foreign: map[string][]nvml.Process{"GPU-a": {{PID: 301}, {PID: 999}}}},
		},
		{
			name: "a ring of parents", engines: []int{100}, gpus: []nvml.Device{device("GPU-a", 400)},
			want: EngineGPUs{Complete: true, Foreign: map[string][]nvml.Process{"GPU-a": {{PID: 400}}}},
		},
		{
			name: "process list unknown", engines: []int{100}, gpus: []nvml.Device{device("GPU-a", 201), unknown},
			want: EngineGPUs{UUIDs: map[int][]string{100: {"GPU-a"}}},
		},
		{name: "no GPU", engines: []int{100}, want: EngineGPUs{Complete: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := MapGPUs(c.engines, c.gpus, ProcParents("testdata/proc"))
			if c.want.UUIDs == nil {
				c.want.UUIDs = map[int][]string{}
			}
			if c.want.Foreign == nil {
				c.want.Foreign = map[string][]nvml.Process{}
			}
			// What they hold and who owns a process have a test of their own.
			if diff := cmp.Diff(c.want, got, cmpopts.IgnoreFields(EngineGPUs{}, "MemoryBytes", "Owner")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// What an engine's processes hold is known only where it is of each of them, and
// a process on an instance is on that instance, not on all of the GPU.
func TestMapGPUsHoldings(t *testing.T) {
	bytes := func(n uint64) *uint64 { return &n }
	whole := nvml.Device{GPU: nvml.GPU{UUID: "GPU-a", Processes: []nvml.Process{
		{PID: 101, MemoryBytes: bytes(70)}, {PID: 300, MemoryBytes: bytes(5)}, {PID: 999, MemoryBytes: bytes(9)},
	}}}
	split := nvml.Device{GPU: nvml.GPU{Index: 1, UUID: "GPU-b", Processes: []nvml.Process{{PID: 102, MemoryBytes: bytes(30)}, {PID: 301}}, Instances: []nvml.Instance{
		{UUID: "MIG-1", Processes: []nvml.Process{{PID: 102, MemoryBytes: bytes(30)}}}, {UUID: "MIG-2", Processes: []nvml.Process{{PID: 301}}},
	}}}
	parents := func(pid int) (int, bool) { return pid / 100 * 100, pid%100 != 0 && pid < 400 }
	got := MapGPUs([]int{100, 300}, []nvml.Device{whole, split}, parents)
	want := EngineGPUs{
		UUIDs:       map[int][]string{100: {"GPU-a", "MIG-1"}, 300: {"GPU-a", "MIG-2"}},
		MemoryBytes: map[int]uint64{100: 100}, Complete: true,
		Owner:   map[uint32]int{101: 100, 102: 100, 300: 300, 301: 300},
		Foreign: map[string][]nvml.Process{"GPU-a": {{PID: 999, MemoryBytes: bytes(9)}}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Every process is given to the engine that an independent walk down finds, or
// is foreign.
func TestMapGPUsAgainstDescendants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 30).Draw(t, "processes")
		parent := map[int]int{}
		for pid := 2; pid <= n; pid++ {
			parent[pid] = rapid.IntRange(1, pid-1).Draw(t, "parent")
		}
		engines := rapid.SliceOfNDistinct(rapid.IntRange(2, n), 0, 4, rapid.ID).Draw(t, "engines")
		isEngine := map[int]bool{}
		for _, e := range engines {
			isEngine[e] = true
		}
		owner := map[int]int{}
		for pid := 2; pid <= n; pid++ { // parents come first
			switch {
			case isEngine[pid]:
				owner[pid] = pid
			default:
				owner[pid] = owner[parent[pid]]
			}
		}
		pid := rapid.IntRange(2, n).Draw(t, "pid")
		got := MapGPUs(engines, []nvml.Device{device("GPU-a", uint32(pid))}, func(p int) (int, bool) {
			pp, ok := parent[p]
			return pp, ok
		})
		if want := owner[pid]; want == 0 && len(got.Foreign["GPU-a"]) != 1 || want != 0 && len(got.UUIDs[want]) != 1 {
			t.Fatalf("process %d belongs to %d, got %+v", pid, want, got)
		}
	})
}

func TestParentOfThisProcess(t *testing.T) {
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		t.Skip("needs /proc")
	}
	if parent, ok := ProcParents("")(os.Getpid()); !ok || parent != os.Getppid() {
		t.Errorf("got %d %v, want %d", parent, ok, os.Getppid())
	}
}

func FuzzParentOf(f *testing.F) {
	f.Add("201 (VLLM::Worker) 0 (x) S 200 201 201 0")
	f.Add("1 (init) S 0 1 1")
	f.Add("1 (init) S -1 1 1")
	f.Add(") S")
	f.Fuzz(func(t *testing.T, stat string) {
		parent, err := parentOf(stat)
		if err == nil && (parent < 0 || !strings.ContainsRune(stat, ')')) {
			t.Errorf("%q has parent %d", stat, parent)
		}
	})
}
