package nvml

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseLogRecord(t *testing.T) {
	for record, want := range map[string]logXid{
		"4,1100,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.": {"0000:3b:00", 79, 5 * time.Second},
		"4,1101,5000001,-,caller=T1;NVRM: Xid (PCI:0000:3B:00): 31, pid=4242, MMU Fault":                                {"0000:3B:00", 31, 5000001 * time.Microsecond},
		"4,1102,1,c;NVRM: Xid (0000:3b:00.0): 48, DBE":                                                                  {"0000:3b:00.0", 48, time.Microsecond},
		"4,1103,0,-;NVRM: Xid (PCI:00010000:3b:00): 119, Timeout after 6s":                                              {"00010000:3b:00", 119, 0},
		"4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 999999, x":                                                                 {},
		"4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 0, x":                                                                      {},
		"4,1,1,-;NVRM: Xid (PCI:0000:3b): 79, x":                                                                        {},
		"4,1,1,-;someone wrote NVRM: Xid (PCI:0000:3b:00): 79, x":                                                       {},
		"4,1,-1,-;NVRM: Xid (PCI:0000:3b:00): 79, x":                                                                    {},
		"4,1;NVRM: Xid (PCI:0000:3b:00): 79, x":                                                                         {},
		" SUBSYSTEM=pci":                                                                                                {},
		"NVRM: Xid (PCI:0000:3b:00): 79, x":                                                                             {},
		"":                                                                                                              {},
	} {
		got, ok := parseLogRecord(record)
		if ok != (want.xid != 0) || got != want {
			t.Errorf("%q: %+v %v", record, got, ok)
		}
	}
}

func FuzzParseLogRecord(f *testing.F) {
	f.Add("4,1100,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, GPU has fallen off the bus.")
	f.Add("4,1,99999999999999999999,-;NVRM: Xid (PCI:0000:3b:00): 79")
	f.Add(" DEVICE=+pci:0000:3b:00.0")
	f.Fuzz(func(t *testing.T, record string) {
		x, ok := parseLogRecord(record)
		if ok && (x.xid == 0 || x.xid > 99999 || x.sinceBoot < 0 || !strings.Contains(record, x.pciBusID)) {
			t.Errorf("%q: %+v", record, x)
		}
	})
}

func TestSamePCI(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"00000000:3B:00.0", "0000:3b:00", true},
		{"0000:3B:00.0", "0000:3b:00.0", true},
		{"00010000:3b:00.0", "10000:3B:00", true},
		{"00000000:3B:00.0", "0001:3b:00", false},
		{"00000000:3B:00.0", "0000:3c:00", false},
		{"", "0000:3b:00", false},
		{"", "", false},
		{"x:3b:00", "x:3b:00", false},
	} {
		if samePCI(c.a, c.b) != c.want || samePCI(c.b, c.a) != c.want {
			t.Errorf("%q and %q: want %v", c.a, c.b, c.want)
		}
	}
}

// One error that library and log both tell counts once, whoever is first; the log
// read again from its beginning adds nothing; what only the log tells counts.
func TestLogAndLibraryTellOneError(t *testing.T) {
	at := func(s float64) time.Time { return t0.Add(time.Duration(s * float64(time.Second))) }
	log := func(xid uint32) logXid { return logXid{pciBusID: "0000:00:00", xid: xid} }
	var b book
	if b.takeLogXid(log(63), at(-100)) {
		t.Error("an error of a GPU that is not known yet is no news")
	}
	b.takeSnapshot(snapshot(gpu(0, "GPU-a"), gpu(1, "GPU-b")), t0)
	numbers := func() string { return xidNumbers(b.view(at(1000), true, "", time.Hour)[0]) }
	want := func(s string) {
		t.Helper()
		if got := numbers(); got != s {
			t.Errorf("%s, want %s", got, s)
		}
	}
	want("63×1 ")
	b.takeXid(XidEvent{UUID: "GPU-a", Xid: 79}, at(10))
	if b.takeLogXid(log(79), at(10.2)) {
		t.Error("the log tells what the library has told")
	}
	want("63×1 79×1 ")
	if !b.takeLogXid(log(74), at(20)) { // the log is first
		t.Error("no news")
	}
	b.takeXid(XidEvent{UUID: "GPU-a", Xid: 74}, at(20.4))
	want("63×1 79×1 74×1 ")
	b.takeXid(XidEvent{UUID: "GPU-a", Xid: 74}, at(21)) // another one
	want("63×1 79×1 74×2 ")
	b.acknowledge("GPU-a")
	for _, again := range []struct {
		xid uint32
		at  float64
	}{{63, -100}, {79, 10.2}, {74, 20}} { // a restart reads all of it again
		if b.takeLogXid(log(again.xid), at(again.at)) {
			t.Errorf("Xid %d is told again", again.xid)
		}
	}
	for _, x := range b.view(at(1000), true, "", time.Hour)[0].Xids {
		if !x.Acknowledged {
			t.Errorf("Xid %d counts again", x.Xid)
		}
	}
	if !b.takeLogXid(log(79), at(500)) || b.takeLogXid(logXid{pciBusID: "0000:77:00", xid: 79}, at(600)) {
		t.Error("a later error of the GPU is news, one of a device that nobody knows is not")
	}
	if got := xidNumbers(b.view(at(1000), true, "", time.Hour)[1]); got != "" {
		t.Errorf("the other GPU has %s", got)
	}
	for i := range 1000 {
		b.takeLogXid(logXid{pciBusID: "0000:78:00", xid: uint32(i + 1)}, at(0))
	}
	if len(b.earlyLog) > maxXidNumbers {
		t.Errorf("%d errors of unknown devices are kept", len(b.earlyLog))
	}
}

