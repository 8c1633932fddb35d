package kvevents

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/engine/zmtp"
	"waypost/gossip/nonblock"
)

const (
	// replayLimit bounds one replay; the stream gives a silent one up sooner.
	replayLimit = 10 * time.Minute
	// maxBadAnswers bounds the unreadable answers of a replay.
	maxBadAnswers = 100
	// bindRetry is the pause before listening again on a port that is taken.
	bindRetry = 5 * time.Second
	// dialLimit bounds the look whether somebody answers at an address.
	dialLimit = time.Second
	// foreignEvery is the least time between two warnings of a second publisher.
	foreignEvery = time.Minute
)

// BatchDecoder decodes the payloads of a stream.
type BatchDecoder interface {
	// Decode reads one batch, valid until the next call.
	Decode(payload []byte) (Batch, error)
	// Omits says whether the stores seen so far had no place for the adapter's
	// name, or none for salts.
	Omits() (adapters, salts bool)
}

// Sized is a BatchDecoder that must be told how long a block is.
type Sized interface {
	// SetBlockTokens tells the number of tokens per block.
	SetBlockTokens(n int)
}

// ReaderOptions configures a Reader.
type ReaderOptions struct {
	// Rank is the rank, as the sink knows it.
	Rank int
	// Plan is how to reach its publisher.
	Plan Plan
	// Host is where the engine is reached; empty: unknown.
	Host string
	// Dialect is the engine's.
	Dialect *Dialect
	// Stream configures the stream; what the plan tells is filled in.
	Stream StreamOptions
	// Decoder decodes the payloads; nil: a Decoder.
	Decoder BatchDecoder
	// Wrap is given every connection that events come by; nil: nonblock.Conn.
	Wrap func(net.Conn) net.Conn
	// Logger and Sink take what is learnt. Required.
	Logger *slog.Logger
	Sink   engine.Sink
}

// Reader follows one rank: the event socket and the replay socket have a
// goroutine each, and all of them and the poller meet at mu, so that the calls
// of one rank to the sink are never concurrent. Messages are decoded where
// they were received, without a queue: a slow mirror slows the socket, and the
// engine's own queue holds what waits.
type Reader struct {
	o    ReaderOptions
	n    int
	plan Plan
	log  *slog.Logger
	sink engine.Sink

	resync atomic.Int32 // one of the resyncs

	mu      sync.Mutex
	stream  *Stream // nil without events
	decoder BatchDecoder
	work    work
	busy    bool
	asleep  bool
	// asleepAt is when the engine was read to sleep last.
	asleepAt time.Time
	ended    bool // ctx of Run is done: nothing more is told
	seen     engine.Capability
	// tiers says that events of memory other than the GPU's were seen.
	tiers bool
	// badLogged is when an unreadable batch was last warned of, foreignLogged
	// when a second publisher was.
	badLogged, foreignLogged time.Time

	// publisher is the connection whose messages are taken, 0: none. It belongs
	// to the goroutine of the event socket.
	publisher uint64

	asked chan ask // latest only
	stop  context.CancelFunc
}

// ask is a replay the stream wants.
type ask struct{ run, from uint64 }

// NewReader makes a reader; Run starts it.
func NewReader(o ReaderOptions) *Reader {
	if o.Decoder == nil {
		d := NewDecoder()
		if o.Dialect.TellsMedium {
			d.TellsMedium()
		}
		o.Decoder = d
	}
	if o.Wrap == nil {
		o.Wrap = nonblock.Conn
	}
	r := &Reader{
		o: o, n: o.Rank, plan: o.Plan, log: o.Logger.With("rank", o.Rank), sink: o.Sink,
		decoder: o.Decoder, asked: make(chan ask, 1), stop: func() {},
	}
	if o.Plan.Events != "" || o.Plan.Pulled {
		so := o.Stream
		so.Replay = o.Plan.Replay != ""
		so.Rank, so.Endpoint, so.Setting, so.Check = o.Rank, o.Plan.Events, o.Dialect.Setting, o.Dialect.Check
		so.Once = so.Once || o.Plan.Pulled
		r.stream = NewStream(so, r)
	}
	return r
}

// Rank is the rank.
func (r *Reader) Rank() int { return r.n }

