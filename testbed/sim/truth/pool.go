package truth

// none ends a list of blocks.
const none = -1

// anonymous names a block that no prompt can hit: output, or a part of one.
const anonymous = 0

// pool is the KV blocks of one engine. A block is held by requests, or cached:
// released, still findable and next in line to be taken again, or free.
type pool struct {
	prev, next []int32 // the cached blocks, least recently used first
	head, tail int32
	refs       []int32
	name       []uint32
	free       []int32
	cached     int
	index      nameIndex

	events []CacheEvent // since the last report
}

func newPool(blocks int) *pool {
	p := &pool{
		prev: make([]int32, blocks), next: make([]int32, blocks), refs: make([]int32, blocks),
		name: make([]uint32, blocks), free: make([]int32, blocks), head: none, tail: none,
	}
	for i := range p.free {
		p.free[i] = int32(blocks - 1 - i)
	}
	p.index.init(blocks)
	return p
}

// available is the number of blocks that nobody holds.
func (p *pool) available() int { return len(p.free) + p.cached }

func (p *pool) size() int { return len(p.refs) }

// hold adds a reference to a findable block.
func (p *pool) hold(b int32) {
	if p.refs[b] == 0 {
		p.unlink(b)
	}
	p.refs[b]++
}

// take hands out a block with one reference: a free one, else the least
// recently used. The caller has checked that there is one.
func (p *pool) take() int32 {
	var b int32
	if n := len(p.free); n > 0 {
		b = p.free[n-1]
		p.free = p.free[:n-1]
	} else {
		b = p.head
		p.unlink(b)
		if p.name[b] != anonymous {
			p.index.remove(p.name[b])
			p.events = append(p.events, CacheEvent{Name: p.name[b], Removed: true})
			p.name[b] = anonymous
		}
	}
	p.refs[b] = 1
	return b
}

// publish makes a held block findable by its name. If another one has the
// name already, that one is held instead and returned.
func (p *pool) publish(b int32, name uint32, depth int) int32 {
	if other := p.index.find(name); other != none {
		p.hold(other)
		p.refs[b] = 0
		p.free = append(p.free, b)
		return other
	}
	p.name[b] = name
	p.index.add(name, b)
	p.events = append(p.events, CacheEvent{Name: name, Depth: int32(depth)})
	return b
}

// release drops a request's blocks, the last first, so that the tail of a
// prefix is taken before its head. Of its blocks the first full ones stay in
// the cache; a block in part filled is free.
func (p *pool) release(blocks []int32, full int) {
	for i := len(blocks) - 1; i >= 0; i-- {
		b := blocks[i]
		if p.refs[b]--; p.refs[b] > 0 {
			continue
		}
		if i >= full {
			p.free = append(p.free, b)
			continue
		}
		p.link(b)
	}
}

func (p *pool) link(b int32) {
	p.prev[b], p.next[b] = p.tail, none
	if p.tail == none {
		p.head = b
	} else {
		p.next[p.tail] = b
	}
	p.tail = b
	p.cached++
}

func (p *pool) unlink(b int32) {
	prev, next := p.prev[b], p.next[b]
	if prev == none {
		p.head = next
	} else {
		p.next[prev] = next
	}
	if next == none {
		p.tail = prev
	} else {
		p.prev[next] = prev
	}
	p.cached--
}

// nameIndex finds blocks by name: open addressing, half full at most.
type nameIndex struct {
	names  []uint32 // anonymous: free
	blocks []int32
	shift  uint
}

func (x *nameIndex) init(capacity int) {
	size, bits := 16, uint(4)
	for size < 2*capacity {
		size, bits = 2*size, bits+1
	}
	x.names, x.blocks, x.shift = make([]uint32, size), make([]int32, size), 64-bits
}

func (x *nameIndex) slot(name uint32) int { return int(uint64(name) * 0x9e3779b97f4a7c15 >> x.shift) }

func (x *nameIndex) find(name uint32) int32 {
	mask := len(x.names) - 1
	for i := x.slot(name); x.names[i] != anonymous; i = (i + 1) & mask {
		if x.names[i] == name {
			return x.blocks[i]
		}
	}
	return none
}

func (x *nameIndex) add(name uint32, b int32) {
	mask := len(x.names) - 1
	i := x.slot(name)
	for x.names[i] != anonymous {
		i = (i + 1) & mask
	}
	x.names[i], x.blocks[i] = name, b
}

// remove takes a name out and closes the gap behind it.
func (x *nameIndex) remove(name uint32) {
	mask := len(x.names) - 1
	i := x.slot(name)
	for x.names[i] != name {
		if x.names[i] == anonymous {
			return
		}
		i = (i + 1) & mask
	}
	for j := i; ; {
		j = (j + 1) & mask
		if x.names[j] == anonymous {
			break
		}
		// Entry j may fill the gap at i unless its own slot lies behind i.
		if home := x.slot(x.names[j]); (j-home)&mask >= (j-i)&mask {
			x.names[i], x.blocks[i] = x.names[j], x.blocks[j]
			i = j
		}
	}
	x.names[i] = anonymous
}
