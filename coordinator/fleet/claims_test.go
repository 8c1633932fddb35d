package fleet

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// The own choices count at once: a burst without a report in between spreads.
func TestBurstSpreads(t *testing.T) {
	r := newRig(t, 5)
	r.loadAll(0)
	counts := map[string]int{}
	for i := range 100 {
		counts[r.place(100+float64(i)/2, fmt.Sprint("r", i), 400)]++
	}
	for name, n := range counts {
		if n < 15 || n > 25 {
			t.Errorf("%s got %d of 100", name, n)
		}
	}
}

// Without any queue data own claims alone spread the load.
func TestSpreadWithoutMetrics(t *testing.T) {
	r := newRig(t, 4)
	counts := map[string]int{}
	for i := range 200 {
		ms := 100 + float64(i)*20
		for host := range r.lanes { // reports come, but know nothing
			r.load(ms, host, ledger.Load{EngineProcess: 1000, State: ledger.StateReady})
		}
		counts[r.place(ms, fmt.Sprint("r", i), 400)]++
	}
	for name, n := range counts {
		if n < 40 || n > 60 {
			t.Errorf("%s got %d of 200", name, n)
		}
	}
}

// A report that never tells its queue does not make served claims wait again.
func TestUnknownQueueDrainsByTime(t *testing.T) {
	r := newRig(t, 1)
	r.claim(0, "a", worker0, 300)
	for ms := 0.0; ms <= 400; ms += 50 {
		r.load(ms, "gpu-00", ledger.Load{EngineProcess: 1000, State: ledger.StateReady})
		if got, want := r.snapshot(worker0).Waiting.QueueMs(ms), max(300-ms, 0); got != want {
			t.Errorf("queue %v at %v, want %v", got, ms, want)
		}
	}
	if s := r.snapshot(worker0); s.OpenClaims != 1 {
		t.Errorf("%v open claims: it was not ended by time alone", s.OpenClaims)
	}
}

// What a report covers: its echo; and of what it does not echo, claims that
// it must have known.
func TestCoverage(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*ledger.Load)
		atMs   float64
		live   float64 // claims left on top of the report
	}{
		{"counters sampled 100 ms after", func(*ledger.Load) {}, 1100, 1},
		{"counters sampled later", func(*ledger.Load) {}, 1101, 0},
		{"counters are older than the report", func(l *ledger.Load) { l.CountersAgeMs = ptr(500.0) }, 1500, 1},
		{"no counters: by the report's own time", func(l *ledger.Load) { l.CountersAgeMs = nil }, 1300, 1},
		{"no counters, later", func(l *ledger.Load) { l.CountersAgeMs = nil }, 1301, 0},
		{"echoed", func(l *ledger.Load) { l.Echo = []ledger.Echo{{Coordinator: ownProcess, Upto: 1}} }, 1001, 0},
		{"another coordinator's echo", func(l *ledger.Load) { l.Echo = []ledger.Echo{{Coordinator: 0xdd, Upto: 9}} }, 1300, 1},
		{"not echoed for more than 300 ms", func(l *ledger.Load) { l.Echo = []ledger.Echo{{Coordinator: 0xdd, Upto: 9}} }, 1301, 0},
		{"queue unknown: never", func(l *ledger.Load) { l.QueueMs = nil }, 9000, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, 1)
			r.loadAll(500)
			if c := r.claim(1000, "a", worker0, 160); c.Seq != 1 {
				t.Fatalf("first seq %d", c.Seq)
			}
			l := idle(1000)
			l.QueueMs, l.Live = ptr(20.0), ptr(uint32(2))
			test.change(&l)
			r.load(test.atMs, "gpu-00", l)
			s := r.snapshot(worker0)
			if s.OpenClaims != test.live || s.Live != 2+test.live || s.HeldBlocks != 11*test.live {
				t.Errorf("%v claims on top, live %v, held %v; want %v", s.OpenClaims, s.Live, s.HeldBlocks, test.live)
			}
			if l.QueueMs != nil {
				if got, want := s.Waiting.QueueMs(test.atMs), 20+160*test.live; got != want {
					t.Errorf("queue %v, want %v", got, want)
				}
			}
			if r.f.OpenClaims() != 1 {
				t.Error("a covered claim is still open: its reservation has not ended")
			}
		})
	}
}

