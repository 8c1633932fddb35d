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
		r.Candidates = make([]Candidate, 0, keep)
		// Room for the usual number of candidates and those with the least totals.
		var room [2][72]int
		for _, i := range d.keepers(room[0][:0], room[1][:0], keep) {
			r.Candidates = append(r.Candidates, candidates[i])
		}
	}
	for i := range r.Candidates {
		r.Candidates[i].Paths = slices.Clone(r.Candidates[i].Paths)
		r.Candidates[i].Partners = slices.Clone(r.Candidates[i].Partners)
	}
	return r
}

// keepers appends to kept, which is empty, the indices of the candidates a record
// keeps, ascending; least is memory for the search.
func (d *Decision) keepers(kept, least []int, keep int) []int {
	add := func(i int) {
		if i >= 0 && !slices.Contains(kept, i) {
			kept = append(kept, i)
		}
	}
	add(d.Chosen)
	add(d.least)
	// Of a refusal: whoever could have been chosen, or would be soonest.
	add(d.soonest)
	add(d.cheapestPlaceable())
	add(d.MostReuse)
	for _, i := range d.Fallbacks() {
		add(i)
	}
	byTotal := d.cheapest(least, keep)
	for _, i := range byTotal {
		if len(kept) >= keep {
			break
		}
		add(i)
	}
	slices.Sort(kept)
	return kept
}

// cheapestPlaceable is the index of the smallest total of those that could be
// chosen; -1: nobody could.
func (d *Decision) cheapestPlaceable() int {
	least := -1
	for i := range d.Terms {
		if d.Terms[i].Placeable && (least < 0 || d.Terms[i].TotalMs < d.Terms[least].TotalMs) {
			least = i
		}
	}
	return least
}

// cheapest appends to least, which is empty, the indices of the n smallest
// totals, smallest first.
func (d *Decision) cheapest(least []int, n int) []int {
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

// OutputSource says where the expected length of the answer came from.
func (r *Record) OutputSource() OutputSource {
	p := newPricer(&r.Request, &r.Policy, r.Situation)
	_, source := expectedOutput(&r.Request, p.meanOutputTokens, r.Situation.MeanOutputTokens >= 1)
	return source
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
	p.meanLive = r.Survey.MeanLive
	d.reset(len(r.Candidates))
	for i := range r.Candidates {
		p.price(&r.Candidates[i], &d.Terms[i])
	}
	d.Survey = r.Survey
	d.decide(&p, r.Candidates)
	return nil
}
