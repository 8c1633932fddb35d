package fleet

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
)

// boardFault says how the boards that are searched differ from the workers;
// empty: they do not.
func boardFault(f *Fleet) string {
	for name, p := range f.pools {
		if p.board.Len() != len(p.workers) {
			return fmt.Sprintf("pool %s: %d workers on the board, %d in the pool", name, p.board.Len(), len(p.workers))
		}
		for _, w := range p.board.Workers() {
			if own := f.worker(w.ID); own == nil || own.snapshot != w {
				return fmt.Sprintf("pool %s: the board has another snapshot of %s", name, w.Name)
			}
		}
	}
	return ""
}

// Whatever happens to a large fleet, deciding by its board is deciding over
// its candidates.
func TestDecideSearchesTheFleet(t *testing.T) {
	const hosts = 90
	r := newRig(t, hosts)
	random := rand.New(rand.NewPCG(5, 6))
	r.f.SetIntent(at(0), Intent{
		Version: 1,
		Assign: func(i Identity) Assignment {
			return Assignment{Pool: "m", Cordoned: i.Host == "gpu-07" || i.Host == "gpu-11", Why: "by anna: fans"}
		},
		Way: func(zone string, to Identity) Way { return Way{RoundTripMs: float64(len(to.Host) % 3)} },
	})
	ms, searched := 0.0, 0
	for i := range 300 {
		ms += 20 * random.Float64()
		host := fmt.Sprintf("gpu-%02d", random.IntN(hosts))
		switch random.IntN(8) {
		case 0:
			r.f.CloseLane(at(ms), host, r.lanes[host])
		case 1:
			h := hello(host, 1)
			h.Session = uint64(1000 + i)
			r.open(ms, h)
		default:
			l := idle(1000)
			l.QueueMs, l.Live = ptr(random.ExpFloat64()*300), ptr(uint32(random.IntN(20)))
			if lane := r.lanes[host]; r.f.hosts[host].lane == lane {
				r.load(ms, host, l)
			}
		}
		req := placement.Request{ID: fmt.Sprint("r", i), Pool: "m", PromptTokens: 1 + random.IntN(9000)}
		var matches placement.Matches
		for id := range WorkerID(hosts) {
			if random.IntN(5) == 0 {
				matches.Add(id, placement.Held{Tokens: random.Int32N(9000), Predicted: true})
			}
		}
		policy := placement.DefaultPolicy()
		ask := &Ask{Query: Query{Pool: "m", CallerZone: "a"}, Request: &req, Policy: &policy, Matches: matches}
		var d, full placement.Decision
		chosen, sit, err := r.f.Decide(at(ms), ask, nil, &d)
		if err != nil {
			t.Fatal(err)
		}
		all, _, err := r.f.Candidates(at(ms), ask.Query, nil)
		if err != nil {
			t.Fatal(err)
		}
		for id, held := range matches.All() {
			i := slices.IndexFunc(all, func(c placement.Candidate) bool { return c.ID == id })
			all[i].MatchedTokens, all[i].Predicted = int(held.Tokens), held.Predicted
		}
		if err := placement.Decide(&req, all, &policy, sit, &full); err != nil {
			t.Fatal(err)
		}
		if (d.Chosen < 0) != (full.Chosen < 0) || d.Chosen >= 0 && (chosen[d.Chosen].Name != all[full.Chosen].Name || d.FirstTokenMs != full.FirstTokenMs) {
			t.Fatalf("step %d: board and candidates differ: %d of %d priced", i, len(chosen), len(all))
		}
		if d.Chosen < 0 {
			t.Fatalf("step %d: refused: %s", i, d.RefusalDetail(chosen))
		}
		if len(chosen) < len(all) {
			searched++
		}
		w := chosen[d.Chosen]
		if _, _, _, err := r.f.Claim(at(ms), NewClaim{
			Key: RequestKey{ID: req.ID}, Attempt: 1, Placement: req.ID, Worker: w.ID,
			Claim: ledger.Claim{EngineProcess: w.Process, PromptTokens: req.PromptTokens, UncachedTokens: d.Terms[d.Chosen].UncachedTokens},
		}); err != nil {
			t.Fatal(err)
		}
		if fault := boardFault(r.f); fault != "" {
			t.Fatalf("step %d: %s", i, fault)
		}
	}
	if searched < 150 {
		t.Errorf("only %d of 300 decisions were searches", searched)
	}
}

// Sources of a pull come from the matches, and their ways from the caller.
func TestDecidePulls(t *testing.T) {
	r := newRig(t, 0)
	for i := range 3 {
		h := hello(fmt.Sprintf("gpu-%02d", i), 1)
		h.Workers[0].Transfer = &placement.Transfer{Connector: "nixl", SideChannel: "10.0.0.1:5600", Fingerprint: "f", ExportedTier: placement.TierGPU, BytesPerToken: 262_144}
		r.open(0, h)
		r.load(1, h.Host, idle(1000))
	}
	busy := idle(1000)
	busy.QueueMs = ptr(2000.0)
	r.load(2, "gpu-01", busy)
	policy := placement.DefaultPolicy()
	req := placement.Request{ID: "r", PromptTokens: 8192}
	ask := &Ask{
		Request: &req, Policy: &policy,
		Path: func(from, to *placement.Worker) placement.Path {
			if from.Name != "gpu-01/vllm-8000/0" {
				t.Errorf("asked for the way from %s", from.Name)
			}
			return placement.Path{Link: "rack", BytesPerMs: 12.5e6, Figure: placement.FigureMeasured, Never: to.ID == 0}
		},
		Sending: func(*placement.Worker) int { return 0 },
	}
	ask.Matches.Add(1, placement.Held{Tokens: 8192, GPUTokens: 8192, Predicted: true})
	var d placement.Decision
	candidates, _, err := r.f.Decide(at(3), ask, nil, &d)
	if err != nil {
		t.Fatal(err)
	}
	if c := candidates[d.Chosen]; c.ID != 2 || d.Terms[d.Chosen].Pull.Note != placement.PullTaken {
		t.Errorf("chose %s, %v: want the idle worker that may pull", c.Name, d.Terms[d.Chosen].Pull)
	}
	h := hello("gpu-05", 1)
	h.Workers[0].Transfer = &placement.Transfer{ExportedTier: "tape"}
	if _, _, err := r.f.OpenLane(at(4), h); err == nil {
		t.Error("an unknown tier was taken")
	} else if want := `bad hello: workers[0].transfer: exportedTier: "tape" is not gpu or host; leave it out if it exports nothing`; err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
}
