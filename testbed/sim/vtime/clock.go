// Package vtime is virtual time: what is to happen, in order of time, one
// thing after the other. Things of one instant happen in the order in which
// they were asked for, so a run depends on nothing but its input.
package vtime

// Clock is a virtual clock and its agenda. It is not safe for concurrent use.
type Clock struct {
	nowMs float64
	order uint64
	heap  []entry
}

type entry struct {
	atMs  float64
	order uint64
	do    func()
}

func (e *entry) before(f *entry) bool {
	return e.atMs < f.atMs || e.atMs == f.atMs && e.order < f.order
}

// NowMs is the time of what happens at present, in ms from the start.
func (c *Clock) NowMs() float64 { return c.nowMs }

// At asks for do at a time; one that has passed is now.
func (c *Clock) At(ms float64, do func()) {
	c.order++
	c.heap = append(c.heap, entry{max(ms, c.nowMs), c.order, do})
	i := len(c.heap) - 1
	for i > 0 {
		parent := (i - 1) / 4
		if !c.heap[i].before(&c.heap[parent]) {
			break
		}
		c.heap[i], c.heap[parent] = c.heap[parent], c.heap[i]
		i = parent
	}
}

// After asks for do after a delay.
func (c *Clock) After(ms float64, do func()) { c.At(c.nowMs+ms, do) }

// Next lets the next thing happen; false if there is none.
func (c *Clock) Next() bool {
	if len(c.heap) == 0 {
		return false
	}
	first := c.heap[0]
	last := len(c.heap) - 1
	c.heap[0] = c.heap[last]
	c.heap[last] = entry{}
	c.heap = c.heap[:last]
	c.sink()
	c.nowMs = first.atMs
	first.do()
	return true
}

func (c *Clock) sink() {
	for i := 0; ; {
		least := i
		for child := 4*i + 1; child <= 4*i+4 && child < len(c.heap); child++ {
			if c.heap[child].before(&c.heap[least]) {
				least = child
			}
		}
		if least == i {
			return
		}
		c.heap[i], c.heap[least] = c.heap[least], c.heap[i]
		i = least
	}
}
