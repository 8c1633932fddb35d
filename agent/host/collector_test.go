package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/shirou/gopsutil/v4/disk"
	"github.com/shirou/gopsutil/v4/net"
)

func addresses(cidr ...string) net.InterfaceAddrList {
	var l net.InterfaceAddrList
	for _, c := range cidr {
		l = append(l, net.InterfaceAddr{Addr: c})
	}
	return l
}

func fixtureInterfaces(context.Context) (net.InterfaceStatList, error) {
	up := []string{"up", "broadcast"}
	return net.InterfaceStatList{
		{Name: "lo", MTU: 65536, Flags: []string{"up", "loopback"}, Addrs: addresses("127.0.0.1/8")},
		{Name: "ib0", MTU: 4092, Flags: up, Addrs: addresses("10.1.0.11/16")},
		{Name: "eth0", MTU: 9000, Flags: up, Addrs: addresses("fe80::1/64", "2001:db8::11/64", "10.0.0.11/16", "nonsense")},
		{Name: "bond0", MTU: 1500, Flags: up, Addrs: addresses("10.2.0.11/16")},
		{Name: "old0", Flags: up, Addrs: addresses("10.3.0.11/16")},
		{Name: "veth1", MTU: 1500, Flags: up, Addrs: addresses("fe80::2/64", "169.254.1.1/16")},
		{Name: "eth9", MTU: 1500, Flags: []string{"broadcast"}, Addrs: addresses("10.9.0.1/16")},
		{Name: "../../etc", MTU: 1500, Flags: up, Addrs: addresses("10.4.0.1/16")},
	}, nil
}

func fixtureDisk(_ context.Context, path string) (*disk.UsageStat, error) {
	if path != "/var/lib/waypost" {
		return nil, errors.New("no such path")
	}
	return &disk.UsageStat{Total: 1000, Free: 400}, nil
}

func fixture() Options {
	return Options{
		Proc: "testdata/proc", Sys: "testdata/sys", DiskPath: "/var/lib/waypost",
		Interfaces: fixtureInterfaces, DiskUsage: fixtureDisk,
	}
}

func collect(t *testing.T, o Options) Facts {
	t.Helper()
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c.Collect(t.Context())
}

