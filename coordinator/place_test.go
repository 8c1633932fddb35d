package coordinator

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"waypost/coordinator/api"
	"waypost/coordinator/outcome"
	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// A request that is turned away because too many are being decided is answered
// and counted like any other refusal.
func TestBusyIsCounted(t *testing.T) {
	o := startOne(t, func(cfg *Config) { cfg.Limits.PlacesInFlight = 1 })
	joined(t, o)
	o.inFlight <- struct{}{} // another one is being decided
	resp, err := o.placements.Place(t.Context(), &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: ascending(100)}})
	if err != nil || resp.GetRefused().GetReason() != "busy" {
		t.Fatalf("%v, %v", resp, err)
	}
	<-o.inFlight
	for _, series := range []string{"waypost_placements_total{,busy}", "waypost_tenant_refused_total{busy,default}"} {
		if n := o.metric(t, series); n != 1 {
			t.Errorf("%s is %v", series, n)
		}
	}
	if resp, err := o.placements.Place(t.Context(), &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: ascending(100)}}); err == nil && resp.GetRefused().GetReason() == "busy" {
		t.Error("busy with nothing being decided")
	}
}

// Of many requests that come when several workers are to be probed, each loses
// the probes of most to others. It goes to a worker that needs none then, and is
// not refused.
func TestLostProbesAreNoRefusal(t *testing.T) {
	const workers = 8
	o := startOne(t)
	a := &fakeAgent{workers: workers, state: func(i int, l *ledger.Load) {
		l.QueueMs, l.Live, l.AgeMs = new(0.), new(uint32(0)), new(0.)
		if i == workers-1 { // nobody's first choice
			l.QueueMs, l.Live = new(60_000.), new(uint32(50))
		}
	}}
	a.start(t, o)
	eventually(t, "all workers are ready", func() bool {
		ready := 0
		for _, w := range o.fleet.Workers(time.Now()) {
			if w.State == "ready" {
				ready++
			}
		}
		return ready == workers && o.Joined()
	})
	now := time.Now()
	nowMs := o.fleet.Ms(now)
	limits := outcome.DefaultLimits()
	limits.ProbeEveryMs = 3_600_000
	name := func(i int) string { return fmt.Sprintf("gpu-01/vllm-%d/0", 8000+i) }
	o.judges.mu.Lock()
	for i := range workers - 1 {
		w := o.judges.of(name(i), uint64(100+i))
		w.Worker = outcome.NewWorker(limits)
		for range limits.BreakerFaults {
			w.Ended(nowMs-2*limits.ProbeEveryMs, true)
		}
		o.judges.tell(now, name(i), w) // its next placement is a probe
		if !w.TakeProbe(nowMs) {
			t.Errorf("%s is not to be probed", name(i))
		}
	}
	o.judges.mu.Unlock()
	resp, err := o.placements.Place(t.Context(), &waypostv1.PlaceRequest{Reserve: new(true), Input: &waypostv1.Input{TokenIds: ascending(100)}})
	if got := resp.GetPlacement().GetWorker().GetName(); err != nil || got != name(workers-1) {
		t.Errorf("placed on %q, error %v, refused: %v", got, err, resp.GetRefused())
	}
}

