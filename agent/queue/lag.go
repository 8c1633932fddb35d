package queue

import (
	"math"
	"slices"
)

// The signal lag is how long it takes until a claim shows up in the engine's
// counters: transit, steps and the engine's own delay. It is found by holding
// the growth of (waiting + running + finished) against the claims made, shifted
// by candidates of lag, and taking the shift with the least squared error.
const (
	lagStepMs     = 50
	lagSteps      = 161 // 0 to 8 s
	lagForgetting = .99
	// lagPolls is the number of polls with arrivals before a lag is known.
	lagPolls = 25
	// lagBetter is how much better a shift must be to take the place of the
	// one in force.
	lagBetter = .9
	// maxLagClaims bounds the claims looked back at.
	maxLagClaims = 2_000
	// lagSettleMs is how long a poll waits until claims made before it have
	// come in.
	lagSettleMs  = 300
	maxLagPolls  = 64
	maxPollGapMs = 10_000
)

// lag learns the signal lag of one worker's counters.
type lag struct {
	claims []lagClaim // by time made
	polls  []lagPoll  // not judged yet
	errors [lagSteps]float64
	judged int
	// step is the lag in force in steps; -1: not known.
	step int
}

type lagClaim struct {
	madeMs   float64
	requests int
}

// lagPoll is the growth of the requests seen between two readings.
type lagPoll struct{ fromMs, toMs, grown float64 }

func newLag() lag { return lag{step: -1} }

// ms is the lag in force; NaN: not known.
func (l *lag) ms() float64 {
	if l.step < 0 {
		return math.NaN()
	}
	return float64(l.step) * lagStepMs
}

// set starts from a lag known before.
func (l *lag) set(ms float64) {
	l.step = min(max(int(math.Round(ms/lagStepMs)), 0), lagSteps-1)
}

// restart forgets the window, because the counters start anew. The lag in
// force stays: the same engine reports in the same way.
func (l *lag) restart() {
	l.claims, l.polls, l.judged = l.claims[:0], l.polls[:0], 0
	l.errors = [lagSteps]float64{}
}

// claim notes a claim.
func (l *lag) claim(madeMs float64, requests int) {
	at := len(l.claims)
	for at > 0 && l.claims[at-1].madeMs > madeMs {
		at--
	}
	l.claims = slices.Insert(l.claims, at, lagClaim{madeMs, requests})
	if over := len(l.claims) - maxLagClaims; over > 0 {
		l.claims = l.claims[:copy(l.claims, l.claims[over:])]
	}
}

// poll takes the growth between two readings and judges older ones.
func (l *lag) poll(fromMs, toMs, grown float64) {
	if !math.IsNaN(grown) && toMs > fromMs && toMs-fromMs <= maxPollGapMs {
		if len(l.polls) >= maxLagPolls {
			l.polls = l.polls[:copy(l.polls, l.polls[1:])]
		}
		l.polls = append(l.polls, lagPoll{fromMs, toMs, grown})
	}
	n := 0
	for n < len(l.polls) && toMs-l.polls[n].toMs >= lagSettleMs {
		l.judge(&l.polls[n])
		n++
	}
	l.polls = l.polls[:copy(l.polls, l.polls[n:])]
	const longest = (lagSteps - 1) * lagStepMs
	old := 0
	for old < len(l.claims) && l.claims[old].madeMs < toMs-longest-2*maxPollGapMs {
		old++
	}
	l.claims = l.claims[:copy(l.claims, l.claims[old:])]
}

// judge holds one poll against the claims under every shift.
func (l *lag) judge(p *lagPoll) {
	var change [lagSteps + 1]float64
	arrivals := p.grown > 0
	for i := len(l.claims) - 1; i >= 0; i-- {
		c := &l.claims[i]
		if c.madeMs > p.toMs {
			continue
		}
		// It belongs to this poll under shifts in [from − made, to − made).
		first := max(int(math.Ceil((p.fromMs-c.madeMs)/lagStepMs)), 0)
		end := min(int(math.Ceil((p.toMs-c.madeMs)/lagStepMs)), lagSteps)
		if first >= lagSteps {
			break
		}
		if end > first {
			change[first] += float64(c.requests)
			change[end] -= float64(c.requests)
		}
		arrivals = arrivals || c.madeMs > p.fromMs
	}
	made := 0.0
	for i := range l.errors {
		made += change[i]
		off := p.grown - made
		l.errors[i] = lagForgetting*l.errors[i] + off*off
	}
	if !arrivals {
		return
	}
	l.judged++
	l.choose()
}

// choose takes the best shift into force.
func (l *lag) choose() {
	if l.judged < lagPolls {
		return
	}
	best := 0
	for i, off := range l.errors {
		if off < l.errors[best] {
			best = i
		}
	}
	if l.step < 0 || l.errors[best] < lagBetter*l.errors[l.step] {
		l.step = best
	}
}
