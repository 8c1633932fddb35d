package coordinator

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"waypost/coordinator/fleet"
	"waypost/gossip/boundary"
	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// credit is how much of a prompt the first worker of a host is credited with.
func (o *one) credit(t *testing.T, tokens []uint32, worker string) int {
	t.Helper()
	resp, err := waypostv1.NewPlacementServiceClient(o.conn).Place(o.ctx, &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: append(tokens, 1)}, Explain: new("terms"), Reserve: new(false)})
	if err != nil {
		return -1
	}
	for _, term := range resp.GetPlacement().GetTerms() {
		if term.GetWorker() == worker {
			return int(term.GetReuseTokens())
		}
	}
	return -1
}

// boundaryProblem is what the status says of a worker's boundary; empty: nothing.
func (o *one) boundaryProblem(t *testing.T, worker string) string {
	t.Helper()
	resp, err := waypostv1.NewOperatorServiceClient(o.conn).GetStatus(o.ctx, &waypostv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range resp.GetProblems() {
		if p.GetSubject() == worker && strings.Contains(p.GetWhat(), "boundary") {
			return p.GetWhat()
		}
	}
	return ""
}

// measured are the boundaries of three engines that are equal but for the chat
// template of the first; each ask is answered with a new measurement.
type measured struct {
	mu     sync.Mutex
	tokens [3][]boundary.Token
	runs   [3]uint32
	asked  []string
}

func (m *measured) tell() (out []*waypostv1.EngineBoundary) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.tokens {
		out = append(out, lane.BoundaryOf(fmt.Sprintf("vllm-%d", 8000+i), &boundary.Vector{Sets: []int{1, 2}, KeyID: 1, Probes: []boundary.Measurement{
			{Part: boundary.PartRaw, Number: 1, Run: 1, Tokens: []boundary.Token{1, 2, 3}},
			{Part: boundary.PartChat, Number: 3, Run: m.runs[i], Tokens: m.tokens[i]},
		}}))
	}
	return out
}

// A worker that turns chats into other tokens is measured again, then marked and
// shown with probe and token, earns no credit and stays placeable, until it
// agrees again.
func TestAnotherBoundaryEarnsNoCredit(t *testing.T) {
	o := startOne(t)
	c := newCache(1)
	tokens := c.grow(100)
	c.delta()
	same := []boundary.Token{4, 5, 6}
	m := &measured{tokens: [3][]boundary.Token{{4, 5, 9}, same, same}}
	answer := make(chan struct{})
	a := &fakeAgent{workers: 3, pulled: c.replayOr, boundaries: m.tell}
	a.asks = func(_ *lane.Lane, f *waypostv1.ConnectResponse) {
		b := f.GetBoundary()
		if b == nil {
			return
		}
		m.mu.Lock()
		m.asked = append(m.asked, fmt.Sprintf("%d %s %d", b.GetIndex(), b.GetPart(), b.GetProbe()))
		m.mu.Unlock()
		select {
		case <-answer:
			m.mu.Lock()
			m.runs[b.GetIndex()]++
			m.mu.Unlock()
			a.dialer.HelloChanged()
		default:
		}
	}
	a.connect(t, o)
	name := "gpu-01/vllm-8000/0"
	eventually(t, "both sides are asked to measure again", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		all := strings.Join(m.asked, ",")
		return strings.Contains(all, "0 chat 3") && strings.Contains(all, "1 chat 3")
	})
	eventually(t, "the stream is known", func() bool { return o.metric(t, "waypost_index_keys") > 0 })
	eventually(t, "it is credited before the difference counts", func() bool { return o.credit(t, tokens, name) == 1600 })
	close(answer)
	eventually(t, "the difference is shown", func() bool {
		return o.boundaryProblem(t, name) == "boundary differs: chat rendering, probe 3, token 2: worker "+name+" is not as gpu-01/vllm-8001/0"
	})
	if got := o.credit(t, tokens, name); got != 0 {
		t.Errorf("%d tokens credited across boundaries", got)
	}
	if n := o.metric(t, "waypost_workers_boundary_differs"); n != 1 {
		t.Errorf("%v workers counted", n)
	}
	found := false
	happened, _ := o.board.events.After(0)
	for _, e := range happened {
		f := e.Fields
		found = found || e.Name == "boundary_differs" && f["worker"] == name && f["part"] == "chat" && f["probe"] == "3" && f["first_difference"] == "token:2" && f["action"] == "no prefix credit"
	}
	if !found {
		t.Error("no event boundary_differs with probe and token")
	}
	o.checkBoundaryAnswer(t, name)
	m.mu.Lock()
	m.tokens[0], m.runs[0] = same, m.runs[0]+1
	m.mu.Unlock()
	a.dialer.HelloChanged()
	eventually(t, "it earns credit again", func() bool { return o.credit(t, tokens, name) == 1600 })
	if s := o.boundaryProblem(t, name); s != "" {
		t.Errorf("still shown: %s", s)
	}
}

