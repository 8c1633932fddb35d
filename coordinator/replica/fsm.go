package replica

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"waypost/coordinator/registry"
)

// viewHeader begins a snapshot: the format and, after a space, the index of the
// log that the state includes.
const viewHeader = "waypost-replica 1"

// view is a state and the index of the log it includes.
type view struct {
	state *registry.State
	index uint64
}

func emptyView() *view { return &view{state: registry.Empty()} }

func (v *view) encode(w io.Writer) error {
	_, err := w.Write(v.state.AppendSnapshot(fmt.Appendf(nil, "%s %d\n", viewHeader, v.index)))
	return err
}

func decodeView(r io.Reader) (*view, error) {
	b := bufio.NewReader(io.LimitReader(r, registry.MaxSnapshotBytes+128))
	line, err := b.ReadSlice('\n')
	if err != nil {
		return nil, fmt.Errorf("snapshot has no header: %w", err)
	}
	number, ok := strings.CutPrefix(strings.TrimSuffix(string(line), "\n"), viewHeader+" ")
	index, err := strconv.ParseUint(number, 10, 64)
	if !ok || err != nil {
		return nil, fmt.Errorf("snapshot begins with %.40q, this version reads %q", line, viewHeader)
	}
	rest, err := io.ReadAll(b)
	if err != nil {
		return nil, fmt.Errorf("snapshot: %w", err)
	}
	state, err := registry.DecodeSnapshot(rest)
	if err != nil {
		return nil, err
	}
	return &view{state, index}, nil
}

// fsm applies the log to the registry. Raft calls it from one goroutine; readers
// take the view.
type fsm struct {
	now     atomic.Pointer[view]
	applied *appliedMark // nil: nothing is kept
	changed notifier
	logger  *slog.Logger
}

func newFSM(start *view, applied *appliedMark, logger *slog.Logger) *fsm {
	f := &fsm{applied: applied, logger: logger}
	f.now.Store(start)
	return f
}

// Apply applies one entry, unless the state includes it from the start.
func (f *fsm) Apply(l *raft.Log) any {
	v := f.now.Load()
	if l.Index <= v.index {
		return nil
	}
	state, result := v.state.Apply(l.Data)
	f.set(&view{state, l.Index})
	return Applied{Index: l.Index, Result: result}
}

func (f *fsm) set(v *view) {
	f.now.Store(v)
	if f.applied != nil {
		if err := f.applied.write(v.index); err != nil {
			f.logger.Warn("the applied mark cannot be written; a restart without a leader would begin at the last snapshot", "error", err)
		}
	}
	f.changed.notify()
}

// Snapshot returns the state as it is; later changes make new states.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) { return f.now.Load(), nil }

// Persist writes a snapshot.
func (v *view) Persist(sink raft.SnapshotSink) error {
	if err := v.encode(sink); err != nil {
		_ = sink.Cancel()
		return err
	}
	return sink.Close()
}

// Release does nothing: a view needs no care.
func (v *view) Release() {}

// Restore replaces the state by a snapshot of the leader.
func (f *fsm) Restore(r io.ReadCloser) error {
	defer r.Close()
	v, err := decodeView(r)
	if err != nil {
		return err
	}
	f.set(v)
	return nil
}

// notifier wakes subscribers. Several wakes before a subscriber looks are one.
type notifier struct {
	mu   sync.Mutex
	subs map[chan struct{}]struct{}
}

// subscribe returns a channel that gets a value after each change, and the
// function that ends it.
func (n *notifier) subscribe() (<-chan struct{}, func()) {
	c := make(chan struct{}, 1)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.subs == nil {
		n.subs = map[chan struct{}]struct{}{}
	}
	n.subs[c] = struct{}{}
	return c, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.subs, c)
	}
}

func (n *notifier) notify() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c := range n.subs {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}
