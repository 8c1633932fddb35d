package lane

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	waypostv1 "waypost/proto/waypost/v1"
)

// Session is the coordinator's side of one lane.
type Session struct {
	s        *Server
	stream   waypostv1.LaneService_ConnectServer
	certName string
	remote   string
	since    time.Time

	// Set by the first hello, before the session is shown to anyone.
	host    string
	process uint64
	session uint64

	hello  atomic.Pointer[waypostv1.AgentHello]
	out    *outbox[*waypostv1.ConnectResponse]
	fresh  Freshness     // of the read goroutine
	helloC chan struct{} // closed when the first hello was read
	accept chan struct{} // closed when frames may go to the handler
	up     bool          // LaneUp returned nil; final once served is closed
	served chan struct{} // closed when serve has returned
	writer chan struct{} // closed when the writer has ended; nil: never began

	sending atomic.Int64 // when the Send under way began, monotonic ns; 0: none

	frameMu sync.Mutex
	frameC  chan struct{} // closed by the next frame, if someone waits for it

	endOnce sync.Once
	cause   error
	ending  chan struct{}
	done    chan struct{} // closed after LaneDown
}

func newSession(s *Server, stream waypostv1.LaneService_ConnectServer, certName, remote string) *Session {
	return &Session{
		s: s, stream: stream, certName: certName, remote: remote, since: time.Now(),
		out:    newOutbox[*waypostv1.ConnectResponse](),
		helloC: make(chan struct{}), accept: make(chan struct{}), served: make(chan struct{}),
		ending: make(chan struct{}), done: make(chan struct{}),
	}
}

// Host returns the name of the host.
func (c *Session) Host() string { return c.host }

// AgentProcess returns the process mark of the agent.
func (c *Session) AgentProcess() uint64 { return c.process }

// Number returns the session number the agent gave.
func (c *Session) Number() uint64 { return c.session }

// Hello returns the newest hello. It must not be changed.
func (c *Session) Hello() *waypostv1.AgentHello { return c.hello.Load() }

// Since returns when the lane was opened.
func (c *Session) Since() time.Time { return c.since }

// Done is closed when the lane has ended and LaneDown has returned.
func (c *Session) Done() <-chan struct{} { return c.done }

// Send queues a frame, which must not be changed afterwards. It returns
// ErrQueueFull, ErrTooBig or ErrLaneDown.
func (c *Session) Send(f *waypostv1.ConnectResponse) error {
	switch f.GetFrame().(type) {
	case *waypostv1.ConnectResponse_Hello:
		return errors.New("lane: hello is built by the lane and cannot be queued")
	case nil:
		return errors.New("lane: frame is empty")
	}
	return c.out.push(f)
}

// Close ends the lane; the agent dials again.
func (c *Session) Close(cause error) { c.end(cause) }

func (c *Session) end(cause error) {
	c.endOnce.Do(func() {
		c.cause = cause
		c.out.close()
		close(c.ending)
	})
}

func (c *Session) isEnding() bool {
	select {
	case <-c.ending:
		return true
	default:
		return false
	}
}

func (c *Session) mono() int64 { return int64(time.Since(c.s.began)) }

// nextFrame returns a channel that is closed by the next frame from the agent.
func (c *Session) nextFrame() <-chan struct{} {
	c.frameMu.Lock()
	defer c.frameMu.Unlock()
	if c.frameC == nil {
		c.frameC = make(chan struct{})
	}
	return c.frameC
}

func (c *Session) noteFrame() {
	c.frameMu.Lock()
	defer c.frameMu.Unlock()
	if c.frameC != nil {
		close(c.frameC)
		c.frameC = nil
	}
}

// run is the gRPC handler of the stream: when it returns, the stream is closed
// and read ends.
func (c *Session) run() error {
	err := c.serve()
	close(c.served)
	var r *refusal
	if !errors.As(err, &r) {
		c.end(err)
		if errors.Is(c.cause, errReplaced) {
			return status.Error(codes.Aborted, c.cause.Error())
		}
		return status.Error(codes.Unavailable, c.cause.Error())
	}
	c.s.metrics.refused.WithLabelValues(r.label).Inc()
	level := slog.LevelWarn
	if r.favours != 0 {
		level = slog.LevelDebug // a coordinator with two addresses is nothing to warn of
	}
	c.s.log.Log(c.stream.Context(), level, "lane refused", "host", c.hello.Load().GetHost(), "remote", c.remote, "reason", r.text)
	if (r.lasting || r.favours != 0) && c.writerIdle() {
		// Told in the hello, where agents of every version look.
		h := c.s.opts.Hello()
		h.Protocol, h.Refused = new(uint32(Protocol)), new(r.text)
		if r.favours != 0 {
			h.SessionUp = new(r.favours)
		}
		_ = c.send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Hello{Hello: h}})
	}
	c.end(r)
	return status.Error(r.code, r.text)
}

