package lane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"waypost/gossip/identity"
	"waypost/gossip/nonblock"
	waypostv1 "waypost/proto/waypost/v1"
)

// keepaliveTime is how long a silent connection lives before it is asked; gRPC
// allows clients no less than 10 s. TCP notices a dead peer sooner: gRPC sets
// TCP_USER_TIMEOUT to the keepalive timeout, and LOADs are always under way.
const keepaliveTime = 10 * time.Second

// requestStream is the part of the gRPC stream that writing needs.
type requestStream interface {
	Send(*waypostv1.ConnectRequest) error
}

// Lane is one stream to one coordinator, from its hello to its end. A new
// connection is a new Lane.
type Lane struct {
	d       *Dialer
	address string
	session uint64
	hello   *waypostv1.CoordinatorHello
	name    string // of the coordinator

	track *tracker
	out   *outbox[*waypostv1.ConnectRequest]
	kicks chan struct{}
	news  chan struct{}
	wake  chan struct{}
	// helloSent is the number of changes that the last hello sent was built
	// after. Of the goroutine that sends.
	helloSent uint64
	fresh     Freshness // of the read goroutine

	endOnce sync.Once
	cause   error
	ending  chan struct{} // closed by end
	done    chan struct{} // closed after LaneDown
}

func newLane(d *Dialer, address string, session uint64) *Lane {
	return &Lane{
		d: d, address: address, session: session,
		track: newTracker(), out: newOutbox[*waypostv1.ConnectRequest](),
		kicks: make(chan struct{}, 1), news: make(chan struct{}, 1), wake: make(chan struct{}, 1),
		ending: make(chan struct{}), done: make(chan struct{}),
	}
}

// Coordinator returns the coordinator's name and process mark.
func (l *Lane) Coordinator() (name string, process uint64) {
	return l.name, l.hello.GetCoordinatorProcess()
}

// Hello returns what the coordinator said of itself.
func (l *Lane) Hello() *waypostv1.CoordinatorHello { return l.hello }

// Session returns the number of the lane within the agent's life.
func (l *Lane) Session() uint64 { return l.session }

// Address returns the address that was dialled.
func (l *Lane) Address() string { return l.address }

// Done is closed when the lane has ended and LaneDown has returned.
func (l *Lane) Done() <-chan struct{} { return l.done }

// Kick asks for a LOAD at once.
func (l *Lane) Kick() { signal(l.kicks) }

// KickNews asks at once for a LOAD of the workers with news.
func (l *Lane) KickNews() { signal(l.news) }

// Send queues a frame other than hello and LOAD. The frame must not be changed
// afterwards. It returns ErrQueueFull, ErrTooBig or ErrLaneDown.
func (l *Lane) Send(f *waypostv1.ConnectRequest) error {
	if err := checkQueued(f); err != nil {
		return err
	}
	return l.out.push(f)
}

// SendWait queues a frame as soon as there is room.
func (l *Lane) SendWait(ctx context.Context, f *waypostv1.ConnectRequest) error {
	if err := checkQueued(f); err != nil {
		return err
	}
	return l.out.pushWait(ctx, f)
}

func checkQueued(f *waypostv1.ConnectRequest) error {
	switch f.GetFrame().(type) {
	case *waypostv1.ConnectRequest_Load, *waypostv1.ConnectRequest_Hello:
		return fmt.Errorf("lane: %s is built by the lane and cannot be queued", kindOf(f))
	case nil:
		return errors.New("lane: frame is empty")
	}
	return nil
}

// Close ends the lane; the address is dialled again after a pause.
func (l *Lane) Close(cause error) { l.end(cause) }

func (l *Lane) end(cause error) {
	l.endOnce.Do(func() {
		l.cause = cause
		l.out.close()
		close(l.ending)
	})
}

// runLane dials, runs one lane and returns why it ended.
func (d *Dialer) runLane(t *target) (wasUp bool, err error) {
	l := d.open(t.address)
	defer d.shut(l)
	conn, err := d.connect(t.address)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(d.ctx)
	defer cancel()
	helloTimer := time.AfterFunc(d.opts.HelloTimeout, func() {
		l.end(fmt.Errorf("no hello from the coordinator within %v", d.opts.HelloTimeout))
		cancel()
	})
	defer helloTimer.Stop()
	stream, err := waypostv1.NewLaneServiceClient(conn).Connect(ctx, grpc.ForceCodecV2(codec{l.track, d.metrics.bytes}))
	if err == nil {
		err = l.greet(stream)
	}
	if err == nil && !helloTimer.Stop() {
		err = context.DeadlineExceeded
	}
	if err != nil {
		l.end(plain(err)) // keeps the timer's cause if that was first
		return false, l.cause
	}
	if !d.claimUp(l) {
		l.end(&aliasError{l.name, 0})
		return false, l.cause
	}
	t.enterUp(l)
	d.metrics.up(l.name)
	d.log.Info("lane up", "coordinator", l.name, "address", l.address, "session", l.session)
	d.opts.Handler.LaneUp(l)
	l.live(ctx, cancel, stream)
	d.releaseUp(l)
	d.metrics.down(l.name)
	d.opts.Handler.LaneDown(l, l.cause)
	return true, l.cause
}

