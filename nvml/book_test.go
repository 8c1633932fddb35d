package nvml

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func gpu(index int, uuid string) GPU {
	return GPU{
		Index: index, UUID: uuid, Name: "H200", PCIBusID: fmt.Sprintf("0000:%02x:00.0", index),
		MemoryTotalBytes: new(uint64(100)), MemoryUsedBytes: new(uint64(60)), MemoryFreeBytes: new(uint64(40)),
		PowerWatts: new(100.0), NVLinkUp: new(18), NVLinkTotal: new(18), Processes: []Process{},
	}
}

func snapshot(gpus ...GPU) *Snapshot { return &Snapshot{XidState: "ok", GPUs: gpus} }

func xidNumbers(d Device) string {
	s := ""
	for _, x := range d.Xids {
		s += fmt.Sprintf("%d×%d ", x.Xid, x.Count)
	}
	return s
}

func TestBookXids(t *testing.T) {
	var b book
	b.takeXid(XidEvent{UUID: "GPU-a", Xid: 63}, t0) // before any GPU is known
	b.takeSnapshot(snapshot(gpu(0, "GPU-a"), gpu(1, "GPU-b")), t0.Add(time.Second))
	b.takeXid(XidEvent{UUID: "GPU-a", Xid: 79}, t0.Add(2*time.Second))
	for i := range 500 {
		b.takeXid(XidEvent{UUID: "GPU-a", Xid: 31}, t0.Add(time.Duration(3+i)*time.Second))
	}
	b.takeXid(XidEvent{Xid: 48}, t0.Add(600*time.Second)) // no GPU named: put down to all
	devices := b.view(t0.Add(602*time.Second), true, "", time.Hour)
	if got, want := xidNumbers(devices[0]), "63×1 79×1 31×500 48×1 "; got != want {
		t.Errorf("GPU 0 has %s, want %s: a flood must not push another out", got, want)
	}
	if got, want := xidNumbers(devices[1]), "48×1 "; got != want {
		t.Errorf("GPU 1 has %s, want %s", got, want)
	}
	if age := devices[0].Xids[1].Age; age != 600*time.Second {
		t.Errorf("age of 79 is %v", age)
	}
	if !b.acknowledge("GPU-a") || b.acknowledge("GPU-x") {
		t.Error("acknowledge does not tell known from unknown")
	}
	b.takeXid(XidEvent{UUID: "GPU-a", Xid: 79}, t0.Add(603*time.Second))
	devices = b.view(t0.Add(604*time.Second), true, "", time.Hour)
	acked := map[uint32]bool{}
	for _, x := range devices[0].Xids {
		acked[x.Xid] = x.Acknowledged
	}
	if diff := cmp.Diff(map[uint32]bool{63: true, 31: true, 48: true, 79: false}, acked); diff != "" {
		t.Errorf("a new event after the acknowledgement counts (-want +got):\n%s", diff)
	}
	for xid := range uint32(1000) {
		b.takeXid(XidEvent{UUID: "GPU-a", Xid: 10000 + xid}, t0.Add(700*time.Second))
	}
	if n := len(b.view(t0, true, "", time.Hour)[0].Xids); n != maxXidNumbers {
		t.Errorf("%d Xid numbers kept, want at most %d", n, maxXidNumbers)
	}
}

