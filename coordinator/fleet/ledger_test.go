package fleet

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

const peer1, peer2 = uint64(0xc8), uint64(0x0b) // above and below ownProcess

// echoing is a report that echoes the coordinators' claims.
func echoing(queueMs float64, echoes ...ledger.Echo) ledger.Load {
	l := idle(1000)
	l.QueueMs, l.Echo = ptr(queueMs), echoes
	return l
}

func own(upto uint64) ledger.Echo { return ledger.Echo{Coordinator: ownProcess, Upto: upto} }

func (r *rig) placed(ms float64, coordinator uint64, p ledger.Placed) Changes {
	r.t.Helper()
	changes, err := r.f.Placed(at(ms), coordinator, p)
	if err != nil {
		r.t.Fatalf("Placed: %v", err)
	}
	return changes
}

func placed(seq uint64, ageMs float64, tokens int, change ...func(*ledger.Placed)) ledger.Placed {
	p := ledger.Placed{Worker: worker0, Tenant: "t", RequestID: fmt.Sprint("p", seq), Attempt: 1, Offer: ledger.Offer{
		AgeMs: ageMs, Claim: ledger.Claim{Seq: seq, EngineProcess: 1000, PromptTokens: tokens, UncachedTokens: tokens},
	}}
	for _, c := range change {
		c(&p)
	}
	return p
}

// Peers' claims count on top of the report exactly while it does not speak of
// them: lost, doubled, late and reordered ones do no harm.
func TestPeersClaims(t *testing.T) {
	r := newRig(t, 1)
	r.load(1000, "gpu-00", echoing(100))
	check := func(ms, queue, pending float64) {
		t.Helper()
		s := r.snapshot(worker0)
		if got := s.Waiting.QueueMs(ms); math.Abs(got-queue) > 1e-9 || s.OpenClaims != pending {
			t.Errorf("at %v: queue %v with %v pending, want %v with %v", ms, got, s.OpenClaims, queue, pending)
		}
	}
	r.placed(1010, peer1, placed(2, 4, 200))
	r.placed(1011, peer1, placed(1, 8, 100)) // made before, told after
	r.placed(1012, peer1, placed(2, 6, 200)) // doubled
	r.claim(1013, "own", worker0, 50)
	check(1013, 100+200+100+50-13, 3)
	// The report covers peer1 up to 1.
	r.load(1020, "gpu-00", echoing(190, ledger.Echo{Coordinator: peer1, Upto: 1}))
	check(1020, 190+200+50, 2)
	r.placed(1021, peer1, placed(1, 18, 100)) // late: covered
	check(1021, 190+200+50-1, 2)
	// A report built 300 ms after a claim that does not echo it ends the wait.
	r.load(1310, "gpu-00", echoing(0, ledger.Echo{Coordinator: peer1, Upto: 1}))
	check(1310, 50, 1)
	r.placed(1311, peer1, placed(2, 305, 200)) // three hundred late
	check(1311, 49, 1)
	// Another coordinator's restart: a new process, seqs from 1.
	r.placed(1320, 0xfe, placed(1, 0, 80, func(p *ledger.Placed) { p.RequestID = "of another" }))
	check(1320, 40+80, 2)
	if got := r.f.Counts(); got.DuplicatePlaces != 2 {
		t.Errorf("counts %+v", got)
	}
	r.placed(1321, ownProcess, placed(9, 0, 80))
	r.placed(1322, peer1, placed(9, 0, 80, func(p *ledger.Placed) { p.Worker = "gpu-77/vllm-8000/0" }))
	if got := r.f.Counts(); got.OwnPlaces != 1 || got.UnknownPlaces != 1 {
		t.Errorf("counts %+v", got)
	}
	if _, err := r.f.Placed(at(1330), 0, placed(1, 0, 5)); !errors.Is(err, ledger.ErrFrame) {
		t.Errorf("nobody's placement: %v", err)
	}
	if _, err := r.f.Placed(at(1330), peer1, placed(1, 0, 0)); !errors.Is(err, ledger.ErrFrame) {
		t.Errorf("a placement without a prompt: %v", err)
	}
}

