package coordinator

import (
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// A question that went with a lane, or came to an agent that was too slow, is asked
// again, and not without end.
func TestEvidenceIsAskedForAgain(t *testing.T) {
	for name, c := range map[string]struct {
		deaf  int32 // so many questions get no answer
		asked int32
		class string
	}{
		"the second is answered": {1, 2, "false_positive"},
		"none is":                {maxAsked, maxAsked, "evicted_since_view"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := startOne(t)
			o.cases.mu.Lock()
			o.cases.after = 20 * time.Millisecond
			o.cases.mu.Unlock()
			held := newCache(3)
			tokens := held.grow(100)
			a := &fakeAgent{workers: 1, frame: held.delta, pulled: func(*waypostv1.PrefixPull) [][]byte { return held.snapshot() }}
			var asked atomic.Int32
			a.asks = func(l *lane.Lane, f *waypostv1.ConnectResponse) {
				if ask := f.GetEvidence(); ask != nil && asked.Add(1) > c.deaf {
					_ = l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Evidence{Evidence: &waypostv1.EvidenceReply{
						AskId: ask.AskId, EngineProcess: proto.Uint64(100), Held: proto.Bool(false), EventsLost: proto.Bool(false), Removed: proto.Bool(false),
					}}})
				}
			}
			a.start(t, o)
			eventually(t, "the prompt is listed", func() bool { return o.Joined() && o.held(tokens) == 1600 })
			p := o.place(t, &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: append(tokens, 1)}})
			api := waypostv1.NewPlacementServiceClient(o.conn)
			if _, err := api.ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: proto.String("done"), CachedTokens: proto.Uint32(0)}); err != nil {
				t.Fatal(err)
			}
			var rec *waypostv1.PlacementRecord
			eventually(t, "the class is settled", func() bool {
				resp, err := api.GetPlacement(t.Context(), &waypostv1.GetPlacementRequest{PlacementId: p.PlacementId})
				if err != nil {
					t.Fatal(err)
				}
				rec = resp.GetRecord()
				return !rec.GetProvisional()
			})
			if rec.GetReuseClass() != c.class || asked.Load() != c.asked {
				t.Errorf("%s after %d questions, want %s after %d", rec.GetReuseClass(), asked.Load(), c.class, c.asked)
			}
		})
	}
}