// serve waits for the hello, makes the session the one of its host and writes
// until it ends.
func (c *Session) serve() error {
	timer := time.NewTimer(c.s.opts.HelloTimeout)
	defer timer.Stop()
	select {
	case <-c.helloC:
	case <-timer.C:
		c.end(fmt.Errorf("no hello within %v", c.s.opts.HelloTimeout))
	case <-c.ending:
	}
	c.s.greeted()
	select {
	case <-c.ending:
		return c.cause
	default:
	}
	h := c.hello.Load()
	if r := checkHello(h, c.certName); r != nil {
		return r
	}
	c.host, c.process, c.session = h.GetHost(), h.GetAgentProcess(), h.GetSession()
	if r := c.s.claim(c); r != nil {
		return r
	}
	if err := c.s.opts.Handler.LaneUp(c); err != nil {
		return refuse("handler", codes.FailedPrecondition, "%s", cut(err.Error(), maxRefusedTextBytes))
	}
	c.up = true
	close(c.accept)
	c.s.log.Info("lane up", "host", c.host, "remote", c.remote, "session", c.session)
	return c.live()
}

// live writes until the lane ends.
func (c *Session) live() error {
	c.writer = make(chan struct{})
	c.s.wg.Go(func() {
		defer close(c.writer)
		c.end(c.write())
	})
	watch := time.NewTicker(c.s.opts.StallAfter / 8)
	defer watch.Stop()
	ending, writer := c.ending, (<-chan struct{})(nil)
	for {
		select {
		case <-ending:
			ending, writer = nil, c.writer // a Send under way may still finish
		case <-writer:
			return c.cause
		case <-watch.C:
			if began := c.sending.Load(); began != 0 && time.Duration(c.mono()-began) >= c.s.opts.StallAfter {
				c.s.metrics.stalled.Inc()
				c.end(fmt.Errorf("%w for %v", errStalled, c.s.opts.StallAfter))
				return c.cause // closing the stream frees the Send
			}
		}
	}
}

// writerIdle says whether nobody else sends on the stream any more.
func (c *Session) writerIdle() bool {
	if c.writer == nil {
		return true
	}
	select {
	case <-c.writer:
		return true
	default:
		return false
	}
}

func (c *Session) write() error {
	h := c.s.opts.Hello()
	h.Protocol = new(uint32(Protocol))
	if err := c.send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Hello{Hello: h}}); err != nil {
		return err
	}
	for {
		for {
			f, ok := c.out.pop()
			if !ok {
				break
			}
			if err := c.send(f); err != nil {
				return err
			}
		}
		if c.out.finished() {
			return errStops
		}
		select {
		case <-c.out.ready:
		case <-c.ending:
			return c.cause
		}
	}
}

func (c *Session) send(f *waypostv1.ConnectResponse) error {
	now := c.mono()
	f.SentMonoNs = new(uint64(now))
	c.sending.Store(max(1, now))
	defer c.sending.Store(0)
	return c.stream.Send(f)
}

// read takes frames in until the stream ends, and ends the session. The last
// frame has then been handled, and LaneUp has been called or never will be.
func (c *Session) read() {
	defer c.s.wg.Done()
	c.end(c.readFrames())
	<-c.served
	if c.up {
		c.s.log.Info("lane down", "host", c.host, "remote", c.remote, "session", c.session, "cause", c.cause)
		c.s.opts.Handler.LaneDown(c, c.cause)
	}
	c.s.release(c) // only now may the next lane of the host come up
	close(c.done)
}

func (c *Session) readFrames() error {
	first, err := c.stream.Recv()
	if err != nil {
		return ended(err)
	}
	c.fresh.Observe(first.GetSentMonoNs(), c.mono())
	h := first.GetHello()
	if h == nil {
		return fmt.Errorf("agent spoke %s before its hello", kindOf(first))
	}
	c.hello.Store(h)
	close(c.helloC)
	select {
	case <-c.accept:
	case <-c.ending:
		return c.cause
	}
	for {
		f, err := c.stream.Recv()
		if err != nil {
			return ended(err)
		}
		c.noteFrame()
		if f.GetFrame() == nil {
			continue // a kind of a newer agent
		}
		late := c.fresh.Observe(f.GetSentMonoNs(), c.mono())
		if h := f.GetHello(); h != nil {
			if r := c.checkAgain(h); r != nil {
				return r
			}
			c.hello.Store(h)
		}
		if f.GetLoad() != nil {
			c.s.metrics.lateness.Observe(late.Seconds())
		}
		addLateness(f, late)
		c.s.opts.Handler.Frame(c, f, late)
	}
}

// checkAgain checks a later hello: facts may change, who it is may not.
func (c *Session) checkAgain(h *waypostv1.AgentHello) *refusal {
	if r := checkHello(h, c.certName); r != nil {
		return r
	}
	if h.GetHost() != c.host || h.GetAgentProcess() != c.process || h.GetSession() != c.session {
		return refuse("hello", codes.InvalidArgument, "a later hello of the lane names another host, process or session")
	}
	return nil
}

func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("closed by the agent")
	}
	if s, ok := status.FromError(err); ok {
		return errors.New(s.Message())
	}
	return err
}
