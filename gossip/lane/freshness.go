package lane

import (
	"math"
	"time"
)

const (
	// freshWindow is how far back the fastest frame may lie. Clocks that drift
	// apart by 100 ppm move by 6 ms in it.
	freshWindow  = 60 * time.Second
	freshBuckets = 6
	// maxLateness bounds the result, so that a sender with a broken clock yields
	// a very old frame and not a number that overflows.
	maxLateness = 24 * time.Hour
)

// Freshness tells how late frames of one session arrive. Both clocks are
// monotonic and start anywhere; their difference is unknown, but over a window
// of 60 s the smallest (receive − send) is taken for a frame that did not wait,
// and what a frame has above it is lateness. The zero value is ready to use.
type Freshness struct {
	minima [freshBuckets]int64 // smallest offset per bucket of time, relative to base
	filled [freshBuckets]bool
	slot   int64 // number of the newest bucket
	base   uint64
	began  bool
}

// Observe takes one frame in and returns its lateness, at least 0. Receive times
// must not run backwards.
func (f *Freshness) Observe(sentMonoNs uint64, receivedMonoNs int64) time.Duration {
	// The offset may lie anywhere in 64 bits; relative to the first one it is small.
	offset := uint64(receivedMonoNs) - sentMonoNs
	if !f.began {
		f.base, f.began = offset, true
		f.slot = receivedMonoNs / int64(freshWindow/freshBuckets)
	}
	relative := int64(offset - f.base)
	f.advance(receivedMonoNs / int64(freshWindow/freshBuckets))
	i := f.slot % freshBuckets
	if !f.filled[i] || relative < f.minima[i] {
		f.minima[i], f.filled[i] = relative, true
	}
	least := int64(math.MaxInt64)
	for j, ok := range f.filled {
		if ok {
			least = min(least, f.minima[j])
		}
	}
	late := uint64(relative) - uint64(least) // relative ≥ least, but they may lie far apart
	return time.Duration(min(late, uint64(maxLateness)))
}

// advance empties the buckets that time has passed over.
func (f *Freshness) advance(slot int64) {
	for n := 0; f.slot < slot && n < freshBuckets; n++ {
		f.slot++
		f.filled[f.slot%freshBuckets] = false
	}
	f.slot = max(f.slot, slot)
}
