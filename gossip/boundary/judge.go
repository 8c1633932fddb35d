package boundary

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// Worker is what is known of one worker's boundary. Workers of one engine share
// a vector.
type Worker struct {
	// Name is host/engine/rank, Engine host/engine, Pool the pool it serves;
	// empty: none.
	Name, Engine, Pool string
	// Vector is its boundary; nil: not known.
	Vector *Vector
	// Outcomes are those that expected reuse, FoundRatio the mean share of it
	// that was found, 0 to 1. They confirm or revoke what is declared.
	Outcomes, FoundRatio float64
}

// State is what is made of a worker's boundary.
type State string

// The states.
const (
	// StateUnknown: nothing was measured or declared, or nothing that others
	// have too.
	StateUnknown State = "unknown"
	// StateAgrees: it is that of most of the pool.
	StateAgrees State = "agrees"
	// StateDeclared: an operator says so and outcomes do not say otherwise yet;
	// StateConfirmed: they say so too.
	StateDeclared  State = "declared"
	StateConfirmed State = "confirmed"
	// StateRevoked: outcomes show that the declared boundary is wrong.
	StateRevoked State = "revoked"
	// StateMeasuring: it differs, and is measured again before that counts.
	StateMeasuring State = "measuring again"
	// StateDiffers: it differs from that of most of the pool.
	StateDiffers State = "differs"
)

// Verdict is what is made of one worker's boundary.
type Verdict struct {
	Worker string
	State  State
	// Group numbers the workers of the pool that agree, from 1, which are most;
	// 0: none.
	Group int
	// Against is the worker it was compared with, empty: none; Difference what
	// differs.
	Against    string
	Difference Difference
	// Why says it to people; empty: nothing is wrong.
	Why string
	// Credit says that what the worker holds may be counted on.
	Credit bool
}

// Ask is a probe that a worker's agent should measure again.
type Ask struct {
	Worker string
	Part   Part
	Number int
}

// Constants of the judge.
const (
	// maxGroups bounds the boundaries that are told apart in a pool.
	maxGroups = 16
	// askEvery is how long a probe that was asked for is waited for.
	askEvery = 3 * time.Second
	// holdBlank is how long a difference counts while one side's boundary is there
	// without what differed: more than a first measurement takes.
	holdBlank = time.Minute
	// Declared boundaries are believed or revoked after so many outcomes, by the
	// share of the expected reuse that was found.
	leastOutcomes = 8
	confirmedFrom = .75
	revokedBelow  = .25
)

// Judge compares the workers of each pool. It is not safe for concurrent use.
type Judge struct {
	// pending are the differences of workers and the boundary of their pool.
	pending map[string]*pending
}

// pending is a difference of a worker: it outlives the one that it was compared
// with, and a restart of its own agent.
type pending struct {
	pool, against string
	part          Part
	number        int
	runs          [2]uint32
	// counts says that it was measured again on both sides.
	counts  bool
	askedAt time.Time
	// blankAt is since when one side's boundary is there without what differed;
	// zero: it is not so.
	blankAt time.Time
}

// Judge says of each worker what is made of its boundary, and which probes
// should be measured again. It is called when a vector, a pool or outcomes have
// changed, and while asks are open. Verdicts are in the order of the workers.
func (j *Judge) Judge(now time.Time, workers []Worker) (verdicts []Verdict, asks []Ask) {
	former := j.pending
	j.pending = map[string]*pending{}
	pools := map[string][]int{}
	verdicts = make([]Verdict, len(workers))
	for i := range workers {
		w, v := &workers[i], &verdicts[i]
		*v = Verdict{Worker: w.Name, State: StateUnknown, Credit: true}
		p := former[w.Name]
		if p != nil && w.Pool != "" && p.pool != w.Pool {
			p = nil
		}
		if p != nil {
			j.pending[w.Name] = p
		}
		switch {
		case w.Pool != "" && w.Vector != nil:
			pools[w.Pool] = append(pools[w.Pool], i)
		case p != nil && p.counts:
			// Its agent has begun anew and tells nothing yet.
			v.Against = p.against
			v.differs(p.difference())
		}
	}
	for _, members := range pools {
		asks = append(asks, j.pool(now, workers, members, verdicts)...)
	}
	for i := range workers {
		judgeDeclared(&workers[i], &verdicts[i])
	}
	slices.SortFunc(asks, func(a, b Ask) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Part, b.Part), cmp.Compare(a.Number, b.Number))
	})
	return verdicts, slices.Compact(asks)
}

// pool judges the workers of one pool.
func (j *Judge) pool(now time.Time, workers []Worker, members []int, verdicts []Verdict) (asks []Ask) {
	groups := group(workers, members)
	if len(groups) == 0 {
		return nil
	}
	most := &workers[groups[0][0]]
	for n, g := range groups {
		for _, i := range g {
			v, w := &verdicts[i], &workers[i]
			v.Group, v.Against, v.State = n+1, most.Name, StateAgrees
			relation, d := Agree, Difference{}
			if n > 0 {
				relation, d = Compare(w.Vector, most.Vector)
			}
			p := j.pending[w.Name]
			switch {
			case relation == Differ && p != nil:
				p.blankAt = time.Time{}
			case relation != Differ && w != most && p.holds(now, w.Vector, most.Vector):
				relation, d = Differ, p.difference()
			}
			if relation != Differ {
				delete(j.pending, w.Name)
				if relation == Unknown {
					v.State = StateUnknown
				}
				continue
			}
			if p == nil {
				p = &pending{pool: w.Pool, part: d.Part, number: d.Number, runs: runsOf(w, most, d)}
				p.counts = d.Part == PartDeclared || d.Part == PartRule
				j.pending[w.Name] = p
			}
			if !p.counts && p.against != most.Name {
				p.runs, p.askedAt = runsOf(w, most, d), time.Time{}
			}
			p.against = most.Name
			asks = append(asks, p.update(now, w, most, d)...)
			v.Difference, v.State = d, StateMeasuring
			if p.counts {
				v.differs(d)
			}
		}
	}
	return asks
}

