package replica

import (
	"sync/atomic"
	"testing"
)

func benchPropose(b *testing.B, n *node) {
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		propose(b, n, cordon(b, i%1000+1000*(i/1000)))
		i++
	}
}

// BenchmarkProposeAlone is one change at a time on a cluster of one, on disk.
func BenchmarkProposeAlone(b *testing.B) {
	c := newCluster(b)
	a := c.add(true)
	c.leader(a)
	benchPropose(b, a)
}

// BenchmarkProposeThree is one change at a time with three voters on one disk,
// over loopback TCP.
func BenchmarkProposeThree(b *testing.B) {
	c := newCluster(b)
	n := c.three()
	benchPropose(b, c.leader(n...))
}

// BenchmarkProposeThreeParallel is 32 callers at once.
func BenchmarkProposeThreeParallel(b *testing.B) {
	c := newCluster(b)
	n := c.three()
	l := c.leader(n...)
	var i atomic.Int64
	b.ReportAllocs()
	b.SetParallelism(16)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			propose(b, l, cordon(b, int(i.Add(1))%4000))
		}
	})
}

// BenchmarkState is what every placement pays to look at the registry.
func BenchmarkState(b *testing.B) {
	c := newCluster(b)
	a := c.add(true)
	c.leader(a)
	b.ReportAllocs()
	for b.Loop() {
		if a.State().Fleet() == nil {
			b.Fatal("no fleet")
		}
	}
}
