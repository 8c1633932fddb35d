package coordinator

import (
	"testing"

	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// laneOf waits for the agent's lane.
func (a *fakeAgent) laneOf(t *testing.T) *lane.Lane {
	t.Helper()
	var l *lane.Lane
	eventually(t, "the lane is up", func() bool {
		lanes := a.dialer.Lanes()
		if len(lanes) > 0 {
			l = lanes[0]
		}
		return l != nil
	})
	return l
}

// A text whose ids nobody returns is learnt from what the engine's events tell of
// its session: the request names itself, the agent is asked, and what it tells
// teaches when the request ends, cut to the prompt that the engine counted. Ids
// that come before are preferred.
func TestTextIsLearntFromEvents(t *testing.T) {
	o := startOne(t)
	w := newTextWorker(0)
	w.facts = func(f *waypostv1.WorkerFacts) { f.Coverage, f.Capabilities = new("full"), []string{"event-sessions"} }
	w.state = nil
	w.connect(t, o)
	eventually(t, "a worker is ready", func() bool {
		ws, err := waypostv1.NewOperatorServiceClient(o.conn).ListWorkers(t.Context(), &waypostv1.ListWorkersRequest{})
		return err == nil && len(ws.GetWorkers()) == 1 && ws.GetWorkers()[0].GetState() == "ready" && o.Joined()
	})
	l := w.laneOf(t)
	tell := func(session, keyID string, ids []uint32) {
		m := &waypostv1.StoredPrompt{Session: &session, KeyId: &keyID}
		for _, c := range prefix.PointsOf(nil, ids) {
			m.Values = append(m.Values, uint64(c))
		}
		testKey.Mask(session, m.Values)
		if err := l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_StoredPrompt{StoredPrompt: m}}); err != nil {
			t.Fatal(err)
		}
	}
	points := func(placement string) int {
		tp := o.pending(t, placement)
		tp.mu.Lock()
		defer tp.mu.Unlock()
		return len(tp.points)
	}
	end := func(placement string, promptTokens int) {
		req := &waypostv1.ReportOutcomeRequest{PlacementId: &placement, Result: new("done"), PromptTokens: new(uint32(promptTokens))}
		if _, err := waypostv1.NewPlacementServiceClient(o.conn).ReportOutcome(t.Context(), req); err != nil {
			t.Fatal(err)
		}
	}
	given := func(body string) int {
		p := o.place(t, noBudget(bodyInput(body)))
		return o.pending(t, p.GetPlacementId()).given.Tokens
	}

	system := prose(31, 1500)
	first := chatOf(message{"system", system}, message{"user", "hello there"})
	ids := rendered([]byte(first))
	p := o.place(t, noBudget(bodyInput(first)))
	id := p.GetPlacementId()
	if got := p.GetWorker().GetBodyPatch().AsMap()["session_id"]; got != id {
		t.Fatalf("the request names its session %v, want the placement %s", got, id)
	}
	eventually(t, "the agent is asked", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.fakeAgent.mu.Lock()
		defer w.fakeAgent.mu.Unlock()
		for _, f := range w.claims {
			for _, c := range f.GetClaims() {
				if c.GetSession() == id {
					return true
				}
			}
		}
		return false
	})
	// What is masked by another key, or of nobody's session, changes nothing. The
	// answer's tokens are cut off.
	tell(id, "00000000", ids[:800])
	tell("pl_c1_nobody", testKey.ID(), ids[:800])
	values := make([]uint64, 50)
	host, _, ok := o.lanes.where(o.pending(t, id).worker)
	for at, m := range map[string]*waypostv1.StoredPrompt{
		host:      {Session: &id, KeyId: new("00000000"), Values: values},
		"another": {Session: &id, KeyId: new(testKey.ID()), Values: values},
	} {
		if o.memos.stored(at, m); !ok || points(id) != 0 {
			t.Errorf("%d points kept of what %s tells, masked by %s", points(id), at, m.GetKeyId())
		}
	}
	tell(id, testKey.ID(), append(append([]uint32(nil), ids...), someIDs(9000, 64)...))
	eventually(t, "what is stored is kept", func() bool { return points(id) > 0 })
	if points(id) != (len(ids)+64)/16 {
		t.Fatalf("%d points kept of %d tokens", points(id), len(ids)+64)
	}
	end(id, len(ids))
	if n := given(chatOf(message{"system", system}, message{"user", "something else"})); n < 1400 || n > 1504 {
		t.Errorf("%d tokens known of a text that begins alike, want about the system prompt's 1502", n)
	}
	if got := o.memos.of(o.pending(t, o.place(t, noBudget(bodyInput(first))).GetPlacementId()).name).reuse().GetLearnt(); got["events"] != 1 {
		t.Errorf("learnt %v, want one prompt from events", got)
	}

	// Ids of the engine come first and are preferred.
	second := chatOf(message{"system", prose(32, 900)}, message{"user", "hello"})
	q := o.place(t, noBudget(bodyInput(second)))
	tell(q.GetPlacementId(), testKey.ID(), someIDs(500_000, 600))
	eventually(t, "what is stored is kept", func() bool { return points(q.GetPlacementId()) > 0 })
	if r := o.learn(t, q.GetPlacementId(), rendered([]byte(second)), nil, ""); !r.GetLearnt() {
		t.Fatal(r.GetReason())
	}
	end(q.GetPlacementId(), 600)
	if n := given(chatOf(message{"system", prose(32, 900)}, message{"user", "bye"})); n < 800 {
		t.Errorf("%d tokens known: what was stored was believed before the engine's ids", n)
	}

	// Who names a session of their own keeps it.
	own := o.place(t, noBudget(bodyInput(`{"messages":[{"role":"user","content":"x"}],"session_id":"mine"}`)))
	if own.GetWorker().GetBodyPatch().AsMap()["session_id"] != nil {
		t.Error("a client's session is overwritten")
	}
	o.memos.mu.Lock()
	held := 0
	for _, tp := range o.memos.taught {
		held += len(tp.ids) + len(tp.points)*idsPerPoint
	}
	if o.memos.tokens != held {
		t.Errorf("%d tokens counted, %d are kept", o.memos.tokens, held)
	}
	o.memos.mu.Unlock()
}

