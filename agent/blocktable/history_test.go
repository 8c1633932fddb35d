package blocktable

import (
	"testing"

	"waypost/gossip/prefix"
)

var historyKey = prefix.ClusterKey{7}

// script is a table with its history and a prompt of blocks of 16 tokens.
type script struct {
	t     *testing.T
	table *Table
	h     *History
}

func newScript(t *testing.T) *script {
	table := New(Options{Model: "m"})
	return &script{t, table, NewHistory(table)}
}

func promptOf(blocks int) []uint32 {
	out := make([]uint32, 16*blocks)
	for i := range out {
		out[i] = uint32(1000 + i)
	}
	return out
}

// store stores blocks from..to of the prompt at a moment, under hashes that
// begin at base.
func (s *script) store(ms float64, base uint64, from, to int, salt string) {
	e := Event{Op: OpStore, BlockTokens: 16, Tokens: promptOf(to)[16*from:], Salt: salt}
	for i := from; i < to; i++ {
		e.Hashes = append(e.Hashes, base+uint64(i))
	}
	if from > 0 {
		e.HasParent, e.Parent = true, base+uint64(from-1)
	}
	s.h.SetNow(ms)
	s.table.Apply(&e)
}

func (s *script) remove(ms float64, hashes ...uint64) {
	s.h.SetNow(ms)
	s.table.Apply(&Event{Op: OpRemove, Hashes: hashes})
}

func placeOf(blocks int, salt string) Place {
	var p prefix.Probe
	p.ResetTokens(promptOf(blocks), prefix.NewKeyer(historyKey, prefix.Domain{Model: "m", Salt: salt}))
	k, _ := p.At(16 * blocks)
	return Place{DepthTokens: uint32(16 * blocks), Key: k}
}

// ask is asked of a prompt of 8 blocks of which 6 were expected, decided at
// 100 on a view of 90. What is stored again before that is long ago.
func (s *script) ask() Told {
	return s.h.Ask(&Asked{Key: historyKey, ViewMs: 90, DecidedMs: 100, Expected: placeOf(6, ""), Tip: placeOf(8, "")})
}

func is(p *bool) string {
	switch {
	case p == nil:
		return "?"
	case *p:
		return "yes"
	}
	return "no"
}

func TestHistoryTellsWhatHappened(t *testing.T) {
	for _, test := range []struct {
		name                               string
		play                               func(*script)
		held, removed, again, other        string
		reused                             int
		askBeforeHistory, forgetEverything bool
	}{
		{name: "held and reused", play: func(s *script) {
			s.store(50, 1, 0, 6, "")
			s.store(110, 1, 6, 8, "")
		}, held: "yes", removed: "no", again: "no", other: "no", reused: 96},
		{name: "held and not used: nothing of it is stored again", play: func(s *script) {
			s.store(50, 1, 0, 6, "")
		}, held: "yes", removed: "no", again: "no", other: "no", reused: Unknown},
		{name: "never held", play: func(s *script) {
			s.store(110, 1, 0, 8, "")
		}, held: "no", removed: "no", again: "no", other: "no", reused: 0},
		{name: "removed before the decision but after the view", play: func(s *script) {
			s.store(50, 1, 0, 6, "")
			s.remove(95, 6, 5, 4)
			s.store(110, 1, 3, 8, "")
		}, held: "yes", removed: "yes", again: "no", other: "no", reused: 48},
		{name: "removed before the view", play: func(s *script) {
			s.store(50, 1, 0, 6, "")
			s.remove(80, 6, 5, 4)
		}, held: "no", removed: "no", again: "?", other: "no", reused: Unknown},
		{name: "gone without a word: stored again", play: func(s *script) {
			s.store(50, 1, 0, 6, "")
			s.store(110, 1, 2, 8, "")
		}, held: "yes", removed: "no", again: "yes", other: "no", reused: 32},
		{name: "equal content under other names", play: func(s *script) {
			s.store(50, 1, 0, 6, "")
			s.store(110, 500, 0, 8, "")
		}, held: "yes", removed: "no", again: "no", other: "yes", reused: 0},
		{name: "the cache was cleared", play: func(s *script) {
			s.store(50, 1, 0, 6, "")
			s.h.SetNow(105)
			s.table.Apply(&Event{Op: OpClear})
			s.store(110, 1, 0, 8, "")
		}, held: "yes", removed: "yes", again: "?", other: "?", reused: Unknown},
		{name: "events that contradict their block size", play: func(s *script) {
			s.table.Apply(&Event{Op: OpStore, BlockTokens: 32, Hashes: []uint64{1, 2}, Tokens: promptOf(2)})
			s.h.SetNow(60)
		}, held: "no", removed: "no", again: "?", other: "yes", reused: Unknown},
		{name: "the view began anew: nothing can be said of before", play: func(s *script) {
			s.store(50, 1, 0, 6, "")
			s.h.SetNow(95)
			s.table.Clear()
			s.store(110, 1, 0, 8, "")
		}, held: "?", removed: "?", again: "?", other: "?", reused: 0},
	} {
		s := newScript(t)
		test.play(s)
		got := s.ask()
		if is(got.Held) != test.held || is(got.Removed) != test.removed || is(got.StoredAgain) != test.again ||
			is(got.NamedOtherwise) != test.other || got.ReusedTokens != test.reused {
			t.Errorf("%s: held %s, removed %s, stored again %s, named otherwise %s, reused %d", test.name,
				is(got.Held), is(got.Removed), is(got.StoredAgain), is(got.NamedOtherwise), got.ReusedTokens)
		}
	}
}

