package placement

// LostBy says by what a candidate that could have been chosen lost: its own
// time beyond the limit, a budget it would miss, a tie, or the term in which
// it trailed the chosen most. It is empty for the chosen, and for all if
// nobody was chosen.
func (d *Decision) LostBy(i int) string {
	if d.Chosen < 0 || i == d.Chosen {
		return ""
	}
	t, chosen := &d.Terms[i], &d.Terms[d.Chosen]
	switch {
	case t.OverLimit && !chosen.OverLimit:
		return "own-time limit"
	case t.Missed != BudgetNone && chosen.Missed == BudgetNone:
		return t.Missed.String()
	case t.TotalMs <= chosen.TotalMs:
		return "tie"
	}
	name, _ := d.largest(t, chosen)
	if name == "start" {
		return "wait"
	}
	return name
}
