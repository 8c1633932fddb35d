package nvml

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// Exit codes of the child. The message before the exit says more.
const (
	exitParentGone  = 0
	exitUnavailable = 3
	exitRebuild     = 4
)

const (
	// xidWait bounds one wait for an event, so that the child can end.
	xidWait = time.Second
	// xidHung is how long a wait may last before events are held for missing.
	xidHung = 10 * xidWait
	// lostRetry is how often the library is loaded anew while a GPU is lost,
	// to find it again after a repair.
	lostRetry = time.Minute
)

// child reads a source and writes what it says as frames.
type child struct {
	source  Source
	poll    time.Duration
	workers sync.WaitGroup // the goroutines of run; they end with its context

	mu       sync.Mutex // guards what follows
	out      io.Writer
	buffer   []byte
	said     time.Time // when the last frame was written
	xidState string
	xidAsked time.Time // when the wait for events under way began
}

// run writes frames until ctx ends, the source is not available, or the
// library must be loaded anew; it returns the exit code and waits for nothing,
// because a driver call may never return: the owner then ends the process.
func (c *child) run(ctx context.Context) int {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var log CallLog
	c.workers.Go(func() { c.tellBusy(ctx, &log) })
	session, err := c.source.Open(&log)
	if err != nil {
		status := Status{StateFailed, cut(err.Error())}
		if e, ok := errors.AsType[*StatusError](err); ok {
			status = e.Status
		}
		c.say(&message{Status: &status})
		return exitUnavailable
	}
	c.noteXidState("ok")
	c.workers.Go(func() { c.tellXids(ctx, session) })
	return c.tellSnapshots(ctx, session, &log)
}

// tellSnapshots reads and tells once per poll interval.
func (c *child) tellSnapshots(ctx context.Context, session Session, log *CallLog) int {
	ticker := time.NewTicker(c.poll)
	defer ticker.Stop()
	began := time.Now()
	rebuild := false
	for {
		readFrom := time.Now()
		s := session.Read()
		s.TookMs = float64(time.Since(readFrom)) / float64(time.Millisecond)
		s.Calls = log.Take()
		s.XidState = c.getXidState()
		if s.Rebuild == "" && anyLost(s.GPUs) && time.Since(began) >= lostRetry {
			s.Rebuild = "to find a lost GPU again"
		}
		// One more poll before the end, for the event that explains it.
		wanted := s.Rebuild != ""
		if !rebuild {
			s.Rebuild = ""
		}
		if err := c.say(&message{Snapshot: s}); err != nil {
			return exitParentGone
		}
		if s.Rebuild != "" {
			return exitRebuild
		}
		rebuild = wanted
		select {
		case <-ctx.Done():
			return exitParentGone
		case <-ticker.C:
		}
	}
}

func anyLost(gpus []GPU) bool {
	for i := range gpus {
		if gpus[i].Lost {
			return true
		}
	}
	return false
}

// tellXids tells events as they come. When they do not, the snapshots say so.
func (c *child) tellXids(ctx context.Context, session Session) {
	for ctx.Err() == nil {
		event, ok, err := session.WaitXid(xidWait)
		if err != nil {
			c.noteXidState(cut(err.Error()))
			select {
			case <-ctx.Done():
			case <-time.After(xidWait):
			}
			continue
		}
		c.noteXidState("ok")
		if ok {
			_ = c.say(&message{Xid: &event}) // a gone parent ends the process
		}
	}
}

// tellBusy tells which call is under way whenever nothing else was told for a
// poll interval: the parent then knows that the process lives and what it
// waits for.
func (c *child) tellBusy(ctx context.Context, log *CallLog) {
	ticker := time.NewTicker(c.poll)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			c.mu.Lock()
			quiet := now.Sub(c.said) > c.poll
			c.mu.Unlock()
			if quiet {
				b := log.Busy(now)
				_ = c.say(&message{Busy: &b})
			}
		}
	}
}

// say writes a frame in one piece.
func (c *child) say(m *message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	frame, err := appendFrame(c.buffer[:0], m)
	if err != nil {
		return err
	}
	c.buffer = frame
	c.said = time.Now()
	if _, err := c.out.Write(frame); err != nil {
		return fmt.Errorf("write to the parent: %w", err)
	}
	return nil
}

// noteXidState enters how the last wait for events ended.
func (c *child) noteXidState(s string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.xidState, c.xidAsked = s, time.Now()
}

func (c *child) getXidState() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.xidAsked) > xidHung {
		return "waiting for events does not return"
	}
	return c.xidState
}
