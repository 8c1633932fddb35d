package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator"
	"waypost/coordinator/replica"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// leader is the index of the coordinator that leads, as another one sees it.
func (r *rig) leader() int {
	r.t.Helper()
	at := -1
	r.eventually("no leader", func() string {
		for i, co := range r.Coordinators {
			if co == nil {
				continue
			}
			resp, err := r.Operator(i).ListCoordinators(r.t.Context(), &waypostv1.ListCoordinatorsRequest{})
			if err != nil {
				continue
			}
			for j, m := range resp.GetCoordinators() {
				if m.GetRole() == "leader" && r.Coordinators[j] != nil {
					at = j
					return ""
				}
			}
		}
		return "none shown"
	})
	return at
}

func cordonOn(ctx context.Context, op waypostv1.OperatorServiceClient, selector, id string) (*waypostv1.CordonTargetResponse, error) {
	return op.CordonTarget(ctx, &waypostv1.CordonTargetRequest{Selector: &selector, Reason: proto.String("test"), RequestId: &id})
}

// whileNoLeader makes a change again while it is refused for want of a leader,
// as a machine that is busy may miss one that lives.
func (r *rig) whileNoLeader(change func() error) {
	r.t.Helper()
	r.eventually("no leader takes the change", func() string {
		err := change()
		if err == nil {
			return ""
		}
		if code := status.Code(err); code != codes.Unavailable && code != codes.DeadlineExceeded {
			r.t.Fatal(err)
		}
		return err.Error()
	})
}

// cordons are those that a coordinator knows, which may have started just now.
func (r *rig) cordons(i int) map[string]bool {
	r.t.Helper()
	var resp *waypostv1.GetStatusResponse
	r.eventually("no status", func() string {
		var err error
		if resp, err = r.Operator(i).GetStatus(r.t.Context(), &waypostv1.GetStatusRequest{}); err != nil {
			return err.Error()
		}
		return ""
	})
	out := map[string]bool{}
	for _, c := range resp.GetCordons() {
		out[c.GetSelector()] = true
	}
	return out
}

// TestLeaderDies kills the leader while writes and placements go on: every
// write that was answered is there afterwards, and the others' placements do
// not notice.
func TestLeaderDies(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 3, emulator.Options{BlockTokens: 16})
	dead := r.leader()
	var alive []int
	for i := range r.Coordinators {
		if i != dead {
			alive = append(alive, i)
		}
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	var committed []string
	placed, placeErrs := 0, []error(nil)
	wg.Go(func() { // writes through a follower
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			name := fmt.Sprintf("host-%03d", i)
			_, err := cordonOn(ctx, r.Operator(alive[0]), name, "w-"+name)
			cancel()
			if err == nil {
				mu.Lock()
				committed = append(committed, name)
				mu.Unlock()
			}
		}
	})
	for _, i := range alive {
		wg.Go(func() {
			for n := uint32(0); ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				resp, err := r.Placement(i).Place(ctx, &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: tokens(n, 64)}, Reserve: proto.Bool(false)})
				cancel()
				if err == nil && resp.GetPlacement() == nil {
					err = errors.New(resp.GetRefused().GetDetail())
				}
				mu.Lock()
				placed++
				if err != nil {
					placeErrs = append(placeErrs, err)
				}
				mu.Unlock()
				time.Sleep(2 * time.Millisecond)
			}
		})
	}
	enough := func(n int) {
		r.eventually("writes do not get through", func() string {
			mu.Lock()
			defer mu.Unlock()
			if len(committed) < n {
				return fmt.Sprintf("%d of %d", len(committed), n)
			}
			return ""
		})
	}
	enough(5)
	if err := r.StopCoordinator(dead); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	before := len(committed)
	mu.Unlock()
	enough(before + 5)
	close(stop)
	wg.Wait()
	if len(placeErrs) > 0 {
		t.Errorf("%d of %d placements failed, first: %v", len(placeErrs), placed, placeErrs[0])
	}
	for _, i := range alive {
		have := r.cordons(i)
		for _, name := range committed {
			if !have[name] {
				t.Errorf("%s lost the committed cordon of %s", CoordinatorName(i), name)
			}
		}
	}
	// The dead one comes back and catches up.
	if err := r.StartCoordinator(dead); err != nil {
		t.Fatal(err)
	}
	r.eventually("the restarted coordinator does not catch up", func() string {
		if have := r.cordons(dead); len(have) < len(committed) {
			return fmt.Sprintf("%d of %d cordons", len(have), len(committed))
		}
		return ""
	})
}

