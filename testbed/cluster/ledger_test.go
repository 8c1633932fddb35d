package cluster

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/gossip/identity"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// series sums the values of a metric whose labels hold the given pairs; of a
// histogram it counts the observations.
func (r *rig) series(g prometheus.Gatherer, name string, labels ...string) (sum float64) {
	r.t.Helper()
	families, err := g.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if !labelled(m, labels) {
				continue
			}
			sum += m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

func labelled(m *dto.Metric, pairs []string) bool {
	have := map[string]string{}
	for _, l := range m.GetLabel() {
		have[l.GetName()] = l.GetValue()
	}
	for i := 0; i < len(pairs); i += 2 {
		if have[pairs[i]] != pairs[i+1] {
			return false
		}
	}
	return true
}

// reports counts the load reports that a coordinator has taken into its
// estimates.
func (r *rig) reports(coordinator int) float64 {
	return r.series(r.CoordinatorSeries[coordinator], "waypost_ledger_events_total", "kind", "report")
}

// peersUp waits until every coordinator tells all others of its placements.
func (r *rig) peersUp() {
	r.t.Helper()
	r.eventually("coordinators do not tell each other of placements", func() string {
		for i := range r.Coordinators {
			if n := r.series(r.CoordinatorSeries[i], "waypost_ledger_peers_connected"); int(n) != len(r.Coordinators)-1 {
				return fmt.Sprintf("%s tells %v others", CoordinatorName(i), n)
			}
		}
		return ""
	})
}

// long is a prompt that takes seconds to prefill; it is placed, not sent.
func long(seed uint32) ask { return ask{tokens: tokens(seed, 100_000), output: 1} }

// placeLong places prompts that together take longer than a busy machine is
// away.
func (r *rig) placeLong(coordinator, n int) (placed []*waypostv1.Placement) {
	r.t.Helper()
	for i := range n {
		p, err := r.place(coordinator, long(uint32(1000+i)))
		if err != nil {
			r.t.Fatal(err)
		}
		placed = append(placed, p)
	}
	return placed
}

// waits is the wait that a coordinator believes of a worker; -1: unknown.
func (r *rig) waits(coordinator int, worker string) float64 {
	w := r.worker(coordinator, worker)
	if w == nil || w.WaitMs == nil {
		return -1
	}
	return w.GetWaitMs()
}

// idle waits until all running coordinators believe of an idle engine what is
// true of it.
func (r *rig) idle(worker string) {
	r.t.Helper()
	r.eventually("a ghost waits at "+worker, func() string {
		for i, c := range r.Coordinators {
			if c == nil {
				continue
			}
			w := r.worker(i, worker)
			if w.GetState() != "ready" || w.WaitMs == nil || w.GetWaitMs() > 0 || w.GetPendingClaims() > 0 {
				return fmt.Sprintf("%s: %v", CoordinatorName(i), w)
			}
		}
		return ""
	})
}

func (r *rig) release(coordinator int, p *waypostv1.Placement) {
	r.t.Helper()
	resp, err := r.Placement(coordinator).ReleasePlacement(r.t.Context(), &waypostv1.ReleasePlacementRequest{PlacementId: p.PlacementId})
	if err != nil || !resp.GetReleased() {
		r.t.Fatalf("release of %s: %v %v", p.GetPlacementId(), resp, err)
	}
}

// claims counts the claims that an agent knows in a state; events counts what
// became of them.
func (r *rig) claims(engine int, state string) int {
	return int(r.series(r.AgentSeries[engine], "waypost_claims", "state", state))
}

func (r *rig) claimEvents(engine int, kind string) int {
	return int(r.series(r.AgentSeries[engine], "waypost_claim_events_total", "kind", kind))
}

// TestPlacementIsSeenBeforeTheNextReport: what one coordinator placed waits in
// another one's estimate before any report of the host came there.
func TestPlacementIsSeenBeforeTheNextReport(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 3, emulator.Options{BlockTokens: faultBlock})
	r.peersUp()
	w := WorkerName(0, 0)
	r.eventually("the queue is not known", func() string {
		if r.waits(1, w) < 0 {
			return "unknown"
		}
		return ""
	})
	// Few reports get through to the second coordinator.
	stop := r.cutLanes(1, HostName(0))
	proofs, tries := 0, uint32(0)
	r.eventually("no placement was seen before a report", func() string {
		tries++
		reports := r.reports(1)
		before := r.waits(1, w)
		p, err := r.place(0, long(tries))
		if err != nil {
			t.Fatal(err)
		}
		seen := false
		for !seen && r.reports(1) == reports {
			seen = r.waits(1, w) > before+1000
		}
		if seen && r.reports(1) == reports {
			proofs++
		}
		r.release(0, p)
		if proofs < 3 {
			return fmt.Sprintf("%d of %d", proofs, tries)
		}
		return ""
	})
	stop()
	if lag := r.series(r.CoordinatorSeries[1], "waypost_ledger_peer_lag_seconds"); lag < 3 {
		t.Errorf("the lag of %v placements was measured", lag)
	}
	r.idle(w)
}

