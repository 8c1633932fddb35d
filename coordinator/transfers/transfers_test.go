package transfers

import (
	"fmt"
	"math"
	"os"
	"testing"
	"time"

	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
)

func parsedFleet(t *testing.T) *registry.Fleet {
	t.Helper()
	text, err := os.ReadFile("testdata/fleet.toml")
	if err != nil {
		t.Fatal(err)
	}
	file, err := registry.ParseFleet("fleet.toml", string(text))
	if err != nil {
		t.Fatal(err)
	}
	return file
}

func workerNamed(id placement.WorkerID, name string) *placement.Worker {
	w := placement.NewWorker(id, name)
	w.Transfer = &placement.Transfer{Connector: OffloadingConnector, SideChannel: "10.0.0.2:5710", Fingerprint: "f", ExportedTier: placement.TierGPU, BytesPerToken: 262_144}
	return &w
}

func TestTransferPaths(t *testing.T) {
	started := time.Now()
	tr := New(started)
	tr.Use(parsedFleet(t))
	one, two, three := workerNamed(1, "gpu-01/v/0"), workerNamed(2, "gpu-02/v/0"), workerNamed(3, "gpu-03/v/0")
	unknown := workerNamed(4, "gpu-09/v/0")
	near := tr.Path(0, two, one, registry.StayInNone)
	if near.BytesPerMs != 12_500_000 || near.LatencyMs != .02 || near.Figure != placement.FigureDeclared || near.Never || near.Link != "rack a1 ↔ rack a1" {
		t.Errorf("inside the rack: %+v", near)
	}
	if far := tr.Path(0, three, one, registry.StayInNone); !far.Never || far.BytesPerMs != 1_250_000 || far.SurchargeMs != 15 {
		t.Errorf("across zones: %+v", far)
	}
	if lost := tr.Path(0, unknown, one, registry.StayInNone); lost.Never || lost.Figure != placement.FigureAssumed || lost.BytesPerMs != 125_000 {
		t.Errorf("from an unknown place: %+v", lost)
	}
	for _, stay := range []registry.StayIn{registry.StayInZone, registry.StayInRack} {
		if p := tr.Path(0, two, one, stay); p.Never {
			t.Errorf("%s forbids the rack's own link", stay)
		}
		if p := tr.Path(0, unknown, one, stay); !p.Never {
			t.Errorf("%s lets an unknown place in", stay)
		}
	}
	if got := tr.Fastest(); got != 12_500_000 {
		t.Errorf("fastest %v bytes per ms", got)
	}
}

