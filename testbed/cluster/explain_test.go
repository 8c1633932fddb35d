package cluster

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// record asks one coordinator for a placement.
func (r *rig) record(coordinator int, id string) (*waypostv1.PlacementRecord, error) {
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	resp, err := r.Placement(coordinator).GetPlacement(ctx, &waypostv1.GetPlacementRequest{PlacementId: &id})
	return resp.GetRecord(), err
}

// TestRecordsAreReadFromAnyCoordinator places on one coordinator and asks the
// others; then the one restarts, and last it is gone.
func TestRecordsAreReadFromAnyCoordinator(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 3, emulator.Options{})
	secret := uint32(77_777)
	a := ask{tokens: append(tokens(3, 600), secret, secret, secret), output: 3, id: "chat-1"}
	s := r.serve(1, a)
	id := s.placement.GetPlacementId()
	for c := range 3 {
		rec, err := r.record(c, id)
		if err != nil || rec.GetRequestId() != "chat-1" || len(rec.GetPlacement().GetTerms()) != 2 || rec.GetOutcome() == nil {
			t.Fatalf("coordinator %d: %v, %v", c, rec, err)
		}
		list, err := r.Placement(c).ListPlacements(t.Context(), &waypostv1.ListPlacementsRequest{RequestId: proto.String("chat-1")})
		if err != nil || len(list.GetRecords()) != 1 || list.GetRecords()[0].GetCoordinator() != CoordinatorName(1) || len(list.GetSilent()) != 0 {
			t.Errorf("by request at coordinator %d: %v, %v", c, list, err)
		}
	}
	local, err := r.Placement(0).ListPlacements(t.Context(), &waypostv1.ListPlacementsRequest{RequestId: proto.String("chat-1"), Local: proto.Bool(true)})
	if err != nil || len(local.GetRecords()) != 0 {
		t.Errorf("another coordinator's record is kept here: %v, %v", local, err)
	}
	for i := range 5 {
		r.serve(i%3, ask{tokens: tokens(uint32(50+i), 200)})
	}
	sum, err := r.Placement(2).SummarizePlacements(t.Context(), &waypostv1.SummarizePlacementsRequest{})
	if err != nil || len(sum.GetPools()) != 1 || sum.GetPools()[0].GetPlaced() != 6 {
		t.Errorf("summary over all: %v, %v", sum, err)
	}
	reuse, err := r.Operator(2).GetReuse(t.Context(), &waypostv1.GetReuseRequest{})
	if err != nil || len(reuse.GetPools()) != 1 || reuse.GetPools()[0].GetOutcomes() != 6 || reuse.GetPools()[0].GetPromptTokens() != 603+5*200 {
		t.Errorf("reuse over all: %v, %v", reuse, err)
	}
	worker := s.placement.GetWorker().GetName()
	why, err := r.Operator(0).ExplainWorker(t.Context(), &waypostv1.ExplainWorkerRequest{Worker: &worker})
	if err != nil || why.GetConsidered() != 6 || why.GetEvenShare() != .5 {
		t.Errorf("why: %v, %v", why, err)
	}

	before, err := r.record(1, id)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.StopCoordinator(1); err != nil {
		t.Fatal(err)
	}
	if _, err := r.record(0, id); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), CoordinatorName(1)) {
		t.Errorf("the record's coordinator is down: %v", err)
	}
	list, err := r.Placement(0).ListPlacements(t.Context(), &waypostv1.ListPlacementsRequest{})
	if err != nil || len(list.GetSilent()) != 1 || !strings.HasPrefix(list.GetSilent()[0], CoordinatorName(1)) {
		t.Errorf("who is silent is not named: %v, %v", list.GetSilent(), err)
	}
	noTokensOnDisk(t, filepath.Join(r.opt.Dir, CoordinatorName(1)), secret)
	if err := r.StartCoordinator(1); err != nil {
		t.Fatal(err)
	}
	r.eventually("the record is not back after a restart", func() string {
		after, err := r.record(2, id)
		if err != nil {
			return err.Error()
		}
		after.AgeMs, before.AgeMs = nil, nil
		if !proto.Equal(before, after) {
			return fmt.Sprintf("was %v, is %v", before, after)
		}
		return ""
	})
}

