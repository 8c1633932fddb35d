package cluster

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// inspect asks a coordinator about a worker.
func (r *rig) inspect(coordinator int, worker string, verify bool) (*waypostv1.InspectWorkerResponse, error) {
	return r.Operator(coordinator).InspectWorker(r.t.Context(), &waypostv1.InspectWorkerRequest{Worker: &worker, Verify: &verify})
}

// notInTime reports whether a verification did not come to an end, as on a machine
// that is busy.
func notInTime(err error) bool {
	c := status.Code(err)
	return c == codes.DeadlineExceeded || c == codes.Unavailable
}

// verified wants a worker's index to equal the agent's set.
func (r *rig) verified(coordinator int, worker string) (resp *waypostv1.InspectWorkerResponse) {
	r.t.Helper()
	r.eventually("no verification", func() string {
		var err error
		if resp, err = r.inspect(coordinator, worker, true); err != nil && !notInTime(err) {
			r.t.Fatal(err)
		}
		if err != nil {
			return err.Error()
		}
		return ""
	})
	if c := resp.GetComparison(); c == nil || c.GetEqual() == 0 || c.GetMissing()+c.GetExtra()+c.GetExtents() > 0 {
		r.t.Errorf("%v", resp)
	}
	return resp
}

// gauges are the values of the series with one worker, by name.
func gauges(t *testing.T, g prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			out[f.GetName()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return out
}

// TestInspectEqualsTheAgent sends growing and forking conversations through a
// cache that cannot hold them all: what a coordinator shows is what the agent
// says of itself, while they run the index equals the agent's set key by key, and
// every way to ask gives the same.
func TestInspectEqualsTheAgent(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{BlockTokens: faultBlock, PoolBlocks: 600, MaxModelTokens: 4096})
	w := WorkerName(0, 0)
	series := r.AgentSeries[0]

	stop := make(chan struct{})
	var verifying sync.WaitGroup
	var mu sync.Mutex
	compared := map[float64]bool{}
	few := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(compared) < 3
	}
	verifying.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
			resp, err := r.inspect(0, w, true)
			if err != nil && notInTime(err) {
				continue
			}
			if err != nil {
				t.Error(err)
				return
			}
			c := resp.GetComparison()
			if c.GetMissing()+c.GetExtra()+c.GetExtents() > 0 {
				t.Errorf("under traffic: %v", c)
			}
			mu.Lock()
			compared[c.GetSeq()] = true
			mu.Unlock()
		}
	})
	system := tokens(7, 700)
	for i := 0; i < 24 || few() && i < 2000; i++ {
		r.direct(0, ask{tokens: append(append([]uint32(nil), system...), tokens(uint32(100+i%9), 300+40*(i%24))...), output: 8})
	}
	close(stop)
	verifying.Wait()
	if few() {
		t.Errorf("compared at %d frames only: the test proves little", len(compared))
	}

	var resp *waypostv1.InspectWorkerResponse
	r.eventually("the numbers do not come to agree", func() string {
		var err error
		if resp, err = r.inspect(0, w, false); err != nil {
			return err.Error()
		}
		if g := gauges(t, series); float64(resp.GetStreamKeys()) != g["waypost_prefix_stream_keys"] || float64(resp.GetRuns()) != g["waypost_prefix_stream_runs"] {
			return fmt.Sprintf("%d keys, %d runs, the agent says %v", resp.GetStreamKeys(), resp.GetRuns(), g)
		}
		return ""
	})
	if resp.GetStreamKeys() < 10 || resp.GetRuns() < 3 || resp.GetStreamBytes() == 0 || resp.GetFrames()["applied"] == 0 || resp.LastResyncMs == nil {
		t.Errorf("%v", resp)
	}
	if g := gauges(t, series); resp.GetStreamBytes()-resp.GetPulledBytes() > g["waypost_prefix_stream_bytes_total"] {
		t.Errorf("%v bytes came with reports, of %v that the agent told", resp.GetStreamBytes()-resp.GetPulledBytes(), g["waypost_prefix_stream_bytes_total"])
	}
	resyncs := fmt.Sprint(resp.GetResyncs())
	if got := r.verified(0, w); fmt.Sprint(got.GetResyncs()) != resyncs {
		t.Errorf("resyncs %v, before the verification %s", got.GetResyncs(), resyncs)
	}
	r.askedOverHTTP(w)
	run(t, "inspect", "stream", w, "--verify", "--addr", r.API(0)).wants(t, "inspect stream", 0, "Verified", "equal, all ", "Asked: "+CoordinatorName(0))
	run(t, "inspect", "index", w, "--verify", "--json", "--addr", r.API(0)).wants(t, "inspect index", 0, `"missing":`)
	run(t, "inspect", "index", "gpu-1/vllm-1/0", "--addr", r.API(0)).wants(t, "a name that is almost right", 2, "did you mean "+w)
}

