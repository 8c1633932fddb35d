package core

// none is the absence of a block. Block 0 exists and is never handed out, as
// in the engine, where it stands for "nothing here".
const none = ^uint32(0)

type block struct {
	// prev and next link the free queue; nextCopy links blocks with one hash.
	prev, next uint32
	nextCopy   uint32
	refs       int32
	hashed     bool
	queued     bool
	hash       Hash
}

// pool is the block pool of one rank. A block that nobody references is in
// the free queue; it stays findable by its hash until it is taken from there.
type pool struct {
	blocks     []block
	head, tail uint32
	free       int
	// cached maps a hash to its oldest copy.
	cached map[Hash]uint32
	copies int
	events []Event
	// arena backs the hashes of events.
	arena []Hash
	// headFirst releases a request's blocks head first, inOrder queues blocks
	// that hold nothing behind those that do. Engines do neither; tests set
	// them to see that the difference is noticed.
	headFirst, inOrder bool
}

func newPool(blocks int) *pool {
	p := &pool{blocks: make([]block, blocks), head: none, tail: none, cached: make(map[Hash]uint32)}
	for i := 1; i < blocks; i++ {
		p.enqueue(uint32(i))
	}
	return p
}

// used is the number of referenced blocks.
func (p *pool) used() int { return len(p.blocks) - 1 - p.free }

func (p *pool) enqueue(id uint32) {
	b := &p.blocks[id]
	b.prev, b.next, b.queued = p.tail, none, true
	if p.tail == none {
		p.head = id
	} else {
		p.blocks[p.tail].next = id
	}
	p.tail = id
	p.free++
}

// enqueueFirst makes a block the next to be taken: it holds nothing findable.
func (p *pool) enqueueFirst(id uint32) {
	b := &p.blocks[id]
	b.prev, b.next, b.queued = none, p.head, true
	if p.head == none {
		p.tail = id
	} else {
		p.blocks[p.head].prev = id
	}
	p.head = id
	p.free++
}

func (p *pool) dequeue(id uint32) {
	b := &p.blocks[id]
	if b.prev == none {
		p.head = b.next
	} else {
		p.blocks[b.prev].next = b.next
	}
	if b.next == none {
		p.tail = b.prev
	} else {
		p.blocks[b.next].prev = b.prev
	}
	b.queued = false
	p.free--
}

// lookup finds the oldest copy of a block.
func (p *pool) lookup(h Hash) (uint32, bool) {
	id, ok := p.cached[h]
	return id, ok
}

// touch adds a reference to a cached block.
func (p *pool) touch(id uint32) {
	if p.blocks[id].queued {
		p.dequeue(id)
	}
	p.blocks[id].refs++
}

// take hands out the block that was released longest ago; what it held leaves
// the cache, with an event. The caller has checked that one is free.
func (p *pool) take() uint32 {
	id := p.head
	p.dequeue(id)
	if h, was := p.forget(id); was {
		p.arena = append(p.arena, h)
		p.events = append(p.events, Event{Op: OpRemoved, Hashes: p.arena[len(p.arena)-1 : len(p.arena) : len(p.arena)]})
	}
	p.blocks[id].refs = 1
	return id
}

// forget takes one copy out of the cache without an event.
func (p *pool) forget(id uint32) (Hash, bool) {
	b := &p.blocks[id]
	if !b.hashed {
		return Hash{}, false
	}
	if first := p.cached[b.hash]; first == id {
		if b.nextCopy == none {
			delete(p.cached, b.hash)
		} else {
			p.cached[b.hash] = b.nextCopy
		}
	} else {
		before := first
		for p.blocks[before].nextCopy != id {
			before = p.blocks[before].nextCopy
		}
		p.blocks[before].nextCopy = b.nextCopy
	}
	b.hashed = false
	p.copies--
	return b.hash, true
}

// name gives a full block its hash and makes it findable.
func (p *pool) name(id uint32, h Hash) {
	b := &p.blocks[id]
	b.hash, b.hashed, b.nextCopy = h, true, none
	p.copies++
	first, ok := p.cached[h]
	if !ok {
		p.cached[h] = id
		return
	}
	for p.blocks[first].nextCopy != none {
		first = p.blocks[first].nextCopy
	}
	p.blocks[first].nextCopy = id
}

// release drops one reference of each block of a request, the last block
// first, so that the tail of a prefix is evicted before its head. A block that
// holds nothing findable is the next to be taken, before any that does.
func (p *pool) release(ids []uint32) {
	for i := range ids {
		id := ids[len(ids)-1-i]
		if p.headFirst {
			id = ids[i]
		}
		b := &p.blocks[id]
		if b.refs--; b.refs > 0 {
			continue
		}
		if b.hashed || p.inOrder {
			p.enqueue(id)
		} else {
			p.enqueueFirst(id)
		}
	}
}

// reset forgets everything unless a block is referenced.
func (p *pool) reset() bool {
	if p.used() != 0 {
		return false
	}
	clear(p.cached)
	for i := range p.blocks {
		p.blocks[i].hashed = false
	}
	p.copies = 0
	p.events = append(p.events, Event{Op: OpCleared})
	return true
}

// evictSilently forgets up to n cached blocks that nobody references, longest
// released first, and tells nobody.
func (p *pool) evictSilently(n int) int {
	done := 0
	for id := p.head; id != none && done < n; id = p.blocks[id].next {
		if _, was := p.forget(id); was {
			done++
		}
	}
	return done
}
