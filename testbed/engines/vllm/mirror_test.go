package vllm

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/engine/kvevents"
)

// mirror is a block table of the test's own, kept by the parts that the agent
// keeps its one by: it says what the agent's says, at the moment of each request.
type mirror struct {
	reader *kvevents.Reader
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu    sync.Mutex
	table *blocktable.Table
	// first is when the first event of this engine life came.
	first time.Time
	// removals and stores count events.
	removals, stores int
	faults           map[string]int
}

// watch begins to mirror an engine life.
func watch(events, replay string) *mirror {
	m := &mirror{table: blocktable.New(blocktable.Options{Model: model}), faults: map[string]int{}}
	m.reader = kvevents.NewReader(kvevents.ReaderOptions{
		Plan: kvevents.Plan{Events: events, Replay: replay}, Host: "127.0.0.1", Dialect: &kvevents.Dialect{}, Logger: slog.New(slog.DiscardHandler), Sink: m,
	})
	ctx, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	m.done.Go(func() { m.reader.Run(ctx) })
	m.done.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-tick.C:
				m.reader.Tick(now)
			}
		}
	})
	return m
}

func (m *mirror) close() {
	m.cancel()
	m.done.Wait()
}

// match is what the table expects of a prompt, and how many removals it had
// seen by then.
func (m *mirror) match(tokens []uint32, adapter, salt string) (reuse, removals int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.table.Match(tokens, adapter, salt), m.removals
}

// counts are the events seen so far.
func (m *mirror) counts() (stores, removals int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stores, m.removals
}

// began is when the first event came; zero: none yet.
func (m *mirror) began() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.first
}

// Batch implements engine.Sink.
func (m *mirror) Batch(_ int, b engine.Batch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.first.IsZero() {
		m.first = time.Now()
	}
	for i := range b.Events {
		switch b.Events[i].Op {
		case blocktable.OpRemove:
			m.removals += len(b.Events[i].Hashes)
		case blocktable.OpStore:
			m.stores += len(b.Events[i].Hashes)
		}
	}
	m.table.ApplyAll(b.Events)
}

// Reset implements engine.Sink.
func (m *mirror) Reset(int, engine.ResetCause) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.table.Clear()
}

// Counted implements engine.Sink.
func (m *mirror) Counted(_ int, what string, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.faults[what] += n
}

// Facts, Load, Health and Coverage implement engine.Sink; the agent's are told
// to the coordinator.
func (m *mirror) Facts(engine.Facts)                    {}
func (m *mirror) Load(int, engine.Load)                 {}
func (m *mirror) Health(bool, string)                   {}
func (m *mirror) Coverage(int, engine.Coverage, string) {}
