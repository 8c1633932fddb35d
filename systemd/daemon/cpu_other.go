//go:build !unix

package daemon

import "time"

// ProcessCPU is the processor time that all threads of this process took so far;
// false: the system does not tell.
func ProcessCPU() (time.Duration, bool) { return 0, false }
