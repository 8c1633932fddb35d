//go:build unix

package daemon

import (
	"syscall"
	"time"
)

// ProcessCPU is the processor time that all threads of this process took so far;
// false: the system does not tell.
func ProcessCPU() (time.Duration, bool) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0, false
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), true
}
