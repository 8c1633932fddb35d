package blocktable

import "math/bits"

const (
	// maxClasses bounds the distinct block lengths of one table. Engines use
	// one, and one or two more for partial tails.
	maxClasses = 8
	// maxBlockTokens bounds the tokens of one block.
	maxBlockTokens = 1 << 16

	slabPageTokens = 1 << 14
)

// slab keeps the tokens of blocks of one length in pages; slots are reused.
type slab struct {
	length int
	shift  uint // log2 of the slots per page
	pages  [][]uint32
	free   uint32 // first free slot + 1; a free slot's first token links on
	made   uint32
}

func newSlab(length int) *slab {
	perPage := max(1, slabPageTokens/length)
	return &slab{length: length, shift: uint(bits.Len(uint(perPage)) - 1)}
}

func (s *slab) at(slot uint32) []uint32 {
	page := s.pages[slot>>s.shift]
	i := int(slot&(1<<s.shift-1)) * s.length
	return page[i : i+s.length : i+s.length]
}

func (s *slab) take(tokens []uint32) uint32 {
	if s.free != 0 {
		slot := s.free - 1
		b := s.at(slot)
		s.free = b[0]
		copy(b, tokens)
		return slot
	}
	slot := s.made
	s.made++
	if int(slot>>s.shift) >= len(s.pages) {
		s.pages = append(s.pages, make([]uint32, s.length<<s.shift))
	}
	copy(s.at(slot), tokens)
	return slot
}

func (s *slab) give(slot uint32) {
	s.at(slot)[0] = s.free
	s.free = slot + 1
}

func (s *slab) reset() {
	s.free, s.made = 0, 0
}

// classOf gives the slab of a block length, making it if there is room.
func (t *Table) classOf(length int) (uint8, bool) {
	for i, s := range t.slabs {
		if s.length == length {
			return uint8(i), true
		}
	}
	if length <= 0 || length > maxBlockTokens || len(t.slabs) == maxClasses {
		return 0, false
	}
	t.slabs = append(t.slabs, newSlab(length))
	t.longestFirst = append(t.longestFirst, uint8(len(t.slabs)-1))
	for i := len(t.longestFirst) - 1; i > 0; i-- {
		a, b := &t.longestFirst[i-1], &t.longestFirst[i]
		if t.slabs[*a].length < t.slabs[*b].length {
			*a, *b = *b, *a
		}
	}
	return uint8(len(t.slabs) - 1), true
}

// contentKey is a keyed fingerprint of a block's parent and tokens. It folds
// 128-bit products, two tokens at a time; the seed keeps tenants, who choose
// tokens, from choosing slots.
func (t *Table) contentKey(parent uint32, tokens []uint32) uint32 {
	h := t.seed ^ uint64(parent)*0x9e3779b97f4a7c15
	for len(tokens) >= 2 {
		hi, lo := bits.Mul64(h^uint64(tokens[0]), uint64(tokens[1])^0xd6e8feb86659fd93)
		h = hi ^ lo ^ h<<5
		tokens = tokens[2:]
	}
	if len(tokens) == 1 {
		hi, lo := bits.Mul64(h^uint64(tokens[0]), 0xd6e8feb86659fd93)
		h = hi ^ lo
	}
	hi, lo := bits.Mul64(h, 0xa0761d6478bd642f)
	return uint32((hi ^ lo) >> 32)
}
