package poller

import (
	"context"
	"net/http"
	"reflect"
	"sync"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/kvevents"
)

const (
	// factsRetry is the pause after a failed look at the facts, doubled each
	// time up to factsRetryMost: a look is several requests, and an engine that
	// cannot answer one of them is not to be asked with every poll.
	factsRetry     = time.Second
	factsRetryMost = 8 * time.Second
)

// Counters is one reading of an engine's counters.
type Counters struct {
	// Loads are the readings by rank; empty: the engine shows none.
	Loads []engine.Load
	// StartMark is the process life that the counters are of; 0: not told.
	StartMark uint64
	// Faults counts numbers that cannot be.
	Faults int
}

// Known is what seldom changes.
type Known struct {
	// Facts are the engine's. What the event readers see is added.
	Facts engine.Facts
	// Plans say how to reach the event publishers, by rank.
	Plans []kvevents.Plan
	// StartMark is the process life that was asked; 0: not told.
	StartMark uint64
	// Faults counts answers with values that cannot be.
	Faults int
}

// Source asks one engine. Its methods are called by one goroutine.
type Source interface {
	// Counters reads the counters of all ranks.
	Counters(ctx context.Context) (Counters, error)
	// Health asks whether the engine serves.
	Health(ctx context.Context) error
	// Facts asks for what seldom changes; latest are the newest counters.
	Facts(ctx context.Context, latest *Counters) (Known, error)
}

// Deliverer is a Source that reads the events of ranks itself, those with a
// plan that says so.
type Deliverer interface {
	// Deliver reads events and gives them to the readers of the ranks until ctx
	// ends. It is called once the first facts are known.
	Deliver(ctx context.Context, reader func(rank int) *kvevents.Reader)
}

// Doubter is a Source that knows of an engine whose events cannot be relied on.
type Doubter interface {
	// Doubt says why the events of a rank cannot be relied on; empty: they can.
	Doubt(k *Known, r *kvevents.Reader) string
}

// Changer is a Source that notices itself when facts have changed.
type Changer interface {
	// FactsDue says that Facts should be asked again now.
	FactsDue() bool
}

// Options configures a Poller.
type Options struct {
	engine.Options
	// Dialect is how the engine publishes events.
	Dialect *kvevents.Dialect
	// Stream configures the event streams; Replay is found out.
	Stream kvevents.StreamOptions
	// Decoder makes the decoder of a rank; nil: one of kvevents.
	Decoder func() kvevents.BatchDecoder
	// Host is where the engine is reached.
	Host string
	// Close is called at the end of each Run; nil: nothing.
	Close func()
}

// Poller reads one engine. It is what an adapter embeds.
type Poller struct {
	o   Options
	src Source

	mu    sync.Mutex
	ranks []*rank
	lives int
}

// rank is the reader of a rank while it runs.
type rank struct {
	*kvevents.Reader
	plan   kvevents.Plan
	cancel context.CancelFunc
	done   chan struct{}
}

func (r *rank) end() {
	r.cancel()
	<-r.done
}

// New makes a poller; Run starts it. The options are checked already.
func New(o Options, src Source) *Poller { return &Poller{o: o, src: src} }

// Resync implements engine.Resyncer.
func (p *Poller) Resync(rank int, lacking bool) bool {
	r := p.reader(rank)
	return r != nil && r.Resync(lacking)
}

func (p *Poller) reader(rank int) *kvevents.Reader {
	p.mu.Lock()
	defer p.mu.Unlock()
	if rank < 0 || rank >= len(p.ranks) {
		return nil
	}
	return p.ranks[rank].Reader
}

func (p *Poller) readers() []*rank {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]*rank(nil), p.ranks...)
}

// Run reads the engine until ctx ends.
func (p *Poller) Run(ctx context.Context, sink engine.Sink) error {
	ctx, cancel := context.WithCancel(ctx)
	l := &life{p: p, sink: sink}
	defer func() {
		cancel()
		for _, r := range p.readers() {
			r.end()
		}
		l.group.Wait()
		if p.o.Close != nil {
			p.o.Close()
		}
		p.mu.Lock()
		p.ranks = nil
		p.mu.Unlock()
	}()
	p.mu.Lock()
	l.again = p.lives > 0
	p.lives++
	p.mu.Unlock()

	engine.InStep(ctx, p.o.LoadEvery, func() { l.poll(ctx) })
	return nil
}

