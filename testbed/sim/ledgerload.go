package sim

import (
	"math"
	"math/rand/v2"

	"waypost/testbed/sim/prompt"
)

// fate says what becomes of a request besides being served.
type fate uint8

const (
	// The zero value: it is served.
	_ fate = iota
	// fateForeign: it comes to a worker that nobody placed it on.
	fateForeign
	// fateNever: it is placed and never sent.
	fateNever
	// fateCancelled: its caller gives up.
	fateCancelled
)

// ledgerArrival is one request of the ledger's workload.
type ledgerArrival struct {
	atMs         float64
	prompt       *prompt.Prompt
	outputTokens int
	fate         fate
	// foreignTo is where a foreign one goes; giveUpMs is how long a cancelled one
	// waits; sizeError multiplies what its claim says.
	foreignTo int
	giveUpMs  float64
	sizeError float64
}

// ledgerLoad is the ledger's workload: prompts of lognormal length, half of
// the requests continue a conversation.
type ledgerLoad struct {
	perSec, seconds               float64
	meanTokens, turnTokens, sigma float64
	meanOutput                    float64
	foreign, never, cancelled     float64
	sizeSigma                     float64
	workers                       int
}

// Bounds of the workload.
const (
	minPromptTokens = 32
	maxPromptTokens = 60_000
	// maxConversations is the number of conversations that may be continued.
	maxConversations = 1000
	// thinkMs is how long after a turn the next one comes at the earliest.
	thinkMs = 4_000
)

type conversation struct {
	blocks []uint32
	tokens int
	lastMs float64
}

// arrivals draws the workload.
func (l *ledgerLoad) arrivals(seed uint64) []ledgerArrival {
	rng := rand.New(rand.NewPCG(seed, 5))
	lognormal := func(mean float64) int {
		v := mean * math.Exp(l.sigma*rng.NormFloat64()-l.sigma*l.sigma/2)
		return int(min(max(v, minPromptTokens), maxPromptTokens))
	}
	var list []ledgerArrival
	var open []*conversation
	name := uint32(0)
	grow := func(c *conversation, tokens int) {
		c.tokens += tokens
		for len(c.blocks) < c.tokens/prompt.BlockTokens {
			name++
			c.blocks = append(c.blocks, name)
		}
	}
	for ms := 0.0; ; {
		ms += rng.ExpFloat64() * 1000 / l.perSec
		if ms >= l.seconds*1000 {
			return list
		}
		a := ledgerArrival{atMs: ms, sizeError: math.Exp(l.sizeSigma * rng.NormFloat64())}
		switch draw := rng.Float64(); {
		case draw < l.foreign:
			a.fate, a.foreignTo = fateForeign, rng.IntN(l.workers)
		case draw < l.foreign+l.never:
			a.fate = fateNever
		case draw < l.foreign+l.never+l.cancelled:
			a.fate, a.giveUpMs = fateCancelled, rng.Float64()*2000
		}
		a.outputTokens = 1 + int(rng.ExpFloat64()*(l.meanOutput-1))
		var c *conversation
		if rng.Float64() < .5 && len(open) > 0 && a.fate != fateForeign {
			if o := open[rng.IntN(len(open))]; ms-o.lastMs >= thinkMs {
				c = o
			}
		}
		switch {
		case c != nil:
			grow(c, lognormal(l.turnTokens))
		default:
			c = &conversation{}
			grow(c, lognormal(l.meanTokens))
			switch {
			case a.fate == fateForeign:
			case len(open) < maxConversations:
				open = append(open, c)
			default:
				open[rng.IntN(len(open))] = c
			}
		}
		a.prompt = &prompt.Prompt{Tokens: c.tokens, Blocks: c.blocks[:len(c.blocks):len(c.blocks)]}
		c.lastMs = ms
		if c.tokens > maxPromptTokens {
			c.lastMs = math.Inf(1) // it is over
		}
		list = append(list, a)
	}
}
