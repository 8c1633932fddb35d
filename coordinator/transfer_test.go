package coordinator

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

const transferFleet = `
[[rack]]
name = "a1"
zone = "a"
hosts = ["gpu-0[1-2]"]
[[rack]]
name = "b1"
zone = "b"
hosts = ["gpu-03"]
[[zone]]
name = "a"
[[zone]]
name = "b"
[[link]]
between = ["rack:a1", "rack:a1"]
bandwidth = "100Gbit/s"
latency = "20us"
[[link]]
between = ["zone:a", "zone:b"]
bandwidth = "10Gbit/s"
latency = "12ms"
transfer = "never"
place_surcharge = "15ms"
[[pool]]
name = "p"
model = "m"
tenants = ["team-*"]
stay_in = "zone"
max_transfer = "300ms"
[[tenant]]
name = "team-a"
share = 3
max_inflight_tokens = 1000
`

func parsedFleet(t *testing.T) *registry.Fleet {
	t.Helper()
	file, err := registry.ParseFleet("fleet.toml", transferFleet)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

func workerNamed(id fleet.WorkerID, name string) *placement.Worker {
	w := placement.NewWorker(id, name)
	w.Transfer = &placement.Transfer{Connector: offloadingConnector, SideChannel: "10.0.0.2:5710", Fingerprint: "f", ExportedTier: placement.TierGPU, BytesPerToken: 262_144}
	return &w
}

func TestTransferPaths(t *testing.T) {
	started := time.Now()
	tr := newTransfers(started)
	tr.use(parsedFleet(t))
	one, two, three := workerNamed(1, "gpu-01/v/0"), workerNamed(2, "gpu-02/v/0"), workerNamed(3, "gpu-03/v/0")
	unknown := workerNamed(4, "gpu-09/v/0")
	near := tr.path(0, two, one, registry.StayInNone)
	if near.BytesPerMs != 12_500_000 || near.LatencyMs != .02 || near.Figure != placement.FigureDeclared || near.Never || near.Link != "rack a1 ↔ rack a1" {
		t.Errorf("inside the rack: %+v", near)
	}
	if far := tr.path(0, three, one, registry.StayInNone); !far.Never || far.BytesPerMs != 1_250_000 || far.SurchargeMs != 15 {
		t.Errorf("across zones: %+v", far)
	}
	if lost := tr.path(0, unknown, one, registry.StayInNone); lost.Never || lost.Figure != placement.FigureAssumed || lost.BytesPerMs != 125_000 {
		t.Errorf("from an unknown place: %+v", lost)
	}
	for _, stay := range []registry.StayIn{registry.StayInZone, registry.StayInRack} {
		if p := tr.path(0, two, one, stay); p.Never {
			t.Errorf("%s forbids the rack's own link", stay)
		}
		if p := tr.path(0, unknown, one, stay); !p.Never {
			t.Errorf("%s lets an unknown place in", stay)
		}
	}
	if got := tr.fastestNow(); got != 12_500_000 {
		t.Errorf("fastest %v bytes per ms", got)
	}
}

// A pull that the answer asks for takes its share of the link while it lasts;
// three that the engines did not confirm switch the pair off.
func TestPullsAreFollowed(t *testing.T) {
	started := time.Now()
	tr := newTransfers(started)
	tr.use(parsedFleet(t))
	from, to := workerNamed(2, "gpu-02/v/0"), workerNamed(1, "gpu-01/v/0")
	sit := placement.Situation{Sources: []placement.Source{{Worker: from, Tokens: 4096}}}
	candidates := []placement.Candidate{{Worker: to, Paths: []placement.Path{tr.path(0, from, to, registry.StayInNone)}}}
	policy := placement.DefaultPolicy()
	d := &placement.Decision{FirstTokenMs: 120, Terms: []placement.Terms{{ReuseTokens: 512, Partner: -1, Pull: placement.Pull{Note: placement.PullTaken, Tokens: 3584, TransferMs: 80, BytesPerMs: 12_500_000}}}}
	at := func(ms int) time.Time { return started.Add(time.Duration(ms) * time.Millisecond) }
	for i, id := range []string{"a", "b", "c"} {
		tr.begin(at(0), id, d, candidates, &policy, 4096, sit)
		if p := tr.path(1, from, to, registry.StayInNone); p.UnderWay != i+1 || tr.sending(1, from) != i+1 {
			t.Errorf("after %d pulls: %d under way, %d sent", i+1, p.UnderWay, tr.sending(1, from))
		}
	}
	if p := tr.path(90, from, to, registry.StayInNone); p.UnderWay != 0 {
		t.Errorf("%d under way after their time", p.UnderWay)
	}
	tr.begin(at(100), "unsaid", d, candidates, &policy, 4096, sit)
	if tr.outcome("unsaid", true, placement.Unknown, math.NaN()) != nil {
		t.Error("an outcome without a count judged the pair")
	}
	for i, id := range []string{"a", "b", "c"} {
		seen := tr.outcome(id, true, 512, math.NaN())
		nowMs := tr.ms(at(200 + i))
		switched, off := tr.learn(nowMs, nowMs, seen)
		if last := id == "c"; switched != last || off != last || seen.pair.From != from.Name || seen.pair.To != to.Name {
			t.Errorf("outcome %s: %+v switched %v off %v", id, seen, switched, off)
		}
	}
	if p := tr.path(300, from, to, registry.StayInNone); !p.Off {
		t.Error("the pair is still on")
	}
	if p := tr.path(300, to, from, registry.StayInNone); p.Off {
		t.Error("the other direction is off as well")
	}
	if tr.outcome("a", true, 4096, math.NaN()) != nil {
		t.Error("a second outcome counted")
	}
}

// What a first token took beyond the rest of its prediction is the time of the
// bytes; after enough pulls that is what the link is reckoned with.
func TestBandwidthIsMeasured(t *testing.T) {
	started := time.Now()
	tr := newTransfers(started)
	tr.use(parsedFleet(t))
	from, to := workerNamed(2, "gpu-02/v/0"), workerNamed(1, "gpu-01/v/0")
	other := workerNamed(5, "gpu-02/v/1")
	policy := placement.DefaultPolicy()
	const bytes, fast, slow = 4000 * 262_144., 12_500_000., 500_000.
	at := func(s int) time.Time { return started.Add(time.Duration(s) * time.Second) }
	pull := func(s int, id string, firstTokenMs, restMs float64) {
		sit := placement.Situation{Sources: []placement.Source{{Worker: from, Tokens: 4000}}}
		path := tr.path(tr.ms(at(s)), from, to, registry.StayInNone)
		transfer := policy.TransferSetupMs + path.LatencyMs + bytes/path.BytesPerMs
		d := &placement.Decision{FirstTokenMs: restMs + transfer, Terms: []placement.Terms{{
			Partner: -1, Pull: placement.Pull{Note: placement.PullTaken, Tokens: 4000, TransferMs: transfer, BytesPerMs: path.BytesPerMs},
		}}}
		tr.begin(at(s), id, d, []placement.Candidate{{Worker: to, Paths: []placement.Path{path}}}, &policy, 4096, sit)
		tr.learn(tr.ms(at(s+9)), tr.ms(at(s+9)), tr.outcome(id, true, 4000, firstTokenMs))
	}
	took := policy.TransferSetupMs + .02 + bytes/slow
	for i := range placement.MeasuredTransfers {
		if p := tr.path(0, from, to, registry.StayInNone); p.Figure != placement.FigureDeclared || p.BytesPerMs != fast {
			t.Fatalf("after %d pulls: %+v", i, p)
		}
		pull(20*i, fmt.Sprint("p", i), 30+took, 30)
		pull(20*i+10, fmt.Sprint("n", i), math.NaN(), 30)        // no first token told
		pull(20*i+10, fmt.Sprint("w", i), 30_000+2*took, 30_000) // drowned by the rest
	}
	nowMs := tr.ms(at(400))
	p := tr.path(nowMs, from, to, registry.StayInNone)
	if p.Figure != placement.FigureMeasured || math.Abs(p.BytesPerMs/slow-1) > .001 {
		t.Errorf("measured %+v, want %v bytes per ms", p, slow)
	}
	if p := tr.path(nowMs, other, to, registry.StayInNone); p.Figure != placement.FigureMeasured {
		t.Errorf("another pair on the link: %+v", p)
	}
	// What was not seen again for long is forgotten.
	if p := tr.path(nowMs+placement.RateKeptMs+1, from, to, registry.StayInNone); p.Figure != placement.FigureDeclared {
		t.Errorf("an hour later: %+v", p)
	}
	// Nothing bounds the search from the wrong side.
	tr.rates.Note(nowMs, "x", placement.Pair{}, 1e9, 1, 0)
	pull(500, "last", 30.1+policy.TransferSetupMs, 30)
	if s, _ := tr.rates.OfPair(nowMs, placement.Pair{From: from.Name, To: to.Name}); tr.fastestNow() < s.BytesPerMs {
		t.Errorf("fastest %v, measured %v", tr.fastestNow(), s.BytesPerMs)
	}
}

// A caller is given what makes the engines move KV: the source to the engine
// that computes the prompt, each other to the two of a pair.
func TestTransferPatches(t *testing.T) {
	from, prefill := workerNamed(2, "gpu-02/v/0"), workerNamed(1, "gpu-01/v/0")
	prefill.Transfer.SideChannel = "10.0.0.1:5711"
	sit := placement.Situation{Sources: []placement.Source{{Worker: from}}}
	patches := func(terms placement.Terms) (worker, prefiller map[string]any) {
		answer := &waypostv1.Placement{PlacementId: new("pl_c1_x"), Worker: &waypostv1.WorkerRef{}}
		if terms.Partner >= 0 {
			answer.PrefillWorker = &waypostv1.WorkerRef{}
		}
		patched(answer, &placement.Candidate{Worker: prefill}, &terms, sit)
		return answer.GetWorker().GetBodyPatch().AsMap(), answer.GetPrefillWorker().GetBodyPatch().AsMap()
	}
	params := func(p map[string]any) map[string]any { return map[string]any{"kv_transfer_params": p} }
	source := map[string]any{"kv_request_id": "pl_c1_x", "remote_host": "10.0.0.2", "remote_port": 5710.}
	prefiller := map[string]any{"kv_request_id": "pl_c1_x", "remote_host": "10.0.0.1", "remote_port": 5711.}
	decoder := map[string]any{"kv_request_id": "pl_c1_x"}
	pull := placement.Pull{Note: placement.PullTaken}
	for _, c := range []struct {
		name           string
		terms          placement.Terms
		change         func()
		worker, before map[string]any
	}{
		{"nothing", placement.Terms{Partner: -1}, nil, map[string]any{}, map[string]any{}},
		{"a pull", placement.Terms{Partner: -1, Pull: pull}, nil, params(map[string]any{"remote_kv_source": source}), map[string]any{}},
		{"a pair", placement.Terms{}, nil, params(map[string]any{"remote_prefiller": prefiller}), params(map[string]any{"remote_decoder": decoder})},
		{
			"a pair that pulls",
			placement.Terms{Pull: pull},
			nil, params(map[string]any{"remote_prefiller": prefiller}),
			params(map[string]any{"remote_decoder": decoder, "remote_kv_source": source}),
		},
		{"no port", placement.Terms{Partner: -1, Pull: pull}, func() { from.Transfer.SideChannel = "10.0.0.2" }, map[string]any{}, map[string]any{}},
		{
			"NIXL",
			placement.Terms{},
			func() { prefill.Transfer.Connector = nixlConnector },
			map[string]any{},
			params(map[string]any{
				"do_remote_decode": true, "do_remote_prefill": false,
				"remote_engine_id": nil, "remote_block_ids": nil, "remote_host": nil, "remote_port": nil,
			}),
		},
	} {
		if c.change != nil {
			c.change()
		}
		worker, before := patches(c.terms)
		if diff := cmp.Diff(c.worker, worker) + cmp.Diff(c.before, before); diff != "" {
			t.Errorf("%s:\n%s", c.name, diff)
		}
	}
	// An engine that cannot be told what to read is no source, but may hand over.
	tr := newTransfers(time.Now())
	tr.use(parsedFleet(t))
	whole, decode := workerNamed(3, "gpu-02/v/1"), workerNamed(4, "gpu-02/v/2")
	decode.Role = placement.RoleDecode
	if tr.path(0, from, whole, registry.StayInNone).Never || !tr.path(0, prefill, whole, registry.StayInNone).Never || tr.path(0, prefill, decode, registry.StayInNone).Never {
		t.Error("who may read from whom")
	}
}

func TestTenantsAreJudged(t *testing.T) {
	started := time.Now()
	file := parsedFleet(t)
	f, err := fleet.New(fleet.Options{Epoch: started, Process: 1})
	if err != nil {
		t.Fatal(err)
	}
	c := &Coordinator{fleet: f, transfers: newTransfers(started)}
	judge := func(tenant string, tokens int) placement.Request {
		r := placement.Request{ID: "r", Pool: "p", Tenant: tenant, PromptTokens: tokens}
		c.judgeTenant(started, &r, file)
		return r
	}
	if r := judge("", 10); r.TenantBarred != "tenant default may not use pool p" {
		t.Errorf("default tenant: %+v", r)
	}
	if r := judge("team-a", 1000); r.TenantBarred != "" || r.TenantFull != "" || r.TenantOver != "" {
		t.Errorf("team-a with nothing: %+v", r)
	}
	if r := judge("team-a", 1001); r.TenantFull != "tenant team-a has 0 prompt tokens under way, max_inflight_tokens is 1000" {
		t.Errorf("team-a too large: %q", r.TenantFull)
	}
	for range 10 {
		c.placedFor(started, &placement.Request{Pool: "p", Tenant: "team-a"}, 1000)
		c.placedFor(started, &placement.Request{Pool: "p", Tenant: "team-b"}, 2000)
	}
	if r := judge("team-b", 10); !strings.HasPrefix(r.TenantOver, "tenant team-b has 67% of the prefill lately, its share is 25%") {
		t.Errorf("team-b: %q", r.TenantOver)
	}
	if r := judge("team-a", 10); r.TenantOver != "" {
		t.Errorf("team-a: %q", r.TenantOver)
	}
	// What is under way counts until it ends.
	h := fleet.Hello{Host: "gpu-01", AgentProcess: 1, Session: 1, Workers: []fleet.Facts{{Engine: "v", Ranks: 1, Kind: "vllm", EngineProcess: 9, Model: "m"}}}
	if _, _, err := f.OpenLane(started, h); err != nil {
		t.Fatal(err)
	}
	claim := fleet.NewClaim{
		Key: fleet.RequestKey{Tenant: "team-a", ID: "r"}, Attempt: 1, Placement: "x",
		Claim: ledger.Claim{EngineProcess: 9, PromptTokens: 600, UncachedTokens: 600},
	}
	if _, _, _, err := f.Claim(started, claim); err != nil {
		t.Fatal(err)
	}
	if r := judge("team-a", 500); r.TenantFull != "tenant team-a has 600 prompt tokens under way, max_inflight_tokens is 1000" {
		t.Errorf("with 600 under way: %q", r.TenantFull)
	}
	if _, err := f.Mark(started, "x", ledger.MarkDone, 5); err != nil {
		t.Fatal(err)
	}
	if r := judge("team-a", 500); r.TenantFull != "" || f.TenantTokens("team-a") != 0 {
		t.Errorf("after the end: %q, %d tokens", r.TenantFull, f.TenantTokens("team-a"))
	}
	// Who names no tenant and who names the default one are the same tenant.
	if file, err = registry.ParseFleet("fleet.toml", "[[tenant]]\nname = \"default\"\nmax_inflight_tokens = 1000\n"); err != nil {
		t.Fatal(err)
	}
	claim.Key, claim.Placement = fleet.RequestKey{ID: "r2"}, "y"
	if _, _, _, err := f.Claim(started, claim); err != nil {
		t.Fatal(err)
	}
	for _, tenant := range []string{"", registry.DefaultTenant} {
		if r := judge(tenant, 500); r.TenantFull != "tenant default has 600 prompt tokens under way, max_inflight_tokens is 1000" {
			t.Errorf("tenant %q with 600 of the default tenant's under way: %q", tenant, r.TenantFull)
		}
	}
}
