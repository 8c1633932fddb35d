package placement

import "slices"

// Record is a decision's inputs, enough to decide again: on another machine,
// later, or under another policy. It never holds prompts.
type Record struct {
	// Request, Policy and Situation are as they were.
	Request   Request
	Policy    Policy
	Situation Situation
	// Candidates are those kept, in their order.
	Candidates []Candidate
	// Survey is what all candidates said together, the kept ones and the
	// others.
	Survey Survey
}

// NewRecord keeps the inputs of a decision with at most keep candidates: the
// chosen, its rivals, and those with the smallest totals. Removing the others
// does not change what Redecide answers.
func NewRecord(req *Request, candidates []Candidate, policy *Policy, sit Situation, d *Decision, keep int) Record {
	r := Record{Request: *req, Policy: *policy, Situation: sit, Survey: d.Survey}
	r.Request.ExcludeWorkers = slices.Clone(req.ExcludeWorkers)
	r.Request.ExcludeProcesses = slices.Clone(req.ExcludeProcesses)
	r.Situation.Sources = slices.Clone(sit.Sources)
	if len(candidates) <= keep {
		r.Candidates = slices.Clone(candidates)
	} else {
		for _, i := range d.keepers(keep) {
			r.Candidates = append(r.Candidates, candidates[i])
		}
	}
	for i := range r.Candidates {
		r.Candidates[i].Paths = slices.Clone(r.Candidates[i].Paths)
		r.Candidates[i].Partners = slices.Clone(r.Candidates[i].Partners)
	}
	return r
}

// keepers are the indices of the candidates a record keeps, ascending.
func (d *Decision) keepers(keep int) []int {
	var kept []int
	add := func(i int) {
		if i >= 0 && !slices.Contains(kept, i) {
			kept = append(kept, i)
		}
	}
	add(d.Chosen)
	add(d.least)
	add(d.MostReuse)
	for _, i := range d.Fallbacks() {
		add(i)
	}
	byTotal := d.cheapest(keep)
	for _, i := range byTotal {
		if len(kept) >= keep {
			break
		}
		add(i)
	}
	slices.Sort(kept)
	return kept
}

// cheapest are the indices of the n smallest totals, smallest first.
func (d *Decision) cheapest(n int) []int {
	least := make([]int, 0, n+1)
	for i := range d.Terms {
		if len(least) == n && !(d.Terms[i].TotalMs < d.Terms[least[n-1]].TotalMs) {
			continue
		}
		at, _ := slices.BinarySearchFunc(least, i, func(a, b int) int {
			if d.Terms[a].TotalMs <= d.Terms[b].TotalMs {
				return -1
			}
			return 1
		})
		least = slices.Insert(least, at, i)
		least = least[:min(len(least), n)]
	}
	return least
}

// Ranked are the indices of all candidates as an explanation lists them:
// the chosen, then the placeable by total, then the others by total.
func (d *Decision) Ranked() []int {
	order := make([]int, len(d.Terms))
	for i := range order {
		order[i] = i
	}
	class := func(i int) int {
		switch {
		case i == d.Chosen:
			return 0
		case d.Terms[i].Placeable:
			return 1
		}
		return 2
	}
	slices.SortStableFunc(order, func(a, b int) int {
		if ca, cb := class(a), class(b); ca != cb {
			return ca - cb
		}
		switch ta, tb := d.Terms[a].TotalMs, d.Terms[b].TotalMs; {
		case ta < tb:
			return -1
		case ta > tb:
			return 1
		}
		return 0
	})
	return order
}

// Redecide takes the decision again from what was kept. With the recorded
// policy the choice is the recorded one.
func (r *Record) Redecide(d *Decision) error {
	if err := r.Request.Validate(); err != nil {
		return err
	}
	if err := r.Policy.Validate(); err != nil {
		return err
	}
	p := newPricer(&r.Request, &r.Policy, r.Situation)
	d.reset(len(r.Candidates))
	for i := range r.Candidates {
		p.price(&r.Candidates[i], &d.Terms[i])
	}
	d.Survey = r.Survey
	d.decide(&p, r.Candidates)
	return nil
}
