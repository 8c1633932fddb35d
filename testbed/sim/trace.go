package sim

import (
	"math/rand/v2"
	"slices"

	"waypost/testbed/sim/prompt"
	"waypost/testbed/workload"
)

// class says where a request comes from. Classes are the workload's, never a
// rule's.
type class uint8

const (
	classTrace class = iota
	classCrowd
)

// arrival is one request of a run.
type arrival struct {
	atMs         float64
	prompt       *prompt.Prompt
	outputTokens int
	class        class
}

// Mooncake's blocks of 512 tokens as the engine's blocks of 64.
const blocksPerID = workload.MooncakeBlockTokens / prompt.BlockTokens

// traceOptions says how a trace is replayed.
type traceOptions struct {
	// spread moves request k of n with equal time stamps by k/n of the way to
	// the next time stamp; without it they come at once.
	spread bool
	// speedup divides all times.
	speedup float64
	// unique gives every request blocks of its own.
	unique bool
	// jitterMs moves every arrival by up to so much, drawn from seed.
	jitterMs float64
	seed     uint64
	crowd    crowd
}

// crowd is a sudden popular prefix over the trace.
type crowd struct {
	perSec                              float64
	seconds                             float64
	startMs                             float64
	prefixTokens, ownTokens, outputToks int
}

// replay makes the arrivals of a trace, in order of time.
func replay(t *workload.Trace, o traceOptions) ([]arrival, error) {
	if !(o.speedup > 0 && o.speedup <= 1e6) {
		return nil, wrong("speedup", "%v is not above 0 and at most 1e6", o.speedup)
	}
	rng := rand.New(rand.NewPCG(o.seed, 1))
	at := instants(t, o.spread)
	list := make([]arrival, len(t.Requests))
	ids, next := map[uint64]uint32{}, uint32(0)
	name := func(id uint64) uint32 {
		n, known := ids[id]
		if !known || o.unique {
			n = next
			next++
			ids[id] = n
		}
		return n
	}
	for i := range t.Requests {
		q := &t.Requests[i]
		p := &prompt.Prompt{Tokens: q.InputTokens, Blocks: make([]uint32, 0, q.InputTokens/prompt.BlockTokens)}
		for k, id := range q.Blocks {
			n := name(id)
			for j := range min(blocksPerID, q.InputTokens/prompt.BlockTokens-k*blocksPerID) {
				p.Blocks = append(p.Blocks, n*blocksPerID+uint32(j)+1)
			}
		}
		list[i] = arrival{
			atMs: at[i]/o.speedup + rng.Float64()*o.jitterMs, prompt: p,
			outputTokens: max(q.OutputTokens, 1),
		}
	}
	list = append(list, o.crowd.arrivals(rng, (next+1)*blocksPerID)...)
	slices.SortStableFunc(list, func(a, b arrival) int {
		switch {
		case a.atMs < b.atMs:
			return -1
		case a.atMs > b.atMs:
			return 1
		}
		return 0
	})
	return list, nil
}

// instants are the arrival times of a trace before the speed-up, in ms.
func instants(t *workload.Trace, spread bool) []float64 {
	at := make([]float64, len(t.Requests))
	for from := 0; from < len(at); {
		stamp := t.Requests[from].TimestampMs
		to := from + 1
		for to < len(at) && t.Requests[to].TimestampMs == stamp {
			to++
		}
		span := 0.0
		if spread {
			span = workload.MooncakeGroupMs
			if to < len(at) {
				span = float64(t.Requests[to].TimestampMs - stamp)
			}
		}
		for i := from; i < to; i++ {
			at[i] = float64(stamp) + span*float64(i-from)/float64(to-from)
		}
		from = to
	}
	return at
}

// arrivals are the crowd's requests. Their blocks are named from first.
func (c *crowd) arrivals(rng *rand.Rand, first uint32) []arrival {
	if !(c.perSec > 0) {
		return nil
	}
	shared := make([]uint32, c.prefixTokens/prompt.BlockTokens)
	for i := range shared {
		shared[i] = first + uint32(i)
	}
	next := first + uint32(len(shared))
	tokens := c.prefixTokens + c.ownTokens
	var list []arrival
	for ms := 0.0; ; {
		ms += rng.ExpFloat64() * 1000 / c.perSec
		if ms >= c.seconds*1000 {
			return list
		}
		p := &prompt.Prompt{Tokens: tokens, Blocks: slices.Clone(shared)}
		for len(p.Blocks) < tokens/prompt.BlockTokens {
			p.Blocks = append(p.Blocks, next)
			next++
		}
		list = append(list, arrival{
			atMs: c.startMs + ms, prompt: p, outputTokens: c.outputToks, class: classCrowd,
		})
	}
}
