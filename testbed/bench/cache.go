package bench

// blockTokens is the block length of the simulated engines.
const blockTokens = 16

// cache is the block pool of one simulated engine, with the semantics of
// vLLM's: blocks nobody uses wait in a queue and are evicted from its front; a
// request's blocks enter it tail first, so that leaves go before what they
// stand on. Equal blocks computed at once are kept as copies.
type cache struct {
	blocks []cacheBlock // 1..n; 0 is the end of the queue
	slots  []uint32     // open-addressed by hash: first copy of a block
	free   int          // blocks in the queue
	named  int          // blocks with a hash, copies included
	runs   runCounter

	// evicted is told each copy that goes.
	evicted func(hash uint64, last bool)
}

// cacheBlock is one block of the pool.
type cacheBlock struct {
	hash       uint64 // 0: nothing that could be found
	parent     uint64 // hash of the block before it, 0 at the start
	uses       int32
	prev, next uint32 // in the queue
	copies     uint32 // next copy of the same hash
	run        uint32
}

func newCache(blocks int) *cache {
	size := 64
	for size < blocks*2 {
		size *= 2
	}
	c := &cache{blocks: make([]cacheBlock, blocks+1), slots: make([]uint32, size)}
	c.blocks[0].prev, c.blocks[0].next = 0, 0
	for i := 1; i <= blocks; i++ {
		c.enqueue(uint32(i))
	}
	return c
}

// enqueue puts a block at the end of the queue.
func (c *cache) enqueue(b uint32) {
	end := &c.blocks[0]
	c.blocks[b].prev, c.blocks[b].next = end.prev, 0
	c.blocks[end.prev].next = b
	end.prev = b
	c.free++
}

func (c *cache) unqueue(b uint32) {
	n := &c.blocks[b]
	c.blocks[n.prev].next = n.next
	c.blocks[n.next].prev = n.prev
	c.free--
}

func (c *cache) home(hash uint64) int { return int(hash >> 20 & uint64(len(c.slots)-1)) }

// find gives the first copy of a block, 0 if there is none.
func (c *cache) find(hash uint64) uint32 {
	mask := len(c.slots) - 1
	for i := c.home(hash); ; i = (i + 1) & mask {
		b := c.slots[i]
		if b == 0 || c.blocks[b].hash == hash {
			return b
		}
	}
}

// use keeps a block from being evicted.
func (c *cache) use(b uint32) {
	if c.blocks[b].uses == 0 {
		c.unqueue(b)
	}
	c.blocks[b].uses++
}

// release ends one use of a block.
func (c *cache) release(b uint32) {
	if c.blocks[b].uses--; c.blocks[b].uses == 0 {
		c.enqueue(b)
	}
}

// take gives a block to fill, evicting what it held; the caller knows that one
// is free.
func (c *cache) take() uint32 {
	b := c.blocks[0].next
	c.unqueue(b)
	c.blocks[b].uses = 1
	if hash := c.blocks[b].hash; hash != 0 {
		c.forget(b, hash)
		c.evicted(hash, c.find(hash) == 0)
	}
	return b
}

// store names a filled block; parent is the hash of the block before it, 0 at
// the start. It reports whether the block is the first copy.
func (c *cache) store(b uint32, hash, parent uint64) (first bool) {
	n := &c.blocks[b]
	n.hash, n.parent, n.copies = hash, parent, 0
	c.named++
	mask := len(c.slots) - 1
	i := c.home(hash)
	for ; c.slots[i] != 0; i = (i + 1) & mask {
		first := c.slots[i]
		if c.blocks[first].hash != hash {
			continue
		}
		n.copies, c.blocks[first].copies = c.blocks[first].copies, b
		n.run = 0
		return false
	}
	c.slots[i] = b
	before := uint32(0)
	if parent != 0 {
		before = c.find(parent)
	}
	c.runs.add(c, b, before)
	return true
}

// forget takes a block's name away.
func (c *cache) forget(b uint32, hash uint64) {
	c.named--
	mask := len(c.slots) - 1
	i := c.home(hash)
	for c.blocks[c.slots[i]].hash != hash {
		i = (i + 1) & mask
	}
	first := c.slots[i]
	next := c.blocks[b].copies
	c.blocks[b].hash, c.blocks[b].copies = 0, 0
	switch {
	case first != b:
		for c.blocks[first].copies != b {
			first = c.blocks[first].copies
		}
		c.blocks[first].copies = next
	case next != 0:
		c.slots[i] = next
		c.blocks[next].run = c.blocks[b].run
		c.runs.moved(c.blocks[b].run, b, next)
	default:
		c.runs.drop(c, b)
		c.closeGap(i)
	}
}

// closeGap empties a slot and moves back what a probe would no longer reach.
func (c *cache) closeGap(i int) {
	mask := len(c.slots) - 1
	for j := (i + 1) & mask; c.slots[j] != 0; j = (j + 1) & mask {
		if home := c.home(c.blocks[c.slots[j]].hash); (j-home)&mask >= (j-i)&mask {
			c.slots[i] = c.slots[j]
			i = j
		}
	}
	c.slots[i] = 0
}

// runCounter counts the runs of a cache: a block continues the run of the
// block before it if that is the run's last one, else it begins a run. It knows
// nothing of the encoder, so that the shape of a workload is measured apart.
type runCounter struct {
	runs   []run // from 1
	unused []uint32
	count  int
}

type run struct {
	last   uint32 // last block
	blocks int
}

func (r *runCounter) add(c *cache, b, parent uint32) {
	n := c.blocks[parent].run
	if parent == 0 || n == 0 || r.runs[n].last != parent {
		n = r.begin()
	}
	c.blocks[b].run = n
	r.runs[n].last = b
	r.runs[n].blocks++
}

func (r *runCounter) begin() uint32 {
	r.count++
	if n := len(r.unused); n > 0 {
		run := r.unused[n-1]
		r.unused = r.unused[:n-1]
		return run
	}
	if len(r.runs) == 0 {
		r.runs = append(r.runs, run{})
	}
	r.runs = append(r.runs, run{})
	return uint32(len(r.runs) - 1)
}

// drop takes a block out of its run; the last block of a run goes first.
func (r *runCounter) drop(c *cache, b uint32) {
	n := c.blocks[b].run
	c.blocks[b].run = 0
	if n == 0 {
		return
	}
	if r.runs[n].blocks--; r.runs[n].blocks == 0 {
		r.runs[n] = run{}
		r.unused = append(r.unused, n)
		r.count--
		return
	}
	if r.runs[n].last == b {
		if p := c.find(c.blocks[b].parent); p != 0 && c.blocks[p].run == n {
			r.runs[n].last = p
		}
	}
}

// moved tells that another copy stands for a block.
func (r *runCounter) moved(n, from, to uint32) {
	if r.runs[n].last == from {
		r.runs[n].last = to
	}
}
