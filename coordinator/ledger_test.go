package coordinator

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/exchange"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// ascending are n token ids.
func ascending(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i + 1)
	}
	return out
}

// The keys of a claim begin with the first new block and end with the last
// whole one, ascend and come once each.
func TestNewPart(t *testing.T) {
	for _, c := range []struct {
		tokens, held, block int
		want                []uint32
	}{
		{1000, 0, 16, []uint32{16, 512, 992}},
		{1024, 0, 16, []uint32{16, 512, 1024}},
		{1030, 512, 16, []uint32{528, 1024}},
		{1030, 500, 16, []uint32{512, 1024}}, // the first new block is a checkpoint
		{1030, 1008, 16, []uint32{1024}},     // and the tip
		{1030, 1024, 16, nil},                // less than a block is new
		{15, 0, 16, nil},
		{16, 0, 16, []uint32{16}},
		{40, 16, 16, []uint32{32}},
		{3000, 0, 1056, []uint32{512, 1024, 1056, 1536, 2048, 2112}},
		{1000, 0, 0, []uint32{512, 1000}}, // block size not known
	} {
		var p prompt
		keyer := prefix.NewKeyer(testKey, prefix.Domain{Model: testModel})
		if err := p.ofTokens("input.token_ids", ascending(c.tokens), keyer); err != nil {
			t.Fatal(err)
		}
		keys, depths := p.newPart(c.held, c.block, nil, nil)
		if !slices.Equal(depths, c.want) || len(keys) != len(depths) {
			t.Errorf("%d tokens, %d held, blocks of %d: depths %v, want %v", c.tokens, c.held, c.block, depths, c.want)
		}
		for i, depth := range depths {
			if k, ok := p.probe.At(int(depth)); !ok || k != keys[i] {
				t.Errorf("the key at depth %d is not the prompt's", depth)
			}
		}
	}
	if keys, _ := (&prompt{tokens: 1000}).newPart(0, 16, nil, nil); keys != nil {
		t.Error("keys of a prompt that has none")
	}
}

func (a *fakeAgent) offered() []*waypostv1.ClaimFrame {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.claims)
}

func (a *fakeAgent) marked() []*waypostv1.MarkFrame {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.marks)
}

func (o *one) place(t *testing.T, req *waypostv1.PlaceRequest) *waypostv1.Placement {
	t.Helper()
	resp, err := waypostv1.NewPlacementServiceClient(o.conn).Place(t.Context(), req)
	if err != nil || resp.GetPlacement() == nil {
		t.Fatalf("place: %v %v", resp, err)
	}
	return resp.GetPlacement()
}

// joined starts an agent of one worker and waits for its first reports.
func joined(t *testing.T, o *one) *fakeAgent {
	t.Helper()
	a := &fakeAgent{workers: 1}
	a.start(t, o)
	eventually(t, "the worker is ready", func() bool {
		w := o.fleet.Workers(time.Now())
		return len(w) == 1 && w[0].State == "ready" && o.Joined()
	})
	return a
}

// A placement reaches its worker's agent with all that the agent matches
// evidence by, is offered again while it is not echoed, and its end is marked.
func TestClaimReachesTheAgent(t *testing.T) {
	o := startOne(t)
	a := joined(t, o)
	p := o.place(t, &waypostv1.PlaceRequest{RequestId: new("r"), Input: &waypostv1.Input{TokenIds: ascending(1000)}, GeneratedTokens: new(uint32(50)), OutputTokensExpected: new(uint32(80))})
	eventually(t, "the claim is offered twice", func() bool { return len(a.offered()) >= 2 })
	for _, f := range a.offered() {
		c := f.GetClaims()[0]
		if f.GetCoordinator() != o.process || f.GetAgentProcess() != 0xa1 || f.GetIndex() != 0 || f.GetPrev() != 0 || len(f.GetClaims()) != 1 {
			t.Errorf("frame %v", f)
		}
		// A continuation computes what was generated as well.
		if c.GetSeq() != 1 || c.GetEngineProcess() != 100 || c.GetPromptTokens() != 1050 || c.GetUncachedTokens() != 1050 || c.GetN() != 1 || c.GetOutputTokens() != 80 {
			t.Errorf("claim %v", c)
		}
		if !slices.Equal(c.GetKeyDepths(), []uint32{16, 512, 992}) || len(c.GetKeys()) != 3 {
			t.Errorf("keys at %v", c.GetKeyDepths())
		}
	}
	if n := o.fleet.Reservations()[testModel]; n != 1 {
		t.Errorf("%d reservations", n)
	}
	if _, err := waypostv1.NewPlacementServiceClient(o.conn).ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: new("done"), OutputTokens: new(uint32(7))}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the end is marked", func() bool { return len(a.marked()) == 1 })
	m := a.marked()[0]
	if m.GetCoordinator() != o.process || len(m.GetMarks()) != 1 || m.GetMarks()[0].GetSeq() != 1 || m.GetMarks()[0].GetWhat() != "done" || m.GetMarks()[0].GetOutputTokens() != 7 {
		t.Errorf("marks %v", m)
	}
	if n := o.fleet.Reservations()[testModel]; n != 0 {
		t.Errorf("%d reservations after the end", n)
	}
}

