package placement

import (
	"fmt"
	"math"
	"testing"
)

func TestShares(t *testing.T) {
	var s Shares
	weight := func(tenant string) int { return map[string]int{"a": 3, "b": 1}[tenant] }
	over := func(nowMs float64, tenant, want string) {
		t.Helper()
		if got := s.Over(nowMs, tenant, weight); got != want {
			t.Errorf("%s at %v: %q, want %q", tenant, nowMs, got, want)
		}
	}
	over(0, "a", "")
	for i := range 20 { // alone it may have all
		s.Placed(float64(i)*100, "a", 1000)
	}
	over(2000, "a", "")
	for i := range 20 {
		s.Placed(2000+float64(i)*100, "a", 1000)
		s.Placed(2000+float64(i)*100, "b", 1000)
	}
	over(4000, "a", "")
	over(4000, "b", "tenant b has 35% of the prefill lately, its share is 25%")
	over(4000, "c", "") // nothing yet
	over(500_000, "b", "")
	if len(s.tenants) != 0 {
		t.Errorf("%d tenants remembered after minutes of silence", len(s.tenants))
	}
	for i := range maxTenants + 50 {
		s.Placed(600_000, fmt.Sprint("t", i), i)
	}
	if len(s.tenants) > maxTenants {
		t.Errorf("%d tenants kept", len(s.tenants))
	}
}

// Over its share a tenant is served while there is headroom, and the answer is
// marked; without headroom it is refused. The bound of tokens under way holds
// in any case, and what is barred is refused first.
func TestTenantRefusals(t *testing.T) {
	candidates := idleFleet(2)
	over := Request{ID: "r", Tenant: "b", PromptTokens: 1000, TenantOver: "tenant b has 60% of the prefill lately, its share is 25%"}
	if d := place(t, over, candidates); d.Chosen < 0 || d.Marks&MarkTenantOverShare == 0 {
		t.Errorf("with headroom: chosen %d, marks %v", d.Chosen, d.Marks.Words())
	}
	for i := range candidates {
		candidates[i].Worker.Waiting.F = 1e6 + 3000
	}
	d := place(t, over, candidates)
	if d.Chosen >= 0 || d.Refusal.Reason != RefusedTenantOverShare || !(d.Refusal.RetryAfterMs > 900 && d.Refusal.RetryAfterMs < 1100) {
		t.Errorf("without headroom: chosen %d, refusal %+v", d.Chosen, d.Refusal)
	}
	if got, want := d.Because(candidates), over.TenantOver+", and the pool has no headroom: the best worker waits 3014 ms"; got != want {
		t.Errorf("detail %q, want %q", got, want)
	}
	fair := over
	fair.TenantOver = ""
	if d := place(t, fair, candidates); d.Chosen < 0 {
		t.Errorf("a tenant within its share is refused: %+v", d.Refusal)
	}
	full := Request{ID: "r", Tenant: "b", PromptTokens: 1000, TenantFull: "tenant b has 399500 prompt tokens under way, max_inflight_tokens is 400000"}
	if d := place(t, full, idleFleet(2)); d.Chosen >= 0 || d.Refusal.Reason != RefusedTenantOverShare || !math.IsNaN(d.Refusal.RetryAfterMs) {
		t.Errorf("at the bound: chosen %d, refusal %+v", d.Chosen, d.Refusal)
	}
	full.TenantBarred = "tenant b may not use pool p"
	if d := place(t, full, idleFleet(2)); d.Refusal.Reason != RefusedNoneEligible {
		t.Errorf("barred and at the bound: refusal %+v", d.Refusal)
	}
}

func TestPulls(t *testing.T) {
	var p Pulls
	ab, ac := Pair{"a", "b"}, Pair{"a", "c"}
	p.Begin(0, 100, ab, "rack")
	p.Begin(0, 300, ac, "zone")
	p.Begin(10, 5, ab, "rack") // over before it began
	for _, at := range []struct {
		ms            float64
		rack, zone, a int
	}{{50, 1, 1, 2}, {100, 0, 1, 1}, {300, 0, 0, 0}} {
		if r, z, a := p.UnderWay(at.ms, "rack"), p.UnderWay(at.ms, "zone"), p.Sending(at.ms, "a"); r != at.rack || z != at.zone || a != at.a {
			t.Errorf("at %v: %d on the rack, %d on the zone, %d sent by a", at.ms, r, z, a)
		}
	}
	if len(p.links) != 0 || len(p.sending) != 0 {
		t.Errorf("left over: %v %v", p.links, p.sending)
	}
	// Three in a row switch a pair off, for ten minutes; one that worked wipes
	// the slate.
	for i, step := range []struct {
		ms                float64
		confirmed         bool
		switched, offThen bool
	}{
		{1, false, false, false},
		{2, false, false, false},
		{3, true, false, false},
		{4, false, false, false},
		{5, false, false, false},
		{6, false, true, true},
		{7, false, false, true},
		{PairOffMs + 8, false, false, true}, // tried again, and off again
		{PairOffMs + 9, true, true, false},
	} {
		if got := p.Outcome(step.ms, ab, step.confirmed); got != step.switched || p.Off(step.ms, ab) != step.offThen {
			t.Errorf("step %d: switched %v, off %v", i, got, p.Off(step.ms, ab))
		}
	}
	for range PairOffAfter {
		p.Outcome(10, ac, false)
	}
	if off := p.OffPairs(11); len(off) != 1 || off[ac] != PairOffAfter || p.Off(10+PairOffMs, ac) {
		t.Errorf("off pairs %v", off)
	}
	for i := range maxPairs + 50 {
		p.Outcome(float64(i), Pair{fmt.Sprint(i), "x"}, false)
		p.Begin(float64(i), 1e9, ab, "rack")
	}
	if len(p.pairs) > maxPairs || len(p.open) > maxOpenPulls {
		t.Errorf("%d pairs, %d pulls kept", len(p.pairs), len(p.open))
	}
}