// TestNoPlacementAfterCordon: once cordon has returned, no coordinator that it
// lists names the worker any more. Once uncordon has returned, every coordinator
// that it lists has lifted it.
func TestNoPlacementAfterCordon(t *testing.T) {
	t.Parallel()
	r := start(t, 3, 3, emulator.Options{BlockTokens: 16})
	cordoned, lifted := 0, 0 // coordinators that were listed, of all rounds
	for round := range 6 {
		host := HostName(round % 3)
		var resp *waypostv1.CordonTargetResponse
		r.whileNoLeader(func() (err error) {
			resp, err = cordonOn(t.Context(), r.Operator(round%3), host, fmt.Sprintf("c-%d", round))
			return err
		})
		if len(resp.GetAppliedOn())+len(resp.GetPendingOn()) != 3 || len(resp.GetWorkers()) != 1 {
			t.Errorf("applied on %v, pending on %v, workers %v", resp.GetAppliedOn(), resp.GetPendingOn(), resp.GetWorkers())
		}
		cordoned += len(resp.GetAppliedOn())
		for i := range 3 {
			if !slices.Contains(resp.GetAppliedOn(), CoordinatorName(i)) {
				continue // it was too slow and is said to be
			}
			for n := range 5 {
				p, err := r.place(i, ask{tokens: tokens(uint32(1000*round+10*i+n), 50)})
				if err != nil {
					t.Fatal(err)
				}
				if strings.HasPrefix(p.GetWorker().GetName(), host+"/") {
					t.Errorf("%s placed on cordoned %s", CoordinatorName(i), host)
				}
			}
		}
		// A repetition after an answer that was lost finds nothing to remove.
		var back *waypostv1.UncordonTargetResponse
		r.whileNoLeader(func() (err error) {
			back, err = r.Operator((round+1)%3).UncordonTarget(t.Context(), &waypostv1.UncordonTargetRequest{Selector: &host})
			return err
		})
		if len(back.GetAppliedOn())+len(back.GetPendingOn()) != 3 {
			t.Errorf("lifted on %v, pending on %v", back.GetAppliedOn(), back.GetPendingOn())
		}
		lifted += len(back.GetAppliedOn())
		for i := range 3 {
			if slices.Contains(back.GetAppliedOn(), CoordinatorName(i)) && r.cordons(i)[host] {
				t.Errorf("%s is said to have lifted the cordon of %s, and has it", CoordinatorName(i), host)
			}
			r.eventually("the cordon is not lifted on "+CoordinatorName(i), func() string {
				if r.cordons(i)[host] {
					return host
				}
				return ""
			})
		}
	}
	if cordoned == 0 || lifted == 0 {
		t.Errorf("cordons were in force on %d and lifted on %d coordinators when the call returned: the test proves little", cordoned, lifted)
	}
}

// TestDrainedOnBothSides: a coordinator that was away when a host was cordoned,
// and comes back without the others, hears of it from the host itself.
func TestDrainedOnBothSides(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 3, emulator.Options{BlockTokens: 16})
	away := (r.leader() + 1) % 3
	majority := []int{(away + 1) % 3, (away + 2) % 3}
	mesh := r.listener()
	if err := r.StopCoordinator(away); err != nil {
		t.Fatal(err)
	}
	r.whileNoLeader(func() error {
		_, err := cordonOn(t.Context(), r.Operator(majority[0]), HostName(0), "both")
		return err
	})
	r.eventually("the host is not told of its cordon", func() string {
		for _, s := range mesh.Sketches() {
			if s.Name != HostName(0) {
				continue
			}
			sk, err := summary.ParseSketch(s.Payload)
			if err != nil {
				t.Fatal(err)
			}
			if len(sk.Workers) == 1 && sk.Workers[0].State == summary.SketchDraining {
				return ""
			}
			return fmt.Sprintf("%+v", sk)
		}
		return "it says nothing"
	})
	for _, i := range majority {
		if err := r.StopCoordinator(i); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.StartCoordinator(away); err != nil {
		t.Fatal(err)
	}
	r.eventually("the minority does not place", func() string {
		if w := r.worker(away, WorkerName(1, 0)); w.GetState() != "ready" {
			return fmt.Sprint(w)
		}
		return ""
	})
	r.eventually("the minority does not hear from the drained host", func() string {
		if w := r.worker(away, WorkerName(0, 0)); w.GetState() != "cordoned" {
			return fmt.Sprint(w)
		}
		return ""
	})
	// Its own state has no such cordon.
	if r.cordons(away)[HostName(0)] {
		t.Error("the minority has the majority's change")
	}
	for n := range uint32(20) {
		resp, err := r.Placement(away).Place(t.Context(), &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: tokens(n, 64)}, Reserve: proto.Bool(false)})
		if err != nil {
			t.Fatal(err)
		}
		if got := resp.GetPlacement().GetWorker().GetName(); got != WorkerName(1, 0) {
			t.Fatalf("placed on %q: %v", got, resp.GetRefused())
		}
	}
}

// TestMinorityRefusesWrites: without a majority placements go on and say how
// old their policy is; changes are refused with what is missing.
func TestMinorityRefusesWrites(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 3, emulator.Options{BlockTokens: 16})
	for _, i := range []int{1, 2} {
		if err := r.StopCoordinator(i); err != nil {
			t.Fatal(err)
		}
	}
	r.eventually("the minority still takes writes", func() string {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := cordonOn(ctx, r.Operator(0), "gpu-99", "x")
		switch status.Code(err) {
		case codes.Unavailable, codes.DeadlineExceeded:
			return ""
		default:
			return fmt.Sprint(err)
		}
	})
	p, err := r.place(0, ask{tokens: tokens(1, 100)})
	if err != nil {
		t.Fatal(err)
	}
	if p.GetBasis().PolicyAgeMs == nil {
		t.Error("the placement does not say how old its policy is")
	}
	resp, err := r.Operator(0).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, pr := range resp.GetProblems() {
		found = found || (pr.GetSubject() == "coordinators" && strings.Contains(pr.GetWhat(), "no leader"))
	}
	if !found {
		t.Errorf("status does not name the lost quorum: %v", resp.GetProblems())
	}
}