func TestHistoryKnowsThePromptWithoutItsSalt(t *testing.T) {
	s := newScript(t)
	s.store(50, 1, 0, 5, "")
	got := s.h.Ask(&Asked{
		Key: historyKey, ViewMs: 90, DecidedMs: 100, Expected: placeOf(3, "x"),
		Unsalted: []Place{placeOf(2, ""), placeOf(4, ""), placeOf(7, "")},
	})
	if got.UnsaltedTokens != 64 || is(got.Held) != "no" {
		t.Errorf("%+v", got)
	}
}

// What is remembered is bounded, and what was forgotten is unknown, not no.
func TestHistoryIsBounded(t *testing.T) {
	s := newScript(t)
	s.store(50, 1, 0, 6, "")
	for i := range historyLength + 10 {
		s.store(101, 1, 5, 6, "")
		if i%2 == 0 {
			s.remove(102, 6)
			s.remove(102, 6)
			s.remove(102, 6)
		}
	}
	if n := len(s.h.stored.items) + len(s.h.removed.items); n > 2*historyLength {
		t.Errorf("%d items", n)
	}
	s.remove(103, 1, 2, 3, 4, 5, 6, 6, 6)
	for range historyLength {
		s.store(104, 900, 0, 1, "")
		s.remove(104, 900)
	}
	if got := s.ask(); is(got.Held) != "?" || is(got.Removed) != "?" {
		t.Errorf("of what was forgotten: held %s, removed %s", is(got.Held), is(got.Removed))
	}
}

// clearedBesideHost is a cache that was cleared at 60 ms, when host memory held its six
// blocks as well.
func clearedBesideHost(t *testing.T) *script {
	s := newScript(t)
	s.table.FollowHost(true)
	s.store(50, 1, 0, 6, "")
	s.table.Apply(&Event{Op: OpStore, Medium: MediumCPU, Hashes: []uint64{1, 2, 3, 4, 5, 6}})
	s.h.SetNow(60)
	s.table.Apply(&Event{Op: OpClear})
	return s
}

// A cleared cache leaves what host memory holds: that keeps its names, but when it was
// listed is forgotten.
func TestHistoryKeepsTheNamesOfWhatStays(t *testing.T) {
	s := clearedBesideHost(t)
	id := s.table.findHash(6)
	if s.table.Attached() != 6 || s.h.listedAt(id) != never {
		t.Fatalf("%d blocks are held, the last one was listed at %v", s.table.Attached(), s.h.listedAt(id))
	}
	if got, want := s.table.PointOf(id), prefix.Point(0, promptOf(6)); got != want {
		t.Errorf("named %x, want %x", got, want)
	}
	// They are explained by what happens to them from then on.
	s.h.SetNow(95)
	s.table.Apply(&Event{Op: OpRemove, Medium: MediumCPU, Hashes: []uint64{6}})
	if got := s.ask(); is(got.Held) != "yes" || is(got.Removed) != "yes" {
		t.Errorf("held %s, removed %s", is(got.Held), is(got.Removed))
	}
}

// Clears come in floods: what the first of them forgot is not walked again, however
// much host memory holds.
func TestFloodOfClearsForgetsOnce(t *testing.T) {
	s := clearedBesideHost(t)
	const untouched = 1 // is not kept by any walk
	id := s.table.findHash(6)
	at := &s.h.listed[id>>pageShift][id&(pageNodes-1)].at
	*at = untouched
	for range 3 {
		s.table.Apply(&Event{Op: OpClear})
	}
	if *at != untouched {
		t.Error("a clear of nothing walked what is listed")
	}
	*at = 0
	s.store(70, 1, 6, 7, "")
	s.table.Apply(&Event{Op: OpStore, Medium: MediumCPU, Hashes: []uint64{7}})
	s.table.Apply(&Event{Op: OpClear})
	if got := s.h.listedAt(s.table.findHash(7)); s.table.Attached() != 7 || got != never {
		t.Errorf("after a store and a clear a block was listed at %v", got)
	}
}

// What a cache that is empty needed to be told of is given back.
func TestHistoryOfAnEmptyCacheTakesNoMemory(t *testing.T) {
	s := newScript(t)
	s.store(50, 1, 0, 6, "")
	s.table.Apply(&Event{Op: OpClear})
	if n := len(s.h.listed); n != 0 {
		t.Errorf("%d pages of moments are kept of no block", n)
	}
	s.store(60, 1, 0, 6, "")
	if got := s.h.listedAt(s.table.findHash(6)); got != 60 {
		t.Errorf("stored anew at 60 ms, listed at %v", got)
	}
}
