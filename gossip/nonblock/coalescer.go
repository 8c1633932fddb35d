package nonblock

import (
	"errors"
	"fmt"
	"time"
)

// What a [Coalescer] does by default.
const (
	defaultPeriod = 10 * time.Millisecond
	defaultBegin  = 250 // reads per second
	defaultEnd    = 150
)

// CoalescerOptions configures a [Coalescer]. Zero values are the defaults.
type CoalescerOptions struct {
	// Period is the time between two ticks, by which what is read may be late.
	// Default 10 ms, at most 1 s.
	Period time.Duration
	// BeginReadsPerSec is the rate of reads, of all connections together, above
	// which they wait for ticks, EndReadsPerSec the rate below which they do no
	// more. Only reads that brought something count; on ticks a connection has at
	// most one each. Defaults 250 and 150.
	BeginReadsPerSec, EndReadsPerSec float64
}

// withDefaults checks the options and fills in what is not set.
func (o CoalescerOptions) withDefaults() (CoalescerOptions, error) {
	const most = time.Second
	if o.Period < 0 || o.Period > most {
		return o, fmt.Errorf("nonblock: Period is %v: must be positive and at most %v, or 0 for the default %v", o.Period, most, defaultPeriod)
	}
	if o.Period == 0 {
		o.Period = defaultPeriod
	}
	if !(o.BeginReadsPerSec >= 0 && o.EndReadsPerSec >= 0) {
		return o, errors.New("nonblock: BeginReadsPerSec and EndReadsPerSec must not be negative")
	}
	if o.BeginReadsPerSec == 0 && o.EndReadsPerSec == 0 {
		o.BeginReadsPerSec, o.EndReadsPerSec = defaultBegin, defaultEnd
	}
	if o.EndReadsPerSec > o.BeginReadsPerSec {
		return o, fmt.Errorf("nonblock: EndReadsPerSec %v is above BeginReadsPerSec %v", o.EndReadsPerSec, o.BeginReadsPerSec)
	}
	return o, nil
}
