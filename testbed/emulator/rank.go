package emulator

import (
	"context"
	"sync"
	"time"

	"waypost/testbed/emulator/core"
)

// Steps whose end is past are not slept for, so that a coarse timer does not
// slow the engine down; an engine that is this much behind starts afresh.
const maxStepDebt = 100 * time.Millisecond

// rank is one data-parallel rank's life: a goroutine that steps its core.
type rank struct {
	index int
	opts  Options
	pub   *publisher // nil without events
	stats *rankStats
	began time.Time

	mu sync.Mutex
	// calls wait for the next time between two steps; forced ones are run by a
	// stalled rank too.
	calls, forced []func()
	wake          chan struct{}
	stalled       bool
	// held is set by sleep and pause: nothing is scheduled.
	held bool
	slow float64
	// ended is set when the goroutine is gone and calls are run no more.
	ended bool
	// open counts the requests added and not yet ended.
	open int

	// The rest belongs to the goroutine.
	core    *core.Core
	answers map[*core.Sequence]*answer
	planned time.Time // when the last step ended, or should have
}

func newRank(index int, o Options, began time.Time, pub *publisher) (*rank, error) {
	c, err := core.New(o.coreOptions())
	if err != nil {
		return nil, err
	}
	return &rank{
		index: index, opts: o, pub: pub, stats: newRankStats(o, began), began: began, slow: 1,
		wake: make(chan struct{}, 1), core: c, answers: make(map[*core.Sequence]*answer),
	}, nil
}

func (r *rank) now() time.Duration { return r.opts.Clock.Now().Sub(r.began) }

// run steps until ctx ends.
func (r *rank) run(ctx context.Context) {
	defer r.end()
	for ctx.Err() == nil {
		if held := r.serveCalls(); held {
			r.wait(ctx)
			continue
		}
		step, ok := r.core.Schedule(r.now())
		if !ok {
			r.stats.record(r.opts.Clock.Now(), r.core.Status())
			r.wait(ctx)
			continue
		}
		r.stepTime(ctx, step.Duration)
		for ctx.Err() == nil && r.isStalled() {
			r.serveForced()
			r.wait(ctx)
		}
		if ctx.Err() != nil {
			return // a killed process publishes nothing more
		}
		if out, ok := r.core.Finish(r.now()); ok {
			r.deliver(out)
		}
	}
}

// stepTime lets the step's duration pass.
func (r *rank) stepTime(ctx context.Context, d time.Duration) {
	r.mu.Lock()
	slow := r.slow
	r.mu.Unlock()
	now := r.opts.Clock.Now()
	if now.Sub(r.planned) > maxStepDebt {
		r.planned = now
	}
	r.planned = r.planned.Add(time.Duration(float64(d) * slow / r.opts.Speed))
	r.opts.Clock.SleepUntil(ctx, r.planned)
}

func (r *rank) deliver(out *core.Outcome) {
	now := r.opts.Clock.Now()
	for i := range out.Outputs {
		o := &out.Outputs[i]
		if a := r.answers[o.Sequence]; a != nil {
			if o.Finish != "" {
				r.forget(o.Sequence)
			}
			r.stats.token(o, a, now)
			a.put(o)
		}
	}
	r.stats.step(out, now, r.core.Status())
	if r.pub != nil && len(out.Events) > 0 {
		r.pub.publish(out.Events, float64(now.UnixNano())/1e9)
	}
}

// serveCalls runs what waits between two steps. It reports whether nothing may
// be scheduled now.
func (r *rank) serveCalls() bool {
	r.serveForced()
	r.mu.Lock()
	if r.stalled {
		r.mu.Unlock()
		return true
	}
	calls := r.calls
	r.calls = nil
	r.mu.Unlock()
	for _, f := range calls {
		f()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.held
}

func (r *rank) serveForced() {
	r.mu.Lock()
	forced := r.forced
	r.forced = nil
	r.mu.Unlock()
	for _, f := range forced {
		f()
	}
}

func (r *rank) isStalled() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stalled
}

func (r *rank) wait(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-r.wake:
	}
	// What passed while idle is not owed.
	r.planned = r.opts.Clock.Now()
}

// end fails the answers that are still open.
func (r *rank) end() {
	r.mu.Lock()
	r.ended = true
	calls := append(r.forced, r.calls...)
	r.forced, r.calls = nil, nil
	r.mu.Unlock()
	for _, f := range calls {
		f() // the core is still whole; whoever waits for the call gets on
	}
	for s, a := range r.answers {
		a.fail()
		r.forget(s)
	}
}

// forget ends the bookkeeping of a request.
func (r *rank) forget(s *core.Sequence) {
	delete(r.answers, s)
	r.closed()
}

func (r *rank) closed() {
	r.mu.Lock()
	r.open--
	r.mu.Unlock()
}

// post runs f on the rank's goroutine between two steps. It reports false if
// the rank has ended.
func (r *rank) post(f func()) bool { return r.enqueue(&r.calls, f) }

func (r *rank) enqueue(queue *[]func(), f func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return false
	}
	*queue = append(*queue, f)
	r.poke()
	return true
}

// call is post, and waits until f has run or ctx ends.
func (r *rank) call(ctx context.Context, f func()) error {
	done := make(chan struct{})
	if !r.post(func() { defer close(done); f() }) {
		return context.Canceled
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// force runs f on the rank's goroutine even if the rank is stalled, and waits.
func (r *rank) force(f func()) {
	done := make(chan struct{})
	if r.enqueue(&r.forced, func() { defer close(done); f() }) {
		<-done
	}
}

func (r *rank) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *rank) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
	r.poke()
}

// add hands a request to the core; its answer fails if the core refuses.
func (r *rank) add(req core.Request, a *answer) {
	r.mu.Lock()
	r.open++
	r.mu.Unlock()
	ok := r.post(func() {
		s, err := r.core.Add(req, r.now())
		if err != nil {
			a.fail()
			r.closed()
			return
		}
		r.answers[s] = a
	})
	if !ok {
		a.fail()
		r.closed()
	}
}

// abort ends a request whose client has left.
func (r *rank) abort(id string) {
	r.post(func() {
		for s := range r.answers {
			if s.ID() == id {
				r.forget(s)
			}
		}
		r.core.Abort(id)
	})
}

// hold stops or restarts scheduling, for sleep and pause.
func (r *rank) hold(on bool) { r.set(func() { r.held = on }) }

// abortAll ends every request, as sleep does.
func (r *rank) abortAll() {
	for s, a := range r.answers {
		r.core.Abort(s.ID())
		a.fail()
		r.forget(s)
	}
}

// load is the score by which requests without a rank are spread.
func (r *rank) load() int {
	running := r.stats.latest().Running
	r.mu.Lock()
	defer r.mu.Unlock()
	return 4*max(r.open-running, 0) + running
}
