package coordinator

import (
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/events"
	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

func gpuReport(verdict string, xids ...*waypostv1.XidEvent) *waypostv1.ConnectRequest {
	return &waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Host{Host: &waypostv1.HostReport{GpuState: proto.String("ok"), Gpus: []*waypostv1.Gpu{
		{Index: proto.Uint32(1), Uuid: proto.String("GPU-c04d"), Verdict: &verdict, Xids: xids, Engines: []string{"vllm-8000"}},
	}}}}
}

// sick is a report of a GPU with values and an error.
func sick() *waypostv1.ConnectRequest {
	r := gpuReport("exclude:xid_79", xid(79, "hardware", 1))
	g := r.GetHost().GetGpus()[0]
	g.TemperatureCelsius, g.NvlinkUp = proto.Float64(60), proto.Uint32(18)
	return r
}

func xid(number uint32, class string, count float64) *waypostv1.XidEvent {
	return &waypostv1.XidEvent{Xid: &number, Class: &class, Count: &count, AgeMs: proto.Float64(10), Acknowledged: proto.Bool(false)}
}

// GPUs are listed with the workers there; an acknowledgement reaches the host and
// comes back with what it changed; the fleet's policy reaches the host.
func TestGPUsAreListedAndAcknowledged(t *testing.T) {
	o := startOne(t)
	var asked atomic.Pointer[waypostv1.AckGpu]
	a := &fakeAgent{workers: 2}
	a.asks = func(l *lane.Lane, f *waypostv1.ConnectResponse) {
		ask := f.GetAckGpu()
		if ask == nil {
			return
		}
		asked.Store(ask)
		reply := &waypostv1.AckGpuReply{AskId: ask.AskId, Uuid: proto.String("GPU-c04d"), Xids: []uint32{79}, Verdict: proto.String("ok")}
		if ask.GetIndex() == 9 {
			reply = &waypostv1.AckGpuReply{AskId: ask.AskId, Error: proto.String("no such GPU was seen")}
		}
		_ = l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_AckGpu{AckGpu: reply}})
	}
	a.start(t, o)
	operators := waypostv1.NewOperatorServiceClient(o.conn)
	list := func(host *string) *waypostv1.ListGpusResponse {
		resp, err := operators.ListGpus(t.Context(), &waypostv1.ListGpusRequest{Host: host})
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	eventually(t, "host without facts", func() bool {
		w := list(nil).GetWithout()
		return len(w) == 1 && w[0].GetGpuState() == "not reported yet"
	})
	send := func(f *waypostv1.ConnectRequest) {
		for _, l := range a.dialer.Lanes() {
			_ = l.Send(proto.CloneOf(f)) // the lane writes into what it sends
		}
	}
	// A lane that is opened anew takes what was on its way with it; an agent
	// reports again and again.
	reported := func(what string, f *waypostv1.ConnectRequest, ok func() bool) {
		t.Helper()
		eventually(t, what, func() bool {
			send(f)
			return ok()
		})
	}
	reported("a GPU", gpuReport("ok"), func() bool { return len(list(proto.String("gpu-01")).GetGpus()) == 1 })
	g := list(nil).GetGpus()[0]
	if g.GetName() != "gpu-01/1" || !slices.Equal(g.GetWorkers(), []string{"vllm-8000/0"}) || g.AgeMs == nil || len(list(nil).GetWithout()) != 0 {
		t.Errorf("listed %v", g)
	}
	if other := list(proto.String("gpu-7")); len(other.GetGpus())+len(other.GetWithout()) != 0 {
		t.Errorf("of an unknown host: %v", other)
	}

	// What is new is told once, what an application did as well; what was there at
	// first is no news.
	event := func(name string, fields map[string]string) func() bool {
		return func() bool {
			happened, _ := o.board.events.After(0)
			return slices.ContainsFunc(happened, func(e *events.Event) bool {
				if e.Name != name {
					return false
				}
				for k, v := range fields {
					if e.Fields[k] != v {
						return false
					}
				}
				return true
			})
		}
	}
	reported("event of an application's error", gpuReport("ok", xid(31, "application", 1)), event("gpu_fault", map[string]string{"gpu": "gpu-01/1", "xid": "31", "class": "application", "action": "ok"}))
	reported("event of the GPU's error", gpuReport("exclude:xid_79", xid(31, "application", 1), xid(79, "hardware", 1)), event("gpu_fault", map[string]string{"gpu": "gpu-01/1", "xid": "79", "class": "hardware", "action": "exclude", "workers": "vllm-8000"}))

	// An agent on a busy machine may be too slow to answer: one asks again.
	ack := func(gpu, reason string) (resp *waypostv1.AckGpuResponse, err error) {
		t.Helper()
		eventually(t, "an answer about "+gpu, func() bool {
			resp, err = operators.AckGpu(t.Context(), &waypostv1.AckGpuRequest{Gpu: &gpu, Reason: &reason})
			return status.Code(err) != codes.Unavailable
		})
		return resp, err
	}
	resp, err := ack("gpu-01/1", "reseated")
	if err != nil || resp.GetVerdict() != "ok" || !slices.Equal(resp.GetXids(), []uint32{79}) {
		t.Fatalf("%v %v", resp, err)
	}
	if ask := asked.Load(); ask.GetIndex() != 1 || ask.Uuid != nil || ask.GetReason() != "reseated" || ask.GetDryRun() {
		t.Errorf("the host was asked %v", ask)
	}
	eventually(t, "event of the acknowledgement", event("gpu_acked", map[string]string{"gpu": "gpu-01/1", "reason": "reseated"}))
	reported("event of the end", gpuReport("ok"), event("gpu_cleared", map[string]string{"gpu": "gpu-01/1", "was": "exclude:xid_79"}))

	// By UUID, and over HTTP.
	var body []byte
	eventually(t, "an answer over HTTP", func() bool {
		answer, err := http.Post("http://"+o.APIAddress()+"/v1/gpus/gpu-c04d:ack", "application/json", strings.NewReader(`{"reason":"again","dryRun":true}`))
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		if body, err = io.ReadAll(answer.Body); err != nil {
			t.Fatal(err)
		}
		return answer.StatusCode != http.StatusServiceUnavailable
	})
	http.DefaultClient.CloseIdleConnections()
	over := &waypostv1.AckGpuResponse{}
	if protojson.Unmarshal(body, over) != nil || over.GetUuid() != "GPU-c04d" {
		t.Errorf("over HTTP: %s", body)
	}
	if ask := asked.Load(); ask.GetUuid() != "GPU-c04d" || ask.Index != nil || !ask.GetDryRun() {
		t.Errorf("the host was asked %v", ask)
	}

	for _, c := range []struct {
		gpu, reason string
		code        codes.Code
		text        string
	}{
		{"gpu-01/1", " ", codes.InvalidArgument, "must say why"},
		{"gpu-01/x", "r", codes.InvalidArgument, "comes the GPU's index"},
		{"gpu-07/1", "r", codes.NotFound, `no host "gpu-07"`},
		{"", "r", codes.NotFound, "no GPU"},
		{"GPU-ffff", "r", codes.NotFound, `no GPU "GPU-ffff"`},
		{"gpu-01/9", "r", codes.NotFound, "no such GPU was seen"},
	} {
		_, err := ack(c.gpu, c.reason)
		if status.Code(err) != c.code || !strings.Contains(status.Convert(err).Message(), c.text) {
			t.Errorf("%q: %v, want %v %q", c.gpu, err, c.code, c.text)
		}
	}

	a.mu.Lock()
	policy := a.policy.GetGpu()
	a.mu.Unlock()
	if !slices.Equal(policy.GetPrice(), []string{"thermal_throttle", "power_brake"}) {
		t.Errorf("the host was told %v", policy)
	}
	fleet := "version = 1\n[policy.gpu]\nexclude = [\"xid:48\"]\nprice = [\"xid:79\"]\n"
	if _, err := operators.PutFleet(t.Context(), &waypostv1.PutFleetRequest{Toml: &fleet, BaseVersion: proto.Uint32(0)}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the fleet's policy at the host", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return slices.Equal(a.policy.GetGpu().GetPrice(), []string{"xid:79"}) && slices.Equal(a.policy.GetGpu().GetExclude(), []string{"xid:48"})
	})

	reported("what it has now", sick(), func() bool { return list(nil).GetGpus()[0].GetGpu().TemperatureCelsius != nil })
	a.dialer.Close()
	eventually(t, "no lane", func() bool { return o.lanes.session("gpu-01") == nil })
	// What a silent host said is not shown as true now, but for what stays.
	var last *waypostv1.Gpu
	eventually(t, "the GPUs of a silent host", func() bool {
		resp := list(nil)
		last = resp.GetGpus()[0].GetGpu()
		return len(resp.GetWithout()) == 1 && strings.Contains(resp.GetWithout()[0].GetGpuState(), "last heard of its GPUs")
	})
	if last.GetUuid() != "GPU-c04d" || last.TemperatureCelsius != nil || last.NvlinkUp != nil || last.GetVerdict() != "exclude:xid_79" || last.GetMissing()["values"] == "" {
		t.Errorf("of a silent host: %v", last)
	}
	if x := last.GetXids(); len(x) != 1 || x[0].GetXid() != 79 || x[0].GetAgeMs() <= 10 {
		t.Errorf("errors of a silent host: %v", x)
	}
	if well := lastKnown(&waypostv1.Gpu{Verdict: proto.String("ok")}, 1); well.Verdict != nil {
		t.Error("a silent host's GPU is said to be well")
	}
	_, err = operators.AckGpu(t.Context(), &waypostv1.AckGpuRequest{Gpu: proto.String("gpu-01/1"), Reason: proto.String("r")})
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "has no lane") {
		t.Errorf("without a lane: %v", err)
	}
}

