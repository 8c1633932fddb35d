package vllm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/engine/zmtp"
)

const (
	// replayLimit bounds one replay; the stream gives a silent one up sooner.
	replayLimit = 10 * time.Minute
	// bindRetry is the pause before listening again on a port that is taken.
	bindRetry = 5 * time.Second
)

// rankReader follows one rank: the event socket and the replay socket have a
// goroutine each, and all of them and the poller meet at mu, so that the calls
// of one rank to the sink are never concurrent. Messages are decoded where
// they were received, without a queue: a slow mirror slows the socket, and the
// engine's own queue holds what waits.
type rankReader struct {
	n    int
	plan plan
	log  *slog.Logger
	sink engine.Sink

	resync atomic.Bool

	mu      sync.Mutex
	stream  *Stream // nil without events
	decoder *Decoder
	busy    bool
	asleep  bool
	ended   bool // ctx of Run is done: nothing more is told
	// badLogged is when an unreadable batch was last warned of.
	badLogged time.Time

	asked chan ask // latest only
	stop  context.CancelFunc
}

// ask is a replay the stream wants.
type ask struct{ run, from uint64 }

func newRankReader(n int, pl plan, p *poller) *rankReader {
	r := &rankReader{
		n: n, plan: pl, log: p.a.log.With("rank", n), sink: p.sink,
		decoder: NewDecoder(), asked: make(chan ask, 1), stop: func() {},
	}
	if pl.events != "" {
		o := p.a.o.Stream
		o.Replay = pl.replay != ""
		r.stream = NewStream(o, r)
	}
	return r
}

// with runs f under the rank's lock.
func (r *rankReader) with(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// onStream runs f under the lock if there is a stream.
func (r *rankReader) onStream(f func(s *Stream)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stream != nil && !r.ended {
		f(r.stream)
	}
}

func (r *rankReader) tick(now time.Time) {
	r.onStream(func(s *Stream) {
		if r.resync.Swap(false) {
			s.Resync(now)
		}
		s.Tick(now, r.busy)
	})
}

func (r *rankReader) goneAt(now time.Time) { r.onStream(func(s *Stream) { s.Gone(now) }) }
func (r *rankReader) back(now time.Time)   { r.onStream(func(s *Stream) { s.Back(now) }) }
func (r *rankReader) setPool(blocks int)   { r.onStream(func(s *Stream) { s.SetPool(blocks) }) }

func (r *rankReader) restarted(now, lastSame time.Time) {
	r.onStream(func(s *Stream) {
		if !s.LastRestart().After(lastSame) {
			s.Restart(now)
		}
	})
}

// capabilities are what the events were seen to have and to leave out.
func (r *rankReader) capabilities() engine.Capability {
	r.mu.Lock()
	defer r.mu.Unlock()
	adapters, salts := r.decoder.Omits()
	return engine.Capability(0).With(engine.OmitsAdapters, adapters).With(engine.OmitsSalts, salts)
}

func (r *rankReader) counted(what string, n int) {
	r.with(func() { r.Counted(what, n) })
}

// load passes a reading on and draws from it what the stream must know.
func (r *rankReader) load(l engine.Load, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy = l.Running != nil && *l.Running > 0
	if asleep := l.Sleeping != nil && *l.Sleeping; asleep != r.asleep {
		r.asleep = asleep
		if asleep && r.stream != nil {
			r.stream.Slept(now)
		}
	}
	r.sink.Load(r.n, l)
}

// run reads the event socket until ctx ends.
func (r *rankReader) run(ctx context.Context) {
	defer func() { r.with(func() { r.ended = true; r.stop() }) }()
	for ctx.Err() == nil {
		sub, err := r.open(ctx)
		if err != nil {
			r.log.Warn("event socket cannot be opened", "endpoint", r.plan.events, "error", err)
			r.with(func() { r.sink.Coverage(r.n, engine.CoverageNone, err.Error()) })
			sleep(ctx, bindRetry)
			continue
		}
		r.receive(ctx, sub)
		sub.Close()
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// open makes the event socket. An address that does not tell who binds is
// dialled if somebody answers there, else listened on.
func (r *rankReader) open(ctx context.Context) (*zmtp.Sub, error) {
	o := zmtp.Options{Endpoint: r.plan.events, Topics: []string{""}, MaxFrameBytes: MaxBatchBytes, MaxMessageBytes: MaxBatchBytes + 64<<10}
	listen := r.plan.listen
	if r.plan.either {
		d := net.Dialer{Timeout: engine.DefaultPageTimeout}
		c, err := d.DialContext(ctx, "tcp", strings.TrimPrefix(r.plan.events, "tcp://"))
		if err == nil {
			c.Close()
		}
		listen = errors.Is(err, syscall.ECONNREFUSED)
	}
	if !listen {
		return zmtp.DialSub(o)
	}
	sub, err := zmtp.ListenSub(o)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf(`the engine connects to %s, where another process listens already; give the engine an endpoint with "*", as in tcp://*:5557: %w`, r.plan.events, err)
	}
	return sub, err
}

// receive reads one socket until ctx ends or the socket is of no more use.
func (r *rankReader) receive(ctx context.Context, sub *zmtp.Sub) {
	for {
		frames, err := sub.Recv(ctx)
		now := time.Now()
		switch {
		case err == nil:
			r.onStream(func(s *Stream) {
				seq, payload, end, err := ParseFrames(frames)
				if err != nil || end {
					s.Malformed(now)
					return
				}
				s.Live(Message{Seq: seq, Payload: payload, Received: now})
			})
		case zmtp.IsNotice(err):
			r.notice(err, now)
		default:
			return
		}
	}
}

func (r *rankReader) notice(err error, now time.Time) {
	var up *zmtp.Connected
	var down *zmtp.Disconnected
	switch {
	case errors.As(err, &up):
		r.log.Info("event socket connected", "endpoint", r.plan.events)
		r.onStream(func(s *Stream) { s.Connected(now) })
	case errors.As(err, &down):
		r.log.Warn("event socket lost its connection", "endpoint", r.plan.events, "error", down.Err)
		r.onStream(func(s *Stream) { s.Disconnected(now) })
	default:
		r.log.Debug("event socket cannot connect", "endpoint", r.plan.events, "error", err)
	}
}

// replays asks for replays, one at a time; a new one abandons the former.
func (r *rankReader) replays(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case a := <-r.asked:
			run, cancel := context.WithTimeout(ctx, replayLimit)
			r.mu.Lock()
			if len(r.asked) > 0 { // a newer one came meanwhile
				r.mu.Unlock()
				cancel()
				continue
			}
			r.stop = cancel
			r.mu.Unlock()
			if err := r.replay(run, a); err != nil && ctx.Err() == nil {
				r.log.Debug("replay failed", "endpoint", r.plan.replay, "from", a.from, "error", err)
				r.onStream(func(s *Stream) { s.ReplayFailed(a.run, time.Now()) })
			}
			cancel()
		}
	}
}

