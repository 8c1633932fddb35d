package queue

import (
	"math"
	"time"
)

// maxTracedBlocks bounds the blocks whose age is followed.
const maxTracedBlocks = 4096

// eviction learns the age that cached blocks reach, from a sample of them: it
// is what the trust in an old view of the cache fades with.
type eviction struct {
	stored map[uint64]float64 // hash → stored ms
	mask   uint64             // a block is traced if its hash has none of these bits
	age    float64            // of evicted blocks, a moving mean
	lastMs float64            // newest eviction of a traced block; +Inf: none since a restore
	any    bool
}

// ageMs is the age that blocks reach; NaN: nothing was evicted yet. A cache
// that has evicted nothing for longer than that does not turn over that fast
// any more.
func (v *eviction) ageMs(nowMs float64) float64 {
	if !v.any {
		return math.NaN()
	}
	return max(v.age, nowMs-v.lastMs)
}

// learnt is the learnt age; nil: nothing was evicted yet. restore starts from
// it.
func (v *eviction) learnt() *float64 {
	if !v.any {
		return nil
	}
	age := v.age
	return &age
}

func (v *eviction) restore(ageMs float64) { v.age, v.lastMs, v.any = ageMs, math.Inf(1), true }

// mix spreads the bits of an engine's hash.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	return h ^ h>>33
}

func (v *eviction) store(atMs float64, hashes []uint64) {
	if v.stored == nil {
		v.stored = map[uint64]float64{}
	}
	for _, h := range hashes {
		if mix(h)&v.mask != 0 {
			continue
		}
		v.stored[h] = atMs
		if len(v.stored) > maxTracedBlocks {
			v.mask = v.mask<<1 | 1
			for other := range v.stored {
				if mix(other)&v.mask != 0 {
					delete(v.stored, other)
				}
			}
		}
	}
}

func (v *eviction) remove(atMs float64, hashes []uint64) {
	for _, h := range hashes {
		if mix(h)&v.mask != 0 {
			continue
		}
		at, traced := v.stored[h]
		if !traced {
			continue
		}
		delete(v.stored, h)
		if math.IsInf(v.lastMs, 1) || atMs > v.lastMs {
			v.lastMs = atMs
		}
		age := max(atMs-at, 0)
		if !v.any {
			v.age, v.lastMs, v.any = age, atMs, true
			continue
		}
		v.age += (age - v.age) * perRequest
	}
}

// BlocksStored tells the engine's hashes of stored blocks.
func (e *Estimator) BlocksStored(at time.Time, hashes []uint64) {
	e.eviction.store(e.ms(at), hashes)
}

// BlocksRemoved tells the engine's hashes of removed blocks: their age is the
// worker's eviction age.
func (e *Estimator) BlocksRemoved(at time.Time, hashes []uint64) {
	e.eviction.remove(e.ms(at), hashes)
}

// CacheCleared tells that all blocks went at once, which says nothing of their
// age.
func (e *Estimator) CacheCleared() { clear(e.eviction.stored) }
