package placement

import (
	"iter"
	"math/bits"
	"slices"
)

// Held is how much of a prompt is held.
type Held struct {
	// Tokens is the deepest prefix that is known to be held; Unknown: that cannot
	// be said.
	Tokens int32
	// GPUTokens is how much of that is in GPU memory, HostTokens how much is
	// there or in host memory. They say what may be pulled.
	GPUTokens, HostTokens int32
	// LowerTokens is how many of Tokens, from the end, are not in GPU memory but
	// in the host's: they are read back at a price.
	LowerTokens int32
	// Predicted says that it comes from the prompt of a live claim.
	Predicted bool
}

// mostLower is more tokens than any match has in host memory.
const mostLower = 1<<30 - 1

// number stands for what a price sees of it. It is never 0, and the larger the
// more is held: what is Unknown is the least, since a price takes it as nothing.
func (h *Held) number() uint64 {
	number := uint64(uint32(h.Tokens-Unknown))<<32 | uint64(h.LowerTokens&mostLower)<<2 | 1
	if h.Predicted {
		number |= 2
	}
	return number
}

// Matches says which workers hold how much of a prompt, each worker once at most.
// Most prefixes have many holders of which few differ: it keeps sets of workers
// that hold the same. The zero value is nobody. One that is used again spares
// memory.
type Matches struct {
	groups []holders
	words  []uint64
}

// holders hold the same: the bits of words[from:to] stand for the workers from
// 64·firstWord on.
type holders struct {
	Held
	firstWord, from, to int
}

// Reset takes everybody out.
func (m *Matches) Reset() { m.groups, m.words = m.groups[:0], m.words[:0] }

// AddSet adds the workers of a bitmap, whose bits stand for the workers from
// 64·firstWord on; words are copied. No words are nobody.
func (m *Matches) AddSet(h Held, firstWord int, words []uint64) {
	if len(words) == 0 {
		return // Add takes it that a set has a last word
	}
	from := len(m.words)
	m.words = append(m.words, words...)
	m.groups = append(m.groups, holders{h, firstWord, from, len(m.words)})
}

// Add adds one worker.
func (m *Matches) Add(id WorkerID, h Held) {
	word := int(id / 64)
	// Ascending workers that hold the same need one set.
	if n := len(m.groups) - 1; n >= 0 {
		g := &m.groups[n]
		if last := g.firstWord + g.to - g.from - 1; g.Held == h && g.to == len(m.words) && (word == last || word == last+1) {
			if word > last {
				m.words = append(m.words, 0)
				g.to++
			}
			m.words[g.to-1] |= 1 << (id % 64)
			return
		}
	}
	m.words = append(m.words, 1<<(id%64))
	m.groups = append(m.groups, holders{h, word, len(m.words) - 1, len(m.words)})
}

// Remove takes a worker out; one that is not there is no mistake.
func (m *Matches) Remove(id WorkerID) {
	for g := range m.groups {
		if at := m.groups[g].from + int(id/64) - m.groups[g].firstWord; at >= m.groups[g].from && at < m.groups[g].to {
			m.words[at] &^= 1 << (id % 64)
		}
	}
}

// Adjust replaces what every worker holds by what change makes of it.
func (m *Matches) Adjust(change func(id WorkerID, h Held) Held) {
	for g := range len(m.groups) {
		old := m.groups[g]
		made := len(m.groups) // the sets that come out of this one
		for at := old.from; at < old.to; at++ {
			for word := m.words[at]; word != 0; word &= word - 1 {
				id := WorkerID(64*(old.firstWord+at-old.from) + bits.TrailingZeros64(word))
				if h := change(id, old.Held); h != old.Held {
					m.words[at] &^= 1 << (id % 64)
					m.move(&old, made, id, h)
				}
			}
		}
	}
}

// maxMade is in how many sets of its size a set falls apart; who differs from all
// of these is a set of one.
const maxMade = 8

// move adds a worker of a set to one of those made of it.
func (m *Matches) move(old *holders, made int, id WorkerID, h Held) {
	for g := made; g < len(m.groups) && g < made+maxMade; g++ {
		if to := &m.groups[g]; to.Held == h {
			m.words[to.from+int(id/64)-to.firstWord] |= 1 << (id % 64)
			return
		}
	}
	if len(m.groups) >= made+maxMade {
		m.Add(id, h)
		return
	}
	from := len(m.words)
	m.words = slices.Grow(m.words, old.to-old.from)[:from+old.to-old.from]
	clear(m.words[from:])
	m.words[from+int(id/64)-old.firstWord] |= 1 << (id % 64)
	m.groups = append(m.groups, holders{h, old.firstWord, from, len(m.words)})
}

// All yields every worker and what it holds.
func (m *Matches) All() iter.Seq2[WorkerID, Held] {
	return func(yield func(WorkerID, Held) bool) {
		for g := range m.groups {
			for id := range m.of(g) {
				if !yield(id, m.groups[g].Held) {
					return
				}
			}
		}
	}
}

// of yields the workers of a set in ascending order.
func (m *Matches) of(g int) iter.Seq[WorkerID] {
	return func(yield func(WorkerID) bool) {
		set := &m.groups[g]
		for i, word := range m.words[set.from:set.to] {
			for ; word != 0; word &= word - 1 {
				if !yield(WorkerID(64*(set.firstWord+i) + bits.TrailingZeros64(word))) {
					return
				}
			}
		}
	}
}

// Len is the number of workers.
func (m *Matches) Len() int {
	n := 0
	for g := range m.groups {
		n += m.size(g)
	}
	return n
}

func (m *Matches) size(g int) (n int) {
	for _, word := range m.words[m.groups[g].from:m.groups[g].to] {
		n += bits.OnesCount64(word)
	}
	return n
}

// DeepestTokens is the most that any worker is known to hold.
func (m *Matches) DeepestTokens() int {
	deepest := 0
	for g := range m.groups {
		if tokens := int(m.groups[g].Tokens); tokens > deepest && m.size(g) > 0 {
			deepest = tokens
		}
	}
	return deepest
}