// replay asks once and passes the answers on. Each replay has a connection of
// its own, so that no late answer of another one can come in.
func (r *rankReader) replay(ctx context.Context, a ask) error {
	d, err := zmtp.DialDealer(zmtp.Options{Endpoint: r.plan.replay, MaxFrameBytes: MaxBatchBytes, MaxMessageBytes: MaxBatchBytes + 64<<10})
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Send(ctx, nil, binary.BigEndian.AppendUint64(nil, a.from)); err != nil {
		return err
	}
	for {
		frames, err := d.Recv(ctx)
		if err != nil {
			return err
		}
		now := time.Now()
		seq, payload, end, err := ParseFrames(frames)
		r.onStream(func(s *Stream) {
			switch {
			case err != nil:
				s.Malformed(now)
			case end:
				s.ReplayEnded(a.run, now)
			default:
				s.Replayed(a.run, Message{Seq: seq, Payload: payload, Received: now})
			}
		})
		if end {
			return nil
		}
	}
}

// Apply decodes a batch and passes it on.
func (r *rankReader) Apply(m Message) {
	b, err := r.decoder.Decode(m.Payload)
	if err != nil {
		r.logBad(m, err)
		r.stream.BadPayload(m.Received)
		return
	}
	stored := 0
	for i := range b.Events {
		if e := &b.Events[i]; e.Op == blocktable.OpStore && e.Medium == blocktable.MediumGPU {
			stored += len(e.Hashes)
		}
	}
	out := engine.Batch{Seq: m.Seq, Received: m.Received, Replayed: m.Replayed, Events: b.Events}
	if b.PublishedUnixSeconds > 0 {
		// Engine and agent read the same host's clock.
		age := float64(m.Received.UnixNano())/1e9 - b.PublishedUnixSeconds
		out.Age = time.Duration(min(max(age, 0), 1e6) * float64(time.Second))
	}
	r.sink.Batch(r.n, out)
	r.stream.Applied(m.Received, stored, b.Damaged, b.Unknown, b.LostRemovals)
}

// badEvery is the least time between two warnings of unreadable batches: an
// engine of an unknown version sends nothing else.
const badEvery = time.Minute

// logBad warns of an unreadable batch now and then; all are counted.
func (r *rankReader) logBad(m Message, err error) {
	level := slog.LevelDebug
	if r.badLogged.IsZero() || m.Received.Sub(r.badLogged) >= badEvery {
		level, r.badLogged = slog.LevelWarn, m.Received
	}
	r.log.Log(context.Background(), level, "event batch cannot be read", "seq", m.Seq, "error", err)
}

// AskReplay hands a request to the goroutine of the replay socket.
func (r *rankReader) AskReplay(run, from uint64) {
	r.stop()
	select {
	case <-r.asked:
	default:
	}
	r.asked <- ask{run, from}
}

// Reset implements Effects.
func (r *rankReader) Reset(cause engine.ResetCause) { r.sink.Reset(r.n, cause) }

// Rebuild implements Effects for sinks that can and those that cannot.
func (r *rankReader) Rebuild(cause engine.ResetCause) {
	if b, ok := r.sink.(engine.Rebuilder); ok {
		b.Rebuild(r.n, cause)
		return
	}
	r.sink.Reset(r.n, cause)
}

// Rebuilt implements Effects.
func (r *rankReader) Rebuilt() {
	if b, ok := r.sink.(engine.Rebuilder); ok {
		b.Rebuilt(r.n)
	}
}

// Coverage implements Effects.
func (r *rankReader) Coverage(c engine.Coverage, hint string) { r.sink.Coverage(r.n, c, hint) }

// Counted implements Effects.
func (r *rankReader) Counted(what string, n int) { r.sink.Counted(r.n, what, n) }