func peerPlace(seq uint64, id string) *waypostv1.PlaceFrame {
	return &waypostv1.PlaceFrame{
		Worker: new("gpu-01/vllm-8000/0"), RequestId: &id, Attempt: new(uint32(1)), PlacementId: new("pl_c2_" + id),
		Claim: &waypostv1.Claim{Seq: &seq, EngineProcess: new(uint64(100)), AgeMs: new(1.0), PromptTokens: new(uint32(4000)), UncachedTokens: new(uint32(4000)), N: new(uint32(1))},
	}
}

// What a peer says is checked: who it is at once, each placement by itself.
func TestPlacementsOfPeers(t *testing.T) {
	o := startOne(t)
	joined(t, o)
	open := func(messages ...*waypostv1.ExchangePlacementsRequest) (waypostv1.PeerService_ExchangePlacementsClient, error) {
		t.Helper()
		conn, err := o.peer(o.ClusterAddress())
		if err != nil {
			t.Fatal(err)
		}
		s, err := waypostv1.NewPeerServiceClient(conn).ExchangePlacements(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range messages {
			if err := s.Send(m); err != nil {
				break // the answer says why
			}
		}
		_, err = s.Recv()
		return s, err
	}
	message := func(coordinator uint64, places ...*waypostv1.PlaceFrame) *waypostv1.ExchangePlacementsRequest {
		return &waypostv1.ExchangePlacementsRequest{Coordinator: &coordinator, Places: places}
	}
	if _, err := open(message(0)); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a peer without a mark: %v", err)
	}
	s, err := open(message(0xc2))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(message(0xc3)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a stream that changes its mark: %v", err)
	}

	s, err = open(message(0xc2, peerPlace(0, "bad"), peerPlace(1, "x")))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the placement counts", func() bool {
		id, _, ok := o.fleet.LookupWorker("gpu-01/vllm-8000/0")
		w, err := o.fleet.Worker(time.Now(), "gpu-01/vllm-8000/0")
		return ok && err == nil && w.ID == id && o.fleet.Counts().DuplicatePlaces == 0 && count(t, o, "waypost_ledger_places_total", "taken") == 1
	})
	if n := count(t, o, "waypost_ledger_places_total", "refused"); n != 1 {
		t.Errorf("%v placements refused, want the one without a seq", n)
	}
	// The same attempt asked here gets the peer's answer, a later one another.
	p := o.place(t, &waypostv1.PlaceRequest{RequestId: new("x"), Input: &waypostv1.Input{TokenIds: ascending(100)}})
	if p.GetPlacementId() != "pl_c2_x" || p.GetWorker().GetName() != "gpu-01/vllm-8000/0" || p.GetWorker().GetUrl() == "" {
		t.Errorf("the same attempt: %v", p)
	}
	if n := o.fleet.OpenClaims(); n != 0 {
		t.Errorf("%d claims for what a peer placed", n)
	}
	if err := s.CloseSend(); err != nil {
		t.Error(err)
	}
	// The only worker's process is that of the former attempt.
	resp, err := waypostv1.NewPlacementServiceClient(o.conn).Place(t.Context(), &waypostv1.PlaceRequest{RequestId: new("x"), Attempt: new(uint32(2)), Input: &waypostv1.Input{TokenIds: ascending(100)}})
	if err != nil || resp.GetRefused() == nil {
		t.Errorf("a later attempt: %v %v", resp, err)
	}
}

