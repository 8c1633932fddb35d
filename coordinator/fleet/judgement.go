package fleet

import (
	"math"
	"time"
)

// Judgement is what outcomes taught about one engine life.
type Judgement struct {
	// Trust is the factor on cache credit, 0 to 1; NaN: nothing was learnt.
	Trust float64
	// Failing keeps the worker from placements: it fails what it is given.
	// Probing says that the next placement will tell. Why says more.
	Failing, Probing bool
	Why              string
}

// Judge takes what outcomes taught about a worker. A process that is not the
// worker's changes nothing: the next life starts without a judgement.
func (f *Fleet) Judge(now time.Time, id WorkerID, process uint64, j Judgement) Changes {
	f.mu.Lock()
	defer f.mu.Unlock()
	var changes Changes
	w := f.worker(id)
	if w == nil || w.process != process {
		return changes
	}
	same := w.view.Trust == j.Trust || math.IsNaN(w.view.Trust) && math.IsNaN(j.Trust)
	if same && w.judged.Failing == j.Failing && w.judged.Probing == j.Probing && w.judged.Why == j.Why {
		return changes
	}
	w.judged, w.view.Trust = j, j.Trust
	f.publish(w, f.Ms(now), &changes)
	return changes
}
