package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"sync"
	"time"

	"waypost/agent/discover"
	"waypost/agent/engine"
)

// watched is one engine of this host with its ranks. It is the sink of the
// engine's adapter.
type watched struct {
	target    engine.Target
	adapter   engine.Adapter
	advertise string
	// configured says that agent.toml names the engine.
	configured bool
	// config is what agent.toml says of the engine, hostAddress where others
	// reach this host; empty: loopback only.
	config      *EngineConfig
	hostAddress string
	log         *slog.Logger
	newRank     func(engineName string, number int) *rank
	// prober measures the hashing boundary.
	prober *prober
	// selfTester tests it when it comes up; nil: it is not to be tested.
	selfTester *selfTester
	// changed tells that what the hello says has changed; dirty that a load
	// report of some ranks is worth sending at once.
	changed func()
	dirty   func(...*rank)
	// odd spaces the warnings of numbers that cannot be.
	odd rarely

	mu    sync.Mutex
	ranks []*rank
	// serving is how many of them the engine has: an engine that is started again
	// may have fewer than before. 0: not known. up and reason are its health.
	serving int
	up      bool
	reason  string
	// found is its process; nil: not found among this host's, or gone. lostAt is
	// when it went.
	found  *discover.Engine
	lostAt time.Time
	// foundModel is the model as its command line named it when it was found.
	foundModel string
	// gpus are the UUIDs of the GPUs that its processes use; nil: not known.
	gpus []string
	// cancel ends the reading of it, done is closed when it has ended; nil: it is
	// not read.
	cancel context.CancelFunc
	done   chan struct{}
}

// start reads the engine until ctx ends or stop.
func (w *watched) start(ctx context.Context, tasks *sync.WaitGroup) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cancel != nil {
		return
	}
	ctx, w.cancel = context.WithCancel(ctx)
	done := make(chan struct{})
	w.done = done
	tasks.Go(func() {
		defer close(done)
		var probing sync.WaitGroup
		defer probing.Wait()
		if w.prober != nil {
			probing.Go(func() { w.prober.run(ctx) })
		}
		if w.selfTester != nil {
			probing.Go(func() { w.selfTester.run(ctx) })
		}
		w.run(ctx)
	})
}

// stop ends the reading and waits for its end. From then on the engine is taken
// for gone.
func (w *watched) stop() {
	w.mu.Lock()
	cancel, done := w.cancel, w.done
	w.cancel, w.done = nil, nil
	w.mu.Unlock()
	if cancel != nil {
		cancel()
		<-done
	}
	for _, r := range w.all() {
		r.leave()
	}
}

// process is the engine's process; nil: it is not known.
func (w *watched) process() *discover.Engine {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.found
}

// gpuUUIDs are the GPUs that the engine uses; nil: not known.
func (w *watched) gpuUUIDs() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.gpus
}

// run reads the engine until ctx ends. An adapter that gives up is started
// again: what it could not do at first may work after an engine's upgrade.
func (w *watched) run(ctx context.Context) {
	const pause = 10 * time.Second
	for ctx.Err() == nil {
		err := w.adapter.Run(ctx, w)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			w.log.Warn("engine cannot be read", "engine", w.target.Name, "error", err)
			w.Health(false, err.Error())
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
		}
	}
}

// tokenizer is the adapter's, if the engine has one.
func (w *watched) tokenizer() (engine.Tokenizer, error) {
	if t, ok := w.adapter.(engine.Tokenizer); ok {
		return t, nil
	}
	return nil, fmt.Errorf("engine %s tells no token ids: its kind is %s", w.target.Name, w.target.Kind)
}

// rank returns the rank of a number, and makes it at first sight.
func (w *watched) rank(number int) *rank {
	w.mu.Lock()
	defer w.mu.Unlock()
	if number < 0 || number >= engine.MaxRanks {
		return nil
	}
	for len(w.ranks) <= number {
		w.ranks = append(w.ranks, w.newRank(w.target.Name, len(w.ranks)))
	}
	return w.ranks[number]
}

func (w *watched) all() []*rank {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]*rank(nil), w.ranks...)
}

// Facts implements engine.Sink.
func (w *watched) Facts(f engine.Facts) {
	f = f.Bounded()
	for n := range f.Ranks {
		if r := w.rank(n); r != nil {
			r.setFacts(f.Of(n))
		}
	}
	w.mu.Lock()
	changed := w.serving != 0 && w.serving != f.Ranks
	w.serving = f.Ranks
	up, reason := w.up, w.reason
	w.mu.Unlock()
	if changed {
		w.Health(up, reason)
	}
	w.changed()
}