// with runs f under the rank's lock.
func (r *Reader) with(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// onStream runs f under the lock if there is a stream.
func (r *Reader) onStream(f func(s *Stream)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stream != nil && !r.ended {
		f(r.stream)
	}
}

// What a Reader was asked to do at the next Tick about a view that proved wrong.
const (
	resyncNone int32 = iota
	resyncLacking
	resyncAll
)

// Resync asks for the view to be built anew at the next Tick. lacking says that what
// it has is not in doubt: it reports false where then nothing is to be done, as the
// publisher tells nothing twice.
func (r *Reader) Resync(lacking bool) bool {
	switch {
	case !lacking:
		r.resync.Store(resyncAll)
	case r.plan.Replay == "":
		return false
	default:
		r.resync.CompareAndSwap(resyncNone, resyncLacking)
	}
	return true
}

// Tick lets time pass.
func (r *Reader) Tick(now time.Time) {
	r.onStream(func(s *Stream) {
		if asked := r.resync.Swap(resyncNone); asked != resyncNone {
			s.Resync(now, asked == resyncLacking)
		}
		s.Tick(now, r.busy)
	})
}

// Gone tells that the engine's process has ended. What is known of the rank ends
// with it, also where there are no events.
func (r *Reader) Gone(now time.Time) {
	r.with(func() {
		switch {
		case r.ended:
		case r.stream != nil:
			r.stream.Gone(now)
		default:
			r.sink.Reset(r.n, engine.ResetGone)
		}
	})
}

// Back tells that the engine serves again.
func (r *Reader) Back(now time.Time) { r.onStream(func(s *Stream) { s.Back(now) }) }

// SetCapacity tells the block length in tokens and the number of blocks that
// the engine can hold; 0 is unknown.
func (r *Reader) SetCapacity(blockTokens, poolBlocks int) {
	r.onStream(func(s *Stream) {
		r.work.blockTokens = blockTokens
		if d, ok := r.decoder.(Sized); ok && blockTokens > 0 {
			d.SetBlockTokens(blockTokens)
		}
		s.SetPool(poolBlocks)
	})
}

// Doubt tells why the events cannot be relied on; empty: they can.
func (r *Reader) Doubt(why string) { r.onStream(func(s *Stream) { s.Doubt(why) }) }

// SeesTiers says whether events of memory other than the GPU's were seen.
func (r *Reader) SeesTiers() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.tiers
}

// Restarted tells that the engine's process is another one than it was at
// lastSame. A stream that has seen its restart by itself is left alone.
func (r *Reader) Restarted(now, lastSame time.Time) {
	r.onStream(func(s *Stream) {
		if !s.LastRestart().After(lastSame) {
			s.Restart(now)
		}
	})
}

// Capabilities are what the events were seen to have and to leave out.
func (r *Reader) Capabilities() engine.Capability {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stream == nil {
		return 0
	}
	adapters, salts := r.decoder.Omits()
	return r.seen.With(engine.OmitsAdapters, adapters || r.o.Dialect.NamesNoAdapters).With(engine.OmitsSalts, salts)
}

// Counted tells the sink a number of faults.
func (r *Reader) Counted(what string, n int) { r.sink.Counted(r.n, what, n) }

// Count tells the sink a number of faults, from any goroutine.
func (r *Reader) Count(what string, n int) { r.with(func() { r.Counted(what, n) }) }

// Load passes a reading on and draws from it what the stream must know.
func (r *Reader) Load(l engine.Load, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy = l.Running != nil && *l.Running > 0
	asleep := l.Sleeping != nil && *l.Sleeping
	// What was read of its past while it slept is gone as well, and its word that it
	// is comes with its next step.
	woke := r.asleep && !asleep && r.stream != nil && !r.stream.lastLive.After(r.asleepAt)
	if r.stream != nil && (asleep && !r.asleep || woke) {
		r.stream.Slept(now)
	}
	if r.asleep = asleep; asleep {
		r.asleepAt = now
	}
	if r.stream != nil && !r.ended {
		r.stream.Silent(r.work.unheard(&l, r.stream.lastLive, now))
	}
	r.sink.Load(r.n, l)
}

// coverNone tells that there are no events, and why.
func (r *Reader) coverNone(hint string) {
	r.with(func() { r.sink.Coverage(r.n, engine.CoverageNone, hint) })
}