// Lane down: the walk goes on from the last report with what is placed.
func TestPeersClaimsWithoutReports(t *testing.T) {
	r := newRig(t, 1)
	r.load(0, "gpu-00", echoing(0))
	r.f.CloseLane(at(10), "gpu-00", r.lanes["gpu-00"])
	for i := range 20 {
		r.placed(1000+float64(i), peer1, placed(uint64(i+1), 1, 100))
	}
	if got := r.snapshot(worker0).Waiting.QueueMs(1019); got != 2000-20 {
		t.Errorf("queue %v, want 1980", got)
	}
	// A minute later they are gone, and the work they were is done.
	r.f.Tick(at(62_000))
	if s := r.snapshot(worker0); s.OpenClaims != 0 || s.Live != 0 || s.Waiting.QueueMs(62_000) != 0 || r.f.claims.peerParts != 0 {
		t.Errorf("left: %+v", s)
	}
}

// A peer may know of an engine's restart first.
func TestClaimsForALifeNotSeenYet(t *testing.T) {
	r := newRig(t, 1)
	r.load(0, "gpu-00", echoing(0))
	r.placed(10, peer1, placed(1, 0, 100))
	r.placed(11, peer1, placed(2, 0, 70, func(p *ledger.Placed) { p.EngineProcess = 1001 }))
	h := hello("gpu-00", 1)
	h.Workers[0].EngineProcess = 1001
	if _, err := r.f.UpdateHello(at(20), r.lanes["gpu-00"], h); err != nil {
		t.Fatal(err)
	}
	if s := r.snapshot(worker0); s.OpenClaims != 1 || s.Waiting.QueueMs(20) != 61 {
		t.Errorf("%v pending, queue %v: want the one for the new life", s.OpenClaims, s.Waiting.QueueMs(20))
	}
	r.placed(30, peer1, placed(3, 0, 100)) // for the old life, late
	if s := r.snapshot(worker0); s.OpenClaims != 1 || r.f.Counts().FencedPlaces != 1 {
		t.Errorf("%v pending, counts %+v", s.OpenClaims, r.f.Counts())
	}
}

// Two coordinators place the same attempt: the smaller mark stays, on both.
func TestOneOfTwoPlacementsStays(t *testing.T) {
	for _, test := range []struct {
		name      string
		peer      uint64
		attempt   uint32
		ownStays  bool
		peerStays bool
	}{
		{"the peer's mark is larger", peer1, 1, true, false},
		{"the peer's mark is smaller", peer2, 1, false, true},
		{"a higher attempt at the peer", peer1, 2, false, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, 2)
			r.load(0, "gpu-00", echoing(0))
			r.load(0, "gpu-01", echoing(0))
			r.claim(10, "x", worker0, 300)
			r.frames(11)
			told := placed(1, 5, 100, func(p *ledger.Placed) {
				p.Worker, p.RequestID, p.Attempt = "gpu-01/vllm-8000/0", "x", test.attempt
			})
			changes := r.placed(20, test.peer, told)
			if got := r.f.OpenClaims() == 1; got != test.ownStays {
				t.Errorf("own claim stays: %v", got)
			}
			if got := r.snapshot("gpu-01/vllm-8000/0").OpenClaims == 1; got != test.peerStays {
				t.Errorf("peer's claim stays: %v", got)
			}
			if got := r.snapshot(worker0).Waiting.QueueMs(20) > 0; got != test.ownStays {
				t.Errorf("own work stays: %v", got)
			}
			_, marks, _ := r.frames(21)
			if !test.ownStays {
				if len(changes.Ended) != 1 || changes.Ended[0].How != EndSuperseded || len(marks) != 1 || marks[0].What != ledger.MarkSuperseded {
					t.Errorf("ended %v, marks %v", changes.Ended, marks)
				}
				if got, err := r.f.Admit(RequestKey{"t", "x"}, test.attempt); err != nil || got.PlacedBy == nil || got.PlacedBy.Worker != "gpu-01/vllm-8000/0" || got.PlacedBy.Coordinator != test.peer {
					t.Errorf("admission %+v, %v", got, err)
				}
			} else if len(marks) != 0 {
				t.Errorf("marks %v", marks)
			}
			r.placed(22, test.peer, told) // again: nothing
			if got := r.f.OpenClaims() == 1; got != test.ownStays {
				t.Errorf("own claim stays after the second telling: %v", got)
			}
		})
	}
	// The other way round: known before it is claimed here.
	r := newRig(t, 1)
	r.load(0, "gpu-00", echoing(0))
	r.placed(10, peer2, placed(1, 0, 100, func(p *ledger.Placed) { p.RequestID, p.Attempt = "x", 3 }))
	if _, err := r.f.Admit(RequestKey{"t", "x"}, 2); !errors.Is(err, ErrOlderAttempt) {
		t.Errorf("an attempt below the peer's: %v", err)
	}
	if got, err := r.f.Admit(RequestKey{"t", "x"}, 4); err != nil || !cmp.Equal(got.ExcludeProcesses, []uint64{1000}) {
		t.Errorf("the next attempt: %+v, %v", got, err)
	}
	r.claim(11, "x", worker0, 50, func(n *NewClaim) { n.Attempt = 4 })
	if s := r.snapshot(worker0); s.OpenClaims != 1 || s.Waiting.QueueMs(11) != 50 {
		t.Errorf("%v pending, queue %v: the peer's attempt 3 still counts", s.OpenClaims, s.Waiting.QueueMs(11))
	}
	r.placed(12, peer2, placed(2, 0, 100, func(p *ledger.Placed) { p.RequestID, p.Attempt = "x", 3 }))
	if s := r.snapshot(worker0); s.OpenClaims != 1 {
		t.Errorf("%v pending after an older attempt was told", s.OpenClaims)
	}
}

