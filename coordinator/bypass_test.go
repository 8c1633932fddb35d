package coordinator

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// A rule that takes most requests away from the worker that holds their prefix
// is shown with its share; one that leaves them there is not.
func TestHOT07BypassedCacheIsShown(t *testing.T) {
	o := startOne(t)
	held := newCache(7)
	tokens := held.grow(200)
	busy := make(chan struct{})
	a := &fakeAgent{
		workers: 2, frame: held.delta, pulled: func(*waypostv1.PrefixPull) [][]byte { return held.snapshot() },
		state: func(i int, l *ledger.Load) {
			l.QueueMs, l.Live, l.AgeMs = proto.Float64(0), proto.Uint32(0), proto.Float64(0)
			select {
			case <-busy:
				if i == 0 {
					l.QueueMs, l.Live = proto.Float64(60_000), proto.Uint32(50)
				}
			default:
			}
		},
	}
	a.start(t, o)
	place := func() *waypostv1.Placement {
		t.Helper()
		p := o.place(t, &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: tokens}, OutputTokensMax: new(uint32(1))})
		if _, err := waypostv1.NewPlacementServiceClient(o.conn).ReleasePlacement(t.Context(), &waypostv1.ReleasePlacementRequest{PlacementId: p.PlacementId}); err != nil {
			t.Fatal(err)
		}
		return p
	}
	status := func() string {
		t.Helper()
		resp, err := waypostv1.NewOperatorServiceClient(o.conn).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range resp.GetProblems() {
			if strings.HasPrefix(p.GetWhat(), "cache bypassed") {
				return p.GetWhat()
			}
		}
		return ""
	}
	eventually(t, "the prompt is found", func() bool {
		w := o.fleet.Workers(time.Now())
		return o.Joined() && len(w) == 2 && w[0].State == "ready" && w[1].State == "ready" && place().GetExpected().GetReuseTokens() > 1000
	})
	for range 30 {
		if p := place(); p.GetWorker().GetName() != "gpu-01/vllm-8000/0" {
			t.Fatalf("placed on %s: %s", p.GetWorker().GetName(), p.GetBecause())
		}
	}
	if got := status(); got != "" {
		t.Errorf("while the holder serves: %s", got)
	}
	close(busy)
	eventually(t, "the holder is busy", func() bool { return place().GetWorker().GetName() == "gpu-01/vllm-8001/0" })
	for range 100 {
		place()
	}
	if got := status(); !strings.HasPrefix(got, "cache bypassed by load rule: ") || !strings.HasSuffix(got, "placements of the last 10 min whose prefix was held") {
		t.Errorf("after 100 placements away from the holder: %q", got)
	}
}
