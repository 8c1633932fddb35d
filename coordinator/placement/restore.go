package placement

import "github.com/zeebo/xxh3"

// Restored completes a record that was read back from where it was kept: what
// is derived from its fields is not kept with them. It reports false if the
// record lacks what every decision has.
func (r *Record) Restored() bool {
	whole := true
	for i := range r.Situation.Sources {
		whole = r.Situation.Sources[i].Worker.restored() && whole
	}
	for i := range r.Candidates {
		c := &r.Candidates[i]
		whole = c.Worker.restored() && whole
		for k := range c.Partners {
			whole = c.Partners[k].Worker.restored() && whole
		}
	}
	return whole
}

func (w *Worker) restored() bool {
	if w == nil || w.Steps.BudgetTokens() < 1 {
		return false // without steps nothing can be priced
	}
	w.nameHash = xxh3.HashString(w.Name)
	return true
}
