package queue

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// claimAt takes one claim in, made and told at a moment.
func claimAt(t testing.TB, e *Estimator, ms float64, coordinator, seq uint64, tokens int, change ...func(*ledger.Offer)) {
	t.Helper()
	c := claimed{coordinator, seq, fmt.Sprint(coordinator, "/", seq), tokens, 0}
	o := c.offer(0)
	for _, f := range change {
		f(&o)
	}
	in, err := e.Claims(atMs(ms), &ledger.ClaimFrame{Coordinator: coordinator, Agent: testAgent, Prev: seq - 1, Offers: []ledger.Offer{o}})
	if err != nil || in.Gap {
		t.Fatalf("claim %d: %+v, %v", seq, in, err)
	}
}

func markAt(t testing.TB, e *Estimator, ms float64, coordinator, seq uint64, what ledger.Mark, ageMs float64) {
	t.Helper()
	if _, err := e.Marks(atMs(ms), &ledger.MarkFrame{Coordinator: coordinator, Marks: []ledger.Marked{{Seq: seq, What: what, AgeMs: ageMs}}}); err != nil {
		t.Fatal(err)
	}
}

// Claims without any fact: the report equals the replay of the whole list, and
// so does what a coordinator makes of it.
func TestReportEqualsListReplay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := Options{AgentProcess: testAgent, Facts: Facts{
			Model: ledger.StepModel{
				P0Ms: rapid.Float64Range(0, 50).Draw(t, "p0"), P1MsPerToken: rapid.Float64Range(.001, .2).Draw(t, "p1"),
				QMsPerToken2: rapid.Float64Range(0, 1e-5).Draw(t, "q"),
			},
			StepTokens: rapid.SampledFrom([]int{16, 512, 2048, 8192}).Draw(t, "budget"),
		}}
		e, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		at := 100.0
		e.ms(atMs(0))
		var all []ledger.Job
		offers := map[uint64][]ledger.Offer{}
		for range rapid.IntRange(1, 40).Draw(t, "claims") {
			// Times of whole µs: a frame's age is kept to the ns.
			at += rapid.SampledFrom([]float64{0, 0, .5, 7, 90, 2500}).Draw(t, "gap")
			coordinator := rapid.Uint64Range(1, 3).Draw(t, "coordinator")
			reused := rapid.SampledFrom([]int{0, 16, 4096}).Draw(t, "reused")
			tokens := rapid.SampledFrom([]int{1, 15, 17, 511, 2048, 8191, 8192, 20_000}).Draw(t, "tokens")
			all = append(all, ledger.NewJob(at, reused, tokens))
			offers[coordinator] = append(offers[coordinator], ledger.Offer{AgeMs: at, Claim: ledger.Claim{
				Seq: uint64(len(offers[coordinator]) + 1), EngineProcess: 1, PromptTokens: reused + tokens, UncachedTokens: tokens,
			}})
		}
		now := at + rapid.SampledFrom([]float64{.25, 11, 400}).Draw(t, "now")
		for coordinator, list := range offers {
			for i := range list {
				list[i].AgeMs = now - list[i].AgeMs
			}
			if _, err := e.Claims(atMs(now), &ledger.ClaimFrame{Coordinator: coordinator, Agent: testAgent, Offers: list}); err != nil {
				t.Fatal(err)
			}
		}
		load := e.Load(atMs(now))
		steps := ledger.NewSteps(o.Facts.Model, o.Facts.StepTokens, 0)
		replay := ledger.NewReplay(&steps, all[0].AtMs, all)
		replay.Run(now)
		want := replay.Waiting(now)
		got := ledger.AtLoad(&steps, now, *load.QueueMs, int(*load.OpenTokens))
		if want.F <= now {
			want.F, want.S, want.K = now, now, 0
		}
		for name, pair := range map[string][2]float64{"F": {got.F, want.F}, "S": {got.S, want.S}, "K": {float64(got.K), float64(want.K)}} {
			if math.Abs(pair[0]-pair[1]) > 1e-6*max(1, math.Abs(pair[1])) {
				t.Fatalf("%s = %.9f by the report, %.9f by the list; %+v", name, pair[0], pair[1], load)
			}
		}
	})
}