func TestMarks(t *testing.T) {
	r := newRig(t, 1)
	r.loadAll(0)
	r.claim(100, "a", worker0, 300)
	r.claim(100, "b", worker0, 200)
	queue := func(ms float64) float64 { return r.snapshot(worker0).Waiting.QueueMs(ms) }
	if queue(100) != 500 {
		t.Fatalf("queue %v", queue(100))
	}
	mark := func(ms float64, id string, m ledger.Mark) Changes {
		t.Helper()
		changes, err := r.f.Mark(at(ms), "pl_"+id, m, 12)
		if err != nil {
			t.Fatal(err)
		}
		return changes
	}
	mark(200, "a", ledger.MarkFirst)
	if s := r.snapshot(worker0); queue(200) != 100 || s.OpenClaims != 2 {
		t.Errorf("after a's first token: queue %v, %v open; want b's 100 left and both live", queue(200), s.OpenClaims)
	}
	mark(210, "a", ledger.MarkFirst) // again: nothing
	changes := mark(300, "a", ledger.MarkDone)
	if len(changes.Ended) != 1 || changes.Ended[0].How != EndDone || !changes.Ended[0].First || changes.Ended[0].AgeMs != 200 {
		t.Errorf("ended %+v", changes.Ended)
	}
	mark(310, "b", ledger.MarkGone)
	if s := r.snapshot(worker0); queue(310) != 0 || s.OpenClaims != 0 || s.Live != 0 || s.HeldBlocks != 0 {
		t.Errorf("after all ended: %+v", s)
	}
	// One end per placement, whatever is reported later.
	for range 20 {
		mark(400, "a", ledger.MarkFailed)
		mark(400, "a", ledger.MarkDone)
	}
	if s := r.snapshot(worker0); s.Live != 0 || r.f.Counts().DuplicateMarks != 40 {
		t.Errorf("live %v, counts %+v", s.Live, r.f.Counts())
	}
	if how, ok := r.f.Ended("pl_a"); !ok || how != EndDone {
		t.Errorf("a ended as %q", how)
	}
	if _, err := r.f.Mark(at(500), "pl_z", ledger.MarkDone, 0); !errors.Is(err, ErrUnknownPlacement) {
		t.Errorf("unknown placement: %v", err)
	}
	if _, err := r.f.Mark(at(500), "pl_a", "finished", 0); !errors.Is(err, ErrClaim) {
		t.Errorf("unknown mark: %v", err)
	}
	_, sit, err := r.f.Candidates(at(500), Query{}, nil)
	if err != nil || sit.MeanOutputTokens != 100 {
		t.Errorf("mean output %v: the report's goes before the marks'", sit.MeanOutputTokens)
	}
}

