package queue

import (
	"fmt"
	"testing"

	"waypost/gossip/ledger"
)

// benchEstimator holds 128 open claims, behind evidence of one more.
func benchEstimator(b *testing.B) *Estimator {
	e := newLedgerEstimator(b)
	e.lag.set(100)
	e.Sample(Sample{At: atMs(0), Running: ptr(8), Waiting: ptr(100), Finished: ptr(0.0), KVUsedRatio: ptr(.5)})
	claimAt(b, e, 0, 1, 1, 2000)
	for seq := uint64(2); seq <= 129; seq++ {
		claimAt(b, e, float64(seq), 1, seq, 300+int(seq)*37%6000)
	}
	e.Sample(Sample{At: atMs(250), Running: ptr(8), Waiting: ptr(100), Finished: ptr(1.0), KVUsedRatio: ptr(.5)})
	markAt(b, e, 300, 1, 1, ledger.MarkFirst, 0)
	return e
}

// BenchmarkLoad128 builds a report with 128 open claims.
func BenchmarkLoad128(b *testing.B) {
	e := benchEstimator(b)
	b.ReportAllocs()
	for b.Loop() {
		e.Load(atMs(400))
	}
}

// BenchmarkLoadServed builds a report of a worker where a request waits behind
// eighty that get their answers, which is how most are built.
func BenchmarkLoadServed(b *testing.B) {
	e := newLedgerEstimator(b)
	e.lag.set(100)
	for seq := uint64(1); seq <= 80; seq++ {
		claimAt(b, e, float64(seq), 1, seq, 1000)
		e.Stores(atMs(float64(seq)+.5), []Store{blocks(fmt.Sprintf("1/%d", seq), 0, 992)})
	}
	claimAt(b, e, 100, 1, 81, 1000)
	e.Sample(Sample{At: atMs(101), Running: ptr(80), Waiting: ptr(1), Finished: ptr(0.0), KVUsedRatio: ptr(.5)})
	if open, kept := e.OpenClaims(); open != 1 || kept != 81 {
		b.Fatalf("%d of %d claims are open", open, kept)
	}
	b.ReportAllocs()
	for b.Loop() {
		e.Load(atMs(110))
	}
}

// BenchmarkIntake takes a claim in and ends it, beside 128 open ones.
func BenchmarkIntake(b *testing.B) {
	e := benchEstimator(b)
	c := claimed{2, 0, "x", 4096, 512}
	o := c.offer(3)
	frame := &ledger.ClaimFrame{Coordinator: 2, Agent: testAgent, Offers: []ledger.Offer{o}}
	marks := &ledger.MarkFrame{Coordinator: 2, Marks: []ledger.Marked{{What: ledger.MarkGone}}}
	now := atMs(400)
	b.ReportAllocs()
	for b.Loop() {
		frame.Offers[0].Seq++
		marks.Marks[0].Seq = frame.Offers[0].Seq
		if _, err := e.Claims(now, frame); err != nil {
			b.Fatal(err)
		}
		if _, err := e.Marks(now, marks); err != nil {
			b.Fatal(err)
		}
		e.ledger.remove(func(c *claim) bool { return c.id.coordinator == 2 })
	}
}

// BenchmarkStores matches a step's batch: 128 blocks of one claim.
func BenchmarkStores(b *testing.B) {
	e := benchEstimator(b)
	s := []Store{blocks("1/60", 0, 2048)}
	b.ReportAllocs()
	for b.Loop() {
		e.Stores(atMs(400), s)
	}
}
