package placement

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"waypost/gossip/ledger"
)

// boardWorld is a large fleet for the bounded search.
type boardWorld struct {
	board   Board
	req     Request
	policy  Policy
	sit     Situation
	query   Query
	workers []*Worker
	matches []match // what query.Matches is made of
}

// match is what one worker holds.
type match struct {
	Worker WorkerID
	Held
}

// noteMatches makes the query's matches those of the list: three lists of four in
// sets as an index finds them, deep ones first, the others in the order they have.
func (w *boardWorld) noteMatches() {
	w.query.Matches.Reset()
	list := slices.Clone(w.matches)
	if len(list)%4 > 0 {
		slices.SortFunc(list, func(a, b match) int {
			return cmp.Or(cmp.Compare(b.number(), a.number()), cmp.Compare(a.Worker, b.Worker))
		})
	}
	for _, m := range list {
		w.query.Matches.Add(m.Worker, m.Held)
	}
}

const worldNowMs = 5e5

// mix says how a world is made: each is a share from 0 to 1.
type mix struct {
	idle, alike, unknown, excluded, matched, lower, far, pulling float64
	// unseen is the share of matches of which nobody can say how long they are.
	unseen  float64
	budgets bool
	// same gives all one step budget and a fresh report.
	same bool
}

func newBoardWorld(r *rand.Rand, n int, m mix) *boardWorld {
	w := &boardWorld{policy: DefaultPolicy(), query: Query{}}
	chance := func(p float64) bool { return r.Float64() < p }
	maybe := func(v float64) float64 {
		if chance(m.unknown) {
			return math.NaN()
		}
		return v
	}
	w.policy.Theta = []float64{0, 1, 5, 20}[r.IntN(4)]
	w.policy.TieMs = []float64{0, 1, 25}[r.IntN(3)]
	w.sit = Situation{NowMs: worldNowMs, PolicyAgeMs: 50, ArrivalsPerMs: maybe([]float64{0, .002, .01}[r.IntN(3)]), MeanOutputTokens: maybe(200)}
	w.req = Request{
		ID: fmt.Sprintf("r%d", r.IntN(1000)), PromptTokens: []int{1, 17, 700, 8192, 9000, 60_000}[r.IntN(6)],
		OutputTokensExpected: []float64{0, 64, 2000}[r.IntN(3)],
	}
	if m.budgets {
		w.req.FirstTokenBudgetMs = []float64{0, 30, 400}[r.IntN(3)]
		w.req.GapBudgetMs = []float64{0, 10, 25}[r.IntN(3)]
		w.req.DeadlineMs = []float64{0, 900, 9000}[r.IntN(3)]
		w.req.IfInfeasible = []IfInfeasible{"", Reject, RetryAfter}[r.IntN(3)]
	}
	if chance(m.excluded) {
		w.req.ExcludeWorkers = []string{"gpu-0003/vllm-8000/0"}
		w.req.ExcludeProcesses = []uint64{105}
		w.req.Adapter = []string{"", "a1"}[r.IntN(2)]
	}
	common := r.IntN(w.req.PromptTokens + 50)
	if chance(m.far) {
		w.query.Ways = make([]Way, n-r.IntN(2))
		w.query.WaysOpen = len(w.query.Ways) == n
		w.query.WaysAlike = w.query.WaysOpen && r.IntN(2) == 0
		for i := range w.query.Ways {
			w.query.Ways[i] = Way{RoundTripMs: maybe([]float64{0, 0, 12}[r.IntN(3)]), SurchargeMs: []float64{0, 15}[r.IntN(2)], Outside: chance(m.excluded)}
			if w.query.WaysAlike {
				w.query.Ways[i] = Way{RoundTripMs: 12, SurchargeMs: 15}
			}
			w.query.WaysOpen = w.query.WaysOpen && w.query.Ways[i].RoundTripMs >= 0 && !w.query.Ways[i].Outside
		}
	}
	for i := range n {
		worker := testWorker(i, fmt.Sprintf("gpu-%04d/vllm-8000/0", i), worldNowMs)
		model := worker.Steps.Model()
		if !chance(m.alike) {
			f := 1 + float64(r.IntN(5))/4
			model.P1MsPerToken, model.P2MsPerToken2, model.P0Ms = model.P1MsPerToken*f, model.P2MsPerToken2*f, float64(r.IntN(20))
			if chance(.3) {
				model.QMsPerToken2, model.D3Ms = 4e-7, -25
			}
		}
		if !chance(m.idle) {
			worker.Decoding = maybe(float64(r.IntN(100)))
			worker.ContextTokens = maybe(r.Float64() * 3e5)
			worker.Live = maybe(float64(r.IntN(300)))
			worker.HeldBlocks = maybe(r.Float64() * 21_000)
			worker.ErrorMs = maybe(r.Float64() * 300)
			worker.LoadAtMs = maybe(worldNowMs - []float64{100, 400, 5000}[r.IntN(3)])
			worker.View.AtMs = worldNowMs - r.Float64()*2e5
		}
		budget := []int{2048, 8192}[r.IntN(2)]
		if m.same {
			budget, worker.LoadAtMs = 8192, max(worker.LoadAtMs, worldNowMs-400)
		}
		worker.Steps = ledger.NewSteps(model, budget, model.DecodeMs(positive(worker.Decoding), positive(worker.ContextTokens), 320_000))
		queue := 0.0
		if !chance(m.idle) {
			queue = maybe([]float64{1, 40, 300 * r.Float64(), 5000 * r.Float64()}[r.IntN(4)])
		}
		worker.QueueKnown = !math.IsNaN(queue)
		worker.Waiting = ledger.AtLoad(&worker.Steps, worldNowMs-100, queue, r.IntN(2047))
		if chance(m.unknown) {
			worker.Waiting.Fold(&worker.Steps, worldNowMs-50, 0, 900)
			worker.OpenClaims = 1
			worker.View.Kind = []ViewKind{ViewBlind, ViewInferred, ViewStale, ViewLive}[r.IntN(4)]
		}
		if chance(m.excluded) {
			worker.Doubted = []Reason{0, ReasonStalled, ReasonGPUFault}[r.IntN(3)]
			worker.Barred = []Reason{0, ReasonCordoned, ReasonLost}[r.IntN(3)]
			worker.AwaySinceMs = []float64{math.NaN(), worldNowMs - 5000, worldNowMs - 90_000}[r.IntN(3)]
			worker.Served = [][]string{nil, {"a0", "a1"}}[r.IntN(2)]
			worker.MaxModelTokens = []int{0, 8192, 131_072}[r.IntN(3)]
		}
		if chance(m.pulling) {
			worker.Transfer = &Transfer{
				Connector: "nixl", SideChannel: "10.0.0.1:5600", Fingerprint: []string{"a", "a", "b"}[r.IntN(3)],
				ExportedTier: "gpu", BytesPerToken: 262_144,
			}
		}
		if chance(m.matched) {
			tokens := common
			if chance(.3) {
				tokens = r.IntN(w.req.PromptTokens + 50)
			}
			held := match{worker.ID, Held{Tokens: int32(tokens), Predicted: chance(.2)}}
			if chance(m.lower) {
				held.LowerTokens = int32(tokens / (1 + r.IntN(2)))
				worker.Host = []*HostTier{nil, {BytesPerToken: 262_144, BytesPerMs: 18e6}, {BytesPerToken: 262_144, BytesPerMs: 2e6}}[r.IntN(3)]
			}
			if m.unseen > 0 && chance(m.unseen) {
				held.Held = Held{Tokens: Unknown}
			}
			w.matches = append(w.matches, held)
		}
		w.workers = append(w.workers, &worker)
		w.board.Set(&worker)
	}
	if m.pulling > 0 {
		for _, match := range w.matches[:min(len(w.matches), MaxSources)] {
			if match.Tokens == Unknown {
				continue // nobody can say what may be pulled
			}
			w.sit.Sources = append(w.sit.Sources, Source{Worker: w.workers[match.Worker], Tokens: int(match.Tokens), Sending: r.IntN(3)})
		}
		speeds := []float64{1.2e5, 3e6, 12.5e6}
		seed := r.Uint64()
		w.query.Paths = func(to *Worker, dst []Path) []Path {
			for i := range w.sit.Sources {
				x := rendezvous(seed, uint64(to.ID)*8+uint64(i))
				dst = append(dst, Path{Link: "l", BytesPerMs: speeds[x%3], LatencyMs: float64(x >> 8 % 3), UnderWay: int(x >> 16 % 3), Never: x>>24%7 == 0})
			}
			return dst
		}
		w.query.FastestBytesPerMs = []float64{0, 12.5e6}[r.IntN(2)]
	}
	w.query.MatchUnknown = chance(m.unknown / 4)
	r.Shuffle(len(w.matches), func(i, j int) { w.matches[i], w.matches[j] = w.matches[j], w.matches[i] })
	w.noteMatches()
	return w
}