// A placement over two workers is one reservation with two claims.
func TestPrefillDecodePair(t *testing.T) {
	book := newKeyBook(t)
	r := newRig(t, 2, func(o *Options) { o.Predicted = book })
	const decodes = "gpu-01/vllm-8000/0"
	r.load(0, "gpu-00", echoing(0))
	r.load(0, "gpu-01", echoing(0))
	pair := func(n *NewClaim) {
		id, process, _ := r.f.LookupWorker(decodes)
		n.Keys, n.KeyDepths = []prefix.Key{7}, []uint32{512}
		n.Decode = &DecodeClaim{Worker: id, Claim: ledger.Claim{
			EngineProcess: process, PromptTokens: n.PromptTokens, UncachedTokens: 1, OutputTokens: 90, Keys: []prefix.Key{7}, KeyDepths: []uint32{512},
		}}
	}
	c := r.claim(10, "x", worker0, 600, pair)
	if c.Seq != 1 || c.Decode == nil || c.Decode.Seq != 1 || r.f.OpenClaims() != 1 || book.count() != 2 {
		t.Fatalf("claim %+v, %d open, %d key sets", c, r.f.OpenClaims(), book.count())
	}
	queues := func(ms, prefills, decodesMs float64) {
		t.Helper()
		if got, other := r.snapshot(worker0).Waiting.QueueMs(ms), r.snapshot(decodes).Waiting.QueueMs(ms); got != prefills || other != decodesMs {
			t.Errorf("at %v: queues %v and %v, want %v and %v", ms, got, other, prefills, decodesMs)
		}
	}
	queues(10, 600, 1)
	out := r.f.TakeOutgoing(at(10))
	if len(out.Hosts) != 2 || len(out.Places) != 2 || out.Places[0].RequestID != "x" || out.Places[1].RequestID != "x" {
		t.Fatalf("outgoing %+v", out)
	}
	// A peer takes both.
	other := newRig(t, 2, func(o *Options) { o.Process = peer1 })
	for _, p := range out.Places {
		other.placed(12, ownProcess, p)
	}
	if other.snapshot(worker0).OpenClaims != 1 || other.snapshot(decodes).OpenClaims != 1 {
		t.Error("the peer did not take both claims")
	}
	// First token: the prefill worker is done with it, the other goes on.
	if _, err := r.f.Mark(at(300), "pl_x", ledger.MarkFirst, 0); err != nil {
		t.Fatal(err)
	}
	queues(300, 0, 0)
	got := map[string]string{}
	for _, h := range r.f.TakeOutgoing(at(300)).Hosts {
		for _, m := range h.Marks {
			got[h.Host] += string(m.Marks[0].What)
		}
	}
	if diff := cmp.Diff(map[string]string{"gpu-00": "done", "gpu-01": "first"}, got); diff != "" {
		t.Error(diff)
	}
	if changes, err := r.f.Mark(at(900), "pl_x", ledger.MarkDone, 90); err != nil || len(changes.Ended) != 1 || r.f.OpenClaims() != 0 || book.count() != 0 {
		t.Errorf("%v, ended %v, %d open, %d key sets", err, changes.Ended, r.f.OpenClaims(), book.count())
	}
	// If either engine is gone the placement is over, and a later attempt uses
	// neither life.
	r.claim(1000, "y", worker0, 600, pair)
	h := hello("gpu-01", 1)
	h.Workers[0].EngineProcess = 2000
	changes, err := r.f.UpdateHello(at(1010), r.lanes["gpu-01"], h)
	if err != nil || len(changes.Ended) != 1 || changes.Ended[0].How != EndWorkerLost {
		t.Errorf("ended %v, %v", changes.Ended, err)
	}
	queues(1010, 0, 0)
	if got, err := r.f.Admit(RequestKey{"t", "y"}, 2); err != nil || !cmp.Equal(got.ExcludeProcesses, []uint64{1000, 1000}) {
		t.Errorf("admission %+v, %v", got, err)
	}
	// Both or none.
	id, _, _ := r.f.LookupWorker(decodes)
	n := NewClaim{
		Key: RequestKey{ID: "z"}, Attempt: 1, Placement: "pl_z", Claim: ledger.Claim{EngineProcess: 1000, PromptTokens: 10, UncachedTokens: 10},
		Decode: &DecodeClaim{Worker: id, Claim: ledger.Claim{EngineProcess: 1000, PromptTokens: 10, UncachedTokens: 1}},
	}
	if _, _, _, err := r.f.Claim(at(1020), n); !errors.Is(err, ErrFenced) || r.f.OpenClaims() != 0 {
		t.Errorf("a decode worker that restarted: %v, %d open", err, r.f.OpenClaims())
	}
	n.Decode.Worker = 0
	if _, _, _, err := r.f.Claim(at(1020), n); !errors.Is(err, ErrClaim) || !strings.Contains(err.Error(), "decode.worker") {
		t.Errorf("a pair of one: %v", err)
	}
	if w := r.snapshot(worker0); w.Live != 0 || w.OpenClaims != 0 || r.snapshot(decodes).OpenClaims != 0 {
		t.Error("something is left")
	}
}