func (d *Dialer) connect(address string) (*grpc.ClientConn, error) {
	creds := insecure.NewCredentials()
	if d.opts.TLS != nil {
		creds = credentials.NewTLS(d.opts.TLS)
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(quiet{creds, d.opts.Coalescer}),
		grpc.WithNoProxy(),
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithIdleTimeout(0),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessageBytes), grpc.MaxCallSendMsgSize(MaxMessageBytes)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: grpcbackoff.Config{BaseDelay: time.Hour, MaxDelay: time.Hour}, MinConnectTimeout: d.opts.HelloTimeout}),
		grpc.WithStaticStreamWindowSize(streamWindow),
		grpc.WithStaticConnWindowSize(connWindow),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveTime, Timeout: d.opts.StallAfter}),
	}
	if d.dial != nil {
		options = append(options, grpc.WithContextDialer(d.dial))
	}
	return grpc.NewClient("passthrough:///"+address, options...)
}

// quiet makes the calls of a connection that gRPC has dialled and set up without
// telling the scheduler: small frames come and go a hundred times a second.
type quiet struct {
	credentials.TransportCredentials
	coalescer *nonblock.Coalescer
}

// ClientHandshake implements credentials.TransportCredentials.
func (q quiet) ClientHandshake(ctx context.Context, authority string, c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return q.TransportCredentials.ClientHandshake(ctx, authority, q.coalescer.ConnFirst(c))
}

// Clone implements credentials.TransportCredentials.
func (q quiet) Clone() credentials.TransportCredentials {
	return quiet{q.TransportCredentials.Clone(), q.coalescer}
}

// greet exchanges the hellos.
func (l *Lane) greet(stream waypostv1.LaneService_ConnectClient) error {
	hello := l.buildHello()
	hello.GetHello().OpenSessions = l.d.openBefore(l.session)
	if err := stream.Send(hello); err != nil && !errors.Is(err, io.EOF) { // EOF: Recv tells why
		return err
	}
	first, err := stream.Recv()
	switch status.Code(err) {
	case codes.OK:
	case codes.PermissionDenied, codes.Unauthenticated:
		return &refusedError{cut(status.Convert(err).Message(), maxRefusedTextBytes)}
	default:
		return err
	}
	l.fresh.Observe(first.GetSentMonoNs(), l.mono())
	h := first.GetHello()
	switch {
	case h == nil:
		return fmt.Errorf("coordinator spoke %s before its hello", kindOf(first))
	case h.GetRefused() != "" && h.GetSessionUp() == 0:
		return &refusedError{cut(h.GetRefused(), maxRefusedTextBytes)}
	case h.GetName() == "":
		return errors.New("coordinator's hello names nobody")
	}
	if p, ok := peer.FromContext(stream.Context()); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			role, name, err := identity.PeerOf(info.State)
			if err != nil {
				return err
			}
			if role != identity.RoleCoordinator || name != h.GetName() {
				return fmt.Errorf("certificate names %s/%s, hello says coordinator %q", role, name, h.GetName())
			}
		}
	}
	if up := h.GetSessionUp(); up != 0 {
		return &aliasError{h.GetName(), up}
	}
	l.hello, l.name = h, h.GetName()
	return nil
}

func (l *Lane) mono() int64 { return int64(time.Since(l.d.began)) }

// buildHello counts before it asks for the facts: a change between the two is
// told twice rather than never.
func (l *Lane) buildHello() *waypostv1.ConnectRequest {
	l.helloSent = l.d.helloChanges.Load()
	h := l.d.opts.Hello()
	h.Session, h.Protocol, h.ProtocolMin = new(l.session), new(uint32(Protocol)), new(uint32(ProtocolMin))
	return &waypostv1.ConnectRequest{SentMonoNs: new(uint64(l.mono())), Frame: &waypostv1.ConnectRequest_Hello{Hello: h}}
}

