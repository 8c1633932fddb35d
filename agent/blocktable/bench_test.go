package blocktable

import (
	"math/rand/v2"
	"runtime"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// churn is a stream of stores and removals of an engine under eviction: every
// step removes the oldest blocks, tails first, one event each as engines do,
// and stores a prompt in their place.
type churn struct {
	pool   []uint32 // random tokens that stores take windows of
	at     int
	queue  []uint64 // held blocks in order of removal
	next   uint64
	store  Event
	remove Event
}

const (
	churnBlock  = 16
	churnBlocks = 32 // per store
)

func newChurn() *churn {
	rng := rand.New(rand.NewPCG(1, 2))
	c := &churn{pool: make([]uint32, 1<<20), next: 1}
	for i := range c.pool {
		c.pool[i] = rng.Uint32N(150_000)
	}
	c.store = Event{Op: OpStore, Spec: SpecFull, BlockTokens: churnBlock, Hashes: make([]uint64, churnBlocks)}
	c.remove = Event{Op: OpRemove, Hashes: make([]uint64, 1)}
	return c
}

func (c *churn) step(t *Table, capacity int) (blockEvents int) {
	for len(c.queue) > capacity-churnBlocks {
		c.remove.Hashes[0] = c.queue[0] * 0x9e3779b97f4a7c15
		c.queue = c.queue[1:]
		t.Apply(&c.remove)
		blockEvents++
	}
	c.at = (c.at + 509) % (len(c.pool) - churnBlock*churnBlocks)
	c.store.Tokens = c.pool[c.at : c.at+churnBlock*churnBlocks]
	for i := range c.store.Hashes {
		c.store.Hashes[i] = c.next * 0x9e3779b97f4a7c15
		c.next++
	}
	for i := len(c.store.Hashes) - 1; i >= 0; i-- { // the tail goes first
		c.queue = append(c.queue, c.next-uint64(len(c.store.Hashes))+uint64(i))
	}
	t.Apply(&c.store)
	return blockEvents + churnBlocks
}

func BenchmarkApply(b *testing.B) {
	benchmarkApply(b, func(*Table) {})
}

// An agent remembers what happens and names each block that is stored.
func BenchmarkApplyNamed(b *testing.B) {
	benchmarkApply(b, func(t *Table) {
		NewHistory(t)
		t.Listen(&namer{table: t})
	})
}

type namer struct {
	silent
	table *Table
	sum   prefix.Chain
}

func (n *namer) Attached(b summary.Block) { n.sum ^= n.table.PointOf(b.ID) }

func benchmarkApply(b *testing.B, prepare func(*Table)) {
	for _, capacity := range []int{4096, 32768, 262144} {
		b.Run(sizeName(capacity), func(b *testing.B) {
			t := New(Options{MaxBlocks: capacity, ExpectBlocks: capacity})
			prepare(t)
			c := newChurn()
			c.queue = make([]uint64, 0, 1<<22)
			for range 3 * capacity / churnBlocks {
				c.step(t, capacity)
			}
			b.ReportAllocs()
			b.ResetTimer()
			events := 0
			for i := 0; i < b.N; {
				if cap(c.queue)-len(c.queue) < churnBlocks {
					b.StopTimer()
					c.queue = append(make([]uint64, 0, 1<<22), c.queue...)
					b.StartTimer()
				}
				n := c.step(t, capacity)
				i += n
				events += n
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(events), "ns/blockEvent")
		})
	}
}

func sizeName(n int) string {
	switch n {
	case 4096:
		return "blocks=4k"
	case 32768:
		return "blocks=32k"
	}
	return "blocks=256k"
}

func BenchmarkMatch(b *testing.B) {
	t := New(Options{})
	var hashes []uint64
	for h := uint64(1); h <= 1000; h++ {
		hashes = append(hashes, h)
	}
	t.Apply(store(0, hashes...))
	var p []uint32
	for _, h := range hashes {
		p = append(p, tokens(int(100*h), 16)...)
	}
	b.ReportAllocs()
	for b.Loop() {
		if t.Match(p, "", "") != 16000-16 {
			b.Fatal("no match")
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1000, "ns/block")
}

// bytesPerBlock is what a full table of 16-token blocks costs.
func bytesPerBlock(capacity int) float64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	t := New(Options{MaxBlocks: capacity, ExpectBlocks: capacity})
	c := newChurn()
	for range capacity/churnBlocks + 100 {
		c.step(t, capacity)
	}
	c.queue = nil
	runtime.GC()
	runtime.ReadMemStats(&after)
	defer runtime.KeepAlive(t)
	return float64(after.HeapAlloc-before.HeapAlloc) / float64(t.Len())
}

func TestMemoryPerBlock(t *testing.T) {
	if got := bytesPerBlock(1 << 17); got > 95 {
		t.Errorf("%.1f bytes per block of 16 tokens, want at most 95", got)
	} else {
		t.Logf("%.1f bytes per block of 16 tokens", got)
	}
}

func TestNoAllocationInSteadyState(t *testing.T) {
	const capacity = 4096
	table := New(Options{MaxBlocks: capacity})
	c := newChurn()
	c.queue = make([]uint64, 0, 1<<20)
	for range 3 * capacity / churnBlocks {
		c.step(table, capacity)
	}
	if n := testing.AllocsPerRun(200, func() { c.step(table, capacity) }); n != 0 {
		t.Errorf("%v allocations per store of %d blocks with its removals", n, churnBlocks)
	}
}
