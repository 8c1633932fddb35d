package ledger

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func none(uint64) bool { return false }

func frame(coordinator, prev uint64, seqs ...uint64) *ClaimFrame {
	f := &ClaimFrame{Coordinator: coordinator, Prev: prev}
	for _, seq := range seqs {
		f.Offers = append(f.Offers, goodOffer(seq))
	}
	return f
}

// The echo by hand: gaps are refused, given-up seqs are passed over, what is
// below the echo is a duplicate.
func TestEchoIsContiguous(t *testing.T) {
	var e Echoes
	var got []uint64
	take := func(f *ClaimFrame) TakeResult {
		got = nil
		return e.Take(0, f, none, func(o *Offer) { got = append(got, o.Seq) })
	}
	for _, step := range []struct {
		f    *ClaimFrame
		want TakeResult
		took []uint64
		upto uint64
	}{
		{frame(7, 0, 1, 2), Taken, []uint64{1, 2}, 2},
		{frame(7, 3, 4), TakenGap, nil, 2},            // 3 is missing
		{frame(7, 2, 3, 4), Taken, []uint64{3, 4}, 4}, // offered again from the echo
		{frame(7, 3, 4), Taken, nil, 4},               // late: a duplicate
		{frame(7, 4, 6), Taken, []uint64{6}, 6},       // 5 was given up
		{frame(7, 5, 6, 7), Taken, []uint64{7}, 7},    // overlaps
		{frame(8, 2, 3), TakenGap, nil, 0},            // of an unknown process
		{frame(8, 0, 3), Taken, []uint64{3}, 3},
	} {
		if result := take(step.f); result != step.want || !slices.Equal(got, step.took) || e.Upto(step.f.Coordinator) != step.upto {
			t.Errorf("frame of %d after %d: %v, took %v, echo %d; want %v, %v, %d", step.f.Coordinator, step.f.Prev, result, got, e.Upto(step.f.Coordinator), step.want, step.took, step.upto)
		}
	}
	want := []Echo{{Coordinator: 7, Upto: 7}, {Coordinator: 8, Upto: 3}}
	if diff := cmp.Diff(want, e.Append(nil)); diff != "" {
		t.Error(diff)
	}
}

// Whatever is lost, doubled and reordered: with offers from the echo every
// claim is taken in exactly once and in order.
func TestEveryClaimOnceUnderLoss(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var e Echoes
		var took []uint64
		var flying []*ClaimFrame
		made, offered := uint64(0), uint64(0)
		givenUp := map[uint64]bool{}
		offer := func(from uint64) {
			f := frame(1, from)
			for seq := from + 1; seq <= made; seq++ {
				if !givenUp[seq] {
					f.Offers = append(f.Offers, goodOffer(seq))
				}
			}
			offered = made
			flying = append(flying, f)
		}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			switch rapid.IntRange(0, 5).Draw(t, "what") {
			case 0, 1:
				made++
			case 2:
				if seq := rapid.Uint64Range(e.Upto(1), made).Draw(t, "give up"); seq > e.Upto(1) && seq > offered {
					givenUp[seq] = true
				}
			case 3:
				offer(offered)
			case 4:
				offer(e.Upto(1))
			case 5:
				if len(flying) == 0 {
					continue
				}
				i := rapid.IntRange(0, len(flying)-1).Draw(t, "frame")
				e.Take(0, flying[i], none, func(o *Offer) { took = append(took, o.Seq) })
				if rapid.Bool().Draw(t, "keep") {
					flying = slices.Delete(flying, i, i+1)
				}
			}
			seen := map[uint64]bool{}
			for _, seq := range took {
				seen[seq] = true
			}
			if !slices.IsSorted(took) || len(seen) != len(took) {
				t.Fatalf("took %v", took)
			}
			for seq := uint64(1); seq <= e.Upto(1); seq++ {
				if !seen[seq] && !givenUp[seq] {
					t.Fatalf("echo %d covers %d, which was never taken in", e.Upto(1), seq)
				}
			}
		}
	})
}

func TestCoordinatorsAreForgottenInOrder(t *testing.T) {
	var e Echoes
	open := map[uint64]bool{}
	hasOpen := func(c uint64) bool { return open[c] }
	ignore := func(*Offer) {}
	for c := uint64(1); c <= MaxCoordinators; c++ {
		e.Take(float64(c), frame(c, 0, 1), hasOpen, ignore)
	}
	// 1 has a lane, 2 an open claim: 3 goes for a newcomer.
	if !e.LaneUp(100, 1, hasOpen) {
		t.Fatal("a known coordinator's lane was refused")
	}
	open[2] = true
	if got := e.Take(101, frame(900, 0, 1), hasOpen, ignore); got != Taken {
		t.Fatalf("a newcomer: %v", got)
	}
	if e.Upto(1) != 1 || e.Upto(2) != 1 || e.Upto(3) != 0 || e.Upto(900) != 1 || len(e.marks) != MaxCoordinators {
		t.Errorf("echoes %v", e.Append(nil))
	}
	// With lanes for all nobody is forgotten, and a newcomer finds no room.
	for _, m := range slices.Clone(e.marks) {
		e.LaneUp(102, m.coordinator, hasOpen)
	}
	if got := e.Take(103, frame(901, 0, 1), hasOpen, ignore); got != TakenFull || e.LaneUp(103, 901, hasOpen) {
		t.Errorf("one too many: %v", got)
	}
	e.Expire(1e9, hasOpen)
	if len(e.marks) != MaxCoordinators {
		t.Errorf("%d left: a mark with a lane was forgotten", len(e.marks))
	}
	for _, m := range slices.Clone(e.marks) {
		e.LaneDown(2000, m.coordinator)
	}
	e.LaneDown(2000, 1) // its second lane
	e.Expire(2000+forgetCoordinatorMs-1, hasOpen)
	if len(e.marks) != MaxCoordinators {
		t.Errorf("%d left before two minutes", len(e.marks))
	}
	e.Expire(2000+forgetCoordinatorMs, hasOpen)
	if want := []Echo{{Coordinator: 2, Upto: 1}}; cmp.Diff(want, e.Append(nil)) != "" {
		t.Errorf("left %v: only the one with an open claim stays", e.Append(nil))
	}
}