// keeper is a client with a system's clock and boot by script.
func keeper(t *testing.T, s *script, file string, uptime *time.Duration, boot string) *Client {
	t.Helper()
	c, err := New(Options{Executable: "fake", StateFile: file})
	if err != nil {
		t.Fatal(err)
	}
	c.start = func() (process, error) { return startFake(s, defaultPoll, false), nil }
	began := time.Now()
	c.uptime = func() time.Duration { return *uptime + time.Since(began) }
	c.boot = func() string { return boot }
	return c
}

// What was seen and acknowledged outlives a restart of the agent; a reboot clears
// it, as it does on the GPU.
func TestXidsOutliveTheAgentNotTheBoot(t *testing.T) {
	file := filepath.Join(t.TempDir(), "gpus.json")
	uptime := time.Duration(0)
	life := func(boot string, gpus []GPU, ack bool, xids ...uint32) (verdicts, numbers string) {
		synctest.Test(t, func(t *testing.T) {
			s := newScript(gpus...)
			s.xids = make(chan XidEvent, len(xids))
			uptime += 1000 * time.Second
			c := keeper(t, s, file, &uptime, boot)
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() { _ = c.Run(ctx) })
			time.Sleep(3 * time.Second)
			for _, x := range xids {
				s.xids <- XidEvent{UUID: "GPU-a", Xid: x}
			}
			time.Sleep(3 * time.Second)
			if ack && !c.Acknowledge("GPU-a") {
				t.Error("not acknowledged")
			}
			time.Sleep(time.Second)
			v := c.View()
			for i := range v.Devices {
				verdicts += DefaultPolicy().Judge(v.Status.Code, v.XidState, &v.Devices[i]).String() + " "
				numbers += xidNumbers(v.Devices[i])
			}
			cancel()
			running.Wait()
		})
		return verdicts, numbers
	}
	both, one := []GPU{gpu(0, "GPU-a"), gpu(1, "GPU-b")}, []GPU{gpu(1, "GPU-b")}
	for i, step := range []struct {
		boot              string
		gpus              []GPU
		ack               bool
		xids              []uint32
		verdicts, numbers string
	}{
		{"one", both, false, []uint32{79, 31, 31}, "exclude:xid_79 ok ", "79×1 31×2 "},
		{"one", both, false, nil, "exclude:xid_79 ok ", "79×1 31×2 "},
		{"one", one, false, nil, "exclude:xid_79,gpu_lost ok ", "79×1 31×2 "}, // it is not listed any more
		{"one", both, true, nil, "ok ok ", "79×1 31×2 "},
		{"one", both, false, nil, "ok ok ", "79×1 31×2 "},
		{"one", both, false, []uint32{79}, "exclude:xid_79 ok ", "31×2 79×2 "},
		{"two", both, false, nil, "ok ok ", ""},
		{"", both, false, []uint32{79}, "exclude:xid_79 ok ", "79×1 "}, // whose boot is unknown keeps nothing
		{"two", both, false, nil, "ok ok ", ""},
	} {
		verdicts, numbers := life(step.boot, step.gpus, step.ack, step.xids...)
		if verdicts != step.verdicts || numbers != step.numbers {
			t.Errorf("life %d: %q %q, want %q %q", i, verdicts, numbers, step.verdicts, step.numbers)
		}
	}
}

