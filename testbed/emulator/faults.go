package emulator

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrDown is a fault asked of an engine that is not running.
var ErrDown = errors.New("the engine is down")

// Restart kills the process and, after down, starts a new one on the same
// ports: sequence numbers from 0, an empty cache, equal block hashes. Faults of
// the old life end with it.
func (e *Engine) Restart(down time.Duration) error {
	e.change.Lock()
	defer e.change.Unlock()
	e.endLife()
	timer := time.NewTimer(down)
	defer timer.Stop()
	select {
	case <-e.done:
	case <-timer.C:
	}
	if e.isClosed() {
		return ErrDown
	}
	sockets, err := e.ports.again()
	if err != nil {
		return fmt.Errorf("restart: %w", err)
	}
	l, err := startLife(e, sockets)
	if err != nil {
		return fmt.Errorf("restart: %w", err)
	}
	e.mu.Lock()
	e.life = l
	e.lives++
	e.mu.Unlock()
	return nil
}

// Kill ends the process; Restart brings the engine back.
func (e *Engine) Kill() {
	e.change.Lock()
	defer e.change.Unlock()
	e.endLife()
}

// KillAPI ends the HTTP server alone: connections are refused, while events
// and replay live on. Only Restart brings it back.
func (e *Engine) KillAPI() {
	if l := e.current(); l != nil {
		l.stopAPI()
	}
}

// ClearCache resets the prefix cache of every rank and reports whether all of
// them could: a rank that runs a request cannot. As in the real engine, it is
// announced with the next step.
func (e *Engine) ClearCache() bool {
	l := e.current()
	if l == nil {
		return false
	}
	ok := true
	for _, r := range l.ranks {
		r.force(func() { ok = r.core.Reset(false) && ok })
	}
	return ok
}

// DropBatches loses the next n event batches of a rank.
func (e *Engine) DropBatches(rank, n int, mode DropMode) error {
	if n < 0 || mode > DropForever {
		return fmt.Errorf("%w: drop %d batches in mode %d: want 0 or more in mode 0 or 1", ErrOptions, n, mode)
	}
	r, err := e.rank(rank)
	if err != nil {
		return err
	}
	if r.pub == nil {
		return fmt.Errorf("%w: the engine publishes no events", ErrOptions)
	}
	r.pub.lose(n, mode)
	return nil
}

// Stall stops all progress while ports stay open; Resume ends it.
func (e *Engine) Stall() { e.eachRank(func(r *rank) { r.set(func() { r.stalled = true }) }) }

// Resume ends Stall.
func (e *Engine) Resume() { e.eachRank(func(r *rank) { r.set(func() { r.stalled = false }) }) }

// Slow multiplies the duration of every step; 1: as configured.
func (e *Engine) Slow(factor float64) error {
	if !(factor > 0 && factor <= 1e6) {
		return fmt.Errorf("%w: factor %v: want more than 0, at most 1e6", ErrOptions, factor)
	}
	e.eachRank(func(r *rank) { r.set(func() { r.slow = factor }) })
	return nil
}

// DropConnections cuts every connection of every port; new ones are accepted.
func (e *Engine) DropConnections() {
	if l := e.current(); l != nil {
		l.listener.dropConnections()
		e.eachRank(func(r *rank) {
			if r.pub != nil {
				r.pub.dropConnections()
			}
		})
	}
}

// ClaimBlockTokens makes events and metrics state another block size than the
// true one; 0: the true one.
func (e *Engine) ClaimBlockTokens(n int) error {
	if n < 0 {
		return fmt.Errorf("%w: block size %d: want 0 or more", ErrOptions, n)
	}
	l := e.current()
	if l == nil {
		return ErrDown
	}
	if n == 0 {
		n = e.opts.BlockTokens
	}
	l.mu.Lock()
	l.blockTokens = n
	l.mu.Unlock()
	e.eachRank(func(r *rank) {
		if r.pub != nil {
			r.pub.claim(n)
		}
	})
	return nil
}

// SkewTemplate renders prompts otherwise from now on: their first token is
// replaced by this one, as a changed chat template does; 0: as they come.
func (e *Engine) SkewTemplate(token uint32) error {
	if int64(token) >= int64(e.opts.VocabularyTokens) {
		return fmt.Errorf("%w: token %d: want less than %d", ErrOptions, token, e.opts.VocabularyTokens)
	}
	l := e.current()
	if l == nil {
		return ErrDown
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.skew = token
	return nil
}

// IgnoreSalts lets requests with a cache salt share the cache of all.
func (e *Engine) IgnoreSalts(on bool) error {
	l := e.current()
	if l == nil {
		return ErrDown
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ignoreSalt = on
	return nil
}

// HideSalts leaves cache salts out of the events, while blocks go on to be
// hashed with them.
func (e *Engine) HideSalts(on bool) {
	e.eachRank(func(r *rank) {
		if r.pub != nil {
			r.pub.hideSalts(on)
		}
	})
}

func (l *life) promptFaults() (skew uint32, ignoreSalt bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.skew, l.ignoreSalt
}

// EvictSilently forgets up to n cached blocks of a rank that no request uses,
// least recently used first, without an event. It returns how many it forgot.
func (e *Engine) EvictSilently(rank, n int) (int, error) {
	r, err := e.rank(rank)
	if err != nil {
		return 0, err
	}
	done := 0
	r.force(func() { done = r.core.EvictSilently(n) })
	return done, nil
}

// SetGaugeLag changes the age of the gauges in /metrics.
func (e *Engine) SetGaugeLag(lag time.Duration) error {
	if lag < 0 {
		return fmt.Errorf("%w: lag %v: want 0 or more", ErrOptions, lag)
	}
	e.mu.Lock()
	e.gauges = lag
	e.mu.Unlock()
	e.eachRank(func(r *rank) { r.stats.setLag(lag) })
	return nil
}

func (e *Engine) eachRank(f func(r *rank)) {
	if l := e.current(); l != nil {
		for _, r := range l.ranks {
			f(r)
		}
	}
}

// reset is the engine's own reset of the cache, which needs a live rank.
func (l *life) reset(ctx context.Context, evictRunning bool) (bool, error) {
	ok := true
	for _, r := range l.ranks {
		if err := r.call(ctx, func() { ok = r.core.Reset(evictRunning) && ok }); err != nil {
			return false, err
		}
	}
	return ok, nil
}
