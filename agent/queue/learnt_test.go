package queue

import (
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"waypost/agent/blocktable"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// An age that coordinators fade old views with: the mean life of blocks.
func TestEvictionAge(t *testing.T) {
	e := newLedgerEstimator(t)
	if load := e.Load(atMs(0)); load.EvictionAgeMs != nil {
		t.Error("an age before anything was evicted")
	}
	hash := func(i int) []uint64 { return []uint64{uint64(i) * 0x9e3779b97f4a7c15} }
	for i := range 30_000 {
		e.BlocksStored(atMs(float64(i)*10), hash(i))
		if i >= 6000 {
			e.BlocksRemoved(atMs(float64(i)*10), hash(i-6000))
		}
	}
	got := e.Load(atMs(300_000)).EvictionAgeMs
	if got == nil || math.Abs(*got-60_000) > 1 {
		t.Errorf("eviction age %v, want 60 s", got)
	}
	if len(e.eviction.stored) > maxTracedBlocks {
		t.Errorf("%d blocks are followed", len(e.eviction.stored))
	}
	e.CacheCleared()
	e.BlocksRemoved(atMs(301_000), hash(29_999))
	if again := e.Load(atMs(301_000)).EvictionAgeMs; *again != *got {
		t.Errorf("a clear changed the age to %v", *again)
	}
	// Nothing is evicted any more: after a while the cache is known to turn over
	// more slowly than it did.
	if later := e.Load(atMs(400_000)).EvictionAgeMs; math.Abs(*later-100_010) > 1 {
		t.Errorf("eviction age %v after 100 s without an eviction", *later)
	}
	// An agent that starts again knows the age, but of no eviction.
	state := e.Export()
	r := newLedgerEstimator(t)
	if err := r.Import(state); err != nil {
		t.Fatal(err)
	}
	if restored := r.Load(atMs(0)).EvictionAgeMs; restored == nil || *restored != *got {
		t.Errorf("restored eviction age %v, want %v", restored, *got)
	}
}

func TestRoom(t *testing.T) {
	e := newLedgerEstimator(t)
	if r := e.Room(atMs(0)); r.FreeBlocks != nil || r.SlotWaitMs != nil {
		t.Errorf("room %+v out of nowhere", r)
	}
	e.lag.set(0)
	e.Sample(Sample{At: atMs(0), Running: ptr(8), Waiting: ptr(3), Finished: ptr(0.0), KVUsedRatio: ptr(.9)})
	e.Sample(Sample{At: atMs(1000), Running: ptr(8), Waiting: ptr(3), Finished: ptr(2.0), KVUsedRatio: ptr(.9)})
	claimAt(t, e, 1000, 1, 1, 320, func(o *ledger.Offer) { o.OutputTokens = 64 })
	r := e.Room(atMs(1001))
	// 100 blocks free, less 20 and one of the prompt, less 4 of the answer.
	if r.FreeBlocks == nil || *r.FreeBlocks != 75 {
		t.Errorf("free blocks %v, want 75", *r.FreeBlocks)
	}
	// Three wait and the claim is on its way, two finish per second.
	if r.SlotWaitMs == nil || math.Abs(*r.SlotWaitMs-2500) > 1 {
		t.Errorf("slot wait %v, want 2,500", r.SlotWaitMs)
	}
	e.Sample(Sample{At: atMs(1250), Running: ptr(7), Waiting: ptr(0), Finished: ptr(3.0), KVUsedRatio: ptr(.5)})
	if r := e.Room(atMs(1251)); r.SlotWaitMs == nil || *r.SlotWaitMs != 0 {
		t.Errorf("slot wait %v with a free slot", r.SlotWaitMs)
	}
}

func TestStateOverARestart(t *testing.T) {
	e := newLedgerEstimator(t)
	e.lag.set(350)
	for i := range uint64(30) {
		at := float64(i) * 1000
		claimAt(t, e, at, 1, i+1, 400)
		markAt(t, e, at+150, 1, i+1, ledger.MarkFirst, 0) // 80 by the prior
		markAt(t, e, at+300, 1, i+1, ledger.MarkDone, 0)
	}
	e.BlocksStored(atMs(0), []uint64{5})
	e.BlocksRemoved(atMs(9000), []uint64{5})
	text, err := json.Marshal(e.Export())
	if err != nil {
		t.Fatal(err)
	}
	var state State
	if err := json.Unmarshal(text, &state); err != nil {
		t.Fatal(err)
	}
	next := newLedgerEstimator(t)
	if err := next.Import(state); err != nil {
		t.Fatal(err)
	}
	if next.LagMs() != 350 || next.StepModel() != e.StepModel() || next.StepModel().Source != ledger.SourceLearnt {
		t.Errorf("lag %v, model %+v, want %+v", next.LagMs(), next.StepModel(), e.StepModel())
	}
	model := next.StepModel()
	if got := model.PrefillMs(400); got < 1.3*50 {
		t.Errorf("prefill of 400 tokens %v: the worker is slower than the prior's 50", got)
	}
	if got := next.Load(atMs(0)).EvictionAgeMs; got == nil || *got != 9000 {
		t.Errorf("eviction age %v", got)
	}
	bad := state
	bad.LagMs = ptr(-5.0)
	if err := next.Import(bad); !errors.Is(err, ErrState) || !strings.Contains(err.Error(), "lagMs") {
		t.Errorf("a bad lag: %v", err)
	}
	bad = state
	bad.Speeds.LnFactor = math.Inf(1)
	if err := next.Import(bad); !errors.Is(err, ErrState) {
		t.Errorf("a bad speed: %v", err)
	}
	// Another prior: the speeds are of another model, the rest is taken.
	other := newLedgerEstimator(t, func(o *Options) { o.Facts.Model.P0Ms = 11 })
	if err := other.Import(state); err != nil || other.StepModel().Source == ledger.SourceLearnt || other.LagMs() != 350 {
		t.Errorf("%v, model %+v, lag %v", err, other.StepModel(), other.LagMs())
	}
	// Facts with the same prior keep what was learnt.
	if err := next.SetFacts(next.facts); err != nil || next.StepModel().Source != ledger.SourceLearnt {
		t.Errorf("facts told again voided the speeds: %v", err)
	}
}

// A queue jumped when it ends at another moment than a report showed, whatever
// was looked at since, or when it is over before.
func TestJumpedFrom(t *testing.T) {
	e := newLedgerEstimator(t)
	var shown End
	jumped := func(ms float64, want bool) {
		t.Helper()
		if got := e.End(atMs(ms)).JumpedFrom(shown); got != want {
			t.Errorf("at %v jumped: %v", ms, got)
		}
	}
	report := func(ms float64) {
		t.Helper()
		load := e.Load(atMs(ms))
		if shown = e.Shown(); math.Abs(shown.endMs-ms-*load.QueueMs) > 1e-9 || shown.knownMs != ms {
			t.Errorf("at %v the report has %v ms and is taken for %+v", ms, *load.QueueMs, shown)
		}
	}
	jumped(0, false)
	claimAt(t, e, 1, 1, 1, 900)
	jumped(1, true)
	jumped(2, true) // nobody was told yet
	report(3)
	jumped(3, false)
	jumped(100, false) // drains as told
	markAt(t, e, 110, 1, 1, ledger.MarkFirst, 0)
	jumped(110, true) // idle ten ms before it was told
	report(111)
	jumped(111, false)
	jumped(190, false) // idle still, as told
	claimAt(t, e, 200, 1, 2, 900)
	report(200)
	if !e.Stores(atMs(500), []Store{blocks("1/2", 0, 96)}) { // slower than told
		t.Error("part of a prompt says nothing of the queue")
	}
	jumped(501, true)
	// What a report of the period showed is no jump any more.
	report(502)
	jumped(503, false)
}

// Marks tell of the queue while nothing else has shown a claim's first token, and
// of no queue after that.
func TestMarksThatMoveTheQueue(t *testing.T) {
	e := newLedgerEstimator(t)
	for seq := range uint64(6) {
		claimAt(t, e, float64(seq), 1, seq+1, 900)
	}
	e.Stores(atMs(50), []Store{blocks("1/1", 0, 896)})
	for _, m := range []struct {
		what  string
		seq   uint64
		mark  ledger.Mark
		ageMs float64
		want  bool
	}{
		{"a first token before the stores showed it", 1, ledger.MarkFirst, 12, false},
		{"after that", 1, ledger.MarkFirst, 0, false},
		{"the end of its answer", 1, ledger.MarkDone, 0, false},
		{"a first token", 2, ledger.MarkFirst, 0, true},
		{"the same again", 2, ledger.MarkFirst, 0, false},
		{"its caller is gone", 2, ledger.MarkGone, 0, false},
		{"an end without a first token", 3, ledger.MarkDone, 0, true},
		{"the first token after it", 3, ledger.MarkFirst, 0, true},
		{"a request that waits no more", 4, ledger.MarkGone, 0, true},
		{"the same again", 4, ledger.MarkFailed, 0, false},
		{"a claim that did not come yet", 9, ledger.MarkFirst, 0, false},
	} {
		got, err := e.Marks(atMs(60), &ledger.MarkFrame{Coordinator: 1, Marks: []ledger.Marked{{Seq: m.seq, What: m.mark, AgeMs: m.ageMs}}})
		if err != nil || got != m.want {
			t.Errorf("%s: %v, %v", m.what, got, err)
		}
	}
	// Of a frame any one counts.
	got, err := e.Marks(atMs(61), &ledger.MarkFrame{Coordinator: 1, Marks: []ledger.Marked{{Seq: 5, What: ledger.MarkFirst}, {Seq: 1, What: ledger.MarkFirst}}})
	if err != nil || !got {
		t.Errorf("a first token and an old one: %v, %v", got, err)
	}
}

// A shift takes the place of the one in force if it is a tenth better.
func TestLagHolds(t *testing.T) {
	l := newLag()
	l.judged, l.step = lagPolls, 3
	for better, want := range map[float64]int{.95: 3, .91: 3, .89: 7} {
		for i := range l.errors {
			l.errors[i] = 2
		}
		l.step, l.errors[3], l.errors[7] = 3, 1, better
		if l.choose(); l.step != want {
			t.Errorf("an error of %v of the former: shift %d, want %d", better, l.step, want)
		}
	}
}

// What a batch computed of prompts says something of the queue, whosever they
// are; blocks that an answer fills do not.
func TestStoresThatMoveTheQueue(t *testing.T) {
	e := newLedgerEstimator(t)
	claimAt(t, e, 0, 1, 1, 900)
	for _, s := range []struct {
		what  string
		ms    float64
		store Store
		want  bool
	}{
		{"a prompt's beginning", 10, blocks("1/1", 0, 512), true},
		{"its end", 20, blocks("1/1", 512, 896), true},
		{"a block of its answer", 30, blocks("1/1", 896, 912), false},
		{"a block of somebody's answer", 40, blocks("other", 64, 80), false},
		{"a prompt of somebody", 50, blocks("other", 0, 64), true},
		{"nothing", 60, Store{}, false},
	} {
		if got := e.Stores(atMs(s.ms), []Store{s.store}); got != s.want {
			t.Errorf("%s: %v", s.what, got)
		}
	}
}

// The lag is learnt to within a step of the shifts, jumps are followed, and
// before the first value counts are not used.
func TestLagIsLearnt(t *testing.T) {
	for _, test := range []struct{ before, after float64 }{{50, 50}, {1000, 1000}, {5000, 5000}, {100, 5000}, {5000, 100}} {
		e := newLedgerEstimator(t)
		rng := rand.New(rand.NewPCG(3, uint64(test.before)))
		var arrivals []float64
		truth, now, next, seq := test.before, 0.0, 0.0, uint64(0)
		polls, changed := 0, false
		poll := func() {
			seen := 0
			for _, at := range arrivals {
				if at <= now-truth {
					seen++
				}
			}
			// A fifth of what finishes is never counted as finished, some of
			// what runs is nobody's claim.
			e.Sample(Sample{At: atMs(now), Running: ptr(2 + rng.IntN(2)), Waiting: ptr(0), Finished: ptr(float64(seen))})
			polls++
		}
		for polls < 600 {
			for next <= now {
				seq++
				arrivals = append(arrivals, next)
				claimAt(t, e, next, 1, seq, 100)
				next += rng.ExpFloat64() * 400
			}
			poll()
			if known := !math.IsNaN(e.LagMs()); polls <= 25 && known {
				t.Errorf("lag %v known after %d polls", e.LagMs(), polls)
			} else if !known && e.Load(atMs(now)).CountersAgeMs != nil {
				t.Errorf("counters are used before their lag is known")
			}
			switch {
			case polls == 200 || polls == 500 && changed:
				if off := math.Abs(e.LagMs() - truth); !(off <= 50) {
					t.Errorf("%v then %v: after %d polls lag %v, true is %v", test.before, test.after, polls, e.LagMs(), truth)
				}
			case polls == 300:
				changed, truth = true, test.after
			}
			now += 250
		}
		// The engine restarts: the old value serves on.
		e.SetProcess(2)
		if off := math.Abs(e.LagMs() - truth); !(off <= 50) {
			t.Errorf("lag %v after a restart", e.LagMs())
		}
	}
}

// Blocks of a real table turn into stores under the keys that claims name.
func TestRecorder(t *testing.T) {
	var cluster prefix.ClusterKey
	cluster[0] = 7
	domain := prefix.Domain{Model: "m"}
	table := blocktable.New(blocktable.Options{Model: "m", Seed: 1})
	encoder := summary.NewEncoder(summary.Options{Key: cluster, Blocks: table, Epoch: 1})
	recorder := NewRecorder(cluster, table, encoder)
	table.Listen(recorder.ForTable())

	tokens := make([]uint32, 1600)
	for i := range tokens {
		tokens[i] = uint32(i * 7)
	}
	var probe prefix.Probe
	probe.ResetTokens(tokens, prefix.NewKeyer(cluster, domain))
	keyAt := func(depth int) prefix.Key {
		k, ok := probe.At(depth)
		if !ok {
			t.Fatalf("no key at %d", depth)
		}
		return k
	}
	store := func(from, to int) blocktable.Event {
		e := blocktable.Event{Op: blocktable.OpStore, BlockTokens: 16, Spec: blocktable.SpecFull, Tokens: tokens[from:to]}
		if from > 0 {
			e.HasParent, e.Parent = true, uint64(from/16)
		}
		for d := from + 16; d <= to; d += 16 {
			e.Hashes = append(e.Hashes, uint64(d/16))
		}
		return e
	}
	first, second := store(0, 992), store(992, 1600)
	table.Apply(&first)
	got := recorder.Take()
	if len(got) != 1 || got[0].Parent != 0 || len(got[0].Points) != 62 || got[0].Points[61] != (Point{keyAt(992), 992}) || got[0].Points[31] != (Point{keyAt(512), 512}) {
		t.Fatalf("recorded %d stores", len(got))
	}
	table.Apply(&second)
	got = recorder.Take()
	if len(got) != 1 || got[0].Parent != keyAt(992) || got[0].Points[len(got[0].Points)-1] != (Point{keyAt(1600), 1600}) {
		t.Fatalf("recorded %+v", got)
	}
	if encoder.Delta(atMs(0)); encoder.Keys() == 0 {
		t.Error("nothing was passed on")
	}
	table.Apply(&first) // again: nothing is new
	if got := recorder.Take(); len(got) != 0 {
		t.Errorf("recorded %+v", got)
	}
	table.Clear()
	if got := recorder.Take(); len(got) != 0 {
		t.Errorf("recorded %+v after a clear", got)
	}
	// They are evidence.
	e := newLedgerEstimator(t)
	o := ledger.Offer{Claim: ledger.Claim{
		Seq: 1, EngineProcess: 1, PromptTokens: 1600, UncachedTokens: 1600,
		Keys: []prefix.Key{keyAt(16), keyAt(1600)}, KeyDepths: []uint32{16, 1600},
	}}
	if _, err := e.Claims(atMs(0), &ledger.ClaimFrame{Coordinator: 1, Agent: testAgent, Offers: []ledger.Offer{o}}); err != nil {
		t.Fatal(err)
	}
	table.Apply(&first)
	e.Stores(atMs(100), recorder.Take())
	if c := e.ledger.list[0]; c.coveredTokens != 992 {
		t.Errorf("%d tokens covered, want 992", c.coveredTokens)
	}
	table.Apply(&second)
	e.Stores(atMs(200), recorder.Take())
	if load := e.Load(atMs(200)); *load.QueueMs != 0 || *load.Decoding != 1 {
		t.Errorf("queue %v, decoding %v", *load.QueueMs, *load.Decoding)
	}
}

func BenchmarkRecorder(b *testing.B) {
	var cluster prefix.ClusterKey
	table := blocktable.New(blocktable.Options{Model: "m", Seed: 1})
	recorder := NewRecorder(cluster, table, summary.NewEncoder(summary.Options{Key: cluster, Blocks: table, Epoch: 1}))
	table.Listen(recorder.ForTable())
	e := blocktable.Event{Op: blocktable.OpStore, BlockTokens: 16, Spec: blocktable.SpecFull, Tokens: make([]uint32, 2048), Hashes: make([]uint64, 128)}
	for i := range e.Hashes {
		e.Hashes[i] = uint64(i + 1)
	}
	remove := e
	remove.Op, remove.Tokens = blocktable.OpRemove, nil
	b.ReportAllocs()
	for b.Loop() {
		table.Apply(&e)
		recorder.Take()
		table.Apply(&remove)
	}
}

// Counters tell of a prefill when it is over: in the middle of a long one
// they show neither first tokens nor prompt tokens. The token gaps beside it
// are not the worker's decode step; those of plain decoding are.
func TestDecodeStepIsLearntWithoutPrefills(t *testing.T) {
	learnt := func(slowdown float64, prefills bool) float64 {
		e := newLedgerEstimator(t)
		e.lag.set(0)
		prior := e.speeds.Prior()
		gap := slowdown * prior.DecodeMs(8, 32_000, e.poolTokens())
		zero, generated := 0.0, 0.0
		for i := range 400 {
			now, beside := float64(i)*250, 1.0
			if prefills && i%20 >= 10 {
				beside = 10
				seq := uint64(i/20) + 1
				if i%20 == 10 {
					claimAt(t, e, now-249, 1, seq, 60_000)
				}
				if i%20 == 19 {
					markAt(t, e, now-1, 1, seq, ledger.MarkFirst, 0)
					markAt(t, e, now-1, 1, seq, ledger.MarkDone, 0)
				}
			}
			generated += 8 * 250 / (gap * beside)
			g := generated
			e.decodeLoad, e.contextLoad = 8, 32_000
			e.Sample(Sample{
				At: atMs(now), Running: ptr(8), Waiting: ptr(0), Finished: &zero, FirstTokens: &zero,
				PromptTokens: &zero, ComputedPromptTokens: &zero, GenerationTokens: &g,
			})
		}
		return math.Exp(e.Export().Speeds.LnDecode)
	}
	if got := learnt(2, false); math.Abs(got-2) > .1 {
		t.Errorf("a worker that decodes at half the speed is learnt as %.2f times the prior", got)
	}
	if got := learnt(1, true); math.Abs(got-1) > .1 {
		t.Errorf("gaps beside prefills are learnt as a decode step %.2f times the prior", got)
	}
}