func (w *boardWorld) decide(t testing.TB, dst []Candidate, d *Decision) []Candidate {
	candidates, err := w.board.Decide(&w.req, &w.policy, w.sit, &w.query, dst, d)
	if err != nil {
		t.Fatal(err)
	}
	return candidates
}

// all are the candidates of a full scan.
func (w *boardWorld) all() []Candidate {
	var all []Candidate
	for _, worker := range w.board.Workers() {
		c := Candidate{Worker: worker, DistanceMs: math.NaN()}
		if int(worker.ID) < len(w.query.Ways) {
			way := w.query.Ways[worker.ID]
			c.DistanceMs, c.SurchargeMs, c.Outside = way.RoundTripMs, way.SurchargeMs, way.Outside
		}
		for _, m := range w.matches {
			if m.Worker == worker.ID {
				c.MatchedTokens, c.LowerTokens, c.Predicted = int(m.Tokens), int(m.LowerTokens), m.Predicted
			}
		}
		if w.query.MatchUnknown {
			c.MatchedTokens, c.Predicted = Unknown, false
		}
		if w.query.Paths != nil {
			c.Paths = w.query.Paths(worker, nil)
		}
		all = append(all, c)
	}
	return all
}

// verdict is all that a caller sees of a decision.
func verdict(d *Decision, candidates []Candidate) string {
	name := func(i int) string {
		if i < 0 {
			return "nobody"
		}
		if !d.Terms[i].Placeable { // what is unknown of it is taken as nothing in a search
			return candidates[i].Name
		}
		return fmt.Sprintf("%s %v %v", candidates[i].Name, d.Terms[i].TotalMs, d.Terms[i].Pull)
	}
	text := fmt.Sprintf("chosen %s, most reuse on %s, tied %v, marks %v, %v tokens, first %v p90 %v, refusal %v, placeable %d, eligible %d, best own %v, reasons %v",
		name(d.Chosen), name(d.MostReuse), d.Tied, d.Marks.Words(), d.OutputTokens, d.FirstTokenMs, d.FirstTokenP90Ms, d.Refusal,
		d.Survey.Placeable, d.Survey.Eligible, d.Survey.BestOwnMs, d.Survey.Reasons)
	for _, i := range d.Fallbacks() {
		text += ", then " + name(i)
	}
	return text
}