// noTokensOnDisk looks for three token ids in a row in every form that a
// program would write them in.
func noTokensOnDisk(t *testing.T, dir string, id uint32) {
	t.Helper()
	le := []byte{byte(id), byte(id >> 8), byte(id >> 16), byte(id >> 24)}
	forms := []string{strings.Repeat(string(le), 2), fmt.Sprintf("%d,%d", id, id), fmt.Sprintf("%d, %d", id, id), fmt.Sprintf("%d %d", id, id)}
	files := 0
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		files++
		for _, f := range forms {
			if strings.Contains(string(b), f) {
				t.Errorf("%s holds token ids", path)
			}
		}
		return err
	})
	if err != nil || files < 2 {
		t.Fatalf("%d files, %v", files, err)
	}
}

// TestLiveStream follows decisions and outcomes as they come.
func TestLiveStream(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{})
	stream, err := r.Placement(0).WatchPlacements(t.Context(), &waypostv1.WatchPlacementsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	// The stream is up once the first event comes; until then placements are
	// made that it may miss.
	first := make(chan *waypostv1.WatchPlacementsResponse, 1)
	go func() {
		e, err := stream.Recv()
		if err == nil {
			first <- e
		}
	}()
	for i := 0; ; i++ {
		s := r.serve(0, ask{tokens: tokens(uint32(10+i), 100)})
		select {
		case e := <-first:
			if e.GetRecord().GetPlacement().GetPlacementId() == "" || len(e.GetRecord().GetPlacement().GetTerms()) > 0 {
				t.Errorf("first event %v", e)
			}
		case <-time.After(100 * time.Millisecond):
			continue
		}
		s = r.serve(0, ask{tokens: tokens(5000, 100)})
		kinds := ""
		for kinds != "placed outcome " {
			e, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if e.GetRecord().GetPlacement().GetPlacementId() == s.placement.GetPlacementId() {
				kinds += e.GetKind() + " "
			}
		}
		return
	}
}

// TestUnreportedPlacementsAreJoinedByTheAgent serves requests whose caller
// never reports: the agent says what was reused.
func TestUnreportedPlacementsAreJoinedByTheAgent(t *testing.T) {
	t.Parallel()
	const block = 16
	r := start(t, 1, 1, emulator.Options{BlockTokens: block}, func(o *Options) { o.Reservation = time.Second })
	a := ask{tokens: tokens(3, 640)}
	r.warm(a)
	// What the request stores comes long after its decision.
	if err := r.Engines[0].Slow(100); err != nil {
		t.Fatal(err)
	}
	longer := ask{tokens: append(append([]uint32(nil), a.tokens...), tokens(9, 320)...)}
	p, err := r.place(0, longer)
	if err != nil {
		t.Fatal(err)
	}
	cached, _, err := r.send(p, longer)
	if err != nil || cached != 640 {
		t.Fatalf("reused %d, %v", cached, err)
	}
	never, err := r.place(0, ask{tokens: tokens(77, 300)})
	if err != nil {
		t.Fatal(err)
	}
	if class := r.class(0, p.GetPlacementId()); class != "as_predicted" {
		t.Errorf("class %s", class)
	}
	rec, err := r.record(0, p.GetPlacementId())
	if err != nil || rec.GetOutcomeSource() != "agent" || rec.GetOutcome().GetCachedTokens() != 640 {
		t.Errorf("record %v, %v", rec, err)
	}
	if class := r.class(0, never.GetPlacementId()); class != "not_reported" {
		t.Errorf("a request that was never sent: %s", class)
	}
	// The caller knows better, however late it says so.
	r.report(0, p, longer, 624)
	if rec, err = r.record(0, p.GetPlacementId()); err != nil || rec.GetOutcomeSource() != "caller" || rec.GetOutcome().GetCachedTokens() != 624 {
		t.Errorf("after the caller's report: %v, %v", rec.GetOutcome(), err)
	}
}

