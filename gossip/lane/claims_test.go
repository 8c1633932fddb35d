package lane

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

func drawOffer(t *rapid.T, seq uint64, keys int) ledger.Offer {
	o := ledger.Offer{AgeMs: rapid.Float64Range(0, ledger.MaxClaimAgeMs).Draw(t, "age"), Claim: ledger.Claim{
		Seq: seq, EngineProcess: rapid.Uint64Min(1).Draw(t, "process"), PromptTokens: rapid.IntRange(keys+1, ledger.MaxTokens).Draw(t, "prompt"),
		OutputTokens: rapid.Float64Range(0, 1e5).Draw(t, "output"), Sequences: rapid.IntRange(1, ledger.MaxSequences).Draw(t, "n"),
	}}
	o.UncachedTokens = rapid.IntRange(1, o.PromptTokens).Draw(t, "uncached")
	for i := range keys {
		o.Keys, o.KeyDepths = append(o.Keys, prefix.Key(seq<<32|uint64(i))), append(o.KeyDepths, uint32(i+1))
	}
	o.AfterKey = rapid.Uint64().Draw(t, "afterKey")
	if rapid.Bool().Draw(t, "pinned") {
		o.Slot = new(rapid.Uint32Range(0, 9).Draw(t, "slot"))
	}
	for i := range min(rapid.IntRange(0, 5).Draw(t, "points"), o.PromptTokens/ledger.PointTokens) {
		o.Points = append(o.Points, prefix.Key(seq<<40|uint64(i+1)))
	}
	return o
}

// wire sends a message through its encoding.
func wire[M proto.Message](t rapid.TB, m, into M) M {
	b, err := proto.Marshal(m)
	if err == nil {
		err = proto.Unmarshal(b, into)
	}
	if err != nil {
		t.Fatal(err)
	}
	return into
}

// A frame of claims arrives as it was sent.
func TestClaimsTravel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sent := ledger.ClaimFrame{Coordinator: rapid.Uint64Min(1).Draw(t, "coordinator"), Agent: rapid.Uint64Min(1).Draw(t, "agent"), Prev: rapid.Uint64Range(0, 1<<40).Draw(t, "prev")}
		sent.PointsKeyID = rapid.SampledFrom([]string{"", "00c0ffee"}).Draw(t, "pointsKey")
		seq := sent.Prev
		for range rapid.IntRange(1, 9).Draw(t, "claims") {
			seq += rapid.Uint64Range(1, 3).Draw(t, "step")
			sent.Offers = append(sent.Offers, drawOffer(t, seq, rapid.IntRange(0, 9).Draw(t, "keys")))
		}
		claimsTravel(t, &sent)
	})
}

// One that is large arrives in pieces.
func TestLongClaimsAreSplit(t *testing.T) {
	sent := ledger.ClaimFrame{Coordinator: 1, Agent: 2, Prev: 7}
	for seq := uint64(9); seq < 14; seq++ {
		o := ledger.Offer{Claim: ledger.Claim{Seq: seq, EngineProcess: 3, PromptTokens: 1 << 20, UncachedTokens: 1, Sequences: 1}}
		for i := range 60_000 {
			o.Keys, o.KeyDepths = append(o.Keys, prefix.Key(seq<<32|uint64(i))), append(o.KeyDepths, uint32(i+1))
		}
		sent.Offers = append(sent.Offers, o)
	}
	if frames := claimsTravel(t, &sent); frames < 2 {
		t.Errorf("%d frames", frames)
	}
}

// claimsTravel sends a frame and wants pieces that each continue the former
// without a gap and fit into a lane.
func claimsTravel(t rapid.TB, sent *ledger.ClaimFrame) (frames int) {
	t.Helper()
	got := ledger.ClaimFrame{Coordinator: sent.Coordinator, Agent: sent.Agent, Prev: sent.Prev, PointsKeyID: sent.PointsKeyID}
	prev := sent.Prev
	for _, f := range ClaimFramesOf(3, sent) {
		frames++
		if size := proto.Size(f); size > MaxMessageBytes/2 {
			t.Fatalf("a frame of %d bytes", size)
		}
		part := ClaimsOf(wire(t, f, &waypostv1.ClaimFrame{}))
		if f.GetIndex() != 3 || part.Prev != prev || part.PointsKeyID != sent.PointsKeyID {
			t.Fatalf("index %d, continues %d, want 3 and %d", f.GetIndex(), part.Prev, prev)
		}
		if err := part.Validate(); err != nil {
			t.Fatal(err)
		}
		got.Offers = append(got.Offers, part.Offers...)
		prev = part.Offers[len(part.Offers)-1].Seq
	}
	if !reflect.DeepEqual(*sent, got) {
		t.Fatalf("arrived as %.2000s", fmt.Sprintf("%+v", got))
	}
	return frames
}