// The bounded search gives what the full scan gives, whatever the fleet: idle
// and alike, busy, half unknown, half excluded, with matches, distances, pulls
// and budgets. And it prices few.
func TestSearchEqualsFullScan(t *testing.T) {
	priced, total := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 7))
		share := func(name string, shares ...float64) float64 { return rapid.SampledFrom(shares).Draw(t, name) }
		w := newBoardWorld(r, rapid.IntRange(1, 250).Draw(t, "workers"), mix{
			idle: share("idle", 0, .3, 1), alike: share("alike", 0, 1), unknown: share("unknown", 0, 0, .02, .3),
			excluded: share("excluded", 0, 0, .1, .6), matched: share("matched", 0, .02, .06, 1), far: share("far", 0, 1), same: rapid.Bool().Draw(t, "same"),
			lower: share("lower", 0, .3, 1), pulling: share("pulling", 0, 0, 1), budgets: rapid.Bool().Draw(t, "budgets"),
			unseen: share("unseen", 0, .1, .9),
		})
		var full, bounded Decision
		all := w.all()
		sit := w.sit
		if w.query.Paths == nil {
			sit.Sources = nil
		}
		if err := Decide(&w.req, all, &w.policy, sit, &full); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time with used memory
			candidates, err := w.board.Decide(&w.req, &w.policy, w.sit, &w.query, nil, &bounded)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := verdict(&bounded, candidates), verdict(&full, all); got != want {
				t.Fatalf("of %d workers, %d priced:\n got %s\nwant %s", len(all), len(candidates), got, want)
			}
			if n := bounded.Survey.Unpriced; n < 0 || n > len(all)-len(candidates) {
				t.Fatalf("%d unpriced of %d, %d are priced", n, len(all), len(candidates))
			}
			record := NewRecord(&w.req, candidates, &w.policy, w.sit, &bounded, 8)
			var again Decision
			if err := record.Redecide(&again); err != nil {
				t.Fatal(err)
			}
			if (again.Chosen < 0) != (full.Chosen < 0) || again.Refusal.Reason != full.Refusal.Reason || full.Chosen >= 0 && record.Candidates[again.Chosen].Name != all[full.Chosen].Name {
				t.Fatalf("the record decides %s, the fleet %s", verdict(&again, record.Candidates), verdict(&full, all))
			}
			priced, total = priced+len(candidates), total+len(all)
		}
	})
	t.Logf("%d of %d workers priced", priced, total)
}

