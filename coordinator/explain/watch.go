package explain

// EventKind says what a watcher is told.
type EventKind string

// The kinds.
const (
	EventPlaced  EventKind = "placed"
	EventRefused EventKind = "refused"
	EventOutcome EventKind = "outcome"
)

// Event is a new entry, or one whose outcome came or was settled.
type Event struct {
	Kind  EventKind
	Entry *Entry
	// Missed counts the matching events before this one that the watcher was
	// too slow for.
	Missed int
}

// Watcher receives events.
type Watcher struct {
	// Events gives them in order.
	Events <-chan Event

	events chan Event
	filter Filter
	missed int
}

// watchBuffer is how many events wait for a slow watcher, maxWatchers how many
// may watch.
const (
	watchBuffer = 256
	maxWatchers = 64
)

// Watch begins to tell the events whose entries match, until Unwatch; ok is
// false if too many watch already.
func (s *Store) Watch(f Filter) (w *Watcher, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.watchers) >= maxWatchers {
		return nil, false
	}
	w = &Watcher{events: make(chan Event, watchBuffer), filter: f}
	w.Events = w.events
	s.watchers[w] = struct{}{}
	return w, true
}

// Unwatch ends the telling.
func (s *Store) Unwatch(w *Watcher) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.watchers, w)
}

// tell tells the watchers; one that is slow misses events and is told how
// many. The lock is held.
func (s *Store) tell(kind EventKind, e *Entry) {
	for w := range s.watchers {
		if !w.filter.matches(e) {
			continue
		}
		select {
		case w.events <- Event{Kind: kind, Entry: e, Missed: w.missed}:
			w.missed = 0
		default:
			w.missed++
		}
	}
}
