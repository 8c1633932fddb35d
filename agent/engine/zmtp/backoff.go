package zmtp

import (
	"math/rand/v2"
	"time"
)

// backoff gives the pauses between attempts: doubling from min to max, each
// cut at random to between half and all of it, so that the agents of a fleet
// do not knock in step.
type backoff struct {
	min, max time.Duration
	rand     *rand.Rand
	current  time.Duration
}

func newBackoff(o *Options) backoff {
	return backoff{min: o.BackoffMin, max: o.BackoffMax, rand: o.Rand}
}

func (b *backoff) next() time.Duration {
	switch {
	case b.current == 0:
		b.current = b.min
	case b.current > b.max/2:
		b.current = b.max
	default:
		b.current *= 2
	}
	half := b.current / 2
	return half + time.Duration(b.rand.Int64N(int64(b.current-half)+1))
}

func (b *backoff) reset() { b.current = 0 }
