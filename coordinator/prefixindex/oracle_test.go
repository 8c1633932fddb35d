package prefixindex_test

import (
	"hash/fnv"
	"math/rand/v2"
)

// This file is the oracle of whole streams: what a worker holds, as a plain set
// of texts built from the operations alone. It uses nothing of Waypost.

const oracleBlock = 16 // tokens

// plainText is a prefix of some prompt, four bytes a token.
type plainText string

func textOf(tokens []uint32) plainText {
	b := make([]byte, 0, 4*len(tokens))
	for _, t := range tokens {
		b = append(b, byte(t), byte(t>>8), byte(t>>16), byte(t>>24))
	}
	return plainText(b)
}

func (t plainText) len() int                { return len(t) / 4 }
func (t plainText) first(n int) plainText   { return t[:4*n] }
func (t plainText) token(i int) (id uint32) { return uint32(t[4*i]) | uint32(t[4*i+1])<<8 }

// hash is the engine's name of the block that ends a text.
func (t plainText) hash() uint64 {
	h := fnv.New64a()
	h.Write([]byte(t))
	return h.Sum64() | 1
}

// holdings are the texts that end with a block which a worker holds.
type holdings map[plainText]bool

// reusable is how many tokens of a prompt a worker can reuse: whole blocks, none
// of them missing.
func (h holdings) reusable(prompt plainText) (n int) {
	for n+oracleBlock <= prompt.len() && h[prompt.first(n+oracleBlock)] {
		n += oracleBlock
	}
	return n
}

// forks says how many held texts go on behind a text by a block.
func (h holdings) forks(t plainText) (n int) {
	for other := range h {
		if other.len() == t.len()+oracleBlock && other.first(t.len()) == t {
			n++
		}
	}
	return n
}

// operation is one change of what a worker holds: the blocks that end some texts
// are stored in this order, or removed.
type operation struct {
	worker int
	stores []plainText
	drops  []plainText
}

// author draws operations and keeps what they come to.
type author struct {
	rng     *rand.Rand
	holds   []holdings
	prompts []plainText // written so far, the latest ones
}

func newAuthor(seed uint64, workers int) *author {
	a := &author{rng: rand.New(rand.NewPCG(seed, 77))}
	for range workers {
		a.holds = append(a.holds, holdings{})
	}
	return a
}

const (
	promptsKept  = 40
	promptBlocks = 100 // at most, of fresh text
	heldBlocks   = 400 // a worker evicts beyond it
)

// write makes a prompt: one that parts from an earlier one somewhere, or a new one.
func (a *author) write() plainText {
	var tokens []uint32
	if len(a.prompts) > 0 && a.rng.IntN(6) > 0 {
		p := a.prompts[a.rng.IntN(len(a.prompts))]
		for i := range a.rng.IntN(p.len() + 1) {
			tokens = append(tokens, p.token(i))
		}
	}
	for range a.rng.IntN(promptBlocks * oracleBlock) {
		tokens = append(tokens, a.rng.Uint32N(1<<16))
	}
	t := textOf(tokens)
	if a.prompts = append(a.prompts, t); len(a.prompts) > promptsKept {
		a.prompts = a.prompts[1:]
	}
	return t
}

// step draws an operation of a worker.
func (a *author) step() operation {
	op := operation{worker: a.rng.IntN(len(a.holds))}
	h := a.holds[op.worker]
	if len(h) > heldBlocks || len(h) > 0 && a.rng.IntN(3) == 0 {
		op.drops = a.evict(h)
	} else {
		prompt := a.write()
		for n := oracleBlock; n <= prompt.len(); n += oracleBlock {
			if t := prompt.first(n); !h[t] {
				op.stores = append(op.stores, t)
			}
		}
	}
	for _, t := range op.stores {
		h[t] = true
	}
	for _, t := range op.drops {
		delete(h, t)
	}
	return op
}

// evict drops the end of a prompt, or one block from its middle, which leaves a
// hole.
func (a *author) evict(h holdings) (drops []plainText) {
	p := a.prompts[a.rng.IntN(len(a.prompts))]
	n := h.reusable(p)
	if n == 0 {
		return nil
	}
	from := oracleBlock * (1 + a.rng.IntN(n/oracleBlock))
	if a.rng.IntN(4) == 0 {
		return []plainText{p.first(from)}
	}
	for ; n >= from && h.forks(p.first(n)) == 0; n -= oracleBlock {
		drops = append(drops, p.first(n))
		delete(h, p.first(n))
	}
	return drops
}

// question is a prompt to ask for: one that was written, cut and continued.
func (a *author) question() plainText {
	if len(a.prompts) == 0 {
		return ""
	}
	p := a.prompts[a.rng.IntN(len(a.prompts))]
	if a.rng.IntN(3) == 0 {
		return p
	}
	return p.first(a.rng.IntN(p.len()+1)) + textOf([]uint32{a.rng.Uint32N(1 << 16), 1, 2, 3})
}