// Predicted keys of a peer's claim live for a while and never twice.
func TestPredictedKeysOfPeers(t *testing.T) {
	book := newKeyBook(t)
	r := newRig(t, 1, func(o *Options) { o.Predicted = book })
	r.load(0, "gpu-00", echoing(0))
	keyed := func(seq uint64) ledger.Placed {
		return placed(seq, 0, 1000, func(p *ledger.Placed) { p.Keys, p.KeyDepths = []prefix.Key{prefix.Key(seq)}, []uint32{512} })
	}
	r.placed(10, peer1, keyed(1))
	r.placed(10, peer1, keyed(1))
	if book.count() != 1 {
		t.Fatalf("%d key sets", book.count())
	}
	r.f.Tick(at(10 + 1300 + 1900)) // its predicted second, 1.3 times, and two more
	if book.count() != 1 {
		t.Error("gone before its time")
	}
	r.f.Tick(at(10 + 1300 + 2001))
	if book.count() != 0 {
		t.Errorf("%d key sets after its time", book.count())
	}
	for i := range maxKeptKeys + 20 {
		r.placed(5000, peer1, keyed(uint64(i+2)))
	}
	if book.count() != maxKeptKeys {
		t.Errorf("%d key sets, want the bound", book.count())
	}
	r.remove(6000, "gpu-00")
	r.f.Tick(at(100_000))
	if book.count() != 0 || r.f.claims.peerParts != 0 {
		t.Errorf("%d key sets, %d claims of peers left", book.count(), r.f.claims.peerParts)
	}
}