// A pull that the answer asks for takes its share of the link while it lasts;
// three that the engines did not confirm switch the pair off.
func TestPullsAreFollowed(t *testing.T) {
	started := time.Now()
	tr := New(started)
	tr.Use(parsedFleet(t))
	from, to := workerNamed(2, "gpu-02/v/0"), workerNamed(1, "gpu-01/v/0")
	sit := placement.Situation{Sources: []placement.Source{{Worker: from, Tokens: 4096}}}
	candidates := []placement.Candidate{{Worker: to, Paths: []placement.Path{tr.Path(0, from, to, registry.StayInNone)}}}
	policy := placement.DefaultPolicy()
	d := &placement.Decision{FirstTokenMs: 120, Terms: []placement.Terms{{ReuseTokens: 512, StillThere: .95, PullMs: 80, Partner: -1, Pull: placement.Pull{Note: placement.PullTaken, Tokens: 3584, Behind: 512, TransferMs: 80, BytesPerMs: 12_500_000}}}}
	at := func(ms int) time.Time { return started.Add(time.Duration(ms) * time.Millisecond) }
	// A spare source is asked only if the worker's own are gone: while they are
	// likelier there no transfer is expected, and what the engine reuses judges nobody.
	spare := &placement.Decision{FirstTokenMs: 40, Terms: []placement.Terms{{ReuseTokens: 4096, StillThere: .6, PullMs: 32, Partner: -1, Pull: placement.Pull{Note: placement.PullSpare, Tokens: 4096, TransferMs: 80, BytesPerMs: 12_500_000}}}}
	tr.Begin(at(0), "spare", spare, candidates, &policy, 4100, sit)
	if tr.Sending(1, from) != 0 || tr.Outcome("spare", true, 0, math.NaN()) != nil {
		t.Error("a spare source was followed like a pull")
	}
	// If they are likelier gone it is followed like a pull of all that it holds.
	spare.Terms[0].StillThere = .4
	for i, reused := range []int{2047, 2048} {
		id := fmt.Sprint("likely", i)
		tr.Begin(at(-200), id, spare, candidates, &policy, 4100, sit)
		path := tr.Path(tr.Ms(at(-199)), from, to, registry.StayInNone)
		if sent := tr.Sending(tr.Ms(at(-199)), from); path.UnderWay != i+1 || sent != i+1 {
			t.Errorf("%d likely transfers: %d under way, %d sent", i+1, path.UnderWay, sent)
		}
		seen := tr.Outcome(id, true, reused, math.NaN())
		if seen == nil || seen.Confirmed != (i == 1) || seen.Pair != (placement.Pair{From: from.Name, To: to.Name}) {
			t.Errorf("%d tokens reused: %+v", reused, seen)
		}
	}
	for i, id := range []string{"a", "b", "c"} {
		tr.Begin(at(0), id, d, candidates, &policy, 4096, sit)
		if p := tr.Path(1, from, to, registry.StayInNone); p.UnderWay != i+1 || tr.Sending(1, from) != i+1 {
			t.Errorf("after %d pulls: %d under way, %d sent", i+1, p.UnderWay, tr.Sending(1, from))
		}
	}
	if p := tr.Path(90, from, to, registry.StayInNone); p.UnderWay != 0 {
		t.Errorf("%d under way after their time", p.UnderWay)
	}
	tr.Begin(at(100), "unsaid", d, candidates, &policy, 4096, sit)
	if tr.Outcome("unsaid", true, placement.Unknown, math.NaN()) != nil {
		t.Error("an outcome without a count judged the pair")
	}
	for i, id := range []string{"a", "b", "c"} {
		seen := tr.Outcome(id, true, 512, math.NaN())
		nowMs := tr.Ms(at(200 + i))
		switched, off := tr.Learn(nowMs, nowMs, seen)
		if last := id == "c"; switched != last || off != last || seen.Pair.From != from.Name || seen.Pair.To != to.Name {
			t.Errorf("outcome %s: %+v switched %v off %v", id, seen, switched, off)
		}
	}
	if p := tr.Path(300, from, to, registry.StayInNone); !p.Off {
		t.Error("the pair is still on")
	}
	if p := tr.Path(300, to, from, registry.StayInNone); p.Off {
		t.Error("the other direction is off as well")
	}
	if tr.Outcome("a", true, 4096, math.NaN()) != nil {
		t.Error("a second outcome counted")
	}
}