// ledgerHash is everything that the facts decide. A first token that is only
// estimated rests on the learnt pace as well and is left out.
func ledgerHash(e *Estimator) string {
	var b strings.Builder
	for _, c := range e.ledger.list {
		c := *c
		if c.estimated {
			c.overMs, c.servedMs = -1, -1
		}
		fmt.Fprintf(&b, "%d/%d %.3f why %d over %.3f served %.3f done %.3f started %.3f covered %d\n",
			c.id.coordinator, c.id.seq, c.madeMs, c.why, c.overMs, c.servedMs, c.doneMs, c.startedMs, c.coveredTokens)
	}
	fmt.Fprintf(&b, "anchor %.3f", e.ledger.anchorMs)
	if s := e.ledger.newestServed; s != nil {
		fmt.Fprintf(&b, " newest served %d/%d", s.id.coordinator, s.id.seq)
	}
	for _, echo := range e.ledger.echoes.Append(nil) {
		fmt.Fprintf(&b, " echo %+v", echo)
	}
	return b.String()
}

// Doubled, reordered and late claims and marks lead to the same state as those
// in order.
func TestOrderOfArrivalDoesNotMatter(t *testing.T) {
	type fact struct {
		atMs        float64
		coordinator uint64
		mark        *ledger.Marked // nil: the claims up to seq are offered
		seq         uint64
	}
	rapid.Check(t, func(t *rapid.T) {
		made := map[uint64][]float64{}
		var facts []fact
		at := 0.0
		for range rapid.IntRange(1, 60).Draw(t, "facts") {
			at += rapid.SampledFrom([]float64{0, 1, 30, 200}).Draw(t, "gap")
			coordinator := rapid.Uint64Range(1, 2).Draw(t, "coordinator")
			n := uint64(len(made[coordinator]))
			if n == 0 || rapid.Bool().Draw(t, "claim") {
				made[coordinator] = append(made[coordinator], at)
				facts = append(facts, fact{at, coordinator, nil, n + 1})
				continue
			}
			facts = append(facts, fact{at, coordinator, &ledger.Marked{
				Seq: rapid.Uint64Range(1, n).Draw(t, "seq"), OutputTokens: 5,
				What: rapid.SampledFrom([]ledger.Mark{ledger.MarkFirst, ledger.MarkFirst, ledger.MarkDone, ledger.MarkGone}).Draw(t, "what"),
			}, 0})
		}
		// Of one claim the first end counts and nothing after it: told in
		// another order that cannot be known, so each has one end here, and its
		// first token before it.
		firsts, ends := map[[2]uint64]bool{}, map[[2]uint64]bool{}
		facts = slices.DeleteFunc(facts, func(f fact) bool {
			if f.mark == nil {
				return false
			}
			id := [2]uint64{f.coordinator, f.mark.Seq}
			if ends[id] || f.mark.What == ledger.MarkFirst && firsts[id] {
				return true
			}
			firsts[id] = true
			ends[id] = f.mark.What.Ends()
			return false
		})
		end := at + 4000
		play := func(lag func() float64, times int) *Estimator {
			e, err := New(Options{AgentProcess: testAgent, Facts: Facts{Model: ledger.StepModel{P0Ms: 10, P1MsPerToken: .1, D0Ms: 20}, StepTokens: 1000}})
			if err != nil {
				t.Fatal(err)
			}
			e.ms(atMs(0))
			type arrival struct {
				ms float64
				f  fact
			}
			var arrivals []arrival
			for _, f := range facts {
				for range times {
					arrivals = append(arrivals, arrival{f.atMs + lag(), f})
				}
			}
			slices.SortStableFunc(arrivals, func(a, b arrival) int {
				switch {
				case a.ms < b.ms:
					return -1
				case a.ms > b.ms:
					return 1
				}
				return 0
			})
			for _, a := range arrivals {
				if a.f.mark != nil {
					m := *a.f.mark
					m.AgeMs = a.ms - a.f.atMs
					if _, err := e.Marks(atMs(a.ms), &ledger.MarkFrame{Coordinator: a.f.coordinator, Marks: []ledger.Marked{m}}); err != nil {
						t.Fatal(err)
					}
					continue
				}
				offer := func(prev, last uint64) Intake {
					frame := &ledger.ClaimFrame{Coordinator: a.f.coordinator, Agent: testAgent, Prev: prev}
					for seq := prev + 1; seq <= last; seq++ {
						frame.Offers = append(frame.Offers, ledger.Offer{AgeMs: a.ms - made[a.f.coordinator][seq-1], Claim: ledger.Claim{
							Seq: seq, EngineProcess: 1, PromptTokens: 400, UncachedTokens: 400, OutputTokens: 5000,
						}})
					}
					in, err := e.Claims(atMs(a.ms), frame)
					if err != nil {
						t.Fatal(err)
					}
					return in
				}
				if offer(a.f.seq-1, a.f.seq).Gap {
					// What the gap kept out is offered again from the echo.
					offer(e.ledger.echoes.Upto(a.f.coordinator), a.f.seq)
				}
				e.End(atMs(a.ms))
			}
			e.Load(atMs(end))
			return e
		}
		inOrder := play(func() float64 { return 0 }, 1)
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		shuffled := play(func() float64 { return float64(rng.IntN(3000)) }, 2)
		if diff := cmp.Diff(ledgerHash(inOrder), ledgerHash(shuffled)); diff != "" {
			t.Fatalf("state in order (-) and as told (+):\n%s", diff)
		}
	})
}