// What the search leaves out it leaves out rightly: no bound is above the price.
func TestBoundsAreLower(t *testing.T) {
	tight, n := 0.0, 0
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 8))
		share := func(name string, shares ...float64) float64 { return rapid.SampledFrom(shares).Draw(t, name) }
		w := newBoardWorld(r, 80, mix{
			idle: share("idle", 0, .3), alike: share("alike", 0, 1), unknown: share("unknown", 0, .1), excluded: share("excluded", 0, .1),
			matched: share("matched", 0, .05, .05, .5), far: share("far", 0, 1), pulling: share("pulling", 0, 1), unseen: share("unseen", 0, .3),
			same: rapid.Bool().Draw(t, "same"),
		})
		var d, full Decision
		all := w.all()
		if err := Decide(&w.req, all, &w.policy, w.sit, &full); err != nil {
			t.Fatal(err)
		}
		p := newPricer(&w.req, &w.policy, w.sit)
		s := search{board: &w.board, p: &p, q: &w.query, d: &d, scratch: new(scratch)}
		s.begin(len(w.board.workers), len(w.board.classes))
		s.run()
		for k := range s.blocks {
			s.unfold(k)
		}
		for i := range all {
			price := &full.Terms[i]
			if price.Reason != ReasonNone {
				continue
			}
			if doubt := s.doubtMs(i); s.totals[i]+doubt > slack(price.TotalMs) || s.owns[i]+doubt > slack(price.OwnMs) {
				t.Fatalf("%s: bounds %v and %v and doubt of total %v, own %v: %+v", all[i].Name, s.totals[i], s.owns[i], price.TotalMs, price.OwnMs, *price)
			}
			tight, n = tight+(s.totals[i]+s.doubtMs(i))/price.TotalMs, n+1
		}
	})
	t.Logf("bounds are %.3f of the price in the mean", tight/float64(n))
}

// Of many workers that are alike most are judged by groups, holders apart and
// idle ones by their hashes alone: that, too, gives what the full scan gives.
func TestGroupsDecideAsRows(t *testing.T) {
	twins, holders, together := 0, 0, 0
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 12))
		n := 100 + r.IntN(150)
		if seed%10 == 6 || seed%10 == 8 { // a set too large to be looked at one by one
			n += 2 * apartMatches
		}
		w := newBoardWorld(r, n, mix{
			alike: 1, same: true, idle: []float64{0, .5, 1}[seed%3], matched: []float64{0, .05, .9}[seed/3%3], far: float64(seed % 2), budgets: seed%5 == 0,
			unseen: []float64{0, .3, 0, 1}[seed/9%4],
		})
		w.policy.TieMs = 0
		var full, bounded Decision
		all := w.all()
		if err := Decide(&w.req, all, &w.policy, w.sit, &full); err != nil {
			t.Fatal(err)
		}
		candidates := w.decide(t, nil, &bounded)
		if got, want := verdict(&bounded, candidates), verdict(&full, all); got != want {
			t.Fatalf("seed %d: of %d workers, %d priced:\n got %s\nwant %s", seed, len(all), len(candidates), got, want)
		}
		for k := range bounded.scratch.blocks {
			if bounded.scratch.blocks[k].twinned {
				twins++
			}
		}
		holders += len(bounded.scratch.holders)
		for k := range bounded.scratch.held {
			together += bits.OnesCount16(bounded.scratch.held[k].rows &^ bounded.scratch.held[k].apart)
		}
	}
	if twins < 200 || holders < 500 || together < 500 {
		t.Errorf("%d blocks of twins, %d holders apart and %d not: too few to tell anything", twins, holders, together)
	}
	t.Logf("%d blocks of twins, %d holders apart and %d not", twins, holders, together)
}

