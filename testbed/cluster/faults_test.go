package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

const faultBlock = 16

// warm runs one engine whose cache holds a prompt that is expected there.
func warm(t *testing.T, opt emulator.Options) (r *rig, worker string, a ask) {
	t.Helper()
	opt.BlockTokens = faultBlock
	r = start(t, 1, 1, opt)
	worker, a = WorkerName(0, 0), ask{tokens: tokens(11, 1200)}
	r.serve(0, a)
	r.settled(worker, a, len(a.tokens), faultBlock)
	return r, worker, a
}

// noCredit waits until nothing is expected of a prompt.
func (r *rig) noCredit(worker string, a ask) {
	r.t.Helper()
	r.eventually("credit for a cache that is gone", func() string {
		if got := r.expects(0, worker, a); got > 0 {
			return fmt.Sprintf("%d tokens expected", got)
		}
		return ""
	})
}

// exact serves a prompt twice and wants the second to be as expected.
func (r *rig) exact(worker string, a ask) {
	r.t.Helper()
	if s := r.serve(0, a); s.expected > s.actual {
		r.t.Errorf("expected %d tokens, the engine reused %d", s.expected, s.actual)
	}
	r.settled(worker, a, len(a.tokens), faultBlock)
	if s := r.serve(0, a); s.expected != s.actual || s.actual == 0 {
		r.t.Errorf("at rest: expected %d tokens, the engine reused %d", s.expected, s.actual)
	}
}

func TestEngineRestart(t *testing.T) {
	t.Parallel()
	r, w, a := warm(t, emulator.Options{})
	before := r.worker(0, w).GetIncarnation()
	if err := r.Engines[0].Restart(100 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	r.noCredit(w, a)
	r.eventually("the new life is not seen", func() string {
		x := r.worker(0, w)
		if x.GetState() != "ready" || x.GetIncarnation() == before {
			return fmt.Sprintf("%s, incarnation %s", x.GetState(), x.GetIncarnation())
		}
		return ""
	})
	// The same blocks come back under the same hashes.
	r.exact(w, a)
}

func TestCacheClear(t *testing.T) {
	t.Parallel()
	r, w, a := warm(t, emulator.Options{})
	if !r.Engines[0].ClearCache() {
		t.Fatal("the engine did not clear")
	}
	// A clear is told with the next step.
	r.serve(0, ask{tokens: tokens(12, 40)})
	r.noCredit(w, a)
	r.exact(w, a)
}

func TestLostEvents(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]emulator.DropMode{"replay has them": emulator.DropLive, "nobody has them": emulator.DropForever} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, w, a := warm(t, emulator.Options{PoolBlocks: 200, MaxModelTokens: 3000})
			if err := r.Engines[0].DropBatches(0, 4, mode); err != nil {
				t.Fatal(err)
			}
			// These evict what was there and are not told live.
			for i := range 4 {
				r.serve(0, ask{tokens: tokens(uint32(20+i), 1000), output: 1})
			}
			// The next batch shows the gap.
			r.serve(0, ask{tokens: tokens(30, 100), output: 1})
			r.noCredit(w, a)
			r.eventually("the view does not come back", func() string { return notLive(r.worker(0, w)) })
			r.fresh(w)
			if s := r.serve(0, a); s.expected > s.actual {
				t.Errorf("expected %d tokens, the engine reused %d", s.expected, s.actual)
			}
		})
	}
}

func notLive(w *waypostv1.Worker) string {
	if w.GetState() != "ready" || (w.GetView() != "live" && w.GetView() != "partial") {
		return w.GetState() + ", view " + w.GetView()
	}
	return ""
}

func TestDroppedEventConnections(t *testing.T) {
	t.Parallel()
	r, w, a := warm(t, emulator.Options{})
	r.Engines[0].DropConnections()
	r.serve(0, ask{tokens: tokens(13, 300), output: 1})
	r.settled(w, ask{tokens: tokens(13, 300)}, 300, faultBlock)
	r.exact(w, a)
}

