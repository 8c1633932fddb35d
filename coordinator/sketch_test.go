package coordinator

import (
	"testing"
	"time"

	"waypost/gossip/mesh"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// placed asks for a placement without a reservation.
func (o *one) placed(tb testing.TB, tokens []uint32) *waypostv1.Placement {
	tb.Helper()
	resp, err := waypostv1.NewPlacementServiceClient(o.conn).Place(o.ctx, &waypostv1.PlaceRequest{
		Input: &waypostv1.Input{TokenIds: tokens}, Explain: new("terms"), Reserve: new(false),
	})
	if err != nil || len(resp.GetPlacement().GetTerms()) != 1 {
		tb.Fatalf("%v %v", resp, err)
	}
	return resp.GetPlacement()
}

// keysOf are the prefix keys of a prompt.
func (o *one) keysOf(tokens []uint32) *prefix.Probe {
	p := &prefix.Probe{}
	p.ResetTokens(tokens, prefix.NewKeyer(testKey, prefix.Domain{Model: testModel}))
	return p
}

// Without a lane, what the stream told stays and ages; when it is too old, the
// sketch of the mesh stands in for it, and the next lane outranks both.
func TestSketchStandsInForALane(t *testing.T) {
	o := startOne(t)
	agentMesh, err := mesh.New(mesh.Options{Name: "gpu-01", Fleet: o.cfg.Mesh.Fleet, Role: mesh.RoleAgent, Process: 0xa1, Listen: "127.0.0.1:0", Join: []string{o.MeshAddress()}, Local: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := agentMesh.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := agentMesh.Stop(); err != nil {
			t.Error(err)
		}
	}()
	c := newCache(1)
	tokens := c.grow(100)
	c.delta()
	a := &fakeAgent{workers: 1, pulled: c.replayOr}
	a.connect(t, o)
	eventually(t, "the stream is known", func() bool { return o.held(tokens) == 1600 })

	// The sketch knows of a prompt that no stream told.
	unseen := newCache(2)
	hot := unseen.grow(300)
	for i := range hot {
		hot[i] += 7
	}
	other := append(append([]uint32(nil), hot...), 1)
	key, ok := o.keysOf(hot).Checkpoint(4)
	if !ok {
		t.Fatal("no key")
	}
	send := func(state summary.SketchState, keyID uint32, age time.Duration) {
		b, err := summary.AppendSketch(nil, &summary.Sketch{Age: age, KeyID: keyID, Workers: []summary.WorkerSketch{
			{Name: "vllm-8000/0", State: state, Roots: []summary.Root{{Key: key, DepthTokens: 2048}}},
			{Name: "vllm-9999/0", State: state, Roots: []summary.Root{{Key: key, DepthTokens: 2048}}}, // of no known worker
		}}, summary.MaxSketchBytes)
		if err != nil {
			t.Fatal(err)
		}
		if err := agentMesh.SetSketch(b); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the sketch arrives", func() bool {
			for _, s := range o.mesh.Sketches() {
				if s.Name == "gpu-01" && string(s.Payload) == string(b) {
					return true
				}
			}
			return false
		})
	}
	send(summary.SketchReady, testKey.IDUint32(), 0)
	o.readSketches(time.Now())
	if o.metric(t, "waypost_sketch_age_seconds") != -1 {
		t.Error("a sketch is used although the lane is up")
	}
	if p := o.placed(t, other); p.GetTerms()[0].GetReuseTokens() != 0 || p.GetBasis().GetCacheView() != "live" {
		t.Errorf("with a lane: %v %v", p.GetTerms()[0].GetReuseTokens(), p.GetBasis())
	}

	a.dialer.Close()
	view := func() string { return o.placed(t, tokens).GetBasis().GetCacheView() }
	eventually(t, "the view is stale", func() bool { return view() == "stale" })
	if got := o.placed(t, append(tokens, 1)).GetTerms()[0].GetReuseTokens(); got != 1600 {
		t.Errorf("%d tokens of the stale view", got)
	}
	o.readSketches(time.Now())
	if view() != "stale" {
		t.Error("a sketch outranks what the stream told just before")
	}

	// As if the lane had been down for long: what its stream tells is old.
	old := &fakeAgent{workers: 1, pulled: c.replayOr, process: 0xa3, ageMs: func() *float64 { return new(20 * 60_000.0) }}
	old.connect(t, o)
	eventually(t, "the view is old", func() bool {
		st, ok := o.stream()
		return ok && time.Since(st.ViewAt) > 19*time.Minute
	})
	old.dialer.Close()
	eventually(t, "the view is stale again", func() bool { return view() == "stale" })
	for _, no := range []struct {
		state summary.SketchState
		keyID uint32
		age   time.Duration
	}{{summary.SketchLost, testKey.IDUint32(), 0}, {summary.SketchReady, 1, 0}, {summary.SketchReady, testKey.IDUint32(), 11 * time.Minute}} {
		send(no.state, no.keyID, no.age)
		o.readSketches(time.Now())
		if got := o.placed(t, other).GetTerms()[0].GetReuseTokens(); got != 0 {
			t.Errorf("%+v: %d tokens credited", no, got)
		}
	}
	send(summary.SketchReady, testKey.IDUint32(), 20*time.Second)
	o.readSketches(time.Now())
	p := o.placed(t, other)
	if got := p.GetTerms()[0].GetReuseTokens(); got != 2048 {
		t.Errorf("%d tokens credited by the sketch, want 2048", got)
	}
	if p.GetBasis().GetCacheView() != "inferred" || p.GetBasis().GetCacheViewAgeMs() < 20_000 || p.GetBasis().GetCacheViewAgeMs() > 120_000 {
		t.Errorf("basis %v", p.GetBasis())
	}
	if p := o.placed(t, append(tokens, 1)); p.GetTerms()[0].ReuseTokens != nil {
		t.Errorf("%d tokens where the sketch says nothing", p.GetTerms()[0].GetReuseTokens())
	}
	if age := o.metric(t, "waypost_sketch_age_seconds"); age < 20 || age > 120 {
		t.Errorf("sketch age %v s", age)
	}
	if n := o.fleet.Workers(time.Now()); len(n) != 1 {
		t.Errorf("%d workers: a sketch made one known", len(n))
	}

	again := &fakeAgent{workers: 1, pulled: c.replayOr, process: 0xa2}
	again.connect(t, o)
	eventually(t, "the lane outranks the sketch", func() bool { return view() == "live" && o.held(tokens) == 1600 })
}
