package host

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/testing/protocmp"

	"waypost/nvml"
	waypostv1 "waypost/proto/waypost/v1"
)

func TestReport(t *testing.T) {
	facts := collect(t, fixture())
	facts.Interfaces = facts.Interfaces[1:3]
	view := &nvml.View{
		Status: nvml.Status{Code: nvml.StateOK, Text: "ok"}, XidState: "ok",
		Devices: []nvml.Device{{GPU: nvml.GPU{
			UUID: "GPU-a", Name: "H200", PCIBusID: "00000000:1B:00.0",
			MemoryTotalBytes: new(uint64(150754820096)), MemoryUsedBytes: new(uint64(0)), MemoryFreeBytes: new(uint64(150754820096)),
			UtilizationRatio: new(0.0), TemperatureCelsius: new(61.0), SMClockMHz: new(1755.0), SMClockMaxMHz: new(1980.0),
			ThrottleReasons: []string{nvml.ThrottleThermal}, ECCUncorrected: new(uint64(0)), ECCCorrected: new(uint64(12)),
			NVLinkUp: new(18), NVLinkTotal: new(18), PowerWatts: new(512.345),
			Processes: []nvml.Process{{PID: 4242, MemoryBytes: new(uint64(7))}, {PID: 4243}},
		}}, {
			GPU: nvml.GPU{Index: 1, UUID: "GPU-b", Lost: true}, Xids: []nvml.XidSeen{{Xid: 31, Count: 2}, {Xid: 79, Count: 1, Age: 4 * time.Minute}},
		}},
	}
	const want = `{
		"facts": {
			"cpus": 4, "load1m": 3.25, "memoryTotalBytes": 2164382760960, "memoryAvailableBytes": 1242782760960,
			"diskFreeBytes": 400, "uptimeSec": 123456.78,
			"interfaces": [
				{"name": "bond0", "addresses": ["10.2.0.11/16"], "mtuBytes": 1500},
				{"name": "eth0", "addresses": ["10.0.0.11/16", "2001:db8::11/64"], "bitsPerSec": 1e11, "mtuBytes": 9000}
			]
		},
		"gpuState": "ok",
		"gpus": [
			{
				"index": 0, "uuid": "GPU-a", "model": "H200", "pciBusId": "00000000:1B:00.0",
				"memoryTotalBytes": 150754820096, "memoryUsedBytes": 0, "memoryFreeBytes": 150754820096,
				"utilization": 0, "temperatureCelsius": 61, "smClockMhz": 1755, "smClockMaxMhz": 1980,
				"throttleReasons": ["thermal slowdown"], "eccUncorrected": 0, "eccCorrected": 12,
				"nvlinkUp": 18, "nvlinkTotal": 18, "powerWatts": 512.345,
				"processes": [{"pid": 4242, "memoryBytes": 7}, {"pid": 4243}],
				"verdict": "price:thermal_throttle", "notes": ["ecc_corrected"], "ways": [{"to": 1, "way": "unknown"}]
			},
			{
				"index": 1, "uuid": "GPU-b", "xids": [
					{"xid": 31, "ageMs": 0, "class": "application", "means": "GPU memory page fault", "count": 2, "acknowledged": false},
					{"xid": 79, "ageMs": 240000, "class": "hardware", "means": "fell off the bus", "count": 1, "acknowledged": false}
				],
				"verdict": "exclude:xid_79,gpu_lost", "notes": ["xid_31"], "ways": [{"to": 0, "way": "unknown"}]
			}
		]
	}`
	check(t, want, Report(&facts, view, nvml.DefaultPolicy()))
}

// Nothing known is nothing sent, and no zero.
func TestReportUnknown(t *testing.T) {
	view := &nvml.View{Status: nvml.Status{Code: nvml.StateNoLibrary, Text: "no NVIDIA driver (libnvidia-ml.so.1 not found)"}}
	check(t, `{"gpuState": "no NVIDIA driver (libnvidia-ml.so.1 not found)"}`, Report(nil, view, nvml.DefaultPolicy()))
	check(t, `{"facts": {}, "gpuState": "no NVIDIA driver (libnvidia-ml.so.1 not found)"}`, Report(&Facts{}, view, nvml.DefaultPolicy()))
	blocked := &nvml.View{
		Status:  nvml.Status{Code: nvml.StateBlocked, Text: "NVML blocked"},
		Devices: []nvml.Device{{GPU: nvml.GPU{Index: 3, UUID: "GPU-a"}}},
	}
	check(t, `{"gpuState": "NVML blocked", "gpus": [{"index": 3, "uuid": "GPU-a", "verdict": "price:nvml_blocked"}]}`,
		Report(nil, blocked, nvml.DefaultPolicy()))
}

func TestReportIsBounded(t *testing.T) {
	d := nvml.Device{}
	for i := range uint32(64) {
		d.Xids = append(d.Xids, nvml.XidSeen{Xid: 1000 + i})
	}
	g := GPUs(&nvml.View{Devices: []nvml.Device{d}}, nvml.DefaultPolicy())[0]
	if len(g.GetXids()) != maxReportedXids || g.GetXids()[maxReportedXids-1].GetXid() != 1063 {
		t.Errorf("%v, want the newest %d, the newest last", g.GetXids(), maxReportedXids)
	}
}

func check(t *testing.T, want string, got *waypostv1.HostReport) {
	t.Helper()
	var w waypostv1.HostReport
	if err := protojson.Unmarshal([]byte(want), &w); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&w, got, protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
