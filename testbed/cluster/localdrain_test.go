package cluster

import (
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// local is the local socket of a host's agent.
func (r *rig) local(host int) waypostv1.OperatorServiceClient {
	r.t.Helper()
	conn, err := grpc.NewClient("unix:"+r.Agents[host].SocketPath(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = conn.Close() })
	return waypostv1.NewOperatorServiceClient(conn)
}

// TestDrainWithoutLeader: a host that wishes to be drained is, by a coordinator
// without a leader and over a restart of its agent; the leader that comes back
// makes a drain of it, which is then taken back like any other.
func TestDrainWithoutLeader(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 2, emulator.Options{BlockTokens: 16})
	lost := r.leader()
	left := 1 - lost
	if err := r.StopCoordinator(lost); err != nil {
		t.Fatal(err)
	}
	shows := func(i int, state string) {
		t.Helper()
		r.eventually(fmt.Sprintf("coordinator %d does not show %s", i, state), func() string {
			if w := r.worker(i, WorkerName(0, 0)); w.GetState() != state {
				return "it is " + w.GetState()
			}
			return ""
		})
	}
	placesElsewhere := func(i int) {
		t.Helper()
		// A coordinator that has just started knows a host as soon as its agent has
		// dialled, each in its own time: until the other one has, it knows nobody to
		// place on.
		r.eventually(fmt.Sprintf("coordinator %d does not know the other host", i), func() string {
			if w := r.worker(i, WorkerName(1, 0)); w.GetState() != "ready" {
				return "it is " + w.GetState()
			}
			return ""
		})
		for n := range uint32(10) {
			resp, err := r.Placement(i).Place(t.Context(), &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: tokens(n, 64)}, Reserve: proto.Bool(false)})
			if err != nil {
				t.Fatal(err)
			}
			if got := resp.GetPlacement().GetWorker().GetName(); got != WorkerName(1, 0) {
				t.Fatalf("placed on %q: %v", got, resp.GetRefused())
			}
		}
	}
	wish := &waypostv1.CordonTargetRequest{Reason: proto.String("fan"), Drain: proto.Bool(true)}
	resp, err := r.local(0).CordonTarget(t.Context(), wish)
	if err != nil {
		t.Fatal(err)
	}
	if c := resp.GetCordon(); c.GetSelector() != HostName(0) || len(resp.GetWorkers()) != 1 || len(resp.GetAppliedOn()) != 0 {
		t.Errorf("%v", resp)
	}
	shows(left, "drained")
	placesElsewhere(left)
	if w := r.worker(left, WorkerName(0, 0)); !w.GetCordon().GetDrain() || w.GetCordon().GetReason() != "fan" {
		t.Errorf("%v", w.GetCordon())
	}
	if !r.cordons(left)[HostName(0)] {
		t.Error("the status does not tell of it")
	}

	// Taken back, and wished for again by an agent that dies over it.
	back, err := r.local(0).UncordonTarget(t.Context(), &waypostv1.UncordonTargetRequest{})
	if err != nil || !back.GetRemoved() {
		t.Fatalf("%v %v", back, err)
	}
	shows(left, "ready")
	if _, err := r.local(0).CordonTarget(t.Context(), wish); err != nil {
		t.Fatal(err)
	}
	shows(left, "drained")
	if err := r.StopAgent(0); err != nil {
		t.Fatal(err)
	}
	if err := r.StartAgent(0); err != nil {
		t.Fatal(err)
	}
	shows(left, "drained")

	// The leader comes back: it is on record, and the host wishes no more.
	if err := r.StartCoordinator(lost); err != nil {
		t.Fatal(err)
	}
	r.eventually("the wish is not on record", func() string {
		back, err := r.local(0).UncordonTarget(t.Context(), &waypostv1.UncordonTargetRequest{DryRun: proto.Bool(true)})
		if err != nil || back.GetRemoved() {
			return fmt.Sprint(back, err)
		}
		return ""
	})
	for i := range 2 {
		shows(i, "drained")
		placesElsewhere(i)
		if c := r.worker(i, WorkerName(0, 0)).GetCordon(); c.GetAt() == "" || !c.GetDrain() {
			t.Errorf("not by the registry: %v", c)
		}
	}
	r.whileNoLeader(func() error {
		_, err := r.Operator(left).UncordonTarget(t.Context(), &waypostv1.UncordonTargetRequest{Selector: proto.String(HostName(0)), RequestId: proto.String("u")})
		return err
	})
	for i := range 2 {
		shows(i, "ready")
	}
}

// TestLocalDrainIsRefused: what the local socket does not take, it says why.
func TestLocalDrainIsRefused(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{BlockTokens: 16})
	for name, req := range map[string]*waypostv1.CordonTargetRequest{
		"another target is a coordinator's matter": {Selector: proto.String(HostName(0)), Reason: proto.String("x"), Drain: proto.Bool(true)},
		"no drain":  {Reason: proto.String("x")},
		"no reason": {Drain: proto.Bool(true)},
		"two lines": {Drain: proto.Bool(true), Reason: proto.String("a\nb")},
	} {
		if _, err := r.local(0).CordonTarget(t.Context(), req); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	if resp, err := r.local(0).CordonTarget(t.Context(), &waypostv1.CordonTargetRequest{Reason: proto.String("x"), Drain: proto.Bool(true), DryRun: proto.Bool(true)}); err != nil || len(resp.GetPendingOn()) != 1 {
		t.Errorf("%v %v", resp, err)
	}
	if w := r.worker(0, WorkerName(0, 0)); w.GetState() != "ready" {
		t.Errorf("a dry run drains: %s", w.GetState())
	}
}