// count is a counter's value by its only label's value.
func count(t *testing.T, o *one, name, label string) float64 {
	t.Helper()
	families, err := o.opt.Gatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && len(m.GetLabel()) == 1 && m.GetLabel()[0].GetValue() == label {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

// Every series of the ledger is there before anything happened.
func TestLedgerSeries(t *testing.T) {
	o := startOne(t)
	joined(t, o)
	families, err := o.opt.Gatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, f := range families {
		have[f.GetName()] = true
	}
	for _, name := range []string{
		"waypost_reservations", "waypost_ledger_peer_lag_seconds", "waypost_queue_data_age_seconds", "waypost_ledger_events_total",
		"waypost_ledger_peers_connected", "waypost_ledger_frames_unsent_total",
	} {
		if !have[name] {
			t.Errorf("no series %s", name)
		}
	}
	if age := count(t, o, "waypost_queue_data_age_seconds", testModel); !(age >= 0 && age < 30) {
		t.Errorf("queue data of %s is %v s old", testModel, age)
	}
}

// What a lane adds to ages for lateness is taken back before the fleet adds its
// own; unknown stays unknown.
func TestLatenessCountsOnce(t *testing.T) {
	for _, c := range []struct{ age, want *float64 }{
		{nil, nil}, {proto.Float64(1500), proto.Float64(500)}, {proto.Float64(1), proto.Float64(0)},
	} {
		got := younger(c.age, time.Second)
		if (got == nil) != (c.want == nil) || got != nil && *got != *c.want {
			t.Errorf("%v becomes %v, want %v", c.age, got, c.want)
		}
	}
}

// A peer that cannot be told for a while is a problem with its reason.
func TestUntoldPeerIsAProblem(t *testing.T) {
	now := time.Now()
	p := &problems{}
	checkTold(p, []exchange.Peer{
		{Name: "c-2", Since: now.Add(-2 * laneGrace)}, {Name: "just ended", Since: now}, {Name: "told", Up: true, Since: now.Add(-2 * laneGrace)},
	}, now)
	var said []string
	for _, x := range p.sorted() {
		said = append(said, x.GetSubject()+" "+x.GetWhat())
	}
	if got := fmt.Sprint(said); got != "[c-2 is not told of placements made here]" {
		t.Error(got)
	}
}

// What a placement adds to a long prompt that a worker holds is expected there
// as soon as it is placed, though the claim names the new part only.
func TestNewPartOfAHeldPromptIsExpected(t *testing.T) {
	o := startOne(t)
	c := newCache(1)
	prompt := c.grow(200)
	a := &fakeAgent{workers: 1, pulled: func(*waypostv1.PrefixPull) [][]byte { return c.snapshot() }}
	c.delta()
	a.start(t, o)
	eventually(t, "the stream is known", func() bool { return o.held(prompt) == len(prompt) && o.Joined() })
	longer := append(prompt, ascending(1600)...)
	ask := func(id string, reserve bool) uint32 {
		p := o.place(t, &waypostv1.PlaceRequest{RequestId: &id, Reserve: &reserve, Input: &waypostv1.Input{TokenIds: append(longer, 7)}})
		return p.GetExpected().GetReuseTokens()
	}
	if got := ask("first", true); got != 3200 {
		t.Fatalf("%d tokens expected of the 3200 that the stream lists", got)
	}
	if got := ask("second", false); got != 4800 {
		t.Errorf("%d tokens expected after the placement, want 4800", got)
	}
	eventually(t, "the claim is offered", func() bool { return len(a.offered()) > 0 })
	if c := a.offered()[0].GetClaims()[0]; c.GetAfterKey() == 0 || c.GetKeyDepths()[0] != 3216 {
		t.Errorf("claim %v", c)
	}
}
