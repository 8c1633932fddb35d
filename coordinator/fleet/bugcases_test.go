package fleet

import (
	"fmt"
	"testing"

	"waypost/gossip/ledger"
)

// HOT-02: three coordinators place 300 requests in 200 ms on the reports they
// began with. What each places reaches the others 15 ms later, and nobody piles
// onto one worker: at the end each believes the same of every worker.
func TestHOT02CoordinatorsDoNotHerd(t *testing.T) {
	const workers, placements, lateMs = 6, 300, 15
	var rigs [3]*rig
	for i := range rigs {
		rigs[i] = newRig(t, workers, func(o *Options) { o.Process = 0xc0 + uint64(i) })
		rigs[i].loadAll(0)
	}
	type word struct {
		madeMs float64
		from   int
		placed ledger.Placed
	}
	var words []word
	tell := func(now float64) {
		for len(words) > 0 && words[0].madeMs+lateMs <= now {
			w := words[0]
			words = words[1:]
			w.placed.AgeMs = now - w.madeMs
			for i, r := range rigs {
				if i == w.from {
					continue
				}
				if _, err := r.f.Placed(at(now), 0xc0+uint64(w.from), w.placed); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	counts := map[string]int{}
	for n := range placements {
		now := 100 + 200*float64(n)/placements
		tell(now)
		from, id := n%len(rigs), fmt.Sprint("r", n)
		name := rigs[from].place(now, id, 300+n*37%900)
		counts[name]++
		c, ok := rigs[from].f.Open("pl_" + id)
		if !ok {
			t.Fatalf("%s is not open", id)
		}
		words = append(words, word{now, from, ledger.Placed{Worker: name, Tenant: "t", RequestID: id, Attempt: 1, Offer: ledger.Offer{Claim: c.Claim}}})
	}
	for name, n := range counts {
		if n > placements/workers*3/2 {
			t.Errorf("%s got %d of %d: %v", name, n, placements, counts)
		}
	}
	tell(400)
	for name := range counts {
		want := rigs[0].snapshot(name).Waiting.QueueMs(400)
		for _, r := range rigs[1:] {
			if got := r.snapshot(name).Waiting.QueueMs(400); got < want-1 || got > want+1 || got == 0 {
				t.Errorf("%s waits %v ms for one coordinator, %v for another", name, want, got)
			}
		}
	}
}

// DSC-02: a worker whose address changes is the same worker, and the old address is
// never given out after the word of the new one.
func TestDSC02ChangedAddressIsGivenOut(t *testing.T) {
	r := newRig(t, 1)
	r.load(1000, "gpu-00", idle(1000))
	id, _, _ := r.f.LookupWorker(worker0)
	moved := hello("gpu-00", 1)
	moved.Workers[0].URL = "http://10.0.0.9:9000"
	changes, err := r.f.UpdateHello(at(2000), r.lanes["gpu-00"], moved)
	if err != nil || len(changes.Removed) != 0 {
		t.Fatalf("%v, removed %v", err, changes.Removed)
	}
	w, err := r.f.Worker(at(2000), worker0)
	if now, _, _ := r.f.LookupWorker(worker0); err != nil || now != id || w.Facts.URL != "http://10.0.0.9:9000" {
		t.Errorf("worker %d at %s, was %d: %v", now, w.Facts.URL, id, err)
	}
	candidates, _, err := r.f.Candidates(at(2000), Query{}, nil)
	if err != nil || len(candidates) != 1 {
		t.Fatalf("%d candidates: %v", len(candidates), err)
	}
}
