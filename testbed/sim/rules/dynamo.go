package rules

import (
	"math/rand/v2"

	"waypost/testbed/sim/prompt"
)

// Dynamo is the selector of NVIDIA Dynamo 1.6, in blocks:
//
//	S · max(0, (active prefill tokens + prompt)/block − overlap)
//	  + distinct prompt blocks of the worker's active requests with this one,
//	    and one more per request for its partial block
//
// Prefill tokens leave at the first token, blocks at the end. The smallest
// cost wins, ties are random. S is prefill_load_scale: 1 by default, 32 in
// NVIDIA's own tuning.
type Dynamo struct {
	books
	scale  float64
	blocks []prompt.Counts
}

// NewDynamo makes the selector with a prefill_load_scale.
func NewDynamo(scale float64, workers int, cache CacheView, rng *rand.Rand) *Dynamo {
	d := &Dynamo{books: newBooks(workers, cache, rng), scale: scale}
	for range workers {
		d.blocks = append(d.blocks, prompt.Counts{})
	}
	return d
}

// Place implements Router.
func (d *Dynamo) Place(_ float64, q Query) int {
	p := q.Prompt
	w := least(d.rng, len(d.workers), func(w int) float64 {
		a := &d.workers[w]
		prefill := float64(a.prefillTokens+p.Tokens)/prompt.BlockTokens - float64(d.cache.Depth(w, p))
		fresh := len(p.Blocks) - d.blocks[w].Depth(p, 0)
		return d.scale*max(prefill, 0) + float64(len(d.blocks[w])+fresh+a.requests+1)
	})
	d.enter(w, q, d.uncached(w, p))
	d.blocks[w].Add(p)
	return w
}

// Done implements Router.
func (d *Dynamo) Done(_ float64, id int, _ float64, _ int) {
	if e, ok := d.close(id); ok {
		d.blocks[e.worker].Drop(e.prompt)
	}
}