// A group is left out rightly: its bound is not above that of any of its rows.
// Those that hold something are bounded apart, each once.
func TestGroupsAreLower(t *testing.T) {
	folded, holders := 0, 0
	for seed := range uint64(100) {
		n, m := 200, mix{alike: 1, same: true, idle: .3, matched: .05, far: float64(seed % 2), unseen: []float64{0, .3}[seed/2%2]}
		if seed%5 == 0 { // a set too large to be looked at one by one
			n, m.matched = 200+2*apartMatches, .9
		}
		w := newBoardWorld(rand.New(rand.NewPCG(seed, 10)), n, m)
		var d Decision
		p := newPricer(&w.req, &w.policy, w.sit)
		s := search{board: &w.board, p: &p, q: &w.query, d: &d, scratch: new(scratch)}
		s.begin(len(w.board.workers), len(w.board.classes))
		s.run()
		survey, firsts := emptySurvey(len(w.workers)), [numReasons]int32{}
		s.boundAll(&survey, &firsts) // again, since the search opened groups
		for k := range s.blocks {
			group := s.blocks[k]
			if group.folded {
				folded++
				holders += bits.OnesCount16(s.rowsOf(k, holder))
			}
			s.unfold(k)
			if exact := s.blocks[k]; group.total > exact.total || group.own > exact.own {
				t.Fatalf("seed %d: a group's bounds %v are above its rows' %v", seed, group, exact)
			}
		}
	}
	if folded < 100 || holders < 100 {
		t.Errorf("%d groups with %d holders: too few to tell anything", folded, holders)
	}
}

// Holders that cost the same are judged by their hashes alone, and only those:
// how long a match is, whether a claim stands behind it, how much it is doubted and
// what reading it from host memory takes set them apart.
func TestTwinHoldersDecideAsRows(t *testing.T) {
	priced, holders, blocks, unseenBlocks, mixed := 0, 0, 0, 0, 0
	for seed := range uint64(600) {
		r := rand.New(rand.NewPCG(seed, 21))
		n := 80 + r.IntN(120)
		if seed%10 == 1 || seed%10 == 5 { // sets too large to be looked at one by one
			n += 2 * apartMatches
		}
		m := mix{alike: 1, same: true, idle: []float64{.7, 1}[seed%2], matched: []float64{.3, 1}[seed/2%2], far: float64(seed / 4 % 2)}
		plain := seed%20 == 11 || seed%20 == 15 // but for a small set, all hold the same
		if plain {
			m.matched = 1
		}
		w := newBoardWorld(r, n, m)
		w.policy.TieMs = 0
		unseen := seed%4 == 3 && seed/20%2 == 0 // of some nobody can say what they hold
		lengths := []int32{r.Int32N(int32(w.req.PromptTokens) + 50), r.Int32N(int32(w.req.PromptTokens) + 50)}
		if seed%5 == 0 || plain {
			lengths = lengths[:1]
		}
		for i := range w.matches {
			if w.matches[i].Tokens = lengths[r.IntN(len(lengths))]; r.IntN(20) == 0 { // one of a small set
				w.matches[i].Tokens = lengths[0] / 2
			}
			w.matches[i].Predicted = w.matches[i].Predicted && seed%5 > 1 && !plain
			if seed%7 > 1 && !plain { // or in host memory
				w.matches[i].LowerTokens = []int32{0, w.matches[i].Tokens}[r.IntN(2)]
			}
			if unseen && (plain && w.matches[i].Tokens == lengths[0] || r.IntN(3) == 0) {
				w.matches[i].Held = Held{Tokens: Unknown}
			}
		}
		w.noteMatches()
		for i, worker := range w.workers {
			if seed%7 > 1 {
				worker.Host = &HostTier{BytesPerToken: 262_144, BytesPerMs: 18e6}
				if seed%7 > 4 && r.IntN(2) == 0 {
					worker.Host = &HostTier{BytesPerToken: 131_072, BytesPerMs: 18e6}
				}
			}
			// In some worlds the views differ, in trust or in age.
			if seed%3 > 0 && !plain && r.IntN(2) == 0 {
				worker.View.Trust = []float64{.5, .9}[r.IntN(2)]
			}
			if seed%3 > 1 && !plain && r.IntN(2) == 0 {
				worker.View.AtMs = worldNowMs - 20_000
			}
			w.board.Set(w.workers[i])
		}
		var full, bounded Decision
		all := w.all()
		if err := Decide(&w.req, all, &w.policy, w.sit, &full); err != nil {
			t.Fatal(err)
		}
		candidates := w.decide(t, nil, &bounded)
		if got, want := verdict(&bounded, candidates), verdict(&full, all); got != want {
			t.Fatalf("seed %d: of %d workers, %d priced:\n got %s\nwant %s", seed, len(all), len(candidates), got, want)
		}
		priced, holders = priced+len(candidates), holders+len(w.matches)
		for k, h := range bounded.scratch.held {
			if h.some() && bounded.scratch.blocks[k].twinned {
				blocks++
				if h.tokens() == Unknown {
					unseenBlocks++
				}
			} else if h.mixed() {
				mixed++
			}
		}
	}
	if priced*4 > holders {
		t.Errorf("%d priced, %d holders: twins among them do not help", priced, holders)
	}
	if blocks < 50 || mixed < 50 || unseenBlocks < 20 {
		t.Errorf("%d blocks of twins with holders, %d of these unseen, %d mixed: too few to tell anything", blocks, unseenBlocks, mixed)
	}
	t.Logf("%d priced, %d holders, %d blocks of twins with holders, %d of these unseen, %d mixed", priced, holders, blocks, unseenBlocks, mixed)
}

