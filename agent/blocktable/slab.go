package blocktable

import (
	"math/bits"
	"slices"
)

const (
	// maxLengths bounds the distinct block lengths of one table. Engines use
	// one, and one or two more for partial tails.
	maxLengths = 8
	// maxBlockTokens bounds the tokens of one block.
	maxBlockTokens = 1 << 16

	slabPageTokens = 1 << 15
)

// tokenBits are the widths in which token ids are kept. Nearly all vocabularies
// are below 2^18, and many blocks have no id above 2^16.
var tokenBits = [...]int{16, 18, 32}

// widths is the number of slabs per block length.
const widths = len(tokenBits)

// slab keeps the tokens of blocks of one length, all of one width, in pages;
// slots are reused. Most of what a table needs would be tokens if each took four
// bytes.
//
// A slot holds two tokens a word, the earlier one in the low half. With 18 bits
// there follow the bits above the sixteenth, of sixteen tokens a word.
type slab struct {
	length int
	bits   int
	words  int  // of a slot
	shift  uint // log2 of the slots per page
	pages  [][]uint32
	free   uint32 // first free slot + 1; a free slot's first word links on
	made   uint32
}

func newSlab(length, bitsPerToken int) slab {
	perPage := max(1, slabPageTokens/length)
	s := slab{length: length, bits: bitsPerToken, words: length, shift: uint(bits.Len(uint(perPage)) - 1)}
	switch bitsPerToken {
	case 16:
		s.words = halfWords(length)
	case 18:
		s.words = halfWords(length) + (length+15)/16
	}
	if s.words >= length {
		s.bits, s.words = 32, length
	}
	return s
}

func halfWords(length int) int { return (length + 1) / 2 }

// at is where a slot's tokens are packed.
func (s *slab) at(slot uint32) []uint32 {
	page := s.pages[slot>>s.shift]
	i := int(slot&(1<<s.shift-1)) * s.words
	return page[i : i+s.words : i+s.words]
}

func (s *slab) take(tokens []uint32) uint32 {
	slot := s.free - 1
	if s.free != 0 {
		s.free = s.at(slot)[0]
	} else {
		slot = s.made
		s.made++
		if int(slot>>s.shift) >= len(s.pages) {
			s.pages = append(s.pages, make([]uint32, s.words<<s.shift))
		}
	}
	s.pack(s.at(slot), tokens)
	return slot
}

func (s *slab) give(slot uint32) {
	s.at(slot)[0] = s.free
	s.free = slot + 1
}

func (s *slab) reset() {
	s.free, s.made = 0, 0
}

// pack fills a slot.
func (s *slab) pack(w, tokens []uint32) {
	if s.bits == 32 {
		copy(w, tokens)
		return
	}
	half := halfWords(s.length)
	low := w[:half]
	for i := range low[:len(tokens)/2] {
		low[i] = tokens[2*i]&0xffff | tokens[2*i+1]<<16
	}
	if len(tokens)%2 != 0 {
		low[half-1] = tokens[len(tokens)-1] & 0xffff
	}
	for i := range w[half:] {
		var high uint32
		for k, t := range tokens[16*i : min(16*i+16, len(tokens))] {
			high |= t >> 16 << (2 * k)
		}
		w[half+i] = high
	}
}

// read unpacks all tokens of a slot.
func (s *slab) read(dst []uint32, slot uint32) {
	w := s.at(slot)
	if s.bits == 32 {
		copy(dst, w)
		return
	}
	half := halfWords(s.length)
	dst = dst[:s.length]
	for i, v := range w[:len(dst)/2] {
		dst[2*i], dst[2*i+1] = v&0xffff, v>>16
	}
	if len(dst)%2 != 0 {
		dst[len(dst)-1] = w[half-1] & 0xffff
	}
	for i, high := range w[half:] {
		if high == 0 {
			continue
		}
		part := dst[16*i : min(16*i+16, len(dst))]
		for k := range part {
			part[k] |= high >> (2 * k) & 3 << 16
		}
	}
}

// begins says whether a slot's first token is the given one.
func (s *slab) begins(slot, token uint32) bool {
	w := s.at(slot)
	if s.bits == 32 {
		return w[0] == token
	}
	first := w[0] & 0xffff
	if half := halfWords(s.length); half < len(w) {
		first |= w[half] & 3 << 16
	}
	return first == token
}

// lengthOf gives the first of the slabs of a block length, making them if there
// is room.
func (t *Table) lengthOf(length int) (first uint8, ok bool) {
	for i := 0; i < len(t.slabs); i += widths {
		if t.slabs[i].length == length {
			return uint8(i), true
		}
	}
	if length <= 0 || length > maxBlockTokens || len(t.slabs) == maxLengths*widths {
		return 0, false
	}
	first = uint8(len(t.slabs))
	for _, b := range tokenBits {
		t.slabs = append(t.slabs, newSlab(length, b))
	}
	t.longestFirst = append(t.longestFirst, length)
	for i := len(t.longestFirst) - 1; i > 0; i-- {
		if a, b := &t.longestFirst[i-1], &t.longestFirst[i]; *a < *b {
			*a, *b = *b, *a
		}
	}
	return first, true
}

// keep puts the tokens of a block into the narrowest of the slabs of its length.
func (t *Table) keep(first uint8, tokens []uint32) (class uint8, slot uint32) {
	var all uint32
	for _, id := range tokens {
		all |= id
	}
	for class = first; bits.Len32(all) > tokenBits[class-first]; {
		class++
	}
	return class, t.slabs[class].take(tokens)
}

// tokensOf unpacks the tokens of a linked node, valid until the next call.
func (t *Table) tokensOf(n *node) []uint32 {
	s := &t.slabs[n.class]
	if len(t.unpacked) < s.length {
		t.unpacked = make([]uint32, s.length)
	}
	out := t.unpacked[:s.length]
	s.read(out, n.slot)
	return out
}

// holds says whether a linked node holds exactly the tokens.
func (t *Table) holds(n *node, tokens []uint32) bool {
	s := &t.slabs[n.class]
	return s.length == len(tokens) && s.begins(n.slot, tokens[0]) && slices.Equal(t.tokensOf(n), tokens)
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
