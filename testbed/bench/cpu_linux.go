package bench

import (
	"time"

	"golang.org/x/sys/unix"
)

// threadCPU is the processor time of the calling thread so far: on a shared
// machine the wall clock says little. Callers lock their goroutine to its thread.
func threadCPU() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return time.Duration(time.Now().UnixNano())
	}
	return time.Duration(t.Nano())
}
