// Package prompt is what both sides of the simulator see of a prompt: its
// length and the names of its blocks.
package prompt

// BlockTokens is the number of tokens of a named block.
const BlockTokens = 64

// Prompt is one prompt. It does not change.
type Prompt struct {
	// Tokens is its length, at least 1.
	Tokens int
	// Blocks name its full blocks in order, from 1. A name stands for its
	// block and all before it.
	Blocks []uint32
}

// Set is a set of block names. The zero value is empty.
type Set struct {
	names []uint32 // 0: free
	n     int
	shift uint
}

// Len is the number of names.
func (s *Set) Len() int { return s.n }

// Has reports whether a name is in the set.
func (s *Set) Has(name uint32) bool {
	if s.n == 0 {
		return false
	}
	return s.names[s.find(name)] == name
}

// Depth is the number of leading blocks of a prompt that are in the set.
func (s *Set) Depth(p *Prompt, from int) int {
	for from < len(p.Blocks) && s.Has(p.Blocks[from]) {
		from++
	}
	return from
}

// Add puts a name, not 0, into the set.
func (s *Set) Add(name uint32) {
	if 2*s.n >= len(s.names) {
		s.grow()
	}
	i := s.find(name)
	if s.names[i] == 0 {
		s.names[i] = name
		s.n++
	}
}

// Remove takes a name out of the set.
func (s *Set) Remove(name uint32) {
	if s.n == 0 {
		return
	}
	i := s.find(name)
	if s.names[i] != name {
		return
	}
	s.n--
	mask := len(s.names) - 1
	for j := (i + 1) & mask; s.names[j] != 0; j = (j + 1) & mask {
		// Name j may fill the gap at i unless its own place lies behind i.
		if home := s.home(s.names[j]); (j-home)&mask >= (j-i)&mask {
			s.names[i] = s.names[j]
			i = j
		}
	}
	s.names[i] = 0
}

// Clear empties the set.
func (s *Set) Clear() {
	clear(s.names)
	s.n = 0
}

// find is where a name is, or the free place where it belongs.
func (s *Set) find(name uint32) int {
	mask := len(s.names) - 1
	i := s.home(name)
	for s.names[i] != 0 && s.names[i] != name {
		i = (i + 1) & mask
	}
	return i
}

func (s *Set) home(name uint32) int { return int(uint64(name) * 0x9e3779b97f4a7c15 >> s.shift) }

func (s *Set) grow() {
	old := s.names
	size := max(16, 2*len(old))
	s.names, s.shift = make([]uint32, size), 64
	for 1<<(64-s.shift) < size {
		s.shift--
	}
	s.n = 0
	for _, name := range old {
		if name != 0 {
			s.names[s.find(name)] = name
			s.n++
		}
	}
}

// Counts counts prompts by block. As prompts are added whole, the blocks of
// one prompt that count are always its first.
type Counts map[uint32]int32

// Add counts a prompt's blocks.
func (c Counts) Add(p *Prompt) {
	for _, b := range p.Blocks {
		c[b]++
	}
}

// Drop takes a prompt back that was added.
func (c Counts) Drop(p *Prompt) {
	for _, b := range p.Blocks {
		if c[b]--; c[b] == 0 {
			delete(c, b)
		}
	}
}

// Depth is the number of leading blocks of a prompt, at least from, that
// count, given that those before from may be taken for granted.
func (c Counts) Depth(p *Prompt, from int) int {
	low, high := from, len(p.Blocks)
	for low < high {
		middle := (low + high) / 2
		if c[p.Blocks[middle]] > 0 {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low
}
