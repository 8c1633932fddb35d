package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// TestWRK06DrainCountsDown drains a worker with six requests running: no new
// ones come, every coordinator shows how many are left, until none is.
func TestWRK06DrainCountsDown(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 2, emulator.Options{BlockTokens: 16, Speed: .2})
	worker := WorkerName(0, 0)
	var running []func()
	var tasks sync.WaitGroup
	t.Cleanup(tasks.Wait)
	for i := range 6 {
		a := ask{tokens: tokens(uint32(1+i), 64), output: 4000, exclude: []string{WorkerName(1, 0)}}
		p, err := r.place(i%2, a)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		ended := make(chan struct{})
		tasks.Go(func() {
			defer close(ended)
			if _, _, err := r.sendContext(ctx, p, a); err == nil || !errors.Is(err, context.Canceled) {
				t.Errorf("a request ended before it was told to: %v", err)
			}
		})
		running = append(running, func() {
			cancel()
			<-ended
			if _, err := r.Placement(i%2).ReportOutcome(t.Context(), &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: proto.String("cancelled")}); err != nil {
				t.Error(err)
			}
		})
	}
	r.eventually("the requests do not run", func() string {
		if w := r.worker(0, worker); w.GetRunning() != 6 {
			return fmt.Sprint(w.GetRunning())
		}
		return ""
	})
	r.whileNoLeader(func() error {
		resp, err := r.Operator(0).CordonTarget(t.Context(), &waypostv1.CordonTargetRequest{Selector: proto.String(HostName(0)), Reason: proto.String("fan"), RequestId: proto.String("d"), Drain: proto.Bool(true)})
		if err == nil && (len(resp.GetWorkers()) != 1 || !resp.GetCordon().GetDrain()) {
			t.Errorf("drained %v", resp)
		}
		return err
	})
	shows := func(state string) {
		t.Helper()
		for i := range 2 {
			r.eventually(fmt.Sprintf("coordinator %d does not show %s", i, state), func() string {
				if w := r.worker(i, worker); w.GetState() != state {
					return "it is " + w.GetState()
				}
				return ""
			})
		}
	}
	for left := 6; left > 0; left-- {
		shows(fmt.Sprintf("draining(%d)", left))
		for i := range 2 {
			if p, err := r.place(i, ask{tokens: tokens(uint32(100+left), 64)}); err != nil || p.GetWorker().GetName() == worker {
				t.Errorf("placed on %s, %v", p.GetWorker().GetName(), err)
			}
		}
		running[left-1]()
	}
	shows("drained")
	// Both tell that it is done, and who looks finds it.
	for i := range 2 {
		r.eventually("the end is not told", func() string {
			stream, err := r.Operator(i).Watch(t.Context(), &waypostv1.WatchRequest{Kinds: []string{"events"}})
			if err != nil {
				return err.Error()
			}
			for {
				m, err := stream.Recv()
				switch {
				case errors.Is(err, io.EOF):
					return "the stream ended"
				case err != nil:
					return err.Error()
				case m.GetEvent().GetEvent() == "drain_done" && m.GetEvent().GetFields()["target"] == HostName(0):
					return ""
				case m.GetKind() == "synced":
					return "not among the events"
				}
			}
		})
	}
	if _, err := r.Operator(1).UncordonTarget(t.Context(), &waypostv1.UncordonTargetRequest{Selector: proto.String(HostName(0)), RequestId: proto.String("u")}); err != nil {
		t.Fatal(err)
	}
	shows("ready")
}