func TestCollect(t *testing.T) {
	want := Facts{
		CPUs: new(4), Load1M: new(3.25),
		MemoryTotalBytes: new(uint64(2113655040 << 10)), MemoryAvailableBytes: new(uint64(1213655040 << 10)),
		DiskFreeBytes: new(uint64(400)), Uptime: new(123456780 * time.Millisecond),
		BootID: "0fd0b8bb-676e-4612-ae48-00472595eada",
		Interfaces: []Interface{
			{Name: "../../etc", Addresses: []string{"10.4.0.1/16"}, MTUBytes: new(1500)},
			{Name: "bond0", Addresses: []string{"10.2.0.11/16"}, MTUBytes: new(1500)},
			{Name: "eth0", Addresses: []string{"10.0.0.11/16", "2001:db8::11/64"}, MTUBytes: new(9000), BitsPerSec: new(100e9)},
			{Name: "ib0", Addresses: []string{"10.1.0.11/16"}, MTUBytes: new(4092), BitsPerSec: new(400e9), NUMANode: new(1)},
			{Name: "old0", Addresses: []string{"10.3.0.11/16"}},
		},
	}
	if diff := cmp.Diff(want, collect(t, fixture())); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A fact that cannot be read is unknown and says why; the others are read.
func TestCollectUnknown(t *testing.T) {
	all := collect(t, fixture())
	for _, c := range []struct {
		name    string
		file    string // replaced below proc; empty: none
		content string // empty: removed
		change  func(*Options)
		want    func(*Facts)
		missing string // fact, and what its reason contains
	}{
		{name: "no stat", file: "stat", want: func(f *Facts) { f.CPUs = nil }, missing: "cpus: no such file"},
		{name: "strange stat", file: "stat", content: "cpu\ncpuidle 1\n", want: func(f *Facts) { f.CPUs = nil }, missing: "cpus: no cpu lines"},
		{name: "no loadavg", file: "loadavg", want: func(f *Facts) { f.Load1M = nil }, missing: "load: no such file"},
		{name: "no meminfo", file: "meminfo", want: func(f *Facts) { f.MemoryTotalBytes, f.MemoryAvailableBytes = nil, nil }, missing: "memory: "},
		{name: "empty meminfo", file: "meminfo", content: "\n", want: func(f *Facts) { f.MemoryTotalBytes, f.MemoryAvailableBytes = nil, nil }, missing: "memory: no MemTotal"},
		{name: "cut meminfo", file: "meminfo", content: "MemTotal:       2113655040 kB\n", want: func(f *Facts) { f.MemoryAvailableBytes = nil }, missing: "memory: no MemAvailable"},
		{name: "no uptime", file: "uptime", want: func(f *Facts) { f.Uptime = nil }, missing: "uptime: no such file"},
		{name: "strange uptime", file: "uptime", content: "NaN 1\n", want: func(f *Facts) { f.Uptime = nil }, missing: `uptime: uptime is "NaN"`},
		{name: "no boot id", file: "sys/kernel/random/boot_id", want: func(f *Facts) { f.BootID = "" }, missing: "bootId: no such file"},
		{name: "short boot id", file: "sys/kernel/random/boot_id", content: "x\n", want: func(f *Facts) { f.BootID = "" }, missing: `bootId: boot_id is "x"`},
		{
			name: "no interfaces", change: func(o *Options) {
				o.Interfaces = func(context.Context) (net.InterfaceStatList, error) { return nil, errors.New("netlink refused") }
			},
			want: func(f *Facts) { f.Interfaces = nil }, missing: "interfaces: netlink refused",
		},
		{
			name: "panic in a reader", change: func(o *Options) {
				o.Interfaces = func(context.Context) (net.InterfaceStatList, error) { panic("index out of range") }
			},
			want: func(f *Facts) { f.Interfaces = nil }, missing: "interfaces: reading failed: index out of range",
		},
		{name: "no sys", change: func(o *Options) { o.Sys = "testdata/nowhere" }, want: func(f *Facts) {
			f.Interfaces = append([]Interface(nil), f.Interfaces...)
			for i := range f.Interfaces {
				f.Interfaces[i].BitsPerSec, f.Interfaces[i].NUMANode = nil, nil
			}
		}},
		{name: "no disk path", change: func(o *Options) { o.DiskPath = "" }, want: func(f *Facts) { f.DiskFreeBytes = nil }, missing: "disk: no path configured"},
		{name: "disk fails", change: func(o *Options) { o.DiskPath = "/x" }, want: func(f *Facts) { f.DiskFreeBytes = nil }, missing: "disk: no such path"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := fixture()
			if c.file != "" {
				o.Proc = copyProc(t)
				path := filepath.Join(o.Proc, c.file)
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
				if c.content != "" {
					if err := os.WriteFile(path, []byte(c.content), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			if c.change != nil {
				c.change(&o)
			}
			want := all
			c.want(&want)
			got := collect(t, o)
			reasons := got.Missing
			got.Missing = nil
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if c.missing == "" {
				if len(reasons) != 0 {
					t.Errorf("reasons %v", reasons)
				}
				return
			}
			fact, reason, _ := strings.Cut(c.missing, ": ")
			if len(reasons) != 1 || !strings.Contains(reasons[fact], reason) {
				t.Errorf("reasons %v, want %q", reasons, c.missing)
			}
		})
	}
}

// The library's parser of a cut loadavg ends in a panic.
func TestCollectSurvivesLibrary(t *testing.T) {
	o := fixture()
	o.Proc = copyProc(t)
	if err := os.WriteFile(filepath.Join(o.Proc, "loadavg"), []byte("3.25\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if f := collect(t, o); f.Load1M != nil || f.CPUs == nil || f.Missing["load"] == "" {
		t.Errorf("%+v", f)
	}
}

func copyProc(t *testing.T) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS("testdata/proc")); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(to, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			err = os.Chmod(path, 0o600)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return to
}

// This machine has all of it.
func TestCollectThisMachine(t *testing.T) {
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		t.Skip("needs /proc")
	}
	f := collect(t, Options{DiskPath: t.TempDir()})
	if len(f.Missing) != 0 {
		t.Errorf("unknown here: %v", f.Missing)
	}
	if f.CPUs == nil || *f.CPUs < 1 || f.MemoryAvailableBytes == nil || *f.MemoryAvailableBytes > *f.MemoryTotalBytes ||
		f.DiskFreeBytes == nil || f.Uptime == nil || *f.Uptime <= 0 || len(f.BootID) != 36 || f.Interfaces == nil {
		t.Errorf("%+v", f)
	}
}

// A file system that does not answer delays nothing and is not asked again and
// again; when it answers its space is known again.
func TestCollectHungDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		var hung atomic.Bool
		hung.Store(true)
		release := make(chan struct{})
		o := fixture()
		o.DiskUsage = func(ctx context.Context, path string) (*disk.UsageStat, error) {
			asked.Add(1)
			if hung.Load() {
				<-release
			}
			return fixtureDisk(ctx, path)
		}
		c, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- c.Run(ctx) }()
		if _, _, ok := c.Facts(); ok {
			t.Error("facts before the first reading")
		}
		time.Sleep(time.Minute + 5*time.Second)
		f, age, ok := c.Facts()
		if !ok || f.CPUs == nil || f.DiskFreeBytes != nil || f.Missing["disk"] != "file system of /var/lib/waypost does not answer" {
			t.Errorf("%v %+v", ok, f)
		}
		if age > 10*time.Second {
			t.Errorf("age %v", age)
		}
		if n := asked.Load(); n != 1 {
			t.Errorf("asked %d times while the first question was open", n)
		}
		hung.Store(false)
		close(release)
		time.Sleep(20 * time.Second)
		if f, _, _ := c.Facts(); f.DiskFreeBytes == nil || *f.DiskFreeBytes != 400 {
			t.Errorf("after recovery %+v", f)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestRunInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var readings atomic.Int64
		o := fixture()
		o.DiskUsage = func(ctx context.Context, path string) (*disk.UsageStat, error) {
			readings.Add(1)
			return fixtureDisk(ctx, path)
		}
		c, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 65*time.Second)
		defer cancel()
		if err := c.Run(ctx); err != nil {
			t.Error(err)
		}
		if n := readings.Load(); n != 7 {
			t.Errorf("%d readings in 65 s, want one at once and one every 10 s", n)
		}
	})
}

