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

// A prompt that was placed by a text and becomes known while its request runs is
// told to who follows the cache by its points, whoever tells the ids: at the first
// chunk, or with the end, before it.
func TestWhoFollowsIsToldWhatATextWas(t *testing.T) {
	for _, how := range []string{"learn", "outcome", "tokenize"} {
		o := startOne(t)
		w := newTextWorker(0)
		w.facts = func(f *waypostv1.WorkerFacts) {
			f.Coverage, f.BlockTokens, f.Capabilities = new("none"), new(uint32(16)), []string{fleet.CapabilityClaimPoints}
		}
		if how == "tokenize" {
			w.allow()
		}
		w.connect(t, o)
		eventually(t, "the worker has joined", func() bool {
			ws, err := waypostv1.NewOperatorServiceClient(o.conn).ListWorkers(t.Context(), &waypostv1.ListWorkersRequest{})
			return err == nil && len(ws.GetWorkers()) == 1 && ws.GetWorkers()[0].GetState() == "ready" && o.Joined()
		})
		body := chatOf(message{"system", prose(1, 700)}, message{"user", "hello there"})
		p, ids := o.place(t, noBudget(bodyInput(body))), rendered([]byte(body))
		report := &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: new("done"), OutputTokens: new(uint32(7))}
		switch how {
		case "learn":
			o.learn(t, p.GetPlacementId(), ids, nil, "")
		case "outcome":
			report.PromptTokenIds = ids
			if _, err := waypostv1.NewPlacementServiceClient(o.conn).ReportOutcome(t.Context(), report); err != nil {
				t.Fatal(err)
			}
		}
		var probe prefix.Probe
		pool, err := o.fleet.PoolName("")
		if err != nil {
			t.Fatal(err)
		}
		probe.ResetTokens(ids, o.keyers.of(prefix.Domain{Model: o.modelOf(pool)}))
		var want []uint64
		for d := 16; d <= len(ids); d += 16 {
			k, _ := probe.At(d)
			want = append(want, uint64(k))
		}
		eventually(t, how+": the prompt is told, and not after its end", func() bool {
			w.fakeAgent.mu.Lock()
			defer w.fakeAgent.mu.Unlock()
			for _, f := range w.marks {
				for _, l := range f.GetLearnt() {
					return l.GetSeq() == 1 && int(l.GetPromptTokens()) == len(ids) && slices.Equal(l.GetPoints(), want) && f.GetPointsKeyId() == o.prefixKey.ID()
				}
				if len(f.GetMarks()) > 0 {
					t.Fatalf("%s: the end is told before the prompt", how)
				}
			}
			return false
		})
	}
}