// Each field of a request that cannot be used is refused under its own name,
// with what is allowed.
func TestPlaceNamesBadFields(t *testing.T) {
	o := startOne(t)
	joined(t, o)
	file, err := registry.ParseFleet("fleet.toml", "[[tenant]]\nname = \"team-a\"\ncache_salts = [\"a-*\"]\n")
	if err != nil {
		t.Fatal(err)
	}
	o.fleetFile.Store(file)
	o.place(t, &waypostv1.PlaceRequest{Tenant: new("team-a"), CacheSalt: new("a-1"), Input: &waypostv1.Input{TokenIds: ascending(100)}})
	long := strings.Repeat("x", maxNameLen+1)
	keys := func(k *waypostv1.PrefixKeys) func(*waypostv1.PlaceRequest) {
		return func(r *waypostv1.PlaceRequest) { r.Input = &waypostv1.Input{PrefixKeys: k} }
	}
	input := func(in *waypostv1.Input) func(*waypostv1.PlaceRequest) {
		return func(r *waypostv1.PlaceRequest) { r.Input = in }
	}
	point := &waypostv1.PrefixPoint{Offset: new(uint32(5)), Key: new("0011223344556677")}
	for _, c := range []struct {
		field, says string
		change      func(*waypostv1.PlaceRequest)
	}{
		{"request_id", "257 bytes", func(r *waypostv1.PlaceRequest) { r.RequestId = &long }},
		{"pool", "257 bytes", func(r *waypostv1.PlaceRequest) { r.Pool = &long }},
		{"tenant", "257 bytes", func(r *waypostv1.PlaceRequest) { r.Tenant = &long }},
		{"adapter", "257 bytes", func(r *waypostv1.PlaceRequest) { r.Adapter = &long }},
		{"cache_salt", "257 bytes", func(r *waypostv1.PlaceRequest) { r.CacheSalt = &long }},
		{"cache_salt", "uses no others", func(r *waypostv1.PlaceRequest) { r.Tenant = new("team-a") }},
		{"cache_salt", "another tenant", func(r *waypostv1.PlaceRequest) { r.CacheSalt = new("a-1") }},
		{"caller_zone", "257 bytes", func(r *waypostv1.PlaceRequest) { r.CallerZone = &long }},
		{"output_tokens_max", "leave it out", func(r *waypostv1.PlaceRequest) { r.OutputTokensMax = new(uint32(0)) }},
		{"output_tokens_max", "2147483648", func(r *waypostv1.PlaceRequest) { r.OutputTokensMax = new(uint32(1 << 31)) }},
		{"output_tokens_expected", "leave it out", func(r *waypostv1.PlaceRequest) { r.OutputTokensExpected = new(uint32(0)) }},
		{"output_tokens_expected", "4.294967295e+09", func(r *waypostv1.PlaceRequest) { r.OutputTokensExpected = new(uint32(math.MaxUint32)) }},
		{"generated_tokens", "4294967295", func(r *waypostv1.PlaceRequest) { r.GeneratedTokens = new(uint32(math.MaxUint32)) }},
		{"deadline_ms", "1e+300", func(r *waypostv1.PlaceRequest) { r.DeadlineMs = new(1e300) }},
		{"deadline_ms", "0 is not", func(r *waypostv1.PlaceRequest) { r.DeadlineMs = new(0.) }},
		{"first_token_budget_ms", "NaN", func(r *waypostv1.PlaceRequest) { r.FirstTokenBudgetMs = new(math.NaN()) }},
		{"first_token_budget_ms", "1e+10", func(r *waypostv1.PlaceRequest) { r.FirstTokenBudgetMs = new(1e10) }},
		{"gap_budget_ms", "+Inf", func(r *waypostv1.PlaceRequest) { r.GapBudgetMs = new(math.Inf(1)) }},
		{"gap_budget_ms", "-1 is not", func(r *waypostv1.PlaceRequest) { r.GapBudgetMs = new(-1.) }},
		{"tokenize_budget_ms", "1001", func(r *waypostv1.PlaceRequest) { r.TokenizeBudgetMs = new(1001.) }},
		{"tokenize_budget_ms", "NaN", func(r *waypostv1.PlaceRequest) { r.TokenizeBudgetMs = new(math.NaN()) }},
		{"if_infeasible", "retry-after", func(r *waypostv1.PlaceRequest) { r.IfInfeasible = new("perhaps") }},
		{"attempt", "from 1", func(r *waypostv1.PlaceRequest) { r.Attempt = new(uint32(0)) }},
		{"exclude", "1025 names", func(r *waypostv1.PlaceRequest) { r.Exclude = make([]string, 1025) }},
		{"exclude[1]", "257 bytes", func(r *waypostv1.PlaceRequest) { r.Exclude = []string{"gpu-01/vllm-8000/0", long} }},
		{"explain", "none, terms or full", func(r *waypostv1.PlaceRequest) { r.Explain = new("all") }},
		{"input", "missing or empty", input(nil)},
		{"input", "more than one form", input(&waypostv1.Input{TokenIds: ascending(3), Prompt: new("x")})},
		{"input.tools", "messages", input(&waypostv1.Input{TokenIds: ascending(3), Tools: []*structpb.Struct{{}}})},
		{"input.prompt", "empty", input(&waypostv1.Input{Prompt: new("")})},
		{"input.token_ids_le", "7 bytes", input(&waypostv1.Input{TokenIdsLe: make([]byte, 7)})},
		{"input.prefix_keys.prompt_tokens", "16777217", keys(&waypostv1.PrefixKeys{PromptTokens: new(uint32(placement.MaxPromptTokens + 1))})},
		{"input.prefix_keys.key_id", "cluster key", keys(&waypostv1.PrefixKeys{PromptTokens: new(uint32(9)), Points: []*waypostv1.PrefixPoint{point}})},
		{"input.prefix_keys.points[0].offset", "outside", keys(&waypostv1.PrefixKeys{PromptTokens: new(uint32(4)), KeyId: new(testKey.ID()), Points: []*waypostv1.PrefixPoint{point}})},
		{"input.prefix_keys.checkpoints", "1 checkpoints", keys(&waypostv1.PrefixKeys{PromptTokens: new(uint32(4)), KeyId: new(testKey.ID()), Checkpoints: []string{"0011223344556677"}})},
		{"input.prefix_keys.checkpoints[0]", "16 hex digits", keys(&waypostv1.PrefixKeys{PromptTokens: new(uint32(600)), KeyId: new(testKey.ID()), Checkpoints: []string{"1122"}})},
	} {
		req := &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: ascending(100)}}
		c.change(req)
		_, err := o.placements.Place(t.Context(), req)
		if status.Code(err) != codes.InvalidArgument && status.Code(err) != codes.NotFound || api.FieldOf(err) != c.field || !strings.Contains(status.Convert(err).Message(), c.says) {
			t.Errorf("%s: field %q, %v; want %q", c.field, api.FieldOf(err), err, c.says)
		}
	}
}

