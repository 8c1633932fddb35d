package cluster

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// TestTextIsLearntFromEvents: nobody returns token ids and no engine is asked for
// them. What the engine's events tell of a request's session teaches the memo, so
// that a text that begins alike is expected to be reused.
func TestTextIsLearntFromEvents(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{BlockTokens: 16, PoolBlocks: 1400, MaxModelTokens: 8192})
	place := func(system, user string) *waypostv1.Placement {
		body := fmt.Sprintf(`{"messages":[{"role":"system","content":%q},{"role":"user","content":%q}]}`, system, user)
		resp, err := r.Placement(0).Place(t.Context(), &waypostv1.PlaceRequest{Input: &waypostv1.Input{BodyJson: &body}, Reserve: proto.Bool(true), Attempt: proto.Uint32(1), TokenizeBudgetMs: proto.Float64(0)})
		if err != nil || resp.GetPlacement() == nil {
			t.Fatal(err, resp)
		}
		return resp.GetPlacement()
	}
	// So short that no engine is asked about it.
	system := strings.Repeat("you are a helpful assistant of few words. ", 14)
	begin := tokens(5, 640)
	r.eventually("the worker's events name no sessions", func() string {
		if p := place("something", "else"); p.GetWorker().GetBodyPatch().AsMap()["session_id"] == nil {
			return fmt.Sprint(p.GetWorker())
		}
		return ""
	})
	n := uint32(0)
	r.eventually("nothing was learnt of what was stored", func() string {
		n++
		p := place(system, fmt.Sprint("question ", n))
		if p.GetBasis().GetInputSource() == "memo" {
			if got := p.GetExpected().GetReuseTokens(); got < 512 || got > 640 {
				return fmt.Sprintf("%d tokens of reuse are expected of the 640 that are there", got)
			}
			return ""
		}
		ids := append(append([]uint32(nil), begin...), tokens(100+n, 40)...)
		if _, _, err := r.send(p, ask{tokens: ids, output: 3}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Placement(0).ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: proto.String("done"), PromptTokens: proto.Uint32(uint32(len(ids)))}); err != nil {
			t.Fatal(err)
		}
		return "input source " + p.GetBasis().GetInputSource()
	})
}