func TestBookLostGPU(t *testing.T) {
	var b book
	b.takeSnapshot(snapshot(gpu(0, "GPU-a"), gpu(1, "GPU-b"), gpu(2, "GPU-c")), t0)

	nameless := GPU{Index: 1, Lost: true, Missing: map[string]string{"handle": "GPU is lost"}}
	b.takeSnapshot(snapshot(gpu(0, "GPU-a"), nameless, gpu(2, "GPU-c")), t0.Add(time.Second))
	d := b.view(t0.Add(time.Second), true, "", time.Hour)
	if len(d) != 3 || d[1].UUID != "GPU-b" || !d[1].Lost || d[1].Name != "H200" || d[1].MemoryUsedBytes != nil {
		t.Errorf("the GPU at index 1 is not the lost one: %+v", d[1])
	}

	// The driver renumbers: GPU 2 is now at index 1. The lost one stays known.
	b.takeSnapshot(snapshot(gpu(0, "GPU-a"), gpu(1, "GPU-c")), t0.Add(2*time.Second))
	var got []string
	for _, v := range b.view(t0.Add(2*time.Second), true, "", time.Hour) {
		got = append(got, fmt.Sprintf("%d %s %v %v", v.Index, v.UUID, v.Lost, v.MemoryUsedBytes != nil))
	}
	want := []string{"0 GPU-a false true", "1 GPU-b true false", "1 GPU-c false true"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	b.takeSnapshot(snapshot(gpu(0, "GPU-a"), gpu(1, "GPU-b"), gpu(2, "GPU-c")), t0.Add(3*time.Second))
	if d := b.view(t0.Add(3*time.Second), true, "", time.Hour); d[1].Lost || d[1].MemoryUsedBytes == nil {
		t.Errorf("a repaired GPU is not back: %+v", d[1])
	}
}

// Instances that cannot be listed stay known by what they are; those that the
// driver does not list any more while it works are gone.
func TestBookKeepsInstances(t *testing.T) {
	split := func(instances ...Instance) GPU {
		g := gpu(0, "GPU-a")
		g.MIG, g.Instances = new(true), instances
		return g
	}
	one := func(index int, uuid string) Instance {
		return Instance{Index: index, UUID: uuid, Name: "1g", MemoryTotalBytes: new(uint64(10)), MemoryUsedBytes: new(uint64(9)), Processes: []Process{{PID: 7}}}
	}
	partial := func(instances ...Instance) GPU {
		g := split(instances...)
		g.Missing = map[string]string{"instances": "MIG: partial data: unknown error"}
		return g
	}
	unsplit := gpu(0, "GPU-a")
	unsplit.MIG = new(false)
	lost := GPU{Index: 0, Lost: true}
	for _, tc := range []struct {
		name string
		now  *Snapshot
		want string // index, UUID, size and whether its processes are known
	}{
		{"all listed", snapshot(split(one(0, "MIG-a"), one(3, "MIG-b"))), "0 MIG-a 10 true, 3 MIG-b 10 true, "},
		{"one was taken away", snapshot(split(one(3, "MIG-b"))), "3 MIG-b 10 true, "},
		{"not split any more", snapshot(unsplit), ""},
		{"the mode is not known", snapshot(gpu(0, "GPU-a")), "0 MIG-a 10 false, 3 MIG-b 10 false, "},
		{"listed in part", snapshot(partial(one(3, "MIG-b"))), "0 MIG-a 10 false, 3 MIG-b 10 true, "},
		{"listed in part, another in its place", snapshot(partial(one(0, "MIG-c"))), "0 MIG-c 10 true, 3 MIG-b 10 false, "},
		{"lost", snapshot(lost), "0 MIG-a 10 false, 3 MIG-b 10 false, "},
		{"not listed any more", snapshot(), "0 MIG-a 10 false, 3 MIG-b 10 false, "},
	} {
		var b book
		b.takeSnapshot(snapshot(split(one(0, "MIG-a"), one(3, "MIG-b"))), t0)
		for range 2 { // what was kept is kept on
			b.takeSnapshot(tc.now, t0.Add(time.Second))
		}
		got := ""
		for _, i := range b.view(t0.Add(time.Second), true, "", time.Hour)[0].Instances {
			got += fmt.Sprintf("%d %s %d %v, ", i.Index, i.UUID, *i.MemoryTotalBytes, i.Processes != nil)
		}
		if got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
		b.takeSnapshot(snapshot(split(one(0, "MIG-a"), one(3, "MIG-b"))), t0.Add(2*time.Second))
		for _, i := range b.view(t0.Add(2*time.Second), true, "", time.Hour)[0].Instances {
			if i.MemoryUsedBytes == nil || i.Processes == nil || i.Missing != nil {
				t.Errorf("%s, and back: %+v", tc.name, i)
			}
		}
	}
	// Of a host whose values may not be shown the instances are known all the same.
	var b book
	b.takeSnapshot(snapshot(split(one(0, "MIG-a"))), t0)
	if d := b.view(t0, false, "stale", time.Hour)[0]; len(d.Instances) != 1 || d.Instances[0].UUID != "MIG-a" || d.Instances[0].MemoryUsedBytes != nil || d.Instances[0].Processes != nil {
		t.Errorf("of values that are too old: %+v", d.Instances)
	}
}

func TestBookLinksExpected(t *testing.T) {
	links := func(up int, name string) GPU {
		g := gpu(0, "GPU-"+name+fmt.Sprint(up))
		g.NVLinkUp, g.Name = &up, name
		return g
	}
	expected := func(b *book, uuid string) int {
		for _, d := range b.view(t0, true, "", time.Hour) {
			if d.UUID == uuid && d.LinksExpected != nil {
				return *d.LinksExpected
			}
		}
		return -1
	}
	var b book
	b.takeSnapshot(snapshot(links(18, "sxm"), links(17, "sxm"), links(0, "sxm"), links(4, "pcie")), t0)
	for uuid, want := range map[string]int{
		"GPU-sxm18": 18,
		"GPU-sxm17": 18, // one down from the start: its equal beside it tells
		"GPU-sxm0":  -1, // never had one up: no bridge
		"GPU-pcie4": 4,  // another product
	} {
		if got := expected(&b, uuid); got != want {
			t.Errorf("%s: %d links expected, want %d", uuid, got, want)
		}
	}
	dropped := links(4, "pcie")
	dropped.NVLinkUp = new(0)
	b.takeSnapshot(snapshot(dropped), t0.Add(time.Second))
	if got := expected(&b, "GPU-pcie4"); got != 4 {
		t.Errorf("all links dropped: %d expected, want the 4 that were up", got)
	}
}

func TestBookFrozenReadings(t *testing.T) {
	var b book
	a, still := gpu(0, "GPU-a"), gpu(1, "GPU-b")
	idle := gpu(2, "GPU-c")
	idle.PowerWatts = nil
	at := t0
	for i := range 62 {
		at = t0.Add(time.Duration(i) * time.Second)
		a.PowerWatts = new(100 + float64(i)/1000)
		b.takeSnapshot(snapshot(a, still, idle), at)
	}
	d := b.view(at, true, "", time.Minute)
	if d[0].FrozenFor != 0 || d[0].MemoryUsedBytes == nil {
		t.Errorf("moving power is frozen: %+v", d[0])
	}
	if d[1].FrozenFor != 61*time.Second || d[1].MemoryUsedBytes != nil || d[1].MemoryTotalBytes == nil {
		t.Errorf("the same sample for 61 s: frozen %v, memory used %v", d[1].FrozenFor, d[1].MemoryUsedBytes)
	}
	if d[2].FrozenFor != 0 {
		t.Error("without a power reading standing still means nothing")
	}
	still.PowerWatts = new(101.0)
	b.takeSnapshot(snapshot(a, still, idle), at)
	if d := b.view(at, true, "", time.Minute); d[1].FrozenFor != 0 {
		t.Error("a reading that moves again stays frozen")
	}
}

func TestBookHidesOldValues(t *testing.T) {
	var b book
	b.takeSnapshot(snapshot(gpu(0, "GPU-a")), t0)
	b.takeXid(XidEvent{UUID: "GPU-a", Xid: 79}, t0)
	got := b.view(t0, false, "NVML blocked", time.Minute)
	want := []Device{{
		GPU: GPU{
			UUID: "GPU-a", Name: "H200", PCIBusID: "0000:00:00.0", MemoryTotalBytes: new(uint64(100)),
			NVLinkTotal: new(18), Missing: map[string]string{"values": "NVML blocked"},
		},
		Xids: []XidSeen{{Xid: 79, Count: 1}}, LinksExpected: new(18),
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestBookIsBounded(t *testing.T) {
	var b book
	for i := range 1000 {
		b.takeSnapshot(snapshot(gpu(i%64, fmt.Sprintf("GPU-%d", i))), t0)
	}
	if n := len(b.view(t0, true, "", time.Hour)); n != maxGPUs {
		t.Errorf("%d GPUs kept, want at most %d", n, maxGPUs)
	}
	b = book{}
	for range 1000 {
		b.takeXid(XidEvent{Xid: 79}, t0)
	}
	if len(b.early) > maxXidNumbers {
		t.Errorf("%d early events kept", len(b.early))
	}
}