func (o *one) checkBoundaryAnswer(t *testing.T, differs string) {
	t.Helper()
	client := waypostv1.NewOperatorServiceClient(o.conn)
	resp, err := client.GetBoundary(o.ctx, &waypostv1.GetBoundaryRequest{Pool: new(testModel)})
	if err != nil || len(resp.GetPools()) != 1 {
		t.Fatalf("%v: %v", err, resp)
	}
	workers := resp.GetPools()[0].GetWorkers()
	for i, w := range workers {
		if (w.GetWorker() == differs) != (w.GetState() == "differs") || w.GetCredited() == (w.GetWorker() == differs) || w.GetProbes() != 2 {
			t.Errorf("%v", w)
		}
		if w.GetWorker() == differs && (i != len(workers)-1 || w.GetGroup() != 2 || w.GetPart() != "chat" || w.GetProbe() != 3 || w.GetFirstDifference() != 2 || w.GetAgainst() == "") {
			t.Errorf("%d: %v", i, w)
		}
	}
	if _, err := client.GetBoundary(o.ctx, &waypostv1.GetBoundaryRequest{Pool: new("x")}); status.Code(err) != codes.NotFound {
		t.Errorf("a pool that is not: %v", err)
	}
}

// Engines that cannot be measured differ by what is declared of them, and a
// vector that is out of bounds is as none.
func TestDeclaredBoundaries(t *testing.T) {
	o := startOne(t)
	a := &fakeAgent{workers: 3, boundaries: func() []*waypostv1.EngineBoundary {
		return []*waypostv1.EngineBoundary{
			lane.BoundaryOf("vllm-8000", &boundary.Vector{Declared: "of may"}), lane.BoundaryOf("vllm-8001", &boundary.Vector{Declared: "of june"}),
			lane.BoundaryOf("vllm-8002", &boundary.Vector{Declared: strings.Repeat("x", boundary.MaxTextBytes+1)}),
		}
	}}
	a.connect(t, o)
	eventually(t, "the difference is shown", func() bool {
		return strings.Contains(o.boundaryProblem(t, "gpu-01/vllm-8001/0"), "boundary differs: declared boundary")
	})
	for _, w := range []string{"gpu-01/vllm-8000/0", "gpu-01/vllm-8002/0"} {
		if s := o.boundaryProblem(t, w); s != "" {
			t.Errorf("%s: %s", w, s)
		}
	}
	if n := o.metric(t, `waypost_lane_frames_refused_total{boundary}`); n < 1 {
		t.Error("a boundary out of bounds is not counted")
	}
}

// What is declared of an engine is revoked when it reuses nothing of what was
// expected, and confirmed when it does.
func TestDeclaredBoundaryAndOutcomes(t *testing.T) {
	o := startOne(t)
	c := newCache(1)
	tokens := c.grow(100)
	c.delta()
	var found atomic.Uint64 // hundredths
	found.Store(1)
	name := "gpu-01/vllm-8000/0"
	a := &fakeAgent{workers: 1, pulled: c.replayOr}
	a.boundaries = func() []*waypostv1.EngineBoundary {
		return []*waypostv1.EngineBoundary{lane.BoundaryOf("vllm-8000", &boundary.Vector{Declared: "of may"})}
	}
	a.accuracy = func() *waypostv1.WorkerAccuracy {
		return &waypostv1.WorkerAccuracy{Outcomes: new(20.), FoundRatio: new(float64(found.Load()) / 100)}
	}
	a.connect(t, o)
	state := func() string {
		a.dialer.HelloChanged() // boundaries are judged again
		resp, err := waypostv1.NewOperatorServiceClient(o.conn).GetBoundary(o.ctx, &waypostv1.GetBoundaryRequest{})
		if err != nil || len(resp.GetPools()) == 0 || len(resp.GetPools()[0].GetWorkers()) == 0 {
			return ""
		}
		return resp.GetPools()[0].GetWorkers()[0].GetState()
	}
	eventually(t, "the stream is known", func() bool { return o.metric(t, "waypost_index_keys") > 0 })
	eventually(t, "it is revoked", func() bool { return state() == "revoked" && o.credit(t, tokens, name) == 0 })
	if s := o.boundaryProblem(t, name); !strings.Contains(s, "declared boundary revoked: the engine found 1 % of the reuse") {
		t.Errorf("the status says %q", s)
	}
	found.Store(95)
	eventually(t, "it is confirmed", func() bool { return state() == "confirmed" && o.credit(t, tokens, name) > 0 })
}

// Two declared boundaries that begin alike are not shown as one.
func TestBoundaryNames(t *testing.T) {
	const fingerprint = "8a22c8510123abcd"
	for want, f := range map[string]*fleet.Facts{
		"Qwen/Qwen3-32B": {Boundary: "Qwen/Qwen3-32B", Vector: &boundary.Vector{Declared: "Qwen/Qwen3-32B"}},
		"Qwen/Qwen3-8B":  {Boundary: "Qwen/Qwen3-8B"},
		"8a22c851":       {Boundary: fingerprint, Vector: &boundary.Vector{}},
		"":               {},
	} {
		if got := boundaryName(f); got != want {
			t.Errorf("%v is shown as %q, want %q", f, got, want)
		}
	}
}
