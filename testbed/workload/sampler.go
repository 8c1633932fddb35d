package workload

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Sampling says how conversations are drawn from a trace.
type Sampling struct {
	Shape
	// Seed decides everything that is drawn.
	Seed uint64
	// RequestsPerSecond is the mean rate of arrivals, all turns counted.
	RequestsPerSecond float64
	// Duration is the length of the workload.
	Duration time.Duration
	// Speedup divides the pauses between the turns of a conversation; default 1.
	Speedup float64
}

const maxSampled = 1 << 20

func (o Sampling) validate() error {
	if !(o.RequestsPerSecond > 0) || o.Duration <= 0 || o.RequestsPerSecond*o.Duration.Seconds() > maxSampled {
		return fmt.Errorf("%w: %v requests/s for %v: want more than 0, and at most %d requests", ErrOptions, o.RequestsPerSecond, o.Duration, maxSampled)
	}
	if !(o.Speedup > 0 && o.Speedup <= 1e6) {
		return fmt.Errorf("%w: Speedup is %v: want more than 0, at most 1e6", ErrOptions, o.Speedup)
	}
	return nil
}

// conversation is the turns of one, as indices into the trace.
type conversation struct {
	turns []int
	// offsetsMs are the turns' times from the first.
	offsetsMs []float64
}

// Conversations draws whole conversations of the trace at random and lets them
// begin at random times. Each drawing is a conversation of its own: it shares
// with others what conversations of the trace share, and nothing more. The
// workload is in its steady state from the start: conversations that began
// before it take part with their later turns.
func (t *Trace) Conversations(o Sampling) ([]Request, error) {
	shape, err := o.Shape.withDefaults()
	if err != nil {
		return nil, err
	}
	if o.Speedup == 0 {
		o.Speedup = 1
	}
	if err := o.validate(); err != nil {
		return nil, err
	}
	rng := rand.New(rand.NewPCG(o.Seed, 2))
	list, shared := t.group(rng, o.Speedup)
	longest := 0.0
	for _, c := range list {
		longest = max(longest, c.offsetsMs[len(c.offsetsMs)-1])
	}
	endMs := float64(o.Duration) / float64(time.Millisecond)
	startsPerMs := o.RequestsPerSecond / 1000 * float64(len(list)) / float64(len(t.Requests))
	var out []Request
	for at, copies := -longest, uint64(0); ; copies++ {
		at += rng.ExpFloat64() / startsPerMs
		if at >= endMs {
			break
		}
		c := list[rng.IntN(len(list))]
		for turn, i := range c.turns {
			arrival := at + c.offsetsMs[turn]
			if arrival < 0 || arrival >= endMs {
				continue
			}
			q := t.Requests[i]
			p, ok := shape.prompt(q.InputTokens, rename(q.Blocks, shared, copies))
			if !ok {
				continue
			}
			out = append(out, Request{ArrivalMs: arrival, Prompt: p, OutputTokens: shape.scaled(q.OutputTokens), Conversation: copies, Turn: turn})
		}
	}
	byArrival(out)
	return out, nil
}

// group finds the conversations, and the blocks that several of them share.
func (t *Trace) group(rng *rand.Rand, speedup float64) ([]conversation, map[uint64]bool) {
	var list []conversation
	index := make(map[int]int)
	owner := make(map[uint64]int)
	shared := make(map[uint64]bool)
	arrivals := t.spread(rng)
	for i, first := range t.conversations() {
		k, ok := index[first]
		if !ok {
			k = len(list)
			index[first] = k
			list = append(list, conversation{})
		}
		c := &list[k]
		c.turns = append(c.turns, i)
		c.offsetsMs = append(c.offsetsMs, (arrivals[i]-arrivals[c.turns[0]])/speedup)
		for _, b := range t.Requests[i].Blocks {
			if was, seen := owner[b]; seen && was != k {
				shared[b] = true
			}
			owner[b] = k
		}
	}
	return list, shared
}

// rename gives the blocks of a copy names of their own, except shared ones.
func rename(blocks []uint64, shared map[uint64]bool, copies uint64) []uint64 {
	out := make([]uint64, len(blocks))
	for i, b := range blocks {
		if shared[b] {
			out[i] = b
		} else {
			out[i] = mix(mix(b) + copies)
		}
	}
	return out
}
