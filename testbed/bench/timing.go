package bench

import (
	"math"
	"runtime"
	"runtime/debug"
	"slices"
	"time"
)

// quantiles are two quantiles of a repeated measurement, ns.
type quantiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

// A timing is repeated in windows and the best window is given, since whatever
// else the machine does can only slow it down; the peer's harness does the same.
const repetitions = 5

// timeFor calls do again and again for a while and times each call by the wall
// clock; i counts the calls.
func timeFor(window time.Duration, do func(i int)) quantiles {
	var took []int64
	for began := time.Now(); ; {
		from := time.Now()
		if from.Sub(began) > window && len(took) >= 100 {
			break
		}
		do(len(took))
		took = append(took, int64(time.Since(from)))
	}
	slices.Sort(took)
	return quantiles{P50: float64(took[(len(took)-1)/2]), P99: float64(took[(len(took)-1)*99/100])}
}

// best is the least of each quantile.
func best(list []quantiles) quantiles {
	out := list[0]
	for _, q := range list[1:] {
		out.P50, out.P99 = min(out.P50, q.P50), min(out.P99, q.P99)
	}
	return out
}

// bestOf repeats a timing.
func bestOf(window time.Duration, do func(i int)) quantiles {
	var list []quantiles
	for range repetitions {
		list = append(list, timeFor(window, do))
	}
	return best(list)
}

// heapBytes is what is reachable on the heap.
func heapBytes() int64 {
	// The second collection frees what the first one's finalizers held.
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// allocations is the number of heap allocations that do makes. What runs
// beside it can only add some: the least of several rounds counts, without a
// collection meanwhile, after which pools would be filled anew.
func allocations(do func()) uint64 {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	least := uint64(math.MaxUint64)
	for range repetitions {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		do()
		runtime.ReadMemStats(&after)
		least = min(least, after.Mallocs-before.Mallocs)
	}
	return least
}
