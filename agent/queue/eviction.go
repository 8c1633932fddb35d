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
	age    float64            // NaN: nothing was evicted yet
	any    bool
}

func (v *eviction) ageMs() float64 {
	if !v.any {
		return math.NaN()
	}
	return v.age
}

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
		age := max(atMs-at, 0)
		if !v.any {
			v.age, v.any = age, true
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
