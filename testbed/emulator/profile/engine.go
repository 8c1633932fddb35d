package profile

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Engine is a running emulated engine. Its methods are safe for concurrent use.
type Engine struct {
	opts                 Options
	http, events, replay string

	change sync.Mutex // held while one life takes another's place
	mu     sync.Mutex
	life   *life
	closed bool
}

// Start runs an engine until Close.
func Start(o Options) (*Engine, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	e := &Engine{opts: o, http: o.Address, events: o.EventsAddress, replay: o.ReplayAddress}
	if e.life, err = e.begin(); err != nil {
		return nil, err
	}
	return e, nil
}

// begin listens and starts a life; the ports are the same in every one.
func (e *Engine) begin() (*life, error) {
	var lns [3]net.Listener
	names := []*string{&e.http, &e.events, &e.replay}
	if !e.opts.streams() {
		names = names[:1]
	}
	for i, a := range names {
		ln, err := listen(*a)
		if err != nil {
			for _, l := range lns[:i] {
				l.Close()
			}
			return nil, fmt.Errorf("listen on %s: %w", *a, err)
		}
		*a, lns[i] = ln.Addr().String(), ln
	}
	return startLife(e, lns), nil
}

// streams says that events go over ZeroMQ.
func (o *Options) streams() bool {
	return !o.NoEvents && (o.Kind == SGLang || o.Kind == TensorRTLLM && o.Streams)
}

// listen waits for a former life to let a port go.
func listen(address string) (net.Listener, error) {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		ln, err := net.Listen("tcp", address)
		if err == nil || time.Now().After(end) {
			return ln, err
		}
	}
}

// URL is the base of the engine's HTTP API.
func (e *Engine) URL() string { return "http://" + e.http }

// Kind is the engine's kind.
func (e *Engine) Kind() Kind { return e.opts.Kind }

// EventsEndpoint is where events are published, ReplayEndpoint where they are
// replayed; empty: nowhere.
func (e *Engine) EventsEndpoint() string { return e.endpoint(e.events) }

// ReplayEndpoint is as EventsEndpoint.
func (e *Engine) ReplayEndpoint() string {
	if e.opts.NoReplay {
		return ""
	}
	return e.endpoint(e.replay)
}

func (e *Engine) endpoint(address string) string {
	if !e.opts.streams() {
		return ""
	}
	return "tcp://" + address
}

func (e *Engine) current() *life {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.life
}

func (e *Engine) end() {
	e.mu.Lock()
	l := e.life
	e.life = nil
	e.mu.Unlock()
	if l != nil {
		l.end()
	}
}

// Close ends the engine. It may be called again.
func (e *Engine) Close() {
	e.change.Lock()
	defer e.change.Unlock()
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.end()
}

// Restart kills the process and starts another on the same ports: an empty
// cache and numbers from 0.
func (e *Engine) Restart() error {
	e.change.Lock()
	defer e.change.Unlock()
	e.mu.Lock()
	closed := e.closed
	e.mu.Unlock()
	if closed {
		return fmt.Errorf("restart: %w", http.ErrServerClosed)
	}
	e.end()
	l, err := e.begin()
	if err != nil {
		return fmt.Errorf("restart: %w", err)
	}
	e.mu.Lock()
	e.life = l
	e.mu.Unlock()
	return nil
}

// Clear empties the cache, as a flush does. It reports false while requests
// run, and for TensorRT-LLM whose events are polled: they have none of that.
func (e *Engine) Clear() bool {
	l := e.current()
	return l != nil && l.clear()
}

// DropConnections cuts every event connection; new ones are accepted.
func (e *Engine) DropConnections() {
	if l := e.current(); l != nil && l.stream != nil {
		l.stream.dropConnections()
	}
}

// Subscribers is the number of connections that subscribed to events.
func (e *Engine) Subscribers() int {
	if l := e.current(); l != nil && l.stream != nil {
		return l.stream.pub.Subscribers()
	}
	return 0
}

// counts are the totals of one life.
type counts struct {
	prompt, cached, generated, finished, firsts atomic.Int64
	firstMicros, longest                        atomic.Int64
	// prefilled are tokens that were computed before an answer's first one.
	prefilled, prefillMicros atomic.Int64
}

// life is one process life.
type life struct {
	opts    Options
	engine  *Engine
	began   time.Time
	ctx     context.Context
	cancel  context.CancelFunc
	server  *http.Server
	wg      sync.WaitGroup
	stream  *stream
	polled  *polled
	counts  counts
	gpu     chan struct{} // one prefill at a time
	freed   chan struct{} // closed and replaced when a request has ended
	mu      sync.Mutex
	pages   *pageCache // of SGLang and TensorRT-LLM
	slots   *slotCache // of llama.cpp
	pending []event
	running int
	waiting int
	// queued are those of running that wait for their turn to be computed, backlog
	// is how many tokens wait to be.
	queued, backlog int
	// active are the requests that run, in the order of admission; retractions counts
	// those that had to give up their pages.
	active      []*held
	retractions int
	steps       int64
	files       map[string][]uint32 // of saved slots
}

