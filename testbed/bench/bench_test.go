package bench

import (
	"testing"
	"time"
)

// recordTapes is what one engine publishes, second by second.
func recordTapes(b *testing.B, blocks int, perSecond, seconds float64) (tapes []tape, events int) {
	var pool jobPool
	e := newEngine(blocks, &pool)
	requests := mixRequests(b, perSecond, seconds)
	n := 0
	for tick := 1000.0; tick <= 1000*seconds; tick += 1000 {
		for ; n < len(requests) && requests[n].ArrivalMs < tick; n++ {
			e.advanceTo(requests[n].ArrivalMs)
			j := pool.newJob(&requests[n])
			e.submit(j, j.prompt-e.match(j)*blockTokens, requests[n].ArrivalMs)
		}
		e.advanceTo(tick)
		tapes = append(tapes, e.tape)
		events += e.tape.blocks
		e.tape = tape{}
	}
	return tapes, events
}

// BenchmarkAgent is the production block table with its encoder, on what an
// engine of 32,768 blocks publishes while its cache fills and turns over.
func BenchmarkAgent(b *testing.B) {
	tapes, events := recordTapes(b, poolBlocks, mixPerWorker, 100)
	b.ReportAllocs()
	for b.Loop() {
		a := newAgent(poolBlocks, 1)
		for i := range tapes {
			a.apply(&tapes[i], float64(i)*1000)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*events), "ns/blockEvent")
}

// BenchmarkEngine is the simulation itself, which must not be what is measured.
func BenchmarkEngine(b *testing.B) {
	requests := mixRequests(b, 4*mixPerWorker, 60)
	stored := 0.0
	b.ReportAllocs()
	for b.Loop() {
		s := newClosed(closedOptions{workers: 4, blocks: poolBlocks, durationMs: 60_000, tickMs: 1000}).run(requests)
		stored += s.BlocksPerSec * s.Seconds * 4
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/stored, "ns/block")
}

// BenchmarkIndex is lookups of 1,000-block chains and updates, in a small fleet.
func BenchmarkIndex(b *testing.B) {
	x := &indexBench{opt: indexOptions{smallFleet(30_000), time.Millisecond}}
	if err := x.live(); err != nil {
		b.Fatal(err)
	}
	if err := x.prepareQueries(); err != nil {
		b.Fatal(err)
	}
	if err := x.fill(); err != nil {
		b.Fatal(err)
	}
	x.warm()
	b.Run("lookup", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			x.lookup(&x.long[i%len(x.long)].probe)
		}
	})
	b.Run("decide", func(b *testing.B) {
		b.ReportAllocs()
		for i, worker := 0, 0; b.Loop(); i++ {
			q := x.long[i%len(x.long)]
			worker += x.decide(q)
		}
	})
	b.Run("frame", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			ok, err := x.applyNext()
			if err != nil {
				b.Fatal(err)
			}
			if !ok { // from the beginning
				b.StopTimer()
				x.applied = 0
				if err := x.fill(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		}
	})
}

// BenchmarkPlace is one placement and its release, one caller at a time.
func BenchmarkPlace(b *testing.B) {
	opt := fleetOptions{workers: 64, blocks: 2000}
	s, err := startService(b.Context(), opt)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := s.stop(); err != nil {
			b.Error(err)
		}
	})
	var prompts [][]uint32
	for _, q := range chainQueries(opt)[:128] {
		prompts = append(prompts, q.AppendTokens(nil))
	}
	for _, t := range []Transport{TransportGRPC, TransportJSON} {
		b.Run(string(t), func(b *testing.B) {
			c, err := newCaller(s.address(), t, prompts)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				id, _, err := c.place(b.Context(), i)
				if err != nil {
					b.Fatal(err)
				}
				if err := c.release(b.Context(), id); err != nil {
					b.Fatal(err)
				}
			}
			if err := c.close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}
