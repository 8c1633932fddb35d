package nvml

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

func full() *Snapshot {
	g := gpu(3, "GPU-a")
	g.MIG, g.UtilizationRatio, g.TemperatureCelsius = new(false), new(0.5), new(61.0)
	g.SMClockMHz, g.SMClockMaxMHz, g.ThrottleReasons = new(1200.0), new(1980.0), []string{}
	g.ECCCorrected, g.ECCUncorrected, g.RowRemapFailed = new(uint64(0)), new(uint64(1<<40)), new(false)
	g.Processes = []Process{{PID: 7}, {PID: 9, MemoryBytes: new(uint64(1 << 34))}}
	g.Instances = []Instance{{Index: 2, UUID: "MIG-a", Name: "1g", MemoryTotalBytes: new(uint64(1 << 33)), Processes: []Process{}, Missing: map[string]string{"memory": "no"}}}
	g.NVLinkPeers, g.Paths = []LinkPeer{{PeerSwitch, "0:7", 18}}, []Path{{4, new(true), AncestorSystem}}
	g.PCIe = &PCIeLink{5, 16}
	g.Fabric = &Fabric{FabricCompleted, "timeout", "00", new(uint32(0)), new(false)}
	g.Missing = map[string]string{"rowRemapPending": "not supported"}
	return &Snapshot{
		Driver: Driver{"580.65.06", "13.580.65.06"}, TookMs: 1.5, XidState: "ok",
		GPUs: []GPU{g, {Index: 4, Lost: true}}, Calls: []CallTime{{"nvmlDeviceGetUUID", 2, 0.25}}, Rebuild: "GPU 4: GPU is lost",
	}
}

// What a child cuts short arrives, whatever bytes a driver or its errors have.
func TestCutTextFitsAFrame(t *testing.T) {
	for _, text := range []string{strings.Repeat("ü", maxTextBytes), "x" + strings.Repeat("ü", maxTextBytes), strings.Repeat("\xff", maxTextBytes), "ok"} {
		frame, err := appendFrame(nil, &message{Status: &Status{StateFailed, cut(text)}})
		if err != nil {
			t.Fatal(err)
		}
		got, err := readMessage(bytes.NewReader(frame))
		if err != nil || !strings.HasPrefix(text, got.Status.Text) {
			t.Errorf("%.8q…: %v", text, err)
		}
	}
}

func TestFrameRoundTrip(t *testing.T) {
	messages := []*message{
		{Snapshot: full()},
		{Status: &Status{StateNoLibrary, "no NVIDIA driver"}},
		{Xid: &XidEvent{"GPU-a", 79}},
		{Busy: &Busy{Call: "nvmlInit", ForMs: 2500}},
		{Busy: &Busy{Call: "nvmlDeviceGetTemperature", GPU: new(0)}},
	}
	var stream []byte
	for _, m := range messages {
		var err error
		if stream, err = appendFrame(stream, m); err != nil {
			t.Fatal(err)
		}
	}
	r := iotest.OneByteReader(bytes.NewReader(stream))
	for i, want := range messages {
		got, err := readMessage(r)
		if err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("message %d (-want +got):\n%s", i, diff)
		}
	}
	if _, err := readMessage(r); err != io.EOF {
		t.Errorf("at the end: %v, want EOF", err)
	}
	if _, err := readMessage(bytes.NewReader(stream[:100])); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut off: %v", err)
	}
}

// Unknown lists stay unknown and empty ones stay known on the wire.
func TestFrameKeepsUnknownApart(t *testing.T) {
	frame, err := appendFrame(nil, &message{Snapshot: snapshot(GPU{UUID: "a"}, GPU{Index: 1, UUID: "b", Processes: []Process{}, ThrottleReasons: []string{}})})
	if err != nil {
		t.Fatal(err)
	}
	m, err := readMessage(bytes.NewReader(frame))
	if err != nil {
		t.Fatal(err)
	}
	unknown, none := m.Snapshot.GPUs[0], m.Snapshot.GPUs[1]
	if unknown.Processes != nil || unknown.ThrottleReasons != nil || none.Processes == nil || none.ThrottleReasons == nil {
		t.Errorf("unknown %#v %#v, none %#v %#v", unknown.Processes, unknown.ThrottleReasons, none.Processes, none.ThrottleReasons)
	}
}

func manyMissing() map[string]string {
	m := map[string]string{}
	for i := range maxMissing + 1 {
		m[fmt.Sprint(i)] = "no"
	}
	return m
}

