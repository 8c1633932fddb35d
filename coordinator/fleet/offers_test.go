package fleet

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"waypost/gossip/ledger"
)

// frames takes what is to be sent and returns the claim frames of worker0.
func (r *rig) frames(ms float64) (claims []ledger.ClaimFrame, marks []ledger.Marked, places []ledger.Placed) {
	r.t.Helper()
	out := r.f.TakeOutgoing(at(ms))
	for _, h := range out.Hosts {
		for _, c := range h.Claims {
			if err := c.Validate(); err != nil {
				r.t.Fatalf("frame: %v", err)
			}
			claims = append(claims, c.ClaimFrame)
		}
		for _, m := range h.Marks {
			if err := m.Validate(); err != nil {
				r.t.Fatalf("marks: %v", err)
			}
			marks = append(marks, m.Marks...)
		}
	}
	return claims, marks, out.Places
}

func seqs(f ledger.ClaimFrame) string {
	var s []string
	for _, o := range f.Offers {
		s = append(s, fmt.Sprint(o.Seq))
	}
	return fmt.Sprintf("prev %d: %s", f.Prev, strings.Join(s, " "))
}

// expectFrame takes what is to be sent and wants one frame, or none for "".
func (r *rig) expectFrame(ms float64, want string) {
	r.t.Helper()
	claims, _, _ := r.frames(ms)
	got := ""
	for _, f := range claims {
		got += seqs(f)
	}
	if got != want {
		r.t.Fatalf("at %v offered %q, want %q", ms, got, want)
	}
}

// More claims than a frame takes make more frames, and what comes after them is
// offered as well.
func TestOffersBeyondOneFrame(t *testing.T) {
	r := newRig(t, 1)
	const many = ledger.MaxOffers + 10
	for i := range many {
		r.claim(100, fmt.Sprint("r", i), worker0, 10)
	}
	r.load(110, "gpu-00", echoing(0))
	claims, _, _ := r.frames(111)
	if len(claims) != 2 || len(claims[0].Offers) != ledger.MaxOffers || claims[1].Prev != ledger.MaxOffers || len(claims[1].Offers) != 10 {
		t.Fatalf("%d frames", len(claims))
	}
	r.claim(120, "next", worker0, 10)
	r.expectFrame(121, fmt.Sprintf("prev %d: %d", many, many+1))
}

// What did not get onto the lane goes with the next, without a gap.
func TestUnsentClaimsGoWithTheNext(t *testing.T) {
	r := newRig(t, 1)
	r.load(50, "gpu-00", echoing(0))
	r.frames(51)
	unsent := func(ms float64, want string) WorkerClaims {
		t.Helper()
		out := r.f.TakeOutgoing(at(ms))
		if len(out.Hosts) != 1 || seqs(out.Hosts[0].Claims[0].ClaimFrame) != want {
			t.Fatalf("at %v: %+v, want %q", ms, out.Hosts, want)
		}
		return out.Hosts[0].Claims[0]
	}
	r.claim(100, "a", worker0, 10)
	first := unsent(101, "prev 0: 1")
	r.f.Unsent("gpu-00", r.lanes["gpu-00"], &first)
	r.claim(102, "b", worker0, 10)
	second := unsent(103, "prev 0: 1 2")
	r.f.Unsent("gpu-00", r.lanes["gpu-00"], &second)
	r.expectFrame(104, "prev 0: 1 2") // of itself, too
	r.f.Unsent("gpu-00", r.lanes["gpu-00"]+1, &second)
	r.expectFrame(105, "") // another lane's word changes nothing
}

