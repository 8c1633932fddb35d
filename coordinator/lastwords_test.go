package coordinator

import (
	"fmt"
	"testing"

	waypostv1 "waypost/proto/waypost/v1"
)

// What agents are told of in lots reaches them before an orderly end: the outcomes
// that wait for a quarter of a second, the claims and marks of the last calls.
func TestAnEndSendsWhatWaits(t *testing.T) {
	const requests = 20 // the outcome of the first is told at once, the others wait
	o := startOne(t)
	a := joined(t, o)
	place := func(id string, tokens int) *waypostv1.Placement {
		return o.place(t, &waypostv1.PlaceRequest{RequestId: &id, Input: &waypostv1.Input{TokenIds: ascending(tokens)}})
	}
	report := func(p *waypostv1.Placement, outputTokens uint32) {
		t.Helper()
		report := &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: new("done"), CachedTokens: p.GetExpected().ReuseTokens, OutputTokens: &outputTokens}
		if _, err := waypostv1.NewPlacementServiceClient(o.conn).ReportOutcome(t.Context(), report); err != nil {
			t.Fatal(err)
		}
	}
	kept := place("r-kept", 64)
	eventually(t, "the claim is offered", func() bool { return len(a.offered()) > 0 })
	for i := range requests {
		report(place(fmt.Sprint("r-", i), 64), 7)
	}
	place("r-last", 1000)
	report(kept, 77)
	if err := o.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the lane has ended", func() bool { return len(a.dialer.Lanes()) == 0 })
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.outcomes) != requests+1 {
		t.Errorf("the agent was told of %d outcomes, want %d", len(a.outcomes), requests+1)
	}
	marked, claimed := false, false
	for _, f := range a.marks {
		for _, m := range f.GetMarks() {
			marked = marked || m.GetOutputTokens() == 77
		}
	}
	for _, f := range a.claims {
		for _, c := range f.GetClaims() {
			claimed = claimed || c.GetPromptTokens() == 1000
		}
	}
	if !marked || !claimed {
		t.Errorf("the last mark came: %v, the last claim: %v, want both", marked, claimed)
	}
}

// What waits when the end of telling comes goes with it, though nobody was woken.
func TestTheEndOfShippingSendsWhatWaits(t *testing.T) {
	o := startOne(t)
	a := joined(t, o)
	o.endTell()
	o.telling.Wait()
	o.place(t, &waypostv1.PlaceRequest{RequestId: new("r-last"), Input: &waypostv1.Input{TokenIds: ascending(1000)}})
	select {
	case <-o.shipC:
	default:
	}
	o.shipping()
	eventually(t, "the claim is offered", func() bool { return len(a.offered()) > 0 })
}

// The stream of a peer lasts as long as that, so an end that lets streams finish ends
// it itself.
func TestAnEndEndsThePeersStreams(t *testing.T) {
	first := startOne(t)
	second := startOneOf(t, "c-2", first)
	eventually(t, "the second tells the first", func() bool { return second.exchange.Connected() == 1 })
	first.cancel()
	eventually(t, "it does not any more", func() bool { return second.exchange.Connected() == 0 })
}