// What could not be written, as on a full disk, is written with the next change or
// at the end.
func TestStateIsWrittenAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	file := filepath.Join(dir, "gpus.json")
	uptime := time.Hour
	c := keeper(t, newScript(), file, &uptime, "b")
	c.book.takeSnapshot(snapshot(gpu(0, "GPU-a")), time.Now())
	c.book.takeXid(XidEvent{UUID: "GPU-a", Xid: 79}, time.Now())
	c.writeState()
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	c.writeState()
	state, err := readState(file)
	if err != nil || len(state.GPUs) != 1 || state.GPUs[0].Xids[0].Xid != 79 {
		t.Errorf("kept %+v, %v", state, err)
	}
}

// A damaged or hostile state file is refused or bounded; nothing of it harms.
func TestRestoreIsBounded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "gpus.json")
	uptime := time.Hour
	for _, c := range []struct {
		text string
		want int
	}{
		{"", 0},
		{"{", 0},
		{strings.Repeat(" ", maxStateBytes+1), 0},
		{`{"bootId":"b","gpus":[{"uuid":"GPU-a","xids":[{"xid":79,"count":1,"sinceBootSec":5}]}]}`, 1},
		{`{"bootId":"b","gpus":[{"uuid":"","xids":[{"xid":79,"count":1,"sinceBootSec":5}]},{"uuid":"GPU-a","index":-1,"xids":[{"xid":79,"count":1}]}]}`, 0},
		{`{"bootId":"b","gpus":[{"uuid":"GPU-a","xids":[{"xid":79,"count":1,"sinceBootSec":-5},{"xid":79,"count":1,"sinceBootSec":1e9},{"xid":48,"sinceBootSec":1}]}]}`, 0},
		{`{"bootId":"b","gpus":[` + strings.TrimSuffix(strings.Repeat(`{"uuid":"GPU-%d","xids":[{"xid":79,"count":1,"sinceBootSec":5}]},`, 200), ",") + `]}`, maxGPUs},
	} {
		text := c.text
		for i := 0; strings.Contains(text, "%d"); i++ {
			text = strings.Replace(text, "%d", fmt.Sprint(i), 1)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		k := keeper(t, newScript(), file, &uptime, "b")
		k.restore()
		if got := len(k.View().Devices); got != c.want {
			t.Errorf("%.60q: %d GPUs, want %d", c.text, got, c.want)
		}
	}
}

// While the log is read, a driver library that tells no errors is no condition;
// why the log is not read is said.
func TestKernelLogState(t *testing.T) {
	for _, c := range []struct{ log, xids, wantXids, wantLog string }{
		{"", "not supported", "not supported", ""},
		{"ok", "not supported", "ok", "ok; the driver library tells no errors: not supported"},
		{"ok", "ok", "ok", "ok"},
		{"no kernel log here", "not supported", "not supported", "no kernel log here"},
	} {
		k := &Client{kernelLog: c.log, xidState: c.xids}
		if v := k.View(); v.XidState != c.wantXids || v.KernelLogState != c.wantLog {
			t.Errorf("%+v: %q %q", c, v.XidState, v.KernelLogState)
		}
	}
	for err, want := range map[error]string{os.ErrPermission: "CAP_SYSLOG", os.ErrNotExist: "no kernel log", nil: "ended"} {
		if got := logStateOf(err); !strings.Contains(got, want) {
			t.Errorf("%v: %q", err, got)
		}
	}
}

// lines taken from a log: damage and floods between two errors hide neither.
func TestTakeKernelLog(t *testing.T) {
	c, err := New(Options{Executable: "fake"})
	if err != nil {
		t.Fatal(err)
	}
	c.uptime = func() time.Duration { return time.Hour }
	c.book.takeSnapshot(snapshot(gpu(0, "GPU-a")), time.Now())
	text := "4,1,1000000,-;NVRM: Xid (PCI:0000:00:00): 79, x\n" + strings.Repeat("z", 3*maxLogRecord) + "\n \n" +
		"4,2,2000000,-;NVRM: Xid (PCI:0000:00:00): 48, x\n SUBSYSTEM=pci\n4,3,9999000000000,-;NVRM: Xid (PCI:0000:00:00): 94, of the future\n"
	if err := c.takeKernelLog(strings.NewReader(text)); err == nil {
		t.Error("no end")
	}
	v := c.View()
	if diff := cmp.Diff("79×1 48×1 ", xidNumbers(v.Devices[0])); diff != "" {
		t.Error(diff)
	}
	if age := v.Devices[0].Xids[0].Age; age < time.Hour-time.Second-time.Minute || age > time.Hour {
		t.Errorf("age %v, want what the log says", age)
	}
}
