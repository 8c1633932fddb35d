package prefixindex

import "sync/atomic"

// slab lends blocks of 64-bit words in sizes of powers of two. A block is named
// by a handle: the size class in its upper bits and a number in the lower ones.
// Its words are read and written atomically; a reader of a block that was
// given back meanwhile reads somebody else's words, which its segment tells it
// afterwards.
type slab struct {
	classes [slabClasses]slabClass
}

const (
	slabClasses = 16 // 1 to 32,768 words
	handleBits  = 23 // of a block's number
	// 1<<pageBits words, or a block, are asked of the allocator at once.
	pageBits = 11
)

type slabClass struct {
	pages  atomic.Pointer[[][]uint64]
	taken  int      // blocks ever taken; the writer's
	unused []uint32 // of them, given back
}

// handle names a block. It has handleBits, and four for the class.
type handle uint32

const anyHandle = slabClasses<<handleBits - 1

func (h handle) class() int  { return int(h >> handleBits) }
func (h handle) number() int { return int(h & (1<<handleBits - 1)) }

// pageShift is the logarithm of how many blocks of a class share a page.
func pageShift(class int) int { return max(0, pageBits-class) }

func perPage(class int) int { return 1 << pageShift(class) }

// take lends a block of 1<<class words, or more, all 0.
func (b *slab) take(class int) handle {
	c := &b.classes[class]
	if n := len(c.unused); n > 0 {
		number := c.unused[n-1]
		c.unused = c.unused[:n-1]
		return handle(class<<handleBits) | handle(number)
	}
	if c.taken == 1<<handleBits {
		return b.take(class + 1)
	}
	if c.taken%perPage(class) == 0 {
		var pages [][]uint64
		if old := c.pages.Load(); old != nil {
			pages = *old
		}
		// Readers of the shorter slice never look past its end.
		pages = append(pages, make([]uint64, perPage(class)<<class))
		c.pages.Store(&pages)
	}
	c.taken++
	return handle(class<<handleBits) | handle(c.taken-1)
}

// give takes a block back.
func (b *slab) give(h handle) {
	words := b.words(h)
	for i := range words {
		atomic.StoreUint64(&words[i], 0)
	}
	c := &b.classes[h.class()]
	c.unused = append(c.unused, uint32(h.number()))
}

// words returns a block.
func (b *slab) words(h handle) []uint64 {
	class, number := h.class(), h.number()
	shift := pageShift(class)
	page := (*b.classes[class].pages.Load())[number>>shift]
	at := number & (1<<shift - 1) << class
	return page[at : at+1<<class : at+1<<class]
}

// bytes is the memory of all blocks, lent or not.
func (b *slab) bytes() int {
	n := 0
	for i := range b.classes {
		if p := b.classes[i].pages.Load(); p != nil {
			n += len(*p) * perPage(i) << i * 8
		}
		n += cap(b.classes[i].unused) * 4
	}
	return n
}
