package coordinator

import (
	"fmt"
	"math"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// A dry run decides what was placed again under the file it would apply.
func TestDryRunTellsTheEffect(t *testing.T) {
	o := startOne(t)
	a := &fakeAgent{workers: 2}
	a.start(t, o)
	client := waypostv1.NewOperatorServiceClient(o.conn)
	diff := func(toml string) *waypostv1.FleetEffect {
		t.Helper()
		resp, err := client.PutFleet(t.Context(), &waypostv1.PutFleetRequest{Toml: &toml, DryRun: proto.Bool(true)})
		if err != nil {
			t.Fatal(err)
		}
		return resp.GetEffect()
	}
	if e := diff("version = 1"); e.GetDecided() != 0 || e.FirstTokenBeforeMs != nil || e.GetWindowMs() != 600_000 || e.GetAnsweredBy() != "c-1" {
		t.Errorf("nothing placed: %v", e)
	}
	eventually(t, "both workers are there and this coordinator has a number", func() bool {
		ready := 0
		for _, w := range o.fleet.Workers(time.Now()) {
			if w.State == "ready" {
				ready++
			}
		}
		return o.number.Load() != 0 && ready == 2
	})
	const n = 12
	on := map[string]uint32{}
	for i := range n {
		prompt := ascending(1000 + i)
		prompt[0] = uint32(1_000_000 + i) // nothing is shared, so nothing binds it to a worker
		p := o.place(t, &waypostv1.PlaceRequest{RequestId: new(fmt.Sprint("r", i)), Input: &waypostv1.Input{TokenIds: prompt}})
		on[p.GetWorker().GetName()]++
	}
	gone := on[firstWorker]
	if gone == 0 || gone == n {
		t.Fatalf("all on one worker: %v", on)
	}
	pool := "version = 1\n[[pool]]\nname = \"p\"\nmodel = \"" + testModel + "\"\n"
	for _, c := range []struct {
		name, toml          string
		changed, infeasible uint32
	}{
		{"nothing new", "version = 1", 0, 0},
		{"a name for the pool", pool, 0, 0},
		{"one worker leaves", pool + "workers = [\"gpu-01/vllm-8001\"]\n", gone, 0},
		{"only others may use it", pool + "tenants = [\"team-a\"]\n[[tenant]]\nname = \"team-a\"\n", 0, n},
		{"nobody stays in a zone", pool + "stay_in = \"zone\"\n", 0, n},
	} {
		e := diff(c.toml)
		if e.GetDecided() != n || e.GetLeftOut() != 0 || e.GetChanged() != c.changed || e.GetInfeasible() != c.infeasible {
			t.Errorf("%s: %v", c.name, e)
			continue
		}
		if want := min(int(c.changed+c.infeasible), worstTold); len(e.GetWorst()) != want {
			t.Errorf("%s: %d examples, want %d", c.name, len(e.GetWorst()), want)
		}
		for _, w := range e.GetWorst() {
			if c.infeasible > 0 && w.GetRefused() == "" || c.changed > 0 && (w.GetWorker() != firstWorker || w.GetNewWorker() != "gpu-01/vllm-8001/0" || w.GetPlacementId() == "") {
				t.Errorf("%s: example %v", c.name, w)
			}
		}
		if (e.FirstTokenBeforeMs == nil) != (c.infeasible == n) {
			t.Errorf("%s: first token %v", c.name, e)
		}
	}
}

// Links, limits, surcharges and preferences of the file reach a record; what
// was measured stays, and the record itself is not changed.
func TestRecordsUnderAFile(t *testing.T) {
	worker := func(id int, name string) *placement.Worker {
		w := workerNamed(fleet.WorkerID(id), name)
		prior := ledger.PriorFor(ledger.Class{Engine: "vllm", Model: testModel})
		w.BlockTokens, w.MaxModelTokens, w.Process = 16, 65_536, uint64(id)
		w.Steps = ledger.NewSteps(prior.Model, prior.StepTokens, prior.Model.DecodeMs(0, 0, 0))
		w.QueueKnown, w.LoadAtMs, w.Live, w.Decoding, w.ContextTokens, w.HeldBlocks = true, 1e6, 0, 0, 0, 0
		w.View = placement.View{Kind: placement.ViewLive, AtMs: 1e6, Trust: 1, EvictionAgeMs: math.NaN()}
		return w
	}
	source, near, far := worker(2, "gpu-02/v/0"), worker(1, "gpu-01/v/0"), worker(3, "gpu-03/v/0")
	fast := placement.Path{Link: "l", BytesPerMs: 12_500_000, Figure: placement.FigureDeclared}
	record := func() *placement.Record {
		return &placement.Record{
			Request:   placement.Request{ID: "r", Pool: "p", Tenant: "team-a", PromptTokens: 16_000, CallerZone: "a", ExcludeWorkers: []string{source.Name}},
			Policy:    placement.DefaultPolicy(),
			Situation: placement.Situation{NowMs: 1e6, ArrivalsPerMs: math.NaN(), MeanOutputTokens: 64, PolicyAgeMs: 1, Sources: []placement.Source{{Worker: source, Tokens: 15_984}}},
			Candidates: []placement.Candidate{
				{Worker: source, MatchedTokens: 15_984, Paths: []placement.Path{{}}},
				{Worker: near, Paths: []placement.Path{fast}},
				{Worker: far, Paths: []placement.Path{fast}, DistanceMs: 5},
			},
		}
	}
	models := map[string]string{near.Name: "m", far.Name: "m", source.Name: "m"}
	decide := func(toml string, r *placement.Record) (*placement.Decision, *placement.Record) {
		t.Helper()
		file, err := registry.ParseFleet("fleet.toml", toml)
		if err != nil {
			t.Fatal(err)
		}
		policy, err := policyOf(file)
		if err != nil {
			t.Fatal(err)
		}
		u := underFile{file: file, policy: policy, models: models}
		next := u.record(r)
		d := &placement.Decision{}
		if err := placement.Decide(&next.Request, next.Candidates, &next.Policy, next.Situation, d); err != nil {
			t.Fatal(err)
		}
		return d, &next
	}
	racks := "version = 1\n[[rack]]\nname = \"a1\"\nzone = \"a\"\nhosts = [\"gpu-0[1-2]\"]\n[[rack]]\nname = \"b1\"\nzone = \"b\"\nhosts = [\"gpu-03\"]\n[[zone]]\nname = \"a\"\n[[zone]]\nname = \"b\"\n"
	link := func(rest string) string {
		return racks + "[[link]]\nbetween = [\"rack:a1\", \"rack:a1\"]\nbandwidth = \"100Gbit/s\"\n" + rest
	}
	pool := "[[pool]]\nname = \"p\"\nmodel = \"m\"\n"
	for _, c := range []struct {
		name, toml string
		change     func(*placement.Record)
		chosen     int // -1: refused
		note       placement.PullNote
	}{
		{"a fast link pulls", link(pool), nil, 1, placement.PullTaken},
		{"a slow link does not pay", racks + pool, func(r *placement.Record) { r.Request.PromptTokens, r.Situation.Sources[0].Tokens = 2000, 1984 }, 1, placement.PullDearer},
		{"a forbidden link", link("transfer = \"never\"\n" + pool), nil, 1, placement.PullForbidden},
		{"a limit of the pool", link(pool + "max_transfer = \"5ms\"\n"), nil, 1, placement.PullTooLong},
		{"what was measured stays", racks + pool, func(r *placement.Record) {
			r.Candidates[1].Paths[0].Figure, r.Candidates[1].Paths[0].BytesPerMs = placement.FigureMeasured, 30_000_000
		}, 1, placement.PullTaken},
		{"a pair that is off stays off", link(pool), func(r *placement.Record) { r.Candidates[1].Paths[0].Off = true }, 1, placement.PullPairOff},
		{"it must stay in its zone", racks + pool + "stay_in = \"zone\"\n", func(r *placement.Record) { r.Request.CallerZone = "b" }, 2, placement.PullForbidden},
		{"another tenant's", racks + pool + "tenants = [\"team-b\"]\n[[tenant]]\nname = \"team-b\"\n", nil, -1, 0},
		{"a worker of another pool", racks + pool + "workers = [\"gpu-03/v\"]\n", nil, 2, placement.PullDearer},
	} {
		r := record()
		if c.change != nil {
			c.change(r)
		}
		before := fmt.Sprintf("%+v", r.Candidates[1].Paths)
		d, next := decide(c.toml, r)
		if d.Chosen != c.chosen || c.chosen >= 0 && d.Terms[d.Chosen].Pull.Note != c.note {
			note := placement.PullNone
			if d.Chosen >= 0 {
				note = d.Terms[d.Chosen].Pull.Note
			}
			t.Errorf("%s: chose %d with %q, want %d with %q; paths %+v", c.name, d.Chosen, note, c.chosen, c.note, next.Candidates[1].Paths)
		}
		if after := fmt.Sprintf("%+v", r.Candidates[1].Paths); after != before || r.Policy != placement.DefaultPolicy() {
			t.Errorf("%s: the record was changed: %s", c.name, after)
		}
	}
	// The preference is the file's, and an answer to an impossible budget is
	// only the request's if it asked for another one than the policy's.
	r := record()
	r.Policy.IfInfeasible, r.Request.IfInfeasible = placement.Reject, placement.Reject
	if _, next := decide("version = 1\n[policy]\nobjective = \"throughput\"\n", r); next.Policy.Theta != 20 || next.Request.IfInfeasible != "" {
		t.Errorf("theta %v, if infeasible %q", next.Policy.Theta, next.Request.IfInfeasible)
	}
	r.Request.IfInfeasible = placement.RetryAfter
	if _, next := decide("version = 1", r); next.Request.IfInfeasible != placement.RetryAfter {
		t.Errorf("the request's own wish became %q", next.Request.IfInfeasible)
	}
}