// A board that changed worker by worker is one that was made of the last.
func TestBoardFollowsChanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 9))
		m := mix{idle: .5, unknown: .1, excluded: .2, matched: .2, pulling: .5}
		w, other := newBoardWorld(r, 120, m), newBoardWorld(r, 120, m)
		for range 200 {
			i := r.IntN(120)
			if r.IntN(4) == 0 {
				w.board.Remove(WorkerID(i))
				continue
			}
			w.board.Set(other.workers[i])
		}
		var fresh Board
		for _, worker := range w.board.Workers() {
			fresh.Set(worker)
		}
		var a, b Decision
		w.query.Paths, w.sit.Sources = nil, nil
		first, err := w.board.Decide(&w.req, &w.policy, w.sit, &w.query, nil, &a)
		if err != nil {
			t.Fatal(err)
		}
		second, err := fresh.Decide(&w.req, &w.policy, w.sit, &w.query, nil, &b)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := verdict(&a, first), verdict(&b, second); got != want {
			t.Fatalf("after changes %s\nfresh %s", got, want)
		}
		if got, want := groupsOf(&w.board), groupsOf(&fresh); got != want {
			t.Fatalf("groups after changes\n%s\nfresh\n%s", got, want)
		}
		if w.board.errors != fresh.errors || w.board.pulling != fresh.pulling || len(w.board.classAt) != len(fresh.classAt) {
			t.Fatalf("sums %d %d %d, fresh %d %d %d", w.board.errors.known, w.board.pulling, len(w.board.classAt), fresh.errors.known, fresh.pulling, len(fresh.classAt))
		}
		for i := range 120 {
			w.board.Remove(WorkerID(i))
		}
		if w.board.Len() != 0 || len(w.board.classAt) != 0 || w.board.errors != (errorSum{}) || w.board.pulling != 0 {
			t.Fatalf("an emptied board holds %d workers, %d classes", w.board.Len(), len(w.board.classAt))
		}
	})
}

// groupsOf writes a board's groups; classes have no numbers of their own.
func groupsOf(b *Board) string {
	var out strings.Builder
	for k, g := range b.groups {
		budget := b.classes[g.class].steps.BudgetTokens()
		g.class = 0
		fmt.Fprintln(&out, budget, g, b.alike[k])
	}
	return out.String()
}

var figureFleets = []struct {
	name string
	mix  mix
}{
	{"busy", mix{alike: 1}},
	{"shared", mix{alike: 1, matched: 1}}, // all hold the system prompt
	{"mixed", mix{}},                      // of several speeds
	{"idle", mix{alike: 1, same: true, idle: 1}},
	{"idle, cold", mix{alike: 1, same: true, idle: 1, matched: -1}},
	{"idle, shared", mix{alike: 1, same: true, idle: 1, matched: .25}},
	{"third idle, shared", mix{alike: 1, same: true, idle: .3, matched: .25}},
}
