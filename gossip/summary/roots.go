package summary

import (
	"cmp"
	"slices"

	"waypost/gossip/prefix"
)

// HotRoots returns up to n of the prefixes that most of what was used last
// begins with, hottest first, under the primary cluster key: for each beginning
// the stretch up to where prompts part, down to a checkpoint where there is one.
func (e *Encoder) HotRoots(n int) []Root {
	heat, order := append(e.heat[:0], make([]uint64, len(e.runs))...), e.order[:0]
	for i := range e.runs {
		if e.runs[i].end > e.runs[i].start {
			heat[i] = e.runs[i].touched
			order = append(order, uint32(i))
		}
	}
	slices.SortFunc(order, func(a, b uint32) int { return cmp.Compare(e.runs[b].start, e.runs[a].start) })
	roots := order[:0]
	for _, i := range order { // deep ones first: a run's heat is whole when it is reached
		if p := e.runs[i].parent; p != 0 {
			heat[p] = max(heat[p], heat[i])
		} else {
			roots = append(roots, i)
		}
	}
	e.heat, e.order = heat, order
	slices.SortFunc(roots, func(a, b uint32) int { return cmp.Compare(heat[b], heat[a]) })
	out := make([]Root, 0, min(n, len(roots)))
	for _, i := range roots[:min(n, len(roots))] {
		out = append(out, e.rootOf(&e.runs[i]))
	}
	return out
}

// rootOf names a run that begins a prompt up to its first fork.
func (e *Encoder) rootOf(r *grown) Root {
	depth, block := r.end, r.tip
	for c := r.first; c != 0; c = e.runs[c].next {
		if s := e.runs[c].start; s < depth {
			depth, block = s, e.runs[c].attach
		}
	}
	if n := depth / prefix.ChunkTokens; n > 0 {
		return Root{e.name(&e.told[0], r.domain, r.chains[n-1], n*prefix.ChunkTokens), n * prefix.ChunkTokens}
	}
	return Root{e.name(&e.told[0], r.domain, e.blocks.PointOf(block), depth), depth}
}
