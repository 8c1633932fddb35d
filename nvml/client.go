package nvml

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Defaults and limits of a Client.
const (
	defaultPoll         = time.Second
	defaultBlockedPolls = 5
	defaultFrozenAfter  = time.Minute
	// staleFactor times the blocked limit is the age beyond which values are
	// not shown: a slow driver that goes on is slow, not blocked.
	staleFactor = 3
	// startLimit bounds the wait for a child's first word: a program start on
	// a busy host takes longer than a poll.
	startLimit = 10 * time.Second
	minBackOff = time.Second
	maxBackOff = time.Minute
	// steadyAfter is how long a child must have worked for the next one to be
	// started without a growing delay.
	steadyAfter = 30 * time.Second
	// maxUnkillable bounds the children that do not end when killed, because
	// the kernel holds them inside the driver.
	maxUnkillable = 2
	closeGrace    = time.Second
	killGrace     = 2 * time.Second
)

// Options configure a Client. The zero value is valid.
type Options struct {
	// Logger takes state changes; nil: none.
	Logger *slog.Logger
	// Registerer takes the metrics; nil: none.
	Registerer prometheus.Registerer
	// Executable is the program that has the command nvml; empty: this one.
	Executable string
	// Library is the path of the driver library; empty: as the loader finds it.
	Library string
	// Environ is added to the child's environment, NAME=value each.
	Environ []string
	// Poll is the interval between readings, 50 ms to 1 min; 0: 1 s.
	Poll time.Duration
	// BlockedAfterPolls is how many polls may pass within one driver call, or
	// without a word from the child; 0: 5.
	BlockedAfterPolls int
	// KernelLog is the kernel's log to read Xid errors from as well, /dev/kmsg for
	// example; empty: none.
	KernelLog string
	// StateFile keeps the errors of this boot and what was acknowledged over a
	// restart of the program; empty: they are not kept.
	StateFile string
	// FrozenAfter is how long all readings of a GPU may stand still; 0: 1 min.
	FrozenAfter time.Duration
}

// Client keeps a child process reading and knows what it last said.
type Client struct {
	options Options
	blocked time.Duration
	start   func() (process, error) // nil: this binary has no child to start
	changed chan struct{}
	metrics *metrics
	// uptime and boot tell how long the system is up, 0: unknown, and which life
	// of it this is.
	uptime func() time.Duration
	boot   func() string
	keep   chan struct{} // there is something to write to the state file

	mu         sync.Mutex // guards what follows
	kernelLog  string
	book       book
	status     Status
	since      time.Time
	xidState   string
	unkillable int
}

// New prepares a client; it starts nothing.
func New(options Options) (*Client, error) {
	if options.Poll == 0 {
		options.Poll = defaultPoll
	}
	if options.Poll < minPoll || options.Poll > maxPoll {
		return nil, fmt.Errorf("gpu.poll is %v, allowed is %v to %v", options.Poll, minPoll, maxPoll)
	}
	if options.BlockedAfterPolls == 0 {
		options.BlockedAfterPolls = defaultBlockedPolls
	}
	if options.BlockedAfterPolls < 0 {
		return nil, fmt.Errorf("blocked after %d polls, allowed is 1 or more", options.BlockedAfterPolls)
	}
	if options.FrozenAfter == 0 {
		options.FrozenAfter = defaultFrozenAfter
	}
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Client{
		options: options,
		blocked: time.Duration(options.BlockedAfterPolls) * options.Poll,
		changed: make(chan struct{}, 1),
		keep:    make(chan struct{}, 1),
		uptime:  sinceBoot,
		boot:    bootID,
		status:  Status{StateStarting, "NVML is starting"},
		since:   time.Now(),
	}
	if options.Executable == "" && !Built {
		c.status = statusNotBuilt()
	} else {
		c.start = c.startChild
	}
	c.metrics = newMetrics(c)
	if options.Registerer != nil {
		if err := options.Registerer.Register(c.metrics); err != nil {
			return nil, fmt.Errorf("register NVML metrics: %w", err)
		}
	}
	return c, nil
}

// childMark is set in a child's environment. A program that ignores the command
// nvml, as a test binary does, would otherwise start itself without end.
const childMark = "_WAYPOST_NVML_CHILD"

func (c *Client) startChild() (process, error) {
	if os.Getenv(childMark) != "" {
		return nil, errors.New("this process is an NVML child itself")
	}
	executable := c.options.Executable
	if executable == "" {
		var err error
		if executable, err = os.Executable(); err != nil {
			return nil, fmt.Errorf("find this program: %w", err)
		}
	}
	arguments := []string{"nvml", "--poll", c.options.Poll.String()}
	if c.options.Library != "" {
		arguments = append(arguments, "--library", c.options.Library)
	}
	environ := append(childEnviron(os.Environ(), c.options.Environ), childMark+"=1")
	return startProcess(command{executable, arguments, environ})
}