// An answer that came fast teaches a short gap between tokens; what that says
// of other streams drops no claim that can still be told of.
func TestLearntPaceDropsNoClaimThatIsStillToldOf(t *testing.T) {
	for _, fast := range []bool{false, true} {
		e := newLedgerEstimator(t)
		claimAt(t, e, 0, 1, 1, 200, func(o *ledger.Offer) { o.OutputTokens = 4000 })
		claimAt(t, e, 0, 1, 2, 200)
		markAt(t, e, 20, 1, 2, ledger.MarkFirst, 0) // closes the claim before it
		if fast {
			if _, err := e.Marks(atMs(21), &ledger.MarkFrame{Coordinator: 1, Marks: []ledger.Marked{{Seq: 2, What: ledger.MarkDone, OutputTokens: 1001}}}); err != nil {
				t.Fatal(err)
			}
		}
		e.Load(atMs(8_000))
		markAt(t, e, 8_001, 1, 1, ledger.MarkGone, 0)
		if got := e.Counts().UnknownMarks; got != 0 {
			t.Errorf("fast answers %v: the end of a claim was told 8 s after it left the queue and came too late", fast)
		}
		e.Load(atMs(8_001 + endUntoldMs + 60_000))
		if _, kept := e.OpenClaims(); kept != 0 {
			t.Errorf("fast answers %v: %d claims are kept", fast, kept)
		}
	}
}

// Of streams whose end nobody tells, as many are reported as are expected to go
// on: by time alone, and from a reading that is seconds old.
func TestUntoldEndsAreExpected(t *testing.T) {
	const streams, meanMs = 100, 1000.0
	for _, age := range []float64{0, 500} { // of the reading; 0: there is none
		e := newLedgerEstimator(t)
		e.gapMs = 10
		for i := range uint64(streams) {
			claimAt(t, e, 0, 1, i+1, 100, func(o *ledger.Offer) { o.OutputTokens = meanMs / 10 })
		}
		last := e.ledger.list[streams-1]
		e.Stores(atMs(1000), []Store{{Points: []Point{{Key: last.keys[len(last.keys)-1], DepthTokens: last.tipTokens()}}}})
		now, want := 2000.0, streams*math.Exp(-1)
		if age > 0 {
			e.lag.set(age)
			running := 64 // and not the 60.7 that were to be expected
			e.Sample(Sample{At: atMs(now), Running: &running, Waiting: ptr(0)})
			want = 64 - streams*(math.Exp(-.5)-math.Exp(-1))
		}
		if got := float64(*e.Load(atMs(now)).Live); math.Abs(got-want) > .5 {
			t.Errorf("reading %v ms old: %v live a mean answer after the first token, want %.1f", age, got, want)
		}
	}
}