// λ counts every arrival once, by placements or by the growth of the echoes.
func TestArrivalsOfPeers(t *testing.T) {
	rate := func(ms float64, r *rig) float64 {
		_, sit, err := r.f.Candidates(at(ms), Query{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return sit.ArrivalsPerMs * 1000
	}
	for _, test := range []struct {
		name           string
		places, echoes bool
	}{{"placements", true, false}, {"echoes", false, true}, {"both", true, true}} {
		r := newRig(t, 1)
		for i := range 600 { // 20 per second for 30 s, half of them a peer's
			ms := float64(i) * 50
			if i%2 == 0 {
				r.claim(ms, fmt.Sprint("r", i), worker0, 10)
			} else if test.places {
				r.placed(ms, peer1, placed(uint64(i/2+1), 3, 10))
				r.placed(ms, peer1, placed(uint64(max(i/2-3, 1)), 3, 10)) // late, and told before
			}
			if i%4 == 3 {
				l := echoing(0)
				if test.echoes {
					l.Echo = []ledger.Echo{{Coordinator: peer1, Upto: uint64(i/2 + 1)}, own(1)}
				}
				r.load(ms+1, "gpu-00", l)
			}
		}
		if got := rate(30_000, r); got < 17 || got > 23 {
			t.Errorf("%s: %v arrivals per second, want 20", test.name, got)
		}
	}
}

// Claims of peers that no report spoke of for a minute are kept no longer, and
// their work waits on.
func TestPeersClaimsWithoutAReport(t *testing.T) {
	r := newRig(t, 1)
	r.load(0, "gpu-00", echoing(0))
	for seq := range uint64(100) {
		r.placed(1, peer1, placed(seq+1, 0, 1000))
	}
	before := r.snapshot(worker0).Waiting.QueueMs(offerableMs + 10)
	if !(before > 30_000) {
		t.Fatalf("queue %v after a minute: the test shows nothing", before)
	}
	r.f.Tick(at(offerableMs + 10))
	if got := r.snapshot(worker0).Waiting.QueueMs(offerableMs + 10); got != before || r.f.claims.peerParts != 0 {
		t.Errorf("queue %v, before %v; %d claims are kept", got, before, r.f.claims.peerParts)
	}
}

func TestBoundsOfPeers(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.MaxClaims = 3000 })
	r.load(0, "gpu-00", echoing(0))
	for i := range 5000 {
		for _, c := range []uint64{peer1, peer2} {
			r.placed(1, c, placed(uint64(i+1), 0, 10, func(p *ledger.Placed) { p.RequestID = "" }))
		}
	}
	s := r.snapshot(worker0)
	if got := s.Waiting.QueueMs(1); got != 100_000 {
		t.Errorf("queue %v, want 100,000: folding loses nothing", got)
	}
	w := r.f.slots[0]
	pending := map[uint64]int{}
	for _, p := range w.open {
		if p.pending() {
			pending[p.coordinator]++
		}
	}
	if pending[peer1] > maxPending || pending[peer2] > maxPending || len(w.open) > 3000 || r.f.claims.peerParts != len(w.open) {
		t.Errorf("%v pending, %d kept, counted as %d", pending, len(w.open), r.f.claims.peerParts)
	}
	if s.OpenClaims != 10_000 {
		t.Errorf("%v on top: the folded ones are live as well", s.OpenClaims)
	}
	for c := range uint64(500) {
		r.placed(2, 1000+c, placed(1, 0, 10))
	}
	if len(w.counted) > maxCoordinators {
		t.Errorf("%d coordinators are counted", len(w.counted))
	}
	// Nobody fetches what is to be sent.
	for i := range 3 * maxPlacesWaiting {
		id := fmt.Sprint("r", i)
		r.claim(3, id, worker0, 10)
		if _, err := r.f.Mark(at(3), "pl_"+id, ledger.MarkDone, 1); err != nil {
			t.Fatal(err)
		}
	}
	if len(r.f.claims.places) > maxPlacesWaiting || len(w.offer.marks) > maxMarksWaiting || len(r.f.outbox) != 1 {
		t.Errorf("%d placements, %d marks, %d workers wait", len(r.f.claims.places), len(w.offer.marks), len(r.f.outbox))
	}
	if r.f.Counts().LostPlaces == 0 {
		t.Error("lost placements are not counted")
	}
}

// Waiting requests of an agent that knows no request's size are priced by the
// pool's mean claim.
func TestForeignQueueIsPricedByThePool(t *testing.T) {
	r := newRig(t, 2)
	r.load(0, "gpu-00", echoing(0))
	unknown := idle(1000)
	unknown.QueueMs, unknown.Foreign, unknown.Waiting = nil, ptr(uint32(4)), ptr(uint32(4))
	r.load(1, "gpu-01", unknown)
	if s := r.snapshot("gpu-01/vllm-8000/0"); s.QueueKnown {
		t.Error("a queue out of nowhere")
	}
	for i := range 50 {
		r.claim(2, fmt.Sprint("r", i), worker0, 200)
	}
	r.load(10, "gpu-01", unknown)
	if s := r.snapshot("gpu-01/vllm-8000/0"); !s.QueueKnown || s.Waiting.QueueMs(10) != 4.5*200 {
		t.Errorf("queue known %v, %v ms; want 900", s.QueueKnown, s.Waiting.QueueMs(10))
	}
}
