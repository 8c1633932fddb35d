package coordinator

import (
	"strings"
	"testing"
	"time"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
	"waypost/gossip/ledger"
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
	d := &placement.Decision{Terms: []placement.Terms{{ReuseTokens: 512, Pull: placement.Pull{Note: placement.PullTaken, Tokens: 3584, TransferMs: 80}}}}
	at := func(ms int) time.Time { return started.Add(time.Duration(ms) * time.Millisecond) }
	for i, id := range []string{"a", "b", "c"} {
		tr.begin(at(0), id, d, candidates, sit)
		if p := tr.path(1, from, to, registry.StayInNone); p.UnderWay != i+1 || tr.sending(1, from) != i+1 {
			t.Errorf("after %d pulls: %d under way, %d sent", i+1, p.UnderWay, tr.sending(1, from))
		}
	}
	if p := tr.path(90, from, to, registry.StayInNone); p.UnderWay != 0 {
		t.Errorf("%d under way after their time", p.UnderWay)
	}
	tr.begin(at(100), "unsaid", d, candidates, sit)
	if _, switched, _ := tr.outcome(at(101), "unsaid", true, placement.Unknown); switched {
		t.Error("an outcome without a count judged the pair")
	}
	for i, id := range []string{"a", "b", "c"} {
		pair, switched, off := tr.outcome(at(200+i), id, true, 512)
		if last := id == "c"; switched != last || off != last || pair.From != from.Name || pair.To != to.Name {
			t.Errorf("outcome %s: %v switched %v off %v", id, pair, switched, off)
		}
	}
	if p := tr.path(300, from, to, registry.StayInNone); !p.Off {
		t.Error("the pair is still on")
	}
	if p := tr.path(300, to, from, registry.StayInNone); p.Off {
		t.Error("the other direction is off as well")
	}
	if _, switched, _ := tr.outcome(at(400), "a", true, 4096); switched {
		t.Error("a second outcome counted")
	}
}

func TestPullPatch(t *testing.T) {
	from := workerNamed(2, "gpu-02/v/0")
	patch := pullPatch("pl_c1_x", from)
	source := patch.GetFields()["kv_transfer_params"].GetStructValue().GetFields()["remote_kv_source"].GetStructValue().AsMap()
	if source["kv_request_id"] != "pl_c1_x" || source["remote_host"] != "10.0.0.2" || source["remote_port"] != 5710.0 {
		t.Errorf("patch %v", patch)
	}
	from.Transfer.SideChannel = "10.0.0.2"
	if pullPatch("x", from) != nil {
		t.Error("a side channel without port gave a patch")
	}
	from.Transfer.SideChannel, from.Transfer.Connector = "10.0.0.2:1", "NixlConnector"
	if pullPatch("x", from) != nil {
		t.Error("a connector that cannot read at will gave a patch")
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
}
