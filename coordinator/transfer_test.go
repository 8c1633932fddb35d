package coordinator

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
	"waypost/coordinator/transfers"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// poolAndTenant go with the racks and links of the fleet file of package transfers.
const poolAndTenant = `
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
	text, err := os.ReadFile("transfers/testdata/fleet.toml")
	if err != nil {
		t.Fatal(err)
	}
	file, err := registry.ParseFleet("fleet.toml", string(text)+poolAndTenant)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

func workerNamed(id fleet.WorkerID, name string) *placement.Worker {
	w := placement.NewWorker(id, name)
	w.Transfer = &placement.Transfer{Connector: transfers.OffloadingConnector, SideChannel: "10.0.0.2:5710", Fingerprint: "f", ExportedTier: placement.TierGPU, BytesPerToken: 262_144}
	return &w
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
		{"a spare source", placement.Terms{Partner: -1, Pull: placement.Pull{Note: placement.PullSpare}}, nil, params(map[string]any{"remote_kv_source": source}), map[string]any{}},
		{"none asked for", placement.Terms{Partner: -1, Pull: placement.Pull{Note: placement.PullDearer}}, nil, map[string]any{}, map[string]any{}},
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
	tr := transfers.New(time.Now())
	tr.Use(parsedFleet(t))
	whole, decode := workerNamed(3, "gpu-02/v/1"), workerNamed(4, "gpu-02/v/2")
	decode.Role = placement.RoleDecode
	if tr.Path(0, from, whole, registry.StayInNone).Never || !tr.Path(0, prefill, whole, registry.StayInNone).Never || tr.Path(0, prefill, decode, registry.StayInNone).Never {
		t.Error("who may read from whom")
	}
}

// The answer and the record say in the same words what is pulled, and whether only
// if the worker's own are gone.
func TestPullPlan(t *testing.T) {
	from := workerNamed(2, "gpu-02/v/0")
	sit := placement.Situation{Sources: []placement.Source{{Worker: from}}}
	for note, want := range map[placement.PullNote]*waypostv1.PullPlan{
		placement.PullDearer: nil,
		placement.PullTaken:  {Tokens: new(uint32(4080)), TransferMs: new(50.)},
		placement.PullSpare:  {Tokens: new(uint32(4080)), TransferMs: new(50.), OnlyIfGone: new(true)},
	} {
		var p waypostv1.Placement
		recordedWay(&p, &placement.Candidate{Worker: from}, &placement.Terms{Partner: -1, Pull: placement.Pull{Note: note, Tokens: 4080, TransferMs: 50}}, sit)
		got := p.GetPull()
		if got != nil {
			if got.GetSource().GetName() != from.Name {
				t.Errorf("%s: from %v", note, got.GetSource())
			}
			got.Source = nil
		}
		if !proto.Equal(got, want) {
			t.Errorf("%s: %v, want %v", note, got, want)
		}
	}
}

func TestTenantsAreJudged(t *testing.T) {
	started := time.Now()
	file := parsedFleet(t)
	f, err := fleet.New(fleet.Options{Epoch: started, Process: 1})
	if err != nil {
		t.Fatal(err)
	}
	c := &Coordinator{fleet: f, transfers: transfers.New(started)}
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

// What an agent says of an engine's way to the host's memory is shown as it was
// said, and refused where it cannot be.
func TestHostTierIsShownAsTold(t *testing.T) {
	for _, told := range []*waypostv1.HostTierFacts{
		nil,
		{LinkSource: new("assumed")},
		{LinkSource: new("declared"), KvBytesPerToken: new(131072.), LinkBytesPerSec: new(5e10)},
		{LinkSource: new("assumed"), KvBytesPerToken: new(131072.), LinkBytesPerSec: new(18e9), Link: new("PCIe 5.0 x16")},
		{LinkSource: new("assumed"), Uncounted: new("hybrid model")},
	} {
		h := hostTierOf(&waypostv1.WorkerFacts{HostTier: told})
		if diff := cmp.Diff(told, hostTierProto(h), protocmp.Transform()); diff != "" {
			t.Errorf("%v: (-told +shown)\n%s", told, diff)
		}
		if h != nil && h.Fault() != "" {
			t.Errorf("%v: %s", told, h.Fault())
		}
	}
	h := hostTierOf(&waypostv1.WorkerFacts{HostTier: &waypostv1.HostTierFacts{Link: new(strings.Repeat("x", 33))}})
	if fault := h.Fault(); fault != "link: has 33 bytes, at most 32" {
		t.Errorf("a long name of a link: %q", fault)
	}
}
