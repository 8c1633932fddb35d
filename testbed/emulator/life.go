package emulator

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// life is one process life of the engine.
type life struct {
	engine *Engine
	opts   Options
	ports  ports
	began  time.Time
	ranks  []*rank

	cancel context.CancelFunc
	wg     sync.WaitGroup

	listener *trackedListener
	server   *http.Server

	sides        []*http.Server
	pulledBlocks atomic.Int64

	requests atomic.Uint64 // numbers requests that name no id

	mu          sync.Mutex
	level       int // of sleep
	paused      bool
	blockTokens int // the block size claimed
	skew        uint32
	ignoreSalt  bool
	apiDead     bool
	handlers    int           // HTTP requests in progress
	drained     chan struct{} // closed when apiDead and no handler is left
}

// opened are the sockets of a life before it runs.
type opened struct {
	http           net.Listener
	events, replay []net.Listener
	sides          []net.Listener
}

func (o opened) close() {
	if o.http != nil {
		o.http.Close()
	}
	closeAll(o.events)
	closeAll(o.replay)
	closeAll(o.sides)
}

// open listens for the first time.
func open(o Options) (opened, error) {
	var out opened
	lns, err := listenRanks(o.Address, 1)
	if err != nil {
		return out, fmt.Errorf("listen for HTTP on %s: %w", o.Address, err)
	}
	out.http = lns[0]
	if o.Transfer != nil {
		if out.sides, err = listenRanks(o.Transfer.Address, o.Ranks); err != nil {
			out.close()
			return out, fmt.Errorf("listen for peers on %s: %w", o.Transfer.Address, err)
		}
	}
	if o.NoEvents {
		return out, nil
	}
	if o.EventsDial == "" {
		if out.events, err = listenRanks(o.EventsAddress, o.Ranks); err != nil {
			out.close()
			return out, fmt.Errorf("listen for event subscribers on %s: %w", o.EventsAddress, err)
		}
	}
	if !o.NoReplay {
		if out.replay, err = listenRanks(o.ReplayAddress, o.Ranks); err != nil {
			out.close()
			return out, fmt.Errorf("listen for replay on %s: %w", o.ReplayAddress, err)
		}
	}
	return out, nil
}

// again listens where the first life did.
func (p ports) again() (opened, error) {
	var out opened
	all := func(list []string, into *[]net.Listener) error {
		for _, a := range list {
			ln, err := reopen(a)
			if err != nil {
				return err
			}
			*into = append(*into, ln)
		}
		return nil
	}
	ln, err := reopen(p.http)
	if err != nil {
		return out, err
	}
	out.http = ln
	if err := all(p.events, &out.events); err != nil {
		out.close()
		return out, err
	}
	if err := all(p.replay, &out.replay); err != nil {
		out.close()
		return out, err
	}
	if err := all(p.sides, &out.sides); err != nil {
		out.close()
		return out, err
	}
	return out, nil
}

// startLife runs a process life on opened sockets, which it owns from now on.
func startLife(e *Engine, sockets opened) (*life, error) {
	o := e.opts
	ctx, cancel := context.WithCancel(context.Background())
	l := &life{engine: e, opts: o, ports: e.ports, began: o.Clock.Now(), cancel: cancel, blockTokens: o.BlockTokens, drained: make(chan struct{})}
	for i := range o.Ranks {
		var pub *publisher
		if !o.NoEvents {
			pub = newPublisher(o, i, o.Logger)
		}
		r, err := newRank(i, o, l.began, pub)
		if err != nil {
			cancel()
			sockets.close()
			return nil, err
		}
		r.stats.setLag(e.lag())
		l.ranks = append(l.ranks, r)
	}
	for i, r := range l.ranks {
		if r.pub != nil {
			l.startPublisher(i, r.pub, sockets)
		}
		l.wg.Go(func() { r.run(ctx) })
	}
	l.serveSides(sockets.sides)
	l.listener = track(sockets.http)
	routes := l.routes()
	if o.Wrap != nil {
		routes = o.Wrap(routes)
	}
	l.server = &http.Server{Handler: l.counted(routes), ReadHeaderTimeout: 30 * time.Second}
	l.wg.Go(func() { _ = l.server.Serve(l.listener) })
	return l, nil
}

func (l *life) startPublisher(i int, p *publisher, sockets opened) {
	if l.opts.EventsDial != "" {
		host, port, _ := splitAddress(l.opts.EventsDial)
		p.pub.Dial(net.JoinHostPort(host, strconv.Itoa(port+i)))
	} else {
		p.pub.Serve(sockets.events[i])
	}
	if p.router != nil {
		p.router.Serve(sockets.replay[i])
	}
}

// counted refuses requests of a dead API and counts the others.
func (l *life) counted(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.mu.Lock()
		if l.apiDead {
			l.mu.Unlock()
			panic(http.ErrAbortHandler)
		}
		l.handlers++
		l.mu.Unlock()
		defer func() {
			l.mu.Lock()
			l.handlers--
			l.drainLocked()
			l.mu.Unlock()
		}()
		next.ServeHTTP(w, r)
	})
}

func (l *life) drainLocked() {
	if l.apiDead && l.handlers == 0 {
		select {
		case <-l.drained:
		default:
			close(l.drained)
		}
	}
}

// stopAPI ends HTTP; the engine process behind it lives on and goes on
// generating.
func (l *life) stopAPI() {
	l.mu.Lock()
	l.apiDead = true
	l.drainLocked()
	l.mu.Unlock()
	l.server.Close()
}

func (l *life) apiIsDead() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.apiDead
}

// end kills the whole process.
func (l *life) end() {
	l.stopAPI()
	l.cancel()
	for _, s := range l.sides {
		s.Close()
	}
	for _, r := range l.ranks {
		if r.pub != nil {
			r.pub.close()
		}
	}
	l.wg.Wait()
	<-l.drained
}

func (l *life) sleepLevel() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.level
}

func (l *life) claimedBlockTokens() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.blockTokens
}

// setHeld stops scheduling while the engine sleeps or is paused.
func (l *life) setHeld(change func()) {
	l.mu.Lock()
	change()
	held := l.level > 0 || l.paused
	l.mu.Unlock()
	for _, r := range l.ranks {
		r.hold(held)
	}
}

// sourceOf describes rank r's publisher as /kv_event_sources does.
func (l *life) sourceOf(r int) map[string]any {
	endpoint := func(list []string) any {
		if list == nil {
			return nil
		}
		_, port, _ := splitAddress(list[r])
		return fmt.Sprintf("tcp://*:%d", port)
	}
	pub := endpoint(l.ports.events)
	if l.opts.EventsDial != "" {
		host, port, _ := splitAddress(l.opts.EventsDial)
		pub = "tcp://" + net.JoinHostPort(host, strconv.Itoa(port+r))
	}
	return map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": pub, "replay_endpoint": endpoint(l.ports.replay),
		"buffer_steps": l.opts.BufferBatches, "hwm": l.opts.HighWater, "max_queue_size": 100000, "topic": l.opts.Topic,
	}
}
