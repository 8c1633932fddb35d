package emulator

import (
	"fmt"
	"sync"
	"time"

	"waypost/testbed/emulator/core"
)

// Engine is a running emulated engine. Its methods are safe for concurrent use.
type Engine struct {
	opts  Options
	ports ports
	later sync.WaitGroup // faults asked for over HTTP that run on their own

	// change is held while one life takes another's place.
	change sync.Mutex
	mu     sync.Mutex
	life   *life // nil between two lives
	lives  int
	done   chan struct{} // closed by Close
	gauges time.Duration
}

// Start runs an engine until Close.
func Start(o Options) (*Engine, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	sockets, err := open(o)
	if err != nil {
		return nil, err
	}
	e := &Engine{opts: o, gauges: o.GaugeLag, lives: 1, done: make(chan struct{})}
	e.ports.http = sockets.http.Addr().String()
	if sockets.events != nil {
		e.ports.events = addresses(sockets.events)
	}
	if sockets.replay != nil {
		e.ports.replay = addresses(sockets.replay)
	}
	if sockets.sides != nil {
		e.ports.sides = addresses(sockets.sides)
	}
	if e.life, err = startLife(e, sockets); err != nil {
		return nil, err
	}
	return e, nil
}

// Close ends the engine and everything it started. It may be called again.
func (e *Engine) Close() {
	e.mu.Lock()
	if !e.isClosed() {
		close(e.done)
	}
	e.mu.Unlock()
	e.change.Lock()
	e.endLife()
	e.change.Unlock()
	e.later.Wait()
}

func (e *Engine) isClosed() bool {
	select {
	case <-e.done:
		return true
	default:
		return false
	}
}

func (e *Engine) endLife() {
	e.mu.Lock()
	l := e.life
	e.life = nil
	e.mu.Unlock()
	if l != nil {
		l.end()
	}
}

// current is the life in progress, nil between two.
func (e *Engine) current() *life {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.life
}

// rank finds a rank of the current life.
func (e *Engine) rank(i int) (*rank, error) {
	l := e.current()
	if l == nil {
		return nil, ErrDown
	}
	if i < 0 || i >= len(l.ranks) {
		return nil, fmt.Errorf("%w: rank %d: the engine has %d", ErrOptions, i, len(l.ranks))
	}
	return l.ranks[i], nil
}

// URL is the base of the engine's HTTP API.
func (e *Engine) URL() string { return "http://" + e.ports.http }

// Address is the host and port of the HTTP API.
func (e *Engine) Address() string { return e.ports.http }

// Ranks is the number of data-parallel ranks.
func (e *Engine) Ranks() int { return e.opts.Ranks }

// Options are the engine's, defaults filled in.
func (e *Engine) Options() Options { return e.opts }

// EventsEndpoint is rank 0's, "tcp://host:port"; rank r has the port + r. It
// is empty if the engine publishes no events or dials its subscriber.
func (e *Engine) EventsEndpoint() string { return endpoint(e.ports.events) }

// ReplayEndpoint is as EventsEndpoint, for replay.
func (e *Engine) ReplayEndpoint() string { return endpoint(e.ports.replay) }

func endpoint(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return "tcp://" + list[0]
}

// Lives counts the process lives so far, from 1.
func (e *Engine) Lives() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.lives
}

// Status is the newest state of a rank, whatever the lag of the gauges; zero
// while the engine is down.
func (e *Engine) Status(rank int) core.Status {
	r, err := e.rank(rank)
	if err != nil {
		return core.Status{}
	}
	return r.stats.latest()
}

// Subscribers is the number of connections that subscribed to a rank's events.
func (e *Engine) Subscribers(rank int) int {
	r, err := e.rank(rank)
	if err != nil || r.pub == nil {
		return 0
	}
	return r.pub.pub.Subscribers()
}

func (e *Engine) lag() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.gauges
}