// TestDistrustedViewIsReadAgain lets a worker's predictions go wrong without a
// word from its engine: the view is asked for anew, at a bounded rate, trust
// falls, and why says so.
func TestDistrustedViewIsReadAgain(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{})
	w := WorkerName(0, 0)
	for i := range 8 {
		r.warm(ask{tokens: tokens(uint32(100+i), causePrompt)})
	}
	if _, err := r.Engines[0].EvictSilently(0, 1_000_000); err != nil {
		t.Fatal(err)
	}
	for i := range 8 {
		r.serve(0, ask{tokens: tokens(uint32(100+i), causePrompt)})
	}
	r.eventually("nothing was learnt", func() string {
		why, err := r.Operator(0).ExplainWorker(t.Context(), &waypostv1.ExplainWorkerRequest{Worker: &w})
		if err != nil {
			return err.Error()
		}
		l := why.GetWorker().GetLearnt()
		if l.GetResyncs() != 1 || l.GetOutcomes() < 3 || why.GetWorker().Trust == nil || !(why.GetWorker().GetTrust() < .75) || l.GetBreaker() != "closed" {
			return fmt.Sprint(why.GetWorker())
		}
		return ""
	})
	resp, err := r.client.Get("http://" + r.API(0) + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || !strings.Contains(string(b), `waypost_prefix_pulls_total{reason="distrust",source="agent"} 1`) {
		t.Errorf("the view was not asked for anew once: %v", err)
	}
	// What is read again is a live view, and true.
	if err := r.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestFailFastWorkerIsNoMagnet lets one of two workers fail all it is given at
// once: it goes out, gets a single probe, and comes back when it serves.
func TestFailFastWorkerIsNoMagnet(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 1, emulator.Options{})
	bad := WorkerName(0, 0)
	fail := func(p *waypostv1.Placement, class string) {
		t.Helper()
		_, err := r.Placement(0).ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: proto.String("failed"), ErrorClass: &class})
		if err != nil {
			t.Fatal(err)
		}
	}
	onBad := func(n int, class string) (got int) {
		for i := range n {
			p, err := r.place(0, ask{tokens: tokens(uint32(1000+i), 64)})
			if err != nil {
				t.Fatal(err)
			}
			if p.GetWorker().GetName() == bad {
				got++
				fail(p, class)
				continue
			}
			if _, err := r.Placement(0).ReleasePlacement(t.Context(), &waypostv1.ReleasePlacementRequest{PlacementId: p.PlacementId}); err != nil {
				t.Fatal(err)
			}
		}
		return got
	}
	// Mistakes of clients and overload are not its fault.
	// How many either is given depends on what both are believed to have to do.
	got := 0
	r.eventually("nothing is placed on a worker that clients use wrongly", func() string {
		if got += onBad(20, "client"); got < 10 {
			return fmt.Sprintf("%d placements", got)
		}
		return ""
	})
	if w := r.worker(0, bad); w.GetState() != "ready" {
		t.Fatalf("client errors make it %s", w.GetState())
	}
	got = 0
	r.eventually("its failures do not take it out", func() string {
		got += onBad(20, "worker")
		if w := r.worker(0, bad); w.GetState() != "failing" || w.GetLearnt().GetBreaker() != "open" {
			return fmt.Sprintf("state %s, learnt %v", w.GetState(), w.GetLearnt())
		}
		return ""
	})
	if got != 5 {
		t.Errorf("%d placements on a worker that fails fast, want 5", got)
	}
	r.eventually("no probe comes due", func() string {
		if w := r.worker(0, bad); w.GetState() != "probing" {
			return "it is " + w.GetState()
		}
		return ""
	})
	// A probe that nobody hears of for 10 s is given up, and another one goes.
	const probeLife = 10 * time.Second
	began := time.Now()
	var probe *waypostv1.Placement
	for i := 0; probe == nil && i < 200; i++ {
		p, err := r.place(0, ask{tokens: tokens(uint32(3000+i), 64)})
		if err != nil {
			t.Fatal(err)
		}
		if p.GetWorker().GetName() == bad {
			probe = p
		} else {
			began = time.Now()
		}
	}
	if probe == nil {
		t.Fatal("the probe was never placed")
	}
	for i := range 40 {
		p, err := r.place(0, ask{tokens: tokens(uint32(5000+i), 64)})
		if err != nil {
			t.Fatal(err)
		}
		if time.Since(began) > probeLife {
			t.Logf("%d placements took longer than a probe lives: a busy machine", i+1)
			return
		}
		if p.GetWorker().GetName() == bad {
			t.Fatal("a second placement while the probe is under way")
		}
	}
	r.report(0, probe, ask{tokens: tokens(1, 64)}, 0)
	if w := r.worker(0, bad); w.GetState() != "ready" && time.Since(began) < probeLife {
		t.Errorf("after a served probe it is %s", w.GetState())
	}
}