// TestCutCoordinatorsMeetThroughTheAgent: without a word between coordinators
// a claim reaches the others in the report of its worker's agent, and leaves
// them the same way.
func TestCutCoordinatorsMeetThroughTheAgent(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 3, emulator.Options{BlockTokens: faultBlock})
	for _, c := range r.Coordinators {
		c.CutPlaces(true)
	}
	w := WorkerName(0, 0)
	placed := r.placeLong(0, 5)
	for i := range r.Coordinators {
		r.eventually(CoordinatorName(i)+" does not hear of the claims", func() string {
			if ms := r.waits(i, w); ms < 1000 {
				return fmt.Sprintf("wait %v ms", ms)
			}
			return ""
		})
	}
	if n := r.claimEvents(0, "taken"); n == 0 {
		t.Error("the agent took no claim in")
	}
	for i := range r.Coordinators {
		if n := r.series(r.CoordinatorSeries[i], "waypost_ledger_places_total", "result", "taken"); n != 0 {
			t.Errorf("%s took %v placements of peers in: they are not cut off", CoordinatorName(i), n)
		}
	}
	if n := r.series(r.CoordinatorSeries[0], "waypost_ledger_places_total", "result", "lost"); n == 0 {
		t.Error("what was not told is not counted")
	}
	if got := r.series(r.CoordinatorSeries[0], "waypost_reservations"); int(got) != len(placed) {
		t.Errorf("%v reservations", got)
	}
	for _, p := range placed {
		r.release(0, p)
	}
	r.idle(w)
	// By the mark, not because its time was over.
	if n := r.claims(0, "open"); n != 0 {
		t.Errorf("%d claims are open", n)
	}
}

// TestAgentRestartLeavesNoGhost: claims that the old agent had taken in are
// gone with it, those that it never saw are offered to the new one.
func TestAgentRestartLeavesNoGhost(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 3, emulator.Options{BlockTokens: faultBlock})
	r.peersUp()
	w := WorkerName(0, 0)
	if _, err := r.place(0, long(1)); err != nil {
		t.Fatal(err)
	}
	r.eventually("the agent does not take the claim in", func() string {
		if n := r.claims(0, "open"); n != 1 {
			return fmt.Sprintf("%d open", n)
		}
		return ""
	})
	// What is echoed is not offered again; the second report from now on has it.
	heard := r.reports(0)
	r.eventually("the coordinator does not hear of it", func() string {
		if n := r.reports(0) - heard; n < 2 {
			return fmt.Sprintf("%v reports", n)
		}
		return ""
	})
	if err := r.StopAgent(0); err != nil {
		t.Fatal(err)
	}
	if err := r.StartAgent(0); err != nil {
		t.Fatal(err)
	}
	r.idle(w)
	if n := r.claims(0, "kept"); n != 0 {
		t.Errorf("%d claims came again", n)
	}

	// Placed while nobody listens: its worker stays placeable.
	if err := r.StopAgent(0); err != nil {
		t.Fatal(err)
	}
	p, err := r.place(0, long(2))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.StartAgent(0); err != nil {
		t.Fatal(err)
	}
	r.eventually("the new agent is not offered the claim", func() string {
		if n := r.claimEvents(0, "taken"); n != 1 {
			return fmt.Sprintf("%d taken in", n)
		}
		return ""
	})
	r.release(0, p)
	r.idle(w)
	if n := r.claims(0, "open"); n != 0 {
		t.Errorf("%d claims are open", n)
	}
}