// TestOrphanedEngine kills the API server alone: events and replay still
// answer, requests do not.
func TestOrphanedEngine(t *testing.T) {
	t.Parallel()
	r, w, a := warm(t, emulator.Options{})
	r.Engines[0].KillAPI()
	r.eventually("the dead engine stays placeable", func() string {
		_, err := r.place(0, a)
		if err == nil {
			return "placed on it"
		}
		if x := r.worker(0, w); !strings.HasPrefix(x.GetState(), "lost") {
			return "it is " + x.GetState()
		}
		return ""
	})
	if got := r.expectsNow(0, w, a); got > 0 {
		t.Errorf("%d tokens expected of a dead engine", got)
	}
	if err := r.Engines[0].Restart(50 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	r.eventually("the engine does not come back", func() string { return notLive(r.worker(0, w)) })
	r.exact(w, a)
}

func TestAgentRestart(t *testing.T) {
	t.Parallel()
	r, w, a := warm(t, emulator.Options{})
	before := r.worker(0, w).GetIncarnation()
	if err := r.StopAgent(0); err != nil {
		t.Fatal(err)
	}
	r.eventually("the lost lane is not shown", func() string {
		resp, err := r.Operator(0).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
		if err != nil {
			return err.Error()
		}
		for _, p := range resp.GetProblems() {
			if p.GetSubject() == HostName(0) && strings.Contains(p.GetWhat(), "lane is down") {
				return ""
			}
		}
		return fmt.Sprint(resp.GetProblems())
	})
	// Its worker stays placeable: the engine serves on.
	r.serve(0, ask{tokens: tokens(14, 200), output: 1})
	if err := r.StartAgent(0); err != nil {
		t.Fatal(err)
	}
	r.eventually("the agent does not come back", func() string { return notLive(r.worker(0, w)) })
	if after := r.worker(0, w).GetIncarnation(); after != before {
		t.Errorf("incarnation %s became %s although the engine lives on", before, after)
	}
	r.settled(w, a, len(a.tokens), faultBlock)
	r.exact(w, a)
}

func TestCoordinatorRestart(t *testing.T) {
	t.Parallel()
	r, w, a := warm(t, emulator.Options{})
	if _, err := r.Operator(0).CordonTarget(t.Context(), &waypostv1.CordonTargetRequest{Selector: proto.String("gpu-77"), Reason: proto.String("kept over restarts")}); err != nil {
		t.Fatal(err)
	}
	if err := r.StopCoordinator(0); err != nil {
		t.Fatal(err)
	}
	if err := r.StartCoordinator(0); err != nil {
		t.Fatal(err)
	}
	r.eventually("the worker does not come back", func() string { return notLive(r.worker(0, w)) })
	r.settled(w, a, len(a.tokens), faultBlock)
	r.exact(w, a)
	resp, err := r.Operator(0).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
	if err != nil || len(resp.GetCordons()) != 1 || resp.GetCordons()[0].GetSelector() != "gpu-77" {
		t.Errorf("cordons after the restart: %v %v", resp.GetCordons(), err)
	}
}

func TestStalledEngine(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 1, emulator.Options{BlockTokens: faultBlock})
	stalled := WorkerName(0, 0)
	// A long answer is under way when everything stops.
	long := ask{tokens: tokens(15, 100), output: 4000, exclude: []string{WorkerName(1, 0)}}
	p, err := r.place(0, long)
	if err != nil {
		t.Fatal(err)
	}
	hung := make(chan struct{})
	ctx, giveUp := context.WithCancel(t.Context())
	go func() {
		defer close(hung)
		// The caller gives up when the engine goes on.
		_, _, _ = r.sendContext(ctx, p, long)
	}()
	r.eventually("the long answer does not run", func() string {
		if x := r.worker(0, stalled); x.GetRunning() == 0 {
			return fmt.Sprint(x)
		}
		return ""
	})
	r.Engines[0].Stall()
	r.eventually("the stall is not seen", func() string {
		if x := r.worker(0, stalled); !strings.HasPrefix(x.GetState(), "stalled") {
			return "it is " + x.GetState()
		}
		return ""
	})
	for i := range 20 {
		p, err := r.place(0, ask{tokens: tokens(uint32(40+i), 100)})
		if err != nil {
			t.Fatal(err)
		}
		if p.GetWorker().GetName() == stalled {
			t.Fatalf("placed on the stalled worker: %s", p.GetBecause())
		}
	}
	r.Engines[0].Resume()
	giveUp()
	<-hung
	r.eventually("the worker does not return", func() string {
		if x := r.worker(0, stalled); x.GetState() != "ready" {
			return "it is " + x.GetState()
		}
		return ""
	})
}