// someIDs are n token ids.
func someIDs(first uint32, n int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = first + uint32(i)
	}
	return ids
}

// The ids that come at the first chunk are credited to the worker at once: what
// follows the same text is expected to find it there, though the worker's events,
// if it has any, have not told yet. When the request has ended, a worker with
// events is believed again.
func TestIDsExtendTheClaim(t *testing.T) {
	for _, coverage := range []string{"none", "full"} {
		o := startOne(t)
		w := newTextWorker(0)
		w.facts = func(f *waypostv1.WorkerFacts) { f.Coverage = &coverage }
		w.state = func(_ int, l *ledger.Load) { l.Coverage = coverage }
		w.connect(t, o)
		eventually(t, "a worker is ready", func() bool {
			ws, err := waypostv1.NewOperatorServiceClient(o.conn).ListWorkers(t.Context(), &waypostv1.ListWorkersRequest{})
			return err == nil && len(ws.GetWorkers()) == 1 && ws.GetWorkers()[0].GetState() == "ready" && o.Joined()
		})
		body := chatOf(message{"system", prose(41, 1500)}, message{"user", "hello"})
		ids := rendered([]byte(body))
		req := noBudget(bodyInput(body))
		req.CacheSalt = new("s")
		p := o.place(t, req)
		heldBy := func(salt string) int {
			resp, err := waypostv1.NewPlacementServiceClient(o.conn).Place(t.Context(), &waypostv1.PlaceRequest{
				Input: &waypostv1.Input{TokenIds: append(ids[:len(ids):len(ids)], 1)}, CacheSalt: &salt, Explain: new("terms"), Reserve: new(false),
			})
			if err != nil {
				t.Fatal(err)
			}
			return int(resp.GetPlacement().GetTerms()[0].GetReuseTokens())
		}
		if n := heldBy("s"); n != 0 {
			t.Errorf("%s: %d tokens are predicted of a text that nobody knows", coverage, n)
		}
		if r := o.learn(t, p.GetPlacementId(), ids, nil, ""); !r.GetLearnt() {
			t.Fatal(r.GetReason())
		}
		if n := heldBy("s"); n != len(ids)/16*16 {
			t.Errorf("%s: %d tokens are predicted, want %d", coverage, n, len(ids)/16*16)
		}
		if n := heldBy(""); n != 0 {
			t.Errorf("%s: %d tokens are predicted of another salt", coverage, n)
		}
		report := &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: new("done")}
		if _, err := waypostv1.NewPlacementServiceClient(o.conn).ReportOutcome(t.Context(), report); err != nil {
			t.Fatal(err)
		}
		if n := heldBy("s"); (n > 0) != (coverage == "none") {
			t.Errorf("%s: %d tokens are predicted when the request has ended", coverage, n)
		}
	}
}
