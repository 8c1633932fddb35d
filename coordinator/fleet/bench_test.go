package fleet

import (
	"fmt"
	"testing"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
)

// BenchmarkPlaced takes a peer's placement beside 128 claims on top of the
// report; each is in order, as they come.
func BenchmarkPlaced(b *testing.B) {
	r := newRig(b, 1)
	r.load(0, "gpu-00", echoing(0))
	for i := range uint64(128) {
		r.placed(1, peer1, placed(i+1, 0, 500))
	}
	p := placed(0, 0, 500)
	n := uint64(128)
	b.ReportAllocs()
	for b.Loop() {
		n++
		p.Seq, p.RequestID = n, ""
		r.placed(2, peer1, p)
		r.f.slots[0].open = r.f.slots[0].open[:128]
		r.f.claims.peerParts = 128
	}
}

// BenchmarkClaimToFrames makes a claim and hands its frame and placement over.
func BenchmarkClaimToFrames(b *testing.B) {
	r := newRig(b, 1)
	r.load(0, "gpu-00", echoing(0))
	n := 0
	b.ReportAllocs()
	for b.Loop() {
		n++
		id := fmt.Sprint("x", n)
		r.claim(2, id, worker0, 500)
		r.f.TakeOutgoing(at(3))
		if _, err := r.f.Mark(at(4), "pl_"+id, ledger.MarkDone, 1); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkLoadEchoing takes a report that covers half of 128 claims of four
// coordinators and refolds the rest.
func BenchmarkLoadEchoing(b *testing.B) {
	r := newRig(b, 1)
	r.load(0, "gpu-00", echoing(0))
	l := idle(1000)
	for c := range uint64(4) {
		l.Echo = append(l.Echo, ledger.Echo{Coordinator: c + 1, Upto: 16})
		for i := range uint64(32) {
			r.placed(1, c+1, placed(i+1, 0, 500, func(p *ledger.Placed) { p.RequestID = "" }))
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		r.load(2, "gpu-00", l)
	}
}

// BenchmarkDecide decides over fleets whose workers have open claims: their
// number must not matter.
func BenchmarkDecide(b *testing.B) {
	for _, hosts := range []int{1000, 4000} {
		for _, claims := range []int{0, 8} {
			b.Run(fmt.Sprintf("%d workers, %d claims each", hosts, claims), func(b *testing.B) {
				r := newRig(b, hosts)
				for i := range hosts {
					l := idle(1000)
					l.QueueMs, l.Live = ptr(float64(i*37%900)), ptr(uint32(i%40))
					r.load(0, fmt.Sprintf("gpu-%02d", i), l)
				}
				for i := range claims * hosts {
					r.claim(1, fmt.Sprint("c", i), fmt.Sprintf("gpu-%02d/vllm-8000/0", i%hosts), 500)
				}
				policy := placement.DefaultPolicy()
				req := placement.Request{ID: "r", PromptTokens: 8192}
				ask := &Ask{Request: &req, Policy: &policy}
				ask.Matches.Add(5, placement.Held{Tokens: 4096})
				ask.Matches.Add(17, placement.Held{Tokens: 1024})
				var d placement.Decision
				var candidates []placement.Candidate
				b.ReportAllocs()
				for b.Loop() {
					var err error
					if candidates, _, err = r.f.Decide(at(2), ask, candidates, &d); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(len(candidates)), "priced")
			})
		}
	}
}
