package ledger

import (
	"cmp"
	"slices"
)

// Bounds of what an agent remembers of coordinators.
const (
	// MaxCoordinators bounds the coordinator marks that are echoed for one
	// worker.
	MaxCoordinators = maxEchoes
	// forgetCoordinatorMs is how long a coordinator without a lane and
	// without an open claim is remembered.
	forgetCoordinatorMs = 120_000
)

// Echoes is how far an agent took in each coordinator's claims for one worker.
// The echo is contiguous: every claim up to it was taken in, or its sender gave
// it up. It is not the highest seq seen; a lost frame below that would be lost
// for good. The zero value has seen nobody.
type Echoes struct {
	marks []echoMark // by coordinator
}

// echoMark is what is known of one coordinator process.
type echoMark struct {
	coordinator, upto uint64
	lanes             int
	// quietMs is the last time it was heard or its last lane went down.
	quietMs float64
}

// TakeResult says what became of a frame.
type TakeResult uint8

// The results of Echoes.Take.
const (
	// Taken: every claim above the echo was taken in.
	Taken TakeResult = iota
	// TakenGap: claims before the frame are missing; nothing was taken in and
	// the sender offers again from the echo.
	TakenGap
	// TakenFull: MaxCoordinators others have lanes or open claims.
	TakenFull
)

func (e *Echoes) find(coordinator uint64) (int, bool) {
	return slices.BinarySearchFunc(e.marks, coordinator, func(m echoMark, c uint64) int { return cmp.Compare(m.coordinator, c) })
}

// mark is the mark of a coordinator, made if there is room; nil if there is
// none. hasOpen tells whether a coordinator has open claims.
func (e *Echoes) mark(coordinator uint64, nowMs float64, hasOpen func(uint64) bool) *echoMark {
	at, found := e.find(coordinator)
	if found {
		return &e.marks[at]
	}
	if len(e.marks) >= MaxCoordinators && !e.makeRoom(hasOpen) {
		return nil
	}
	at, _ = e.find(coordinator)
	e.marks = slices.Insert(e.marks, at, echoMark{coordinator: coordinator, quietMs: nowMs})
	return &e.marks[at]
}

// makeRoom forgets the mark that was silent longest of those without a lane
// and without an open claim. A mark that has a lane is never forgotten: its
// coordinator would offer ended claims again.
func (e *Echoes) makeRoom(hasOpen func(uint64) bool) bool {
	oldest := -1
	for i := range e.marks {
		m := &e.marks[i]
		if m.lanes == 0 && !hasOpen(m.coordinator) && (oldest < 0 || m.quietMs < e.marks[oldest].quietMs) {
			oldest = i
		}
	}
	if oldest < 0 {
		return false
	}
	e.marks = slices.Delete(e.marks, oldest, oldest+1)
	return true
}

// LaneUp tells that a lane of the coordinator is up. It reports false if its
// claims cannot be taken in for want of room.
func (e *Echoes) LaneUp(nowMs float64, coordinator uint64, hasOpen func(uint64) bool) bool {
	m := e.mark(coordinator, nowMs, hasOpen)
	if m == nil {
		return false
	}
	m.lanes++
	return true
}

// LaneDown tells that a lane of the coordinator is down.
func (e *Echoes) LaneDown(nowMs float64, coordinator uint64) {
	if at, found := e.find(coordinator); found && e.marks[at].lanes > 0 {
		e.marks[at].lanes--
		e.marks[at].quietMs = nowMs
	}
}

// Take takes a validated frame in: it calls take for every claim above the
// echo, in order, and moves the echo to it.
func (e *Echoes) Take(nowMs float64, f *ClaimFrame, hasOpen func(uint64) bool, take func(*Offer)) TakeResult {
	at, known := e.find(f.Coordinator)
	if f.Prev > 0 && (!known || f.Prev > e.marks[at].upto) {
		return TakenGap
	}
	m := e.mark(f.Coordinator, nowMs, hasOpen)
	if m == nil {
		return TakenFull
	}
	m.quietMs = nowMs
	for i := range f.Offers {
		if o := &f.Offers[i]; o.Seq > m.upto {
			m.upto = o.Seq
			take(o)
		}
	}
	return Taken
}

// Upto is the echo of a coordinator; 0 if none of its claims was taken in.
func (e *Echoes) Upto(coordinator uint64) uint64 {
	if at, found := e.find(coordinator); found {
		return e.marks[at].upto
	}
	return 0
}

// Expire forgets coordinators that had neither a lane nor an open claim for
// two minutes.
func (e *Echoes) Expire(nowMs float64, hasOpen func(uint64) bool) {
	e.marks = slices.DeleteFunc(e.marks, func(m echoMark) bool {
		return m.lanes == 0 && nowMs-m.quietMs >= forgetCoordinatorMs && !hasOpen(m.coordinator)
	})
}

// Append appends the echoes of a load report to dst, by coordinator.
func (e *Echoes) Append(dst []Echo) []Echo {
	for i := range e.marks {
		if m := &e.marks[i]; m.upto > 0 {
			dst = append(dst, Echo{Coordinator: m.coordinator, Upto: m.upto})
		}
	}
	return dst
}
