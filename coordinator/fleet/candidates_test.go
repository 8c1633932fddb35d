package fleet

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"waypost/coordinator/placement"
)

func TestCandidatesOfAPool(t *testing.T) {
	r := newRig(t, 0)
	other := hello("gpu-02", 1)
	other.Workers[0].Model = "other"
	r.open(0, hello("gpu-00", 2))
	r.open(0, other)
	names := func(pool string) string {
		t.Helper()
		candidates, _, err := r.f.Candidates(at(0), Query{Pool: pool}, nil)
		if err != nil {
			return err.Error()
		}
		var list []string
		for i := range candidates {
			list = append(list, candidates[i].Name)
			if candidates[i].MatchedTokens != 0 || !math.IsNaN(candidates[i].DistanceMs) {
				t.Errorf("%+v: a match or distance out of nowhere", candidates[i])
			}
		}
		return strings.Join(list, " ")
	}
	if got := names("m"); got != "gpu-00/vllm-8000/0 gpu-00/vllm-8001/0" {
		t.Errorf("pool m: %s", got)
	}
	if got := names("other"); got != "gpu-02/vllm-8000/0" {
		t.Errorf("pool other: %s", got)
	}
	if got := names("x"); got != `unknown pool: "x"; the pools are: m, other` {
		t.Errorf("pool x: %s", got)
	}
	if got := names(""); got != "unknown pool: name one of: m, other" {
		t.Errorf("no name with two pools: %s", got)
	}
	// Intent renames; a declared pool exists without workers.
	r.f.SetIntent(at(1), Intent{Version: 1, Pools: []string{"spare"}, Assign: func(i Identity) Assignment {
		if i.Model == "other" {
			return Assignment{}
		}
		return Assignment{Pool: "big"}
	}})
	if got := names("big"); got != "gpu-00/vllm-8000/0 gpu-00/vllm-8001/0" {
		t.Errorf("pool big: %s", got)
	}
	if got := names("spare"); got != "" {
		t.Errorf("pool spare: %q", got)
	}
	if got := names("m"); !strings.Contains(got, "big, spare") {
		t.Errorf("pool m after the change: %s", got)
	}
	r.f.SetIntent(at(2), Intent{Version: 2, Assign: func(Identity) Assignment { return Assignment{Pool: "big"} }})
	if got, err := r.f.PoolName(""); err != nil || got != "big" {
		t.Errorf("the only pool is %q, %v", got, err)
	}
	if _, err := r.f.PoolName("spare"); !errors.Is(err, ErrUnknownPool) {
		t.Errorf("a pool declared no more: %v", err)
	}
}