// 50 claims without requests: nothing is left of them after their own time,
// one step and one reading; without counters after a minute.
func TestClaimsWithoutRequestsEnd(t *testing.T) {
	for _, counters := range []bool{true, false} {
		e := newLedgerEstimator(t)
		e.lag.set(0)
		sample := func(ms float64) {
			if counters {
				e.Sample(Sample{At: atMs(ms), Running: ptr(0), Waiting: ptr(0), Finished: ptr(0.0)})
			}
		}
		sample(0)
		for i := range 50 {
			claimAt(t, e, float64(i), 1, uint64(i+1), 300)
		}
		if load := e.Load(atMs(50)); *load.Live != 50 || *load.QueueMs < 1500 {
			t.Errorf("counters %v: at first queue %v, live %v", counters, *load.QueueMs, *load.Live)
		}
		// 15,000 tokens in steps of 1,000: about two seconds.
		for ms := 250.0; ms <= 3000; ms += 250 {
			sample(ms)
			e.Load(atMs(ms))
		}
		load := e.Load(atMs(3000))
		if *load.QueueMs != 0 {
			t.Errorf("counters %v: queue %v after their own time", counters, *load.QueueMs)
		}
		if live, want := *load.Live, uint32(0); counters && live != want {
			t.Errorf("live %v after a reading", live)
		}
		if open, _ := e.OpenClaims(); counters && open != 0 {
			t.Errorf("%d claims are still open", open)
		}
		if !counters {
			if load.QueueBasis != ledger.BasisTime {
				t.Errorf("basis %q", load.QueueBasis)
			}
			e.Load(atMs(59_000))
			if load := e.Load(atMs(60_100)); *load.Live != 0 {
				t.Errorf("live %v after a minute without a fact", *load.Live)
			}
		}
		e.Load(atMs(62_000))
		e.Load(atMs(83_000))
		if open, kept := e.OpenClaims(); open != 0 || kept != 0 {
			t.Errorf("counters %v: %d open, %d kept", counters, open, kept)
		}
		if len(e.ledger.byKey) != 0 || len(e.ledger.byID) != 0 || len(e.ledger.byTail) != 0 {
			t.Errorf("counters %v: indices hold %d keys, %d ids, %d tails", counters, len(e.ledger.byKey), len(e.ledger.byID), len(e.ledger.byTail))
		}
		if e.ledger.inSlot != [keySlots]uint32{} {
			t.Errorf("counters %v: keys of ended claims are counted", counters)
		}
	}
}

// A caller that hangs up before, within and after the prefill leaves nothing.
func TestCancelledRequestsLeaveNothing(t *testing.T) {
	e := newLedgerEstimator(t)
	for i := range uint64(50) {
		claimAt(t, e, float64(i), 1, i+1, 200)
	}
	for i := range uint64(50) {
		markAt(t, e, 100+float64(i), 1, i+1, ledger.MarkGone, 0)
		markAt(t, e, 200+float64(i), 1, i+1, ledger.MarkDone, 0) // a second end
	}
	load := e.Load(atMs(300))
	if *load.Live != 0 || *load.QueueMs != 0 {
		t.Errorf("live %d, queue %v", *load.Live, *load.QueueMs)
	}
	if got := e.Counts().DuplicateMarks; got != 50 {
		t.Errorf("%d second ends counted", got)
	}
}

// A claim that is told of again and again ends with its life.
func TestNoClaimOutlivesItsLife(t *testing.T) {
	e := newLedgerEstimator(t)
	claimAt(t, e, 0, 1, 1, 200)
	for ms := silentMs / 2.; ms <= lifeMs; ms += silentMs / 2 {
		c := e.ledger.byID[claimID{1, 1}]
		if c == nil {
			t.Fatalf("it is gone before %v ms", ms)
		}
		c.factMs = ms
		e.Load(atMs(ms))
	}
	if open, kept := e.OpenClaims(); open != 0 || kept != 0 {
		t.Errorf("%d claims open, %d kept, after %v ms", open, kept, float64(lifeMs))
	}
}

