package emulator

import (
	"errors"
	"slices"
	"sync"
	"time"

	"waypost/testbed/emulator/core"
)

var errEngineDied = errors.New("the engine died")

// answer collects what a rank generates for one request and hands it to the
// HTTP handler: the first token at once, then every interval of them, and the
// last; or all together if the answer is not streamed. How it is cut does not
// depend on how fast the handler is.
type answer struct {
	index    int       // of the choice
	arrived  time.Time // at the API
	streamed bool
	interval int
	signal   chan struct{} // shared by the choices of one request

	mu     sync.Mutex
	tokens []uint32
	taken  int
	finish core.Finish
	failed bool
	cached int
}

// put adds a token.
func (a *answer) put(o *core.Output) {
	a.mu.Lock()
	a.tokens = append(a.tokens, o.Token)
	a.finish = o.Finish
	a.cached = o.Sequence.CachedTokens()
	show := a.nextLocked() > 0
	a.mu.Unlock()
	if show {
		a.poke()
	}
}

// nextLocked is the size of the next portion, 0 if it is not complete.
func (a *answer) nextLocked() int {
	waiting := len(a.tokens) - a.taken
	if !a.streamed {
		if a.finish == "" {
			return 0
		}
		return waiting
	}
	size := a.interval
	if a.taken == 0 {
		size = 1
	}
	if waiting >= size {
		return size
	}
	if a.finish != "" {
		return waiting
	}
	return 0
}

// fail ends the answer without a finish: the engine is gone or refused.
func (a *answer) fail() {
	a.mu.Lock()
	a.failed = true
	a.mu.Unlock()
	a.poke()
}

func (a *answer) poke() {
	select {
	case a.signal <- struct{}{}:
	default:
	}
}

// portion is what is new of an answer.
type portion struct {
	tokens []uint32
	finish core.Finish
	cached int
}

// take returns the next portion, and whether there is one. It fails if the
// engine did and nothing is left.
func (a *answer) take() (p portion, ok bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.nextLocked()
	if n == 0 {
		if a.failed {
			return portion{}, false, errEngineDied
		}
		return portion{}, false, nil
	}
	p = portion{tokens: slices.Clone(a.tokens[a.taken : a.taken+n]), cached: a.cached}
	if a.taken += n; a.taken == len(a.tokens) {
		p.finish = a.finish
	}
	return p, true, nil
}
