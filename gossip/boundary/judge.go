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
	// Declared boundaries are believed or revoked after so many outcomes, by the
	// share of the expected reuse that was found.
	leastOutcomes = 8
	confirmedFrom = .75
	revokedBelow  = .25
)

// Judge compares the workers of each pool. It is not safe for concurrent use.
type Judge struct {
	// pending are the differences of a worker and the one it is compared with.
	pending map[[2]string]*pending
}

type pending struct {
	part   Part
	number int
	runs   [2]uint32
	// counts says that it was measured again on both sides.
	counts  bool
	askedAt time.Time
}

// Judge says of each worker what is made of its boundary, and which probes
// should be measured again. It is called when a vector, a pool or outcomes have
// changed, and while asks are open. Verdicts are in the order of the workers.
func (j *Judge) Judge(now time.Time, workers []Worker) (verdicts []Verdict, asks []Ask) {
	if j.pending == nil {
		j.pending = map[[2]string]*pending{}
	}
	pools := map[string][]int{}
	verdicts = make([]Verdict, len(workers))
	for i := range workers {
		verdicts[i] = Verdict{Worker: workers[i].Name, State: StateUnknown, Credit: true}
		if workers[i].Pool != "" && workers[i].Vector != nil {
			pools[workers[i].Pool] = append(pools[workers[i].Pool], i)
		}
	}
	live := map[[2]string]bool{}
	for _, members := range pools {
		asks = append(asks, j.pool(now, workers, members, verdicts, live)...)
	}
	for pair := range j.pending {
		if !live[pair] {
			delete(j.pending, pair)
		}
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
func (j *Judge) pool(now time.Time, workers []Worker, members []int, verdicts []Verdict, live map[[2]string]bool) (asks []Ask) {
	groups := group(workers, members)
	if len(groups) == 0 {
		return nil
	}
	most := &workers[groups[0][0]]
	for n, g := range groups {
		for _, i := range g {
			v := &verdicts[i]
			v.Group, v.Against, v.State = n+1, most.Name, StateAgrees
			if n == 0 {
				continue
			}
			w := &workers[i]
			relation, d := Compare(w.Vector, most.Vector)
			pair := [2]string{w.Name, most.Name}
			p := j.pending[pair]
			if relation == Unknown && p != nil && p.counts {
				// A key that is changed on one side takes nothing back.
				relation, d = Differ, Difference{Part: p.part, Number: p.number, Token: -1}
			}
			if relation != Differ {
				v.State = StateUnknown
				continue
			}
			live[pair] = true
			if p == nil {
				p = &pending{part: d.Part, number: d.Number, runs: runsOf(w, most, d)}
				p.counts = d.Part == PartDeclared || d.Part == PartRule
				j.pending[pair] = p
			}
			asks = append(asks, p.update(now, w, most, d)...)
			v.Difference, v.State = d, StateMeasuring
			if p.counts {
				v.State, v.Credit = StateDiffers, !d.CostsCredit()
				v.Why = fmt.Sprintf("boundary differs: %s: worker %s is not as %s", place(d), w.Name, most.Name)
			}
		}
	}
	return asks
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
		*p = pending{part: d.Part, number: d.Number, runs: runs, counts: d.Part == PartDeclared}
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
