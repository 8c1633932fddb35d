package ctl

import (
	"context"
	"fmt"
	"net"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	waypostv1 "waypost/proto/waypost/v1"
)

// draining is a fleet whose host gpu-02 has as many requests as each look in
// turn says; the last one stays.
type draining struct {
	fleet
	looks [][]int
	look  *atomic.Int32
	undo  bool
	asked *atomic.Pointer[waypostv1.CordonTargetRequest]
}

func (d draining) CordonTarget(ctx context.Context, r *waypostv1.CordonTargetRequest) (*waypostv1.CordonTargetResponse, error) {
	d.asked.Store(r)
	resp, err := d.fleet.CordonTarget(ctx, r)
	if err != nil {
		return nil, err
	}
	resp.Workers = nil
	for i := range d.looks[0] {
		resp.Workers = append(resp.Workers, fmt.Sprintf("gpu-02/vllm-8000/%d", i))
	}
	return resp, nil
}

func (d draining) ListWorkers(context.Context, *waypostv1.ListWorkersRequest) (*waypostv1.ListWorkersResponse, error) {
	i := min(int(d.look.Add(1))-1, len(d.looks)-1)
	out := &waypostv1.ListWorkersResponse{Workers: []*waypostv1.Worker{{Name: proto.String("gpu-01/vllm-8000/0"), State: proto.String("ready")}}}
	for rank, n := range d.looks[i] {
		w := &waypostv1.Worker{Name: proto.String(fmt.Sprintf("gpu-02/vllm-8000/%d", rank)), State: proto.String(fmt.Sprintf("draining(%d)", n)), InFlight: proto.Uint32(uint32(n)), Cordon: &waypostv1.Cordon{Drain: proto.Bool(!d.undo)}}
		if n == 0 {
			w.State = proto.String("drained")
		}
		if n < 0 {
			w.InFlight, w.State = nil, proto.String("draining(?)")
		}
		out.Workers = append(out.Workers, w)
	}
	return out, nil
}

func TestDrainShowsWhatStillRuns(t *testing.T) {
	took := regexp.MustCompile(`[\d.]+ (ms|s)\)|in [\dhm]+s`)
	for name, c := range map[string]struct {
		looks [][]int
		undo  bool
		args  string
		code  int
		want  string
	}{
		"until nothing runs": {looks: [][]int{{6}, {4}, {4}, {1}, {0}}, args: "--reason fan", want: "gpu-02: no new placements (all 3 coordinators, T\nvllm-8000/0: 6 running … 4 … 1 … 0\ndrained T. Safe to stop. Undo: waypost uncordon gpu-02\n"},
		"a coordinator that does not answer": {looks: [][]int{{0}}, args: "--reason cut", want: "gpu-02: no new placements (in force on c-gpu-01, c-gpu-02; not confirmed by c-gpu-03, T\nvllm-8000/0: 0 running\n" +
			"drained T. Safe to stop. Undo: waypost uncordon gpu-02\n"},
		"several workers": {looks: [][]int{{2, -1}, {0, 1}, {0, 0}}, args: "--reason fan", want: "gpu-02: no new placements (all 3 coordinators, T\n" +
			"gpu-02/vllm-8000/0: 2 running\ngpu-02/vllm-8000/1: ? running\ngpu-02/vllm-8000/0: 0 running\ngpu-02/vllm-8000/1: 1 running\ngpu-02/vllm-8000/1: 0 running\n" +
			"drained T. Safe to stop. Undo: waypost uncordon gpu-02\n"},
		"time runs out": {looks: [][]int{{3}}, args: "--reason fan --timeout 700ms", code: ExitTimeout, want: "gpu-02: no new placements (all 3 coordinators, T\nvllm-8000/0: 3 running\n" +
			"waypost drain: gpu-02 is still draining after 700ms: gpu-02/vllm-8000/0 3 running. It goes on; see: waypost workers --state draining\n"},
		"taken back":     {looks: [][]int{{3}}, undo: true, args: "--reason fan", code: ExitConflict, want: "gpu-02: no new placements (all 3 coordinators, T\nwaypost drain: gpu-02/vllm-8000/0: somebody took the drain back\n"},
		"not waited for": {looks: [][]int{{3}}, args: "--reason fan --no-wait", want: "gpu-02: no new placements (all 3 coordinators, T\n"},
		"dry run":        {looks: [][]int{{3}}, args: "--reason fan --dry-run", want: "gpu-02: would stop new placements on gpu-02/vllm-8000/0\n"},
		"nothing there":  {looks: [][]int{{}}, args: "--reason fan", want: "gpu-02: no new placements (all 3 coordinators, T\nNothing that is here now; the drain is kept. Undo: waypost uncordon gpu-02\n"},
		"no reason":      {looks: [][]int{{3}}, code: ExitUsage, want: "waypost drain: --reason is required: the next person asks why\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			d := draining{fleet: fleet{t: t}, looks: c.looks, look: new(atomic.Int32), undo: c.undo, asked: new(atomic.Pointer[waypostv1.CordonTargetRequest])}
			s := grpc.NewServer()
			waypostv1.RegisterOperatorServiceServer(s, d)
			done := make(chan error, 1)
			go func() { done <- s.Serve(l) }()
			t.Cleanup(func() {
				s.Stop()
				<-done
			})
			args := append([]string{"drain", "gpu-02", "--addr", l.Addr().String()}, strings.Fields(c.args)...)
			stdout, stderr, code := run(t, nil, args...)
			if got := took.ReplaceAllString(stdout+stderr, "T"); got != c.want || code != c.code {
				t.Errorf("exit %d, want %d:\n%s\nwant\n%s", code, c.code, got, c.want)
			}
			if r := d.asked.Load(); r != nil && !r.GetDrain() {
				t.Error("a cordon was set, not a drain")
			}
		})
	}
}

