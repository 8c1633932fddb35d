package placement

import "github.com/zeebo/xxh3"

// Restored completes a record that was read back from where it was kept: what
// is derived from its fields is not kept with them.
func (r *Record) Restored() {
	for i := range r.Candidates {
		if w := r.Candidates[i].Worker; w != nil {
			w.nameHash = xxh3.HashString(w.Name)
		}
	}
}
