package summary

import (
	"math"
	"time"
)

// budget watches the rate of a stream. Above it the stream first tells only the
// first half of each run that nothing ever continued or forked from (a run that
// is used again is told whole at once), then it speaks less often. With chained
// fingerprints a checkpoint cannot be left out without those behind it, so the
// far half goes rather than every second one.
type budget struct {
	bytesPerSec float64 // negative: no bound
	rate        float64 // present rate, smoothed
	level       uint8
	changed     time.Time
}

const (
	// budgetWindow smooths the rate and is the least time between two levels.
	budgetWindow = 10 * time.Second
	maxPressure  = 3
)

// interval is the least time between two frames.
func (b *budget) interval() time.Duration {
	switch b.level {
	case 2:
		return 2 * time.Second
	case 3:
		return 5 * time.Second
	}
	return 0
}

// spend counts a frame and reports whether the pressure has ceased.
func (b *budget) spend(now, last time.Time, bytes int) (ceased bool) {
	dt := now.Sub(last).Seconds()
	if last.IsZero() || dt <= 0 {
		return false
	}
	keep := math.Exp(-dt / budgetWindow.Seconds())
	b.rate = b.rate*keep + float64(bytes)/dt*(1-keep)
	if b.bytesPerSec < 0 || now.Sub(b.changed) < budgetWindow {
		return false
	}
	switch {
	case b.rate > b.bytesPerSec && b.level < maxPressure:
		b.level++
	case b.rate < b.bytesPerSec/2 && b.level > 0:
		b.level--
		ceased = b.level == 0
	default:
		return false
	}
	b.changed = now
	return ceased
}

// uncut lets runs be told whole that were told in part.
func (f *forest) uncut() {
	for i := range f.runs {
		if r := &f.runs[i]; r.has(runCut) && r.end > r.start {
			f.touch(uint32(i))
		}
	}
}