// Run reads the sockets until ctx ends.
func (r *Reader) Run(ctx context.Context) {
	if r.stream == nil {
		r.coverNone(r.plan.Hint)
		return
	}
	defer func() { r.with(func() { r.ended = true; r.stop() }) }()
	if r.plan.Pulled {
		<-ctx.Done()
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	if r.plan.Replay != "" {
		wg.Go(func() { r.replays(ctx) })
	}
	for ctx.Err() == nil {
		sub, err := r.open(ctx)
		if err != nil {
			r.log.Warn("event socket cannot be opened", "endpoint", r.plan.Events, "error", err)
			r.coverNone(err.Error())
			sleep(ctx, cmp.Or(r.o.Stream.RetryMin, bindRetry))
			continue
		}
		r.receive(ctx, sub)
		sub.Close()
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// open makes the event socket. An address that does not tell who binds is
// dialled if somebody answers there, else listened on.
func (r *Reader) open(ctx context.Context) (*zmtp.Sub, error) {
	if r.plan.EventsTold {
		if err := r.elsewhere(r.plan.Events); err != nil {
			return nil, err
		}
	}
	o := zmtp.Options{Endpoint: r.plan.Events, Topics: []string{""}, MaxFrameBytes: MaxBatchBytes, MaxMessageBytes: MaxBatchBytes + 64<<10, Wrap: r.o.Wrap}
	listen := r.plan.Listen
	if r.plan.Either {
		d := net.Dialer{Timeout: dialLimit}
		c, err := d.DialContext(ctx, "tcp", strings.TrimPrefix(r.plan.Events, "tcp://"))
		if err == nil {
			c.Close()
		}
		listen = errors.Is(err, syscall.ECONNREFUSED)
	}
	r.publisher = 0
	if !listen {
		return zmtp.DialSub(o)
	}
	sub, err := zmtp.ListenSub(o)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf(`the engine connects to %s, where another process listens already; give the engine an endpoint with "*", as in tcp://*:5557: %w`, r.plan.Events, err)
	}
	return sub, err
}

// elsewhere refuses an endpoint that the engine names on another host: an
// engine that lies must not send the agent anywhere.
func (r *Reader) elsewhere(endpoint string) error {
	host := hostOf(endpoint)
	if host == r.o.Host || host == "localhost" || host == "*" {
		return nil
	}
	ip := net.ParseIP(host)
	if ip != nil && ip.IsLoopback() {
		return nil
	}
	addresses, err := net.InterfaceAddrs()
	for _, a := range addresses {
		if n, ok := a.(*net.IPNet); ok && ip != nil && n.IP.Equal(ip) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("the addresses of this host cannot be read: %w", err)
	}
	return fmt.Errorf("the engine names %s for its events, which is not on this host: set kv_events and kv_replay of the engine if that is right", endpoint)
}

// receive reads one socket until ctx ends or the socket is of no more use.
func (r *Reader) receive(ctx context.Context, sub *zmtp.Sub) {
	for {
		frames, err := sub.Recv(ctx)
		now := time.Now()
		switch {
		case err == nil && !r.ours(sub.Conn(), now):
		case err == nil:
			r.onStream(func(s *Stream) {
				seq, payload, end, err := ParseFrames(frames)
				if err != nil || end {
					s.Malformed(now)
					return
				}
				r.seen |= engine.PublishesEvents
				s.Live(Message{Seq: seq, Payload: payload, Received: now})
			})
		case zmtp.IsNotice(err):
			r.notice(err, now)
		default:
			return
		}
	}
}

// ours says whether a connection is that of the publisher that is followed.
// Where publishers connect to us, a second one has numbers of its own, and both
// together would look like an engine that restarts with every batch.
func (r *Reader) ours(conn uint64, now time.Time) bool {
	if r.publisher == 0 {
		r.publisher = conn
		r.onStream(func(s *Stream) { s.Connected(now) })
	}
	if conn == r.publisher {
		return true
	}
	r.Count(CountForeign, 1)
	if r.foreignLogged.IsZero() || now.Sub(r.foreignLogged) >= foreignEvery {
		r.foreignLogged = now
		r.log.Warn("a second publisher connects to the event socket and is ignored: give each engine and rank an endpoint of its own", "endpoint", r.plan.Events)
	}
	return false
}

func (r *Reader) notice(err error, now time.Time) {
	var up *zmtp.Connected
	var down *zmtp.Disconnected
	switch {
	case errors.As(err, &up):
		r.log.Info("event socket connected", "endpoint", r.plan.Events)
		if r.publisher == 0 {
			r.publisher = up.Conn
			r.onStream(func(s *Stream) { s.Connected(now) })
		}
	case errors.As(err, &down):
		r.log.Warn("event socket lost its connection", "endpoint", r.plan.Events, "error", down.Err)
		if down.Conn == r.publisher {
			r.publisher = 0
			r.onStream(func(s *Stream) { s.Disconnected(now) })
		}
	default:
		r.log.Debug("event socket cannot connect", "endpoint", r.plan.Events, "error", err)
	}
}

var errBadAnswers = errors.New("too many answers that cannot be read")

// Deliver takes a message that the adapter read itself, and connects the stream
// with the first.
func (r *Reader) Deliver(m Message) {
	r.onStream(func(s *Stream) {
		r.seen |= engine.PublishesEvents
		s.Live(m)
	})
}

// Connected and Disconnected tell that the adapter reads events itself, and that
// it cannot.
func (r *Reader) Connected(now time.Time) { r.onStream(func(s *Stream) { s.Connected(now) }) }

// Disconnected tells that events may be lost from here on.
func (r *Reader) Disconnected(now time.Time) { r.onStream(func(s *Stream) { s.Disconnected(now) }) }

// Malformed tells of an answer of the engine that is no events.
func (r *Reader) Malformed(now time.Time) { r.onStream(func(s *Stream) { s.Malformed(now) }) }

// Apply decodes a batch and passes it on.
func (r *Reader) Apply(m Message) {
	b, err := r.decoder.Decode(m.Payload)
	if err != nil {
		r.logBad(m, err)
		r.stream.BadPayload(m.Received)
		return
	}
	// Engines that know of no ranks call each of theirs 0, so that 0 proves
	// nothing.
	if b.Rank > 0 && b.Rank != r.plan.Named && slices.Contains(r.plan.Others, b.Rank) {
		r.stream.WrongRank(m.Received, b.Rank)
		return
	}
	r.stream.RightRank()
	told := tellOf(b.Events)
	r.tiers = r.tiers || told.tiers
	r.stream.UnknownTier(told.untold)
	if told.cleared && !r.tiers {
		r.stream.Cleared()
	}
	out := engine.Batch{Seq: m.Seq, Received: m.Received, Replayed: m.Replayed, Events: b.Events}
	out.Age = age(m, b.PublishedUnixSeconds)
	r.sink.Batch(r.n, out)
	if b.Clears > 0 {
		r.Counted(CountClears, b.Clears)
	}
	r.stream.Applied(m.Received, told.gpu, b.Damaged, b.Unknown, b.LostRemovals)
}

// told is what the events of a batch tell of the memory they are of.
type told struct {
	gpu, untold int  // blocks stored in GPU memory, and in memory that is not told
	tiers       bool // any event is of memory that is told to be another
	cleared     bool // GPU memory was cleared
}

func tellOf(events []blocktable.Event) (t told) {
	for i := range events {
		e, n := &events[i], 0
		if e.Op == blocktable.OpStore {
			n = len(e.Hashes)
		}
		switch e.Medium {
		case blocktable.MediumGPU:
			t.gpu += n
			t.cleared = t.cleared || e.Op == blocktable.OpClear
		case blocktable.MediumUnknown:
			t.untold += n
		default:
			t.tiers = true
		}
	}
	return t
}

// age is how long ago a batch was published by the engine's clock, which is that
// of the agent's host. One that says otherwise is not believed: a batch of long
// ago comes by a replay only.
func age(m Message, publishedUnixSeconds float64) time.Duration {
	const (
		mostReplayed = 30 * 24 * time.Hour
		mostLive     = time.Minute
	)
	if !(publishedUnixSeconds > 0) {
		return 0
	}
	most := mostLive
	if m.Replayed {
		most = mostReplayed
	}
	seconds := float64(m.Received.UnixNano())/1e9 - publishedUnixSeconds
	return time.Duration(min(max(seconds, 0), most.Seconds()) * float64(time.Second))
}

// badEvery is the least time between two warnings of unreadable batches: an
// engine of an unknown version sends nothing else.
const badEvery = time.Minute

// logBad warns of an unreadable batch now and then; all are counted.
func (r *Reader) logBad(m Message, err error) {
	level := slog.LevelDebug
	if r.badLogged.IsZero() || m.Received.Sub(r.badLogged) >= badEvery {
		level, r.badLogged = slog.LevelWarn, m.Received
	}
	r.log.Log(context.Background(), level, "event batch cannot be read", "seq", m.Seq, "error", err)
}

// Reset implements Effects.
func (r *Reader) Reset(cause engine.ResetCause) { r.sink.Reset(r.n, cause) }

// Rebuild implements Effects for sinks that can and those that cannot.
func (r *Reader) Rebuild(cause engine.ResetCause) {
	if b, ok := r.sink.(engine.Rebuilder); ok {
		b.Rebuild(r.n, cause)
		return
	}
	r.sink.Reset(r.n, cause)
}

// Rebuilt implements Effects.
func (r *Reader) Rebuilt() {
	if b, ok := r.sink.(engine.Rebuilder); ok {
		b.Rebuilt(r.n)
	}
}

// Coverage implements Effects.
func (r *Reader) Coverage(c engine.Coverage, hint string) { r.sink.Coverage(r.n, c, hint) }