// What is offered on a lane, and when it is offered again.
func TestOffers(t *testing.T) {
	r := newRig(t, 1)
	r.claim(100, "a", worker0, 10)
	r.expectFrame(101, "") // the agent has not spoken on this lane
	r.load(110, "gpu-00", echoing(0))
	r.expectFrame(111, "prev 0: 1")
	r.expectFrame(112, "") // once
	r.claim(120, "b", worker0, 10)
	r.claim(121, "c", worker0, 10)
	claims, _, _ := r.frames(125)
	if len(claims) != 1 || seqs(claims[0]) != "prev 1: 2 3" || claims[0].Agent != 0xa || claims[0].Coordinator != ownProcess || claims[0].Offers[0].AgeMs != 5 {
		t.Fatalf("offered %+v", claims)
	}
	r.load(130, "gpu-00", echoing(0, own(1)))
	r.expectFrame(131, "") // 2 and 3 are on their way
	r.load(425, "gpu-00", echoing(0, own(1)))
	r.expectFrame(426, "prev 1: 2 3") // 300 ms without an echo
	r.load(500, "gpu-00", echoing(0, own(1)))
	r.expectFrame(501, "") // not for each report
	r.load(730, "gpu-00", echoing(0, own(3)))
	r.expectFrame(731, "")
	// What ended before it was offered is given up; what was offered is marked.
	r.claim(740, "d", worker0, 10)
	r.claim(741, "e", worker0, 10)
	if _, err := r.f.Mark(at(742), "pl_d", ledger.MarkGone, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := r.f.Mark(at(743), "pl_a", ledger.MarkDone, 7); err != nil {
		t.Fatal(err)
	}
	claims, marks, _ := r.frames(745)
	if len(claims) != 1 || seqs(claims[0]) != "prev 3: 5" {
		t.Errorf("offered %v", claims)
	}
	if diff := cmp.Diff([]ledger.Marked{{Seq: 1, What: ledger.MarkDone, AgeMs: 2, OutputTokens: 7}}, marks); diff != "" {
		t.Errorf("marks: %s", diff)
	}
	// A new agent process knows nothing: what no agent had is offered from the
	// start, what one took in is not.
	h := hello("gpu-00", 1)
	h.AgentProcess, h.Session = 0xb, 1
	r.f.CloseLane(at(800), "gpu-00", r.lanes["gpu-00"])
	r.claim(801, "f", worker0, 10)
	r.expectFrame(802, "")
	r.open(810, h)
	r.expectFrame(811, "")
	r.seq = 0
	r.load(820, "gpu-00", echoing(0), func(p *Report) { p.AgentProcess = 0xb })
	claims, _, _ = r.frames(821)
	if len(claims) != 1 || seqs(claims[0]) != "prev 0: 5 6" || claims[0].Agent != 0xb {
		t.Errorf("offered to the new agent %v", claims)
	}
	// The echo went down on the same lane: again from there.
	r.load(830, "gpu-00", echoing(0, own(6)), func(p *Report) { p.AgentProcess = 0xb })
	r.claim(831, "g", worker0, 10)
	r.expectFrame(832, "prev 6: 7")
	r.load(840, "gpu-00", echoing(0), func(p *Report) { p.AgentProcess = 0xb })
	r.expectFrame(841, "prev 0: 7")
	// Claims are offered for a minute.
	r.load(61_000, "gpu-00", echoing(0), func(p *Report) { p.AgentProcess = 0xb })
	r.expectFrame(61_001, "")
}

// No mark goes out for a claim that the agent cannot know, and none on a lane
// that never carried it.
func TestMarksGoWhereTheClaimWent(t *testing.T) {
	r := newRig(t, 1)
	r.load(0, "gpu-00", echoing(0))
	r.claim(10, "unsent", worker0, 10)
	r.claim(10, "sent", worker0, 10)
	mark := func(ms float64, id string, m ledger.Mark) {
		t.Helper()
		if _, err := r.f.Mark(at(ms), "pl_"+id, m, 0); err != nil {
			t.Fatal(err)
		}
	}
	mark(11, "unsent", ledger.MarkGone)
	if _, marks, _ := r.frames(12); len(marks) != 0 {
		t.Errorf("marks %v", marks)
	}
	mark(20, "sent", ledger.MarkFirst)
	mark(21, "sent", ledger.MarkFirst)
	if _, marks, _ := r.frames(30); len(marks) != 1 || marks[0].What != ledger.MarkFirst || marks[0].AgeMs != 10 {
		t.Errorf("marks %v", marks)
	}
	r.f.CloseLane(at(40), "gpu-00", r.lanes["gpu-00"])
	mark(41, "sent", ledger.MarkDone)
	r.open(50, hello("gpu-00", 1))
	r.load(60, "gpu-00", echoing(0, own(2)))
	if _, marks, _ := r.frames(61); len(marks) != 0 {
		t.Errorf("marks are never repeated: %v", marks)
	}
}