// differs is said of a worker whose difference counts.
func (v *Verdict) differs(d Difference) {
	v.State, v.Difference, v.Credit = StateDiffers, d, !d.CostsCredit()
	v.Why = fmt.Sprintf("boundary differs: %s: worker %s is not as %s", place(d), v.Worker, v.Against)
}

// difference is what differed when it was compared last.
func (p *pending) difference() Difference {
	return Difference{Part: p.part, Number: p.number, Token: -1}
}

// holds says that a difference that counts was not compared again, and goes on to
// count: a key that is changed on one side, and an agent that has begun to measure
// anew, take nothing back. A boundary that stays without what differed does.
// It is called when the two do not differ in anything else.
func (p *pending) holds(now time.Time, worker, most *Vector) bool {
	if p == nil || !p.counts {
		return false
	}
	if d := p.difference(); worker.lacks(d) || most.lacks(d) {
		if p.blankAt.IsZero() {
			p.blankAt = now
		}
		return now.Sub(p.blankAt) < holdBlank
	}
	p.blankAt = time.Time{}
	return worker.KeyID != most.KeyID && p.part != PartRule && p.part != PartDeclared
}

// lacks says that a boundary does not have, or not yet, what differed.
func (v *Vector) lacks(d Difference) bool {
	switch d.Part {
	case PartDeclared:
		return v.Declared == ""
	case PartRule:
		return v.Rule == ""
	}
	return v.Probe(d.Part, d.Number) == nil
}

// place is a difference with its token.
func place(d Difference) string {
	if d.Token < 0 {
		return d.String()
	}
	return fmt.Sprintf("%s, token %d", d, d.Token)
}

func runsOf(a, b *Worker, d Difference) (runs [2]uint32) {
	for i, w := range [2]*Worker{a, b} {
		if m := w.Vector.Probe(d.Part, d.Number); m != nil {
			runs[i] = m.Run
		}
	}
	return runs
}

// update looks whether both sides have measured again, and asks those that have
// not.
func (p *pending) update(now time.Time, a, b *Worker, d Difference) (asks []Ask) {
	runs := runsOf(a, b, d)
	if p.counts && d.CostsCredit() && !(Difference{Part: p.part}).CostsCredit() {
		// What counted so far took no credit; this would.
		*p = pending{pool: p.pool, against: p.against, part: d.Part, number: d.Number, runs: runs, counts: d.Part == PartDeclared}
	}
	if p.counts {
		p.part, p.number = d.Part, d.Number
		return nil
	}
	if p.part != d.Part || p.number != d.Number {
		p.part, p.number, p.runs, p.askedAt = d.Part, d.Number, runs, time.Time{}
	}
	again := [2]bool{runs[0] != p.runs[0], runs[1] != p.runs[1]}
	if p.counts = again[0] && again[1]; p.counts || !p.askedAt.IsZero() && now.Sub(p.askedAt) < askEvery {
		return nil
	}
	p.askedAt = now
	for i, w := range [2]*Worker{a, b} {
		if !again[i] {
			asks = append(asks, Ask{Worker: w.Name, Part: d.Part, Number: d.Number})
		}
	}
	return asks
}

// group sorts workers into those that agree: the largest group first, of equal
// ones that with the lowest name. The first of a group stands for it.
func group(workers []Worker, members []int) (groups [][]int) {
	members = slices.Clone(members)
	slices.SortFunc(members, func(a, b int) int {
		x, y := &workers[a], &workers[b]
		return cmp.Or(cmp.Compare(len(y.Vector.Probes), len(x.Vector.Probes)), cmp.Compare(x.Name, y.Name))
	})
	var others []int
	for _, i := range members {
		at := slices.IndexFunc(groups, func(g []int) bool {
			r, _ := Compare(workers[i].Vector, workers[g[0]].Vector)
			return r == Agree
		})
		switch {
		case at >= 0:
			groups[at] = append(groups[at], i)
		case len(groups) < maxGroups:
			groups = append(groups, []int{i})
		default:
			others = append(others, i)
		}
	}
	slices.SortStableFunc(groups, func(a, b []int) int {
		return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(workers[a[0]].Name, workers[b[0]].Name))
	})
	if len(others) > 0 {
		groups = append(groups, others)
	}
	return groups
}

// judgeDeclared weighs a declared boundary against what engines really reused.
func judgeDeclared(w *Worker, v *Verdict) {
	if w.Vector == nil || w.Vector.Declared == "" || v.State == StateDiffers || v.State == StateMeasuring {
		return
	}
	switch {
	case w.Outcomes < leastOutcomes:
		v.State = StateDeclared
	case w.FoundRatio < revokedBelow:
		v.State, v.Credit, v.Difference = StateRevoked, false, Difference{Part: PartDeclared, Token: -1}
		v.Why = fmt.Sprintf("boundary differs: declared boundary revoked: the engine found %.0f %% of the reuse that was expected", 100*w.FoundRatio)
	case w.FoundRatio >= confirmedFrom:
		v.State = StateConfirmed
	default:
		v.State = StateDeclared
	}
}
