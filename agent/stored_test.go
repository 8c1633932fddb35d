package agent

import (
	"fmt"
	"slices"
	"testing"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// storing is a worker's mirror with the claims that want to hear of it.
type storing struct {
	table  *blocktable.Table
	wanted wantedPrompts
	tokens []uint32
	blocks int
}

func newStoring(sessions ...string) *storing {
	s := &storing{table: blocktable.New(blocktable.Options{Model: "m", Seed: 1})}
	f := ledger.ClaimFrame{Coordinator: 7}
	for _, name := range sessions {
		f.Offers = append(f.Offers, ledger.Offer{Claim: ledger.Claim{Session: name}})
	}
	s.wanted.claims(&f)
	return s
}

// store adds blocks of 16 tokens behind what is stored, for a session.
func (s *storing) store(session string, blocks int, replayed bool) {
	e := blocktable.Event{Op: blocktable.OpStore, BlockTokens: 16, HasParent: s.blocks > 0, Parent: uint64(s.blocks), Session: session}
	for range blocks {
		s.blocks++
		e.Hashes = append(e.Hashes, uint64(s.blocks))
		for i := range 16 {
			e.Tokens = append(e.Tokens, uint32(s.blocks*100+i))
		}
	}
	s.tokens = append(s.tokens, e.Tokens...)
	b := engine.Batch{Events: []blocktable.Event{e}, Replayed: replayed}
	s.table.ApplyAll(b.Events)
	s.wanted.stored(s.table, &b)
}

// A coordinator is told what the steps of a prefill stored of its prompt with
// what was there before, and never of an answer, of another request, of what is
// replayed, or of what a preempted request computes again.
func TestStoredPromptsAreTold(t *testing.T) {
	type step struct {
		session  string
		blocks   int
		replayed bool
	}
	for _, c := range []struct {
		name  string
		steps []step
		want  []int // blocks told, one after the other
	}{
		{"one step, then an answer", []step{{"a", 40, false}, {"a", 1, false}, {"a", 1, false}}, []int{40}},
		{"behind a cached beginning", []step{{"", 33, false}, {"a", 7, false}}, []int{40}},
		{"chunks", []step{{"a", 32, false}, {"a", 32, false}, {"a", 1, false}, {"a", 9, false}}, []int{32, 64}},
		{"one block may be of the answer", []step{{"", 10, false}, {"a", 1, false}, {"a", 5, false}}, nil},
		{"not where it was left", []step{{"a", 10, false}, {"", 3, false}, {"a", 5, false}, {"a", 5, false}}, []int{10}},
		{"who did not ask", []step{{"b", 40, false}}, nil},
		{"replayed", []step{{"a", 40, true}}, nil},
	} {
		s := newStoring("a")
		for _, st := range c.steps {
			s.store(st.session, st.blocks, st.replayed)
		}
		var got []int
		for _, told := range s.wanted.untold {
			n := len(told.points)
			got = append(got, n)
			if told.coordinator != 7 || told.session != "a" || !slices.Equal(told.points, prefix.PointsOf(nil, s.tokens[:n*16])) {
				t.Errorf("%s: %d points of session %q for %d are others than the prompt's", c.name, n, told.session, told.coordinator)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: told of %v blocks, want %v", c.name, got, c.want)
		}
	}
}

// However many claims want to hear, and however much is stored while nobody
// takes it, memory is bounded.
func TestStoredPromptsAreBounded(t *testing.T) {
	s := newStoring()
	for i := range 3 * maxWanted {
		s.wanted.claims(&ledger.ClaimFrame{Coordinator: 7, Offers: []ledger.Offer{{Claim: ledger.Claim{Session: fmt.Sprint(i)}}}})
		s.store(fmt.Sprint(i), 2, false)
	}
	if len(s.wanted.by) != maxWanted || len(s.wanted.order) != maxWanted || len(s.wanted.untold) != maxUntold {
		t.Errorf("%d claims, %d in order, %d to be told", len(s.wanted.by), len(s.wanted.order), len(s.wanted.untold))
	}
	r := testRank(nil)
	r.wanted = s.wanted
	if told, _, _ := r.takeStored(); len(told) != 0 || len(r.wanted.untold) != 0 {
		t.Errorf("%d told to nobody, %d kept for a coordinator that is gone", len(told), len(r.wanted.untold))
	}
}
