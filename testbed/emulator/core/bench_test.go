package core_test

import (
	"fmt"
	"testing"
	"time"

	"waypost/testbed/emulator/core"
)

// BenchmarkDecodeStep is one step of 64 decoding requests.
func BenchmarkDecodeStep(b *testing.B) {
	o := core.Options{BlockTokens: 16, PoolBlocks: 20000, MaxModelTokens: 131072, StepTokens: 8192, MaxRunning: 256, StepTime: core.Llama8BH100}
	c, err := core.New(o)
	if err != nil {
		b.Fatal(err)
	}
	n := 0
	fill := func() {
		for c.Status().Running+c.Status().Waiting < 64 {
			n++
			if _, err := c.Add(core.Request{ID: fmt.Sprint(n), Prompt: prompt(byte(n), 100), MaxTokens: 1 << 16, Generate: func(i int) (uint32, bool) { return uint32(i), i == 2000 }}, 0); err != nil {
				b.Fatal(err)
			}
		}
	}
	fill()
	b.ReportAllocs()
	for b.Loop() {
		if c.Status().Running < 64 {
			fill()
		}
		c.Schedule(0)
		c.Finish(time.Millisecond)
	}
}

// BenchmarkPrefill is a prompt of 12,000 tokens against a full pool: 750
// blocks hashed, evicted and stored.
func BenchmarkPrefill(b *testing.B) {
	o := core.Options{BlockTokens: 16, PoolBlocks: 4000, MaxModelTokens: 32768, StepTokens: 16384, MaxRunning: 256, StepTime: core.Llama8BH100}
	c, err := core.New(o)
	if err != nil {
		b.Fatal(err)
	}
	p := prompt('p', 12000)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		p[0] = uint32(i)
		if _, err := c.Add(core.Request{ID: "p", Prompt: p, MaxTokens: 1, Generate: func(int) (uint32, bool) { return 1, false }}, 0); err != nil {
			b.Fatal(err)
		}
		c.Schedule(0)
		c.Finish(time.Millisecond)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/750, "ns/block")
}