// askedOverHTTP wants the JSON route to answer as the RPC does.
func (r *rig) askedOverHTTP(worker string) {
	r.t.Helper()
	resp, err := r.client.Get("http://" + r.API(0) + "/v1/inspect?verify=1&worker=" + url.QueryEscape(worker))
	if err != nil {
		r.t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	m := &waypostv1.InspectWorkerResponse{}
	if err != nil || resp.StatusCode != http.StatusOK || protojson.Unmarshal(b, m) != nil || m.GetWorker() != worker || m.GetComparison().GetEqual() == 0 {
		r.t.Errorf("over HTTP: %d %v %s", resp.StatusCode, err, b)
	}
}

// TestInspectOfAnAgentThatIsGone: what was known still shows, and a verification
// says who is missing.
func TestInspectOfAnAgentThatIsGone(t *testing.T) {
	t.Parallel()
	r, w, _ := warm(t, emulator.Options{})
	before := r.verified(0, w)
	if err := r.StopAgent(0); err != nil {
		t.Fatal(err)
	}
	r.eventually("the lane stays up", func() string {
		resp, err := r.inspect(0, w, false)
		if err != nil || resp.GetLaneUp() {
			return fmt.Sprint(resp, err)
		}
		if resp.GetStreamKeys() != before.GetStreamKeys() {
			return fmt.Sprintf("%d keys, there were %d", resp.GetStreamKeys(), before.GetStreamKeys())
		}
		return ""
	})
	_, err := r.inspect(0, w, true)
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), HostName(0)) {
		t.Errorf("%v", err)
	}
	run(t, "inspect", "stream", w, "--verify", "--addr", r.API(0)).wants(t, "inspect without an agent", 3, HostName(0)+" has no lane")
}

// TestVerifyWhereTheLaneIs: a coordinator whose lane is cut lets one answer that
// has one.
func TestVerifyWhereTheLaneIs(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 3, emulator.Options{BlockTokens: faultBlock})
	w, a := WorkerName(0, 0), ask{tokens: tokens(77, 1200)}
	r.direct(0, a)
	for i := range 3 {
		r.eventually(CoordinatorName(i)+" is not told", func() string {
			if got := r.expects(i, w, a); got != 1184 {
				return fmt.Sprint(got)
			}
			return ""
		})
		if got := r.verified(i, w); got.GetAnsweredBy() != CoordinatorName(i) {
			t.Errorf("asked %s, %s answered", CoordinatorName(i), got.GetAnsweredBy())
		}
	}
	stop := r.cutLanes(0, HostName(0))
	defer stop()
	r.eventually("nobody answers for a coordinator without a lane", func() string {
		resp, err := r.inspect(0, w, true)
		if err != nil || resp.GetAnsweredBy() == CoordinatorName(0) {
			return fmt.Sprint(resp.GetAnsweredBy(), err)
		}
		if c := resp.GetComparison(); !resp.GetLaneUp() || c.GetEqual() == 0 || c.GetMissing()+c.GetExtra() > 0 {
			t.Errorf("%v", resp)
		}
		return ""
	})
}
