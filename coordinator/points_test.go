package coordinator

import (
	"slices"
	"testing"

	"waypost/coordinator/fleet"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// A claim on a worker whose agent follows the cache by claims carries the whole
// prompt's points and the id of their key; nothing is predicted of it, and
// nothing kept.
func TestClaimsCarryPointsForWhoFollowsByThem(t *testing.T) {
	for _, follows := range []bool{true, false} {
		o := startOne(t)
		a := &fakeAgent{
			workers: 1, pulled: func(*waypostv1.PrefixPull) [][]byte { return [][]byte{} },
			facts: func(f *waypostv1.WorkerFacts) {
				f.Coverage, f.BlockTokens, f.PoolBlocks = new("none"), new(uint32(16)), new(uint32(1000))
				if follows {
					f.Capabilities = []string{fleet.CapabilityClaimPoints}
				}
			},
			state: func(_ int, l *ledger.Load) { l.Coverage = "none" },
		}
		a.start(t, o)
		eventually(t, "the worker has joined", func() bool { return o.Joined() })
		tokens := ascending(1605)
		var p *waypostv1.Placement
		eventually(t, "the worker is placed on", func() bool {
			resp, err := waypostv1.NewPlacementServiceClient(o.conn).Place(t.Context(), &waypostv1.PlaceRequest{RequestId: new("r-1"), Input: &waypostv1.Input{TokenIds: tokens}})
			p = resp.GetPlacement()
			return err == nil && p != nil
		})
		var frame *waypostv1.ClaimFrame
		eventually(t, "the claim arrives", func() bool {
			a.mu.Lock()
			defer a.mu.Unlock()
			if len(a.claims) > 0 {
				frame = a.claims[0]
			}
			return frame != nil
		})
		claim := frame.GetClaims()[0]
		if !follows {
			if len(claim.GetPoints()) != 0 || frame.PointsKeyId != nil || o.held(tokens) == 0 {
				t.Errorf("%d points for who needs none, %d tokens predicted", len(claim.GetPoints()), o.held(tokens))
			}
			continue
		}
		pool, err := o.fleet.PoolName("")
		if err != nil {
			t.Fatal(err)
		}
		var want []uint64
		var probe prefix.Probe
		probe.ResetTokens(tokens, o.keyers.of(prefix.Domain{Model: o.modelOf(pool)}))
		for d := 16; d <= 1600; d += 16 {
			k, _ := probe.At(d)
			want = append(want, uint64(k))
		}
		if !slices.Equal(claim.GetPoints(), want) || frame.GetPointsKeyId() != o.prefixKey.ID() {
			t.Errorf("%d points by key %q, want the prompt's %d", len(claim.GetPoints()), frame.GetPointsKeyId(), len(want))
		}
		if got := o.held(tokens); got != 0 {
			t.Errorf("%d tokens are predicted of a slot that is in use", got)
		}
		report := &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: new("done"), CachedTokens: new(uint32(48)), OutputTokens: new(uint32(7))}
		if _, err := waypostv1.NewPlacementServiceClient(o.conn).ReportOutcome(t.Context(), report); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the mark tells the reuse", func() bool {
			a.mu.Lock()
			defer a.mu.Unlock()
			for _, f := range a.marks {
				for _, m := range f.GetMarks() {
					if m.GetWhat() == "done" {
						return m.CachedTokens != nil && m.GetCachedTokens() == 48 && m.GetOutputTokens() == 7
					}
				}
			}
			return false
		})
		if got := o.held(tokens); got != 0 {
			t.Errorf("%d tokens are kept here of what the agent follows", got)
		}
	}
}
