package lane

import (
	"math/rand/v2"
	"time"
)

// backoff is the pause before the next dial: it doubles from least to most, with
// jitter between half and the whole, so that the lanes of a restarted
// coordinator do not come back in one instant.
type backoff struct {
	least, most time.Duration
	next        time.Duration
}

func (b *backoff) pause(rng *rand.Rand) time.Duration {
	if b.next < b.least {
		b.next = b.least
	}
	d := b.next
	b.next = min(2*b.next, b.most)
	return jitter(d, rng)
}

func (b *backoff) reset() { b.next = 0 }

// jitter returns a duration between half of d and d.
func jitter(d time.Duration, rng *rand.Rand) time.Duration {
	return d/2 + time.Duration(rng.Int64N(int64(d/2)+1))
}
