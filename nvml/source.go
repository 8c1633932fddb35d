package nvml

import (
	"slices"
	"sync"
	"time"
)

// Source opens the driver library in this process.
type Source interface {
	// Open initializes the library. Every call into it is entered in log. An
	// error is a *StatusError when it has a state of its own.
	Open(log *CallLog) (Session, error)
}

// Session reads through an initialized library. Read and WaitXid are called
// from different goroutines, each from one.
type Session interface {
	// Read takes one reading of all GPUs. It may block for ever.
	Read() *Snapshot
	// WaitXid waits at most timeout for an event; ok is false when none came.
	// An error says why events do not arrive, in words.
	WaitXid(timeout time.Duration) (event XidEvent, ok bool, err error)
}

// StatusError is a failure that is a state of the host.
type StatusError struct{ Status Status }

// Error is the state's sentence.
func (e *StatusError) Error() string { return e.Status.Text }

// maxCallNames bounds the library functions told apart in a CallLog.
const maxCallNames = 64

// CallLog records driver calls while they run, so that a call that does not
// return can be named by another goroutine.
type CallLog struct {
	mu    sync.Mutex
	call  string
	gpu   int
	began time.Time
	sums  map[string]CallTime
}

// Begin enters a call about the GPU with index gpu, below 0: about none.
func (l *CallLog) Begin(call string, gpu int, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.call, l.gpu, l.began = call, gpu, now
}

// End enters that the call begun last has returned.
func (l *CallLog) End(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sums == nil {
		l.sums = map[string]CallTime{}
	}
	s, ok := l.sums[l.call]
	if ok || len(l.sums) < maxCallNames {
		s.Call = l.call
		s.Count++
		s.SumMs += float64(now.Sub(l.began)) / float64(time.Millisecond)
		l.sums[l.call] = s
	}
	l.call = ""
}

// Busy is the call under way, if any.
func (l *CallLog) Busy(now time.Time) Busy {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.call == "" {
		return Busy{}
	}
	b := Busy{Call: l.call, ForMs: float64(now.Sub(l.began)) / float64(time.Millisecond)}
	if l.gpu >= 0 {
		b.GPU = new(l.gpu)
	}
	return b
}

// Take returns the sums since the Take before, by name.
func (l *CallLog) Take() []CallTime {
	l.mu.Lock()
	defer l.mu.Unlock()
	taken := make([]CallTime, 0, len(l.sums))
	for _, s := range l.sums {
		taken = append(taken, s)
	}
	slices.SortFunc(taken, func(a, b CallTime) int {
		if a.Call < b.Call {
			return -1
		}
		return 1
	})
	clear(l.sums)
	return taken
}