func startLife(e *Engine, lns [3]net.Listener) *life {
	l := &life{opts: e.opts, engine: e, began: time.Now(), gpu: make(chan struct{}, 1), freed: make(chan struct{}), files: map[string][]uint32{}}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	o := &l.opts
	seen := func(ev event) { l.pending = append(l.pending, ev) }
	pool := o.PoolTokens / o.PageTokens
	switch o.Kind {
	case SGLang:
		l.pages = newSGLCache(o.PageTokens, pool, !o.UnsaltedHashes, seen)
	case TensorRTLLM:
		l.pages = newTRTCache(o.PageTokens, pool, o.Hash.page(), seen)
	case LlamaCpp:
		l.slots = newSlotCache(slotOptions{slots: o.Slots, similarity: o.Similarity, hostTokens: max(0, o.HostTokens), unified: o.Unified, idleKept: o.NoIdleCopies})
	}
	if o.streams() {
		l.stream = newStream(*o, o.Logger)
		l.stream.serve(lns[1], lns[2])
	} else if o.Kind == TensorRTLLM {
		l.polled = newPolled(o.EventBuffer)
	}
	l.mu.Lock()
	switch {
	case o.Kind == SGLang:
		// The first batch of a life is that of the cache that was made.
		l.pending = append(l.pending, event{op: opCleared})
	case l.polled != nil && !o.NoEvents:
		l.polled.put(map[string]any{"type": "created", "num_blocks_per_cache_level": []int{pool, 0}}, o.MaxModelTokens)
	}
	l.publish()
	l.mu.Unlock()
	mux := http.NewServeMux()
	switch o.Kind {
	case SGLang:
		l.sglRoutes(mux)
	case TensorRTLLM:
		l.trtRoutes(mux)
	case LlamaCpp:
		l.llamaRoutes(mux)
	}
	var handler http.Handler = mux
	if o.Wrap != nil {
		handler = o.Wrap(handler)
	}
	l.server = &http.Server{Handler: handler, ReadHeaderTimeout: 30 * time.Second, BaseContext: func(net.Listener) context.Context { return l.ctx }}
	l.wg.Go(func() { _ = l.server.Serve(lns[0]) })
	return l
}

// publish sends the events since the last time as one batch; mu is held, so
// that batches go out in the order of the cache.
func (l *life) publish() {
	events := l.pending
	l.pending = nil
	if len(events) == 0 || l.opts.NoEvents {
		return
	}
	seconds := float64(time.Now().UnixNano()) / 1e9
	switch {
	case l.opts.Kind == SGLang:
		if l.opts.Layout < SGSalted {
			events = single(events)
		}
		l.stream.send(sglBatch(l.opts.Layout, events, seconds, 0))
	case l.stream != nil:
		// What is streamed are full blocks only.
		var full []event
		for _, e := range events {
			if !e.partial {
				full = append(full, e)
			}
		}
		if len(full) > 0 {
			l.stream.send(sglBatch(SGMap, full, seconds, 0))
		}
	case l.polled != nil:
		for _, e := range events {
			if e.op != opCleared {
				l.polled.put(trtData(e, l.opts.Hash), l.opts.MaxModelTokens)
			}
		}
	}
}

// single makes an event of each page, as older versions tell them.
func single(events []event) (out []event) {
	for _, e := range events {
		if len(e.hashes) < 2 {
			out = append(out, e)
			continue
		}
		for i := range e.hashes {
			one := e
			one.hashes = e.hashes[i : i+1]
			if e.op == opStored {
				one.tokens = e.tokens[i*e.pageSize : (i+1)*e.pageSize]
				if i > 0 {
					one.parent = &e.hashes[i-1]
				}
			}
			out = append(out, one)
		}
	}
	return out
}

func (l *life) clear() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running > 0 || l.waiting > 0 || l.pages == nil || l.polled != nil {
		return false
	}
	l.pages.tree.clear(false)
	l.publish()
	return true
}

func (l *life) end() {
	l.cancel()
	l.server.Close()
	l.wg.Wait()
	if l.stream != nil {
		l.stream.close()
	}
}

// startToken is a number that differs from life to life.
func (l *life) startToken() string {
	return strings.TrimPrefix(fmt.Sprint(l.began.UnixNano()), "1")
}
