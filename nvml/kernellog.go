package nvml

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// logXid is an Xid error in the kernel's log.
type logXid struct {
	pciBusID string
	xid      uint32
	// sinceBoot is when it was logged.
	sinceBoot time.Duration
}

// xidLine is how the driver logs an error: "NVRM: Xid (PCI:0000:3b:00): 79,
// pid=1, GPU has fallen off the bus.", older drivers without the PCI.
var xidLine = regexp.MustCompile(`^NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)\): ([0-9]{1,5})\b`)

// parseLogRecord reads one record of the kernel's log: "priority,sequence,µs
// since boot,flags;text", lines of detail after it.
func parseLogRecord(record string) (x logXid, ok bool) {
	head, text, found := strings.Cut(record, ";")
	fields := strings.SplitN(head, ",", 4)
	if !found || len(fields) < 3 {
		return logXid{}, false
	}
	us, err := strconv.ParseInt(fields[2], 10, 64)
	if err != nil || us < 0 || us > int64(100*365*24*time.Hour/time.Microsecond) {
		return logXid{}, false
	}
	m := xidLine.FindStringSubmatch(text)
	if m == nil {
		return logXid{}, false
	}
	n, err := strconv.ParseUint(m[2], 10, 16)
	if err != nil || n == 0 {
		return logXid{}, false
	}
	return logXid{pciBusID: m[1], xid: uint32(n), sinceBoot: time.Duration(us) * time.Microsecond}, true
}

// samePCI says whether the driver's log and its library mean one device. The
// library writes the domain in eight digits and a function number, the log may
// leave the latter out.
func samePCI(a, b string) bool {
	parse := func(id string) (domain uint64, rest string, ok bool) {
		d, rest, ok := strings.Cut(strings.ToLower(id), ":")
		if !ok {
			return 0, "", false
		}
		domain, err := strconv.ParseUint(d, 16, 32)
		rest, _, _ = strings.Cut(rest, ".")
		return domain, rest, err == nil
	}
	domainA, restA, okA := parse(a)
	domainB, restB, okB := parse(b)
	return okA && okB && domainA == domainB && restA == restB
}

// maxLogRecord is the largest record the kernel writes.
const maxLogRecord = 8192

// followKernelLog reads the kernel's log from its beginning, so that what was
// before the agent is known as well, until ctx ends.
func (c *Client) followKernelLog(ctx context.Context) {
	for ctx.Err() == nil {
		err := c.readKernelLog(ctx)
		if ctx.Err() != nil {
			return
		}
		c.setKernelLogState(logStateOf(err))
		select {
		case <-ctx.Done():
		case <-time.After(maxBackOff):
		}
	}
}

// logStateOf says in words why the kernel's log is not read.
func logStateOf(err error) string {
	switch {
	case errors.Is(err, os.ErrPermission):
		return "no permission to read the kernel's log: give the agent CAP_SYSLOG"
	case errors.Is(err, os.ErrNotExist):
		return "no kernel log here"
	case err == nil || errors.Is(err, io.EOF):
		return "the kernel's log ended"
	}
	return cut(err.Error())
}

func (c *Client) readKernelLog(ctx context.Context) error {
	// Without blocking the runtime waits for records, and a close ends the wait.
	f, err := os.OpenFile(c.options.KernelLog, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = f.Close() })
	defer func() {
		if stop() {
			_ = f.Close()
		}
	}()
	c.setKernelLogState("ok")
	return c.takeKernelLog(f)
}

// takeKernelLog takes in the errors of a log. The kernel gives one record at a
// time, other sources one line; records that were overwritten before they were
// read are lost.
func (c *Client) takeKernelLog(r io.Reader) error {
	lines := bufio.NewReaderSize(r, maxLogRecord)
	for {
		line, err := lines.ReadSlice('\n')
		switch {
		case errors.Is(err, syscall.EPIPE), errors.Is(err, bufio.ErrBufferFull):
			continue
		case err != nil:
			return err
		}
		if x, ok := parseLogRecord(strings.TrimSuffix(string(line), "\n")); ok {
			c.takeLogXid(x)
		}
	}
}

func (c *Client) takeLogXid(x logXid) {
	now := time.Now()
	c.mu.Lock()
	uptime := c.uptime()
	if uptime <= 0 || x.sinceBoot > uptime+time.Minute {
		c.mu.Unlock()
		return // without a clock in common it cannot be told when it was
	}
	at := now.Add(-max(uptime-x.sinceBoot, 0))
	isNew := c.book.takeLogXid(x, at)
	c.mu.Unlock()
	if !isNew {
		return
	}
	c.noteXid(x.xid, "pci", x.pciBusID)
}

// noteXid counts, logs and tells an error that was not known.
func (c *Client) noteXid(xid uint32, key, value string) {
	class, words := DescribeXid(xid)
	c.metrics.xids.WithLabelValues(string(class)).Inc()
	c.options.Logger.Warn("GPU reported an error", "xid", xid, "class", string(class), "means", words, key, value)
	c.signal()
}

func (c *Client) setKernelLogState(s string) {
	c.mu.Lock()
	old := c.kernelLog
	c.kernelLog = s
	c.mu.Unlock()
	if old != s {
		c.options.Logger.Info("kernel log for GPU errors", "state", s)
	}
}

// sinceBoot reads how long the system is up; 0: unknown. The kernel's log counts
// the same clock.
func sinceBoot() time.Duration {
	text, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	seconds, err := strconv.ParseFloat(first, 64)
	if err != nil || !(seconds > 0 && seconds < 1e10) {
		return 0
	}
	return time.Duration(seconds * float64(time.Second))
}

// bootID is another one after each boot; empty: unknown.
func bootID() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
