package nonblock

import (
	"errors"
	"fmt"
	"time"
)

// What a [Coalescer] does by default.
const (
	defaultPeriod = 20 * time.Millisecond
	defaultBegin  = 250 // reads per second
	// defaultEndShare is how many of the ticks on which it is read must bring
	// something to one connection that is alone, or to several together, for them to
	// go on.
	defaultEndShare = .6
)

// CoalescerOptions configures a [Coalescer]. Zero, it has the defaults.
type CoalescerOptions struct {
	// Period is the time between two ticks. Default 20 ms, at most 1 s.
	Period time.Duration
	// Every is how many ticks there are from one read of a connection of Conn to the
	// next, by which what is read may be late; one of ConnFirst is read on each.
	// Default 1, at most 100.
	Every int
	// BeginReadsPerSec is the rate of reads, of all connections together, above
	// which they wait for ticks, EndReadsPerSec the rate below which they do no
	// more. Only reads that brought something count; a connection of Conn has at most
	// one on every Every-th tick, so that EndReadsPerSec must be below the rate of
	// those. Defaults, if both are 0: 250 and three fifths of that rate. With
	// BeginReadsPerSec alone the ticks never end.
	BeginReadsPerSec, EndReadsPerSec float64
}

// withDefaults checks the options and fills in what is not set.
func (o CoalescerOptions) withDefaults() (CoalescerOptions, error) {
	const most = time.Second
	if o.Period < 0 || o.Period > most {
		return o, fmt.Errorf("nonblock: Period is %v: must be at most %v, or 0 for the default %v", o.Period, most, defaultPeriod)
	}
	if o.Period == 0 {
		o.Period = defaultPeriod
	}
	if o.Every < 0 || o.Every > 100 {
		return o, fmt.Errorf("nonblock: Every is %d: must be 1 to 100 ticks, or 0 for 1", o.Every)
	}
	o.Every = max(1, o.Every)
	mostReads := 1 / (o.Period.Seconds() * float64(o.Every)) // reads per second of a connection
	if !(o.BeginReadsPerSec >= 0 && o.EndReadsPerSec >= 0) {
		return o, errors.New("nonblock: BeginReadsPerSec and EndReadsPerSec must not be negative")
	}
	if o.BeginReadsPerSec == 0 && o.EndReadsPerSec == 0 {
		o.BeginReadsPerSec, o.EndReadsPerSec = defaultBegin, min(defaultBegin, defaultEndShare*mostReads)
	}
	if o.EndReadsPerSec >= mostReads {
		return o, fmt.Errorf("nonblock: EndReadsPerSec %v must be below the %v ticks a second on which one connection is read", o.EndReadsPerSec, mostReads)
	}
	if o.EndReadsPerSec > o.BeginReadsPerSec {
		return o, fmt.Errorf("nonblock: EndReadsPerSec %v is above BeginReadsPerSec %v", o.EndReadsPerSec, o.BeginReadsPerSec)
	}
	return o, nil
}