// TestCoordinatorRestartLeavesNoGhost: a dead coordinator's claims end at the
// agent by evidence, and its next life begins from the agents' reports.
func TestCoordinatorRestartLeavesNoGhost(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 3, emulator.Options{BlockTokens: faultBlock})
	r.peersUp()
	w := WorkerName(0, 0)
	r.placeLong(0, 6)
	r.eventually("the agent does not take the claims in", func() string {
		if n := r.claims(0, "open"); n != 6 {
			return fmt.Sprintf("%d open", n)
		}
		return ""
	})
	if err := r.StopCoordinator(0); err != nil {
		t.Fatal(err)
	}
	if ms := r.waits(1, w); ms < 1000 {
		t.Errorf("the other coordinator believes in a wait of %v ms", ms)
	}
	if err := r.StartCoordinator(0); err != nil {
		t.Fatal(err)
	}
	r.eventually("the new life does not hear of the claims", func() string {
		if ms := r.waits(0, w); ms < 1000 {
			return fmt.Sprintf("wait %v ms", ms)
		}
		return ""
	})
	// The engine serves in order: one served now says that none is before it.
	r.serve(1, ask{tokens: tokens(9, 200), output: 1})
	r.idle(w)
	if n := r.claims(0, "open"); n != 0 {
		t.Errorf("%d claims are open", n)
	}
	// The new life counts from 1 under its own mark.
	p, err := r.place(0, long(10))
	if err != nil {
		t.Fatal(err)
	}
	r.eventually("the agent does not take the new life's claim in", func() string {
		if n := r.claims(0, "open"); n != 1 {
			return fmt.Sprintf("%d open", n)
		}
		return ""
	})
	r.release(0, p)
	r.idle(w)
}

// TestClaimThatIsNeverSent: its reservation runs out at the coordinator, later
// evidence closes it at the agent, and both are counted.
func TestClaimThatIsNeverSent(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 3, emulator.Options{BlockTokens: faultBlock}, func(o *Options) { o.Reservation = 2 * time.Second })
	w := WorkerName(0, 0)
	if _, err := r.place(0, long(1)); err != nil {
		t.Fatal(err)
	}
	r.eventually("the reservation does not run out", func() string {
		if n := r.series(r.CoordinatorSeries[0], "waypost_reservations_ended_total", "how", "expired"); n != 1 {
			return fmt.Sprint(n)
		}
		return ""
	})
	if n := r.series(r.CoordinatorSeries[0], "waypost_reservations"); n != 0 {
		t.Errorf("%v reservations are left", n)
	}
	if n := r.claimEvents(0, "ended"); n != 0 {
		t.Errorf("%d claims ended at the agent before there was evidence", n)
	}
	r.serve(1, ask{tokens: tokens(9, 200), output: 1})
	r.idle(w)
	r.eventually("the claim stays at the agent", func() string {
		if kept, ended := r.claims(0, "kept"), r.claimEvents(0, "ended"); kept != 0 || ended != 2 {
			return fmt.Sprintf("%d kept, %d ended", kept, ended)
		}
		return ""
	})
}

