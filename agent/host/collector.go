package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shirou/gopsutil/v4/common"
	"github.com/shirou/gopsutil/v4/disk"
	"github.com/shirou/gopsutil/v4/load"
	"github.com/shirou/gopsutil/v4/mem"
	"github.com/shirou/gopsutil/v4/net"
)

const (
	defaultInterval = 10 * time.Second
	// diskLimit bounds the wait for a file system that does not answer.
	diskLimit     = 2 * time.Second
	maxInterfaces = 64
	maxAddresses  = 16
	// maxFileBytes is more than any file read here has.
	maxFileBytes = 1 << 20
)

// Options configure a Collector. The zero value is valid.
type Options struct {
	// Proc and Sys are the roots of the kernel's file systems; empty: /proc
	// and /sys.
	Proc, Sys string
	// DiskPath is the path whose file system's space is told; empty: none.
	DiskPath string
	// Interval is the time between readings, 1 s or more; 0: 10 s.
	Interval time.Duration

	// Interfaces lists the network interfaces; nil: the kernel's.
	Interfaces func(context.Context) (net.InterfaceStatList, error)
	// DiskUsage tells the space of a path's file system; nil: the kernel's.
	DiskUsage func(context.Context, string) (*disk.UsageStat, error)
}

// Collector reads facts now and then and keeps the newest.
type Collector struct {
	options Options

	mu    sync.Mutex // guards what follows
	facts Facts
	at    time.Time
	disk  chan diskAnswer // of a question not answered yet; nil: none is open
}

type diskAnswer struct {
	usage *disk.UsageStat
	err   error
}

// New prepares a collector; it starts nothing.
func New(options Options) (*Collector, error) {
	if options.Interval == 0 {
		options.Interval = defaultInterval
	}
	if options.Interval < time.Second {
		return nil, fmt.Errorf("interval of host facts is %v, allowed is 1s or more", options.Interval)
	}
	if options.Proc == "" {
		options.Proc = "/proc"
	}
	if options.Sys == "" {
		options.Sys = "/sys"
	}
	if options.Interfaces == nil {
		options.Interfaces = net.InterfacesWithContext
	}
	if options.DiskUsage == nil {
		options.DiskUsage = disk.UsageWithContext
	}
	return &Collector{options: options}, nil
}

// Run reads at once and then every interval until ctx ends.
func (c *Collector) Run(ctx context.Context) error {
	ticker := time.NewTicker(c.options.Interval)
	defer ticker.Stop()
	for {
		c.Collect(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// Facts are the newest facts and their age; ok is false before the first.
func (c *Collector) Facts() (facts Facts, age time.Duration, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at.IsZero() {
		return Facts{}, 0, false
	}
	return c.facts, time.Since(c.at), true
}

// Collect reads the facts now. It takes at most a few seconds, also when a file
// system does not answer.
func (c *Collector) Collect(ctx context.Context) Facts {
	// The library reads where its context says.
	ctx = context.WithValue(ctx, common.EnvKey, common.EnvMap{
		common.HostProcEnvKey: c.options.Proc, common.HostSysEnvKey: c.options.Sys,
	})
	var f Facts
	read := func(fact string, from func() error) {
		if err := safely(from); err != nil {
			if f.Missing == nil {
				f.Missing = map[string]string{}
			}
			f.Missing[fact] = err.Error()
		}
	}
	read("cpus", func() error { return c.readCPUs(&f) })
	read("load", func() error { return c.readLoad(ctx, &f) })
	read("memory", func() error { return readMemory(ctx, &f) })
	read("disk", func() error { return c.readDisk(ctx, &f) })
	read("uptime", func() error { return c.readUptime(&f) })
	read("bootId", func() error { return c.readBootID(&f) })
	read("interfaces", func() error { return c.readInterfaces(ctx, &f) })
	c.mu.Lock()
	c.facts, c.at = f, time.Now()
	c.mu.Unlock()
	return f
}

// safely turns a panic into an error: the library's parsers index into lines
// without looking, and no oddity of a kernel file may end the agent.
func safely(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("reading failed: %v", r)
		}
	}()
	return f()
}

// file reads a small file below root.
func file(root string, name ...string) (string, error) {
	path := filepath.Join(append([]string{root}, name...)...)
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return "", err
	}
	if len(b) > maxFileBytes {
		return "", fmt.Errorf("%s has more than %d bytes", path, maxFileBytes)
	}
	return strings.TrimSpace(string(b)), nil
}

func (c *Collector) readCPUs(f *Facts) error {
	text, err := file(c.options.Proc, "stat")
	if err != nil {
		return err
	}
	n := 0
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, "cpu"); ok && rest != "" && rest[0] >= '0' && rest[0] <= '9' {
			n++
		}
	}
	if n == 0 {
		return errors.New("no cpu lines in stat")
	}
	f.CPUs = &n
	return nil
}

// readLoad looks at the file first: the library answers for this machine when
// the file it was told to read is not there.
func (c *Collector) readLoad(ctx context.Context, f *Facts) error {
	if _, err := file(c.options.Proc, "loadavg"); err != nil {
		return err
	}
	avg, err := load.AvgWithContext(ctx)
	if err != nil {
		return err
	}
	f.Load1M = &avg.Load1
	return nil
}