// What a first token took beyond the rest of its prediction is the time of the
// bytes; after enough pulls that is what the link is reckoned with.
func TestBandwidthIsMeasured(t *testing.T) {
	started := time.Now()
	tr := New(started)
	tr.Use(parsedFleet(t))
	from, to := workerNamed(2, "gpu-02/v/0"), workerNamed(1, "gpu-01/v/0")
	other := workerNamed(5, "gpu-02/v/1")
	policy := placement.DefaultPolicy()
	const bytes, fast, slow, computeMs = 4000 * 262_144., 12_500_000., 500_000., 20.
	at := func(s int) time.Time { return started.Add(time.Duration(s) * time.Second) }
	pull := func(s int, id string, firstTokenMs, restMs float64) {
		sit := placement.Situation{Sources: []placement.Source{{Worker: from, Tokens: 4000}}}
		path := tr.Path(tr.Ms(at(s)), from, to, registry.StayInNone)
		transfer := policy.TransferSetupMs + path.LatencyMs + bytes/path.BytesPerMs
		d := &placement.Decision{FirstTokenMs: restMs + transfer, Terms: []placement.Terms{{
			PullMs: transfer + computeMs, ComputeMs: computeMs,
			Partner: -1, Pull: placement.Pull{Note: placement.PullTaken, Tokens: 4000, TransferMs: transfer, BytesPerMs: path.BytesPerMs},
		}}}
		tr.Begin(at(s), id, d, []placement.Candidate{{Worker: to, Paths: []placement.Path{path}}}, &policy, 4096, sit)
		tr.Learn(tr.Ms(at(s+9)), tr.Ms(at(s+9)), tr.Outcome(id, true, 4000, firstTokenMs))
	}
	took := policy.TransferSetupMs + .02 + bytes/slow
	for i := range placement.MeasuredTransfers {
		if p := tr.Path(0, from, to, registry.StayInNone); p.Figure != placement.FigureDeclared || p.BytesPerMs != fast {
			t.Fatalf("after %d pulls: %+v", i, p)
		}
		pull(20*i, fmt.Sprint("p", i), 30+took, 30)
		pull(20*i+10, fmt.Sprint("n", i), math.NaN(), 30)        // no first token told
		pull(20*i+10, fmt.Sprint("w", i), 30_000+2*took, 30_000) // drowned by the rest
	}
	nowMs := tr.Ms(at(400))
	p := tr.Path(nowMs, from, to, registry.StayInNone)
	if p.Figure != placement.FigureMeasured || math.Abs(p.BytesPerMs/slow-1) > .001 {
		t.Errorf("measured %+v, want %v bytes per ms", p, slow)
	}
	if p := tr.Path(nowMs, other, to, registry.StayInNone); p.Figure != placement.FigureMeasured {
		t.Errorf("another pair on the link: %+v", p)
	}
	// What was not seen again for long is forgotten.
	if p := tr.Path(nowMs+placement.RateKeptMs+1, from, to, registry.StayInNone); p.Figure != placement.FigureDeclared {
		t.Errorf("an hour later: %+v", p)
	}
	// Nothing bounds the search from the wrong side.
	tr.rates.Note(nowMs, "x", placement.Pair{}, 1e9, 1, 0)
	pull(500, "last", 30.1+policy.TransferSetupMs, 30)
	if s, _ := tr.rates.OfPair(nowMs, placement.Pair{From: from.Name, To: to.Name}); tr.Fastest() < s.BytesPerMs {
		t.Errorf("fastest %v, measured %v", tr.Fastest(), s.BytesPerMs)
	}
}