// TestSameRequestOnTwoCoordinators: asked one after the other, the second one
// answers what the first one placed; asked at once, one of two claims stays.
func TestSameRequestOnTwoCoordinators(t *testing.T) {
	t.Parallel()
	// On a busy machine the rounds may take longer than a reservation holds.
	r := start(t, 2, 3, emulator.Options{BlockTokens: faultBlock}, func(o *Options) { o.Reservation = 5 * time.Minute })
	r.peersUp()
	reservations := func() (n int) {
		for _, s := range r.CoordinatorSeries {
			n += int(r.series(s, "waypost_reservations"))
		}
		return n
	}
	a := ask{tokens: tokens(1, 3000), output: 1, id: "same", attempt: 1}
	first, err := r.place(0, a)
	if err != nil {
		t.Fatal(err)
	}
	r.eventually("the peer is not told", func() string {
		if n := r.series(r.CoordinatorSeries[1], "waypost_ledger_places_total", "result", "taken"); n != 1 {
			return fmt.Sprint(n)
		}
		return ""
	})
	second, err := r.place(1, a)
	if err != nil || second.GetPlacementId() != first.GetPlacementId() || second.GetWorker().GetName() != first.GetWorker().GetName() {
		t.Fatalf("the same attempt asked elsewhere: %v %v, want %s on %s", second, err, first.GetPlacementId(), first.GetWorker().GetName())
	}
	if n := reservations(); n != 1 {
		t.Errorf("%d reservations for one attempt", n)
	}
	// Renewals, outcomes and releases that are told there find the coordinator
	// that placed it.
	renewed, err := r.Placement(1).RenewPlacement(t.Context(), &waypostv1.RenewPlacementRequest{PlacementId: second.PlacementId})
	if err != nil || renewed.GetReservationTtlMs() < 30_000 {
		t.Errorf("renewed at the other coordinator: %v %v", renewed, err)
	}
	out, err := r.Placement(1).ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{PlacementId: second.PlacementId, Result: proto.String("done")})
	if err != nil || !out.GetJoined() {
		t.Errorf("outcome told to the other coordinator: %v %v", out, err)
	}
	third, err := r.place(0, ask{tokens: a.tokens, output: 1})
	if err != nil {
		t.Fatal(err)
	}
	r.release(1, third)
	if n := reservations(); n != 0 {
		t.Errorf("%d reservations after the end", n)
	}
	unknown := &waypostv1.ReleasePlacementRequest{PlacementId: proto.String("pl_c1_nobody")}
	if _, err := r.Placement(1).ReleasePlacement(t.Context(), unknown); status.Code(err) != codes.NotFound {
		t.Errorf("release of an unknown placement: %v", err)
	}

	rounds := 0
	ended := func(how string) (n float64) {
		for _, s := range r.CoordinatorSeries {
			n += r.series(s, "waypost_reservations_ended_total", "how", how)
		}
		return n
	}
	r.eventually("two coordinators never placed one attempt at once", func() string {
		rounds++
		b := ask{tokens: tokens(uint32(100+rounds), 3000), output: 1}
		var wg sync.WaitGroup
		for i := range 2 {
			wg.Go(func() {
				req := &waypostv1.PlaceRequest{RequestId: proto.String(fmt.Sprintf("both-%d", rounds)), Input: &waypostv1.Input{TokenIds: b.tokens}, Attempt: proto.Uint32(1)}
				if resp, err := r.Placement(i).Place(t.Context(), req); err != nil || resp.GetPlacement() == nil {
					t.Errorf("place at %s: %v %v", CoordinatorName(i), resp, err)
				}
			})
		}
		wg.Wait()
		if n := ended("superseded"); rounds < 10 || n < 3 {
			return fmt.Sprintf("%v superseded in %d rounds", n, rounds)
		}
		return ""
	})
	r.eventually("an attempt has two claims", func() string {
		if n := reservations(); n != rounds {
			return fmt.Sprintf("%d reservations for %d attempts, %v superseded, %v expired, %v lost with their worker", n, rounds, ended("superseded"), ended("expired"), ended("worker_lost"))
		}
		return ""
	})
	// The agents were told of those that gave way.
	r.eventually("an agent holds a claim that gave way", func() string {
		if open := r.claims(0, "open") + r.claims(1, "open"); open > rounds {
			return fmt.Sprintf("%d open for %d attempts", open, rounds)
		}
		return ""
	})
}