// wishing is an agent's local socket.
type wishing struct {
	fleet
	lanes []string
	none  bool
}

func (w wishing) CordonTarget(_ context.Context, r *waypostv1.CordonTargetRequest) (*waypostv1.CordonTargetResponse, error) {
	if r.GetSelector() != "" {
		return nil, api.Unavailable("no leader")
	}
	return &waypostv1.CordonTargetResponse{Cordon: &waypostv1.Cordon{Selector: proto.String("gpu-02"), Reason: r.Reason, Drain: r.Drain}, Workers: []string{"gpu-02/vllm-8000/0"}, PendingOn: w.lanes}, nil
}

func (w wishing) UncordonTarget(context.Context, *waypostv1.UncordonTargetRequest) (*waypostv1.UncordonTargetResponse, error) {
	return &waypostv1.UncordonTargetResponse{Removed: proto.Bool(!w.none), Workers: []string{"gpu-02/vllm-8000/0"}}, nil
}

func TestDrainWithoutLeader(t *testing.T) {
	const after = "Kept over restarts; a leader makes a drain of it. See: waypost workers --state draining. Undo: waypost uncordon --local before, waypost uncordon gpu-02 after\n"
	for args, c := range map[string]struct {
		agent wishing
		code  int
		want  string
	}{
		"drain --local":                         {agent: wishing{lanes: []string{"c-gpu-01", "c-gpu-02"}}, want: "gpu-02: asks for no new placements (told to c-gpu-01, c-gpu-02)\n" + after},
		"drain --local --reason fan":            {want: "gpu-02: asks for no new placements (no coordinator hears it; each will when it does)\n" + after},
		"drain --local --dry-run":               {want: "gpu-02: would ask for no new placements on gpu-02/vllm-8000/0\n"},
		"drain --local gpu-03":                  {code: ExitUsage, want: "waypost drain: --local means this host; leave \"gpu-03\" out\n"},
		"uncordon --local --dry-run":            {want: "would no longer ask to be drained: gpu-02/vllm-8000/0\n"},
		"uncordon --local":                      {want: "no longer asks to be drained: gpu-02/vllm-8000/0\n"},
		"uncordon --local --reason x":           {agent: wishing{none: true}, code: ExitUsage, want: "waypost uncordon: this host's agent does not ask to be drained; a drain that a leader made of it ends with: waypost uncordon HOST\n"},
		"drain gpu-02/vllm-8000/0 --reason fan": {code: ExitUnreachable, want: "waypost drain: no leader; on gpu-02 itself: waypost drain --local\n"},
		"drain GPU-1 --reason fan":              {code: ExitUnreachable, want: "waypost drain: no leader\n"},
	} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()
			c.agent.t = t
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			s := grpc.NewServer()
			waypostv1.RegisterOperatorServiceServer(s, c.agent)
			done := make(chan error, 1)
			go func() { done <- s.Serve(l) }()
			t.Cleanup(func() {
				s.Stop()
				<-done
			})
			stdout, stderr, code := run(t, nil, append(strings.Fields(args), "--addr", l.Addr().String())...)
			if stdout+stderr != c.want || code != c.code {
				t.Errorf("exit %d, want %d\n%s%s", code, c.code, stdout, stderr)
			}
		})
	}
}