// A million tokens are a request like any other, over the body limit it is
// said; both leave the coordinator as it was.
func TestVeryLongPrompts(t *testing.T) {
	o := startOne(t)
	joined(t, o)
	var le bytes.Buffer
	if err := binary.Write(&le, binary.LittleEndian, ascending(1_000_000)); err != nil {
		t.Fatal(err)
	}
	client := waypostv1.NewPlacementServiceClient(o.conn)
	resp, err := client.Place(t.Context(), &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIdsLe: le.Bytes()}, Explain: new("terms")})
	if err != nil {
		t.Fatal(err)
	}
	// The worker's model takes 65,536: no worker can serve it.
	if r := resp.GetRefused(); r.GetReason() == "" || !strings.Contains(r.GetDetail(), "too_long") {
		t.Errorf("a million tokens: %v", resp)
	}
	_, err = client.Place(t.Context(), &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIdsLe: make([]byte, 10_000_000)}})
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("10 MB over gRPC: %v", err)
	}
	if p := o.place(t, &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: ascending(100)}}); p.GetPlacementId() == "" {
		t.Errorf("afterwards: %v", p)
	}
}

// labelled is the value of the series with exactly these labels, by name; of a
// histogram the observations.
func labelled(t *testing.T, o *one, name string, labels map[string]string) (value float64, ok bool) {
	t.Helper()
	families, err := o.opt.Gatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			have := map[string]string{}
			for _, l := range m.GetLabel() {
				have[l.GetName()] = l.GetValue()
			}
			if f.GetName() == name && maps.Equal(have, labels) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount()), true
			}
		}
	}
	return 0, false
}