// life is one Run.
type life struct {
	p     *Poller
	sink  engine.Sink
	group sync.WaitGroup
	again bool // Run was called before

	counters Counters
	facts    engine.Facts
	known    *Known
	factsAt  time.Time
	// retryAt is when a failed look at the facts is repeated, retry the pause
	// before that.
	retryAt time.Time
	retry   time.Duration
	untold  error     // why the latest look failed; nil: it did not
	aliveAt time.Time // of the last health check
	mark    uint64
	markAt  time.Time // when mark was last seen

	vitals Vitals
}

// poll does what is due. Streams begin once the engine's facts are known.
func (l *life) poll(ctx context.Context) {
	now := time.Now()
	err := l.count(ctx)
	if err == nil && now.Sub(l.aliveAt) >= HealthEvery {
		if err = l.p.src.Health(ctx); err == nil {
			l.aliveAt = now
		}
	}
	due := l.known == nil || now.Sub(l.factsAt) >= l.p.o.FactsEvery
	if c, ok := l.p.src.(Changer); ok {
		due = due || c.FactsDue()
	}
	// Until the pause is over, what was answered last counts on.
	repeated := err == nil && due && now.Before(l.retryAt)
	switch {
	case err != nil || !due:
	case repeated:
		err = l.untold
	default:
		l.untold = l.learn(ctx)
		err = l.untold
		l.pace(time.Now())
	}
	if ctx.Err() != nil {
		return
	}
	l.judge(time.Now(), err, repeated)
	for _, r := range l.p.readers() {
		r.Tick(time.Now())
	}
	l.tellFacts()
}

// pace sets when the facts may be asked for again.
func (l *life) pace(now time.Time) {
	if l.untold == nil {
		l.retryAt, l.retry = time.Time{}, 0
		return
	}
	l.retry = min(max(factsRetry, 2*l.retry), factsRetryMost)
	l.retryAt = now.Add(l.retry)
}

// judge turns the outcome of a poll into health. While it loads its model an
// engine answers 503.
func (l *life) judge(now time.Time, err error, repeated bool) {
	switch l.vitals.Take(err, Refused(err) || enginehttp.Status(err) == http.StatusServiceUnavailable, repeated) {
	case Gone:
		l.mark, l.factsAt = 0, time.Time{}
		for _, r := range l.p.readers() {
			r.Gone(now)
		}
	case Back:
		for _, r := range l.p.readers() {
			r.Back(now)
		}
	}
	l.vitals.Tell(l.sink, err, l.known != nil)
}

// count reads the counters and passes them on by rank.
func (l *life) count(ctx context.Context) error {
	counters, err := l.p.src.Counters(ctx)
	if err != nil {
		return err
	}
	l.counters = counters
	at := time.Now()
	l.watchMark(counters.StartMark, at)
	readers := l.p.readers()
	for i, r := range readers {
		load := engine.Load{At: at}
		if i < len(counters.Loads) {
			load = counters.Loads[i]
		}
		r.Load(load, at)
	}
	if counters.Faults > 0 && len(readers) > 0 {
		readers[0].Count(engine.CountMetricFaults, counters.Faults)
	}
	return nil
}

// watchMark looks whether the engine's process is still the same. A stream
// that has seen its restart by itself is left alone.
func (l *life) watchMark(mark uint64, at time.Time) {
	if mark == 0 {
		return
	}
	if l.mark != 0 && mark != l.mark {
		l.factsAt = time.Time{}
		for _, r := range l.p.readers() {
			r.Restarted(at, l.markAt)
		}
	}
	l.mark, l.markAt = mark, at
}