func readMemory(ctx context.Context, f *Facts) error {
	m, err := mem.VirtualMemoryWithContext(ctx)
	if err != nil {
		return err
	}
	// The library leaves a line that is not there at 0, which no running
	// system has.
	if m.Total == 0 {
		return errors.New("no MemTotal in meminfo")
	}
	f.MemoryTotalBytes = &m.Total
	if m.Available == 0 || m.Available > m.Total {
		return errors.New("no MemAvailable in meminfo")
	}
	f.MemoryAvailableBytes = &m.Available
	return nil
}

// readDisk asks with a limit. While a file system has not answered it is not
// asked again, so that no more than one question is ever open.
func (c *Collector) readDisk(ctx context.Context, f *Facts) error {
	if c.options.DiskPath == "" {
		return errors.New("no path configured")
	}
	c.mu.Lock()
	if c.disk == nil {
		answer := make(chan diskAnswer, 1)
		c.disk = answer
		go func() {
			var a diskAnswer
			a.err = safely(func() (err error) {
				a.usage, err = c.options.DiskUsage(ctx, c.options.DiskPath)
				return err
			})
			answer <- a
		}()
	}
	answer := c.disk
	c.mu.Unlock()
	select {
	case a := <-answer:
		c.mu.Lock()
		c.disk = nil
		c.mu.Unlock()
		if a.err != nil {
			return a.err
		}
		f.DiskFreeBytes = &a.usage.Free
		return nil
	case <-time.After(diskLimit):
		return fmt.Errorf("file system of %s does not answer", c.options.DiskPath)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *Collector) readUptime(f *Facts) error {
	text, err := file(c.options.Proc, "uptime")
	if err != nil {
		return err
	}
	first, _, _ := strings.Cut(text, " ")
	seconds, err := strconv.ParseFloat(first, 64)
	if err != nil || !(seconds >= 0 && seconds < 1e10) {
		return fmt.Errorf("uptime is %q, want seconds", first)
	}
	f.Uptime = new(time.Duration(seconds * float64(time.Second)))
	return nil
}

func (c *Collector) readBootID(f *Facts) error {
	id, err := file(c.options.Proc, "sys", "kernel", "random", "boot_id")
	if err != nil {
		return err
	}
	if len(id) != 36 {
		return fmt.Errorf("boot_id is %q, want 36 characters", id[:min(len(id), 64)])
	}
	f.BootID = id
	return nil
}

func (c *Collector) readInterfaces(ctx context.Context, f *Facts) error {
	all, err := c.options.Interfaces(ctx)
	if err != nil {
		return err
	}
	f.Interfaces = []Interface{}
	for _, stat := range all {
		if !slices.Contains(stat.Flags, "up") || slices.Contains(stat.Flags, "loopback") {
			continue
		}
		i := Interface{Name: stat.Name, Addresses: reachable(stat.Addrs)}
		if len(i.Addresses) == 0 {
			continue
		}
		if stat.MTU > 0 {
			i.MTUBytes = &stat.MTU
		}
		i.BitsPerSec = c.lineRate(stat.Name)
		i.NUMANode = c.numaNode("class", "net", stat.Name, "device", "numa_node")
		f.Interfaces = append(f.Interfaces, i)
	}
	slices.SortFunc(f.Interfaces, func(a, b Interface) int { return strings.Compare(a.Name, b.Name) })
	f.Interfaces = f.Interfaces[:min(len(f.Interfaces), maxInterfaces)]
	return nil
}

// reachable are the addresses another host can use, in order.
func reachable(addresses net.InterfaceAddrList) []string {
	var out []string
	for _, a := range addresses {
		p, err := netip.ParsePrefix(a.Addr)
		if err != nil || p.Addr().IsLoopback() || p.Addr().IsLinkLocalUnicast() || len(out) >= maxAddresses {
			continue
		}
		out = append(out, p.String())
	}
	slices.Sort(out)
	return out
}

// lineRate is what the driver of an interface says. Virtual interfaces fail to
// be read, say -1 or, on old kernels, the largest number.
func (c *Collector) lineRate(name string) *float64 {
	if strings.ContainsRune(name, '/') || name == ".." {
		return nil
	}
	text, err := file(c.options.Sys, "class", "net", name, "speed")
	if err != nil {
		return nil
	}
	megabits, err := strconv.ParseInt(text, 10, 64)
	if err != nil || megabits <= 0 || megabits >= 1<<31-1 {
		return nil
	}
	return new(float64(megabits) * 1e6)
}

// NUMANodeOf is the node that a PCI device hangs on; nil: unknown.
func (c *Collector) NUMANodeOf(pciBusID string) *int {
	id := kernelBusID(pciBusID)
	if id == "" {
		return nil
	}
	return c.numaNode("bus", "pci", "devices", id, "numa_node")
}

// numaNode reads a node below the kernel's tree of devices. The kernel says -1
// where the firmware does not tell.
func (c *Collector) numaNode(path ...string) *int {
	for _, part := range path {
		if strings.ContainsRune(part, '/') || part == ".." {
			return nil
		}
	}
	text, err := file(c.options.Sys, path...)
	if err != nil {
		return nil
	}
	node, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return nil
	}
	return new(int(node))
}
