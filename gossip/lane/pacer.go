package lane

import "time"

// pacer says when a LOAD is due: one period after the last that told of every
// worker, or at once after a kick, but never closer than gap to the last.
type pacer struct {
	every, gap time.Duration
	// last is when one was built, whole when one that told of every worker was.
	last, whole time.Time
	// kicked asks for one that tells of every worker, news for one of those with
	// news.
	kicked, news bool
}

func (p *pacer) kick()     { p.kicked = true }
func (p *pacer) kickNews() { p.news = true }

// due returns when the next LOAD is due; the zero time means now.
func (p *pacer) due() time.Time {
	if p.whole.IsZero() {
		return time.Time{}
	}
	soonest, due := p.last.Add(p.gap), p.whole.Add(p.every)
	if p.kicked || p.news || due.Before(soonest) {
		return soonest
	}
	return due
}

// tellsAll says whether the LOAD that is due is to tell of every worker.
func (p *pacer) tellsAll(now time.Time) bool {
	return p.whole.IsZero() || p.kicked || !now.Before(p.whole.Add(p.every))
}

// sent notes that a LOAD was built; earlier kicks are served by it.
func (p *pacer) sent(now time.Time, all bool) {
	p.last, p.news = now, false
	if all {
		p.whole, p.kicked = now, false
	}
}
