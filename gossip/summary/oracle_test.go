package summary_test

import (
	"fmt"
	"math/bits"
	"slices"

	"waypost/gossip/prefix"
)

// This file is the oracle: what a worker holds, kept as plain lists of tokens
// and built from the operations alone. It uses nothing of the package under
// test; even index keys are computed from their definition.

// plainKey is an index key by definition.
type plainKey struct {
	Key   uint64
	Depth int
}

// plainExtent is what a key is worth, by definition.
type plainExtent struct{ Usable, GPU, Host int }

func mixKey(prev uint64, depth int, fingerprint uint64) uint64 {
	hi, lo := bits.Mul64(prev^0x9e3779b97f4a7c15, (uint64(depth)<<32|fingerprint)^0xa0761d6478bd642f)
	return max(hi^lo, 1)
}

// plainChain returns the index keys of a prompt at its checkpoints, and at its
// end.
func plainChain(tokens []uint32, k *prefix.Keyer) (checkpoints []uint64, end uint64) {
	var c prefix.Chain
	var last uint64
	depth := 0
	for ; len(tokens)-depth >= 512; depth += 512 {
		c = prefix.Next(c, tokens[depth:depth+512])
		h := uint64(k.Key(c, uint32(depth+512)))
		if depth == 0 {
			h >>= 32
		} else {
			h >>= 48
		}
		last = mixKey(last, depth+512, h)
		checkpoints = append(checkpoints, last)
	}
	if depth == len(tokens) {
		return checkpoints, last
	}
	h := uint64(k.Key(prefix.Point(c, tokens[depth:]), uint32(len(tokens))))
	if depth == 0 {
		h >>= 40
	} else {
		h >>= 48
	}
	return checkpoints, mixKey(last, len(tokens), h)
}

// plainBlock is a block that is part of an unbroken prefix.
type plainBlock struct {
	path     []uint32 // all tokens from the start of the prompt
	start    int      // depth before the block
	domain   prefix.Domain
	children int
	extents  []plainExtent // worth of each depth start+1 … len(path)
}

// plainState is what must be told of a set of blocks.
type plainState struct {
	checkpoints map[plainKey]int // exactly these
	ends        map[plainKey]int // at most these, between checkpoints
	needed      map[plainKey]int // at least these of them
	extents     map[plainKey][]plainExtent
}

// stateOf derives what must be told from its definition: every checkpoint of
// every unbroken prefix; where prefixes end or fork; never anything else than
// ends of blocks.
func stateOf(blocks []plainBlock, key prefix.ClusterKey) plainState {
	s := plainState{map[plainKey]int{}, map[plainKey]int{}, map[plainKey]int{}, map[plainKey][]plainExtent{}}
	for _, b := range blocks {
		checkpoints, end := plainChain(b.path, prefix.NewKeyer(key, b.domain))
		for d := (b.start/512 + 1) * 512; d <= len(b.path); d += 512 {
			k := plainKey{checkpoints[d/512-1], d}
			s.checkpoints[k]++
			s.extents[k] = append(s.extents[k], b.extents[d-b.start-1])
		}
		if len(b.path)%512 == 0 {
			continue
		}
		k := plainKey{end, len(b.path)}
		s.ends[k]++
		s.extents[k] = append(s.extents[k], b.extents[len(b.extents)-1])
		if b.children != 1 {
			s.needed[k]++
		}
	}
	return s
}

// heldState is what one side holds.
type heldState struct {
	keys    map[plainKey]int
	extents map[plainKey]plainExtent // of the latest copy, where it is not whole
}

// check compares what one side holds with the definition.
func (s plainState) check(h heldState) error {
	for k, n := range s.checkpoints {
		if h.keys[k] != n {
			return fmt.Errorf("checkpoint at %d held %d times, want %d", k.Depth, h.keys[k], n)
		}
	}
	for k, n := range s.needed {
		if h.keys[k] < n {
			return fmt.Errorf("end or fork at %d held %d times, want at least %d", k.Depth, h.keys[k], n)
		}
	}
	for k, n := range h.keys {
		if most := s.checkpoints[k] + s.ends[k]; n > most {
			return fmt.Errorf("key at %d held %d times, blocks say at most %d", k.Depth, n, most)
		}
		x, limited := h.extents[k]
		if !limited {
			x = plainExtent{k.Depth, k.Depth, k.Depth}
		}
		if !slices.Contains(s.extents[k], x) {
			return fmt.Errorf("key at %d has extent %v, blocks say %v", k.Depth, x, s.extents[k])
		}
	}
	return nil
}