func TestInterfacesAreBounded(t *testing.T) {
	o := fixture()
	o.Interfaces = func(context.Context) (net.InterfaceStatList, error) {
		var l net.InterfaceStatList
		for i := range 1000 {
			s := net.InterfaceStat{Name: fmt.Sprintf("eth%d", i), Flags: []string{"up"}}
			for j := range 100 {
				s.Addrs = append(s.Addrs, net.InterfaceAddr{Addr: fmt.Sprintf("10.0.%d.%d/16", i%256, j)})
			}
			l = append(l, s)
		}
		return l, nil
	}
	f := collect(t, o)
	if len(f.Interfaces) != maxInterfaces || len(f.Interfaces[0].Addresses) != maxAddresses {
		t.Errorf("%d interfaces with %d addresses", len(f.Interfaces), len(f.Interfaces[0].Addresses))
	}
}

func TestNewErrors(t *testing.T) {
	if _, err := New(Options{Interval: time.Millisecond}); err == nil || !strings.Contains(err.Error(), "1ms, allowed is 1s or more") {
		t.Errorf("%v", err)
	}
}

func BenchmarkCollect(b *testing.B) {
	c, err := New(fixture())
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		c.Collect(b.Context())
	}
}

// A node that the firmware does not tell is unknown, and no name leads out of the
// kernel's tree.
func TestTOP04UnknownNUMANodes(t *testing.T) {
	sys := t.TempDir()
	for id, text := range map[string]string{"0000:1b:00.0": "0", "0000:3b:00.0": "-1", "0001:00:00.0": "3", "0000:5b:00.0": "many"} {
		dir := filepath.Join(sys, "bus", "pci", "devices", id)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "numa_node"), []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	o := fixture()
	o.Sys = sys
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]*int{
		"00000000:1B:00.0": new(0), "0000:1b:00.0": new(0), "00000001:00:00.0": new(3), "00000000:3B:00.0": nil, "00000000:5B:00.0": nil,
		"00000000:7B:00.0": nil, "": nil, "x": nil, "0000:../../..": nil,
	} {
		if diff := cmp.Diff(want, c.NUMANodeOf(id)); diff != "" {
			t.Errorf("%q: %s", id, diff)
		}
	}
}