// learn reads the facts, starts the readers of ranks that are new and those
// whose publisher is to be reached another way.
func (l *life) learn(ctx context.Context) error {
	k, err := l.p.src.Facts(ctx, &l.counters)
	if err != nil {
		return err
	}
	k.Facts = k.Facts.Bounded()
	if k.Facts.StartMark == 0 {
		k.Facts.StartMark = k.StartMark
	}
	first := l.known == nil
	l.known, l.factsAt = &k, time.Now()
	if l.counters.StartMark == 0 {
		l.watchMark(k.StartMark, l.factsAt)
	}
	l.tellFacts()
	for n := range k.Facts.Ranks {
		if n >= len(k.Plans) {
			k.Plans = append(k.Plans, kvevents.Plan{Named: n, Hint: l.p.o.Dialect.HintUnknown()})
		}
		l.follow(ctx, n, k.Plans[n])
	}
	l.drop(k.Facts.Ranks)
	if readers := l.p.readers(); k.Faults > 0 && len(readers) > 0 {
		readers[0].Count(engine.CountFactFaults, k.Faults)
	}
	for _, r := range l.p.readers() {
		of := k.Facts.Of(r.Rank())
		r.SetCapacity(of.BlockTokens, of.PoolBlocks)
		if d, ok := l.p.src.(Doubter); ok {
			r.Doubt(d.Doubt(&k, r.Reader))
		}
	}
	if d, ok := l.p.src.(Deliverer); ok && first {
		l.group.Go(func() { d.Deliver(ctx, l.p.reader) })
	}
	return nil
}

// tellFacts tells changed facts, with what the event readers have seen.
func (l *life) tellFacts() {
	if l.known == nil {
		return
	}
	f := l.known.Facts
	f.PerRank = append([]engine.RankFacts(nil), f.PerRank...)
	var all engine.Capability
	readers := l.p.readers()
	for len(f.PerRank) < len(readers) && len(readers) > 1 {
		f.PerRank = append(f.PerRank, engine.RankFacts{})
	}
	for i, r := range readers {
		c := r.Capabilities()
		if i < len(f.PerRank) {
			f.PerRank[i].Capabilities |= c
		} else {
			all |= c
		}
	}
	f.Capabilities |= all
	if !reflect.DeepEqual(f, l.facts) {
		l.facts = f
		l.sink.Facts(f)
	}
}

// drop ends the readers of ranks that the engine has no more, since it was started
// again with fewer.
func (l *life) drop(ranks int) {
	l.p.mu.Lock()
	gone := l.p.ranks[min(ranks, len(l.p.ranks)):]
	l.p.ranks = l.p.ranks[:len(l.p.ranks)-len(gone)]
	l.p.mu.Unlock()
	for _, r := range gone {
		r.end()
		l.sink.Reset(r.Rank(), engine.ResetGone)
	}
}

// follow starts the reader of a rank, or starts it anew if the way to its
// publisher has changed, as with an engine that was started again with other
// settings.
func (l *life) follow(ctx context.Context, n int, plan kvevents.Plan) {
	readers := l.p.readers()
	anew := n < len(readers)
	if anew {
		if reflect.DeepEqual(readers[n].plan, plan) {
			return
		}
		readers[n].end()
	}
	var decoder kvevents.BatchDecoder
	if l.p.o.Decoder != nil {
		decoder = l.p.o.Decoder()
	}
	ctx, cancel := context.WithCancel(ctx)
	r := &rank{plan: plan, cancel: cancel, done: make(chan struct{}), Reader: kvevents.NewReader(kvevents.ReaderOptions{
		Rank: n, Plan: plan, Host: l.p.o.Host, Dialect: l.p.o.Dialect, Stream: l.p.o.Stream, Decoder: decoder, Wrap: l.p.o.WrapEvents, Logger: l.p.o.Logger, Sink: l.sink,
	})}
	l.p.mu.Lock()
	if anew {
		l.p.ranks[n] = r
	} else {
		l.p.ranks = append(l.p.ranks, r)
	}
	l.p.mu.Unlock()
	if l.again || anew {
		l.sink.Reset(n, engine.ResetGap)
	}
	if plan.Hint == "" && plan.Events != "" {
		l.p.o.Logger.Debug("event publisher of a rank", "rank", n, "events", plan.Events, "replay", plan.Replay)
	}
	go func() {
		defer close(r.done)
		r.Run(ctx)
	}()
}