// What is counted is labelled by pools and by the tenants of the fleet file;
// names that callers make up share a label.
func TestSeriesOfPoolsAndTenants(t *testing.T) {
	o := startOne(t)
	var told atomic.Bool
	a := &fakeAgent{workers: 1, state: func(_ int, l *ledger.Load) {
		if told.Load() {
			l.QueueMs = new(0.)
		}
	}}
	a.start(t, o)
	eventually(t, "the worker is ready", func() bool {
		w := o.fleet.Workers(time.Now())
		return len(w) == 1 && w[0].State == "ready" && o.Joined()
	})
	file, err := registry.ParseFleet("fleet.toml", "[[tenant]]\nname = \"team-a\"\n")
	if err != nil {
		t.Fatal(err)
	}
	o.fleetFile.Store(file)
	pool := map[string]string{"pool": testModel}
	if got, ok := labelled(t, o, "waypost_pool_headroom_ratio", pool); ok {
		t.Errorf("headroom %v of a pool whose queue is not known", got)
	}
	told.Store(true)
	eventually(t, "an idle pool has all its headroom", func() bool {
		got, ok := labelled(t, o, "waypost_pool_headroom_ratio", pool)
		return ok && got == 1
	})
	for _, tenant := range []string{"team-a", "", "made-up-1", "made-up-2"} {
		o.place(t, &waypostv1.PlaceRequest{Tenant: &tenant, Input: &waypostv1.Input{TokenIds: ascending(1000)}})
		resp, err := o.placements.Place(t.Context(), &waypostv1.PlaceRequest{Tenant: &tenant, Input: &waypostv1.Input{TokenIds: ascending(100_000)}})
		if err != nil || resp.GetRefused() == nil {
			t.Fatalf("%v, %v", resp, err)
		}
	}
	for tenant, n := range map[string]float64{"team-a": 1, "default": 1, "other": 2, "made-up-1": 0} {
		if got, _ := labelled(t, o, "waypost_tenant_refused_total", map[string]string{"tenant": tenant, "reason": "none_eligible"}); got != n {
			t.Errorf("refused of %s: %v, want %v", tenant, got, n)
		}
		if got, _ := labelled(t, o, "waypost_tenant_uncached_tokens_total", map[string]string{"tenant": tenant}); (got > 0) != (n > 0) || got > 1000*n {
			t.Errorf("uncached tokens of %s: %v", tenant, got)
		}
	}
	if got, _ := labelled(t, o, "waypost_placement_seconds", pool); got != 8 {
		t.Errorf("%v placements were timed, want 8", got)
	}
	if _, ok := labelled(t, o, "waypost_workers_excluded", map[string]string{"pool": testModel, "reason": "cordoned"}); ok {
		t.Error("nobody is cordoned yet")
	}
	if _, err := o.operators.CordonTarget(t.Context(), &waypostv1.CordonTargetRequest{Selector: new("gpu-01"), Reason: new("test")}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the cordoned worker is counted", func() bool {
		n, _ := labelled(t, o, "waypost_workers_excluded", map[string]string{"pool": testModel, "reason": "cordoned"})
		return n == 1
	})
}

func TestHeadroom(t *testing.T) {
	file, err := registry.ParseFleet("fleet.toml", "[[pool]]\nname = \"p\"\nmodel = \"m\"\nslo = { ttft = \"500ms\" }\n")
	if err != nil {
		t.Fatal(err)
	}
	c := &Coordinator{}
	policy := placement.DefaultPolicy()
	c.policy.Store(&policy)
	c.fleetFile.Store(file)
	for _, x := range []struct {
		pool         string
		waitMs, want float64
	}{{"p", 0, 1}, {"p", 125, .75}, {"p", 500, 0}, {"p", 9000, 0}, {"q", 500, .75}} {
		if got := c.headroom(x.pool, x.waitMs); got != x.want {
			t.Errorf("%s at %v ms: %v, want %v", x.pool, x.waitMs, got, x.want)
		}
	}
}