func TestBootstrapIsRefusedOverState(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{})
	if err := r.StopCoordinator(0); err != nil {
		t.Fatal(err)
	}
	// A connection that somebody dialled may hold the port for a moment.
	r.eventually("bootstrap over state is not refused for that", func() string {
		_, err := coordinator.New(coordinator.Options{Config: r.CoordinatorConfig(0), Bootstrap: true, Version: "test"})
		if errors.Is(err, replica.ErrStateExists) {
			return ""
		}
		return fmt.Sprint(err)
	})
}

// TestSameRequestSameAnswer: a repeated attempt gets the stored answer, a
// higher one another worker process, a lower one a refusal.
func TestSameRequestSameAnswer(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 1, emulator.Options{BlockTokens: 16})
	a := ask{tokens: tokens(9, 200), id: "same", attempt: 1}
	first, err := r.place(0, a)
	if err != nil {
		t.Fatal(err)
	}
	again, err := r.place(0, a)
	if err != nil || again.GetPlacementId() != first.GetPlacementId() {
		t.Fatalf("the same attempt got %v, %v; want %s", again.GetPlacementId(), err, first.GetPlacementId())
	}
	a.attempt = 2
	second, err := r.place(0, a)
	if err != nil || second.GetWorker().GetName() == first.GetWorker().GetName() {
		t.Fatalf("attempt 2 went to %s as attempt 1 did (%v)", second.GetWorker().GetName(), err)
	}
	a.attempt = 1
	if _, err := r.place(0, a); status.Code(err) != codes.Aborted {
		t.Errorf("a lower attempt: %v, want a conflict", err)
	}
	rel, err := r.Placement(0).ReleasePlacement(t.Context(), &waypostv1.ReleasePlacementRequest{PlacementId: second.PlacementId})
	if err != nil || !rel.GetReleased() {
		t.Errorf("release: %v %v", rel, err)
	}
}

// TestPredictedReuseLivesAsLongAsItsClaim: a prompt that was just placed is
// expected where it was placed, before any event, and no longer than that.
func TestPredictedReuseLivesAsLongAsItsClaim(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 1, emulator.Options{BlockTokens: 16}, func(o *Options) { o.Reservation = 2 * time.Second })
	a := ask{tokens: tokens(8, 1500)}
	p, err := r.place(0, a)
	if err != nil {
		t.Fatal(err)
	}
	w := p.GetWorker().GetName()
	if got := r.expects(0, w, a); got < 1400 {
		t.Errorf("%d tokens expected where the prompt was placed", got)
	}
	for _, other := range []string{WorkerName(0, 0), WorkerName(1, 0)} {
		if got := r.expects(0, other, a); other != w && got != 0 {
			t.Errorf("%d tokens expected on the other worker", got)
		}
	}
	// It was never sent: the reservation runs out.
	r.noCredit(w, a)
}

// TestRecordsAndOutcomesFindTheirCoordinator: any coordinator explains and
// takes the outcome of what another one placed.
func TestRecordsAndOutcomesFindTheirCoordinator(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 3, emulator.Options{BlockTokens: 16})
	a := ask{tokens: tokens(7, 300)}
	p, err := r.place(1, a)
	if err != nil {
		t.Fatal(err)
	}
	cached, _, err := r.send(p, a)
	if err != nil {
		t.Fatal(err)
	}
	// Another coordinator on a busy machine may be too slow to answer: one asks again.
	r.eventually("the outcome told to another coordinator is not joined", func() string {
		out, err := r.Placement(2).ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: proto.String("done"), CachedTokens: proto.Uint32(uint32(cached))})
		if err != nil || !out.GetJoined() || out.GetReuseClass() != "cold" {
			return fmt.Sprint(out, err)
		}
		return ""
	})
	for i := range 3 {
		var rec *waypostv1.GetPlacementResponse
		r.eventually("no record from "+CoordinatorName(i), func() string {
			if rec, err = r.Placement(i).GetPlacement(t.Context(), &waypostv1.GetPlacementRequest{PlacementId: p.PlacementId}); err != nil {
				return err.Error()
			}
			return ""
		})
		if rec.GetRecord().GetReuseClass() != "cold" || len(rec.GetRecord().GetPlacement().GetTerms()) != 2 {
			t.Errorf("record from %s: %v", CoordinatorName(i), rec)
		}
	}
	if _, err := r.Placement(0).GetPlacement(t.Context(), &waypostv1.GetPlacementRequest{PlacementId: proto.String("pl_c1_nobody")}); status.Code(err) != codes.NotFound {
		t.Errorf("an unknown record: %v", err)
	}
}