// What GPUs and drivers have is a problem of the fleet also where no worker is
// excluded for it; where one is, it is told once.
func TestStatusTellsOfGPUs(t *testing.T) {
	o := startOne(t)
	var verdict atomic.Pointer[string]
	verdict.Store(proto.String(""))
	a := &fakeAgent{workers: 1, state: func(_ int, l *ledger.Load) { l.GPUVerdict = *verdict.Load() }}
	a.start(t, o)
	report := func(driver, verdict string) *waypostv1.ConnectRequest {
		r := gpuReport(verdict)
		r.GetHost().Checks = []*waypostv1.Check{{Check: proto.String("nvml-driver"), State: &driver, What: proto.String("driver/library version mismatch")}}
		return r
	}
	problems := func() (out []string) {
		resp, err := waypostv1.NewOperatorServiceClient(o.conn).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range resp.GetProblems() {
			if strings.Contains(p.GetWhat(), "GPU") || strings.Contains(p.GetWhat(), "gpu") {
				out = append(out, p.GetSeverity()+" "+p.GetSubject()+" "+p.GetWhat())
			}
		}
		return out
	}
	for _, c := range []struct {
		driver, verdict, worker string
		want                    []string
	}{
		{"ok", "ok", "", nil},
		{"problem", "ok", "", []string{"warning gpu-01 GPUs: driver/library version mismatch"}},
		{"ok", "exclude:xid_79,gpu_lost", "", []string{"error gpu-01/1 GPU excluded: xid_79,gpu_lost"}},
		{"unknown", "price:thermal_throttle", "", []string{"warning gpu-01/1 GPU priced: thermal_throttle"}},
		{"ok", "exclude:xid_79", "exclude:xid_79(gpu_1)", []string{"error gpu-01/vllm-8000/0 excluded:gpu_fault (xid_79(gpu_1))"}},
	} {
		verdict.Store(&c.worker)
		var got []string
		eventually(t, "status of "+c.driver+", "+c.verdict+c.worker, func() bool {
			for _, l := range a.dialer.Lanes() {
				_ = l.Send(report(c.driver, c.verdict))
			}
			got = problems()
			return slices.Equal(got, c.want)
		})
	}
}

// A host that does not answer leaves nothing behind; an answer nobody waits for
// is dropped.
func TestAckOfASilentHost(t *testing.T) {
	o := startOne(t)
	a := &fakeAgent{workers: 1}
	a.start(t, o)
	eventually(t, "lane", func() bool { return o.lanes.session("gpu-01") != nil })
	began := time.Now()
	_, err := waypostv1.NewOperatorServiceClient(o.conn).AckGpu(t.Context(), &waypostv1.AckGpuRequest{Gpu: proto.String("gpu-01/0"), Reason: proto.String("r")})
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "did not answer") || time.Since(began) < ackWithin {
		t.Errorf("%v after %v", err, time.Since(began))
	}
	if n := o.acks.waiting(); n != 0 {
		t.Errorf("%d asks are left", n)
	}
	o.acks.answered("gpu-01", 99, &waypostv1.AckGpuReply{AskId: proto.Uint32(99)})
}