// What the fleet file says of policy is in force on the coordinator and on the
// hosts once it is applied.
func TestFleetPolicyIsInForce(t *testing.T) {
	o := startOne(t)
	a := joined(t, o)
	late := func() *waypostv1.PlaceResponse {
		resp, err := o.placements.Place(t.Context(), &waypostv1.PlaceRequest{
			Input: &waypostv1.Input{TokenIds: ascending(1000)}, FirstTokenBudgetMs: new(1e-3), Reserve: new(false),
		})
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	if got := late().GetPlacement().GetBasis(); got.GetTheta() != 5 || !slices.Contains(got.GetMarks(), "over_limit") {
		t.Errorf("by default: %v", got)
	}
	for objective, theta := range map[string]float64{"first-token": 1, "balanced": 5, "throughput": 20} {
		const rest = "own_delay_limit = \"10% + 30ms\"\nif_infeasible = \"reject\"\n[policy.unplaceable_after]\nagent_silent = \"17s\"\nno_progress = \"42s\"\n"
		toml, version := "[policy]\nobjective = \""+objective+"\"\n"+rest, o.replica.State().FleetFile().Version
		if _, err := o.operators.PutFleet(t.Context(), &waypostv1.PutFleetRequest{Toml: &toml, BaseVersion: &version}); err != nil {
			t.Fatal(err)
		}
		eventually(t, objective+" is in force", func() bool { return o.policy.Load().Theta == theta && o.policy.Load().OwnLimitMs == 30 })
		if p := o.policy.Load(); p.OwnLimitRatio != .1 || p.SilentMs != 17_000 || p.IfInfeasible != placement.Reject {
			t.Errorf("%s: %+v", objective, p)
		}
		resp, err := o.placements.Place(t.Context(), &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: ascending(1000)}, Reserve: new(false)})
		if err != nil || resp.GetPlacement().GetBasis().GetTheta() != theta {
			t.Errorf("%s: θ is %v, %v", objective, resp, err)
		}
	}
	if got := late().GetRefused(); got.GetReason() == "" {
		t.Errorf("an impossible budget is not rejected: %v", got)
	}
	eventually(t, "the host is told of no_progress", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.policy.GetNoProgressMs() == 42_000
	})
}

// What tenants were placed in pools that are gone is not kept for ever.
func TestTenantSharesOfPoolsThatAreGone(t *testing.T) {
	o := startOne(t)
	joined(t, o)
	for i := range 100 {
		o.placedFor(time.Now(), &placement.Request{Pool: fmt.Sprint("gone-", i), Tenant: "a"}, 10)
	}
	for range 2 {
		o.placedFor(time.Now(), &placement.Request{Pool: testModel, Tenant: "a"}, 10)
	}
	o.placedFor(time.Now(), &placement.Request{Pool: "gone", Tenant: "a"}, 10)
	o.tenantShares.mu.Lock()
	defer o.tenantShares.mu.Unlock()
	if by := o.tenantShares.by; len(by) != 2 || by[testModel] == nil {
		t.Errorf("%d pools are kept", len(by))
	}
}

// A caller that names no zone stands in the one whose networks hold its address,
// over gRPC and over HTTP; what it names itself goes before.
func TestCallerZoneByAddress(t *testing.T) {
	o := startOne(t)
	joined(t, o)
	client := waypostv1.NewPlacementServiceClient(o.conn)
	ask := func(zone string) string {
		req := &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: ascending(100)}, Reserve: new(false)}
		if zone != "" {
			req.CallerZone = &zone
		}
		resp, err := client.Place(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetRefused().GetReason()
	}
	for _, c := range []struct{ networks, zone, refused string }{
		{`["127.0.0.0/8", "::1/128"]`, "", ""},
		{`["10.0.0.0/8"]`, "", "none_eligible"},
		{`["127.0.0.0/8", "::1/128"]`, "b", "none_eligible"},
		{`["10.0.0.0/8"]`, "a", ""},
	} {
		toml, version := "version = 1\n[[zone]]\nname = \"a\"\nhosts = [\"gpu-01\"]\nnetworks = "+c.networks+"\n[[zone]]\nname = \"b\"\n[[pool]]\nname = \"p\"\nmodel = \""+testModel+"\"\nstay_in = \"zone\"\n",
			o.replica.State().FleetFile().Version
		if _, err := o.operators.PutFleet(t.Context(), &waypostv1.PutFleetRequest{Toml: &toml, BaseVersion: &version}); err != nil {
			t.Fatal(err)
		}
		eventually(t, fmt.Sprintf("networks %s, zone %q: refused %q", c.networks, c.zone, c.refused), func() bool { return ask(c.zone) == c.refused })
		if c.zone != "" {
			continue
		}
		resp, err := http.Post("http://"+o.APIAddress()+"/v1/place", "application/json", strings.NewReader(`{"input":{"tokenIds":[1,2,3]},"reserve":false}`))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || strings.Contains(string(body), "none_eligible") != (c.refused != "") {
			t.Errorf("networks %s over HTTP: %s, %v", c.networks, body, err)
		}
	}
}