// Changed gets a value after the state changed or an Xid event came. Signals
// that nobody has taken yet are one.
func (c *Client) Changed() <-chan struct{} { return c.changed }

// View is what is known now. It never waits for the driver or the child.
func (c *Client) View() View {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	v := View{Status: c.status, Since: now.Sub(c.since), XidState: c.xidState, KernelLogState: c.kernelLog}
	if c.kernelLog == "ok" && c.xidState != "" && c.xidState != "ok" {
		// They arrive, if by another way.
		v.XidState, v.KernelLogState = "ok", "ok; the driver library tells no errors: "+c.xidState
	}
	if c.book.snapshot != nil {
		v.Age = new(now.Sub(c.book.at))
		v.Driver = c.book.snapshot.Driver
	}
	if v.Status.Code == StateOK && *v.Age > staleFactor*c.blocked {
		v.Status = Status{StateStale, fmt.Sprintf("GPU data stale %d s", int(v.Age.Seconds()))}
	}
	if v.Status.Code == StateBlocked {
		v.Status.Text += fmt.Sprintf(" (%d s)", int(v.Since.Seconds()))
	}
	v.Devices = c.book.view(now, v.Status.Code == StateOK, v.Status.Text, c.options.FrozenAfter)
	return v
}

// Acknowledge says that an operator has dealt with the Xid events that a GPU
// had so far; they count no more. False: no GPU with that UUID was seen.
func (c *Client) Acknowledge(uuid string) bool {
	c.mu.Lock()
	ok := c.book.acknowledge(uuid)
	c.mu.Unlock()
	c.signal()
	c.keepSoon()
	return ok
}

// Run keeps a child running until ctx ends. It returns when the last child has
// ended, or after a few seconds if the kernel does not let it.
func (c *Client) Run(ctx context.Context) error {
	if c.start == nil {
		<-ctx.Done()
		return nil
	}
	var beside sync.WaitGroup
	defer beside.Wait()
	if c.options.StateFile != "" {
		c.restore()
		beside.Go(func() { c.keepState(ctx) })
	}
	if c.options.KernelLog != "" {
		beside.Go(func() { c.followKernelLog(ctx) })
	}
	for attempt := 0; ; attempt++ {
		began := time.Now()
		again := c.runOne(ctx)
		if ctx.Err() != nil || !again {
			<-ctx.Done()
			return nil
		}
		if time.Since(began) >= steadyAfter {
			attempt = 0
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(backOff(attempt)):
		}
	}
}

// backOff is the delay before the child after the attempt-th: from minBackOff
// doubling to maxBackOff, a tenth of it random.
func backOff(attempt int) time.Duration {
	d := maxBackOff
	if attempt < 6 {
		d = minBackOff << attempt
	}
	return d - time.Duration(rand.Int64N(int64(d/10)))
}

// runOne runs one child to its end; false: another would end the same way.
func (c *Client) runOne(ctx context.Context) (again bool) {
	c.mu.Lock()
	stuck := c.unkillable
	c.mu.Unlock()
	if stuck >= maxUnkillable {
		c.setStatus(Status{StateBlocked, fmt.Sprintf("NVML blocked: %d killed NVML children do not end", stuck)})
		return true
	}
	p, err := c.start()
	if err != nil {
		c.setStatus(Status{StateFailed, fmt.Sprintf("the NVML child cannot be started: %v", err)})
		return true
	}
	c.metrics.starts.Inc()
	w := &watch{client: c, process: p, messages: make(chan *message), failed: make(chan error, 1), done: make(chan struct{})}
	var reader sync.WaitGroup
	reader.Go(w.readFrames)
	again = w.follow(ctx)
	close(w.done)
	p.Close()
	reader.Wait()
	return again
}

// setStatus changes the state and tells.
func (c *Client) setStatus(s Status) {
	c.mu.Lock()
	old := c.status
	if old.Code != s.Code {
		c.since = time.Now()
	}
	c.status = s
	c.mu.Unlock()
	if old == s {
		return
	}
	level := slog.LevelInfo
	if s.Code == StateBlocked || s.Code == StateCrashed {
		level = slog.LevelWarn
	}
	attrs := []any{"state", string(s.Code), "text", s.Text, "before", string(old.Code)}
	if s.Code == StateBlocked {
		attrs = append(attrs, "event", "nvml_blocked")
	}
	c.options.Logger.Log(context.Background(), level, "NVML state changed", attrs...)
	c.signal()
}