// A second mark of an end changes nothing, and neither does one on a claim that is
// not here any more; both are counted.
func TestSecondMarksChangeNothing(t *testing.T) {
	var loads [2]ledger.Load
	for i := range loads {
		e := newLedgerEstimator(t)
		claimAt(t, e, 0, 1, 1, 200)
		claimAt(t, e, 1, 1, 2, 300)
		markAt(t, e, 50, 1, 1, ledger.MarkFirst, 0)
		end := ledger.Marked{Seq: 1, What: ledger.MarkDone, OutputTokens: 10}
		for k, ms := range []float64{100, 160, 170}[:1+2*i] {
			if k > 0 {
				end.OutputTokens, end.What = 4000, []ledger.Mark{"", ledger.MarkDone, ledger.MarkGone}[k]
			}
			if _, err := e.Marks(atMs(ms), &ledger.MarkFrame{Coordinator: 1, Marks: []ledger.Marked{end}}); err != nil {
				t.Fatal(err)
			}
		}
		loads[i] = e.Load(atMs(200))
		if done := e.ledger.byID[claimID{1, 1}].doneMs; done != 100 {
			t.Errorf("it ended at %v, want 100", done)
		}
		if got := e.Counts().DuplicateMarks; got != uint64(2*i) {
			t.Errorf("%d second marks counted, want %d", got, 2*i)
		}
		for ms := 1000.; e.ledger.byID[claimID{1, 1}] != nil && ms < 2*lifeMs; ms += 1000 {
			e.Load(atMs(ms))
		}
		markAt(t, e, 3*lifeMs, 1, 1, ledger.MarkDone, 0)
		if got := e.Counts().UnknownMarks; got != 1 {
			t.Errorf("%d unknown marks counted, want 1", got)
		}
	}
	if diff := cmp.Diff(loads[0], loads[1]); diff != "" {
		t.Errorf("with second marks: %s", diff)
	}
}

// 10⁶ claims without evidence: memory is flat, what is dropped is counted.
func TestManyClaimsWithoutEvidence(t *testing.T) {
	e := newLedgerEstimator(t)
	total := uint64(1_000_000)
	if testing.Short() {
		total = 100_000
	}
	var flat uint64
	for seq := uint64(1); seq <= total; seq++ {
		claimAt(t, e, float64(seq)/1000, 1, seq, 1000)
		if seq == total/10 || seq == total {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			if flat > 0 && m.HeapAlloc > flat+flat/4+1<<20 {
				t.Errorf("%d bytes after %d claims, %d after a tenth", m.HeapAlloc, seq, flat)
			}
			flat = m.HeapAlloc
		}
	}
	_, kept := e.OpenClaims()
	if kept > MaxClaims || kept < MaxClaims-MaxClaims/16 {
		t.Errorf("%d kept", kept)
	}
	if got := e.Counts().DroppedClaims; got != total-uint64(kept) {
		t.Errorf("%d dropped and counted, want %d", got, total-uint64(kept))
	}
	if len(e.ledger.byKey) > 3*MaxClaims || len(e.ledger.byID) != kept || len(e.lag.claims) > maxLagClaims {
		t.Errorf("indices hold %d keys, %d ids, %d claims to find the lag", len(e.ledger.byKey), len(e.ledger.byID), len(e.lag.claims))
	}
	for range 100_000 {
		e.Stores(atMs(2000), []Store{{Points: []Point{{Key: prefix.Key(rand.Uint64() | 1), DepthTokens: 16}}}})
		markAt(t, e, 2000, 9, 1+rand.Uint64N(1000), ledger.MarkDone, 0)
	}
	if len(e.ledger.early.stores) > maxEarlyStores || len(e.ledger.early.marks) > maxEarlyMarks {
		t.Errorf("%d stores and %d marks are held", len(e.ledger.early.stores), len(e.ledger.early.marks))
	}
	// A long prompt's keys are thinned; the tip stays.
	claimAt(t, e, 3000, 2, 1, 1_000_000)
	c := e.ledger.list[len(e.ledger.list)-1]
	if len(c.keys) != maxKeysPerClaim || c.tipTokens() != 1_000_000 || c.depths[0] != 16 {
		t.Errorf("%d keys, from %d to %d", len(c.keys), c.depths[0], c.tipTokens())
	}
}

