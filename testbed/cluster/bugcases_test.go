package cluster

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// An agent that comes late hears the children of prompts whose beginnings are not
// told any more. That is shown as a view in part, and nothing is credited that
// hangs on a beginning nobody saw; what comes whole from then on is.
func TestEVT04LateAgentSeesInPart(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{BlockTokens: 16, BufferBatches: 2}, func(o *Options) { o.LateAgents = true })
	old := make([]ask, 20)
	for i := range old {
		old[i] = ask{tokens: tokens(uint32(100+i), 700), output: 1}
		r.direct(0, old[i])
	}
	if err := r.StartAgent(0); err != nil {
		t.Fatal(err)
	}
	w := WorkerName(0, 0)
	r.eventually("the view is not one in part", func() string {
		x := r.worker(0, w)
		if x.GetState() != "ready" || x.GetView() != "partial" || x.GetViewHint() == "" {
			return fmt.Sprintf("%s, view %s (%s)", x.GetState(), x.GetView(), x.GetViewHint())
		}
		return ""
	})
	if n := r.expectsNow(0, w, old[0]); n > 0 {
		t.Errorf("%d tokens are expected of a prompt that was never told", n)
	}
	resp, err := r.Operator(0).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(resp.GetProblems(), func(p *waypostv1.Problem) bool {
		return p.GetSubject() == w && strings.HasPrefix(p.GetWhat(), "cache view partial") && strings.Contains(p.GetWhat(), "buffer_steps")
	}) {
		t.Errorf("status does not tell: %v", resp.GetProblems())
	}
	// The engine has it; the answer says on what it rests.
	p, err := r.place(0, old[1])
	if err != nil {
		t.Fatal(err)
	}
	if view := p.GetBasis().GetCacheView(); view != "partial" {
		t.Errorf("the answer rests on a view that is %q", view)
	}
	fresh := ask{tokens: tokens(500, 700), output: 1}
	r.serve(0, fresh)
	r.settled(w, fresh, 700, 16)
	if s := r.serve(0, fresh); s.expected != s.actual || s.actual == 0 {
		t.Errorf("expected %d, reused %d", s.expected, s.actual)
	}
}