// The first token was predicted with the mean of what is moved, own tokens that may be
// gone counted in, so that the mean is what is taken out of it. Where they are not
// surely there nobody knows how much was moved: the outcome judges the pair alone.
func TestRateNeedsToKnowWhatWasMoved(t *testing.T) {
	started := time.Now()
	from, to := workerNamed(2, "gpu-02/v/0"), workerNamed(1, "gpu-01/v/0")
	sit := placement.Situation{Sources: []placement.Source{{Worker: from, Tokens: 4000}}}
	policy := placement.DefaultPolicy()
	const bytes, startMs, computeMs = 3000 * 262_144., 7., 20.
	for name, c := range map[string]struct {
		note          placement.PullNote
		reuse, tokens int
		there         float64
		teaches       bool
	}{
		"nothing of its own":  {placement.PullTaken, 0, 3000, math.NaN(), true},
		"match unknown":       {placement.PullTaken, placement.Unknown, 3000, math.NaN(), true},
		"surely there":        {placement.PullTaken, 1000, 3000, placement.SurelyThere, true},
		"likely there":        {placement.PullTaken, 1000, 3000, placement.SurelyThere - .01, false},
		"likely gone":         {placement.PullTaken, 1000, 3000, .1, false},
		"spare, own are gone": {placement.PullSpare, 3000, 3000, .1, false},
	} {
		tr := New(started)
		tr.Use(parsedFleet(t))
		path := tr.Path(0, from, to, registry.StayInNone)
		moveMs := func(tokens int) float64 {
			return policy.TransferSetupMs + path.LatencyMs + float64(tokens)*from.Transfer.BytesPerToken/path.BytesPerMs
		}
		meanMs, behind := moveMs(c.tokens), 0
		if c.note == placement.PullTaken && c.reuse > 0 {
			behind = c.reuse
			meanMs = c.there*moveMs(c.tokens) + (1-c.there)*moveMs(c.tokens+behind)
		}
		d := &placement.Decision{FirstTokenMs: startMs + meanMs + computeMs, Terms: []placement.Terms{{
			ReuseTokens: c.reuse, StillThere: c.there, StartMs: startMs, ComputeMs: computeMs, PullMs: meanMs + computeMs, Partner: -1,
			Pull: placement.Pull{Note: c.note, Tokens: c.tokens, Behind: behind, TransferMs: moveMs(c.tokens), BytesPerMs: path.BytesPerMs},
		}}}
		tr.Begin(started, "p", d, []placement.Candidate{{Worker: to, Paths: []placement.Path{path}}}, &policy, 4096, sit)
		const tookMs = 500.
		seen := tr.Outcome("p", true, behind+c.tokens, startMs+policy.TransferSetupMs+path.LatencyMs+tookMs+computeMs)
		if seen == nil || !seen.Confirmed {
			t.Fatalf("%s: %+v, want it confirmed", name, seen)
		}
		if c.teaches && (seen.Bytes != bytes || math.Abs(seen.WireMs-tookMs) > 1e-6) || !c.teaches && (seen.Bytes != 0 || seen.WireMs != 0) {
			t.Errorf("%s: %v bytes in %v ms, took %v", name, seen.Bytes, seen.WireMs, tookMs)
		}
	}
}

// What is remembered is bounded, and another fleet file makes ways known anew.
func TestBookIsBounded(t *testing.T) {
	started := time.Now()
	tr := New(started)
	file := parsedFleet(t)
	tr.Use(file)
	from, to := workerNamed(2, "gpu-02/v/0"), workerNamed(1, "gpu-01/v/0")
	sit := placement.Situation{Sources: []placement.Source{{Worker: from, Tokens: 4096}}}
	candidates := []placement.Candidate{{Worker: to, Paths: []placement.Path{tr.Path(0, from, to, registry.StayInNone)}}}
	policy := placement.DefaultPolicy()
	d := &placement.Decision{FirstTokenMs: 120, Terms: []placement.Terms{{PullMs: 80, Partner: -1, Pull: placement.Pull{Note: placement.PullTaken, Tokens: 3584, TransferMs: 80, BytesPerMs: 12_500_000}}}}
	for i := range maxAwaitedPulls + 5 {
		tr.Begin(started, fmt.Sprint("p", i), d, candidates, &policy, 4096, sit)
	}
	if len(tr.awaited) != maxAwaitedPulls || len(tr.order) != maxAwaitedPulls {
		t.Errorf("%d pulls are awaited, %d in order", len(tr.awaited), len(tr.order))
	}
	if tr.Outcome("p4", true, 4096, math.NaN()) != nil || tr.Outcome("p5", true, 4096, math.NaN()) == nil {
		t.Error("not the oldest pulls were given up")
	}
	tr = New(started)
	tr.Use(file)
	ends := make([]*placement.Worker, 300) // of which 300² ways are more than are kept
	for i := range ends {
		ends[i] = workerNamed(placement.WorkerID(i+1), fmt.Sprintf("gpu-%03d/v/0", i))
	}
	for _, a := range ends {
		for _, b := range ends {
			if tr.Path(0, a, b, registry.StayInNone); len(tr.paths) > maxKeptPaths {
				t.Fatalf("%d ways are kept", len(tr.paths))
			}
		}
	}
	tr.Path(0, from, to, registry.StayInNone)
	tr.Use(registry.EmptyFleet())
	if p := tr.Path(0, from, to, registry.StayInNone); p.Figure != placement.FigureAssumed {
		t.Errorf("under a file without links: %+v", p)
	}
}
