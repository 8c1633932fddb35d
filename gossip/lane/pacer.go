package lane

import "time"

// pacer says when a LOAD is due: one period after the last, or at once after a
// kick, but never closer than gap to the last.
type pacer struct {
	every, gap time.Duration
	last       time.Time
	kicked     bool
}

func (p *pacer) kick() { p.kicked = true }

// due returns when the next LOAD is due; the zero time means now.
func (p *pacer) due() time.Time {
	if p.last.IsZero() {
		return time.Time{}
	}
	if p.kicked {
		return p.last.Add(p.gap)
	}
	return p.last.Add(p.every)
}

// sent notes that a LOAD was built; earlier kicks are served by it.
func (p *pacer) sent(now time.Time) { p.last, p.kicked = now, false }