func TestWays(t *testing.T) {
	r := newRig(t, 2)
	asked := 0
	way := func(zone string, to Identity) Way {
		asked++
		switch {
		case zone == "":
			return Way{RoundTripMs: math.NaN()}
		case zone == to.ZoneHint:
			return Way{RoundTripMs: .2}
		}
		return Way{RoundTripMs: 24, SurchargeMs: 15}
	}
	r.f.SetIntent(at(0), Intent{Version: 1, Way: way})
	distance := func(zone string) (ms, surcharge float64) {
		t.Helper()
		candidates, _, err := r.f.Candidates(at(0), Query{CallerZone: zone}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return candidates[0].DistanceMs, candidates[0].SurchargeMs
	}
	for range 3 {
		if ms, surcharge := distance("b"); ms != 24 || surcharge != 15 {
			t.Errorf("distance %v + %v", ms, surcharge)
		}
	}
	if asked != 2 {
		t.Errorf("the way was asked for %d times for two workers", asked)
	}
	if ms, _ := distance(""); !math.IsNaN(ms) {
		t.Errorf("distance %v from nowhere", ms)
	}
	h := hello("gpu-05", 1)
	h.ZoneHint = "b"
	r.open(10, h)
	candidates, _, _ := r.f.Candidates(at(10), Query{CallerZone: "b"}, nil)
	if got := candidates[2].DistanceMs; got != .2 {
		t.Errorf("distance %v to a worker that came later", got)
	}
	for i := range 1000 {
		distance(fmt.Sprint("zone-", i))
	}
	if len(r.f.ways) > maxCallerZones {
		t.Errorf("ways from %d zones are kept", len(r.f.ways))
	}
}

func TestSituation(t *testing.T) {
	r := newRig(t, 2)
	_, sit, _ := r.f.Candidates(at(5), Query{}, nil)
	if !math.IsNaN(sit.ArrivalsPerMs) || !math.IsNaN(sit.MeanOutputTokens) || sit.NowMs != 5 {
		t.Errorf("before anything: %+v", sit)
	}
	r.loadAll(10)
	for i := range 400 { // 20 per second for 20 s
		r.claim(10+float64(i)*50, fmt.Sprint("r", i), worker0, 10)
	}
	_, sit, _ = r.f.Candidates(at(20_000), Query{}, nil)
	if got := sit.ArrivalsPerMs * 1000 * 2; got < 18 || got > 22 {
		t.Errorf("%v arrivals per second and worker, want 10", got/2)
	}
	if sit.MeanOutputTokens != 100 {
		t.Errorf("mean output %v", sit.MeanOutputTokens)
	}
	_, sit, _ = r.f.Candidates(at(90_000), Query{}, nil)
	if got := sit.ArrivalsPerMs * 1000; got > .1 {
		t.Errorf("%v arrivals per second a minute after the last", got)
	}
}

// One worker of ten whose load cannot be read gets no more than its share.
func TestUnreadableWorkerIsNoMagnet(t *testing.T) {
	r := newRig(t, 10)
	counts := map[string]int{}
	for i := range 300 {
		ms := 1000 + float64(i)*30
		for host := range r.lanes {
			l := idle(1000)
			l.QueueMs, l.Live = ptr(250.0), ptr(uint32(5))
			if host == "gpu-03" {
				l.QueueMs, l.Live, l.Decoding, l.ContextTokens, l.HeldBlocks, l.CountersAgeMs = nil, nil, nil, nil, nil, nil
			}
			r.load(ms, host, l)
		}
		counts[r.place(ms, fmt.Sprint("r", i), 200)]++
	}
	if got := counts["gpu-03/vllm-8000/0"]; got > 30 {
		t.Errorf("it got %d of 300", got)
	}
}

func benchFleet(b *testing.B, hosts int) *rig {
	r := newRig(b, hosts)
	r.f.SetIntent(at(0), Intent{Version: 1, Way: func(string, Identity) Way { return Way{RoundTripMs: .3} }})
	r.loadAll(0)
	return r
}

func benchmarkCandidates(b *testing.B, n int) {
	r := benchFleet(b, n)
	now := at(100)
	var dst []placement.Candidate
	b.ReportAllocs()
	for b.Loop() {
		dst, _, _ = r.f.Candidates(now, Query{CallerZone: "a"}, dst[:0])
	}
}

func BenchmarkCandidates100(b *testing.B)  { benchmarkCandidates(b, 100) }
func BenchmarkCandidates1000(b *testing.B) { benchmarkCandidates(b, 1000) }

func TestCandidatesDoNotAllocate(t *testing.T) {
	r := newRig(t, 100)
	r.f.SetIntent(at(0), Intent{Version: 1, Way: func(string, Identity) Way { return Way{RoundTripMs: .3} }})
	dst, _, _ := r.f.Candidates(at(1), Query{CallerZone: "a"}, nil)
	now := at(2)
	if got := testing.AllocsPerRun(100, func() { dst, _, _ = r.f.Candidates(now, Query{CallerZone: "a"}, dst[:0]) }); got != 0 {
		t.Errorf("%v allocations", got)
	}
}

// BenchmarkClaim makes and ends a claim beside 64 others on the worker.
func BenchmarkClaim(b *testing.B) {
	r := benchFleet(b, 1)
	for i := range 64 {
		r.claim(1, fmt.Sprint("r", i), worker0, 500)
	}
	n := 0
	b.ReportAllocs()
	for b.Loop() {
		n++
		id := fmt.Sprint("x", n)
		r.claim(2, id, worker0, 500)
		if _, err := r.f.Mark(at(3), "pl_"+id, "done", 1); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkLoad takes the report of a host with one worker and 64 claims.
func BenchmarkLoad(b *testing.B) {
	r := benchFleet(b, 1)
	for i := range 64 {
		r.claim(1, fmt.Sprint("r", i), worker0, 500)
	}
	l := idle(1000)
	b.ReportAllocs()
	for b.Loop() {
		r.load(2, "gpu-00", l)
	}
}
