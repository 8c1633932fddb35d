package nonblock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

const (
	// lowWater is the number of bytes below which a connection that is read on
	// ticks wakes nobody. What does not fit wakes the process in vain, and is read
	// without waiting for the next tick once some of it was. The buffer of a socket
	// is at least twice as large, and the kernel wakes before it is full.
	lowWater = 32 << 10
	// idleTicks are so many ticks in a row, of those on which it is read, without a
	// byte that on the next one without any a connection waits for its next byte
	// instead.
	idleTicks = 20
	// windowTicks and rateWindow are over how long the rate of reads is counted.
	windowTicks = 40
	rateWindow  = 200 * time.Millisecond
	// ackDelay is the least time after which the kernel acknowledges by itself.
	ackDelay = 40 * time.Millisecond
)

// Coalescer reads many connections together, as network cards coalesce
// interrupts: while they have many messages to read, all are read on the ticks of
// one timer, so that the process wakes once for what arrived at any of them, and
// not for each message. Between the ticks the kernel keeps what arrives. An end of
// a connection, a deadline and Close are noticed on the next tick as well; a
// deadline that has passed by then counts, also for a read whose bytes came before
// it: one that only looks must be longer than Every ticks. With few messages, or without
// Run, each read wakes at once, as by [Conn].
type Coalescer struct {
	o CoalescerOptions

	mu      sync.Mutex
	running bool
	on      bool          // connections wait for ticks
	begin   chan struct{} // on has begun
	reads   int           // since the beginning of the window
	window  time.Time     // when it began, while not on
	// waiting are the reads that wait for a tick: those that come first on it, and
	// the others.
	waiting [2][]*coalesced
	timers  map[*Timer]struct{}
	tick    uint64
}

const (
	first = iota
	others
)

// NewCoalescer returns a coalescer; Run starts it.
func NewCoalescer(o CoalescerOptions) (*Coalescer, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Coalescer{o: o, begin: make(chan struct{}, 1), timers: map[*Timer]struct{}{}}, nil
}

// Conn returns a connection that reads c on ticks and otherwise as [Conn] does. What
// is no TCP connection is returned as it is. A nil Coalescer never ticks.
func (k *Coalescer) Conn(c net.Conn) net.Conn { return k.conn(c, others) }

// ConnFirst is Conn for a connection that is read on each tick before those of
// Conn: what it brings comes in front of what they bring, as far as the scheduler
// lets it.
func (k *Coalescer) ConnFirst(c net.Conn) net.Conn { return k.conn(c, first) }

func (k *Coalescer) conn(c net.Conn, turn int) net.Conn {
	inner, ok := Conn(c).(*conn)
	switch {
	case !ok:
		return c
	case k == nil:
		return inner
	}
	return &coalesced{conn: inner, k: k, turn: turn, woken: make(chan struct{}, 1)}
}

// Run ticks until ctx ends; it is called once. It returns an error if the system has no timer to give;
// connections are then read as by [Conn].
func (k *Coalescer) Run(ctx context.Context) error {
	timer, err := newKernelTimer()
	if err != nil {
		return fmt.Errorf("nonblock: %w", err)
	}
	defer timer.close()
	defer context.AfterFunc(ctx, timer.close)()
	k.with(func() { k.running, k.window, k.reads = true, time.Now(), 0 })
	defer k.with(func() { k.running = false; k.end() })
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-k.begin:
		}
		if err := k.ticks(timer); err != nil && ctx.Err() == nil {
			return fmt.Errorf("nonblock: %w", err)
		}
	}
}

func (k *Coalescer) with(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

// end ends the waiting for ticks. The lock is held.
func (k *Coalescer) end() {
	now := time.Now()
	k.on, k.window, k.reads = false, now, 0
	for turn, list := range k.waiting {
		for i, c := range list {
			list[i] = nil
			c.wake(result{left: true})
		}
		k.waiting[turn] = list[:0]
	}
	for t := range k.timers {
		t.leave(now)
	}
}

// ticks ticks while there is enough to read.
func (k *Coalescer) ticks(timer *kernelTimer) error {
	if err := timer.set(k.o.Period); err != nil {
		return err
	}
	least := k.o.EndReadsPerSec * k.o.Period.Seconds() // reads on a tick
	var passed, since uint64                           // ticks of the window, and since the others were read
	for {
		expired, err := timer.wait()
		if err != nil {
			return err
		}
		passed, since = passed+expired, since+expired
		k.with(func() {
			k.tick += expired
			k.readAll(first)
		})
		runtime.Gosched() // until what they brought is dealt with
		ended := false
		k.with(func() {
			if since >= uint64(k.o.Every) {
				k.readAll(others)
				since = 0
			}
			now := time.Now()
			for t := range k.timers {
				t.look(now)
			}
			if passed >= windowTicks {
				if ended = float64(k.reads) < least*float64(passed); ended {
					k.end()
				}
				k.reads, passed = 0, 0
			}
		})
		if ended {
			return timer.set(0)
		}
	}
}

// readAll makes the reads that wait for a turn. Those that brought nothing go on
// waiting. The lock is held.
func (k *Coalescer) readAll(turn int) {
	list := k.waiting[turn]
	still := list[:0]
	// What is acknowledged next came at most a tick before acknowledgements were
	// delayed last.
	holds := uint64(max(0, ackDelay/k.o.Period-1))
	for _, c := range list {
		if k.tick-c.delayed >= holds {
			c.in.delayAcks, c.delayed = true, k.tick
		}
		n, ok, err := c.conn.try(c.p)
		switch {
		case ok:
			if n > 0 {
				k.reads++
			}
			c.wake(result{n: n, err: err})
		case c.empty == idleTicks:
			c.wake(result{left: true})
		default:
			c.empty++
			still = append(still, c)
		}
	}
	clear(list[len(still):])
	k.waiting[turn] = still
}

// count counts a read that brought n bytes, which may be the one with which waiting
// for ticks begins.
func (k *Coalescer) count(n int) {
	if n == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.reads++
	if k.on || !k.running {
		return
	}
	now := time.Now()
	passed := now.Sub(k.window)
	if passed < rateWindow {
		return
	}
	k.on = float64(k.reads) > k.o.BeginReadsPerSec*passed.Seconds()
	k.window, k.reads = now, 0
	if k.on {
		k.begin <- struct{}{}
	}
}

// enlist has a read made on the next tick. It reports false if there is none.
func (k *Coalescer) enlist(c *coalesced) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.on {
		k.waiting[c.turn] = append(k.waiting[c.turn], c)
	}
	return k.on
}

