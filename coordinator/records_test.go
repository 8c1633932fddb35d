package coordinator

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/explain"
	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// A disk that cannot be used costs no placement: records are in memory, and
// status and metrics say so.
func TestUnusableDiskIsToldAndPlacementsGoOn(t *testing.T) {
	c := startOne(t, func(cfg *Config) {
		if err := os.MkdirAll(cfg.StateDir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(cfg.StateDir, "explain"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	})
	(&fakeAgent{workers: 2}).start(t, c)
	id := c.placeSome(t)
	rec, err := c.placements.GetPlacement(t.Context(), &waypostv1.GetPlacementRequest{PlacementId: &id})
	if err != nil || len(rec.GetRecord().GetPlacement().GetTerms()) != 2 {
		t.Fatalf("%v, %v", rec, err)
	}
	st, err := c.operators.GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	told := false
	for _, p := range st.GetProblems() {
		told = told || p.GetSubject() == "decision records" && strings.Contains(p.GetWhat(), "memory only")
	}
	if !told {
		t.Errorf("status says nothing of it: %v", st.GetProblems())
	}
	families, err := c.opt.Gatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	failed := -1.0
	for _, f := range families {
		if f.GetName() == "waypost_explain_disk_failed" {
			failed = f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	if failed != 1 {
		t.Errorf("waypost_explain_disk_failed is %v", failed)
	}
}

// placeSome waits until a request can be placed and returns the placement's id.
func (c *one) placeSome(t *testing.T) (id string) {
	t.Helper()
	eventually(t, "a placement", func() bool {
		resp, err := c.placements.Place(t.Context(), &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: []uint32{1, 2, 3, 4, 5}}})
		id = resp.GetPlacement().GetPlacementId()
		return err == nil && id != ""
	})
	return id
}

func TestQuestionsAboutRecordsNameBadFields(t *testing.T) {
	c := startOne(t)
	(&fakeAgent{workers: 2}).start(t, c)
	c.placeSome(t)
	list := func(req *waypostv1.ListPlacementsRequest) error {
		_, err := c.placements.ListPlacements(t.Context(), req)
		return err
	}
	for field, err := range map[string]error{
		"limit":       list(&waypostv1.ListPlacementsRequest{Limit: proto.Uint32(0)}),
		"reuse_class": list(&waypostv1.ListPlacementsRequest{ReuseClass: proto.String("warm")}),
		"since_ms":    list(&waypostv1.ListPlacementsRequest{SinceMs: proto.Float64(-1)}),
	} {
		if status.Code(err) != codes.InvalidArgument || api.FieldOf(err) != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	if err := list(&waypostv1.ListPlacementsRequest{Limit: proto.Uint32(1001)}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("limit 1001: %v", err)
	}
	if _, err := c.placements.SummarizePlacements(t.Context(), &waypostv1.SummarizePlacementsRequest{SinceMs: proto.Float64(0)}); api.FieldOf(err) != "since_ms" {
		t.Errorf("summary since 0: %v", err)
	}
	if _, err := c.operators.GetReuse(t.Context(), &waypostv1.GetReuseRequest{SinceMs: proto.Float64(1e13)}); api.FieldOf(err) != "since_ms" {
		t.Errorf("reuse since long ago: %v", err)
	}
	if _, err := c.operators.ExplainWorker(t.Context(), &waypostv1.ExplainWorkerRequest{Worker: proto.String("nobody")}); status.Code(err) != codes.NotFound || api.FieldOf(err) != "worker" {
		t.Errorf("why nobody: %v", err)
	}
	why, err := c.operators.ExplainWorker(t.Context(), &waypostv1.ExplainWorkerRequest{Worker: proto.String("gpu-01/vllm-8000/0")})
	if err != nil || why.GetConsidered() == 0 || why.GetEvenShare() != .5 || why.GetSinceMs() != 600_000 {
		t.Errorf("why: %v, %v", why, err)
	}
}

// Above the bound of the search decisions price only workers that may win. One
// that is never priced is told so, and what it would cost now.
func TestWhyOfAWorkerThatIsNotPriced(t *testing.T) {
	c := startOne(t)
	const workers = placement.SearchAbove + 16
	(&fakeAgent{workers: workers, state: func(i int, l *ledger.Load) {
		l.QueueMs, l.Live, l.Decoding, l.QueueBasis = new(1000*float64(i)), new(uint32(i)), new(uint32(i)), ledger.BasisEvidence
	}}).start(t, c)
	eventually(t, "all workers", func() bool {
		ready := 0
		for _, w := range c.fleet.Workers(time.Now()) {
			if w.State == "ready" && w.Snapshot.QueueKnown {
				ready++
			}
		}
		return ready == workers
	})
	id := c.placeSome(t)
	e, ok := c.records.Get(id)
	if !ok || e.Record.Survey.Unpriced == 0 || e.Record.Survey.Candidates != workers {
		t.Fatalf("%d candidates, %d not priced", e.Record.Survey.Candidates, e.Record.Survey.Unpriced)
	}
	rec, err := c.placements.GetPlacement(t.Context(), &waypostv1.GetPlacementRequest{PlacementId: &id})
	if b := rec.GetRecord().GetPlacement().GetBasis(); err != nil || int(b.GetUnpricedWorkers()) != e.Record.Survey.Unpriced {
		t.Errorf("%v, %v", b, err)
	}
	for _, w := range c.fleet.Workers(time.Now()) {
		if explain.Lists(e, w.Name) {
			continue
		}
		why, err := c.operators.ExplainWorker(t.Context(), &waypostv1.ExplainWorkerRequest{Worker: &w.Name})
		if err != nil || why.GetConsidered() == 0 || why.GetLostBy()["not_priced"] == 0 || why.GetChosen()+why.GetLostBy()["not_priced"] > why.GetConsidered() {
			t.Fatalf("%v, %v", why, err)
		}
		p := why.GetPresent()
		if p.GetPlacementId() != id || p.GetTerms().GetWorker() != w.Name || p.GetTerms().TotalMs == nil || p.GetChosen() == nil || p.GetLostBy() == "" {
			t.Errorf("now: %v", p)
		}
		chosen, err := c.operators.ExplainWorker(t.Context(), &waypostv1.ExplainWorkerRequest{Worker: &e.Worker})
		if err != nil || chosen.Present != nil {
			t.Errorf("the chosen was priced: %v, %v", chosen, err)
		}
		return
	}
	t.Fatal("all are listed")
}

// A request that nobody was named for is explained as well: by its id, by the
// request's, in the summary and as it comes. A question that reserves nothing is
// not kept.
func TestRefusalsAreExplained(t *testing.T) {
	o := startOne(t)
	joined(t, o)
	client := waypostv1.NewPlacementServiceClient(o.conn)
	ask := &waypostv1.PlaceRequest{RequestId: new("late"), Input: &waypostv1.Input{TokenIds: ascending(2000)}, FirstTokenBudgetMs: new(.001), IfInfeasible: new("reject")}
	resp, err := client.Place(t.Context(), ask)
	id := resp.GetRefused().GetPlacementId()
	if err != nil || resp.GetRefused().GetReason() != "deadline_impossible" || id == "" {
		t.Fatalf("%v, %v", resp, err)
	}
	dry := proto.CloneOf(ask)
	dry.RequestId, dry.Reserve = new("dry"), proto.Bool(false)
	if resp, err := client.Place(t.Context(), dry); err != nil || resp.GetRefused() == nil || resp.GetRefused().PlacementId != nil {
		t.Errorf("a question: %v, %v", resp, err)
	}
	got, err := client.GetPlacement(t.Context(), &waypostv1.GetPlacementRequest{PlacementId: &id})
	r := got.GetRecord()
	if err != nil || r.GetRequestId() != "late" || r.GetPlacement().GetWorker() != nil || r.GetRefusal().GetReason() != "deadline_impossible" || r.GetRefusal().GetDetail() != resp.GetRefused().GetDetail() ||
		r.GetRefusal().GetPlacementId() != id || len(r.GetPlacement().GetTerms()) == 0 || r.GetPlacement().GetTerms()[0].GetPassedOver() != "misses the first-token budget" {
		t.Errorf("explained by %v, %v", r, err)
	}
	list, err := client.ListPlacements(t.Context(), &waypostv1.ListPlacementsRequest{RequestId: new("late")})
	if err != nil || len(list.GetRecords()) != 1 || list.GetRecords()[0].GetRefusal().GetReason() != "deadline_impossible" {
		t.Errorf("by request: %v, %v", list, err)
	}
	if list, err = client.ListPlacements(t.Context(), &waypostv1.ListPlacementsRequest{RequestId: new("dry")}); err != nil || len(list.GetRecords()) != 0 {
		t.Errorf("the question is kept: %v, %v", list, err)
	}
	sum, err := client.SummarizePlacements(t.Context(), &waypostv1.SummarizePlacementsRequest{})
	if err != nil || len(sum.GetPools()) != 1 || sum.GetPools()[0].GetPlaced() != 0 || sum.GetPools()[0].GetRefused()["deadline_impossible"] != 1 {
		t.Errorf("summary %v, %v", sum, err)
	}
	out, err := client.ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{PlacementId: &id, Result: new("done")})
	if err != nil || out.GetJoined() {
		t.Errorf("an outcome of it: %v, %v", out, err)
	}
}

// What is remembered of placements is bounded, and what has its class is
// forgotten.
func TestRememberedPlacementsAreBounded(t *testing.T) {
	c := startOne(t)
	(&fakeAgent{workers: 1}).start(t, c)
	c.placeSome(t)
	for range 200 {
		id := c.placeSome(t)
		_, err := c.placements.ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{PlacementId: &id, Result: proto.String("done"), CachedTokens: proto.Uint32(0)})
		if err != nil {
			t.Fatal(err)
		}
	}
	c.cases.mu.Lock()
	defer c.cases.mu.Unlock()
	if open := len(c.cases.open); open > 2 {
		t.Errorf("%d placements with a final class are remembered", open)
	}
}