// Load implements engine.Sink.
func (w *watched) Load(number int, l engine.Load) {
	if r := w.rank(number); r != nil && r.setLoad(l) {
		w.dirty(r)
	}
}

// Health implements engine.Sink. Ranks that the engine has no more do not serve,
// however well it is.
func (w *watched) Health(up bool, reason string) {
	w.rank(0)
	w.mu.Lock()
	w.up, w.reason = up, reason
	serving := w.serving
	w.mu.Unlock()
	ranks := w.all()
	for n, r := range ranks {
		if serving > 0 && n >= serving && up {
			r.setHealth(false, fmt.Sprintf("the engine has no rank %d any more: it runs %d", n, serving))
			continue
		}
		r.setHealth(up, reason)
	}
	w.dirty(ranks...)
}

// Batch implements engine.Sink.
func (w *watched) Batch(number int, b engine.Batch) {
	r := w.rank(number)
	if r == nil {
		return
	}
	whole, due := r.apply(b)
	w.tellStored(r)
	if due {
		w.dirty(r)
	}
	if whole {
		return
	}
	if r.tooMany() {
		w.log.Warn("engine announced more blocks than it can hold; the mirror is built again without counting copies", "event", "view_disagrees", "engine", w.target.Name, "rank", number)
	}
	if again, ok := w.adapter.(engine.Resyncer); ok {
		again.Resync(number, false)
	}
}

// Rebuild implements engine.Rebuilder.
func (w *watched) Rebuild(number int, cause engine.ResetCause) {
	if r := w.rank(number); r != nil {
		w.log.Info("cache view is built again beside the old one", "event", "view_gap", "engine", w.target.Name, "rank", number, "cause", string(cause))
		r.startBeside(cause)
	}
}

// Rebuilt implements engine.Rebuilder.
func (w *watched) Rebuilt(number int) {
	if r := w.rank(number); r != nil {
		w.log.Info("cache view rebuilt", "event", "view_resync", "engine", w.target.Name, "rank", number)
		r.finishBeside()
		r.tick(time.Now())
		w.dirty(r)
	}
}

// Reset implements engine.Sink.
func (w *watched) Reset(number int, cause engine.ResetCause) {
	if r := w.rank(number); r != nil {
		w.log.Info("cache view reset", "event", "view_resync", "engine", w.target.Name, "rank", number, "cause", string(cause))
		r.reset(cause)
		r.tick(time.Now())
		w.dirty(r)
	}
	w.changed()
}

// Coverage implements engine.Sink.
func (w *watched) Coverage(number int, c engine.Coverage, hint string) {
	if r := w.rank(number); r != nil {
		r.setCoverage(c, hint)
	}
	w.changed()
}

// Counted implements engine.Sink.
func (w *watched) Counted(number int, what string, n int) {
	if r := w.rank(number); r != nil {
		r.count(what, n)
	}
	switch what {
	case engine.CountMetricFaults, engine.CountFactFaults, engine.CountSlotFaults:
		if w.odd.due(time.Now()) {
			w.log.Warn("engine tells numbers that cannot be; they count as unknown", "engine", w.target.Name, "rank", number, "kind", what)
		}
	}
}

// oddEvery is the least time between two warnings of numbers that cannot be.
const oddEvery = 10 * time.Minute

// rarely lets one through at first and then one each oddEvery.
type rarely struct {
	mu sync.Mutex
	at time.Time
}

func (r *rarely) due(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.at.IsZero() && now.Sub(r.at) < oddEvery {
		return false
	}
	r.at = now
	return true
}

// advertisedURL is where callers on other hosts reach an engine that this
// host reaches at target: a loopback host is replaced by the host's address.
func advertisedURL(configured, target, hostAddress string) string {
	if configured != "" {
		return configured
	}
	u, err := url.Parse(target)
	if err != nil || hostAddress == "" {
		return target
	}
	switch u.Hostname() {
	case "127.0.0.1", "::1", "localhost":
		if u.Port() != "" {
			u.Host = hostAddress + ":" + u.Port()
		} else {
			u.Host = hostAddress
		}
	}
	return u.String()
}