func TestFrameErrors(t *testing.T) {
	gpus := func(change func(*GPU)) *message {
		s := full()
		change(&s.GPUs[0])
		return &message{Version: protocolVersion, Snapshot: s}
	}
	many := make([]GPU, maxGPUs+1)
	for _, c := range []struct {
		name string
		m    *message
		want string
	}{
		{"other version", &message{Version: 2, Busy: &Busy{}}, "protocol version 2, this agent speaks 1; install both from one version"},
		{"nothing", &message{Version: 1}, "0 messages in a frame"},
		{"two", &message{Version: 1, Busy: &Busy{}, Xid: &XidEvent{}}, "2 messages in a frame"},
		{"state of the parent", &message{Version: 1, Status: &Status{Code: StateOK}}, `"ok" is no state a child may report`},
		{"negative power", gpus(func(g *GPU) { g.PowerWatts = new(-1.0) }), "gpus[0]: powerWatts is -1, allowed is 0 to"},
		{"utilization in percent", gpus(func(g *GPU) { g.UtilizationRatio = new(55.0) }), "utilizationRatio is 55, allowed is 0 to 1"},
		{"long text", gpus(func(g *GPU) { g.Name = strings.Repeat("x", 513) }), "name has 513 bytes, at most 512"},
		{"many processes", gpus(func(g *GPU) { g.Processes = make([]Process, 513) }), "number of processes is 513"},
		{"many GPUs", &message{Version: 1, Snapshot: &Snapshot{GPUs: many}}, "number of gpus is 65"},
		{"twice the same", &message{Version: 1, Snapshot: &Snapshot{GPUs: []GPU{{UUID: "a"}, {UUID: "a"}}}}, `gpus[1]: uuid "a" appears twice`},
		{"index", gpus(func(g *GPU) { g.Index = -1 }), "index is -1"},
		{"many instances", gpus(func(g *GPU) { g.Instances = make([]Instance, 17) }), "number of instances is 17"},
		{"instance", gpus(func(g *GPU) { g.Instances[0].UUID = strings.Repeat("x", 513) }), "instances[0]: uuid has 513 bytes"},
		{"many processes of an instance", gpus(func(g *GPU) { g.Instances[0].Processes = make([]Process, 513) }), "instances[0]: number of processes is 513"},
		{"much unknown of an instance", gpus(func(g *GPU) { g.Instances[0].Missing = manyMissing() }), "instances[0]: number of missing is 65"},
		{"much unknown", gpus(func(g *GPU) { g.Missing = manyMissing() }), "number of missing is 65"},
		{"many reasons", gpus(func(g *GPU) { g.ThrottleReasons = make([]string, 65) }), "number of throttleReasons is 65"},
		{"many peers", gpus(func(g *GPU) { g.NVLinkPeers = make([]LinkPeer, 257) }), "number of nvlinkPeers is 257"},
		{"many calls", &message{Version: 1, Snapshot: &Snapshot{Calls: make([]CallTime, 65)}}, "number of calls is 65"},
		{"peer", gpus(func(g *GPU) { g.NVLinkPeers[0].Links = -1 }), "nvlinkPeers.links is -1"},
		{"path", gpus(func(g *GPU) { g.Paths[0].To = 1 << 20 }), "paths.to is"},
		{"many paths", gpus(func(g *GPU) { g.Paths = make([]Path, 65) }), "number of paths is 65"},
		{"lanes", gpus(func(g *GPU) { g.PCIe.Lanes = 129 }), "pcie.lanes is 129, allowed is 0 to 64"},
		{"generation", gpus(func(g *GPU) { g.PCIe.Generation = -1 }), "pcie.generation is -1"},
		{"fabric", gpus(func(g *GPU) { g.Fabric.Failure = strings.Repeat("x", 513) }), "fabric.failure has 513 bytes"},
		{"links", gpus(func(g *GPU) { g.NVLinkUp = new(999) }), "nvlinkUp is 999"},
	} {
		body, err := json.Marshal(c.m)
		if err != nil {
			t.Fatal(err)
		}
		_, err = decodeMessage(body)
		if !errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
	for _, head := range [][]byte{{0, 0, 0, 0}, {0x40, 0, 0, 0}, []byte("no NVML")} {
		if _, err := readMessage(bytes.NewReader(head)); !errors.Is(err, ErrFrame) {
			t.Errorf("head %x: %v", head, err)
		}
	}
}

// A length that is only claimed takes no memory.
func TestFrameClaimTakesNoMemory(t *testing.T) {
	head := binary.BigEndian.AppendUint32(nil, maxFrameBytes)
	bytesPerRun := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			if _, err := readMessage(bytes.NewReader(head)); err == nil {
				b.Fatal("no error")
			}
		}
	}).AllocedBytesPerOp()
	if bytesPerRun > 4096 {
		t.Errorf("%d bytes taken for a claim of %d", bytesPerRun, maxFrameBytes)
	}
}

func FuzzDecodeMessage(f *testing.F) {
	for _, m := range []*message{{Snapshot: full()}, {Status: &Status{StateFailed, "x"}}, {Xid: &XidEvent{"GPU-a", 79}}, {Busy: &Busy{GPU: new(1)}}} {
		frame, err := appendFrame(nil, m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(frame[4:])
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		m, err := decodeMessage(body)
		if err != nil {
			if m != nil || !errors.Is(err, ErrFrame) {
				t.Fatalf("message %v with error %v", m, err)
			}
			return
		}
		// What was taken in can be kept, shown and judged.
		var b book
		if m.Xid != nil {
			b.takeXid(*m.Xid, t0)
		}
		if m.Snapshot != nil {
			b.takeSnapshot(m.Snapshot, t0)
		}
		for _, d := range b.view(t0, true, "", 1) {
			DefaultPolicy().Judge(StateOK, "ok", &d)
		}
		frame, err := appendFrame(nil, m)
		if err != nil {
			return // a message may grow by escaping beyond the limit
		}
		if _, err := readMessage(bytes.NewReader(frame)); err != nil {
			t.Fatalf("does not survive a round trip: %v", err)
		}
	})
}

func BenchmarkReadMessage(b *testing.B) {
	s := &Snapshot{XidState: "ok"}
	for i := range 8 {
		g := full().GPUs[0]
		g.Index, g.UUID = i, "GPU-"+string(rune('a'+i))
		s.GPUs = append(s.GPUs, g)
	}
	frame, err := appendFrame(nil, &message{Snapshot: s})
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(frame)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := readMessage(bytes.NewReader(frame)); err != nil {
			b.Fatal(err)
		}
	}
}
