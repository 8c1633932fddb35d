//go:build !linux

package bench

import "time"

var began = time.Now()

// threadCPU stands for the processor time of the thread; only the wall clock
// is at hand here.
func threadCPU() time.Duration { return time.Since(began) }

// processCPU stands for the processor time of the process.
func processCPU() time.Duration { return time.Since(began) }