func TestClaimsNameBadFields(t *testing.T) {
	e := newLedgerEstimator(t)
	o := (&claimed{1, 1, "x", 100, 0}).offer(0)
	o.UncachedTokens = 0
	if _, err := e.Claims(atMs(0), &ledger.ClaimFrame{Coordinator: 1, Agent: testAgent, Offers: []ledger.Offer{o}}); !errors.Is(err, ledger.ErrFrame) || !strings.Contains(err.Error(), "claims[0]") {
		t.Errorf("error %v", err)
	}
	if _, err := e.Marks(atMs(0), &ledger.MarkFrame{Coordinator: 1, Marks: []ledger.Marked{{Seq: 1, What: "x"}}}); !errors.Is(err, ledger.ErrFrame) {
		t.Errorf("error %v", err)
	}
	if load := e.Load(atMs(1)); len(load.Echo) != 0 {
		t.Error("a bad frame was taken in part")
	}
}

// The echo outlives nothing it must not, and nobody whose lane is up is
// forgotten.
func TestEchoOfAForgottenCoordinator(t *testing.T) {
	e := newLedgerEstimator(t)
	e.LaneUp(atMs(0), 1)
	claimAt(t, e, 0, 1, 1, 100)
	claimAt(t, e, 0, 2, 1, 100)
	e.Load(atMs(70_000)) // the claims are over
	load := e.Load(atMs(200_000))
	if want := []ledger.Echo{{Coordinator: 1, Upto: 1}}; cmp.Diff(want, load.Echo) != "" {
		t.Errorf("echo %v, want only the one with a lane", load.Echo)
	}
	e.LaneDown(atMs(200_000), 1)
	e.Load(atMs(310_000))
	if load := e.Load(atMs(330_000)); len(load.Echo) != 0 {
		t.Errorf("echo %v two minutes after the lane went down", load.Echo)
	}
}