func TestMarksAndPlacementsTravel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		marks := ledger.MarkFrame{Coordinator: rapid.Uint64Min(1).Draw(t, "coordinator")}
		for i := range rapid.IntRange(1, 5).Draw(t, "marks") {
			what := rapid.SampledFrom([]ledger.Mark{ledger.MarkFirst, ledger.MarkDone, ledger.MarkFailed, ledger.MarkGone, ledger.MarkSuperseded}).Draw(t, "what")
			m := ledger.Marked{Seq: uint64(i + 1), What: what, AgeMs: float64(i)}
			if what == ledger.MarkDone {
				m.OutputTokens = rapid.IntRange(0, 9).Draw(t, "output")
				if rapid.Bool().Draw(t, "told") {
					m.CachedTokens = new(rapid.IntRange(0, 9).Draw(t, "cached"))
				}
			}
			marks.Marks = append(marks.Marks, m)
		}
		for i := range rapid.IntRange(0, 4).Draw(t, "learnt") {
			marks.PointsKeyID = "00c0ffee"
			l := ledger.LearntPrompt{Seq: uint64(i + 1), PromptTokens: rapid.SampledFrom([]int{1, 40, 5000, 400_000}).Draw(t, "prompt")}
			for k := range l.PromptTokens / ledger.PointTokens {
				l.Points = append(l.Points, prefix.Key(k+i))
			}
			marks.Learnt = append(marks.Learnt, l)
		}
		got := ledger.MarkFrame{Coordinator: marks.Coordinator, PointsKeyID: marks.PointsKeyID}
		frames := MarkFramesOf(7, &marks)
		for i, f := range frames {
			f = wire(t, f, &waypostv1.MarkFrame{})
			part := MarksOf(f)
			if size := proto.Size(f); f.GetIndex() != 7 || part.PointsKeyID != marks.PointsKeyID || size > frameBytes && len(part.Learnt) > 1 || len(part.Marks) > 0 && i < len(frames)-1 {
				t.Fatalf("frame %d of %d: index %d, %d bytes, %d marks", i, len(frames), f.GetIndex(), size, len(part.Marks))
			}
			got.Learnt, got.Marks = append(got.Learnt, part.Learnt...), append(got.Marks, part.Marks...)
		}
		if d := cmp.Diff(marks, got); d != "" {
			t.Fatal(d)
		}
		placed := ledger.Placed{
			Worker: "gpu-01/vllm-8000/0", Tenant: rapid.SampledFrom([]string{"", "team-a"}).Draw(t, "tenant"), RequestID: "r", Attempt: rapid.Uint32().Draw(t, "attempt"),
			Placement: "pl_c1_x", Offer: drawOffer(t, 1, rapid.IntRange(0, 5).Draw(t, "keys")),
		}
		if d := cmp.Diff(placed, PlacedOf(wire(t, PlaceFrameOf(&placed), &waypostv1.PlaceFrame{}))); d != "" {
			t.Fatal(d)
		}
	})
}

// What the queue rests on is told, and not told when it is not known.
func TestQueueBasisTravels(t *testing.T) {
	for _, basis := range []ledger.Basis{"", ledger.BasisEvidence, ledger.BasisCounters, ledger.BasisTime} {
		w := WorkerLoadOf(0, &ledger.Load{QueueBasis: basis})
		if got := LoadOf(w).QueueBasis; got != basis || (w.QueueBasis == nil) != (basis == "") {
			t.Errorf("%q arrives as %q", basis, got)
		}
	}
	if got := fmt.Sprint(ClaimFramesOf(0, &ledger.ClaimFrame{Coordinator: 1})); got != "[]" {
		t.Errorf("an empty frame of claims is sent as %s", got)
	}
}
