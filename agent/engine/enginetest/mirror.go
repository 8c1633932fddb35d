package enginetest

import (
	"context"
	"sync"
	"testing"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
)

// deadline only keeps a broken test from hanging.
const deadline = 2 * time.Minute

// Mirror is a sink that keeps a block table per rank, as an agent does.
type Mirror struct {
	t       testing.TB
	changed *sync.Cond

	// Mu guards what follows.
	Mu     sync.Mutex
	Known  engine.Facts
	Up     bool
	Reason string
	ranks  map[int]*Rank
	busy   map[int]bool // a call of the rank is under way
}

// Rank is what is known of a rank.
type Rank struct {
	Table, Beside *blocktable.Table
	Load          engine.Load
	Coverage      engine.Coverage
	Hint          string
	Resets        []engine.ResetCause
	Counts        map[string]int
	Ages          []time.Duration
	Batches       int
}

// NewMirror makes an empty one.
func NewMirror(t testing.TB) *Mirror {
	m := &Mirror{t: t, ranks: map[int]*Rank{}, busy: map[int]bool{}}
	m.changed = sync.NewCond(&m.Mu)
	return m
}

// Of is what is known of a rank; Mu is held.
func (m *Mirror) Of(rank int) *Rank {
	r := m.ranks[rank]
	if r == nil {
		r = &Rank{Table: blocktable.New(blocktable.Options{}), Counts: map[string]int{}}
		m.ranks[rank] = r
	}
	return r
}

// call runs f for a rank and proves that calls of a rank do not overlap.
func (m *Mirror) call(rank int, f func(r *Rank)) {
	m.Mu.Lock()
	if m.busy[rank] {
		m.t.Error("calls of one rank overlap")
	}
	m.busy[rank] = true
	m.Mu.Unlock()
	m.Mu.Lock()
	f(m.Of(rank))
	m.busy[rank] = false
	m.changed.Broadcast()
	m.Mu.Unlock()
}

// Facts implements engine.Sink.
func (m *Mirror) Facts(f engine.Facts) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.Known = f
	m.changed.Broadcast()
}

// Health implements engine.Sink.
func (m *Mirror) Health(up bool, reason string) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.Up, m.Reason = up, reason
	m.changed.Broadcast()
}

// Load implements engine.Sink.
func (m *Mirror) Load(rank int, l engine.Load) { m.call(rank, func(r *Rank) { r.Load = l }) }

// Batch implements engine.Sink.
func (m *Mirror) Batch(rank int, b engine.Batch) {
	m.call(rank, func(r *Rank) {
		table := r.Table
		if r.Beside != nil {
			table = r.Beside
		}
		for i := range b.Events {
			table.Apply(&b.Events[i])
		}
		r.Ages = append(r.Ages, b.Age)
		r.Batches++
	})
}

// Reset implements engine.Sink.
func (m *Mirror) Reset(rank int, cause engine.ResetCause) {
	m.call(rank, func(r *Rank) {
		r.Table.Clear()
		r.Beside = nil
		r.Resets = append(r.Resets, cause)
	})
}

// Coverage implements engine.Sink.
func (m *Mirror) Coverage(rank int, c engine.Coverage, hint string) {
	m.call(rank, func(r *Rank) { r.Coverage, r.Hint = c, hint })
}

// Counted implements engine.Sink.
func (m *Mirror) Counted(rank int, what string, n int) {
	m.call(rank, func(r *Rank) { r.Counts[what] += n })
}

// Rebuilder is a Mirror that builds beside.
type Rebuilder struct{ *Mirror }

// Rebuild implements engine.Rebuilder.
func (m Rebuilder) Rebuild(rank int, cause engine.ResetCause) {
	m.call(rank, func(r *Rank) { r.Beside = blocktable.New(blocktable.Options{}) })
}

// Rebuilt implements engine.Rebuilder.
func (m Rebuilder) Rebuilt(rank int) {
	m.call(rank, func(r *Rank) { r.Table, r.Beside = r.Beside, nil })
}

// Await waits until ok holds.
func (m *Mirror) Await(what string, ok func() bool) {
	m.t.Helper()
	timer := time.AfterFunc(deadline, func() {
		m.Mu.Lock()
		defer m.Mu.Unlock()
		m.changed.Broadcast()
	})
	defer timer.Stop()
	end := time.Now().Add(deadline)
	m.Mu.Lock()
	defer m.Mu.Unlock()
	for !ok() {
		if time.Now().After(end) {
			for n, r := range m.ranks {
				m.t.Logf("rank %d: %s (%s), resets %v, counts %v, %d blocks", n, r.Coverage, r.Hint, r.Resets, r.Counts, r.Table.Len())
			}
			m.t.Fatalf("%s: not within %s", what, deadline)
		}
		m.changed.Wait()
	}
}

// Match is the reuse of the prompt of the named blocks.
func (r *Rank) Match(blocks ...int) int {
	var tokens []uint32
	for _, b := range blocks {
		tokens = append(tokens, uint32(10*b), uint32(10*b+1))
	}
	return r.Table.Match(append(tokens, 1), "", "")
}

// Watch runs an adapter until the test ends.
func Watch(t testing.TB, a engine.Adapter, sink engine.Sink) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, sink) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