// live moves frames both ways until the lane ends, and waits for both ways.
func (l *Lane) live(ctx context.Context, cancel context.CancelFunc, stream waypostv1.LaneService_ConnectClient) {
	var wg sync.WaitGroup
	wg.Go(func() {
		// The coordinator has ended the stream: reading tells why, behind the frames
		// that it still sent.
		if err := l.write(ctx, stream); !errors.Is(err, io.EOF) {
			l.end(plain(err))
		}
	})
	wg.Go(func() { l.end(l.read(stream)) })
	watch := time.NewTicker(l.d.opts.StallAfter / 8)
	defer watch.Stop()
	for running := true; running; {
		select {
		case <-l.ending:
			running = false
		case <-ctx.Done():
			l.end(ctx.Err())
		case <-watch.C:
			if s := l.track.stalledFor(time.Now()); s >= l.d.opts.StallAfter {
				l.d.metrics.stalled.Inc()
				l.end(fmt.Errorf("%w for %v", errStalled, s.Round(100*time.Millisecond)))
			}
		}
	}
	cancel() // frees a Send or Recv that blocks
	wg.Wait()
}

func (l *Lane) read(stream waypostv1.LaneService_ConnectClient) error {
	for {
		f, err := stream.Recv()
		if err != nil {
			return plain(err)
		}
		if f.GetFrame() == nil {
			continue // a kind of a newer coordinator
		}
		if h := f.GetHello(); h != nil && h.GetRefused() != "" {
			return &refusedError{cut(h.GetRefused(), maxRefusedTextBytes)}
		}
		addLatenessDown(f, l.fresh.Observe(f.GetSentMonoNs(), l.mono()))
		l.d.opts.Handler.Frame(l, f)
	}
}

// write is the only sender. A hello that changed goes first, then a LOAD that is
// due, then the queue; a LOAD is not built while the last one is under way.
func (l *Lane) write(ctx context.Context, stream requestStream) error {
	pace := pacer{every: l.d.opts.LoadEvery, gap: l.d.opts.LoadGap}
	timer := l.d.opts.Coalescer.NewTimer()
	defer timer.Stop()
	for {
		select {
		case <-l.kicks:
			pace.kick()
		default:
		}
		select {
		case <-l.news:
			pace.kickNews()
		default:
		}
		if l.helloSent != l.d.helloChanges.Load() {
			hello := l.buildHello()
			hello.GetHello().OpenSessions = l.d.openBefore(l.session)
			if err := stream.Send(hello); err != nil {
				return err
			}
			continue
		}
		wait := time.Until(pace.due())
		slotFree := !l.track.loadPending()
		if wait <= 0 && slotFree {
			now := time.Now()
			build := l.d.opts.Load
			all := pace.tellsAll(now)
			if !all && l.d.opts.News != nil {
				build = l.d.opts.News
			}
			pace.sent(now, all || l.d.opts.News == nil)
			if load := build(l); load != nil {
				if err := l.send(stream, &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Load{Load: load}}); err != nil {
					return err
				}
			}
		}
		if f, ok := l.out.pop(); ok {
			if err := l.send(stream, f); err != nil {
				return err
			}
			continue
		}
		var due <-chan struct{}
		if wait := time.Until(pace.due()); slotFree || !l.track.loadPending() {
			timer.Reset(max(0, wait))
			due = timer.C
		}
		// A LOAD that was asked for answers all that ask until it is built.
		kicks, news := l.kicks, l.news
		if pace.kicked {
			kicks = nil
		}
		if pace.kicked || pace.news {
			news = nil
		}
		select {
		case <-due:
		case <-kicks:
			pace.kick()
		case <-news:
			pace.kickNews()
		case <-l.wake:
		case <-l.out.ready:
		case <-l.track.freed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (l *Lane) send(stream requestStream, f *waypostv1.ConnectRequest) error {
	f.SentMonoNs = new(uint64(l.mono()))
	return stream.Send(f)
}

// plain turns a gRPC status into an error with its message only, and keeps others.
func plain(err error) error {
	if errors.Is(err, io.EOF) {
		return errors.New("closed by the coordinator")
	}
	if s, ok := status.FromError(err); ok && s != nil {
		return &statusError{s}
	}
	return err
}

// statusError shows a status as people read it: without "rpc error: code = ".
type statusError struct{ s *status.Status }

func (e *statusError) Error() string {
	msg := e.s.Message()
	if inner, ok := strings.CutPrefix(msg, `connection error: desc = "`); ok {
		msg = strings.TrimPrefix(strings.TrimSuffix(inner, `"`), "transport: ")
	}
	return msg
}

// GRPCStatus lets status.Code see through.
func (e *statusError) GRPCStatus() *status.Status { return e.s }

func cut(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}