func TestPredictionErrorIsLearnt(t *testing.T) {
	r := newRig(t, 1)
	for i, took := range []float64{150, 70} {
		id := fmt.Sprint("r", i)
		r.claim(1000*float64(i), id, worker0, 10, func(n *NewClaim) { n.ExpectedFirstMs = 100 })
		if _, err := r.f.Mark(at(1000*float64(i)+took), "pl_"+id, ledger.MarkFirst, 0); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := r.snapshot(worker0).ErrorMs, 50+(30-50)/20.; math.Abs(got-want) > 1e-6 {
		t.Errorf("error %v, want %v", got, want)
	}
}

func TestReservationsEnd(t *testing.T) {
	r := newRig(t, 1)
	r.loadAll(0)
	for i := range 50 {
		r.claim(1000+float64(i), fmt.Sprint("r", i), worker0, 100)
	}
	if got := r.f.Tick(at(60_999)).Ended; len(got) != 0 {
		t.Errorf("%d ended before their time", len(got))
	}
	if ttl, err := r.f.Renew(at(60_999), "pl_r7"); err != nil || ttl != 60*time.Second {
		t.Errorf("renewed for %v, %v", ttl, err)
	}
	ended := r.f.Tick(at(61_500)).Ended
	if len(ended) != 49 || ended[0].How != EndExpired {
		t.Errorf("%d ended", len(ended))
	}
	// A renewed claim lives on, but not for ever.
	for ms := 110_000.0; ms < 640_000; ms += 50_000 {
		if _, err := r.f.Renew(at(ms), "pl_r7"); err != nil && ms < 600_000 {
			t.Fatalf("at %v: %v", ms, err)
		}
		r.f.Tick(at(ms))
	}
	if s := r.snapshot(worker0); r.f.OpenClaims() != 0 || s.OpenClaims != 0 || s.Live != 0 {
		t.Errorf("%d open, snapshot %v live", r.f.OpenClaims(), s.Live)
	}
}

// A worker that leaves and returns starts at zero, and late ends of its
// former life do not make it negative.
func TestReturningWorkerStartsAtZero(t *testing.T) {
	r := newRig(t, 1)
	r.loadAll(0)
	first := OpenClaim{}
	for i := range 5 {
		first = r.claim(100, fmt.Sprint("r", i), worker0, 100)
	}
	if got := r.remove(200, "gpu-00").Ended; len(got) != 5 {
		t.Errorf("%d claims ended with the host", len(got))
	}
	r.open(300, hello("gpu-00", 1))
	r.loadAll(310)
	for i := range 5 {
		if _, err := r.f.Mark(at(400), fmt.Sprint("pl_r", i), ledger.MarkDone, 1); err != nil {
			t.Error(err)
		}
	}
	if s := r.snapshot(worker0); s.Live != 0 || s.OpenClaims != 0 {
		t.Errorf("live %v, open %v", s.Live, s.OpenClaims)
	}
	// Its claims go on counting where the old ones ended, so that an echo of
	// the old ones never covers a new one.
	if c := r.claim(500, "new", worker0, 10); c.Seq != first.Seq+1 {
		t.Errorf("seq %d after %d", c.Seq, first.Seq)
	}
}

func TestAttempts(t *testing.T) {
	r := newRig(t, 3)
	r.loadAll(0)
	key := RequestKey{Tenant: "t", ID: "a"}
	r.claim(100, "a", worker0, 100, func(n *NewClaim) { n.Answer = "first answer" })

	got, err := r.f.Admit(key, 1)
	if err != nil || got.Stored == nil || got.Stored.Answer != "first answer" || got.Stored.Placement != "pl_a" {
		t.Fatalf("same attempt: %+v, %v", got, err)
	}
	if got, err := r.f.Admit(RequestKey{Tenant: "other", ID: "a"}, 1); err != nil || got.Stored != nil {
		t.Errorf("another tenant's request of the same id: %+v, %v", got, err)
	}
	// A race of two equal attempts: the second claim gets the first's.
	w1, _, _ := r.f.LookupWorker("gpu-01/vllm-8000/0")
	again := NewClaim{Key: key, Attempt: 1, Placement: "pl_a_again", Worker: w1, Claim: ledger.Claim{EngineProcess: 1000, PromptTokens: 1, UncachedTokens: 1}}
	if c, stored, _, err := r.f.Claim(at(110), again); err != nil || !stored || c.Placement != "pl_a" {
		t.Errorf("equal claim: %+v, stored %v, %v", c, stored, err)
	}
	if r.f.OpenClaims() != 1 {
		t.Errorf("%d claims of one attempt", r.f.OpenClaims())
	}
	// A higher attempt excludes the former's process and takes its place.
	got, err = r.f.Admit(key, 2)
	if err != nil || got.Stored != nil || !cmp.Equal(got.ExcludeProcesses, []uint64{1000}) {
		t.Errorf("second attempt: %+v, %v", got, err)
	}
	again.Attempt, again.Placement = 2, "pl_a2"
	_, stored, changes, err := r.f.Claim(at(200), again)
	if err != nil || stored || len(changes.Ended) != 1 || changes.Ended[0].How != EndSuperseded {
		t.Fatalf("second attempt: stored %v, %v, ended %v", stored, err, changes.Ended)
	}
	if s := r.snapshot(worker0); s.OpenClaims != 0 {
		t.Error("the superseded claim still counts")
	}
	if _, err := r.f.Admit(key, 1); !errors.Is(err, ErrOlderAttempt) {
		t.Errorf("the first attempt again: %v", err)
	}
	if _, _, _, err := r.f.Claim(at(210), NewClaim{Key: key, Attempt: 1, Placement: "p"}); !errors.Is(err, ErrOlderAttempt) {
		t.Errorf("a claim of the first attempt: %v", err)
	}
	// Ended, it is remembered: older ones stay refused, later ones exclude
	// both processes, and the same attempt is placed anew.
	if _, err := r.f.Mark(at(300), "pl_a2", ledger.MarkFailed, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := r.f.Admit(key, 1); !errors.Is(err, ErrOlderAttempt) {
		t.Errorf("the first attempt after the end: %v", err)
	}
	if got, err := r.f.Admit(key, 2); err != nil || got.Stored != nil || got.ExcludeProcesses != nil {
		t.Errorf("the same attempt after the end: %+v, %v", got, err)
	}
	if got, err := r.f.Admit(key, 3); err != nil || !cmp.Equal(got.ExcludeProcesses, []uint64{1000, 1000}) {
		t.Errorf("a third attempt: %+v, %v", got, err)
	}
}

func TestPredictedKeysLiveWithTheirClaim(t *testing.T) {
	book := newKeyBook(t)
	r := newRig(t, 1, func(o *Options) { o.Predicted = book })
	r.loadAll(0)
	keys := func(n *NewClaim) { n.Keys, n.KeyDepths = []prefix.Key{5, 6}, []uint32{512, 700} }
	r.claim(10, "done", worker0, 700, keys)
	r.claim(10, "expires", worker0, 700, keys)
	r.claim(10, "superseded", worker0, 700, keys)
	r.claim(10, "without", worker0, 700)
	if book.count() != 3 {
		t.Fatalf("%d key sets", book.count())
	}
	r.load(5000, "gpu-00", idle(1000)) // covers them all: they live on
	if book.count() != 3 {
		t.Errorf("%d key sets after the report", book.count())
	}
	if _, err := r.f.Mark(at(6000), "pl_done", ledger.MarkDone, 1); err != nil || book.count() != 2 {
		t.Errorf("%d key sets after done, %v", book.count(), err)
	}
	r.claim(7000, "superseded", worker0, 700, keys, func(n *NewClaim) { n.Attempt, n.Placement = 2, "pl_s2" })
	if book.count() != 2 {
		t.Errorf("%d key sets after superseding one by another", book.count())
	}
	r.f.Tick(at(60_100))
	if book.count() != 1 {
		t.Errorf("%d key sets after expiry", book.count())
	}
	r.remove(60_200, "gpu-00")
	if book.count() != 0 || len(book.drops) != 1 {
		t.Errorf("%d key sets after removal, dropped %v", book.count(), book.drops)
	}
}

// What was computed for a request is told with the next changes of the cache:
// until then it stays predicted, of a worker whose cache is seen.
func TestPredictedKeysStayUntilTheViewTellsOfThem(t *testing.T) {
	for _, c := range []struct {
		name  string
		views func(r *rig, id WorkerID)
		mark  ledger.Mark
		kept  bool // right after the end
		gone  func(r *rig, id WorkerID)
	}{
		{"a newer view", setView(50, placement.ViewLive), ledger.MarkDone, true, setView(1000+viewLagMs, placement.ViewLive)},
		{"no view comes", setView(50, placement.ViewLive), ledger.MarkDone, true, func(r *rig, _ WorkerID) { r.f.Tick(at(1000 + keyRestMs)) }},
		{"the view is lost", setView(50, placement.ViewLive), ledger.MarkDone, true, setView(1500, placement.ViewStale)},
		{"it failed", setView(50, placement.ViewLive), ledger.MarkFailed, false, nil},
		{"nothing is seen", func(*rig, WorkerID) {}, ledger.MarkDone, false, nil},
		{"its cache is inferred", setView(50, placement.ViewInferred), ledger.MarkDone, false, nil},
	} {
		book := newKeyBook(t)
		r := newRig(t, 1, func(o *Options) { o.Predicted = book })
		r.loadAll(0)
		id, _, _ := r.f.LookupWorker(worker0)
		c.views(r, id)
		r.claim(100, "a", worker0, 700, func(n *NewClaim) { n.Keys, n.KeyDepths = []prefix.Key{5, 6}, []uint32{512, 700} })
		if _, err := r.f.Mark(at(1000), "pl_a", c.mark, 1); err != nil || book.count() != bit(c.kept) {
			t.Errorf("%s: %d key sets after the end, %v", c.name, book.count(), err)
		}
		if !c.kept {
			continue
		}
		// A view that is no newer than the end tells nothing of it yet.
		if setView(1000+viewLagMs-1, placement.ViewLive)(r, id); book.count() != 1 {
			t.Errorf("%s: %d key sets after a view of before", c.name, book.count())
		}
		if c.gone(r, id); book.count() != 0 {
			t.Errorf("%s: %d key sets are left", c.name, book.count())
		}
	}
}

func setView(ms float64, kind placement.ViewKind) func(*rig, WorkerID) {
	return func(r *rig, id WorkerID) { r.f.SetView(at(ms), id, 1000, kind, 0) }
}

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestClaimNamesBadFields(t *testing.T) {
	r := newRig(t, 1)
	for field, change := range map[string]func(*NewClaim){
		"placement":      func(n *NewClaim) { n.Placement = "" },
		"promptTokens":   func(n *NewClaim) { n.PromptTokens = 0 },
		"uncachedTokens": func(n *NewClaim) { n.UncachedTokens = 11 },
		"n: -1":          func(n *NewClaim) { n.Sequences = -1 },
		"keyDepths":      func(n *NewClaim) { n.Keys = make([]prefix.Key, 2) },
		"keys":           func(n *NewClaim) { n.Keys, n.KeyDepths = make([]prefix.Key, 1<<17), make([]uint32, 1<<17) },
	} {
		n := NewClaim{Key: RequestKey{ID: "a"}, Attempt: 1, Placement: "p", Claim: ledger.Claim{EngineProcess: 1000, PromptTokens: 10, UncachedTokens: 10}}
		change(&n)
		if _, _, _, err := r.f.Claim(at(0), n); !errors.Is(err, ErrClaim) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: error %v", field, err)
		}
	}
	n := NewClaim{Key: RequestKey{ID: "a"}, Attempt: 1, Placement: "p", Worker: 99, Claim: ledger.Claim{EngineProcess: 1000, PromptTokens: 10, UncachedTokens: 10}}
	if _, _, _, err := r.f.Claim(at(0), n); !errors.Is(err, ErrUnknownWorker) {
		t.Errorf("unknown slot: %v", err)
	}
}

// Over the bound of claims per worker the oldest move into the report: the
// waiting work is the same, and nothing grows.
func TestManyClaimsOnOneWorker(t *testing.T) {
	r := newRig(t, 1)
	r.loadAll(0)
	for i := range maxPending + 100 {
		r.claim(1, fmt.Sprint("r", i), worker0, 3000)
	}
	s := r.snapshot(worker0)
	if got, want := s.Waiting.QueueMs(1), 3000.*(maxPending+100); got != want {
		t.Errorf("queue %v, want %v", got, want)
	}
	if s.OpenClaims != maxPending+100 || r.f.Counts().FoldedClaims != 100 {
		t.Errorf("%v open, counts %+v", s.OpenClaims, r.f.Counts())
	}
	if _, err := r.f.Mark(at(2), fmt.Sprint("pl_r", maxPending+99), ledger.MarkGone, 0); err != nil {
		t.Fatal(err)
	}
	if got, want := r.snapshot(worker0).Waiting.QueueMs(1), 3000.*(maxPending+99); got != want {
		t.Errorf("queue %v after one left, want %v: a refold lost the folded claims", got, want)
	}
	// A report that tells no queue leaves all of them on top, folded ones too.
	blind := idle(1000)
	blind.QueueMs = nil
	for ms := 3.; ms < 5; ms++ {
		r.load(ms, "gpu-00", blind)
		if s := r.snapshot(worker0); s.OpenClaims != maxPending+99 {
			t.Errorf("%v open at %v ms, want %d", s.OpenClaims, ms, maxPending+99)
		}
	}
}

func TestBoundsOfClaims(t *testing.T) {
	r := newRig(t, 1, func(o *Options) { o.MaxClaims, o.MaxEnded = 10, 4 })
	for i := range 10 {
		r.claim(1, fmt.Sprint("r", i), worker0, 10)
	}
	n := NewClaim{Key: RequestKey{ID: "more"}, Attempt: 1, Placement: "more", Claim: ledger.Claim{EngineProcess: 1000, PromptTokens: 10, UncachedTokens: 10}}
	if _, _, _, err := r.f.Claim(at(2), n); !errors.Is(err, ErrFull) {
		t.Errorf("an eleventh claim: %v", err)
	}
	for round := range 50 {
		for i := range 10 {
			id := fmt.Sprint("pl_r", i)
			if round > 0 {
				id = fmt.Sprintf("pl_r%d_%d", i, round-1)
			}
			if _, err := r.f.Mark(at(3), id, ledger.MarkDone, 1); err != nil {
				t.Fatal(err)
			}
			r.claim(4, fmt.Sprintf("r%d_%d", i, round), worker0, 10)
		}
	}
	l := &r.f.claims
	if len(l.ended) != 4 || len(l.endedKeys) != 4 || len(l.byKey) != 10 || len(l.deadlines) != 10 {
		t.Errorf("remembers %d ends, %d requests, holds %d claims, %d deadlines", len(l.ended), len(l.endedKeys), len(l.byKey), len(l.deadlines))
	}
}

// However often a request is tried again, one claim and few processes are kept.
func TestSupersededChainKeepsFewProcesses(t *testing.T) {
	r := newRig(t, 1)
	r.loadAll(0)
	for attempt := range uint32(40) {
		r.claim(float64(attempt), "a", worker0, 10, func(n *NewClaim) {
			n.Attempt, n.Placement = attempt+1, fmt.Sprint("pl_a", attempt)
		})
	}
	got, err := r.f.Admit(RequestKey{Tenant: "t", ID: "a"}, 41)
	if err != nil || len(got.ExcludeProcesses) != maxExcluded {
		t.Errorf("%d excluded processes, %v", len(got.ExcludeProcesses), err)
	}
	if r.f.OpenClaims() != 1 {
		t.Errorf("%d claims of one request", r.f.OpenClaims())
	}
}