func (c *Client) signal() {
	c.mu.Lock()
	changed := c.book.changed
	c.mu.Unlock()
	if changed {
		c.keepSoon()
	}
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// take takes in what a child said.
func (c *Client) take(m *message) {
	switch {
	case m.Snapshot != nil:
		c.mu.Lock()
		before := c.book.changed
		c.book.takeSnapshot(m.Snapshot, time.Now())
		news := c.book.changed && !before // errors told before their GPU was known
		c.xidState = m.Snapshot.XidState
		c.mu.Unlock()
		if news {
			c.signal()
		}
		c.metrics.addCalls(m.Snapshot.Calls)
		if len(m.Snapshot.GPUs) == 0 {
			c.setStatus(Status{StateNoGPUs, "no GPUs"})
		} else {
			c.setStatus(Status{StateOK, "ok"})
		}
	case m.Xid != nil:
		c.mu.Lock()
		c.book.takeXid(*m.Xid, time.Now())
		c.mu.Unlock()
		c.noteXid(m.Xid.Xid, "uuid", m.Xid.UUID)
	case m.Status != nil:
		c.setStatus(*m.Status)
	}
}

// watch follows one child.
type watch struct {
	client   *Client
	process  process
	messages chan *message
	failed   chan error // the reader's last word
	done     chan struct{}
}

func (w *watch) readFrames() {
	for {
		m, err := readMessage(w.process.Frames())
		if err != nil {
			w.failed <- err
			return
		}
		select {
		case w.messages <- m:
		case <-w.done:
			return
		}
	}
}

// follow takes in what the child says until it ends or must be ended.
func (w *watch) follow(ctx context.Context) (again bool) {
	c := w.client
	// Silence is heard in two halves: of one that this process slept through, the
	// second half is still to come, and with it what waits to be read.
	half := c.blocked / 2
	silence := time.NewTimer(max(c.blocked, startLimit) - half)
	defer silence.Stop()
	quiet := false
	var reported *Status // the state the child ended with, by its own word
	rebuild := false
	for {
		select {
		case m := <-w.messages:
			silence.Reset(c.blocked - half)
			quiet = false
			if m.Busy != nil {
				if m.Busy.ForMs >= float64(c.blocked)/float64(time.Millisecond) {
					w.block(m.Busy.words() + " does not return")
					return true
				}
				continue
			}
			reported = m.Status
			rebuild = m.Snapshot != nil && m.Snapshot.Rebuild != ""
			c.take(m)
		case err := <-w.failed:
			return w.ended(err, reported, rebuild)
		case <-silence.C:
			if !quiet {
				quiet = true
				silence.Reset(half)
				continue
			}
			w.block("the NVML child is silent")
			return true
		case <-ctx.Done():
			w.process.CloseInput()
			w.reap(closeGrace)
			return false
		}
	}
}

// words names the call.
func (b *Busy) words() string {
	if b.GPU == nil {
		return b.Call
	}
	return fmt.Sprintf("%s on GPU %d", b.Call, *b.GPU)
}

func (w *watch) block(why string) {
	w.client.metrics.blocks.Inc()
	w.client.setStatus(Status{StateBlocked, "NVML blocked: " + why})
	w.reap(0)
}

// ended says how a child that stopped talking ended.
func (w *watch) ended(err error, reported *Status, rebuild bool) (again bool) {
	c := w.client
	if errors.Is(err, ErrFrame) {
		w.reap(0)
		c.setStatus(Status{StateCrashed, err.Error()})
		return true
	}
	ended := w.reap(killGrace)
	if reported != nil {
		return reported.Code != StateNotBuilt
	}
	if rebuild {
		return true
	}
	text := "the NVML child ended"
	if ended {
		_, words := w.process.Exit()
		text += ": " + words
	}
	c.metrics.crashes.Inc()
	c.setStatus(Status{StateCrashed, text})
	return true
}

// reap waits for the child's end at most grace, then kills it and waits a
// little longer. A child that the kernel holds is left to itself and counted
// until it ends.
func (w *watch) reap(grace time.Duration) (ended bool) {
	c := w.client
	select {
	case <-w.process.Exited():
		return true
	case <-time.After(grace):
	}
	w.process.Kill()
	select {
	case <-w.process.Exited():
		return true
	case <-time.After(killGrace):
	}
	c.mu.Lock()
	c.unkillable++
	c.mu.Unlock()
	c.options.Logger.Warn("a killed NVML child does not end: the kernel holds it inside the driver",
		"event", "nvml_blocked")
	go func() {
		<-w.process.Exited()
		c.mu.Lock()
		c.unkillable--
		c.mu.Unlock()
	}()
	return false
}