// Whatever is told in whatever order, the report is one that a coordinator
// takes, and nothing stays.
func TestLedgerReportIsAlwaysValid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e, err := New(Options{AgentProcess: testAgent, Facts: Facts{
			Model: ledger.StepModel{P0Ms: 10, P1MsPerToken: .1, D0Ms: 20}, StepTokens: rapid.SampledFrom([]int{0, 1, 512}).Draw(t, "budget"),
			BlockTokens: 16, PoolBlocks: rapid.SampledFrom([]int{0, 100}).Draw(t, "pool"), Unordered: rapid.Bool().Draw(t, "unordered"),
		}})
		if err != nil {
			t.Fatal(err)
		}
		e.ms(atMs(0))
		clock := 0.0
		seqs := map[uint64]uint64{}
		for range rapid.IntRange(1, 80).Draw(t, "facts") {
			clock += rapid.SampledFrom([]float64{0, 1, 40, 900, 30_000}).Draw(t, "gap")
			of := rapid.Uint64Range(1, 3).Draw(t, "of")
			seq := rapid.Uint64Range(1, 12).Draw(t, "seq")
			text := fmt.Sprint(of, seq)
			switch rapid.IntRange(0, 8).Draw(t, "what") {
			case 0, 1, 2:
				seqs[of]++
				c := claimed{of, seqs[of], fmt.Sprint(of, seqs[of]), rapid.SampledFrom([]int{1, 17, 900, 70_000}).Draw(t, "prompt"), 0}
				o := c.offer(rapid.SampledFrom([]float64{0, 5, 3000, 600_000}).Draw(t, "age"))
				o.Sequences = rapid.IntRange(0, 5).Draw(t, "n")
				if _, err := e.Claims(atMs(clock), &ledger.ClaimFrame{Coordinator: of, Agent: testAgent, Prev: seqs[of] - 1, Offers: []ledger.Offer{o}}); err != nil {
					t.Fatal(err)
				}
			case 3:
				what := rapid.SampledFrom([]ledger.Mark{ledger.MarkFirst, ledger.MarkDone, ledger.MarkGone, ledger.MarkFailed, ledger.MarkSuperseded}).Draw(t, "mark")
				m := ledger.Marked{Seq: seq, What: what, AgeMs: rapid.SampledFrom([]float64{0, 100, 600_000}).Draw(t, "mark age"), OutputTokens: rapid.SampledFrom([]int{0, 9, 1 << 24}).Draw(t, "out")}
				if _, err := e.Marks(atMs(clock), &ledger.MarkFrame{Coordinator: of, Marks: []ledger.Marked{m}}); err != nil {
					t.Fatal(err)
				}
			case 4:
				from := rapid.IntRange(0, 60).Draw(t, "from") * 16
				e.Stores(atMs(clock-rapid.SampledFrom([]float64{0, 20, 3000}).Draw(t, "store age")), []Store{blocks(text, from, from+rapid.IntRange(0, 80).Draw(t, "blocks")*16), {}})
			case 5, 6:
				e.Sample(Sample{
					At: atMs(clock), Running: ptr(rapid.IntRange(-1, 9).Draw(t, "running")), Waiting: ptr(rapid.IntRange(-1, 9).Draw(t, "waiting")),
					Finished: ptr(float64(rapid.IntRange(0, 99).Draw(t, "finished"))), KVUsedRatio: ptr(.5),
				})
			case 7:
				e.Slots(atMs(clock), []Slot{{rapid.IntRange(-1, 900).Draw(t, "slot"), rapid.IntRange(-1, 900).Draw(t, "done")}})
				e.Queued(atMs(clock), rapid.SampledFrom([]int{-1, 0, 500, 1 << 40}).Draw(t, "queued"))
			case 8:
				e.SetProcess(rapid.Uint64Range(1, 2).Draw(t, "process"))
			}
			load := e.Load(atMs(clock))
			if err := load.Validate(); err != nil {
				t.Fatal(err)
			}
			if e.ledger.ever && load.QueueMs == nil {
				t.Fatal("claims are echoed and no queue is told: a coordinator would lose them")
			}
			if load.Live != nil && load.Decoding != nil && *load.Decoding > *load.Live {
				t.Fatalf("%d of %d decode", *load.Decoding, *load.Live)
			}
			room := e.Room(atMs(clock))
			if room.SlotWaitMs != nil && !(*room.SlotWaitMs >= 0) {
				t.Fatalf("slot wait %v", *room.SlotWaitMs)
			}
		}
		// A claim lives ten minutes at most.
		for _, later := range []float64{601_000, 622_000, 643_000} {
			if load := e.Load(atMs(clock + later)); later == 643_000 && load.QueueMs != nil && *load.QueueMs != 0 {
				t.Fatalf("queue %v ten minutes later", *load.QueueMs)
			}
		}
		if _, kept := e.OpenClaims(); kept != 0 || len(e.ledger.byID)+len(e.ledger.byKey)+len(e.ledger.byTail) != 0 {
			t.Fatalf("%d claims left; indices %d, %d, %d", kept, len(e.ledger.byID), len(e.ledger.byKey), len(e.ledger.byTail))
		}
	})
}

// The price of a decoding request can put the end of its own prefill off beyond now:
// what is told of requests is of the replay that the queue is told by.
func TestRequestsAreCountedByTheNewestReplay(t *testing.T) {
	e := newLedgerEstimator(t, func(o *Options) { o.Facts.Model.D1MsPerRequest = 20 })
	claimAt(t, e, 0, 1, 1, 900) // ends at 120 if nothing decodes, else at 140
	for ms, want := range map[float64]float64{110: 10, 125: 15} {
		load := e.Load(atMs(ms))
		if *load.QueueMs != want || *load.Live != 1 || *load.Decoding != 0 {
			t.Errorf("at %v: %v ms, %d live, %d decoding, want %v ms and one that waits", ms, *load.QueueMs, *load.Live, *load.Decoding, want)
		}
	}
}
