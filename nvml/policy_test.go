package nvml

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func healthy() Device {
	return Device{GPU: GPU{
		Index: 1, UUID: "GPU-b", Name: "H200", MemoryTotalBytes: new(uint64(100)), ThrottleReasons: []string{ThrottleIdle},
		ECCCorrected: new(uint64(0)), ECCUncorrected: new(uint64(0)), RowRemapFailed: new(false), RowRemapPending: new(false),
		NVLinkUp: new(18), NVLinkTotal: new(18),
	}, LinksExpected: new(18)}
}

func TestJudge(t *testing.T) {
	type change func(*Device)
	xid := func(n uint32, age time.Duration) change {
		return func(d *Device) { d.Xids = append(d.Xids, XidSeen{Xid: n, Count: 1, Age: age}) }
	}
	for _, c := range []struct {
		name    string
		change  change
		state   StateCode
		xids    string
		verdict string
		notes   []string
	}{
		{name: "healthy", verdict: "ok"},
		{name: "nothing known", change: func(d *Device) { *d = Device{GPU: GPU{Index: 1, UUID: "GPU-b"}} }, verdict: "ok"},
		{name: "application Xid", change: xid(31, 0), verdict: "ok", notes: []string{"xid_31"}},
		{name: "off the bus", change: xid(79, 0), verdict: "exclude:xid_79"},
		{name: "off the bus a week ago", change: xid(79, 168*time.Hour), verdict: "exclude:xid_79"},
		{name: "off the bus, repaired", change: func(d *Device) {
			d.Xids = []XidSeen{{Xid: 79, Count: 1, Acknowledged: true}}
		}, verdict: "ok", notes: []string{"xid_79"}},
		{name: "Xid in no list", change: xid(500, 0), verdict: "ok", notes: []string{"xid_500"}},
		{name: "many corrected errors", change: func(d *Device) { d.ECCCorrected = new(uint64(10000)) }, verdict: "ok", notes: []string{"ecc_corrected"}},
		{
			name:    "uncorrected error and failed remap",
			change:  func(d *Device) { d.ECCUncorrected, d.RowRemapFailed = new(uint64(1)), new(true) },
			verdict: "exclude:row_remap_failed", notes: []string{"ecc_uncorrected"},
		},
		{name: "remap pending", change: func(d *Device) { d.RowRemapPending = new(true) }, verdict: "ok", notes: []string{"row_remap_pending"}},
		{name: "link down", change: func(d *Device) { d.NVLinkUp = new(17) }, verdict: "exclude:nvlink_down"},
		{name: "links unknown", change: func(d *Device) { d.NVLinkUp = nil }, verdict: "ok"},
		{name: "never had links up", change: func(d *Device) { d.NVLinkUp, d.LinksExpected = new(0), nil }, verdict: "ok"},
		{name: "hot", change: func(d *Device) { d.ThrottleReasons = []string{ThrottleThermal} }, verdict: "price:thermal_throttle"},
		{
			name: "hot and braked", change: func(d *Device) {
				d.ThrottleReasons = []string{ThrottleHardware, ThrottleHardwareThermal, ThrottlePowerBrake}
			}, verdict: "price:thermal_throttle,hardware_slowdown,power_brake",
		},
		{name: "at its power cap", change: func(d *Device) { d.ThrottleReasons = []string{ThrottlePowerCap} }, verdict: "ok", notes: []string{"power_cap"}},
		{
			name: "the worst counts, the rest is told",
			change: func(d *Device) {
				d.ThrottleReasons = []string{ThrottleThermal}
				d.NVLinkUp = new(3)
				xid(31, 0)(d)
				xid(48, 0)(d)
			},
			verdict: "exclude:xid_48,nvlink_down", notes: []string{"xid_31", "thermal_throttle"},
		},
		{name: "lost", change: func(d *Device) { d.Lost = true }, verdict: "exclude:gpu_lost"},
		{name: "frozen", change: func(d *Device) { d.FrozenFor = time.Minute }, verdict: "price:readings_frozen"},
		{name: "hung driver", state: StateBlocked, verdict: "price:nvml_blocked"},
		{name: "crashed child", state: StateCrashed, verdict: "price:nvml_blocked"},
		{name: "hung driver after Xid 79", state: StateBlocked, change: xid(79, 0), verdict: "exclude:xid_79", notes: []string{"nvml_blocked"}},
		{name: "driver upgraded under us", state: StateVersionMismatch, verdict: "ok", notes: []string{"version_mismatch"}},
		{name: "no driver", state: StateNoLibrary, verdict: "ok"},
		{name: "no Xid events", xids: "no permission", verdict: "ok", notes: []string{"xid_events_missing"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := healthy()
			if c.change != nil {
				c.change(&d)
			}
			if c.state == "" {
				c.state = StateOK
			}
			if c.xids == "" {
				c.xids = "ok"
			}
			v := DefaultPolicy().Judge(c.state, c.xids, &d)
			if v.String() != c.verdict {
				t.Errorf("verdict %q, want %q", v, c.verdict)
			}
			if diff := cmp.Diff(c.notes, v.Notes); diff != "" {
				t.Errorf("notes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOwnLists(t *testing.T) {
	p, err := ParsePolicy([]string{"nvml_blocked"}, []string{"xid:31"}, []string{"gpu_lost", "xid:79"})
	if err != nil {
		t.Fatal(err)
	}
	d := healthy()
	d.Lost = true
	d.Xids = []XidSeen{{Xid: 79}, {Xid: 31, Age: PriceXidFor}}
	if v := p.Judge(StateOK, "ok", &d); v.String() != "price:xid_31" {
		t.Errorf("ignored loss and Xid 79, priced 31: got %q", v)
	}
	d.Xids[1].Age = PriceXidFor + 1
	if v := p.Judge(StateOK, "ok", &d); v.String() != "ok" {
		t.Errorf("a priced Xid did not fade: got %q", v)
	}
	if v := p.Judge(StateBlocked, "ok", &d); v.String() != "exclude:nvml_blocked" {
		t.Errorf("got %q", v)
	}
}

func TestZeroPolicyKnowsOnlyBuiltInActions(t *testing.T) {
	d := healthy()
	d.Xids = []XidSeen{{Xid: 79}}
	if v := new(Policy).Judge(StateOK, "ok", &d); v.String() != "ok" {
		t.Errorf("got %q", v)
	}
	d.Lost = true
	if v := new(Policy).Judge(StateOK, "ok", &d); v.String() != "exclude:gpu_lost" {
		t.Errorf("got %q", v)
	}
}

func TestParsePolicyErrors(t *testing.T) {
	for _, c := range []struct {
		exclude, price, ignore []string
		want                   string
	}{
		{exclude: []string{"xid:79", "nvlink"}, want: `policy.gpu.exclude[1]: unknown condition "nvlink"; known are xid:N,… and ecc_corrected,`},
		{price: []string{"xid:"}, want: `policy.gpu.price[0]: "xid:": "" is not an Xid number from 1 to 65535`},
		{price: []string{"xid:13,x"}, want: `"x" is not an Xid number`},
		{price: []string{"xid:0"}, want: `"0" is not an Xid number`},
		{price: []string{"xid:70000"}, want: `"70000" is not an Xid number`},
		{exclude: []string{"xid:79"}, ignore: []string{"xid:13,79"}, want: "policy.gpu.ignore[0]: xid:79 is in two lists; keep it in one"},
		{exclude: []string{"gpu_lost"}, price: []string{"gpu_lost"}, want: "policy.gpu.price[0]: gpu_lost is in two lists; keep it in one"},
	} {
		_, err := ParsePolicy(c.exclude, c.price, c.ignore)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want it to contain %q", err, c.want)
		}
	}
	if _, err := ParsePolicy([]string{"xid:79", "xid:48, 79"}, nil, nil); err != nil {
		t.Errorf("naming one twice in a list is harmless: %v", err)
	}
}

func TestJudgeWorker(t *testing.T) {
	a, b := healthy(), healthy()
	a.UUID, a.Index = "GPU-a", 0
	a.ThrottleReasons = []string{ThrottleThermal}
	b.Xids = []XidSeen{{Xid: 79}}
	v := View{Status: Status{StateOK, "ok"}, XidState: "ok", Devices: []Device{a, b}}
	p := DefaultPolicy()
	for _, c := range []struct {
		uuids []string
		want  string
		notes []string
	}{
		{[]string{"GPU-a", "GPU-b"}, "exclude:xid_79(gpu_1)", []string{"thermal_throttle(gpu_0)"}},
		{[]string{"GPU-a"}, "price:thermal_throttle(gpu_0)", nil},
		{[]string{"GPU-z"}, "ok", nil},
		{nil, "ok", nil},
	} {
		got := v.Judge(p, c.uuids)
		if got.String() != c.want || !cmp.Equal(got.Notes, c.notes) {
			t.Errorf("%v: got %q %q, want %q %q", c.uuids, got, got.Notes, c.want, c.notes)
		}
	}
}