// Ticking says whether connections wait for ticks now.
func (k *Coalescer) Ticking() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.on
}

// coalesced is a connection that is read on ticks.
type coalesced struct {
	*conn
	k    *Coalescer
	turn int

	mu    sync.Mutex // held by Read
	quiet bool       // the kernel wakes nobody for a few bytes
	more  bool       // the last read may have left some

	// Of a read that waits for a tick; the coalescer's while it does.
	p       []byte
	delayed uint64 // the tick on which acknowledgements were delayed last
	empty   int    // ticks in a row without a byte
	got     result
	woken   chan struct{}
}

// result is how a read ended that waited for a tick.
type result struct {
	n    int
	err  error
	left bool // nothing was read: wait for the next byte instead
}

// wake ends a read that waits for a tick.
func (c *coalesced) wake(r result) {
	c.p, c.got = nil, r
	c.woken <- struct{}{}
}

// Read implements net.Conn.
func (c *coalesced) Read(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(p) == 0 {
		return 0, nil
	}
	if c.more {
		n, ok, err := c.conn.try(p)
		c.more = false
		if ok {
			c.k.count(n)
			return c.done(n, len(p), err)
		}
	}
	if c.k.Ticking() {
		if err := c.setQuiet(true); err != nil {
			return 0, err
		}
		c.p, c.empty = p, 0
		if c.k.enlist(c) {
			<-c.woken
			if !c.got.left {
				return c.done(c.got.n, len(p), c.got.err)
			}
		}
		c.p = nil
	}
	if err := c.setQuiet(false); err != nil {
		return 0, err
	}
	n, err := c.conn.Read(p)
	c.k.count(n)
	return c.done(n, len(p), err)
}

// done notes what was read into so much space.
func (c *coalesced) done(n, space int, err error) (int, error) {
	c.more = n == space || n >= lowWater
	return n, err
}

// WriteTo implements io.WriterTo.
func (c *coalesced) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, struct{ io.Reader }{c}) }

// setQuiet sets how many bytes wake a reader. What has arrived already counts.
func (c *coalesced) setQuiet(quiet bool) error {
	if quiet == c.quiet {
		return nil
	}
	bytes := int32(1)
	if quiet {
		bytes = lowWater
	}
	var errno syscall.Errno
	err := c.raw.Control(func(fd uintptr) {
		_, _, errno = syscall.RawSyscall6(syscall.SYS_SETSOCKOPT, fd, syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, uintptr(unsafe.Pointer(&bytes)), unsafe.Sizeof(bytes), 0)
	})
	if err != nil {
		return err
	}
	if errno != 0 {
		return c.fault("set", "setsockopt", errno)
	}
	c.quiet = quiet
	return nil
}

// kernelTimer is a timer of the kernel: one of the runtime wakes its monitor as
// well, and waits in whole milliseconds.
type kernelTimer struct {
	file *os.File
	raw  syscall.RawConn
	once sync.Once

	// Of a wait, so that none makes a closure.
	take    func(fd uintptr) bool
	expired uint64
	errno   syscall.Errno
}

const clockMonotonic = 1 // CLOCK_MONOTONIC

func newKernelTimer() (*kernelTimer, error) {
	fd, _, errno := syscall.RawSyscall(syscall.SYS_TIMERFD_CREATE, clockMonotonic, syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if errno != 0 {
		return nil, os.NewSyscallError("timerfd_create", errno)
	}
	f := os.NewFile(fd, "timer")
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	t := &kernelTimer{file: f, raw: raw}
	t.take = func(fd uintptr) bool {
		_, _, t.errno = syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(&t.expired)), unsafe.Sizeof(t.expired))
		return t.errno != syscall.EAGAIN
	}
	return t, nil
}

// set makes the timer expire every period; 0: never.
func (t *kernelTimer) set(period time.Duration) error {
	spec := [2]syscall.Timespec{syscall.NsecToTimespec(int64(period)), syscall.NsecToTimespec(int64(period))}
	var errno syscall.Errno
	err := t.raw.Control(func(fd uintptr) {
		_, _, errno = syscall.RawSyscall6(syscall.SYS_TIMERFD_SETTIME, fd, 0, uintptr(unsafe.Pointer(&spec)), 0, 0, 0)
	})
	if errno != 0 {
		return os.NewSyscallError("timerfd_settime", errno)
	}
	return err
}

// wait waits for the timer to expire, and says how often it has since the last time.
func (t *kernelTimer) wait() (times uint64, err error) {
	if err := t.raw.Read(t.take); err != nil {
		return 0, err
	}
	if t.errno != 0 {
		return 0, os.NewSyscallError("read", t.errno)
	}
	return t.expired, nil
}

// close ends the timer, and with it a wait.
func (t *kernelTimer) close() { t.once.Do(func() { _ = t.file.Close() }) }