// TestLearntSpeedSurvivesTheAgent: a slow engine is learnt from its events, all
// coordinators are told, and a restart of the agent forgets nothing.
func TestLearntSpeedSurvivesTheAgent(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 3, emulator.Options{BlockTokens: faultBlock})
	w := WorkerName(0, 0)
	prior := r.worker(0, w)
	if prior.GetSpeedSource() != "prior" || prior.GetPrefillTokensPerSec() <= 0 {
		t.Fatalf("before anything was learnt: %v", prior)
	}
	if err := r.Engines[0].Slow(6); err != nil {
		t.Fatal(err)
	}
	seed := uint32(0)
	slow := func(i int) string {
		x := r.worker(i, w)
		if x.GetSpeedSource() != "learnt" || x.GetPrefillTokensPerSec() > .8*prior.GetPrefillTokensPerSec() {
			return fmt.Sprintf("%s: %v tokens/s, %s", CoordinatorName(i), x.GetPrefillTokensPerSec(), x.GetSpeedSource())
		}
		return ""
	}
	r.eventually("the slow engine is not learnt", func() string {
		seed++
		r.serve(0, ask{tokens: tokens(seed, 2500), output: 1})
		return slow(0)
	})
	r.eventually("the other coordinator is not told", func() string { return slow(1) })
	before := r.worker(0, w).GetPrefillTokensPerSec()
	if err := r.StopAgent(0); err != nil {
		t.Fatal(err)
	}
	if err := r.StartAgent(0); err != nil {
		t.Fatal(err)
	}
	r.eventually("the agent does not come back", func() string { return notLive(r.worker(0, w)) })
	if after := r.worker(0, w); after.GetSpeedSource() != "learnt" || after.GetPrefillTokensPerSec() < .9*before || after.GetPrefillTokensPerSec() > 1.1*before {
		t.Errorf("%v tokens/s (%s) after a restart of the agent, %v before", after.GetPrefillTokensPerSec(), after.GetSpeedSource(), before)
	}
	if got := r.series(r.AgentSeries[0], "waypost_engine_prefill_tokens_per_second"); got > .8*prior.GetPrefillTokensPerSec() {
		t.Errorf("the agent tells %v tokens/s", got)
	}
}

// TestEngineRestartEndsItsClaims: a new engine process has none of the old
// one's requests; claims made for it count as ever.
func TestEngineRestartEndsItsClaims(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 3, emulator.Options{BlockTokens: faultBlock})
	r.peersUp()
	w := WorkerName(0, 0)
	for i := range 3 {
		if _, err := r.place(i, long(uint32(i))); err != nil {
			t.Fatal(err)
		}
	}
	r.eventually("the agent does not take the claims in", func() string {
		if n := r.claims(0, "open"); n != 3 {
			return fmt.Sprintf("%d open", n)
		}
		return ""
	})
	before := r.worker(0, w).GetIncarnation()
	if err := r.Engines[0].Restart(50 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	r.eventually("the new life is not seen everywhere", func() string {
		for i := range r.Coordinators {
			if x := r.worker(i, w); notLive(x) != "" || x.GetIncarnation() == before {
				return fmt.Sprintf("%s: %s, incarnation %s", CoordinatorName(i), x.GetState(), x.GetIncarnation())
			}
		}
		return ""
	})
	r.idle(w)
	if open, ended := r.claims(0, "open"), r.claimEvents(0, "ended"); open != 0 || ended != 3 {
		t.Errorf("%d claims are open at the agent, %d ended", open, ended)
	}
	for i, s := range r.CoordinatorSeries {
		if n := r.series(s, "waypost_reservations_ended_total", "how", "worker_lost"); n != 1 {
			t.Errorf("%s ended %v reservations as lost with their worker", CoordinatorName(i), n)
		}
	}
	p, err := r.place(0, long(9))
	if err != nil {
		t.Fatal(err)
	}
	r.eventually("the new life's claim is not seen", func() string {
		for i := range r.Coordinators {
			if ms := r.waits(i, w); ms < 1000 {
				return fmt.Sprintf("%s: wait %v ms", CoordinatorName(i), ms)
			}
		}
		return ""
	})
	r.release(0, p)
	r.idle(w)
}

// TestOnlyCoordinatorsTellPlacements: an agent's certificate opens lanes, not
// the way between coordinators.
func TestOnlyCoordinatorsTellPlacements(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{BlockTokens: faultBlock})
	tlsConfig, err := identity.APIClient(r.Cert("ca.pem"), r.Cert("agent-"+HostName(0)+".pem"), r.Cert("agent-"+HostName(0)+".key"))
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("passthrough:///"+r.ClusterAddress(0), grpc.WithTransportCredentials(credentials.NewTLS(tlsConfig)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	peer := waypostv1.NewPeerServiceClient(conn)
	stream, err := peer.ExchangePlacements(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.PermissionDenied {
		t.Errorf("placements told by an agent: %v", err)
	}
	if _, err := peer.RelayReservation(t.Context(), &waypostv1.RelayReservationRequest{}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a release relayed by an agent: %v", err)
	}
}
