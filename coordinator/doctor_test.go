package coordinator

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// A coordinator tells what the agents found, and what only it can see: a clock
// that is off, a lane that is down.
func TestDoctor(t *testing.T) {
	o := startOne(t)
	a := &fakeAgent{workers: 1}
	a.start(t, o)
	client := waypostv1.NewOperatorServiceClient(o.conn)
	has := func(r *waypostv1.DoctorResponse, check, state, subject, what string) bool {
		for _, c := range r.GetChecks() {
			if c.GetCheck() == check && c.GetState() == state && c.GetSubject() == subject && strings.Contains(c.GetWhat(), what) {
				return true
			}
		}
		return false
	}
	doctor := func(host string) *waypostv1.DoctorResponse {
		r, err := client.Doctor(t.Context(), &waypostv1.DoctorRequest{Host: proto.String(host)})
		if err != nil && status.Code(err) != codes.NotFound {
			t.Fatal(err)
		}
		return r
	}
	eventually(t, "the host is known", func() bool { return has(doctor("gpu-01"), "lane", "ok", "gpu-01", "up") })
	if r := doctor("gpu-01"); !has(r, "engine-reachable", "unknown", "gpu-01", "has not told its checks yet") {
		t.Errorf("before the first report: %v", r.GetChecks())
	}
	report := &waypostv1.HostReport{
		WallUnixMs: proto.Float64(float64(time.Now().Add(10 * time.Minute).UnixMilli())),
		Checks: []*waypostv1.Check{
			{Check: proto.String("engine-events"), State: proto.String("problem"), Subject: proto.String("gpu-01/vllm-8000"), What: proto.String("publishes none"), Fix: proto.String("--kv-events-config x")},
			{Check: proto.String("made-up"), State: proto.String("problem")},
		},
	}
	// A lane that is opened anew takes what was on its way with it; an agent
	// reports again and again.
	send := func() {
		for _, l := range a.dialer.Lanes() {
			_ = l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_Host{Host: proto.CloneOf(report)}})
		}
	}
	eventually(t, "the agent's checks are told", func() bool {
		send()
		return has(doctor("gpu-01"), "engine-events", "problem", "gpu-01/vllm-8000", "publishes none")
	})
	r := doctor("gpu-01")
	if !has(r, "clock-skew", "problem", "gpu-01", "ahead of c-1's") || has(r, "made-up", "problem", "", "") || !has(r, "boundary", "ok", firstWorker, "") {
		t.Errorf("%v", r.GetChecks())
	}
	if first := r.GetChecks()[0]; first.GetState() != "problem" || first.AgeMs == nil && first.GetCheck() == "engine-events" {
		t.Errorf("problems come first, with their age: %v", first)
	}
	// Numbers that cannot be are no time.
	report.WallUnixMs = proto.Float64(1e300)
	eventually(t, "the odd clock is unknown", func() bool {
		send()
		return !has(doctor("gpu-01"), "clock-skew", "problem", "gpu-01", "")
	})

	for _, want := range []string{"raft-quorum", "policy-age", "disk", "mesh-udp", "mesh-key", "version-skew"} {
		eventually(t, want+" is ok", func() bool { return has(doctor("c-1"), want, "ok", "c-1", "") })
	}
	// On a busy machine its own work may be late, all the time.
	if r := doctor("c-1"); !has(r, "coordinator-cpu", "ok", "c-1", "runs in time") && !has(r, "coordinator-cpu", "problem", "c-1", "ms late") {
		t.Errorf("nothing of the coordinator's own work: %v", r.GetChecks())
	}
	if r := doctor(""); !has(r, "raft-quorum", "ok", "c-1", "") || !has(r, "engine-events", "problem", "gpu-01/vllm-8000", "") {
		t.Errorf("asked about all: %v", r.GetChecks())
	}
	if _, err := client.Doctor(t.Context(), &waypostv1.DoctorRequest{Host: proto.String("gpu-09")}); status.Code(err) != codes.NotFound {
		t.Errorf("asked about a stranger: %v", err)
	}
	resp, err := http.Get("http://" + o.APIAddress() + "/v1/doctor?host=gpu-01&ports=1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(body), `"check":"ports"`) {
		t.Errorf("%d %s %v", resp.StatusCode, body, err)
	}
}

func TestLateTicksFade(t *testing.T) {
	c := &Coordinator{}
	c.noteLate(time.Second)
	c.noteLate(0)
	if got := time.Duration(c.late.Load()); got != 900*time.Millisecond {
		t.Errorf("%s after a tick in time, want 900ms", got)
	}
	c.noteLate(2 * time.Second)
	if got := time.Duration(c.late.Load()); got != 2*time.Second {
		t.Errorf("%s, want the worst", got)
	}
}
