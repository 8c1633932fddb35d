package placement

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// Matches are a map from workers to what they hold, however these are grouped.
func TestMatchesAreAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 3))
		few := rapid.SampledFrom([]int32{2, 40, 4000}).Draw(t, "lengths") // more than a set falls apart into
		var m Matches
		want := map[WorkerID]Held{}
		held := func() Held { return Held{Tokens: 1 + r.Int32N(few), GPUTokens: r.Int32N(3), Predicted: r.IntN(2) == 0} }
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			switch r.IntN(6) {
			case 0:
				m.Reset()
				clear(want)
			case 1:
				h, first := held(), r.IntN(5)
				words := make([]uint64, r.IntN(4))
				for i := range words {
					words[i] = r.Uint64() & r.Uint64()
					for bit := range 64 {
						id := WorkerID(64*(first+i) + bit)
						if _, there := want[id]; there {
							words[i] &^= 1 << bit
						} else if words[i]>>bit&1 != 0 {
							want[id] = h
						}
					}
				}
				m.AddSet(h, first, words)
				clear(words) // they belong to the caller
			case 2:
				h := held()
				for id := WorkerID(r.IntN(300)); id < 320; id += WorkerID(1 + r.IntN(100)) {
					if _, there := want[id]; !there {
						m.Add(id, h)
						want[id] = h
					}
				}
			case 3:
				id := WorkerID(r.IntN(500))
				m.Remove(id)
				delete(want, id)
			default:
				by := make([]int32, 600)
				for i := range by {
					by[i] = r.Int32N(few) * r.Int32N(2)
				}
				change := func(id WorkerID, h Held) Held {
					h.Tokens = max(0, h.Tokens-by[id])
					return h
				}
				seen := 0
				m.Adjust(func(id WorkerID, h Held) Held {
					seen++
					return change(id, h)
				})
				if seen != len(want) {
					t.Fatalf("%d of %d workers adjusted", seen, len(want))
				}
				for id, h := range want {
					want[id] = change(id, h)
				}
			}
			got := map[WorkerID]Held{}
			for id, h := range m.All() {
				if _, twice := got[id]; twice {
					t.Fatalf("worker %d is there twice", id)
				}
				got[id] = h
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("(-want +got)\n%s", diff)
			}
			deepest := 0
			for h := range maps.Values(want) {
				deepest = max(deepest, int(h.Tokens))
			}
			if m.Len() != len(want) || m.DeepestTokens() != deepest {
				t.Fatalf("%d workers, deepest %d: want %d, %d", m.Len(), m.DeepestTokens(), len(want), deepest)
			}
		}
	})
}

// A set of no words is nobody's, and what is added after it is where it belongs.
func TestSetsOfNobodyAddNothing(t *testing.T) {
	for _, c := range []struct {
		name string
		add  func(m *Matches)
		want map[WorkerID]Held
	}{
		{"alone", func(m *Matches) { m.AddSet(Held{Tokens: 2}, 0, nil) }, map[WorkerID]Held{}},
		{"first", func(m *Matches) {
			m.AddSet(Held{Tokens: 2}, 1, []uint64{})
			m.Add(5, Held{Tokens: 2})
		}, map[WorkerID]Held{5: {Tokens: 2}}},
		{"after another", func(m *Matches) {
			m.AddSet(Held{Tokens: 1}, 0, []uint64{1})
			m.AddSet(Held{Tokens: 2}, 1, nil)
			m.Add(5, Held{Tokens: 2})
		}, map[WorkerID]Held{0: {Tokens: 1}, 5: {Tokens: 2}}},
	} {
		var m Matches
		c.add(&m)
		got := map[WorkerID]Held{}
		for id, h := range m.All() {
			got[id] = h
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", c.name, diff)
		}
	}
}

// Sets that workers leave one by one stay few where they still hold the same, and
// memory is used again.
func TestMatchesStayGrouped(t *testing.T) {
	words := []uint64{^uint64(0), ^uint64(0)}
	var m Matches
	fill := func() {
		m.Reset()
		m.AddSet(Held{Tokens: 100}, 0, words)
		m.Adjust(func(id WorkerID, h Held) Held {
			h.Tokens -= int32(id % 3)
			return h
		})
	}
	fill()
	if len(m.groups) != 3 {
		t.Errorf("%d sets, want 3", len(m.groups))
	}
	if n := testing.AllocsPerRun(10, fill); n > 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

// The number of a match says what it is made of, and grows with what is known to
// be held: what is Unknown is the least.
func TestNumbersOfMatches(t *testing.T) {
	ascending := []Held{
		{Tokens: Unknown},
		{Tokens: Unknown, Predicted: true},
		{},
		{Predicted: true},
		{Tokens: 1},
		{Tokens: 1, LowerTokens: 1},
		{Tokens: 1, LowerTokens: 1, Predicted: true},
		{Tokens: 2},
		{Tokens: MaxPromptTokens, LowerTokens: MaxPromptTokens},
		{Tokens: math.MaxInt32},
	}
	last := uint64(0)
	for _, h := range ascending {
		number := h.number()
		if number <= last {
			t.Errorf("the number of %+v is not above that of what is less", h)
		}
		last = number
		of := holding{most: number, least: ^number}
		if got := (Held{Tokens: of.tokens(), LowerTokens: of.lower(), Predicted: of.predicted()}); got != h || !of.some() || of.mixed() {
			t.Errorf("rows that hold %+v are told as %+v, some %v, mixed %v", h, got, of.some(), of.mixed())
		}
	}
}

// Where nobody can say what most workers hold, their blocks are bounded as those of
// workers that hold nothing, and their rows have the keys of their blocks.
func TestUnseenMatchesBoundAsNone(t *testing.T) {
	unseen, keys := 0, 0
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 31))
		// Of so many that one set of them is not looked at one by one.
		w := newBoardWorld(r, 201+2*apartMatches, mix{alike: 1, same: true, idle: float64(seed % 2), matched: 1, unseen: 1, far: float64(seed / 2 % 2)})
		bounds := func() (*search, []block) {
			p := newPricer(&w.req, &w.policy, w.sit)
			s := &search{board: &w.board, p: &p, q: &w.query, d: new(Decision), scratch: new(scratch)}
			s.begin(len(w.board.workers), len(w.board.classes))
			s.run()
			survey, firsts := emptySurvey(len(w.workers)), [numReasons]int32{}
			s.boundAll(&survey, &firsts) // again, since the search opened groups
			return s, slices.Clone(s.blocks)
		}
		s, got := bounds()
		for k := range got {
			if !got[k].folded || s.rowsOf(k, holder) == 0 {
				continue
			}
			unseen++
			if b := s.blockKeys(k); b != nil {
				if keys++; b.keys[1] != s.twinKey(s.firstOf(k, holder)) {
					t.Fatalf("seed %d: block %d has another key than its rows", seed, k)
				}
			}
		}
		w.query.Matches.Reset()
		_, want := bounds()
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(block{})); diff != "" {
			t.Fatalf("seed %d: (-nothing held +unknown)\n%s", seed, diff)
		}
	}
	if unseen < 500 || keys < 200 {
		t.Errorf("%d blocks, %d with keys: too few to tell anything", unseen, keys)
	}
}
