package bench

import (
	"time"

	"golang.org/x/sys/unix"
)

// threadCPU is the processor time of the calling thread so far: on a shared
// machine the wall clock says little. Callers lock their goroutine to its thread.
func threadCPU() time.Duration { return cpuClock(unix.CLOCK_THREAD_CPUTIME_ID) }

// processCPU is the processor time of all threads of this process so far.
func processCPU() time.Duration { return cpuClock(unix.CLOCK_PROCESS_CPUTIME_ID) }

func cpuClock(id int32) time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(id, &t); err != nil {
		return time.Duration(time.Now().UnixNano())
	}
	return time.Duration(t.Nano())
}
